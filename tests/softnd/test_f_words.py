"""F.5.4, event by event: how the two ends of a connection learn what was taken, with a peer in Python that decides the order.

The peer tells how far it took, as softnd does, or is a foreign one, which only answers Reads.
"""

from __future__ import annotations

import socket
import time

import iwarp
import pytest
import workers
from conftest import share
from consumer import Side, accept, brief, connect, get_address, get_results, no_completion
from endings import passing
from iwarp import Opcode, Queue, Startup
from meeting import limits_of
from nd2 import Kind, Status, kernel32
from test_h_hostile_answers import Peer
from test_h_silent_peer import connected_to

SUCCESS, CANCELED, IO_TIMEOUT = Status.SUCCESS, Status.CANCELED, Status.IO_TIMEOUT
# Longer than an end that leaves waits for the peer, however busy the machine.
LEAVE_LIMIT_S = 20.0


class Counting(Peer):
    """Knows how many messages came before the last Read Request."""

    messages_before_read = 0

    def _answer_read(self, request: bytes) -> None:
        self.messages_before_read = len(self.messages)
        super()._answer_read(request)


class Conversation:
    """A softnd side that connected to a peer in Python; every Read Request of a foreign peer's is held."""

    def __init__(self, kit, listener, *, tells: bool, crc: bool = False, limit: int = 16, **side) -> None:
        self.kit, self.tells = kit, tells
        self.side = Side(kit.node(), 0xA, **side)
        to = listener.getsockname()[:2]
        connecting = connect(kit, self.side.connector, self.side.qp, to, (limit, limit))
        self.peer = Counting(listener.accept()[0])
        self.peer.await_start()
        rtr = iwarp.Rtr.READ
        self.peer.answer(Startup(reply=True, ird=limit, ord=limit, peer_to_peer=True, rtr=rtr, crc=crc))
        assert connecting.result() == SUCCESS
        assert kit.do(self.side.connector, "CompleteConnect") == SUCCESS
        self.peer.run_until(lambda: self.peer.rtr_taken)
        self.peer.holding = True
        if tells:
            self.peer.tell()
            self.peer.run_until(lambda: bool(self.peer.words))

    def send(self, count: int, size: int = 8) -> None:
        for number in range(count):
            self.side.send(self.side.region.sge(0, size), context=number)

    def take(self, count: int) -> None:
        """The peer takes as many messages."""
        self.peer.run_until(lambda: len(self.peer.messages) >= count)

    def acknowledge(self) -> None:
        """The peer says that it took what came until now, in its way."""
        if self.tells:
            self.peer.tell()
            return
        for sink, offset, *_ in self.peer.held:
            self.peer.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink, offset, b""))
        self.peer.held.clear()

    def all_sent(self, count: int) -> None:
        """The peer has the messages and, if it does not tell, the Read behind the last."""
        self.take(count)
        if not self.tells:
            self.peer.run_until(lambda: self.peer.messages_before_read == count)

    def acknowledged_all(self, count: int) -> bool:
        """Acknowledges whatever has come; whether that was all of so many messages."""
        came = len(self.peer.messages)
        acknowledged = came if self.tells else self.peer.messages_before_read if self.peer.held else 0
        self.acknowledge()
        return acknowledged == count

    def ends(self) -> None:
        """The peer has seen the end of what softnd sends."""
        self.peer.run_to_the_end()

    def statuses(self, count: int, kind: Kind = Kind.SEND) -> list:
        done = self.side.take(count, LEAVE_LIMIT_S)
        assert [d.kind for d in done] == [kind] * count
        assert [d.context for d in done] == list(range(count))
        return [d.status for d in done]

    def disconnect(self):
        return self.kit.issue(self.side.connector, "Disconnect")


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


@pytest.fixture
def meet(kit, listener):
    """Makes a Conversation."""
    made = []

    def meet(**options) -> Conversation:
        made.append(Conversation(kit, listener, **options))
        return made[-1]

    yield meet
    for conversation in made:
        conversation.peer.close()


both_peers = pytest.mark.parametrize("tells", [True, False], ids=["softnd", "foreign"])
both_crcs = pytest.mark.parametrize("crc", [False, True], ids=["plain", "crc"])


# Words


@both_crcs
def test_sends_complete_by_the_peers_words_without_a_read(meet, crc):
    there = meet(tells=True, crc=crc, limit=0)
    there.send(6)
    there.take(4)
    between = there.peer.taken
    assert no_completion(there.side.cq), "nobody said that anything was taken"
    there.peer.tell(between)
    assert there.statuses(4) == [SUCCESS] * 4
    there.take(6)
    there.peer.tell()
    assert [d.status for d in there.side.take(2)] == [SUCCESS] * 2
    assert there.peer.held == []


def test_a_write_completes_by_a_word_and_a_read_by_its_answer(meet):
    there = meet(tells=True)
    memory = bytearray(100_000)
    token = int.from_bytes(there.peer.expose(memory, iwarp.Rights.WRITE).to_bytes(4, "big"), "little")
    region = there.side.node.region(len(memory))
    there.side.write(region.sge(), to=0, token=token, context=0)
    there.side.read(there.side.region.sge(0, 8), at=0, token=token, context=1)
    there.side.write(region.sge(0, 0), to=0, token=token, context=2)
    there.peer.hold(1)
    there.peer.rtr_taken = False
    there.peer.run_until(lambda: there.peer.rtr_taken)  # the Write of nothing
    there.peer.tell()
    assert brief(there.side.take(1)) == [(Kind.WRITE, SUCCESS, 0)]
    sink, offset, *_ = there.peer.held[0]
    there.peer.send_raw(iwarp.tagged(Opcode.READ_RESPONSE, sink, offset, b"12345678"))
    assert brief(there.side.take(2)) == [(Kind.READ, SUCCESS, 1), (Kind.WRITE, SUCCESS, 2)]


def test_a_word_comes_before_what_the_program_does_about_the_message(meet):
    there = meet(tells=True)
    there.side.receive(there.side.region.sge(0, 64), context=1)
    before = there.peer.words[-1].taken
    message = iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"x"), crc=False)
    there.peer.socket.sendall(message)
    assert brief(there.side.take(1)) == [(Kind.RECEIVE, SUCCESS, 1)]
    there.side.send(there.side.region.sge(0, 1))
    there.take(1)
    # The peer's first word was taken too, and is not worth a word by itself.
    assert there.peer.words[-1].taken == before + len(message)


def test_only_a_peer_that_made_itself_known_is_told(kit):
    side = Side(kit.node(), 2)
    side.receive(side.region.sge(0, 64), context=1)
    peer = connected_to(kit, side)
    with peer:
        peer.send(b"x")
        peer.read_start(0, 0, 0)
        assert brief(side.take(1)) == [(Kind.RECEIVE, SUCCESS, 1)]
        peer.flush()
        assert peer.words == []
        request = iwarp.read_request(0x77, iwarp.GREETING, 0, 0, 0)
        peer._send_untagged(Opcode.READ_REQUEST, Queue.READ_REQUEST, request)
        with pytest.raises(iwarp.ProtocolError, match="nobody asked for"):
            peer.run_until(lambda: False)
        assert [word.last for word in peer.words] == [False], "the word is there before the answer"


def test_softnd_makes_itself_known_with_its_first_message(meet):
    assert meet(tells=False).peer.greeted


@both_crcs
def test_a_word_that_claims_more_than_was_sent_is_refused(meet, crc):
    there = meet(tells=True, crc=crc)
    there.send(2)
    there.take(2)
    there.peer.tell(there.peer.taken + 1)
    assert there.statuses(2)[0] != SUCCESS
    there.ends()
    assert there.peer.terminated is not None and there.peer.terminated.error == (1, 1, 1)


def test_a_word_that_claims_what_still_waits_to_be_sent_is_refused(meet):
    there = meet(tells=True)
    region = there.side.node.region(8 << 20)
    for number in range(4):
        there.side.send(region.sge(), context=number)
    # Nobody reads, so most of it cannot have been sent.
    there.peer.tell(4 * (8 << 20))
    statuses = there.statuses(4)
    assert SUCCESS not in statuses


def test_a_terminate_that_claims_what_still_waits_to_be_sent_is_refused(meet):
    there = meet(tells=False)
    region = there.side.node.region(8 << 20)
    for number in range(4):
        there.side.send(region.sge(), context=number)
    header = iwarp.untagged(Opcode.SEND, Queue.SEND, 4, b"")
    there.peer.terminate(0, 2, 255, header)
    assert SUCCESS not in there.statuses(4)


# The peer goes


@both_peers
@both_crcs
def test_what_was_taken_before_the_peer_left_succeeds_and_nothing_else(meet, tells, crc):
    there = meet(tells=tells, crc=crc)
    there.send(1)
    there.all_sent(1)
    there.acknowledge()
    assert there.statuses(1) == [SUCCESS]
    there.send(3)
    there.take(4)
    if tells:
        there.peer.tell(last=True)
    there.peer.close()
    # A foreign peer that leaves without an answer proves nothing, even if it took them.
    statuses = there.statuses(3)
    assert statuses[0] in ((SUCCESS,) if tells else (CANCELED, IO_TIMEOUT))
    assert statuses[1:] == [SUCCESS if tells else CANCELED] * 2


def test_part_of_what_was_sent_is_taken_when_the_peer_leaves(meet):
    there = meet(tells=True)
    there.send(4)
    there.take(2)
    taken = there.peer.taken
    there.take(4)
    there.peer.tell(taken, last=True)
    there.peer.socket.shutdown(socket.SHUT_WR)
    assert there.statuses(4) == [SUCCESS, SUCCESS, CANCELED, CANCELED]


def test_f_6_6_a_peer_that_tells_and_goes_without_a_last_word_has_died(meet):
    there = meet(tells=True)
    there.send(4)
    there.take(4)
    there.peer.tell(there.peer.taken - 1)
    there.peer.socket.shutdown(socket.SHUT_WR)
    assert there.statuses(4) == [SUCCESS, SUCCESS, SUCCESS, IO_TIMEOUT]


@both_peers
def test_what_a_peer_took_before_it_died_succeeds_though_a_send_finds_the_connection_reset_first(meet, tells):
    there = meet(tells=tells)
    there.send(2)
    there.all_sent(2)
    with workers.asleep(there.kit.library):
        there.acknowledge()
        there.peer.reset()
        there.side.send(there.side.region.sge(0, 8), context=2)
    assert there.statuses(3) == [SUCCESS, SUCCESS, IO_TIMEOUT]


@both_peers
def test_a_message_that_nobody_receives_hides_no_reset(meet, tells):
    """Receiving stands still behind it."""
    there = meet(tells=tells)
    there.peer.send(b"nobody receives it")
    with workers.asleep(there.kit.library):
        there.peer.reset()
        there.side.send(there.side.region.sge(0, 8), context=0)
    assert there.statuses(1) == [IO_TIMEOUT]


@both_peers
def test_an_acknowledgement_behind_a_message_without_a_receive_is_heard_when_the_peer_goes(meet, tells):
    there = meet(tells=tells)
    there.send(2)
    there.all_sent(2)
    there.peer.send(b"no Receive for this")
    there.acknowledge()
    if tells:
        there.peer.tell(last=True)
    there.peer.socket.shutdown(socket.SHUT_WR)
    assert there.statuses(2) == [SUCCESS] * 2


@both_peers
def test_an_acknowledgement_before_a_terminate_counts(meet, tells):
    there = meet(tells=tells)
    there.send(3)
    there.all_sent(3)
    there.acknowledge()
    there.peer.terminate(0, 0, 0)
    assert there.statuses(3) == [SUCCESS] * 3
    there.ends()


# This end goes


@both_peers
@both_crcs
def test_disconnect_waits_for_the_acknowledgement_of_what_was_sent(meet, tells, crc):
    there = meet(tells=tells, crc=crc)
    there.send(4)
    there.take(4)
    leaving = there.disconnect()
    there.side.receive(context=77)
    assert brief(there.side.take(1)) == [(Kind.RECEIVE, CANCELED, 77)]
    assert leaving.pending()
    there.all_sent(4)
    there.acknowledge()
    assert there.statuses(4) == [SUCCESS] * 4
    if tells:
        there.ends()
        assert there.peer.words[-1].last
        assert leaving.pending() or leaving.result() == SUCCESS
        there.peer.close()
    else:
        there.ends()
    assert leaving.result() == SUCCESS


def test_disconnect_ends_with_the_peers_end_and_what_it_did_not_take_is_cancelled(meet):
    there = meet(tells=True)
    there.send(4)
    there.take(2)
    taken = there.peer.taken
    leaving = there.disconnect()
    there.ends()
    assert leaving.pending()
    there.peer.tell(taken, last=True)
    there.peer.close()
    assert there.statuses(4) == [SUCCESS, SUCCESS, CANCELED, CANCELED]
    assert leaving.result() == SUCCESS


@both_peers
def test_disconnect_from_a_peer_that_says_nothing_ends_in_time(meet, tells):
    there = meet(tells=tells)
    there.send(2)
    began = time.monotonic()
    assert there.disconnect().result() == SUCCESS
    assert time.monotonic() - began < LEAVE_LIMIT_S
    assert there.statuses(2) == [CANCELED] * 2


def test_disconnect_with_nothing_under_way_waits_for_nobody(meet):
    for tells in (True, False):
        there = meet(tells=tells)
        assert there.disconnect().poll() == SUCCESS
        there.ends()
        assert [word.last for word in there.peer.words[1:]] == [True] * tells


@both_peers
def test_who_leaves_takes_nothing_more_and_does_not_say_so(meet, tells):
    there = meet(tells=tells)
    for number in range(2):
        there.side.receive(there.side.region.sge(0, 64), context=number)
    there.peer.send(b"taken")
    there.peer.flush()
    if not tells:
        there.peer.read_start(0, 0, 0)
        there.peer.flush()
    assert brief(there.side.take(1)) == [(Kind.RECEIVE, SUCCESS, 0)]
    there.send(1)
    there.take(1)
    leaving = there.disconnect()
    assert brief(there.side.take(1)) == [(Kind.RECEIVE, CANCELED, 1)]
    if tells:
        there.peer.run_until(lambda: there.peer.words[-1].last)
        told = there.peer.words[-1].taken
    there.peer.send(b"too late")
    there.peer.read_start(0, 0, 0)
    if not tells:
        there.peer.hold(1)
    there.acknowledge()
    assert there.statuses(1) == [SUCCESS]
    there.ends()
    assert not there.peer._reads[0].done, "an answer would say that the message was taken"
    if tells:
        assert there.peer.words[-1].taken == told
        there.peer.close()
    assert leaving.result() == SUCCESS


@both_peers
def test_a_send_that_waits_for_a_slot_is_cancelled_by_disconnect(meet, tells):
    there = meet(tells=tells, depth=4)
    there.send(4)
    there.take(4)
    leaving = there.disconnect()
    there.all_sent(4)
    there.acknowledge()
    assert there.statuses(4) == [SUCCESS] * 4
    there.side.send(there.side.region.sge(0, 8), context=9)
    assert brief(there.side.take(1)) == [(Kind.SEND, CANCELED, 9)]
    there.peer.close()
    assert leaving.result() == SUCCESS


def test_a_flush_ends_the_wait_of_disconnect(meet):
    there = meet(tells=True)
    there.send(2)
    leaving = there.disconnect()
    assert leaving.pending()
    assert there.side.qp.Flush() == SUCCESS
    assert leaving.poll() == SUCCESS
    assert there.statuses(2) == [CANCELED] * 2


def trespass(peer: Peer) -> None:
    peer.send_raw(iwarp.tagged(Opcode.WRITE, 0xDEADBEEF, 0, b"x"))


@both_peers
@both_crcs
def test_a_trespasser_that_took_a_message_has_it_acknowledged_first(meet, tells, crc):
    there = meet(tells=tells, crc=crc)
    there.send(2)
    there.all_sent(2)
    trespass(there.peer)
    assert no_completion(there.side.cq)
    there.acknowledge()
    there.ends()
    assert there.peer.terminated is not None and there.peer.terminated.error == (1, 1, 0)
    there.peer.close()
    assert there.statuses(2) == [SUCCESS] * 2


def test_a_terminate_says_how_far_it_took(meet):
    there = meet(tells=True)
    for number in range(2):
        there.side.receive(there.side.region.sge(0, 64), context=number)
    message = iwarp.fpdu(iwarp.untagged(Opcode.SEND, 0, 1, b"x"), crc=False)
    before = there.peer.words[-1].taken
    more = iwarp.fpdu(iwarp.tagged(Opcode.WRITE, 0xDEADBEEF, 0, b"x"), crc=False)
    there.peer.socket.sendall(message + more + message)
    there.ends()
    assert there.peer.terminated is not None
    assert there.peer.words[-1] == (before + len(message), True)
    assert there.statuses(2, Kind.RECEIVE) == [SUCCESS, CANCELED]


@both_peers
def test_a_terminate_does_not_wait_for_ever(meet, tells):
    there = meet(tells=tells)
    there.send(2)
    there.all_sent(2)
    trespass(there.peer)
    there.ends()
    assert there.peer.terminated is not None
    assert there.statuses(2) == [CANCELED] * 2


@both_peers
def test_both_ends_terminate(meet, tells):
    there = meet(tells=tells)
    there.send(2)
    there.all_sent(2)
    trespass(there.peer)
    there.acknowledge()
    there.peer.terminate(0, 0, 0)
    assert there.statuses(2) == [SUCCESS] * 2


# A foreign peer's read limit


def test_no_send_to_a_foreign_peer_goes_without_its_read(meet):
    there = meet(tells=False, limit=1)
    there.send(1)
    there.all_sent(1)
    there.send(3)
    kernel32.Sleep(50)
    there.peer.limit_s = 0.2
    with pytest.raises(TimeoutError):
        there.take(2)
    there.peer.limit_s = 10
    there.acknowledge()
    there.all_sent(4)
    assert len(there.peer.held) == 1, "one Read for all three"
    there.acknowledge()
    assert [d.status for d in there.side.take(4)] == [SUCCESS] * 4


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


def test_a_peer_that_has_closed_its_side_gets_no_read_beyond_its_limit(meet):
    there = meet(tells=False, limit=1)
    there.send(1)
    there.all_sent(1)
    there.peer.socket.shutdown(socket.SHUT_WR)
    there.ends()
    assert len(there.peer.held) == 1
    assert there.statuses(1) == [CANCELED]


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
        peer.limit_s = LEAVE_LIMIT_S
        peer.run_to_the_end()
        assert not peer.messages


def test_a_released_connector_leaves_in_the_same_way(meet):
    there = meet(tells=True)
    there.send(2)
    there.take(2)
    there.side.connector.release()
    there.ends()
    assert not get_results(there.side.cq, 1)
    there.peer.tell()
    assert there.statuses(2) == [SUCCESS] * 2


# The four patterns of test_f_taken.py with this peer, which is gone as soon as it has acknowledged


def exchange(there: Conversation) -> None:
    there.side.receive(there.side.region.sge(0, 64), context=100)
    there.send(1)
    there.peer.send(b"one each way")
    there.all_sent(1)
    there.acknowledge()


def trespass_with_a_token(there: Conversation) -> None:
    there.send(1)
    there.all_sent(1)
    trespass(there.peer)
    there.acknowledge()


def take_nothing(there: Conversation) -> None:
    there.send(1, 0)
    there.all_sent(1)
    there.acknowledge()


def take_a_burst(there: Conversation) -> None:
    there.send(4)
    there.peer.run_until(lambda: there.acknowledged_all(4))


@both_peers
@both_crcs
@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("pattern", [exchange, trespass_with_a_token, take_nothing, take_a_burst])
def test_a_peer_that_acknowledges_and_is_gone(kit, listener, pattern, tells, crc, limit):
    for _ in range(share(100, 2)):
        with passing(kit):
            there = Conversation(kit, listener, tells=tells, crc=crc, limit=limit)
            pattern(there)
            if tells:
                there.peer.tell(last=True)
            there.peer.socket.shutdown(socket.SHUT_WR)
            done = there.side.take(2 if pattern is exchange else 4 if pattern is take_a_burst else 1)
            assert [d.status for d in done] == [SUCCESS] * len(done)
            assert there.disconnect().result() == SUCCESS
            there.peer.close()
