"""Section D of the contract: memory regions."""

from __future__ import annotations

import pytest
import version2
from conftest import share
from consumer import (
    Memory,
    Region,
    accept,
    connect,
    ended,
    get_address,
    pointer,
    sges,
    take,
)
from kit.deadlines import patient
from kit.threads import in_threads
from version2 import NULL, PAGE, Kind, Mr, Op, Status, ffi, kernel32


@pytest.fixture
def memory(kit):
    memory = Memory(16 * PAGE)
    kit.on_close(memory.free)
    return memory


def alive(active, passive):
    """Check that data still arrive."""
    assert passive.receive(passive.region.sge(60000, 8), context=0xA1) == Status.SUCCESS
    assert active.send(active.region.sge(60000, 8), context=0xA2) == Status.SUCCESS
    assert [passive.one().status, active.one().status] == [Status.SUCCESS] * 2


def test_d_1_1_another_interface_than_a_regions_is_refused(node):
    assert node.try_create("MemoryRegion", node.file, name="IND2QueuePair") == (Status.E_NOINTERFACE, None)


def test_d_1_3_a_second_buffer_is_refused_and_the_first_stays(kit, pair):
    active, passive = pair
    region = active.region
    before = region.local, region.remote
    other = ffi.new("char[4096]")
    assert kit.do(region.mr, "Register", other, 4096, 1) == Status.INVALID_DEVICE_STATE
    assert (region.local, region.remote) == before
    alive(active, passive)


def test_d_1_4_a_region_can_be_registered_again_with_other_buffer_size_and_flags(kit, pair):
    active, passive = pair
    mr = active.node.mr()
    for size, flags in ((4096, 0), (1, 1), (100000, 2), (8192, 0xF)):
        buffer = ffi.new("char[]", size)
        assert kit.do(mr, "Register", buffer, size, flags) == Status.SUCCESS
        region = Region(mr, buffer, int(ffi.cast("uintptr_t", buffer)), size)
        region.put(0, b"z")
        passive.receive(passive.region.sge(0, 64))
        active.send(region.sge(0, 1))
        assert (passive.one().bytes, active.one().status) == (1, Status.SUCCESS)
        assert passive.region.get(0, 1) == b"z"
        assert kit.do(mr, "Deregister") == Status.SUCCESS


def test_d_1_5_many_regions_over_one_buffer(kit, node, memory):
    regions = [node.mr() for _ in range(share(10000, 1000))]
    event = kit.event(manual=False)
    overlapped = kit.overlapped(event)
    for i, mr in enumerate(regions):
        where = memory.address + (i * 7) % PAGE
        assert mr.Register(pointer(where), PAGE, i % 16, overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 10000) == 0
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
    tokens = [mr.GetLocalToken() for mr in regions] + [mr.GetRemoteToken() for mr in regions]
    assert len(set(tokens)) == len(tokens), "D.4.5: no token is another one, and none is of both kinds"
    for mr in regions:
        assert mr.Deregister(overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 10000) == 0
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS


def test_d_2_2_above_the_largest_size_is_refused(kit, node, memory):
    limit = node.info.MaxRegistrationSize
    assert kit.do(node.mr(), "Register", memory.pointer, limit + 1, 0) == Status.INVALID_PARAMETER
    at_limit = kit.do(node.mr(), "Register", memory.pointer, limit, 0)
    assert at_limit in (Status.ACCESS_VIOLATION, Status.INSUFFICIENT_RESOURCES), "refused for its size"


@pytest.mark.parametrize("case", ["unmapped", "partly unmapped", "wraps", "null with a size", "no access"])
def test_d_2_3_invalid_memory_is_an_access_violation(kit, node, memory, case):
    if case == "unmapped":
        gone = Memory(PAGE)
        gone.free()
        where, size = gone.address, PAGE
    elif case == "partly unmapped":
        pages = Memory(4 * PAGE)
        kit.on_close(pages.free)
        pages.protect(version2.PAGE_NOACCESS, 2 * PAGE, PAGE)
        where, size = pages.address, 4 * PAGE
    elif case == "wraps":
        where, size = 0xFFFFFFFFFFFFF000, 0x2000
    elif case == "null with a size":
        where, size = 0, PAGE
    else:
        memory.protect(version2.PAGE_NOACCESS)
        where, size = memory.address, memory.size
    for flags in (0, Mr.EVERYTHING):
        mr = node.mr()
        assert kit.do(mr, "Register", pointer(where), size, flags) == Status.ACCESS_VIOLATION
        assert kit.do(mr, "Deregister") == Status.INVALID_DEVICE_STATE


@pytest.mark.parametrize("flags", [Mr.LOCAL_WRITE, Mr.REMOTE_WRITE])
def test_d_2_3_local_write_on_read_only_pages_is_an_access_violation(kit, node, memory, flags):
    memory.protect(version2.PAGE_READONLY)
    assert kit.do(node.mr(), "Register", memory.pointer, memory.size, flags) == Status.ACCESS_VIOLATION
    assert kit.do(node.mr(), "Register", memory.pointer, memory.size, Mr.REMOTE_READ) == Status.SUCCESS


def test_d_2_4_m_5_empty_buffers(kit, node, memory):
    assert kit.do(node.mr(), "Register", NULL, 0, 0) == Status.INVALID_PARAMETER
    assert kit.do(node.mr(), "Register", memory.pointer, 0, 0) == Status.INVALID_BUFFER_SIZE


def test_d_2_7_after_a_failure_it_can_be_tried_again(kit, node, memory):
    mr = node.mr()
    for _ in range(3):
        assert kit.do(mr, "Register", pointer(0x10), PAGE, 0) == Status.ACCESS_VIOLATION
    assert kit.do(mr, "Register", memory.pointer, PAGE, 0) == Status.SUCCESS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4095, 4096, 4097])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_d_2_8_any_size_and_alignment(kit, node, memory, size, offset):
    mr = node.mr()
    assert kit.do(mr, "Register", pointer(memory.address + offset), size, 0xF) == Status.SUCCESS
    assert kit.do(mr, "Deregister") == Status.SUCCESS


def test_d_2_9_the_contents_are_not_changed(kit, node):
    pattern = bytes(range(256)) * 256
    region = node.region(len(pattern))
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    region.put(0, pattern)
    assert kit.do(region.mr, "Register", pointer(region.address), region.size, 0xF) == Status.SUCCESS
    assert region.get() == pattern
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    assert region.get() == pattern


@pytest.mark.parametrize("flags", [Mr.LOCAL_READ, Mr.REMOTE_READ, Mr.READ_SINK])
@pytest.mark.parametrize("use", ["receive", "read"])
def test_d_3_2_without_local_write_a_sink_is_a_violation(pair, use, flags):
    active, passive = pair
    region = active.node.region(64, flags)
    before = region.get()
    if use == "receive":
        active.receive(region.sge(), context=5)
        passive.send(passive.region.sge(0, 64))
        kind = Kind.RECEIVE
    else:
        active.read(region.sge(), at=passive.region.address, token=passive.region.remote, context=5)
        kind = Kind.READ
    done = active.one()
    assert (done.kind, done.status, done.context) == (kind, Status.ACCESS_VIOLATION, 5)
    assert region.get() == before
    assert ended(active)


@pytest.mark.parametrize(
    ("flags", "may_read", "may_write"),
    [
        (Mr.LOCAL_READ, False, False),
        (Mr.LOCAL_WRITE, False, False),
        (Mr.REMOTE_READ, True, False),
        (Mr.REMOTE_WRITE, False, True),
        (Mr.REMOTE_READ | Mr.REMOTE_WRITE, True, True),
        (Mr.LOCAL_WRITE | Mr.REMOTE_READ, True, False),
    ],
)
@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_d_3_3_each_remote_right_grants_its_own_direction_only(pair, flags, may_read, may_write, kind):
    active, passive = pair
    region = passive.node.region(64, flags)
    region.put(0, b"R" * 64)
    active.region.put(0, b"W" * 64)
    if kind == Kind.READ:
        active.read(active.region.sge(0, 64), at=region.address, token=region.remote)
        granted = may_read
    else:
        active.write(active.region.sge(0, 64), to=region.address, token=region.remote)
        granted = may_write
    done = active.one()
    assert done.status == (Status.SUCCESS if granted else Status.ACCESS_VIOLATION)
    if kind == Kind.READ:
        changed, kept = active.region.get(0, 64) == b"R" * 64, region.get() == b"R" * 64
    else:
        changed, kept = region.get() == b"W" * 64, active.region.get(0, 64) == b"W" * 64
    assert changed == granted
    assert kept


def test_d_3_7_do_not_secure_vm_changes_nothing_else(pair):
    active, passive = pair
    region = passive.node.region(64, Mr.REMOTE_WRITE | Mr.DO_NOT_SECURE_VM)
    active.region.put(0, b"v" * 64)
    active.transfer(Kind.WRITE, active.region.sge(0, 64), region.address, region.remote)
    assert region.get() == b"v" * 64
    active.transfer(Kind.READ, active.region.sge(0, 64), region.address, region.remote, Status.ACCESS_VIOLATION)


@pytest.mark.parametrize("bit", [0x10, 0x100, 0x10000, 0x40000000])
def test_d_3_8_unknown_flags_are_refused(kit, node, memory, bit):
    assert kit.do(node.mr(), "Register", memory.pointer, PAGE, bit) == Status.INVALID_PARAMETER_3


def test_d_4_3_tokens_are_final_when_the_event_is_signalled(kit, pair):
    active, passive = pair
    mr = active.node.mr()
    buffer = ffi.new("char[64]", b"early")
    request = kit.issue(mr, "Register", buffer, 64, 0)
    assert kernel32.WaitForSingleObject(request.event, 10000) == 0
    element = (int(ffi.cast("uintptr_t", buffer)), 5, mr.GetLocalToken())
    passive.receive(passive.region.sge(0, 64))
    active.send(element)
    assert (active.one().status, passive.one().bytes) == (Status.SUCCESS, 5)
    assert request.result() == Status.SUCCESS


def test_d_4_4_tokens_are_never_0_and_not_used_again_soon(kit, node, memory):
    mr = node.mr()
    seen = set()
    for _ in range(200):
        assert kit.do(mr, "Register", memory.pointer, PAGE, 0xF) == Status.SUCCESS
        fresh = {mr.GetLocalToken(), mr.GetRemoteToken()}
        assert 0 not in fresh
        assert not fresh & seen
        seen |= fresh
        assert kit.do(mr, "Deregister") == Status.SUCCESS


@pytest.mark.parametrize("when", ["before registering", "after deregistering"])
@pytest.mark.parametrize("kind", [Kind.SEND, Kind.WRITE])
def test_d_4_4_no_token_gives_access_while_nothing_is_registered(kit, pair, when, kind):
    active, passive = pair
    owner = active if kind == Kind.SEND else passive
    buffer = ffi.new("char[64]")
    mr = owner.node.mr()
    tokens = {mr.GetLocalToken() if kind == Kind.SEND else mr.GetRemoteToken()}
    if when == "after deregistering":
        assert kit.do(mr, "Register", buffer, 64, 0xF) == Status.SUCCESS
        tokens = {mr.GetLocalToken() if kind == Kind.SEND else mr.GetRemoteToken()}
        assert kit.do(mr, "Deregister") == Status.SUCCESS
    where = int(ffi.cast("uintptr_t", buffer))
    if kind == Kind.SEND:
        passive.receive(passive.region.sge())
        active.send((where, 64, tokens.pop()))
    else:
        active.region.put(0, b"n" * 64)
        active.write(active.region.sge(0, 64), to=where, token=tokens.pop())
    assert active.one().status == Status.ACCESS_VIOLATION
    assert bytes(ffi.buffer(buffer)) == bytes(64)


def test_d_4_5_a_remote_token_is_no_local_one(pair):
    active, passive = pair
    passive.receive(passive.region.sge())
    active.send((active.region.address, 64, active.region.remote))
    assert active.one().status == Status.ACCESS_VIOLATION


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize("offset", [0, 63])
def test_d_4_7_the_last_byte_is_included(pair, kind, offset):
    active, passive = pair
    region = passive.node.region(64)
    active.transfer(kind, active.region.sge(0, 64 - offset), region.address + offset, region.remote)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize(
    ("offset", "size"), [(0, 65), (64, 1), (63, 2), (-1, 2), (-1, 1), (-64, 64), (1 << 40, 1), (-(1 << 40), 1)]
)
def test_d_4_7_one_byte_outside_is_a_violation(pair, kind, offset, size):
    active, passive = pair
    region = passive.node.region(Region(None, passive.region.memory, passive.region.address + 4096, 64))
    before, sink = passive.region.get(), active.region.get()
    if kind == Kind.WRITE:
        active.region.put(0, b"!" * size)
    where = (region.address + offset) & (1 << 64) - 1
    active.transfer(kind, active.region.sge(0, size), where, region.remote, Status.ACCESS_VIOLATION)
    assert passive.region.get() == before
    if kind == Kind.READ:
        assert active.region.get() == sink


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_d_4_7_an_address_that_wraps_is_a_violation(pair, kind):
    active, passive = pair
    active.transfer(kind, active.region.sge(0, 64), (1 << 64) - 16, passive.region.remote, Status.ACCESS_VIOLATION)


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 2), (-1, 1), (65535, 2), (65536, 1), (0, 65537), (-4096, 4096), (0, 0xFFFFFFFF)]
)
@pytest.mark.parametrize("use", ["send", "write", "read", "receive"])
def test_d_5_2_an_element_must_lie_inside_its_region(pair, use, offset, size):
    active, passive = pair
    element = (active.region.address + offset, size, active.region.local)
    remote = passive.region
    if use == "receive":
        code = active.try_receive(element, context=9)
        passive.send(passive.region.sge(0, 1))
    elif use == "send":
        passive.receive(passive.region.sge())
        code = active.try_send(element, context=9)
    elif use == "write":
        code = active.try_write(element, to=remote.address, token=remote.remote, context=9)
    else:
        code = active.try_read(element, at=remote.address, token=remote.remote, context=9)
    if size > active.node.info.MaxTransferLength:
        assert code == Status.BUFFER_OVERFLOW, "F.2.7: longer than a transfer"
        return
    assert code == Status.SUCCESS
    done = active.one()
    assert (done.status, done.context) == (Status.ACCESS_VIOLATION, 9)


def test_d_6_2_a_bound_window_makes_deregister_busy_inline(kit, pair):
    active, passive = pair
    window = passive.bound_window(0, 4096)
    tokens = passive.region.local, passive.region.remote
    event = kit.event()
    overlapped = kit.overlapped(event)
    assert passive.region.mr.Deregister(overlapped) == Status.DEVICE_BUSY
    assert kernel32.WaitForSingleObject(event, 100) == version2.WAIT_TIMEOUT
    assert (passive.region.local, passive.region.remote) == tokens
    active.region.put(0, b"still")
    active.transfer(Kind.WRITE, active.region.sge(0, 5), passive.region.address, window.GetRemoteToken())
    assert passive.region.get(0, 5) == b"still"
    passive.invalidated(window)
    assert kit.do(passive.region.mr, "Deregister") == Status.SUCCESS


def test_d_6_3_a_window_without_rights_counts_as_bound(kit, pair):
    active, _ = pair
    window = active.bound_window(0, 4096, flags=0)
    assert kit.issue(active.region.mr, "Deregister").returned == Status.DEVICE_BUSY
    active.invalidated(window)
    assert kit.do(active.region.mr, "Deregister") == Status.SUCCESS


@pytest.mark.parametrize("how", ["window released", "queue pair released"])
def test_d_6_4_releasing_window_or_queue_pair_ends_the_binding(kit, pair, how):
    active, _ = pair
    window = active.bound_window(0, 4096)
    assert kit.issue(active.region.mr, "Deregister").returned == Status.DEVICE_BUSY
    (window if how == "window released" else active.qp).release()
    assert kit.do(active.region.mr, "Deregister") == Status.SUCCESS


def test_d_6_5_deregistering_what_is_not_registered_is_refused(kit, node):
    mr = node.mr()
    assert kit.do(mr, "Deregister") == Status.INVALID_DEVICE_STATE
    region = node.region(64)
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    assert kit.do(region.mr, "Deregister") == Status.INVALID_DEVICE_STATE


def test_d_6_6_a_peer_using_a_dead_token_loses_its_connection(kit, pair):
    active, passive = pair
    region = passive.node.region(4096)
    token = region.remote
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    passive.receive(context=1)
    active.transfer(Kind.WRITE, active.region.sge(0, 64), region.address, token, Status.ACCESS_VIOLATION)
    assert passive.one().status == Status.CANCELED


def test_d_6_6_a_receive_whose_region_is_gone_touches_nothing(kit, pair):
    active, passive = pair
    memory = Memory(PAGE)
    region = active.node.region(memory)
    active.receive(region.sge(), context=4)
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    memory.protect(version2.PAGE_NOACCESS)
    kit.on_close(memory.free)
    passive.send(passive.region.sge(0, 64), context=5)
    done = active.one()
    assert (done.kind, done.status, done.context) == (Kind.RECEIVE, Status.ACCESS_VIOLATION, 4)
    assert passive.one().status != Status.SUCCESS


@pytest.mark.parametrize("use", ["send", "write", "read", "receive", "peer's write", "peer's read"])
def test_d_memory_that_is_gone_while_registered_is_a_violation_not_a_crash(kit, pair, use):
    active, passive = pair
    memory = Memory(16 * PAGE)
    kit.on_close(memory.free)
    owner = passive if use.startswith("peer's") else active
    region = owner.node.region(memory)
    memory.protect(version2.PAGE_NOACCESS)  # freed pages could be reused at once
    if use == "send":
        passive.receive(passive.region.sge())
        active.send(region.sge())
    elif use == "write":
        active.write(region.sge(), to=passive.region.address, token=passive.region.remote)
    elif use == "read":
        active.read(region.sge(), at=passive.region.address, token=passive.region.remote)
    elif use == "receive":
        active.receive(region.sge())
        passive.send(passive.region.sge(0, 64))
    elif use == "peer's write":
        active.write(active.region.sge(0, 4096), to=region.address, token=region.remote)
    else:
        active.read(active.region.sge(0, 4096), at=region.address, token=region.remote)
    assert active.one().status == Status.ACCESS_VIOLATION
    assert ended(active)


def test_d_6_7_releasing_without_deregister_drops_the_registration(kit, pair):
    active, passive = pair
    region = passive.node.region(4096)
    token = region.remote
    assert region.mr.release() == 0
    active.transfer(Kind.WRITE, active.region.sge(0, 64), region.address, token, Status.ACCESS_VIOLATION)


def test_d_6_8_several_threads_register_and_deregister(kit, node, memory):
    failures = []

    def work(_):
        mr = node.mr()
        event = kit.event(manual=False)
        overlapped = kit.overlapped(event)
        for i in range(share(2000, 200)):
            for method, arguments in (("Register", (memory.pointer, memory.size, i % 16)), ("Deregister", ())):
                if getattr(mr, method)(*arguments, overlapped) != Status.PENDING:
                    failures.append((i, method, "not pending"))
                kernel32.WaitForSingleObject(event, 10000)
                code = mr.GetOverlappedResult(overlapped, 0)
                if code != Status.SUCCESS:
                    failures.append((i, method, code))

    in_threads(4, work, patient(60))
    assert not failures


def test_d_2_10_registering_between_connect_and_accept(kit):
    a, b = kit.node(), kit.node()
    cqs = a.cq(), b.cq()
    qps = a.qp(cqs[0]), b.qp(cqs[1])
    listener, given, connector = b.listener(), b.connector(), a.bound_connector()
    arrived = kit.issue(listener, "GetConnectionRequest", given)
    connecting = connect(kit, connector, qps[0], get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    sink = b.region(64)
    assert qps[1].Receive(NULL, sges(sink.sge()), 1) == Status.SUCCESS
    accepting = accept(kit, given, qps[1])
    assert connecting.result() == Status.SUCCESS
    source = a.region(64)
    source.put(0, b"between")
    assert kit.do(connector, "CompleteConnect") == Status.SUCCESS
    assert accepting.result() == Status.SUCCESS
    assert qps[0].Send(NULL, sges(source.sge(0, 7)), 1, Op.NONE) == Status.SUCCESS
    assert take(cqs[1], 1)[0].bytes == 7
    assert sink.get(0, 7) == b"between"
