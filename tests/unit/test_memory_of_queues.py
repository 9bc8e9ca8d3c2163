"""How much memory an idle queue pair and its completion queue take, over a verbs provider without a device."""

from __future__ import annotations

import gc
import tracemalloc

from kit import linux_only as linux_only
from kit.helpers import HAS_GIL

COUNT = 400
# 4 KiB, without what the data path allocates by malloc(): two rings of 112 bytes without slots, the queue pair, the
# completion queue, and room for the elements of one request.
LIMIT = 4096 - 512
# Without the GIL each object is 16 bytes longer, and a dictionary more than that.
LIMIT_WITHOUT_GIL = 5 << 10


def test_an_idle_queue_pair_with_its_queue_takes_at_most_4_kib(fake):
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
