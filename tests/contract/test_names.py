"""Connecting to a host name: it is looked up elsewhere, and all of its addresses are tried within one time."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time

import pytest
from kit.aio_ends import OPTIONS, echo, settle, until
from kit.deadlines import patient
from kit.helpers import CLOCK_TICK_S, DEADLINE_S, create_end, host_of, require, wait_until
from kit.threads import beside

import ndpy
from ndpy import aio

NAME = "server.example"


class Names:
    """Stands in for the system's resolver. found: the (host, port) of the name, or None: there is no such name."""

    def __init__(self, monkeypatch) -> None:
        self._real = socket.getaddrinfo
        self.found: list | None = []
        self.threads: list[threading.Thread] = []
        self.answers = threading.Event()
        self.answers.set()
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host, port, *arguments, **options):
        if host != NAME:
            return self._real(host, port, *arguments, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not numeric")
        self.threads.append(threading.current_thread())
        self.answers.wait(DEADLINE_S)
        if self.found is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [self._real(host, port, type=socket.SOCK_STREAM)[0] for host, port in self.found]


@pytest.fixture
def names(adapter, monkeypatch):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return Names(monkeypatch)


@pytest.fixture
def deaf(adapter, keep):
    """The (host, port) of somebody who takes the connection of an adapter that connects over TCP, and says nothing."""
    if adapter.info.driver not in ("softverbs", "softnd.dll", "siw"):
        pytest.skip("only an adapter that connects over TCP has such a peer")
    with socket.create_server((host_of(adapter), 0), backlog=8) as listening:
        yield listening.getsockname()


@pytest.fixture
def share_s(adapter):
    """The time for an address that is silent. A connection is made within less, under Wine and in an emulated machine
    too.

    siw's kernel gives an address up by itself after ten seconds.
    """
    return min(patient({"siw": 6.0, "softnd.dll": 0.7}.get(adapter.info.driver, 0.25)), 9.0)


@pytest.fixture
def closed_port(adapter):
    """A (host, port) where nobody listens."""
    with adapter.listen((host_of(adapter), 0)) as listener:
        return listener.address


@pytest.fixture
def listener(adapter, keep):
    return keep(adapter.listen((host_of(adapter), 0)))


@pytest.fixture
def attempt(adapter, keep):
    """A queue pair and a connector for one connect()."""
    return create_end(keep, adapter).queue_pair, keep(adapter.create_connector())


def test_a_name_is_looked_up_in_another_thread(names, listener, attempt):
    queue_pair, connector = attempt
    names.found = [listener.address]
    names.answers.clear()
    pending = connector.begin_connect(queue_pair, (NAME, listener.address[1]))
    assert connector.state == "connecting"
    assert not pending.done()
    names.answers.set()
    with listener.get_request(DEADLINE_S) as request:
        request.reject()
        with pytest.raises(ndpy.ConnectionRefusedError):
            pending.result(DEADLINE_S)
    assert threading.current_thread() not in names.threads


def test_a_name_that_is_unknown_ends_the_call_and_the_connector_can_try_again(names, listener, attempt):
    queue_pair, connector = attempt
    names.found = None
    with pytest.raises(ndpy.AddressUnreachableError, match="no such name"):
        connector.connect(queue_pair, (NAME, 1), timeout_s=DEADLINE_S)
    assert connector.state == "idle"
    names.found = [listener.address]
    pending = connector.begin_connect(queue_pair, (NAME, 1))
    listener.get_request(DEADLINE_S).close()
    with pytest.raises(ndpy.NdpyError):
        pending.result(DEADLINE_S)


def test_a_resolver_that_does_not_answer_is_not_waited_for(names, listener, attempt):
    queue_pair, connector = attempt
    names.found = [listener.address]
    names.answers.clear()
    begin = time.monotonic()
    with pytest.raises(ndpy.TimeoutError):
        connector.connect(queue_pair, (NAME, 1), timeout_s=0.05)
    assert time.monotonic() - begin < patient(2.0)
    names.answers.set()
    wait_until(lambda: not names.threads[0].is_alive(), "the thread has ended")
    assert connector.state == "failed"
    with pytest.raises(ndpy.TimeoutError):
        listener.get_request(0.05)


def test_a_connector_can_be_closed_while_its_name_is_looked_up(names, attempt):
    queue_pair, connector = attempt
    names.answers.clear()
    pending = connector.begin_connect(queue_pair, (NAME, 1))
    connector.close()
    with pytest.raises(ndpy.CanceledError):
        pending.result(DEADLINE_S)
    names.answers.set()
    wait_until(lambda: not names.threads[0].is_alive(), "the thread has ended")


def test_all_addresses_of_a_name_are_tried_in_turn(names, listener, attempt, closed_port):
    queue_pair, connector = attempt
    names.found = [closed_port, closed_port, listener.address]
    pending = connector.begin_connect(queue_pair, (NAME, 1))
    with listener.get_request(DEADLINE_S) as request:
        request.reject()
        with pytest.raises(ndpy.ConnectionRefusedError, match=r"all 2 addresses of server\.example were tried"):
            pending.result(DEADLINE_S)
    assert connector.state == "idle"


def test_an_address_that_is_silent_gets_an_equal_share_of_the_time(names, listener, attempt, deaf, share_s):
    queue_pair, connector = attempt
    names.found = [deaf, (deaf[0], deaf[1]), listener.address]
    begin = time.monotonic()

    with beside(lambda: listener.get_request(DEADLINE_S).reject()):
        with pytest.raises(ndpy.ConnectionRefusedError):
            connector.connect(queue_pair, (NAME, 1), timeout_s=2 * share_s)
        took_s = time.monotonic() - begin
    assert share_s * 0.9 < took_s < 2 * share_s


def test_the_time_bounds_all_addresses_together(names, attempt, deaf):
    queue_pair, connector = attempt
    with socket.create_server((deaf[0], 0), backlog=8) as second:
        names.found = [deaf, second.getsockname()]
        begin = time.monotonic()
        with pytest.raises(ndpy.TimeoutError):
            connector.connect(queue_pair, (NAME, 1), timeout_s=0.3)
        assert 0.25 < time.monotonic() - begin < 0.3 + patient(1.0)


def test_one_connect_of_the_adapter_has_one_time(adapter, keep, listener):
    """The server accepts late, and never sees the end of it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    left: list[float] = []
    kind = adapter._classes.connector

    class Late(kind):
        def connect(self, *arguments, timeout_s, **options):
            left.append(timeout_s)
            time.sleep(0.1)

        def complete_connect(self, timeout_s):
            left.append(timeout_s)

    Late.__abstractmethods__ = frozenset()
    queue_pair = create_end(keep, adapter).queue_pair
    adapter._classes = dataclasses.replace(adapter._classes, connector=Late)
    try:
        keep(adapter.connect(queue_pair, listener.address, timeout_s=10.0))
    finally:
        del adapter._classes
    assert left[0] == 10.0
    assert left[1] <= 9.9 + CLOCK_TICK_S


def connect_once(adapter, found, names, **options):
    """Connect to a server of ndpy.aio under its name. found: addresses before the server's."""

    async def main():
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
            names.found = [*found, server.address]
            async with aio.connect((NAME, 1), adapter=adapter, **{**OPTIONS, **options}) as client:
                assert client.peer_address[1] == server.address[1]
                await client.send(b"x")
                assert await client.receive() == b"x"
        assert not adapter._device._open_children()

    asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))


def test_a_connection_of_a_loop_tries_all_addresses(adapter, names, closed_port):
    connect_once(adapter, [closed_port, closed_port], names)
    assert threading.main_thread() not in names.threads


def test_a_connection_of_a_loop_passes_over_an_address_that_is_silent(adapter, names, deaf, share_s):
    connect_once(adapter, [deaf], names, timeout_s=2 * share_s)


async def test_a_connection_of_a_loop_goes_on_while_the_driver_holds_the_attempt_before(
    adapter, names, closed_port, monkeypatch
):
    """Quirk.IWARP_DESTROY_WAITS. Closing the connection waits for it."""
    let_go, held = threading.Event(), []
    free_natively = aio.Connection._free_natively

    def free(connection):
        if connection._messages.protocol is None:
            held.append(connection)
            assert let_go.wait(DEADLINE_S), "nobody has let the driver go on"
        free_natively(connection)

    monkeypatch.setattr(aio.Connection, "_free_natively", free)
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
        names.found = [closed_port, (closed_port[0], closed_port[1] - 1), server.address]
        client = await aio.connect((NAME, 1), adapter=adapter, **OPTIONS)
        try:
            await until(lambda: len(held) == 2)
            await client.send(b"x")
            assert await client.receive() == b"x"
            closing = asyncio.ensure_future(client.close())
            await client.wait_closed()
            await settle()
            assert not closing.done()
        finally:
            let_go.set()
        await closing
        assert all(connection._life.state == "free" for connection in held)
    assert not adapter._device._open_children()


async def test_a_connection_of_a_loop_leaves_nothing_when_no_address_answers(adapter, names, closed_port):
    names.found = [closed_port, (closed_port[0], closed_port[1] - 1)]
    with pytest.raises(ndpy.ConnectionRefusedError):
        await aio.connect((NAME, 1), adapter=adapter, **OPTIONS)
    names.found = None
    with pytest.raises(ndpy.AddressUnreachableError, match="no such name"):
        await aio.connect((NAME, 1), adapter=adapter, **OPTIONS)
    assert not adapter._device._open_children()
