"""The messages of a connection: those that come, those that go, and the frames that tell the peer about them.

A short message is copied into registered memory and sent. A longer one is offered: the peer reads it from the program's
memory. protocol.py has the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ndpy import errors
from ndpy.aio.channel import Channel
from ndpy.aio.errors import ConnectionEndedError, ConnectionResetError, ProtocolError
from ndpy.aio.life import ALIVE, SENDING, Event, Finally
from ndpy.aio.memory import Memory, measured, measured_room, view_of
from ndpy.aio.protocol import HEADER_LENGTH, Frame, Kind, Protocol
from ndpy.aio.tasks import Turns, Waiters
from ndpy.aio.transfers import Exposure, Transfers
from ndpy.objects.resource import Uncopied
from ndpy.vocabulary.flags import Access


@dataclasses.dataclass(eq=False, slots=True)
class _Incoming:
    """A message that has come.

    Attributes:
        place: how many messages came before it.
        slot: the number of its receive, which is posted again when the message has been taken. None for an offer.
        contents: of a message that is not an offer. A view of its slot, or a copy when the slot belongs to somebody
            else.
        withdrawn: whether the peer has asked for the answer without a reading.
    """

    place: int
    frame: Frame
    slot: int | None
    contents: memoryview | bytes = b""
    withdrawn: bool = False


def _filled(places: list[tuple[Memory, int]], length: int) -> Iterator[tuple[Memory, int, int]]:
    """Yield (memory, start, end) for each place that a message of this length fills, one after the other."""
    start = 0
    for memory, room in places:
        end = min(start + room, length)
        if start < end:
            yield memory, start, end
        start = end


class Messages(Uncopied):
    """What is sent and received.

    Attributes:
        protocol: None until the peer has told its limits.
        inbox: messages that no receive() has taken.
        reading: offers of the peer whose memory is being read.
        answers: of this end's offers. Each ends with Kind.DONE if the peer's program has the message.
        senders: those who wait for room.
    """

    protocol: Protocol | None = None

    def __init__(self, channel: Channel, transfers: Transfers) -> None:
        self._channel = channel
        channel.on_frame, channel.on_room, channel.who_waits = self._on_frame, self._on_room, self._who_waits
        self._transfers = transfers
        self.life = channel.life
        self._arrived = 0
        self.inbox: list[_Incoming] = []
        self.reading: dict[int, _Incoming] = {}
        self.answers: dict[int, asyncio.Future[Kind | None]] = {}
        self.senders = Waiters()
        self._receivers = Waiters()
        self._turns = Turns(self.life.loop)

    # ---- what goes ----

    async def send(self, data: Memory) -> None:
        self.life.require(SENDING)
        protocol = self.protocol
        assert protocol is not None
        if isinstance(data, (list, tuple)):
            data = b"".join(view_of(measured(piece)[0]) for piece in data)
        data, length = measured(data)
        if length > protocol.peer.max_message_length:
            raise errors.LimitExceededError(
                f"a message of {length} bytes is longer than the {protocol.peer.max_message_length} "
                f"that {self.life.peer} takes"
            )
        channel = self._channel
        if length > protocol.longest_frame:
            await self._offer(protocol, data)
        elif self._turns.count or not (protocol.may_send and channel.send_slots.free):
            async with self._turns:
                await self._room_for(lambda: protocol.may_send and bool(channel.send_slots.free))
                channel.send_message(protocol, view_of(data), length)
        else:
            channel.send_message(protocol, view_of(data), length)

    async def _room_for(self, there_is: Callable[[], bool]) -> None:
        """Wait for room. Raise if the connection has ended, also while others had their turns."""
        self.life.require(SENDING)
        while not there_is():
            await self.senders.wait(self.life.loop)
            self.life.require(SENDING)

    async def _offer(self, protocol: Protocol, data: Memory) -> None:
        exposure, channel = Exposure(self._transfers), self._channel
        async with Finally(self.life, exposure.end):
            async with self._turns:
                remote = await exposure.begin(data, Access.REMOTE_READ, wait=False)
                await self._room_for(lambda: protocol.may_offer and bool(channel.control_slots.free))
                number, frame = protocol.offer(remote)
                answer = self.answers[number] = self.life.loop.create_future()
                channel.send_control(frame)
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                if not answer.done():
                    protocol.add_withdrawal(number)
                    self.post_controls()
                    await self._transfers.let_go(answer)
                raise
            finally:
                self.answers.pop(number, None)
            if answer.result() is Kind.DROPPED:
                has_not = "has not taken" if protocol.peer.knows_dropped else "may not have taken"
                raise ConnectionEndedError(f"{self.life.peer} has closed the connection and {has_not} the message")
            if answer.result() is None:
                raise self.life.error()

    def post_controls(self) -> None:
        """Send the control frames that there is room for."""
        channel, protocol = self._channel, self.protocol
        while protocol is not None and channel.control_slots.free and self.life.alive:
            control = protocol.next_control()
            if control is None:
                return
            channel.send_control(*control)

    # ---- what comes ----

    async def receive(self, into: Memory | None) -> bytearray | int:
        while not self.inbox:
            if self.life.state != "open":
                raise self.life.error()
            await self._receivers.wait(self.life.loop)
        incoming = self.inbox.pop(0)
        frame = incoming.frame
        try:
            room = frame.length
            places: list[tuple[Memory, int]] = []
            if into is not None:
                places = [measured_room(piece) for piece in (into if isinstance(into, (list, tuple)) else [into])]
                room = sum(length for _, length in places)
            if frame.length > room:
                raise errors.LimitExceededError(
                    f"a message of {frame.length} bytes is longer than the {room} that receive() was given"
                )
            if incoming.slot is None:
                target = bytearray(frame.length if into is None else 0)
                await self._read(incoming, places or [(target, frame.length)])
            elif into is None:
                target = bytearray(incoming.contents)
            else:
                for piece, start, end in _filled(places, frame.length):
                    view_of(piece)[: end - start] = incoming.contents[start:end]
        except GeneratorExit:
            # See Finally.
            raise
        except BaseException:
            self._put_back(incoming)
            raise
        self._finish(incoming, taken=True)
        return target if into is None else frame.length

    async def _read(self, incoming: _Incoming, places: list[tuple[Memory, int]]) -> None:
        """Read what the peer has offered."""
        frame, life = incoming.frame, self.life
        assert frame.remote is not None
        self.reading[frame.number] = incoming
        try:
            pieces = [
                (frame.remote[start:end], piece, end - start) for piece, start, end in _filled(places, frame.length)
            ]
            await self._transfers.read_into(pieces)
        except errors.AccessViolationError:
            if life.alive:
                # It was not posted, for example because `into` is not mapped.
                raise
            # The memory is the peer's fault, and not the program's.
            error = life.error()
            raise error from error.__cause__
        except ConnectionEndedError:
            # Not the end of everything that was sent.
            raise ConnectionResetError(f"{life.peer} has gone with a long message that was not read") from None
        finally:
            del self.reading[frame.number]

    def _put_back(self, incoming: _Incoming) -> None:
        """A receive() failed or was cancelled. The next one gets the message."""
        if incoming.withdrawn or (self.protocol is not None and self.protocol.closing):
            self._finish(incoming)
        else:
            # Others that came before it may be back already.
            later = (place for place, other in enumerate(self.inbox) if other.place > incoming.place)
            self.inbox.insert(next(later, len(self.inbox)), incoming)
            self._receivers.wake()

    def _finish(self, incoming: _Incoming, *, taken: bool = False) -> None:
        """A message was taken, or nobody wants it. Tell the peer that there is room."""
        protocol = self.protocol
        if protocol is None or not self.life.alive:
            return
        has_control = protocol.take()
        if incoming.slot is None:
            protocol.add_answer(incoming.frame.number, incoming.frame.remote, taken=taken)
            has_control = True
        else:
            self._channel.post_receive(incoming.slot)
        if has_control:
            self.post_controls()

    def _on_frame(self, slot: int, nbytes: int) -> None:
        life, protocol = self.life, self.protocol
        if protocol is None:
            life.end("a message came before the connection was there")
            return
        data = self._channel.frame(slot, nbytes)
        try:
            frame = protocol.receive(data)
        except ProtocolError as error:
            life.end(str(error), error, kind=ProtocolError)
            return
        kind = frame.kind
        if kind is Kind.MESSAGE:
            self._on_incoming(_Incoming(self._arrived, frame, slot, data[HEADER_LENGTH:]))
        else:
            self._channel.post_receive(slot)
            if not life.alive:
                return
            if kind is Kind.OFFER:
                self._on_incoming(_Incoming(self._arrived, frame, None))
            elif kind is Kind.DONE or kind is Kind.DROPPED:
                answer = self.answers.get(frame.number)
                if answer is not None and not answer.done():
                    answer.set_result(kind)
            elif kind is Kind.WITHDRAW:
                self._on_withdrawn(frame.number)
            elif kind is Kind.START:
                life.on(Event.STARTED)
            elif kind is Kind.CLOSE:
                life.on(Event.PEER_CLOSED)
                self._receivers.wake_all()
        if self.senders:
            self.senders.wake()

    def _on_incoming(self, incoming: _Incoming) -> None:
        self._arrived += 1
        if self.protocol is not None and self.protocol.closing:
            # The peer may be waiting for room.
            self._finish(incoming)
        else:
            self.inbox.append(incoming)
            self._receivers.wake()

    def _on_withdrawn(self, number: int) -> None:
        for incoming in self.inbox:
            if incoming.slot is None and incoming.frame.number == number:
                self.inbox.remove(incoming)
                self._finish(incoming)
                return
        reading = self.reading.get(number)
        if reading is not None:
            reading.withdrawn = True

    def _on_room(self) -> None:
        self.post_controls()
        self.senders.wake()

    def _who_waits(self) -> tuple[Any, ...]:
        return (
            next(iter(self._transfers.under_way), None),
            next(iter(self.answers), None),
            self.senders[0] if self.senders else None,
            self._receivers[0] if self._receivers else None,
        )

    # ---- the beginning and the end ----

    def begin(self) -> None:
        """Tell the peer that both sides have agreed."""
        assert self.protocol is not None
        self.protocol.add_start()
        self.post_controls()

    def close(self) -> None:
        """This end sends and takes no more messages. Those who wait for their turn raise when it comes."""
        self._wake_all()
        protocol = self.protocol
        if protocol is not None and protocol.started:
            protocol.add_close()
            self.post_controls()
            while self.inbox:
                self._finish(self.inbox.pop(0))

    async def until_delivered(self) -> None:
        """Wait until the peer's adapter has everything that was sent: then a request that is posted after it has
        succeeded.
        """
        life, protocol = self.life, self.protocol
        while protocol is not None and protocol.has_waiting and life.alive and life.limited(None) != 0:
            slot_is_free: asyncio.Future[None] = life.loop.create_future()
            self.senders.append(slot_is_free)
            await life.past(*ALIVE, until=(slot_is_free,), timeout_s=life.limited(None))
        # Without room for it, the time is waited for.
        delivered = None
        if life.alive:
            with contextlib.suppress(errors.NdpyError):
                delivered = await self._transfers.delivered()
        await life.past(*ALIVE, until=() if delivered is None else (delivered,), timeout_s=life.limited(None))

    def end(self) -> None:
        """The connection has ended. Everybody who waits learns of it."""
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(None)
        self._wake_all()

    def _wake_all(self) -> None:
        self.senders.wake_all()
        self._receivers.wake_all()

    def keep(self) -> None:
        """What has come stays there for receive(). Its slots go to another connection."""
        for incoming in self.inbox if self.life.state == "free" else ():
            if incoming.slot is not None:
                incoming.contents = bytes(incoming.contents)
