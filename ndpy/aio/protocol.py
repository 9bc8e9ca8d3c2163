"""The protocol of ndpy.aio without any input or output. docs/aio_protocol.md describes it.

Each end has a Protocol. It makes the header of every frame that is sent, keeps the control frames that wait for room,
checks every frame that comes, and counts:

- Data frames (MESSAGE and OFFER) take one of the receives that the peer has posted for them. `granted` says how many
  data frames the peer may have sent since the beginning. It grows when the program takes a message.
- Control frames take other receives. Rules limit how many of each kind can be on their way, so the peer has always
  posted enough of these.

The numbers count modulo 2**32.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import NamedTuple

from ndpy.aio.errors import ProtocolError
from ndpy.objects.memory import RemoteMemory
from ndpy.vocabulary.flags import NamedInt

VERSION = 1
_MAGIC = b"ndpa"
_HELLO = struct.Struct("!4sBBHHxxIQ")
# Bits of the second byte.
_INVALIDATES = 1
_KNOWS_DROPPED = 2
HELLO_LENGTH = _HELLO.size
#: kind, 3 zero bytes, number of the offer, granted, seen, length
_HEADER = struct.Struct("!B3xIIIQ")
HEADER_LENGTH = _HEADER.size
DESCRIPTOR_LENGTH = 20
_MASK = 0xFFFFFFFF

MIN_SLOT_SIZE = 64
MAX_SLOT_SIZE = 1 << 20
MAX_SLOTS = 1024
MAX_OFFERS = 64


class Kind(NamedInt):
    """The kinds of frames.

    Names:
        START: the first frame of each end.
        MESSAGE: a message, which follows the header.
        OFFER: a message that the peer reads from this end's memory. The descriptor of the memory follows the header.
        DONE: the peer has the message of an offer, and no longer uses its memory.
        WITHDRAW: the sender of an offer asks for its answer now, even if the message was not read.
        GRANT: nothing but the numbers in the header.
        CLOSE: this end neither sends nor takes further messages.
        DROPPED: the peer does not take the message of an offer, and no longer uses its memory.
    """

    START = 1
    MESSAGE = 2
    OFFER = 3
    DONE = 4
    WITHDRAW = 5
    GRANT = 6
    CLOSE = 7
    DROPPED = 8


_KINDS = {kind.value: kind for kind in Kind}
_DATA = (Kind.MESSAGE, Kind.OFFER)
_ABOUT_AN_OFFER = (Kind.OFFER, Kind.DONE, Kind.WITHDRAW, Kind.DROPPED)
_ANSWERS = (Kind.DONE, Kind.DROPPED)


@dataclasses.dataclass(frozen=True)
class Hello:
    """What each end tells the other when it connects, as private data.

    Attributes:
        slots: how many data frames it takes at once.
        offers: how many offers of each end may be open. The smaller of the two ends' numbers holds.
        slot_size: the longest frame that it takes, in bytes.
        max_message_length: the longest message that it takes, in bytes.
        invalidates: whether the answer to an offer may invalidate its token.
        knows_dropped: whether it knows DROPPED. To an end that does not, DONE is the only answer.
    """

    slots: int
    offers: int
    slot_size: int
    max_message_length: int
    invalidates: bool = False
    knows_dropped: bool = True

    def to_bytes(self) -> bytes:
        bits = _INVALIDATES * self.invalidates | _KNOWS_DROPPED * self.knows_dropped
        return _HELLO.pack(_MAGIC, VERSION, bits, self.slots, self.offers, self.slot_size, self.max_message_length)

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Read it from private data, which some transports pad with zeros. Raises ProtocolError."""
        if len(data) < _HELLO.size or data[:4] != _MAGIC:
            raise ProtocolError(
                "the peer does not speak the protocol of ndpy.aio: its private data begin with other bytes"
            )
        _, version, bits, slots, offers, slot_size, max_message_length = _HELLO.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version} of the protocol, and this end version {VERSION}")
        hello = cls(
            slots, offers, slot_size, max_message_length, bool(bits & _INVALIDATES), bool(bits & _KNOWS_DROPPED)
        )
        if not (1 <= slots <= MAX_SLOTS and 1 <= offers <= MAX_OFFERS and MIN_SLOT_SIZE <= slot_size <= MAX_SLOT_SIZE):
            raise ProtocolError(f"the peer tells impossible limits: {hello}")
        return hello


class Frame(NamedTuple):
    """A frame of the peer.

    Attributes:
        number: of the offer that it is about, else 0.
        length: of the message, in bytes.
        remote: the memory of an offer, else None.
    """

    kind: Kind
    number: int
    length: int
    remote: RemoteMemory | None = None


class Protocol:
    """One end's part of the protocol.

    Attributes:
        own, peer: what the two ends have told each other.
        offered: the numbers of this end's offers that are open.
        peer_closed: whether CLOSE has come.
        closing: whether this end's CLOSE was made, or waits. From then on this end drops the messages that come.
        longest_frame: how many bytes a MESSAGE holds. It fits a slot of either end: this end's is where it is sent
            from.
    """

    def __init__(self, own: Hello, peer: Hello) -> None:
        self.own = own
        self.peer = peer
        self.longest_frame = min(own.slot_size, peer.slot_size) - HEADER_LENGTH
        self.started = False
        self.peer_closed = False
        #: How many offers of each end may be open. Each may bring a DONE, and the receives for that were posted before
        #: the peer told its number.
        self._most_offers = min(own.offers, peer.offers)
        self.offered: set[int] = set()
        self._withdrawn: set[int] = set()
        self._last_offer = 0
        #: Open offers of the peer.
        self._peer_offers: set[int] = set()
        self._peer_last_offer = 0
        self._sent = 0
        #: What the peer has granted, and what this end has granted.
        self._peer_granted = peer.slots
        self._granted = own.slots
        self._received = 0
        #: The last `granted` that was sent, and the last one that the peer has seen.
        self._told = own.slots
        self._peer_seen = own.slots
        #: What the last GRANT said. None if the peer has seen it.
        self._unseen_grant: int | None = None
        #: Control frames that wait for room, and what each may invalidate.
        self._waiting: list[tuple[Callable[[], bytes], RemoteMemory | None]] = []
        self.closing = False

    @staticmethod
    def control_frames(own_offers: int, peer_offers: int) -> int:
        """How many control frames of the peer can be on their way at once.

        START, GRANT and CLOSE; an answer to each offer of this end; two WITHDRAW for each offer of the peer, since one
        may cross the answer to the offer before.
        """
        return 3 + own_offers + 2 * peer_offers

    # ---- sending ----

    @property
    def may_send(self) -> bool:
        """Whether the peer takes one more data frame."""
        return (self._peer_granted - self._sent) & _MASK != 0

    @property
    def may_offer(self) -> bool:
        return self.may_send and len(self.offered) < self._most_offers

    def message(self, length: int) -> bytes:
        """The header of a MESSAGE of this length."""
        assert self.may_send and not self.closing
        self._sent = (self._sent + 1) & _MASK
        return self._header(Kind.MESSAGE, 0, length)

    def offer(self, remote: RemoteMemory) -> tuple[int, bytes]:
        """An OFFER. Returns its number and the whole frame."""
        assert self.may_offer and not self.closing
        self._sent = (self._sent + 1) & _MASK
        number = self._last_offer = self._last_offer % _MASK + 1
        self.offered.add(number)
        return number, self._header(Kind.OFFER, number, remote.length) + remote.to_bytes()

    def start(self) -> bytes:
        return self._header(Kind.START, 0, 0)

    def withdraw(self, number: int) -> bytes:
        assert number in self.offered - self._withdrawn
        self._withdrawn.add(number)
        return self._header(Kind.WITHDRAW, number, 0)

    def answer(self, number: int, *, taken: bool) -> bytes:
        """The answer to an offer whose memory is no longer used. taken: whether the program has the message."""
        self._peer_offers.remove(number)
        return self._header(Kind.DONE if taken or not self.peer.knows_dropped else Kind.DROPPED, number, 0)

    def close(self) -> bytes:
        self.closing = True
        return self._header(Kind.CLOSE, 0, 0)

    def take(self) -> bool:
        """The program has taken a message, so there is room for another one. Returns whether next_control() has a frame
        now.
        """
        self._granted = (self._granted + 1) & _MASK
        return bool(self._waiting) or self.grant_is_due

    @property
    def grant_is_due(self) -> bool:
        """Whether to send a GRANT now. The peer must have seen the last one, and half of the room must be new."""
        return self._unseen_grant is None and 2 * ((self._granted - self._told) & _MASK) >= self.own.slots

    def grant(self) -> bytes:
        self._unseen_grant = self._granted
        return self._header(Kind.GRANT, 0, 0)

    # ---- control frames that wait ----

    def add_start(self) -> None:
        self._waiting.append((self.start, None))

    def add_close(self) -> None:
        self.closing = True
        self._waiting.append((self.close, None))

    def add_withdrawal(self, number: int) -> None:
        """It is dropped if the answer comes while it waits."""
        self._waiting.append((lambda: self.withdraw(number) if number in self.offered else b"", None))

    def add_answer(self, number: int, remote: RemoteMemory | None, *, taken: bool) -> None:
        """remote: the memory of the offer, which the answer may invalidate if the peer allows it."""
        ended = remote if self.peer.invalidates else None
        self._waiting.append((lambda: self.answer(number, taken=taken), ended))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def next_control(self) -> tuple[bytes, RemoteMemory | None] | None:
        """The next control frame, and what it may invalidate. There is room for it.

        Each is made when it goes, because it carries the newest numbers. So a GRANT goes only if no other frame does.
        """
        while self._waiting:
            make, ended = self._waiting.pop(0)
            if frame := make():
                return frame, ended
        return (self.grant(), None) if self.grant_is_due else None

    def _header(self, kind: Kind, number: int, length: int) -> bytes:
        self._told = self._granted
        return _HEADER.pack(kind, number, self._granted, self._peer_granted, length)

    # ---- receiving ----

    def receive(self, data: memoryview) -> Frame:
        """Check a frame of the peer, and take its numbers. Raises ProtocolError."""
        if len(data) < HEADER_LENGTH:
            raise ProtocolError(f"the peer sent a frame of {len(data)} bytes, which is shorter than a header")
        word, number, granted, seen, length = _HEADER.unpack_from(data)
        kind = _KINDS.get(word)
        if kind is None or data[1] or data[2] or data[3]:
            raise ProtocolError(f"the peer sent a frame of an unknown kind: {bytes(data[:4]).hex()}")
        self._take_numbers(granted, seen)
        if self.started == (kind is Kind.START):
            raise ProtocolError(
                f"the peer sent {kind.name} where the connection {'has' if self.started else 'has not'} begun"
            )
        if (number != 0) != (kind in _ABOUT_AN_OFFER):
            raise ProtocolError(f"the peer sent {kind.name} with the number {number}")
        if kind in _DATA:
            return self._receive_data(kind, number, length, data)
        if length or len(data) != HEADER_LENGTH:
            raise ProtocolError(f"the peer sent {kind.name} with {len(data)} bytes and the length {length}")
        if kind is Kind.START:
            self.started = True
        elif kind is Kind.CLOSE:
            self._require_open(kind)
            self.peer_closed = True
        elif kind in _ANSWERS:
            kind = self._receive_answer(kind, number)
        elif kind is Kind.WITHDRAW and (self._peer_last_offer - number) & _MASK > _MASK // 2:
            raise ProtocolError(f"the peer withdrew offer {number}, which it has not made")
        return Frame(kind, number, length)

    def _receive_answer(self, kind: Kind, number: int) -> Kind:
        """Returns DROPPED unless the answer says that the message was taken."""
        if number not in self.offered:
            raise ProtocolError(f"the peer sent {kind.name} for offer {number}, which is not open")
        if kind is Kind.DROPPED and not (self.peer_closed or number in self._withdrawn):
            raise ProtocolError(f"the peer sent DROPPED for offer {number} before CLOSE, and it was not withdrawn")
        self.offered.remove(number)
        self._withdrawn.discard(number)
        # An end that knows no DROPPED answers so to what it drops.
        return Kind.DROPPED if self.peer_closed and not self.peer.knows_dropped else kind

    def _receive_data(self, kind: Kind, number: int, length: int, data: memoryview) -> Frame:
        self._require_open(kind)
        if self._received == self._granted:
            raise ProtocolError("the peer sent more messages than it was granted")
        self._received = (self._received + 1) & _MASK
        if length > self.own.max_message_length:
            raise ProtocolError(
                f"the peer sent a message of {length} bytes, and this end takes {self.own.max_message_length} "
                "(max_message_length)"
            )
        if kind is Kind.MESSAGE:
            if len(data) != HEADER_LENGTH + length:
                raise ProtocolError(f"the peer sent a message of {length} bytes in a frame of {len(data)}")
            return Frame(kind, 0, length)
        if len(data) != HEADER_LENGTH + DESCRIPTOR_LENGTH:
            raise ProtocolError(f"the peer sent an offer of {len(data)} bytes")
        if number != self._peer_last_offer % _MASK + 1 or len(self._peer_offers) >= self._most_offers:
            raise ProtocolError(
                f"the peer sent offer {number} after {self._peer_last_offer}, with {len(self._peer_offers)} open"
            )
        try:
            remote = RemoteMemory.from_bytes(data[HEADER_LENGTH:])
        except ValueError as error:
            raise ProtocolError(f"the peer offered impossible memory: {error}") from None
        if remote.length != length or not length:
            raise ProtocolError(f"the peer offered {remote.length} bytes for a message of {length}")
        self._peer_last_offer = number
        self._peer_offers.add(number)
        return Frame(kind, number, length, remote)

    def is_open(self, number: int) -> bool:
        """Whether an offer of the peer has not been answered."""
        return number in self._peer_offers

    def _require_open(self, kind: Kind) -> None:
        if self.peer_closed:
            raise ProtocolError(f"the peer sent {kind.name} after CLOSE")

    def _take_numbers(self, granted: int, seen: int) -> None:
        # Neither number goes back, and the peer cannot grant more than its slots or have seen more than it was told.
        more, ahead = (granted - self._peer_granted) & _MASK, (granted - self._sent) & _MASK
        if more > self.peer.slots or ahead > self.peer.slots:
            raise ProtocolError(
                f"the peer granted {granted} messages; {self._sent} were sent, and it has {self.peer.slots} slots"
            )
        news, missing = (seen - self._peer_seen) & _MASK, (self._told - seen) & _MASK
        if news + missing != (self._told - self._peer_seen) & _MASK:
            raise ProtocolError(f"the peer has seen {seen} granted messages, but was told {self._told}")
        self._peer_granted, self._peer_seen = granted, seen
        if self._unseen_grant is not None and (seen - self._unseen_grant) & _MASK <= _MASK // 2:
            self._unseen_grant = None
