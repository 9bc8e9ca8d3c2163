"""What the hosts of tests/networks do, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

import ndpy
from ndpy import aio

LIMIT_S = 30.0
_MESSAGE = b"over the network" * 200
_open: list[object] = []
_early: list[ndpy.Adapter] = []


def addresses(which: str = "soft0") -> list[str]:
    with ndpy.open_adapter(which) as adapter:
        return list(adapter.info.addresses)


def _ready_queue_pair(adapter: ndpy.Adapter) -> tuple[ndpy.CompletionQueue, ndpy.QueuePair, ndpy.MemoryRegion]:
    queue = adapter.create_completion_queue(8)
    queue_pair = adapter.create_queue_pair(queue)
    region = adapter.register(bytearray(2 * len(_MESSAGE)))
    queue_pair.receive(region[len(_MESSAGE) :])
    return queue, queue_pair, region


def _say_and_hear(queue: ndpy.CompletionQueue, queue_pair: ndpy.QueuePair, region: ndpy.MemoryRegion) -> None:
    with memoryview(region.buffer) as view:
        view[: len(_MESSAGE)] = _MESSAGE
        queue_pair.send(region[: len(_MESSAGE)])
        _take(queue, 2)
        assert view[len(_MESSAGE) :] == _MESSAGE


def _take(queue: ndpy.CompletionQueue, count: int) -> None:
    done = 0
    while done < count:
        for completion in queue.wait(LIMIT_S):
            completion.raise_for_status()
            done += 1


class Server:
    """Sends each message back that comes to this address. peers: the addresses from which clients came."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._adapter = ndpy.open_adapter("soft0")
        self._listener = self._adapter.listen((host, port))
        self.address = self._listener.address
        self.peers: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connector = self._listener.get_request(LIMIT_S)
            except ndpy.NdpyError:
                return
            self._echo(connector)

    def _echo(self, connector: ndpy.Connector) -> None:
        queue, queue_pair, region = _ready_queue_pair(self._adapter)
        assert connector.peer_address is not None
        self.peers.append(connector.peer_address[0])
        connector.accept(queue_pair, timeout_s=LIMIT_S)
        _take(queue, 1)
        queue_pair.send(region[len(_MESSAGE) :])
        _take(queue, 1)
        connector.wait_disconnected(LIMIT_S)
        for thing in (connector, queue_pair, queue, region):
            thing.close()


def serve(host: str, port: int = 0) -> Server:
    server = Server(host, port)
    _open.append(server)
    return server


def exchange(host: str, port: int, source: str | None = None, timeout_s: float = LIMIT_S) -> tuple[str, str]:
    """Connect, and have a message sent back. Returns the hosts of both ends, as this one sees them.

    source: the local address to bind to. Without it the routes decide.
    """
    with contextlib.ExitStack() as stack:
        adapter = _early[0] if _early else stack.enter_context(ndpy.open_adapter("soft0"))
        queue, queue_pair, region = _ready_queue_pair(adapter)
        connector = adapter.create_connector()
        try:
            if source is not None:
                connector.bind((source, 0))
            connector.connect(queue_pair, (host, port), timeout_s=timeout_s)
            connector.complete_connect(LIMIT_S)
            own, peer = connector.local_address, connector.peer_address
            _say_and_hear(queue, queue_pair, region)
            connector.disconnect(LIMIT_S)
        finally:
            for thing in (connector, queue_pair, queue, region):
                thing.close()
        assert own is not None and peer is not None
        return own[0], peer[0]


def open_early() -> None:
    """exchange() uses this adapter from now on."""
    _early.append(ndpy.open_adapter("soft0"))


def refusal(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """The class and the message of the error of a connection that does not come about."""
    try:
        exchange(host, port, timeout_s=timeout_s)
    except ndpy.NdpyError as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"something answers at {host} port {port}")


class AioServer:
    """Sends each message of ndpy.aio back that comes to this address."""

    def __init__(self, host: str) -> None:
        started = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(host, started),), daemon=True).start()
        assert started.wait(LIMIT_S)

    async def _serve(self, host: str, started: threading.Event) -> None:
        async def echo(connection: aio.Connection) -> None:
            await connection.send(await connection.receive())
            await connection.receive()

        async with aio.serve((host, 0), echo, adapter="soft0", timeout_s=LIMIT_S) as server:
            self.port = server.address[1]
            started.set()
            await asyncio.sleep(LIMIT_S)


def serve_aio(host: str) -> int:
    """Returns the port."""
    server = AioServer(host)
    _open.append(server)
    return server.port


def exchange_aio(host: str, port: int) -> None:
    """Have a long message sent back."""

    async def talk() -> None:
        async with aio.connect((host, port), adapter="soft0", timeout_s=LIMIT_S) as connection:
            await connection.send(_MESSAGE * 100)
            assert await connection.receive() == _MESSAGE * 100

    asyncio.run(asyncio.wait_for(talk(), LIMIT_S))


class ByHand:
    """An end of a connection without a connection manager. endpoint: what the other end needs."""

    def __init__(self, gid_index: int) -> None:
        self._adapter = ndpy.open_adapter("soft0")
        self._queue, self._queue_pair, self._region = _ready_queue_pair(self._adapter)
        self.own = self._queue_pair.local_endpoint(gid_index)
        self.endpoint = self.own.to_bytes()

    def connect(self, endpoint: bytes) -> None:
        self._queue_pair.connect_endpoint(ndpy.Endpoint.from_bytes(endpoint))

    def speak(self) -> None:
        with memoryview(self._region.buffer) as view:
            view[: len(_MESSAGE)] = _MESSAGE
        self._queue_pair.send(self._region[: len(_MESSAGE)])

    def hear(self) -> None:
        """The message came back."""
        _take(self._queue, 2)
        assert self._region.buffer[len(_MESSAGE) :] == _MESSAGE

    def answer(self) -> None:
        _take(self._queue, 1)
        self._queue_pair.send(self._region[len(_MESSAGE) :])
        _take(self._queue, 1)


def by_hand(gid_index: int) -> ByHand:
    return ByHand(gid_index)


def gids() -> list[tuple[int, str]]:
    """The GIDs of soft0, as (index, address)."""
    with ndpy.open_adapter("soft0") as adapter:
        return [(gid.index, gid.address) for gid in adapter.info.ports[0].gids]


def restrict(host: str) -> None:
    """soft0 of this process has this address only. It is not open yet."""
    os.environ["SOFTVERBS_ADDRESSES"] = host


def lookup(name: str) -> list[str]:
    return [entry[4][0] for entry in socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)]
