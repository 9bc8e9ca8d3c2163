"""The other process of a test. The test decides when it dies or is interrupted.

    python peer.py ROLE ADAPTER [HOST PORT]

It prints one line for each step, and runs until it is killed.
"""

from __future__ import annotations

import sys
import time

import ndpy
from ndpy import Access

SIZE = 65536
LIMIT_S = 60.0


def say(*words: object) -> None:
    print(*words, flush=True)


def host_of(adapter: ndpy.Adapter) -> str:
    return next(address for address in adapter.info.addresses if ":" not in address)


def serve(adapter: ndpy.Adapter) -> None:
    """Accept one client, give it memory to write to, and take its messages for ever."""
    cq = adapter.create_completion_queue(64)
    queue_pair = adapter.create_queue_pair(cq, receive_queue_depth=32)
    region = adapter.register(bytearray(SIZE), Access.REMOTE_READ | Access.REMOTE_WRITE)
    inbox = adapter.register(bytearray(SIZE))
    for _ in range(32):
        queue_pair.receive(inbox)
    listener = adapter.listen((host_of(adapter), 0))
    say("listening on", listener.address[0], "port", listener.address[1])
    connector = listener.get_request(LIMIT_S)
    connector.accept(queue_pair, private_data=region.remote().to_bytes(), timeout_s=LIMIT_S)
    say("connected")
    while True:
        for completion in cq.wait(LIMIT_S):
            completion.raise_for_status()
            queue_pair.receive(inbox)


def flood(adapter: ndpy.Adapter, host: str, port: str) -> None:
    """Connect and send messages as fast as the server allows: 16 at first, then 8 for each empty message from it."""
    cq = adapter.create_completion_queue(64)
    queue_pair = adapter.create_queue_pair(cq)
    outbox = adapter.register(bytearray(SIZE), Access.NONE)
    for _ in range(8):
        queue_pair.receive([])
    adapter.connect(queue_pair, (host, int(port)), timeout_s=LIMIT_S)
    say("connected")
    allowed = 16
    while True:
        for _ in range(allowed):
            queue_pair.send(outbox[0:4096])
        allowed = 0
        for completion in cq.wait(LIMIT_S):
            completion.raise_for_status()
            if completion.operation is ndpy.Operation.RECEIVE:
                queue_pair.receive([])
                allowed += 8


def hesitate(adapter: ndpy.Adapter, host: str, port: str) -> None:
    """Ask for a connection and never complete it."""
    queue_pair = adapter.create_queue_pair(adapter.create_completion_queue(8))
    connector = adapter.create_connector()
    connecting = connector.begin_connect(queue_pair, (host, int(port)))
    say("asked")
    connecting.result(LIMIT_S)
    say("offered")
    time.sleep(LIMIT_S)


def ignore(adapter: ndpy.Adapter) -> None:
    """Listen and never answer."""
    listener = adapter.listen((host_of(adapter), 0))
    say("listening on", listener.address[0], "port", listener.address[1])
    connector = listener.get_request(LIMIT_S)
    say("asked", connector.peer_address[1])
    time.sleep(LIMIT_S)


def hold(adapter: ndpy.Adapter) -> None:
    """Hold one object of each kind: connected to itself, a window bound, and requests outstanding."""
    region = adapter.register(bytearray(SIZE))
    window = adapter.create_memory_window() if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities else None
    queues = [adapter.create_completion_queue(64) for _ in range(2)]
    client, server = (adapter.create_queue_pair(cq) for cq in queues)
    listener = adapter.listen((host_of(adapter), 0))
    connector = adapter.create_connector()
    connecting = connector.begin_connect(client, listener.address)
    accepted = listener.get_request(LIMIT_S)
    accepting = accepted.begin_accept(server)
    connecting.result(LIMIT_S)
    connector.complete_connect(LIMIT_S)
    accepting.result(LIMIT_S)
    server.receive(region)
    client.receive(region)
    if window is not None:
        server.bind(window, region)
        queues[1].wait(LIMIT_S)[0].raise_for_status()
    say("ready")
    time.sleep(LIMIT_S)


def wait(adapter: ndpy.Adapter) -> None:
    """Wait in each way there is. An interrupt ends each wait, and everything still works afterwards."""
    cq = adapter.create_completion_queue(8)
    queue_pair = adapter.create_queue_pair(cq)
    listener = adapter.listen((host_of(adapter), 0))
    poller = ndpy.Poller()
    poller.add(cq)
    connector = adapter.create_connector()
    waits = {
        "completion queue": lambda: cq.wait(LIMIT_S),
        "poller": lambda: poller.wait(LIMIT_S),
        "poller without deadline": lambda: poller.wait(),
        "listener": lambda: listener.get_request(LIMIT_S),
        "pending": lambda: cq.arm().result(LIMIT_S),
        "connect": lambda: connector.connect(queue_pair, listener.address, timeout_s=LIMIT_S),
    }
    for name, call in waits.items():
        say("waiting", name)
        try:
            call()
        except KeyboardInterrupt:
            say("interrupted", name)
    queue_pair.receive([])
    queue_pair.flush()
    assert poller.wait(LIMIT_S)[0][1][0].status is ndpy.Status.CANCELED
    say("still works")
    for thing in (poller, connector, listener, queue_pair, cq):
        thing.close()


ROLES = {role.__name__: role for role in (serve, flood, hesitate, ignore, hold, wait)}

if __name__ == "__main__":
    with ndpy.open_adapter(sys.argv[2]) as opened:
        ROLES[sys.argv[1]](opened, *sys.argv[3:])
