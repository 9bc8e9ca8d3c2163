"""Queue pairs of the type UC: sends and writes that nobody answers."""

from __future__ import annotations

import pytest
from kit.helpers import assert_quiet, contents, contexts, create_end, memory, require, succeed, take, wait_until

import ndpy
from ndpy import Access, Batch, Capability, Flags, Operation, QueuePairState, QueuePairType, RetryPolicy, Status

UC = QueuePairType.UC


@pytest.fixture
def ends(keep, adapter):
    require(adapter, Capability.UNRELIABLE_CONNECTIONS)
    one, other = create_end(keep, adapter, type=UC), create_end(keep, adapter, type=UC)
    local, remote = one.queue_pair.local_endpoint(), other.queue_pair.local_endpoint()
    one.queue_pair.connect_endpoint(remote)
    other.queue_pair.connect_endpoint(local)
    return one, other


def test_messages_arrive_in_both_directions(ends, keep, adapter):
    inbox = memory(keep, adapter, 9000)
    for source, sink, length in ((*ends, 5), (*reversed(ends), 8999), (*ends, 0)):
        text = bytes(place % 251 for place in range(length))
        sink.queue_pair.receive(inbox, context=1)
        source.queue_pair.send(memory(keep, adapter, text) if length else [], context=2)
        (received,) = succeed(sink.cq)
        assert (received.operation, received.context, received.nbytes) == (Operation.RECEIVE, 1, length)
        assert contents(inbox)[:length] == text
        assert contexts(succeed(source.cq)) == [2]


def test_writes_arrive_and_may_bring_a_number(ends, keep, adapter):
    one, other = ends
    target = memory(keep, adapter, 32, Access.REMOTE_WRITE)
    one.queue_pair.write(memory(keep, adapter, b"plain"), target.remote())
    succeed(one.cq)
    wait_until(lambda: contents(target)[:5] == b"plain", "the write")
    other.queue_pair.receive([], context=1)
    one.queue_pair.write(memory(keep, adapter, b"with a number"), target.remote()[8:], immediate=5)
    (received,) = succeed(other.cq)
    assert (received.operation, received.immediate) == (Operation.RECEIVE_RDMA_WITH_IMMEDIATE, 5)
    assert contents(target)[8:21] == b"with a number"
    succeed(one.cq)


def test_a_message_that_nobody_receives_is_dropped(ends, keep, adapter):
    one, other = ends
    source = memory(keep, adapter, b"lost")
    for context in range(3):
        one.queue_pair.send(source, context=context)
    assert contexts(succeed(one.cq, 3)) == [0, 1, 2]
    assert_quiet(other.cq)
    other.queue_pair.receive(memory(keep, adapter, 16), context=7)
    one.queue_pair.send(memory(keep, adapter, b"found"), context=8)
    (received,) = succeed(other.cq)
    assert (received.context, received.nbytes) == (7, 5)


def test_a_write_without_the_right_changes_nothing(ends, keep, adapter):
    one, _ = ends
    private = memory(keep, adapter, b"original", Access.REMOTE_READ)
    one.queue_pair.write(memory(keep, adapter, b"intruder"), private.remote())
    (ended,) = take(one.cq)
    assert ended.operation is Operation.WRITE
    assert contents(private) == b"original"


def test_a_batch_of_both(ends, keep, adapter):
    one, other = ends
    target = memory(keep, adapter, 32, Access.REMOTE_WRITE)
    source = memory(keep, adapter, bytes(range(32)))
    batch = Batch(4)
    for place in range(0, 24, 8):
        batch.write(source[place : place + 8], target.remote()[place:])
    batch.send(source[24:32], immediate=9)
    other.queue_pair.receive(memory(keep, adapter, 16))
    one.queue_pair.post(batch)
    assert [found.immediate for found in succeed(other.cq)] == [9]
    assert contents(target)[:24] == bytes(range(24))
    succeed(one.cq)


def test_what_it_has_not_is_refused(ends, keep, adapter):
    one, _ = ends
    region = memory(keep, adapter, 8, Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
    batch = Batch(1)
    batch.read(region, region.remote())
    for call in (
        lambda: one.queue_pair.read(region, region.remote()),
        lambda: one.queue_pair.read([region], region.remote()),
        lambda: one.queue_pair.post(batch),
        lambda: one.queue_pair.fetch_and_add(region, region.remote(), 1),
        lambda: one.queue_pair.send_and_invalidate(region, region.remote()),
    ):
        with pytest.raises(ndpy.UnsupportedError, match="a queue pair of type UC sends and writes only"):
            call()
    with pytest.raises(ndpy.InvalidFlagsError):
        one.queue_pair.write(region, region.remote(), flags=Flags.SOLICITED)
    assert one.queue_pair.retry == RetryPolicy()
    assert one.queue_pair.read_limits == (0, 0)


def test_it_has_no_retries_and_no_connector(keep, adapter):
    require(adapter, Capability.UNRELIABLE_CONNECTIONS)
    end = create_end(keep, adapter, type=UC)
    local = end.queue_pair.local_endpoint()
    with pytest.raises(ndpy.UnsupportedError, match="has no RetryPolicy"):
        end.queue_pair.connect_endpoint(local, retry=RetryPolicy(retry_count=1))
    with pytest.raises(ndpy.UnsupportedError, match="a connector connects queue pairs of type RC, not UC"):
        keep(adapter.create_connector()).begin_connect(end.queue_pair, (adapter.info.addresses[0], 9))
    end.queue_pair.connect_endpoint(local)


def test_it_can_be_connected_by_hand(ends):
    one, other = ends
    attributes = one.queue_pair.query()
    assert (attributes.state, attributes.remote_number) == (QueuePairState.RTS, other.queue_pair.number)
    assert attributes.retry_count is None
    with pytest.raises(ndpy.QueuePairAttributesError, match="does not take retry_count"):
        one.queue_pair.modify(retry_count=1)


def test_the_end_cancels_receives(ends, keep, adapter):
    one, _ = ends
    one.queue_pair.receive(memory(keep, adapter, 16), context=4)
    one.queue_pair.flush()
    assert [(c.context, c.status) for c in take(one.cq)] == [(4, Status.CANCELED)]


def test_an_adapter_without_them_says_so(keep, adapter):
    if Capability.UNRELIABLE_CONNECTIONS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} has unreliable connections")
    cq = keep(adapter.create_completion_queue(4))
    with pytest.raises(ndpy.UnsupportedError, match=f"{adapter.info.name} has no queue pairs of type UC"):
        adapter.create_queue_pair(cq, type=UC)
