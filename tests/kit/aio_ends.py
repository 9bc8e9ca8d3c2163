"""Two ends of a connection of ndpy.aio, for the tests of tests/contract/test_aio*.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

import ndpy
from kit.helpers import DEADLINE_S, STRESS, has_kernel_driver, host_of, require, wait_until
from kit.quirks import has_quirk
from ndpy import aio
from ndpy.aio.protocol import HEADER_LENGTH
from ndpy.vocabulary.quirks import Quirk

SHORT = 100
LONG = 50_000
SLOT = 1024
LONGEST_SHORT = SLOT - HEADER_LENGTH
OPTIONS = {"slot_size": SLOT, "slots": 4, "close_timeout_s": DEADLINE_S, "timeout_s": DEADLINE_S}


@contextlib.asynccontextmanager
async def _connected(adapter, client_options=None, server_options=None):
    arrived: asyncio.Future[aio.Connection] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def handler(connection):
        arrived.set_result(connection)
        await leave.wait()

    options = {"adapter": adapter, **OPTIONS, **(server_options or {})}
    async with aio.serve((host_of(adapter), 0), handler, **options) as server:
        options = {"adapter": adapter, **OPTIONS, **(client_options or {})}
        async with aio.connect(server.address, **options) as client:
            yield client, await arrived
            leave.set()


@pytest.fixture
def connected(adapter):
    """`async with connected() as (client, server)`: the two ends of one connection."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return functools.partial(_connected, adapter)


@pytest.fixture
def run(adapter, connected):
    """run(scene) calls the coroutine function with a client and the server's end of one connection."""

    def start(scene, **options):
        async def main():
            async with connected(**options) as ends:
                await scene(*ends)

        asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))

    # A kernel's driver is slow in an emulated machine, and so are Windows programs. siw takes longest to connect. There
    # the usual run takes some of the points.
    slow = 20 if has_quirk(adapter, Quirk.SIW_LEAVES_FIRST_MESSAGE) else 10
    start.stride = 1 if STRESS or not has_kernel_driver(adapter) else slow
    return start


@pytest.fixture
def windows(adapter, monkeypatch):
    """What is exposed is behind memory windows, also on rxe."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)
    monkeypatch.setattr("ndpy.aio.transfers.has_usable_windows", lambda adapter: True)


# A generator of 50,000 numbers takes a tenth of a second in an emulated machine, so the pattern is repeated.
_PERIOD = 251


def pattern(length: int, start: int = 1) -> bytes:
    period = bytes((start + 7 * place) % _PERIOD for place in range(_PERIOD))
    return (period * (length // _PERIOD + 1))[:length]


async def both(first, second):
    return await asyncio.gather(first, second)


async def settle() -> None:
    """Let tasks go on until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """wait_until() in a coroutine. A failure shows the condition's source."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {inspect.getsource(condition).strip()}"
        await asyncio.sleep(0.002)


async def echo(connection):
    async for message in connection:
        await connection.send(message)


def require_usable(adapter: ndpy.Adapter) -> None:
    """Exchange a message in a new loop."""

    async def again():
        async with (
            aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server,
            aio.connect(server.address, adapter=adapter, **OPTIONS) as client,
        ):
            await client.send(b"again")
            assert await client.receive() == b"again"

    asyncio.run(asyncio.wait_for(again(), DEADLINE_S))


def require_closed(adapter: ndpy.Adapter) -> None:
    """What a closed loop has left goes when it is collected."""

    def closed():
        gc.collect()
        return not adapter._device._open_children()

    wait_until(closed, "everything of the closed loop is closed")
