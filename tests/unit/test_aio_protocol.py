"""The rules of ndpy/aio/protocol.py. The frames are made here, from docs/aio_protocol.md and not with the module."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from ndpy.aio.errors import ProtocolError
from ndpy.aio.protocol import Hello, Kind, Protocol
from ndpy.objects.memory import RemoteMemory

SLOTS, OFFERS, SLOT_SIZE, LONGEST = 4, 2, 256, 10_000
HELLO = Hello(SLOTS, OFFERS, SLOT_SIZE, LONGEST)
# Of an end that does not know DROPPED.
OLDER = dataclasses.replace(HELLO, knows_dropped=False)
START, MESSAGE, OFFER, DONE, WITHDRAW, GRANT, CLOSE, DROPPED = range(1, 9)
TURN = 1 << 32


def frame(kind, number=0, granted=SLOTS, seen=SLOTS, length=0, body=b"") -> memoryview:
    """The numbers are those of an end that has taken nothing and been granted nothing new."""
    return memoryview(struct.pack("!BBBBIIIQ", kind, 0, 0, 0, number, granted, seen, length) + body)


def message(length=0, **numbers) -> memoryview:
    return frame(MESSAGE, length=length, body=bytes(length), **numbers)


def offer(number, length=5000, *, described=None, **numbers) -> memoryview:
    body = struct.pack("!QQI", 0x1000, length if described is None else described, 7)
    return frame(OFFER, number, length=length, body=body, **numbers)


def end(own: Hello = HELLO, peer: Hello = HELLO) -> Protocol:
    """An end that has sent START and received it."""
    protocol = Protocol(own, peer)
    protocol.start()
    protocol.receive(frame(START, granted=peer.slots, seen=own.slots))
    return protocol


def refuses(protocol: Protocol, data: memoryview, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        protocol.receive(data)


def take(protocol: Protocol, count: int) -> None:
    for _ in range(count):
        protocol.take()


# ---- what the ends tell each other when they connect ----


def test_private_data_are_24_bytes_in_network_order():
    data = HELLO.to_bytes()
    assert data == b"ndpa" + bytes([1, 2]) + struct.pack("!HH", SLOTS, OFFERS) + bytes(2) + struct.pack(
        "!IQ", 256, 10_000
    )
    assert Hello.from_bytes(data) == HELLO


@pytest.mark.parametrize("padding", [0, 1, 32, 172, 488])
def test_zeros_that_a_transport_adds_to_private_data_are_ignored(padding):
    assert Hello.from_bytes(HELLO.to_bytes() + bytes(padding)) == HELLO


@pytest.mark.parametrize("data", [b"", bytes(24), b"ndpa", b"NDPA" + HELLO.to_bytes()[4:], HELLO.to_bytes()[:-1]])
def test_private_data_of_something_else_are_refused(data):
    with pytest.raises(ProtocolError, match="does not speak the protocol"):
        Hello.from_bytes(data)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_and_named(version):
    data = bytearray(HELLO.to_bytes())
    data[4] = version
    with pytest.raises(ProtocolError, match=f"version {version} of the protocol, and this end version 1"):
        Hello.from_bytes(bytes(data))


@pytest.mark.parametrize("invalidates", [False, True])
@pytest.mark.parametrize("knows_dropped", [False, True])
def test_an_end_tells_whether_a_token_may_be_invalidated_and_whether_it_knows_dropped(invalidates, knows_dropped):
    hello = dataclasses.replace(HELLO, invalidates=invalidates, knows_dropped=knows_dropped)
    data = bytearray(hello.to_bytes())
    assert data[5] == invalidates + 2 * knows_dropped
    data[5] |= 0xFC
    assert Hello.from_bytes(bytes(data)) == hello


@pytest.mark.parametrize(("name", "least", "most"), [("slots", 1, 1024), ("offers", 1, 64), ("slot_size", 64, 1 << 20)])
def test_limits_have_bounds(name, least, most):
    for value in (least, most):
        hello = dataclasses.replace(HELLO, **{name: value})
        assert Hello.from_bytes(hello.to_bytes()) == hello
    for value in (least - 1, most + 1):
        with pytest.raises(ProtocolError, match="impossible limits"):
            Hello.from_bytes(dataclasses.replace(HELLO, **{name: value}).to_bytes())


# ---- frames ----


def test_a_frame_has_a_header_of_24_bytes_in_network_order():
    protocol = end()
    protocol.message(0)
    protocol.message(0)
    protocol.receive(message(granted=6))
    protocol.take()
    assert protocol.message(3) == bytes([2, 0, 0, 0]) + struct.pack("!IIIQ", 0, SLOTS + 1, 6, 3)


def test_an_offer_is_followed_by_a_descriptor():
    remote = RemoteMemory(0x1122334455667788, 5000, 0xCAFE)
    number, data = end().offer(remote)
    assert (number, data[24:]) == (1, struct.pack("!QQI", 0x1122334455667788, 5000, 0xCAFE))
    received = end().receive(memoryview(data))
    assert (received.kind, received.number, received.length, received.remote) == (Kind.OFFER, 1, 5000, remote)


@pytest.mark.parametrize("length", [0, 1, 23])
def test_a_frame_shorter_than_a_header_is_refused(length):
    refuses(end(), message()[:length], "shorter than a header")


@pytest.mark.parametrize("kind", [0, 9, 255])
def test_an_unknown_kind_is_refused(kind):
    refuses(end(), frame(kind), "unknown kind")


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_unused_bytes_are_zero(place):
    data = bytearray(frame(GRANT))
    data[place] = 1
    refuses(end(), memoryview(data), "unknown kind")


@pytest.mark.parametrize("kind", [MESSAGE, OFFER, DONE, WITHDRAW, GRANT, CLOSE, DROPPED])
def test_the_first_frame_is_start(kind):
    number = int(kind in (OFFER, DONE, WITHDRAW, DROPPED))
    refuses(Protocol(HELLO, HELLO), offer(1) if kind == OFFER else frame(kind, number), "has not begun")


def test_start_comes_once():
    refuses(end(), frame(START), "has begun")


@pytest.mark.parametrize("kind", [MESSAGE, GRANT, CLOSE])
def test_a_frame_that_is_about_no_offer_has_no_number(kind):
    refuses(end(), frame(kind, 1), "with the number 1")


def test_start_has_no_number():
    refuses(Protocol(HELLO, HELLO), frame(START, 1), "with the number 1")


@pytest.mark.parametrize("kind", [OFFER, DONE, WITHDRAW, DROPPED])
def test_a_frame_about_an_offer_has_a_number(kind):
    refuses(end(), offer(0) if kind == OFFER else frame(kind), "with the number 0")


@pytest.mark.parametrize("kind", [DONE, WITHDRAW, GRANT, CLOSE, DROPPED])
def test_a_control_frame_is_nothing_but_a_header(kind):
    def fresh():
        protocol = end()
        number, _ = protocol.offer(RemoteMemory(0, 5000, 0))
        protocol.withdraw(number)
        protocol.receive(offer(1))
        return protocol

    number = int(kind in (DONE, WITHDRAW, DROPPED))
    fresh().receive(frame(kind, number))
    refuses(fresh(), frame(kind, number, body=b"x"), "with 25 bytes")
    refuses(fresh(), frame(kind, number, length=1), "the length 1")


def test_a_message_is_as_long_as_its_header_says():
    for length, body in ((3, b"four"), (3, b"ab"), (0, b"x"), (1, b"")):
        refuses(end(), frame(MESSAGE, length=length, body=body), f"a message of {length} bytes in a frame of")
    assert end().receive(message(3)).length == 3


def test_a_message_that_is_too_long_is_refused():
    small = dataclasses.replace(HELLO, max_message_length=100)
    assert end(small).receive(message(100)).length == 100
    assert end(small).receive(offer(1, 100)).length == 100
    refuses(end(small), message(101), r"101 bytes, and this end takes 100 \(max_message_length\)")
    refuses(end(small), offer(1, 101), "101 bytes, and this end takes 100")
    refuses(end(), offer(1, 1 << 60), "takes 10000")


def test_an_offer_has_exactly_one_descriptor():
    whole = offer(1)
    refuses(end(), whole[:-1], "an offer of 43 bytes")
    refuses(end(), memoryview(bytes(whole) + b"x"), "an offer of 45 bytes")


def test_an_offer_s_length_is_that_of_its_memory():
    refuses(end(), offer(1, 5000, described=4999), "offered 4999 bytes for a message of 5000")
    refuses(end(), offer(1, 5000, described=5001), "offered 5001 bytes for a message of 5000")
    refuses(end(), offer(1, 0), "offered 0 bytes")


def test_memory_beyond_the_last_address_is_refused():
    body = struct.pack("!QQI", (1 << 64) - 4, 5000, 7)
    refuses(end(), frame(OFFER, 1, length=5000, body=body), "impossible memory")


# ---- data frames ----


def test_an_end_sends_as_many_data_frames_as_it_was_granted():
    protocol = end()
    for _ in range(SLOTS):
        assert protocol.may_send
        protocol.message(0)
    assert not protocol.may_send
    assert not protocol.may_offer
    protocol.receive(frame(GRANT, granted=SLOTS + 1))
    assert protocol.may_send
    protocol.offer(RemoteMemory(0, 5000, 0))
    assert not protocol.may_send


@pytest.mark.parametrize("last", [message(), offer(1)])
def test_more_data_frames_than_were_granted_are_refused(last):
    protocol = end()
    for _ in range(SLOTS):
        protocol.receive(message())
    refuses(protocol, last, "more messages than it was granted")
    protocol.take()
    protocol.receive(last)


def test_a_short_message_fits_the_slots_of_both_ends():
    small = dataclasses.replace(HELLO, slot_size=64)
    assert end(peer=small).longest_frame == 40
    assert end(own=small).longest_frame == 40
    assert end().longest_frame == SLOT_SIZE - 24


# ---- offers ----


@pytest.mark.parametrize("number", [2, 3, TURN - 1])
def test_the_first_offer_is_number_1(number):
    refuses(end(), offer(number), f"offer {number} after 0")


@pytest.mark.parametrize("number", [1, 3])
def test_offers_are_numbered_in_sequence(number):
    protocol = end()
    protocol.receive(offer(1))
    protocol.answer(1, taken=True)
    refuses(protocol, offer(number), f"offer {number} after 1")
    protocol.receive(offer(2))


@pytest.mark.parametrize(("own", "peer"), [(2, 2), (1, 64), (64, 1)])
def test_no_more_offers_are_open_than_either_end_has_said(own, peer):
    """Each open offer may bring a DONE, and its sender has posted receives for as many as it has said itself."""
    few = dataclasses.replace(HELLO, offers=own, slots=100), dataclasses.replace(HELLO, offers=peer, slots=100)
    sender, receiver = end(*few), end(*reversed(few))
    for _ in range(min(own, peer)):
        assert sender.may_offer
        number, data = sender.offer(RemoteMemory(0, 5000, 0))
        assert receiver.receive(memoryview(data)).number == number
    assert not sender.may_offer
    assert sender.may_send
    number = min(own, peer) + 1
    refuses(
        receiver, offer(number, granted=100, seen=100), f"offer {number} after {number - 1}, with {number - 1} open"
    )
    sender.receive(memoryview(receiver.answer(1, taken=True)))
    assert sender.may_offer


def test_done_answers_an_open_offer_once():
    protocol = end()
    refuses(protocol, frame(DONE, 1), "DONE for offer 1, which is not open")
    number, _ = protocol.offer(RemoteMemory(0, 5000, 0))
    refuses(protocol, frame(DONE, 2), "DONE for offer 2, which is not open")
    assert protocol.offered == {number}
    assert protocol.receive(frame(DONE, number)).number == number
    assert protocol.offered == set()
    refuses(protocol, frame(DONE, number), "DONE for offer 1, which is not open")


@pytest.mark.parametrize("taken", [True, False])
def test_an_answer_says_whether_the_message_was_taken(taken):
    receiver, sender = end(), end()
    number, data = sender.offer(RemoteMemory(0, 5000, 0))
    receiver.receive(memoryview(data))
    sender.receive(memoryview(receiver.close()))
    answer = receiver.answer(number, taken=taken)
    assert answer[0] == (DONE if taken else DROPPED)
    assert sender.receive(memoryview(answer)).kind is (Kind.DONE if taken else Kind.DROPPED)
    assert sender.offered == set()


@pytest.mark.parametrize("why", ["close", "withdrawal"])
def test_only_a_peer_that_closes_or_was_asked_to_drops_a_message(why):
    protocol = end()
    number, _ = protocol.offer(RemoteMemory(0, 5000, 0))
    refuses(protocol, frame(DROPPED, number), "DROPPED for offer 1 before CLOSE, and it was not withdrawn")
    refuses(protocol, frame(DROPPED, 2), "DROPPED for offer 2, which is not open")
    if why == "close":
        protocol.receive(frame(CLOSE))
    else:
        protocol.withdraw(number)
    assert protocol.receive(frame(DROPPED, number)).kind is Kind.DROPPED
    refuses(protocol, frame(DROPPED, number), "DROPPED for offer 1, which is not open")
    refuses(protocol, frame(DONE, number), "DONE for offer 1, which is not open")


def test_a_withdrawal_is_about_one_offer_only():
    """Numbers come again after 2**32 offers."""
    protocol = end()
    for number in (1, 2):
        protocol.offer(RemoteMemory(0, 5000, 0))
        protocol.withdraw(number)
        protocol.receive(frame(DONE, number))
    protocol._last_offer = TURN - 1
    assert protocol.offer(RemoteMemory(0, 5000, 0))[0] == 1
    refuses(protocol, frame(DROPPED, 1), "it was not withdrawn")


@pytest.mark.parametrize("taken", [True, False])
def test_an_end_that_does_not_know_dropped_gets_done(taken):
    protocol = end(peer=OLDER)
    protocol.receive(offer(1))
    assert protocol.answer(1, taken=taken)[0] == DONE


def test_done_of_an_end_that_does_not_know_dropped_says_nothing_after_close():
    protocol = end(peer=OLDER)
    for _ in range(2):
        protocol.offer(RemoteMemory(0, 5000, 0))
    assert protocol.receive(frame(DONE, 1)).kind is Kind.DONE
    protocol.receive(frame(CLOSE))
    assert protocol.receive(frame(DONE, 2)).kind is Kind.DROPPED


def test_done_of_an_end_that_knows_dropped_says_the_same_after_close():
    protocol = end()
    protocol.offer(RemoteMemory(0, 5000, 0))
    protocol.receive(frame(CLOSE))
    assert protocol.receive(frame(DONE, 1)).kind is Kind.DONE


def test_offers_may_be_answered_in_any_order():
    protocol = end()
    numbers = [protocol.offer(RemoteMemory(0, 5000, 0))[0] for _ in range(2)]
    for number in reversed(numbers):
        protocol.receive(frame(DONE, number))
    assert protocol.offered == set()


def test_a_withdrawal_may_cross_the_answer():
    protocol = end()
    protocol.receive(offer(1))
    protocol.answer(1, taken=True)
    assert not protocol.is_open(1)
    assert protocol.receive(frame(WITHDRAW, 1)).number == 1
    protocol.receive(offer(2))
    assert protocol.is_open(2)
    assert protocol.receive(frame(WITHDRAW, 2)).number == 2
    assert protocol.is_open(2)


def test_an_offer_that_was_not_made_is_not_withdrawn():
    protocol = end()
    refuses(protocol, frame(WITHDRAW, 1), "withdrew offer 1, which it has not made")
    protocol.receive(offer(1))
    refuses(protocol, frame(WITHDRAW, 2), "withdrew offer 2, which it has not made")


# ---- CLOSE ----


@pytest.mark.parametrize("late", [message(), offer(1), frame(CLOSE)])
def test_no_message_and_no_second_close_comes_after_close(late):
    protocol = end()
    assert protocol.receive(frame(CLOSE)).kind is Kind.CLOSE
    assert protocol.peer_closed
    refuses(protocol, late, "after CLOSE")


def test_answers_withdrawals_and_grants_come_after_close():
    protocol = end()
    protocol.offer(RemoteMemory(0, 5000, 0))
    protocol.receive(offer(1))
    protocol.receive(frame(CLOSE))
    for late in (frame(DONE, 1), frame(WITHDRAW, 1), frame(GRANT, granted=SLOTS + 1)):
        protocol.receive(late)


# ---- the numbers in each header ----


@pytest.mark.parametrize("kind", [MESSAGE, GRANT, CLOSE])
def test_what_was_granted_is_not_taken_back(kind):
    protocol = end()
    protocol.receive(frame(kind, granted=SLOTS))
    refuses(end(), frame(kind, granted=SLOTS - 1), "granted 3 messages")


def test_no_more_is_granted_than_the_peer_has_slots():
    protocol = end()
    refuses(protocol, frame(GRANT, granted=SLOTS + 1), "granted 5 messages; 0 were sent, and it has 4 slots")
    protocol.message(0)
    protocol.receive(frame(GRANT, granted=SLOTS + 1))
    refuses(protocol, frame(GRANT, granted=SLOTS + 2), "granted 6 messages; 1 were sent")


def test_the_peer_cannot_have_seen_what_it_was_not_told():
    protocol = end()
    protocol.receive(message())
    protocol.take()
    refuses(protocol, frame(GRANT, seen=SLOTS + 1), "seen 5 granted messages, but was told 4")
    protocol.grant()
    protocol.receive(frame(GRANT, seen=SLOTS + 1))


def test_what_the_peer_has_seen_does_not_go_back():
    protocol = end()
    for _ in range(3):
        protocol.receive(message())
    take(protocol, 3)
    protocol.grant()
    protocol.receive(frame(GRANT, seen=SLOTS + 3))
    refuses(protocol, frame(GRANT, seen=SLOTS + 2), "seen 6 granted messages, but was told 7")


def test_a_grant_is_due_when_half_of_the_room_is_new():
    protocol = end()
    for due in (False, True):
        protocol.receive(message())
        protocol.take()
        assert protocol.grant_is_due == due
    assert end(dataclasses.replace(HELLO, slots=1)).grant_is_due is False


def test_no_grant_is_due_when_another_frame_has_told_it():
    protocol = end()
    for _ in range(3):
        protocol.receive(message())
        protocol.take()
    assert protocol.grant_is_due
    protocol.message(0)
    assert not protocol.grant_is_due


def test_a_second_grant_waits_until_the_first_was_seen():
    protocol = end()
    for _ in range(4):
        protocol.receive(message())
    take(protocol, 2)
    protocol.grant()
    take(protocol, 2)
    assert not protocol.grant_is_due
    protocol.receive(message(seen=SLOTS))
    assert not protocol.grant_is_due
    protocol.receive(message(seen=SLOTS + 2))
    assert protocol.grant_is_due


def test_all_numbers_count_beyond_2_to_the_32():
    client, server = end(), end()
    for protocol in (client, server):
        for name in ("_sent", "_received", "_peer_granted", "_granted", "_told", "_peer_seen"):
            setattr(protocol, name, (getattr(protocol, name) + TURN - 7) % TURN)
        protocol._last_offer = protocol._peer_last_offer = TURN - 3
    numbers = []
    for _ in range(10):
        assert client.may_offer
        number, data = client.offer(RemoteMemory(0, 5000, 0))
        numbers.append(server.receive(memoryview(data)).number)
        server.take()
        client.receive(memoryview(server.answer(number, taken=True)))
        server.receive(memoryview(client.message(0)))
        server.receive(memoryview(client.message(0)))
        take(server, 2)
        if server.grant_is_due:
            client.receive(memoryview(server.grant()))
    # Zero stands for no offer.
    assert numbers == [TURN - 2, TURN - 1, 1, 2, 3, 4, 5, 6, 7, 8]
    server.receive(frame(WITHDRAW, TURN - 1, granted=client._granted, seen=client._peer_granted))
    number = 9
    refuses(server, frame(WITHDRAW, number, granted=client._granted, seen=client._peer_granted), "has not made")


def test_a_grant_that_was_seen_beyond_2_to_the_32_is_no_longer_waited_for():
    protocol = end()
    for name in ("_received", "_granted", "_told", "_peer_seen"):
        setattr(protocol, name, (getattr(protocol, name) + TURN - 5) % TURN)
    for _ in range(4):
        protocol.receive(message(seen=TURN - 1))
    take(protocol, 4)
    assert protocol.grant_is_due
    protocol.grant()
    protocol.receive(message(seen=3))
    take(protocol, 1)
    protocol.receive(message(seen=3))
    take(protocol, 1)
    assert protocol.grant_is_due


def test_too_much_is_refused_beyond_2_to_the_32():
    protocol = end()
    protocol._sent, protocol._peer_granted = TURN - 2, 2
    refuses(protocol, frame(GRANT, granted=3), "granted 3 messages; 4294967294 were sent")
    refuses(protocol, frame(GRANT, granted=1), "granted 1 messages")
    protocol.receive(frame(GRANT, granted=2))


def test_an_end_does_not_break_the_rules_itself():
    """A mistake in connection.py shows here and not at the peer."""
    closed, full, withdrawn = end(), end(), end()
    closed.close()
    withdrawn.withdraw(withdrawn.offer(RemoteMemory(0, 5000, 0))[0])
    for _ in range(SLOTS):
        full.message(0)
    for act in (
        lambda: closed.message(0),
        lambda: closed.offer(RemoteMemory(0, 5000, 0)),
        lambda: full.message(0),
        lambda: full.offer(RemoteMemory(0, 5000, 0)),
        lambda: end().withdraw(1),
        lambda: withdrawn.withdraw(1),
    ):
        with pytest.raises(AssertionError):
            act()
    with pytest.raises(KeyError):
        end().answer(1, taken=True)


# ---- control frames that wait ----


def waiting_kinds(protocol: Protocol) -> list[Kind]:
    """Of the frames that go now."""
    found = []
    while control := protocol.next_control():
        found.append(Kind(control[0][0]))
    return found


def test_control_frames_go_in_their_order_with_the_newest_numbers():
    protocol = end()
    protocol.receive(offer(1))
    protocol.add_answer(1, None, taken=True)
    protocol.take()
    protocol.add_close()
    assert protocol.has_waiting
    assert protocol.next_control() == (bytes(frame(DONE, 1, granted=SLOTS + 1)), None)
    assert waiting_kinds(protocol) == [Kind.CLOSE]
    assert not protocol.has_waiting


def test_a_withdrawal_that_waits_is_dropped_when_the_answer_comes():
    protocol = end()
    number, _ = protocol.offer(RemoteMemory(0, 5000, 0))
    protocol.add_withdrawal(number)
    protocol.receive(frame(DONE, number))
    assert waiting_kinds(protocol) == []


def test_a_grant_goes_if_no_other_frame_tells_its_numbers():
    protocol = end()
    for _ in range(SLOTS):
        protocol.receive(message())
    take(protocol, SLOTS)
    protocol.add_close()
    assert waiting_kinds(protocol) == [Kind.CLOSE]
    protocol = end()
    for _ in range(SLOTS):
        protocol.receive(message())
    take(protocol, SLOTS)
    assert waiting_kinds(protocol) == [Kind.GRANT]


@pytest.mark.parametrize("allowed", [False, True])
def test_an_answer_invalidates_if_the_peer_allows_it(allowed):
    protocol = end(peer=dataclasses.replace(HELLO, invalidates=allowed))
    remote = protocol.receive(offer(1)).remote
    protocol.add_answer(1, remote, taken=False)
    assert protocol.next_control()[1] is (remote if allowed else None)


def test_nothing_is_sent_from_the_call_of_close_on():
    protocol = end()
    protocol.add_close()
    assert protocol.closing
    with pytest.raises(AssertionError):
        protocol.message(0)


def test_all_control_frames_but_start_can_be_on_their_way_at_once():
    """So an end that posts fewer receives breaks."""
    one = Protocol(HELLO, HELLO)
    two = Protocol(HELLO, HELLO)
    one.receive(memoryview(two.start()))
    on_the_way = [one.start()]
    sent = [one.offer(RemoteMemory(0, 5000, 0))[1] for _ in range(OFFERS)]
    waiting = [one.withdraw(number) for number in sorted(one.offered)]
    two.receive(memoryview(on_the_way[0]))
    for data in sent:
        number = two.receive(memoryview(data)).number
        two.take()
        one.receive(memoryview(two.answer(number, taken=True)))
    for _ in range(OFFERS):
        one.offer(RemoteMemory(0, 5000, 0))
    waiting += [one.withdraw(number) for number in sorted(one.offered)]
    for _ in range(OFFERS):
        _, data = two.offer(RemoteMemory(0, 5000, 0))
        number = one.receive(memoryview(data)).number
        one.take()
        waiting.append(one.answer(number, taken=True))
    waiting += [one.grant(), one.close()]
    assert len(waiting) == Protocol.control_frames(OFFERS, OFFERS) - len(on_the_way)
