"""Measures a hit of the registration cache: its cost compared with a registration, and with few and many entries. Also
measures the memory of an entry.

python registration_cache.py [ADAPTER]    (`make bench-cache` runs it on rxe0 in a VM whose clock counts instructions)

The exit status is 1 if a ratio exceeds its bound.
"""

import mmap
import statistics
import sys
import time
import tracemalloc

import ndpy
from ndpy.objects.memory import address_of

LENGTH = 4096
ROUNDS = 200
MOST_OF_A_REGISTRATION = 1 / 20
MOST_AMONG_MANY = 1.5
FEW, MANY = 10, 10_000


def registration_us(adapter, buffer):
    """The median time of registering and deregistering a buffer, in microseconds."""
    register, now = adapter.register, time.perf_counter_ns
    times = []
    for _ in range(ROUNDS):
        begin = now()
        register(buffer).close()
        times.append(now() - begin)
    return statistics.median(times) / 1000


def hit_us(cache, buffers):
    """The median time of leasing and releasing a cached buffer, in microseconds. The buffers take turns."""
    local, now = cache.local, time.perf_counter_ns
    times = []
    for turn in range(ROUNDS):
        buffer = buffers[turn * 7919 % len(buffers)]
        begin = now()
        local(buffer).release()
        times.append(now() - begin)
    return statistics.median(times) / 1000


def clock_us():
    """The time of reading the clock, which each measurement includes, in microseconds."""
    now = time.perf_counter_ns
    times = []
    for _ in range(ROUNDS):
        begin = now()
        times.append(now() - begin)
    return statistics.median(times) / 1000


def entry_bytes(adapter, count):
    """The memory of one entry and its region in Python, without that of the driver."""
    buffers = [bytearray(64) for _ in range(count)]
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 30, max_entries=count) as cache:
        tracemalloc.start()
        for buffer in buffers:
            cache.local(buffer).release()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return taken / count


def main():
    adapter_name = sys.argv[1] if len(sys.argv) > 1 else None
    clock = clock_us()
    with ndpy.open_adapter(adapter_name) as adapter:
        registration = registration_us(adapter, ndpy.alloc(LENGTH)) - clock
        print(f"{'register and deregister 4 KiB':44}{registration:9.2f} us")
        hits = {}
        for kind, kept in kinds().items():
            monitor = kind == "monitored"
            with ndpy.RegistrationCache(adapter, max_bytes=1 << 30, max_entries=MANY, monitor=monitor) as cache:
                cache.local(kept).release()
                hits[kind] = hit_us(cache, [kept]) - clock
                print(f"{'a hit, ' + kind:44}{hits[kind]:9.2f} us{hits[kind] / registration:9.3f}")
        among = {}
        whole = ndpy.alloc(2 * MANY * LENGTH)
        for count in (FEW, MANY):
            for kind, slices in (
                ("owners", [bytearray(64) for _ in range(count)]),
                ("slices", [whole[2 * place * LENGTH : (2 * place + 1) * LENGTH] for place in range(count)]),
            ):
                with ndpy.RegistrationCache(adapter, max_bytes=1 << 30, max_entries=MANY) as cache:
                    for part in slices:
                        cache.local(part).release()
                    among[kind, count] = hit_us(cache, slices) - clock
                    assert cache.stats.evictions == 0
                    print(f"{f'a hit among {count} {kind}':44}{among[kind, count]:9.2f} us")
        print(f"{'memory of an entry':44}{entry_bytes(adapter, 1000):9.0f} bytes")
    failed = False
    for kind, cost in hits.items():
        failed |= verdict(f"a hit, {kind}, of a registration", cost / registration, MOST_OF_A_REGISTRATION)
    for kind in ("owners", "slices"):
        ratio = among[kind, MANY] / among[kind, FEW]
        failed |= verdict(f"a hit among {MANY} {kind}, of one among {FEW}", ratio, MOST_AMONG_MANY)
    sys.exit(failed)


def kinds():
    """One buffer of each kind that the cache distinguishes."""
    found = {"alloc": ndpy.alloc(LENGTH), "mmap": mmap.mmap(-1, LENGTH), "bytearray": bytearray(LENGTH)}
    if sys.platform == "linux":
        found["monitored"] = (address_of(found["alloc"]), LENGTH)
    try:
        import numpy
    except ImportError:
        return found
    found["NumPy"] = numpy.zeros(LENGTH, dtype="u1")
    found["view of NumPy"] = numpy.zeros(4 * LENGTH, dtype="u1")[LENGTH : 2 * LENGTH]
    return found


def verdict(what, ratio, bound):
    """Print a ratio and its bound. Returns whether the ratio exceeds the bound."""
    print(f"{what:44}{ratio:9.3f}  at most {bound:g}: {'yes' if ratio <= bound else 'NO'}")
    return ratio > bound


if __name__ == "__main__":
    main()
