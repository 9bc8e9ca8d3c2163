"""Many connections at once between two processes, in both directions, and the death of a process under load.

NDPY_STRESS=1 moves 1 GiB over 64 connections. Without it, the test moves a share of that.
"""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
from conftest import SEED, share
from consumer import (
    Completion,
    Kit,
    Node,
    Request,
    Side,
    accept,
    connect,
    get_address,
    get_results,
    make_pair,
    open_handles,
    private_data,
    still_open,
    used_bytes,
    wait_until,
)
from peer import Peer
from version2 import NOTIFY_ANY, Kind, Status, kernel32

CONNECTIONS = 64
TOTAL = share(1 << 30, 128 << 20)
MESSAGE = 128 << 10
SLOTS = 2  # to send from
RING = 4  # to receive into: the sender of message n has seen n - 2, which was sent after n - 4 was checked

pytestmark = pytest.mark.timeout(900)


def content(direction: int, connection: int, number: int) -> bytes:
    """The bytes of one message. No two messages are equal."""
    seed = f"{SEED} {direction} {connection} {number}".encode()
    block = hashlib.sha256(seed).digest() * 32  # 1 KiB
    return seed.ljust(64, b".") + (block * (MESSAGE // len(block)))[64:]


class Stream:
    """One connection's traffic. Half of the messages are Sends. The others are Writes that a small Send announces."""

    def __init__(self, side: Side, connection: int, direction: int, messages: int) -> None:
        self.side, self.connection, self.direction, self.messages = side, connection, direction, messages
        self.sent = self.finished = self.received = 0
        self.remote: tuple[int, int] = (0, 0)
        # The region has SLOTS to send from, RING to receive into, and RING for the peer's Writes.
        for number in range(RING):
            self.post(number)

    def post(self, number: int) -> None:
        element = self.side.region.sge((SLOTS + number % RING) * MESSAGE, MESSAGE)
        assert self.side.receive(element, context=number) == Status.SUCCESS

    def push(self) -> None:
        """Send as much as there is room for."""
        while self.sent < self.messages and self.sent < min(self.finished, self.received) + SLOTS:
            slot, number = self.sent % SLOTS, self.sent
            data = content(self.direction, self.connection, number)
            self.side.region.put(slot * MESSAGE, data)
            if number % 2:
                where = self.remote[0] + (SLOTS + RING + number % RING) * MESSAGE
                element = self.side.region.sge(slot * MESSAGE, MESSAGE)
                assert self.side.write(element, to=where, token=self.remote[1], context=number, flags=1) == 0
                code = self.side.try_send(self.side.region.sge(slot * MESSAGE, 64), context=number)
            else:
                code = self.side.try_send(self.side.region.sge(slot * MESSAGE, MESSAGE), context=number)
            assert code == Status.SUCCESS
            self.sent += 1

    def take(self, done: Completion) -> None:
        assert done.status == Status.SUCCESS, done
        if done.kind == Kind.SEND:
            assert done.context == self.finished
            self.finished += 1
        else:
            number = self.received
            assert (done.kind, done.context) == (Kind.RECEIVE, number)
            expected = content(1 - self.direction, self.connection, number)
            slot = number % RING
            view = self.side.region.view()
            if number % 2:
                assert done.bytes == 64
                start = (SLOTS + RING + slot) * MESSAGE
                assert view[(SLOTS + slot) * MESSAGE : (SLOTS + slot) * MESSAGE + 64] == expected[:64]
            else:
                assert done.bytes == MESSAGE
                start = (SLOTS + slot) * MESSAGE
            assert view[start : start + MESSAGE] == expected, f"message {number} of connection {self.connection}"
            self.received += 1
            self.post(number + RING)
        self.push()

    @property
    def over(self) -> bool:
        return self.finished == self.received == self.messages


def pump(kit: Kit, cq, streams: list[Stream], limit_s: float) -> None:
    """Handle completions until all streams have ended. Wait by notification."""
    event = kit.event(manual=False)
    overlapped = kit.overlapped(event)
    end = time.monotonic() + limit_s
    left = {stream.side.context: stream for stream in streams}
    for stream in streams:
        stream.push()
    while left:
        got = get_results(cq, 64)
        for done in got:
            stream = left[done.queue_pair]
            stream.take(done)
            if stream.over:
                del left[done.queue_pair]
        if not got:
            assert time.monotonic() < end, f"{len(left)} connections are not through"
            assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
            assert kernel32.WaitForSingleObject(event, 30000) == 0, "nothing moves any more"
            kit.kept[:] = kit.kept[-64:]


def make_side(node: Node, cq, number: int) -> Side:
    return Side(node, 1 + number, size=(SLOTS + 2 * RING) * MESSAGE, cq=cq, depth=2 * RING)


def serve_load(channel, connections, messages):
    kit = Kit()
    node = Node(kit, "127.0.0.1")
    cq = node.cq(4096)
    listener = node.listener()
    channel.send(get_address(listener, "GetLocalAddress"))
    streams = []
    for number in range(connections):
        side = make_side(node, cq, number)
        assert kit.do(listener, "GetConnectionRequest", side.connector) == Status.SUCCESS
        stream = Stream(side, number, 1, messages)
        stream.remote = tuple(int(x) for x in private_data(side.connector).split())
        data = b"%d %d" % (side.region.address, side.region.remote)
        assert accept(kit, side.connector, side.qp, data=data).result() == Status.SUCCESS
        streams.append(stream)
    kept = list(kit.kept)
    channel.send("connected")
    channel.receive()
    pump(kit, cq, streams, 600)
    channel.send([stream.received for stream in streams])
    channel.receive()
    kit.kept += kept
    kit.close()
    channel.send("closed")


def join_load(kit: Kit, peer: Peer, connections: int, messages: int):
    node = kit.node()
    cq = node.cq(4096)
    to = tuple(peer.receive())
    streams = []
    for number in range(connections):
        side = make_side(node, cq, number)
        stream = Stream(side, number, 0, messages)
        data = b"%d %d" % (side.region.address, side.region.remote)
        assert connect(kit, side.connector, side.qp, to, data=data).result() == Status.SUCCESS
        stream.remote = tuple(int(x) for x in private_data(side.connector).split())
        assert kit.do(side.connector, "CompleteConnect") == Status.SUCCESS
        streams.append(stream)
    assert peer.receive() == "connected"
    return node, cq, streams


def test_many_connections_lose_and_double_nothing(kit):
    messages = TOTAL // (2 * CONNECTIONS * MESSAGE)
    with Peer("test_load", "serve_load", CONNECTIONS, messages) as peer:
        _, cq, streams = join_load(kit, peer, CONNECTIONS, messages)
        kept = list(kit.kept)
        start = time.monotonic()
        peer.send("go")
        pump(kit, cq, streams, 600)
        assert peer.receive(600) == [messages] * CONNECTIONS
        took = time.monotonic() - start
        print(f"{TOTAL >> 20} MiB over {CONNECTIONS} connections in {took:.1f} s")
        peer.send("leave")
        for stream in streams:
            assert stream.side.disconnect() == Status.SUCCESS
        kit.kept += kept
        assert peer.receive() == "closed"
        assert peer.finish() == 0


def end_of_all(streams: list[Stream], gone: list[Request]) -> None:
    """Check that the peer's death ends every connection.

    This ends the few connections from here whose other end Wine keeps open.
    """
    kept = 0
    for stream, request in zip(streams, gone, strict=True):
        if not request.ends(3):
            assert still_open(stream.side.connector), "the peer's socket is closed, without any notice"
            kept += 1
            assert stream.side.disconnect() == Status.SUCCESS
        else:
            assert request.poll() == Status.SUCCESS
    assert kept <= len(gone) // 4, "too many to be Wine's"


def test_a_killed_peer_frees_everything_of_its_connections(kit):
    connections, rounds = share(16, 8), share(20, 1)
    kit.node()  # keeps the provider's threads alive
    measured = []
    for _ in range(rounds + 1):
        own = Kit()
        with Peer("test_load", "serve_load", connections, 1 << 30) as peer:
            _, cq, streams = join_load(own, peer, connections, 1 << 30)
            peer.send("go")
            for stream in streams:
                stream.push()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                for done in get_results(cq, 64):
                    streams[done.queue_pair - 1].take(done)
            gone = [own.issue(stream.side.connector, "NotifyDisconnect") for stream in streams]
            peer.kill()
            end_of_all(streams, gone)
            # Every request ends: what was posted and has not finished completes, once.
            posted = {s.side.context: [s.sent - s.finished, RING] for s in streams}

            def all_ended(posted=posted, cq=cq):
                for done in get_results(cq, 64):
                    if done.kind == Kind.WRITE:  # silent, so only failures complete
                        assert done.status != Status.SUCCESS
                        continue
                    posted[done.queue_pair][done.kind == Kind.RECEIVE] -= 1
                return not any(n for counts in posted.values() for n in counts)

            wait_until(all_ended, "all requests end")
            kernel32.Sleep(50)
            assert all_ended(), "no completion comes twice"
            assert not get_results(cq, 4)
        own.close()
        measured.append((open_handles(), used_bytes()))
    assert measured[-1][0] <= measured[0][0] + 12, measured
    assert measured[-1][1] <= measured[0][1] + (8 << 20), measured


def test_one_connection_dies_and_the_others_go_on(kit):
    messages = 40
    with Peer("test_load", "serve_load", 8, messages) as peer, Peer("test_load", "serve_load", 8, 1 << 30) as victim:
        _, cq, streams = join_load(kit, peer, 8, messages)
        other = Kit()
        _, other_cq, _ = join_load(other, victim, 8, 1 << 30)
        victim.send("go")
        timer = threading.Timer(0.2, victim.kill)
        timer.start()
        kept = list(kit.kept)
        peer.send("go")
        pump(kit, cq, streams, 120)
        timer.join()
        wait_until(lambda: bool(get_results(other_cq, 64)), "the victim's connections end")
        kit.kept += kept
        other.close()
        peer.send("leave")
        assert peer.receive() == [messages] * 8
        assert peer.receive() == "closed"


def test_a_connection_that_rests_gives_back_its_buffers(kit):
    """Those of both directions. A receive is pending at each end, and goes on afterwards."""
    size = 1 << 20
    pair = make_pair(kit, size=size)

    def both_send(count):
        for side in pair:
            assert side.receive(side.region.sge(0, count), context=1) == Status.SUCCESS
        for side in pair:
            assert side.send(side.region.sge(0, count), context=2) == Status.SUCCESS
        for side in pair:
            assert {(done.context, done.status) for done in side.take(2)} == {(1, Status.SUCCESS), (2, Status.SUCCESS)}

    both_send(size)
    most = used_bytes()
    # One buffer for output, and at least 128 KiB for input, at each end.
    wait_until(lambda: used_bytes() <= most - 2_400_000, "the buffers are given back")
    for count in (1, 5000, size, 1):
        both_send(count)
