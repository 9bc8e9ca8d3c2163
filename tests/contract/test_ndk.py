"""The kernel interface's registration, modelled in user mode: contract section J."""

from __future__ import annotations

import ctypes
import inspect
import threading

import pytest
from kit.helpers import (
    DEADLINE_S,
    QUIET_S,
    assert_refused,
    assert_works,
    bind,
    contents,
    expose,
    memory,
    require,
    succeed,
    wait_until,
)
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Operation, RemoteMemory, ndk
from ndpy.ndk import Mdl, NdkAdapterFlags, NdkFlags, NdkMr, NtStatus
from ndpy.vocabulary.quirks import Quirk

PAGE = 4096
# Some adapters finish small registrations inline and large ones through the callback. Others treat all alike.
LENGTHS = (1, PAGE, 1 << 20)


class Callback:
    """Records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, NtStatus]] = []

    def __call__(self, context: object, status: NtStatus) -> None:
        self.calls.append((context, status))

    def wait(self) -> tuple[object, NtStatus]:
        wait_until(lambda: self.calls, "the callback comes")
        return self.calls[0]


class ScriptedAdapter:
    """An adapter whose registrations end when the test says so. Everything else comes from the real adapter."""

    def __init__(self, adapter: ndpy.Adapter) -> None:
        self.adapter = adapter
        self.info = adapter.info
        self.refusal: ndpy.NdpyError | None = None
        self.begun: list[tuple[ndpy.Pending, object, Access]] = []

    def begin_register(self, buffer, access):
        if self.refusal is not None:
            raise self.refusal
        pending = ndpy.Pending("register")
        self.begun.append((pending, buffer, access))
        return pending

    def succeed(self) -> None:
        pending, buffer, access = self.begun.pop()
        region = self.adapter.register(buffer, access)
        if not pending.succeed(region):
            region.close()

    def fail(self, error: ndpy.NdpyError) -> None:
        self.begun.pop()[0].fail(error)


@pytest.fixture
def scripted(adapter):
    return ScriptedAdapter(adapter)


@pytest.fixture
def mrs(adapter, keep):
    """mrs() makes an NdkMr over the adapter. All of them are closed at the end."""

    def make(over=adapter) -> NdkMr:
        mr: NdkMr = keep(NdkMr(over))
        return mr

    return make


def final(mr: NdkMr, mdl: Mdl, length: int, flags: int = NdkFlags.ALLOW_LOCAL_WRITE) -> NtStatus:
    """Register, and wait for the callback if the call returns PENDING. Returns the final status."""
    callback = Callback()
    status = mr.register(mdl, length, flags, callback, mr)
    if status is NtStatus.PENDING:
        _, status = callback.wait()
    return status


def registered(mr: NdkMr, buffer, flags: int = NdkFlags.ALLOW_LOCAL_WRITE) -> ndpy.MemoryRegion:
    assert final(mr, Mdl(buffer), len(buffer), flags) is NtStatus.SUCCESS
    return mr.region


def deregistered(mr: NdkMr) -> NtStatus:
    callback = Callback()
    status = mr.deregister(callback, mr)
    if status is NtStatus.PENDING:
        _, status = callback.wait()
    return status


def in_pieces(buffer, *sizes: int) -> Mdl:
    """A chain over consecutive pieces of a buffer."""
    view = memoryview(buffer)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    chain = None
    for size, end in zip(reversed(sizes), reversed(ends), strict=True):
        chain = Mdl(view[end - size : end], chain)
    return chain


# ---- what is registered ----


def test_j_1_register_takes_what_the_kernel_interface_takes_and_returns_a_status(mrs):
    names = list(inspect.signature(NdkMr.register).parameters)[1:]
    assert names == ["mdl", "length", "flags", "request_completion", "request_context"]
    mr = mrs()
    status = mr.register(Mdl(bytearray(PAGE)), PAGE, NdkFlags.ALLOW_LOCAL_READ, Callback())
    assert isinstance(status, NtStatus)
    wait_until(lambda: mr.region, "it is registered")


def test_j_2_objects_for_fast_registration_are_refused(adapter):
    with pytest.raises(ndpy.UnsupportedError, match="user mode"):
        NdkMr(adapter, fast_register=True)


@pytest.mark.parametrize("sizes", [(8192,), (4096, 4096), (1, 4095, 3000, 1096), (100,) * 50])
def test_j_3_a_chain_of_contiguous_mdls_is_one_region(pair, keep, mrs, sizes):
    total = sum(sizes)
    buffer = bytearray(total)
    mr = mrs()
    assert final(mr, in_pieces(buffer, *sizes), total, NdkFlags.ALLOW_REMOTE_WRITE) is NtStatus.SUCCESS
    data = bytes(number % 251 for number in range(total))
    pair.client.queue_pair.write(memory(keep, pair.adapter, data, Access.NONE), expose(keep, pair.server, mr.region))
    succeed(pair.client.cq)
    assert_works(keep, pair)
    assert buffer == data


def test_j_4_the_region_starts_at_the_first_mdl_and_is_as_long_as_asked_for(mrs):
    buffer = bytearray(3 * PAGE)
    mr = mrs()
    view = memoryview(buffer)
    chain = Mdl(view[100:PAGE], Mdl(view[PAGE:]))
    assert final(mr, chain, PAGE + 5) is NtStatus.SUCCESS
    assert (mr.region.address, mr.region.length) == (chain.virtual_address, PAGE + 5)
    del view
    assert chain.virtual_address == memoryview_address(buffer) + 100


def memoryview_address(buffer) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def test_j_5_fewer_bytes_than_the_chain_has_can_be_registered_and_not_one_more(pair, keep, mrs):
    buffer = bytearray(b"_" * 200)
    for length, status in ((201, NtStatus.INVALID_PARAMETER), (0, NtStatus.INVALID_PARAMETER), (150, NtStatus.SUCCESS)):
        mr = mrs()
        assert final(mr, in_pieces(buffer, 100, 100), length, NdkFlags.ALLOW_REMOTE_WRITE) is status
    remote = expose(keep, pair.server, mr.region)
    beyond = RemoteMemory(remote.address + 150, 1, remote.token)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"X"), beyond, context=5)
    assert_refused(pair.client, Operation.WRITE, 5)
    assert buffer == b"_" * 200


def test_j_6_a_gap_among_the_first_bytes_is_an_invalid_parameter(mrs):
    view = memoryview(bytearray(3 * PAGE))
    for second in (view[2 * PAGE :], view[PAGE + 1 :], view[PAGE - 1 :], view[:PAGE]):
        mr = mrs()
        assert final(mr, Mdl(view[:PAGE], Mdl(second)), PAGE + 1) is NtStatus.INVALID_PARAMETER
        assert mr.region is None
    # The object can still be used.
    assert registered(mr, bytearray(64)).length == 64


def test_j_6_a_gap_behind_the_length_is_no_error(mrs):
    view = memoryview(bytearray(3 * PAGE))
    apart = Mdl(view[:PAGE], Mdl(view[2 * PAGE :]))
    assert final(mrs(), apart, PAGE) is NtStatus.SUCCESS
    three = Mdl(view[:100], Mdl(view[100:200], Mdl(view[300:])))
    assert final(mrs(), three, 200) is NtStatus.SUCCESS
    assert final(mrs(), three, 201) is NtStatus.INVALID_PARAMETER


def test_j_7_the_address_is_the_first_offset_of_the_region_and_no_byte_changes(pair, keep, mrs):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    buffer = bytearray(bytes(range(256)))
    mr = mrs()
    region = registered(mr, buffer, NdkFlags.ALLOW_REMOTE_READ)
    remote = RemoteMemory(Mdl(buffer).virtual_address, 256, mr.remote_token)
    sink = memory(keep, pair.adapter, 256, Access.LOCAL_WRITE | Access.READ_SINK)
    pair.client.queue_pair.read(sink, remote)
    succeed(pair.client.cq)
    assert contents(sink) == buffer == bytes(range(256))
    assert region.address == remote.address
    before = RemoteMemory(remote.address - 1, 1, remote.token)
    pair.client.queue_pair.read(sink[0:1], before, context=6)
    assert_refused(pair.client, Operation.READ, 6)


def test_j_8_address_0_is_refused(mrs):
    assert final(mrs(), Mdl((0, PAGE)), PAGE) is NtStatus.INVALID_PARAMETER
    assert final(mrs(), Mdl((0, PAGE), Mdl((PAGE, PAGE))), 2 * PAGE) is NtStatus.INVALID_PARAMETER


# ---- flags ----


def test_j_9_flags_have_the_values_of_the_header(mrs):
    assert [
        NdkFlags.ALLOW_LOCAL_READ,
        NdkFlags.ALLOW_LOCAL_WRITE,
        NdkFlags.ALLOW_REMOTE_READ,
        NdkFlags.ALLOW_REMOTE_WRITE,
        NdkFlags.RDMA_READ_SINK,
    ] == [0x0, 0x1, 0x2, 0x5, 0x8]
    assert NdkFlags.ALLOW_LOCAL_WRITE in NdkFlags.ALLOW_REMOTE_WRITE
    for bits in range(16):
        if bits & 0x5 != 0x4:
            assert final(mrs(), Mdl(bytearray(64)), 64, bits) is NtStatus.SUCCESS, bits
    for bits in (0x10, 0x20, 0x10000, 0x80000000):
        assert final(mrs(), Mdl(bytearray(64)), 64, bits) is NtStatus.INVALID_PARAMETER, bits


def test_j_9_local_read_is_always_granted_and_remote_rights_as_asked(pair, keep, mrs):
    source = registered(mrs(), bytearray(b"only read"), NdkFlags.ALLOW_LOCAL_READ)
    owner = bytearray(b"guarded__")
    region = registered(mrs(), owner, NdkFlags.ALLOW_REMOTE_READ)
    inbox = memory(keep, pair.adapter, 9)
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.send(source)
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(inbox) == b"only read"
    pair.client.queue_pair.write(source, expose(keep, pair.server, region), context=4)
    assert_refused(pair.client, Operation.WRITE, 4)
    assert owner == b"guarded__"


def test_j_10_a_region_with_read_sink_is_the_sink_of_a_read(pair, keep, mrs):
    """A sink needs local write (D.3.2). RDMA_READ_SINK adds whatever else the transport needs."""
    remote = expose(keep, pair.server, memory(keep, pair.adapter, b"readable", Access.REMOTE_READ))
    for others in (NdkFlags.ALLOW_LOCAL_WRITE, NdkFlags.ALLOW_REMOTE_WRITE, 0x3, 0x7):
        sink = registered(mrs(), bytearray(8), others | NdkFlags.RDMA_READ_SINK)
        pair.client.queue_pair.read(sink, remote)
        succeed(pair.client.cq)
        assert contents(sink) == b"readable"


def test_j_11_the_adapter_says_whether_read_sink_is_required(adapter):
    assert NdkAdapterFlags.RDMA_READ_SINK_NOT_REQUIRED == 0x2
    required = ndpy.Capability.READ_SINK_REQUIRED in adapter.info.capabilities
    assert (ndk.adapter_flags(adapter) == NdkAdapterFlags.NONE) is required
    assert required or not has_quirk(adapter, Quirk.IWARP_READ_SINK_NEEDS_REMOTE_WRITE)


def test_j_12_read_sink_never_fails_a_registration(mrs):
    for flags in (0x8, 0x9, 0xA, 0xB, 0xD, 0xF):
        assert final(mrs(), Mdl(bytearray(PAGE)), PAGE, flags) is NtStatus.SUCCESS


# ---- statuses ----


def test_statuses_have_the_values_of_the_header():
    assert {status: status.value for status in NtStatus} == {
        NtStatus.SUCCESS: 0,
        NtStatus.PENDING: 0x103,
        NtStatus.INVALID_PARAMETER: 0xC000000D,
        NtStatus.INSUFFICIENT_RESOURCES: 0xC000009A,
        NtStatus.ACCESS_VIOLATION: 0xC0000005,
        NtStatus.DEVICE_BUSY: 0x80000011,
        NtStatus.CANCELLED: 0xC0000120,
        NtStatus.NOT_SUPPORTED: 0xC00000BB,
        NtStatus.DEVICE_REMOVED: 0xC00002B6,
        NtStatus.INVALID_DEVICE_STATE: 0xC0000184,
        NtStatus.UNSUCCESSFUL: 0xC0000001,
    }


@pytest.mark.parametrize("length", LENGTHS)
def test_j_13_j_14_either_the_call_succeeds_or_one_callback_tells_of_it(mrs, length):
    """SUCCESS brings no callback. PENDING brings one, with the context and the final status."""
    mr, callback, context = mrs(), Callback(), object()
    status = mr.register(Mdl(bytearray(length)), length, NdkFlags.ALLOW_REMOTE_READ, callback, context)
    if status is NtStatus.PENDING:
        callback.wait()
    else:
        assert status is NtStatus.SUCCESS
        assert mr.region.length == length
    threading.Event().wait(QUIET_S)
    assert callback.calls == ([(context, NtStatus.SUCCESS)] if status is NtStatus.PENDING else [])
    assert callback.calls == [] or callback.calls[0][0] is context
    assert mr.region.length == length


def test_j_13_inline_success_calls_nothing(adapter, mrs, monkeypatch):
    def at_once(buffer, access):
        pending = ndpy.Pending("register")
        pending.succeed(adapter.register(buffer, access))
        return pending

    monkeypatch.setattr(adapter, "begin_register", at_once)
    mr, callback = mrs(), Callback()
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback) is NtStatus.SUCCESS
    assert mr.region.length == 64
    assert callback.calls == []


def test_j_14_pending_is_followed_by_one_callback_with_the_context(scripted, mrs):
    mr, callback, context = mrs(scripted), Callback(), ["context"]
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback, context) is NtStatus.PENDING
    assert callback.calls == []
    assert mr.region is None
    with pytest.raises(ndpy.ClosedError):
        _ = mr.remote_token
    scripted.succeed()
    assert callback.calls == [(context, NtStatus.SUCCESS)]
    assert callback.calls[0][0] is context
    assert mr.local_token == mr.region.local_token


def test_j_14_many_registrations_pend_at_once_and_each_is_told_once(mrs):
    callbacks = [Callback() for _ in range(32)]
    buffers = [ndpy.alloc(1 << 17) for _ in callbacks]
    made = [mrs() for _ in callbacks]
    returned = [
        mr.register(Mdl(buffer), len(buffer), NdkFlags.ALLOW_LOCAL_WRITE, callback, number)
        for number, (mr, buffer, callback) in enumerate(zip(made, buffers, callbacks, strict=True))
    ]
    assert set(returned) <= {NtStatus.SUCCESS, NtStatus.PENDING}
    wait_until(lambda: all(mr.region for mr in made), "all are registered")
    threading.Event().wait(QUIET_S)
    for number, (status, callback) in enumerate(zip(returned, callbacks, strict=True)):
        assert callback.calls == ([(number, NtStatus.SUCCESS)] if status is NtStatus.PENDING else [])


def test_j_15_a_lack_of_resources_is_told_inline_and_through_the_callback(scripted, mrs):
    mr, callback = mrs(scripted), Callback()
    scripted.refusal = ndpy.InsufficientResourcesError("no memory left", operation="register")
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback) is NtStatus.INSUFFICIENT_RESOURCES
    assert callback.calls == []
    scripted.refusal = None
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback, 1) is NtStatus.PENDING
    scripted.fail(ndpy.InsufficientResourcesError("no memory left", operation="register"))
    assert callback.calls == [(1, NtStatus.INSUFFICIENT_RESOURCES)]
    assert mr.region is None
    # The object can still be used after both failures.
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback, 2) is NtStatus.PENDING
    scripted.succeed()
    assert callback.calls[1:] == [(2, NtStatus.SUCCESS)]


def test_j_16_other_failures_have_their_status(adapter, scripted, mrs):
    mr = mrs(scripted)
    for error, status in (
        (ndpy.DeviceRemovedError("gone"), NtStatus.DEVICE_REMOVED),
        (ndpy.UnsupportedError("cannot"), NtStatus.NOT_SUPPORTED),
        (ndpy.AccessViolationError("not mapped"), NtStatus.ACCESS_VIOLATION),
        (ndpy.ProviderError("odd", native=0xC0FFEE), NtStatus.UNSUCCESSFUL),
    ):
        callback = Callback()
        assert mr.register(Mdl(bytearray(64)), 64, 0, callback) is NtStatus.PENDING
        scripted.fail(error)
        assert callback.calls == [(None, status)]
    # The middle of the unmapped range. A new mapping, such as one of Python's own, fills such a hole from its end.
    unmapped = ndpy.alloc(1 << 26)
    address = Mdl(unmapped).virtual_address + (1 << 25)
    del unmapped
    assert final(mrs(), Mdl((address, 1 << 20)), 1 << 20) is NtStatus.ACCESS_VIOLATION
    longest = adapter.info.max_registration_size
    if longest < 1 << 62:
        assert final(mrs(), Mdl((PAGE, longest + 1)), longest + 1) is NtStatus.INVALID_PARAMETER


@pytest.mark.parametrize("memory", [(0, 0), (PAGE, 0), (PAGE, -1), (-1, 1), ((1 << 64) - 10, 11), (1 << 64, 1)])
def test_a_chain_is_not_made_of_what_is_no_range_of_memory(memory):
    with pytest.raises(ndpy.InvalidBufferError, match="not a range of memory"):
        Mdl(memory)
    assert Mdl(((1 << 64) - 10, 10)).byte_count == 10
    assert Mdl((0, 1)).virtual_address == 0


def test_memory_locked_for_reading_is_not_registered_for_writing(mrs):
    chain = Mdl(b"constant")
    assert not chain.writable
    assert final(mrs(), chain, 8, NdkFlags.ALLOW_LOCAL_READ) is NtStatus.SUCCESS
    for flags in (NdkFlags.ALLOW_LOCAL_WRITE, NdkFlags.ALLOW_REMOTE_WRITE, NdkFlags.RDMA_READ_SINK):
        assert final(mrs(), chain, 8, flags) is NtStatus.ACCESS_VIOLATION


# ---- while it is pending, and afterwards ----


def test_j_17_the_chain_is_the_providers_while_the_request_is_pending(scripted, mrs):
    buffer = bytearray(300)
    chain = in_pieces(buffer, 100, 100, 100)
    links = list(chain)
    before = [(link.virtual_address, link.byte_count, link.next) for link in links]
    mr = mrs(scripted)
    assert mr.register(chain, 150, 0, Callback()) is NtStatus.PENDING
    for link in links:
        with pytest.raises(ndpy.DeviceBusyError, match="pending"):
            link.next = None
    assert [(link.virtual_address, link.byte_count, link.next) for link in links] == before
    scripted.succeed()
    chain.next = None
    assert [link.byte_count for link in chain] == [100]


def test_j_17_memory_that_the_program_drops_stays_while_it_is_pending_and_registered(scripted, pair, keep, mrs):
    buffer = bytearray(b"kept for as long as it is needed")
    mr = mrs(scripted)
    assert mr.register(Mdl(buffer), 32, NdkFlags.ALLOW_REMOTE_READ, Callback()) is NtStatus.PENDING
    with pytest.raises(BufferError):
        buffer.clear()
    scripted.succeed()
    with pytest.raises(BufferError):
        buffer.clear()
    assert deregistered(mr) is NtStatus.SUCCESS
    buffer.clear()


def test_j_19_deregistering_takes_back_the_tokens_and_frees_the_object(pair, keep, mrs):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    buffer = bytearray(b"original")
    mr = mrs()
    stale = registered(mr, buffer, NdkFlags.ALLOW_REMOTE_WRITE).remote()
    assert deregistered(mr) is NtStatus.SUCCESS
    assert mr.region is None
    again = registered(mr, buffer, NdkFlags.ALLOW_REMOTE_WRITE)
    assert again.remote_token != stale.token
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), stale, context=9)
    assert_refused(pair.client, Operation.WRITE, 9)
    assert buffer == b"original"


def test_j_19_what_is_not_registered_cannot_be_deregistered(mrs, scripted):
    mr = mrs(scripted)
    assert deregistered(mr) is NtStatus.INVALID_DEVICE_STATE
    assert mr.register(Mdl(bytearray(64)), 64, 0, Callback()) is NtStatus.PENDING
    assert deregistered(mr) is NtStatus.INVALID_DEVICE_STATE
    scripted.succeed()
    assert deregistered(mr) is NtStatus.SUCCESS
    assert deregistered(mr) is NtStatus.INVALID_DEVICE_STATE


def test_j_19_a_region_under_a_bound_window_is_busy(window_pair, mrs, keep):
    mr = mrs()
    region = registered(mr, bytearray(64))
    window = keep(window_pair.adapter.create_memory_window())
    bind(window_pair.server, window, region)
    callback = Callback()
    assert mr.deregister(callback) is NtStatus.DEVICE_BUSY
    with pytest.raises(ndpy.DeviceBusyError):
        mr.close()
    assert mr.region is region
    assert not region.closed
    window_pair.server.queue_pair.invalidate(window)
    succeed(window_pair.server.cq)
    assert deregistered(mr) is NtStatus.SUCCESS
    assert callback.calls == []


def test_j_20_rights_are_those_of_user_mode_and_there_is_no_secure_flag(mrs):
    assert [int(flag) for flag in (Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.READ_SINK)] == [
        int(flag)
        for flag in (
            NdkFlags.ALLOW_LOCAL_WRITE,
            NdkFlags.ALLOW_REMOTE_READ,
            NdkFlags.ALLOW_REMOTE_WRITE,
            NdkFlags.RDMA_READ_SINK,
        )
    ]
    mr = mrs()
    secure = int(Access.DO_NOT_SECURE_VM)
    assert final(mr, Mdl(bytearray(64)), 64, secure) is NtStatus.INVALID_PARAMETER
    assert registered(mr, bytearray(64), 0xB).access == Access.LOCAL_WRITE | Access.REMOTE_READ | Access.READ_SINK


def test_one_object_holds_one_registration(mrs, scripted):
    mr = mrs()
    region = registered(mr, bytearray(64))
    assert final(mr, Mdl(bytearray(64)), 64) is NtStatus.INVALID_DEVICE_STATE
    assert mr.region is region
    pending = mrs(scripted)
    assert pending.register(Mdl(bytearray(64)), 64, 0, Callback()) is NtStatus.PENDING
    assert final(pending, Mdl(bytearray(64)), 64) is NtStatus.INVALID_DEVICE_STATE


def test_closing_while_it_is_pending_tells_cancelled_once_and_leaves_no_region(adapter, scripted):
    mr, callback = NdkMr(scripted), Callback()
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback, 3) is NtStatus.PENDING
    mr.close()
    mr.close()
    assert callback.calls == [(3, NtStatus.CANCELLED)]
    scripted.succeed()
    assert callback.calls == [(3, NtStatus.CANCELLED)]
    assert final(mr, Mdl(bytearray(64)), 64) is NtStatus.INVALID_DEVICE_STATE
    adapter._refuse_if_used()


def test_closing_when_it_has_just_succeeded_tells_cancelled_and_leaves_no_region(adapter, scripted, monkeypatch):
    mr, callback = NdkMr(scripted), Callback()
    assert mr.register(Mdl(bytearray(64)), 64, 0, callback, 3) is NtStatus.PENDING
    ((pending, *_),) = scripted.begun
    # The adapter finishes before it sees the cancellation.
    monkeypatch.setattr(pending, "cancel", scripted.succeed)
    mr.close()
    assert callback.calls == [(3, NtStatus.CANCELLED)]
    assert mr.region is None
    assert final(mr, Mdl(bytearray(64)), 64) is NtStatus.INVALID_DEVICE_STATE
    adapter._refuse_if_used()


def test_closing_while_the_adapter_registers_leaves_no_region(adapter):
    callbacks = [Callback() for _ in range(16)]
    for callback in callbacks:
        with NdkMr(adapter) as mr:
            status = mr.register(Mdl(ndpy.alloc(1 << 20)), 1 << 20, 0, callback)
        assert status in (NtStatus.PENDING, NtStatus.SUCCESS)
        if status is NtStatus.PENDING:
            assert callback.wait()[1] in (NtStatus.SUCCESS, NtStatus.CANCELLED)
    threading.Event().wait(QUIET_S)
    assert all(len(callback.calls) <= 1 for callback in callbacks)
    wait_until(lambda: not adapter._users_left(), "no region is left")


def test_what_a_callback_raises_is_not_lost_and_stops_nothing(mrs, monkeypatch):
    import sys

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    def bad(context, status):
        raise ValueError("the consumer's own")

    statuses = []
    for _ in range(8):
        mr = mrs()
        statuses.append(mr.register(Mdl(ndpy.alloc(1 << 20)), 1 << 20, 0, bad))
        wait_until(lambda mr=mr: mr.region, "it is registered")
    pending = statuses.count(NtStatus.PENDING)
    wait_until(lambda: len(seen) == pending, "every exception is seen", DEADLINE_S)
    assert all(isinstance(entry.exc_value, ValueError) for entry in seen)


def test_a_callback_can_deregister(mrs):
    mr, ended = mrs(), Callback()

    def on_registered(context, status):
        assert status is NtStatus.SUCCESS
        if mr.deregister(ended) is not NtStatus.PENDING:
            ended(None, NtStatus.SUCCESS)

    if mr.register(Mdl(ndpy.alloc(1 << 20)), 1 << 20, 0, on_registered) is NtStatus.SUCCESS:
        on_registered(None, NtStatus.SUCCESS)
    assert ended.wait() == (None, NtStatus.SUCCESS)
    assert mr.region is None


def test_the_documentation_says_that_it_runs_in_user_mode():
    for text in (ndk.__doc__, NdkMr.__doc__):
        assert "user mode" in text
    assert "J.18" in ndk.__doc__
    assert "J.3" in ndk.__doc__
