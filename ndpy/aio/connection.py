"""Connections for programs: messages of any length, and transfers to and from memory of the peer.

All of a connection runs in the thread of its event loop. Finally in life.py says what happens if the loop is closed
before the connection. life.py has the states of a connection, messages.py and transfers.py have what it is for, and
channel.py has what it is made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ndpy import errors
from ndpy.aio.channel import SILENT, Channel
from ndpy.aio.errors import ConnectionEndedError, ProtocolError
from ndpy.aio.hub import Hub
from ndpy.aio.life import ALIVE, USABLE, Event, Finally, Life
from ndpy.aio.memory import Memory
from ndpy.aio.messages import Messages
from ndpy.aio.protocol import Hello, Protocol
from ndpy.aio.tasks import finish, in_thread, start
from ndpy.aio.transfers import MOST_REQUESTS, Exposure, Transfers
from ndpy.objects.memory import RemoteMemory
from ndpy.objects.operations import READ, WRITE
from ndpy.objects.pending import await_or_cancel
from ndpy.objects.resource import Uncopied
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.flags import Access

if TYPE_CHECKING:
    from ndpy.objects.connection import Connector
    from ndpy.objects.queue_pair import QueuePair

# The client repeats its first step so often: siw may leave a server's first frame in its socket until more come.
_NUDGE_S = 0.2
# How long the end that closes second waits for the first one to disconnect.
_LINGER_S = 2.0


class Connection(Uncopied):
    """One end of a connection, made by connect() and serve().

    Messages arrive whole, once, and in the order of the calls of send(). Use a connection in the loop's thread only.
    Many tasks may use it at once.

    Attributes:
        queue_pair, connector, adapter: the objects below the connection. Use them for things that the connection does
            not offer. Do not post requests there.
    """

    connector: Connector | None = None

    def __init__(self, hub: Hub, own: Hello, close_timeout_s: float | None) -> None:
        self._hub = hub
        self._close_timeout_s = close_timeout_s
        self.adapter = hub.adapter
        self._loop = asyncio.get_running_loop()
        self._life = life = Life(self._loop, hub.interrupts, self._on_end)
        #: Frees it. None until it has ended.
        self._freeing: asyncio.Future[None] | None = None
        #: Attempts of the same connect() that were being freed when this one succeeded.
        self._attempts: list[Connection] = []
        self._channel = channel = Channel(hub, life, own, MOST_REQUESTS)
        self.queue_pair: QueuePair = channel.queue_pair
        self._transfers = Transfers(hub, channel)
        # It is one user of the hub until everything of it is free.
        hub.stay()
        self._own = dataclasses.replace(own, invalidates=self._transfers.has_windows and channel.may_invalidate)
        self._messages = Messages(channel, self._transfers)

    # ---- what it is ----

    @property
    def peer_address(self) -> tuple[str, int]:
        """The address and port of the other end."""
        return self._peer_address

    @property
    def local_address(self) -> tuple[str, int]:
        """The address and port of this end."""
        return self._local_address

    @property
    def registered_bytes(self) -> int:
        """How much memory is registered for its messages."""
        return self._channel.region.length

    @property
    def closed(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return not self._life.alive

    @property
    def close_timeout_s(self) -> float | None:
        """How long close() may take. None waits for ever.

        Raises:
            TypeError, ValueError: it was set to something that is not a time.
        """
        return self._close_timeout_s

    @close_timeout_s.setter
    def close_timeout_s(self, timeout_s: float | None) -> None:
        self._close_timeout_s = timeout(timeout_s, "close_timeout_s")

    def __repr__(self) -> str:
        return repr(self._life)

    # ---- its beginning ----

    def _connected_by(self, connector: Connector) -> None:
        self.connector = connector
        self._peer_address = connector.peer_address
        self._local_address = connector.local_address
        self._life.peer = "{} port {}".format(*self._peer_address[:2])

    async def _open(self, way: Coroutine[Any, Any, None], *, wait: bool = False) -> None:
        """Go the way into the connection. wait: if that fails, until it is free."""
        try:
            await way
        except GeneratorExit:
            self.on_dropped()
            raise
        except BaseException:
            self._life.end("it could not be made")
            if wait:
                await self._until_free()
            raise

    async def _connect(self, host: str, port: int, timeout_s: float | None) -> None:
        """The client's way into the connection."""
        connector = self.connector = self.adapter.create_connector()
        deadline = self._deadline(timeout_s)
        connecting = connector.begin_connect(self.queue_pair, (host, port), private_data=self._own.to_bytes())
        try:
            await await_or_cancel(connecting, timeout_s)
        except errors.TimeoutError as error:
            raise connector._no_answer(error, timeout_s) from None
        self._connected_by(connector)
        self._messages.protocol = Protocol(self._own, self._hello_of_server(connector))
        await await_or_cancel(connector.begin_complete_connect(), timeout(deadline - self._loop.time()))
        self._on_agreed()
        self._messages.begin()
        await self._until_begun(deadline, "accepted the connection", operation="connect", nudge_s=_NUDGE_S)

    async def _accept(self, connector: Connector, timeout_s: float | None) -> None:
        """The server's way into the connection."""
        self._connected_by(connector)
        self._messages.protocol = Protocol(self._own, Hello.from_bytes(connector.private_data))
        deadline = self._deadline(timeout_s)
        await await_or_cancel(connector.begin_accept(self.queue_pair, private_data=self._own.to_bytes()), timeout_s)
        self._on_agreed()
        # On iWARP the client sends first.
        await self._until_begun(deadline, "connected", operation="accept")
        self._messages.begin()

    async def _until_begun(self, deadline: float, did: str, *, operation: str, nudge_s: float = math.inf) -> None:
        """Wait for START. did: what the peer has done. nudge_s: how often to write nothing meanwhile."""
        life = self._life
        while life.state == "opening":
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise errors.TimeoutError(f"{life.peer} {did} and then said nothing", operation=operation)
            await life.past("opening", timeout_s=min(left_s, nudge_s))
            if life.state == "opening" and nudge_s < left_s:
                with contextlib.suppress(errors.NdpyError):
                    self._channel.write_nothing(0, SILENT)
        life.require(ALIVE)

    def _on_agreed(self) -> None:
        was_severed = self._life.state == "severed"
        self._life.on(Event.AGREED)
        if was_severed:
            self._channel.on_severed()

    def _deadline(self, timeout_s: float | None) -> float:
        return self._loop.time() + (math.inf if timeout_s is None else timeout_s)

    def _hello_of_server(self, connector: Connector) -> Hello:
        try:
            return Hello.from_bytes(connector.private_data)
        except ProtocolError:
            # A server that is closed takes its offer back, and then the private data are those of its refusal.
            if connector.state != "offered":
                connector.begin_complete_connect()
            raise

    # ---- messages ----

    async def send(self, data: Memory | Sequence[Memory]) -> None:
        """Send a message. Return when its memory may be used again.

        A short message is copied, and this returns when the copy is posted. A message that is longer than a slot of the
        peer is read by the peer from this memory, and this returns when the peer has read it: that is, after the peer
        has called receive(). Memory that is not registered is registered, and remains so in a cache for as long as it
        exists.

        While the peer takes no messages, this waits.

        When this end has learnt that the peer has closed the connection, nothing is sent any longer: this raises, and
        receive() has what the peer sent before. A short message that crosses the peer's close() is dropped there, and
        only the next call raises. A long one raises.

        If it is cancelled, the message is sent whole or not at all. A long message is withdrawn then, unless the peer
        is reading it. This ends when the peer no longer uses the memory, or the connection has ended. A peer
        that does neither within 5 s loses the connection. After Ctrl-C that is 0.4 s, if the program runs by
        asyncio.run() of Python 3.11 or later. By other means the program ends it with abort(), or with a second
        cancellation.

        Parameters:
            data: any contiguous buffer or array, a region, a slice of one, or a lease. A list or tuple of them is one
                message of all their bytes: they are copied into one piece first.
        Raises:
            LimitExceededError: it is longer than the peer's max_message_length.
            InvalidBufferError: the buffer has gaps, another order, or Python objects, or a device has its memory.
            ConnectionEndedError: the peer has closed the connection, and has not taken the message.
            ConnectionResetError, ProtocolError, ClosedError: the connection was lost, or was closed by this end.
        """
        await self._messages.send(data)

    @overload
    async def receive(self, into: None = None) -> bytearray: ...

    @overload
    async def receive(self, into: Memory | Sequence[Memory]) -> int: ...

    async def receive(self, into: Memory | Sequence[Memory] | None = None) -> bytearray | int:
        """Wait for the next message.

        If it is cancelled, the next receive() gets the message. This ends when the adapter no longer writes to the
        memory.

        Parameters:
            into: memory for the message. A long message is read into it directly. A list or tuple of memories is filled
                one after the other. None allocates memory.
        Returns: the message as a bytearray. With `into`, its length in bytes.
        Raises:
            LimitExceededError: the message is longer than `into`. It is still there for the next receive().
            AccessViolationError: `into` is read-only, or a region without LOCAL_WRITE. The message is still there.
            InvalidBufferError: `into` has gaps, another order, or Python objects, or a device has its memory. The
                message is still there.
            ConnectionEndedError: the peer has closed the connection, and all its messages have been received.
            ConnectionResetError, ProtocolError, ClosedError: the connection was lost, or was closed by this end.
        """
        return await self._messages.receive(into)

    async def __aiter__(self) -> AsyncIterator[bytearray]:
        """Yield the messages that come, until the peer closes the connection."""
        while True:
            try:
                message = await self.receive()
            except ConnectionEndedError:
                return
            yield message

    # ---- transfers ----

    async def read(self, remote: RemoteMemory, into: Memory) -> None:
        """Read memory of the peer, which its program does not notice. Return when the bytes are there.

        If it is cancelled, it ends when the adapter no longer writes to the memory.

        Parameters:
            remote: what the peer has exposed: the `remote` of its expose(), or a part of it. The peer sends it as
                remote.to_bytes().
            into: writable memory of at most remote.length bytes. All of it is filled.
        Raises:
            ElementRangeError: `into` is longer than `remote`.
            AccessViolationError: `into` is read-only, or a region without LOCAL_WRITE. Or the peer has not exposed this
                memory for reading: then the connection has ended.
            ConnectionEndedError, ConnectionResetError, ProtocolError, ClosedError: the connection has ended.
        """
        self._life.require(USABLE)
        await self._transfers.move(READ, [(remote, into)])

    async def write(self, remote: RemoteMemory, data: Memory) -> None:
        """Write to memory of the peer, which its program does not notice. Return when the adapter needs `data` no more.

        On InfiniBand and RoCE the bytes are in the peer's memory then. On iWARP they may still be on the way. A message
        that is sent afterwards arrives after them everywhere.

        If it is cancelled, it ends when the adapter no longer reads the memory.

        Parameters:
            remote: as for read().
            data: at most remote.length bytes.
        Raises: as for read().
        """
        self._life.require(USABLE)
        await self._transfers.move(WRITE, [(remote, data)])

    async def read_many(self, pairs: Iterable[tuple[RemoteMemory, Memory]]) -> None:
        """Read many pieces of the peer's memory. Return when the bytes of all are there.

        All pieces are checked before the first is read. The requests are posted together, as far as there is room for
        them. If this is cancelled, or a piece fails, it ends when the adapter no longer writes to any of the memory.

        Parameters:
            pairs: (remote, into) of each piece, as for read(). The order in which they are filled is not known.
        Raises: as for read().
        """
        self._life.require(USABLE)
        await self._transfers.move(READ, pairs)

    async def write_many(self, pairs: Iterable[tuple[RemoteMemory, Memory]]) -> None:
        """Write many pieces to the peer's memory. Return when the adapter no longer needs the data.

        The pieces are checked and posted as by read_many(). They are written in their order, and arrive as write()
        says.

        Parameters:
            pairs: (remote, data) of each piece, as for write().
        Raises: as for read().
        """
        self._life.require(USABLE)
        await self._transfers.move(WRITE, pairs)

    @contextlib.asynccontextmanager
    async def expose(
        self, memory: Memory, access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE
    ) -> AsyncIterator[RemoteMemory]:
        """Let the peer use memory while the block lasts: `async with connection.expose(buffer) as remote`.

        A message that is sent in the block can carry remote.to_bytes(). When the block ends, the peer's right has
        ended. On adapters with memory windows, only this connection's peer has the right. On others, on rxe (see
        Quirk.RXE_BINDS_AGAIN), and for memory of a device, whoever knows the token has it.

        Parameters:
            memory: a buffer, a region, a slice of one, or a lease. At least one byte.
            access: REMOTE_READ, REMOTE_WRITE or both.
        Raises:
            ConnectionEndedError, ConnectionResetError, ProtocolError, ClosedError: the connection has ended.
            Otherwise what Adapter.register() raises.
        """
        self._life.require(USABLE)
        exposure = Exposure(self._transfers)
        async with Finally(self._life, exposure.end):
            # The program may tell the peer by another way than this connection.
            yield await exposure.begin(memory, access, wait=True)

    # ---- the end ----

    async def close(self) -> None:
        """End the connection when all messages of this end have been delivered. Harmless when repeated.

        Messages of the peer that were not received are dropped. This waits until the peer has closed its end too, at
        most as long as `close_timeout_s` of connect() or serve(). If it is cancelled, the connection ends at once.

        If Ctrl-C ends the program, it waits no longer than for the delivery, and at most 0.4 s. It knows of Ctrl-C in a
        program that runs by asyncio.run() of Python 3.11 or later.

        It raises nothing if the connection was lost.
        """
        if self._life.on(Event.CLOSE):
            start(self._loop, self._take_leave)
        try:
            await self._life.past(*ALIVE)
            await self._until_free()
        except asyncio.CancelledError:
            self.abort()
            await self._until_free()
            raise

    async def _take_leave(self) -> None:
        async with Finally(self._life, self._on_left):
            try:
                await self._say_goodbye()
            except asyncio.CancelledError:
                # The loop ends all of its tasks.
                self.abort()
                await self._until_free()
                raise

    async def _say_goodbye(self) -> None:
        life, protocol = self._life, self._messages.protocol
        second = protocol is not None and protocol.peer_closed
        self._messages.close()
        await life.past("closing", until=(life.hurried,), timeout_s=life.limited(self._close_timeout_s))
        if second:
            await life.past("leaving", until=(life.hurried,), timeout_s=life.limited(_LINGER_S))
        if life.hurried.done():
            await self._messages.until_delivered()
        if life.on(Event.LEAVE) and self.connector is not None:
            with contextlib.suppress(errors.NdpyError):
                await await_or_cancel(self.connector.begin_disconnect(), life.limited(self._close_timeout_s))

    async def _on_left(self) -> None:
        self._life.end("this end was closed", kind=errors.ClosedError)

    def abort(self) -> None:
        """End the connection at once. What was not delivered is lost, and the peer gets a ConnectionResetError."""
        self.hurry()
        self._life.end("abort() was called")

    def hurry(self) -> None:
        """The program is being ended. Wait until all is delivered, but not for the peer's program, nor long. For the
        implementation.
        """
        self._life.hurry()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, whichever side ends it, and its resources are free."""
        await self._life.past(*ALIVE)
        await asyncio.shield(self._freed())

    def _on_end(self) -> None:
        if self._loop.is_closed():
            # Nobody waits any more, and this may be a finalizer, see Finally.
            self.adapter._events.call_soon(self._free_natively)
            return
        self._messages.end()
        with contextlib.suppress(errors.NdpyError):
            self.queue_pair.flush()
        self._freed()

    def _freed(self) -> asyncio.Future[None]:
        """Ends when everything is free. Ctrl-C may have come before _on_end() had begun with it."""
        if self._freeing is None:
            self._freeing = start(self._loop, self._free)
        return self._freeing

    async def _free(self) -> None:
        self._life.on(Event.FREE)
        async with Finally(self._life, self._leave_all):
            await self._transfers.end()
            await in_thread(self._free_natively)

    def _free_natively(self) -> None:
        """Close everything, in any thread. Harmless when repeated."""
        if self.connector is not None:
            self.connector.close()
        self._transfers.close_windows()
        self._channel.close()
        self._life.on(Event.FREED)

    async def _leave_all(self) -> None:
        self._transfers.fail()
        self._messages.keep()
        self._channel.leave()
        await self._hub.leave()

    async def _until_free(self) -> None:
        await finish(self._freed())
        for attempt in self._attempts:
            await attempt._until_free()

    @property
    def _has_left(self) -> bool:
        """Whether everything of it is free."""
        return self._freeing is not None and self._freeing.done()

    def _tells_of_end(self, error: BaseException | None, kind: type[BaseException] = ConnectionError) -> bool:
        """Whether an exception of this kind tells that this connection has ended, whoever ended it."""
        return isinstance(error, errors.NdpyError) and isinstance(error, kind) and self._life.peer_has_left

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close it. After an exception end it at once, so that the peer does not take it for complete."""
        if kind is GeneratorExit:
            self.on_dropped()
            return
        # The peer's end is no error, unless it is that of another connection.
        if kind is not None and not self._tells_of_end(error, ConnectionEndedError):
            self.abort()
        await self.close()

    def on_dropped(self) -> None:
        """A coroutine that used the connection was dropped, see Finally. The connection ends.
        For the implementation.
        """
        self._life.on_dropped()
