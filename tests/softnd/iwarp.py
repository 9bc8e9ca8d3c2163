"""An iWARP peer over plain sockets, for tests: MPA, DDP and RDMAP in Python, without any code of softnd.

Sources: RFC 5044 (MPA), RFC 6581 (MPA revision 2), RFC 5041 (DDP), RFC 5040 (RDMAP), RFC 3720 (CRC32C).

The upper half builds frames and segments from any arguments, right or wrong, so that a test can send anything.
`Endpoint`, in the lower half, keeps to the rules. It counts messages, places what arrives in exposed memory and
answers Read Requests. It raises ProtocolError for anything that a peer must not send. It runs in the caller's
thread and reads bytes only inside its methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

REQUEST_KEY = b"MPA ID Req Frame"
REPLY_KEY = b"MPA ID Rep Frame"
MAX_PRIVATE_DATA = 512

# Bits of the flags byte of a start-up frame. S: the four bytes of enhanced set-up follow (RFC 6581, 9).
MARKERS, CRC, REJECT, ENHANCED = 0x80, 0x40, 0x20, 0x10

TAGGED_HEADER = 14
UNTAGGED_HEADER = 18
READ_REQUEST = struct.Struct("!IQIIQ")  # sink tag, sink offset, size, source tag, source offset
_TAGGED = struct.Struct("!BBIQ")
_UNTAGGED = struct.Struct("!BBIIII")


class ProtocolError(Exception):
    """The peer sent something that the RFCs forbid."""


class ClosedError(Exception):
    """The peer ended the stream."""


class Opcode(IntEnum):
    """RFC 5040, figure 4."""

    WRITE = 0
    READ_REQUEST = 1
    READ_RESPONSE = 2
    SEND = 3
    SEND_INVALIDATE = 4
    SEND_SE = 5
    SEND_SE_INVALIDATE = 6
    TERMINATE = 7


class Queue(IntEnum):
    """RFC 5040, 5.1: the untagged queues."""

    SEND = 0
    READ_REQUEST = 1
    TERMINATE = 2


SENDS = (Opcode.SEND, Opcode.SEND_INVALIDATE, Opcode.SEND_SE, Opcode.SEND_SE_INVALIDATE)
TAGGED = (Opcode.WRITE, Opcode.READ_RESPONSE)


class Rtr(IntFlag):
    """The three ready-to-receive messages of RFC 6581, 9: flags B, C and D."""

    NONE = 0
    FPDU = 1
    WRITE = 2
    READ = 4


class Rights(IntFlag):
    """What a peer may do to exposed memory."""

    READ = 1
    WRITE = 2


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """The CRC of RFC 3720, 12.1. On the wire, its least significant byte comes first."""
    table, crc = _CRC_TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


# --- MPA start-up -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Startup:
    """One start-up frame. ird, ord, peer_to_peer and rtr are used only if `enhanced`."""

    reply: bool = False
    revision: int = 2
    crc: bool = False
    markers: bool = False
    rejected: bool = False
    enhanced: bool = True
    ird: int = 0
    ord: int = 0
    peer_to_peer: bool = False
    rtr: Rtr = Rtr.NONE
    private_data: bytes = b""

    def encode(self) -> bytes:
        data = self.private_data
        if self.enhanced:
            first = self.ird & 0x3FFF | self.peer_to_peer << 15 | bool(self.rtr & Rtr.FPDU) << 14
            second = self.ord & 0x3FFF | bool(self.rtr & Rtr.WRITE) << 15 | bool(self.rtr & Rtr.READ) << 14
            data = struct.pack("!HH", first, second) + data
        flags = MARKERS * self.markers | CRC * self.crc | REJECT * self.rejected | ENHANCED * self.enhanced
        return raw_startup(REPLY_KEY if self.reply else REQUEST_KEY, flags, self.revision, data)

    def answered(self) -> Startup:
        """A reply to this request, in its revision, that offers nothing."""
        return Startup(reply=True, revision=self.revision, enhanced=self.enhanced)


def raw_startup(key: bytes, flags: int, revision: int, data: bytes, length: int | None = None) -> bytes:
    """Return a start-up frame with any fields. `length` is the size of `data` that the frame claims."""
    return key + struct.pack("!BBH", flags, revision, len(data) if length is None else length) + data


def decode_startup(data: bytes, *, reply: bool) -> tuple[Startup, int] | None:
    """Return the frame at the beginning of `data` and its length, or None if bytes are missing."""
    key = REPLY_KEY if reply else REQUEST_KEY
    if not key.startswith(data[: len(key)]):
        raise ProtocolError(f"the key of a start-up frame is {data[:16]!r}")
    if len(data) < 20:
        return None
    flags, revision, length = struct.unpack_from("!BBH", data, 16)
    if revision not in (1, 2):
        raise ProtocolError(f"MPA revision {revision}")
    if length > MAX_PRIVATE_DATA:
        raise ProtocolError(f"{length} bytes of private data")
    if len(data) < 20 + length:
        return None
    private = data[20 : 20 + length]
    enhanced = revision == 2 and bool(flags & ENHANCED)
    frame = Startup(
        reply=reply,
        revision=revision,
        crc=bool(flags & CRC),
        markers=bool(flags & MARKERS),
        rejected=bool(flags & REJECT),
        enhanced=enhanced,
        private_data=private,
    )
    if enhanced:
        if length < 4:
            raise ProtocolError("enhanced set-up without its four bytes")
        first, second = struct.unpack_from("!HH", private)
        rtr = Rtr.FPDU * (first >> 14 & 1) | Rtr.WRITE * (second >> 15 & 1) | Rtr.READ * (second >> 14 & 1)
        frame = dataclasses.replace(
            frame,
            ird=first & 0x3FFF,
            ord=second & 0x3FFF,
            peer_to_peer=bool(first & 0x8000),
            rtr=Rtr(rtr),
            private_data=private[4:],
        )
    return frame, 20 + length


# --- FPDUs and segments -----------------------------------------------------------------------------


def fpdu(ulpdu: bytes, *, crc: bool, length: int | None = None, checksum: int | None = None) -> bytes:
    """RFC 5044, 4: length, ULPDU, padding to a multiple of four, CRC (zeros if CRCs are off)."""
    body = struct.pack("!H", len(ulpdu) if length is None else length) + ulpdu
    body += bytes(-len(body) % 4)
    if checksum is None:
        checksum = crc32c(body) if crc else 0
    return body + struct.pack("<I", checksum)


def fpdu_size(ulpdu_length: int) -> int:
    """Return the size on the wire of an FPDU with a ULPDU of that length."""
    return ulpdu_length + 2 + -(ulpdu_length + 2) % 4 + 4


def _control(opcode: int, last: bool, tagged: bool, ddp_version: int, rdmap_version: int) -> tuple[int, int]:
    ddp = (0x80 if tagged else 0) | (0x40 if last else 0) | ddp_version
    return ddp, rdmap_version << 6 | opcode


def tagged(
    opcode: int,
    stag: int,
    offset: int,
    payload: bytes,
    *,
    last: bool = True,
    ddp_version: int = 1,
    rdmap_version: int = 1,
) -> bytes:
    """RFC 5041, 4.2: a segment into a tagged buffer."""
    control = _control(opcode, last, True, ddp_version, rdmap_version)
    return _TAGGED.pack(*control, stag, offset & 2**64 - 1) + payload


def untagged(
    opcode: int,
    queue: int,
    msn: int,
    payload: bytes,
    *,
    offset: int = 0,
    invalidate: int = 0,
    last: bool = True,
    ddp_version: int = 1,
    rdmap_version: int = 1,
) -> bytes:
    """RFC 5041, 4.3: a segment into an untagged buffer."""
    control = _control(opcode, last, False, ddp_version, rdmap_version)
    return _UNTAGGED.pack(*control, invalidate, queue, msn & 0xFFFFFFFF, offset) + payload


@dataclasses.dataclass(frozen=True)
class Segment:
    """One parsed DDP segment. The fields of the other kind are 0."""

    opcode: Opcode
    last: bool
    payload: bytes
    header: bytes
    stag: int = 0
    offset: int = 0
    queue: int = 0
    msn: int = 0
    invalidate: int = 0


def parse_segment(ulpdu: bytes) -> Segment:
    """Parse the segment in a ULPDU. Every field that the RFCs fix is checked."""
    if len(ulpdu) < 2:
        raise ProtocolError(f"a ULPDU of {len(ulpdu)} bytes")
    ddp, rdmap = ulpdu[0], ulpdu[1]
    if ddp & 0x3C or ddp & 3 != 1:
        raise ProtocolError(f"DDP control {ddp:#x}")
    if rdmap >> 6 != 1 or rdmap & 0xF > 7:
        raise ProtocolError(f"RDMAP control {rdmap:#x}")
    opcode, last = Opcode(rdmap & 0xF), bool(ddp & 0x40)
    if bool(ddp & 0x80) != (opcode in TAGGED):
        raise ProtocolError(f"{opcode.name} in the wrong kind of segment")
    if ddp & 0x80:
        if len(ulpdu) < TAGGED_HEADER:
            raise ProtocolError("a short tagged header")
        _, _, stag, offset = _TAGGED.unpack_from(ulpdu)
        if opcode is Opcode.READ_RESPONSE and not last and len(ulpdu) == TAGGED_HEADER:
            raise ProtocolError("an empty segment that is not the last")
        return Segment(opcode, last, ulpdu[14:], ulpdu[:14], stag=stag, offset=offset)
    if len(ulpdu) < UNTAGGED_HEADER:
        raise ProtocolError("a short untagged header")
    _, _, invalidate, queue, msn, offset = _UNTAGGED.unpack_from(ulpdu)
    expected = {Opcode.READ_REQUEST: Queue.READ_REQUEST, Opcode.TERMINATE: Queue.TERMINATE}.get(opcode, Queue.SEND)
    if queue != expected:
        raise ProtocolError(f"{opcode.name} on queue {queue}")
    return Segment(opcode, last, ulpdu[18:], ulpdu[:18], offset=offset, queue=queue, msn=msn, invalidate=invalidate)


def read_request(sink_stag: int, sink_offset: int, size: int, source_stag: int, source_offset: int) -> bytes:
    """The payload of a Read Request (RFC 5040, 4.4)."""
    return READ_REQUEST.pack(sink_stag, sink_offset & 2**64 - 1, size, source_stag, source_offset & 2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Terminate:
    """RFC 5040, 4.8. `header` is the DDP header of the refused segment, if the Terminate has it."""

    layer: int
    type: int
    code: int
    header: bytes = b""
    read_header: bytes = b""
    length: int | None = None

    @property
    def error(self) -> tuple[int, int, int]:
        return self.layer, self.type, self.code

    def encode(self) -> bytes:
        bits = (self.length is not None) << 7 | bool(self.header) << 6 | bool(self.read_header) << 5
        control = struct.pack("!BBBB", self.layer << 4 | self.type, self.code, bits, 0)
        length = b"" if self.length is None else struct.pack("!H", self.length)
        return control + length + self.header + self.read_header


def parse_terminate(payload: bytes) -> Terminate:
    if len(payload) < 4:
        raise ProtocolError(f"a Terminate of {len(payload)} bytes")
    first, code, bits, _ = payload[:4]
    at, length, header = 4, None, b""
    if bits & 0x80:
        if len(payload) < at + 2:
            raise ProtocolError("a Terminate without the length that it announces")
        (length,) = struct.unpack_from("!H", payload, at)
        at += 2
    if bits & 0x40:
        size = TAGGED_HEADER if at < len(payload) and payload[at] & 0x80 else UNTAGGED_HEADER
        header = payload[at : at + size]
        at += size
        if len(header) < size:
            raise ProtocolError("a Terminate with half a DDP header")
    read_header = payload[at : at + READ_REQUEST.size] if bits & 0x20 else b""
    return Terminate(first >> 4, first & 0xF, code, header, read_header, length)


# Between two softnd ends (softrdma/README.md, "On the wire").
SOFTND_READ_OFFSET = 0x736F66746E640001
RECEIPT_STAG, FINAL_RECEIPT_STAG = 0xFFFFFF00, 0xFFFFFF01


class Receipt(NamedTuple):
    """How many bytes of this end's stream the peer has taken. The `final` one says that it takes no more."""

    taken: int
    final: bool


# --- An end of a connection that keeps to the rules -------------------------------------------------


@dataclasses.dataclass
class Region:
    """Memory that the peer may use: its first byte has the offset `base`."""

    stag: int
    memory: bytearray
    rights: Rights
    base: int = 0

    def place(self, offset: int, size: int, right: Rights) -> int:
        start = offset - self.base
        if not self.rights & right:
            raise ProtocolError(f"stag {self.stag:#x} is not for that")
        if start < 0 or start + size > len(self.memory):
            raise ProtocolError(f"{size} bytes at {offset:#x} are outside of stag {self.stag:#x}")
        return start


@dataclasses.dataclass(frozen=True)
class Message:
    """A Send that arrived."""

    data: bytes
    solicited: bool = False
    invalidated: int | None = None


@dataclasses.dataclass
class _Read:
    size: int
    stag: int
    data: bytearray = dataclasses.field(default_factory=bytearray)
    done: bool = False


class Endpoint:
    """One iWARP stream over a connected socket.

    First call start() on the active side, or await_start() and then answer() or reject() on the passive side.
    `limit_s` bounds every wait; after it, TimeoutError is raised.
    """

    def __init__(self, connected: socket.socket, *, limit_s: float = 10.0, segment: int = 1 << 14) -> None:
        self.socket = connected
        self.limit_s = limit_s
        self.segment = segment  # maximum payload of one segment
        self.crc = False
        self.peer: Startup | None = None
        self.local: Startup | None = None
        self.messages: deque[Message] = deque()
        self.terminated: Terminate | None = None
        self.closed = False
        self.regions: dict[int, Region] = {}
        self._input = bytearray()
        self._sent = dict.fromkeys(Queue, 0)
        self._received = dict.fromkeys(Queue, 0)
        self._assembly: dict[Queue, bytearray] = {}
        self._reads: deque[_Read] = deque()
        self._stags = itertools.count(0x1001)
        self.rtr_taken = False
        self.taken = 0  # bytes of the stream, including the start-up
        self.identified_as_softnd = False  # the peer's first Read said that it is softnd
        self.receipts: list[Receipt] = []
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """End as TCP does for a process that dies with unread data."""
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()

    # Set-up

    def start(self, request: Startup) -> Startup:
        """Send the request and read the reply. A reply of revision 1 to a request of revision 2 is accepted too."""
        self.local = request
        self.socket.sendall(request.encode())
        reply = self._take_startup(reply=True)
        if not reply.rejected:
            self._agree(reply)
            if reply.enhanced and reply.peer_to_peer:
                self._send_rtr(request, reply)
        return reply

    def await_start(self) -> Startup:
        self.peer = self._take_startup(reply=False)
        return self.peer

    def answer(self, reply: Startup) -> None:
        assert self.peer is not None
        self.local = reply
        self.socket.sendall(reply.encode())
        self._agree(self.peer)

    def reject(self, private_data: bytes = b"") -> None:
        assert self.peer is not None
        self.answer(dataclasses.replace(self.peer.answered(), rejected=True, private_data=private_data))

    def _take_startup(self, *, reply: bool) -> Startup:
        deadline = time.monotonic() + self.limit_s
        while True:
            found = decode_startup(bytes(self._input), reply=reply)
            if found is not None:
                del self._input[: found[1]]
                self.taken += found[1]
                return found[0]
            self._receive(deadline)

    def _agree(self, peer: Startup) -> None:
        assert self.local is not None
        if peer.markers:
            raise ProtocolError("the peer wants markers")
        self.peer = peer
        self.crc = self.local.crc or peer.crc  # RFC 5044, 7.1.1: in use if either side wants it

    def _send_rtr(self, request: Startup, reply: Startup) -> None:
        common = request.rtr & reply.rtr
        if common & Rtr.READ:
            self.read_start(0, 0, 0)
        elif common & Rtr.WRITE:
            self.write(0, 0, b"")
        elif common & Rtr.FPDU:
            self.send(b"")
        else:
            raise ProtocolError("no ready-to-receive message that both sides know")

    # Memory

    def expose(self, memory: bytearray, rights: Rights, base: int = 0) -> int:
        """Let the peer use `memory`; return its STag."""
        stag = next(self._stags) << 8
        self.regions[stag] = Region(stag, memory, rights, base)
        return stag

    # Requests

    def send_raw(self, ulpdu: bytes) -> None:
        self.socket.sendall(fpdu(ulpdu, crc=self.crc))

    def _pieces(self, data: bytes) -> Iterator[tuple[int, bytes, bool]]:
        for at in range(0, max(len(data), 1), self.segment):
            yield at, data[at : at + self.segment], at + self.segment >= len(data)

    def send(self, data: bytes, *, solicited: bool = False, invalidate: int | None = None) -> None:
        opcode = Opcode.SEND + (2 if solicited else 0) + (1 if invalidate is not None else 0)
        self._send_untagged(opcode, Queue.SEND, data, invalidate or 0)

    def _send_untagged(self, opcode: int, queue: Queue, data: bytes, invalidate: int = 0) -> None:
        self._sent[queue] += 1
        for offset, piece, last in self._pieces(data):
            segment = untagged(opcode, queue, self._sent[queue], piece, offset=offset, invalidate=invalidate, last=last)
            self.send_raw(segment)

    def write(self, stag: int, offset: int, data: bytes) -> None:
        for at, piece, last in self._pieces(data):
            self.send_raw(tagged(Opcode.WRITE, stag, offset + at, piece, last=last))

    def read_start(self, stag: int, offset: int, size: int) -> None:
        """Send a Read Request. read_finish() returns the answers in order."""
        read = _Read(size, next(self._stags) << 8)
        self._reads.append(read)
        self._send_untagged(Opcode.READ_REQUEST, Queue.READ_REQUEST, read_request(read.stag, 0, size, stag, offset))

    def read_finish(self) -> bytes:
        read = self._reads[0]
        self.run_until(lambda: read.done)
        self._reads.popleft()
        return bytes(read.data)

    def read(self, stag: int, offset: int, size: int) -> bytes:
        self.flush()
        self.read_start(stag, offset, size)
        return self.read_finish()

    def flush(self) -> None:
        """Read the answers of all Read Requests under way, including the ready-to-receive one."""
        while self._reads:
            self.read_finish()

    def terminate(self, layer: int, type: int, code: int, header: bytes = b"") -> None:
        length = len(header) if header else None
        payload = Terminate(layer, type, code, header, length=length).encode()
        self._send_untagged(Opcode.TERMINATE, Queue.TERMINATE, payload)

    def send_receipt(self, taken: int | None = None, *, final: bool = False) -> None:
        """Send a receipt, as softnd does: this many bytes of the peer's stream were taken."""
        offset = self.taken if taken is None else taken
        self.send_raw(tagged(Opcode.WRITE, FINAL_RECEIPT_STAG if final else RECEIPT_STAG, offset, b""))

    def receive(self) -> Message:
        self.run_until(lambda: bool(self.messages))
        return self.messages.popleft()

    # What arrives

    def run_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while not self._take_fpdus(done):
            if self.terminated is not None:
                raise ClosedError(f"the peer sent {self.terminated}")
            self._receive(deadline)

    def run_to_the_end(self) -> None:
        """Handle everything until the peer has closed the stream."""
        with contextlib.suppress(ClosedError, ConnectionError):
            deadline = time.monotonic() + self.limit_s
            while True:
                self._take_fpdus(lambda: False)
                self._receive(deadline)
        self.closed = True

    def _receive(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"nothing came in {self.limit_s:g} s")
        # The condition may become true without any new data.
        if not select.select([self.socket], [], [], min(left, 0.05))[0]:
            return
        data = self.socket.recv(1 << 18)
        if not data:
            self.closed = True
            raise ClosedError("the peer closed the stream")
        self._input += data

    def _take_fpdus(self, done: Callable[[], bool]) -> bool:
        while not done():
            if len(self._input) < 2:
                return False
            (length,) = struct.unpack_from("!H", self._input)
            size = fpdu_size(length)
            if len(self._input) < size:
                return False
            frame = bytes(self._input[:size])
            del self._input[:size]
            if self.crc and crc32c(frame[:-4]) != struct.unpack("<I", frame[-4:])[0]:
                raise ProtocolError("a wrong CRC")
            if length == 0:  # RFC 6581, 9: the ready-to-receive message of flag B
                self.rtr_taken = True
                continue
            self._take(parse_segment(frame[2 : 2 + length]))
            self.taken += size
        return True

    def _take(self, segment: Segment) -> None:
        if segment.opcode is Opcode.WRITE:
            self._take_write(segment)
        elif segment.opcode is Opcode.READ_RESPONSE:
            self._take_read_response(segment)
        else:
            self._take_untagged(segment)

    def _region(self, stag: int) -> Region:
        if stag not in self.regions:
            raise ProtocolError(f"unknown stag {stag:#x}")
        return self.regions[stag]

    def _take_write(self, segment: Segment) -> None:
        size = len(segment.payload)
        if size == 0:  # its tag is ignored (RFC 5040, 5.2.1)
            if segment.stag in (RECEIPT_STAG, FINAL_RECEIPT_STAG):
                self.receipts.append(Receipt(segment.offset, segment.stag == FINAL_RECEIPT_STAG))
            self.rtr_taken = True
            return
        region = self._region(segment.stag)
        at = region.place(segment.offset, size, Rights.WRITE)
        region.memory[at : at + size] = segment.payload

    def _take_read_response(self, segment: Segment) -> None:
        read = next((read for read in self._reads if not read.done), None)
        if read is None:
            raise ProtocolError("an unrequested Read Response")
        if segment.stag != read.stag or segment.offset != len(read.data):
            raise ProtocolError(f"a Read Response for {segment.stag:#x} at {segment.offset:#x}")
        read.data += segment.payload
        if len(read.data) > read.size or (segment.last and len(read.data) != read.size):
            raise ProtocolError(f"a Read Response of {len(read.data)} bytes, not {read.size}")
        read.done = segment.last

    def _take_untagged(self, segment: Segment) -> None:
        queue = Queue(segment.queue)
        assembly = self._assembly.setdefault(queue, bytearray())
        if segment.msn != self._received[queue] + 1 & 0xFFFFFFFF:
            raise ProtocolError(f"message {segment.msn} of {queue.name}, not {self._received[queue] + 1}")
        if segment.offset != len(assembly):
            raise ProtocolError(f"offset {segment.offset} of a message, not {len(assembly)}")
        assembly += segment.payload
        if not segment.last:
            return
        self._received[queue] = segment.msn
        data = bytes(self._assembly.pop(queue))
        if queue is Queue.READ_REQUEST:
            self._answer_read(data)
        elif queue is Queue.TERMINATE:
            self.terminated = parse_terminate(data)
        else:
            invalidates = segment.opcode in (Opcode.SEND_INVALIDATE, Opcode.SEND_SE_INVALIDATE)
            solicited = segment.opcode in (Opcode.SEND_SE, Opcode.SEND_SE_INVALIDATE)
            if invalidates:
                self.regions.pop(segment.invalidate, None)
            self.messages.append(Message(data, solicited, segment.invalidate if invalidates else None))

    def _answer_read(self, request: bytes) -> None:
        if len(request) != READ_REQUEST.size:
            raise ProtocolError(f"a Read Request of {len(request)} bytes")
        sink_stag, sink_offset, size, source_stag, source_offset = READ_REQUEST.unpack(request)
        data = b""
        self.identified_as_softnd |= size == 0 and sink_offset == SOFTND_READ_OFFSET
        if size:
            region = self._region(source_stag)
            at = region.place(source_offset, size, Rights.READ)
            data = bytes(region.memory[at : at + size])
        else:
            self.rtr_taken = True
        for at, piece, last in self._pieces(data):
            self.send_raw(tagged(Opcode.READ_RESPONSE, sink_stag, sink_offset + at, piece, last=last))


def connect(address: str, port: int, *, limit_s: float = 10.0) -> Endpoint:
    """Connect a stream to a listener. Nothing is sent yet."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    connected = socket.socket(family)
    try:
        connected.settimeout(limit_s)
        connected.connect((address, port))
    except BaseException:
        connected.close()
        raise
    return Endpoint(connected, limit_s=limit_s)
