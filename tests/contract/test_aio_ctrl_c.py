"""Ctrl-C on programs of ndpy.aio: they end at once, whatever their peers do, and what was sent is delivered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time

import pytest
from aio_ends import OPTIONS, echo, pattern, require_closed, require_usable
from deadlines import patient
from helpers import DEADLINE_S, STRESS, has_kernel_driver, host_of, require

import ndpy
from ndpy import aio
from ndpy.aio import connection

pytestmark = pytest.mark.timeout(180)
# How long peers are waited for without Ctrl-C.
LONG_WAIT = {**OPTIONS, "close_timeout_s": 20 * DEADLINE_S}
ENDS_WITHIN_S = patient(1.0)
PACKAGE = os.path.dirname(connection.__file__)


@pytest.fixture(autouse=True)
def in_user_space(adapter):
    if has_kernel_driver(adapter):
        pytest.skip(
            "the time limits are those of an engine in user space; a kernel's driver runs in an emulated machine here"
        )


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also where the tests run as a background job."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


class Clients:
    """Clients in threads of their own, each with a connection and a loop. They do nothing after their first exchange until end().

    blocked: their loops stand still meanwhile.
    """

    def __init__(self, adapter, count: int, *, blocked: bool = False) -> None:
        self._adapter, self._blocked, self._count = adapter, blocked, count
        self._go_on = threading.Event()
        self._ready = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        #: What each has received after end(), and how its connection ended.
        self.ends: list = []

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        client = await aio.connect(self.address, adapter=self._adapter, **LONG_WAIT)
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        await asyncio.to_thread(self._ready.wait, DEADLINE_S)
        if self._blocked:
            self._go_on.wait(DEADLINE_S)
        else:
            await asyncio.to_thread(self._go_on.wait, DEADLINE_S)
        received: list = []
        try:
            while True:
                received.append(await asyncio.wait_for(client.receive(), DEADLINE_S))
        except Exception as error:
            self.ends.append((received, type(error)))
        await client.close()

    def begin(self, address) -> None:
        self.address = address
        for thread in self._threads:
            thread.start()
        self._ready.wait(DEADLINE_S)

    def end(self) -> list:
        self._go_on.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return self.ends


async def echo_and_more(conn):
    """The last message comes when the program ends already."""
    try:
        await echo(conn)
    finally:
        with contextlib.suppress(ndpy.NdpyError):
            await conn.send(b"last words")


def interrupted(main) -> float:
    """Run a program that gets Ctrl-C. Returns how long it went on after that."""
    at = []

    async def noting():
        # What it would log keeps all of the program.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await main(lambda: (at.append(time.monotonic()), signal.raise_signal(signal.SIGINT)))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(noting())
    return time.monotonic() - at[0]


@pytest.fixture(params=["with", "bare"])
def serving(request, adapter):
    """A program that serves until Ctrl-C. bare: it never closes the server, so the loop ends all tasks."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def program(clients, handler=echo):
        async def main(interrupt):
            server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **LONG_WAIT)
            await asyncio.to_thread(clients.begin, server.address)
            asyncio.get_running_loop().call_soon(interrupt)
            if request.param == "bare":
                await server.serve_forever()
            else:
                async with server:
                    await server.serve_forever()

        return main

    return program


@pytest.mark.parametrize(("count", "blocked"), [(1, False), (3, True)])
def test_a_server_ends_at_once_though_its_clients_do_nothing(adapter, serving, interrupts, count, blocked):
    clients = Clients(adapter, count, blocked=blocked)
    took_s = interrupted(serving(clients, echo_and_more))
    assert clients.end() == count * [([b"last words"], aio.ConnectionEndedError)]
    assert took_s < ENDS_WITHIN_S
    require_usable(adapter)


def test_a_server_whose_handler_sends_a_long_message_ends_at_once(adapter, serving, interrupts):
    """The client's program takes no part, so it does not let go of the message."""

    async def handler(conn):
        await conn.send(await conn.receive())
        await conn.send(pattern(50_000))

    clients = Clients(adapter, 1, blocked=True)
    assert interrupted(serving(clients, handler)) < ENDS_WITHIN_S
    ((received, kind),) = clients.end()
    assert received == []
    assert issubclass(kind, ConnectionError)
    require_usable(adapter)


@pytest.mark.parametrize("blocked", [False, True])
def test_ctrl_c_ends_a_close_that_waits_for_clients(adapter, interrupts, blocked):
    """Without Ctrl-C the program waits for them."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    clients = Clients(adapter, 1, blocked=blocked)

    async def main(interrupt):
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **LONG_WAIT) as server:
            await asyncio.to_thread(clients.begin, server.address)
            closing = asyncio.ensure_future(server.close())
            while not all(conn._closing for conn in server.connections):
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            assert not closing.done()
            asyncio.get_running_loop().call_soon(interrupt)
            await closing

    assert interrupted(main) < ENDS_WITHIN_S
    assert clients.end() == [([], aio.ConnectionEndedError)]
    require_usable(adapter)


def test_ctrl_c_ends_a_client_at_once_though_its_server_does_nothing(adapter, interrupts):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    go_on, ready = threading.Event(), threading.Event()
    address = []

    async def handler(conn):
        await conn.send(await conn.receive())
        go_on.wait(DEADLINE_S)

    async def serve():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            address.append(server.address)
            ready.set()
            await asyncio.to_thread(go_on.wait, DEADLINE_S)

    async def main(interrupt):
        async with aio.connect(address[0], adapter=adapter, **LONG_WAIT) as client:
            await client.send(b"hello")
            assert await client.receive() == b"hello"
            asyncio.get_running_loop().call_soon(interrupt)
            await client.receive()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait(DEADLINE_S)
    took_s = interrupted(main)
    go_on.set()
    thread.join(DEADLINE_S)
    assert took_s < ENDS_WITHIN_S


class SecondSignal:
    """Ctrl-C once more when the main thread runs line number `chosen` of the package after begin()."""

    def __init__(self, chosen: int) -> None:
        self._left = chosen

    @property
    def came(self) -> bool:
        return self._left < 0

    def begin(self) -> None:
        frame = sys._getframe()
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_second_ctrl_c_ends_a_server_at_once_wherever_it_comes(adapter, interrupts):
    """It comes while the first one's KeyboardInterrupt is on its way."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    step, chosen = (5 if STRESS else 61), 0
    former = sys.gettrace()
    while True:
        second, clients = SecondSignal(chosen), Clients(adapter, 1)

        async def main(interrupt, second=second, clients=clients):
            async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **LONG_WAIT) as server:
                await asyncio.to_thread(clients.begin, server.address)
                asyncio.get_running_loop().call_soon(second.begin)
                asyncio.get_running_loop().call_soon(interrupt)
                await server.serve_forever()

        try:
            took_s = interrupted(main)
        finally:
            sys.settrace(former)
        assert took_s < ENDS_WITHIN_S, f"line {chosen}"
        clients.end()
        if not second.came:
            break
        chosen += step
    assert chosen > 5 * step
    require_usable(adapter)
    require_closed(adapter)
