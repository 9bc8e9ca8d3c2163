"""Section F of the contract: queue pairs, their requests, order, errors and ends."""

from __future__ import annotations

import os
import time

import pytest
from consumer import (
    Memory,
    Side,
    accept,
    connect,
    establish,
    get_address,
    get_results,
    make_pair,
    no_completion,
    pointer,
    sges,
    take,
    wait_until,
)
from nd2 import NOTIFY_ANY, NULL, PAGE, Kind, Mr, Op, Status, ffi, raw

LIMITS = "MaxReceiveQueueDepth", "MaxInitiatorQueueDepth", "MaxReceiveSge", "MaxInitiatorSge", "MaxInlineDataSize"


def brief(done):
    return [(d.kind, d.status, d.context) for d in done]


def one_way(active, passive, data, flags=0):
    """Send data, check that they arrive."""
    active.region.put(0, data)
    assert passive.receive(passive.region.sge(0, 4096), context=1) == Status.SUCCESS
    assert active.send(active.region.sge(0, len(data)), context=2, flags=flags) == Status.SUCCESS
    got = passive.one()
    assert (got.kind, got.status, got.context, got.bytes) == (Kind.RECEIVE, Status.SUCCESS, 1, len(data))
    assert passive.region.get(0, len(data)) == data


# F.1 Creation


@pytest.mark.parametrize("over", range(5))
def test_f_1_1_one_above_a_limit_is_refused_by_number(node, over):
    cq = node.cq()
    values = [4, 4, 1, 1, 0]
    values[over] = getattr(node.info, LIMITS[over]) + 1
    code, _ = node.try_create("QueuePair", cq, cq, NULL, *values)
    assert (
        code
        == (
            Status.INVALID_PARAMETER_5,
            Status.INVALID_PARAMETER_6,
            Status.INVALID_PARAMETER_7,
            Status.INVALID_PARAMETER_8,
            Status.INVALID_PARAMETER_9,
        )[over]
    )


@pytest.mark.parametrize("over", range(3))
def test_f_1_1_one_above_a_limit_is_refused_with_a_shared_queue(node, over):
    cq, srq = node.cq(), node.srq()
    values = [4, 1, 0]
    values[over] = getattr(node.info, (LIMITS[1], LIMITS[3], LIMITS[4])[over]) + 1
    code, _ = node.try_create("QueuePairWithSrq", cq, cq, srq, NULL, *values, name="IND2QueuePair")
    assert code == (Status.INVALID_PARAMETER_6, Status.INVALID_PARAMETER_7, Status.INVALID_PARAMETER_8)[over]


def test_f_1_2_every_limit_at_once_succeeds(node):
    cq = node.cq()
    values = [getattr(node.info, name) for name in LIMITS]
    assert node.create("QueuePair", cq, cq, NULL, *values)
    assert node.create(
        "QueuePairWithSrq", cq, cq, node.srq(), NULL, values[1], values[3], values[4], name="IND2QueuePair"
    )


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("wrong", ["null", "region", "other adapter"])
def test_f_1_1_and_f_1_3_an_invalid_completion_queue_is_refused(kit, node, position, wrong):
    bad = {"null": None, "region": node.mr(), "other adapter": kit.node().cq()}[wrong]
    queues = [node.cq(), node.cq()]
    queues[position] = bad
    expected = (Status.INVALID_PARAMETER_2, Status.INVALID_PARAMETER_3)[position]
    assert node.try_create("QueuePair", *queues, NULL, 4, 4, 1, 1, 0) == (expected, None)
    code, _ = node.try_create("QueuePairWithSrq", *queues, node.srq(), NULL, 4, 1, 0, name="IND2QueuePair")
    assert code == expected


@pytest.mark.parametrize("wrong", ["null", "region", "other adapter"])
def test_f_1_1_an_invalid_shared_queue_is_refused(kit, node, wrong):
    bad = {"null": None, "region": node.mr(), "other adapter": kit.node().srq()}[wrong]
    cq = node.cq()
    code, _ = node.try_create("QueuePairWithSrq", cq, cq, bad, NULL, 4, 1, 0, name="IND2QueuePair")
    assert code == Status.INVALID_PARAMETER_4


def test_f_1_4_one_completion_queue_serves_many_queue_pairs(kit):
    a, b = kit.node(), kit.node()
    cqs = a.cq(), b.cq()
    sides = []
    for i in range(4):
        active, passive = Side(a, 10 + i, cq=cqs[0]), Side(b, 20 + i, cq=cqs[1])
        establish(active, passive)
        sides.append((active, passive))
    for active, passive in sides:
        passive.receive(passive.region.sge(0, 64), context=passive.context)
        active.send(active.region.sge(0, 64), context=active.context)
    sent, received = take(cqs[0], 4), take(cqs[1], 4)
    assert sorted((d.queue_pair, d.context) for d in sent) == [(10 + i, 10 + i) for i in range(4)]
    assert sorted((d.queue_pair, d.context) for d in received) == [(20 + i, 20 + i) for i in range(4)]


def test_f_1_5_queue_depth_is_independent_of_the_completion_queues(kit, node):
    cq = node.cq(2)
    assert node.qp(cq, depth=64)


def test_f_1_6_m_9_one_element_asked_for_grants_two(kit):
    active, passive = make_pair(kit, sge=1)
    passive.receive(passive.region.sge(0, 8), passive.region.sge(100, 8))
    active.region.put(0, b"firstpart2ndpart")
    assert active.send(active.region.sge(0, 9), active.region.sge(9, 7)) == Status.SUCCESS
    assert passive.one().bytes == 16
    assert passive.region.get(0, 8) + passive.region.get(100, 8) == b"firstpart2ndpart"


def test_f_1_7_depth_0_is_allowed_and_every_post_finds_it_full(kit):
    active, passive = make_pair(kit, depth=0, receive_depth=0)
    full = Status.NO_MORE_ENTRIES
    assert active.try_receive(active.region.sge(0, 8)) == full
    assert active.try_send(active.region.sge(0, 8)) == full
    remote = {"token": passive.region.remote}
    assert active.try_write(active.region.sge(0, 8), to=passive.region.address, **remote) == full
    assert active.try_read(active.region.sge(0, 8), at=passive.region.address, **remote) == full


def test_f_1_8_completion_and_shared_queue_may_be_released_before_the_queue_pair(kit):
    active = Side(kit.node(), 1)
    b = kit.node()
    srq = b.srq()
    passive = Side(b, 2, srq=srq)
    establish(active, passive)
    array = sges(passive.region.sge(0, 64))
    assert srq.Receive(NULL, array, 1) == Status.SUCCESS
    srq.release()
    active.cq.release()
    active.send(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
    assert passive.one().status == Status.SUCCESS
    passive.cq.release()
    assert active.disconnect() == Status.SUCCESS
    assert passive.qp.release() == 0
    assert active.qp.release() == 0


@pytest.mark.parametrize("context", [0, 1, (1 << 64) - 1])
def test_f_1_9_the_context_comes_back_unchanged(node, context):
    cq = node.cq()
    qp = node.qp(cq, context=context)
    qp.Receive(pointer(context), NULL, 0)
    qp.Flush()
    done = take(cq, 1)[0]
    assert (done.queue_pair, done.context) == (context, context)


def test_f_1_10_the_last_release_disconnects_and_flushes(kit, pair):
    active, passive = pair
    sent = kit.issue(active.cq, "Notify", NOTIFY_ANY)
    one_way(active, passive, b"before")
    assert sent.result() == Status.SUCCESS
    for context in (1, 2):
        active.receive(active.region.sge(0, 64), context=context)
        passive.receive(passive.region.sge(0, 64), context=context)
    gone = kit.issue(passive.connector, "NotifyDisconnect")
    assert active.qp.release() == 0
    assert brief(active.take(3)) == [
        (Kind.SEND, Status.SUCCESS, 2),
        (Kind.RECEIVE, Status.CANCELED, 1),
        (Kind.RECEIVE, Status.CANCELED, 2),
    ]
    assert brief(passive.take(2)) == [(Kind.RECEIVE, Status.CANCELED, 1), (Kind.RECEIVE, Status.CANCELED, 2)]
    assert gone.result() == Status.SUCCESS


# F.2 Return values when posting


def test_f_2_2_without_a_connection_initiator_requests_are_refused(kit, node):
    side = Side(node, 1)
    element = side.region.sge(0, 8)
    invalid = Status.CONNECTION_INVALID

    def refused():
        assert side.try_send(element) == invalid
        assert side.try_write(element, to=0, token=0) == invalid
        assert side.try_read(element, at=0, token=0) == invalid
        assert no_completion(side.cq)

    refused()
    other = Side(kit.node(), 2)
    listener = other.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", other.connector)
    connecting = connect(kit, side.connector, side.qp, get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    assert other.try_send(other.region.sge(0, 8)) == invalid
    refused()
    accepting = accept(kit, other.connector, other.qp)
    assert connecting.result() == Status.SUCCESS
    refused()
    assert other.try_send(other.region.sge(0, 8)) == invalid
    assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS
    other.receive(other.region.sge(0, 8))
    assert side.send(element) == Status.SUCCESS
    assert side.one().status == Status.SUCCESS


def test_f_2_3_receive_may_be_posted_at_any_time(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    passive.receive(passive.region.sge(0, 8), context=1)
    active.receive(active.region.sge(0, 8), context=1)
    establish(active, passive)
    passive.receive(passive.region.sge(0, 8), context=2)
    for _ in range(2):
        active.send(active.region.sge(0, 8))
    assert brief(passive.take(2)) == [(Kind.RECEIVE, Status.SUCCESS, 1), (Kind.RECEIVE, Status.SUCCESS, 2)]


@pytest.mark.parametrize("who", ["peer", "self"])
def test_f_2_4_m_10_after_the_end_requests_complete_with_canceled(kit, pair, who):
    active, passive = pair
    gone = kit.issue(active.connector, "NotifyDisconnect")
    assert (passive if who == "peer" else active).disconnect() == Status.SUCCESS
    if who == "peer":
        assert gone.result() == Status.SUCCESS
    window = active.node.window()
    posts = [
        lambda: active.try_send(active.region.sge(0, 8), context=1),
        lambda: active.try_receive(active.region.sge(0, 8), context=2),
        lambda: active.try_write(active.region.sge(0, 8), to=0, token=0, context=3),
        lambda: active.try_read(active.region.sge(0, 8), at=0, token=0, context=4),
        lambda: active.try_bind(active.region, window, active.region.address, 8, context=5),
        lambda: active.try_invalidate(window, context=6),
    ]
    for i, post in enumerate(posts):
        assert post() == Status.SUCCESS
        done = active.one()
        assert (done.status, done.context) == (Status.CANCELED, i + 1)


def test_f_2_5_a_full_receive_queue_refuses_and_nothing_is_lost(kit):
    active, passive = make_pair(kit, depth=8)
    for i in range(8):
        assert passive.receive(passive.region.sge(i * 64, 64), context=i) == Status.SUCCESS
    assert passive.try_receive(passive.region.sge(0, 64), context=99) == Status.NO_MORE_ENTRIES
    for _ in range(8):
        active.send(active.region.sge(0, 4))
        assert active.one().status == Status.SUCCESS
    assert [d.context for d in passive.take(8)] == list(range(8))
    assert no_completion(passive.cq)


@pytest.mark.parametrize("flags", [0, Op.SILENT_SUCCESS])
def test_f_2_5_a_full_initiator_queue_refuses_also_with_silent_requests(kit, flags):
    active, passive = make_pair(kit, depth=8)
    # No Receive is posted, so the first Send holds up all the others.
    posted = 0
    while (code := active.try_send(active.region.sge(0, 4), context=posted, flags=flags)) == Status.SUCCESS:
        posted += 1
        assert posted <= 64, "the queue has no end"
    assert code == Status.NO_MORE_ENTRIES
    assert posted >= 8
    received = 0
    while received < posted:
        passive.receive(passive.region.sge(0, 4))
        received += 1
        assert passive.one().status == Status.SUCCESS
    if not flags:
        assert [d.context for d in active.take(posted)] == list(range(posted))
    passive.receive(passive.region.sge(0, 4))
    wait_until(lambda: active.try_send(active.region.sge(0, 4), context=77) == Status.SUCCESS, "a slot becomes free")
    assert active.one().context == 77
    assert no_completion(active.cq)


def test_f_2_6_more_elements_than_the_adapters_maximum_are_refused(pair):
    active, passive = pair
    info = active.node.info
    element = active.region.sge(0, 1)
    assert active.try_send(*[element] * (info.MaxInitiatorSge + 1)) == Status.DATA_OVERRUN
    assert active.try_receive(*[element] * (info.MaxReceiveSge + 1)) == Status.DATA_OVERRUN
    remote = {"token": passive.region.remote}
    too_many = [element] * (info.MaxInitiatorSge + 1)
    assert active.try_write(*too_many, to=passive.region.address, **remote) == Status.DATA_OVERRUN
    assert active.try_read(*too_many, at=passive.region.address, **remote) == Status.DATA_OVERRUN
    one_way(active, passive, b"unaffected")


def test_f_2_6_the_adapters_maximum_of_elements_works(kit):
    probe = kit.node()
    count = probe.info.MaxInitiatorSge
    active, passive = make_pair(kit, sge=count)
    pieces = [active.region.sge(i * 100, i + 1) for i in range(count)]
    for i in range(count):
        active.region.put(i * 100, bytes([65 + i]) * (i + 1))
    expected = b"".join(bytes([65 + i]) * (i + 1) for i in range(count))
    passive.receive(*[passive.region.sge(i * 50, 9) for i in range(count)])
    assert active.send(*pieces) == Status.SUCCESS
    assert passive.one().bytes == len(expected)
    assert b"".join(passive.region.get(i * 50, 9) for i in range(count))[: len(expected)] == expected
    assert active.write(*pieces, to=passive.region.address + 8192, token=passive.region.remote) == Status.SUCCESS
    assert [d.status for d in active.take(2)] == [Status.SUCCESS] * 2
    assert passive.region.get(8192, len(expected)) == expected
    sink = [active.region.sge(16384 + i * 100, i + 1) for i in range(probe.info.MaxReadSge)]
    assert active.read(*sink, at=passive.region.address + 8192, token=passive.region.remote) == Status.SUCCESS
    assert active.one().status == Status.SUCCESS
    got = b"".join(active.region.get(16384 + i * 100, i + 1) for i in range(probe.info.MaxReadSge))
    assert got == expected[: len(got)]


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.WRITE, Kind.READ])
def test_f_2_7_more_bytes_than_a_transfer_can_have_are_refused(pair, kind):
    active, passive = pair
    limit = active.node.info.MaxTransferLength
    elements = [(active.region.address, limit, active.region.local), active.region.sge(0, 1)]
    remote = {"token": passive.region.remote}
    code = {
        Kind.SEND: lambda: active.try_send(*elements),
        Kind.WRITE: lambda: active.try_write(*elements, to=passive.region.address, **remote),
        Kind.READ: lambda: active.try_read(*elements, at=passive.region.address, **remote),
    }[kind]()
    assert code == Status.BUFFER_OVERFLOW
    one_way(active, passive, b"unaffected")


@pytest.mark.parametrize(
    ("kind", "allowed", "expected"),
    [
        (Kind.SEND, Op.SILENT_SUCCESS | Op.READ_FENCE | Op.SOLICIT | Op.INLINE, Status.INVALID_PARAMETER_4),
        (Kind.WRITE, Op.SILENT_SUCCESS | Op.READ_FENCE | Op.INLINE, Status.INVALID_PARAMETER_6),
        (Kind.READ, Op.SILENT_SUCCESS | Op.READ_FENCE, Status.INVALID_PARAMETER_6),
    ],
)
def test_f_2_8_and_f_2_9_every_flag_not_allowed_is_refused(pair, kind, allowed, expected):
    active, passive = pair
    for bit in [1 << i for i in range(32)]:
        if bit & allowed:
            continue
        if kind == Kind.SEND:
            code = active.try_send(active.region.sge(0, 8), flags=bit)
        elif kind == Kind.WRITE:
            code = active.try_write(
                active.region.sge(0, 8), to=passive.region.address, token=passive.region.remote, flags=bit
            )
        else:
            code = active.try_read(
                active.region.sge(0, 8), at=passive.region.address, token=passive.region.remote, flags=bit
            )
        assert code == expected, hex(bit)
    assert no_completion(active.cq)


def test_f_2_10_null_elements_with_a_count_are_refused_without_a_crash(pair):
    active, passive = pair
    wrong = (Status.ACCESS_VIOLATION, Status.INVALID_PARAMETER_2)
    assert active.qp.Send(NULL, NULL, 1, 0) in wrong
    assert active.qp.Receive(NULL, NULL, 1) in wrong
    assert active.qp.Write(NULL, NULL, 1, passive.region.address, passive.region.remote, 0) in wrong
    assert active.qp.Read(NULL, NULL, 1, passive.region.address, passive.region.remote, 0) in wrong
    assert active.node.srq().Receive(NULL, NULL, 1) in wrong
    one_way(active, passive, b"unaffected")


def test_f_2_11_the_element_array_is_read_during_the_call_only(pair):
    active, passive = pair
    array = ffi.new("ND2_SGE[1]")

    def set_array(region, offset, size):
        array[0].Buffer, array[0].BufferLength = pointer(region.address + offset), size
        array[0].MemoryRegionToken = region.local

    for i in range(50):
        set_array(passive.region, 512, 64)
        assert passive.qp.Receive(pointer(i), array, 1) == Status.SUCCESS
        data = b"%08d" % i
        active.region.put(0, data)
        set_array(active.region, 0, 8)
        assert active.qp.Send(pointer(i), array, 1, 0) == Status.SUCCESS
        ffi.buffer(array)[:] = b"\xee" * 16
        assert passive.one().bytes == 8
        assert active.one().status == Status.SUCCESS
        assert passive.region.get(512, 8) == data


# F.3 The requests


def test_f_3_1_a_send_takes_the_oldest_receive_and_fills_its_elements_in_order(pair):
    active, passive = pair
    passive.receive(passive.region.sge(0, 3), passive.region.sge(100, 0), passive.region.sge(200, 10), context=1)
    passive.receive(passive.region.sge(1000, 64), context=2)
    active.region.put(0, b"0123456789")
    active.send(active.region.sge(0, 10))
    active.send(active.region.sge(0, 5))
    assert [(d.context, d.bytes) for d in passive.take(2)] == [(1, 10), (2, 5)]
    assert passive.region.get(0, 4) == b"012\0"
    assert passive.region.get(200, 8) == b"3456789\0"
    assert passive.region.get(1000, 6) == b"01234\0"


def test_f_3_2_zero_byte_sends_consume_receives(pair):
    active, passive = pair
    passive.receive(passive.region.sge(0, 8), context=1)
    passive.receive(context=2)
    active.send(context=3)
    active.send(active.region.sge(0, 0), context=4)
    assert [(d.context, d.bytes, d.status) for d in passive.take(2)] == [(1, 0, Status.SUCCESS), (2, 0, Status.SUCCESS)]
    assert brief(active.take(2)) == [(Kind.SEND, Status.SUCCESS, 3), (Kind.SEND, Status.SUCCESS, 4)]


def test_f_3_3_a_small_message_leaves_the_rest_of_the_buffer(pair):
    active, passive = pair
    passive.region.put(0, b"#" * 64)
    passive.receive(passive.region.sge(0, 64))
    active.region.put(0, b"abc")
    active.send(active.region.sge(0, 3))
    assert passive.one().bytes == 3
    assert passive.region.get(0, 64) == b"abc" + b"#" * 61


@pytest.mark.parametrize("sizes", [(8, 9), (0, 1), (64, 65536), (100, 60000)])
def test_f_3_4_m_11_a_message_larger_than_the_receive(pair, sizes):
    active, passive = pair
    room, size = sizes
    passive.receive(passive.region.sge(0, room), context=1)
    passive.receive(passive.region.sge(0, 8), context=2)
    active.send(active.region.sge(0, size), context=3)
    active.send(active.region.sge(0, 4), context=4)
    assert brief(passive.take(2)) == [
        (Kind.RECEIVE, Status.BUFFER_OVERFLOW, 1),
        (Kind.RECEIVE, Status.CANCELED, 2),
    ]
    assert brief(active.take(2)) == [(Kind.SEND, Status.DATA_OVERRUN, 3), (Kind.SEND, Status.CANCELED, 4)]
    assert passive.region.get(room, 1024) == bytes(1024)


def test_f_3_5_a_send_without_a_receive_times_out(pair):
    active, passive = pair
    start = time.monotonic()
    active.send(active.region.sge(0, 4), context=1)
    active.send(active.region.sge(0, 4), context=2)
    done = active.take(2)
    assert brief(done) == [(Kind.SEND, Status.IO_TIMEOUT, 1), (Kind.SEND, Status.CANCELED, 2)]
    assert 0.5 < time.monotonic() - start < 4.8
    assert no_completion(passive.cq)
    passive.receive(passive.region.sge(0, 4), context=9)
    assert brief(passive.take(1)) == [(Kind.RECEIVE, Status.CANCELED, 9)]


def test_f_3_5_a_receive_posted_in_time_takes_the_send(pair):
    active, passive = pair
    active.region.put(0, b"late")
    active.send(active.region.sge(0, 4), context=1)
    time.sleep(0.5)
    assert no_completion(active.cq)
    passive.receive(passive.region.sge(0, 64), context=2)
    assert passive.one().bytes == 4
    assert active.one().status == Status.SUCCESS
    assert passive.region.get(0, 4) == b"late"
    # The time starts anew for each Send.
    for _ in range(3):
        active.send(active.region.sge(0, 4))
        time.sleep(1.2)
        passive.receive(passive.region.sge(0, 64))
        assert active.one().status == Status.SUCCESS


@pytest.mark.parametrize("size", [1, 7, 1000, 65472, 65473, 65536, 200_000, 3 << 20])
def test_f_3_7_reads_and_writes_of_any_size(kit, size):
    active, passive = make_pair(kit, size=(4 << 20))
    data = os.urandom(size)
    active.region.put(1, data)
    half = size // 2
    elements = (active.region.sge(1, half), active.region.sge(1 + half, size - half))
    active.write(*elements, to=passive.region.address + 3, token=passive.region.remote)
    assert active.one().status == Status.SUCCESS
    assert passive.region.get(3, size) == data
    assert passive.region.get(0, 3) == bytes(3)
    assert passive.region.get(3 + size, 64) == bytes(64)
    active.region.put(1, bytes(size))
    third = size // 3
    elements = (active.region.sge(5 + third, size - third), active.region.sge(5, third))
    active.read(*elements, at=passive.region.address + 3, token=passive.region.remote)
    assert active.one().status == Status.SUCCESS
    assert active.region.get(5 + third, size - third) + active.region.get(5, third) == data


@pytest.mark.parametrize("size", [65473, 300_000, 3 << 20])
def test_f_3_1_sends_of_more_than_one_segment(kit, size):
    active, passive = make_pair(kit, size=(4 << 20))
    data = os.urandom(size)
    active.region.put(0, data)
    passive.receive(passive.region.sge(0, 1000), passive.region.sge(1000, size - 1000))
    active.send(active.region.sge(0, 77), active.region.sge(77, size - 77))
    assert passive.one().bytes == size
    assert active.one().status == Status.SUCCESS
    assert passive.region.get(0, size) == data


def test_f_3_8_a_write_or_read_raises_nothing_at_the_peer(pair):
    active, passive = pair
    passive.receive(passive.region.sge(0, 64), context=1)
    for _ in range(10):
        active.write(active.region.sge(0, 64), to=passive.region.address, token=passive.region.remote)
        active.read(active.region.sge(0, 64), at=passive.region.address, token=passive.region.remote)
    assert {d.status for d in active.take(20)} == {Status.SUCCESS}
    assert no_completion(passive.cq)


def test_f_3_9_zero_byte_reads_and_writes_succeed(pair):
    active, passive = pair
    active.write(to=passive.region.address, token=passive.region.remote, context=1)
    active.read(at=passive.region.address, token=passive.region.remote, context=2)
    active.read(active.region.sge(0, 0), at=passive.region.address, token=passive.region.remote, context=3)
    assert brief(active.take(3)) == [
        (Kind.WRITE, Status.SUCCESS, 1),
        (Kind.READ, Status.SUCCESS, 2),
        (Kind.READ, Status.SUCCESS, 3),
    ]


def test_f_3_11_the_last_byte_of_a_write_is_written_last(kit):
    active, passive = make_pair(kit, size=256 * 1024)
    size = 200_000
    last = passive.region.view()
    for i in range(1, 60):
        active.region.put(0, bytes([i]) * size)
        active.write(active.region.sge(0, size), to=passive.region.address, token=passive.region.remote)
        wait_until(lambda i=i: last[size - 1] == bytes([i]), "the last byte arrives")
        assert passive.region.get(0, size) == bytes([i]) * size
        assert active.one().status == Status.SUCCESS


def test_f_3_12_writes_before_a_send_are_visible_with_its_receive(pair):
    active, passive = pair
    for i in range(100):
        passive.receive(passive.region.sge(60000, 8))
        data = b"%08d" % i * 1000
        active.region.put(0, data)
        active.write(
            active.region.sge(0, 8000), to=passive.region.address, token=passive.region.remote, flags=Op.SILENT_SUCCESS
        )
        active.send(active.region.sge(0, 8))
        assert passive.one().status == Status.SUCCESS
        assert passive.region.get(0, 8000) == data
        assert active.one().kind == Kind.SEND


@pytest.mark.parametrize("limit", [1, 2, 64])
def test_f_3_13_more_reads_than_the_limit_wait(kit, limit):
    active, passive = make_pair(kit, limits=(limit, limit))
    passive.region.put(0, bytes(range(256)) * 256)
    for i in range(40):
        active.read(
            active.region.sge(i * 64, 64), at=passive.region.address + i * 128, token=passive.region.remote, context=i
        )
    assert brief(active.take(40)) == [(Kind.READ, Status.SUCCESS, i) for i in range(40)]
    for i in range(40):
        assert active.region.get(i * 64, 64) == passive.region.get(i * 128, 64)


def test_f_3_13_with_a_limit_of_0_a_read_is_invalid(kit):
    active, passive = make_pair(kit, limits=(0, 0))
    one_way(active, passive, b"sends work without reads")
    assert active.one().status == Status.SUCCESS
    active.read(active.region.sge(0, 64), at=passive.region.address, token=passive.region.remote, context=1)
    assert brief(active.take(1)) == [(Kind.READ, Status.INVALID_DEVICE_REQUEST, 1)]


# F.4 Flags


def test_f_4_1_silent_success_is_silent(pair):
    active, passive = pair
    silent = {"flags": Op.SILENT_SUCCESS}
    passive.receive(passive.region.sge(0, 64))
    remote = passive.region
    active.send(active.region.sge(0, 8), context=1, **silent)
    active.write(active.region.sge(0, 8), to=remote.address, token=remote.remote, context=2, **silent)
    active.read(active.region.sge(0, 8), at=remote.address, token=remote.remote, context=3, **silent)
    active.write(active.region.sge(0, 8), to=remote.address, token=remote.remote, context=4)
    assert brief(active.take(1)) == [(Kind.WRITE, Status.SUCCESS, 4)]
    assert no_completion(active.cq)


def test_f_4_1_a_silent_request_that_fails_or_is_cancelled_completes(pair):
    active, passive = pair
    silent = {"flags": Op.SILENT_SUCCESS}
    active.write(active.region.sge(0, 8), to=passive.region.address, token=0x1111, context=1, **silent)
    active.send(active.region.sge(0, 8), context=2, **silent)
    assert brief(active.take(2)) == [(Kind.WRITE, Status.ACCESS_VIOLATION, 1), (Kind.SEND, Status.CANCELED, 2)]


def test_f_4_2_a_fenced_request_waits_for_earlier_reads(kit):
    active, passive = make_pair(kit, size=2 << 20)
    size = 1 << 20
    for i in range(10):
        passive.region.put(0, bytes([i + 1]) * size)
        passive.receive(passive.region.sge(size, size))
        active.read(active.region.sge(0, size), at=passive.region.address, token=passive.region.remote, context=1)
        active.send(active.region.sge(size - 64, 64), context=2, flags=Op.READ_FENCE)
        assert passive.one().bytes == 64
        assert passive.region.get(size, 64) == bytes([i + 1]) * 64
        assert brief(active.take(2)) == [(Kind.READ, Status.SUCCESS, 1), (Kind.SEND, Status.SUCCESS, 2)]


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.WRITE])
def test_f_4_4_and_f_4_5_inline_takes_the_bytes_during_the_call(kit, kind):
    active, passive = make_pair(kit, inline=236)
    memory = ffi.new("char[]", 236)
    where = int(ffi.cast("uintptr_t", memory))
    for i in range(30):
        data = os.urandom(236)
        ffi.buffer(memory)[:] = data
        passive.receive(passive.region.sge(0, 236))
        element = (where, 236, 0xDEADBEEF)
        if kind == Kind.SEND:
            assert active.send(element, flags=Op.INLINE) == Status.SUCCESS
        else:
            remote = passive.region
            assert active.write(element, to=remote.address, token=remote.remote, flags=Op.INLINE) == Status.SUCCESS
            assert active.send(flags=Op.SILENT_SUCCESS) == Status.SUCCESS
        ffi.buffer(memory)[:] = bytes([i]) * 236
        assert passive.one().status == Status.SUCCESS
        assert passive.region.get(0, 236) == data
        assert active.one().status == Status.SUCCESS


def test_f_4_6_inline_is_limited_by_bytes_not_by_elements(kit):
    active, passive = make_pair(kit, inline=100, sge=1)
    memory = ffi.new("char[]", bytes(range(200)))
    where = int(ffi.cast("uintptr_t", memory))
    elements = [(where + i, 1, 0) for i in range(100)]
    passive.receive(passive.region.sge(0, 200))
    assert active.send(*elements, flags=Op.INLINE) == Status.SUCCESS
    assert passive.one().bytes == 100
    assert passive.region.get(0, 100) == bytes(range(100))
    assert (
        active.try_send((where, active.node.info.MaxInlineDataSize + 1, 0), flags=Op.INLINE) == Status.BUFFER_OVERFLOW
    )
    assert active.one().status == Status.SUCCESS
    one_way(active, passive, b"unaffected")


def test_f_4_4_inline_from_memory_that_is_not_there_is_a_violation(kit):
    active, passive = make_pair(kit, inline=64)
    memory = Memory(PAGE)
    kit.on_close(memory.free)
    memory.protect(1)
    code = active.try_send((memory.address, 64, 0), context=1, flags=Op.INLINE)
    if code == Status.SUCCESS:
        assert active.one().status == Status.ACCESS_VIOLATION
    else:
        assert code == Status.ACCESS_VIOLATION
        one_way(active, passive, b"unaffected")


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.WRITE, Kind.READ, Kind.RECEIVE])
def test_f_4_7_and_f_6_2_an_invalid_token_is_a_completion(pair, kind):
    active, passive = pair
    element = (active.region.address, 64, 0x0BADF00D)
    if kind == Kind.SEND:
        passive.receive(passive.region.sge(0, 64))
        code = active.try_send(element, context=1)
    elif kind == Kind.WRITE:
        code = active.try_write(element, to=passive.region.address, token=passive.region.remote, context=1)
    elif kind == Kind.READ:
        code = active.try_read(element, at=passive.region.address, token=passive.region.remote, context=1)
    else:
        code = active.try_receive(element, context=1)
        passive.send(passive.region.sge(0, 64), context=2)
    assert code == Status.SUCCESS
    assert brief(active.take(1)) == [(kind, Status.ACCESS_VIOLATION, 1)]
    active.receive(context=3)
    assert brief(active.take(1)) == [(Kind.RECEIVE, Status.CANCELED, 3)]


# F.5 Order


def test_f_5_1_and_f_5_2_initiator_requests_complete_in_posting_order(kit):
    active, passive = make_pair(kit, size=4 << 20, depth=64)
    remote = passive.region
    expected = []
    for i in range(20):
        passive.receive(passive.region.sge(4 * i, 4), context=i)
        active.read(active.region.sge(0, 1 << 18), at=remote.address, token=remote.remote, context=3 * i)
        active.write(active.region.sge(0, 8), to=remote.address + 4096, token=remote.remote, context=3 * i + 1)
        active.send(active.region.sge(0, 4), context=3 * i + 2)
        expected += [(Kind.READ, 3 * i), (Kind.WRITE, 3 * i + 1), (Kind.SEND, 3 * i + 2)]
    done = active.take(60)
    assert [(d.kind, d.context) for d in done] == expected
    assert {d.status for d in done} == {Status.SUCCESS}
    assert [d.context for d in passive.take(20)] == list(range(20))


def test_f_5_3_messages_arrive_in_sending_order(kit):
    active, passive = make_pair(kit, depth=64)
    for i in range(64):
        passive.receive(passive.region.sge(i * 8, 8), context=i)
    for i in range(64):
        active.region.put(i * 8, i.to_bytes(8, "little"))
        active.send(active.region.sge(i * 8, 8), context=i)
    assert [d.context for d in passive.take(64)] == list(range(64))
    assert [d.context for d in active.take(64)] == list(range(64))
    assert passive.region.get(0, 512) == b"".join(i.to_bytes(8, "little") for i in range(64))


def test_f_5_4_a_send_succeeds_though_the_peer_disconnects_right_after_receiving(kit):
    for _ in range(20):
        active, passive = make_pair(kit)
        passive.receive(passive.region.sge(0, 8))
        active.send(active.region.sge(0, 8), context=1)
        assert passive.one().status == Status.SUCCESS
        assert passive.disconnect() == Status.SUCCESS
        assert brief(active.take(1)) == [(Kind.SEND, Status.SUCCESS, 1)]


def test_f_5_5_a_refusal_reaches_the_peer_though_the_owner_leaves_at_once(kit):
    for _ in range(10):
        active, passive = make_pair(kit)
        passive.receive(passive.region.sge(0, 4), context=1)
        active.send(active.region.sge(0, 8), context=2)
        assert passive.one().status == Status.BUFFER_OVERFLOW
        passive.qp.release()
        passive.connector.release()
        assert brief(active.take(1)) == [(Kind.SEND, Status.DATA_OVERRUN, 2)]


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


def test_f_7_2_flush_leaves_other_queue_pairs_of_the_same_queue_alone(kit, node):
    cq = node.cq()
    one, other = node.qp(cq, context=1), node.qp(cq, context=2)
    for qp in (one, other):
        assert qp.Receive(NULL, NULL, 0) == Status.SUCCESS
    assert one.Flush() == Status.SUCCESS
    assert [d.queue_pair for d in take(cq, 1)] == [1]
    assert no_completion(cq)
    assert other.Flush() == Status.SUCCESS
    assert [d.queue_pair for d in take(cq, 1)] == [2]


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


def test_f_7_4_completed_requests_keep_their_status(pair):
    active, passive = pair
    one_way(active, passive, b"done")
    wait = active.take(1)
    assert brief(wait) == [(Kind.SEND, Status.SUCCESS, 2)]
    passive.receive(passive.region.sge(0, 8), context=1)
    active.send(active.region.sge(0, 8), context=3)
    assert brief(active.take(1)) == [(Kind.SEND, Status.SUCCESS, 3)]
    passive.receive(passive.region.sge(0, 8), context=2)
    passive.qp.Flush()
    assert brief(passive.take(2)) == [(Kind.RECEIVE, Status.SUCCESS, 1), (Kind.RECEIVE, Status.CANCELED, 2)]


def test_f_7_5_flushing_nothing_gives_nothing(pair, node):
    active, _ = pair
    assert active.qp.Flush() == Status.SUCCESS
    assert node.qp(node.cq()).Flush() == Status.SUCCESS
    assert no_completion(active.cq)


def test_f_7_6_after_a_flush_later_posts_are_cancelled_on_a_connected_queue_pair(pair):
    active, _ = pair
    active.qp.Flush()
    assert active.receive(context=1) == Status.SUCCESS
    assert active.send(active.region.sge(0, 8), context=2) == Status.SUCCESS
    done = active.take(2)
    assert sorted(brief(done)) == [(Kind.RECEIVE, Status.CANCELED, 1), (Kind.SEND, Status.CANCELED, 2)]


def test_f_7_6_a_queue_pair_never_connected_stays_usable_after_a_flush(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    passive.receive(context=1)
    passive.qp.Flush()
    assert brief(passive.take(1)) == [(Kind.RECEIVE, Status.CANCELED, 1)]
    establish(active, passive)
    one_way(active, passive, b"usable")


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
