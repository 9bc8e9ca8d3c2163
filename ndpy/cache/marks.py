"""What callbacks and finalizers tell a registration cache."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ndpy.cache.lease import Entry, Exposure, Grant, Lease
from ndpy.cache.ownership import Owner
from ndpy.objects.queue_pair import QueuePair

if TYPE_CHECKING:
    from ndpy.cache.registration_cache import RegistrationCache

T = TypeVar("T")


class Marks:
    """What callbacks and finalizers have marked, and the reaper, which handles it in the adapter's thread.

    A callback may run in any thread, with any lock held. So it takes no lock, and appends to one of the lists only. One
    call of the reaper serves all marks that came before it.

    Attributes:
        dead: owners of memory that have died.
        abandoned: the entries of leases that nobody released, with the grant of an exposure, and what keeps the memory
            in place.
        ended: queue pairs whose connection has ended.
    """

    def __init__(self, cache: RegistrationCache) -> None:
        self.dead: deque[Owner] = deque()
        self.abandoned: deque[tuple[Entry, Grant | None, Any]] = deque()
        self.ended: deque[QueuePair] = deque()
        self._thread = cache._adapter._events
        self._cache = weakref.ref(cache)
        self._called = False

    def __bool__(self) -> bool:
        return bool(self.dead or self.abandoned or self.ended)

    def died(self, owner: Owner) -> None:
        self.dead.append(owner)
        self.wake()

    def abandon(self, lease: Lease, view: Any) -> None:
        """A lease will be released by the reaper."""
        self.abandoned.append((lease._range.entry, lease._grant if isinstance(lease, Exposure) else None, view))
        self.wake()

    def connection_ended(self, queue_pair: QueuePair) -> None:
        self.ended.append(queue_pair)
        self.wake()

    def memory_changed(self) -> None:
        """A monitor has marked some watches. The adapter's thread calls this."""
        cache = self._cache()
        if cache is not None:
            cache._on_memory_changed()

    def wake(self) -> None:
        """Start the reaper. Safe in callbacks and finalizers."""
        if not self._called:
            self._called = True
            self._thread.call_soon(self._reap)

    def _reap(self) -> None:
        self._called = False
        cache = self._cache()
        if cache is not None and not cache.closed:
            cache._reap()

    def on_forked(self) -> None:
        self._called = False
        for marked in (self.dead, self.abandoned, self.ended):
            marked.clear()


def taken(marked: deque[T]) -> Iterator[T]:
    """Take the marks one by one. Other threads may take some of them."""
    while marked:
        try:
            mark = marked.popleft()
        except IndexError:
            return
        yield mark
