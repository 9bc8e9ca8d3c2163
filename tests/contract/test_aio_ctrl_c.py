"""Ctrl-C on programs of ndpy.aio: they end at once, whatever their peers do, and what was sent is delivered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time

import pytest
from kit.aio_ends import OPTIONS, echo, pattern, require_closed, require_usable
from kit.deadlines import patient
from kit.helpers import DEADLINE_S, STRESS, has_kernel_driver, host_of, require

import ndpy
from ndpy import aio
from ndpy.aio import life, transfers

pytestmark = pytest.mark.timeout(180)
# How long peers are waited for without Ctrl-C.
LONG_WAIT = {**OPTIONS, "close_timeout_s": 20 * DEADLINE_S}
PACKAGE = os.path.dirname(life.__file__)
# What runs in a machine or a Windows that is emulated: one test of each kind.
QUICK = {
    "test_a_server_ends_at_once_though_its_clients_do_nothing[finally-3-True]",
    "test_a_server_whose_handler_sends_a_long_message_ends_at_once[with]",
    "test_ctrl_c_ends_a_close_that_waits_for_clients[False]",
    "test_ctrl_c_ends_a_client_at_once_though_its_server_does_nothing[send_a_long_message]",
}


@pytest.fixture(autouse=True)
def long_waits(request, adapter, monkeypatch):
    """Without Ctrl-C everything takes long."""
    if has_kernel_driver(adapter) and not STRESS and request.node.name not in QUICK:
        pytest.skip(f"{adapter.info.name} is slow; NDPY_STRESS=1 runs all of these tests")
    monkeypatch.setattr(transfers, "_LET_GO_S", 20 * DEADLINE_S)


@pytest.fixture
def ends_within_s(adapter):
    return patient(4.0 if has_kernel_driver(adapter) else 1.0)


@pytest.fixture
def time_to_deliver(adapter, monkeypatch):
    """What was sent is delivered on a busy machine too."""
    monkeypatch.setattr(life, "_HURRY_S", patient(1.0 if has_kernel_driver(adapter) else 0.4))


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also where the tests run as a background job."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


class Clients:
    """Clients in threads of their own, each with a connection and a loop. They do nothing after their first exchange
    until end().

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


@pytest.fixture(params=["with", "finally", "bare"])
def serving(request, adapter):
    """A program that serves until Ctrl-C. bare: it never closes the server, so the loop ends all tasks."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def program(clients, handler=echo):
        async def main(interrupt):
            server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **LONG_WAIT)
            await asyncio.to_thread(clients.begin, server.address)
            asyncio.get_running_loop().call_soon(interrupt)
            if request.param == "with":
                async with server:
                    await server.serve_forever()
            else:
                try:
                    await server.serve_forever()
                finally:
                    if request.param == "finally":
                        await server.close()

        return main

    return program


@pytest.mark.parametrize(("count", "blocked"), [(1, False), (3, True)])
def test_a_server_ends_at_once_though_its_clients_do_nothing(
    adapter, serving, interrupts, time_to_deliver, count, blocked, ends_within_s
):
    clients = Clients(adapter, count, blocked=blocked)
    took_s = interrupted(serving(clients, echo_and_more))
    assert clients.end() == count * [([b"last words"], aio.ConnectionEndedError)]
    assert took_s < ends_within_s
    require_usable(adapter)


def test_a_server_whose_handler_sends_a_long_message_ends_at_once(adapter, serving, interrupts, ends_within_s):
    """The client's program takes no part, so it does not let go of the message."""

    async def handler(conn):
        await conn.send(await conn.receive())
        await conn.send(pattern(50_000))

    clients = Clients(adapter, 1, blocked=True)
    assert interrupted(serving(clients, handler)) < ends_within_s
    ((received, kind),) = clients.end()
    assert received == []
    assert issubclass(kind, ConnectionError)
    require_usable(adapter)


@pytest.mark.parametrize("blocked", [False, True])
def test_ctrl_c_ends_a_close_that_waits_for_clients(adapter, interrupts, time_to_deliver, blocked, ends_within_s):
    """Without Ctrl-C the program waits for them."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    clients = Clients(adapter, 1, blocked=blocked)

    async def main(interrupt):
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **LONG_WAIT) as server:
            await asyncio.to_thread(clients.begin, server.address)
            closing = asyncio.ensure_future(server.close())
            while not all(conn._life.state in ("closing", "leaving") for conn in server.connections):
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            assert not closing.done()
            asyncio.get_running_loop().call_soon(interrupt)
            await closing

    assert interrupted(main) < ends_within_s
    assert clients.end() == [([], aio.ConnectionEndedError)]
    require_usable(adapter)


@contextlib.contextmanager
def busy_server(adapter):
    """The address of a server whose loop stands still after it has returned a client's first message."""
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

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield address[0]
    finally:
        go_on.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


async def receive_in_block(client, interrupt):
    async with client:
        interrupt()
        await client.receive()


async def close_finally(client, interrupt):
    try:
        interrupt()
        await client.receive()
    finally:
        await client.close()


async def send_a_long_message(client, interrupt):
    async with client:
        interrupt()
        await client.send(pattern(50_000))


async def send_a_long_message_in_a_task(client, interrupt):
    """The loop cancels the task when the main task has ended."""
    sending = asyncio.ensure_future(client.send(pattern(50_000)))
    interrupt()
    await asyncio.sleep(DEADLINE_S)
    await sending


@pytest.mark.parametrize(
    "program", [receive_in_block, close_finally, send_a_long_message, send_a_long_message_in_a_task]
)
def test_ctrl_c_ends_a_client_at_once_though_its_server_does_nothing(adapter, interrupts, program, ends_within_s):
    if sys.version_info < (3, 11) and "long_message" in program.__name__:
        pytest.skip("asyncio.run() of Python 3.10 has no count of Ctrl-C")

    async def main(interrupt):
        client = await aio.connect(address, adapter=adapter, **LONG_WAIT)
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        # The steps that its tasks can take without the peer come first.
        loop = asyncio.get_running_loop()
        await program(client, lambda: loop.call_later(0.05, interrupt))

    with busy_server(adapter) as address:
        took_s = interrupted(main)
    assert took_s < ends_within_s


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Task.uncancel() came with Python 3.11")
def test_a_program_that_goes_on_after_ctrl_c_waits_for_its_peers(adapter, interrupts):
    """It has taken the cancellation back."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    waited: list = []

    async def handler(conn):
        assert await conn.receive() == b"hello"
        # Longer than it waits when the program is ended.
        await asyncio.sleep(0.6)
        waited.append(await conn.receive())

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **LONG_WAIT) as server:
            async with aio.connect(server.address, adapter=adapter, **LONG_WAIT) as client:
                try:
                    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                    await asyncio.sleep(DEADLINE_S)
                except asyncio.CancelledError:
                    assert client._hub.interrupts.is_ending
                    asyncio.current_task().uncancel()
                assert not client._hub.interrupts.is_ending
                await client.send(b"hello")
                await client.send(b"the last")
            assert waited == [b"the last"]

    asyncio.run(main())


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


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_second_ctrl_c_ends_a_server_at_once_wherever_it_comes(adapter, interrupts, ends_within_s, monkeypatch):
    """It comes while the first one's KeyboardInterrupt is on its way."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    # pytest keeps an exception that cannot be raised, and with it all that its frames refer to.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
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
        assert took_s < ends_within_s, f"line {chosen}"
        # What the second one has left is dropped, and may be in a circle. A program would have ended.
        gc.collect()
        clients.end()
        if not second.came:
            break
        chosen += step
    assert chosen > 5 * step
    require_usable(adapter)
    require_closed(adapter)
