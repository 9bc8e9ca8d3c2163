"""rstream and riostream of rdmacm-utils against a stream that speaks the protocol of rsockets: data and credits are
writes with immediate data.

The private data of the connection name a buffer for data and a table. Its first two entries are where each side tells
the other its next buffer. In the entries after them each side tells what memory it has mapped; the other writes to it
without a word (riostream). The immediate data of a write say what it was: 0 for data, with their length; 4 for credits,
with the number of the last message that may be sent; 6 for mapped memory, with its number in the table; 7 for the end.
On iWARP a message of these 4 bytes follows the write.
"""

from __future__ import annotations

import itertools
import struct
import sys
import time
from functools import partial

import pytest
from kit.helpers import DEADLINE_S, STRESS, host_of, memory, require_kernel_driver, sample, wait_until
from kit.processes import free_port, start_program, wait_for_rdma_listener
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Capability, Flags, Operation, Status
from ndpy.platforms.verbs import distribution
from ndpy.vocabulary.quirks import Quirk

PROGRAMS = distribution.CONNECTION_PROGRAMS
# Messages that may be on the way to this side, and receives for its peer's credits besides.
CREDITS, CONTROL = 32, 8
BUFFER = 1 << 15
HALF = BUFFER // 2
CONNECTION = struct.Struct(">BBH3xBQIIQII")
HAS_MAPS = 2
# Entries and messages are in the order of bytes of both hosts: address, token, length; the same after an offset.
ENTRY = struct.Struct("=QII")
MAP = struct.Struct("=QQII")
MAPS_AT = 2 * ENTRY.size
MESSAGE = 4
DATA, BUFFERS, MAPPED, END = 0, 4, 6, 7
SIZE, COUNT, ITERATIONS = 5000, 10, 4


class Stream:
    """One end of a stream."""

    def __init__(self, keep, adapter):
        self.cq = keep(adapter.create_completion_queue(256))
        self.queue_pair = keep(
            adapter.create_queue_pair(
                self.cq, receive_queue_depth=CREDITS + CONTROL, initiator_queue_depth=64, inline_data_size=MESSAGE
            )
        )
        self.inbox = memory(keep, adapter, BUFFER, Access.REMOTE_WRITE)
        self.table = memory(keep, adapter, MAPS_AT + MAP.size, Access.REMOTE_WRITE)
        self.outbox = memory(keep, adapter, HALF)
        self.news = memory(keep, adapter, MAP.size)
        self.has_immediate = Capability.IMMEDIATE_DATA in adapter.info.capabilities
        self.words = memory(keep, adapter, MESSAGE * (CREDITS + CONTROL))
        self.word = memory(keep, adapter, MESSAGE)
        for slot in range(CREDITS + CONTROL):
            self._receive_word(slot)
        self.received = bytearray()
        self.place = 0
        self.messages = self.credited = 0
        #: How much of the inbox the peer may be told of, and from where on.
        self.spare, self.spare_from = HALF, HALF
        self.sent = 0
        self.ended = False

    def introduction(self):
        table, inbox = self.table.remote(), self.inbox.remote()
        return CONNECTION.pack(1, HAS_MAPS, CREDITS, 1, table.address, table.token, 2, inbox.address, inbox.token, HALF)

    def meet(self, private_data):
        version, flags, self.may_send, maps, address, token, count, *first = CONNECTION.unpack_from(private_data)
        assert (version, flags, count) == (1, HAS_MAPS, 2)
        self.peer_table = ndpy.RemoteMemory(address, MAPS_AT + maps * MAP.size, token)
        self.next_entry = itertools.cycle((1, 0))
        place, key, length = first
        self.target = ndpy.RemoteMemory(place, length, key)
        self.own_entry = itertools.cycle((1, 0))

    # ---- what comes ----

    def work(self, ready):
        """Take completions until ready()."""
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert not self.ended
            for found in self.cq.wait(max(deadline - time.monotonic(), 0)):
                if found.status is Status.CANCELED:
                    # The peer has left, perhaps before its last message was received.
                    self.ended = True
                    continue
                found.raise_for_status()
                if found.operation in (Operation.RECEIVE, Operation.RECEIVE_RDMA_WITH_IMMEDIATE):
                    word = found.immediate if self.has_immediate else self._word_in(found.context)
                    self._receive_word(found.context)
                    self.take(word >> 29, word & 0x1FFFFFFF)
                else:
                    self.posted -= 1

    posted = 0

    def _receive_word(self, slot):
        self.queue_pair.receive(self.words[MESSAGE * slot : MESSAGE * (slot + 1)], context=slot)

    def _word_in(self, slot):
        return int.from_bytes(self.words.buffer[MESSAGE * slot : MESSAGE * (slot + 1)], sys.byteorder)

    def take(self, kind, number):
        if kind == BUFFERS:
            self.may_send = number & 0xFFFF
        elif kind == MAPPED:
            self.messages += 1
        elif kind == END:
            self.ended = True
        else:
            assert kind == DATA
            self.received += self.inbox.buffer[self.place : self.place + number]
            assert self.place % HALF + number <= HALF
            self.place = (self.place + number) % BUFFER
            self.spare += number
            self.messages += 1
            if self.spare >= HALF or self.messages - self.credited >= CREDITS // 2:
                self.give()

    def give(self):
        """Tell the peer how many messages may come, and the next buffer if half of the inbox is free."""
        self.credited = self.messages
        number = (self.messages + CREDITS) & 0xFFFF
        if self.spare < HALF:
            self.tell(BUFFERS, number)
            return
        inbox = self.inbox.remote()
        self.news.buffer[: ENTRY.size] = ENTRY.pack(inbox.address + self.spare_from, inbox.token, HALF)
        self.spare -= HALF
        self.spare_from = (self.spare_from + HALF) % BUFFER
        start = ENTRY.size * next(self.next_entry)
        self.tell(BUFFERS, number, self.news[: ENTRY.size], self.peer_table[start : start + ENTRY.size])

    def receive(self, length):
        self.work(lambda: len(self.received) >= length)
        data = bytes(self.received[:length])
        del self.received[:length]
        return data

    # ---- what goes ----

    def tell(self, kind, number, local=(), remote=None):
        """Write, and tell what it was."""
        word = kind << 29 | number
        if self.has_immediate:
            self.posted += 1
            self.queue_pair.write(local, remote or self.peer_table[0:0], immediate=word)
            return
        if remote:
            self.posted += 1
            self.queue_pair.write(local, remote)
        self.word.buffer[:] = word.to_bytes(MESSAGE, sys.byteorder)
        self.posted += 1
        self.queue_pair.send(self.word, flags=Flags.INLINE)

    def send(self, data):
        while data:
            if not self.target.length:
                self.turn()
            self.work(lambda: self.sent & 0xFFFF != self.may_send and not self.posted)
            part = data[: min(self.target.length, HALF)]
            self.outbox.buffer[: len(part)] = part
            self.tell(DATA, len(part), self.outbox[: len(part)], self.target[: len(part)])
            self.target = self.target[len(part) :]
            self.sent += 1
            data = data[len(part) :]
        self.work(lambda: not self.posted)

    def map(self, region):
        """Let the peer write to a region, at offset 0."""
        remote = region.remote()
        self.news.buffer[:] = MAP.pack(0, remote.address, remote.token, remote.length)
        self.sent += 1
        self.tell(MAPPED, 0, self.news, self.peer_table[MAPS_AT : MAPS_AT + MAP.size])
        self.work(lambda: not self.posted)

    def mapped(self):
        """What the peer has mapped."""
        offset, address, token, length = MAP.unpack_from(self.table.buffer, MAPS_AT)
        assert offset == 0
        return ndpy.RemoteMemory(address, length, token)

    def turn(self):
        """Go on in the peer's next buffer, which it has told or will tell."""
        start = ENTRY.size * next(self.own_entry)
        entry = memoryview(self.table.buffer)[start : start + ENTRY.size]

        def is_told():
            return ENTRY.unpack(entry)[2] != 0

        self.work(is_told)
        address, token, length = ENTRY.unpack(entry)
        entry[:] = bytes(ENTRY.size)
        self.target = ndpy.RemoteMemory(address, length, token)


def numbers():
    """Endless data: rstream checks that each byte is one more than the last."""
    place = 0

    def more(length):
        nonlocal place
        place += length
        return bytes(number & 0xFF for number in range(place - length, place))

    return more


@pytest.fixture
def stream(adapter, keep):
    require_kernel_driver(adapter, "rsockets")
    return Stream(keep, adapter)


OPTIONS = ("-S", SIZE, "-C", COUNT, "-I", ITERATIONS, "-T", "v")


def exchange_messages(stream, turns):
    """What rstream does: 16 bytes there and back, then all messages of a turn there and back."""
    ours, theirs = numbers(), numbers()
    for length in [16] + [SIZE * COUNT] * ITERATIONS:
        for is_ours in turns:
            if is_ours:
                stream.send(ours(length))
            else:
                assert stream.receive(length) == theirs(length)


def ends_with(buffer, byte):
    return buffer[-1] == byte


def exchange_in_mapped_memory(stream, keep, adapter, begins):
    """What riostream does: it maps memory, sends 16 bytes there and back, then writes all transfers of a turn there and
    back.

    The last byte of the last transfer is the number of the turn, and its other bytes count. Those of the transfers
    before are still what they were.
    """
    ours, theirs = numbers(), numbers()
    inbox = memory(keep, adapter, SIZE, Access.REMOTE_WRITE)
    inbox.buffer[-1] = 0xFF
    source = memory(keep, adapter, SIZE)
    if begins:
        stream.map(inbox)
        stream.send(bytes(16))
    assert len(stream.receive(16)) == 16
    if not begins:
        stream.map(inbox)
        stream.send(bytes(16))
    target = stream.mapped()
    assert target.length == SIZE

    def write():
        stream.posted += 1
        stream.queue_pair.write(source, target)
        stream.work(lambda: not stream.posted)

    for turn in range(2 * ITERATIONS):
        if begins == (turn % 2 == 0):
            source.buffer[:] = bytes([turn ^ 0xFF]) * SIZE
            for _ in range(COUNT - 1):
                write()
            source.buffer[:] = ours(SIZE - 1) + bytes([turn])
            write()
        else:
            wait_until(partial(ends_with, inbox.buffer, turn), f"turn {turn}", DEADLINE_S)
            assert inbox.buffer[:-1] == theirs(SIZE - 1)


PROGRAM_CASES = [("riostream", "client"), ("rstream", "server"), ("rstream", "client"), ("riostream", "server")]


@pytest.mark.parametrize(("program", "role"), PROGRAM_CASES)
def test_their_stream_and_ours(adapter, keep, pytestconfig, stream, program, role):
    if (program, role) not in sample(PROGRAM_CASES, 2):
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine is slow at it")
    if has_quirk(adapter, Quirk.SIW_LEAVES_FIRST_MESSAGE) and not STRESS:
        pytest.skip("with NDPY_STRESS=1 only: once in a while the first message stays in the server's socket")
    begins = role == "server"

    def exchange():
        if program == "rstream":
            exchange_messages(stream, (True, False) if begins else (False, True))
        else:
            exchange_in_mapped_memory(stream, keep, adapter, begins)
        stream.work(lambda: stream.ended)
        connector.disconnect(DEADLINE_S)

    if role == "client":
        listener = keep(adapter.listen((host_of(adapter), 0)))
        where = ("-s", listener.address[0], "-p", listener.address[1])
        with start_program(pytestconfig, program, PROGRAMS, *where, *OPTIONS) as client:
            connector = keep(listener.get_request(DEADLINE_S))
            stream.meet(connector.private_data)
            connector.accept(stream.queue_pair, private_data=stream.introduction(), timeout_s=DEADLINE_S)
            exchange()
            result = client.succeed()
    else:
        port = free_port()
        with start_program(pytestconfig, program, PROGRAMS, "-b", host_of(adapter), "-p", port, *OPTIONS) as server:
            wait_for_rdma_listener(server, port)
            connector = keep(adapter.create_connector())
            connector.connect(
                stream.queue_pair, (host_of(adapter), port), private_data=stream.introduction(), timeout_s=DEADLINE_S
            )
            stream.meet(connector.private_data)
            connector.complete_connect(DEADLINE_S)
            exchange()
            result = server.succeed()
    # It prints this line when it has verified all bytes.
    assert "custom    4.8k    10" in result.out
