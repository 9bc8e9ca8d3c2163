"""ndpy.aio between ends that differ: in slots, sizes, limits and capabilities."""

from __future__ import annotations

import asyncio
import gc

import pytest
from kit.aio_ends import LONG, OPTIONS, SHORT, both, echo, pattern, until
from kit.helpers import host_of, require

import ndpy
from ndpy import aio


async def test_an_end_with_few_slots_sends_on_when_its_own_sends_have_completed(connected):
    """The peer has room, and says nothing meanwhile: only the end's own completions free its slots."""
    async with connected(client_options={"slots": 1}, server_options={"slots": 8}) as (client, server):
        for number in range(6):
            await client.send(pattern(SHORT, number))
        for number in range(6):
            assert await server.receive() == pattern(SHORT, number)


@pytest.mark.parametrize(("here", "there"), [((8, 1024), (1, 64)), ((1, 64), (8, 1024)), ((3, 100), (5, 4096))])
async def test_messages_between_ends_with_different_slots_arrive_whole(connected, here, there):
    """As many messages as the larger end has slots are sent before the first is taken, from both ends at once."""
    lengths = (0, 40, 41, 76, 77, SHORT, 1000, 1001, 4072, 4073, LONG)
    options = [{"slots": slots, "slot_size": size} for slots, size in (here, there)]
    async with connected(client_options=options[0], server_options=options[1]) as (client, server):

        async def exchange(mine, start):
            sending = [asyncio.ensure_future(mine.send(pattern(length, start))) for length in lengths]
            await asyncio.sleep(0.02)
            for length in lengths:
                assert await mine.receive() == pattern(length, 3 - start)
            await asyncio.gather(*sending)

        await both(exchange(client, 1), exchange(server, 2))


@pytest.mark.parametrize(("here", "there"), [(4, 1), (1, 4)])
async def test_long_messages_at_once_keep_to_the_smaller_number_of_offers(connected, here, there):
    async with connected(client_options={"offers": here}, server_options={"offers": there}) as (client, server):
        sending = [asyncio.ensure_future(client.send(pattern(LONG, place))) for place in range(5)]
        for place in range(5):
            assert await server.receive() == pattern(LONG, place)
        await asyncio.gather(*sending)


@pytest.mark.parametrize("with_windows", [(False, True), (True, False)])
async def test_a_peer_that_wants_no_invalidation_gets_none(connected, adapter, monkeypatch, with_windows):
    """One end exposes memory behind windows, which the other may invalidate.
    The other exposes regions, and they stay.
    """
    capability = ndpy.Capability
    require(adapter, capability.MEMORY_WINDOWS, capability.SEND_INVALIDATE, capability.REGION_ACCESS)
    ends = iter(with_windows)
    monkeypatch.setattr("ndpy.aio.transfers.has_usable_windows", lambda adapter: next(ends))
    async with connected() as (client, server):
        for _ in range(3):
            for source, sink in ((client, server), (server, client)):
                _, message = await both(source.send(pattern(LONG)), sink.receive())
                assert message == pattern(LONG)


async def test_connections_that_have_ended_leave_their_room_in_the_queue_to_others(adapter):
    """Connections share completion queues. Each of these takes half of one."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    options = {**OPTIONS, "adapter": adapter, "slots": 900, "slot_size": 64}

    def queues():
        return [child for child in adapter._device._open_children() if isinstance(child, ndpy.CompletionQueue)]

    async with aio.serve((host_of(adapter), 0), echo, **options) as server:
        for _ in range(4):
            async with aio.connect(server.address, **options) as client:
                await client.send(b"again")
                assert await client.receive() == b"again"
                most = len(queues())
            await until(lambda: not server.connections)
        assert most <= 2


async def test_long_messages_that_were_sent_leave_nothing_behind(connected):
    """Also not what a connection waits for: a future for each would stay with it."""
    async with connected() as (client, server):

        async def exchange(count):
            for _ in range(count):
                _, message = await both(client.send(pattern(LONG)), server.receive())
                assert message == pattern(LONG)

        def futures():
            gc.collect()
            return sum(isinstance(found, asyncio.Future) for found in gc.get_objects())

        await exchange(2)
        before = futures()
        await exchange(8)
        assert futures() < before + 4
