"""Section H of the contract: connectors and listeners."""

from __future__ import annotations

import os
import threading
import time

import pytest
from conftest import share
from consumer import (
    Kit,
    Node,
    Port,
    Side,
    accept,
    address_list,
    connect,
    establish,
    get_address,
    make_pair,
    no_completion,
    private_data,
    raw,
    wait_until,
)
from nd2 import NULL, Kind, Status, ffi, kernel32, sockaddr
from peer import Peer

IPV6 = "::1"


class Meeting:
    """A Connect that has arrived at a listener and awaits the passive side's word."""

    def __init__(self, kit: Kit, *, limits=(16, 16), data: bytes = b"", address: str = "127.0.0.1") -> None:
        self.kit = kit
        self.active, self.passive = Side(kit.node(address), 1), Side(kit.node(address), 2)
        self.listener = self.passive.node.listener()
        self.to = get_address(self.listener, "GetLocalAddress")
        arrived = kit.issue(self.listener, "GetConnectionRequest", self.passive.connector)
        self.connecting = connect(kit, self.active.connector, self.active.qp, self.to, limits, data)
        assert arrived.result() == Status.SUCCESS

    def accept(self, limits=(16, 16), data: bytes = b""):
        self.accepting = accept(self.kit, self.passive.connector, self.passive.qp, limits, data)
        return self.accepting

    def offer(self, **arguments):
        """Accept, and see Connect succeed."""
        self.accept(**arguments)
        assert self.connecting.result() == Status.SUCCESS

    def complete(self):
        assert self.kit.do(self.active.connector, "CompleteConnect") == Status.SUCCESS
        assert self.accepting.result() == Status.SUCCESS
        works(self.active, self.passive)


def works(active, passive):
    passive.receive(passive.region.sge(0, 64), context=1)
    active.region.put(0, b"works")
    active.send(active.region.sge(0, 5), context=2)
    assert (passive.one().bytes, active.one().status) == (5, Status.SUCCESS)


def bind(thing, address, port=0):
    name = sockaddr(address, port)
    return thing.Bind(name, len(name))


def closed_port(kit):
    """A port on which nobody listens."""
    listener = kit.node().listener()
    address = get_address(listener, "GetLocalAddress")
    listener.release()
    return address


def reject(connector, data=b""):
    return connector.Reject(ffi.new("char[]", data) if data else NULL, len(data))


def limits_of(connector):
    inbound, outbound = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    assert connector.GetReadLimits(inbound, outbound) == Status.SUCCESS
    return inbound[0], outbound[0]


# H.1 Call order


def test_h_1_1_connect_completes_with_accept_and_accept_with_complete_connect(kit):
    meeting = Meeting(kit)
    time.sleep(0.2)
    assert meeting.connecting.pending()
    accepting = meeting.accept()
    assert meeting.connecting.result() == Status.SUCCESS
    time.sleep(0.2)
    assert accepting.pending()
    meeting.complete()


def test_h_1_2_slow_programs_are_waited_for(kit):
    meeting = Meeting(kit)
    time.sleep(share(30, 2))
    assert meeting.connecting.pending()
    meeting.offer()
    time.sleep(share(30, 2))
    assert meeting.accepting.pending()
    meeting.complete()


def test_h_1_3_the_passive_side_may_send_first(pair):
    active, passive = pair
    active.receive(active.region.sge(0, 64))
    passive.send(passive.region.sge(0, 8))
    assert (active.one().bytes, passive.one().status) == (8, Status.SUCCESS)


# H.2 Connector Bind


def test_h_2_1_port_0_gives_an_ephemeral_port(kit):
    meeting = Meeting(kit)
    meeting.offer()
    address, port = get_address(meeting.active.connector, "GetLocalAddress")
    assert address == "127.0.0.1"
    assert 49152 <= port <= 65535
    meeting.complete()


def test_h_2_1_a_fixed_local_port_is_seen_by_the_peer(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    port = closed_port(kit)[1]
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    establish(active, passive)
    assert get_address(active.connector, "GetLocalAddress")[1] == port
    assert get_address(passive.connector, "GetPeerAddress") == ("127.0.0.1", port)


def test_h_2_2_h_2_5_a_local_port_is_not_shared(node):
    port = closed_port(node.kit)[1]
    assert bind(node.connector(), "127.0.0.1", port) == Status.SUCCESS
    assert bind(node.connector(), "127.0.0.1", port) == Status.SHARING_VIOLATION


def test_h_2_3_bind_while_connecting_or_offered_is_refused(kit):
    meeting = Meeting(kit)
    assert bind(meeting.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED
    assert meeting.connecting.pending()
    meeting.offer()
    assert bind(meeting.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED
    meeting.complete()
    assert bind(meeting.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED


def test_h_2_4_connect_works_whatever_a_second_bind_said(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    assert bind(active.connector, "127.0.0.1") == Status.SUCCESS
    bind(active.connector, "127.0.0.1")
    establish(active, passive)
    works(active, passive)


def test_h_2_4_after_a_failed_connect_the_same_address_binds_again(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    port = closed_port(kit)[1]
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    assert connect(kit, active.connector, active.qp, closed_port(kit)).result() == Status.CONNECTION_REFUSED
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    establish(active, passive)
    works(active, passive)


def test_h_2_5_the_port_of_another_addresss_listener_binds(kit):
    others = [a for a in address_list(kit.provider) if "." in a and a != "127.0.0.1"]
    if not others:
        pytest.skip("this machine has one IPv4 address only")
    listener = kit.node(others[0]).listener()
    port = get_address(listener, "GetLocalAddress")[1]
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    establish(active, passive)


@pytest.mark.parametrize("kind", ["connector", "listener"])
def test_h_2_6_addresses_that_cannot_be_bound(node, kind):
    def fresh():
        return node.connector() if kind == "connector" else node.create("Listener", node.file)

    name = sockaddr("127.0.0.1")
    for size in (0, 1, 15):
        assert fresh().Bind(name, size) == Status.INVALID_PARAMETER_2
    assert fresh().Bind(sockaddr("::1"), 27) == Status.INVALID_PARAMETER_2
    assert bind(fresh(), "198.51.100.77") == Status.INVALID_ADDRESS
    assert fresh().Bind(ffi.new("unsigned char[28]", b"\x11\0" + bytes(26)), 28) == Status.INVALID_ADDRESS


def test_h_2_6_connect_without_bind_binds_itself(pair):
    active, passive = pair  # made without Bind
    assert get_address(active.connector, "GetLocalAddress")[0] == "127.0.0.1"
    assert get_address(active.connector, "GetLocalAddress") == get_address(passive.connector, "GetPeerAddress")


# H.3 Listener


def test_h_3_1_an_address_is_listened_on_once_by_any_adapter_object(kit, node):
    first = node.listener()
    port = get_address(first, "GetLocalAddress")[1]
    for owner in (node, kit.node()):
        second = owner.create("Listener", owner.file)
        code = bind(second, "127.0.0.1", port)
        if code == Status.SUCCESS:
            code = second.Listen(0)
        assert code == Status.SHARING_VIOLATION


def test_h_3_2_a_second_bind_or_listen_is_refused(kit, node):
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")
    assert bind(listener, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED
    assert listener.Listen(0).failed
    assert get_address(listener, "GetLocalAddress") == to
    active, passive = Side(kit.node(), 1), Side(node, 2)
    establish(active, passive, listener)


def test_h_3_3_the_wildcard_listens_on_all_addresses(kit, node):
    listener = node.create("Listener", node.file)
    assert bind(listener, "0.0.0.0") == Status.SUCCESS
    assert listener.Listen(0) == Status.SUCCESS
    port = get_address(listener, "GetLocalAddress")[1]
    assert port
    for address in [a for a in address_list(node.adapter) if "." in a]:
        active, passive = Side(kit.node(address), 1), Side(node, 2)
        arrived = kit.issue(listener, "GetConnectionRequest", passive.connector)
        connect(kit, active.connector, active.qp, (address, port))
        assert arrived.result() == Status.SUCCESS
        assert get_address(passive.connector, "GetLocalAddress") == (address, port)


def test_h_3_4_listen_before_bind_is_refused(node):
    assert node.create("Listener", node.file).Listen(0) == Status.INVALID_DEVICE_STATE


def test_h_3_5_get_local_address(node):
    listener = node.create("Listener", node.file)
    size, data = ffi.new("uint32_t *", 28), ffi.new("unsigned char[28]")
    assert listener.GetLocalAddress(data, size) == Status.INVALID_DEVICE_STATE
    assert bind(listener, "127.0.0.1") == Status.SUCCESS
    assert listener.GetLocalAddress(data, size) == Status.INVALID_DEVICE_STATE
    assert listener.Listen(0) == Status.SUCCESS
    for given in (0, 8, 15):
        ffi.buffer(data)[:] = b"\xa5" * 28
        size[0] = given
        assert listener.GetLocalAddress(data, size) == Status.BUFFER_OVERFLOW
        assert (size[0], bytes(ffi.buffer(data))) == (16, b"\xa5" * 28)
    size[0] = 0
    assert listener.GetLocalAddress(NULL, size) == Status.BUFFER_OVERFLOW
    address, port = get_address(listener, "GetLocalAddress")
    assert address == "127.0.0.1"
    assert 49152 <= port <= 65535


def test_h_3_5_a_port_asked_for_is_the_one_given(kit, node):
    port = closed_port(kit)[1]
    assert get_address(node.listener(port), "GetLocalAddress") == ("127.0.0.1", port)


def test_h_3_7_each_request_completes_exactly_one_call_in_order(kit):
    node = kit.node()
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")
    connectors = [node.connector() for _ in range(5)]
    calls = [kit.issue(listener, "GetConnectionRequest", c) for c in connectors]
    for i in range(5):
        side = Side(kit.node(), i)
        request = connect(kit, side.connector, side.qp, to, data=b"%d" % i)
        assert calls[i].result() == Status.SUCCESS
        assert [call.pending() for call in calls[i + 1 :]] == [True] * (4 - i)
        assert private_data(connectors[i]) == b"%d" % i
        assert request.pending()


def test_h_3_8_requests_wait_in_the_backlog(kit):
    node = kit.node()
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")
    sides = [Side(kit.node(), i) for i in range(8)]
    requests = []
    for i, side in enumerate(sides):
        requests.append(connect(kit, side.connector, side.qp, to, data=b"%d" % i))
    seen = []
    for _ in sides:
        given = node.connector()
        assert kit.do(listener, "GetConnectionRequest", given) == Status.SUCCESS
        seen.append(private_data(given))
    assert sorted(seen) == [b"%d" % i for i in range(8)]
    assert all(request.pending() for request in requests)


def test_h_3_8_over_the_backlog_they_are_refused(kit):
    node = kit.node()
    listener = node.listener(backlog=2)
    to = get_address(listener, "GetLocalAddress")
    requests = []
    for i in range(8):
        side = Side(kit.node(), i)
        requests.append(connect(kit, side.connector, side.qp, to))
    wait_until(lambda: sum(not r.pending() for r in requests) >= 1, "one is refused")
    time.sleep(0.3)
    ended = [r for r in requests if not r.pending()]
    assert {r.result() for r in ended} == {Status.CONNECTION_REFUSED}
    waiting = [r for r in requests if r.pending()]
    assert len(waiting) >= 2
    for request in waiting:
        assert kit.do(listener, "GetConnectionRequest", node.connector()) == Status.SUCCESS
        assert request.pending()


def test_h_3_9_what_get_connection_request_refuses(kit, pair):
    active, passive = pair
    node = passive.node
    listener = node.listener()
    for wrong, code in (
        (passive.connector, Status.CONNECTION_ACTIVE),
        (None, Status.INVALID_PARAMETER_1),
        (passive.cq, Status.INVALID_PARAMETER_1),
        (active.node.connector(), None),
    ):
        returned = kit.issue(listener, "GetConnectionRequest", wrong).returned
        if code is None:  # a connector of another adapter object
            assert returned in (Status.INVALID_PARAMETER_1, Status.PENDING)
        else:
            assert returned == code
    idle = node.create("Listener", node.file)
    assert kit.issue(idle, "GetConnectionRequest", node.connector()).returned == Status.INVALID_DEVICE_STATE


def test_h_3_10_closing_a_listener(kit):
    meeting = Meeting(kit)
    node, listener = meeting.passive.node, meeting.listener
    waiting = kit.issue(listener, "GetConnectionRequest", node.connector())
    assert waiting.pending()
    other = Side(kit.node(), 9)
    assert listener.release() == 0
    assert kernel32.WaitForSingleObject(waiting.event, 10000) == 0
    assert node.connector().GetOverlappedResult(waiting.overlapped, 0) == Status.CANCELED
    assert connect(kit, other.connector, other.qp, meeting.to).result() == Status.CONNECTION_REFUSED
    assert get_address(node.listener(meeting.to[1]), "GetLocalAddress") == meeting.to, "the address is free"
    meeting.offer()
    meeting.complete()


def test_h_3_10_requests_in_the_backlog_are_refused_on_closing(kit):
    node, side = kit.node(), Side(kit.node(), 1)
    listener = node.listener()
    request = connect(kit, side.connector, side.qp, get_address(listener, "GetLocalAddress"))
    time.sleep(0.2)
    assert request.pending()
    listener.release()
    assert request.result() == Status.CONNECTION_REFUSED


def test_h_3_11_hundreds_of_requests_at_once(kit):
    count = share(500, 150)
    node, active = kit.node(), kit.node()
    listener = node.listener()
    to = get_address(listener, "GetLocalAddress")
    cq = active.cq(1024)
    requests = []
    start = time.monotonic()
    for _ in range(count):
        requests.append(connect(kit, active.connector(), active.qp(cq, depth=1), to))
    calls = [(c := node.connector(), kit.issue(listener, "GetConnectionRequest", c)) for _ in range(count)]
    for connector, call in calls:
        assert call.result() == Status.SUCCESS
        assert reject(connector) == Status.SUCCESS
    assert {r.result() for r in requests} == {Status.CONNECTION_REFUSED}
    assert time.monotonic() - start < 60


# H.4 Connect


def test_h_4_2_nobody_listens(kit):
    side = Side(kit.node(), 1)
    assert connect(kit, side.connector, side.qp, closed_port(kit)).result() == Status.CONNECTION_REFUSED


def test_h_4_2_a_rejection_comes_with_its_data_and_may_be_retried(kit):
    meeting = Meeting(kit)
    assert reject(meeting.passive.connector, b"not today") == Status.SUCCESS
    assert meeting.connecting.result() == Status.CONNECTION_REFUSED
    assert private_data(meeting.active.connector) == b"not today"
    passive = Side(meeting.passive.node, 3)
    establish(meeting.active, passive, meeting.listener)
    works(meeting.active, passive)


def test_h_4_2_m_17_the_unspecified_address(kit):
    side = Side(kit.node(), 1)
    code = connect(kit, side.connector, side.qp, ("0.0.0.0", 5000)).result()
    assert code == Status.BAD_NETWORK_NAME


def test_h_4_2_unusable_destinations(kit):
    side = Side(kit.node(), 1)
    assert bind(side.connector, "127.0.0.1") == Status.SUCCESS
    name = sockaddr("127.0.0.1", 5000)
    short = kit.issue(side.connector, "Connect", side.qp, name, 8, 1, 1, NULL, 0)
    assert short.result() == Status.INVALID_ADDRESS
    assert connect(kit, side.connector, side.qp, ("127.0.0.1", 0)).result() == Status.INVALID_ADDRESS
    assert connect(kit, side.connector, side.qp, ("::1", 5000)).result() == Status.INVALID_ADDRESS
    passive = Side(kit.node(), 2)
    establish(side, passive)
    works(side, passive)


def test_h_4_2_h_4_3_private_data_too_long_is_refused_inline_and_harmless(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    limit = active.node.info.MaxCallerData
    listener = passive.node.listener()
    to = get_address(listener, "GetLocalAddress")
    request = connect(kit, active.connector, active.qp, to, data=b"x" * (limit + 1))
    assert request.returned == Status.INVALID_BUFFER_SIZE
    name = sockaddr(*to)
    bad = kit.issue(active.connector, "Connect", active.qp, name, len(name), 1, 1, NULL, 4)
    assert bad.returned == Status.ACCESS_VIOLATION
    bad = kit.issue(active.connector, "Connect", active.qp, name, len(name), 1, 1, ffi.cast("void *", 0x10), 4)
    assert bad.returned == Status.ACCESS_VIOLATION
    establish(active, passive, listener)


def test_h_4_2_h_4_7_a_second_connect_is_refused_and_the_first_unharmed(kit):
    meeting = Meeting(kit)
    active = meeting.active
    other = active.node.bound_connector()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, meeting.to).result() == Status.CONNECTION_ACTIVE
    meeting.offer()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, meeting.to).result() == Status.CONNECTION_ACTIVE
    assert meeting.accepting.pending()
    meeting.complete()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, meeting.to).result() == Status.CONNECTION_ACTIVE
    works(active, meeting.passive)


def test_h_4_2_a_queue_pair_of_another_adapter_is_refused(kit):
    side, stranger = Side(kit.node(), 1), Side(kit.node(), 2)
    to = get_address(kit.node().listener(), "GetLocalAddress")
    assert connect(kit, side.connector, stranger.qp, to).result() == Status.INVALID_PARAMETER_1
    assert connect(kit, side.connector, None, to).result() == Status.INVALID_PARAMETER_1
    assert connect(kit, side.connector, side.cq, to).result() == Status.INVALID_PARAMETER_1


def test_h_4_2_a_queue_pair_released_meanwhile(kit):
    meeting = Meeting(kit)
    meeting.active.qp.release()
    assert meeting.connecting.result() == Status.CANCELED


def test_h_4_5_exactly_the_limits_of_private_data(kit):
    node = kit.node()
    caller, callee = os.urandom(node.info.MaxCallerData), os.urandom(node.info.MaxCalleeData)
    meeting = Meeting(kit, data=caller)
    assert private_data(meeting.passive.connector) == caller
    meeting.offer(data=callee)
    assert private_data(meeting.active.connector) == callee
    meeting.complete()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 56, 148])
def test_h_4_5_h_7_1_h_7_3_private_data_of_any_size_arrive_exactly(kit, size):
    there, back = os.urandom(size), os.urandom(size)
    meeting = Meeting(kit, data=there)
    assert private_data(meeting.passive.connector) == there
    meeting.offer(data=back)
    assert private_data(meeting.active.connector) == back


def test_h_4_6_h_5_6_read_limits_above_the_adapters_are_lowered(kit):
    huge = 0xFFFFFFFF
    meeting = Meeting(kit, limits=(huge, huge))
    info = meeting.active.node.info
    assert limits_of(meeting.passive.connector) == (info.MaxInboundReadLimit, info.MaxOutboundReadLimit)
    meeting.offer(limits=(huge, huge))
    assert limits_of(meeting.active.connector) == (info.MaxInboundReadLimit, info.MaxOutboundReadLimit)
    meeting.complete()


@pytest.mark.parametrize("what", ["connector", "queue pair"])
def test_h_4_8_h_6_2_releasing_while_offered_refuses_the_accept(kit, what):
    meeting = Meeting(kit)
    meeting.offer()
    assert meeting.accepting.pending()
    (meeting.active.connector if what == "connector" else meeting.active.qp).release()
    assert meeting.accepting.result() == Status.CONNECTION_REFUSED


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_h_4_9_h_5_4_abandoned_before_accept_is_aborted(kit, how):
    meeting = Meeting(kit)
    if how == "cancel":
        assert meeting.active.connector.CancelOverlappedRequests() == Status.SUCCESS
        assert meeting.connecting.result() == Status.CANCELED
    else:
        meeting.active.connector.release()
    time.sleep(0.3)  # the passive side learns of it
    assert meeting.accept().result() == Status.CONNECTION_ABORTED


def test_h_4_10_the_last_release_of_a_connector_returns_0(kit):
    meeting = Meeting(kit)
    other = meeting.active.node.connector()
    assert other.release() == 0
    meeting.offer()
    meeting.complete()
    assert meeting.active.connector.release() == 0
    assert meeting.passive.connector.release() == 0


@pytest.mark.parametrize("state", ["connecting", "requested", "offered", "accepting"])
def test_h_4_10_in_every_state(kit, state):
    meeting = Meeting(kit)
    if state in ("offered", "accepting"):
        meeting.offer()
    side = meeting.active if state in ("connecting", "offered") else meeting.passive
    assert side.connector.release() == 0


# H.5 CompleteConnect and Accept


def test_h_5_1_complete_connect_only_from_offered(kit):
    meeting = Meeting(kit)
    invalid = Status.CONNECTION_INVALID
    assert kit.do(meeting.active.node.connector(), "CompleteConnect") == invalid
    assert kit.do(meeting.active.connector, "CompleteConnect") == invalid
    assert kit.do(meeting.passive.connector, "CompleteConnect") == invalid
    meeting.offer()
    meeting.complete()
    assert kit.do(meeting.active.connector, "CompleteConnect") == invalid


def test_h_5_3_a_queue_pair_of_another_adapter_is_refused(kit):
    meeting = Meeting(kit)
    wrong = accept(kit, meeting.passive.connector, meeting.active.qp)
    assert wrong.result().failed
    assert accept(kit, meeting.passive.connector, None).result().failed
    meeting.offer()
    meeting.complete()


def test_h_5_4_m_18_argument_errors_of_accept_leave_the_state(kit):
    meeting = Meeting(kit)
    passive = meeting.passive
    too_long = accept(kit, passive.connector, passive.qp, data=b"x" * (passive.node.info.MaxCalleeData + 1))
    assert too_long.result() == Status.INVALID_BUFFER_SIZE
    bad = kit.issue(passive.connector, "Accept", passive.qp, 1, 1, NULL, 4)
    assert bad.result() == Status.ACCESS_VIOLATION
    assert meeting.connecting.pending()
    meeting.offer()
    meeting.complete()


def test_h_5_4_a_connected_queue_pair_is_refused(kit, pair):
    _, connected = pair
    listener = connected.node.listener()
    side = Side(kit.node(), 3)
    given = connected.node.connector()
    arrived = kit.issue(listener, "GetConnectionRequest", given)
    connect(kit, side.connector, side.qp, get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    assert accept(kit, given, connected.qp).result() == Status.CONNECTION_ACTIVE


def test_h_5_4_accept_in_another_state_is_refused(kit, pair):
    active, passive = pair
    side = Side(kit.node(), 3)
    assert accept(kit, side.connector, side.qp).result() == Status.CONNECTION_INVALID
    fresh = passive.node.qp(passive.cq)
    assert accept(kit, passive.connector, fresh).result() == Status.CONNECTION_INVALID
    works(active, passive)


def test_h_5_4_a_queue_pair_released_while_accepting(kit):
    meeting = Meeting(kit)
    meeting.offer()
    meeting.passive.qp.release()
    assert meeting.accepting.result() == Status.CANCELED


def test_h_5_5_accept_succeeds_though_the_active_side_disconnects_at_once(kit):
    for _ in range(20):
        meeting = Meeting(kit)
        meeting.offer()
        kit.issue(meeting.active.connector, "CompleteConnect")
        kit.issue(meeting.active.connector, "Disconnect")
        assert meeting.accepting.result() in (Status.SUCCESS,)


def test_h_5_7_data_may_arrive_before_accept_was_observed(kit):
    meeting = Meeting(kit)
    passive, active = meeting.passive, meeting.active
    passive.receive(passive.region.sge(0, 8), context=1)
    meeting.offer()
    assert kit.do(active.connector, "CompleteConnect") == Status.SUCCESS
    active.send(active.region.sge(0, 8))
    assert passive.one().status == Status.SUCCESS
    assert active.one().status == Status.SUCCESS
    assert meeting.accepting.result() == Status.SUCCESS


# H.6 Reject


def test_h_6_1_a_passive_reject_refuses_with_data(kit):
    meeting = Meeting(kit)
    data = os.urandom(meeting.passive.node.info.MaxCalleeData)
    assert reject(meeting.passive.connector, data) == Status.SUCCESS
    assert meeting.connecting.result() == Status.CONNECTION_REFUSED
    assert private_data(meeting.active.connector) == data


def test_h_6_2_an_active_reject_refuses_the_accept(kit):
    meeting = Meeting(kit)
    meeting.offer()
    assert reject(meeting.active.connector, b"no, thanks") == Status.SUCCESS
    assert meeting.accepting.result() == Status.CONNECTION_REFUSED


def test_h_6_3_errors_of_reject_leave_the_state(kit):
    meeting = Meeting(kit)
    connector = meeting.passive.connector
    limit = meeting.passive.node.info.MaxCalleeData
    assert reject(connector, b"x" * (limit + 1)) == Status.INVALID_BUFFER_SIZE
    assert connector.Reject(NULL, 4) == Status.ACCESS_VIOLATION
    assert connector.Reject(ffi.cast("void *", 0x10), 4) == Status.ACCESS_VIOLATION
    meeting.offer()
    meeting.complete()


def test_h_6_3_reject_in_another_state_is_refused(kit, pair):
    active, passive = pair
    for connector in (active.connector, passive.connector, active.node.connector(), active.node.bound_connector()):
        assert reject(connector) == Status.CONNECTION_INVALID
    works(active, passive)
    meeting = Meeting(kit)
    assert reject(meeting.active.connector) == Status.CONNECTION_INVALID
    meeting.offer()
    meeting.complete()


def test_h_6_3_reject_after_the_peer_has_gone_is_aborted(kit):
    meeting = Meeting(kit)
    meeting.active.connector.release()
    time.sleep(0.3)  # the passive side learns of it
    assert reject(meeting.passive.connector) == Status.CONNECTION_ABORTED


def test_h_6_4_releasing_a_requested_connector_refuses(kit):
    meeting = Meeting(kit)
    assert meeting.passive.connector.release() == 0
    assert meeting.connecting.result() == Status.CONNECTION_REFUSED


# H.7 Queries


def test_h_7_1_private_data_when_there_can_be_none(kit, node):
    size = ffi.new("uint32_t *", 0)
    for connector in (node.connector(), node.bound_connector()):
        assert connector.GetPrivateData(NULL, size) == Status.CONNECTION_INVALID
    meeting = Meeting(kit)
    assert meeting.active.connector.GetPrivateData(NULL, size) == Status.CONNECTION_INVALID


def test_h_7_2_the_part_that_fits_is_copied(kit):
    meeting = Meeting(kit, data=b"0123456789")
    connector = meeting.passive.connector
    for given in range(10):
        data, size = ffi.new("char[]", b"#" * 12), ffi.new("uint32_t *", given)
        assert connector.GetPrivateData(data, size) == Status.BUFFER_OVERFLOW
        assert size[0] == 10
        assert bytes(ffi.buffer(data, 12)) == b"0123456789"[:given] + b"#" * (12 - given)
    size = ffi.new("uint32_t *", 0)
    assert connector.GetPrivateData(NULL, size) == Status.BUFFER_OVERFLOW
    assert size[0] == 10
    size[0] = 10
    assert connector.GetPrivateData(ffi.new("char[10]"), size) == Status.SUCCESS


def test_h_7_4_private_data_after_the_active_side_has_gone(kit):
    meeting = Meeting(kit, data=b"mine")
    meeting.active.connector.release()
    size, data = ffi.new("uint32_t *", 64), ffi.new("char[64]")
    wait_until(
        lambda: meeting.passive.connector.GetPrivateData(data, size) == Status.CONNECTION_ABORTED,
        "the passive side learns of it",
    )


def test_h_7_5_read_limits_are_seen_from_the_caller(kit):
    meeting = Meeting(kit, limits=(4, 7))
    assert limits_of(meeting.passive.connector) == (7, 4)
    meeting.offer(limits=(5, 3))
    assert limits_of(meeting.active.connector) == (3, 5)
    assert meeting.active.connector.GetReadLimits(NULL, NULL) == Status.SUCCESS
    meeting.complete()


def test_h_7_6_read_limits_in_other_states(kit, pair):
    active, passive = pair
    out = ffi.new("uint32_t *")
    meeting = Meeting(kit)
    for connector in (
        active.connector, passive.connector, active.node.connector(), active.node.bound_connector(),
        meeting.active.connector,
    ):  # fmt: skip
        assert connector.GetReadLimits(out, out) == Status.CONNECTION_INVALID


def test_h_7_7_h_7_8_addresses(kit):
    meeting = Meeting(kit)
    requested = meeting.passive.connector
    mine = get_address(meeting.active.connector, "GetLocalAddress")
    assert get_address(requested, "GetPeerAddress") == mine
    assert get_address(requested, "GetLocalAddress") == meeting.to
    meeting.offer()
    meeting.complete()
    assert get_address(meeting.active.connector, "GetPeerAddress") == meeting.to
    assert get_address(requested, "GetPeerAddress") == mine
    for method in ("GetLocalAddress", "GetPeerAddress"):
        size, data = ffi.new("uint32_t *", 15), ffi.new("unsigned char[]", b"\xa5" * 28)
        assert getattr(meeting.active.connector, method)(data, size) == Status.BUFFER_OVERFLOW
        assert (size[0], bytes(ffi.buffer(data, 28))) == (16, b"\xa5" * 28)
        size[0] = 0
        assert getattr(meeting.active.connector, method)(NULL, size) == Status.BUFFER_OVERFLOW


def test_h_7_7_addresses_of_an_idle_connector(node):
    size, data = ffi.new("uint32_t *", 28), ffi.new("unsigned char[28]")
    for method in ("GetLocalAddress", "GetPeerAddress"):
        assert getattr(node.connector(), method)(data, size) == Status.CONNECTION_INVALID


def test_h_ipv6(kit):
    if IPV6 not in address_list(kit.provider):
        pytest.skip("this machine has no IPv6 loopback address")
    meeting = Meeting(kit, address=IPV6, data=b"six")
    assert private_data(meeting.passive.connector) == b"six"
    assert get_address(meeting.passive.connector, "GetPeerAddress")[0] == IPV6
    meeting.offer()
    meeting.complete()
    size = ffi.new("uint32_t *", 27)
    assert meeting.active.connector.GetPeerAddress(ffi.new("char[28]"), size) == Status.BUFFER_OVERFLOW
    assert size[0] == 28


# H.8 NotifyDisconnect and Disconnect


def test_h_8_1_notify_disconnect_completes_when_the_peer_ends_it(kit, pair):
    active, passive = pair
    request = kit.issue(active.connector, "NotifyDisconnect")
    time.sleep(0.1)
    assert request.pending()
    assert passive.disconnect() == Status.SUCCESS
    assert request.result() == Status.SUCCESS


def test_h_8_1_never_connected(kit):
    meeting = Meeting(kit)
    invalid = Status.CONNECTION_INVALID
    for connector in (meeting.active.connector, meeting.passive.connector, meeting.active.node.bound_connector()):
        assert kit.issue(connector, "NotifyDisconnect").returned == invalid
        assert kit.do(connector, "Disconnect") == invalid
    meeting.offer()
    meeting.complete()


def test_h_8_2_after_the_peer_has_disconnected_it_completes_at_once(kit, pair):
    active, passive = pair
    active.receive(context=1)
    assert passive.disconnect() == Status.SUCCESS
    assert active.one().status == Status.CANCELED
    assert kit.do(active.connector, "NotifyDisconnect") == Status.SUCCESS


def test_h_8_3_cancelled_notify_disconnect(kit, pair):
    active, _ = pair
    request = kit.issue(active.connector, "NotifyDisconnect")
    active.connector.CancelOverlappedRequests()
    assert request.result() == Status.CANCELED


def test_h_8_3_h_8_4_disconnect_then_cancel_ends_it_in_some_way(kit, pair):
    active, _ = pair
    request = kit.issue(active.connector, "NotifyDisconnect")
    assert active.disconnect() == Status.SUCCESS
    active.connector.CancelOverlappedRequests()
    assert request.result() in (Status.CANCELED, Status.SUCCESS, Status.CONNECTION_DISCONNECTED)


def test_h_8_6_m_10_both_disconnects_succeed(kit, pair):
    active, passive = pair
    assert active.disconnect() == Status.SUCCESS
    gone = kit.issue(passive.connector, "NotifyDisconnect")
    assert gone.result() == Status.SUCCESS
    assert passive.disconnect() == Status.SUCCESS
    assert active.disconnect() == Status.CONNECTION_INVALID
    assert passive.disconnect() == Status.CONNECTION_INVALID


def test_h_8_6_both_at_once(kit):
    for _ in range(20):
        active, passive = make_pair(kit)
        requests = [kit.issue(side.connector, "Disconnect") for side in (active, passive)]
        assert [request.result() for request in requests] == [Status.SUCCESS] * 2


def test_h_8_6_disconnect_after_an_error(pair):
    active, passive = pair
    active.write(active.region.sge(0, 8), to=0, token=1)
    assert active.one().status == Status.ACCESS_VIOLATION
    assert active.disconnect() == Status.SUCCESS
    assert passive.disconnect() == Status.SUCCESS


def test_h_8_5_a_queue_pair_removed(kit, pair):
    active, _ = pair
    active.qp.release()
    assert active.disconnect() in (Status.CANCELED, Status.SUCCESS)


def test_h_8_7_disconnect_does_not_need_the_peers_program(kit, pair):
    active, passive = pair
    passive.send(passive.region.sge(0, 8))  # waits for a Receive of the active side
    start = time.monotonic()
    assert active.disconnect() == Status.SUCCESS
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("what", ["connector", "queue pair"])
def test_h_8_9_releasing_without_disconnect_looks_like_one(kit, pair, what):
    active, passive = pair
    passive.receive(context=1)
    gone = kit.issue(passive.connector, "NotifyDisconnect")
    (active.connector if what == "connector" else active.qp).release()
    assert gone.result() == Status.SUCCESS
    assert passive.one()[:3] == (Kind.RECEIVE, Status.CANCELED, 1)


def test_h_8_10_both_ends_on_one_adapter_object(kit, node):
    active, passive = Side(node, 1), Side(node, 2)
    establish(active, passive)
    works(active, passive)
    works(passive, active)


def test_h_many_threads_connect_at_once(kit):
    passive_node = kit.node()
    listener = passive_node.listener()
    failures = []

    def work(number):
        mine = Kit()
        try:
            for _ in range(share(30, 5)):
                active = Side(mine.node(), number)
                to = get_address(listener, "GetLocalAddress")
                request = connect(mine, active.connector, active.qp, to, data=b"%d" % number)
                assert request.result() == Status.SUCCESS
                assert mine.do(active.connector, "CompleteConnect") == Status.SUCCESS
                active.receive(active.region.sge(0, 64))
                assert active.one().bytes == number + 1
                active.disconnect()
        except BaseException as error:
            failures.append(error)
        finally:
            mine.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4 * share(30, 5)):
        side = Side(passive_node, 0)
        assert kit.do(listener, "GetConnectionRequest", side.connector) == Status.SUCCESS
        number = int(private_data(side.connector))
        accepting = accept(kit, side.connector, side.qp)
        assert accepting.result() == Status.SUCCESS
        side.send(side.region.sge(0, number + 1))
        assert side.one().status == Status.SUCCESS
    for thread in threads:
        thread.join(60)
    assert not failures


# Two processes


def serve(channel, action, count):
    """Accept one connection, take `count` messages into Receives, then do `action`."""
    kit = Kit()
    node = Node(kit, "127.0.0.1")
    side = Side(node, 2)
    for i in range(count):
        side.receive(side.region.sge(i * 16, 16), context=i)
    listener = node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
    channel.send(get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    if action == "vanish before accept":
        os._exit(0)
    assert accept(kit, side.connector, side.qp).result() == Status.SUCCESS
    if action == "exit after receiving":
        side.take(count)
        os._exit(0)
    if action == "send and leave":
        side.region.put(0, b"last words" * 1000)
        side.send(side.region.sge(0, 10000))
        assert side.one().status == Status.SUCCESS
        kit.close()
        os._exit(0)
    channel.send({"address": side.region.address, "token": side.region.remote})
    if action == "collect":
        done = side.take(count, 30)
        channel.send([[d.context, d.bytes, int(d.status)] for d in done])
        channel.send(side.region.get(0, 16 * count).hex())
    channel.receive()
    kit.close()
    channel.send("closed")


def join(kit, peer):
    side = Side(kit.node(), 1)
    to = tuple(peer.receive())
    assert connect(kit, side.connector, side.qp, to).result() == Status.SUCCESS
    assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
    return side


def test_h_two_processes_send_write_and_read(kit):
    with Peer("test_h_connectors", "serve", "collect", 8) as peer:
        side = join(kit, peer)
        remote = peer.receive()
        for i in range(8):
            side.region.put(0, b"message%d" % i)
            side.send(side.region.sge(0, 8))
            assert side.one().status == Status.SUCCESS
        assert peer.receive() == [[i, 8, 0] for i in range(8)]
        expected = b"".join((b"message%d" % i).ljust(16, b"\0") for i in range(8))
        assert bytes.fromhex(peer.receive()) == expected
        data = os.urandom(4096)
        side.region.put(0, data)
        side.write(side.region.sge(0, 4096), to=remote["address"] + 8192, token=remote["token"])
        side.read(side.region.sge(8192, 4096), at=remote["address"] + 8192, token=remote["token"])
        assert [d.status for d in side.take(2)] == [Status.SUCCESS] * 2
        assert side.region.get(8192, 4096) == data
        peer.send("leave")
        assert peer.receive() == "closed"
        assert peer.finish() == 0
    side.receive(context=1)
    assert side.one().status == Status.CANCELED


def test_h_two_processes_an_address_listened_on_elsewhere_is_taken(kit, node):
    with Peer("test_h_connectors", "serve", "wait", 0) as peer:
        _, port = peer.receive()
        listener = node.create("Listener", node.file)
        code = bind(listener, "127.0.0.1", port)
        if code == Status.SUCCESS:
            code = listener.Listen(0)
        assert code == Status.SHARING_VIOLATION


def test_f_5_4_two_processes_a_send_succeeds_though_the_receiver_exits(kit):
    with Peer("test_h_connectors", "serve", "exit after receiving", 1) as peer:
        side = join(kit, peer)
        side.send(side.region.sge(0, 8), context=1)
        assert side.one()[:3] == (Kind.SEND, Status.SUCCESS, 1)
        side.receive(context=2)
        assert side.one()[:3] == (Kind.RECEIVE, Status.CANCELED, 2)
        assert peer.finish() == 0


def test_h_8_8_two_processes_data_arrive_though_the_sender_exits(kit):
    with Peer("test_h_connectors", "serve", "send and leave", 0) as peer:
        side = Side(kit.node(), 1)
        side.receive(side.region.sge(0, 20000), context=1)
        to = tuple(peer.receive())
        assert connect(kit, side.connector, side.qp, to).result() == Status.SUCCESS
        assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
        assert side.one().bytes == 10000
        assert side.region.get(0, 10000) == b"last words" * 1000
        assert peer.finish() == 0


def test_h_5_4_two_processes_the_peer_vanishes_before_accepting(kit):
    with Peer("test_h_connectors", "serve", "vanish before accept", 0) as peer:
        side = Side(kit.node(), 1)
        to = tuple(peer.receive())
        code = connect(kit, side.connector, side.qp, to).result()
        assert code in (Status.CONNECTION_REFUSED, Status.CONNECTION_ABORTED)


def test_f_6_6_two_processes_a_killed_peer(kit):
    with Peer("test_h_connectors", "serve", "wait", 0) as peer:
        side = join(kit, peer)
        peer.receive()
        gone = kit.issue(side.connector, "NotifyDisconnect")
        side.receive(context=1)
        side.send(side.region.sge(0, 8), context=2)  # finds no Receive
        side.send(side.region.sge(0, 8), context=3)
        peer.kill()
        done = side.take(3)
        assert [(d.status, d.context) for d in done if d.kind == Kind.SEND] == [
            (Status.IO_TIMEOUT, 2),
            (Status.CANCELED, 3),
        ]
        assert [(d.status, d.context) for d in done if d.kind == Kind.RECEIVE] == [(Status.CANCELED, 1)]
        assert gone.result() == Status.SUCCESS
        assert side.disconnect() == Status.SUCCESS


def vanish(channel, to, phase):
    kit = Kit()
    side = Side(Node(kit, "127.0.0.1"), 1)
    request = connect(kit, side.connector, side.qp, tuple(to))
    channel.send("connecting")
    if phase == "offered":
        assert request.result() == Status.SUCCESS
        channel.send("offered")
    channel.receive()


@pytest.mark.parametrize("phase", ["connecting", "offered"])
def test_h_5_4_m_16_two_processes_the_active_side_is_killed(kit, phase):
    side = Side(kit.node(), 2)
    listener = side.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
    to = get_address(listener, "GetLocalAddress")
    with Peer("test_h_connectors", "vanish", to, phase) as peer:
        assert peer.receive() == "connecting"
        assert arrived.result() == Status.SUCCESS
        if phase == "offered":
            accepting = accept(kit, side.connector, side.qp)
            assert peer.receive() == "offered"
        peer.kill()
        if phase == "connecting":
            time.sleep(0.3)  # the passive side learns of it
            accepting = accept(kit, side.connector, side.qp)
        assert accepting.result() == Status.CONNECTION_ABORTED


def test_c_1_5_a_connections_packets_carry_the_key(kit):
    node = kit.node()
    file = node.new_file()
    port = Port(file, key=0x5151)
    cq = node.cq()
    connector, qp = node.connector(file), node.qp(cq)
    passive = Side(kit.node(), 2)
    listener = passive.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", passive.connector)
    name = sockaddr(*get_address(listener, "GetLocalAddress"))
    overlapped = kit.overlapped()
    assert connector.Connect(raw(qp), name, len(name), 1, 1, NULL, 0, overlapped) == Status.PENDING
    assert arrived.result() == Status.SUCCESS
    accepting = accept(kit, passive.connector, passive.qp)
    assert port.get() == (True, overlapped, 0x5151)
    assert connector.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
    assert connector.CompleteConnect(overlapped) == Status.PENDING
    assert port.get() == (True, overlapped, 0x5151)
    assert accepting.result() == Status.SUCCESS
    assert connector.NotifyDisconnect(overlapped) == Status.PENDING
    assert passive.disconnect() == Status.SUCCESS
    assert port.get() == (True, overlapped, 0x5151)
    other = kit.overlapped()
    assert connector.Disconnect(other) == Status.PENDING
    assert port.get() == (True, other, 0x5151)
    assert no_completion(cq)
    port.close()
