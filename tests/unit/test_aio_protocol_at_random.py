"""Two ends of ndpy/aio/protocol.py under a random scheduler, and streams that are changed on their way."""

from __future__ import annotations

import random

import pytest
from kit.aio_peer import mutate
from kit.helpers import SEED, rounds
from test_aio_protocol import HELLO, MESSAGE, OFFER, TURN

from ndpy.aio.errors import ProtocolError
from ndpy.aio.protocol import Hello, Kind, Protocol
from ndpy.objects.memory import RemoteMemory


class End:
    """An end, its program, and the frames that are on their way to the other end.

    It posts receives as ndpy/aio/channel.py does: one for each slot and for each control frame. A MESSAGE keeps its
    receive until the program has taken it. All other frames give it back at once.
    """

    def __init__(self, own: Hello, peer: Hello, quota: int, rng: random.Random) -> None:
        self.own = own
        self.protocol = Protocol(own, peer)
        self.rng = rng
        self.to_send = quota
        self.receives = own.slots + Protocol.control_frames(own.offers, peer.offers)
        self.way: list[bytes] = []
        #: Lengths of short messages, and numbers of offers, as the program will take them.
        self.inbox: list[tuple[Kind, int]] = []
        self.reading: list[int] = []
        self.withdrawn: set[int] = set()
        self.sent: list[int] = []
        self.got: list[int] = []
        self.closed = False
        #: Offers that the peer has withdrawn.
        self.unwanted: set[int] = set()
        #: The answers of this end, and those that have come.
        self.answers: list[tuple[int, Kind]] = []
        self.answered: list[tuple[int, Kind]] = []

    def moves(self, other: End) -> list:
        """What can happen next at this end."""
        protocol = self.protocol
        moves = []
        if other.way:
            moves += [self.deliver] * 3
        if not protocol.started:
            return moves
        if self.inbox:
            moves.append(self.take)
        if self.reading:
            moves.append(self.answer)
        if self.to_send:
            if protocol.may_send:
                moves.append(self.message)
            if protocol.may_offer:
                moves.append(self.offer)
        elif not self.closed:
            moves.append(self.close)
        if protocol.offered - self.withdrawn and self.rng.random() < 0.3:
            moves.append(self.withdraw)
        return moves

    def message(self, other: End) -> None:
        self.to_send -= 1
        length = self.to_send % 100
        self.sent.append(length)
        self.way.append(self.protocol.message(length) + bytes(length))

    def offer(self, other: End) -> None:
        self.to_send -= 1
        length = 1000 + self.to_send % 100
        self.sent.append(length)
        self.way.append(self.protocol.offer(RemoteMemory(0, length, 0))[1])

    def withdraw(self, other: End) -> None:
        number = self.rng.choice(sorted(self.protocol.offered - self.withdrawn))
        self.withdrawn.add(number)
        self.way.append(self.protocol.withdraw(number))

    def close(self, other: End) -> None:
        self.closed = True
        self.way.append(self.protocol.close())

    def take(self, other: End) -> None:
        kind, length = self.inbox.pop(0)
        if kind is Kind.OFFER:
            self.reading.append(length)
            return
        self.got.append(length)
        self.receives += 1
        self.protocol.take()
        self.grant()

    def answer(self, other: End) -> None:
        number = self.reading.pop(self.rng.randrange(len(self.reading)))
        taken = not (self.closed or number in self.unwanted) or self.rng.random() < 0.5
        self.answers.append((number, Kind.DONE if taken else Kind.DROPPED))
        self.protocol.take()
        self.way.append(self.protocol.answer(number, taken=taken))
        self.grant()

    def grant(self) -> None:
        if self.protocol.grant_is_due:
            self.way.append(self.protocol.grant())

    def deliver(self, other: End) -> None:
        received = self.protocol.receive(memoryview(other.way.pop(0)))
        if received.kind is Kind.MESSAGE:
            self.receives -= 1
            self.inbox.append((Kind.MESSAGE, received.length))
        elif received.kind is Kind.OFFER:
            self.got.append(received.length)
            self.inbox.append((Kind.OFFER, received.number))
        elif received.kind is Kind.START:
            self.way += [self.protocol.start()] * (not self.closed and self.answers_start)
        elif received.kind is Kind.WITHDRAW:
            self.unwanted.add(received.number)
        elif received.kind in (Kind.DONE, Kind.DROPPED):
            self.answered.append((received.number, received.kind))

    answers_start = False

    def check(self, other: End) -> None:
        kinds = [data[0] for data in other.way]
        data = sum(kind in (MESSAGE, OFFER) for kind in kinds)
        held = self.own.slots + Protocol.control_frames(self.own.offers, other.own.offers) - self.receives
        assert data + held <= self.own.slots, "more data frames than slots"
        control = len(kinds) - data
        assert control <= Protocol.control_frames(self.own.offers, other.own.offers), "too many control frames"
        # A connection makes its receives before it knows how many offers the peer takes.
        assert control <= Protocol.control_frames(self.own.offers, self.own.offers), "more than a connection posts"
        assert len(kinds) <= self.receives, "a frame finds no receive"


def converse(rng: random.Random, quota: int) -> None:
    """Two ends that send and take in random order, until everything was taken and all frames have come."""
    hellos = [Hello(rng.choice((1, 2, 3, 8)), rng.choice((1, 2, 5)), 256, 10_000) for _ in range(2)]
    client, server = End(*hellos, quota, rng), End(*reversed(hellos), rng.choice((0, 1, quota)), rng)
    server.answers_start = True
    # Some programs take rarely, and some networks are slow.
    lazy = {rng.choice(("take", "answer", "deliver", "nothing")) for _ in range(2)}
    client.way.append(client.protocol.start())
    while True:
        moves = [(one, move, two) for one, two in ((client, server), (server, client)) for move in one.moves(two)]
        if not moves:
            break
        eager = [(one, move, two) for one, move, two in moves if move.__name__ not in lazy]
        one, move, two = rng.choice(eager if eager and rng.random() < 0.95 else moves)
        move(two)
        client.check(server)
        server.check(client)
    for one, two in ((client, server), (server, client)):
        assert one.closed and one.to_send == 0, f"an end waits for ever: {vars(one.protocol)}"
        assert sorted(one.got) == sorted(two.sent)
        assert one.answered == two.answers
        assert not one.protocol.offered


@pytest.mark.timeout(1800)
def test_two_ends_never_stop_and_never_send_more_than_there_are_receives():
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    for turn in range(rounds(5_000, 300)):
        seed = f"{SEED} {turn}"
        try:
            converse(random.Random(seed), 60)
        except (AssertionError, ProtocolError) as error:
            raise AssertionError(f"random.Random({seed!r}): {error}") from error


# ---- mutated streams ----


class Mutated(End):
    """An end whose frames are changed on their way, now and then."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.changes = 0

    def deliver(self, other: End) -> None:
        if self.changes < 2 and self.rng.random() < 0.05:
            self.changes += 1
            other.way[:1] = mutate(other.way[0], self.rng)
            if not other.way:
                return
        super().deliver(other)

    def check_state(self) -> None:
        """What protects the rest of ndpy.aio from its peer."""
        protocol, hello = self.protocol, self.protocol.peer
        assert len(protocol._peer_offers) <= min(self.own.offers, hello.offers)
        assert len(protocol.offered) <= min(self.own.offers, hello.offers)
        assert (protocol._peer_granted - protocol._sent) % TURN <= hello.slots
        assert (protocol._granted - protocol._received) % TURN <= self.own.slots
        assert (protocol._told - protocol._peer_seen) % TURN <= (protocol._told - self.own.slots) % TURN


def converse_badly(rng: random.Random) -> str:
    """Returns how it ended."""
    hello = Hello(rng.choice((1, 2, 4)), rng.choice((1, 2)), 256, 10_000)
    client, server = Mutated(hello, HELLO, 8, rng), Mutated(HELLO, hello, 8, rng)
    server.answers_start = True
    client.way.append(client.protocol.start())
    for _ in range(150):
        moves = [(one, move, two) for one, two in ((client, server), (server, client)) for move in one.moves(two)]
        if not moves:
            return "stopped"
        one, move, two = rng.choice(moves)
        try:
            move(two)
        except ProtocolError:
            return "refused"
        one.check_state()
    return "went on"


@pytest.mark.timeout(1800)
def test_mutated_streams_are_refused_or_harmless():
    """10^5 with NDPY_STRESS=1. Nothing but ProtocolError is raised, and the state stays within its limits."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    ends = {"refused": 0, "stopped": 0, "went on": 0}
    for turn in range(rounds(100_000, 2_000)):
        seed = f"{SEED} mutated {turn}"
        try:
            ends[converse_badly(random.Random(seed))] += 1
        except Exception as error:
            raise AssertionError(f"random.Random({seed!r}): {error!r}") from error
    print(ends)
    assert ends["refused"] > sum(ends.values()) / 3
