"""The cost of posting a receive and polling its completion with softnd, in C and in Python, in one run.

python networkdirect_calls.py NETWORKDIRECT_CALLS.EXE SOFTND.DLL: prints a line of JSON for each loop. bench.py runs it
under Wine.
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
CONNECTIONS = 2
#: Of each connection. A read needs a place too.
MESSAGES = 1024
DEPTH = MESSAGES + 1
#: So long softnd's threads may take to come to rest after the last message.
REST_S = 0.002
EMPTY_POLLS = 1000
#: Polls of another queue before those that are timed, so that the processor has their code in its caches.
WARM_UPS = 100
BATCH = 64
TIMEOUT_S = 10
ACCESS = ndpy.Access.LOCAL_WRITE | ndpy.Access.REMOTE_READ | ndpy.Access.READ_SINK
LOOPS = ("softnd_receive", "softnd_poll_64", "softnd_poll_empty")


class Scene:
    """Connected queue pairs of this process. The receives of all `servers` report to `received`."""

    def __init__(self, stack):
        enter = stack.enter_context
        adapter = enter(ndpy.open_adapter("127.0.0.1"))
        self.region = enter(adapter.register(ndpy.alloc(4096), ACCESS))
        self.received = enter(adapter.create_completion_queue(CONNECTIONS * DEPTH))
        self.sent = enter(adapter.create_completion_queue(CONNECTIONS * DEPTH))
        depths = {"receive_queue_depth": DEPTH, "initiator_queue_depth": DEPTH}
        self.clients, self.servers = [], []
        listener = enter(adapter.listen(("", 0)))
        for _ in range(CONNECTIONS):
            client = enter(adapter.create_queue_pair(self.sent, **depths))
            server = enter(adapter.create_queue_pair(self.received, self.sent, **depths))
            connector = enter(adapter.create_connector())
            connecting = connector.begin_connect(client, (adapter.info.addresses[0], listener.address[1]))
            accepting = enter(listener.get_request(timeout_s=TIMEOUT_S)).begin_accept(server)
            connecting.result(TIMEOUT_S)
            connector.complete_connect(timeout_s=TIMEOUT_S)
            accepting.result(TIMEOUT_S)
            self.clients.append(client)
            self.servers.append(server)

    def deliver(self):
        """Send a message into each receive. Returns when all of them have arrived."""
        element = self.region[0:8]
        for client in self.clients:
            for _ in range(MESSAGES):
                client.send(element, flags=ndpy.Flags.SILENT_SUCCESS)
            # The answer to a read comes after everything that was sent before it.
            client.read(self.region[8:16], self.region.remote(16, 8))
            self.sent.wait(TIMEOUT_S)[0].raise_for_status()
        time.sleep(REST_S)


def python_ns():
    """The nanoseconds of each of LOOPS, of every round."""
    times = ([], [], [])
    now = time.perf_counter_ns
    with contextlib.ExitStack() as stack:
        scene = Scene(stack)
        element, found = scene.region[64:72], ndpy.CompletionArray(BATCH)
        receives = [server.receive for server in scene.servers]
        poll, poll_into = scene.received.poll, scene.received.poll_into
        for _ in range(ROUNDS):
            begin = now()
            for receive in receives:
                for _ in range(MESSAGES):
                    receive(element)
            times[0].append((now() - begin) / (CONNECTIONS * MESSAGES))
            scene.deliver()
            for _ in range(WARM_UPS):
                scene.sent.poll_into(found)
            taken = 0
            begin = now()
            while taken < CONNECTIONS * MESSAGES:
                taken += poll_into(found)
            times[1].append((now() - begin) / taken)
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
