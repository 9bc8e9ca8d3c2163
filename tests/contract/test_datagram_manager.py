"""Datagrams whose way the connection manager finds: resolve(), listen_for_datagrams() and join_multicast()."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, assert_quiet, contents, host_of, memory, require, succeed, wait_until
from kit.processes import free_port

import ndpy
from ndpy import Capability

GROUP = "239.7.8.9"


class Station:
    """A queue pair for datagrams with its completion queue."""

    def __init__(self, keep, adapter, **options):
        self.cq = keep(adapter.create_completion_queue(64))
        self.queue_pair = keep(adapter.create_datagram_queue_pair(self.cq, **options))


@pytest.fixture
def station(keep, adapter):
    """station(**options) makes one."""
    require(adapter, Capability.DATAGRAMS)
    return lambda **options: Station(keep, adapter, **options)


@pytest.fixture
def server(station):
    return station()


@pytest.fixture
def client(station):
    return station()


@pytest.fixture
def listener(keep, adapter, server):
    return keep(adapter.listen_for_datagrams(server.queue_pair, (host_of(adapter), 0), private_data=b"welcome"))


def groups_of(adapter):
    return [child for child in adapter._open_children() if isinstance(child, ndpy.MulticastGroup)]


def test_a_datagram_goes_to_the_queue_pair_that_the_listener_names(adapter, keep, server, client, listener):
    assert listener.address[1] > 0
    there = keep(client.queue_pair.resolve(listener.address, private_data=b"hello", timeout_s=DEADLINE_S))
    assert (there.qp_number, there.qkey) == (server.queue_pair.number, ndpy.MANAGER_QKEY)
    assert there.private_data[:7] == b"welcome"
    assert not there.private_data[7:].strip(b"\0")
    inbox = memory(keep, adapter, 64)
    server.queue_pair.receive(inbox)
    client.queue_pair.send(memory(keep, adapter, b"question"), there)
    (found,) = succeed(server.cq)
    assert contents(inbox)[:8] == b"question"
    client.queue_pair.receive(inbox)
    server.queue_pair.send(memory(keep, adapter, b"answer!!"), keep(server.queue_pair.destination(found.source)))
    succeed(client.cq, 2)
    assert contents(inbox)[:8] == b"answer!!"
    assert listener.answered >= 1


def test_many_ask_at_once(keep, server, client, listener):
    pendings = [client.queue_pair.begin_resolve(listener.address) for _ in range(20)]
    for pending in pendings:
        assert keep(pending.result(DEADLINE_S)).qp_number == server.queue_pair.number
    assert listener.answered >= 20
    assert not client.queue_pair._calls


def test_nobody_listens(adapter, client):
    with pytest.raises(ndpy.ConnectionRefusedError, match="nobody listens there"):
        client.queue_pair.resolve((host_of(adapter), free_port()), timeout_s=DEADLINE_S)
    with pytest.raises(ndpy.AddressUnreachableError, match="nobody can listen at port 0"):
        client.queue_pair.resolve((host_of(adapter), 0))


def test_a_closed_listener_does_not_answer(server, client, listener):
    address = listener.address
    listener.close()
    listener.close()
    with pytest.raises(ndpy.ConnectionRefusedError, match="nobody listens there"):
        client.queue_pair.resolve(address, timeout_s=DEADLINE_S)
    with pytest.raises(ndpy.ClosedError):
        assert listener.address
    server.queue_pair.close()


def test_ports_of_datagrams_are_others_than_those_of_connections(adapter, keep, server, listener):
    keep(adapter.listen(listener.address))
    with pytest.raises(ndpy.AddressInUseError):
        adapter.listen_for_datagrams(server.queue_pair, listener.address)


def test_private_data_has_limits(adapter, keep, server, client, listener):
    with pytest.raises(ndpy.LimitExceededError, match="181 bytes of private data are more than 180"):
        client.queue_pair.resolve(listener.address, private_data=bytes(181))
    with pytest.raises(ndpy.LimitExceededError, match="137 bytes of private data are more than 136"):
        adapter.listen_for_datagrams(server.queue_pair, (host_of(adapter), 0), private_data=bytes(137))
    longest = bytes(range(1, 137))
    other = keep(adapter.listen_for_datagrams(server.queue_pair, (host_of(adapter), 0), private_data=longest))
    there = keep(client.queue_pair.resolve(other.address, private_data=bytes(180), timeout_s=DEADLINE_S))
    assert there.private_data == longest


def test_another_qkey_would_receive_nothing(adapter, station):
    other = station(qkey=0x11111111)
    for call in (
        lambda: adapter.listen_for_datagrams(other.queue_pair, (host_of(adapter), 0)),
        lambda: other.queue_pair.join_multicast(GROUP),
    ):
        with pytest.raises(ValueError, match="make it with qkey=0x1234567"):
            call()


def test_a_queue_pair_in_use_is_not_closed(server, client, listener):
    group = client.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S)
    for end, user in ((server, "DatagramListener at"), (client, f"MulticastGroup {GROUP}")):
        with pytest.raises(ndpy.DeviceBusyError, match=f"DatagramQueuePair is in use by {user}"):
            end.queue_pair.close()
        assert not end.queue_pair.closed
    group.close()
    client.queue_pair.close()


def test_closing_the_queue_pair_ends_its_calls(adapter, client, listener):
    waiting = client.queue_pair.begin_resolve(listener.address)
    joining = client.queue_pair.begin_join_multicast(GROUP)
    ended = []
    for pending in (waiting, joining):
        pending.add_done_callback(ended.append)
    try:
        client.queue_pair.close()
    except ndpy.DeviceBusyError:
        # The group was joined before.
        joining.result(0).close()
        client.queue_pair.close()
    wait_until(lambda: len(ended) == 2, "both ends")
    for pending in (waiting, joining):
        if pending.exception(0) is None:
            pending.result(0).close()
        else:
            with pytest.raises(ndpy.CanceledError):
                pending.result(0)
    with pytest.raises(ndpy.ClosedError):
        client.queue_pair.resolve(listener.address)


def test_a_call_can_be_cancelled(adapter, client, listener):
    for begin in (
        lambda: client.queue_pair.begin_resolve(listener.address),
        lambda: client.queue_pair.begin_join_multicast(GROUP),
    ):
        pending = begin()
        if pending.cancel():
            with pytest.raises(ndpy.CanceledError):
                pending.result(0)
        else:
            pending.result(0).close()
        assert not client.queue_pair._calls
    wait_until(lambda: not groups_of(adapter), "the end of a membership that nobody wanted")


def test_a_deadline_ends_a_call(client, listener):
    try:
        client.queue_pair.resolve(listener.address, timeout_s=0).close()
    except ndpy.TimeoutError as error:
        assert "has not answered within 0 s" in str(error)
    assert not client.queue_pair._calls


def test_a_group_gets_what_is_sent_to_it(adapter, keep, station):
    sender, members, stranger = station(), [station(), station()], station()
    groups = [keep(member.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S)) for member in members]
    for receiver in (*members, stranger):
        receiver.queue_pair.receive(memory(keep, adapter, 64), context=4)
    own = keep(sender.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S))
    assert (own.destination.qp_number, own.gid, own.address) == (0xFFFFFF, groups[0].gid, GROUP)
    sender.queue_pair.send(memory(keep, adapter, b"to all of you"), own.destination)
    for member in members:
        (received,) = succeed(member.cq)
        assert (received.context, received.nbytes) == (4, 13)
        assert received.source.qp_number == sender.queue_pair.number
        assert received.source.local_gid == own.gid
    assert_quiet(stranger.cq)
    groups[0].close()
    groups[0].close()
    for member in members:
        member.queue_pair.receive(memory(keep, adapter, 64), context=5)
    sender.queue_pair.send(memory(keep, adapter, b"to the rest"), own.destination)
    succeed(members[1].cq)
    assert_quiet(members[0].cq)
    assert [group.failure for group in groups] == ["", ""]
    with pytest.raises(ndpy.ClosedError):
        members[0].queue_pair.send([], groups[0].destination)


def test_no_group_is_refused(client):
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 is not the address of a multicast group"):
        client.queue_pair.join_multicast("192.0.2.1")


def test_a_membership_that_is_dropped_ends(adapter, keep, station):
    member, sender = station(), station()
    with pytest.warns(ResourceWarning, match=f"MulticastGroup {GROUP}"):
        group = member.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S)
        del group

        def is_left():
            # The adapter's thread may still refer to it while it ends the event.
            gc.collect()
            return not groups_of(adapter) and not adapter._orphans.may_have_some

        wait_until(is_left, "the end of the membership")
    there = keep(sender.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S))
    member.queue_pair.receive(memory(keep, adapter, 64))
    sender.queue_pair.send(memory(keep, adapter, b"gone"), there.destination)
    assert_quiet(member.cq)


def test_a_queue_pair_with_attached_groups_can_be_closed(adapter, station):
    """The kernel would refuse."""
    member, other = station(), station()
    with other.queue_pair.join_multicast(GROUP, timeout_s=DEADLINE_S) as group:
        member.queue_pair.attach_multicast(group.gid, lid=group.lid)
        member.queue_pair.close()


def test_a_dropped_queue_pair_with_calls_goes(adapter, keep):
    require(adapter, Capability.DATAGRAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        cq = keep(adapter.create_completion_queue(4))
        adapter.create_datagram_queue_pair(cq).begin_join_multicast(GROUP)

        def is_gone():
            gc.collect()
            return not groups_of(adapter) and not cq._users

        wait_until(is_gone, "the end of the queue pair")


def test_the_documents_example_runs(adapter, keep, server, client, capsys):
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    programs = [block.partition("```")[0] for block in blocks]
    (program,) = (text for text in programs if "listen_for_datagrams(" in text)
    names = {
        "adapter": adapter,
        "host": host_of(adapter),
        "far": server.queue_pair,
        "near": client.queue_pair,
        "source": memory(keep, adapter, b"question"),
        "inbox": memory(keep, adapter, 64),
        "far_queue": server.cq,
    }
    exec(compile(program, "docs/verbs.md", "exec"), names)
    assert capsys.readouterr().out == f"{server.queue_pair.number} 8\n"
