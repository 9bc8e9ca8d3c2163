"""The peer is told once of the end of a connection. Some attempts end while they are given up. No device is needed."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from fake_verbs import opened
from kit.helpers import Replacing
from racing import DEADLINE_S, Elsewhere, wait_until

import ndpy
from ndpy import Endpoint
from ndpy.objects.connection import Connector
from ndpy.platforms.verbs import connection
from ndpy.platforms.verbs.native_calls import ffi, lib

SERVER = ("127.0.0.1", 4791)


adapter = opened()


@pytest.fixture
def connector(adapter, queue_pair):
    """The connector of a connected queue pair."""
    with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as connector:
        yield connector


def fail(identifier: Any) -> int:
    ffi.errno = errno.ENOMEM
    return -1


#: The extension's functions. rdma_disconnect() fails.
FAILING = Replacing(lib, rdma_disconnect=fail)


@pytest.fixture
def told(fake, connector):
    """A list of the calls of rdma_disconnect()."""
    return fake.calls_of("rdma_disconnect")


@pytest.mark.parametrize("closed", ["connector", "queue_pair"])
@pytest.mark.parametrize("disconnected", [False, True])
def test_the_peer_is_told_once(fake, connector, queue_pair, told, closed, disconnected):
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_DISCONNECTED
    if disconnected:
        connector.begin_disconnect()
    (connector if closed == "connector" else queue_pair).close()
    queue_pair.close()
    connector.close()
    assert len(told) == 1


def test_closing_a_queue_pair_sends_nothing_through_a_port_that_is_down(fake, adapter, connector, queue_pair, told):
    fake.device_event(adapter, lib.IBV_EVENT_PORT_ERR)
    wait_until(lambda: adapter.port_state == "down", "the port is down")
    queue_pair.close()
    assert not told
    fake.device_event(adapter, lib.IBV_EVENT_PORT_ACTIVE)
    wait_until(lambda: told, "the peer is told")


def test_the_port_that_counts_is_that_of_the_connection(fake, adapter, connector, queue_pair, told):
    """Port 1, on which the adapter was opened, goes down and comes back. The connection is one of port 2, which does
    not.
    """
    adapter._port_states |= {1: "active", 2: "down"}
    connector._id.port_num = 2
    queue_pair.close()
    assert not told
    with adapter.events() as events:
        fake.device_event(adapter, lib.IBV_EVENT_PORT_ACTIVE)
        events.get(DEADLINE_S)
        fake.device_event(adapter, lib.IBV_EVENT_PORT_ACTIVE)
        # The first one has been handled by now.
        events.get(DEADLINE_S)
    assert not told
    adapter._port_states[2] = "active"
    fake.device_event(adapter, lib.IBV_EVENT_PORT_ACTIVE)
    wait_until(lambda: told, "the peer is told")


def test_a_disconnect_that_failed_can_be_repeated(connector, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(connection, "lib", FAILING)
        with pytest.raises(ndpy.InsufficientResourcesError):
            connector.disconnect(DEADLINE_S)
    connector.disconnect(DEADLINE_S)
    assert connector.state == "disconnected"


def test_completions_are_delivered_although_the_peer_cannot_be_told_of_a_failure(fake, queue, connector, monkeypatch):
    connector.queue_pair.receive([], context=7)
    assert fake.complete(connector.queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "lib", FAILING)
        assert [completion.context for completion in queue.poll()] == [7]
        with pytest.raises(ndpy.InsufficientResourcesError):
            connector.disconnect(DEADLINE_S)
    connector.disconnect(DEADLINE_S)


def test_completions_are_delivered_although_the_connector_lets_go_of_the_queue_pair_meanwhile(fake, queue, connector):
    """It lets go after the check that the queue pair has a connector, and before the use."""
    queue_pair = connector.queue_pair

    class LettingGo:
        looks = 0

        def __get__(self, owner: Any, kind: type) -> Connector | None:
            if owner is not queue_pair:
                return owner.__dict__.get("connector") if owner is not None else None
            self.looks += 1
            return connector if self.looks == 1 else None

        def __set__(self, owner: Any, value: Any) -> None:
            owner.__dict__["connector"] = value

    queue_pair.receive([], context=7)
    assert fake.complete(queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ndpy.QueuePair, "connector", LettingGo(), raising=False)
        assert [completion.context for completion in queue.poll()] == [7]


class Watched:
    """A connector's lock. It calls released() each time it is free again."""

    def __init__(self, lock: Any, released: Any) -> None:
        self._lock, self._released, self._depth = lock, released, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        free = not self._depth
        self._lock.release()
        if free:
            self._released()


def test_an_attempt_that_succeeds_while_it_is_given_up_is_given_up_or_has_succeeded(fake, adapter, queue_pair):
    """The cancel comes as soon as the lock is free after the event."""
    with adapter.create_connector() as connector:
        answers: list[bool] = []

        def cancel() -> None:
            if connector.state == "offered" and not answers:
                answers.append(True)
                answers.append(pending.cancel())

        fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_CONNECT_RESPONSE
        lock = connector._state_lock
        connector._state_lock = Watched(lock, cancel)
        pending = connector.begin_connect(queue_pair, SERVER)
        fake.connection_event(connector, lib.RDMA_CM_EVENT_CONNECT_RESPONSE)
        wait_until(lambda: len(answers) == 2, "it was cancelled")
        connector._state_lock = lock
        assert answers == [True, False]
        pending.result(DEADLINE_S)
        assert connector.state == "offered"


@pytest.mark.parametrize("limit", ["inbound_read_limit", "outbound_read_limit"])
@pytest.mark.parametrize("value", [-1, 1.5, "4"])
def test_a_read_limit_that_is_no_number_of_reads_is_refused_at_once(fake, adapter, queue_pair, limit, value):
    with adapter.create_connector() as client:
        with pytest.raises(ValueError, match="a read limit is"):
            client.begin_connect(queue_pair, SERVER, **{limit: value})
        assert client.state == "idle"
    with adapter.listen(("127.0.0.1", 0)) as listener:
        fake.request(listener)
        with listener.get_request(DEADLINE_S) as server:
            with pytest.raises(ValueError, match="a read limit is"):
                server.begin_accept(queue_pair, **{limit: value})
            assert server.state == "requested"
    assert queue_pair.connector is None


@pytest.mark.parametrize("host", ["fe80::1%lo", "2001:db8::1"])
def test_a_client_on_a_link_is_told_with_the_interface_that_its_request_came_by(fake, adapter, host):
    """The kernel tells link-local addresses of RoCE without one. A server may connect back to the address."""
    with adapter.listen((host, 0)) as listener:
        fake.request(listener)
        with listener.get_request(DEADLINE_S) as server:
            assert (server.local_address[0], server.peer_address[0]) == (host, host)


def test_a_queue_pair_that_a_connector_takes_meanwhile_is_connected_to_no_endpoint(adapter, queue_pair):
    ends = [Endpoint(lid=1, qp_number=number, psn=1, gid=bytes(16), mtu=1024) for number in (1, 2)]
    queue_pair._local = ends[0]
    with adapter.create_connector() as connector, queue_pair._lock:
        connecting = Elsewhere(lambda: queue_pair.connect_endpoint(ends[1])).start()
        # The call has looked and waits for the lock.
        connecting.thread.join(0.05)
        queue_pair.connector = connector
    assert isinstance(connecting.outcome(), ndpy.ConnectionActiveError)
    queue_pair.connector = None
