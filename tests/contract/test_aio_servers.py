"""Servers of ndpy.aio, and peers that speak something else."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aio_ends import LONG, OPTIONS, SHORT, echo, pattern, require_closed, require_usable, wait_for
from helpers import DEADLINE_S, host_of, require

import ndpy
from ndpy import aio

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]


def reports_of(main):
    """Run a program. Returns what reached the loop's exception handler."""
    reported = []

    async def listening():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        await main()

    asyncio.run(listening())
    return reported


def test_a_handler_that_raises_ends_its_connection_only(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        message = await connection.receive()
        if message == b"bad":
            raise ZeroDivisionError("the handler's fault")
        await connection.send(message)

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as bad:
                await bad.send(b"bad")
                with pytest.raises(aio.ConnectionResetError):
                    await bad.receive()
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as good:
                await good.send(b"good")
                assert await good.receive() == b"good"

    (context,) = reports_of(main)
    assert isinstance(context["exception"], ZeroDivisionError)
    assert "the handler of a client" in context["message"]


def test_the_error_of_a_handler_is_reported_though_the_server_is_closed_meanwhile(adapter):
    """The handler's task is cancelled while its connection ends."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await connection.receive()
        task = asyncio.current_task()
        connection._ended.add_done_callback(lambda _: task.cancel())
        raise ZeroDivisionError("the handler's fault")

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
                await client.send(b"x")
                with pytest.raises(aio.ConnectionResetError):
                    await client.receive()
            await wait_for(lambda: not server.connections)

    (context,) = reports_of(main)
    assert isinstance(context["exception"], ZeroDivisionError)


def test_a_fault_of_the_package_ends_one_connection(run, adapter, monkeypatch):
    reported = []

    async def scene(client, server):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        monkeypatch.setattr(server._protocol, "receive", lambda data: 1 / 0)
        await client.send(b"x")
        with pytest.raises(aio.ConnectionResetError, match="ZeroDivisionError"):
            await server.receive()
        with pytest.raises(aio.ConnectionResetError):
            await client.receive()
        async with (
            aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as another,
            aio.connect(another.address, adapter=adapter, **OPTIONS) as connection,
        ):
            await connection.send(b"good")
            assert await connection.receive() == b"good"

    run(scene)
    (context,) = reported
    assert isinstance(context["exception"], ZeroDivisionError)


def test_closing_the_server_ends_its_connections(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await asyncio.sleep(3600)

    async def main():
        server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
        serving = asyncio.ensure_future(server.serve_forever())
        async with aio.connect(server.address, adapter=adapter, **{**OPTIONS, "close_timeout_s": 0.2}) as client:
            await wait_for(lambda: server.connections)
            closing = asyncio.ensure_future(server.close())
            with pytest.raises(ConnectionError):
                await client.receive()
        await closing
        await serving
        with pytest.raises((ndpy.ConnectionRefusedError, ndpy.TimeoutError)):
            await aio.connect(server.address, adapter=adapter, timeout_s=3)

    asyncio.run(main())


def test_a_server_that_is_closed_delivers_what_its_handlers_have_sent(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await connection.send(b"sent")
        await asyncio.sleep(3600)

    async def main():
        server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
        async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
            await wait_for(lambda: client._inbox)
            closing = asyncio.ensure_future(server.close())
            assert [message async for message in client] == [b"sent"]
        await closing

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_nobody_listens(adapter):
    async def main():
        with adapter.listen((host_of(adapter), 0)) as listener:
            address = listener.address
        with pytest.raises((ndpy.ConnectionRefusedError, ndpy.TimeoutError)):
            await aio.connect(address, adapter=adapter, timeout_s=3)

    asyncio.run(main())


def test_an_option_out_of_range_is_refused(adapter):
    for options in ({"slots": 0}, {"slot_size": 63}, {"offers": 65}, {"max_message_length": -1}):
        with pytest.raises(ndpy.LimitExceededError):
            aio.connect(("192.0.2.1", 1), adapter=adapter, **options)


def test_a_client_that_speaks_something_else_is_refused_and_the_server_goes_on(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        async for message in connection:
            await connection.send(message)

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            queue = keep(adapter.create_completion_queue(8))
            connector = keep(adapter.create_connector())
            with pytest.raises((ndpy.ConnectionRefusedError, ndpy.ConnectionAbortedError, ndpy.TimeoutError)):
                await connector.begin_connect(
                    keep(adapter.create_queue_pair(queue)), server.address, private_data=b"something else"
                )
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
                await client.send(b"good")
                assert await client.receive() == b"good"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_server_that_speaks_something_else_is_left(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def main():
        with adapter.listen((host_of(adapter), 0)) as listener:
            connecting = asyncio.ensure_future(
                aio.connect(listener.address, adapter=adapter, timeout_s=DEADLINE_S).__aenter__()
            )
            request = keep(await listener.get_request_async(DEADLINE_S))
            queue = keep(adapter.create_completion_queue(8))
            accepting = request.begin_accept(keep(adapter.create_queue_pair(queue)), private_data=b"something else")
            with pytest.raises(aio.ProtocolError, match=r"does not speak the protocol of ndpy\.aio"):
                await connecting
            with contextlib.suppress(ndpy.NdpyError):
                await accepting

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_server_that_takes_its_offer_back_is_no_stranger(adapter, monkeypatch):
    """Its refusal comes just before the client reads what the offer said, and has private data of its own."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    connected_by = aio.Connection._connected_by

    def taking_back(connection, connector):
        connected_by(connection, connector)
        # The server's end is connected by a request.
        if connector.state == "offered":
            connector._private_data = b""
            connector._on_lost(ndpy.ConnectionAbortedError("it has gone"))

    monkeypatch.setattr(aio.Connection, "_connected_by", taking_back)

    async def main():
        async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
            with pytest.raises(ndpy.ConnectionAbortedError, match="the server has taken its offer back"):
                await aio.connect(server.address, adapter=adapter, **OPTIONS).__aenter__()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_many_connections_at_once(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        async for message in connection:
            await connection.send(message)

    async def talk(address, number):
        async with aio.connect(address, adapter=adapter, **OPTIONS) as connection:
            for turn in range(3):
                await connection.send(pattern(SHORT, number + turn))
                assert await connection.receive() == pattern(SHORT, number + turn)

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            await asyncio.gather(*(talk(server.address, number) for number in range(20)))

    asyncio.run(asyncio.wait_for(main(), 4 * DEADLINE_S))


@pytest.mark.parametrize("pause_s", [0, 0.05])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_loop_that_is_closed_with_operations_in_flight_leaves_the_adapter_usable(adapter, pause_s):
    """The program drops the loop and the connection. Their memory stays until the adapter has let go of it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    loop = asyncio.new_event_loop()

    async def handler(connection):
        await asyncio.sleep(3600)

    async def begin():
        server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
        client = await aio.connect(server.address, adapter=adapter, **OPTIONS)
        tasks = [asyncio.ensure_future(client.send(pattern(LONG))) for _ in range(3)]
        await asyncio.sleep(pause_s)
        return server, client, tasks

    _, client, tasks = loop.run_until_complete(begin())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()
    del tasks, task, client, _, loop

    require_usable(adapter)
    require_closed(adapter)
