"""Connections of ndpy.aio: cancelling what is under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import pytest
from kit.aio_ends import LONG, SHORT, both, pattern, settle, until
from kit.helpers import DEADLINE_S

from ndpy import Access

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]


def cancel_at_each_point(run, act, check, points=40, **options):
    """Cancel a task after each (or of some) number of steps of the loop, until it is through before. check() looks what
    is left.
    """
    through = False
    for steps in range(0, points * run.stride, run.stride):

        async def scene(client, server, steps=steps):
            nonlocal through
            task = asyncio.ensure_future(act(client, server))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps > 20:
                await asyncio.sleep(0.002 * (steps - 20))
            cancelled = task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            through = through or not cancelled
            await check(client, server, task)

        run(scene, **options)
        if through:
            return
    pytest.fail(f"never through after {points} steps")


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_cancelled_send_is_whole_or_not_at_all(run, length):
    async def act(client, server):
        receiving = asyncio.ensure_future(server.receive())
        try:
            await client.send(pattern(length))
        finally:
            server.received = receiving

    async def check(client, server, task):
        await client.send(b"next")
        message = await server.received if hasattr(server, "received") else await server.receive()
        if message != b"next":
            assert message == pattern(length)
            assert await server.receive() == b"next"

    cancel_at_each_point(run, act, check)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_cancelled_receive_loses_no_message(run, length, into):
    async def act(client, server):
        client.sending = asyncio.ensure_future(client.send(pattern(length)))
        client.received = await server.receive(bytearray(length) if into else None)

    async def check(client, server, task):
        if not hasattr(client, "sending"):
            return
        if not hasattr(client, "received"):
            assert await server.receive() == pattern(length)
        await client.sending
        await client.send(b"next")
        assert await server.receive() == b"next"

    cancel_at_each_point(run, act, check)


async def test_cancelled_receives_leave_the_messages_in_order(connected):
    async with connected() as (client, server):
        sending = [asyncio.ensure_future(client.send(pattern(LONG, place))) for place in range(2)]
        await until(lambda: len(server._messages.inbox) == 2)
        receiving = [asyncio.ensure_future(server.receive()) for _ in range(2)]
        await asyncio.sleep(0)
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        assert all(task.cancelled() for task in receiving)
        for place in range(2):
            assert await server.receive() == pattern(LONG, place)
        await asyncio.gather(*sending)


async def test_a_receive_that_is_cancelled_while_it_reads_puts_its_message_before_those_that_came_later(connected):
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: server._messages.inbox)
        await client.send(pattern(SHORT))
        await until(lambda: len(server._messages.inbox) == 2)
        receiving = asyncio.ensure_future(server.receive())
        while not server._messages.reading:
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert await server.receive() == pattern(LONG)
        assert await server.receive() == pattern(SHORT)
        await sending


async def test_a_receiver_cancelled_as_a_message_arrives_leaves_it_to_the_next(connected, monkeypatch):
    async with connected() as (client, server):
        first, second = (asyncio.ensure_future(server.receive()) for _ in range(2))
        await settle()
        arrive = server._messages._on_incoming

        def arrive_and_cancel(incoming):
            arrive(incoming)
            first.cancel()

        monkeypatch.setattr(server._messages, "_on_incoming", arrive_and_cancel)
        await client.send(pattern(SHORT))
        assert await asyncio.wait_for(second, DEADLINE_S) == pattern(SHORT)
        with pytest.raises(asyncio.CancelledError):
            await first


def test_a_cancelled_read_leaves_the_memory_alone_afterwards(run):
    async def act(client, server):
        async with server.expose(bytearray(pattern(LONG)), Access.REMOTE_READ) as remote:
            client.target = bytearray(LONG)
            await client.read(remote, into=client.target)

    async def check(client, server, task):
        if hasattr(client, "target"):
            before = bytes(client.target)
            assert before in (bytes(LONG), pattern(LONG))
            assert task.cancelled() or before == pattern(LONG)
            await asyncio.sleep(0.01)
            assert client.target == before
        _, message = await both(client.send(b"next"), server.receive())
        assert message == b"next"

    cancel_at_each_point(run, act, check, points=60)


def test_a_cancelled_exposure_ends_the_right(run, adapter):
    async def act(client, server):
        async with client.expose(bytearray(LONG), Access.REMOTE_READ):
            await asyncio.sleep(0)

    async def check(client, server, task):
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)

    cancel_at_each_point(run, act, check)


async def test_a_long_message_that_nobody_receives_is_withdrawn(connected):
    async with connected() as (client, server):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.send(pattern(LONG)), 0.2)
        await client.send(b"next")
        assert await server.receive() == b"next"


async def test_a_withdrawal_that_waits_for_a_slot_is_dropped_when_the_answer_comes(connected):
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: server._messages.inbox)
        slots, client._channel.control_slots.free = client._channel.control_slots.free, deque()
        sending.cancel()
        await settle()
        assert await server.receive() == pattern(LONG)
        with pytest.raises(asyncio.CancelledError):
            await sending
        client._channel.control_slots.free = slots
        for _ in range(3):
            _, message = await both(client.send(pattern(LONG)), server.receive())
            assert message == pattern(LONG)


async def test_a_withdrawal_that_is_dropped_leaves_the_peer_its_room(connected):
    """The withdrawal that waited stood for the GRANT that was due meanwhile."""
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: server._messages.inbox)
        for place in range(4):
            await server.send(pattern(SHORT, place))
        await until(lambda: len(client._messages.inbox) == 4)
        slots, client._channel.control_slots.free = client._channel.control_slots.free, deque()
        sending.cancel()
        await settle()
        for place in range(4):
            assert await client.receive() == pattern(SHORT, place)
        assert await server.receive() == pattern(LONG)
        with pytest.raises(asyncio.CancelledError):
            await sending
        client._channel.control_slots.free = slots
        client._messages.post_controls()
        await server.send(pattern(SHORT))
        assert await client.receive() == pattern(SHORT)


async def test_withdrawn_messages_leave_room_for_others(connected):
    async with connected() as (client, server):
        for _ in range(12):
            sending = asyncio.ensure_future(client.send(pattern(LONG)))
            await asyncio.sleep(0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)


async def test_a_cancelled_close_ends_the_connection_at_once(connected):
    async with connected() as (client, server):
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert client.closed
        with pytest.raises(ConnectionError):
            await server.receive()
