"""Memory windows: contract section E. A peer that breaks the rules gets an error, and no byte changes."""

from __future__ import annotations

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_quiet,
    assert_refused,
    assert_works,
    bind,
    connect_pair,
    contents,
    create_end,
    fill,
    memory,
    require,
    statuses,
    succeed,
    take,
)
from kit.quirks import expect_quirk

import ndpy
from ndpy import Access, Flags, Operation, RemoteMemory, Sge, Status
from ndpy.vocabulary.quirks import Quirk

READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE
SINK = Access.LOCAL_WRITE | Access.READ_SINK


@pytest.fixture
def window(keep, adapter):
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)
    return keep(adapter.create_memory_window())


@pytest.fixture
def owner(keep, adapter):
    """The owner's memory: 4096 bytes. The region itself grants no remote right (contract E.2.3)."""
    return memory(keep, adapter, b"original" * 512)


@pytest.fixture
def local(keep, adapter):
    """The peer's memory."""
    return memory(keep, adapter, b"intruder" * 512, SINK)


def assert_fatal(window_pair, keep, owner, context):
    """The requester gets an error, no byte changes, and the connection ends on both sides (E.5.1 to E.5.3)."""
    client = window_pair.client
    assert_refused(client, Operation.WRITE, context)
    assert contents(owner) == b"original" * 512
    client.queue_pair.send(memory(keep, window_pair.adapter, b"later"), context=51)
    (later,) = take(client.cq)
    assert (later.context, later.status) == (51, Status.CANCELED)


# ---- E.1, E.2: life and binding ----


def test_without_the_capability_windows_are_unsupported(adapter):
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} claims MEMORY_WINDOWS")
    with pytest.raises(ndpy.UnsupportedError):
        adapter.create_memory_window()


def test_e_1_2_a_new_window_is_invalid(window):
    assert not window.is_bound
    assert (window.region, window.queue_pair, window.length) == (None, None, 0)
    with pytest.raises(ndpy.NdpyError, match="bound"):
        window.remote()


def test_e_1_3_a_window_is_bound_and_invalidated_again_and_again(window_pair, keep, window, local):
    for turn in range(6):
        region = memory(keep, window_pair.adapter, 1024)
        end, peer = (window_pair.server, window_pair.client) if turn % 2 else (window_pair.client, window_pair.server)
        remote = bind(end, window, region[8 * turn : 8 * turn + 16 + turn], READ | WRITE)
        assert (window.region, window.queue_pair, window.length) == (region, end.queue_pair, 16 + turn)
        assert (remote.address, remote.length) == (region.address + 8 * turn, 16 + turn)
        if peer is window_pair.client:
            peer.queue_pair.write(local[0 : 16 + turn], remote)
            succeed(peer.cq)
            assert contents(region)[8 * turn : 8 * turn + 16 + turn] == contents(local)[: 16 + turn]
        end.queue_pair.invalidate(window, context=78)
        (completion,) = succeed(end.cq)
        assert (completion.operation, completion.context) == (Operation.INVALIDATE, 78)
        assert not window.is_bound
        region.deregister()


def test_e_1_5_a_mixture_of_adapters_is_refused(window_pair, keep, window, owner, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    foreign_region, foreign_window = memory(keep, other, 64), keep(other.create_memory_window())
    with pytest.raises(ndpy.ForeignObjectError):
        window_pair.server.queue_pair.bind(window, foreign_region)
    with pytest.raises(ndpy.ForeignObjectError):
        window_pair.server.queue_pair.bind(foreign_window, owner)
    assert not window.is_bound
    assert_works(keep, window_pair)


def test_e_2_2_binding_needs_a_connection(adapter, keep, window, owner):
    end = create_end(keep, adapter)
    with pytest.raises(ndpy.NotConnectedError):
        end.queue_pair.bind(window, owner)
    assert not window.is_bound
    owner.deregister()


def test_e_2_2_binding_needs_a_free_slot(adapter, keep, window, owner):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter, initiator_queue_depth=1)
    pair.server.queue_pair.send([], context=1)
    with pytest.raises(ndpy.QueueFullError):
        pair.server.queue_pair.bind(window, owner)
    assert not window.is_bound


def test_e_2_2_a_writable_window_needs_local_write(window_pair, keep, window):
    readable = memory(keep, window_pair.adapter, b"constant", Access.NONE)
    with pytest.raises(ndpy.AccessViolationError):
        window_pair.server.queue_pair.bind(window, readable, access=WRITE)
    assert not window.is_bound


def test_e_2_3_a_region_without_flags_carries_a_readable_window(window_pair, keep, window, local):
    readable = memory(keep, window_pair.adapter, b"constant", Access.NONE)
    remote = bind(window_pair.server, window, readable[0:8], READ)
    window_pair.client.queue_pair.read(local[:8], remote)
    succeed(window_pair.client.cq)
    assert contents(local)[:8] == b"constant"


def test_e_2_3_a_region_without_remote_right_carries_windows_of_both_rights(window_pair, window, owner, local):
    remote = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    window_pair.client.queue_pair.write(local[:8], remote)
    succeed(window_pair.client.cq)
    assert contents(owner)[:16] == b"intruderoriginal"
    window_pair.client.queue_pair.read(local[:8], remote[8:16])
    succeed(window_pair.client.cq)
    assert contents(local)[:8] == b"original"


@pytest.mark.parametrize(("offset", "length"), [(0, 4097), (4096, 1), (4090, 7), (-1, 4), (0, 0)])
def test_e_2_4_a_range_outside_of_the_region_is_refused(window_pair, keep, window, owner, offset, length):
    with pytest.raises(ndpy.ElementRangeError):
        window_pair.server.queue_pair.bind(window, owner[offset : offset + length])
    with pytest.raises(ndpy.ElementRangeError):
        window_pair.server.queue_pair.bind(window, Sge(owner, owner.address + offset, length, owner.local_token))
    assert not window.is_bound
    assert_works(keep, window_pair)


def test_what_is_not_registered_memory_cannot_be_bound(window_pair, keep, window):
    with pytest.raises(TypeError, match=r"slice of one \(region\[a:b\]\)"):
        window_pair.server.queue_pair.bind(window, bytearray(64))
    assert not window.is_bound
    assert_works(keep, window_pair)


def test_e_2_5_a_closed_region_cannot_be_bound(window_pair, window, owner):
    owner.close()
    with pytest.raises(ndpy.ClosedError):
        window_pair.server.queue_pair.bind(window, owner)


def test_e_2_6_other_flags_are_refused(window_pair, window, owner):
    for flags in (Flags.INLINE, Flags.SOLICITED, 0x100):
        with pytest.raises(ndpy.InvalidFlagsError):
            window_pair.server.queue_pair.bind(window, owner, flags=flags)
    with pytest.raises(ndpy.InvalidFlagsError):
        window_pair.server.queue_pair.bind(window, owner, access=READ | Access.READ_SINK)
    assert not window.is_bound


def test_e_2_7_binding_a_bound_window_ends_the_connection(window_pair, keep, window, owner):
    remote = bind(window_pair.server, window, owner[0:64], READ)
    window_pair.server.queue_pair.bind(window, owner[64:128], READ, context=4)
    (completion,) = take(window_pair.server.cq)
    assert (completion.operation, completion.context) == (Operation.BIND, 4)
    assert completion.status is Status.INVALID_REQUEST
    assert (window.remote().address, window.length) == (remote.address, 64)
    window_pair.server.connector.wait_disconnected(DEADLINE_S)
    window_pair.client.connector.wait_disconnected(DEADLINE_S)


def test_e_2_8_the_token_is_there_when_bind_returns(window_pair, keep, window, owner, local):
    """The send that carries the token is posted right after the bind. The peer can use the token at once (E.2.9)."""
    client, server = window_pair
    inbox = memory(keep, window_pair.adapter, 20)
    client.queue_pair.receive(inbox)
    announcement = memory(keep, window_pair.adapter, 20)
    server.queue_pair.bind(window, owner[0:4096], READ | WRITE, flags=Flags.SILENT_SUCCESS)
    fill(announcement, window.remote().to_bytes())
    server.queue_pair.send(announcement)
    succeed(client.cq)
    client.queue_pair.write(local, RemoteMemory.from_bytes(contents(inbox)))
    succeed(client.cq)
    assert contents(owner) == contents(local)


def test_e_2_10_a_refused_bind_leaves_the_window_as_it_was(window_pair, window, owner, local):
    remote = bind(window_pair.server, window, owner[0:64], READ | WRITE)
    for wrong in (Sge(owner, owner.address, 5000, owner.local_token), owner[0:0]):
        with pytest.raises(ndpy.ElementRangeError):
            window_pair.server.queue_pair.bind(window, wrong)
    assert window.remote() == remote
    window_pair.client.queue_pair.write(local[:64], remote)
    succeed(window_pair.client.cq)
    assert contents(owner)[:64] == b"intruder" * 8


# ---- E.3 to E.5: what the peer may and may not ----


def test_e_3_1_the_right_of_the_region_does_not_help(window_pair, keep, window, local):
    owner = memory(keep, window_pair.adapter, b"original" * 512, READ | WRITE)
    remote = bind(window_pair.server, window, owner[0:4096], READ)
    window_pair.client.queue_pair.write(local, remote, context=5)
    assert_fatal(window_pair, keep, owner, 5)


def test_e_3_1_reading_through_a_writable_window_is_refused(window_pair, window, owner, local):
    remote = bind(window_pair.server, window, owner[0:4096], WRITE)
    window_pair.client.queue_pair.read(local, remote, context=6)
    assert_refused(window_pair.client, Operation.READ, 6)
    assert contents(local) == b"intruder" * 512


def test_e_3_2_windows_over_the_same_bytes_are_judged_alone(window_pair, keep, owner, local):
    client, server = window_pair
    readable, writable = (keep(window_pair.adapter.create_memory_window()) for _ in range(2))
    read_it = bind(server, readable, owner[0:128], READ)
    write_it = bind(server, writable, owner[64:192], WRITE)
    assert read_it.token != write_it.token
    client.queue_pair.write(local[:64], write_it)
    client.queue_pair.read(local[64:128], read_it[64:])
    succeed(client.cq, 2)
    assert contents(local)[64:128] == b"intruder" * 8
    server.queue_pair.invalidate(readable)
    succeed(server.cq)
    client.queue_pair.write(local[:64], write_it[64:])
    succeed(client.cq)
    assert contents(owner)[128:192] == b"intruder" * 8


def test_e_3_3_another_queue_pair_cannot_use_the_window(window_pair, keep, window, owner, local):
    second = connect_pair(keep, window_pair.adapter)
    remote = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    second.client.queue_pair.write(local, remote, context=7)
    assert_fatal(second, keep, owner, 7)
    window_pair.client.queue_pair.write(local[:8], remote)
    succeed(window_pair.client.cq)
    assert contents(owner)[:16] == b"intruderoriginal"
    assert_works(keep, window_pair)


# Rights and range of a window, and what is written: an offset to its beginning, and a length. The last one ends with
# the region.
BEYOND = {
    "e_2_6 no rights": (Access.NONE, slice(0, 4096), 0, 8),
    "e_3_1 readable": (READ, slice(0, 4096), 0, 4096),
    "e_3_4 one byte past the end": (READ | WRITE, slice(0, 4000), 0, 4001),
    "e_3_4 one byte before the beginning": (READ | WRITE, slice(64, 128), -1, 2),
    "e_3_4 past the end of the region": (READ | WRITE, slice(4000, 4096), 0, 97),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_a_window_does_not_grant_is_refused(request, window_pair, keep, window, owner, local, case):
    rights, bound, offset, length = BEYOND[case]
    if "one byte" in case:
        expect_quirk(request, window_pair.adapter, Quirk.RXE_WINDOW_BOUNDS)
    remote = bind(window_pair.server, window, owner[bound], rights)
    wanted = RemoteMemory(remote.address + offset, length, remote.token)
    window_pair.client.queue_pair.write(local[:length], wanted, context=8)
    assert_fatal(window_pair, keep, owner, 8)


def test_e_3_4_the_whole_range_can_be_used(window_pair, window, owner, local):
    remote = bind(window_pair.server, window, owner[100:1100], READ | WRITE)
    window_pair.client.queue_pair.write(local[:1000], remote)
    succeed(window_pair.client.cq)
    expected = bytearray(b"original" * 512)
    expected[100:1100] = (b"intruder" * 512)[:1000]
    assert contents(owner) == expected


def test_e_4_2_an_invalidated_window_is_refused(window_pair, keep, window, owner, local):
    remote = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    window_pair.server.queue_pair.invalidate(window)
    succeed(window_pair.server.cq)
    with pytest.raises(ndpy.NdpyError):
        window.remote()
    window_pair.client.queue_pair.write(local, remote, context=9)
    assert_fatal(window_pair, keep, owner, 9)


def test_e_4_3_the_token_of_an_earlier_bind_is_refused(window_pair, keep, window, owner, local):
    earlier = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    window_pair.server.queue_pair.invalidate(window)
    succeed(window_pair.server.cq)
    now = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    assert now.token != earlier.token
    assert (now.address, now.length) == (earlier.address, earlier.length)
    window_pair.client.queue_pair.write(local, earlier, context=10)
    assert_fatal(window_pair, keep, owner, 10)


def test_e_4_3_each_bind_has_a_new_token(window_pair, window, owner):
    tokens = []
    for _ in range(12):
        tokens.append(bind(window_pair.server, window, owner).token)
        window_pair.server.queue_pair.invalidate(window)
        succeed(window_pair.server.cq)
    assert len(set(tokens)) == 12


def test_e_4_4_a_window_can_span_a_large_region(window_pair, keep, window):
    length = 4 << 20
    region = memory(keep, window_pair.adapter, length)
    remote = bind(window_pair.server, window, region)
    assert remote.length == length
    window_pair.client.queue_pair.write(memory(keep, window_pair.adapter, b"end"), remote[length - 3 :])
    succeed(window_pair.client.cq)
    assert contents(region)[-3:] == b"end"


def test_e_5_2_a_violation_cancels_the_owners_receives_and_adds_nothing(window_pair, keep, window, owner, local):
    client, server = window_pair
    remote = bind(server, window, owner[0:4096], READ)
    for context in (1, 2):
        server.queue_pair.receive(memory(keep, window_pair.adapter, 8), context=context)
    client.queue_pair.write(local, remote, context=11)
    client.queue_pair.send(memory(keep, window_pair.adapter, b"behind"), context=12)
    refused, behind = take(client.cq, 2)
    assert (refused.context, refused.status) == (11, Status.ACCESS_VIOLATION)
    assert (behind.context, behind.status) == (12, Status.CANCELED)
    received = take(server.cq, 2)
    assert [completion.context for completion in received] == [1, 2]
    assert statuses(received) == [Status.CANCELED] * 2
    assert_quiet(server.cq)
    assert contents(owner) == b"original" * 512


def test_e_5_4_other_connections_are_unaffected(window_pair, keep, window, owner, local):
    second = connect_pair(keep, window_pair.adapter)
    other_window = keep(window_pair.adapter.create_memory_window())
    other = bind(second.server, other_window, owner[2048:2056], WRITE)
    remote = bind(window_pair.server, window, owner[0:8], READ)
    window_pair.client.queue_pair.write(local[:8], remote, context=13)
    assert_fatal(window_pair, keep, owner, 13)
    second.client.queue_pair.write(local[:8], other)
    succeed(second.client.cq)
    assert contents(owner)[2048:2056] == b"intruder"
    assert_works(keep, second)


# ---- E.6: invalidating ----


def test_e_6_1_invalidating_takes_only_its_flags(window_pair, window, owner):
    bind(window_pair.server, window, owner)
    for flags in (Flags.INLINE, Flags.SOLICITED):
        with pytest.raises(ndpy.InvalidFlagsError):
            window_pair.server.queue_pair.invalidate(window, flags=flags)
    window_pair.server.queue_pair.invalidate(window, flags=Flags.SILENT_SUCCESS | Flags.READ_FENCE)
    assert_quiet(window_pair.server.cq)
    window_pair.server.queue_pair.write([], RemoteMemory(0, 0, 0), context=5)
    assert [completion.context for completion in succeed(window_pair.server.cq)] == [5]
    owner.deregister()


def test_e_6_2_invalidating_an_unbound_window_ends_the_connection(window_pair, keep, window):
    window_pair.server.queue_pair.invalidate(window, context=14)
    (completion,) = take(window_pair.server.cq)
    assert (completion.operation, completion.context) == (Operation.INVALIDATE, 14)
    assert completion.status is Status.INVALID_REQUEST
    window_pair.server.queue_pair.send(memory(keep, window_pair.adapter, b"later"), context=15)
    assert statuses(take(window_pair.server.cq)) == [Status.CANCELED]


def test_e_6_3_another_queue_pair_cannot_invalidate(window_pair, keep, window, owner, local):
    second = connect_pair(keep, window_pair.adapter)
    remote = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    second.server.queue_pair.invalidate(window, context=16)
    (completion,) = take(second.server.cq)
    assert (completion.context, completion.status) == (16, Status.INVALID_REQUEST)
    assert window.is_bound
    window_pair.client.queue_pair.write(local[:8], remote)
    succeed(window_pair.client.cq)
    assert contents(owner)[:8] == b"intruder"


def test_e_6_6_after_invalidating_the_region_can_go_and_the_window_be_bound_again(window_pair, keep, window, owner):
    bind(window_pair.server, window, owner)
    window_pair.server.queue_pair.invalidate(window)
    succeed(window_pair.server.cq)
    owner.deregister()
    bind(window_pair.server, window, memory(keep, window_pair.adapter, 64))
    assert window.length == 64


def test_e_6_7_disconnecting_does_not_end_the_binding(window_pair, window, owner):
    bind(window_pair.server, window, owner)
    window_pair.client.connector.disconnect(DEADLINE_S)
    window_pair.server.connector.wait_disconnected(DEADLINE_S)
    with pytest.raises(ndpy.DeviceBusyError):
        owner.deregister()
    window.close()
    owner.deregister()


def test_a_closed_window_cannot_be_used(window_pair, keep, window, owner):
    window.close()
    window.close()
    for use in (
        window.remote,
        lambda: window_pair.server.queue_pair.bind(window, owner),
        lambda: window_pair.server.queue_pair.invalidate(window),
    ):
        with pytest.raises(ndpy.ClosedError):
            use()
    assert_works(keep, window_pair)


def test_closing_a_bound_window_revokes_it(window_pair, keep, window, owner, local):
    remote = bind(window_pair.server, window, owner[0:4096], READ | WRITE)
    window.close()
    window_pair.client.queue_pair.write(local, remote, context=17)
    assert_fatal(window_pair, keep, owner, 17)
