"""Listeners: contract H.3. With --peer the listeners are here and their clients there, but for those of ask()."""

from __future__ import annotations

import time
import warnings

import pytest
from kit.helpers import (
    CLOCK_TICK_S,
    DEADLINE_S,
    QUIET_S,
    ask,
    connect_ends,
    create_end,
    establish,
    host_of,
    peer_of,
    require,
    send_message,
    wait_until,
)
from kit.threads import Elsewhere

import ndpy


@pytest.fixture
def listener(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return keep(adapter.listen((host_of(adapter), 0)))


def start(keep, adapter, address, **options):
    """Start a connection request of the peer. Returns its end and the pending operation."""
    peer = peer_of(adapter)
    end = create_end(keep, peer)
    end.connector = keep(peer.create_connector())
    return end, end.connector.begin_connect(end.queue_pair, address, **options)


def test_h_3_1_an_address_is_listened_on_once(adapter, listener):
    with pytest.raises(ndpy.AddressInUseError):
        adapter.listen(listener.address)
    with pytest.raises(OSError):
        adapter.listen(listener.address)


def test_h_3_1_an_address_that_is_not_the_adapters_is_refused(adapter):
    with pytest.raises(ndpy.AddressUnreachableError):
        adapter.listen(("203.0.113.77", 0))


@pytest.mark.parametrize("address", ["text", ("host",), ("192.0.2.1", 65536), ("192.0.2.1", -1), None])
def test_what_is_no_address_is_refused(adapter, address):
    with pytest.raises(ValueError):
        adapter.listen(address)


def test_h_3_3_the_wildcard_listens_on_every_address_of_the_adapter(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    everywhere = keep(adapter.listen(("", 0)))
    port = everywhere.address[1]
    assert port
    end, connecting = start(keep, adapter, (host_of(adapter), port))
    connector = keep(everywhere.get_request(DEADLINE_S))
    assert connector.local_address[:2] == (host_of(adapter), port)
    connector.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        connecting.result(DEADLINE_S)
    assert end.connector.state in {"bound", "idle"}


def test_h_3_5_the_address_has_the_port_that_was_chosen(adapter, listener):
    host, port = listener.address[:2]
    assert host == host_of(adapter)
    assert 1024 <= port <= 65535


def test_h_3_6_a_request_becomes_a_connector(adapter, keep, listener):
    _, connecting = start(keep, adapter, listener.address, private_data=b"who I am")
    connector = keep(listener.get_request(DEADLINE_S))
    assert connector.state == "requested"
    assert connector.private_data.startswith(b"who I am")
    assert not connector.private_data[8:].strip(b"\0")
    assert not connecting.done()


def test_get_request_times_out(listener):
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        listener.get_request(0.1)
    assert 0.1 - CLOCK_TICK_S <= time.monotonic() - begin < DEADLINE_S


def test_waits_that_were_given_up_leave_nothing_with_the_listener(adapter, keep, listener):
    for _ in range(50):
        with pytest.raises(ndpy.TimeoutError):
            listener.get_request(0)
        assert listener.begin_get_request().cancel()
    assert not listener._calls
    start(keep, adapter, listener.address, private_data=b"late")
    assert keep(listener.get_request(DEADLINE_S)).private_data.startswith(b"late")


def test_a_request_that_came_after_a_timeout_is_not_lost(adapter, keep, listener):
    with pytest.raises(ndpy.TimeoutError):
        listener.get_request(0.05)
    start(keep, adapter, listener.address, private_data=b"late")
    assert keep(listener.get_request(DEADLINE_S)).private_data.startswith(b"late")


def test_h_3_7_many_may_wait_and_are_served_in_order(adapter, keep, listener):
    waiting = [listener.begin_get_request() for _ in range(4)]
    for number in range(4):
        start(keep, adapter, listener.address, private_data=b"%d" % number)
        connector = keep(waiting[number].result(DEADLINE_S))
        assert connector.private_data[:1] == b"%d" % number
        assert not any(pending.done() for pending in waiting[number + 1 :])


def test_h_3_8_requests_wait_in_the_backlog(adapter, keep, listener):
    for number in range(3):
        start(keep, adapter, listener.address, private_data=b"%d" % number)
    connectors = [keep(listener.get_request(DEADLINE_S)) for _ in range(3)]
    assert sorted(connector.private_data[:1] for connector in connectors) == [b"0", b"1", b"2"]


def test_h_3_8_beyond_the_backlog_requests_are_refused(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    listener = keep(adapter.listen((host_of(adapter), 0), backlog=2))
    pendings = [start(keep, adapter, listener.address)[1] for _ in range(6)]
    wait_until(lambda: any(pending.done() for pending in pendings), "one of six is refused")
    time.sleep(QUIET_S)
    refused = [pending for pending in pendings if pending.done()]
    assert 1 <= len(refused) <= 4
    for pending in refused:
        with pytest.raises(ndpy.ConnectionRefusedError):
            pending.result(0)


def test_h_3_8_twelve_requests_wait_for_a_busy_listener(adapter, keep, listener):
    """The default backlog is 128."""
    pendings = [start(keep, adapter, listener.address)[1] for _ in range(12)]
    time.sleep(QUIET_S)
    connectors = [keep(listener.get_request(DEADLINE_S)) for _ in range(12)]
    assert {connector.state for connector in connectors} == {"requested"}
    assert not any(pending.done() for pending in pendings)
    assert listener.refused == 0


def test_refusals_are_counted_and_warned_of_once(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    listener = keep(adapter.listen((host_of(adapter), 0), backlog=2))
    assert listener.refused == 0
    pendings = [start(keep, adapter, listener.address)[1] for _ in range(5)]
    wait_until(lambda: sum(pending.done() for pending in pendings) == 3, "three of five are refused")
    assert listener.refused == 3
    with pytest.warns(
        RuntimeWarning, match=r"Listener at .* has refused 3 connection requests, since 2 waited already"
    ):
        first = keep(listener.get_request(DEADLINE_S))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = keep(listener.get_request(DEADLINE_S))
        pendings += [start(keep, adapter, listener.address)[1] for _ in range(3)]
        wait_until(lambda: listener.refused == 4, "one more is refused")
        third = keep(listener.get_request(DEADLINE_S))
    assert {first.state, second.state, third.state} == {"requested"}


def test_a_warning_that_is_an_error_loses_no_request(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    listener = keep(adapter.listen((host_of(adapter), 0), backlog=1))
    for _ in range(2):
        start(keep, adapter, listener.address, private_data=b"this one")
    wait_until(lambda: listener.refused, "one is refused")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            listener.begin_get_request()
        assert keep(listener.get_request(DEADLINE_S)).private_data.startswith(b"this one")


def test_a_backlog_is_not_negative(adapter):
    with pytest.raises(ValueError, match="backlog"):
        adapter.listen((host_of(adapter), 0), backlog=-1)


def test_h_3_10_closing_ends_the_waits(adapter):
    listener = adapter.listen((host_of(adapter), 0))
    waiting = [listener.begin_get_request() for _ in range(2)]
    thread = Elsewhere(lambda: listener.get_request(DEADLINE_S)).start()
    time.sleep(0.1)
    listener.close()
    for pending in (*waiting, thread):
        with pytest.raises(ndpy.CanceledError):
            pending.result(DEADLINE_S)
    with pytest.raises(ndpy.ClosedError):
        listener.begin_get_request()


def test_h_3_10_closing_refuses_the_requests_that_wait(adapter, keep, listener):
    pendings = [start(keep, adapter, listener.address)[1] for _ in range(2)]
    time.sleep(QUIET_S)
    listener.close()
    for pending in pendings:
        with pytest.raises(ndpy.ConnectionRefusedError):
            pending.result(DEADLINE_S)


def test_h_3_10_after_closing_connects_are_refused_and_the_address_is_free(adapter, keep, listener):
    address = listener.address
    listener.close()
    listener.close()
    _, connecting = start(keep, adapter, address)
    with pytest.raises(ndpy.ConnectionRefusedError):
        connecting.result(DEADLINE_S)
    keep(adapter.listen(address))


def test_h_3_10_connectors_given_out_outlive_the_listener(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, peer)
    offer = ask(keep, adapter, client.queue_pair)
    offer.listener.close()
    establish(offer, server.queue_pair)
    send_message(keep, client, server, b"still")


def test_connections_outlive_the_listener(adapter, keep, peer):
    """connect_ends() closes its listener as soon as the connection is made."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_ends(keep, adapter, create_end(keep, peer), create_end(keep, adapter))
    send_message(keep, pair.client, pair.server, b"still")


def test_h_3_11_a_burst_of_requests_is_served(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    count = 24
    listener = keep(adapter.listen((host_of(adapter), 0), backlog=0))
    cq, cq_of_peer = keep(adapter.create_completion_queue(8)), keep(peer.create_completion_queue(8))
    attempts = []
    for _ in range(count):
        connector = keep(peer.create_connector())
        queue_pair = keep(peer.create_queue_pair(cq_of_peer, receive_queue_depth=1, initiator_queue_depth=1))
        attempts.append((connector, connector.begin_connect(queue_pair, listener.address)))
    accepting = []
    for _ in range(count):
        queue_pair = keep(adapter.create_queue_pair(cq, receive_queue_depth=1, initiator_queue_depth=1))
        accepting.append(keep(listener.get_request(DEADLINE_S)).begin_accept(queue_pair))
    for connector, connecting in attempts:
        connecting.result(DEADLINE_S)
        connector.complete_connect(DEADLINE_S)
    for pending in accepting:
        pending.result(DEADLINE_S)


def test_an_ipv6_listener(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    listener = keep(adapter.listen((host_of(adapter, 6), 0)))
    assert listener.address[0] == host_of(adapter, 6)
