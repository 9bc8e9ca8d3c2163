"""Coroutines of ndpy.aio that the garbage collector closes: their loop was closed first, or nobody referred to their task.

It closes them in any thread, which may hold any lock. So they may not wait for one, and may not call a provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time

import pytest
from aio_ends import LONG, OPTIONS, SHORT, echo, pattern, settle, wait_for
from helpers import DEADLINE_S, host_of, require, wait_until

import ndpy
from ndpy import aio

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("each_loop_where_quick"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FOR_EVER_S = 3600


async def sending(client, server, adapter):
    await client.send(pattern(LONG))


async def receiving(client, server, adapter):
    await client.receive()


async def reading(client, server, adapter):
    async with server.expose(bytearray(LONG)) as remote:
        await client.read(remote, bytearray(LONG))


async def exposing(client, server, adapter):
    async with client.expose(bytearray(LONG)):
        await asyncio.sleep(FOR_EVER_S)


async def being_used(client, server, adapter):
    async with client:
        await asyncio.sleep(FOR_EVER_S)


async def closing(client, server, adapter):
    await client.close()


async def connecting(client, server, adapter):
    await aio.connect((host_of(adapter), client.peer_address[1]), adapter=adapter, **OPTIONS)


async def serving(client, server, adapter):
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS):
        await asyncio.sleep(FOR_EVER_S)


async def listening(client, server, adapter):
    with adapter.listen((host_of(adapter), 0)) as listener:
        await listener.get_request_async()


async def waiting(client, server, adapter):
    with adapter.create_completion_queue(16) as queue:
        await queue.wait_async()


USES = [sending, receiving, reading, exposing, being_used, closing, connecting, serving, listening, waiting]


@pytest.fixture
def unraisable(monkeypatch):
    """What nobody could catch, as text."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(f"{args.exc_value!r} in {args.object!r}"))
    return seen


async def ends(adapter):
    """The two ends of a connection, and the server, whose handler never returns."""
    arrived = asyncio.get_running_loop().create_future()

    async def handler(connection):
        if not arrived.done():
            arrived.set_result(connection)
        await asyncio.sleep(FOR_EVER_S)

    server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
    client = await aio.connect(server.address, adapter=adapter, **OPTIONS)
    return client, await arrived, server


def close_during(use, adapter, pause_s):
    """Close a loop in which a task uses a connection, and drop both."""
    loop = asyncio.new_event_loop()

    async def begin():
        client, server_end, _ = await ends(adapter)
        task = asyncio.ensure_future(use(client, server_end, adapter))
        await asyncio.sleep(pause_s)
        return task

    # So that asyncio does not say that it was destroyed.
    loop.run_until_complete(begin())._log_destroy_pending = False
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()


def locks_of(adapter):
    """Every lock of every open object of the adapter, and of the pollers of its queues."""
    objects = adapter._device._open_children()
    objects += [poller for child in objects for poller in list(getattr(child, "_pollers", None) or ())]
    names = ("_lifetime", "_lock", "_state_lock", "_singly")
    return [lock for one in objects for name in names if (lock := getattr(one, name, None)) is not None]


@contextlib.contextmanager
def locks_held(adapter):
    """Hold all of them. Other threads take them in other orders, so this waits for none while it holds one."""

    def taken(lock):
        held = lock.acquire(False)
        if held:
            stack.callback(lock.release)
        return held

    deadline = time.monotonic() + DEADLINE_S
    with contextlib.ExitStack() as stack:
        while not all(map(taken, locks_of(adapter))):
            stack.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield


@contextlib.contextmanager
def no_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def require_closed(adapter):
    def closed():
        gc.collect()
        return not adapter._device._open_children()

    wait_until(closed, "everything of the closed loop is closed")


def require_usable(adapter):
    async def again():
        async with (
            aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server,
            aio.connect(server.address, adapter=adapter, **OPTIONS) as client,
        ):
            await client.send(b"again")
            assert await client.receive() == b"again"

    asyncio.run(asyncio.wait_for(again(), DEADLINE_S))


@pytest.mark.parametrize("pause_s", [0, 0.05])
@pytest.mark.parametrize("use", USES)
def test_what_a_closed_loop_leaves_is_collected_while_another_thread_holds_every_lock(
    adapter, unraisable, use, pause_s
):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    with no_collection():
        close_during(use, adapter, pause_s)
        collector = threading.Thread(target=gc.collect)
        with locks_held(adapter):
            collector.start()
            collector.join(DEADLINE_S)
            waits = collector.is_alive()
        collector.join(DEADLINE_S)
    assert not waits
    require_closed(adapter)
    assert unraisable == []
    require_usable(adapter)


@pytest.mark.parametrize("use", USES)
def test_what_a_closed_loop_leaves_is_collected_in_the_middle_of_a_call(adapter, unraisable, use):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    with no_collection():
        close_during(use, adapter, 0)
        with locks_held(adapter):
            gc.collect()
    require_closed(adapter)
    assert unraisable == []
    require_usable(adapter)


@pytest.mark.parametrize("use", [sending, exposing, being_used])
def test_a_task_that_is_forgotten_ends_its_connection(adapter, unraisable, use):
    """Another thread collects it while the loop runs."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def forget(client, server_end):
        # Nothing else refers to the future, nor to the task that waits for it.
        never = asyncio.get_running_loop().create_future()

        async def use_for_ever():
            if use is sending:
                using = client.send(pattern(LONG))
                using.send(None)
                try:
                    await never
                finally:
                    using.close()
            elif use is exposing:
                async with client.expose(bytearray(SHORT)):
                    await never
            else:
                async with client:
                    await never

        task = asyncio.ensure_future(use_for_ever())
        task._log_destroy_pending = False
        await wait_for(lambda: never._callbacks)

    async def main():
        client, server_end, server = await ends(adapter)
        await forget(client, server_end)
        with no_collection(), locks_held(adapter):
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join(DEADLINE_S)
            waits = collector.is_alive()
        collector.join(DEADLINE_S)
        assert not waits
        await asyncio.wait_for(client.wait_closed(), DEADLINE_S)
        with pytest.raises(aio.ConnectionResetError, match="a task that used it was dropped"):
            await client.receive()
        with pytest.raises(aio.ConnectionResetError):
            while True:
                await server_end.receive()
        await settle()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))
    assert unraisable == []
    require_closed(adapter)


def test_a_request_is_not_lost_in_a_task_that_was_dropped(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    with adapter.listen((host_of(adapter), 0)) as listener:
        # By hand: the coroutine waits, and is dropped before and after its request has come.
        async def begin(client, queue_pair, *, first):
            early = listener.get_request_async()
            early.send(None)
            if first:
                early.close()
            connecting = client.begin_connect(queue_pair, listener.address)
            if not first:
                await wait_for(lambda: not listener._calls)
                early.close()
            connector = await listener.get_request_async(DEADLINE_S)
            connector.reject()
            connector.close()
            with pytest.raises(ndpy.ConnectionRefusedError):
                await connecting

        for first in (True, False):
            with (
                adapter.create_completion_queue(16) as queue,
                adapter.create_queue_pair(queue) as queue_pair,
                adapter.create_connector() as client,
            ):
                asyncio.run(asyncio.wait_for(begin(client, queue_pair, first=first), DEADLINE_S))
