"""Peers of ndpy.aio that break its rules, stop in the middle or die. Each disturbs its own connection and no other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from pathlib import Path

import pytest
from kit import aio_peer
from kit.aio_peer import CLOSE, DONE, GRANT, OFFERS, SLOT, SLOTS, START, WITHDRAW, Peer, frame, hello, message, offer
from kit.helpers import DEADLINE_S, host_of, require, sample
from kit.quirks import has_quirk, skip_where

import ndpy
from ndpy import Access, RemoteMemory, aio
from ndpy.aio import transfers as transfers_module
from ndpy.vocabulary.quirks import Quirk

pytestmark = pytest.mark.timeout(180)

LONG = 50_000
OPTIONS = {"slot_size": SLOT, "slots": SLOTS, "offers": OFFERS, "timeout_s": DEADLINE_S, "close_timeout_s": 0.3}


class Scene:
    """An echo server, and how its handlers ended."""

    def __init__(self, adapter: ndpy.Adapter, keep) -> None:
        self.adapter = adapter
        self.keep = keep
        self.ends: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.connections: asyncio.Queue[aio.Connection] = asyncio.Queue()
        self.handle = self.echo

    async def echo(self, connection: aio.Connection) -> None:
        async for received in connection:
            await connection.send(received)

    async def handler(self, connection: aio.Connection) -> None:
        self.connections.put_nowait(connection)
        end = None
        try:
            await self.handle(connection)
        except Exception as error:
            end = error
        self.ends.put_nowait(end)

    def peer(self, **options) -> Peer:
        return Peer(self.adapter, self.keep, **options)

    async def begun(self) -> Peer:
        peer = self.peer()
        await peer.start(self.server.address)
        return peer

    async def end(self) -> BaseException | None:
        return await asyncio.wait_for(self.ends.get(), DEADLINE_S)

    async def is_good(self) -> None:
        """A client that keeps the rules is served."""
        handle, self.handle = self.handle, self.echo
        async with aio.connect(self.server.address, adapter=self.adapter, **OPTIONS) as client:
            for length in (10, LONG):
                sending = asyncio.ensure_future(client.send(bytes(length)))
                assert await client.receive() == bytes(length)
                await sending
            await self.connections.get()
        assert await self.end() is None
        self.handle = handle


@pytest.fixture
def served(adapter, keep):
    """`async with served() as scene`. Then the server still serves, and closes everything within its time."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    @contextlib.asynccontextmanager
    async def start(**options):
        scene = Scene(adapter, keep)
        options = {"adapter": adapter, **OPTIONS, **options}
        async with aio.serve((host_of(adapter), 0), scene.handler, **options) as scene.server:
            yield scene
            while not scene.connections.empty():
                scene.connections.get_nowait()
            await scene.is_good()

    yield start
    keep.close()
    gc.collect()
    assert adapter._device._open_children() == []


# ---- broken rules ----

BROKEN = {
    "nothing": (b"", "a frame of 0 bytes"),
    "half-a-header": (frame(GRANT)[:12], "shorter than a header"),
    "unknown-kind": (frame(77), "unknown kind"),
    "second-start": (frame(START), "has begun"),
    "done-for-nothing": (frame(DONE, 1), "which is not open"),
    "withdrawal-of-nothing": (frame(WITHDRAW, 1), "which it has not made"),
    "granted-too-much": (frame(GRANT, granted=SLOTS + 1), "granted 5 messages"),
    "seen-too-much": (frame(GRANT, seen=SLOTS + 1), "has seen 5"),
    "length-of-another": (frame(2, length=5, body=b"four"), "a message of 5 bytes in a frame of 28"),
    "offer-of-2-to-the-60": (offer(1, RemoteMemory(0, 1 << 60, 1)), r"\(max_message_length\)"),
    "offer-out-of-order": (offer(2, RemoteMemory(0, LONG, 1)), "offer 2 after 0"),
    "impossible-memory": (
        frame(3, 1, length=LONG, body=b"\xff" * 8 + RemoteMemory(0, LONG, 1).to_bytes()[8:]),
        "impossible memory",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_rule_is_a_protocol_error_for_its_end_and_a_reset_for_the_peer(served, name):
    data, match = BROKEN[name]
    async with served() as scene:
        peer = await scene.begun()
        peer.send(data)
        with pytest.raises(aio.ProtocolError, match=match):
            raise await scene.end()
        await peer.ended()


async def test_more_messages_than_granted(served):
    async with served() as scene:
        scene.handle = lambda connection: asyncio.sleep(3600)
        peer = await scene.begun()
        connection = await scene.connections.get()
        for _ in range(SLOTS + 1):
            peer.send(message(b"x"))
        await peer.ended()
        for _ in range(SLOTS):
            assert await connection.receive() == b"x"
        with pytest.raises(aio.ProtocolError, match="more messages than it was granted"):
            await connection.receive()


async def test_a_frame_that_is_longer_than_a_slot_ends_the_connection(served):
    async with served() as scene:
        peer = await scene.begun()
        peer.send(message(bytes(SLOT)))
        with pytest.raises(aio.ConnectionResetError):
            raise await scene.end()
        await peer.ended()


@pytest.mark.parametrize(
    "private_data",
    [b"", hello(version=2), hello(slots=0), hello(offers=65), hello(slot_size=63), hello()[:3]],
    ids=["nothing", "version", "slots", "offers", "slot-size", "three-bytes"],
)
async def test_a_client_that_says_something_else_is_refused(served, private_data):
    async with served() as scene:
        with pytest.raises((ndpy.NdpyError, OSError)):
            await scene.peer().connect(scene.server.address, private_data or b"\0")


# ---- long messages ----


async def test_done_twice(served):
    async with served() as scene:

        async def handle(connection):
            await connection.send(bytes(LONG))
            await connection.receive()

        scene.handle = handle
        peer = await scene.begun()
        await peer.frame_of(aio_peer.OFFER)
        for _ in range(2):
            peer.send(frame(DONE, 1))
        with pytest.raises(aio.ProtocolError, match="DONE for offer 1, which is not open"):
            raise await scene.end()


async def test_an_offer_that_nobody_answers_can_be_cancelled_and_costs_the_connection(served, monkeypatch):
    monkeypatch.setattr(transfers_module, "_LET_GO_S", 0.3)
    async with served() as scene:

        async def handle(connection):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(connection.send(bytes(LONG)), 0.2)
            await connection.receive()

        scene.handle = handle
        peer = await scene.begun()
        offered = await peer.frame_of(aio_peer.OFFER)
        assert (await peer.frame_of(WITHDRAW))[4:8] == offered[4:8]
        with pytest.raises(aio.ConnectionResetError, match="did not let go"):
            raise await scene.end()
        # The memory is out of reach for the peer.
        await peer.ended()


async def test_offered_memory_that_is_gone(served, adapter):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    async with served() as scene:
        peer = await scene.begun()
        remote = peer.lend(bytes(LONG))
        peer.lent.close()
        peer.send(offer(1, remote))
        with pytest.raises(aio.ConnectionResetError) as caught:
            raise await scene.end()
        # siw's message about it ends the connection before the read completes.
        if not has_quirk(scene.adapter, Quirk.IWARP_ONE_STATUS_FOR_LOSS_AND_MEMORY):
            assert isinstance(caught.value.__cause__, ndpy.NdpyError)


async def test_offered_memory_that_cannot_be_read(served, adapter):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    skip_where(adapter, Quirk.SIW_READS_WITHOUT_RIGHT)
    async with served() as scene:
        peer = await scene.begun()
        region = peer.keep(scene.adapter.register(bytearray(LONG), Access.LOCAL_WRITE | Access.REMOTE_WRITE))
        peer.send(offer(1, region.remote()))
        with pytest.raises(aio.ConnectionResetError):
            raise await scene.end()


async def test_an_offer_of_more_than_there_is_memory_fails_where_it_is_received(served):
    """The program has allowed it."""
    most = (1 << 63) - 1
    async with served(max_message_length=most) as scene:
        peer = await scene.begun()
        peer.send(offer(1, RemoteMemory(0, most, 1)))
        assert isinstance(await scene.end(), MemoryError)


async def test_the_memory_of_an_offer_is_out_of_reach_after_done(served):
    async with served() as scene:
        data = bytearray(LONG)

        async def handle(connection):
            await connection.send(data)
            await connection.send(b"sent")
            await connection.receive()

        scene.handle = handle
        peer = await scene.begun()
        remote = RemoteMemory.from_bytes((await peer.frame_of(aio_peer.OFFER))[24:])
        assert (await peer.transfer(peer.queue_pair.read, remote, LONG)).ok
        peer.send(frame(DONE, 1))
        await peer.frame_of(aio_peer.MESSAGE)
        # The message says that the right was taken away before.
        assert not (await peer.transfer(peer.queue_pair.read, remote, 64)).ok
        with pytest.raises(aio.ConnectionResetError):
            raise await scene.end()


async def test_the_memory_of_an_offer_cannot_be_written_to(served):
    async with served() as scene:
        data = bytearray(b"d" * LONG)

        async def handle(connection):
            await connection.send(data)

        scene.handle = handle
        peer = await scene.begun()
        remote = RemoteMemory.from_bytes((await peer.frame_of(aio_peer.OFFER))[24:])
        completion = await peer.transfer(peer.queue_pair.write, remote, 64)
        assert not completion.ok or has_quirk(scene.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT)
        with pytest.raises(aio.ConnectionResetError):
            raise await scene.end()
        assert data == b"d" * LONG


# ---- peers that do nothing ----


async def test_a_client_that_connects_and_says_nothing_is_left_alone_after_a_while(served):
    async with served(timeout_s=2.0) as scene:
        peers = [scene.peer() for _ in range(3)]
        for peer in peers:
            await peer.connect(scene.server.address)
        await scene.is_good()
        for peer in peers:
            await peer.ended()


async def test_a_server_that_accepts_and_says_nothing_is_left_after_a_while(adapter, keep, served):
    async with served() as scene:
        listener = keep(adapter.listen((host_of(adapter), 0)))
        connecting = asyncio.ensure_future(
            aio.connect(listener.address, adapter=adapter, **{**OPTIONS, "timeout_s": 2.0}).__aenter__()
        )
        peer = scene.peer()
        await peer.accept(listener)
        with pytest.raises(ndpy.TimeoutError, match="accepted the connection and then said nothing"):
            await connecting


@pytest.mark.parametrize("first", [frame(GRANT), message(b"x"), frame(CLOSE)], ids=["grant", "message", "close"])
async def test_a_server_that_does_not_begin_with_start(adapter, keep, served, first):
    async with served() as scene:
        listener = keep(adapter.listen((host_of(adapter), 0)))
        connecting = asyncio.ensure_future(aio.connect(listener.address, adapter=adapter, **OPTIONS).__aenter__())
        peer = scene.peer()
        await peer.accept(listener)
        assert (await peer.frame())[0] == START
        peer.send(first)
        with pytest.raises(aio.ProtocolError, match="has not begun"):
            await connecting


async def test_a_peer_that_takes_no_messages_holds_up_its_own_handler(served):
    # Leaving the server's block cancels the handler, which waits for room.
    async with served() as scene:

        async def handle(connection):
            for _ in range(100):
                await connection.send(b"message")

        scene.handle = handle
        peer = await scene.begun()
        for _ in range(SLOTS):
            assert (await peer.frame())[0] == aio_peer.MESSAGE
        await scene.is_good()
        assert scene.ends.empty()


async def test_a_peer_that_posts_no_receives_ends_its_own_connection(served):
    async with served() as scene:
        peer = scene.peer(receives=0)
        await peer.connect(scene.server.address)
        peer.send(frame(START))
        await asyncio.to_thread(peer.connector.wait_disconnected, DEADLINE_S)
        assert isinstance(await scene.end(), aio.ConnectionResetError)


async def test_a_peer_that_never_closes_is_waited_for_as_long_as_the_server_says(served):
    async with served() as scene:

        async def handle(connection):
            await connection.send(b"bye")

        scene.handle = handle
        peer = await scene.begun()
        await peer.frame_of(CLOSE)
        await peer.ended()


# ---- peers that die ----


@contextlib.asynccontextmanager
async def process(adapter, address, step):
    script = Path(__file__).parents[1] / "kit/aio_peer.py"
    words = (sys.executable, str(script), adapter.info.name, address[0], str(address[1]), step)
    child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize("step", sample(list(reversed(aio_peer.STEPS)), 2 if sys.platform == "linux" else 1))
async def test_a_process_that_is_killed_is_a_reset(adapter, served, step):
    if aio_peer.STEPS.index(step) >= aio_peer.STEPS.index("offered"):
        # The process offers a region.
        require(adapter, ndpy.Capability.REGION_ACCESS)
    async with served() as scene:
        async with process(adapter, scene.server.address, step) as child:
            assert (await child.stdout.readline()).split() == [b"there"]
            await scene.is_good()
            child.kill()
            await child.wait()
        if step != "connected":
            end = await scene.end()
            if step == "closed":
                # The peer has said that it has no more messages. Sending what it does not take is a reset.
                assert end is None or isinstance(end, ConnectionError)
            else:
                assert isinstance(end, aio.ConnectionResetError)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stops processes")
async def test_a_process_that_is_stopped_holds_up_nobody(adapter, served):
    """On soft0 its adapter is stopped with it, and answers nothing."""
    async with served() as scene:

        async def handle(connection):
            async with connection.expose(bytearray(LONG)):
                await asyncio.gather(*(connection.send(bytes(length)) for length in (10, LONG) * 10))

        async with process(adapter, scene.server.address, "begun") as child:
            scene.handle = handle
            assert (await child.stdout.readline()).split() == [b"there"]
            child.send_signal(signal.SIGSTOP)
            connection = await scene.connections.get()
            await scene.is_good()
            began = time.monotonic()
            await connection.close()
            assert time.monotonic() - began < DEADLINE_S
            assert isinstance(await scene.end(), (ndpy.ClosedError, ConnectionError))
