"""Version 1: registrations and windows (sections I.2 and I.3)."""

from __future__ import annotations

import re
import time

import pytest
import version1
import version2
from conftest import share
from consumer import Kit, Memory, Port, pointer, wait_until
from consumer_version1 import (
    ALLOW_BOTH,
    UNTOUCHED,
    Node,
    Side,
    accept,
    address_of,
    complete,
    connect,
    descriptor,
    do,
    establish,
    fields,
    issue,
    make_pair,
    result_of,
)
from kit.scenarios import refused_registrations, slow_call, slow_completions
from kit.threads import in_threads
from peer import Peer
from version2 import NULL, Op, Status, ffi, kernel32

MADE_UP = [0, 1, 2, 0x100, 0x1000000, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, 1 << 63, (1 << 64) - 1]


# ---- Registrations ----


def test_i_2_1_a_registration_is_good_for_every_local_use_and_for_no_remote_one(kit):
    active, passive = make_pair(kit)
    one = active.region
    passive.receive(passive.region.sge())
    active.expect(active.send(one.sge(0, 100)))
    passive.one()
    _, _, remote = passive.bound_window()
    active.expect(active.write(one.sge(0, 100), remote=remote))
    active.expect(active.read(one.sge(100, 100), remote=remote))
    active.receive(one.sge())
    passive.expect(passive.send(passive.region.sge(0, 100)))
    active.one()


@pytest.mark.parametrize("remote_bit", [0, 1 << 24])
def test_i_2_1_a_handle_is_no_token_for_the_peer(kit, remote_bit):
    active, passive = make_pair(kit)
    token = (passive.region.handle | remote_bit).to_bytes(4, "little")
    stolen = descriptor(passive.region.address, 64, token)
    active.expect(active.read(active.region.sge(0, 64), remote=stolen), Status.ACCESS_VIOLATION)


def test_i_2_1_a_strict_read_sink_is_every_registration(monkeypatch, kit):
    monkeypatch.setenv("SOFTND_READ_SINK", "strict")
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    active.expect(active.read(active.region.sge(0, 64), remote=remote))


def test_i_2_2_the_handle_is_written_when_the_registration_completes(faults, kit):
    faults(slow_call("reg_mr", 250))
    node = Node(kit)
    buffer = ffi.new("char[4096]")
    start = time.monotonic()
    request, handle = node.start_registration(address_of(buffer), 4096)
    assert request.returned == Status.PENDING
    while kernel32.WaitForSingleObject(request.event, 0) != 0:
        # It is written just before the completion, and the thread that does both may have to wait for a processor.
        assert handle[0] == UNTOUCHED or time.monotonic() - start >= 0.23, "not before the completion"
        kernel32.Sleep(10)
    assert time.monotonic() - start >= 0.23
    assert handle[0] not in (UNTOUCHED, 0), "before the completion is signalled"
    assert request.result() == Status.SUCCESS
    start = time.monotonic()
    assert do(kit, node.adapter, "DeregisterMemory", handle[0]) == Status.SUCCESS
    assert time.monotonic() - start < 0.2, "only registering is delayed"


def test_i_2_2_the_handle_is_there_when_the_packet_is(kit):
    node = Node(kit)
    port = Port(node.file)
    kit.on_close(port.close)
    buffer = ffi.new("char[65536]")
    handles = set()
    for i in range(64):
        _, handle = node.start_registration(address_of(buffer) + i, 1000)
        assert port.get()
        assert handle[0] != UNTOUCHED
        handles.add(handle[0])
    assert len(handles) == 64
    for handle in handles:
        assert do(kit, node.adapter, "DeregisterMemory", handle) == Status.SUCCESS


@pytest.mark.parametrize("delays", [slow_completions(250), [slow_call("reg_mr", 250)]], ids=["all", "registration"])
def test_i_2_2_a_release_writes_the_handle_at_once_and_nothing_later(faults, kit, delays):
    faults(*delays)
    node = Node(kit)
    buffer = ffi.new("char[4096]")
    request, handle = node.start_registration(address_of(buffer), 4096)
    assert node.adapter.release() == 0
    assert kernel32.WaitForSingleObject(request.event, 0) == 0
    handle[0] = UNTOUCHED
    time.sleep(0.5)
    assert handle[0] == UNTOUCHED


def test_i_2_2_a_failure_leaves_the_handle_alone(kit):
    node = Node(kit)
    maximum = node.info.MaxRegistrationSize
    pages, read_only = Memory(3 * 4096), Memory(4096, version2.PAGE_READONLY)
    kit.on_close(pages.free)
    kit.on_close(read_only.free)
    pages.protect(version2.PAGE_NOACCESS, 4096, 4096)
    address = pages.address
    violation = Status.ACCESS_VIOLATION
    cases = [
        (0, 0, violation),
        (address, 0, violation),
        (0, 4096, violation),
        (8, 16, violation),
        (address, 4097, violation),
        (address + 4095, 2, violation),
        (read_only.address, 4096, violation),
        ((1 << 64) - 16, 32, violation),
        (address, maximum + 1, Status.INVALID_PARAMETER),
        (address, (1 << 64) - 1, Status.INVALID_PARAMETER),
    ]
    for where, size, expected in cases:
        request, handle = node.start_registration(where, size)
        assert (request.result(), handle[0]) == (expected, UNTOUCHED), (hex(where), size)
    request, handle = node.start_registration(address, 4096)
    assert request.result() == Status.SUCCESS
    assert do(kit, node.adapter, "DeregisterMemory", handle[0]) == Status.SUCCESS


def test_i_2_2_a_handle_that_cannot_be_written_ends_the_registration(kit):
    node = Node(kit)
    buffer, page = ffi.new("char[64]"), Memory(4096, version2.PAGE_READONLY)
    kit.on_close(page.free)
    for bad in (NULL, ffi.cast("uintptr_t *", 8)):
        arguments = (pointer(address_of(buffer)), 64)
        assert issue(kit, node.adapter, "RegisterMemory", *arguments, last=(bad,)).result().failed
    where = ffi.cast("uintptr_t *", page.address)
    request = issue(kit, node.adapter, "RegisterMemory", pointer(address_of(buffer)), 64, last=(where,))
    assert request.result() == Status.ACCESS_VIOLATION
    assert node.adapter.RegisterMemory(pointer(address_of(buffer)), 64, NULL, ffi.new("uintptr_t *")).failed
    bad = ffi.cast("OVERLAPPED *", 8)
    assert node.adapter.RegisterMemory(pointer(address_of(buffer)), 64, bad, ffi.new("uintptr_t *")).failed


def test_i_2_3_registrations_run_out_by_a_fault(faults, kit):
    faults(refused_registrations(after=2))
    node = Node(kit)
    buffer = ffi.new("char[64]")
    codes = [node.start_registration(address_of(buffer), 64)[0].result() for _ in range(4)]
    assert codes == [Status.SUCCESS] * 2 + [Status.INSUFFICIENT_RESOURCES] * 2


def test_i_2_4_memory_is_registered_while_connecting(kit):
    active, passive = Side(Node(kit)), Side(Node(kit))
    listen, to = passive.node.listen()
    arrived = issue(kit, listen, "GetConnectionRequest", passive.connector)
    connecting = connect(active, to)
    assert arrived.result() == Status.SUCCESS
    target = passive.node.register(100)
    accepting = accept(passive)
    assert connecting.result() == Status.SUCCESS
    source = active.node.register(100)
    received = passive.receive(target.sge())
    complete(active, connecting, accepting)
    source.put(0, bytes(range(100)))
    active.expect(active.send(source.sge()))
    passive.expect(received)
    assert target.get() == bytes(range(100))


def test_i_2_5_one_handle_serves_all_endpoints_of_its_adapter_and_no_other_adapter(kit):
    node, other = Node(kit), Node(kit)
    shared = node.register(4096)
    sides = [Side(node) for _ in range(3)]
    peers = [Side(other) for _ in range(3)]
    for side, peer in zip(sides, peers, strict=True):
        establish(side, peer)
        peer.receive(peer.region.sge())
        side.expect(side.send(shared.sge(0, 128)))
        peer.one()
    peers[0].receive(peers[0].region.sge())
    done = sides[0].send((other.register(64).address, 64, peers[0].region.handle))
    sides[0].expect(done, Status.ACCESS_VIOLATION)


def test_i_2_6_each_registration_of_a_buffer_is_its_own(kit):
    active, passive = make_pair(kit)
    first = active.node.register(4096)
    second = active.node.register(first)
    assert first.handle != second.handle
    assert first.deregister() == Status.SUCCESS
    passive.receive(passive.region.sge())
    active.expect(active.send(second.sge(0, 10)))
    passive.receive(passive.region.sge())
    active.expect(active.send(first.sge(0, 10)), Status.ACCESS_VIOLATION)


def test_i_2_6_registrations_by_the_thousand(kit):
    node = Node(kit)
    buffer = ffi.new("char[65536]")
    seen, count = set(), share(10_000, 600)
    for round_number in range(2):
        handles = []
        for i in range(count):
            request, handle = node.start_registration(address_of(buffer) + i, 64)
            assert request.result() == Status.SUCCESS
            handles.append(handle[0])
        assert len(set(handles)) == count
        assert not seen & set(handles), f"D.4.4: a handle of the first round is used again in round {round_number}"
        seen |= set(handles)
        for handle in handles:
            assert do(kit, node.adapter, "DeregisterMemory", handle) == Status.SUCCESS


def test_i_2_7_memory_that_goes_while_registered_is_a_violation(kit):
    active, passive = make_pair(kit)
    pages = Memory(8192)
    request, handle = active.node.start_registration(pages.address, 8192)
    assert request.result() == Status.SUCCESS
    where = pages.address
    pages.free()
    passive.receive(passive.region.sge())
    for size in (100, 8192):  # copied at once, and sent later
        done = active.send((where, size, handle[0]))
        if size == 100:
            active.expect(done, Status.ACCESS_VIOLATION)
        else:
            active.expect(done, Status.CANCELED)


def test_i_2_8_deregistering_what_is_not_registered(kit, rng):
    node = Node(kit)
    mine = node.register(64)
    made_up = [*MADE_UP, mine.handle ^ 1 << 24, mine.handle | 1 << 32, mine.handle | 1 << 63, address_of(mine.memory)]
    made_up += [rng.getrandbits(rng.choice((24, 32, 64))) for _ in range(2000)]
    request = kit.overlapped()
    for handle in made_up:
        if handle != mine.handle:
            assert node.adapter.DeregisterMemory(handle, request) == Status.INVALID_HANDLE, hex(handle)
    assert Node(kit).adapter.DeregisterMemory(mine.handle, request) == Status.INVALID_HANDLE
    assert node.adapter.DeregisterMemory(mine.handle, NULL).failed
    assert node.adapter.DeregisterMemory(mine.handle, ffi.cast("OVERLAPPED *", 8)).failed
    assert mine.deregister() == Status.SUCCESS, "none of that did any harm"
    assert mine.deregister() == Status.INVALID_HANDLE


def test_i_2_8_a_handle_that_is_guessed_before_it_is_given(faults, kit):
    faults(slow_call("reg_mr", 150))
    node = Node(kit)
    known = node.register(64)
    buffer, overlapped = ffi.new("char[64]"), kit.overlapped()
    request, handle = node.start_registration(address_of(buffer), 64)
    number = int.from_bytes(known.handle.to_bytes(4, "little"), "big")
    for guess in range(number - 0x1000, number + 0x1000, 2):
        wire = int.from_bytes((guess & 0xFFFFFFFF).to_bytes(4, "big"), "little")
        if wire != known.handle:
            assert node.adapter.DeregisterMemory(wire, overlapped) == Status.INVALID_HANDLE
    assert request.result() == Status.SUCCESS
    assert do(kit, node.adapter, "DeregisterMemory", handle[0]) == Status.SUCCESS


def test_i_2_8_threads_register_and_deregister(kit):
    node = Node(kit)
    buffer = ffi.new("char[65536]")

    def work(number):
        own = Kit()
        try:
            for i in range(share(5_000, 300)):
                handle = ffi.new("uintptr_t *")
                arguments = (pointer(address_of(buffer) + 1000 * number + i % 100), 512)
                request = issue(own, node.adapter, "RegisterMemory", *arguments, last=(handle,))
                assert request.result() == Status.SUCCESS
                again = [issue(own, node.adapter, "DeregisterMemory", handle[0]).result() for _ in range(2)]
                assert again == [Status.SUCCESS, Status.INVALID_HANDLE]
        finally:
            own.close()

    in_threads(4, work, 600)


def test_i_2_8_a_registration_with_windows_is_busy(kit):
    active, passive = make_pair(kit)
    region = passive.node.register(4096)
    windows = [passive.node.window()[0] for _ in range(2)]
    for window in windows:
        code, result, _ = passive.try_bind(window, region=region)
        assert code == Status.SUCCESS
        passive.expect(result)
        assert region.deregister() == Status.DEVICE_BUSY
    for window in windows:
        assert region.deregister() == Status.DEVICE_BUSY
        result = passive.node.result()
        assert passive.endpoint.Invalidate(result, window.pointer, 0) == Status.SUCCESS
        passive.expect(result)
    assert region.deregister() == Status.SUCCESS
    assert active.disconnect() == Status.SUCCESS


def leave_registrations(channel):
    kit = Kit()
    node = Node(kit)
    buffer = ffi.new("char[4096]")
    for size in (64, 4096, 1):
        request, _ = node.start_registration(address_of(buffer), size)
        assert request.result() == Status.SUCCESS
    assert node.register(64).deregister() == Status.SUCCESS
    kit.close()
    channel.send("done")


def test_d_6_7_registrations_end_with_their_adapter_and_are_counted_as_leaked(tmp_path):
    statistics = tmp_path / "statistics.txt"
    with Peer("test_i_memory", "leave_registrations", SOFTND_STATISTICS=str(statistics)) as peer:
        assert peer.receive() == "done"
        assert peer.finish() == 0
    wait_until(statistics.exists, "the statistics are written")
    counts = dict(re.findall(r"^(.*): (\d+ created, \d+ leaked)", statistics.read_text(), re.M))
    assert counts["registration"] == "4 created, 3 leaked"
    assert {counts[kind].split(", ")[1] for kind in ("memory region", "adapter", "class factory")} == {"0 leaked"}


# ---- Windows ----


def test_i_3_2_a_window_needs_no_result_of_its_own(kit):
    active, passive = make_pair(kit)
    window = passive.node.create("MemoryWindow", NULL)
    code, result, remote = passive.try_bind(window)
    assert code == Status.SUCCESS
    passive.expect(result)
    received = passive.receive(passive.region.sge())
    active.expect(active.send_and_invalidate(active.region.sge(0, 8), remote=remote))
    passive.expect(received)
    assert not passive.cq.GetResults(ffi.new("ND_RESULT *[1]"), 1), "nothing else is reported"
    assert passive.node.try_create("MemoryWindow", ffi.cast("ND_RESULT *", 8))[0].failed


def test_i_3_3_a_window_belongs_to_one_endpoint_at_a_time(kit):
    node, other = Node(kit), Node(kit)
    first, second, third = (Side(node) for _ in range(3))
    peers = [Side(other) for _ in range(3)]
    for side, peer in zip((first, second, third), peers, strict=True):
        establish(peer, side)
    window, _, remote = first.bound_window(0, 4096)
    peers[1].expect(peers[1].read(peers[1].region.sge(0, 8), remote=remote), Status.ACCESS_VIOLATION)
    peers[0].expect(peers[0].read(peers[0].region.sge(0, 8), remote=remote))
    # After the invalidation, another endpoint uses it.
    result = node.result()
    assert first.endpoint.Invalidate(result, window.pointer, 0) == Status.SUCCESS
    first.expect(result)
    code, result, again = third.try_bind(window, 0, 4096)
    assert code == Status.SUCCESS
    third.expect(result)
    peers[2].expect(peers[2].read(peers[2].region.sge(0, 8), remote=again))
    peers[0].expect(peers[0].read(peers[0].region.sge(0, 8), remote=again), Status.ACCESS_VIOLATION)


def test_i_3_4_the_descriptor_is_there_when_bind_returns_and_travels_byte_for_byte(kit):
    active, passive = make_pair(kit)
    active.receive(active.region.sge(0, 20))
    window, _ = passive.node.window()
    code, _, made = passive.try_bind(window, 256, 1024)
    assert code == Status.SUCCESS
    passive.region.put(0, bytes(ffi.buffer(made)))
    passive.send(passive.region.sge(0, 20))  # E.2.8: without waiting for the Bind
    assert [done.status for done in passive.take(2)] == [Status.SUCCESS] * 2
    assert active.one().bytes == 20
    remote = ffi.new("ND_MW_DESCRIPTOR *")
    ffi.buffer(remote)[:] = active.region.get(0, 20)
    active.region.put(0, b"through the descriptor")
    active.expect(active.write(active.region.sge(0, 22), remote=remote, offset=1002))
    assert passive.region.get(256 + 1002, 22) == b"through the descriptor"


def test_i_3_5_the_descriptor_is_in_network_order(kit):
    _, passive = make_pair(kit)
    window, _, made = passive.bound_window(0x123, 0x4567)
    base, length, token = fields(made)
    assert (base, length) == (passive.region.address + 0x123, 0x4567)
    second = version2.Interface("IND2MemoryWindow", window.pointer)
    assert token == second.GetRemoteToken().to_bytes(4, "little"), "D.4.2: a token is in network order already"


def test_i_3_6_what_bind_refuses(kit, rng):
    active, passive = make_pair(kit)
    side, region = passive, passive.region
    window, _ = side.node.window()
    idle = Side(side.node)
    assert idle.try_bind(window, region=region)[0] == Status.CONNECTION_INVALID

    def bind(handle, offset=0, size=64, flags=8, of=window):
        made, result = ffi.new("ND_MW_DESCRIPTOR *"), side.node.result()
        where = pointer(region.address + offset)
        return side.endpoint.Bind(result, handle, of.pointer, where, size, flags, made)

    made_up = [handle for handle in [*MADE_UP, *(rng.getrandbits(64) for _ in range(200))] if handle != region.handle]
    for handle in (*made_up, active.region.handle | 1 << 40):
        assert bind(handle) == Status.ACCESS_VIOLATION, hex(handle)
    for offset, size in ((-1, 64), (region.size - 63, 64), (0, region.size + 1), (region.size, 1)):
        assert bind(region.handle, offset, size) == Status.ACCESS_VIOLATION
    assert bind(region.handle, 0, 0) == Status.INVALID_PARAMETER_5
    for flags in (Op.SOLICIT, Op.INLINE, 0x40, 0x80000000):
        assert bind(region.handle, flags=flags) == Status.INVALID_PARAMETER_6
    assert bind(region.handle, of=Node(kit).window()[0]) == Status.INVALID_PARAMETER_MIX
    good = (window.pointer, pointer(region.address), 64, 8)
    made, result = ffi.new("ND_MW_DESCRIPTOR *"), side.node.result()
    assert side.endpoint.Bind(result, region.handle, *good, NULL) == Status.INVALID_PARAMETER_7
    assert side.endpoint.Bind(NULL, region.handle, *good, made) == Status.INVALID_PARAMETER_1
    assert result_of(result) == UNTOUCHED
    dead = side.node.register(64)
    assert dead.deregister() == Status.SUCCESS
    assert bind(dead.handle) == Status.ACCESS_VIOLATION
    assert bind(region.handle) == Status.SUCCESS, "none of that did any harm"
    assert side.one().status == Status.SUCCESS
    assert bind(region.handle) == Status.SUCCESS
    assert side.one().status == Status.INVALID_DEVICE_REQUEST, "E.2.7: it is bound already"


def test_i_3_6_rights_are_those_of_the_bind(kit):
    for flags, may_read, may_write in (
        (8, True, False),
        (16, False, True),
        (ALLOW_BOTH, True, True),
        (0, False, False),
    ):
        active, passive = make_pair(kit)
        _, _, remote = passive.bound_window(0, 64, flags)
        for allowed, go in ((may_read, active.read), (may_write, active.write)):
            if allowed:
                active.expect(go(active.region.sge(0, 64), remote=remote))
        if not may_read:
            active.expect(active.read(active.region.sge(0, 1), remote=remote), Status.ACCESS_VIOLATION)
        elif not may_write:
            active.expect(active.write(active.region.sge(0, 1), remote=remote), Status.ACCESS_VIOLATION)


def test_i_3_7_an_invalidated_window_is_closed_to_the_peer(kit):
    active, passive = make_pair(kit)
    window, invalidated, remote = passive.bound_window(0, 64)
    active.expect(active.read(active.region.sge(0, 64), remote=remote))
    result = passive.node.result()
    assert passive.endpoint.Invalidate(result, window.pointer, 0) == Status.SUCCESS
    passive.expect(result)
    assert result_of(invalidated) == UNTOUCHED, "that is for the peer's invalidation only"
    active.expect(active.read(active.region.sge(0, 64), remote=remote), Status.ACCESS_VIOLATION)


def test_i_3_8_invalidating_a_window_that_is_not_bound(kit):
    active, passive = make_pair(kit)
    window, _ = passive.node.window()
    for wrong in (NULL, ffi.cast("void *", 8), passive.cq.pointer):
        assert passive.endpoint.Invalidate(passive.node.result(), wrong, 0) == Status.INVALID_PARAMETER_2
    assert passive.endpoint.Invalidate(NULL, window.pointer, 0) == Status.INVALID_PARAMETER_1
    assert passive.endpoint.Invalidate(passive.node.result(), window.pointer, 0x8) == Status.INVALID_PARAMETER_3
    result = passive.node.result()
    assert passive.endpoint.Invalidate(result, window.pointer, 0) == Status.SUCCESS
    assert passive.one()[:2] == (address_of(result), version1.INVALIDATION_ERROR)
    assert active.disconnect() == Status.SUCCESS
