"""Section F of the contract, F.6 to F.8: errors, flushing, and the end of a connection."""

from __future__ import annotations

import pytest
from consumer import (
    Side,
    brief,
    connect,
    establish,
    get_address,
    get_results,
    make_pair,
    no_completion,
    one_way,
    pointer,
)
from version2 import NOTIFY_ANY, NULL, Kind, Mr, Op, Status, raw

# F.6 Errors


def test_f_6_1_and_f_6_5_only_the_first_failure_is_specific_and_nothing_is_lost(pair):
    active, passive = pair
    for i in range(5):
        active.receive(active.region.sge(0, 64), context=100 + i)
    remote = passive.region
    active.write(active.region.sge(0, 8), to=remote.address, token=remote.remote, context=0)
    active.write(active.region.sge(0, 8), to=remote.address, token=0x77, context=1)
    for i in range(2, 12):
        active.write(
            active.region.sge(0, 8), to=remote.address, token=remote.remote, context=i, flags=i % 2 * Op.SILENT_SUCCESS
        )
    done = active.take(17)
    initiator = [(d.status, d.context) for d in done if d.kind == Kind.WRITE]
    assert initiator[:2] == [(Status.SUCCESS, 0), (Status.ACCESS_VIOLATION, 1)]
    assert initiator[2:] == [(Status.CANCELED, i) for i in range(2, 12)]
    receives = [(d.status, d.context) for d in done if d.kind == Kind.RECEIVE]
    assert receives == [(Status.CANCELED, 100 + i) for i in range(5)]
    active.send(active.region.sge(0, 8), context=50)
    assert brief(active.take(1)) == [(Kind.SEND, Status.CANCELED, 50)]
    assert no_completion(active.cq)


# F.7 Flush


def test_f_7_1_flush_cancels_everything_outstanding(pair):
    active, _passive = pair
    for i in range(3):
        active.receive(active.region.sge(0, 64), context=i)
    active.send(active.region.sge(0, 8), context=10)  # the peer has no Receive
    active.send(active.region.sge(0, 8), context=11)
    assert active.qp.Flush() == Status.SUCCESS
    done = active.take(5)
    assert {d.status for d in done} == {Status.CANCELED}
    assert [d.context for d in done if d.kind == Kind.RECEIVE] == [0, 1, 2]
    assert [d.context for d in done if d.kind == Kind.SEND] == [10, 11]


def test_f_7_3_one_notification_and_both_completions(kit, node):
    cq = node.cq()
    qp = node.qp(cq)
    for _ in range(20):
        for context in (1, 2):
            assert qp.Receive(pointer(context), NULL, 0) == Status.SUCCESS
        request = kit.issue(cq, "Notify", NOTIFY_ANY)
        assert request.pending()
        assert qp.Flush() == Status.SUCCESS
        assert request.result() == Status.SUCCESS
        assert brief(get_results(cq, 2)) == [(Kind.RECEIVE, Status.CANCELED, 1), (Kind.RECEIVE, Status.CANCELED, 2)]


def test_f_7_6_after_a_flush_later_posts_are_cancelled_on_a_connected_queue_pair(pair):
    active, _ = pair
    active.qp.Flush()
    assert active.receive(context=1) == Status.SUCCESS
    assert active.send(active.region.sge(0, 8), context=2) == Status.SUCCESS
    done = active.take(2)
    assert sorted(brief(done)) == [(Kind.RECEIVE, Status.CANCELED, 1), (Kind.SEND, Status.CANCELED, 2)]


# F.8 Disconnect


def pend(side, receives=2, sends=2):
    for i in range(receives):
        side.receive(side.region.sge(0, 64), context=i)
    for i in range(sends):
        side.send(side.region.sge(0, 65536), context=100 + i)


@pytest.mark.parametrize("how", ["disconnect", "queue pair", "connector", "both"])
def test_f_8_1_f_8_2_m_12_an_end_flushes_both_sides(pair, how):
    active, passive = pair
    pend(active, 2, 0)
    pend(passive, 3, 0)
    if how == "disconnect":
        assert active.disconnect() == Status.SUCCESS
    if how in ("queue pair", "both"):
        active.qp.release()
    if how in ("connector", "both"):
        active.connector.release()
    assert brief(active.take(2)) == [(Kind.RECEIVE, Status.CANCELED, i) for i in range(2)]
    assert brief(passive.take(3)) == [(Kind.RECEIVE, Status.CANCELED, i) for i in range(3)]


def test_f_8_1_a_disconnect_cancels_initiator_requests_of_both_sides(pair):
    active, passive = pair
    # Neither side has Receives, so these Sends wait.
    pend(active, 0, 2)
    pend(passive, 0, 2)
    assert active.disconnect() == Status.SUCCESS
    assert brief(active.take(2)) == [(Kind.SEND, Status.CANCELED, 100 + i) for i in range(2)]
    assert brief(passive.take(2)) == [(Kind.SEND, Status.CANCELED, 100 + i) for i in range(2)]


def test_f_8_3_messages_before_the_disconnect_are_delivered_first(kit):
    for _ in range(10):
        active, passive = make_pair(kit)
        for i in range(12):
            passive.receive(passive.region.sge(i * 4096, 4096), context=i)
        for i in range(10):
            active.region.put(i * 4096, bytes([i + 1]) * 4096)
            active.send(active.region.sge(i * 4096, 4096), context=i)
        assert [d.status for d in active.take(10)] == [Status.SUCCESS] * 10
        assert active.disconnect() == Status.SUCCESS
        done = passive.take(12)
        assert [d.context for d in done] == list(range(12))
        assert [d.status for d in done] == [Status.SUCCESS] * 10 + [Status.CANCELED] * 2
        assert passive.region.get(0, 40960) == b"".join(bytes([i + 1]) * 4096 for i in range(10))


def test_f_8_5_a_used_queue_pair_connects_no_more(kit, pair):
    active, passive = pair
    assert active.disconnect() == Status.SUCCESS
    listener = passive.node.listener()
    again = connect(kit, active.node.connector(), active.qp, get_address(listener, "GetLocalAddress"))
    assert again.result().failed


def test_f_8_5_after_a_failed_connect_the_queue_pair_is_as_before(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    active.receive(active.region.sge(0, 64), context=5)
    closed = passive.node.listener()
    address = get_address(closed, "GetLocalAddress")
    closed.release()
    assert connect(kit, active.connector, active.qp, address).result() == Status.CONNECTION_REFUSED
    assert no_completion(active.cq)
    establish(active, passive)
    passive.send(passive.region.sge(0, 8))
    assert brief(active.take(1)) == [(Kind.RECEIVE, Status.SUCCESS, 5)]


def test_f_8_6_a_queue_pair_is_on_one_connector_at_a_time(kit, pair):
    active, passive = pair
    listener = passive.node.listener()
    to = get_address(listener, "GetLocalAddress")
    assert connect(kit, active.node.connector(), active.qp, to).result() == Status.CONNECTION_ACTIVE
    one_way(active, passive, b"unharmed")


def test_m_15_an_inline_failure_leaves_the_connection(pair):
    active, passive = pair
    too_many = [passive.region.sge(0, 1)] * (passive.node.info.MaxReceiveSge + 1)
    assert passive.try_receive(*too_many) == Status.DATA_OVERRUN
    assert passive.qp.Receive(NULL, NULL, 1).failed
    one_way(active, passive, b"goes on")


@pytest.mark.parametrize("flags", [Mr.LOCAL_WRITE, Mr.REMOTE_WRITE])
def test_f_receives_of_several_regions(kit, pair, flags):
    active, passive = pair
    others = [passive.node.region(16, flags) for _ in range(3)]
    passive.receive(*[region.sge() for region in others])
    active.region.put(0, bytes(range(48)))
    active.send(active.region.sge(0, 40))
    assert passive.one().bytes == 40
    assert b"".join(region.get() for region in others) == bytes(range(40)) + bytes(8)


def test_f_8_6_connect_with_something_else_than_a_queue_pair(kit, node):
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")
    assert connect(kit, node.bound_connector(), raw(node.cq()), to).result() == Status.INVALID_PARAMETER_1
