"""A peer of ndpy.aio that is made of plain queue pairs. It speaks the protocol as it likes: docs/aio_protocol.md has
the rules.

    python tests/kit/aio_peer.py ADAPTER HOST PORT STEP

connects to a server, goes as far as STEP of STEPS, says so, and does nothing more until it is killed.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from pathlib import Path

# The Windows Python of the rig does not look around a program.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ndpy
from kit.helpers import DEADLINE_S, Keeper, create_end, memory
from ndpy import Access, RemoteMemory

START, MESSAGE, OFFER, DONE, WITHDRAW, GRANT, CLOSE, DROPPED = range(1, 9)
# A bit of the private data.
KNOWS_DROPPED = 2
SLOTS, OFFERS, SLOT = 4, 2, 1024
_RECEIVES = 32
_SENDS = 64


def hello(version=1, slots=SLOTS, offers=OFFERS, slot_size=SLOT, longest=1 << 20, magic=b"ndpa", bits=0) -> bytes:
    return struct.pack("!4sBBHHxxIQ", magic, version, bits, slots, offers, slot_size, longest)


def frame(kind, number=0, granted=SLOTS, seen=SLOTS, length=0, body=b"") -> bytes:
    return struct.pack("!B3xIIIQ", kind, number, granted, seen, length) + body


def message(body=b"", **numbers) -> bytes:
    return frame(MESSAGE, length=len(body), body=body, **numbers)


def offer(number, remote: RemoteMemory, **numbers) -> bytes:
    return frame(OFFER, number, length=remote.length, body=remote.to_bytes(), **numbers)


def mutate(data: bytes, rng: random.Random, added: int = 100) -> list[bytes]:
    """What comes instead of a frame that is changed on its way. `added`: bytes behind it, at most."""
    choice = rng.randrange(9)
    changed = bytearray(data)
    place = rng.randrange(len(data))
    if choice == 0:
        changed[place] ^= 1 << rng.randrange(8)
    elif choice == 1:
        changed[place] = rng.randrange(256)
    elif choice == 2:
        changed = changed[:place]
    elif choice == 3:
        changed += rng.randbytes(rng.choice((1, 20, added)))
    elif choice == 4:
        # One of the numbers in the header, or in the address of an offer.
        numbers = ((4, 4), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 4))
        start, size = rng.choice([(start, size) for start, size in numbers if start + size <= len(data)] or [(0, 1)])
        old = int.from_bytes(data[start : start + size], "big")
        values = (0, 1, old + 1, old - 1, old + SLOTS, (1 << 8 * size) - 1, 1 << 31, rng.getrandbits(8 * size))
        changed[start : start + size] = (rng.choice(values) % (1 << 8 * size)).to_bytes(size, "big")
    elif choice == 5:
        changed[0] = rng.randrange(10)
    elif choice == 6:
        return []
    elif choice == 7:
        return [data, data]
    else:
        return [rng.randbytes(rng.randrange(200)), data]
    return [bytes(changed)]


class Peer:
    """One end of a connection."""

    def __init__(self, adapter: ndpy.Adapter, keep: Keeper, receives: int = _RECEIVES) -> None:
        self.adapter = adapter
        self.keep = keep
        options = {"receive_queue_depth": _RECEIVES, "initiator_queue_depth": _SENDS}
        self.end = create_end(keep, adapter, cq_depth=_RECEIVES + _SENDS, **options)
        self.queue_pair = self.end.queue_pair
        self.inbox = memory(keep, adapter, _RECEIVES * SLOT)
        self.outbox = memory(keep, adapter, _SENDS * 2 * SLOT)
        self.sent = 0
        self.completions: list[ndpy.Completion] = []
        for slot in range(receives):
            self.queue_pair.receive(self.inbox[slot * SLOT : (slot + 1) * SLOT], context=slot)

    async def connect(self, address, private_data: bytes | None = None) -> None:
        self.connector = self.keep(self.adapter.create_connector())
        await self.connector.begin_connect(self.queue_pair, address, private_data=private_data or hello())
        await self.connector.begin_complete_connect()

    async def accept(self, listener: ndpy.Listener, private_data: bytes | None = None) -> None:
        self.connector = self.keep(await listener.get_request_async(DEADLINE_S))
        await self.connector.begin_accept(self.queue_pair, private_data=private_data or hello())

    async def start(self, address, private_data: bytes | None = None) -> None:
        """Connect, and exchange START."""
        await self.connect(address, private_data)
        self.send(frame(START))
        assert (await self.frame())[0] == START

    def send(self, data: bytes) -> None:
        start = self.sent % _SENDS * 2 * SLOT
        self.sent += 1
        self.outbox.buffer[start : start + len(data)] = data
        self.queue_pair.send(self.outbox[start : start + len(data)], context=1 << 32)

    async def _next(self, wanted) -> ndpy.Completion:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for completion in self.completions:
                if wanted(completion):
                    self.completions.remove(completion)
                    return completion
            self.completions += await self.end.cq.wait_async(max(0.0, deadline - time.monotonic()))

    async def frame(self) -> bytes:
        """The next frame that comes. Fails if the connection ends."""
        completion = await self._next(lambda completion: completion.operation is ndpy.Operation.RECEIVE)
        completion.raise_for_status()
        start = completion.context * SLOT
        data = bytes(self.inbox.buffer[start : start + completion.nbytes])
        self.queue_pair.receive(self.inbox[start : start + SLOT], context=completion.context)
        return data

    async def frame_of(self, kind: int) -> bytes:
        while (data := await self.frame())[0] != kind:
            pass
        return data

    async def ended(self) -> None:
        """Wait until the connection has ended."""
        await self._next(lambda completion: not completion.ok)

    async def transfer(self, post, remote: RemoteMemory, length: int) -> ndpy.Completion:
        region = memory(self.keep, self.adapter, length, Access.LOCAL_WRITE | Access.READ_SINK)
        post(region, remote, context=2 << 32)
        return await self._next(lambda completion: completion.context == 2 << 32)

    def lend(self, contents: bytes) -> RemoteMemory:
        """Memory that the other end may read."""
        self.lent = memory(self.keep, self.adapter, contents, Access.LOCAL_WRITE | Access.REMOTE_READ)
        return self.lent.remote()

    # ---- the steps after which it can be killed, each after those before it ----

    async def connected(self) -> None:
        await self.connect(self.address)

    async def begun(self) -> None:
        self.send(frame(START))
        assert (await self.frame())[0] == START

    async def sent_messages(self) -> None:
        for _ in range(2):
            self.send(message(b"hello"))

    async def offered(self) -> None:
        """The server asks for this message, and the answer has not come."""
        self.send(offer(1, self.lend(bytes(1 << 19))))

    async def was_offered(self) -> None:
        """The server echoes the long message by an offer of its own, which is not answered."""
        self.offer_to_answer = await self.frame_of(OFFER)

    async def has_read(self) -> None:
        remote = RemoteMemory.from_bytes(self.offer_to_answer[24:])
        completion = await self.transfer(self.queue_pair.read, remote, remote.length)
        completion.raise_for_status()

    async def answered(self) -> None:
        self.send(frame(DONE, 1, seen=SLOTS))

    async def closed(self) -> None:
        self.send(frame(CLOSE))


STEPS = ("connected", "begun", "sent_messages", "offered", "was_offered", "has_read", "answered", "closed")


async def go_to(adapter: ndpy.Adapter, address: tuple[str, int], step: str) -> None:
    peer = Peer(adapter, Keeper())
    peer.address = address
    for name in STEPS[: STEPS.index(step) + 1]:
        await getattr(peer, name)()
    print("there", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    with ndpy.open_adapter(sys.argv[1]) as opened:
        asyncio.run(go_to(opened, (sys.argv[2], int(sys.argv[3])), sys.argv[4]))
