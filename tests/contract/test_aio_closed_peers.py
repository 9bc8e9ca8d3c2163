"""What send() of ndpy.aio says when the peer has closed the connection, or closes it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kit.aio_ends import LONG, OPTIONS, SHORT, both, pattern, settle, until
from kit.aio_peer import CLOSE, DONE, DROPPED, KNOWS_DROPPED, OFFER, Peer, frame, hello, offer
from kit.helpers import DEADLINE_S, host_of, require

import ndpy
from ndpy import aio

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]

UNEQUAL = {"slots": 1, "offers": 1, "slot_size": 256}
LENGTHS = pytest.mark.parametrize("length", [SHORT, LONG])


@pytest.fixture(params=["client", "server"])
def ordered(request, connected):
    """`async with ordered() as (closer, sender)`. Either end closes first, and the client has the fewest slots."""

    @contextlib.asynccontextmanager
    async def start():
        async with connected(client_options=UNEQUAL) as (client, server):
            yield (client, server) if request.param == "client" else (server, client)

    return start


@LENGTHS
async def test_a_send_after_the_peer_s_end_was_received_raises(ordered, length):
    async with ordered() as (closer, sender):
        closing = asyncio.ensure_future(closer.close())
        with pytest.raises(aio.ConnectionEndedError):
            await sender.receive()
        for _ in range(2):
            with pytest.raises(aio.ConnectionEndedError, match="has closed the connection"):
                await sender.send(pattern(length))
        await both(sender.close(), closing)


@LENGTHS
async def test_a_send_after_the_end_has_come_raises_and_leaves_what_the_peer_sent_before(ordered, length):
    """The program has received nothing yet."""
    async with ordered() as (closer, sender):
        await closer.send(pattern(SHORT))
        closing = asyncio.ensure_future(closer.close())
        await until(lambda: sender._life.state == "peer_closed")
        with pytest.raises(aio.ConnectionEndedError):
            await sender.send(pattern(length))
        assert [bytes(message) async for message in sender] == [pattern(SHORT)]
        await both(sender.close(), closing)


async def test_a_long_message_that_the_peer_has_and_does_not_receive_is_an_error(ordered):
    async with ordered() as (closer, sender):
        sending = asyncio.ensure_future(sender.send(pattern(LONG)))
        await until(lambda: closer._messages.inbox)
        closing = asyncio.ensure_future(closer.close())
        with pytest.raises(aio.ConnectionEndedError, match="has closed the connection and has not taken the message"):
            await sending
        await both(sender.close(), closing)


@LENGTHS
async def test_a_message_that_crosses_the_peer_s_close(ordered, length):
    """Only of a long one does the sender learn that it was dropped. The next message is an error."""
    async with ordered() as (closer, sender):
        sending = asyncio.ensure_future(sender.send(pattern(length)))
        closing = asyncio.ensure_future(closer.close())
        await settle()
        sent = sender._messages.protocol._sent
        assert sent == 1
        if length == LONG:
            with pytest.raises(aio.ConnectionEndedError, match="has not taken the message"):
                await sending
        else:
            await sending
            await until(lambda: sender._life.state == "peer_closed")
        with pytest.raises(aio.ConnectionEndedError):
            await sender.send(pattern(length))
        assert sender._messages.protocol._sent == sent
        await both(sender.close(), closing)


async def test_all_who_wait_for_room_learn_that_the_peer_has_closed(ordered):
    """What had not been sent is not sent."""
    async with ordered() as (closer, sender):
        sending = [asyncio.ensure_future(sender.send(pattern(length))) for length in (SHORT, LONG) * 8]
        # The second long one waits for the first.
        sent = min(closer._own.slots, 3)
        await until(lambda: sender._messages.protocol._sent == sent)
        closing = asyncio.ensure_future(closer.close())
        ends = await asyncio.gather(*sending, return_exceptions=True)
        assert [type(end) for end in ends] == [
            type(None) if place < sent and not place % 2 else aio.ConnectionEndedError for place in range(16)
        ]
        assert sender._messages.protocol._sent == sent
        # They did not wait until the connection ended.
        assert not sender.closed
        await both(sender.close(), closing)


@pytest.mark.parametrize("outcome", ["received", "cancelled"])
async def test_a_long_message_that_is_being_read_when_the_peer_closes(ordered, monkeypatch, outcome):
    """Its send() says what becomes of it."""
    async with ordered() as (closer, sender):
        go_on = asyncio.Event()
        read_into = closer._transfers.read_into

        async def later(pieces):
            await go_on.wait()
            await read_into(pieces)

        monkeypatch.setattr(closer._transfers, "read_into", later)
        sending = asyncio.ensure_future(sender.send(pattern(LONG)))
        receiving = asyncio.ensure_future(closer.receive())
        await until(lambda: closer._messages.reading)
        closing = asyncio.ensure_future(closer.close())
        await until(lambda: sender._life.state == "peer_closed")
        assert not sending.done()
        if outcome == "received":
            go_on.set()
            assert await receiving == pattern(LONG)
            assert await sending is None
        else:
            receiving.cancel()
            with pytest.raises(aio.ConnectionEndedError, match="has not taken the message"):
                await sending
        await both(sender.close(), closing)


async def test_a_handler_whose_client_leaves_while_it_sends_ends_in_peace(adapter):
    """As one that receives. The client is not told that the connection was lost."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    reported, ends = [], []

    async def handler(connection):
        try:
            while True:
                await connection.send(pattern(SHORT))
        except Exception as error:
            ends.append(type(error))
            raise

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
        async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
            assert await client.receive() == pattern(SHORT)
        with pytest.raises(ndpy.ClosedError, match="this end was closed"):
            await client.receive()
        await until(lambda: not server.connections)
    assert ends == [aio.ConnectionEndedError]
    assert reported == []


# ---- peers of the protocol, with and without DROPPED ----


def serve_peer(adapter, keep, handler, scene, **greeting):
    """Call scene(peer) with a peer that greets so, and then wait for the handler. Returns how the handler has ended."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def main():
        end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def handle(connection):
            try:
                await handler(connection)
            except Exception as error:
                end.set_result(error)
            else:
                end.set_result(None)

        async with aio.serve((host_of(adapter), 0), handle, adapter=adapter, **OPTIONS) as server:
            peer = Peer(adapter, keep)
            await peer.start(server.address, hello(**greeting))
            await scene(peer)
            return await asyncio.wait_for(end, DEADLINE_S)

    result = asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))
    keep.close()
    return result


BITS = pytest.mark.parametrize("bits", [0, KNOWS_DROPPED], ids=["older", "newer"])


async def send_long(connection):
    await connection.send(pattern(LONG))


@BITS
def test_done_before_the_peer_s_close_says_that_the_message_was_taken(adapter, keep, bits):
    async def scene(peer):
        await peer.frame_of(OFFER)
        peer.send(frame(DONE, 1))
        peer.send(frame(CLOSE))

    assert serve_peer(adapter, keep, send_long, scene, bits=bits) is None


@BITS
def test_done_after_the_peer_s_close_says_so_only_if_the_peer_knows_another_answer(adapter, keep, bits):
    async def scene(peer):
        await peer.frame_of(OFFER)
        peer.send(frame(CLOSE))
        peer.send(frame(DONE, 1))

    end = serve_peer(adapter, keep, send_long, scene, bits=bits)
    if bits:
        assert end is None
    else:
        assert isinstance(end, aio.ConnectionEndedError)
        assert "may not have taken the message" in str(end)


def test_dropped_without_a_reason_breaks_the_rules(adapter, keep):
    async def scene(peer):
        await peer.frame_of(OFFER)
        peer.send(frame(DROPPED, 1))
        await peer.ended()

    end = serve_peer(adapter, keep, send_long, scene, bits=KNOWS_DROPPED)
    assert isinstance(end, aio.ProtocolError)
    assert "DROPPED for offer 1 before CLOSE" in str(end)


@BITS
@pytest.mark.parametrize("order", ["offered-before-close", "crossing-close"])
def test_a_peer_whose_message_is_not_taken_gets_the_answer_that_it_knows(adapter, keep, bits, order):
    require(adapter, ndpy.Capability.REGION_ACCESS)

    async def handler(connection):
        if order == "offered-before-close":
            await until(lambda: connection._messages.inbox)
        await connection.close()

    async def scene(peer):
        offered = offer(1, peer.lend(bytes(LONG)))
        if order == "offered-before-close":
            peer.send(offered)
            await peer.frame_of(CLOSE)
        else:
            await peer.frame_of(CLOSE)
            peer.send(offered)
        answer = await peer.frame()
        assert answer[0] == (DROPPED if bits else DONE)
        assert answer[4:8] == (1).to_bytes(4, "big")
        peer.send(frame(CLOSE))

    assert serve_peer(adapter, keep, handler, scene, bits=bits) is None
