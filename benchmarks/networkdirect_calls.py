"""The cost of posting a receive and polling its completion with softnd, in C and in Python, in one run.

python networkdirect_calls.py NETWORKDIRECT_CALLS.EXE SOFTND.DLL: prints a line of JSON for each loop. bench.py runs it under Wine.
"""

import contextlib
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
TIMEOUT_S = 10
ACCESS = ndpy.Access.LOCAL_WRITE | ndpy.Access.REMOTE_READ | ndpy.Access.READ_SINK
LOOPS = ("softnd_receive", "softnd_poll_64", "softnd_poll_empty")


class Scene:
    """Two connected queue pairs of this process. The receives of `server` report to `received`."""

    def __init__(self, stack):
        enter = stack.enter_context
        adapter = enter(ndpy.open_adapter("127.0.0.1"))
        self.region = enter(adapter.register(ndpy.alloc(4096), ACCESS))
        self.received = enter(adapter.create_completion_queue(2 * DEPTH))
        self.sent = enter(adapter.create_completion_queue(2 * DEPTH))
        depths = {"receive_queue_depth": DEPTH, "initiator_queue_depth": DEPTH}
        self.client = enter(adapter.create_queue_pair(self.sent, **depths))
        self.server = enter(adapter.create_queue_pair(self.received, self.sent, **depths))
        listener, connector = enter(adapter.listen(("", 0))), enter(adapter.create_connector())
        connecting = connector.begin_connect(self.client, (adapter.info.addresses[0], listener.address[1]))
        accepting = enter(listener.get_request(timeout_s=TIMEOUT_S)).begin_accept(self.server)
        connecting.result(TIMEOUT_S)
        connector.complete_connect(timeout_s=TIMEOUT_S)
        accepting.result(TIMEOUT_S)

    def deliver(self):
        """Send a message into each receive. Returns when all of them have arrived."""
        element = self.region[0:8]
        for _ in range(DEPTH - 1):
            self.client.send(element, flags=ndpy.Flags.SILENT_SUCCESS)
        # The answer to a read comes after everything that was sent before it.
        self.client.read(self.region[8:16], self.region.remote(16, 8))
        self.sent.wait(TIMEOUT_S)[0].raise_for_status()


def python_ns():
    """The nanoseconds of each of LOOPS, of every round."""
    times = ([], [], [])
    now = time.perf_counter_ns
    with contextlib.ExitStack() as stack:
        scene = Scene(stack)
        element, found = scene.region[64:72], ndpy.CompletionArray(64)
        receive, poll, poll_into = scene.server.receive, scene.received.poll, scene.received.poll_into
        for _ in range(ROUNDS):
            begin = now()
            for _ in range(DEPTH - 1):
                receive(element)
            times[0].append((now() - begin) / (DEPTH - 1))
            scene.deliver()
            taken = 0
            begin = now()
            while taken < DEPTH - 1:
                taken += poll_into(found)
            times[1].append((now() - begin) / (DEPTH - 1))
            if not found.all_ok:
                found.raise_for_status()
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
