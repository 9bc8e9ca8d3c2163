"""Compares registering many buffers one after the other with beginning all registrations at once, in one run.

python registration.py [ADAPTER [ROUNDS]]    (`make bench-register` runs it on rxe, with a clock that counts
instructions and with two processors, and with softnd, where each registration is delayed by 1 ms)
"""

import statistics
import sys
import time

import ndpy

BUFFERS = 64
SIZES = (4096, 65536, 131072, 262144, 1 << 20)


def one_after_the_other(adapter, buffers):
    return [adapter.register(buffer) for buffer in buffers]


def all_at_once(adapter, buffers):
    return [pending.result() for pending in [adapter.begin_register(buffer) for buffer in buffers]]


def measured(ways, adapter, buffers, rounds):
    """The median time of each way in seconds. The ways alternate."""
    times = [[] for _ in ways]
    for round_number in range(rounds + 1):
        for way, seconds in zip(ways, times, strict=True):
            begin = time.perf_counter()
            regions = way(adapter, buffers)
            end = time.perf_counter()
            for region in regions:
                region.close()
            # The first round starts threads and touches memory, so it does not count.
            if round_number:
                seconds.append(end - begin)
    return [statistics.median(seconds) for seconds in times]


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else None
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    with ndpy.open_adapter(name) as adapter:
        print(f"{BUFFERS} buffers on {adapter.info.name}, milliseconds")
        print(f"{'bytes each':>12}{'one by one':>14}{'all at once':>14}{'ratio':>8}")
        for size in SIZES:
            buffers = [ndpy.alloc(size) for _ in range(BUFFERS)]
            for buffer in buffers:
                buffer[:] = bytes(size)
            alone, together = measured((one_after_the_other, all_at_once), adapter, buffers, rounds)
            print(f"{size:12}{alone * 1e3:14.2f}{together * 1e3:14.2f}{together / alone:8.2f}", flush=True)


if __name__ == "__main__":
    main()
