"""Connections of ndpy.aio: messages, transfers, exposures, cancellation, and the ends of connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque

import pytest
from defects import differs
from helpers import DEADLINE_S, STRESS, has_kernel_driver, host_of, require, wait_until

import ndpy
from ndpy import Access, aio
from ndpy.aio.protocol import HEADER_LENGTH
from ndpy.quirks import Quirk

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]

SHORT = 100
LONG = 50_000
SLOT = 1024
LONGEST_SHORT = SLOT - HEADER_LENGTH
OPTIONS = {"slot_size": SLOT, "slots": 4, "close_timeout_s": DEADLINE_S, "timeout_s": DEADLINE_S}


@pytest.fixture
def run(adapter):
    """run(scene) calls the coroutine function with a client and the server's end of one connection."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def start(scene, *, client_options=None, server_options=None):
        async def main():
            arrived: asyncio.Future[aio.Connection] = asyncio.get_running_loop().create_future()
            leave = asyncio.Event()

            async def handler(connection):
                arrived.set_result(connection)
                await leave.wait()

            options = {"adapter": adapter, **OPTIONS, **(server_options or {})}
            async with aio.serve((host_of(adapter), 0), handler, **options) as server:
                options = {"adapter": adapter, **OPTIONS, **(client_options or {})}
                async with aio.connect(server.address, **options) as client:
                    await scene(client, await arrived)
                    leave.set()

        asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))

    # A kernel's driver is slow in an emulated machine, and so are Windows programs. siw takes longest to connect. There the usual
    # run takes some of the points.
    slow = 20 if differs(adapter, Quirk.SIW_LEAVES_FIRST_MESSAGE) else 10
    start.stride = 1 if STRESS or not has_kernel_driver(adapter) else slow
    return start


def pattern(length: int, start: int = 1) -> bytes:
    return bytes((start + 7 * place) % 251 for place in range(length))


async def both(first, second):
    return await asyncio.gather(first, second)


async def settle() -> None:
    """Let tasks go on until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


# ---- messages ----


@pytest.mark.parametrize("length", [0, 1, LONGEST_SHORT, LONGEST_SHORT + 1, LONG])
def test_a_message_of_any_length_arrives_whole(run, length):
    async def scene(client, server):
        for sender, receiver in ((client, server), (server, client)):
            data = pattern(length)
            _, message = await both(sender.send(data), receiver.receive())
            assert message == data

    run(scene)


def test_messages_arrive_in_the_order_of_the_calls(run):
    lengths = [10, LONG, 20, 30, LONG, LONG, 40, LONG, 5] * 3

    async def scene(client, server):
        async def receive_all():
            return [await server.receive() for _ in lengths]

        sending = [client.send(pattern(length, start)) for start, length in enumerate(lengths)]
        *_, messages = await asyncio.gather(*sending, receive_all())
        assert messages == [pattern(length, start) for start, length in enumerate(lengths)]

    run(scene)


def test_a_message_whose_memory_is_registered_in_a_thread_is_not_overtaken(run):
    async def scene(client, server):
        sending = [asyncio.ensure_future(client.send(data)) for data in (bytes(2 << 20), b"short", b"er" * LONG)]
        assert [len(await server.receive()) for _ in sending] == [2 << 20, 5, 2 * LONG]
        await asyncio.gather(*sending)

    run(scene)


def test_nobody_jumps_the_queue(run):
    """Senders wait in line. Others send at every step of the loop, also when the turn goes from one to the next."""

    async def scene(client, server):
        sending: list[asyncio.Task] = []

        def begin(_=None):
            if len(sending) < 100:
                number = len(sending).to_bytes(2, "big")
                sending.append(asyncio.ensure_future(client.send(number)))
                asyncio.get_running_loop().call_soon(begin)

        begin()
        assert [int.from_bytes(await server.receive(), "big") for _ in range(100)] == list(range(100))
        await asyncio.gather(*sending)

    run(scene)


@pytest.mark.parametrize("peer_does_it", [True, False])
def test_the_right_to_a_long_message_has_ended_when_send_returns(run, adapter, monkeypatch, peer_does_it):
    """The peer's answer invalidates the window, if both adapters can do that. The peer may leave it undone."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)
    can_do_it = ndpy.Capability.SEND_INVALIDATE in adapter.info.capabilities

    async def scene(client, server):
        server._may_invalidate = server._may_invalidate and peer_does_it
        own = []
        invalidate = client.queue_pair.invalidate
        monkeypatch.setattr(client.queue_pair, "invalidate", lambda *a, **k: (own.append(a), invalidate(*a, **k)))
        # More than there may be binds without a completion.
        for _ in range(10):
            await both(client.send(pattern(LONG)), server.receive())
            assert not any(window.is_bound for window in client._windows)
            assert len(client._windows) == 1
        assert len(own) == (0 if can_do_it and peer_does_it else 10)

    run(scene)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_message_is_received_into_memory_of_the_program(run, adapter, length):
    async def scene(client, server):
        data = pattern(length)
        target = bytearray(length + 10)
        with adapter.register(bytearray(length), Access.LOCAL_WRITE | Access.READ_SINK) as region:
            for into, seen in (
                (target, target),
                (memoryview(target)[5:], memoryview(target)[5:]),
                (region, region.buffer),
            ):
                _, count = await both(client.send(data), server.receive(into))
                assert count == length
                assert bytes(seen)[:length] == data

    run(scene)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_registered_memory_is_sent(run, adapter, length):
    async def scene(client, server):
        with adapter.register(bytearray(pattern(length)), Access.LOCAL_WRITE) as region:
            for data in (region, region[10:length]):
                _, message = await both(client.send(data), server.receive())
                assert message == pattern(length)[-len(message) :]
                assert len(message) == data.length

    run(scene)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_message_that_is_too_long_for_the_memory_stays(run, length):
    async def scene(client, server):
        sending = asyncio.ensure_future(client.send(pattern(length)))
        with pytest.raises(ndpy.LimitExceededError, match=f"{length} bytes is longer than the {length - 1}"):
            await server.receive(bytearray(length - 1))
        assert await server.receive() == pattern(length)
        await sending

    run(scene)


@pytest.mark.parametrize(("small", "large"), [(64, 4096), (4096, 64)])
def test_the_ends_may_have_slots_of_different_sizes(run, small, large):
    """A message fits the slots of both ends, or is offered."""
    lengths = [10, 40, 41, 1000, 4072, 4073, 10]

    async def scene(client, server):
        for sender, receiver in ((client, server), (server, client)):
            sending = [asyncio.ensure_future(sender.send(pattern(length))) for length in lengths]
            for length in lengths:
                assert await receiver.receive() == pattern(length)
            await asyncio.gather(*sending)

    run(scene, client_options={"slot_size": small}, server_options={"slot_size": large})


def test_a_message_beyond_the_peer_s_limit_is_refused_before_it_is_sent(run):
    async def scene(client, server):
        with pytest.raises(ndpy.LimitExceededError, match="longer than the 2000"):
            await client.send(bytes(2001))
        _, message = await both(client.send(bytes(2000)), server.receive())
        assert message == bytes(2000)

    run(scene, server_options={"max_message_length": 2000})


def test_a_sender_waits_while_the_peer_takes_no_messages(run):
    """The peer never finds no receive posted: the sender counts."""

    async def scene(client, server):
        sending = [asyncio.ensure_future(client.send(pattern(SHORT, place))) for place in range(20)]
        await asyncio.sleep(0.2)
        assert sum(task.done() for task in sending) == 4
        assert [await server.receive() for _ in range(20)] == [pattern(SHORT, place) for place in range(20)]
        await asyncio.gather(*sending)

    run(scene)


def test_both_ends_send_before_they_receive(run):
    """Each end is full of messages that the other has not taken. Nothing may hang when they begin to take them."""

    async def scene(client, server):
        async def exchange(connection):
            sending = [asyncio.ensure_future(connection.send(pattern(SHORT, place))) for place in range(30)]
            await asyncio.sleep(0.1)
            messages = [await connection.receive() for _ in range(30)]
            await asyncio.gather(*sending)
            return messages

        expected = [pattern(SHORT, place) for place in range(30)]
        assert await both(exchange(client), exchange(server)) == [expected, expected]

    run(scene, client_options={"slots": 1}, server_options={"slots": 1})


def test_a_stream_in_one_direction_goes_on_while_the_other_is_full(run):
    """The client takes nothing that the server sends. The server still takes everything, and grants more."""

    async def scene(client, server):
        stuck = [asyncio.ensure_future(server.send(pattern(SHORT))) for _ in range(10)]
        await settle()

        async def send_all():
            for place in range(50):
                await client.send(pattern(SHORT, place))

        async def receive_all():
            return [await server.receive() for _ in range(50)]

        _, messages = await both(send_all(), receive_all())
        assert messages == [pattern(SHORT, place) for place in range(50)]
        for _ in stuck:
            await client.receive()
        await asyncio.gather(*stuck)

    run(scene)


def test_messages_are_iterated_until_the_peer_closes(run):
    async def scene(client, server):
        for place in range(3):
            await client.send(pattern(SHORT, place))
        closing = asyncio.ensure_future(client.close())
        assert [message async for message in server] == [pattern(SHORT, place) for place in range(3)]
        with pytest.raises(aio.ConnectionEndedError):
            await server.receive()
        await server.close()
        await closing

    run(scene)


# ---- transfers ----


def test_exposed_memory_is_read_and_written(run):
    async def scene(client, server):
        memory = bytearray(pattern(LONG))
        async with client.expose(memory) as remote:
            await client.send(remote.to_bytes())
            remote = ndpy.RemoteMemory.from_bytes(await server.receive())
            target = bytearray(LONG)
            await server.read(remote, into=target)
            assert target == pattern(LONG)
            await server.write(remote[10:20], b"0123456789")
            # A message that is sent afterwards arrives after the bytes.
            await server.send(b"written")
            await client.receive()
            assert memory[10:20] == b"0123456789"
            assert memory[:10] == pattern(10)

    run(scene)


def test_the_peer_s_right_ends_with_the_block(run):
    async def scene(client, server):
        async with client.expose(bytearray(LONG), Access.REMOTE_READ) as remote:
            await server.read(remote, into=bytearray(100))
        with pytest.raises((ndpy.AccessViolationError, aio.ConnectionResetError)):
            await server.read(remote, into=bytearray(100))
        with pytest.raises(ConnectionError):
            await server.receive()

    run(scene)


def test_memory_is_exposed_when_the_block_begins(run, adapter, monkeypatch):
    """The program may tell the peer about it by another way than this connection. So the bind has completed."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)

    async def scene(client, server):
        bound, completed = [], []
        bind, on_completion = client.queue_pair.bind, client._on_completion

        def binding(*arguments, context, flags):
            bound.append(context)
            bind(*arguments, context=context, flags=flags)

        def completing(completion):
            completed.append(completion.context)
            on_completion(completion)

        monkeypatch.setattr(client.queue_pair, "bind", binding)
        monkeypatch.setattr(client, "_on_completion", completing)
        async with client.expose(bytearray(LONG)):
            assert len(bound) == 1
            assert bound[0] in completed

    run(scene)


def test_a_connection_that_ends_while_memory_is_being_exposed_is_a_reset(run, adapter, monkeypatch):
    """Its end takes the right away, which the bind has just given."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)

    async def scene(client, server):
        end_of = client._end_of

        async def ending(future):
            await end_of(future)
            client.abort()

        monkeypatch.setattr(client, "_end_of", ending)
        with pytest.raises(aio.ConnectionResetError, match="abort"):
            async with client.expose(bytearray(LONG)):
                pass

    run(scene)


def test_a_connection_that_ends_in_another_thread_while_memory_is_being_exposed_is_a_reset(run, adapter, monkeypatch):
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)

    async def scene(client, server):
        bind = client.queue_pair.bind

        def binding(window, *arguments, **options):
            bind(window, *arguments, **options)
            window._binding.end()

        monkeypatch.setattr(client.queue_pair, "bind", binding)
        with pytest.raises(aio.ConnectionResetError):
            await client.send(pattern(LONG))

    run(scene)


def test_a_window_that_could_not_be_invalidated_is_not_used_again(run, adapter, monkeypatch):
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)

    async def invalidate(window):
        raise RuntimeError("planted")

    async def scene(client, server):
        monkeypatch.setattr(client, "_invalidate", invalidate)
        with pytest.raises(RuntimeError, match="planted"):
            async with client.expose(bytearray(LONG)):
                pass
        assert client._windows == []

    run(scene)


def test_many_memories_are_exposed_at_once(run):
    async def scene(client, server):
        memories = [bytearray(pattern(1000, start)) for start in range(40)]
        async with contextlib.AsyncExitStack() as stack:
            for memory in memories:
                remote = await stack.enter_async_context(client.expose(memory, Access.REMOTE_READ))
                target = bytearray(1000)
                await server.read(remote, into=target)
                assert target == memory

    run(scene)


def test_a_transfer_beyond_the_memory_is_refused_before_it_is_posted(run):
    async def scene(client, server):
        async with client.expose(bytearray(64)) as remote:
            with pytest.raises(ndpy.ElementRangeError, match="65 bytes do not fit the 64"):
                await server.read(remote, into=bytearray(65))
            await server.read(remote, into=bytearray(64))
            await server.read(remote, into=bytearray(0))

    run(scene)


@pytest.mark.parametrize("transfer", ["read", "write", "expose"])
def test_an_end_that_was_not_told_yet_is_a_reset(run, adapter, monkeypatch, transfer):
    """The queue pair knows already that there is no connection any more."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)

    def post(*arguments, **options):
        raise ndpy.NotConnectedError("the queue pair has no connection")

    async def scene(client, server):
        async with server.expose(bytearray(100)) as remote:
            monkeypatch.setattr(client.queue_pair, "bind" if transfer == "expose" else transfer, post)
            with pytest.raises(aio.ConnectionResetError):
                if transfer == "read":
                    await client.read(remote, into=bytearray(100))
                elif transfer == "write":
                    await client.write(remote, bytes(100))
                else:
                    async with client.expose(bytearray(100)):
                        pass

    run(scene)


def test_many_transfers_run_at_once(run):
    async def scene(client, server):
        memory = bytearray(pattern(LONG))
        async with client.expose(memory, Access.REMOTE_READ) as remote:
            targets = [bytearray(LONG // 50) for _ in range(50)]
            await asyncio.gather(
                *(
                    server.read(remote[place * len(target) : (place + 1) * len(target)], into=target)
                    for place, target in enumerate(targets)
                )
            )
            assert b"".join(targets) == memory

    run(scene)


# ---- cancellation ----


def cancel_at_each_point(run, act, check, points=40, **options):
    """Cancel a task after each (or of some) number of steps of the loop, until it is through before. check() looks what is left."""
    through = False
    for steps in range(0, points * run.stride, run.stride):

        async def scene(client, server, steps=steps):
            nonlocal through
            task = asyncio.ensure_future(act(client, server))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps > 20:
                await asyncio.sleep(0.002 * (steps - 20))
            cancelled = task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            through = through or not cancelled
            await check(client, server, task)

        run(scene, **options)
        if through:
            return
    pytest.fail(f"never through after {points} steps")


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_cancelled_send_is_whole_or_not_at_all(run, length):
    async def act(client, server):
        receiving = asyncio.ensure_future(server.receive())
        try:
            await client.send(pattern(length))
        finally:
            server.received = receiving

    async def check(client, server, task):
        await client.send(b"next")
        message = await server.received if hasattr(server, "received") else await server.receive()
        if message != b"next":
            assert message == pattern(length)
            assert await server.receive() == b"next"

    cancel_at_each_point(run, act, check)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_cancelled_receive_loses_no_message(run, length, into):
    async def act(client, server):
        client.sending = asyncio.ensure_future(client.send(pattern(length)))
        client.received = await server.receive(bytearray(length) if into else None)

    async def check(client, server, task):
        if not hasattr(client, "sending"):
            return
        if not hasattr(client, "received"):
            assert await server.receive() == pattern(length)
        await client.sending
        await client.send(b"next")
        assert await server.receive() == b"next"

    cancel_at_each_point(run, act, check)


def test_cancelled_receives_leave_the_messages_in_order(run):
    async def scene(client, server):
        sending = [asyncio.ensure_future(client.send(pattern(LONG, place))) for place in range(2)]
        await wait_for(lambda: len(server._inbox) == 2)
        receiving = [asyncio.ensure_future(server.receive()) for _ in range(2)]
        await asyncio.sleep(0)
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        assert all(task.cancelled() for task in receiving)
        for place in range(2):
            assert await server.receive() == pattern(LONG, place)
        await asyncio.gather(*sending)

    run(scene)


def test_a_cancelled_read_leaves_the_memory_alone_afterwards(run):
    async def act(client, server):
        async with server.expose(bytearray(pattern(LONG)), Access.REMOTE_READ) as remote:
            client.target = bytearray(LONG)
            await client.read(remote, into=client.target)

    async def check(client, server, task):
        if hasattr(client, "target"):
            before = bytes(client.target)
            assert before in (bytes(LONG), pattern(LONG))
            await asyncio.sleep(0.01)
            assert client.target == before
        _, message = await both(client.send(b"next"), server.receive())
        assert message == b"next"

    cancel_at_each_point(run, act, check, points=60)


def test_a_cancelled_exposure_ends_the_right(run, adapter):
    async def act(client, server):
        async with client.expose(bytearray(LONG), Access.REMOTE_READ):
            await asyncio.sleep(0)

    async def check(client, server, task):
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)

    cancel_at_each_point(run, act, check)


def test_a_long_message_that_nobody_receives_is_withdrawn(run):
    async def scene(client, server):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.send(pattern(LONG)), 0.2)
        await client.send(b"next")
        assert await server.receive() == b"next"

    run(scene)


def test_a_withdrawal_that_waits_for_a_slot_is_dropped_when_the_answer_comes(run):
    async def scene(client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await wait_for(lambda: server._inbox)
        slots, client._control_slots.free = client._control_slots.free, deque()
        sending.cancel()
        await settle()
        assert await server.receive() == pattern(LONG)
        with pytest.raises(asyncio.CancelledError):
            await sending
        client._control_slots.free = slots
        for _ in range(3):
            _, message = await both(client.send(pattern(LONG)), server.receive())
            assert message == pattern(LONG)

    run(scene)


def test_a_withdrawal_that_is_dropped_leaves_the_peer_its_room(run):
    """The withdrawal that waited stood for the GRANT that was due meanwhile."""

    async def scene(client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await wait_for(lambda: server._inbox)
        for place in range(4):
            await server.send(pattern(SHORT, place))
        await wait_for(lambda: len(client._inbox) == 4)
        slots, client._control_slots.free = client._control_slots.free, deque()
        sending.cancel()
        await settle()
        for place in range(4):
            assert await client.receive() == pattern(SHORT, place)
        assert await server.receive() == pattern(LONG)
        with pytest.raises(asyncio.CancelledError):
            await sending
        client._control_slots.free = slots
        client._post_controls()
        await server.send(pattern(SHORT))
        assert await client.receive() == pattern(SHORT)

    run(scene)


def test_withdrawn_messages_leave_room_for_others(run):
    async def scene(client, server):
        for _ in range(12):
            sending = asyncio.ensure_future(client.send(pattern(LONG)))
            await asyncio.sleep(0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)

    run(scene)


def test_a_cancelled_close_ends_the_connection_at_once(run):
    async def scene(client, server):
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert client.closed
        with pytest.raises(ConnectionError):
            await server.receive()

    run(scene)


# ---- the end ----


def test_close_delivers_what_was_sent(run):
    async def scene(client, server):
        for place in range(4):
            await client.send(pattern(SHORT, place))
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.1)
        assert [bytes(message) async for message in server] == [pattern(SHORT, place) for place in range(4)]
        await both(closing, server.close())

    run(scene)


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16])
def test_a_long_message_is_not_offered_after_close(run, steps):
    """Its memory is so long that it is registered in a thread. Meanwhile the connection is closed."""

    async def scene(client, server):
        data = bytes(2 << 20)
        sending = asyncio.ensure_future(client.send(data))
        for _ in range(steps):
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        messages = [message async for message in server]
        await both(closing, server.close())
        try:
            await sending
        except ndpy.ClosedError:
            assert messages == []
        else:
            assert messages == [data]

    run(scene)


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_all_senders_that_wait_in_line_learn_of_the_end(run, end, length):
    """The peer takes nothing."""

    async def scene(client, server):
        sending = [asyncio.ensure_future(client.send(pattern(length))) for length in (SHORT, length) * 8]
        await asyncio.sleep(0.05)
        assert not all(task.done() for task in sending)
        if end == "close":
            await client.close()
        else:
            client.abort()
        done, waiting = await asyncio.wait(sending, timeout=DEADLINE_S / 2)
        assert not waiting
        assert all(
            isinstance(task.exception(), (ndpy.ClosedError, aio.ConnectionResetError, type(None))) for task in done
        )

    run(scene, client_options={"close_timeout_s": 0.3})


def test_a_closed_connection_says_so(run):
    async def scene(client, server):
        await both(client.close(), server.close())
        assert client.closed
        for call in (client.send(b"x"), client.receive(), client.read(ndpy.RemoteMemory(0, 1, 0), into=bytearray(1))):
            with pytest.raises(ndpy.ClosedError, match="was closed"):
                await call
        await client.close()
        await client.wait_closed()

    run(scene)


def test_abort_is_a_reset_for_the_peer(run):
    async def scene(client, server):
        waiting = asyncio.ensure_future(server.receive())
        await settle()
        client.abort()
        with pytest.raises(aio.ConnectionResetError, match="ended it without close"):
            await waiting
        with pytest.raises(aio.ConnectionResetError, match="abort"):
            await client.send(b"x")
        await server.wait_closed()

    run(scene)


def test_messages_that_came_before_a_reset_are_received(run):
    async def scene(client, server):
        await client.send(b"first")
        await wait_for(lambda: server._inbox)
        client.abort()
        await server.wait_closed()
        assert await server.receive() == b"first"
        with pytest.raises(aio.ConnectionResetError):
            await server.receive()

    run(scene)


def test_a_message_of_a_connection_that_has_ended_is_not_that_of_the_next_one(run, adapter):
    """Connections use the same memory one after the other."""

    async def scene(client, server):
        await client.send(b"first")
        await wait_for(lambda: server._inbox)
        client.abort()
        await server.wait_closed()
        await client.wait_closed()
        async with (
            aio.serve((host_of(adapter), 0), _echo, adapter=adapter, **OPTIONS) as another,
            aio.connect(another.address, adapter=adapter, **OPTIONS) as connection,
        ):
            for _ in range(20):
                await connection.send(b"other")
                assert await connection.receive() == b"other"
        assert await server.receive() == b"first"

    run(scene)


async def wait_for(condition):
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


def test_an_exception_in_the_block_aborts(adapter, run):
    async def scene(client, server):
        with pytest.raises(ZeroDivisionError):
            async with client:
                raise ZeroDivisionError
        with pytest.raises(aio.ConnectionResetError):
            await server.receive()

    run(scene)


def test_an_offer_that_is_out_when_the_peer_leaves_fails(run):
    async def scene(client, server):
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await wait_for(lambda: server._inbox)
        server.abort()
        with pytest.raises(aio.ConnectionResetError):
            await sending

    run(scene)


def test_a_long_message_that_is_lost_with_the_connection_is_no_end_of_the_messages(run):
    """The peer waits for its reader as long as it says, and then disconnects."""

    async def scene(client, server):
        await client.send(b"first")
        sending = asyncio.ensure_future(client.send(pattern(LONG)))
        await wait_for(lambda: len(server._inbox) == 2)
        await client.close()
        with pytest.raises(ndpy.ClosedError):
            await sending
        await server.wait_closed()
        assert await server.receive() == b"first"
        for _ in range(2):
            with pytest.raises(aio.ConnectionResetError, match="a long message that was not read"):
                await server.receive()

    run(scene, client_options={"close_timeout_s": 0.2})


def test_nothing_is_left_when_the_connections_are_closed(adapter, run):
    """adapter.close(), at the end of the fixture, fails if an object is still open."""

    async def scene(client, server):
        _, message = await both(client.send(pattern(LONG)), server.receive())
        assert message == pattern(LONG)

    run(scene)
    gc.collect()
    assert adapter._device._open_children() == []


def test_the_last_connection_is_closed_while_its_memory_is_still_exposed(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    async def main():
        server = await aio.serve((host_of(adapter), 0), _echo, adapter=adapter, **OPTIONS)
        client = await aio.connect(server.address, adapter=adapter, **OPTIONS)
        exposed, leave = asyncio.Event(), asyncio.Event()

        async def hold():
            async with client.expose(bytearray(LONG)):
                exposed.set()
                await leave.wait()

        holding = asyncio.ensure_future(hold())
        await exposed.wait()
        await client.close()
        await server.close()
        leave.set()
        await holding
        assert adapter._device._open_children() == []

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


# ---- servers ----


def test_a_handler_that_raises_ends_its_connection_only(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    reported = []

    async def handler(connection):
        message = await connection.receive()
        if message == b"bad":
            raise ZeroDivisionError("the handler's fault")
        await connection.send(message)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        async with aio.serve((host_of(adapter), 0), handler, adapter=adapter, **OPTIONS) as server:
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as bad:
                await bad.send(b"bad")
                with pytest.raises(aio.ConnectionResetError):
                    await bad.receive()
            async with aio.connect(server.address, adapter=adapter, **OPTIONS) as good:
                await good.send(b"good")
                assert await good.receive() == b"good"

    asyncio.run(main())
    (context,) = reported
    assert isinstance(context["exception"], ZeroDivisionError)
    assert "the handler of a client" in context["message"]


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
            aio.serve((host_of(adapter), 0), _echo, adapter=adapter, **OPTIONS) as another,
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

    async def again():
        async with (
            aio.serve((host_of(adapter), 0), _echo, adapter=adapter, **OPTIONS) as server,
            aio.connect(server.address, adapter=adapter, **OPTIONS) as client,
        ):
            await client.send(b"again")
            assert await client.receive() == b"again"

    asyncio.run(asyncio.wait_for(again(), DEADLINE_S))

    def closed():
        gc.collect()
        return not adapter._device._open_children()

    wait_until(closed, "everything of the closed loop is closed")


async def _echo(connection):
    async for message in connection:
        await connection.send(message)
