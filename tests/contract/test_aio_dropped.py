"""Coroutines of ndpy.aio that the garbage collector closes: their loop was closed first, or nobody referred to their
task.

It closes them in any thread, which may hold any lock. So they may not wait for one, and may not call a provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import sys

import pytest
from kit.aio_ends import LONG, OPTIONS, SHORT, echo, pattern, require_closed, require_usable, until
from kit.helpers import DEADLINE_S, STRESS, has_kernel_driver, host_of, require
from kit.locks import elsewhere, locks_held

import ndpy
from ndpy import aio
from ndpy.objects.event_loop import poller_of_loop

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("each_loop_where_quick"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FOR_EVER_S = 3600


@dataclasses.dataclass
class Ends:
    """The two ends of a connection, and the server, whose handler never returns.

    waits: set when a task waits for a request that has no completion.
    """

    adapter: ndpy.Adapter
    server: aio.Server
    client: aio.Connection
    accepted: aio.Connection
    waits: asyncio.Event


async def sending(ends):
    """Some wait for answers, one for room, and one for its turn."""
    await asyncio.gather(*(ends.client.send(pattern(LONG)) for _ in range(5)))


async def receiving(ends):
    await ends.client.receive()


async def reading(ends):
    async with ends.accepted.expose(bytearray(LONG)) as remote:
        await ends.client.read(remote, bytearray(LONG))


async def receiving_long(ends):
    """One reads the message, which does not end, and one waits."""
    ends.accepted.queue_pair.read = lambda *arguments, **options: None
    await asyncio.gather(ends.client.send(pattern(LONG)), ends.accepted.receive(), ends.accepted.receive())


async def taking_back(ends):
    ends.accepted.queue_pair.invalidate = lambda *arguments, **options: ends.waits.set()
    async with ends.accepted.expose(bytearray(LONG)):
        pass
    # Without memory windows nothing waits.
    ends.waits.set()


async def exposing(ends):
    async with ends.client.expose(bytearray(LONG)):
        await asyncio.sleep(FOR_EVER_S)


async def being_used(ends):
    async with ends.client:
        await asyncio.sleep(FOR_EVER_S)


async def closing(ends):
    await ends.client.close()


async def connecting(ends):
    await aio.connect((host_of(ends.adapter), ends.client.peer_address[1]), adapter=ends.adapter, **OPTIONS)


async def serving(ends):
    async with aio.serve((host_of(ends.adapter), 0), echo, adapter=ends.adapter, **OPTIONS):
        await asyncio.sleep(FOR_EVER_S)


async def closing_server(ends):
    await ends.server.close()


async def leasing(ends):
    """What is leased is more than the cache may keep."""
    cache = ndpy.RegistrationCache(ends.adapter, max_bytes=LONG, max_entries=1)
    with cache, cache.local(bytearray(LONG)), cache.local(bytearray(LONG)):
        await asyncio.sleep(FOR_EVER_S)


async def polling(ends):
    with ends.adapter.create_completion_queue(16) as queue, ndpy.Poller() as poller:
        poller.add(queue)
        await asyncio.sleep(FOR_EVER_S)


async def listening(ends):
    with ends.adapter.listen((host_of(ends.adapter), 0)) as listener:
        await listener.get_request_async()


async def waiting(ends):
    with ends.adapter.create_completion_queue(16) as queue:
        await asyncio.gather(queue.wait_async(), queue.wait_async())


USES = [
    sending,
    receiving,
    reading,
    receiving_long,
    exposing,
    being_used,
    closing,
    connecting,
    serving,
    closing_server,
    leasing,
    polling,
    listening,
    waiting,
]


@pytest.fixture
def unraisable(monkeypatch):
    """What nobody could catch, as text."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(f"{args.exc_value!r} in {args.object!r}"))
    return seen


async def make_ends(adapter):
    arrived = asyncio.get_running_loop().create_future()

    async def handler(connection):
        if not arrived.done():
            arrived.set_result(connection)
        await asyncio.sleep(FOR_EVER_S)

    server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
    client = await aio.connect(server.address, adapter=adapter, **OPTIONS)
    return Ends(adapter, server, client, await arrived, asyncio.Event())


def close_during(use, adapter, pause_s):
    """Close a loop in which a task uses a connection, and drop both. pause_s: after so long, or None: when it has
    `waits`.
    """
    loop = asyncio.new_event_loop()

    async def begin():
        ends = await make_ends(adapter)
        poller = poller_of_loop()
        task = asyncio.ensure_future(use(ends))
        # It is dropped pending, which is what is tested.
        task._log_destroy_pending = False
        if pause_s is None:
            await asyncio.wait_for(ends.waits.wait(), DEADLINE_S)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(pause_s)
        return task, poller

    task, poller = loop.run_until_complete(begin())
    # These are woken, and never run on.
    for queue in poller._waiting:
        poller._wake(queue)
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()


@contextlib.contextmanager
def no_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("use, pause_s", [*itertools.product(USES, [0, 0.05]), (taking_back, None)])
def test_what_a_closed_loop_leaves_is_collected_while_another_thread_holds_every_lock(
    adapter, unraisable, use, pause_s
):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    if pause_s and has_kernel_driver(adapter) and not STRESS:
        pytest.skip("with NDPY_STRESS=1 only: it takes long on this adapter")
    with no_collection():
        close_during(use, adapter, pause_s)
        elsewhere(adapter, gc.collect)
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


def forget(use):
    """Begin a task that nothing refers to but what it waits for."""
    task = asyncio.ensure_future(use)
    task._log_destroy_pending = False


@pytest.mark.parametrize("use", ["sends", "exposes", "is in its block"])
def test_a_task_that_is_forgotten_ends_its_connection(adapter, unraisable, use):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def use_for_ever(client, waits):
        never = asyncio.get_running_loop().create_future()
        if use == "sends":
            using = client.send(pattern(LONG))
            using.send(None)
            try:
                waits.append(True)
                await never
            finally:
                using.close()
        elif use == "exposes":
            async with client.expose(bytearray(SHORT)):
                waits.append(True)
                await never
        else:
            async with client:
                waits.append(True)
                await never

    async def main():
        ends = await make_ends(adapter)
        waits = []
        forget(use_for_ever(ends.client, waits))
        await until(lambda: waits)
        elsewhere(adapter, gc.collect)
        await asyncio.wait_for(ends.client.wait_closed(), DEADLINE_S)
        with pytest.raises(aio.ConnectionResetError, match="a task that used it was dropped"):
            await ends.client.receive()
        with pytest.raises(aio.ConnectionResetError):
            while True:
                await ends.accepted.receive()
        await ends.server.close()
        # Nothing has to be collected for it.
        await until(lambda: not adapter._device._open_children())

    with no_collection():
        asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))
    assert unraisable == []


def test_a_task_that_is_forgotten_closes_its_server(adapter, unraisable):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def serve_for_ever(servers):
        never = asyncio.get_running_loop().create_future()
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
            servers.append(server.address)
            await never

    async def main():
        servers = []
        forget(serve_for_ever(servers))
        await until(lambda: servers)
        elsewhere(adapter, gc.collect)
        await until(lambda: not adapter._device._open_children())

    with no_collection():
        asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))
    assert unraisable == []


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
                await until(lambda: not listener._calls)
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
