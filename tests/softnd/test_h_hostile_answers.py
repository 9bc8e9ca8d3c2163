"""A peer that the program connects to and that breaks every rule: start-up replies, answers to Reads, Terminates.

The peer is Python in this process. Whatever it does, the requests must end with a failure, no byte may change
except those that a Read asked for, and the provider must stay usable. attacks.py has the other role, a
hostile peer that connects.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import iwarp
import pytest
from conftest import SEED, share
from consumer import Completion, Kit, Side, connect, take
from hostile import mutate, mutate_fields
from iwarp import Opcode, Queue, Rights, Startup
from version2 import Kind, Mr, Status

STREAMS = share(5_000, 150)
GUARD = b"\xa5"
SINK, SIZE, REGION = 0x400, 256, 0x1000
REPLY = Startup(reply=True, ird=16, ord=16, peer_to_peer=True, rtr=iwarp.Rtr.READ)
RESPONSE = Opcode.READ_RESPONSE

pytestmark = pytest.mark.timeout(share(1800, 120))


class Peer(iwarp.Endpoint):
    """Keeps Read Requests unanswered once `holding` is set."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.holding = False
        self.held: list[tuple[int, int, int, int, int]] = []

    def _answer_read(self, request: bytes) -> None:
        if self.holding:
            self.held.append(iwarp.READ_REQUEST.unpack(request))
        else:
            super()._answer_read(request)

    def hold(self, count: int) -> list[tuple[int, int, int, int, int]]:
        self.run_until(lambda: len(self.held) >= count)
        return self.held[:count]


def connect_to_peer(
    side: Side, listener: socket.socket, reply: Startup = REPLY, kind: type[Peer] = Peer, limits=(16, 16)
) -> Peer:
    """Connect the side to a peer in Python, which listens and answers with `reply`."""
    connecting = connect(side.kit, side.connector, side.qp, listener.getsockname()[:2], limits)
    peer = kind(listener.accept()[0])
    peer.await_start()
    peer.answer(reply)
    assert connecting.result() == Status.SUCCESS
    assert side.kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
    peer.run_until(lambda: peer.rtr_taken)
    return peer


class Victim:
    """A program with one connection to the peer. Only the middle of its memory may change."""

    def __init__(self, kit: Kit, listener: socket.socket, crc: bool = False) -> None:
        node = kit.node()
        self.kit = kit
        self.side = Side(node, 0xA)
        self.region = node.region(REGION, Mr.LOCAL_WRITE | Mr.READ_SINK)
        self.region.put(0, GUARD * REGION)
        self.peer = connect_to_peer(self.side, listener, Startup(**{**vars(REPLY), "crc": crc}))
        self.peer.holding = True

    def read(self) -> tuple[int, int, int, int, int]:
        """Start a Read into the middle. Return the request that the peer got."""
        element = self.region.sge(SINK, SIZE)
        assert self.side.read(element, at=0x1000, token=0x1234) == Status.SUCCESS
        (request,) = self.peer.hold(1)
        assert request[2:] == (SIZE, int.from_bytes((0x1234).to_bytes(4, "little"), "big"), 0x1000)
        return request

    def guards_are_whole(self) -> bool:
        left, right = self.region.get(0, SINK), self.region.get(SINK + SIZE)
        return left == GUARD * len(left) and right == GUARD * len(right)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


@pytest.fixture(params=[False, True], ids=["plain", "crc"])
def victim(kit, listener, request):
    victim = Victim(kit, listener, request.param)
    yield victim
    victim.peer.close()


def answer(data=b"x" * SIZE, *, stag=0, offset=0, last=True, opcode=RESPONSE):
    """Return an answer to the Read, with its tag and offset changed by these amounts."""
    return lambda request: iwarp.tagged(
        opcode, request[0] + stag & 0xFFFFFFFF, request[1] + offset & 2**64 - 1, data, last=last
    )


ANSWERS = {
    "one byte more": [answer(b"x" * (SIZE + 1))],
    "60,000 bytes": [answer(b"x" * 60_000)],
    "one byte less": [answer(b"x" * (SIZE - 1))],
    "no end": [answer(last=False)],
    "an end too early": [answer(b"x" * 8)],
    "nothing": [answer(b"")],
    "a piece of nothing": [answer(b"", last=False)],
    "one byte more in the second piece": [answer(b"x", last=False), answer(b"x" * SIZE, offset=1)],
    "a piece left out": [answer(b"x" * 8, last=False), answer(b"x" * 8, offset=16)],
    "the same piece again": [answer(b"x" * 8, last=False), answer(b"x" * 8, last=False)],
    "the second half first": [answer(b"x" * 128, offset=128)],
    "one byte later": [answer(b"x" * (SIZE - 1), offset=1)],
    "one byte earlier": [answer(offset=-1)],
    "an offset that wraps": [answer(offset=-8)],
    "the last offset": [answer(b"x", offset=-1)],
    "another tag": [answer(stag=1)],
    "the tag of an earlier Read": [answer(stag=-1)],
    "another tag in the second piece": [answer(b"x" * 8, last=False), answer(b"x" * 248, stag=1, offset=8)],
    "a Write to the tag of the sink": [answer(opcode=Opcode.WRITE)],
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS.keys())
def test_wrong_answer_to_a_read_ends_the_connection_and_reaches_only_the_sink(victim, answers):
    request = victim.read()
    for build in answers:
        victim.peer.send_raw(build(request))
    done = victim.side.one()
    assert (done.kind, done.status.failed) == (Kind.READ, True)
    victim.peer.run_to_the_end()
    assert victim.peer.terminated is not None
    assert victim.guards_are_whole()


def test_write_through_the_local_token_of_a_sink_is_refused(victim):
    victim.read()
    token = int.from_bytes(victim.region.local.to_bytes(4, "little"), "big")
    victim.peer.send_raw(iwarp.tagged(Opcode.WRITE, token, victim.region.address + SINK, b"x"))
    assert victim.side.one().status.failed
    victim.peer.run_to_the_end()
    assert victim.peer.terminated.error in {(1, 1, 0), (0, 1, 0)}
    assert victim.region.get() == GUARD * REGION


def test_second_answer_to_a_read_is_refused(victim):
    request = victim.read()
    for _ in range(2):
        victim.peer.send_raw(answer()(request))
    assert victim.side.one().status == Status.SUCCESS
    victim.peer.run_to_the_end()
    assert victim.peer.terminated is not None
    assert victim.guards_are_whole()
    assert victim.region.get(SINK, SIZE) == b"x" * SIZE


def test_bytes_in_an_acknowledgement_go_nowhere(victim):
    assert victim.side.send(victim.region.sge(0, 8)) == Status.SUCCESS
    (request,) = victim.peer.hold(1)
    assert request[2] == 0
    victim.peer.send_raw(answer(b"x" * 60_000, last=False)(request))
    victim.peer.send_raw(answer(b"x", offset=victim.region.address)(request))
    assert victim.side.one().status == Status.SUCCESS
    assert victim.region.get() == GUARD * REGION


def test_acknowledgement_with_another_tag_is_refused_and_the_send_does_not_succeed(victim):
    assert victim.side.send(victim.region.sge(0, 8)) == Status.SUCCESS
    (request,) = victim.peer.hold(1)
    victim.peer.send_raw(answer(b"", stag=1)(request))
    assert victim.side.one().status.failed
    victim.peer.run_to_the_end()
    assert victim.peer.terminated.error in {(1, 1, 0), (0, 1, 0)}
    assert victim.region.get() == GUARD * REGION


def test_answer_that_is_cut_off_ends_the_read(victim):
    request = victim.read()
    frame = iwarp.fpdu(answer()(request), crc=victim.peer.crc)
    victim.peer.socket.sendall(frame[:-5])
    victim.peer.close()
    assert victim.side.one().status.failed
    assert victim.region.get() == GUARD * REGION  # an FPDU is placed completely or not at all


# Requests under way


def start_all(victim: Victim) -> list[tuple[int, int, int, int, int]]:
    """Start a Read, a Send and a Write. Return the peer's Read Requests, including acknowledgements."""
    side, region = victim.side, victim.region
    memory = bytearray(64)
    token = victim.peer.expose(memory, Rights.WRITE)
    token = int.from_bytes(token.to_bytes(4, "big"), "little")
    assert side.read(region.sge(SINK, SIZE), at=0x1000, token=0x1234) == Status.SUCCESS
    assert side.send(region.sge(0, 8)) == Status.SUCCESS
    assert side.write(region.sge(0, 64), to=0, token=token) == Status.SUCCESS
    victim.peer.run_until(lambda: bool(victim.peer.messages) and bytes(memory) == GUARD * 64)
    victim.peer.hold(2)
    return list(victim.peer.held)


def random_terminate(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(0, 80))
    header = b""
    if rng.random() < 0.8:
        queue, msn = rng.choice((0, 1, 2, rng.randrange(1 << 32))), rng.choice((0, 1, 2, 3, rng.randrange(1 << 32)))
        header = iwarp.untagged(rng.randrange(8), queue, msn, b"")
        if rng.random() < 0.5:
            header = iwarp.tagged(
                rng.randrange(8), rng.choice((0x100100, rng.randrange(1 << 32))), rng.randrange(80), b""
            )
    payload = iwarp.Terminate(
        rng.randrange(3), rng.randrange(3), rng.choice((*range(10), 255)), header, length=len(header) or None
    ).encode()
    return payload + rng.randbytes(rng.choice((0, 0, 28, 40)))


def end_all(victim: Victim, stream: bytes) -> list[Completion]:
    with contextlib.suppress(ConnectionError):
        victim.peer.socket.sendall(stream)
        victim.peer.socket.shutdown(socket.SHUT_WR)
    done = take(victim.side.cq, 3)
    assert sorted(one.kind for one in done) == sorted((Kind.READ, Kind.SEND, Kind.WRITE))
    assert victim.guards_are_whole()
    return done


@contextlib.contextmanager
def fresh(listener: socket.socket, crc: bool):
    """Return a new victim. It is released with everything that belongs to it."""
    kit = Kit()
    try:
        victim = Victim(kit, listener, crc)
        with victim.peer:
            yield victim
    finally:
        kit.close()


def test_random_terminates_end_all_requests(listener):
    rng = random.Random(f"{SEED}/terminates")
    for number in range(share(1_000, 60)):
        crc = bool(number % 2)
        with fresh(listener, crc) as victim:
            start_all(victim)
            ulpdu = iwarp.untagged(Opcode.TERMINATE, Queue.TERMINATE, 1, random_terminate(rng))
            done = end_all(victim, iwarp.fpdu(ulpdu, crc=crc))
            assert any(one.status.failed for one in done), f"terminate {number} (seed {SEED}): {done}"


def test_mutated_answers_end_all_requests_and_reach_only_the_sink(listener):
    for number in range(STREAMS):
        rng = random.Random(f"{SEED}/answers/{number}")
        crc = rng.random() < 0.25
        with fresh(listener, crc) as victim:
            frames = []
            for sink_stag, sink_offset, size, _, _ in start_all(victim):
                half = rng.randint(0, size)
                pieces = [(0, half), (half, size)] if 0 < half < size else [(0, size)]
                for begin, end in pieces:
                    data = rng.randbytes(end - begin)
                    ulpdu = iwarp.tagged(RESPONSE, sink_stag, sink_offset + begin, data, last=end == size)
                    frames.append(iwarp.fpdu(ulpdu, crc=crc))
            frames.append(iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"late"), crc=crc))
            stream = mutate_fields(rng, frames, crc) if rng.random() < 0.5 else mutate(rng, b"".join(frames))
            try:
                end_all(victim, stream)
            except AssertionError as error:
                raise AssertionError(f"stream {number} (seed {SEED})") from error


# Start-up


class Replies:
    """Answers every connection with the same bytes, then ends its stream."""

    def __init__(self, listener: socket.socket, data: bytes) -> None:
        self.connections = 0
        self._listener, self._data = listener, data
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self.connections += 1
                with connected, contextlib.suppress(OSError):
                    connected.settimeout(10)
                    peer = iwarp.Endpoint(connected)
                    peer.await_start()
                    connected.sendall(self._data)
                    connected.shutdown(socket.SHUT_WR)
                    while connected.recv(1000):
                        pass

    def stop(self) -> None:
        self._listener.close()
        self._thread.join(10)


GOOD = Startup(reply=True, ird=1, ord=1, private_data=b"good").encode()
REPLIES = {
    "no MPA at all": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a request": iwarp.raw_startup(iwarp.REQUEST_KEY, 0, 2, b""),
    "revision 0": iwarp.raw_startup(iwarp.REPLY_KEY, 0, 0, b""),
    "revision 3": iwarp.raw_startup(iwarp.REPLY_KEY, 0, 3, b""),
    "513 bytes of private data": iwarp.raw_startup(iwarp.REPLY_KEY, 0, 1, bytes(513)),
    "65,535 bytes of private data": iwarp.raw_startup(iwarp.REPLY_KEY, 0, 2, bytes(65535)),
    "65,535 bytes of private data announced": iwarp.raw_startup(iwarp.REPLY_KEY, 0, 2, b"", 65535),
    "enhanced without its four bytes": iwarp.raw_startup(iwarp.REPLY_KEY, 0x10, 2, b"abc"),
    "markers": iwarp.raw_startup(iwarp.REPLY_KEY, 0x80, 1, b""),
    "one byte": GOOD[:1],
    "a header cut off": GOOD[:19],
    "private data cut off": GOOD[:-1],
}


@pytest.mark.parametrize("data", REPLIES.values(), ids=REPLIES.keys())
def test_h_4_reply_that_is_none_fails_connect_and_the_queue_pair_can_connect_elsewhere(kit, listener, data):
    side = Side(kit.node(), 0xA)
    replies = Replies(listener, data)
    status = connect(kit, side.connector, side.qp, listener.getsockname()[:2]).result()
    replies.stop()
    assert status in (Status.CONNECTION_REFUSED, Status.CONNECTION_ABORTED)
    assert 1 <= replies.connections <= 2
    with socket.create_server(("127.0.0.1", 0)) as good:
        good.settimeout(10)
        side.connector = side.node.connector()
        connect_to_peer(side, good).close()


def test_h_4_random_replies_end_connect(listener):
    for number in range(share(1_000, 40)):
        rng = random.Random(f"{SEED}/replies/{number}")
        kit = Kit()
        try:
            side = Side(kit.node(), 0xA)
            connecting = connect(kit, side.connector, side.qp, listener.getsockname()[:2])
            data = mutate(rng, GOOD)
            while connecting.pending():
                with contextlib.suppress(TimeoutError):
                    listener.settimeout(0.05)
                    with listener.accept()[0] as connected, contextlib.suppress(OSError):
                        connected.settimeout(10)
                        iwarp.Endpoint(connected).await_start()
                        connected.sendall(data)
                        connected.shutdown(socket.SHUT_WR)
                        while connecting.pending() and connected.recv(1000):
                            pass
            assert connecting.result() in (Status.SUCCESS, Status.CONNECTION_REFUSED, Status.CONNECTION_ABORTED)
        finally:
            kit.close()
