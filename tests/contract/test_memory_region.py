"""Memory regions: contract section D."""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_quiet,
    assert_refused,
    assert_works,
    bind,
    connect_pair,
    contents,
    create_end,
    establish,
    expose,
    fill,
    memory,
    require,
    statuses,
    succeed,
    take,
)
from kit.quirks import expect_quirk
from kit.threads import in_threads

import ndpy
from ndpy import Access, Operation, RemoteMemory, Status
from ndpy.vocabulary.quirks import Quirk

PATTERN = bytes(range(256)) * 16


def sink_access(adapter) -> Access:
    """The rights that a portable program gives the sink of a read."""
    return Access.LOCAL_WRITE | Access.READ_SINK


# ---- D.1, D.2: registering ----


def test_region_describes_what_was_registered(adapter, keep):
    buffer = bytearray(5000)
    region = keep(adapter.register(buffer, Access.LOCAL_WRITE | Access.REMOTE_READ))
    assert region.adapter is adapter
    assert region.address == ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert region.length == len(region) == 5000
    assert region.access == Access.LOCAL_WRITE | Access.REMOTE_READ
    fill(region, b"seen by both")
    assert buffer.startswith(b"seen by both")


def test_local_write_is_the_default(adapter, keep):
    assert keep(adapter.register(bytearray(8))).access == Access.LOCAL_WRITE


def test_d_1_5_one_buffer_has_many_regions_with_their_own_tokens(adapter, keep):
    buffer = bytearray(8192)
    regions = [keep(adapter.register(buffer, access)) for access in (Access.NONE, Access.REMOTE_READ) * 8]
    part = keep(adapter.register(memoryview(buffer)[100:200], Access.REMOTE_WRITE))
    assert part.address == regions[0].address + 100
    assert len({region.local_token for region in [*regions, part]}) == 17
    regions[0].close()
    require(adapter, ndpy.Capability.REGION_ACCESS)
    shared = [region for region in [*regions, part] if region.access & Access.REMOTE_READ or region is part]
    assert len({region.remote_token for region in shared}) == 9
    assert regions[1].remote().length == 8192


def test_d_2_2_a_length_beyond_the_limit_is_refused(adapter):
    address = ctypes.addressof(ctypes.create_string_buffer(1))
    with pytest.raises((ndpy.LimitExceededError, ndpy.InvalidBufferError)) as refused:
        adapter.register((address, adapter.info.max_registration_size + 1))
    if adapter.info.max_registration_size < (1 << 64) - address:
        assert refused.type is ndpy.LimitExceededError
        assert str(adapter.info.max_registration_size) in str(refused.value)


def test_d_2_3_memory_that_is_not_mapped_is_refused(adapter):
    mapped = mmap.mmap(-1, 1 << 20)
    view = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(view)
    del view
    mapped.close()
    with pytest.raises(ndpy.AccessViolationError):
        adapter.register((address, 1 << 20))


def test_d_2_3_a_range_that_wraps_is_refused(adapter):
    with pytest.raises((ndpy.InvalidBufferError, ndpy.AccessViolationError)):
        adapter.register(((1 << 64) - 4096, 8192))


def test_d_2_3_read_only_memory_cannot_be_registered_for_writing(adapter):
    for access in (Access.LOCAL_WRITE, Access.REMOTE_WRITE):
        with pytest.raises(ndpy.AccessViolationError, match="read-only"):
            adapter.register(b"constant", access)
    assert issubclass(ndpy.AccessViolationError, PermissionError)


@pytest.mark.parametrize("buffer", [b"", bytearray(), memoryview(b""), (0, 0), (0, 4096), (4096, 0), (4096, -1)])
def test_d_2_4_an_empty_buffer_is_refused(adapter, buffer):
    with pytest.raises(ndpy.InvalidBufferError):
        adapter.register(buffer, Access.NONE)


@pytest.mark.parametrize("memory", [(4096,), (4096, 1, 1), (4096, "1"), (bytearray(8), 8), ()])
def test_what_is_no_address_and_length_is_refused(adapter, memory):
    with pytest.raises(ndpy.InvalidBufferError, match="address, length"):
        adapter.register(memory)


def test_what_is_no_buffer_is_refused_with_advice(adapter):
    with pytest.raises(TypeError, match="bytearray"):
        adapter.register("text")


def test_d_2_7_registering_works_after_a_refusal(adapter, keep):
    with pytest.raises(ndpy.InvalidBufferError):
        adapter.register(b"", Access.NONE)
    assert keep(adapter.register(bytearray(16))).length == 16


@pytest.mark.parametrize("length", [1, 2, 4095, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_d_2_8_any_length_at_any_address_registers(adapter, offset, length):
    view = memoryview(bytearray(length + offset))[offset:]
    with adapter.register(view) as region:
        assert region.length == length


def test_d_2_9_registering_changes_no_byte(adapter):
    buffer = bytearray(PATTERN)
    with adapter.register(buffer, Access.REMOTE_WRITE):
        assert buffer == PATTERN
    assert buffer == PATTERN


@pytest.mark.parametrize("late", ["client", "server"])
def test_d_2_10_memory_can_be_registered_while_connecting(adapter, keep, late):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    early = memory(keep, adapter, b"early", Access.LOCAL_WRITE)
    offer = ask(keep, adapter, client.queue_pair)
    between = memory(keep, adapter, b"later", Access.LOCAL_WRITE)
    source, sink = (between, early) if late == "client" else (early, between)
    data = contents(source)
    server.queue_pair.receive(sink)
    establish(offer, server.queue_pair)
    client.queue_pair.send(source)
    succeed(client.cq)
    succeed(server.cq)
    assert contents(sink) == data


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"12345678"),
        lambda: array.array("I", [1, 2]),
        lambda: (ctypes.c_uint8 * 8)(),
        lambda: mmap.mmap(-1, 4096),
        lambda: ndpy.alloc(8),
        lambda: memoryview(bytearray(16))[4:12],
    ],
    ids=["bytearray", "array", "ctypes", "mmap", "alloc", "memoryview"],
)
def test_every_kind_of_buffer_registers(adapter, make):
    with adapter.register(make()) as region:
        assert region.length >= 8


def test_memory_that_python_does_not_own_is_given_by_address(adapter, keep):
    owned = ctypes.create_string_buffer(100)
    region = keep(adapter.register((ctypes.addressof(owned), 100)))
    assert (region.address, region.length) == (ctypes.addressof(owned), 100)


def test_the_region_keeps_its_buffer(adapter, keep):
    buffer = bytearray(64)
    region = keep(adapter.register(buffer))
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    region.close()
    buffer.extend(b"x")


def test_registrations_run_concurrently(adapter, keep):
    pendings = [adapter.begin_register(bytearray(4096), Access.REMOTE_READ) for _ in range(16)]
    regions = [keep(pending.result(DEADLINE_S)) for pending in pendings]
    assert len({region.local_token for region in regions}) == 16


@pytest.mark.parametrize("length", [4096, 1 << 17])
def test_64_registrations_are_under_way_at_once(adapter, length):
    """64 are more than the adapter makes at a time, at either length. Each one ends with a region of its own."""
    buffers = [bytearray(length + number) for number in range(64)]
    pendings = [adapter.begin_register(buffer, Access.REMOTE_READ) for buffer in buffers]
    regions = [pending.result(DEADLINE_S) for pending in pendings]
    assert [region.length for region in regions] == [len(buffer) for buffer in buffers]
    assert len({region.local_token for region in regions}) == 64
    for region in regions:
        region.close()
    for buffer in buffers:
        buffer.append(0)


def test_cancelling_and_closing_in_the_middle_lose_nothing(adapter_name, rng):
    """A cancelled registration leaves no region and frees its buffer.

    The others become regions, and the adapter names them when it refuses to close.
    """
    adapter = ndpy.open_adapter(adapter_name)
    buffers = [bytearray(1 << 17) for _ in range(32)]
    pendings = [adapter.begin_register(buffer) for buffer in buffers]
    asked = [pending for pending in pendings if rng.random() < 0.5]
    answers = [pending.cancel() for pending in asked]
    assert len(answers) > 4
    # Each says whether it came in time.
    assert answers == [pending.done() and pending.cancelled() for pending in asked]
    regions = []
    for pending in pendings:
        with contextlib.suppress(ndpy.CanceledError):
            regions.append(pending.result(DEADLINE_S))
    assert len(regions) == len(pendings) - sum(answers)
    if regions:
        with pytest.raises(ndpy.DeviceBusyError, match="MemoryRegion"):
            adapter.close()
    for region in regions:
        region.close()
    late = [adapter.begin_register(buffer) for buffer in (bytearray(1 << 17) for _ in range(8))]
    for pending in late:
        pending.cancel()
        with contextlib.suppress(ndpy.CanceledError):
            pending.result(DEADLINE_S).close()
    adapter.close()
    for buffer in buffers:
        buffer.append(0)
    assert all(pending.done() for pending in late)


# ---- elements ----


def test_slices_are_elements_with_bounds(adapter, keep):
    region = memory(keep, adapter, 100)
    element = region[10:30]
    assert (element.address, element.length, element.token) == (region.address + 10, 20, region.local_token)
    assert (region[:].length, region[90:].length, region[:7].length, region[100:].length) == (100, 10, 7, 0)


@pytest.mark.parametrize("bad", [slice(0, 101), slice(-1, 10), slice(50, 40), slice(101, 101), slice(0, 10, 2)])
def test_d_5_2_an_element_outside_its_region_is_refused(adapter, keep, bad):
    region = memory(keep, adapter, 100)
    with pytest.raises(ndpy.ElementRangeError):
        region[bad]
    assert issubclass(ndpy.ElementRangeError, IndexError)


def test_remote_describes_the_range_that_peers_may_use(adapter, keep):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    region = memory(keep, adapter, 100, Access.REMOTE_READ)
    whole, part = region.remote(), region.remote(20, 30)
    assert (whole.address, whole.length, whole.token) == (region.address, 100, region.remote_token)
    assert (part.address, part.length) == (region.address + 20, 30)
    for offset, length in ((0, 101), (90, 11), (-1, 5), (101, 0)):
        with pytest.raises(ndpy.ElementRangeError):
            region.remote(offset, length)


def test_a_region_without_remote_right_has_nothing_for_peers(adapter, keep):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    with pytest.raises(ndpy.AccessViolationError, match="window"):
        memory(keep, adapter, 100).remote()


def test_a_region_with_the_right_of_atomics_alone_has_something_for_peers(adapter, keep):
    require(adapter, ndpy.Capability.REGION_ACCESS, ndpy.Capability.ATOMICS)
    region = memory(keep, adapter, 8, Access.REMOTE_ATOMIC)
    remote = region.remote()
    assert (remote.address, remote.length, remote.token) == (region.address, 8, region.remote_token)


def test_a_region_that_cannot_have_rights_has_nothing_for_peers(adapter, keep):
    if ndpy.Capability.REGION_ACCESS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} claims REGION_ACCESS")
    region = memory(keep, adapter, 100, Access.REMOTE_READ | Access.REMOTE_WRITE)
    for ask_for in (region.remote, lambda: region.remote(10, 20), lambda: region.remote_token):
        with pytest.raises(ndpy.UnsupportedError, match="window"):
            ask_for()
    assert region.access == Access.REMOTE_READ | Access.REMOTE_WRITE


def test_memory_without_local_write_is_not_written_although_the_adapter_has_no_rights(pair, keep):
    if ndpy.Capability.REGION_ACCESS in pair.adapter.info.capabilities:
        pytest.skip(f"{pair.adapter.info.name} claims REGION_ACCESS")
    source = memory(keep, pair.adapter, b"something", Access.REMOTE_READ)
    remote = expose(keep, pair.server, source)
    inbox = memory(keep, pair.adapter, b"untouched", Access.NONE)
    for post in (
        lambda: pair.client.queue_pair.receive(inbox),
        lambda: pair.client.queue_pair.receive([inbox[0:4]]),
        lambda: pair.client.queue_pair.read(inbox, remote),
        lambda: pair.client.queue_pair.read(inbox[0:4], remote),
    ):
        with pytest.raises(ndpy.AccessViolationError, match="LOCAL_WRITE"):
            post()
    assert_works(keep, pair)
    assert contents(inbox) == b"untouched"


# ---- D.3: rights ----


def test_d_3_1_a_region_without_flags_can_be_sent_and_written_from(pair, keep):
    source = memory(keep, pair.adapter, b"only read", Access.NONE)
    sink = memory(keep, pair.adapter, 9, Access.REMOTE_WRITE)
    pair.client.queue_pair.write(source, expose(keep, pair.server, sink))
    succeed(pair.client.cq)
    inbox = memory(keep, pair.adapter, 9)
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.send(source)
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(sink) == contents(inbox) == b"only read"


def test_d_3_2_a_receive_needs_local_write(pair, keep):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    inbox = memory(keep, pair.adapter, b"untouched", Access.NONE)
    pair.server.queue_pair.receive(inbox, context=5)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"something", Access.NONE))
    (completion,) = take(pair.server.cq)
    assert (completion.operation, completion.context) == (Operation.RECEIVE, 5)
    assert completion.status is Status.ACCESS_VIOLATION
    assert contents(inbox) == b"untouched"


def test_d_3_2_a_read_sink_needs_local_write(pair, keep):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    source = memory(keep, pair.adapter, b"something", Access.REMOTE_READ)
    sink = memory(keep, pair.adapter, b"untouched", Access.NONE)
    pair.client.queue_pair.read(sink, source.remote(), context=6)
    assert_refused(pair.client, Operation.READ, 6)
    assert contents(sink) == b"untouched"


def test_d_3_3_remote_read_grants_reading_only(pair, keep):
    owner = memory(keep, pair.adapter, b"readable", Access.REMOTE_READ)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, 8, sink_access(pair.adapter))
    pair.client.queue_pair.read(local, remote)
    succeed(pair.client.cq)
    assert contents(local) == b"readable"
    fill(local, b"intruder")
    pair.client.queue_pair.write(local, remote, context=3)
    assert_refused(pair.client, Operation.WRITE, 3)
    assert contents(owner) == b"readable"


def test_d_3_3_remote_write_grants_writing_only(request, pair, keep):
    expect_quirk(request, pair.adapter, Quirk.SIW_READS_WITHOUT_RIGHT)
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"written!", sink_access(pair.adapter))
    pair.client.queue_pair.write(local, remote)
    succeed(pair.client.cq)
    assert contents(owner) == b"written!"
    fill(local, b"my bytes")
    pair.client.queue_pair.read(local, remote, context=4)
    assert_refused(pair.client, Operation.READ, 4)
    assert contents(local) == b"my bytes"


def test_d_3_4_remote_write_contains_local_write(pair, keep):
    assert Access.REMOTE_WRITE & Access.LOCAL_WRITE == Access.LOCAL_WRITE
    inbox = memory(keep, pair.adapter, 4, Access.REMOTE_WRITE)
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"data", Access.NONE))
    succeed(pair.server.cq)
    assert contents(inbox) == b"data"


def test_d_3_5_rights_do_not_leak_to_another_region_over_the_same_bytes(pair, keep):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    buffer = bytearray(b"guarded!")
    keep(pair.adapter.register(buffer, Access.REMOTE_WRITE))
    readable = keep(pair.adapter.register(buffer, Access.REMOTE_READ))
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), readable.remote(), context=1)
    assert_refused(pair.client, Operation.WRITE, 1)
    assert buffer == b"guarded!"


def test_d_3_6_a_sink_without_read_sink_works_where_it_is_not_required(pair, keep):
    if ndpy.Capability.READ_SINK_REQUIRED in pair.adapter.info.capabilities:
        pytest.skip(f"{pair.adapter.info.name} claims READ_SINK_REQUIRED")
    remote = expose(keep, pair.server, memory(keep, pair.adapter, b"readable", Access.REMOTE_READ))
    for access in (Access.LOCAL_WRITE, Access.REMOTE_WRITE):
        sink = memory(keep, pair.adapter, 8, access)
        pair.client.queue_pair.read(sink, remote)
        succeed(pair.client.cq)
        assert contents(sink) == b"readable"


def test_d_3_6_where_read_sink_is_required_a_read_without_it_comes_whole_or_is_refused(pair, keep):
    """The adapter may refuse the read (contract J.11). It may not do half of it."""
    require(pair.adapter, ndpy.Capability.READ_SINK_REQUIRED)
    source = memory(keep, pair.adapter, b"readable", Access.REMOTE_READ)
    sink = memory(keep, pair.adapter, b"original", Access.LOCAL_WRITE)
    pair.client.queue_pair.read(sink, source.remote(), context=5)
    (completion,) = take(pair.client.cq)
    assert completion.context == 5
    assert contents(sink) == (b"readable" if completion.ok else b"original")


def test_j_10_a_sink_of_reads_grants_the_peer_nothing_else(pair, keep):
    """Even if a transport needs a remote right for the answer to a read, the peer gets none."""
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    sink = memory(keep, pair.adapter, 8, sink_access(pair.adapter))
    with pytest.raises(ndpy.AccessViolationError):
        sink.remote()
    assert sink.access == Access.LOCAL_WRITE | Access.READ_SINK


def test_d_3_7_do_not_secure_vm_changes_nothing_else(pair, keep):
    source = memory(keep, pair.adapter, b"same", Access.DO_NOT_SECURE_VM)
    sink = memory(keep, pair.adapter, 4, Access.REMOTE_WRITE | Access.DO_NOT_SECURE_VM)
    pair.client.queue_pair.write(source, expose(keep, pair.server, sink))
    succeed(pair.client.cq)
    assert contents(sink) == b"same"


def test_d_3_8_flags_combine_and_unknown_ones_are_refused(adapter, keep):
    memory(keep, adapter, 64, Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK | Access.DO_NOT_SECURE_VM)
    with pytest.raises(ndpy.InvalidFlagsError):
        adapter.register(bytearray(64), 0x400)


# ---- D.4, D.5: tokens and scope ----


def test_d_4_4_a_deregistered_token_is_refused(pair, keep):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    buffer = bytearray(b"original")
    region = pair.adapter.register(buffer, Access.REMOTE_WRITE)
    stale = region.remote()
    region.deregister()
    again = keep(pair.adapter.register(buffer, Access.REMOTE_WRITE))
    assert again.remote_token != stale.token
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), stale, context=9)
    assert_refused(pair.client, Operation.WRITE, 9)
    assert buffer == b"original"


def test_d_4_4_tokens_are_not_reused_soon(adapter):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    seen = []
    for _ in range(20):
        with adapter.register(bytearray(64), Access.REMOTE_READ) as region:
            seen.append(region.remote_token)
    assert 0 not in seen
    assert len(set(seen)) == 20


def test_d_4_5_a_local_token_is_no_remote_token(pair, keep):
    region = memory(keep, pair.adapter, b"original", Access.LOCAL_WRITE)
    forged = RemoteMemory(region.address, region.length, region.local_token & 0xFFFFFFFF)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), forged, context=2)
    assert_refused(pair.client, Operation.WRITE, 2)
    assert contents(region) == b"original"


def test_d_4_6_a_remote_token_is_good_on_every_connection(pair, keep):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    second = connect_pair(keep, pair.adapter)
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    for end, data in ((pair.client, b"first..."), (second.client, b"second..")):
        end.queue_pair.write(memory(keep, pair.adapter, data, Access.NONE), owner.remote())
        succeed(end.cq)
        assert contents(owner) == data


@pytest.mark.parametrize("length", [16, 4096, 10000])
def test_d_4_7_the_last_byte_is_inside_and_the_next_one_is_not(pair, keep, length):
    guard = bytearray(length + 64)
    owner = keep(pair.adapter.register(memoryview(guard)[:length], Access.REMOTE_WRITE))
    local = memory(keep, pair.adapter, b"XY", Access.NONE)
    last = expose(keep, pair.server, owner)[length - 1 :]
    pair.client.queue_pair.write(local[:1], last)
    succeed(pair.client.cq)
    assert guard[length - 1 : length + 1] == b"X\0"
    pair.client.queue_pair.write(local, RemoteMemory(last.address, 2, last.token), context=8)
    assert_refused(pair.client, Operation.WRITE, 8)
    assert guard[length - 1 : length + 1] == b"X\0"


def test_d_4_7_reading_one_byte_past_the_end_is_refused(pair, keep):
    owner = memory(keep, pair.adapter, b"secret..", Access.REMOTE_READ)
    sink = memory(keep, pair.adapter, b"_" * 9, sink_access(pair.adapter))
    remote = expose(keep, pair.server, owner)
    beyond = RemoteMemory(remote.address, 9, remote.token)
    pair.client.queue_pair.read(sink, beyond, context=8)
    assert_refused(pair.client, Operation.READ, 8)
    assert contents(sink) == b"_" * 9


def test_d_5_1_a_region_of_another_adapter_object_is_refused(adapter, keep, pair, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    foreign = memory(keep, other, b"foreign!")
    with pytest.raises(ndpy.ForeignObjectError):
        pair.client.queue_pair.send(foreign)
    with pytest.raises(ndpy.ForeignObjectError):
        pair.client.queue_pair.receive([foreign[0:4]])
    assert_works(keep, pair)


def test_d_5_1_a_token_of_another_adapter_object_is_refused(keep, pair, adapter_name):
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    other = keep(ndpy.open_adapter(adapter_name))
    foreign = memory(keep, other, b"original", Access.REMOTE_WRITE)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), foreign.remote(), context=2)
    assert_refused(pair.client, Operation.WRITE, 2)
    assert contents(foreign) == b"original"


# ---- D.6: deregistering ----


def test_d_6_2_deregister_under_a_bound_window_is_refused(window_pair, keep):
    owner = memory(keep, window_pair.adapter, 64)
    window = keep(window_pair.adapter.create_memory_window())
    remote = bind(window_pair.server, window, owner)
    for attempt in (owner.deregister, owner.close, owner.begin_deregister):
        with pytest.raises(ndpy.DeviceBusyError):
            attempt()
    assert not owner.closed
    assert window.is_bound
    local = memory(keep, window_pair.adapter, b"still here")
    window_pair.client.queue_pair.write(local, remote)
    succeed(window_pair.client.cq)
    assert contents(owner).startswith(b"still here")
    assert_quiet(window_pair.server.cq)
    assert_works(keep, window_pair)


def test_d_6_3_a_window_without_rights_counts_as_bound(window_pair, keep):
    owner = memory(keep, window_pair.adapter, 64)
    window = keep(window_pair.adapter.create_memory_window())
    bind(window_pair.server, window, owner[0:64], Access.NONE)
    with pytest.raises(ndpy.DeviceBusyError):
        owner.deregister()


@pytest.mark.parametrize("how", ["invalidated", "window closed", "queue pair closed"])
def test_d_6_4_deregister_succeeds_once_the_window_is_gone(window_pair, keep, how):
    owner = memory(keep, window_pair.adapter, 64)
    window = keep(window_pair.adapter.create_memory_window())
    bind(window_pair.server, window, owner)
    if how == "invalidated":
        window_pair.server.queue_pair.invalidate(window)
        succeed(window_pair.server.cq)
    elif how == "window closed":
        window.close()
    else:
        window_pair.server.connector.close()
        window_pair.server.queue_pair.close()
    owner.deregister(timeout_s=DEADLINE_S)
    assert owner.closed


def test_d_6_5_closing_twice_is_harmless(adapter):
    for first, second in (("deregister", "close"), ("close", "deregister"), ("close", "close")):
        region = adapter.register(bytearray(64))
        getattr(region, first)()
        assert region.closed
        getattr(region, second)()
        assert region.closed


def test_a_closed_region_cannot_be_used(pair, keep):
    region = pair.adapter.register(bytearray(64), Access.REMOTE_READ)
    element = region[0:8]
    region.close()
    for use in (
        region.remote,
        lambda: pair.client.queue_pair.send(element),
        lambda: pair.client.queue_pair.receive(region),
        lambda: pair.client.queue_pair.send([element]),
    ):
        with pytest.raises(ndpy.ClosedError):
            use()
    assert_works(keep, pair)


def test_d_6_6_deregistering_under_a_posted_receive_ends_it_without_touching_the_memory(pair, keep):
    buffer = bytearray(b"original")
    region = pair.adapter.register(buffer)
    pair.server.queue_pair.receive(region, context=4)
    region.deregister()
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"too late", Access.NONE))
    (completion,) = take(pair.server.cq)
    assert completion.context == 4
    assert completion.status is Status.ACCESS_VIOLATION
    assert buffer == b"original"


def test_d_6_8_threads_register_and_deregister_at_once(adapter):

    def work(_) -> None:
        for size in range(1, 26):
            with adapter.register(bytearray(size * 100), Access.REMOTE_WRITE) as region:
                assert region.length == size * 100

    in_threads(4, work, DEADLINE_S)


def test_e_5_4_a_violation_leaves_other_connections_alone(pair, keep):
    second = connect_pair(keep, pair.adapter)
    remote = expose(keep, pair.server, memory(keep, pair.adapter, b"original", Access.REMOTE_READ))
    pair.server.queue_pair.receive(memory(keep, pair.adapter, 8), context=1)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), remote, context=3)
    assert_refused(pair.client, Operation.WRITE, 3)
    assert statuses(take(pair.server.cq)) == [Status.CANCELED]
    assert_works(keep, second)
