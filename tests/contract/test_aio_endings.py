"""Connections of ndpy.aio: how they end, and what is left then."""

from __future__ import annotations

import asyncio
import gc

import pytest
from kit.aio_ends import LONG, OPTIONS, SHORT, both, echo, pattern, settle, until
from kit.helpers import DEADLINE_S, host_of, require

import ndpy
from ndpy import aio

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]


async def test_close_delivers_what_was_sent(connected):
    async with connected() as (client, server):
        for place in range(4):
            await client.send(pattern(SHORT, place))
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.1)
        assert [bytes(message) async for message in server] == [pattern(SHORT, place) for place in range(4)]
        await both(closing, server.close())


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16])
async def test_a_long_message_is_not_offered_after_close(connected, steps):
    """Its memory is so long that it is registered in a thread. Meanwhile the connection is closed."""
    async with connected() as (client, server):
        data = bytes(2 << 20)
        sending = asyncio.ensure_future(client.send(data))
        for _ in range(steps):
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        messages = [message async for message in server]
        await both(closing, server.close())
        try:
            await sending
        except ndpy.ClosedError:
            assert messages == []
        else:
            assert messages == [data]


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_all_senders_that_wait_in_line_learn_of_the_end(connected, end, length):
    """The peer takes nothing."""
    async with connected(client_options={"close_timeout_s": 0.3}) as (client, _server):
        sending = [asyncio.ensure_future(client.send(pattern(length))) for length in (SHORT, length) * 8]
        await asyncio.sleep(0.05)
        assert not all(task.done() for task in sending)
        if end == "close":
            await client.close()
        else:
            client.abort()
        done, waiting = await asyncio.wait(sending, timeout=DEADLINE_S / 2)
        assert not waiting
        assert all(
            isinstance(task.exception(), (ndpy.ClosedError, aio.ConnectionResetError, type(None))) for task in done
        )


async def test_a_closed_connection_says_so(connected):
    async with connected() as (client, server):
        await both(client.close(), server.close())
        assert client.closed
        for call in (client.send(b"x"), client.receive(), client.read(ndpy.RemoteMemory(0, 1, 0), into=bytearray(1))):
            with pytest.raises(ndpy.ClosedError, match="was closed"):
                await call
        await client.close()
        await client.wait_closed()


async def test_abort_is_a_reset_for_the_peer(connected):
    async with connected() as (client, server):
        waiting = asyncio.ensure_future(server.receive())
        closed = asyncio.ensure_future(server.wait_closed())
        await settle()
        assert not closed.done()
        client.abort()
        with pytest.raises(aio.ConnectionResetError, match="ended it without close"):
            await waiting
        with pytest.raises(aio.ConnectionResetError, match="abort"):
            await client.send(b"x")
        await closed


async def test_messages_that_came_before_a_reset_are_received(connected):
    async with connected() as (client, server):
        await client.send(b"first")
        await until(lambda: server._messages.inbox)
        client.abort()
        await server.wait_closed()
        assert await server.receive() == b"first"
        with pytest.raises(aio.ConnectionResetError):
            await server.receive()


async def test_a_message_of_a_connection_that_has_ended_is_not_that_of_the_next_one(connected, adapter):
    """Connections use the same memory one after the other."""
    async with connected() as (client, server):
        await client.send(b"first")
        await until(lambda: server._messages.inbox)
        client.abort()
        await server.wait_closed()
        await client.wait_closed()
        async with (
            aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as another,
            aio.connect(another.address, adapter=adapter, **OPTIONS) as connection,
        ):
            for _ in range(20):
                await connection.send(b"other")
                assert await connection.receive() == b"other"
        assert await server.receive() == b"first"


async def test_an_exception_in_the_block_aborts(adapter, connected):
    async with connected() as (client, server):
        with pytest.raises(ZeroDivisionError):
            async with client:
                raise ZeroDivisionError
        with pytest.raises(aio.ConnectionResetError):
            await server.receive()


async def test_an_offer_that_is_out_when_the_peer_leaves_fails(connected):
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: server._messages.inbox)
        server.abort()
        with pytest.raises(aio.ConnectionResetError):
            await sending


async def test_a_long_message_that_is_lost_with_the_connection_is_no_end_of_the_messages(connected):
    """The peer waits for its reader as long as it says, and then disconnects."""
    async with connected(client_options={"close_timeout_s": 0.2}) as (client, server):
        await client.send(b"first")
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: len(server._messages.inbox) == 2)
        await client.close()
        with pytest.raises(ndpy.ClosedError):
            await sending
        await server.wait_closed()
        assert await server.receive() == b"first"
        for _ in range(2):
            with pytest.raises(aio.ConnectionResetError, match="a long message that was not read"):
                await server.receive()


async def test_a_connection_is_freed_although_asyncio_has_ended_its_threads(adapter, connected):
    """asyncio.run() does that before its last tasks are through."""
    async with connected() as (_client, _server):
        await asyncio.get_running_loop().shutdown_default_executor()
    assert not adapter._device._open_children()


async def test_who_waits_for_long_posts_an_empty_write_now_and_then(connected, monkeypatch):
    """So a dead host is noticed, although it had acknowledged everything."""
    monkeypatch.setattr("ndpy.aio.hub._PROBE_S", 0.05)
    async with connected() as (client, server):
        probes = []
        write_nothing = client._channel.write_nothing
        monkeypatch.setattr(
            client._channel, "write_nothing", lambda context: (probes.append(context), write_nothing(context))
        )
        await asyncio.sleep(0.5)
        assert probes == []
        receiving = asyncio.ensure_future(client.receive())
        await until(lambda: len(probes) > 1)
        await server.send(b"at last")
        assert await receiving == b"at last"
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await until(lambda: len(probes) > 3)
        assert await server.receive() == pattern(LONG)
        await sending
        count = len(probes)
        await asyncio.sleep(0.5)
        assert len(probes) == count


def test_nothing_is_left_when_the_connections_are_closed(adapter, run):
    """adapter.close(), at the end of the fixture, fails if an object is still open."""

    async def scene(client, server):
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)

    run(scene)
    gc.collect()
    assert adapter._device._open_children() == []


async def test_the_last_connection_is_closed_while_its_memory_is_still_exposed(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    server = await aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS)
    client = await aio.connect(server.address, adapter=adapter, **OPTIONS)
    exposed, leave = asyncio.Event(), asyncio.Event()

    async def hold():
        async with client.expose(bytearray(LONG)):
            exposed.set()
            await leave.wait()

    holding = asyncio.ensure_future(hold())
    await exposed.wait()
    await client.close()
    assert client.closed
    await server.close()
    leave.set()
    await holding
    assert adapter._device._open_children() == []


# ---- ends that cross ----


def abort(connection):
    connection.abort()
    return connection.close()


@pytest.mark.parametrize("own", ["close", "abort"])
@pytest.mark.parametrize("peers", ["close", "abort"])
@pytest.mark.parametrize("steps", [0, 2, 8])
async def test_ends_that_cross(connected, adapter, own, peers, steps):
    """Both ends end the connection in one way or the other, one of them some turns of the loop after the other."""
    ways = {"close": lambda connection: connection.close(), "abort": abort}
    async with connected() as (client, server):
        waiting = [asyncio.ensure_future(connection.receive()) for connection in (client, server)]
        await settle()
        first = asyncio.ensure_future(ways[own](client))
        for _ in range(steps):
            await asyncio.sleep(0)
        await both(first, ways[peers](server))
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, (aio.ConnectionEndedError, aio.ConnectionResetError, ndpy.ClosedError)), error
        for connection in (client, server):
            assert connection._life.state == "free"
            if (own, peers) == ("close", "close"):
                with pytest.raises(ndpy.ClosedError):
                    await connection.receive()
    assert not adapter._device._open_children()


async def test_a_connection_that_fails_while_it_is_being_closed_is_closed(connected):
    """The peer, which has not closed its end, is gone."""
    async with connected() as (client, _server):
        closing = [asyncio.ensure_future(client.close()) for _ in range(2)]
        await until(lambda: client._life.state == "closing")
        client.queue_pair.flush()
        await asyncio.gather(*closing)
        assert client._life.state == "free"
        with pytest.raises(aio.ConnectionResetError, match="ended it without close"):
            await client.send(b"x")
        await client.wait_closed()


@pytest.mark.parametrize("seen", ["connecting", "opening"])
async def test_a_connection_that_is_given_up_while_it_opens_is_freed(adapter, monkeypatch, seen):
    """The server accepts late, or says nothing after it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    begun, accepted, go_on = [], asyncio.Event(), asyncio.Event()
    connect, accept = aio.Connection._connect, aio.Connection._accept

    def connecting(connection, *arguments):
        begun.append(connection)
        return connect(connection, *arguments)

    async def accepting(connection, *arguments):
        accepted.set()
        if seen == "opening":
            monkeypatch.setattr(connection._messages, "begin", lambda: None)
            await accept(connection, *arguments)
        await go_on.wait()
        raise ndpy.TimeoutError("planted")

    monkeypatch.setattr(aio.Connection, "_connect", connecting)
    monkeypatch.setattr(aio.Connection, "_accept", accepting)
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
        opening = asyncio.ensure_future(aio.connect(server.address, adapter=adapter, **OPTIONS).__aenter__())
        await accepted.wait()
        (client,) = begun
        await until(lambda: client._life.state == seen)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert client._life.state == "free"
        with pytest.raises(aio.ConnectionResetError, match="could not be made"):
            await client.send(b"x")
        go_on.set()
    assert not adapter._device._open_children()
