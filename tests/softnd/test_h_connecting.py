"""Section H of the contract, H.1 to H.4: binding, listening, connecting."""

from __future__ import annotations

import os
import time

import pytest
from conftest import share
from connection_attempt import ConnectionAttempt, bind, check_transfer, closed_port, limits_of, reject
from consumer import (
    Side,
    address_list,
    connect,
    establish,
    get_address,
    private_data,
    wait_until,
)
from version2 import NULL, Status, ffi, kernel32, sockaddr

# H.1 Call order


def test_h_1_1_connect_completes_with_accept_and_accept_with_complete_connect(kit):
    attempt = ConnectionAttempt(kit)
    time.sleep(0.2)
    assert attempt.connecting.pending()
    accepting = attempt.accept()
    assert attempt.connecting.result() == Status.SUCCESS
    time.sleep(0.2)
    assert accepting.pending()
    attempt.complete()


def test_h_1_2_slow_programs_are_waited_for(kit):
    attempt = ConnectionAttempt(kit)
    time.sleep(share(30, 2))
    assert attempt.connecting.pending()
    attempt.offer()
    time.sleep(share(30, 2))
    assert attempt.accepting.pending()
    attempt.complete()


def test_h_1_3_the_passive_side_may_send_first(pair):
    active, passive = pair
    active.receive(active.region.sge(0, 64))
    passive.send(passive.region.sge(0, 8))
    assert (active.one().bytes, passive.one().status) == (8, Status.SUCCESS)


# H.2 Connector Bind


def test_h_2_1_port_0_gives_an_ephemeral_port(kit):
    attempt = ConnectionAttempt(kit)
    attempt.offer()
    address, port = get_address(attempt.active.connector, "GetLocalAddress")
    assert address == "127.0.0.1"
    assert 49152 <= port <= 65535
    attempt.complete()


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
    attempt = ConnectionAttempt(kit)
    assert bind(attempt.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED
    assert attempt.connecting.pending()
    attempt.offer()
    assert bind(attempt.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED
    attempt.complete()
    assert bind(attempt.active.connector, "127.0.0.1") == Status.ADDRESS_ALREADY_ASSOCIATED


def test_h_2_4_connect_works_whatever_a_second_bind_said(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    assert bind(active.connector, "127.0.0.1") == Status.SUCCESS
    bind(active.connector, "127.0.0.1")
    establish(active, passive)
    check_transfer(active, passive)


def test_h_2_4_after_a_failed_connect_the_same_address_binds_again(kit):
    active, passive = Side(kit.node(), 1), Side(kit.node(), 2)
    port = closed_port(kit)[1]
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    assert connect(kit, active.connector, active.qp, closed_port(kit)).result() == Status.CONNECTION_REFUSED
    assert bind(active.connector, "127.0.0.1", port) == Status.SUCCESS
    establish(active, passive)
    check_transfer(active, passive)


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
    active, passive = pair  # they were created without Bind
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
    attempt = ConnectionAttempt(kit)
    node, listener = attempt.passive.node, attempt.listener
    waiting = kit.issue(listener, "GetConnectionRequest", node.connector())
    assert waiting.pending()
    other = Side(kit.node(), 9)
    assert listener.release() == 0
    assert kernel32.WaitForSingleObject(waiting.event, 10000) == 0
    assert node.connector().GetOverlappedResult(waiting.overlapped, 0) == Status.CANCELED
    assert connect(kit, other.connector, other.qp, attempt.to).result() == Status.CONNECTION_REFUSED
    assert get_address(node.listener(attempt.to[1]), "GetLocalAddress") == attempt.to, "the address is free"
    attempt.offer()
    attempt.complete()


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
    attempt = ConnectionAttempt(kit)
    assert reject(attempt.passive.connector, b"not today") == Status.SUCCESS
    assert attempt.connecting.result() == Status.CONNECTION_REFUSED
    assert private_data(attempt.active.connector) == b"not today"
    passive = Side(attempt.passive.node, 3)
    establish(attempt.active, passive, attempt.listener)
    check_transfer(attempt.active, passive)


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
    check_transfer(side, passive)


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
    attempt = ConnectionAttempt(kit)
    active = attempt.active
    other = active.node.bound_connector()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, attempt.to).result() == Status.CONNECTION_ACTIVE
    attempt.offer()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, attempt.to).result() == Status.CONNECTION_ACTIVE
    assert attempt.accepting.pending()
    attempt.complete()
    for connector in (active.connector, other):
        assert connect(kit, connector, active.qp, attempt.to).result() == Status.CONNECTION_ACTIVE
    check_transfer(active, attempt.passive)


def test_h_4_2_a_queue_pair_of_another_adapter_is_refused(kit):
    side, stranger = Side(kit.node(), 1), Side(kit.node(), 2)
    to = get_address(kit.node().listener(), "GetLocalAddress")
    assert connect(kit, side.connector, stranger.qp, to).result() == Status.INVALID_PARAMETER_1
    assert connect(kit, side.connector, None, to).result() == Status.INVALID_PARAMETER_1
    assert connect(kit, side.connector, side.cq, to).result() == Status.INVALID_PARAMETER_1


def test_h_4_2_a_queue_pair_released_meanwhile(kit):
    attempt = ConnectionAttempt(kit)
    attempt.active.qp.release()
    assert attempt.connecting.result() == Status.CANCELED


def test_h_4_5_exactly_the_limits_of_private_data(kit):
    node = kit.node()
    caller, callee = os.urandom(node.info.MaxCallerData), os.urandom(node.info.MaxCalleeData)
    attempt = ConnectionAttempt(kit, data=caller)
    assert private_data(attempt.passive.connector) == caller
    attempt.offer(data=callee)
    assert private_data(attempt.active.connector) == callee
    attempt.complete()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 56, 148])
def test_h_4_5_h_7_1_h_7_3_private_data_of_any_size_arrive_exactly(kit, size):
    there, back = os.urandom(size), os.urandom(size)
    attempt = ConnectionAttempt(kit, data=there)
    assert private_data(attempt.passive.connector) == there
    attempt.offer(data=back)
    assert private_data(attempt.active.connector) == back


def test_h_4_6_h_5_6_read_limits_above_the_adapters_are_lowered(kit):
    huge = 0xFFFFFFFF
    attempt = ConnectionAttempt(kit, limits=(huge, huge))
    info = attempt.active.node.info
    assert limits_of(attempt.passive.connector) == (info.MaxInboundReadLimit, info.MaxOutboundReadLimit)
    attempt.offer(limits=(huge, huge))
    assert limits_of(attempt.active.connector) == (info.MaxInboundReadLimit, info.MaxOutboundReadLimit)
    attempt.complete()


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_h_4_9_h_5_4_abandoned_before_accept_is_aborted(kit, how):
    attempt = ConnectionAttempt(kit)
    if how == "cancel":
        assert attempt.active.connector.CancelOverlappedRequests() == Status.SUCCESS
        assert attempt.connecting.result() == Status.CANCELED
    else:
        attempt.active.connector.release()
    time.sleep(0.3)  # time for the passive side to learn of it
    assert attempt.accept().result() == Status.CONNECTION_ABORTED


def test_h_4_10_the_last_release_of_a_connector_returns_0(kit):
    attempt = ConnectionAttempt(kit)
    other = attempt.active.node.connector()
    assert other.release() == 0
    attempt.offer()
    attempt.complete()
    assert attempt.active.connector.release() == 0
    assert attempt.passive.connector.release() == 0


@pytest.mark.parametrize("state", ["connecting", "requested", "offered", "accepting"])
def test_h_4_10_in_every_state(kit, state):
    attempt = ConnectionAttempt(kit)
    if state in ("offered", "accepting"):
        attempt.offer()
    side = attempt.active if state in ("connecting", "offered") else attempt.passive
    assert side.connector.release() == 0
