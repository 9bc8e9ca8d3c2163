"""F.5.4, event by event: how each end learns what the other took. A peer in Python decides the order of events.

The peer either sends receipts, as softnd does, or is a foreign one, which only answers Reads.
"""

from __future__ import annotations

import socket
import time

import iwarp
import pytest
import suspended_workers
from conftest import share
from connection_attempt import limits_of
from consumer import Side, accept, brief, connect, get_address, get_results, no_completion
from early_disconnect import released_at_end
from iwarp import Opcode, Queue, Startup
from test_h_hostile_answers import Peer, connect_to_peer
from test_h_silent_peer import connected_to
from version2 import Kind, Status, kernel32

SUCCESS, CANCELED, IO_TIMEOUT = Status.SUCCESS, Status.CANCELED, Status.IO_TIMEOUT
# Longer than an end that disconnects waits for the peer, even on a busy machine.
FINISH_LIMIT_S = 20.0


class Counting(Peer):
    """Counts the messages before the last Read Request."""

    messages_before_read = 0

    def _answer_read(self, request: bytes) -> None:
        self.messages_before_read = len(self.messages)
        super()._answer_read(request)


class Conversation:
    """A softnd side that is connected to a peer in Python. A foreign peer holds back its answers to Reads."""

    def __init__(self, kit, listener, *, receipts: bool, crc: bool = False, limit: int = 16, **side) -> None:
        self.kit, self.receipts = kit, receipts
        self.side = Side(kit.node(), 0xA, **side)
        rtr = iwarp.Rtr.READ
        reply = Startup(reply=True, ird=limit, ord=limit, peer_to_peer=True, rtr=rtr, crc=crc)
        self.peer = connect_to_peer(self.side, listener, reply, Counting, (limit, limit))
        self.peer.holding = True
        if receipts:
            self.peer.send_receipt()
            self.peer.run_until(lambda: bool(self.peer.receipts))

    def send(self, count: int, size: int = 8) -> None:
        for number in range(count):
            self.side.send(self.side.region.sge(0, size), context=number)

    def take(self, count: int) -> None:
        """Let the peer take this many messages."""
        self.peer.run_until(lambda: len(self.peer.messages) >= count)

    def acknowledge(self) -> None:
        """Let the peer acknowledge, in its own way, what it took so far."""
        if self.receipts:
            self.peer.send_receipt()
            return
        for sink, offset, *_ in self.peer.held:
            self.peer.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink, offset, b""))
        self.peer.held.clear()

    def all_sent(self, count: int) -> None:
        """Wait until the peer has the messages and, if it sends no receipts, the Read behind the last one."""
        self.take(count)
        if not self.receipts:
            self.peer.run_until(lambda: self.peer.messages_before_read == count)

    def send_all(self, count: int) -> None:
        """Send this many messages, and wait until the peer has them."""
        self.send(count)
        self.all_sent(count)

    def acknowledged_all(self, count: int) -> bool:
        """Acknowledge what has arrived. Return whether that was exactly `count` messages."""
        came = len(self.peer.messages)
        acknowledged = came if self.receipts else self.peer.messages_before_read if self.peer.held else 0
        self.acknowledge()
        return acknowledged == count

    def ends(self) -> None:
        """Wait until the peer has seen the end of softnd's stream."""
        self.peer.run_to_the_end()

    def statuses(self, count: int, kind: Kind = Kind.SEND) -> list:
        done = self.side.take(count, FINISH_LIMIT_S)
        assert [d.kind for d in done] == [kind] * count
        assert [d.context for d in done] == list(range(count))
        return [d.status for d in done]

    def succeed(self, count: int) -> None:
        """Acknowledge. So many messages have succeeded then, and no others."""
        self.acknowledge()
        assert self.statuses(count) == [SUCCESS] * count

    def disconnect(self):
        return self.kit.issue(self.side.connector, "Disconnect")


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


@pytest.fixture
def converse(kit, listener):
    """A function that creates a Conversation."""
    made = []

    def converse(**options) -> Conversation:
        made.append(Conversation(kit, listener, **options))
        return made[-1]

    yield converse
    for conversation in made:
        conversation.peer.close()


both_peers = pytest.mark.parametrize("receipts", [True, False], ids=["softnd", "foreign"])
both_crcs = pytest.mark.parametrize("crc", [False, True], ids=["plain", "crc"])


# Receipts


@both_crcs
def test_sends_complete_by_the_peers_receipts_without_a_read(converse, crc):
    conversation = converse(receipts=True, crc=crc, limit=0)
    conversation.send(6)
    conversation.take(4)
    between = conversation.peer.taken
    assert no_completion(conversation.side.cq), "nothing was acknowledged"
    conversation.peer.send_receipt(between)
    assert conversation.statuses(4) == [SUCCESS] * 4
    conversation.take(6)
    conversation.peer.send_receipt()
    assert [d.status for d in conversation.side.take(2)] == [SUCCESS] * 2
    assert conversation.peer.held == []


def test_a_write_completes_by_a_receipt_and_a_read_by_its_answer(converse):
    conversation = converse(receipts=True)
    memory = bytearray(100_000)
    token = int.from_bytes(conversation.peer.expose(memory, iwarp.Rights.WRITE).to_bytes(4, "big"), "little")
    region = conversation.side.node.region(len(memory))
    conversation.side.write(region.sge(), to=0, token=token, context=0)
    conversation.side.read(conversation.side.region.sge(0, 8), at=0, token=token, context=1)
    conversation.side.write(region.sge(0, 0), to=0, token=token, context=2)
    conversation.peer.hold(1)
    conversation.peer.rtr_taken = False
    conversation.peer.run_until(lambda: conversation.peer.rtr_taken)  # the Write of no bytes
    conversation.peer.send_receipt()
    assert brief(conversation.side.take(1)) == [(Kind.WRITE, SUCCESS, 0)]
    sink, offset, *_ = conversation.peer.held[0]
    conversation.peer.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink, offset, b"12345678"))
    assert brief(conversation.side.take(2)) == [(Kind.READ, SUCCESS, 1), (Kind.WRITE, SUCCESS, 2)]


def test_a_receipt_comes_before_what_the_program_does_about_the_message(converse):
    conversation = converse(receipts=True)
    conversation.side.receive(conversation.side.region.sge(0, 64), context=1)
    before = conversation.peer.receipts[-1].taken
    message = iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"x"), crc=False)
    conversation.peer.socket.sendall(message)
    assert brief(conversation.side.take(1)) == [(Kind.RECEIVE, SUCCESS, 1)]
    conversation.side.send(conversation.side.region.sge(0, 1))
    conversation.take(1)
    # The peer's first receipt was taken too, but causes no receipt of its own.
    assert conversation.peer.receipts[-1].taken == before + len(message)


def test_only_a_peer_that_made_itself_known_is_told(kit):
    side = Side(kit.node(), 2)
    side.receive(side.region.sge(0, 64), context=1)
    peer = connected_to(kit, side)
    with peer:
        peer.send(b"x")
        peer.read_start(0, 0, 0)
        assert brief(side.take(1)) == [(Kind.RECEIVE, SUCCESS, 1)]
        peer.flush()
        assert peer.receipts == []
        request = iwarp.read_request(0x77, iwarp.SOFTND_READ_OFFSET, 0, 0, 0)
        peer._send_untagged(Opcode.READ_REQUEST, Queue.READ_REQUEST, request)
        with pytest.raises(iwarp.ProtocolError, match="unrequested"):
            peer.run_until(lambda: False)
        assert [receipt.final for receipt in peer.receipts] == [False], "the receipt precedes the answer"


def test_softnd_makes_itself_known_with_its_first_message(converse):
    assert converse(receipts=False).peer.identified_as_softnd


@both_crcs
def test_a_receipt_that_claims_more_than_was_sent_is_refused(converse, crc):
    conversation = converse(receipts=True, crc=crc)
    conversation.send(2)
    conversation.take(2)
    conversation.peer.send_receipt(conversation.peer.taken + 1)
    assert conversation.statuses(2)[0] != SUCCESS
    conversation.ends()
    assert conversation.peer.terminated is not None and conversation.peer.terminated.error == (1, 1, 1)


def test_a_receipt_that_claims_what_still_waits_to_be_sent_is_refused(converse):
    conversation = converse(receipts=True)
    region = conversation.side.node.region(8 << 20)
    for number in range(4):
        conversation.side.send(region.sge(), context=number)
    # The peer does not read, so most of it cannot have been sent.
    conversation.peer.send_receipt(4 * (8 << 20))
    statuses = conversation.statuses(4)
    assert SUCCESS not in statuses


def test_a_terminate_that_claims_what_still_waits_to_be_sent_is_refused(converse):
    conversation = converse(receipts=False)
    region = conversation.side.node.region(8 << 20)
    for number in range(4):
        conversation.side.send(region.sge(), context=number)
    header = iwarp.untagged(Opcode.SEND, Queue.SEND, 4, b"")
    conversation.peer.terminate(0, 2, 255, header)
    assert SUCCESS not in conversation.statuses(4)


# The peer disconnects


@both_peers
@both_crcs
def test_what_was_taken_before_the_peer_left_succeeds_and_nothing_else(converse, receipts, crc):
    conversation = converse(receipts=receipts, crc=crc)
    conversation.send_all(1)
    conversation.succeed(1)
    conversation.send(3)
    conversation.take(4)
    if receipts:
        conversation.peer.send_receipt(final=True)
    conversation.peer.close()
    # A foreign peer that disconnects without an answer proves nothing, even if it took them.
    statuses = conversation.statuses(3)
    assert statuses[0] in ((SUCCESS,) if receipts else (CANCELED, IO_TIMEOUT))
    assert statuses[1:] == [SUCCESS if receipts else CANCELED] * 2


def test_part_of_what_was_sent_is_taken_when_the_peer_leaves(converse):
    conversation = converse(receipts=True)
    conversation.send(4)
    conversation.take(2)
    taken = conversation.peer.taken
    conversation.take(4)
    conversation.peer.send_receipt(taken, final=True)
    conversation.peer.socket.shutdown(socket.SHUT_WR)
    assert conversation.statuses(4) == [SUCCESS, SUCCESS, CANCELED, CANCELED]


def test_f_6_6_a_peer_that_tells_and_goes_without_a_final_receipt_has_died(converse):
    conversation = converse(receipts=True)
    conversation.send(4)
    conversation.take(4)
    conversation.peer.send_receipt(conversation.peer.taken - 1)
    conversation.peer.socket.shutdown(socket.SHUT_WR)
    assert conversation.statuses(4) == [SUCCESS, SUCCESS, SUCCESS, IO_TIMEOUT]


@both_peers
def test_what_a_peer_took_before_it_died_succeeds_though_a_send_finds_the_connection_reset_first(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send_all(2)
    with suspended_workers.suspended(conversation.kit.library):
        conversation.acknowledge()
        conversation.peer.reset()
        conversation.side.send(conversation.side.region.sge(0, 8), context=2)
    assert conversation.statuses(3) == [SUCCESS, SUCCESS, IO_TIMEOUT]


@both_peers
def test_a_message_that_nobody_receives_hides_no_reset(converse, receipts):
    """Receiving stands still behind this message."""
    conversation = converse(receipts=receipts)
    conversation.peer.send(b"nobody receives it")
    with suspended_workers.suspended(conversation.kit.library):
        conversation.peer.reset()
        conversation.side.send(conversation.side.region.sge(0, 8), context=0)
    assert conversation.statuses(1) == [IO_TIMEOUT]


@both_peers
def test_an_acknowledgement_behind_a_message_without_a_receive_is_heard_when_the_peer_goes(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send_all(2)
    conversation.peer.send(b"no Receive for this")
    conversation.acknowledge()
    if receipts:
        conversation.peer.send_receipt(final=True)
    conversation.peer.socket.shutdown(socket.SHUT_WR)
    assert conversation.statuses(2) == [SUCCESS] * 2


@both_peers
def test_an_acknowledgement_before_a_terminate_counts(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send_all(3)
    conversation.acknowledge()
    conversation.peer.terminate(0, 0, 0)
    assert conversation.statuses(3) == [SUCCESS] * 3
    conversation.ends()


# This end disconnects


@both_peers
@both_crcs
def test_disconnect_waits_for_the_acknowledgement_of_what_was_sent(converse, receipts, crc):
    conversation = converse(receipts=receipts, crc=crc)
    conversation.send(4)
    conversation.take(4)
    disconnecting = conversation.disconnect()
    conversation.side.receive(context=77)
    assert brief(conversation.side.take(1)) == [(Kind.RECEIVE, CANCELED, 77)]
    assert disconnecting.pending()
    conversation.all_sent(4)
    conversation.succeed(4)
    if receipts:
        conversation.ends()
        assert conversation.peer.receipts[-1].final
        assert disconnecting.pending() or disconnecting.result() == SUCCESS
        conversation.peer.close()
    else:
        conversation.ends()
    assert disconnecting.result() == SUCCESS


def test_disconnect_ends_with_the_peers_end_and_what_it_did_not_take_is_cancelled(converse):
    conversation = converse(receipts=True)
    conversation.send(4)
    conversation.take(2)
    taken = conversation.peer.taken
    disconnecting = conversation.disconnect()
    conversation.ends()
    assert disconnecting.pending()
    conversation.peer.send_receipt(taken, final=True)
    conversation.peer.close()
    assert conversation.statuses(4) == [SUCCESS, SUCCESS, CANCELED, CANCELED]
    assert disconnecting.result() == SUCCESS


@both_peers
def test_disconnect_from_a_peer_that_says_nothing_ends_in_time(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send(2)
    began = time.monotonic()
    assert conversation.disconnect().result() == SUCCESS
    assert time.monotonic() - began < FINISH_LIMIT_S
    assert conversation.statuses(2) == [CANCELED] * 2


def test_disconnect_with_nothing_under_way_waits_for_nobody(converse):
    for receipts in (True, False):
        conversation = converse(receipts=receipts)
        assert conversation.disconnect().poll() == SUCCESS
        conversation.ends()
        assert [receipt.final for receipt in conversation.peer.receipts[1:]] == [True] * receipts


@both_peers
def test_who_leaves_takes_nothing_more_and_does_not_say_so(converse, receipts):
    conversation = converse(receipts=receipts)
    for number in range(2):
        conversation.side.receive(conversation.side.region.sge(0, 64), context=number)
    conversation.peer.send(b"taken")
    conversation.peer.flush()
    if not receipts:
        conversation.peer.read_start(0, 0, 0)
        conversation.peer.flush()
    assert brief(conversation.side.take(1)) == [(Kind.RECEIVE, SUCCESS, 0)]
    conversation.send(1)
    conversation.take(1)
    disconnecting = conversation.disconnect()
    assert brief(conversation.side.take(1)) == [(Kind.RECEIVE, CANCELED, 1)]
    if receipts:
        conversation.peer.run_until(lambda: conversation.peer.receipts[-1].final)
        position = conversation.peer.receipts[-1].taken
    conversation.peer.send(b"too late")
    conversation.peer.read_start(0, 0, 0)
    if not receipts:
        conversation.peer.hold(1)
    conversation.succeed(1)
    conversation.ends()
    assert not conversation.peer._reads[0].done, "an answer would say that the message was taken"
    if receipts:
        assert conversation.peer.receipts[-1].taken == position
        conversation.peer.close()
    assert disconnecting.result() == SUCCESS


@both_peers
def test_a_send_that_waits_for_a_slot_is_cancelled_by_disconnect(converse, receipts):
    conversation = converse(receipts=receipts, depth=4)
    conversation.send(4)
    conversation.take(4)
    disconnecting = conversation.disconnect()
    conversation.all_sent(4)
    conversation.succeed(4)
    conversation.side.send(conversation.side.region.sge(0, 8), context=9)
    assert brief(conversation.side.take(1)) == [(Kind.SEND, CANCELED, 9)]
    conversation.peer.close()
    assert disconnecting.result() == SUCCESS


def test_a_flush_ends_the_wait_of_disconnect(converse):
    conversation = converse(receipts=True)
    conversation.send(2)
    disconnecting = conversation.disconnect()
    assert disconnecting.pending()
    assert conversation.side.qp.Flush() == SUCCESS
    assert disconnecting.poll() == SUCCESS
    assert conversation.statuses(2) == [CANCELED] * 2


def violate_access(peer: Peer) -> None:
    peer.send_raw(iwarp.tagged(Opcode.WRITE, 0xDEADBEEF, 0, b"x"))


@both_peers
@both_crcs
def test_a_peer_that_violates_access_and_took_a_message_has_it_acknowledged_first(converse, receipts, crc):
    conversation = converse(receipts=receipts, crc=crc)
    conversation.send_all(2)
    violate_access(conversation.peer)
    assert no_completion(conversation.side.cq)
    conversation.acknowledge()
    conversation.ends()
    assert conversation.peer.terminated is not None and conversation.peer.terminated.error == (1, 1, 0)
    conversation.peer.close()
    assert conversation.statuses(2) == [SUCCESS] * 2


def test_a_terminate_says_how_far_it_took(converse):
    conversation = converse(receipts=True)
    for number in range(2):
        conversation.side.receive(conversation.side.region.sge(0, 64), context=number)
    message = iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"x"), crc=False)
    before = conversation.peer.receipts[-1].taken
    more = iwarp.fpdu(iwarp.tagged(Opcode.WRITE, 0xDEADBEEF, 0, b"x"), crc=False)
    conversation.peer.socket.sendall(message + more + message)
    conversation.ends()
    assert conversation.peer.terminated is not None
    assert conversation.peer.receipts[-1] == (before + len(message), True)
    assert conversation.statuses(2, Kind.RECEIVE) == [SUCCESS, CANCELED]


@both_peers
def test_a_terminate_does_not_wait_for_ever(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send_all(2)
    violate_access(conversation.peer)
    conversation.ends()
    assert conversation.peer.terminated is not None
    assert conversation.statuses(2) == [CANCELED] * 2


@both_peers
def test_both_ends_terminate(converse, receipts):
    conversation = converse(receipts=receipts)
    conversation.send_all(2)
    violate_access(conversation.peer)
    conversation.acknowledge()
    conversation.peer.terminate(0, 0, 0)
    assert conversation.statuses(2) == [SUCCESS] * 2


# A foreign peer's read limit


def test_no_send_to_a_foreign_peer_goes_without_its_read(converse):
    conversation = converse(receipts=False, limit=1)
    conversation.send_all(1)
    conversation.send(3)
    kernel32.Sleep(50)
    conversation.peer.limit_s = 0.2
    with pytest.raises(TimeoutError):
        conversation.take(2)
    conversation.peer.limit_s = 10
    conversation.acknowledge()
    conversation.all_sent(4)
    assert len(conversation.peer.held) == 1, "one Read for all three"
    conversation.acknowledge()
    assert [d.status for d in conversation.side.take(4)] == [SUCCESS] * 4


def test_a_program_without_reads_has_none_though_the_start_up_offers_one(kit, listener):
    side = Side(kit.node(), 2)
    connecting = connect(kit, side.connector, side.qp, listener.getsockname()[:2], (0, 0))
    with Peer(listener.accept()[0]) as peer:
        request = peer.await_start()
        assert (request.ird, request.ord) == (0, 1)
        peer.answer(Startup(reply=True, ird=1, peer_to_peer=True, rtr=iwarp.Rtr.READ))
        assert connecting.result() == SUCCESS
        assert limits_of(side.connector) == (0, 0)
        assert kit.do(side.connector, "CompleteConnect") == SUCCESS
        side.read(side.region.sge(0, 8), at=0x1000, token=0x1234, context=5)
        assert brief(side.take(1)) == [(Kind.READ, Status.INVALID_DEVICE_REQUEST, 5)]


def test_a_peer_that_has_closed_its_side_gets_no_read_beyond_its_limit(converse):
    conversation = converse(receipts=False, limit=1)
    conversation.send_all(1)
    conversation.peer.socket.shutdown(socket.SHUT_WR)
    conversation.ends()
    assert len(conversation.peer.held) == 1
    assert conversation.statuses(1) == [CANCELED]


def test_nothing_is_sent_before_the_first_message_of_a_peer_without_peer_to_peer_set_up(kit):
    side = Side(kit.node(), 2)
    listener = side.node.listener()
    arrived = kit.issue(listener, "GetConnectionRequest", side.connector)
    with Peer(socket.create_connection(get_address(listener, "GetLocalAddress"))) as peer:
        peer.local = Startup(ird=4, ord=4)
        peer.socket.sendall(peer.local.encode())
        assert arrived.result() == SUCCESS
        assert accept(kit, side.connector, side.qp, (4, 4)).result() == SUCCESS
        peer._agree(peer._take_startup(reply=True))
        side.send(side.region.sge(0, 8), context=3)
        peer.limit_s = 0.2
        with pytest.raises(TimeoutError):
            peer.receive()
        assert side.disconnect() == SUCCESS
        assert brief(side.take(1)) == [(Kind.SEND, CANCELED, 3)]
        peer.limit_s = FINISH_LIMIT_S
        peer.run_to_the_end()
        assert not peer.messages


def test_a_released_connector_leaves_in_the_same_way(converse):
    conversation = converse(receipts=True)
    conversation.send(2)
    conversation.take(2)
    conversation.side.connector.release()
    conversation.ends()
    assert not get_results(conversation.side.cq, 1)
    conversation.peer.send_receipt()
    assert conversation.statuses(2) == [SUCCESS] * 2


# The four patterns of test_f_early_disconnect.py with this peer, which disconnects as soon as it has acknowledged


def exchange(conversation: Conversation) -> None:
    conversation.side.receive(conversation.side.region.sge(0, 64), context=100)
    conversation.send(1)
    conversation.peer.send(b"one each way")
    conversation.all_sent(1)
    conversation.acknowledge()


def take_and_violate_access(conversation: Conversation) -> None:
    conversation.send_all(1)
    violate_access(conversation.peer)
    conversation.acknowledge()


def take_nothing(conversation: Conversation) -> None:
    conversation.send(1, 0)
    conversation.all_sent(1)
    conversation.acknowledge()


def take_a_burst(conversation: Conversation) -> None:
    conversation.send(4)
    conversation.peer.run_until(lambda: conversation.acknowledged_all(4))


@both_peers
@both_crcs
@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("pattern", [exchange, take_and_violate_access, take_nothing, take_a_burst])
def test_a_peer_that_acknowledges_and_is_gone(kit, listener, pattern, receipts, crc, limit):
    for _ in range(share(100, 2)):
        with released_at_end(kit):
            conversation = Conversation(kit, listener, receipts=receipts, crc=crc, limit=limit)
            pattern(conversation)
            if receipts:
                conversation.peer.send_receipt(final=True)
            conversation.peer.socket.shutdown(socket.SHUT_WR)
            done = conversation.side.take(2 if pattern is exchange else 4 if pattern is take_a_burst else 1)
            assert [d.status for d in done] == [SUCCESS] * len(done)
            assert conversation.disconnect().result() == SUCCESS
            conversation.peer.close()
