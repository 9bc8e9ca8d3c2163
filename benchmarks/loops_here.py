"""What `make bench` measures on this machine: a hit of the cache by its own clock, and the memory of an idle queue
pair. On soft0.

PYTHONMALLOC=malloc python loops_here.py: prints a line of JSON for each. The `us` of the queue pair are bytes: its own
ones, without the provider's. Python's malloc() is the system's then, whose bytes can be counted.
"""

import ctypes
import gc
import json
import platform
import time

from timing import summary

import ndpy
from ndpy.platforms.verbs.native_calls import lib

COUNT, WARM_UP = 400, 10
DEPTH = 4
HITS, SAMPLES = 20_000, 9


class Allocated(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_of_each(make):
    """How many bytes make() allocates and does not free."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated

    def allocated():
        gc.collect()
        now = library.mallinfo2()
        return now.uordblks + now.hblkhd

    # The first ones fill caches.
    made = [make() for _ in range(WARM_UP)]
    before = allocated()
    made += [make() for _ in range(COUNT)]
    return made, (allocated() - before) / COUNT


def hit_us(adapter):
    """The microseconds of a hit, with its release, of several samples."""
    buffer, samples = ndpy.alloc(4096), []
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=16) as cache:
        lease = cache.local
        for _ in range(SAMPLES):
            begin = time.perf_counter_ns()
            for _ in range(HITS):
                lease(buffer).release()
            samples.append((time.perf_counter_ns() - begin) / HITS / 1000)
    return samples


def main():
    with ndpy.open_adapter("soft0") as adapter, adapter.create_completion_queue(2 * DEPTH * COUNT) as queue:
        depths = {"initiator_queue_depth": DEPTH, "receive_queue_depth": DEPTH}
        made, all_bytes = bytes_of_each(lambda: adapter.create_queue_pair(queue, **depths))
        native, native_bytes = bytes_of_each(made[0]._native_create)
        for each in native:
            lib.ibv_destroy_qp(each)
        for queue_pair in made:
            queue_pair.close()
        hits = summary(hit_us(adapter))
    print(json.dumps({"who": "ndpy", "python_here": platform.python_version()}))
    print(
        json.dumps(
            {"who": "ndpy", "loop": "idle_queue_pair", "us": all_bytes - native_bytes, "spread": 0, "rounds": COUNT}
        )
    )
    print(json.dumps({"who": "ndpy", "loop": "cache_hit_here", **hits, "rounds": HITS}))


if __name__ == "__main__":
    main()
