"""qperf's tests of reliable connections against an end that speaks its protocol, in both roles: messages, writes with
immediate data, reads, and atomic operations, which qperf verifies.

The two ends first speak over TCP, in little-endian order. The client sends a request of 200 bytes, which has the number
of the test. The server sends the port at which it listens for the connection of the connection manager. After
connecting, each end sends where its memory is, and the words SYNC before the test. After the test the server sends its
counts, and the client the words SYNC_AFTER.

qperf's memory is zero at first, and an end that answers sends what it got. So this end checks all bytes that it gets,
and reads the other end's memory for those that it sent.

qperf's tests of UC and UD are missing here: qperf makes their address handles without a GID, so they work on InfiniBand
only.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import struct
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

import pytest
from kit.helpers import (
    DEADLINE_S,
    contents,
    create_end,
    has_kernel_driver,
    host_of,
    memory,
    require,
    require_acknowledged_sends,
    sample,
    succeed,
    wait_until,
)
from kit.processes import Process, foreign_environment, free_port, wait_for_tcp_listener

import ndpy
from ndpy import Access, Capability, Operation

# The numbers of the tests in qperf 0.4.11.
NUMBERS = {
    "rc_bi_bw": 12,
    "rc_bw": 13,
    "rc_lat": 16,
    "rc_rdma_read_bw": 17,
    "rc_rdma_read_lat": 18,
    "rc_rdma_write_bw": 19,
    "rc_rdma_write_lat": 20,
    "rc_rdma_write_poll_lat": 21,
    "ver_rc_compare_swap": 31,
    "ver_rc_fetch_add": 32,
}
VERSION = (0, 4, 11)
ARRIVALS = (Operation.RECEIVE, Operation.RECEIVE_RDMA_WITH_IMMEDIATE)
# Version and test; access_recv, affinity, alt_port, flip, msg_size, mtu_size, no_msgs, poll_mode, port, rd_atomic, sl,
# sock_buf_size, src_path_bits, time, timeout, use_cm; names
REQUEST = struct.Struct("<4H16I64s64s")
PORT = struct.Struct("<I")
# Address; LID, QPN, PSN, number of a shared receive queue, token, second LID, outstanding reads
NODE = struct.Struct("<Q7I4x")
# Processors, ticks a second, completions at once; nine clocks at the start and at the end; bytes, messages and errors
# sent, received, and sent and received by the other end as this end knows
COUNTS = struct.Struct("<3I9Q9Q3Q3Q3Q3Q4x")
TICKS_A_SECOND = 100
SYNC, SYNC_AFTER = b"synchronization before test", b"synchronization after test"
SIZE, DEPTH = 1000, 16
# qperf sends without asking, up to 1,024 messages at once.
RECEIVES = 1100
UNTOUCHED = 0xEE
# What the ends write in the test that polls memory.
CLIENTS, SERVERS = 0x55, 0xAA
IMMEDIATE = ("rc_rdma_write_bw", "rc_rdma_write_lat")
READING = ("rc_rdma_read_bw", "rc_rdma_read_lat")
ATOMIC = ("ver_rc_compare_swap", "ver_rc_fetch_add")
# qperf swaps the value i for the next one, from 0 to this number and on.
FIRST_SWAPPED = 0x0123456789ABCDEF


@dataclass
class Counted:
    """What the other end has counted."""

    sent: int
    received: int
    received_bytes: int
    errors: int


class Ours:
    """One end of a test."""

    def __init__(self, keep, adapter):
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        if Capability.ATOMICS in adapter.info.capabilities:
            access |= Access.REMOTE_ATOMIC
        # What the peer reaches; what this end sends from; what reads and atomic operations of this end fill; slots of
        # receives.
        self.memory = memory(keep, adapter, bytes([UNTOUCHED]) * SIZE, access)
        self.outbox = memory(keep, adapter, SIZE)
        self.result = memory(keep, adapter, SIZE, Access.READ_SINK | Access.LOCAL_WRITE)
        self.inbox = memory(keep, adapter, bytes([UNTOUCHED]) * SIZE * RECEIVES)
        depths = {"receive_queue_depth": RECEIVES, "initiator_queue_depth": DEPTH}
        self.end = create_end(keep, adapter, cq_depth=RECEIVES + DEPTH, **depths)
        for slot in range(RECEIVES):
            self.receive(slot)

    def receive(self, slot):
        self.end.queue_pair.receive(self.inbox[SIZE * slot : SIZE * (slot + 1)], context=slot)

    def take(self, slot):
        """The bytes of a message. Its slot takes another one then."""
        part = memoryview(self.inbox.buffer)[SIZE * slot : SIZE * (slot + 1)]
        data = bytes(part)
        part[:] = bytes([UNTOUCHED]) * SIZE
        self.receive(slot)
        return data

    def take_what_came(self):
        """Post the receives of what has arrived again."""
        for completion in self.end.cq.poll():
            if completion.ok and completion.operation in ARRIVALS:
                with contextlib.suppress(ndpy.NdpyError):
                    self.receive(completion.context)

    # ---- what both ends say ----

    def converse(self, connection):
        self.talk = connection
        connection.settimeout(DEADLINE_S)

    def hear(self, length):
        received = b""
        while len(received) < length:
            part = self.talk.recv(length - len(received))
            assert part, f"the peer left after {received!r}"
            received += part
        return received

    def introduce(self):
        remote = self.memory.remote()
        self.talk.sendall(NODE.pack(remote.address, 0, 0, 0, 0, remote.token, 0, 1))
        address, _, _, _, _, token, _, _ = NODE.unpack(self.hear(NODE.size))
        self.peer = ndpy.RemoteMemory(address, SIZE, token)

    def synchronize(self, words):
        self.talk.sendall(words)
        assert self.hear(len(words)) == words

    # ---- requests of this end ----

    def send(self, test, data):
        self.outbox.buffer[:] = data
        if test in IMMEDIATE:
            self.end.queue_pair.write(self.outbox, self.peer, immediate=0)
        else:
            self.end.queue_pair.send(self.outbox)

    def read(self):
        """What the peer's memory holds."""
        self.result.buffer[:] = bytes([UNTOUCHED]) * SIZE
        self.end.queue_pair.read(self.result, self.peer)
        while (completion := succeed(self.end.cq)[0]).operation is not Operation.READ:
            if completion.operation is Operation.RECEIVE:
                self.take(completion.context)
        return contents(self.result)

    def arrived(self, test, completion):
        """The bytes that ended a receive."""
        assert completion.nbytes == SIZE
        if test in IMMEDIATE:
            assert completion.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
            assert self.take(completion.context) == bytes([UNTOUCHED]) * SIZE
            return contents(self.memory)
        assert completion.operation is Operation.RECEIVE
        return self.take(completion.context)


def pattern(number):
    return bytes((number + place) & 0xFF for place in range(SIZE))


def until(deadline, cq):
    """Successful completions, as they come."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ndpy.TimeoutError):
            for completion in cq.wait(left):
                completion.raise_for_status()
                yield completion


# ---- this end as the server ----


class Served:
    """What the server of a test does until its time is over. It counts what it sent and received."""

    def __init__(self, ours, test, deadline):
        self.ours, self.test, self.deadline = ours, test, deadline
        self.sent = self.received = 0

    def messages(self):
        zeros = bytes(SIZE)
        for completion in until(self.deadline, self.ours.end.cq):
            assert self.ours.arrived(self.test, completion) == zeros
            self.received += 1

    def answers(self):
        expected = bytes(SIZE)
        for completion in until(self.deadline, self.ours.end.cq):
            if completion.operation in (Operation.SEND, Operation.WRITE):
                continue
            assert self.ours.arrived(self.test, completion) == expected
            self.received += 1
            expected = pattern(self.received)
            self.ours.send(self.test, expected)
            self.sent += 1

    def both_ways(self):
        sent = bytes([7]) * SIZE
        for _ in range(DEPTH):
            self.ours.send(self.test, sent)
        self.sent = DEPTH
        for completion in until(self.deadline, self.ours.end.cq):
            if completion.operation is Operation.SEND:
                self.ours.send(self.test, sent)
                self.sent += 1
            else:
                # It sends from the memory into which it receives.
                assert set(self.ours.arrived(self.test, completion)) <= {0, 7}
                self.received += 1

    def reads(self):
        time.sleep(self.deadline - time.monotonic())
        assert self.ours.read() == pattern(1)

    def atomic_operations(self):
        time.sleep(self.deadline - time.monotonic())

    def polled_writes(self):
        mine, queue_pair = self.ours.memory.buffer, self.ours.end.queue_pair
        self.ours.outbox.buffer[:] = bytes([SERVERS]) + bytes(SIZE - 2) + bytes([SERVERS])
        while time.monotonic() < self.deadline:
            if not mine[0] == mine[-1] == CLIENTS:
                continue
            assert not any(mine[1:-1])
            self.received += 1
            mine[0] = mine[-1] = SERVERS
            queue_pair.write(self.ours.outbox, self.ours.peer)
            self.sent += 1
            self.ours.end.cq.poll()


SERVED = {
    "rc_bi_bw": Served.both_ways,
    "rc_bw": Served.messages,
    "rc_lat": Served.answers,
    "rc_rdma_read_bw": Served.reads,
    "rc_rdma_read_lat": Served.reads,
    "rc_rdma_write_bw": Served.messages,
    "rc_rdma_write_lat": Served.answers,
    "rc_rdma_write_poll_lat": Served.polled_writes,
    "ver_rc_compare_swap": Served.atomic_operations,
    "ver_rc_fetch_add": Served.atomic_operations,
}


def serve(ours, listener, port_of_manager, test):
    """One run of qperf's client. Returns what this end did, once the client has all answers."""
    ours.converse(listener.accept()[0])
    *version, number, _, _, _, _, size, _, _, _, _, _, _, _, _, seconds, _, by_manager, _, _ = REQUEST.unpack(
        ours.hear(REQUEST.size)
    )
    assert (tuple(version), number, size, by_manager) == (VERSION, NUMBERS[test], SIZE, 1)
    ours.talk.sendall(PORT.pack(port_of_manager.address[1]))
    connector = port_of_manager.get_request(DEADLINE_S)
    connector.accept(ours.end.queue_pair, timeout_s=DEADLINE_S)
    ours.introduce()
    if test in READING:
        ours.memory.buffer[:] = pattern(1)
    elif test in (*ATOMIC, "rc_rdma_write_poll_lat"):
        ours.memory.buffer[:] = bytes(SIZE)
    ours.synchronize(SYNC)
    served = Served(ours, test, time.monotonic() + seconds)
    SERVED[test](served)
    clocks = [seconds * TICKS_A_SECOND] + 8 * [0]
    sent, received = ((count * SIZE, count, 0) for count in (served.sent, served.received))
    ours.talk.sendall(COUNTS.pack(1, TICKS_A_SECOND, 1, *9 * [0], *clocks, *sent, *received, *6 * [0]))
    assert ours.hear(len(SYNC_AFTER)) == SYNC_AFTER
    return served, connector


# ---- this end as the client ----


class Client:
    """What the client of a test does. Then the other end's counts are checked."""

    COUNT = 20

    def __init__(self, ours, test):
        self.ours, self.test = ours, test

    def messages(self):
        for number in range(self.COUNT):
            self.ours.send(self.test, pattern(number))
            succeed(self.ours.end.cq)
        assert self.ours.read() == pattern(self.COUNT - 1)

    def questions(self):
        queue = self.ours.end.cq
        for number in range(self.COUNT):
            self.ours.send(self.test, pattern(number))
            answers = [one for one in succeed(queue, 2) if one.operation not in (Operation.SEND, Operation.WRITE)]
            assert [self.ours.arrived(self.test, one) for one in answers] == [pattern(number)]

    def both_ways(self):
        sent = completed = received = 0
        while completed < self.COUNT or received < self.COUNT:
            if sent < self.COUNT and sent - completed < DEPTH:
                self.ours.send(self.test, bytes([7]) * SIZE)
                sent += 1
                continue
            for completion in succeed(self.ours.end.cq):
                if completion.operation is Operation.SEND:
                    completed += 1
                else:
                    assert set(self.ours.arrived(self.test, completion)) <= {0, 7}
                    received += 1
        assert set(self.ours.read()) == {7}

    def reads(self):
        for _ in range(self.COUNT):
            assert self.ours.read() == bytes(SIZE)

    def added(self):
        for number in range(self.COUNT):
            self.ours.end.queue_pair.fetch_and_add(self.ours.result[:8], self.ours.peer[:8], 1)
            succeed(self.ours.end.cq)
            assert number_in(self.ours.result) == number

    def swapped(self):
        value = 0
        for number in range(self.COUNT):
            following = FIRST_SWAPPED + number
            self.ours.end.queue_pair.compare_and_swap(self.ours.result[:8], self.ours.peer[:8], value, following)
            succeed(self.ours.end.cq)
            assert number_in(self.ours.result) == value
            value = following

    def polled_writes(self):
        mine, queue_pair = self.ours.memory.buffer, self.ours.end.queue_pair
        mine[:] = bytes(SIZE)
        self.ours.outbox.buffer[:] = bytes([CLIENTS]) + pattern(3)[1:-1] + bytes([CLIENTS])
        for _ in range(self.COUNT):
            queue_pair.write(self.ours.outbox, self.ours.peer)
            succeed(self.ours.end.cq)
            deadline = time.monotonic() + DEADLINE_S
            while not mine[0] == mine[-1] == SERVERS:
                assert time.monotonic() < deadline
            # It sends back what it got, but for its two bytes.
            assert mine[1:-1] == pattern(3)[1:-1]
            mine[:] = bytes(SIZE)


ASKED = {
    "rc_bi_bw": Client.both_ways,
    "rc_bw": Client.messages,
    "rc_lat": Client.questions,
    "rc_rdma_read_bw": Client.reads,
    "rc_rdma_read_lat": Client.reads,
    "rc_rdma_write_bw": Client.messages,
    "rc_rdma_write_lat": Client.questions,
    "rc_rdma_write_poll_lat": Client.polled_writes,
    "ver_rc_compare_swap": Client.swapped,
    "ver_rc_fetch_add": Client.added,
}
# These servers do nothing until their second is over. The others go on until they are told to stop, or have counted all
# messages.
SILENT = (*READING, *ATOMIC)
COUNTING = ("rc_bw", "rc_rdma_write_bw")
STOP = b"."


def number_in(region):
    return int.from_bytes(region.buffer[:8], sys.byteorder)


def ask(keep, adapter, ours, address, test):
    """One run with qperf's server. Returns what the server has counted."""
    ours.converse(socket.create_connection(address, DEADLINE_S))
    messages = Client.COUNT if test in COUNTING else 0
    seconds = 1 if test in SILENT else 0
    settings = (0, 0, 0, 0, SIZE, 0, messages, 1, 0, 1, 0, 0, 0, seconds, int(DEADLINE_S), 1)
    ours.talk.sendall(REQUEST.pack(*VERSION, NUMBERS[test], *settings, b"", b""))
    (port,) = PORT.unpack(ours.hear(PORT.size))
    connector = keep(adapter.connect(ours.end.queue_pair, (address[0], port), timeout_s=DEADLINE_S))
    ours.introduce()
    ours.synchronize(SYNC)
    ASKED[test](Client(ours, test))
    if not messages and not seconds:
        ours.talk.send(STOP, socket.MSG_OOB)
    counts = COUNTS.unpack(ours.hear(COUNTS.size))[21:]
    ours.talk.sendall(SYNC_AFTER)
    connector.disconnect(DEADLINE_S)
    return Counted(sent=counts[1], received=counts[4], received_bytes=counts[3], errors=counts[2] + counts[5])


# ---- the tests ----

CASES = [(test, role) for test in NUMBERS for role in ("client", "server")]
QUICK = [("rc_rdma_write_lat", "client"), ("rc_rdma_write_bw", "server")]


def start_qperf(*arguments):
    return Process(shutil.which("qperf"), *map(str, arguments), variables=foreign_environment())


@pytest.fixture
def ours(adapter, keep):
    ours = Ours(keep, adapter)
    yield ours
    if hasattr(ours, "talk"):
        ours.talk.close()


@pytest.mark.parametrize(("test", "role"), CASES)
def test_qperf_and_ours_find_all_bytes_right(adapter, keep, ours, test, role):
    if shutil.which("qperf") is None:
        pytest.skip("qperf is not installed: make setup, where the distribution has it")
    if (test, role) in (("rc_bw", "client"), ("rc_bi_bw", "client")):
        # Nothing else keeps its sender from sending too much.
        require_acknowledged_sends(adapter)
    if adapter.info.driver == "siw" and test not in ("rc_lat", "rc_bi_bw"):
        pytest.skip("for this test qperf makes a queue pair without one of its two queues, which siw refuses")
    if test in IMMEDIATE:
        require(adapter, Capability.IMMEDIATE_DATA)
    if test in ATOMIC:
        require(adapter, Capability.ATOMICS)
    if has_kernel_driver(adapter) and (test, role) not in sample(CASES, 0) + QUICK:
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine is slow at it")
    if role == "client":
        check_their_client(adapter, keep, ours, test)
    else:
        check_their_server(adapter, keep, ours, test)


def check_their_client(adapter, keep, ours, test):
    options = ("-t", 1, "-m", SIZE, "-cm", 1, "-to", int(DEADLINE_S), "-vvs", "-un")
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        manager = keep(adapter.listen((host_of(adapter), 0)))
        where = ("-lp", listener.getsockname()[1], *options, host_of(adapter), test)
        with start_qperf(*where) as client:
            served, connector = serve(ours, listener, manager, test)
            keep(connector)
            result = client.succeed()
        # Its last messages may find no receive. On siw, TCP tells of its end behind them only.
        ended = connector.begin_wait_disconnected()
        wait_until(lambda: ended.done() or ours.take_what_came(), "the client's end")
        ended.result(0)
    assert "mismatch" not in result.out
    counted = defaultdict(int) | {
        name: int(number.replace(",", "")) for name, number in re.findall(r"(\w+_msgs) += +([\d,]+)", result.out)
    }
    theirs = counted["loc_send_msgs"]
    if test == "ver_rc_fetch_add":
        assert counted["rem_recv_msgs"] <= number_in(ours.memory) <= theirs
    elif test == "ver_rc_compare_swap":
        assert counted["rem_recv_msgs"] <= number_in(ours.memory) - FIRST_SWAPPED + 1 <= theirs
    elif test.endswith("_lat") and test not in READING:
        # At the end one may be on its way.
        assert theirs - 1 <= served.received <= theirs
        assert counted["rem_send_msgs"] == served.sent
    elif test not in READING:
        assert 0 < served.received <= theirs


def check_their_server(adapter, keep, ours, test):
    port = free_port()
    with start_qperf("-lp", port) as server:
        wait_for_tcp_listener(server, port)
        counted = ask(keep, adapter, ours, (host_of(adapter), port), test)
    assert counted.errors == 0
    if test in SILENT:
        assert (counted.sent, counted.received) == (0, 0)
    elif test in ("rc_bi_bw", "rc_rdma_write_poll_lat"):
        # It may be stopped before it has looked for messages, and counts the write that it waits for.
        assert counted.received <= Client.COUNT + 1
    else:
        assert counted.received == Client.COUNT
        assert counted.received_bytes == Client.COUNT * SIZE
