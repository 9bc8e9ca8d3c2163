"""How requests of a queue pair end: contract F.5 to F.8 on order, errors, flush and disconnect."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_quiet,
    assert_works,
    connect_ends,
    contents,
    contexts,
    create_end,
    expose,
    host_of,
    memory,
    require,
    require_reusable_queue_pairs,
    send_message,
    statuses,
    succeed,
    take,
    wait_until,
)

import ndpy
from ndpy import Access, Flags, Operation, RemoteMemory, Status

SINK = Access.LOCAL_WRITE | Access.READ_SINK


# ---- F.5, F.6: order and errors ----


def test_f_5_1_requests_complete_in_posting_order(pair, keep):
    owner = memory(keep, pair.server.adapter, 65536, Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, 65536, SINK)
    for context in range(4):
        pair.server.queue_pair.receive([], context=100 + context)
    queue_pair = pair.client.queue_pair
    for context in range(0, 12, 3):
        queue_pair.read(local, remote, context=context)
        queue_pair.write(local[0:4], remote, context=context + 1)
        queue_pair.send([], context=context + 2)
    assert contexts(succeed(pair.client.cq, 12)) == list(range(12))
    assert contexts(succeed(pair.server.cq, 4)) == [100, 101, 102, 103]


def test_f_5_3_messages_arrive_in_sending_order(pair, keep):
    sinks = [memory(keep, pair.server.adapter, 4) for _ in range(10)]
    for sink in sinks:
        pair.server.queue_pair.receive(sink)
    for number in range(10):
        pair.client.queue_pair.send(memory(keep, pair.adapter, b"%04d" % number))
    succeed(pair.client.cq, 10)
    succeed(pair.server.cq, 10)
    assert [contents(sink) for sink in sinks] == [b"%04d" % number for number in range(10)]


def test_f_5_4_a_send_that_was_received_succeeds_although_the_peer_disconnects_at_once(pair, keep):
    pair.server.queue_pair.receive([])
    pair.client.queue_pair.send([], context=1)
    succeed(pair.server.cq)
    pair.server.connector.disconnect(DEADLINE_S)
    assert pair.server.connector.state == "disconnected"
    assert contexts(succeed(pair.client.cq)) == [1]
    pair.client.connector.wait_disconnected(DEADLINE_S)


def test_f_6_1_an_error_completion_ends_the_connection_and_cancels_the_rest(pair, keep):
    region = memory(keep, pair.adapter, b"contents")
    pair.client.queue_pair.receive(region, context=10)
    pair.server.queue_pair.receive(memory(keep, pair.server.adapter, 8), context=20)
    forged = ndpy.Sge(region, region.address, 8, region.local_token ^ 0x5A00)
    pair.client.queue_pair.send(forged, context=1)
    pair.client.queue_pair.send(region, context=2, flags=Flags.SILENT_SUCCESS)
    pair.client.queue_pair.send(region, context=3)
    completions = take(pair.client.cq, 4)
    initiator = [completion for completion in completions if completion.operation is Operation.SEND]
    assert contexts(initiator) == [1, 2, 3]
    assert statuses(initiator) == [Status.ACCESS_VIOLATION, Status.CANCELED, Status.CANCELED]
    assert [(c.context, c.status) for c in completions if c not in initiator] == [(10, Status.CANCELED)]
    pair.client.connector.wait_disconnected(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)
    assert statuses(take(pair.server.cq)) == [Status.CANCELED]


def test_f_6_1_the_rest_of_a_batch_is_canceled(pair, keep):
    region = memory(keep, pair.adapter, b"contents")
    forged = ndpy.Sge(region, region.address, 8, region.local_token ^ 0x5A00)
    batch = ndpy.Batch(4)
    for context, element in enumerate([forged, region, region, region]):
        batch.send(element, context=context)
    pair.client.queue_pair.post(batch)
    completions = take(pair.client.cq, 4)
    assert contexts(completions) == [0, 1, 2, 3]
    assert statuses(completions) == [Status.ACCESS_VIOLATION, *[Status.CANCELED] * 3]
    pair.client.connector.wait_disconnected(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)


def test_f_6_5_every_request_reports_exactly_once(pair, keep):
    for context in range(16):
        pair.server.queue_pair.receive([], context=context)
    for context in range(8):
        pair.client.queue_pair.send([], context=context)
    succeed(pair.client.cq, 8)
    pair.client.connector.disconnect(DEADLINE_S)
    completions = take(pair.server.cq, 16)
    assert contexts(completions) == list(range(16))
    assert statuses(completions) == [Status.SUCCESS] * 8 + [Status.CANCELED] * 8
    assert_quiet(pair.server.cq)
    assert_quiet(pair.client.cq)


def test_failed_completions_keep_the_native_status(pair, keep):
    region = memory(keep, pair.server.adapter, b"original", Access.REMOTE_READ)
    remote = expose(keep, pair.server, region)
    beyond = RemoteMemory(remote.address, 9, remote.token)
    pair.client.queue_pair.read(memory(keep, pair.adapter, 9, SINK), beyond)
    (completion,) = take(pair.client.cq)
    assert not completion.ok
    assert completion.native_status != 0
    with pytest.raises(ndpy.ProviderError) as raised:
        completion.raise_for_status()
    assert raised.value.native == completion.native_status
    assert raised.value.operation == "read"
    assert isinstance(raised.value, OSError)


# ---- F.7, F.8: flush and disconnect ----


def test_f_7_1_flush_cancels_both_directions(pair, keep):
    for context in (1, 2):
        pair.client.queue_pair.receive(memory(keep, pair.adapter, 8), context=context)
    pair.client.queue_pair.flush()
    completions = take(pair.client.cq, 2)
    assert contexts(completions) == [1, 2]
    assert statuses(completions) == [Status.CANCELED] * 2
    pair.client.queue_pair.send([], context=3)
    (later,) = take(pair.client.cq)
    assert (later.context, later.status) == (3, Status.CANCELED)


def test_f_7_2_flush_leaves_other_queue_pairs_alone(adapter, keep, pair):
    server = create_end(keep, pair.server.adapter, cq=pair.server.cq)
    second = connect_ends(keep, adapter, create_end(keep, adapter), server)
    server.queue_pair.receive(memory(keep, server.adapter, 8), context=5)
    pair.server.queue_pair.receive(memory(keep, server.adapter, 8), context=6)
    pair.server.queue_pair.flush()
    (completion,) = take(pair.server.cq)
    assert (completion.context, completion.status) == (6, Status.CANCELED)
    second.client.queue_pair.send([])
    assert contexts(succeed(pair.server.cq)) == [5]


def test_f_7_3_flush_works_on_a_queue_pair_that_never_was_connected(adapter, keep):
    """Both completions are there when the first notification fires."""
    end = create_end(keep, adapter)
    region = memory(keep, adapter, 16)
    end.queue_pair.receive(region[0:8], context=1)
    end.queue_pair.receive(region[8:16], context=2)
    notified = end.cq.arm()
    assert not notified.done()
    end.queue_pair.flush()
    notified.result(DEADLINE_S)
    completions = end.cq.poll(2)
    assert contexts(completions) == [1, 2]
    assert statuses(completions) == [Status.CANCELED] * 2


def test_f_7_4_flush_does_not_change_what_has_completed(pair, keep):
    inbox = memory(keep, pair.server.adapter, 4)
    pair.server.queue_pair.receive(inbox, context=1)
    pair.server.queue_pair.receive(inbox, context=2)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"data"))
    succeed(pair.client.cq)
    wait_until(lambda: contents(inbox) == b"data", "the message arrives")
    pair.server.queue_pair.flush()
    assert statuses(take(pair.server.cq, 2)) == [Status.SUCCESS, Status.CANCELED]


def test_f_7_5_flush_of_an_empty_queue_pair_gives_no_completion(adapter, keep):
    end = create_end(keep, adapter)
    end.queue_pair.flush()
    assert_quiet(end.cq)
    end.queue_pair.receive([], context=1)
    end.queue_pair.flush()
    (completion,) = end.cq.wait(DEADLINE_S)
    assert (completion.context, completion.status.name) == (1, "CANCELED")


def test_f_7_6_a_flushed_queue_pair_that_never_was_connected_stays_usable(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    require_reusable_queue_pairs(adapter)
    client, server = create_end(keep, adapter), create_end(keep, peer)
    for end in (client, server):
        end.queue_pair.receive([], context=1)
        end.queue_pair.flush()
        assert statuses(take(end.cq)) == [Status.CANCELED]
    assert_works(keep, connect_ends(keep, adapter, client, server))


@pytest.mark.parametrize("who", ["client", "server"])
def test_f_8_1_a_disconnect_cancels_the_requests_of_both_sides(pair, keep, who):
    for end in pair:
        for context in (1, 2, 3):
            end.queue_pair.receive(memory(keep, end.adapter, 8), context=context)
    getattr(pair, who).connector.disconnect(DEADLINE_S)
    for end in pair:
        completions = take(end.cq, 3)
        assert contexts(completions) == [1, 2, 3]
        assert statuses(completions) == [Status.CANCELED] * 3


def test_f_8_3_messages_before_the_disconnect_are_delivered_first(pair, keep):
    for context in range(6):
        pair.server.queue_pair.receive(memory(keep, pair.server.adapter, 8), context=context)
    for _ in range(4):
        pair.client.queue_pair.send(memory(keep, pair.adapter, b"message!"))
    succeed(pair.client.cq, 4)
    pair.client.connector.disconnect(DEADLINE_S)
    assert statuses(take(pair.server.cq, 6)) == [Status.SUCCESS] * 4 + [Status.CANCELED] * 2


def test_f_8_5_a_queue_pair_has_one_connection_in_its_life(pair, keep):
    pair.client.connector.disconnect(DEADLINE_S)
    listener = keep(pair.server.adapter.listen((host_of(pair.server.adapter), 0)))
    again = keep(pair.adapter.create_connector())
    with pytest.raises(ndpy.NdpyError):
        again.connect(pair.client.queue_pair, listener.address, timeout_s=DEADLINE_S)


def test_f_8_5_after_a_failed_connect_the_queue_pair_is_as_it_was(adapter, keep, peer):
    """The queue pair keeps its posted receives."""

    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    require_reusable_queue_pairs(adapter)
    client, server = create_end(keep, adapter), create_end(keep, peer)
    inbox = memory(keep, adapter, 8)
    client.queue_pair.receive(inbox, context=7)
    offer = ask(keep, adapter, client.queue_pair)
    offer.server.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)
    assert client.cq.poll() == []
    pair = connect_ends(keep, adapter, client, server)
    server.queue_pair.receive([])
    pair.client.queue_pair.send([])
    succeed(server.cq)
    succeed(client.cq)
    server.queue_pair.send(memory(keep, server.adapter, b"kept"))
    assert contexts(succeed(client.cq)) == [7]
    assert contents(inbox) == b"kept\0\0\0\0"


# ---- lifetime ----


def test_a_posted_request_keeps_its_memory(adapter, keep):
    """The program drops all its references. The message still arrives."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    # Both ends are here, also with --peer: the warning comes in the process that drops the region.
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter))
    pair.server.queue_pair.receive(pair.adapter.register(bytearray(16))[4:12], context=3)
    with pytest.warns(ResourceWarning):
        gc.collect()
        pair.client.queue_pair.send(memory(keep, pair.adapter, b"arrives!"))
        (completion,) = succeed(pair.server.cq)
        assert (completion.context, completion.nbytes) == (3, 8)
        del completion
        gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("closes", [True, False])
def test_queues_that_are_dropped_while_a_bind_is_outstanding_are_collected(adapter, closes):
    """The bind refers to its queue pair, and the queue keeps the completion of the request before it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS, ndpy.Capability.MEMORY_WINDOWS)
    pair = connect_ends(_forget, adapter, create_end(_forget, adapter), create_end(_forget, adapter))
    end = pair.client
    region = memory(_forget, adapter, 4096)
    end.queue_pair.write([], RemoteMemory(0, 0, 0))
    # Python has the list no more when the bind is posted.
    assert len(succeed(end.cq)) == 1
    end.queue_pair.bind(adapter.create_memory_window(), region, Access.REMOTE_READ, flags=Flags.SILENT_SUCCESS)
    assert len(end.queue_pair._posted_requests.initiator) == 1
    left = [weakref.ref(end.queue_pair), weakref.ref(end.cq)]
    if closes:
        end.connector.close()
        end.queue_pair.close()
        end.cq.close()
    del end, pair, region

    def collected():
        gc.collect()
        return not any(reference() for reference in left)

    wait_until(collected, "the queue pair and its queue are collected")


def _forget(resource):
    """Keeps nothing for the end of the test."""
    return resource


def test_a_closed_queue_pair_cannot_be_used(adapter, keep):
    end = create_end(keep, adapter)
    region = memory(keep, adapter, 8)
    end.queue_pair.close()
    end.queue_pair.close()
    remote = RemoteMemory(region.address, 8, 1)
    for use in (
        lambda: end.queue_pair.send(region),
        lambda: end.queue_pair.send([region]),
        lambda: end.queue_pair.receive(region),
        lambda: end.queue_pair.read(region, remote),
        lambda: end.queue_pair.write(region, remote),
        end.queue_pair.flush,
    ):
        with pytest.raises(ndpy.ClosedError):
            use()


def test_messages_in_both_directions(pair, keep):
    for number in range(5):
        send_message(keep, pair.client, pair.server, b"to the server %d" % number)
        send_message(keep, pair.server, pair.client, b"to the client %d" % number)


def test_f_7_1_what_succeeded_in_silence_does_not_hold_up_the_close_after_a_flush(pair, monkeypatch):
    """On iWARP nothing tells of it after the flush."""
    monkeypatch.setattr("ndpy.objects.queue_pair._FLUSH_S", 20 * DEADLINE_S)
    pair.server.queue_pair.receive([], context=1)
    pair.client.queue_pair.send([], flags=Flags.SILENT_SUCCESS)
    succeed(pair.server.cq)
    pair.client.queue_pair.receive([], context=2)
    pair.client.queue_pair.flush()
    wait_until(lambda: any(done.context == 2 for done in pair.client.cq.poll()), "the receive is cancelled")
    begin = time.monotonic()
    pair.client.queue_pair.close()
    assert time.monotonic() - begin < DEADLINE_S
