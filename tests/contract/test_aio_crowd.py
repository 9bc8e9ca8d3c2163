"""Many connections at once to one server: all are served, none waits much longer than the others, and each costs
little.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
import tracemalloc

import pytest
from kit.deadlines import patient
from kit.helpers import HAS_GIL, host_of, require, rounds

import ndpy
from ndpy import aio

# A thousand on Linux. Under Wine each notification takes a fraction of a millisecond.
CROWD = rounds(1000 if sys.platform == "linux" else 100, 30)
TURNS = 5
LIMIT_S = patient(900.0)
OPTIONS = {"slots": 2, "slot_size": 512, "offers": 1, "timeout_s": LIMIT_S, "close_timeout_s": LIMIT_S}
# How much longer than the median one connection may wait for its answers.
UNFAIR = 10
# What both ends of an idle connection may take of Python's and ndpy's memory: two connections, queue pairs, connectors
# and regions, and the task of the handler.
MOST_BYTES = 32 << 10 if HAS_GIL else 40 << 10
MEASURED = 20


async def echo(connection):
    async for message in connection:
        await connection.send(message)


async def connect(server, adapter):
    return await aio.connect(server.address, adapter=adapter, **OPTIONS)


async def close(connections):
    await asyncio.gather(*(connection.close() for connection in connections))


@pytest.mark.timeout(LIMIT_S)
def test_a_crowd_is_served_fairly(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    waits: list[float] = []

    async def talk(connection, number):
        message = number.to_bytes(4, "big") * 4
        for _ in range(TURNS):
            begin = time.monotonic()
            await connection.send(message)
            assert await connection.receive() == message
            waits.append(time.monotonic() - begin)

    async def main():
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
            connections = await asyncio.gather(*(connect(server, adapter) for _ in range(CROWD)))
            await asyncio.gather(*(talk(connection, number) for number, connection in enumerate(connections)))
            assert len(server.connections) == CROWD
            await close(connections)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    median, longest = statistics.median(waits), max(waits)
    print(f"{CROWD} connections: median {median * 1e3:.1f} ms, longest {longest * 1e3:.1f} ms")
    assert len(waits) == CROWD * TURNS
    assert longest <= UNFAIR * median


async def test_an_idle_connection_takes_little_memory(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    taken = 0
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
        first = [await connect(server, adapter) for _ in range(3)]
        gc.collect()
        tracemalloc.start(1)
        try:
            connections = [await connect(server, adapter) for _ in range(MEASURED)]
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] // MEASURED
        finally:
            tracemalloc.stop()
        await close(first + connections)
    assert 0 < taken < MOST_BYTES
