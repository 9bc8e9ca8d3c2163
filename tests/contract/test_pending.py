"""Pending operations, which the begin_ calls return."""

from __future__ import annotations

import asyncio
import time

import pytest
from kit.helpers import CLOCK_TICK_S, DEADLINE_S, connect_pair, create_end, host_of, require
from kit.threads import Elsewhere

import ndpy


@pytest.fixture
def listener(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return keep(adapter.listen((host_of(adapter), 0)))


def knock(keep, adapter, listener) -> ndpy.Connector:
    """Let a request arrive at the listener."""
    connector = keep(adapter.create_connector())
    connector.begin_connect(create_end(keep, adapter).queue_pair, listener.address)
    return connector


def test_a_pending_operation_ends_with_a_value(adapter, keep, listener):
    pending = listener.begin_get_request()
    assert not pending.done()
    knock(keep, adapter, listener)
    connector = keep(pending.result(DEADLINE_S))
    assert pending.done()
    assert pending.result(0) is connector


def test_result_times_out_and_the_operation_goes_on(adapter, keep, listener):
    pending = listener.begin_get_request()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        pending.result(0.1)
    assert 0.1 - CLOCK_TICK_S <= time.monotonic() - begin < DEADLINE_S
    knock(keep, adapter, listener)
    keep(pending.result(DEADLINE_S))


def test_many_threads_wait_for_one_operation(adapter, keep, listener):
    pending = listener.begin_get_request()
    waiting = [Elsewhere(lambda: pending.result(DEADLINE_S)).start() for _ in range(3)]
    knock(keep, adapter, listener)
    assert [one.result() for one in waiting] == [keep(pending.result(0))] * 3


def test_a_cancelled_request_for_a_connection_takes_none(adapter, keep, listener):
    first, second = listener.begin_get_request(), listener.begin_get_request()
    assert first.cancel()
    with pytest.raises(ndpy.CanceledError):
        first.result(0)
    knock(keep, adapter, listener)
    keep(second.result(DEADLINE_S))
    assert not second.cancel()


def test_cancelling_a_finished_registration_changes_nothing(adapter, keep):
    pending = adapter.begin_register(bytearray(4096))
    region = keep(pending.result(DEADLINE_S))
    assert pending.cancel() is False
    assert pending.result(0) is region
    assert not region.closed


def test_a_failed_operation_raises_its_error_each_time(adapter, keep, listener):
    address = listener.address
    listener.close()
    connector = keep(adapter.create_connector())
    pending = connector.begin_connect(create_end(keep, adapter).queue_pair, address)
    for _ in range(2):
        with pytest.raises(ndpy.ConnectionRefusedError):
            pending.result(DEADLINE_S)


async def test_operations_can_be_awaited(adapter, keep, listener):
    client, server = create_end(keep, adapter), create_end(keep, adapter)

    async def serve() -> ndpy.Connector:
        connector: ndpy.Connector = keep(await listener.begin_get_request())
        await connector.begin_accept(server.queue_pair)
        return connector

    connector = keep(adapter.create_connector())
    serving = asyncio.create_task(serve())
    await connector.begin_connect(client.queue_pair, listener.address)
    await connector.begin_complete_connect()
    other = await serving
    left = other.begin_wait_disconnected()
    await connector.begin_disconnect()
    await left


def test_completion_queues_can_be_awaited(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter)

    async def receive() -> list[ndpy.Completion]:
        notified = pair.server.cq.arm()
        pair.server.queue_pair.receive([], context=4)
        pair.client.queue_pair.send([])
        await notified
        return pair.server.cq.poll()

    (completion,) = asyncio.run(asyncio.wait_for(receive(), DEADLINE_S))
    assert completion.context == 4


def test_cancelling_an_await_cancels_the_operation(adapter, keep, listener):
    pending = listener.begin_get_request()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_wait(pending), 0.1)

    async def _wait(pending: ndpy.Pending[ndpy.Connector]) -> None:
        await pending

    asyncio.run(give_up())
    with pytest.raises(ndpy.CanceledError):
        pending.result(0)
    knock(keep, adapter, listener)
    keep(listener.get_request(DEADLINE_S))


async def test_registrations_can_be_awaited_together(adapter, keep):
    async def one() -> ndpy.MemoryRegion:
        return await adapter.begin_register(bytearray(4096))

    regions = [keep(region) for region in await asyncio.gather(*[one() for _ in range(8)])]
    assert len({region.address for region in regions}) == 8
    for region in regions:
        await region.begin_deregister()
    assert all(region.closed for region in regions)
