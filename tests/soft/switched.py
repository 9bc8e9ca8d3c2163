"""What test_switches_on_linux.py runs, each in a process of its own: the library reads its settings and its scenario
when soft0 is opened.

python switched.py NAME
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "softnd"))

import pytest
from hostile import READY_BY_READ
from kit.helpers import DEADLINE_S, Keeper, connect_pair, create_end, memory, send_message, take

import ndpy
from ndpy import Access, Status, aio
from ndpy.platforms.verbs.native_calls import ffi, lib

# RFC 5044 section 7.1
REQUEST, REPLY, CRC = b"MPA ID Req Frame", b"MPA ID Rep Frame", 0x40


def delayed_registration(adapter: ndpy.Adapter, keep: Keeper) -> None:
    began = time.monotonic()
    memory(keep, adapter, 64)
    assert time.monotonic() - began >= 0.3


def refused_registration(adapter: ndpy.Adapter, keep: Keeper) -> None:
    for _ in range(100):
        try:
            memory(keep, adapter, 64)
        except ndpy.InsufficientResourcesError:
            return
    raise AssertionError("nothing was refused")


def cut_connection(adapter: ndpy.Adapter, keep: Keeper) -> None:
    pair = connect_pair(keep, adapter)
    send_message(keep, pair.client, pair.server, b"x" * 1000)
    pair.server.queue_pair.receive(memory(keep, adapter, 100_000))
    pair.client.queue_pair.send(memory(keep, adapter, b"y" * 100_000, Access.NONE))
    assert not take(pair.client.cq)[0].ok
    (cancelled,) = take(pair.server.cq)
    assert cancelled.status is Status.CANCELED
    pair.server.connector.wait_disconnected(DEADLINE_S)


def removed_device(adapter: ndpy.Adapter, keep: Keeper) -> None:
    pair = connect_pair(keep, adapter)
    with pytest.raises(ndpy.ProviderError):  # EIO, until the event of the removal has come
        for _ in range(100):
            send_message(keep, pair.client, pair.server, b"z")
    with pytest.raises(ndpy.DeviceRemovedError):
        for _ in range(100):
            pair.server.cq.wait(DEADLINE_S)


def removed_device_of_connections(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """Every task of ndpy.aio learns of it, and everything can be closed."""

    async def echo(connection: aio.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async def talk(address: tuple[str, int]) -> None:
        async with aio.connect(address, adapter=adapter) as connection:
            for length in itertools.cycle((10, 10_000)):
                sending = asyncio.ensure_future(connection.send(bytes(length)))
                try:
                    assert len(await connection.receive()) == length
                finally:
                    await asyncio.gather(sending, return_exceptions=True)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        server = await aio.serve(("127.0.0.1", 0), echo, adapter=adapter)
        talking = [asyncio.ensure_future(talk(server.address)) for _ in range(3)]
        serving = asyncio.ensure_future(server.serve_forever())
        for end in await asyncio.gather(*talking, return_exceptions=True):
            assert isinstance(end, (ConnectionError, ndpy.DeviceRemovedError)), end
        with pytest.raises(ndpy.DeviceRemovedError):
            await serving
        await server.close()
        assert not server.connections

    faults: list[dict] = []
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert not [context for context in faults if "handler of a client" not in context["message"]], faults


def unfinished_answer(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """A host that begins to answer and never goes on."""
    end = create_end(keep, adapter)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as peer:
        began = time.monotonic()
        connecting = keep(adapter.create_connector()).begin_connect(end.queue_pair, peer.getsockname())
        connection, _ = peer.accept()
        with connection:
            connection.sendall(REPLY[:10])
            with pytest.raises(ndpy.NdpyError):
                connecting.result(DEADLINE_S)
        assert time.monotonic() - began < 5


def fails_within(pending: ndpy.Pending[None], error: type[ndpy.NdpyError], seconds: float) -> None:
    began = time.monotonic()
    with pytest.raises(error):
        pending.result(seconds)
    assert time.monotonic() - began < seconds


def no_answer(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """A host that takes the request and says nothing."""
    end = create_end(keep, adapter)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as peer:
        connecting = keep(adapter.create_connector()).begin_connect(end.queue_pair, peer.getsockname())
        connection, _ = peer.accept()
        with connection:
            assert connection.recv(100).startswith(REQUEST)
            fails_within(connecting, ndpy.TimeoutError, 30)


def no_first_message(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """A peer that is accepted and says nothing."""
    end = create_end(keep, adapter)
    listener = keep(adapter.listen(("127.0.0.1", 0)))
    with socket.create_connection(listener.address, DEADLINE_S) as peer:
        peer.sendall(READY_BY_READ.encode())
        accepting = keep(listener.get_request(DEADLINE_S)).begin_accept(end.queue_pair)
        peer.settimeout(DEADLINE_S)
        assert peer.recv(100).startswith(REPLY)
        fails_within(accepting, ndpy.TimeoutError, 30)


def no_request(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """A connection that says nothing, and one that says half of it."""
    listener = keep(adapter.listen(("127.0.0.1", 0)))
    for said in (b"", REQUEST):
        with socket.create_connection(listener.address, DEADLINE_S) as peer:
            peer.settimeout(9)
            peer.sendall(said)
            with pytest.raises(ConnectionResetError):
                peer.recv(1)


def required_crc(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """The peer asks for no CRCs. The answer says whether this end does."""
    end = create_end(keep, adapter)
    listener = keep(adapter.listen(("127.0.0.1", 0)))
    with socket.create_connection(listener.address, DEADLINE_S) as peer:
        peer.sendall(REQUEST + bytes([0, 1, 0, 0]))
        request = keep(listener.get_request(DEADLINE_S))
        request.begin_accept(end.queue_pair)
        peer.settimeout(DEADLINE_S)
        reply = b""
        while len(reply) < len(REPLY) + 1:
            reply += peer.recv(100)
        assert reply.startswith(REPLY)
        assert reply[len(REPLY)] & CRC


def exact_elements(adapter: ndpy.Adapter, keep: Keeper) -> None:
    """The library otherwise grants a queue pair a few elements more. ndpy itself lets no request have more than asked
    for.
    """
    queue_pair = create_end(keep, adapter).queue_pair
    attributes, initial = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    assert lib.ibv_query_qp(queue_pair._qp, attributes, lib.IBV_QP_STATE, initial) == 0
    assert (initial.cap.max_send_sge, initial.cap.max_recv_sge) == (1, 1)


def one_address(adapter: ndpy.Adapter, keep: Keeper) -> None:
    assert {gid.address for gid in adapter.info.ports[0].gids} == {"127.0.0.1"}


SCENARIOS: dict[str, Callable[[ndpy.Adapter, Keeper], None]] = {
    function.__name__: function
    for function in (
        delayed_registration,
        refused_registration,
        cut_connection,
        removed_device,
        removed_device_of_connections,
        unfinished_answer,
        no_answer,
        no_first_message,
        no_request,
        required_crc,
        exact_elements,
        one_address,
    )
}

if __name__ == "__main__":
    keeper = Keeper()
    with ndpy.open_adapter("soft0") as opened:
        try:
            SCENARIOS[sys.argv[1]](opened, keeper)
        finally:
            keeper.close()
