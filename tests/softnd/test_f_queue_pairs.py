"""Section F of the contract, F.1 and F.2: creating queue pairs, and the status of posting to them."""

from __future__ import annotations

import pytest
from consumer import (
    Side,
    accept,
    brief,
    connect,
    establish,
    get_address,
    make_pair,
    no_completion,
    one_way,
    pointer,
    sges,
    take,
    wait_until,
)
from version2 import NOTIFY_ANY, NULL, Kind, Op, Status, ffi

LIMITS = "MaxReceiveQueueDepth", "MaxInitiatorQueueDepth", "MaxReceiveSge", "MaxInitiatorSge", "MaxInlineDataSize"


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
    # No Receive is posted, so the first Send blocks all the others.
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
