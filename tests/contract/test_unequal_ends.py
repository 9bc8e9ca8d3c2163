"""Connections between ends that differ: in the number of elements, in depths, in inline data."""

from __future__ import annotations

import pytest
from kit.helpers import DEADLINE_S, connect_ends, contents, contexts, create_end, memory, require, succeed

import ndpy
from ndpy import Access, Flags

SINK = Access.LOCAL_WRITE | Access.READ_SINK


@pytest.fixture
def ends(adapter, keep):
    """ends(client_options, server_options) connects two ends that were created with these options."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def connect(client, server):
        return connect_ends(keep, adapter, create_end(keep, adapter, **client), create_end(keep, adapter, **server))

    return connect


def pieces(region, lengths):
    """Elements of these lengths, one behind the other."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [region[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize(("receives", "initiates"), [(4, 1), (1, 4)])
def test_receives_and_requests_have_their_own_number_of_elements(ends, keep, adapter, receives, initiates):
    if min(adapter.info.max_receive_sge, adapter.info.max_initiator_sge) < 4:
        pytest.skip(f"{adapter.info.name} takes fewer than 4 elements")
    options = {"max_receive_sge": receives, "max_initiator_sge": initiates}
    pair = ends(options, options)
    for one, other in ((pair.client, pair.server), (pair.server, pair.client)):
        limits = one.queue_pair.limits
        source = memory(keep, adapter, bytes(range(64)), Access.NONE)
        sink = memory(keep, adapter, bytes(64))
        other.queue_pair.receive(pieces(sink, [64 // receives] * receives))
        one.queue_pair.send(pieces(source, [64 // initiates] * initiates))
        succeed(one.cq)
        succeed(other.cq)
        assert contents(sink) == bytes(range(64))
        for post, most in (
            (one.queue_pair.receive, limits.max_receive_sge),
            (one.queue_pair.send, limits.max_initiator_sge),
        ):
            with pytest.raises(ndpy.LimitExceededError):
                post([sink[:1]] * (most + 1))


@pytest.mark.parametrize("length", [100_000, 333_333])
def test_a_long_message_between_elements_of_different_lengths_arrives_whole(ends, keep, adapter, rng, length):
    """Each end cuts it in another way, and the packets in a third one."""
    if min(adapter.info.max_receive_sge, adapter.info.max_initiator_sge) < 3:
        pytest.skip(f"{adapter.info.name} takes fewer than 3 elements")
    options = {"max_receive_sge": 3, "max_initiator_sge": 3}
    pair = ends(options, options)
    data = rng.randbytes(length)
    source = memory(keep, adapter, data, Access.NONE)
    far = memory(keep, adapter, data, Access.REMOTE_READ) if _has_regions(adapter) else None
    for cuts in ([1, 50_001, length - 50_002], [length - 7, 3, 4]):
        sink = memory(keep, adapter, bytes(length), SINK)
        pair.server.queue_pair.receive(pieces(sink, cuts))
        pair.client.queue_pair.send(pieces(source, cuts[::-1]))
        succeed(pair.client.cq)
        (received,) = succeed(pair.server.cq)
        assert received.nbytes == length
        # pytest compares bytes that differ for minutes.
        arrived_whole = contents(sink) == data
        assert arrived_whole
        if far is not None:
            sink.buffer[:] = bytes(length)
            parts = [pieces(sink, cuts)] if adapter.info.max_read_sge >= 3 else pieces(sink, cuts)
            begins = [0, cuts[0], cuts[0] + cuts[1]]
            for begin, part in zip(begins, parts, strict=False):
                pair.server.queue_pair.read(part, far.remote()[begin:])
            succeed(pair.server.cq, len(parts))
            arrived_whole = contents(sink) == data
            assert arrived_whole


@pytest.mark.parametrize("road", ["read()", "batch"])
def test_a_read_into_more_elements_than_the_adapter_reads_into_is_refused(ends, keep, adapter, road):
    """siw would fill the first one and report success."""
    most = adapter.info.max_read_sge
    if most == adapter.info.max_initiator_sge or not _has_regions(adapter):
        pytest.skip(f"{adapter.info.name} reads into as many elements as it sends")
    pair = ends({"max_initiator_sge": most + 1}, {})
    source = memory(keep, adapter, bytes(range(most + 1)), Access.REMOTE_READ)
    sink = memory(keep, adapter, bytes(most + 1), SINK)

    def read(count):
        local, remote = pieces(sink, [1] * count), source.remote()
        if road == "read()":
            pair.client.queue_pair.read(local, remote)
        else:
            batch = ndpy.Batch(1, max_sge=most + 1)
            batch.read(local, remote)
            pair.client.queue_pair.post(batch)

    with pytest.raises(ndpy.LimitExceededError, match="max_read_sge"):
        read(most + 1)
    read(most)
    succeed(pair.client.cq)
    assert contents(sink) == bytes(range(most)) + bytes(1)


def _has_regions(adapter):
    return ndpy.Capability.REGION_ACCESS in adapter.info.capabilities


def test_each_end_has_the_depth_that_it_asked_for(ends, keep, adapter):
    pair = ends(
        {"receive_queue_depth": 2, "initiator_queue_depth": 24},
        {"receive_queue_depth": 24, "initiator_queue_depth": 2},
    )
    data = memory(keep, adapter, b"x", Access.NONE)
    sink = memory(keep, adapter, bytes(24))
    for one, other in ((pair.client, pair.server), (pair.server, pair.client)):
        count = min(24, one.queue_pair.limits.initiator_queue_depth)
        assert count in (2, 24)
        for place in range(min(count, other.queue_pair.limits.receive_queue_depth)):
            other.queue_pair.receive(sink[place : place + 1], context=place)
        for place in range(count):
            one.queue_pair.send(data, context=place)
        with pytest.raises(ndpy.QueueFullError):
            one.queue_pair.send(data)
        assert contexts(succeed(one.cq, count)) == list(range(count))
        assert contexts(succeed(other.cq, count)) == list(range(count))
        assert one.queue_pair.limits.initiator_queue_depth >= count


@pytest.mark.parametrize("larger", ["client", "server"])
def test_inline_data_are_limited_by_the_end_that_sends_them(ends, keep, adapter, larger):
    if adapter.info.max_inline_data_size < 64:
        pytest.skip(f"{adapter.info.name} takes no 64 bytes inline")
    sizes = {"client": 8, "server": 8, larger: 64}
    pair = ends({"inline_data_size": sizes["client"]}, {"inline_data_size": sizes["server"]})
    source = memory(keep, adapter, bytes(range(200)), Access.NONE)
    sink = memory(keep, adapter, bytes(200))
    for name, one, other in (("client", pair.client, pair.server), ("server", pair.server, pair.client)):
        granted = one.queue_pair.limits.inline_data_size
        assert granted >= sizes[name]
        granted = min(granted, 199)
        other.queue_pair.receive(sink)
        one.queue_pair.send(source[:granted], flags=Flags.INLINE)
        succeed(one.cq)
        assert succeed(other.cq)[0].nbytes == granted
        with pytest.raises(ndpy.LimitExceededError):
            one.queue_pair.send(source[: one.queue_pair.limits.inline_data_size + 1], flags=Flags.INLINE)


def test_a_message_longer_than_the_peers_depth_of_receives_waits_for_each(ends, keep, adapter):
    """The peer has room for one message at a time, and takes ten."""
    if adapter.info.driver == "siw":
        pytest.skip("siw ends the connection when a message finds no receive")
    pair = ends({"initiator_queue_depth": 12}, {"receive_queue_depth": 1})
    source = memory(keep, adapter, bytes(range(10)), Access.NONE)
    sink = memory(keep, adapter, bytes(10))
    pair.server.queue_pair.receive(sink[0:1], context=0)
    for place in range(10):
        pair.client.queue_pair.send(source[place : place + 1], context=place)
    for place in range(10):
        (received,) = pair.server.cq.wait(DEADLINE_S)
        assert (received.context, received.ok) == (place, True)
        if place < 9:
            pair.server.queue_pair.receive(sink[place + 1 : place + 2], context=place + 1)
    assert contexts(succeed(pair.client.cq, 10)) == list(range(10))
    assert contents(sink) == bytes(range(10))
