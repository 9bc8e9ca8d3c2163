"""The order in which the entries of a registration cache were used."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator

from ndpy.cache.lease import Entry


class UseOrder:
    """The cached entries. The cache's lock guards it."""

    def __init__(self) -> None:
        #: A heap of (use, serial number, entry). An entry may have been used again since, or be cached no more.
        self._heap: list[tuple[int, int, Entry]] = []
        self._serials = itertools.count()

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (entry.used, next(self._serials), entry))

    def clear(self) -> None:
        self._heap.clear()

    def take_idle(self, count: int) -> Generator[Entry, None, None]:
        """Take entries out that nobody uses, the least recently used first. Close the iterator afterwards.

        count: how many entries the cache has.
        """
        heap, in_use = self._heap, []
        if len(heap) > 2 * count + 64:
            heap[:] = [item for item in heap if item[2].cached]
            heapq.heapify(heap)
        try:
            while heap:
                item = heapq.heappop(heap)
                entry = item[2]
                if not entry.cached:
                    continue
                if entry.used != item[0]:
                    # It has been used since, so its turn comes later.
                    heapq.heappush(heap, (entry.used, *item[1:]))
                elif entry.uses:
                    in_use.append(item)
                else:
                    yield entry
        finally:
            for item in in_use:
                heapq.heappush(heap, item)
