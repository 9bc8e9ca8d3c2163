"""soft0 beside a client whose process is stopped: its adapter is stopped with it, takes nothing and says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import DEADLINE_S, create_end, memory, statuses
from kit.processes import start_python

import ndpy
from ndpy import Status, aio

CLIENT = Path(__file__).parent / "programs" / "frozen_client.py"
HOST = "127.0.0.1"


@contextlib.contextmanager
def client_of(kind, address):
    with start_python(CLIENT, kind, *address) as process:
        try:
            yield process
        finally:
            process.popen.send_signal(signal.SIGCONT)


def freeze(client):
    client.popen.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, client.popen.pid, os.WSTOPPED)


@pytest.mark.parametrize("end", ["flush", "close", "disconnect", "close the connector"])
def test_requests_come_back_during_the_call_and_messages_are_delivered(keep, monkeypatch, end):
    """What the stopped client's host has received reaches its program when it goes on."""
    monkeypatch.setattr("ndpy.objects.queue_pair._FLUSH_S", 0.0)
    adapter = keep(ndpy.open_adapter("soft0"))
    server = create_end(keep, adapter)
    listener = keep(adapter.listen((HOST, 0)))
    sources = [memory(keep, adapter, text) for text in (b"one", b"two")]
    sink = memory(keep, adapter, 100)
    with client_of("message", listener.address) as client:
        connector = keep(listener.get_request(DEADLINE_S))
        connector.accept(server.queue_pair)
        client.wait_for("there")
        freeze(client)
        for number, source in enumerate(sources):
            server.queue_pair.send(source, context=number)
        server.queue_pair.receive(sink, context=2)
        assert server.cq.poll() == []
        if end == "disconnect":
            with contextlib.suppress(ndpy.TimeoutError):
                connector.disconnect(0)
        elif end == "close the connector":
            connector.close()
        if end != "flush":
            server.queue_pair.close()
            assert server.queue_pair._all_ended, "the adapter keeps requests of a queue pair that is closed"
        else:
            server.queue_pair.flush()
        completions = server.cq.poll()
        assert statuses(completions) == [Status.CANCELED] * 3
        if end == "flush":
            server.queue_pair.send(sources[0], context=3)
            assert statuses(server.cq.poll()) == [Status.CANCELED]
        # The memory belongs to the program again.
        for source in sources:
            memoryview(source.buffer)[:] = b"???"
        client.popen.send_signal(signal.SIGCONT)
        assert client.succeed().out.splitlines() == ["there", "SUCCESS one", "SUCCESS two", "CANCELED "]


@pytest.mark.parametrize("last_words", [False, True])
def test_ctrl_c_ends_a_server_within_a_second(monkeypatch, last_words):
    # Without an answer of the adapter, close() waits for long.
    monkeypatch.setattr("ndpy.objects.queue_pair._FLUSH_S", 20 * DEADLINE_S)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    at: list[float] = []

    async def handler(connection):
        try:
            while True:
                await connection.send(await connection.receive())
        finally:
            if last_words:
                with contextlib.suppress(ndpy.NdpyError):
                    await connection.send(b"last words")

    async def main():
        async with aio.serve((HOST, 0), handler, adapter="soft0") as server:
            client = stack.enter_context(client_of("aio", server.address))
            await asyncio.to_thread(client.wait_for, "there")
            freeze(client)
            asyncio.get_running_loop().call_soon(
                lambda: (at.append(time.monotonic()), signal.raise_signal(signal.SIGINT))
            )
            await server.serve_forever()

    try:
        with contextlib.ExitStack() as stack:
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(main())
            assert time.monotonic() - at[0] < patient(1.0)
    finally:
        signal.signal(signal.SIGINT, former)
