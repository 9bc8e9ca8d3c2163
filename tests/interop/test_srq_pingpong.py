"""ibverbs-utils' ibv_srq_pingpong against ndpy's shared receive queue, in both roles.

It exchanges lines as ibv_rc_pingpong does, but always 256 of them. Those beyond its queue pairs are zeros. All its
queue pairs share one buffer, for sends and receives. A queue pair sends its next message when its last one has ended
and an answer has come, until `COUNT` messages of all queue pairs together have ended.
"""

from __future__ import annotations

import dataclasses
import random
import socket
from collections import Counter

import pytest
from kit.helpers import DEADLINE_S, SEED, STRESS, contents, has_kernel_driver, memory, require, rounds
from kit.processes import Process, free_port, start_program, wait_for_tcp_listener
from kit.quirks import skip_where

import ndpy
from ndpy import Access, Endpoint, Operation
from ndpy.platforms.verbs import distribution
from ndpy.vocabulary.quirks import Quirk

PROGRAM = "ibv_srq_pingpong"
LINES = 256
LINE_LENGTH = 52
DONE = b"done\0"
PAGE = 4096
MTU = 1024
QUEUE_PAIRS = 4
# Much fewer than COUNT, so every receive is posted many times.
RECEIVES = 2 * QUEUE_PAIRS
SIZE = 10007
COUNT = rounds(1000, 60)


class OurEnd:
    """Queue pairs that draw from one shared receive queue. Each receive has its own part of the memory."""

    def __init__(self, keep, adapter: ndpy.Adapter) -> None:
        # The first byte of each page is 0, which the program's -c looks for.
        data = bytearray(random.Random(SEED).randbytes(SIZE))
        data[::PAGE] = bytes(len(range(0, SIZE, PAGE)))
        self.message = bytes(data)
        self._outbox = memory(keep, adapter, self.message, Access.NONE)
        self._inboxes = [memory(keep, adapter, SIZE) for _ in range(RECEIVES)]
        self._cq = keep(adapter.create_completion_queue(RECEIVES + QUEUE_PAIRS))
        self._shared = keep(adapter.create_shared_receive_queue(RECEIVES))
        self.queue_pairs = [
            keep(adapter.create_queue_pair(self._cq, initiator_queue_depth=2, srq=self._shared))
            for _ in range(QUEUE_PAIRS)
        ]
        for context, inbox in enumerate(self._inboxes):
            self._shared.receive(inbox, context=context)

    @property
    def gid_index(self) -> int:
        return self.queue_pairs[0].local_endpoint().gid_index

    def lines(self) -> bytes:
        ends = [queue_pair.local_endpoint() for queue_pair in self.queue_pairs]
        ends += [Endpoint(0, 0, 0, bytes(16))] * (LINES - QUEUE_PAIRS)
        return b"".join(f"{end.lid:04x}:{end.qp_number:06x}:{end.psn:06x}:{end.gid.hex()}\0".encode() for end in ends)

    def connect(self, lines: bytes) -> None:
        for number, queue_pair in enumerate(self.queue_pairs):
            line = lines[number * LINE_LENGTH : (number + 1) * LINE_LENGTH]
            lid, qp_number, psn, gid = line.rstrip(b"\0").decode().split(":")
            remote = Endpoint(int(lid, 16), int(qp_number, 16), int(psn, 16), bytes.fromhex(gid), mtu=MTU)
            local = queue_pair.local_endpoint()
            queue_pair.connect_endpoint(dataclasses.replace(remote, port=local.port))

    def talk(self, we_begin: bool) -> Counter[ndpy.QueuePair]:
        """Send COUNT messages, and take as many or a few more. Returns how many came for each queue pair.

        The program leaves when COUNT have come and COUNT of its own have ended. A message too many would fail.
        """
        received: Counter[ndpy.QueuePair] = Counter()
        posted = sent = 0
        waits = {queue_pair: {Operation.RECEIVE} for queue_pair in self.queue_pairs}
        if we_begin:
            for queue_pair in self.queue_pairs:
                self._send(queue_pair, waits)
                posted += 1
        while sent < COUNT or received.total() < COUNT:
            # One at a time: when both counts are reached the program leaves, and may leave a surplus message behind.
            (completion,) = self._cq.wait(DEADLINE_S, 1)
            completion.raise_for_status()
            queue_pair = completion.queue_pair
            if completion.operation is Operation.SEND:
                sent += 1
            else:
                received[queue_pair] += 1
                # A client's first message is from before our answer, or from during it.
                self._take(completion, check=we_begin or received[queue_pair] > 1)
            waits[queue_pair].discard(completion.operation)
            if posted < COUNT and not waits[queue_pair]:
                self._send(queue_pair, waits)
                posted += 1
        return received

    def _send(self, queue_pair: ndpy.QueuePair, waits: dict[ndpy.QueuePair, set[Operation]]) -> None:
        queue_pair.send(self._outbox)
        waits[queue_pair] = {Operation.SEND, Operation.RECEIVE}

    def _take(self, completion: ndpy.Completion, check: bool) -> None:
        inbox = self._inboxes[completion.context]
        assert completion.nbytes == SIZE
        if check and contents(inbox) != self.message:
            pytest.fail(f"a message arrived damaged (seed {SEED})")
        inbox.buffer[:] = bytes(SIZE)
        self._shared.receive(inbox, context=completion.context)


@pytest.fixture
def our_end(adapter, keep) -> OurEnd:
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    return OurEnd(keep, adapter)


@pytest.fixture(params=["polls", "waits for events"])
def options(request, adapter, our_end) -> list[object]:
    """The program's options, but for port and host."""
    events = request.param != "polls"
    if events and has_kernel_driver(adapter) and not STRESS:
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine starts programs slowly")
    name, numbers = adapter.info.name, ("-q", QUEUE_PAIRS, "-r", RECEIVES, "-n", COUNT, "-s", SIZE, "-m", MTU)
    return ["-d", name, "-g", our_end.gid_index, *numbers, "-c", *(["-e"] if events else [])]


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        assert part, "the program closed the exchange"
        data += part
    return data


def check(program: Process, received: Counter[ndpy.QueuePair]) -> None:
    ended = program.succeed()
    assert f"{COUNT} iters" in ended.out
    assert "invalid data" not in ended.out
    assert len(received) == QUEUE_PAIRS


def test_ibv_srq_pingpong_as_server_of_our_shared_queue(our_end, options, pytestconfig):
    port = free_port()
    with start_program(pytestconfig, PROGRAM, distribution.VERBS_PROGRAMS, *options, "-p", port) as server:
        wait_for_tcp_listener(server, port)
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
            connection.sendall(our_end.lines())
            our_end.connect(receive_exactly(connection, LINES * LINE_LENGTH))
            connection.sendall(DONE)
        check(server, our_end.talk(we_begin=True))


def test_ibv_srq_pingpong_as_client_of_our_shared_queue(our_end, options, pytestconfig):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        port = listener.getsockname()[1]
        arguments = (*options, "-p", port, "127.0.0.1")
        with start_program(pytestconfig, PROGRAM, distribution.VERBS_PROGRAMS, *arguments) as client:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                our_end.connect(receive_exactly(connection, LINES * LINE_LENGTH))
                connection.sendall(our_end.lines())
                assert receive_exactly(connection, len(DONE)) == DONE
            check(client, our_end.talk(we_begin=False))
