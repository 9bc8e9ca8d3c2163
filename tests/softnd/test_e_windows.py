"""Section E of the contract: memory windows."""

from __future__ import annotations

import pytest
from consumer import Side, ended, establish, make_pair, no_completion, pointer
from version2 import NULL, Kind, Mr, Op, Status, raw


def attempt(active, kind, address, token, size=16, data=b"attempted write!"):
    """Return the status of one Read or Write by the peer."""
    if kind == Kind.WRITE:
        active.region.put(0, (data * (size // len(data) + 1))[:size])
    post, where = (active.read, "at") if kind == Kind.READ else (active.write, "to")
    post(active.region.sge(0, size), **{where: address}, token=token)
    done = active.one()
    assert done.kind == kind
    return done.status


def test_e_1_1_a_window_derives_from_unknown_only(node):
    assert node.try_create("MemoryWindow", name="IND2MemoryRegion") == (Status.E_NOINTERFACE, None)
    assert node.window().release() == 0


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_e_1_2_a_new_window_grants_nothing(pair, kind):
    active, passive = pair
    window = passive.node.window()
    assert attempt(active, kind, passive.region.address, window.GetRemoteToken()) == Status.ACCESS_VIOLATION


def test_e_1_3_bind_and_invalidate_without_limit(pair):
    active, passive = pair
    window = passive.node.window()
    other = passive.node.region(8192)
    seen = set()
    for i in range(100):
        region = (passive.region, other)[i % 2]
        flags = (Op.ALLOW_WRITE, Op.ALLOW_READ | Op.ALLOW_WRITE)[i // 2 % 2]
        offset = i * 16
        passive.bind(region, window, region.address + offset, 16, flags, context=i)
        assert passive.one()[:3] == (Kind.BIND, Status.SUCCESS, i)
        token = window.GetRemoteToken()
        assert token not in seen, "E.4.3: each Bind changes the token"
        seen.add(token)
        data = b"%016d" % i
        assert attempt(active, Kind.WRITE, region.address + offset, token, data=data) == Status.SUCCESS
        assert region.get(offset, 16) == data
        passive.invalidate(window, context=i)
        assert passive.one()[:3] == (Kind.INVALIDATE, Status.SUCCESS, i)


def test_e_1_5_region_window_and_queue_pair_must_be_of_one_adapter(kit, pair):
    _active, passive = pair
    stranger = kit.node()
    window, foreign = passive.node.window(), stranger.window()
    region, elsewhere = passive.region, stranger.region(4096)
    mixed = Status.INVALID_PARAMETER_MIX
    assert passive.try_bind(elsewhere, window, elsewhere.address, 64) == mixed
    assert passive.try_bind(region, foreign, region.address, 64) == mixed
    assert passive.try_bind(elsewhere, foreign, elsewhere.address, 64) == mixed
    assert no_completion(passive.cq)
    assert passive.bind(region, window, region.address, 64) == Status.SUCCESS
    assert passive.one().status == Status.SUCCESS


def test_e_1_6_null_or_other_objects_are_refused(pair):
    _active, passive = pair
    region, window = passive.region, passive.node.window()
    where = pointer(region.address)
    for wrong in (NULL, raw(passive.cq), raw(window)):
        assert passive.qp.Bind(NULL, wrong, raw(window), where, 64, 0) == Status.INVALID_PARAMETER_2
    for wrong in (NULL, raw(passive.cq), raw(region.mr)):
        assert passive.qp.Bind(NULL, raw(region.mr), wrong, where, 64, 0) == Status.INVALID_PARAMETER_3
        assert passive.qp.Invalidate(NULL, wrong, 0) == Status.INVALID_PARAMETER_2


def test_e_2_1_bind_completes_in_order_with_other_initiator_requests(pair):
    active, passive = pair
    window = active.node.window()
    passive.receive(passive.region.sge())
    active.read(active.region.sge(0, 16), at=passive.region.address, token=passive.region.remote, context=1)
    active.bind(active.region, window, active.region.address, 64, context=2)
    active.send(active.region.sge(0, 16), context=3)
    active.invalidate(window, context=4)
    done = active.take(4)
    assert [(d.kind, d.status, d.context) for d in done] == [
        (Kind.READ, Status.SUCCESS, 1),
        (Kind.BIND, Status.SUCCESS, 2),
        (Kind.SEND, Status.SUCCESS, 3),
        (Kind.INVALIDATE, Status.SUCCESS, 4),
    ]


def test_e_2_2_bind_and_invalidate_need_a_connection(node):
    side = Side(node, 1)
    window = node.window()
    assert side.try_bind(side.region, window, side.region.address, 64) == Status.CONNECTION_INVALID
    assert side.try_invalidate(window) == Status.CONNECTION_INVALID


def test_e_2_2_a_full_initiator_queue_refuses_a_bind(kit):
    active, _passive = make_pair(kit, depth=0, receive_depth=4)
    window = active.node.window()
    assert active.try_bind(active.region, window, active.region.address, 64) == Status.NO_MORE_ENTRIES
    assert active.try_invalidate(window) == Status.NO_MORE_ENTRIES


@pytest.mark.parametrize("flags", [Mr.LOCAL_READ, Mr.REMOTE_READ])
def test_e_2_2_allow_write_needs_local_write(pair, flags):
    _, passive = pair
    region, window = passive.node.region(4096, flags), passive.node.window()
    assert passive.try_bind(region, window, region.address, 64, Op.ALLOW_WRITE) == Status.ACCESS_VIOLATION
    both = Op.ALLOW_READ | Op.ALLOW_WRITE
    assert passive.try_bind(region, window, region.address, 64, both) == Status.ACCESS_VIOLATION
    assert no_completion(passive.cq)
    assert passive.bind(region, window, region.address, 64, Op.ALLOW_READ) == Status.SUCCESS


@pytest.mark.parametrize("offset_size", [(-1, 64), (0, 4097), (4096, 1), (4000, 97), (-4096, 4096), (1 << 50, 1)])
def test_e_2_4_the_range_must_lie_inside_the_region(pair, offset_size):
    _active, passive = pair
    offset, size = offset_size
    region, window = passive.node.region(4096), passive.node.window()
    where = (region.address + offset) & ((1 << 64) - 1)
    assert passive.try_bind(region, window, where, size) == Status.ACCESS_VIOLATION
    assert passive.bind(region, window, region.address, 4096) == Status.SUCCESS
    assert passive.one().status == Status.SUCCESS


def test_e_2_4_a_range_that_wraps_is_refused(pair):
    _, passive = pair
    window = passive.node.window()
    assert passive.try_bind(passive.region, window, passive.region.address, (1 << 64) - 1) == Status.ACCESS_VIOLATION


def test_e_2_4_size_0_is_refused(pair):
    _, passive = pair
    window = passive.node.window()
    assert passive.try_bind(passive.region, window, passive.region.address, 0) == Status.INVALID_PARAMETER_5


def test_e_2_5_m_6_an_unregistered_region_is_refused_inline(kit, pair):
    _, passive = pair
    window, mr = passive.node.window(), passive.node.mr()
    assert passive.try_bind(mr, window, passive.region.address, 64) == Status.ACCESS_VIOLATION
    region = passive.node.region(4096)
    assert kit.do(region.mr, "Deregister") == Status.SUCCESS
    assert passive.try_bind(region, window, region.address, 64) == Status.ACCESS_VIOLATION
    assert no_completion(passive.cq)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_e_2_6_m_7_flags_0_are_accepted_and_grant_nothing(pair, kind):
    active, passive = pair
    window = passive.bound_window(0, 4096, flags=0)
    before = passive.region.get(0, 4096)
    assert attempt(active, kind, passive.region.address, window.GetRemoteToken()) == Status.ACCESS_VIOLATION
    assert passive.region.get(0, 4096) == before


@pytest.mark.parametrize("bit", [Op.SOLICIT, Op.INLINE, 0x40, 0x80000000])
def test_e_2_6_other_flags_are_refused(pair, bit):
    _, passive = pair
    window = passive.node.window()
    code = passive.try_bind(passive.region, window, passive.region.address, 64, Op.ALLOW_READ | bit)
    assert code == Status.INVALID_PARAMETER_6


def test_e_2_6_bind_may_be_silent_and_fenced(pair):
    active, passive = pair
    window = passive.node.window()
    flags = Op.ALLOW_WRITE | Op.SILENT_SUCCESS | Op.READ_FENCE
    assert passive.bind(passive.region, window, passive.region.address, 64, flags) == Status.SUCCESS
    assert attempt(active, Kind.WRITE, passive.region.address, window.GetRemoteToken()) == Status.SUCCESS
    assert no_completion(passive.cq)
    assert passive.invalidate(window, flags=Op.SILENT_SUCCESS | Op.READ_FENCE) == Status.SUCCESS
    assert attempt(active, Kind.WRITE, passive.region.address, window.GetRemoteToken()) == Status.ACCESS_VIOLATION


def test_e_2_8_and_e_2_9_bind_and_send_of_the_token_back_to_back(pair):
    active, passive = pair
    for i in range(50):
        window = passive.node.window()
        active.receive(active.region.sge(4096, 4))
        passive.bind(passive.region, window, passive.region.address, 64, context=1)
        token = window.GetRemoteToken()
        passive.region.put(8192, token.to_bytes(4, "little"))
        passive.send(passive.region.sge(8192, 4), context=2)
        assert active.one().status == Status.SUCCESS
        told = int.from_bytes(active.region.get(4096, 4), "little")
        data = b"%016d" % i
        assert attempt(active, Kind.WRITE, passive.region.address, told, data=data) == Status.SUCCESS
        assert passive.region.get(0, 16) == data
        assert [d.context for d in passive.take(2)] == [1, 2]


def test_e_2_10_an_inline_failure_leaves_a_bound_window_as_it_was(pair):
    active, passive = pair
    window = passive.bound_window(0, 64)
    token = window.GetRemoteToken()
    region = passive.region
    assert passive.try_bind(region, window, region.address + region.size, 64) == Status.ACCESS_VIOLATION
    assert passive.try_bind(region, window, region.address, 64, 0x40) == Status.INVALID_PARAMETER_6
    assert window.GetRemoteToken() == token
    assert attempt(active, Kind.WRITE, region.address, token) == Status.SUCCESS


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize("flags", [Op.ALLOW_READ, Op.ALLOW_WRITE])
def test_e_3_1_a_missing_right_is_a_violation_whatever_the_region_grants(pair, flags, kind):
    active, passive = pair
    window = passive.bound_window(0, 4096, flags)
    granted = flags == (Op.ALLOW_READ if kind == Kind.READ else Op.ALLOW_WRITE)
    before = passive.region.get()
    code = attempt(active, kind, passive.region.address, window.GetRemoteToken())
    assert code == (Status.SUCCESS if granted else Status.ACCESS_VIOLATION)
    if not granted:
        assert passive.region.get() == before


def test_e_3_2_overlapping_windows_are_judged_alone(pair):
    active, passive = pair
    wide = passive.bound_window(0, 8192, Op.ALLOW_WRITE)
    narrow = passive.bound_window(100, 50, Op.ALLOW_READ)
    both = passive.bound_window(120, 4096)
    where = passive.region.address
    assert attempt(active, Kind.WRITE, where + 100, wide.GetRemoteToken()) == Status.SUCCESS
    assert attempt(active, Kind.READ, where + 100, narrow.GetRemoteToken()) == Status.SUCCESS
    passive.invalidated(wide)
    assert attempt(active, Kind.READ, where + 130, narrow.GetRemoteToken()) == Status.SUCCESS
    assert attempt(active, Kind.WRITE, where + 130, both.GetRemoteToken()) == Status.SUCCESS
    assert attempt(active, Kind.WRITE, where + 100, narrow.GetRemoteToken()) == Status.ACCESS_VIOLATION


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize(("offset", "size"), [(0, 64), (63, 1), (10, 20), (0, 1)])
def test_e_3_4_everything_inside_is_granted(pair, kind, offset, size):
    active, passive = pair
    window = passive.bound_window(4096, 64)
    where = passive.region.address + 4096 + offset
    assert attempt(active, kind, where, window.GetRemoteToken(), size) == Status.SUCCESS


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (-1, 64), (64, 1), (63, 2), (0, 65), (-4096, 4096), (32, 8192), (-10, 100)]
)
def test_e_3_4_and_e_3_5_one_byte_outside_transfers_nothing(pair, kind, offset, size):
    active, passive = pair
    passive.region.put(0, b"O" * passive.region.size)
    window = passive.bound_window(4096, 64)
    active.region.put(0, b"A" * active.region.size)
    where = passive.region.address + 4096 + offset
    assert attempt(active, kind, where, window.GetRemoteToken(), size) == Status.ACCESS_VIOLATION
    assert passive.region.get() == b"O" * passive.region.size
    if kind == Kind.READ:
        assert active.region.get() == b"A" * active.region.size


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_e_4_2_after_invalidate_the_token_gives_no_access(pair, kind):
    active, passive = pair
    window = passive.bound_window(0, 4096)
    token = window.GetRemoteToken()
    passive.invalidated(window)
    before = passive.region.get()
    assert attempt(active, kind, passive.region.address, token) == Status.ACCESS_VIOLATION
    assert passive.region.get() == before


def test_e_4_2_the_windows_value_after_invalidate_gives_no_access(pair):
    active, passive = pair
    window = passive.bound_window(0, 4096)
    passive.invalidated(window)
    code = attempt(active, Kind.WRITE, passive.region.address, window.GetRemoteToken())
    assert code == Status.ACCESS_VIOLATION


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize("token", [0, 1, 0xFFFFFFFF, 0x12345678])
def test_e_5_1_m_8_an_unknown_token_is_an_access_violation(pair, kind, token):
    active, passive = pair
    assert attempt(active, kind, passive.region.address, token) == Status.ACCESS_VIOLATION


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_e_5_2_a_violation_ends_the_connection_on_both_sides(kit, pair, kind):
    active, passive = pair
    for context in (1, 2):
        passive.receive(passive.region.sge(0, 64), context=context)
        active.receive(active.region.sge(0, 64), context=context)
    gone = kit.issue(passive.connector, "NotifyDisconnect")
    method = active.read if kind == Kind.READ else active.write
    where = {"at" if kind == Kind.READ else "to": passive.region.address}
    method(active.region.sge(0, 16), **where, token=0x5555, context=10)
    active.send(active.region.sge(0, 16), context=11)
    done = active.take(4)
    initiator = [(d.kind, d.status, d.context) for d in done if d.kind != Kind.RECEIVE]
    assert initiator == [(kind, Status.ACCESS_VIOLATION, 10), (Kind.SEND, Status.CANCELED, 11)]
    assert [(d.status, d.context) for d in done if d.kind == Kind.RECEIVE] == [(Status.CANCELED, c) for c in (1, 2)]
    theirs = passive.take(2)
    assert [(d.kind, d.status, d.context) for d in theirs] == [(Kind.RECEIVE, Status.CANCELED, c) for c in (1, 2)]
    assert gone.result() == Status.SUCCESS
    assert no_completion(passive.cq), "the owner sees no completion of the violating access"
    assert active.send(active.region.sge(0, 16), context=12) == Status.SUCCESS
    assert active.one()[:3] == (Kind.SEND, Status.CANCELED, 12)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_e_5_5_zero_bytes_need_no_token(pair, kind):
    active, _passive = pair
    method = active.read if kind == Kind.READ else active.write
    where = {"at" if kind == Kind.READ else "to": 0x1234}
    assert method(**where, token=0x5555, context=3) == Status.SUCCESS
    assert active.one()[:3] == (kind, Status.SUCCESS, 3)


@pytest.mark.parametrize("bit", [Op.SOLICIT, Op.ALLOW_READ, Op.ALLOW_WRITE, Op.INLINE, 0x40])
def test_e_6_1_other_flags_of_invalidate_are_refused(pair, bit):
    _, passive = pair
    window = passive.bound_window(0, 64)
    assert passive.try_invalidate(window, flags=bit) == Status.INVALID_PARAMETER_3


def test_e_6_2_invalidating_an_unbound_window_ends_the_connection(pair):
    active, passive = pair
    passive.invalidate(passive.node.window(), context=6)
    done = passive.one()
    assert (done.kind, done.status, done.context) == (Kind.INVALIDATE, Status.INVALID_DEVICE_REQUEST, 6)
    assert ended(passive)
    assert ended(active)


def test_e_6_6_after_invalidate_the_window_binds_through_another_queue_pair(kit, pair):
    active, passive = pair
    other, beside = Side(kit.node(), 3), Side(passive.node, 4)
    establish(other, beside)
    window = passive.bound_window(0, 64)
    passive.invalidated(window)
    beside.bind(passive.region, window, passive.region.address, 64)
    assert beside.one().status == Status.SUCCESS
    assert attempt(other, Kind.WRITE, passive.region.address, window.GetRemoteToken()) == Status.SUCCESS
    code = attempt(active, Kind.WRITE, passive.region.address, window.GetRemoteToken())
    assert code == Status.ACCESS_VIOLATION


def test_e_6_7_after_a_disconnect_the_binding_stays_until_a_release(kit, pair):
    _active, passive = pair
    window = passive.bound_window(0, 64)
    assert passive.disconnect() == Status.SUCCESS
    assert kit.issue(passive.region.mr, "Deregister").returned == Status.DEVICE_BUSY
    assert window.release() == 0
    assert kit.do(passive.region.mr, "Deregister") == Status.SUCCESS
