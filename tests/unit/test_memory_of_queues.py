"""How much memory an idle queue pair and its completion queue take, over a verbs provider without a device."""

from __future__ import annotations

import gc
import tracemalloc

from kit import linux_only as linux_only
from kit.helpers import HAS_GIL

COUNT = 400
# Of Python's memory. What the data path allocates by malloc() comes to it: some 400 bytes for the queue pair.
LIMIT = 2560
# Without the GIL each object is 16 bytes longer, and a dictionary more than that.
LIMIT_WITHOUT_GIL = 5 << 10


def test_an_idle_queue_pair_with_its_queue_takes_little_memory(fake):
    with fake.open() as adapter:
        made = []

        def make(count):
            for _ in range(count):
                queue = adapter.create_completion_queue(64)
                made.append((queue, adapter.create_queue_pair(queue)))

        # The first ones fill caches, and dictionaries grow in steps.
        make(10)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            make(COUNT)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for queue, queue_pair in made:
            queue_pair.close()
            queue.close()
    assert (after - before) / COUNT < (LIMIT if HAS_GIL else LIMIT_WITHOUT_GIL)
