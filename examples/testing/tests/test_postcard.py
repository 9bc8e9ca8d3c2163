"""Tests of both ends. They run on soft0 by default, and with --rdma vm or --rdma here on other adapters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import postcard
import pytest

import ndpy
from ndpy import aio
from ndpy.faults import Fault
from ndpy.testing import own_address

PROGRAM = Path(__file__).parents[1] / "postcard"


def answer(adapter: ndpy.Adapter, channel, count: int) -> None:
    """The other end, in a process of its own: answer cards with their text in capitals."""
    with adapter.listen((own_address(adapter), 0)) as listener:
        channel.send(listener.address)
        with postcard.accept(adapter, listener) as line:
            for _ in range(count):
                line.send(line.receive().upper())
            assert channel.get() == "done"


def test_a_damaged_card_is_noticed():
    """It needs no adapter, so the plugin does nothing here."""
    card = postcard.pack(0, b"hello")
    assert postcard.unpack(card) == (0, b"hello")
    with pytest.raises(postcard.Damaged):
        postcard.unpack(card[:-1] + b"!")


def test_a_card_is_one_message(rdma_pair):
    """Two connected ends in this process: enough for the bytes that one end puts on the wire."""
    client, server = rdma_pair
    card = postcard.pack(3, b"hello")
    client.memory.buffer[: len(card)] = card
    server.queue_pair.receive(server.memory)
    client.queue_pair.send(client.memory[: len(card)])
    client.take_ok()
    (arrived,) = server.take_ok()
    assert postcard.unpack(bytes(server.memory.buffer[: arrived.nbytes])) == (3, b"hello")


def test_many_cards_to_another_process_and_back(rdma_adapter, rdma_peer):
    peer = rdma_peer(answer, 3 * postcard.ROOM)
    with postcard.connect(rdma_adapter, peer.get()) as line:
        for number in range(3 * postcard.ROOM):
            line.send(b"card %d" % number)
            assert line.receive() == b"CARD %d" % number
        peer.send("done")
        peer.result()


def silent(adapter: ndpy.Adapter, channel) -> None:
    with adapter.listen((own_address(adapter), 0)) as listener:
        channel.send(listener.address)
        with postcard.accept(adapter, listener):
            channel.get()


def test_nobody_sends_more_than_there_is_room_for(rdma_adapter, rdma_peer):
    peer = rdma_peer(silent)
    with postcard.connect(rdma_adapter, peer.get()) as line:
        for _ in range(postcard.ROOM):
            line.send(b"")
        with pytest.raises(postcard.Full):
            line.send(b"")
        peer.send("done")


def read(adapter: ndpy.Adapter, channel) -> str:
    with adapter.listen((own_address(adapter), 0)) as listener:
        channel.send(listener.address)
        with postcard.accept(adapter, listener) as line:
            try:
                return line.receive().decode()
            except postcard.Damaged:
                return "damaged"


def test_a_byte_that_changes_on_the_way_is_noticed(rdma_peer, rdma_faults):
    """The adapter of this process sends a wrong byte.
    Of Windows' adapters only softnd can: on others the test is skipped.
    """
    peer = rdma_peer(read)
    adapter = rdma_faults(Fault("corrupt", nth=1))
    with postcard.connect(adapter, peer.get()) as line:
        line.send(b"hello")
        assert peer.result() == "damaged"


@pytest.mark.skipif(sys.platform == "win32", reason="the C end uses libibverbs, which is for Linux")
def test_the_c_end_and_the_python_end_understand_each_other(rdma_adapter, rdma_env):
    host = own_address(rdma_adapter)
    with rdma_adapter.listen((host, 0)) as listener:
        command = [PROGRAM, host, str(listener.address[1]), "hello", "from C"]
        with (
            subprocess.Popen(command, env=rdma_env, stdout=subprocess.PIPE, text=True) as program,
            postcard.accept(rdma_adapter, listener) as line,
        ):
            for _ in range(2):
                line.send(line.receive().upper())
            printed, _ = program.communicate(timeout=30)
    assert printed == "HELLO\nFROM C\n"
    assert program.returncode == 0


@pytest.mark.asyncio
async def test_the_office_keeps_cards(rdma_adapter, rdma_server):
    async with (
        rdma_server(postcard.Office().serve) as server,
        aio.connect(server.address, adapter=rdma_adapter) as connection,
    ):
        for question, expected in ((b"Ada", b""), (b"Ada hello", None), (b"Ada", b"hello"), (b"Ada", b"")):
            await connection.send(question)
            if expected is not None:
                assert await connection.receive() == expected


@pytest.mark.rdma(capabilities=ndpy.Capability.ATOMICS)
def test_numbers_are_given_once(rdma_adapter, rdma_pair):
    """soft0 and Windows have no atomic operations: there the test is skipped. rxe in the VM has them."""
    client, _ = rdma_pair
    with (
        rdma_adapter.register(bytearray(8), ndpy.Access.REMOTE_ATOMIC) as counter,
        rdma_adapter.register(bytearray(8)) as result,
    ):
        numbers = [postcard.take_number(client.queue_pair, client.queue, result, counter.remote()) for _ in range(3)]
    assert numbers == [0, 1, 2]
