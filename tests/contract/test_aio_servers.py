"""Servers of ndpy.aio, and peers that speak something else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from kit.aio_ends import LONG, OPTIONS, SHORT, echo, pattern, require_closed, require_usable, until
from kit.helpers import DEADLINE_S, host_of, require
from kit.quirks import has_quirk

import ndpy
from ndpy import aio
from ndpy.aio import server as server_module
from ndpy.aio.channel import Channel
from ndpy.vocabulary.quirks import Quirk

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


@pytest.mark.parametrize(
    "kind", [ConnectionResetError, BrokenPipeError, aio.ConnectionResetError, aio.ConnectionEndedError]
)
def test_a_connection_error_of_something_else_is_not_taken_for_the_client_s_end(adapter, kind):
    """For example, of a socket or of another connection of the handler."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await connection.receive()
        raise kind("of another connection")

    async def main():
        async with (
            aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server,
            aio.connect(server.address, adapter=adapter, **OPTIONS) as client,
        ):
            await client.send(b"x")
            with pytest.raises(aio.ConnectionResetError):
                await client.receive()

    (context,) = reports_of(main)
    assert type(context["exception"]) is kind


async def test_the_end_of_another_connection_does_not_end_this_one_in_peace(connected):
    """The peer must not take what it got for complete."""
    async with connected() as (client, server):
        with pytest.raises(aio.ConnectionEndedError):
            async with client:
                raise aio.ConnectionEndedError("another one has ended")
        with pytest.raises(aio.ConnectionResetError):
            await server.receive()


def test_a_client_s_end_is_still_no_error_of_the_handler(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        while True:
            await connection.receive()

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
                await client.send(b"x")
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
                client.abort()
            await until(lambda: not server.connections)

    assert reports_of(main) == []


async def test_a_request_that_is_cancelled_before_its_task_runs_is_refused(adapter, monkeypatch):
    """The server is closed just after the request has come."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    server = await aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS)
    began, begin = [], server_module.start

    def start_and_cancel(loop, make):
        task = begin(loop, make)
        if getattr(make, "func", None) == server._serve_one:
            began.append(make.args[0])
            task.cancel()
        return task

    monkeypatch.setattr(server_module, "start", start_and_cancel)
    with pytest.raises(ConnectionRefusedError):
        await aio.connect(server.address, adapter=adapter, **OPTIONS)
    (connector,) = began
    assert connector.closed
    await server.close()


def test_a_loop_that_is_closed_leaves_no_coroutine_that_was_never_awaited(adapter, monkeypatch):
    """The request's task was made, and the loop never ran it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    loop = asyncio.new_event_loop()
    begin = server_module.start

    def start_and_stop(loop, make):
        task = begin(loop, make)
        if getattr(make, "func", None) is not None:
            loop.stop()
        return task

    monkeypatch.setattr(server_module, "start", start_and_stop)
    server = loop.run_until_complete(aio_server(adapter))
    knocking = threading.Thread(target=knock, args=(adapter, server.address), daemon=True)
    knocking.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run_forever()
        loop.close()
        del server, loop
        # The adapter's thread may still handle the request, and refers to the listener until it has.
        end = time.monotonic() + DEADLINE_S
        while knocking.is_alive() and time.monotonic() < end:
            gc.collect()
            knocking.join(0.05)
    assert not knocking.is_alive()
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "never awaited" in text] == []
    # A ResourceWarning refers to what was not closed.
    caught.clear()
    require_closed(adapter)


def test_a_connection_whose_time_is_over_before_it_begins_says_so(adapter, monkeypatch):
    """Opening an adapter may take seconds."""
    join = server_module.Hub.join
    monkeypatch.setattr(server_module.Hub, "join", lambda adapter: (time.sleep(0.02), join(adapter))[1])

    async def main():
        with pytest.raises(
            ndpy.TimeoutError, match=r"the 0.01 s for a connection to .* port 9 were over before it was asked"
        ):
            await aio.connect((host_of(adapter), 9), adapter=adapter, timeout_s=0.01)

    asyncio.run(main())


async def aio_server(adapter):
    return await aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS)


def knock(adapter, address) -> None:
    """Connect to a server that ends meanwhile."""

    async def main():
        with contextlib.suppress(ndpy.NdpyError):
            async with aio.connect(address, adapter=adapter, **OPTIONS):
                pass

    asyncio.run(main())


def test_the_error_of_a_handler_is_reported_though_the_server_is_closed_meanwhile(adapter):
    """The handler's task is cancelled while its connection ends."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await connection.receive()
        task = asyncio.current_task()
        connection._life._changed.add_done_callback(lambda _: task.cancel())
        raise ZeroDivisionError("the handler's fault")

    async def main():
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
                await client.send(b"x")
                with pytest.raises(aio.ConnectionResetError):
                    await client.receive()
            await until(lambda: not server.connections)

    (context,) = reports_of(main)
    assert isinstance(context["exception"], ZeroDivisionError)


def test_a_fault_of_the_package_ends_one_connection(run, adapter, monkeypatch):
    reported = []

    async def scene(client, server):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        monkeypatch.setattr(server._messages.protocol, "receive", lambda data: 1 / 0)
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


async def test_closing_the_server_ends_its_connections(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await asyncio.sleep(3600)

    server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
    serving = asyncio.ensure_future(server.serve_forever())
    async with aio.connect(server.address, adapter=adapter, **{**OPTIONS, "close_timeout_s": 0.2}) as client:
        await until(lambda: server.connections)
        assert not serving.done()
        closing = asyncio.ensure_future(server.close())
        with pytest.raises(ConnectionError):
            await client.receive()
    await closing
    await serving
    with pytest.raises((ndpy.ConnectionRefusedError, ndpy.TimeoutError)):
        await aio.connect(server.address, adapter=adapter, timeout_s=3)


async def test_a_server_that_is_closed_delivers_what_its_handlers_have_sent(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        await connection.send(b"sent")
        await asyncio.sleep(3600)

    server = await aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS)
    async with aio.connect(server.address, adapter=adapter, **OPTIONS) as client:
        await until(lambda: client._messages.inbox)
        closing = asyncio.ensure_future(server.close())
        assert [message async for message in client] == [b"sent"]
    await closing


@pytest.mark.parametrize("waits", [True, False])
async def test_a_server_whose_adapter_goes_away_says_so_once(adapter, monkeypatch, caplog, waits):
    """Where somebody waits in serve_forever(), and in the log. The loop has nothing to complain about."""
    gone = ndpy.DeviceRemovedError("gone")

    async def fail(*arguments, **options):
        raise gone

    monkeypatch.setattr(ndpy.Listener, "get_request_async", fail)
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
        await until(server._accepting.done)
        if waits:
            with pytest.raises(ndpy.DeviceRemovedError, match="gone"):
                await server.serve_forever()
    del server
    gc.collect()
    assert not reported
    assert [record.getMessage() for record in caplog.records if "no longer accepts anybody" in record.getMessage()]


async def test_nobody_listens(adapter):
    with adapter.listen((host_of(adapter), 0)) as listener:
        address = listener.address
    with pytest.raises((ndpy.ConnectionRefusedError, ndpy.TimeoutError)):
        await aio.connect(address, adapter=adapter, timeout_s=3)


def test_an_option_out_of_range_is_refused(adapter):
    for options in ({"slots": 0}, {"slot_size": 63}, {"offers": 65}, {"max_message_length": -1}):
        with pytest.raises(ndpy.LimitExceededError):
            aio.connect(("192.0.2.1", 1), adapter=adapter, **options)


async def test_a_client_that_speaks_something_else_is_refused_and_the_server_goes_on(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        async for message in connection:
            await connection.send(message)

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


async def test_a_server_that_speaks_something_else_is_left(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
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


async def test_a_server_that_takes_its_offer_back_is_no_stranger(adapter, monkeypatch):
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
    async with aio.serve((host_of(adapter), 0), echo, adapter=adapter, **OPTIONS) as server:
        with pytest.raises(ndpy.ConnectionAbortedError, match="the server has taken its offer back"):
            await aio.connect(server.address, adapter=adapter, **OPTIONS).__aenter__()


async def test_a_refusal_is_told_though_the_receives_were_cancelled_before_it(adapter, keep, monkeypatch):
    """siw cancels them when the refusal comes. The thread that learns of the refusal may be slow."""
    begun, statuses = [], []
    connect, complete = aio.Connection._connect, Channel.on_completion
    cancelled = SimpleNamespace(ok=False, status=ndpy.Status.CANCELED, operation=ndpy.Operation.RECEIVE, context=0)

    def connecting(connection, *arguments):
        begun.append(connection)
        return connect(connection, *arguments)

    def completing(channel, completion):
        complete(channel, completion)
        statuses.append(completion.status)

    monkeypatch.setattr(aio.Connection, "_connect", connecting)
    monkeypatch.setattr(Channel, "on_completion", completing)
    with adapter.listen((host_of(adapter), 0)) as listener:
        opening = asyncio.ensure_future(aio.connect(listener.address, adapter=adapter, timeout_s=None).__aenter__())
        request = keep(await listener.get_request_async(DEADLINE_S))
        (client,) = begun
        with adapter._events.resting(DEADLINE_S):
            request.reject()
            if not has_quirk(adapter, Quirk.SIW_CANCELS_BEFORE_REFUSALS):
                client._channel.on_completion(cancelled)
            await until(lambda: statuses)
        with pytest.raises(ndpy.ConnectionRefusedError):
            await opening
    assert set(statuses) == {ndpy.Status.CANCELED}


async def test_receives_that_are_cancelled_before_accept_has_ended_end_the_connection(adapter, monkeypatch):
    """Nothing else tells the server, which waits for the client's first message without a limit."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    accept = aio.Connection._accept

    async def accepting(connection, *arguments):
        asyncio.get_running_loop().call_soon(connection.queue_pair.flush)
        await accept(connection, *arguments)

    monkeypatch.setattr(aio.Connection, "_accept", accepting)
    options = {**OPTIONS, "adapter": adapter, "timeout_s": None}
    async with aio.serve((host_of(adapter), 0), echo, **options) as server:
        with pytest.raises(ConnectionError):
            await aio.connect(server.address, **options)
        await until(lambda: not server._tasks)


async def test_many_connections_at_once(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def handler(connection):
        async for message in connection:
            await connection.send(message)

    async def talk(address, number):
        async with aio.connect(address, adapter=adapter, **OPTIONS) as connection:
            for turn in range(3):
                await connection.send(pattern(SHORT, number + turn))
                assert await connection.receive() == pattern(SHORT, number + turn)

    async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
        await asyncio.gather(*(talk(server.address, number) for number in range(20)))


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
