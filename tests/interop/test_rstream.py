"""rstream of rdmacm-utils against a stream that speaks the protocol of rsockets: data and credits are writes with immediate data.

The private data of the connection name a buffer for data and a table of two entries, in which each side tells the other its next
buffer. The immediate data of a write say what it was: 0 for data, with their length; 4 for credits, with the number of the last
message that may be sent; 7 for the end. rsockets use no immediate data on iWARP.
"""

from __future__ import annotations

import itertools
import struct
import time

import pytest
from helpers import DEADLINE_S, host_of, memory, require
from processes import free_port, start_program, wait_for_rdma_listener

import ndpy
from ndpy import Access, Capability, Operation, Status
from ndpy.verbs import distribution

PROGRAMS = distribution.CONNECTION_PROGRAMS
# Messages that may be on the way to this side, and receives for its peer's credits besides.
CREDITS, CONTROL = 32, 8
BUFFER = 1 << 15
HALF = BUFFER // 2
CONNECTION = struct.Struct(">BBH3xBQIIQII")
# An entry is in the order of bytes of both hosts.
ENTRY = struct.Struct("=QII")
DATA, BUFFERS, END = 0, 4, 7
SIZE, COUNT, ITERATIONS = 5000, 10, 4


class Stream:
    """One end of a stream."""

    def __init__(self, keep, adapter):
        self.cq = keep(adapter.create_completion_queue(256))
        self.queue_pair = keep(
            adapter.create_queue_pair(self.cq, receive_queue_depth=CREDITS + CONTROL, initiator_queue_depth=64)
        )
        self.inbox = memory(keep, adapter, BUFFER, Access.REMOTE_WRITE)
        self.table = memory(keep, adapter, 2 * ENTRY.size, Access.REMOTE_WRITE)
        self.outbox = memory(keep, adapter, HALF)
        self.news = memory(keep, adapter, ENTRY.size)
        for _ in range(CREDITS + CONTROL):
            self.queue_pair.receive([])
        self.received = bytearray()
        self.place = 0
        self.messages = self.credited = 0
        #: How much of the inbox the peer may be told of, and from where on.
        self.spare, self.spare_from = HALF, HALF
        self.sent = 0
        self.ended = False

    def introduction(self):
        table, inbox = self.table.remote(), self.inbox.remote()
        return CONNECTION.pack(1, 0, CREDITS, 0, table.address, table.token, 2, inbox.address, inbox.token, HALF)

    def meet(self, private_data):
        version, _, self.may_send, _, address, token, count, *first = CONNECTION.unpack_from(private_data)
        assert (version, count) == (1, 2)
        self.peer_table = ndpy.RemoteMemory(address, 2 * ENTRY.size, token)
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
                if found.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE:
                    self.queue_pair.receive([])
                    self.take(found.immediate >> 29, found.immediate & 0x1FFFFFFF)
                else:
                    self.posted -= 1

    posted = 0

    def take(self, kind, number):
        if kind == BUFFERS:
            self.may_send = number & 0xFFFF
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
        self.posted += 1
        number = BUFFERS << 29 | (self.messages + CREDITS) & 0xFFFF
        if self.spare < HALF:
            self.queue_pair.write([], self.peer_table[0:0], immediate=number)
            return
        inbox = self.inbox.remote()
        self.news.buffer[:] = ENTRY.pack(inbox.address + self.spare_from, inbox.token, HALF)
        self.spare -= HALF
        self.spare_from = (self.spare_from + HALF) % BUFFER
        start = ENTRY.size * next(self.next_entry)
        self.queue_pair.write(self.news, self.peer_table[start : start + ENTRY.size], immediate=number)

    def receive(self, length):
        self.work(lambda: len(self.received) >= length)
        data = bytes(self.received[:length])
        del self.received[:length]
        return data

    # ---- what goes ----

    def send(self, data):
        while data:
            if not self.target.length:
                self.turn()
            self.work(lambda: self.sent & 0xFFFF != self.may_send and not self.posted)
            part = data[: min(self.target.length, HALF)]
            self.outbox.buffer[: len(part)] = part
            self.posted += 1
            self.queue_pair.write(self.outbox[: len(part)], self.target[: len(part)], immediate=DATA << 29 | len(part))
            self.target = self.target[len(part) :]
            self.sent += 1
            data = data[len(part) :]
        self.work(lambda: not self.posted)

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
    require(adapter, Capability.IMMEDIATE_DATA)
    return Stream(keep, adapter)


OPTIONS = ("-S", SIZE, "-C", COUNT, "-I", ITERATIONS, "-T", "v")


def exchange(stream, turns):
    """What rstream does: 16 bytes there and back, then all messages of a turn there and back."""
    ours, theirs = numbers(), numbers()
    for length in [16] + [SIZE * COUNT] * ITERATIONS:
        for is_ours in turns:
            if is_ours:
                stream.send(ours(length))
            else:
                assert stream.receive(length) == theirs(length)


def test_rstream_as_client(adapter, keep, pytestconfig, stream):
    listener = keep(adapter.listen((host_of(adapter), 0)))
    where = ("-s", listener.address[0], "-p", listener.address[1])
    with start_program(pytestconfig, "rstream", PROGRAMS, *where, *OPTIONS) as client:
        connector = keep(listener.get_request(DEADLINE_S))
        stream.meet(connector.private_data)
        connector.accept(stream.queue_pair, private_data=stream.introduction(), timeout_s=DEADLINE_S)
        exchange(stream, (False, True))
        stream.work(lambda: stream.ended)
        connector.disconnect(DEADLINE_S)
        assert "custom    4.8k    10" in client.succeed().out


def test_rstream_as_server(adapter, keep, pytestconfig, stream):
    port = free_port()
    with start_program(pytestconfig, "rstream", PROGRAMS, "-b", host_of(adapter), "-p", port, *OPTIONS) as server:
        wait_for_rdma_listener(server, port)
        connector = keep(adapter.create_connector())
        connector.connect(
            stream.queue_pair, (host_of(adapter), port), private_data=stream.introduction(), timeout_s=DEADLINE_S
        )
        stream.meet(connector.private_data)
        connector.complete_connect(DEADLINE_S)
        exchange(stream, (True, False))
        stream.work(lambda: stream.ended)
        connector.disconnect(DEADLINE_S)
        server.succeed()
