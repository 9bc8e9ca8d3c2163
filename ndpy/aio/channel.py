"""What a connection sends and receives with: a queue pair, registered memory for frames, and room for its requests.

The context of a request is the number of the connection, the kind of the request, and a number of the request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.aio.errors import ConnectionEndedError
from ndpy.aio.hub import Hub
from ndpy.aio.life import Event, Life
from ndpy.aio.protocol import HEADER_LENGTH, Hello, Protocol
from ndpy.objects.memory import RemoteMemory
from ndpy.objects.resource import Uncopied
from ndpy.vocabulary.flags import Capability, Flags, Status

if TYPE_CHECKING:
    from ndpy.objects.completion import Completion
    from ndpy.objects.completion_queue import CompletionQueue
    from ndpy.objects.queue_pair import QueuePair

# Kinds of requests, in the context of a request.
_RECEIVE, _SEND, _CONTROL, TRANSFER, BIND, _PROBE = 0 << 24, 1 << 24, 2 << 24, 3 << 24, 4 << 24, 5 << 24
_KIND, INDEX = 0xFF << 24, 0xFFFFFF
SILENT = int(Flags.SILENT_SUCCESS)
# A control frame or an offer, rounded up.
_CONTROL_SIZE = 64
# What probe() finds where nobody waits, and at how many calls it acts where a task waits for a message.
_NOTHING = (None, None, None, None)
_PATIENT_LOOKS = 5


class _SendSlots:
    """Places in registered memory from which frames are sent.

    Only some sends have a completion. It stands for all sends before it too, because they complete in order. So a
    program that exchanges messages is not woken for each one that it has sent.
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


class Channel(Uncopied):
    """Posts frames and other requests, and passes on what has completed. A hub has it as a member.

    Attributes:
        base: what the contexts of its requests have in common.
        send_slots, control_slots: for messages, and for control frames and offers.
        on_frame, on_room, on_transfer, who_waits: what its connection does. on_frame(slot, nbytes) is called for a
            frame that has come, on_room() when slots have become free, and on_transfer(number, completion) at the end
            of a request. who_waits() says who waits for a transfer, for an answer, for room and for a message.
    """

    number = 0
    queue: CompletionQueue
    queue_pair: QueuePair = None  # type: ignore[assignment]
    on_frame: Callable[[int, int], None]
    on_room: Callable[[], None]
    on_transfer: Callable[[int, Completion], None]
    who_waits: Callable[[], tuple[Any, ...]]

    def __init__(self, hub: Hub, life: Life, own: Hello, other_requests: int) -> None:
        """other_requests: how many requests without a frame there may be."""
        self._hub = hub
        self.life = life
        self._own = own
        self.may_invalidate = Capability.SEND_INVALIDATE in hub.adapter.info.capabilities
        self._waits = _NOTHING
        #: How often probe() has found them since.
        self._looks = 0
        self._probing = False
        self._receives = own.slots + Protocol.control_frames(own.offers, own.offers)
        sends, controls = own.slots, 3 + 4 * own.offers
        initiator_queue_depth = sends + controls + other_requests
        self._completions = self._receives + initiator_queue_depth
        hub.add(self, self._completions)
        self.base = self.number << 32
        size = own.slot_size
        self._control_start = (self._receives + sends) * size
        self._memory = None
        try:
            self._memory = self.region = hub.take_memory(self._control_start + controls * _CONTROL_SIZE)
            self._view = memoryview(self.region.buffer).cast("B")
            self.queue_pair = hub.adapter.create_queue_pair(
                self.queue, receive_queue_depth=self._receives, initiator_queue_depth=initiator_queue_depth
            )
            self.send_slots = _SendSlots(sends)
            self.control_slots = _SendSlots(controls)
            self._receive_slots = [self.region[place * size : (place + 1) * size] for place in range(self._receives)]
            self.queue_pair.receive_many(
                self._receive_slots, contexts=[self.base | place for place in range(self._receives)]
            )
        except BaseException:
            self.close()
            hub.remove(self, self._completions)
            raise

    def __repr__(self) -> str:
        return repr(self.life)

    # ---- its end ----

    def close(self) -> None:
        """In any thread. Harmless when repeated."""
        if self.queue_pair is not None:
            self.queue_pair.close()

    def leave(self) -> None:
        """Leave the hub. The memory goes back to it if the queue pair is closed."""
        self._hub.remove(self, self._completions)
        if self.life.state == "free" and self._memory is not None:
            region, self._memory = self._memory, None
            self._hub.give_memory_back(region)

    def fail(self, reason: str, cause: BaseException) -> None:
        self.life.end(reason, cause)

    # ---- posting ----

    def post_receive(self, slot: int) -> None:
        try:
            self.queue_pair.receive(self._receive_slots[slot], context=self.base | slot)
        except errors.NdpyError as error:
            self.life.end(str(error), error)

    def frame(self, slot: int, nbytes: int) -> memoryview:
        """The frame of this length in the memory of a receive."""
        start = slot * self._own.slot_size
        return self._view[start : start + nbytes]

    def send_message(self, protocol: Protocol, source: Any, length: int) -> None:
        slot, flags = self.send_slots.take()
        start = (self._receives + slot) * self._own.slot_size
        end = start + HEADER_LENGTH + length
        view = self._view
        view[start + HEADER_LENGTH : end] = source
        view[start : start + HEADER_LENGTH] = protocol.message(length)
        try:
            self.queue_pair.send(self.region[start:end], context=self.base | _SEND | slot, flags=flags)
        except errors.NdpyError as error:
            self.life.end(str(error), error)
            raise self.life.error() from error

    def send_control(self, frame: bytes, ended: RemoteMemory | None = None) -> None:
        """Send a control frame or an offer. ended: what it may invalidate."""
        slot, flags = self.control_slots.take()
        start = self._control_start + slot * _CONTROL_SIZE
        self._view[start : start + len(frame)] = frame
        element, context = self.region[start : start + len(frame)], self.base | _CONTROL | slot
        try:
            if ended is not None and self.may_invalidate:
                self.queue_pair.send_and_invalidate(element, ended, context=context, flags=flags)
            else:
                self.queue_pair.send(element, context=context, flags=flags)
        except errors.NdpyError as error:
            self.life.end(str(error), error)

    def write_nothing(self, context: int, flags: int = 0) -> None:
        self.queue_pair.write([], RemoteMemory(0, 0, 0), context=context, flags=flags)

    def probe(self) -> None:
        """Post an empty write if somebody has waited for the same thing since the last call.

        So a host that has died is noticed also where everything that was sent had arrived. A task that
        waits for a message does it less often, because peers may be silent for long.
        """
        waits = self.who_waits()
        if waits != self._waits or waits == _NOTHING:
            self._waits, self._looks = waits, 0
            return
        self._looks += 1
        if self._probing or (waits[:3] == _NOTHING[:3] and self._looks % _PATIENT_LOOKS):
            return
        with contextlib.suppress(errors.NdpyError):
            self.write_nothing(self.base | _PROBE)
            self._probing = True

    # ---- completions ----

    def on_completion(self, completion: Completion) -> None:
        context = completion.context
        kind, index, ok = context & _KIND, context & INDEX, completion.ok
        if not ok:
            self._on_failed(completion)
        if kind == TRANSFER:
            self.on_transfer(index, completion)
        elif not ok:
            pass
        elif kind == _RECEIVE:
            if self.life.alive:
                self.on_frame(index, completion.nbytes)
        elif kind == _SEND:
            self.send_slots.ended(index)
            self.on_room()
        elif kind == _CONTROL:
            self.control_slots.ended(index)
            self.on_room()
        else:
            self._probing = False

    def _on_failed(self, completion: Completion) -> None:
        if not self.life.alive:
            return
        if completion.status is Status.CANCELED:
            self.on_severed()
        else:
            what = f"a {completion.operation.name.lower()} ended with {completion.status.name}"
            self.life.end(what, error_of(completion))

    def on_severed(self) -> None:
        """The adapter has cancelled requests: it is over. Before both have agreed, the connector says why."""
        life, adapter = self.life, self._hub.adapter
        if life.on(Event.SEVERED):
            return
        if life.state == "leaving":
            life.end("this end was closed", kind=errors.ClosedError)
        elif adapter._defunct is not None:
            life.end(str(adapter._defunct()), adapter._defunct())
        elif self.queue_pair.failure:
            life.end(f"the adapter reports an error of the queue pair: {self.queue_pair.failure}")
        elif life.state == "opening":
            life.end("it was ended before it had begun")
        elif life.state == "peer_closed":
            life.end("the peer has closed it", kind=ConnectionEndedError)
        else:
            life.end("the peer ended it without close(), or its process has ended")


def error_of(completion: Completion) -> BaseException:
    try:
        completion.raise_for_status()
    except errors.NdpyError as error:
        return error.with_traceback(None)
    raise AssertionError(completion)
