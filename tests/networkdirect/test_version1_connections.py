"""Connections over a provider of version 1: contract section I.6, from the client's side. See test_version1.py."""

from __future__ import annotations

import gc
import socket
import time
import warnings

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_works,
    connect_ends,
    connect_pair,
    contents,
    contexts,
    create_end,
    establish,
    host_of,
    memory,
    send_message,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.scenarios import connect_timeouts
from own_softnd import opened

import ndpy
from ndpy import Operation, Status
from ndpy.platforms.networkdirect.native_calls import TIMEOUT
from ndpy.platforms.networkdirect.version1 import connection as version1_connection


@pytest.fixture
def version():
    return 1


def test_i_6_1_receives_posted_before_there_is_an_endpoint(softnd):
    with opened(softnd) as (adapter, keep):
        client, server = create_end(keep, adapter, max_receive_sge=3), create_end(keep, adapter, max_receive_sge=3)
        inbox = memory(keep, adapter, b"." * 30)
        for end in (client, server):
            end.queue_pair.receive([inbox[0:2], inbox[4:6], inbox[8:12]], context=1)
            end.queue_pair.receive([], context=2)
            end.queue_pair.receive(inbox[20:30], context=3)
        pair = connect_ends(keep, adapter, client, server)
        server.queue_pair.receive(inbox[12:13], context=4)
        for data in (b"abcdefgh", b"", b"third", b"4"):
            client.queue_pair.send(memory(keep, adapter, data) if data else [])
        succeed(client.cq, 4)
        assert [(c.context, c.nbytes) for c in succeed(server.cq, 4)] == [(1, 8), (2, 0), (3, 5), (4, 1)]
        assert contents(inbox) == b"ab..cd..efgh4.......third....."
        pair.client.connector.disconnect(DEADLINE_S)
        assert statuses(take(client.cq, 3)) == [Status.CANCELED] * 3


def test_i_6_1_an_attempt_that_failed_leaves_the_receives(softnd):
    """The endpoint belongs to the connector that made it. The queue pair can go to another connector."""
    with opened(softnd) as (adapter, keep):
        client, server = create_end(keep, adapter), create_end(keep, adapter)
        inbox = memory(keep, adapter, 8)
        client.queue_pair.receive(inbox, context=5)
        for how in ("rejected", "given up", "refused by the client", "nobody listens"):
            if how == "nobody listens":
                with adapter.listen((host_of(adapter), 0)) as listener:
                    address = listener.address
                with pytest.raises(ndpy.ConnectionRefusedError):
                    adapter.connect(client.queue_pair, address, timeout_s=DEADLINE_S)
                continue
            offer = ask(keep, adapter, client.queue_pair)
            if how == "rejected":
                offer.server.reject(b"not now")
                with pytest.raises(ndpy.ConnectionRefusedError):
                    offer.connecting.result(DEADLINE_S)
            elif how == "given up":
                assert offer.connecting.cancel()
            else:
                other = create_end(keep, adapter)
                accepting = offer.server.begin_accept(other.queue_pair)
                offer.connecting.result(DEADLINE_S)
                offer.client.reject()
                with pytest.raises(ndpy.ConnectionRefusedError):
                    accepting.result(DEADLINE_S)
            assert client.queue_pair.connector is None
            assert client.cq.poll() == []
        pair = connect_ends(keep, adapter, client, server)
        send_message(keep, pair.client, pair.server, b"first")
        pair.server.queue_pair.send(memory(keep, adapter, b"to a receive of before"[:8]))
        (received,) = succeed(client.cq)
        assert (received.operation, received.context) == (Operation.RECEIVE, 5)
        assert contents(inbox) == b"to a rec"


def test_i_6_1_kept_receives_are_flushed_in_order(softnd):
    with opened(softnd) as (adapter, keep):
        end = create_end(keep, adapter)
        armed = end.cq.arm()
        for context in range(16):
            end.queue_pair.receive([], context=context)
        with pytest.raises(ndpy.QueueFullError):
            end.queue_pair.receive([])
        end.queue_pair.flush()
        armed.result(DEADLINE_S)
        completions = take(end.cq, 16)
        assert contexts(completions) == list(range(16))
        assert statuses(completions) == [Status.CANCELED] * 16
        # The queue pair can be connected again.
        pair = connect_ends(keep, adapter, end, create_end(keep, adapter))
        assert_works(keep, pair)


def test_i_6_1_the_endpoint_has_the_limits_of_its_connection(softnd):
    with opened(softnd) as (adapter, keep):
        client, server = create_end(keep, adapter), create_end(keep, adapter)
        offer = ask(keep, adapter, client.queue_pair, inbound_read_limit=4, outbound_read_limit=7)
        assert offer.server.read_limits == (7, 4)
        establish(offer, server.queue_pair, inbound_read_limit=5, outbound_read_limit=3)
        assert offer.client.read_limits == (3, 5)


def test_i_6_2_the_local_port(softnd, monkeypatch):
    with opened(softnd) as (adapter, keep):
        listener = keep(adapter.listen(("", 0)))
        assert listener.address[0] == "127.0.0.1"
        connector = keep(adapter.create_connector())
        connector.bind(("127.0.0.1", 50123))
        assert connector.local_address == ("127.0.0.1", 50123)
        client = create_end(keep, adapter)
        connecting = connector.begin_connect(client.queue_pair, listener.address)
        request = keep(listener.get_request(DEADLINE_S))
        assert request.peer_address == ("127.0.0.1", 50123)
        # The port is taken. If the program chose it, connect() fails. If ndpy chose it, ndpy chooses another one.
        other, late = create_end(keep, adapter), keep(adapter.create_connector())
        late.bind(("127.0.0.1", 50123))
        with pytest.raises(ndpy.AddressInUseError):
            late.connect(other.queue_pair, listener.address, timeout_s=DEADLINE_S)
        choices = iter([50123, 50123, 50124])
        monkeypatch.setattr(version1_connection, "_some_port", lambda: next(choices))
        free = keep(adapter.create_connector())
        free.bind(("", 0))
        assert free.local_address == ("127.0.0.1", 50123)
        again = free.begin_connect(other.queue_pair, listener.address)
        second = keep(listener.get_request(DEADLINE_S))
        assert second.peer_address == free.local_address == ("127.0.0.1", 50124)
        for refused, pending in ((request, connecting), (second, again)):
            refused.reject()
            with pytest.raises(ndpy.ConnectionRefusedError):
                pending.result(DEADLINE_S)
        with pytest.raises(ndpy.AddressUnreachableError, match=r"127\.0\.0\.1"):
            keep(adapter.create_connector()).bind(("203.0.113.7", 0))


def test_i_6_3_listening(softnd):
    with opened(softnd) as (adapter, keep):
        first = keep(adapter.listen(("127.0.0.1", 0)))
        assert first.address[1] >= 1024
        with pytest.raises(ndpy.AddressInUseError, match=str(first.address[1])):
            adapter.listen(first.address)
        with pytest.raises(ndpy.AddressUnreachableError, match=r"203\.0\.113\.7"):
            adapter.listen(("203.0.113.7", 0))
        port = first.address[1]
        first.close()
        assert keep(adapter.listen(("", port))).address == ("127.0.0.1", port)


def test_i_6_6_a_timeout_is_asked_again(softnd):
    with opened(softnd, connect_timeouts(3)) as (adapter, keep):
        begun = time.monotonic()
        pair = connect_pair(keep, adapter)
        # The provider answers at once each time. ndpy pauses between two attempts.
        assert time.monotonic() - begun > 2 * version1_connection._PAUSE_S
        assert pair.client.connector._unanswered == 3
        assert_works(keep, pair)


def test_i_6_6_a_timeout_that_comes_inline_is_asked_again(softnd, monkeypatch):
    connect = version1_connection.Version1Connector._connect_native
    calls = []

    def late(self, *arguments):
        calls.append(time.monotonic())
        return TIMEOUT if len(calls) < 4 else connect(self, *arguments)

    monkeypatch.setattr(version1_connection.Version1Connector, "_connect_native", late)
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        assert (len(calls), pair.client.connector._unanswered) == (4, 3)
        assert_works(keep, pair)


def test_i_6_6_until_the_callers_time_is_over(softnd):
    with opened(softnd, connect_timeouts(1_000_000)) as (adapter, keep):
        end = create_end(keep, adapter)
        end.queue_pair.receive([], context=1)
        connector = keep(adapter.create_connector())
        begun = time.monotonic()
        with pytest.raises(ndpy.TimeoutError) as caught:
            connector.connect(end.queue_pair, ("127.0.0.1", 7471), timeout_s=0.5)
        assert 0.4 < time.monotonic() - begun < DEADLINE_S
        # The message names both ends.
        for word in ("127.0.0.1 port 7471", "answered 127.0.0.1 within 0.5 s", "ND_TIMEOUT"):
            assert word in str(caught.value)
        assert (caught.value.native, connector.state) == (0x102, "failed")
        assert 2 <= connector._unanswered <= 8
        quiet = connector._unanswered
        time.sleep(0.3)
        assert connector._unanswered == quiet


def test_i_6_6_until_an_address_of_a_name_has_had_its_share_of_the_time(softnd, monkeypatch):
    """The share ends in a pause between two requests, or during one."""
    found = [(socket.AF_INET, ("127.0.0.1", port)) for port in (7471, 7472)]
    monkeypatch.setattr("ndpy.objects.connection_life.resolve_destinations", lambda host, port: list(found))
    with opened(softnd, connect_timeouts(1_000_000)) as (adapter, keep):
        end = create_end(keep, adapter)
        connector = keep(adapter.create_connector())
        begun = time.monotonic()
        with pytest.raises(ndpy.TimeoutError, match=r"server\.example \(127\.0\.0\.1\) port 7472"):
            connector.connect(end.queue_pair, ("server.example", 7471), timeout_s=0.5)
        assert 0.4 < time.monotonic() - begun < DEADLINE_S
        # The queue pair is unchanged.
        assert (end.queue_pair.connector, end.cq.poll()) == (None, [])


@pytest.mark.parametrize("how", ["cancelled", "connector closed", "queue pair closed", "dropped"])
def test_i_6_6_giving_up_between_two_attempts(softnd, how):
    for pause_s in (0, 0.05, 0.13):
        with opened(softnd, connect_timeouts(1_000_000)) as (adapter, keep):
            cq = keep(adapter.create_completion_queue(8))
            queue_pair = adapter.create_queue_pair(cq)
            connector = adapter.create_connector()
            connecting = connector.begin_connect(queue_pair, ("127.0.0.1", 7471))
            time.sleep(pause_s)
            if how == "cancelled":
                assert connecting.cancel()
            elif how == "connector closed":
                connector.close()
            elif how == "queue pair closed":
                queue_pair.close()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)
                    del connector, connecting, queue_pair
                    wait_until(lambda cq=cq: gc.collect() is not None and not cq._users, "they go")
                continue
            with pytest.raises(ndpy.CanceledError):
                connecting.result(DEADLINE_S)
            connector.close()
            queue_pair.close()
