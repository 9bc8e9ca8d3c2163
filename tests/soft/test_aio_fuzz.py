"""Mutated frames to a server of ndpy.aio, from a peer of plain queue pairs: each disturbs its own connection and no
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random

import pytest
from kit.aio_peer import (
    CLOSE,
    DONE,
    DROPPED,
    GRANT,
    MESSAGE,
    OFFER,
    SLOT,
    SLOTS,
    START,
    WITHDRAW,
    Peer,
    frame,
    hello,
    message,
    mutate,
    offer,
)
from kit.helpers import DEADLINE_S, SEED, Keeper, host_of, open_files, require, rounds

import ndpy
from ndpy import Access, RemoteMemory, aio

BATCH = 25
GUARD = 4096
LENT = 50_000
OPTIONS = {"slot_size": SLOT, "slots": SLOTS, "offers": 2, "timeout_s": 0.5, "close_timeout_s": 0.1}
# Of a connection with a peer that breaks the rules, or that says that it takes no message as long as the server's.
ENDS = (
    type(None),
    aio.ProtocolError,
    aio.ConnectionResetError,
    aio.ConnectionEndedError,
    ndpy.LimitExceededError,
)


def on_its_way(data: bytes, rng: random.Random) -> list[bytes]:
    """What is sent instead of a frame. Half of the time, the frame itself."""
    return mutate(data, rng, SLOT) if rng.random() < 0.5 else [data]


class Attack:
    """One connection of a peer, and the server's side of it."""

    def __init__(self, adapter: ndpy.Adapter, rng: random.Random) -> None:
        self.adapter = adapter
        self.rng = rng

    async def run(self, address) -> None:
        """Connect, and send frames and transfers of which some are changed. Raises nothing for what the server does
        about it.
        """
        keep = Keeper()
        peer = Peer(self.adapter, keep)
        try:
            with contextlib.suppress(ndpy.NdpyError, asyncio.TimeoutError):
                private_data = hello()
                if self.rng.random() < 0.1:
                    private_data = b"".join(on_its_way(private_data, self.rng)) or b"\0"
                await peer.connect(address, private_data[:100])
                await asyncio.wait_for(self.talk(peer), 0.5)
        finally:
            with contextlib.suppress(ndpy.NdpyError):
                if self.rng.random() < 0.5:
                    await asyncio.to_thread(peer.connector.disconnect, DEADLINE_S)
            await asyncio.to_thread(keep.close)

    async def talk(self, peer: Peer) -> None:
        rng = self.rng
        granted, offers, exposed = SLOTS, 0, None
        lent = peer.lend(bytes(LENT))
        frames = [frame(START)]
        for _ in range(rng.randrange(1, 12)):
            choice = rng.randrange(8)
            numbers = {"granted": granted, "seen": SLOTS}
            if choice < 3:
                frames.append(message(rng.randbytes(rng.randrange(100)), **numbers))
            elif choice == 3:
                offers += 1
                frames.append(offer(offers, lent[: rng.randrange(1, LENT)], **numbers))
            else:
                kind = rng.choice((DONE, WITHDRAW, GRANT, CLOSE, DROPPED))
                frames.append(frame(kind, rng.choice((1, 2)) if kind in (DONE, WITHDRAW, DROPPED) else 0, **numbers))
        for place, data in enumerate(frames):
            for changed in on_its_way(data, rng) if place or rng.random() < 0.2 else [data]:
                peer.send(changed[: 2 * SLOT])
            if rng.random() < 0.5:
                with contextlib.suppress(asyncio.TimeoutError):
                    data = await asyncio.wait_for(peer.frame(), 0.01)
                    if data[0] == OFFER or (data[0] == MESSAGE and len(data) == 44):
                        exposed = RemoteMemory.from_bytes(data[24:])
            if exposed is not None and rng.random() < 0.3:
                await self.reach(peer, exposed)

    async def reach(self, peer: Peer, exposed: RemoteMemory) -> None:
        """Write to or read from around what the server has exposed."""
        offset = self.rng.choice((-GUARD, -1, 0, exposed.length - 1, exposed.length))
        address = (exposed.address + offset) % (1 << 64)
        token = exposed.token ^ self.rng.choice((0, 0, 0, 1, 256, 0xFFFFFFFF))
        post = self.rng.choice((peer.queue_pair.write, peer.queue_pair.read))
        await peer.transfer(post, RemoteMemory(address, 64, token), 64)


class Target:
    """The server. Everything that it gives a peer to write to has a margin on both sides."""

    def __init__(self) -> None:
        self.ends: list[BaseException | None] = []
        self.served = 0

    async def handle(self, connection: aio.Connection) -> None:
        end = None
        space = bytearray(b"\xa5" * (2 * GUARD + LENT))
        inside = memoryview(space)[GUARD : GUARD + LENT]
        secret = bytearray(b"\x5a" * LENT)
        try:
            async with connection.expose(inside, Access.REMOTE_WRITE) as remote:
                await connection.send(remote.to_bytes())
                await connection.send(secret)
                while True:
                    try:
                        await connection.receive(inside)
                    except ndpy.LimitExceededError:
                        await connection.receive()
        except Exception as error:
            end = error
        finally:
            self.ends.append(end)
            inside.release()
            for guard in (space[:GUARD], space[-GUARD:]):
                assert guard == b"\xa5" * GUARD, "memory outside of the exposed part was written to"
            assert secret == b"\x5a" * LENT, "memory that was exposed for reading was written to"


async def attack_in_batches(adapter: ndpy.Adapter, target: Target, count: int, faults: list) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    async with aio.serve((host_of(adapter), 0), target.handle, adapter=adapter, **OPTIONS) as server:
        for first in range(0, count, BATCH):
            attacks = [Attack(adapter, random.Random(f"{SEED} attack {first + place}")) for place in range(BATCH)]
            await asyncio.gather(*(attack.run(server.address) for attack in attacks))
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            while server.connections:
                assert asyncio.get_running_loop().time() < deadline, f"after {first}: {server.connections}"
                await asyncio.sleep(0.01)
            assert not faults, f"attacks {first} to {first + BATCH - 1}: {faults[0]}"
            wrong = [end for end in target.ends if not isinstance(end, ENDS)]
            assert not wrong, f"attacks {first} to {first + BATCH - 1}: {wrong}"
            await is_good(adapter, server)


async def is_good(adapter: ndpy.Adapter, server: aio.Server) -> None:
    """A client that keeps the rules is served."""
    async with aio.connect(server.address, adapter=adapter, **{**OPTIONS, "timeout_s": DEADLINE_S}) as client:
        remote = RemoteMemory.from_bytes(await client.receive())
        await client.write(remote, b"good")
        assert await client.receive() == b"\x5a" * LENT
        await client.send(bytes(100))
        await client.send(bytes(LENT))


@pytest.mark.timeout(3600)
def test_mutated_frames_end_one_connection_and_leave_nothing():
    """5,000 connections with NDPY_STRESS=1."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    logging.getLogger("ndpy.aio").setLevel(logging.ERROR)
    target, faults = Target(), []
    with ndpy.open_adapter("soft0") as adapter:
        require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS, ndpy.Capability.MEMORY_WINDOWS)
        # What the first connections leave for ever is there then.
        asyncio.run(attack_in_batches(adapter, target, BATCH, faults))
        gc.collect()
        files = open_files()
        asyncio.run(attack_in_batches(adapter, target, rounds(5_000, 100), faults))
        gc.collect()
        assert adapter._device._open_children() == []
        assert open_files() <= files
    kinds = [type(end).__name__ for end in target.ends]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
    assert kinds.count("ProtocolError") > len(kinds) / 5
