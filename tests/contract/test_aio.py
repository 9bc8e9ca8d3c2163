"""Connections of ndpy.aio: messages, transfers and exposures."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kit.aio_ends import LONG, LONGEST_SHORT, SHORT, both, pattern, settle

import ndpy
from ndpy import Access, aio

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("each_loop_where_quick")]


# ---- messages ----


@pytest.mark.parametrize("length", [0, 1, LONGEST_SHORT, LONGEST_SHORT + 1, LONG])
async def test_a_message_of_any_length_arrives_whole(connected, length):
    async with connected() as (client, server):
        for sender, receiver in ((client, server), (server, client)):
            data = pattern(length)
            _, message = await both(sender.send(data), receiver.receive())
            assert message == data


async def test_messages_arrive_in_the_order_of_the_calls(connected):
    lengths = [10, LONG, 20, 30, LONG, LONG, 40, LONG, 5] * 3
    async with connected() as (client, server):

        async def receive_all():
            return [await server.receive() for _ in lengths]

        sending = [client.send(pattern(length, start)) for start, length in enumerate(lengths)]
        *_, messages = await asyncio.gather(*sending, receive_all())
        assert messages == [pattern(length, start) for start, length in enumerate(lengths)]


async def test_a_message_whose_memory_is_registered_in_a_thread_is_not_overtaken(connected):
    async with connected() as (client, server):
        sending = [asyncio.ensure_future(client.send(data)) for data in (bytes(2 << 20), b"short", b"er" * LONG)]
        assert [len(await server.receive()) for _ in sending] == [2 << 20, 5, 2 * LONG]
        await asyncio.gather(*sending)


async def test_nobody_jumps_the_queue(connected):
    """Senders wait in line. Others send at every step of the loop, also when the turn goes from one to the next."""
    async with connected() as (client, server):
        sending: list[asyncio.Task] = []

        def begin(_=None):
            if len(sending) < 100:
                number = len(sending).to_bytes(2, "big")
                sending.append(asyncio.ensure_future(client.send(number)))
                asyncio.get_running_loop().call_soon(begin)

        begin()
        assert [int.from_bytes(await server.receive(), "big") for _ in range(100)] == list(range(100))
        await asyncio.gather(*sending)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("peer_does_it", [True, False])
async def test_the_right_to_a_long_message_has_ended_when_send_returns(connected, adapter, monkeypatch, peer_does_it):
    """The peer's answer invalidates the window, if both adapters can do that. The peer may leave it undone."""
    can_do_it = ndpy.Capability.SEND_INVALIDATE in adapter.info.capabilities
    async with connected() as (client, server):
        server._channel.may_invalidate = server._channel.may_invalidate and peer_does_it
        own = []
        invalidate = client.queue_pair.invalidate
        monkeypatch.setattr(client.queue_pair, "invalidate", lambda *a, **k: (own.append(a), invalidate(*a, **k)))
        # More than there may be binds without a completion.
        for _ in range(10):
            await both(client.send(pattern(LONG)), server.receive())
            assert not any(window.is_bound for window in client._transfers.windows)
            assert len(client._transfers.windows) == 1
        assert len(own) == (0 if can_do_it and peer_does_it else 10)


@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_a_message_is_received_into_memory_of_the_program(connected, adapter, length):
    async with connected() as (client, server):
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


@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_registered_memory_is_sent(connected, adapter, length):
    async with connected() as (client, server):
        with adapter.register(bytearray(pattern(length)), Access.LOCAL_WRITE) as region:
            for data in (region, region[10:length]):
                _, message = await both(client.send(data), server.receive())
                assert message == pattern(length)[-len(message) :]
                assert len(message) == data.length


@pytest.mark.parametrize("length", [SHORT, LONG])
async def test_a_message_that_is_too_long_for_the_memory_stays(connected, length):
    async with connected() as (client, server):
        sending = asyncio.ensure_future(client.send(pattern(length)))
        with pytest.raises(ndpy.LimitExceededError, match=f"{length} bytes is longer than the {length - 1}"):
            await server.receive(bytearray(length - 1))
        assert await server.receive() == pattern(length)
        await sending


@pytest.mark.parametrize(("small", "large"), [(64, 4096), (4096, 64)])
async def test_the_ends_may_have_slots_of_different_sizes(connected, small, large):
    """A message fits the slots of both ends, or is offered."""
    lengths = [10, 40, 41, 1000, 4072, 4073, 10]
    async with connected(client_options={"slot_size": small}, server_options={"slot_size": large}) as (client, server):
        for sender, receiver in ((client, server), (server, client)):
            sending = [asyncio.ensure_future(sender.send(pattern(length))) for length in lengths]
            for length in lengths:
                assert await receiver.receive() == pattern(length)
            await asyncio.gather(*sending)


async def test_a_message_beyond_the_peer_s_limit_is_refused_before_it_is_sent(connected):
    async with connected(server_options={"max_message_length": 2000}) as (client, server):
        with pytest.raises(ndpy.LimitExceededError, match="longer than the 2000"):
            await client.send(bytes(2001))
        _, message = await both(client.send(bytes(2000)), server.receive())
        assert message == bytes(2000)


async def test_a_sender_waits_while_the_peer_takes_no_messages(connected):
    """The peer never finds no receive posted: the sender counts."""
    async with connected() as (client, server):
        sending = [asyncio.ensure_future(client.send(pattern(SHORT, place))) for place in range(20)]
        await asyncio.sleep(0.2)
        assert sum(task.done() for task in sending) == 4
        assert [await server.receive() for _ in range(20)] == [pattern(SHORT, place) for place in range(20)]
        await asyncio.gather(*sending)


async def test_both_ends_send_before_they_receive(connected):
    """Each end is full of messages that the other has not taken. Nothing may hang when they begin to take them."""
    async with connected(client_options={"slots": 1}, server_options={"slots": 1}) as (client, server):

        async def exchange(connection):
            sending = [asyncio.ensure_future(connection.send(pattern(SHORT, place))) for place in range(30)]
            await asyncio.sleep(0.1)
            messages = [await connection.receive() for _ in range(30)]
            await asyncio.gather(*sending)
            return messages

        expected = [pattern(SHORT, place) for place in range(30)]
        assert await both(exchange(client), exchange(server)) == [expected, expected]


async def test_a_stream_in_one_direction_goes_on_while_the_other_is_full(connected):
    """The client takes nothing that the server sends. The server still takes everything, and grants more."""
    async with connected() as (client, server):
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


async def test_messages_are_iterated_until_the_peer_closes(connected):
    async with connected() as (client, server):
        for place in range(3):
            await client.send(pattern(SHORT, place))
        closing = asyncio.ensure_future(client.close())
        assert [message async for message in server] == [pattern(SHORT, place) for place in range(3)]
        with pytest.raises(aio.ConnectionEndedError):
            await server.receive()
        await server.close()
        await closing


# ---- transfers ----


async def test_exposed_memory_is_read_and_written(connected):
    async with connected() as (client, server):
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


async def test_the_peer_s_right_ends_with_the_block(connected):
    async with connected() as (client, server):
        async with client.expose(bytearray(LONG), Access.REMOTE_READ) as remote:
            await server.read(remote, into=bytearray(100))
        with pytest.raises((ndpy.AccessViolationError, aio.ConnectionResetError)):
            await server.read(remote, into=bytearray(100))
        with pytest.raises(ConnectionError):
            await server.receive()


async def test_the_error_of_a_transfer_does_not_hold_the_memory(connected):
    """A program that keeps the error keeps the frames of its traceback."""
    async with connected() as (client, server):
        view = memoryview(bytearray(100))
        async with client.expose(bytearray(LONG), Access.REMOTE_READ) as remote:
            await server.read(remote, into=view)
        with pytest.raises((ndpy.AccessViolationError, aio.ConnectionResetError)) as kept:
            await server.read(remote, into=view)
        view.release()
        assert kept.tb is not None
        with pytest.raises(ConnectionError):
            await server.receive()


@pytest.mark.usefixtures("windows")
async def test_memory_is_exposed_when_the_block_begins(connected, adapter, monkeypatch):
    """The program may tell the peer about it by another way than this connection. So the bind has completed."""
    async with connected() as (client, _server):
        bound, completed = [], []
        bind, on_completion = client.queue_pair.bind, client._channel.on_completion

        def binding(*arguments, context, flags):
            bound.append(context)
            bind(*arguments, context=context, flags=flags)

        def completing(completion):
            completed.append(completion.context)
            on_completion(completion)

        monkeypatch.setattr(client.queue_pair, "bind", binding)
        monkeypatch.setattr(client._channel, "on_completion", completing)
        async with client.expose(bytearray(LONG)):
            assert len(bound) == 1
            assert bound[0] in completed


@pytest.mark.usefixtures("windows")
async def test_a_connection_that_ends_while_memory_is_being_exposed_is_a_reset(connected, adapter, monkeypatch):
    """Its end takes the right away, which the bind has just given."""
    async with connected() as (client, _server):
        end_of = client._transfers._end_of

        async def ending(future):
            await end_of(future)
            client.abort()

        monkeypatch.setattr(client._transfers, "_end_of", ending)
        with pytest.raises(aio.ConnectionResetError, match="abort"):
            async with client.expose(bytearray(LONG)):
                pass


@pytest.mark.usefixtures("windows")
async def test_a_connection_that_ends_in_another_thread_while_memory_is_being_exposed_is_a_reset(
    connected, adapter, monkeypatch
):
    async with connected() as (client, _server):
        bind = client.queue_pair.bind

        def binding(window, *arguments, **options):
            bind(window, *arguments, **options)
            window._binding.end()

        monkeypatch.setattr(client.queue_pair, "bind", binding)
        with pytest.raises(aio.ConnectionResetError):
            await client.send(pattern(LONG))


@pytest.mark.usefixtures("windows")
async def test_a_window_that_could_not_be_invalidated_is_not_used_again(connected, adapter, monkeypatch):
    async def invalidate(window):
        raise RuntimeError("planted")

    async with connected() as (client, _server):
        monkeypatch.setattr(client._transfers, "_invalidate", invalidate)
        with pytest.raises(RuntimeError, match="planted"):
            async with client.expose(bytearray(LONG)):
                pass
        assert client._transfers.windows == []


async def test_many_memories_are_exposed_at_once(connected):
    async with connected() as (client, server):
        memories = [bytearray(pattern(1000, start)) for start in range(40)]
        async with contextlib.AsyncExitStack() as stack:
            for memory in memories:
                remote = await stack.enter_async_context(client.expose(memory, Access.REMOTE_READ))
                target = bytearray(1000)
                await server.read(remote, into=target)
                assert target == memory


async def test_a_transfer_beyond_the_memory_is_refused_before_it_is_posted(connected):
    async with connected() as (client, server), client.expose(bytearray(64)) as remote:
        with pytest.raises(ndpy.ElementRangeError, match="65 bytes do not fit the 64"):
            await server.read(remote, into=bytearray(65))
        await server.read(remote, into=bytearray(64))
        await server.read(remote, into=bytearray(0))


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("transfer", ["read", "write", "expose"])
async def test_an_end_that_was_not_told_yet_is_a_reset(connected, adapter, monkeypatch, transfer):
    """The queue pair knows already that there is no connection any more."""

    def post(*arguments, **options):
        raise ndpy.NotConnectedError("the queue pair has no connection")

    async with connected() as (client, server), server.expose(bytearray(100)) as remote:
        monkeypatch.setattr(client.queue_pair, "bind" if transfer == "expose" else transfer, post)
        with pytest.raises(aio.ConnectionResetError):
            if transfer == "read":
                await client.read(remote, into=bytearray(100))
            elif transfer == "write":
                await client.write(remote, bytes(100))
            else:
                async with client.expose(bytearray(100)):
                    pass


async def test_many_transfers_run_at_once(connected):
    async with connected() as (client, server):
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
