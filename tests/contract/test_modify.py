"""Queue pairs by hand: modify() and query(), and what each change of state needs and takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_quiet,
    assert_works,
    bind,
    connect_ends,
    contents,
    contexts,
    create_end,
    has_kernel_driver,
    memory,
    require,
    statuses,
    succeed,
    take,
)
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, AddressVector, Capability, Flags, PathMigration, QueuePairAttributes, QueuePairState, Status
from ndpy.vocabulary.queue_pair_attributes import CHANGES, QueuePairType
from ndpy.vocabulary.quirks import Quirk

RESET, INIT, RTR, RTS, SQD, SQE, ERROR = QueuePairState
# For RTS, whatever the type.
RETRIES = {"ack_timeout": 14, "retry_count": 6, "rnr_retry_count": 6}


@pytest.fixture
def two(keep, adapter):
    """Two queue pairs that nobody has connected, each with its completion queue."""
    require(adapter, Capability.MODIFY)
    return create_end(keep, adapter), create_end(keep, adapter)


def ready_to_receive(one, other, **changes):
    """What the first end needs to become ready to receive from the other one."""
    local, remote = one.queue_pair.local_endpoint(), other.queue_pair.local_endpoint()
    given = {
        "state": RTR,
        "path": AddressVector(gid=remote.gid, gid_index=local.gid_index, lid=remote.lid, port=local.port),
        "path_mtu": min(local.mtu, 1024),
        "remote_number": remote.qp_number,
        "receive_psn": remote.psn,
        "inbound_read_limit": 2,
        "min_rnr_timer": 12,
    }
    return given | changes


def ready_to_send(one, **changes):
    return {"state": RTS, "send_psn": one.queue_pair.local_endpoint().psn, "outbound_read_limit": 2} | RETRIES | changes


def connect_by_hand(one, other):
    for end, peer in ((one, other), (other, one)):
        end.queue_pair.modify(**ready_to_receive(end, peer))
    for end in (one, other):
        end.queue_pair.modify(**ready_to_send(end))


def transfer(keep, one, other):
    """A message each way, a write and a read."""
    adapter = one.adapter
    inbox = memory(keep, adapter, 16)
    target = memory(keep, adapter, b"to be read".ljust(32), Access.REMOTE_READ | Access.REMOTE_WRITE)
    for source, sink, text in ((one, other, b"there"), (other, one, b"and back")):
        sink.queue_pair.receive(inbox, context=1)
        source.queue_pair.send(memory(keep, adapter, text), context=2)
        assert contexts(succeed(sink.cq)) == [1]
        assert contexts(succeed(source.cq)) == [2]
        assert contents(inbox).startswith(text)
    local = memory(keep, adapter, 10, Access.LOCAL_WRITE | Access.READ_SINK)
    one.queue_pair.read(local, target.remote(), context=3)
    one.queue_pair.write(memory(keep, adapter, b"written"), target.remote()[16:], context=4)
    assert contexts(succeed(one.cq, 2)) == [3, 4]
    assert contents(local) == b"to be read"
    assert contents(target)[16:23] == b"written"


def test_a_connection_by_hand_carries_everything(two, keep):
    one, other = two
    assert one.queue_pair.query().state is INIT
    connect_by_hand(one, other)
    assert one.queue_pair.query().state is RTS
    assert one.queue_pair.read_limits == (2, 2)
    transfer(keep, one, other)


def test_query_tells_what_was_set(two):
    one, other = two
    connect_by_hand(one, other)
    given = ready_to_receive(one, other) | ready_to_send(one)
    seen = one.queue_pair.query()
    for name in set(given) - {"path", "min_rnr_timer"}:
        assert getattr(seen, name) == given[name], name
    assert seen.path.gid == given["path"].gid
    assert seen.path.gid_index == given["path"].gid_index
    assert seen.path.hop_limit == 64
    assert Access.REMOTE_WRITE in seen.access
    assert seen.path_migration in (PathMigration.MIGRATED, PathMigration.REARM, PathMigration.ARMED)


def test_the_path_s_class_and_label_reach_the_adapter(two):
    one, other = two
    local = one.queue_pair.local_endpoint()
    remote = other.queue_pair.local_endpoint()
    vector = AddressVector(
        gid=remote.gid,
        gid_index=local.gid_index,
        port=local.port,
        traffic_class=0x68,
        flow_label=0x12345,
    )
    one.queue_pair.modify(**ready_to_receive(one, other, path=vector))
    seen = one.queue_pair.query().path
    assert (seen.traffic_class, seen.flow_label) == (0x68, 0x12345)


@pytest.mark.parametrize("missing", sorted(CHANGES[QueuePairType.RC][INIT, RTR][0]))
def test_a_missing_attribute_is_named(two, missing):
    one, other = two
    given = ready_to_receive(one, other)
    del given[missing]
    with pytest.raises(ndpy.QueuePairAttributesError, match=f"from INIT to RTR needs .*; missing: {missing} \\("):
        one.queue_pair.modify(**given)
    assert one.queue_pair.query().state is INIT


def test_an_attribute_too_many_is_named(two):
    one, other = two
    with pytest.raises(ndpy.QueuePairAttributesError, match="does not take send_psn, retry_count; it takes "):
        one.queue_pair.modify(**ready_to_receive(one, other, retry_count=3, send_psn=1))
    with pytest.raises(ndpy.QueuePairAttributesError, match="from INIT to ERROR does not take port; it takes nothing"):
        one.queue_pair.modify(state=ERROR, port=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dest_qp_num", "verbs' dest_qp_num is remote_number$"),
        ("timeout", "verbs' timeout is ack_timeout$"),
        ("speed", "it has state, access, .*, current_state$"),
    ],
)
def test_a_name_of_verbs_is_answered_with_ndpy_s(two, name, hint):
    with pytest.raises(TypeError, match=f"^modify: a queue pair has no attribute {name}; {hint}"):
        two[0].queue_pair.modify(state=INIT, **{name: 1})
    assert two[0].queue_pair.query().state is INIT


@pytest.mark.parametrize("state", [RTS, SQD, SQE])
def test_a_change_that_does_not_exist_is_refused(two, state):
    with pytest.raises(ndpy.QueuePairAttributesError, match="from INIT it changes to RESET, INIT, RTR, ERROR"):
        two[0].queue_pair.modify(state=state)


def test_values_out_of_range_are_refused(two):
    queue_pair = two[0].queue_pair
    for name, value in (
        ("remote_number", 1 << 24),
        ("receive_psn", -1),
        ("min_rnr_timer", 32),
        ("rnr_retry_count", 8),
        ("path_mtu", 1500),
        ("port", 256),
        ("pkey_index", 1 << 16),
    ):
        with pytest.raises(ValueError, match=f"^{name} is "):
            queue_pair.modify(**{name: value})
    with pytest.raises(TypeError, match="state is of the type QueuePairState"):
        queue_pair.modify(state=2)
    with pytest.raises(TypeError, match="colour"):
        queue_pair.modify(colour=2)
    for name, value in (("gid", b"short"), ("service_level", 16), ("flow_label", 1 << 20), ("traffic_class", 256)):
        with pytest.raises(ValueError, match=f"^{name} is "):
            AddressVector(**{name: value})


def test_what_the_adapter_refuses_is_named(two):
    one, other = two
    with pytest.raises(ndpy.ProviderError, match=r"the adapter refused .*path") as caught:
        one.queue_pair.modify(**ready_to_receive(one, other, path=AddressVector(gid=bytes(16), gid_index=255)))
    assert caught.value.native
    one.queue_pair.modify(**ready_to_receive(one, other))


def test_before_rts_there_is_no_connection(two, keep):
    one, other = two
    source = memory(keep, one.adapter, b"message")
    with pytest.raises(ndpy.NotConnectedError):
        one.queue_pair.send(source)
    one.queue_pair.modify(**ready_to_receive(one, other))
    with pytest.raises(ndpy.NotConnectedError):
        one.queue_pair.send(source)


def test_an_end_that_is_ready_to_receive_takes_messages(two, keep):
    one, other = two
    inbox = memory(keep, one.adapter, 16)
    one.queue_pair.receive(inbox, context=5)
    one.queue_pair.modify(**ready_to_receive(one, other))
    other.queue_pair.modify(**ready_to_receive(other, one))
    other.queue_pair.modify(**ready_to_send(other))
    other.queue_pair.send(memory(keep, one.adapter, b"message"))
    (received,) = succeed(one.cq)
    assert (received.context, received.nbytes) == (5, 7)


def test_error_cancels_everything(two, keep):
    one, other = two
    connect_by_hand(one, other)
    inbox = memory(keep, one.adapter, 16)
    for context in (1, 2):
        one.queue_pair.receive(inbox, context=context)
    one.queue_pair.modify(state=ERROR)
    assert one.queue_pair.query().state is ERROR
    ended = take(one.cq, 2)
    assert contexts(ended) == [1, 2]
    assert statuses(ended) == [Status.CANCELED] * 2
    one.queue_pair.send(memory(keep, one.adapter, b"late"), context=3)
    assert [(c.context, c.status) for c in take(one.cq)] == [(3, Status.CANCELED)]


def test_error_cancels_receives_before_a_connection(two, keep):
    one, _ = two
    one.queue_pair.receive(memory(keep, one.adapter, 16), context=1)
    one.queue_pair.modify(state=ERROR)
    assert [(c.context, c.status) for c in take(one.cq)] == [(1, Status.CANCELED)]
    one.queue_pair.modify(state=RESET)
    assert one.queue_pair.query().state is RESET


@pytest.mark.parametrize("ended", [False, True])
def test_after_a_reset_it_can_be_connected_again(two, keep, adapter, ended):
    """Another peer takes the place of the first one."""
    one, other = two
    connect_by_hand(one, other)
    transfer(keep, one, other)
    if ended:
        other.queue_pair.close()
        one.queue_pair.write([], ndpy.RemoteMemory(0, 0, 0), context=6)
        (failed,) = take(one.cq)
        assert not failed.ok
    one.queue_pair.receive(memory(keep, adapter, 16), context=7)
    one.queue_pair.modify(state=RESET)
    assert [(c.context, c.status) for c in take(one.cq)] == [(7, Status.CANCELED)]
    assert not one.queue_pair.connection_ended
    with pytest.raises(ndpy.NotConnectedError):
        one.queue_pair.send(memory(keep, adapter, b"too early"))
    one.queue_pair.modify(state=INIT, port=1, pkey_index=0, access=Access.REMOTE_READ | Access.REMOTE_WRITE)
    successor = create_end(keep, adapter)
    connect_by_hand(one, successor)
    transfer(keep, one, successor)
    transfer(keep, successor, one)
    assert_quiet(one.cq)


def test_a_reset_waits_for_no_window(two, keep):
    one, other = two
    require(one.adapter, Capability.MEMORY_WINDOWS)
    connect_by_hand(one, other)
    window = keep(one.adapter.create_memory_window())
    bind(one, window, memory(keep, one.adapter, 64, Access.LOCAL_WRITE))
    with pytest.raises(ndpy.DeviceBusyError, match="1 windows are bound"):
        one.queue_pair.modify(state=RESET)
    transfer(keep, one, other)


def test_the_peer_s_rights_are_those_of_the_queue_pair(two, keep):
    """The memory grants everything, and the queue pair only what it was given."""
    one, other = two
    other.queue_pair.modify(access=Access.REMOTE_READ)
    connect_by_hand(one, other)
    target = memory(keep, one.adapter, b"original", Access.REMOTE_READ | Access.REMOTE_WRITE)
    local = memory(keep, one.adapter, 8, Access.LOCAL_WRITE | Access.READ_SINK)
    one.queue_pair.read(local, target.remote())
    succeed(one.cq)
    assert contents(local) == b"original"
    one.queue_pair.write(local, target.remote(), context=2)
    (failed,) = take(one.cq)
    assert failed.status in (Status.ACCESS_VIOLATION, Status.REMOTE_ERROR)
    assert contents(target) == b"original"


def test_an_end_can_stop_sending_for_a_while(two, keep, adapter):
    """In SQD requests wait. Back in RTS they go on."""
    if not has_kernel_driver(adapter):
        pytest.skip(f"{adapter.info.name} has no state SQD")
    one, other = two
    connect_by_hand(one, other)
    one.queue_pair.modify(state=SQD)
    assert one.queue_pair.query().state is SQD
    other.queue_pair.receive(memory(keep, adapter, 16), context=1)
    one.queue_pair.send(memory(keep, adapter, b"later"), context=2)
    assert_quiet(other.cq)
    one.queue_pair.modify(state=RTS)
    if has_quirk(adapter, Quirk.RXE_STAYS_DRAINED):
        one.queue_pair.write([], ndpy.RemoteMemory(0, 0, 0), flags=Flags.SILENT_SUCCESS)
    assert contexts(succeed(one.cq)) == [2]
    assert contexts(succeed(other.cq)) == [1]


def test_either_by_hand_or_otherwise(keep, adapter, two):
    one, other = two
    one.queue_pair.modify(**ready_to_receive(one, other))
    with pytest.raises(ndpy.ProviderError):
        one.queue_pair.connect_endpoint(other.queue_pair.local_endpoint())
    ends = create_end(keep, adapter), create_end(keep, adapter)
    pair = connect_ends(keep, adapter, *ends)
    with pytest.raises(ndpy.ConnectionActiveError, match="a connector has the queue pair"):
        pair.client.queue_pair.modify(state=RESET)
    assert pair.client.queue_pair.query().state is RTS
    assert_works(keep, pair)
    pair.client.queue_pair.receive(memory(keep, adapter, 16), context=4)
    pair.client.queue_pair.modify(state=ERROR)
    assert [(c.context, c.status) for c in take(pair.client.cq)] == [(4, Status.CANCELED)]
    pair.client.connector.disconnect(timeout_s=DEADLINE_S)


def test_a_closed_queue_pair_has_no_attributes(two):
    queue_pair = two[0].queue_pair
    queue_pair.close()
    for call in (queue_pair.query, lambda: queue_pair.modify(state=ERROR)):
        with pytest.raises(ndpy.ClosedError):
            call()


def test_an_adapter_that_connects_by_itself_says_so(keep, adapter):
    if Capability.MODIFY in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} takes attributes by hand")
    end = create_end(keep, adapter)
    for call in (end.queue_pair.query, lambda: end.queue_pair.modify(state=RTS)):
        with pytest.raises(ndpy.UnsupportedError, match="connects through connectors only"):
            call()


def test_attributes_are_plain_values():
    assert QueuePairAttributes(state=RTS, port=1).given() == {"state": RTS, "port": 1}
    assert QueuePairAttributes().given() == {}


def test_the_documents_example_runs(two, keep, capsys):
    one, other = two
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    (program,) = (block.partition("```")[0] for block in blocks if ".modify(" in block.partition("```")[0])
    ends = [end.queue_pair.local_endpoint() for end in two]
    for end, peer in zip(two, reversed(ends), strict=True):
        exec(compile(program, "docs/verbs.md", "exec"), {"ndpy": ndpy, "near": end.queue_pair, "peer": peer})
    assert capsys.readouterr().out == "104\n" * 2
    transfer(keep, one, other)
