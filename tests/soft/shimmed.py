"""What test_shim.py runs over the shim, each in a process of its own. Each prints what the program saw.

python shimmed.py NAME [ADAPTER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.helpers import DEADLINE_S, Keeper, connect_pair, create_end, host_of, memory, send_message, take

import ndpy
from ndpy import Access


def connects(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """Twice. What the first attempt ends with, and that the second one has a connection that works."""
    listener = keep(adapter.listen((host_of(adapter), 0)))
    first = create_end(keep, adapter)
    connector = keep(adapter.create_connector())
    try:
        connector.begin_connect(first.queue_pair, listener.address).result(DEADLINE_S)
        print("connected")
    except ndpy.ConnectionRefusedError as error:
        print(type(error).__name__, connector.private_data[:3].hex())
    except ndpy.NdpyError as error:
        print(type(error).__name__)
    listener.close()
    pair = connect_pair(keep, adapter)
    send_message(keep, pair.client, pair.server, b"works")
    print("works")


def loses(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """How many sends of 100 bytes succeed, and that both ends learn of the end."""
    pair = connect_pair(keep, adapter)
    sent = 0
    try:
        while sent < 10:
            pair.server.queue_pair.receive(memory(keep, adapter, 100))
            pair.client.queue_pair.send(memory(keep, adapter, b"x" * 100, Access.NONE))
            if not take(pair.client.cq)[0].ok:
                break
            sent += 1
    except ndpy.NdpyError as error:
        print(type(error).__name__)
    print("sent", sent)
    pair.client.connector.wait_disconnected(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)
    print("both ends know")


def wrong_byte(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """How many bytes of a message differ, and whether the sender's memory is as it was."""
    pair = connect_pair(keep, adapter)
    source, target = memory(keep, adapter, b"z" * 1000, Access.NONE), memory(keep, adapter, 1000)
    pair.server.queue_pair.receive(target)
    pair.client.queue_pair.send(source)
    assert take(pair.client.cq)[0].ok
    assert take(pair.server.cq)[0].ok
    print("wrong", sum(byte != ord("z") for byte in bytes(target.buffer)))
    print("source", bytes(source.buffer) == b"z" * 1000)


def is_removed(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """Requests fail, then waiting says that the adapter has gone, and everything can be closed."""
    pair = connect_pair(keep, adapter)
    for _ in range(20):
        try:
            send_message(keep, pair.client, pair.server, b"z")
        except (ndpy.NdpyError, AssertionError):
            break
    else:
        raise AssertionError("nothing failed")
    try:
        for _ in range(100):
            pair.server.cq.wait(DEADLINE_S)
    except ndpy.DeviceRemovedError as error:
        print(type(error).__name__)


SITUATIONS: dict[str, Callable[[ndpy.Adapter, Keeper], None]] = {
    function.__name__: function for function in (connects, loses, wrong_byte, is_removed)
}

if __name__ == "__main__":
    keep = Keeper()
    with ndpy.open_adapter(sys.argv[2] if len(sys.argv) > 2 else "soft0") as adapter:
        try:
            SITUATIONS[sys.argv[1]](adapter, keep)
        finally:
            keep.close()
