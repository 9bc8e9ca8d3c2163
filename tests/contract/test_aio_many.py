"""Many pieces at once: read_many() and write_many(), and messages that are gathered and scattered."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from kit.aio_ends import LONG, SHORT, both, pattern

import ndpy
from ndpy import Access, aio

PIECES, LENGTH = 300, 40


def places(order):
    """Where each piece is, in a mixed order, with gaps."""
    return [(LENGTH + 8) * ((order * place) % PIECES) for place in range(PIECES)]


async def test_each_piece_is_read_into_its_place(connected):
    source = bytearray(pattern((LENGTH + 8) * PIECES))
    sink = bytearray(len(source))
    expected = bytearray(len(source))
    async with connected() as (client, server), server.expose(source) as remote:
        pairs = []
        for here, there in zip(places(1), places(7), strict=True):
            pairs.append((remote[there : there + LENGTH], memoryview(sink)[here : here + LENGTH]))
            expected[here : here + LENGTH] = source[there : there + LENGTH]
        await client.read_many(iter(pairs))
    assert sink == expected


async def test_each_piece_is_written_to_its_place_in_order(connected, adapter, keep):
    data = pattern((LENGTH + 8) * PIECES)
    region = keep(adapter.register(data, Access.NONE))
    target = bytearray(len(data))
    expected = bytearray(len(data))
    async with connected() as (client, server):
        async with server.expose(target) as remote:
            pairs = []
            for here, there in zip(places(1), places(7), strict=True):
                pairs.append((remote[there : there + LENGTH], region[here : here + LENGTH]))
                expected[there : there + LENGTH] = data[here : here + LENGTH]
            # The last one of the same place wins.
            pairs.append((remote[0:8], b"overwrit"))
            pairs.append((remote[0:3], b"new"))
            expected[0:8] = b"newrwrit"
            await client.write_many(pairs)
            await both(client.send(b"written"), server.receive())
        assert target == expected


async def test_pieces_of_all_kinds_of_memory_are_written_in_their_order(connected, adapter, keep):
    """Slices of regions among buffers, a whole region, and pieces that are shorter than the peer's memory."""
    data = pattern(64)
    region, target = keep(adapter.register(bytearray(data))), bytearray(64)
    async with connected() as (client, server), server.expose(target) as remote:
        await client.write_many(
            [
                (remote[0:8], region[0:8]),
                (remote[0:64], region),
                (remote[0:8], region[8:16]),
                (remote[0:8], b"abc"),
                (remote[1:8], region[0:1]),
                (remote[8:8], b""),
                (remote[16:24], region[0:8]),
            ]
        )
        await both(client.send(b"written"), server.receive())
    assert target[:8] == b"a" + data[0:1] + b"c" + data[11:16]
    assert target[8:] == data[8:16] + data[0:8] + data[24:]


async def test_no_pieces_and_pieces_of_no_bytes_are_nothing_to_do(connected):
    async with connected() as (client, server), server.expose(bytearray(8)) as remote:
        await client.read_many([])
        await client.write_many([(remote, b""), (remote[0:0], bytearray())])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda remote: (remote, bytes(8)), ndpy.AccessViolationError),
        (lambda remote: (remote, bytearray(9)), ndpy.ElementRangeError),
        (lambda remote: (5, bytearray(8)), TypeError),
        (lambda remote: (remote, memoryview(bytearray(16))[::2]), ndpy.InvalidBufferError),
    ],
)
async def test_a_mistake_in_one_piece_is_found_before_any_is_read(connected, bad, error):
    sink = bytearray(8)
    async with connected() as (client, server), server.expose(bytearray(pattern(8))) as remote:
        with pytest.raises(error):
            await client.read_many([(remote, sink), bad(remote)])
        assert sink == bytes(8)
        await client.read_many([(remote, sink)])
    assert sink == pattern(8)


async def test_a_request_that_is_refused_in_the_middle_ends_after_those_before_it(connected, adapter, monkeypatch):
    source, sink = bytearray(pattern(128 * 8)), bytearray(128 * 8)
    async with connected() as (client, server), server.expose(source) as remote:
        region = adapter.register(sink)
        other = adapter.register(bytearray(8))
        pairs = [(remote[at : at + 8], region[at : at + 8]) for at in range(0, 72 * 8, 8)]
        bad = other[0:8]
        other.close()
        with pytest.raises(ndpy.ClosedError):
            await client.read_many([*pairs, (remote[0:8], bad)])
        # Those that were posted before it have ended, so their memory can go, and the connection works.
        region.close()
        assert sink[: 48 * 8] == source[: 48 * 8]
        again = bytearray(8)
        await client.read(remote[8:16], again)
        assert again == source[8:16]
        # All room has been given back.
        region = adapter.register(sink)
        await client.read_many([(remote[at : at + 8], region[at : at + 8]) for at in range(0, 128 * 8, 8)])
        assert sink == source
        region.close()


async def test_a_piece_that_the_peer_has_not_exposed_ends_the_connection(connected, adapter):
    """On siw the end comes before the peer's answer."""
    early = (aio.ConnectionResetError,) if adapter.info.driver == "siw" else ()
    source, sink = bytearray(64), bytearray(64)
    async with connected() as (client, server), server.expose(source) as remote:
        wrong = ndpy.RemoteMemory(remote.address, remote.length, remote.token ^ 0xFF00)
        pairs = [(remote[at : at + 8], memoryview(sink)[at : at + 8]) for at in range(0, 64, 8)]
        pairs.insert(3, (wrong[0:8], bytearray(8)))
        with pytest.raises((ndpy.AccessViolationError, *early)):
            await client.read_many(pairs)
        assert client.closed


async def test_a_cancelled_read_of_many_ends_when_nothing_is_written_any_more(connected, adapter):
    length = 1 << 16
    source = bytearray(pattern(64 * length))
    sink = bytearray(len(source))
    async with connected() as (client, server), server.expose(source) as remote:
        region = adapter.register(sink)
        pairs = [(remote[at : at + length], region[at : at + length]) for at in range(0, len(source), length)]
        for _ in range(4):
            reading = asyncio.ensure_future(client.read_many(pairs))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            now = bytes(sink)
            await asyncio.sleep(0.01)
            assert sink == now
        await client.read_many(pairs)
        assert sink == source
        region.close()


async def test_many_reads_of_many_pieces_run_at_once(connected):
    source = bytearray(pattern(64 * PIECES))
    sinks, starts = [bytearray(len(source)) for _ in range(5)], range(0, 64 * PIECES, 64)
    async with connected() as (client, server), server.expose(source) as remote:
        await asyncio.gather(
            *(
                client.read_many([(remote[at : at + 64], memoryview(sink)[at : at + 64]) for at in starts])
                for sink in sinks
            )
        )
    assert all(sink == source for sink in sinks)


@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_a_message_is_gathered_and_scattered(connected, adapter, keep, length):
    data = pattern(length)
    region = keep(adapter.register(bytearray(data)))
    cuts = [0, 1, 30, 30, 77, length]
    pieces = [memoryview(data)[start:end] for start, end in itertools.pairwise(cuts)]
    pieces[1] = region[1:30]
    async with connected() as (client, server):
        into = [bytearray(5), bytearray(0), memoryview(bytearray(40))[8:], bytearray(length), bytearray(3)]
        _, count = await both(client.send(pieces), server.receive(into=into))
        assert count == length
        assert b"".join(into)[:length] == data
        assert into[-1] == bytes(3)
        _, message = await both(client.send(tuple(pieces)), server.receive())
        assert message == data
        await both(client.send([]), server.receive())


@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_a_message_stays_if_a_piece_cannot_be_filled_or_all_are_too_short(connected, length):
    data = pattern(length)
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(data))
        with pytest.raises(ndpy.AccessViolationError, match="is read-only"):
            await server.receive(into=[bytearray(length), b"read-only"])
        with pytest.raises(ndpy.LimitExceededError, match=f"longer than the {length - 1}"):
            await server.receive(into=[bytearray(length - 3), bytearray(2)])
        target = [bytearray(3), bytearray(length - 3)]
        assert await server.receive(into=target) == length
        assert b"".join(target) == data
        await sending
