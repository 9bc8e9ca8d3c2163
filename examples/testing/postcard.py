"""Postcards: short messages over RDMA, each with a checksum. postcard.c is the same in C.

A card is one RDMA message: the CRC-32 of the rest (4 bytes), how many cards its sender has taken so far
(4 bytes), both in network order, and up to TEXT bytes of text. The receiver of a message has to have memory posted for
it. Each end has room for ROOM cards, and the count in each card tells its reader how much of that is free again.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

import ndpy
from ndpy import aio

HEADER = struct.Struct("!II")
SIZE = 1024
TEXT = SIZE - HEADER.size
ROOM = 8


class Damaged(ValueError):
    """A card's checksum is wrong."""


class Full(RuntimeError):
    """The peer has no room for another card until it answers."""


def pack(taken: int, text: bytes) -> bytes:
    if len(text) > TEXT:
        raise ValueError(f"{len(text)} bytes of text, and a card has room for {TEXT}")
    rest = struct.pack("!I", taken) + text
    return struct.pack("!I", zlib.crc32(rest)) + rest


def unpack(card: bytes) -> tuple[int, bytes]:
    """How many cards the sender has taken, and the text."""
    if len(card) < HEADER.size or zlib.crc32(card[4:]) != struct.unpack_from("!I", card)[0]:
        raise Damaged(f"a card of {len(card)} bytes has a wrong checksum")
    return HEADER.unpack_from(card)[1], card[HEADER.size :]


class Line:
    """One end of a connection that carries postcards. connect() and accept() make one."""

    def __init__(self, adapter: ndpy.Adapter) -> None:
        self._sent = self._taken = self._peer_has_taken = 0
        with contextlib.ExitStack() as stack:
            # The last place is for the card that is being sent.
            self._memory = stack.enter_context(adapter.register(bytearray((ROOM + 1) * SIZE)))
            self._arrivals = stack.enter_context(adapter.create_completion_queue(ROOM))
            self._departures = stack.enter_context(adapter.create_completion_queue(1))
            self.queue_pair = stack.enter_context(
                adapter.create_queue_pair(
                    self._arrivals, self._departures, receive_queue_depth=ROOM, initiator_queue_depth=1
                )
            )
            for place in range(ROOM):
                self._post(place)
            self._stack = stack.pop_all()

    def _post(self, place: int) -> None:
        self.queue_pair.receive(self._memory[place * SIZE : (place + 1) * SIZE], context=place)

    def send(self, text: bytes, timeout_s: float = 10.0) -> None:
        """Send a card, and return when the peer's adapter has it. The end that has connected sends first."""
        if self._sent - self._peer_has_taken == ROOM:
            raise Full(f"{ROOM} cards are on their way, and the peer has not answered")
        card = pack(self._taken, text)
        start = ROOM * SIZE
        self._memory.buffer[start : start + len(card)] = card
        self.queue_pair.send(self._memory[start : start + len(card)])
        (completion,) = self._departures.wait(timeout_s)
        completion.raise_for_status()
        self._sent += 1

    def receive(self, timeout_s: float = 10.0) -> bytes:
        """The text of the next card."""
        (completion,) = self._arrivals.wait(timeout_s, 1)
        completion.raise_for_status()
        start = completion.context * SIZE
        card = bytes(self._memory.buffer[start : start + completion.nbytes])
        self._post(completion.context)
        self._taken += 1
        self._peer_has_taken, text = unpack(card)
        return text

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _line(adapter: ndpy.Adapter) -> Iterator[Line]:
    """A line, which is closed if the block that connects it raises."""
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(Line(adapter))
        yield line
        stack.pop_all()


def connect(adapter: ndpy.Adapter, address: tuple[str, int], timeout_s: float = 10.0) -> Line:
    """Connect to a listener at this address."""
    with _line(adapter) as line:
        line._stack.enter_context(adapter.connect(line.queue_pair, address, timeout_s=timeout_s))
        return line


def accept(adapter: ndpy.Adapter, listener: ndpy.Listener, timeout_s: float = 10.0) -> Line:
    """Take the next connection of a listener of this adapter."""
    with _line(adapter) as line:
        request = line._stack.enter_context(listener.get_request(timeout_s))
        request.accept(line.queue_pair, timeout_s=timeout_s)
        return line


def take_number(
    queue_pair: ndpy.QueuePair,
    queue: ndpy.CompletionQueue,
    result: ndpy.MemoryRegion,
    counter: ndpy.RemoteMemory,
    timeout_s: float = 10.0,
) -> int:
    """A number that nobody else gets, from a counter in the peer's memory.
    It needs an adapter with atomic operations.
    """
    queue_pair.fetch_and_add(result[:8], counter, 1)
    (completion,) = queue.wait(timeout_s)
    completion.raise_for_status()
    return int.from_bytes(result.buffer[:8], "little")


class Office:
    """A post office for asyncio: ndpy.aio.serve(address, office.serve). It keeps cards until they are asked for."""

    def __init__(self) -> None:
        self._boxes: dict[bytes, list[bytes]] = {}

    async def serve(self, connection: aio.Connection) -> None:
        """b"NAME TEXT" leaves a card for NAME. b"NAME" is answered with the oldest card for NAME, or with nothing."""
        async for line in connection:
            name, leaves, text = bytes(line).partition(b" ")
            box = self._boxes.setdefault(name, [])
            if leaves:
                box.append(text)
            else:
                await connection.send(box.pop(0) if box else b"")
