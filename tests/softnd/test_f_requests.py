"""Section F of the contract, F.3 to F.5: the requests, their flags and their order."""

from __future__ import annotations

import os
import time

import pytest
from consumer import Memory, brief, make_pair, no_completion, one_way, wait_until
from version2 import PAGE, Kind, Op, Status, ffi

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
    # The time limit starts again for each Send.
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
