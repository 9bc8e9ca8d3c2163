"""Completion queues that are created and polled by verbs' extended calls: single-threaded ones, and those with
timestamps.
"""

from __future__ import annotations

import itertools
import time

import pytest
from kit.helpers import (
    DEADLINE_S,
    bind,
    connect_ends,
    contents,
    create_end,
    memory,
    require,
    send_message,
    succeed,
    take,
)

import ndpy
from ndpy import Access, Capability, CompletionArray, CompletionDetails, Operation, Status

DETAILS = {
    CompletionDetails.TIMESTAMP: Capability.TIMESTAMPS,
    CompletionDetails.WALL_CLOCK: Capability.WALL_CLOCK_TIMESTAMPS,
    CompletionDetails.FLOW_TAG: Capability.FLOW_TAGS,
}


def single_threaded(keep, adapter, depth=64):
    require(adapter, Capability.SINGLE_THREADED_QUEUES)
    return keep(adapter.create_completion_queue(depth, single_threaded=True))


@pytest.fixture
def ends(adapter, keep):
    """A connected pair whose completion queues are single-threaded."""
    require(adapter, Capability.LOOPBACK_CONNECTIONS)
    client, server = (create_end(keep, adapter, cq=single_threaded(keep, adapter)) for _ in range(2))
    return connect_ends(keep, adapter, client, server)


def test_what_the_adapter_does_not_claim_is_refused(adapter, keep):
    claimed = adapter.info.capabilities
    for detail, capability in DETAILS.items():
        if capability not in claimed:
            with pytest.raises(ndpy.UnsupportedError, match=str(capability.name)):
                adapter.create_completion_queue(8, details=detail)
    if Capability.SINGLE_THREADED_QUEUES not in claimed:
        with pytest.raises(ndpy.UnsupportedError, match="SINGLE_THREADED_QUEUES"):
            adapter.create_completion_queue(8, single_threaded=True)
    if Capability.CLOCK not in claimed:
        with pytest.raises(ndpy.UnsupportedError, match="CLOCK"):
            adapter.clock()


def test_timestamps_grow(adapter, keep):
    require(adapter, Capability.TIMESTAMPS, Capability.CLOCK)
    cq = keep(adapter.create_completion_queue(64, details=CompletionDetails.TIMESTAMP))
    pair = connect_ends(keep, adapter, create_end(keep, adapter, cq=cq), create_end(keep, adapter))
    send_message(keep, pair.client, pair.server, b"first")
    source, target = memory(keep, adapter, b"bytes"), memory(keep, adapter, 5, Access.REMOTE_WRITE)
    stamps = []
    for _ in range(5):
        pair.client.queue_pair.write(source, target.remote())
        stamps += [completion.timestamp for completion in succeed(cq)]
    clock = adapter.clock()
    assert all(clock.seconds_between(*both) > 0 for both in itertools.pairwise(stamps))
    assert abs(clock.to_time_ns(stamps[-1]) - time.time_ns()) < DEADLINE_S * 1e9


def test_messages_writes_and_reads_complete(ends, keep, adapter):
    client, server = ends
    send_message(keep, client, server, b"message")
    source, target = (
        memory(keep, adapter, b"written"),
        memory(keep, adapter, 7, Access.REMOTE_WRITE | Access.REMOTE_READ),
    )
    client.queue_pair.write(source, target.remote(), context=3)
    (written,) = succeed(client.cq)
    assert (written.operation, written.context, written.nbytes) == (Operation.WRITE, 3, 7)
    assert contents(target) == b"written"
    sink = memory(keep, adapter, 7, Access.LOCAL_WRITE | Access.READ_SINK)
    client.queue_pair.read(sink, target.remote(), context=4)
    (read,) = succeed(client.cq)
    assert (read.operation, read.context, contents(sink)) == (Operation.READ, 4, b"written")
    assert (read.timestamp, read.wall_clock_ns, read.flow_tag) == (None, None, None)


def test_a_message_brings_its_number(ends, keep, adapter):
    require(adapter, Capability.IMMEDIATE_DATA)
    inbox = memory(keep, adapter, 16)
    for _ in range(2):
        ends.server.queue_pair.receive(inbox)
    ends.client.queue_pair.send(memory(keep, adapter, b"message"), immediate=0x81020304)
    target = memory(keep, adapter, 16, Access.REMOTE_WRITE)
    ends.client.queue_pair.write(memory(keep, adapter, b"write"), target.remote(), immediate=0x04030201)
    received = succeed(ends.server.cq, 2)
    assert [(found.immediate, found.operation, found.nbytes) for found in received] == [
        (0x81020304, Operation.RECEIVE, 7),
        (0x04030201, Operation.RECEIVE_RDMA_WITH_IMMEDIATE, 5),
    ]
    succeed(ends.client.cq, 2)


def test_a_message_invalidates_a_window(ends, keep, adapter):
    require(adapter, Capability.MEMORY_WINDOWS, Capability.SEND_INVALIDATE)
    client, server = ends
    send_message(keep, client, server, b"hello")
    window = keep(adapter.create_memory_window())
    remote = bind(server, window, memory(keep, adapter, 64))
    server.queue_pair.receive([])
    client.queue_pair.send_and_invalidate([], remote)
    succeed(client.cq)
    succeed(server.cq)
    assert not window.is_bound


def test_a_failed_request_tells_why_and_cancels_the_others(ends, keep, adapter):
    for context in range(3):
        ends.client.queue_pair.receive([], context=10 + context)
    target = memory(keep, adapter, 64, Access.LOCAL_WRITE)
    wrong = ndpy.RemoteMemory(target.address, 64, 0x12345678)
    ends.client.queue_pair.write(memory(keep, adapter, 64), wrong, context=1)
    found = take(ends.client.cq, 4)
    assert {completion.context: completion.status for completion in found} == {
        1: Status.ACCESS_VIOLATION,
        **dict.fromkeys((10, 11, 12), Status.CANCELED),
    }


def test_an_array_a_batch_and_silent_requests(ends, keep, adapter):
    source, target = memory(keep, adapter, 64), memory(keep, adapter, 64, Access.REMOTE_WRITE)
    send_message(keep, ends.client, ends.server, b"hello")
    batch, array = ndpy.Batch(8, signal_all=True), CompletionArray(16)
    for place in range(8):
        batch.write(source[place : place + 1], target.remote(place, 1), context=place)
    for _ in range(3):
        ends.client.queue_pair.post(batch)
        assert ends.client.cq.poll_into(array, at_least=8, spin_s=DEADLINE_S) == 8
        assert (list(array.contexts), array.all_ok) == (list(range(8)), True)
        assert list(array.timestamps) == [0] * 8
    for context in range(60):
        ends.client.queue_pair.write(
            source, target.remote(), context=context, flags=ndpy.Flags.SILENT_SUCCESS if context % 5 < 4 else 0
        )
        if context % 5 == 4:
            (completion,) = succeed(ends.client.cq)
            assert completion.context == context


def test_waiting_arming_and_a_poller_are_notified(ends, keep):
    client, server = ends
    server.queue_pair.receive_many([[]] * 3)
    armed = server.cq.arm()
    client.queue_pair.send([])
    armed.result(DEADLINE_S)
    succeed(server.cq)
    client.queue_pair.send([])
    assert len(server.cq.wait(DEADLINE_S)) == 1
    poller = keep(ndpy.Poller())
    poller.add(server.cq)
    client.queue_pair.send([], context=7)
    ((queue, completions),) = poller.wait(DEADLINE_S)
    assert (queue, len(completions)) == (server.cq, 1)
    succeed(client.cq, 3)


def test_resizing_loses_nothing(ends, keep, adapter):
    require(adapter, Capability.RESIZE_COMPLETION_QUEUE)
    for context in range(10):
        ends.server.queue_pair.receive([], context=context)
        ends.client.queue_pair.send([])
    succeed(ends.client.cq, 10)
    ends.server.cq.resize(200)
    assert [completion.context for completion in succeed(ends.server.cq, 10)] == list(range(10))


def test_a_shared_receive_queue_reports_there(adapter, keep):
    require(adapter, Capability.LOOPBACK_CONNECTIONS, Capability.SHARED_RECEIVE_QUEUES)
    cq = single_threaded(keep, adapter)
    shared = keep(adapter.create_shared_receive_queue(8))
    server = create_end(keep, adapter, cq=cq, srq=shared)
    pair = connect_ends(keep, adapter, create_end(keep, adapter), server)
    inbox = memory(keep, adapter, 16)
    shared.receive(inbox, context=5)
    pair.client.queue_pair.send(memory(keep, adapter, b"shared"))
    (received,) = succeed(cq)
    assert (received.context, received.nbytes, received.queue_pair) == (5, 6, server.queue_pair)
    succeed(pair.client.cq)


def test_a_datagram_names_its_source(adapter, keep):
    require(adapter, Capability.DATAGRAMS, Capability.SINGLE_THREADED_QUEUES)
    near_cq, far_cq = single_threaded(keep, adapter), single_threaded(keep, adapter)
    near = keep(adapter.create_datagram_queue_pair(near_cq))
    far = keep(adapter.create_datagram_queue_pair(far_cq))
    there = keep(near.destination(far.local_endpoint()))
    inbox = memory(keep, adapter, 64)
    far.receive(inbox, context=4)
    near.send(memory(keep, adapter, b"datagram"), there)
    (received,) = succeed(far_cq)
    assert (received.context, received.nbytes, contents(inbox)[:8]) == (4, 8, b"datagram")
    assert received.source.qp_number == near.number
    assert received.source.gid == near.local_endpoint().gid
    succeed(near_cq)
