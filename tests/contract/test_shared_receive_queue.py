"""Shared receive queues: contract G.5 and G.6."""

from __future__ import annotations

import time

import pytest
from kit.helpers import (
    DEADLINE_S,
    QUIET_S,
    assert_quiet,
    connect_ends,
    contents,
    create_end,
    memory,
    require,
    statuses,
    succeed,
    take,
)
from kit.quirks import has_quirk, skip_where
from kit.threads import Elsewhere

import ndpy
from ndpy import Access, Status
from ndpy.vocabulary.quirks import Quirk


@pytest.fixture
def shared(keep, adapter):
    """A shared receive queue, if the adapter has them."""
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    return keep(adapter.create_shared_receive_queue(16))


@pytest.fixture
def pairs(keep, adapter, shared):
    """Two connections. Both server ends take receives from the shared queue. Each has its own completion queue."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return [
        connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, srq=shared)) for _ in range(2)
    ]


def send(keep, pair, data: bytes) -> None:
    pair.client.queue_pair.send(memory(keep, pair.adapter, data, Access.NONE) if data else [])


def test_g_5_1_the_capability_and_the_limit_agree(adapter):
    has = ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities
    assert has == (adapter.info.max_shared_receive_queue_depth > 0)
    if not has:
        with pytest.raises(ndpy.UnsupportedError):
            adapter.create_shared_receive_queue(16)


def test_g_5_2_depths_and_elements_beyond_the_limits_are_refused(adapter, shared):
    info = adapter.info
    for depth, max_sge in (
        (info.max_shared_receive_queue_depth + 1, 1),
        (0, 1),
        (16, info.max_receive_sge + 1),
    ):
        with pytest.raises(ndpy.LimitExceededError):
            adapter.create_shared_receive_queue(depth, max_sge=max_sge)


def test_g_6_1_receives_can_be_posted_before_any_connection_and_up_to_the_depth(adapter, keep):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    queue = keep(adapter.create_shared_receive_queue(4))
    region = memory(keep, adapter, 64)
    for context in range(4):
        queue.receive(region[16 * context : 16 * (context + 1)], context=context)
    with pytest.raises(ndpy.QueueFullError, match="4"):
        queue.receive([], context=9)
    assert issubclass(ndpy.QueueFullError, ndpy.ProviderError)


def test_g_6_1_too_many_elements_are_refused(adapter, keep, shared):
    region = memory(keep, adapter, 8)
    with pytest.raises(ndpy.LimitExceededError):
        shared.receive([region[0:1]] * (adapter.info.max_receive_sge + 1))


def test_g_6_1_regions_of_another_adapter_are_refused(keep, shared, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    with pytest.raises(ndpy.ForeignObjectError):
        shared.receive(memory(keep, other, 8))


@pytest.mark.parametrize(("context", "error"), [(-1, ValueError), (1 << 64, ValueError), ("a", TypeError)])
def test_a_receive_with_a_wrong_argument_is_refused_and_takes_no_place(adapter, keep, context, error):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    shared = keep(adapter.create_shared_receive_queue(1))
    for _ in range(3):
        with pytest.raises(error, match="context"):
            shared.receive([], context=context)
        with pytest.raises(TypeError, match="an element is a region or a slice of one"):
            shared.receive([bytearray(8)])
    shared.receive([], context=(1 << 64) - 1)
    with pytest.raises(ndpy.QueueFullError):
        shared.receive([])


def test_g_6_2_messages_take_the_oldest_receive_and_report_to_their_queue_pair(adapter, keep, shared, pairs):
    regions = [memory(keep, adapter, 8) for _ in range(4)]
    for context, region in enumerate(regions):
        shared.receive(region, context=context)
    for turn, data in ((0, b"first"), (1, b"second"), (1, b"third"), (0, b"fourth")):
        pair = pairs[turn]
        send(keep, pair, data)
        (completion,) = succeed(pair.server.cq)
        assert completion.queue_pair is pair.server.queue_pair
        assert completion.nbytes == len(data)
        assert contents(regions[completion.context]) == data.ljust(8, b"\0")
        succeed(pair.client.cq)
    assert [contents(region).rstrip(b"\0") for region in regions] == [b"first", b"second", b"third", b"fourth"]


def test_g_6_2_slots_are_used_again_and_again(keep, shared, pairs):
    for number in range(40):
        shared.receive([], context=number)
        pair = pairs[number % 2]
        send(keep, pair, b"")
        (completion,) = succeed(pair.server.cq)
        assert completion.context == number
        succeed(pair.client.cq)


def test_g_6_3_arm_notifies_below_the_threshold(adapter, keep):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES, ndpy.Capability.LOOPBACK_CONNECTIONS)
    shared = keep(adapter.create_shared_receive_queue(16))
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, srq=shared))
    for context in range(4):
        shared.receive([], context=context)
    shared.modify(threshold=3)
    first, second = shared.arm(), shared.arm()
    send(keep, pair, b"")
    succeed(pair.server.cq)
    with pytest.raises(ndpy.TimeoutError):
        first.result(QUIET_S)
    send(keep, pair, b"")
    succeed(pair.server.cq)
    first.result(DEADLINE_S)
    second.result(DEADLINE_S)
    shared.arm().result(DEADLINE_S)


def test_g_5_3_modify_changes_the_depth(adapter, keep, shared):
    for context in range(8):
        shared.receive([], context=context)
    with pytest.raises(ndpy.LimitExceededError):
        shared.modify(adapter.info.max_shared_receive_queue_depth + 1)
    with pytest.raises(ndpy.LimitExceededError):
        shared.modify(4)
    assert shared.depth == 16
    try:
        shared.modify(32)
    except ndpy.UnsupportedError:
        assert shared.depth == 16
        return
    assert shared.depth == 32
    for context in range(8, 32):
        shared.receive([], context=context)
    with pytest.raises(ndpy.QueueFullError):
        shared.receive([])


def test_g_6_5_a_receive_too_small_ends_one_connection_only(adapter, keep, shared, pairs):
    small, large = memory(keep, adapter, 4), memory(keep, adapter, 64)
    shared.receive(small, context=1)
    shared.receive(large, context=2)
    send(keep, pairs[0], b"much too long")
    (completion,) = take(pairs[0].server.cq)
    assert (completion.context, completion.status) == (1, Status.BUFFER_OVERFLOW)
    send(keep, pairs[1], b"fits")
    (completion,) = succeed(pairs[1].server.cq)
    assert completion.context == 2


def test_g_6_6_receives_go_to_the_shared_queue_only(adapter, keep, pairs):
    with pytest.raises(ndpy.UnsupportedError, match="shared"):
        pairs[0].server.queue_pair.receive(memory(keep, adapter, 8))


def test_g_6_7_an_empty_queue_makes_the_sender_wait(adapter, keep, shared, pairs):
    skip_where(adapter, Quirk.IWARP_NO_RECEIVER_NOT_READY)
    send(keep, pairs[0], b"patient")
    assert_quiet(pairs[0].client.cq, 1.0)
    region = memory(keep, adapter, 8)
    shared.receive(region, context=3)
    assert [c.context for c in succeed(pairs[0].server.cq)] == [3]
    succeed(pairs[0].client.cq)
    assert contents(region) == b"patient\0"


@pytest.mark.parametrize("how", ["disconnect", "flush", "close"])
def test_g_6_8_waiting_receives_survive_the_end_of_a_queue_pair(keep, shared, pairs, how):
    for context in (1, 2):
        shared.receive([], context=context)
    end = pairs[0].server
    if how == "disconnect":
        end.connector.disconnect(DEADLINE_S)
    elif how == "flush":
        end.queue_pair.flush()
    else:
        end.connector.close()
        end.queue_pair.close()
    assert_quiet(end.cq)
    for context in (1, 2):
        send(keep, pairs[1], b"")
        (completion,) = succeed(pairs[1].server.cq)
        assert completion.context == context


def test_completions_outlive_their_queue_pair(keep, shared, pairs):
    shared.receive([], context=6)
    send(keep, pairs[0], b"")
    succeed(pairs[0].client.cq)
    pairs[0].server.connector.close()
    pairs[0].server.queue_pair.close()
    (completion,) = take(pairs[0].server.cq)
    assert (completion.context, completion.status) == (6, Status.SUCCESS)


def test_a_queue_in_use_refuses_to_close(shared, pairs):
    with pytest.raises(ndpy.DeviceBusyError, match="QueuePair"):
        shared.close()
    assert not shared.closed


def test_a_closed_queue_cannot_be_used(adapter):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    queue = adapter.create_shared_receive_queue(4)
    queue.receive([], context=1)
    queue.close()
    queue.close()
    for use in (lambda: queue.receive([]), lambda: queue.modify(8), queue.arm):
        with pytest.raises(ndpy.ClosedError):
            use()


def test_a_peers_disconnect_does_not_touch_the_shared_receives(keep, shared, pairs):
    shared.receive([], context=1)
    pairs[0].client.connector.disconnect(DEADLINE_S)
    pairs[0].server.connector.wait_disconnected(DEADLINE_S)
    assert pairs[0].server.cq.poll() == []
    send(keep, pairs[1], b"")
    assert statuses(take(pairs[1].server.cq)) == [Status.SUCCESS]


def test_notifications_that_were_given_up_leave_nothing_with_the_queue(adapter, keep):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    shared = keep(adapter.create_shared_receive_queue(8, threshold=2))
    region = memory(keep, adapter, 64)
    for _ in range(4):
        shared.receive(region)
    for _ in range(50):
        assert shared.arm().cancel()
    assert not shared._armed
    assert len(getattr(shared, "_requests", ())) <= 1
    again = shared.arm()
    assert not again.done()
    shared.close()
    with pytest.raises(ndpy.CanceledError):
        again.result(DEADLINE_S)


def test_the_adapter_tells_of_the_last_receive_unless_the_table_says_otherwise(keep, adapter):
    require(adapter, ndpy.Capability.EVENTS)
    srq = keep(adapter.create_shared_receive_queue(4))
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, srq=srq))
    silent = has_quirk(adapter, Quirk.RXE_TELLS_NO_LAST_RECEIVE) or has_quirk(adapter, Quirk.SIW_TELLS_NO_LAST_RECEIVE)
    with adapter.events() as events:
        pair.server.queue_pair.flush()
        if silent:
            with pytest.raises(ndpy.TimeoutError):
                while events.get(QUIET_S).kind is not ndpy.EventKind.LAST_RECEIVE_TAKEN:
                    pass
        else:
            while events.get(DEADLINE_S).kind is not ndpy.EventKind.LAST_RECEIVE_TAKEN:
                pass


def test_a_queue_pair_is_destroyed_after_it_has_taken_its_last_shared_receive(keep, adapter):
    require(adapter, ndpy.Capability.EVENTS)
    skip_where(adapter, Quirk.RXE_TELLS_NO_LAST_RECEIVE)
    skip_where(adapter, Quirk.SIW_TELLS_NO_LAST_RECEIVE)
    srq = keep(adapter.create_shared_receive_queue(4))
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, srq=srq))
    # The thread that handles the event is held up, for less time than close() waits.
    with adapter._events.resting(DEADLINE_S):
        closing = Elsewhere(pair.server.queue_pair.close).start()
        time.sleep(0.2)
        waits = not closing.over
    closing.result()
    assert waits
    assert pair.server.queue_pair.closed


def test_a_driver_that_never_tells_of_the_last_receive_is_waited_for_once(keep, adapter, monkeypatch):
    require(adapter, ndpy.Capability.EVENTS)
    monkeypatch.setattr(adapter, "_on_queue_pair_event", lambda *_: None)
    monkeypatch.setattr(adapter, "_tells_last_receives", None)
    monkeypatch.setattr("ndpy.objects.queue_pair._FLUSH_S", 0.05)
    srq = keep(adapter.create_shared_receive_queue(4))
    for expected in (None, False):
        assert adapter._tells_last_receives is expected
        pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, srq=srq))
        pair.server.queue_pair.close()
    assert adapter._tells_last_receives is False
