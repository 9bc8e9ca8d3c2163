"""The cost of posting a receive and polling its completion with softnd, in C and in Python, in one run.

python networkdirect_calls.py NETWORKDIRECT_CALLS.EXE SOFTND.DLL: prints a line of JSON for each loop. bench.py runs it under Wine.
"""

import json
import os
import platform
import subprocess
import sys
import time

program, provider = sys.argv[1:3]
os.environ["NDPY_PROVIDER"] = provider
# An embeddable Python does not look beside the program.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from timing import summary  # noqa: E402

import ndpy  # noqa: E402

ROUNDS = 100
DEPTH = 512
EMPTY_POLLS = 1000
LOOPS = ("softnd_receive", "softnd_poll_64", "softnd_poll_empty")


def python_ns():
    """The nanoseconds of each of LOOPS, of every round."""
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
                poll()
            times[2].append((now() - begin) / EMPTY_POLLS)
    return times


def native_ns():
    result = subprocess.run([program, provider, str(ROUNDS)], capture_output=True, text=True, check=True)
    return [list(map(float, line.split())) for line in result.stdout.splitlines()]


def main():
    print(json.dumps({"who": "ndpy", "windows_python": platform.python_version()}))
    for who, times in (("C", native_ns()), ("ndpy", python_ns())):
        for loop, values in zip(LOOPS, times, strict=True):
            print(json.dumps({"who": who, "loop": loop, **summary([ns / 1000 for ns in values]), "rounds": 1}))


if __name__ == "__main__":
    main()
