"""Connections for programs: messages of any length, and transfers to and from memory of the peer.

All of a connection runs in the thread of its event loop. AtEnd says what happens if the loop is closed before the connection.

A short message is copied into registered memory and sent. A longer one is offered: the peer reads it from the program's memory.
protocol.py has the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ndpy import errors
from ndpy.aio.errors import ConnectionEndedError, ConnectionResetError, ProtocolError
from ndpy.aio.hub import Hub, finish, in_thread, start
from ndpy.aio.memory import Memory, length_of, room_of, view_of
from ndpy.aio.protocol import HEADER_LENGTH, Frame, Hello, Kind, Protocol
from ndpy.aio.transfers import (
    CONTROL,
    INDEX,
    KIND,
    MOST_REQUESTS,
    PROBE,
    RECEIVE,
    SEND,
    SILENT,
    TRANSFER,
    AtEnd,
    Exposure,
    Transfers,
)
from ndpy.objects.memory import MemoryRegion, RemoteMemory
from ndpy.objects.pending import await_or_cancel
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.flags import Access, Capability, Status

if TYPE_CHECKING:
    from ndpy.objects.completion import Completion
    from ndpy.objects.completion_queue import CompletionQueue
    from ndpy.objects.connection import Connector
    from ndpy.objects.queue_pair import QueuePair

# A control frame or an offer, rounded up.
_CONTROL_SIZE = 64
# The client repeats its first step so often, because siw may leave a server's first frame in its socket until more come.
_NUDGE_S = 0.2
# What _probe_if_stuck() finds where nobody waits, and at how many calls a connection is probed on which a task waits for a message.
_NOTHING = (None, None, None, None)
_PATIENT_LOOKS = 5
# How long the end that closes second waits for the first one to disconnect.
_LINGER_S = 2.0


class _Incoming:
    """A message that has come.

    Attributes:
        place: how many messages came before it.
        slot: where it is, in a receive that is posted again when it has been taken. Of an offer, None.
        contents: of a message whose connection has ended. Its slot is somebody else's then.
        withdrawn: whether the peer does not want it to be read any more.
    """

    __slots__ = ("contents", "frame", "place", "slot", "withdrawn")

    def __init__(self, place: int, frame: Frame, slot: int | None) -> None:
        self.place = place
        self.frame = frame
        self.slot = slot
        self.contents: bytes | None = None
        self.withdrawn = False


class _SendSlots:
    """Places in registered memory from which frames are sent.

    Only some sends have a completion. It stands for all sends before it too, because they complete in order. So a program that
    exchanges messages is not woken for each one that it has sent.
    """

    def __init__(self, count: int) -> None:
        # Lists, because an empty deque takes 0.7 KiB and these are short.
        self.free = list(range(count))
        self._posted: list[int] = []
        self._silent = 0
        self._most_silent = count // 2

    def take(self) -> tuple[int, int]:
        """The next free slot, and the flags of its send."""
        slot = self.free.pop(0)
        self._posted.append(slot)
        if self._silent < self._most_silent:
            self._silent += 1
            return slot, SILENT
        self._silent = 0
        return slot, 0

    def ended(self, slot: int) -> None:
        """The send from this slot has completed."""
        while True:
            first = self._posted.pop(0)
            self.free.append(first)
            if first == slot:
                return


class _Line:
    """Those who send take turns, in the order of their calls. A lock that is released is free until the next one runs, so they count."""

    __slots__ = ("_loop", "_turn", "count")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()
        self.count = 0

    async def __aenter__(self) -> None:
        self.count += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.count -= 1
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.count -= 1
        if kind is GeneratorExit:
            # See AtEnd. After the loop's end nobody can be woken.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._turn.release)
        else:
            self._turn.release()


class Connection(Transfers):
    """One end of a connection, made by connect() and serve().

    Messages arrive whole, once, and in the order of the calls of send(). Use a connection in the loop's thread only. Many tasks
    may use it at once.

    Attributes:
        queue_pair, connector, adapter: what it is made of, for what it does not offer itself. Do not post requests there.
    """

    _number = 0

    connector: Connector | None = None
    queue_pair: QueuePair = None  # type: ignore[assignment]
    _memory: MemoryRegion | None = None

    def __init__(self, hub: Hub, own: Hello, close_timeout_s: float | None) -> None:
        self._hub = hub
        self._close_timeout_s = close_timeout_s
        self.adapter = hub.adapter
        capabilities = hub.adapter.info.capabilities
        self._may_invalidate = Capability.SEND_INVALIDATE in capabilities
        self._loop = asyncio.get_running_loop()
        super().__init__()
        self._own = own = dataclasses.replace(own, invalidates=self._has_windows and self._may_invalidate)
        self._protocol: Protocol | None = None
        self._peer = "the peer"
        self._failure: BaseException | None = None
        self._cause: BaseException | None = None
        self._closing: asyncio.Future[None] | None = None
        #: Whether CLOSE has been sent or waits for a slot. From then on this end drops the messages that come.
        self._drops = False
        #: Whether close() has begun to disconnect.
        self._leaving = False
        self._freeing: asyncio.Future[None] | None = None
        #: Attempts of the same connect() that were being freed when this one succeeded.
        self._attempts: list[Connection] = []
        self._is_free = False
        #: Whether both sides have agreed, and a request that was cancelled before.
        self._agreed = False
        self._cancelled_early: Completion | None = None
        #: They end when the peer's START or its CLOSE comes, or when the connection ends.
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._peer_closed: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        #: Who waits for room, for a message, or for a slot, the longest waiting first.
        self._senders: list[asyncio.Future[None]] = []
        self._receivers: list[asyncio.Future[None]] = []
        self._line = _Line(self._loop)
        self._inbox: list[_Incoming] = []
        self._arrived = 0
        #: Offers of the peer whose memory is being read.
        self._reading: dict[int, _Incoming] = {}
        #: Of this end's offers. Each ends with Kind.DONE if the peer's program has the message.
        self._answers: dict[int, asyncio.Future[Kind | None]] = {}
        #: What the tasks waited for when _probe_if_stuck() looked, and whether a probe is on its way.
        self._waits: tuple[Any, ...] = _NOTHING
        #: How often it has looked since.
        self._looks = 0
        self._probing = False
        #: Control frames that wait for a slot. Each is made when it is posted, because it carries the newest numbers. It is empty
        #: if it is not needed any more.
        self._waiting_controls: list[tuple[Callable[[], bytes], RemoteMemory | None]] = []

        slots, offers = own.slots, own.offers
        self._receives = slots + Protocol.control_frames(offers, offers)
        self._sends = slots
        self._controls = 3 + 4 * offers
        initiator_queue_depth = self._sends + self._controls + MOST_REQUESTS
        completions = self._receives + initiator_queue_depth
        self._completions = completions
        self._queue: CompletionQueue = hub.add(self, completions)
        self._base = self._number << 32
        try:
            size = own.slot_size
            self._memory = region = hub.take_memory(
                (self._receives + self._sends) * size + self._controls * _CONTROL_SIZE
            )
            self._region = region
            self._view = memoryview(region.buffer).cast("B")
            self._control_start = (self._receives + self._sends) * size
            self.queue_pair = self.adapter.create_queue_pair(
                self._queue,
                receive_queue_depth=self._receives,
                initiator_queue_depth=initiator_queue_depth,
            )
            self._send_slots = _SendSlots(self._sends)
            self._control_slots = _SendSlots(self._controls)
            self._receive_slots = [region[place * size : (place + 1) * size] for place in range(self._receives)]
            self.queue_pair.receive_many(
                self._receive_slots, contexts=[self._base | place for place in range(self._receives)]
            )
        except BaseException:
            self._free_natively()
            hub.remove(self, self._queue, completions)
            raise

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
        return self._region.length

    @property
    def closed(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._failure is not None

    def __repr__(self) -> str:
        state = f"ended: {self._failure}" if self._failure is not None else "open"
        return f"<Connection to {self._peer} {state}>"

    def _uses(self, queue: CompletionQueue) -> bool:
        return self._queue is queue

    @property
    def close_timeout_s(self) -> float | None:
        return self._close_timeout_s

    @close_timeout_s.setter
    def close_timeout_s(self, timeout_s: float | None) -> None:
        self._close_timeout_s = timeout(timeout_s, "close_timeout_s")

    # ---- its beginning ----

    def _connected_by(self, connector: Connector) -> None:
        self.connector = connector
        self._peer_address = connector.peer_address
        self._local_address = connector.local_address
        self._peer = "{} port {}".format(*self._peer_address[:2])

    async def _connect(self, host: str, port: int, timeout_s: float | None) -> None:
        """The client's way into the connection."""
        connector = self.connector = self.adapter.create_connector()
        deadline = self._deadline(timeout_s)
        connecting = connector.begin_connect(self.queue_pair, (host, port), private_data=self._own.to_bytes())
        try:
            await await_or_cancel(connecting, timeout_s)
        except errors.TimeoutError as error:
            raise connector._native_no_answer(error, timeout_s) from None
        self._connected_by(connector)
        self._protocol = Protocol(self._own, self._hello_of_server(connector))
        await await_or_cancel(connector.begin_complete_connect(), self._left_s(deadline))
        self._on_agreed()
        self._send_control(self._protocol.start)
        while not self._started.done():
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise errors.TimeoutError(
                    f"{self._peer} accepted the connection and then said nothing", operation="connect"
                )
            await asyncio.wait((self._started,), timeout=min(left_s, _NUDGE_S))
            if not self._started.done():
                with contextlib.suppress(errors.NdpyError):
                    self._write_nothing(0, SILENT)
        self._require_started()

    def _on_agreed(self) -> None:
        """Both sides have agreed. Until now the connector said why it could not be: siw cancels the receives before that."""
        self._agreed = True
        if self._cancelled_early is not None:
            self._on_failed_completion(self._cancelled_early)

    def _deadline(self, timeout_s: float | None) -> float:
        return self._loop.time() + (math.inf if timeout_s is None else timeout_s)

    def _left_s(self, deadline: float) -> float | None:
        return timeout(deadline - self._loop.time())

    def _hello_of_server(self, connector: Connector) -> Hello:
        try:
            return Hello.from_bytes(connector.private_data)
        except ProtocolError:
            # A server that is closed takes its offer back, and then the private data are those of its refusal.
            if connector.state != "offered":
                connector.begin_complete_connect()
            raise

    async def _accept(self, connector: Connector, timeout_s: float | None) -> None:
        """The server's way into the connection."""
        self._connected_by(connector)
        self._protocol = Protocol(self._own, Hello.from_bytes(connector.private_data))
        deadline = self._deadline(timeout_s)
        await await_or_cancel(connector.begin_accept(self.queue_pair, private_data=self._own.to_bytes()), timeout_s)
        self._on_agreed()
        # On iWARP the client sends first.
        await asyncio.wait((self._started,), timeout=self._left_s(deadline))
        if not self._started.done():
            raise errors.TimeoutError(f"{self._peer} connected and then said nothing", operation="accept")
        self._require_started()
        self._send_control(self._protocol.start)

    # ---- messages ----

    async def send(self, data: Memory) -> None:
        """Send a message. Return when its memory may be used again.

        A short message is copied, and this returns when the copy is posted. A message that is longer than a slot of the peer is
        read by the peer from this memory, and this returns when the peer has read it: that is, after the peer has called
        receive(). Memory that is not registered is registered, and remains so in a cache for as long as it exists.

        While the peer takes no messages, this waits.

        When this end has learnt that the peer has closed the connection, nothing is sent any more: this raises, and receive() has
        what the peer sent before. A short message that crosses the peer's close() is dropped there, and only the next call
        raises. A long one raises.

        If it is cancelled, the message is sent whole or not at all. A long message is withdrawn then, unless the peer is
        reading it. This ends when the peer does not use the memory any more, or the connection has ended. A peer that does
        neither within 5 s loses the connection. After Ctrl-C that is 0.4 s, if the program runs by asyncio.run() of Python 3.11
        or later. By other means the program ends it with abort(), or with a second cancellation.

        Parameters:
            data: any contiguous buffer, a region, a slice of one, or a lease.
        Raises:
            LimitExceededError: it is longer than the peer's max_message_length.
            InvalidBufferError: the buffer has gaps, another order, or Python objects.
            ConnectionEndedError: the peer has closed the connection, and has not taken the message.
            ConnectionResetError, ProtocolError, ClosedError: the connection was lost, or was closed by this end.
        """
        protocol = self._require_open(sending=True)
        length = length_of(data)
        if length > protocol.peer.max_message_length:
            raise errors.LimitExceededError(
                f"a message of {length} bytes is longer than the {protocol.peer.max_message_length} that {self._peer} takes"
            )
        if length > protocol.longest_frame:
            await self._send_offer(protocol, data)
        elif self._line.count or not (protocol.may_send and self._send_slots.free):
            async with self._line:
                await self._room_for(lambda: protocol.may_send and bool(self._send_slots.free))
                self._send_message(protocol, data, length)
        else:
            self._send_message(protocol, data, length)

    async def _room_for(self, there_is: Callable[[], bool]) -> None:
        """Wait for room. Raise if the connection has ended, also while others were in line before."""
        self._require_open(sending=True)
        while not there_is():
            await self._wait_in(self._senders)
            self._require_open(sending=True)

    def _send_message(self, protocol: Protocol, data: Memory, length: int) -> None:
        source = view_of(data)
        slot, flags = self._send_slots.take()
        start = (self._receives + slot) * self._own.slot_size
        end = start + HEADER_LENGTH + length
        view = self._view
        view[start + HEADER_LENGTH : end] = source
        view[start : start + HEADER_LENGTH] = protocol.message(length)
        try:
            self.queue_pair.send(self._region[start:end], context=self._base | SEND | slot, flags=flags)
        except errors.NdpyError as error:
            self._lose(str(error), error)
            raise self._end_error() from error

    async def _send_offer(self, protocol: Protocol, data: Memory) -> None:
        exposure = Exposure(self)
        async with AtEnd(self, exposure.end):
            async with self._line:
                remote = await exposure.begin(data, Access.REMOTE_READ, wait=False)
                await self._room_for(lambda: protocol.may_offer and bool(self._control_slots.free))
                number, frame = protocol.offer(remote)
                answer = self._answers[number] = self._loop.create_future()
                self._send_control(lambda: frame)
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                if not answer.done():
                    self._send_control(lambda: protocol.withdraw(number) if number in protocol.offered else b"")
                    await self._let_go(answer)
                raise
            finally:
                self._answers.pop(number, None)
            if answer.result() is Kind.DROPPED:
                has_not = "has not taken" if protocol.peer.knows_dropped else "may not have taken"
                raise ConnectionEndedError(f"{self._peer} has closed the connection and {has_not} the message")
            if answer.result() is None:
                raise self._end_error()

    @overload
    async def receive(self, into: None = None) -> bytearray: ...

    @overload
    async def receive(self, into: Memory) -> int: ...

    async def receive(self, into: Memory | None = None) -> bytearray | int:
        """Wait for the next message.

        If it is cancelled, the next receive() gets the message. This ends when the adapter does not write to the memory any
        more.

        Parameters:
            into: memory for the message. A long message is read into it directly. None allocates memory.
        Returns: the message as a bytearray. With `into`, its length in bytes.
        Raises:
            LimitExceededError: the message is longer than `into`. It is still there for the next receive().
            AccessViolationError: `into` is read-only, or a region without LOCAL_WRITE. The message is still there.
            InvalidBufferError: `into` has gaps, another order, or Python objects. The message is still there.
            ConnectionEndedError: the peer has closed the connection, and all its messages have been received.
            ConnectionResetError, ProtocolError, ClosedError: the connection was lost, or was closed by this end.
        """
        while not self._inbox:
            if self._failure is not None or self._peer_closed.done() or self._closing is not None:
                raise self._end_error()
            await self._wait_in(self._receivers)
        incoming = self._inbox.pop(0)
        frame = incoming.frame
        try:
            room = frame.length if into is None else room_of(into)
            if frame.length > room:
                raise errors.LimitExceededError(
                    f"a message of {frame.length} bytes is longer than the {room} that receive() was given"
                )
            if incoming.slot is None:
                assert frame.remote is not None
                target = bytearray(frame.length) if into is None else into
                self._reading[frame.number] = incoming
                try:
                    await self._move(self.queue_pair.read, frame.remote, target, frame.length)
                except errors.AccessViolationError:
                    if self._failure is None:
                        # It was not posted, for example because `into` is not mapped.
                        raise
                    # The memory is the peer's fault, and not the program's.
                    raise self._end_error() from self._cause
                except ConnectionEndedError:
                    # Not the end of everything that was sent.
                    raise ConnectionResetError(f"{self._peer} has gone with a long message that was not read") from None
                finally:
                    del self._reading[frame.number]
            else:
                source = self._contents(incoming)
                if into is None:
                    target = bytearray(source)
                else:
                    target = into
                    view_of(into)[: frame.length] = source
        except GeneratorExit:
            # See AtEnd.
            raise
        except BaseException:
            self._put_back(incoming)
            raise
        self._finish_incoming(incoming, taken=True)
        return frame.length if into is not None else target

    def _contents(self, incoming: _Incoming) -> Any:
        if incoming.contents is not None:
            return incoming.contents
        assert incoming.slot is not None
        start = incoming.slot * self._own.slot_size + HEADER_LENGTH
        return self._view[start : start + incoming.frame.length]

    def _put_back(self, incoming: _Incoming) -> None:
        """A receive() failed or was cancelled. The next one gets the message."""
        if incoming.withdrawn or self._drops:
            self._finish_incoming(incoming)
        else:
            # Others that came before it may be back already.
            later = (place for place, other in enumerate(self._inbox) if other.place > incoming.place)
            self._inbox.insert(next(later, len(self._inbox)), incoming)
            self._wake(self._receivers)

    def _finish_incoming(self, incoming: _Incoming, *, taken: bool = False) -> None:
        """A message was taken, or nobody wants it. Tell the peer that there is room."""
        protocol = self._protocol
        if self._failure is not None or protocol is None:
            return
        protocol.take()
        if incoming.slot is None:
            number = incoming.frame.number
            self._send_control(
                lambda: protocol.answer(number, taken=taken),
                incoming.frame.remote if protocol.peer.invalidates else None,
            )
        else:
            self._post_receive(incoming.slot)
        if protocol.grant_is_due and not self._waiting_controls:
            self._send_control(protocol.grant)

    async def __aiter__(self) -> AsyncIterator[bytearray]:
        """Yield the messages that come, until the peer closes the connection."""
        while True:
            try:
                message = await self.receive()
            except ConnectionEndedError:
                return
            yield message

    # ---- frames ----

    def _send_control(self, make: Callable[[], bytes], ended: RemoteMemory | None = None) -> None:
        """Send a control frame or an offer. It waits for a slot if there is none. ended: what it may invalidate."""
        if self._failure is None:
            self._waiting_controls.append((make, ended))
            self._post_controls()

    def _post_controls(self) -> None:
        while self._control_slots.free and self._waiting_controls:
            make, ended = self._waiting_controls.pop(0)
            frame = make()
            if not frame:
                # While it waited it stood for a GRANT, because any frame has the numbers.
                if self._waiting_controls or self._protocol is None or not self._protocol.grant_is_due:
                    continue
                frame = self._protocol.grant()
            slot, flags = self._control_slots.take()
            start = self._control_start + slot * _CONTROL_SIZE
            self._view[start : start + len(frame)] = frame
            element, context = self._region[start : start + len(frame)], self._base | CONTROL | slot
            try:
                if ended is not None and self._may_invalidate:
                    self.queue_pair.send_and_invalidate(element, ended, context=context, flags=flags)
                else:
                    self.queue_pair.send(element, context=context, flags=flags)
            except errors.NdpyError as error:
                self._lose(str(error), error)

    def _post_receive(self, slot: int) -> None:
        try:
            self.queue_pair.receive(self._receive_slots[slot], context=self._base | slot)
        except errors.NdpyError as error:
            self._lose(str(error), error)

    def _on_completion(self, completion: Completion) -> None:
        context = completion.context
        kind, index = context & KIND, context & INDEX
        if kind == TRANSFER:
            if not completion.ok:
                self._on_failed_completion(completion)
            self._on_transfer(index, None if completion.ok else self._why(completion))
        elif not completion.ok:
            self._on_failed_completion(completion)
        elif kind == RECEIVE:
            if self._failure is None:
                self._on_frame(index, completion.nbytes)
        elif kind == SEND:
            self._send_slots.ended(index)
            self._wake(self._senders)
        elif kind == CONTROL:
            self._control_slots.ended(index)
            self._post_controls()
            self._wake(self._senders)
        else:
            self._probing = False

    def _probe_if_stuck(self) -> None:
        """Called at intervals. Post an empty write if somebody has waited for the same thing since the last call.

        So a host that has died is noticed also where everything that was sent had arrived. Who waits for a message does it less
        often, because peers may be silent for long.
        """
        waits = (
            next(iter(self._transfers), None),
            next(iter(self._answers), None),
            self._senders[0] if self._senders else None,
            self._receivers[0] if self._receivers else None,
        )
        if waits != self._waits or waits == _NOTHING:
            self._waits, self._looks = waits, 0
            return
        self._looks += 1
        if self._probing or (waits[:3] == _NOTHING[:3] and self._looks % _PATIENT_LOOKS):
            return
        with contextlib.suppress(errors.NdpyError):
            self._write_nothing(self._base | PROBE)
            self._probing = True

    def _write_nothing(self, context: int, flags: int = 0) -> None:
        self.queue_pair.write([], RemoteMemory(0, 0, 0), context=context, flags=flags)

    def _on_failed_completion(self, completion: Completion) -> None:
        if self._failure is not None:
            return
        if completion.status is not Status.CANCELED:
            self._lose(
                f"a {completion.operation.name.lower()} ended with {completion.status.name}", _error_of(completion)
            )
        elif not self._agreed:
            self._cancelled_early = completion
        elif self._leaving:
            self._lose("this end was closed", kind=errors.ClosedError)
        elif self.adapter._defunct is not None:
            self._lose(str(self.adapter._defunct()), self.adapter._defunct())
        elif self.queue_pair.failure:
            self._lose(f"the adapter reports an error of the queue pair: {self.queue_pair.failure}")
        elif self._protocol is not None and not self._protocol.started:
            self._lose("it was ended before it had begun")
        elif self._peer_closed.done():
            if self._closing is not None:
                self._lose("this end was closed", kind=errors.ClosedError)
            else:
                self._lose("the peer has closed it", kind=ConnectionEndedError)
        else:
            self._lose("the peer ended it without close(), or its process has ended")

    def _why(self, completion: Completion) -> BaseException:
        """What a task raises for a failed transfer."""
        if completion.status is Status.ACCESS_VIOLATION:
            return _error_of(completion)
        return self._end_error()

    def _on_frame(self, slot: int, nbytes: int) -> None:
        start = slot * self._own.slot_size
        protocol = self._protocol
        if protocol is None:
            self._lose("a message came before the connection was there")
            return
        try:
            frame = protocol.receive(self._view[start : start + nbytes])
        except ProtocolError as error:
            self._lose(str(error), error, kind=ProtocolError)
            return
        kind = frame.kind
        if kind is Kind.MESSAGE:
            self._on_incoming(frame, slot)
        else:
            self._post_receive(slot)
            if self._failure is not None:
                return
            if kind is Kind.OFFER:
                self._on_incoming(frame, None)
            elif kind is Kind.DONE or kind is Kind.DROPPED:
                answer = self._answers.get(frame.number)
                if answer is not None and not answer.done():
                    answer.set_result(kind)
            elif kind is Kind.WITHDRAW:
                self._on_withdrawn(frame.number)
            elif kind is Kind.START:
                self._started.set_result(None)
            elif kind is Kind.CLOSE:
                self._peer_closed.set_result(None)
                self._wake_all(self._receivers)
        if self._senders:
            self._wake(self._senders)

    def _on_incoming(self, frame: Frame, slot: int | None) -> None:
        incoming = _Incoming(self._arrived, frame, slot)
        self._arrived += 1
        if self._drops:
            # The peer may be waiting for room.
            self._finish_incoming(incoming)
        else:
            self._inbox.append(incoming)
            self._wake(self._receivers)

    def _on_withdrawn(self, number: int) -> None:
        for incoming in self._inbox:
            if incoming.slot is None and incoming.frame.number == number:
                self._inbox.remove(incoming)
                self._finish_incoming(incoming)
                return
        reading = self._reading.get(number)
        if reading is not None:
            reading.withdrawn = True

    # ---- waiting ----

    async def _wait_in(self, line: list[asyncio.Future[None]]) -> None:
        """Wait to be woken. One who is woken and cancelled at once wakes the next."""
        future = self._loop.create_future()
        line.append(future)
        try:
            await future
        except BaseException as error:
            # Who wakes one takes it out of the line.
            if future in line:
                line.remove(future)
            elif isinstance(error, asyncio.CancelledError) and future.done() and not future.cancelled():
                self._wake(line)
            raise

    @staticmethod
    def _wake(line: list[asyncio.Future[None]]) -> None:
        while line:
            future = line.pop(0)
            if not future.done():
                future.set_result(None)
                return

    @staticmethod
    def _wake_all(line: list[asyncio.Future[None]]) -> None:
        while line:
            future = line.pop(0)
            if not future.done():
                future.set_result(None)

    def _require_started(self) -> None:
        if self._failure is not None:
            raise self._end_error()

    def _require_open(self, *, closing: bool = False, sending: bool = False) -> Protocol:
        """Raise unless the connection can be used.

        closing: a transfer may still be posted during close(). sending: the peer has to take messages.
        """
        if self._failure is not None or (self._closing is not None and not closing):
            raise self._end_error()
        if sending and self._peer_closed.done():
            raise self._end_error()
        assert self._protocol is not None
        return self._protocol

    def _end_error(self) -> BaseException:
        """A new exception that says why the connection has ended."""
        failure = self._failure
        if failure is not None:
            error = type(failure)(*failure.args)
            error.__cause__ = self._cause
            return error
        if self._closing is not None:
            return errors.ClosedError(f"the connection to {self._peer} was closed")
        assert self._peer_closed.done()
        return ConnectionEndedError(f"{self._peer} has closed the connection")

    def _is_own_end(self, error: BaseException | None) -> bool:
        """Whether an exception tells that the peer has closed this connection, and not another one."""
        return isinstance(error, ConnectionEndedError) and self._peer_closed.done()

    def _tells_of_end(self, error: BaseException) -> bool:
        """Whether an exception tells that this connection has ended, whoever ended it."""
        is_ours = isinstance(error, errors.NdpyError) and isinstance(error, ConnectionError)
        return is_ours and (self._failure is not None or self._peer_closed.done())

    # ---- the end ----

    @property
    def _has_left(self) -> bool:
        """Whether everything of it is free."""
        return self._freeing is not None and self._freeing.done()

    async def close(self) -> None:
        """End the connection when all messages of this end have been delivered. Harmless when repeated.

        Messages of the peer that were not received are dropped. This waits until the peer has closed its end too, at most as
        long as `close_timeout_s` of connect() or serve(). If it is cancelled, the connection ends at once.

        If Ctrl-C ends the program, it waits no longer than for the delivery, and at most 0.4 s. It knows of Ctrl-C in a program
        that runs by asyncio.run() of Python 3.11 or later.

        It raises nothing if the connection was lost.
        """
        if self._closing is None:
            self._closing = start(self._loop, self._close)
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self.abort()
            await finish(self._closing)
            raise

    async def _close(self) -> None:
        try:
            await self._take_leave()
        except asyncio.CancelledError:
            # The loop ends all of its tasks.
            self.abort()
            await self._until_free()
            raise
        await self._until_free()

    async def _until_free(self) -> None:
        if self._freeing is None:
            # Ctrl-C came in the middle of _lose().
            self._freeing = start(self._loop, self._free)
        await finish(self._freeing)
        for attempt in self._attempts:
            await attempt._until_free()

    async def _take_leave(self) -> None:
        self._wake_all(self._receivers)
        self._wake_all(self._senders)
        protocol = self._protocol
        if self._failure is None and protocol is not None and protocol.started:
            # Those in line raise when their turn comes.
            second = protocol.peer_closed
            self._drops = True
            self._send_control(protocol.close)
            while self._inbox:
                self._finish_incoming(self._inbox.pop(0))
            await self._until(self._peer_closed, self._hurried, timeout_s=self._close_timeout_s)
            if second:
                await self._until(self._hurried, timeout_s=_LINGER_S)
            if self._hurried.done():
                await self._until_delivered()
            if self._failure is None and self.connector is not None:
                self._leaving = True
                with contextlib.suppress(errors.NdpyError):
                    await await_or_cancel(self.connector.begin_disconnect(), self._limited(self._close_timeout_s))
        self._lose("this end was closed", kind=errors.ClosedError)

    async def _until(self, *futures: asyncio.Future[Any], timeout_s: float | None) -> None:
        """Wait until one of these has ended, or the connection."""
        timeout_s = self._limited(timeout_s)
        await asyncio.wait((*futures, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _until_delivered(self) -> None:
        """Wait until the peer's adapter has all that was sent: a request that is posted after that has succeeded then."""
        while self._waiting_controls and self._failure is None and self._limited(None) != 0:
            slot_is_free: asyncio.Future[None] = self._loop.create_future()
            self._senders.append(slot_is_free)
            await self._until(slot_is_free, timeout_s=None)
        # Without room for it, the time is waited for.
        delivered: asyncio.Future[Any] = self._ended
        if self._failure is None and not self._transfer_room.locked():
            with contextlib.suppress(errors.NdpyError):
                delivered = await self._begin(self._write_nothing)
        await self._until(delivered, timeout_s=None)

    def abort(self) -> None:
        """End the connection at once. What was not delivered is lost, and the peer gets a ConnectionResetError."""
        self.hurry()
        self._lose("abort() was called")

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, whichever side ends it, and its resources are free."""
        await asyncio.shield(self._ended)
        assert self._freeing is not None
        await asyncio.shield(self._freeing)

    def _lose(
        self, reason: str, cause: BaseException | None = None, *, kind: type[errors.NdpyError] = ConnectionResetError
    ) -> None:
        """The connection has ended. Everybody who waits learns why."""
        is_orphan = self._loop.is_closed()
        if is_orphan:
            # Nobody waits any more, and this may be a finalizer, see AtEnd.
            self.adapter._events.call_soon(self._free_natively)
        if self._failure is not None:
            return
        text = reason if kind is ProtocolError else f"the connection to {self._peer} has ended: {reason}"
        self._failure = kind(text)
        self._cause = None if kind is ProtocolError else cause
        self._waiting_controls.clear()
        if is_orphan:
            return
        waiting: list[asyncio.Future[Any]] = [self._started, self._peer_closed, self._ended, *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._wake_all(self._senders)
        self._wake_all(self._receivers)
        with contextlib.suppress(errors.NdpyError):
            self.queue_pair.flush()
        self._freeing = start(self._loop, self._free)

    async def _free(self) -> None:
        async with AtEnd(self, self._leave_all):
            await self._end_transfers()
            await in_thread(self._free_natively)

    async def _leave_all(self) -> None:
        self._fail_transfers()
        self._hub.remove(self, self._queue, self._completions)
        if self._is_free and self._memory is not None:
            for incoming in self._inbox:
                if incoming.slot is not None:
                    incoming.contents = bytes(self._contents(incoming))
            region, self._memory = self._memory, None
            self._hub.give_memory_back(region)
        await self._hub.leave()

    def _free_natively(self) -> None:
        """Close everything, in any thread. Harmless when repeated."""
        if self.connector is not None:
            self.connector.close()
        self._close_windows()
        if self.queue_pair is not None:
            self.queue_pair.close()
        self._is_free = True

    def _abandon(self) -> None:
        """The connection could not be made. It is being freed then."""
        self._lose("it could not be made")

    async def _give_up(self) -> None:
        """The connection could not be made. It is free then."""
        self._abandon()
        await self._until_free()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close it. After an exception end it at once, so that the peer does not take it for complete."""
        if kind is GeneratorExit:
            self.on_dropped()
            return
        if kind is not None and not self._is_own_end(error):
            self.abort()
        await self.close()


def _error_of(completion: Completion) -> BaseException:
    try:
        completion.raise_for_status()
    except errors.NdpyError as error:
        return error.with_traceback(None)
    raise AssertionError(completion)
