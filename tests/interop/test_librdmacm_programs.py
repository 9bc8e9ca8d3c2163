"""rdma_server, rdma_client, ucmatose and cmtime of rdmacm-utils: nothing that they send is lost, even if ndpy is
late.
"""

from __future__ import annotations

import time

import pytest
from kit.helpers import (
    DEADLINE_S,
    End,
    assert_quiet,
    create_end,
    host_of,
    memory,
    require_acknowledged_sends,
    sample,
    succeed,
    take,
)
from kit.processes import Process, free_port, start_program, wait_for_rdma_listener

import ndpy
from ndpy import Status
from ndpy.platforms.verbs import distribution

PROGRAMS = distribution.CONNECTION_PROGRAMS
# Their message finds no receive posted for this long. A message of ndpy's would give up after 0.7 s.
LATE_S = 2.0
SIZE = 16


def accepted(keep, listener: ndpy.Listener, end: End) -> ndpy.Connector:
    connector = keep(listener.get_request(DEADLINE_S))
    connector.accept(end.queue_pair, timeout_s=DEADLINE_S)
    return connector


def connected(keep, end: End, port: int) -> ndpy.Connector:
    return keep(end.adapter.connect(end.queue_pair, (host_of(end.adapter), port), timeout_s=DEADLINE_S))


def start(config: pytest.Config, name: str, *arguments: object) -> Process:
    return start_program(config, name, PROGRAMS, *map(str, arguments))


def test_rdma_server_waits_for_a_receive_that_is_posted_late(adapter, keep, pytestconfig):
    require_acknowledged_sends(adapter)
    port = free_port()
    end = create_end(keep, adapter)
    with start(pytestconfig, "rdma_server", "-p", port) as server:
        wait_for_rdma_listener(server, port)
        connector = connected(keep, end, port)
        end.queue_pair.send(memory(keep, adapter, SIZE))
        succeed(end.cq)
        # The server answers at once.
        assert_quiet(end.cq, LATE_S)
        end.queue_pair.receive(memory(keep, adapter, SIZE))
        (received,) = succeed(end.cq)
        assert received.nbytes == SIZE
        connector.disconnect(DEADLINE_S)
        server.succeed()


def test_rdma_client_waits_for_a_receive_that_is_posted_late(adapter, keep, pytestconfig):
    require_acknowledged_sends(adapter)
    end = create_end(keep, adapter)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    with start(pytestconfig, "rdma_client", "-s", listener.address[0], "-p", listener.address[1]) as client:
        connector = accepted(keep, listener, end)
        # The client sends at once.
        assert_quiet(end.cq, LATE_S)
        end.queue_pair.receive(memory(keep, adapter, SIZE))
        (received,) = succeed(end.cq)
        assert received.nbytes == SIZE
        end.queue_pair.send(memory(keep, adapter, SIZE))
        succeed(end.cq)
        client.succeed()
        connector.wait_disconnected(DEADLINE_S)


@pytest.mark.parametrize("attempt", sample(list(range(10)), 4))
def test_connecting_to_a_server_that_accepts_and_leaves(adapter, keep, pytestconfig, attempt):
    """ucmatose -C 0 sends no messages, and disconnects as soon as the connection is made."""
    end = create_end(keep, adapter)
    end.queue_pair.receive([], context=1)
    port = free_port()
    with start(pytestconfig, "ucmatose", "-C", 0, "-p", port) as server:
        wait_for_rdma_listener(server, port)
        connector = connected(keep, end, port)
        connector.wait_disconnected(DEADLINE_S)
        (cancelled,) = take(end.cq)
        assert (cancelled.context, cancelled.status) == (1, Status.CANCELED)
        connector.disconnect(DEADLINE_S)
        server.succeed()


def test_a_busy_server_refuses_none_of_twelve_clients(adapter, keep, pytestconfig):
    """ucmatose -c 12 asks for twelve connections at once, and fails if one is refused."""
    count = 12
    listener = keep(adapter.listen((host_of(adapter), 0)))
    options = ("-s", listener.address[0], "-p", listener.address[1], "-c", count, "-C", 0)
    with start(pytestconfig, "ucmatose", *options) as client:
        deadline = time.monotonic() + LATE_S
        while time.monotonic() < deadline and client.popen.poll() is None:
            time.sleep(0.05)
        connectors = [accepted(keep, listener, create_end(keep, adapter)) for _ in range(count)]
        for connector in connectors:
            connector.disconnect(DEADLINE_S)
        client.succeed()
    assert listener.refused == 0


TIMED = 8


def test_cmtime_makes_connections_to_our_listener(adapter, keep, pytestconfig):
    """It prints how long each step took for all connections."""
    listener = keep(adapter.listen((host_of(adapter), 0)))
    options = ("-s", listener.address[0], "-p", listener.address[1], "-c", TIMED)
    with start(pytestconfig, "cmtime", *options) as client:
        connectors = [accepted(keep, listener, create_end(keep, adapter)) for _ in range(TIMED)]
        for connector in connectors:
            connector.wait_disconnected(DEADLINE_S)
        result = client.succeed()
    assert "destroy  " in result.out


def test_our_connections_to_cmtime_s_server(adapter, keep, pytestconfig):
    port = free_port()
    with start(pytestconfig, "cmtime", "-b", host_of(adapter), "-p", port, "-c", TIMED) as server:
        wait_for_rdma_listener(server, port)
        connectors = [connected(keep, create_end(keep, adapter), port) for _ in range(TIMED)]
        for connector in connectors:
            connector.disconnect(DEADLINE_S)
        assert server.popen.poll() is None or server.succeed()
