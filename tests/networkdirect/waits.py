"""Waits of every kind, in the main thread. An interrupt ends each wait, and everything still works afterwards.

Run it as `python waits.py`, with NDPY_PROVIDER set. It prints what it waits for, and what was interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# An embedded Python searches neither the working folder nor PYTHONPATH.
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from kit.helpers import Keeper, connect_pair, create_end, host_of  # noqa: E402

import ndpy  # noqa: E402

LIMIT_S = 60.0


def main() -> None:
    adapter = ndpy.open_adapter()
    keep = Keeper()
    pair = connect_pair(keep, adapter)
    end = create_end(keep, adapter)
    poller = keep(ndpy.Poller())
    poller.add(end.cq)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    silent = keep(adapter.listen((host_of(adapter), 0)))
    connector = keep(adapter.create_connector())
    waits = {
        "completion queue": lambda: pair.client.cq.wait(LIMIT_S),
        "completion queue without deadline": lambda: pair.client.cq.wait(),
        "poller": lambda: poller.wait(LIMIT_S),
        "poller without deadline": lambda: poller.wait(),
        "listener": lambda: listener.get_request(LIMIT_S),
        "listener without deadline": lambda: listener.get_request(),
        "notification": lambda: pair.server.cq.arm().result(LIMIT_S),
        "end of the connection": lambda: pair.client.connector.wait_disconnected(LIMIT_S),
        "end of the connection without deadline": lambda: pair.client.connector.wait_disconnected(),
        "connect": lambda: connector.connect(end.queue_pair, silent.address, timeout_s=LIMIT_S),
    }
    if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
        srq = keep(adapter.create_shared_receive_queue(8, threshold=2))
        region = keep(adapter.register(bytearray(64)))
        for _ in range(4):
            srq.receive(region)
        waits["shared receive queue"] = lambda: srq.arm().result(LIMIT_S)
    for name, call in waits.items():
        print("waiting for", name, flush=True)
        try:
            call()
        except KeyboardInterrupt:
            print("interrupted", name, flush=True)
    assert not pair.client.connector._watching
    pair.server.connector.disconnect(LIMIT_S)
    pair.client.connector.wait_disconnected(LIMIT_S)
    keep.close()
    adapter.close()
    print("still works", flush=True)


main()
