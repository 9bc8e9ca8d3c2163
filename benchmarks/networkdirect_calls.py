"""Compares Python with C: the cost of posting a receive and polling its completion with softnd, in one run.

python networkdirect_calls.py NETWORKDIRECT_CALLS.EXE SOFTND.DLL (`make bench-windows` runs it under Wine)
"""

import os
import statistics
import subprocess
import sys
import time

program, provider = sys.argv[1:3]
os.environ["NDPY_PROVIDER"] = provider

import ndpy  # noqa: E402

ROUNDS = 100
DEPTH = 512
EMPTY_POLLS = 1000
NAMES = ("post a receive", "poll a completion, 64 at once", "poll an empty queue")


def python_ns():
    """The median time of each of NAMES, in nanoseconds."""
    times = ([], [], [])
    now = time.perf_counter_ns
    with (
        ndpy.open_adapter("127.0.0.1") as adapter,
        adapter.register(bytearray(8)) as region,
        adapter.create_completion_queue(2 * DEPTH) as queue,
        adapter.create_queue_pair(queue, receive_queue_depth=DEPTH, initiator_queue_depth=1) as queue_pair,
    ):
        element = region[:]
        receive, poll = queue_pair.receive, queue.poll
        for _ in range(ROUNDS):
            begin = now()
            for _ in range(DEPTH):
                receive(element)
            times[0].append((now() - begin) / DEPTH)
            queue_pair.flush()
            taken = 0
            begin = now()
            while taken < DEPTH:
                taken += len(poll(64))
            times[1].append((now() - begin) / DEPTH)
            begin = now()
            for _ in range(EMPTY_POLLS):
                poll(64)
            times[2].append((now() - begin) / EMPTY_POLLS)
    return [statistics.median(values) for values in times]


def main():
    native = subprocess.run([program, provider, str(ROUNDS)], capture_output=True, text=True, check=True).stdout
    print(f"{'nanoseconds':32}{'C':>8}{'Python':>8}{'ratio':>8}")
    for name, ours, theirs in zip(NAMES, python_ns(), map(float, native.split()), strict=True):
        print(f"{name:32}{theirs:8.0f}{ours:8.0f}{ours / theirs:8.1f}")


if __name__ == "__main__":
    main()
