"""Section H of the contract, H.5 to H.8: accepting, rejecting, a connector's queries, and the end."""

from __future__ import annotations

import functools
import os
import time

import pytest
from conftest import share
from connection_attempt import ConnectionAttempt, check_transfer, limits_of, reject
from consumer import (
    Kit,
    Side,
    accept,
    address_list,
    connect,
    establish,
    get_address,
    make_pair,
    private_data,
    wait_until,
)
from kit.threads import beside
from version2 import NULL, Kind, Status, ffi

IPV6 = "::1"


# H.5 CompleteConnect and Accept


def test_h_5_1_complete_connect_only_from_offered(kit):
    attempt = ConnectionAttempt(kit)
    invalid = Status.CONNECTION_INVALID
    assert kit.do(attempt.active.node.connector(), "CompleteConnect") == invalid
    assert kit.do(attempt.active.connector, "CompleteConnect") == invalid
    assert kit.do(attempt.passive.connector, "CompleteConnect") == invalid
    attempt.offer()
    attempt.complete()
    assert kit.do(attempt.active.connector, "CompleteConnect") == invalid


def test_h_5_3_a_queue_pair_of_another_adapter_is_refused(kit):
    attempt = ConnectionAttempt(kit)
    wrong = accept(kit, attempt.passive.connector, attempt.active.qp)
    assert wrong.result().failed
    assert accept(kit, attempt.passive.connector, None).result().failed
    attempt.offer()
    attempt.complete()


def test_h_5_4_m_18_argument_errors_of_accept_leave_the_state(kit):
    attempt = ConnectionAttempt(kit)
    passive = attempt.passive
    too_long = accept(kit, passive.connector, passive.qp, data=b"x" * (passive.node.info.MaxCalleeData + 1))
    assert too_long.result() == Status.INVALID_BUFFER_SIZE
    bad = kit.issue(passive.connector, "Accept", passive.qp, 1, 1, NULL, 4)
    assert bad.result() == Status.ACCESS_VIOLATION
    assert attempt.connecting.pending()
    attempt.offer()
    attempt.complete()


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
    check_transfer(active, passive)


def test_h_5_4_a_queue_pair_released_while_accepting(kit):
    attempt = ConnectionAttempt(kit)
    attempt.offer()
    attempt.passive.qp.release()
    assert attempt.accepting.result() == Status.CANCELED


def test_h_5_5_accept_succeeds_though_the_active_side_disconnects_at_once(kit):
    for _ in range(20):
        attempt = ConnectionAttempt(kit)
        attempt.offer()
        kit.issue(attempt.active.connector, "CompleteConnect")
        kit.issue(attempt.active.connector, "Disconnect")
        assert attempt.accepting.result() in (Status.SUCCESS,)


def test_h_5_7_data_may_arrive_before_accept_was_observed(kit):
    attempt = ConnectionAttempt(kit)
    passive, active = attempt.passive, attempt.active
    passive.receive(passive.region.sge(0, 8), context=1)
    attempt.offer()
    assert kit.do(active.connector, "CompleteConnect") == Status.SUCCESS
    active.send(active.region.sge(0, 8))
    assert passive.one().status == Status.SUCCESS
    assert active.one().status == Status.SUCCESS
    assert attempt.accepting.result() == Status.SUCCESS


# H.6 Reject


def test_h_6_1_a_passive_reject_refuses_with_data(kit):
    attempt = ConnectionAttempt(kit)
    data = os.urandom(attempt.passive.node.info.MaxCalleeData)
    assert reject(attempt.passive.connector, data) == Status.SUCCESS
    assert attempt.connecting.result() == Status.CONNECTION_REFUSED
    assert private_data(attempt.active.connector) == data


def test_h_6_3_errors_of_reject_leave_the_state(kit):
    attempt = ConnectionAttempt(kit)
    connector = attempt.passive.connector
    limit = attempt.passive.node.info.MaxCalleeData
    assert reject(connector, b"x" * (limit + 1)) == Status.INVALID_BUFFER_SIZE
    assert connector.Reject(NULL, 4) == Status.ACCESS_VIOLATION
    assert connector.Reject(ffi.cast("void *", 0x10), 4) == Status.ACCESS_VIOLATION
    attempt.offer()
    attempt.complete()


def test_h_6_3_reject_in_another_state_is_refused(kit, pair):
    active, passive = pair
    for connector in (active.connector, passive.connector, active.node.connector(), active.node.bound_connector()):
        assert reject(connector) == Status.CONNECTION_INVALID
    check_transfer(active, passive)
    attempt = ConnectionAttempt(kit)
    assert reject(attempt.active.connector) == Status.CONNECTION_INVALID
    attempt.offer()
    attempt.complete()


def test_h_6_3_reject_after_the_peer_has_gone_is_aborted(kit):
    attempt = ConnectionAttempt(kit)
    attempt.active.connector.release()
    time.sleep(0.3)  # time for the passive side to learn of it
    assert reject(attempt.passive.connector) == Status.CONNECTION_ABORTED


# H.7 Queries


def test_h_7_1_private_data_when_there_can_be_none(kit, node):
    size = ffi.new("uint32_t *", 0)
    for connector in (node.connector(), node.bound_connector()):
        assert connector.GetPrivateData(NULL, size) == Status.CONNECTION_INVALID
    attempt = ConnectionAttempt(kit)
    assert attempt.active.connector.GetPrivateData(NULL, size) == Status.CONNECTION_INVALID


def test_h_7_2_the_part_that_fits_is_copied(kit):
    attempt = ConnectionAttempt(kit, data=b"0123456789")
    connector = attempt.passive.connector
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
    attempt = ConnectionAttempt(kit, data=b"mine")
    attempt.active.connector.release()
    size, data = ffi.new("uint32_t *", 64), ffi.new("char[64]")
    wait_until(
        lambda: attempt.passive.connector.GetPrivateData(data, size) == Status.CONNECTION_ABORTED,
        "the passive side learns of it",
    )


def test_h_7_5_read_limits_are_seen_from_the_caller(kit):
    attempt = ConnectionAttempt(kit, limits=(4, 7))
    assert limits_of(attempt.passive.connector) == (7, 4)
    attempt.offer(limits=(5, 3))
    assert limits_of(attempt.active.connector) == (3, 5)
    assert attempt.active.connector.GetReadLimits(NULL, NULL) == Status.SUCCESS
    attempt.complete()


def test_h_7_6_read_limits_in_other_states(kit, pair):
    active, passive = pair
    out = ffi.new("uint32_t *")
    attempt = ConnectionAttempt(kit)
    for connector in (
        active.connector, passive.connector, active.node.connector(), active.node.bound_connector(),
        attempt.active.connector,
    ):  # fmt: skip
        assert connector.GetReadLimits(out, out) == Status.CONNECTION_INVALID


def test_h_7_7_h_7_8_addresses(kit):
    attempt = ConnectionAttempt(kit)
    requested = attempt.passive.connector
    mine = get_address(attempt.active.connector, "GetLocalAddress")
    assert get_address(requested, "GetPeerAddress") == mine
    assert get_address(requested, "GetLocalAddress") == attempt.to
    attempt.offer()
    attempt.complete()
    assert get_address(attempt.active.connector, "GetPeerAddress") == attempt.to
    assert get_address(requested, "GetPeerAddress") == mine
    for method in ("GetLocalAddress", "GetPeerAddress"):
        size, data = ffi.new("uint32_t *", 15), ffi.new("unsigned char[]", b"\xa5" * 28)
        assert getattr(attempt.active.connector, method)(data, size) == Status.BUFFER_OVERFLOW
        assert (size[0], bytes(ffi.buffer(data, 28))) == (16, b"\xa5" * 28)
        size[0] = 0
        assert getattr(attempt.active.connector, method)(NULL, size) == Status.BUFFER_OVERFLOW


def test_h_7_7_addresses_of_an_idle_connector(node):
    size, data = ffi.new("uint32_t *", 28), ffi.new("unsigned char[28]")
    for method in ("GetLocalAddress", "GetPeerAddress"):
        assert getattr(node.connector(), method)(data, size) == Status.CONNECTION_INVALID


def test_h_ipv6(kit):
    if IPV6 not in address_list(kit.provider):
        pytest.skip("this machine has no IPv6 loopback address")
    attempt = ConnectionAttempt(kit, address=IPV6, data=b"six")
    assert private_data(attempt.passive.connector) == b"six"
    assert get_address(attempt.passive.connector, "GetPeerAddress")[0] == IPV6
    attempt.offer()
    attempt.complete()
    size = ffi.new("uint32_t *", 27)
    assert attempt.active.connector.GetPeerAddress(ffi.new("char[28]"), size) == Status.BUFFER_OVERFLOW
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
    attempt = ConnectionAttempt(kit)
    invalid = Status.CONNECTION_INVALID
    for connector in (attempt.active.connector, attempt.passive.connector, attempt.active.node.bound_connector()):
        assert kit.issue(connector, "NotifyDisconnect").returned == invalid
        assert kit.do(connector, "Disconnect") == invalid
    attempt.offer()
    attempt.complete()


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
    active.transfer(Kind.WRITE, active.region.sge(0, 8), 0, 1, Status.ACCESS_VIOLATION)
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
    check_transfer(active, passive)
    check_transfer(passive, active)


def test_h_many_threads_connect_at_once(kit):
    passive_node = kit.node()
    listener = passive_node.listener()

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
        finally:
            mine.close()

    with beside(*(functools.partial(work, number) for number in range(4)), timeout_s=60):
        for _ in range(4 * share(30, 5)):
            side = Side(passive_node, 0)
            assert kit.do(listener, "GetConnectionRequest", side.connector) == Status.SUCCESS
            number = int(private_data(side.connector))
            accepting = accept(kit, side.connector, side.qp)
            assert accepting.result() == Status.SUCCESS
            side.send(side.region.sge(0, number + 1))
            assert side.one().status == Status.SUCCESS
