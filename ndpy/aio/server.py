"""The two functions that make connections: connect() and serve()."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from ndpy import errors
from ndpy.aio.connection import Connection
from ndpy.aio.hub import Hub
from ndpy.aio.life import Finally
from ndpy.aio.protocol import MAX_OFFERS, MAX_SLOT_SIZE, MAX_SLOTS, MIN_SLOT_SIZE, Hello
from ndpy.aio.tasks import finish, in_thread, start, start_soon
from ndpy.objects.adapter import Adapter
from ndpy.objects.connection import Connector
from ndpy.objects.listener import Listener
from ndpy.objects.resource import Uncopied
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.addresses import Address, check_address, is_numeric, numeric_host, unique, unresolved
from ndpy.vocabulary.integers import integer
from ndpy.vocabulary.loggers import logger

T = TypeVar("T", "Connection", "Server")

_log = logger("ndpy.aio")

# After these errors connect() tries the next address of a name.
_TRY_NEXT = (
    errors.ConnectionRefusedError,
    errors.AddressUnreachableError,
    errors.TimeoutError,
    errors.ConnectionAbortedError,
)

#: What a server calls for each connection.
Handler = Callable[[Connection], Awaitable[object]]


class _Awaitable(Uncopied, Generic[T]):
    """The result of connect() and serve(): `await` it, or use it with `async with`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, T]] = make
        self._made: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._make().__await__()

    async def __aenter__(self) -> T:
        self._made = await self
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._made is not None
        await self._made.__aexit__(kind, error, trace)


def connect(
    address: Address,
    *,
    adapter: Adapter | str | None = None,
    timeout_s: float | None = 10.0,
    close_timeout_s: float | None = 10.0,
    slots: int = 8,
    slot_size: int = 4096,
    offers: int = 2,
    max_message_length: int = 1 << 26,
) -> _Awaitable[Connection]:
    """Connect to a server: `connection = await connect(address)`, or `async with connect(address) as connection`.

    Parameters:
        address: (host, port) of the server.
        adapter: an open adapter, or what open_adapter() takes. All connections of one loop to the same adapter share
            what they need, and the last one closes what was opened.
        timeout_s: how long all of it may take. None waits for ever. The addresses of a name are tried in turn, and one
            that does not answer gets an equal share of the time that is left. Where the kernel is slow to let go of a
            silent address (Quirk.IWARP_DESTROY_WAITS), a connect() that fails returns up to ten seconds later. One that
            succeeds does not wait for it, and its close() does.
        close_timeout_s: how long close() waits for the peer. None waits for ever.
        slots: how many messages the peer may send before this end receives one, 1 to 1,024. Each slot of both
            directions has slot_size bytes of registered memory, and some more for the protocol.
        slot_size: in bytes, 64 to 1 MiB. A message that fits with its header of 24 bytes is sent at once. For a longer
            one the receiver reads the sender's memory.
        offers: how many longer messages each end may have under way, 1 to 64.
        max_message_length: the longest message that this end takes, in bytes.
    Returns: a Connection.
    Raises:
        ConnectionRefusedError: nobody listens there, or the server refused.
        TimeoutError: there was no answer in time.
        ProtocolError: the server does not speak the protocol of ndpy.aio.
        LimitExceededError: an option is out of range.
        Otherwise what open_adapter() and Connector.connect() raise.
    """
    timeout_s, close_timeout_s = timeout(timeout_s), timeout(close_timeout_s, "close_timeout_s")
    hello = _hello(slots, slot_size, offers, max_message_length)

    async def make() -> Connection:
        loop = asyncio.get_running_loop()
        end = loop.time() + (math.inf if timeout_s is None else timeout_s)
        found = await _addresses_of(address, timeout_s)
        hub = Hub.join(adapter)
        #: They are freed beside the next attempt, because the kernel may hold them for long
        #: (Quirk.IWARP_DESTROY_WAITS).
        failed: list[Connection] = []
        async with Finally(hub, hub.leave):
            for left in range(len(found), 0, -1):
                share_s = None if timeout_s is None else max(0.0, end - loop.time()) / left
                if timeout_s and not share_s:
                    raise errors.TimeoutError(
                        f"the {timeout_s:g} s for a connection to {address[0]} port {address[1]} were over before it "
                        f"was asked: "
                        "opening the adapter took that long",
                        operation="connect",
                    )
                try:
                    connection = Connection(hub, hello, close_timeout_s)
                    failed.append(connection)
                    await connection._open(connection._connect(*found[-left], share_s))
                except GeneratorExit:
                    raise
                except BaseException as error:
                    if left > 1 and isinstance(error, _TRY_NEXT) and loop.time() < end:
                        _log.debug("%s port %d failed, and the next address is tried: %s", *found[-left], error)
                        continue
                    for attempt in failed:
                        await attempt._until_free()
                    raise
                connection._attempts = [attempt for attempt in failed[:-1] if not attempt._has_left]
                return connection
        raise AssertionError("there is no address")

    return _Awaitable(make)


def serve(
    address: Address,
    handler: Handler,
    *,
    adapter: Adapter | str | None = None,
    backlog: int = 1024,
    timeout_s: float | None = 10.0,
    close_timeout_s: float | None = 10.0,
    slots: int = 8,
    slot_size: int = 4096,
    offers: int = 2,
    max_message_length: int = 1 << 26,
) -> _Awaitable[Server]:
    """Serve connections: `server = await serve(address, handler)`, or `async with serve(address, handler) as server`.

    Parameters:
        address: (host, port) to listen at. Host "" stands for every address of the adapter, and port 0 for a free port.
        handler: a coroutine function. It is called with each Connection, in a task of its own. When it returns, the
            connection is closed. What it raises goes to the loop's exception handler, and ends this connection only.
        adapter: as for connect().
        backlog: see Adapter.listen().
        timeout_s: how long a client may take to complete its connection. None waits for ever.
        close_timeout_s, slots, slot_size, offers, max_message_length: as for connect(), for each connection.
    Returns: a Server.
    Raises: what open_adapter() and Adapter.listen() raise, and LimitExceededError for an option that is out of range.
    """
    timeout_s, close_timeout_s = timeout(timeout_s), timeout(close_timeout_s, "close_timeout_s")
    hello = _hello(slots, slot_size, offers, max_message_length)

    async def make() -> Server:
        local = address
        if local[0] not in ("", "*"):
            local = (await _addresses_of(address, None))[0]
        hub = Hub.join(adapter)
        try:
            listener = hub.adapter.listen(local, backlog=backlog)
        except BaseException:
            await hub.leave()
            raise
        return Server(hub, listener, handler, hello, timeout_s, close_timeout_s)

    return _Awaitable(make)


def _hello(slots: int, slot_size: int, offers: int, max_message_length: int) -> Hello:
    for name, value, least, most in (
        ("slots", slots, 1, MAX_SLOTS),
        ("slot_size", slot_size, MIN_SLOT_SIZE, MAX_SLOT_SIZE),
        ("offers", offers, 1, MAX_OFFERS),
        ("max_message_length", max_message_length, 0, (1 << 63) - 1),
    ):
        if not least <= integer(value, name) <= most:
            raise errors.LimitExceededError(f"{name} is {least} to {most}, not {value}")
    return Hello(slots, offers, slot_size, max_message_length)


async def _addresses_of(address: Address, timeout_s: float | None) -> list[Address]:
    """The addresses of (host, port) in the system's order. A name is looked up without holding up the loop."""
    host, port = check_address(address)
    if not port or is_numeric(host):
        return [(host, port)]
    looking_up = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(looking_up, timeout_s)
    except asyncio.TimeoutError:
        raise errors.TimeoutError(f"{host!r} was not resolved within {timeout_s:g} s", operation="connect") from None
    except (OSError, UnicodeError) as error:
        raise unresolved(host, error) from None
    return [(numeric_host(resolved), resolved[1]) for _, resolved in unique(found)]


class Server(Uncopied):
    """Accepts connections, made by serve(). Leaving its block calls close().

    If the block or close() is cancelled, as Ctrl-C does, it ends at once: what was sent is delivered, and no client is
    waited for. So does a close() that follows Ctrl-C, see Connection.close().

    Attributes:
        address: the (host, port) at which it listens. The port is never 0.
        connections: the connections whose handlers run.
    """

    def __init__(
        self,
        hub: Hub,
        listener: Listener,
        handler: Handler,
        hello: Hello,
        timeout_s: float | None,
        close_timeout_s: float | None,
    ) -> None:
        self._hub = hub
        self._listener = listener
        self._handler = handler
        self._hello = hello
        self._timeout_s = timeout_s
        self._close_timeout_s = close_timeout_s
        self.address = listener.address
        self.connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._accepting = start(self._loop, self._accept_all)
        self._closing: asyncio.Future[None] | None = None
        #: Whether the program is being ended, so that nobody waits for clients.
        self._hurries = False

    async def _accept_all(self) -> None:
        try:
            async for connector in self._listener:
                task = start(self._loop, partial(self._serve_one, connector))
                self._tasks.add(task)
                task.add_done_callback(partial(self._on_served, connector))
        except asyncio.CancelledError:
            # Nobody but the loop's end cancels this.
            self._hurry()
            raise
        except errors.NdpyError as error:
            _log.warning("the server at %s port %s no longer accepts anybody: %s", *self.address[:2], error)
            raise

    def _on_served(self, connector: Connector, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if connector.state == "requested":
            # It was cancelled before it ran.
            connector.close()

    async def _serve_one(self, connector: Connector) -> None:
        peer = "an unknown address"
        with contextlib.suppress(errors.DeviceRemovedError):
            peer = "{} port {}".format(*connector.peer_address[:2])
        try:
            connection = Connection(self._hub, self._hello, self._close_timeout_s)
        except errors.NdpyError as error:
            _log.warning("a client at %s was refused: %s", peer, error)
            with contextlib.suppress(errors.NdpyError):
                connector.reject()
            connector.close()
            return
        try:
            await connection._open(connection._accept(connector, self._timeout_s), wait=True)
        except errors.NdpyError as error:
            _log.warning("the connection of a client at %s failed: %s", peer, error)
            return
        self.connections.add(connection)
        try:
            async with connection:
                try:
                    await self._handler(connection)
                except asyncio.CancelledError:
                    # The server is being closed, or the loop ends all tasks. What the handler has sent is delivered.
                    if self._closing is None or self._hurries:
                        connection.hurry()
                    await connection.close()
                    raise
                except Exception as error:
                    if connection._tells_of_end(error):
                        raise
                    # Before the connection ends: if the server is closed meanwhile, the cancellation takes the place of
                    # the error.
                    context = {"message": f"the handler of a client at {peer} failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)
                    connection.abort()
        except ConnectionError as error:
            _log.info("the connection of a client at %s ended: %s", peer, error)
        finally:
            self.connections.discard(connection)

    async def serve_forever(self) -> None:
        """Wait until the server is closed. Raises DeviceRemovedError if the adapter goes away."""
        await asyncio.shield(self._accepting)

    async def close(self) -> None:
        """Stop listening, cancel the handlers, and close their connections as Connection.close() does.

        Harmless when repeated.
        """
        if self._loop.is_closed():
            # This may be a finalizer, see Finally.
            self._hub.adapter._events.call_soon(self._listener.close)
            return
        if self._closing is None:
            self._closing = start(self._loop, self._close)
        await finish(self._closing, self._hurry)

    def _hurry(self) -> None:
        """Whoever closes the server is cancelled, as by Ctrl-C. The second time, what was not delivered is lost."""
        for connection in list(self.connections):
            connection.abort() if self._hurries else connection.hurry()
        self._hurries = True

    async def _close(self) -> None:
        async with Finally(self._hub, self._hub.leave):
            await in_thread(self._listener.close)
            await asyncio.wait((self._accepting,))
            if not self._accepting.cancelled():
                # It was told: an error counts as retrieved, also if nobody waits in serve_forever().
                self._accepting.exception()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is GeneratorExit and not self._loop.is_closed():
            # See Finally.
            start_soon(self._loop, self.close)
        else:
            if kind is not None and issubclass(kind, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
                self._hurry()
            await self.close()
