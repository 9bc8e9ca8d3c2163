"""Many connections at once to one server: all are served, none waits much longer than the others, and each costs little."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

import pytest
from helpers import host_of, require, resident_memory, rounds

import ndpy
from ndpy import aio

# A thousand on Linux. Under Wine each notification takes a fraction of a millisecond.
CROWD = rounds(1000 if sys.platform == "linux" else 100, 30)
TURNS = 5
LIMIT_S = 900.0
OPTIONS = {"slots": 2, "slot_size": 512, "offers": 1, "timeout_s": LIMIT_S, "close_timeout_s": LIMIT_S}
# How much longer than the median one connection may wait for its answers.
UNFAIR = 10
# What the objects of a connection may cost with both of its ends in this process, besides its memory for messages. It contains
# what the driver's library and the connection manager's take.
MOST_BYTES = 100_000


async def echo(connection):
    async for message in connection:
        await connection.send(message)


@pytest.mark.timeout(LIMIT_S)
def test_a_crowd_is_served_fairly(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    waits: list[float] = []
    grown, slots = 0.0, 0

    async def talk(connection, number):
        message = number.to_bytes(4, "big") * 4
        for _ in range(TURNS):
            begin = time.monotonic()
            await connection.send(message)
            assert await connection.receive() == message
            waits.append(time.monotonic() - begin)

    async def main():
        nonlocal grown, slots
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
            before = resident_memory()
            connecting = (aio.connect(server.address, adapter=adapter, **OPTIONS) for _ in range(CROWD))
            connections = await asyncio.gather(*map(_open, connecting))
            grown = (resident_memory() - before) / CROWD
            slots = 2 * connections[0].registered_bytes
            await asyncio.gather(*(talk(connection, number) for number, connection in enumerate(connections)))
            assert len(server.connections) == CROWD
            await asyncio.gather(*(connection.close() for connection in connections))

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    median, longest = statistics.median(waits), max(waits)
    print(
        f"{CROWD} connections: median {median * 1e3:.1f} ms, longest {longest * 1e3:.1f} ms; {grown:.0f} bytes each, of which {slots} are for messages"
    )
    assert len(waits) == CROWD * TURNS
    assert longest <= UNFAIR * median
    assert grown - slots < MOST_BYTES


async def _open(opening):
    return await opening
