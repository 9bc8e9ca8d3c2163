"""rping's conversation over iwarp.py, in both roles.

The client names a source buffer with a Send of 16 bytes (address, key, size). The server reads it and sends 16
bytes as go-ahead. Then the client names a sink. The server writes there what it read and sends again.

As a program it is a client of `rping -s -P`: `rping_wire.py ADDRESS PORT`. It uses each start of the list below
once, except those of revision 1. Revision 1 has no read limits, and siw then lets rping read nothing.
"""

from __future__ import annotations

import struct
import sys

import iwarp
from iwarp import Endpoint, Rights, Rtr, Startup

_ADVERTISEMENT = struct.Struct("!QII")


def pattern(number: int, size: int) -> bytes:
    """The bytes with which rping's client fills its source: a title, letters that shift by one each round, a zero."""
    title = f"rdma-ping-{number}: ".encode()
    letters = bytes(65 + (number + index) % 58 for index in range(size - len(title) - 1))
    return title + letters + b"\0"


def _advertise(endpoint: Endpoint, stag: int, offset: int, size: int) -> None:
    endpoint.send(_ADVERTISEMENT.pack(offset, stag, size))


def client(endpoint: Endpoint, rounds: int, size: int) -> None:
    """Run the rounds. Raise if the bytes that return differ from the source."""
    base = 0x7F0000001000
    source, sink = bytearray(size), bytearray(size)
    source_tag = endpoint.expose(source, Rights.READ, base)
    sink_tag = endpoint.expose(sink, Rights.WRITE, base)
    for number in range(rounds):
        source[:] = pattern(number, size)
        sink[:] = bytes(size)
        _advertise(endpoint, source_tag, base, size)
        endpoint.receive()
        _advertise(endpoint, sink_tag, base, size)
        endpoint.receive()
        if sink != source:
            raise AssertionError(f"round {number}: {bytes(sink)!r}, not {bytes(source)!r}")


def server(endpoint: Endpoint) -> list[bytes]:
    """Serve until the peer closes. Return what was read in each round."""
    seen = []
    try:
        while True:
            offset, stag, size = _ADVERTISEMENT.unpack(endpoint.receive().data)
            data = endpoint.read(stag, offset, size)
            seen.append(data)
            endpoint.send(bytes(16))
            offset, stag, size = _ADVERTISEMENT.unpack(endpoint.receive().data)
            endpoint.write(stag, offset, data)
            endpoint.send(bytes(16))
    except (iwarp.ClosedError, ConnectionError):
        return seen


STARTS = {
    "revision 1": Startup(revision=1, enhanced=False),
    "revision 1 with CRC": Startup(revision=1, enhanced=False, crc=True),
    "revision 2": Startup(ird=4, ord=4),
    "revision 2, ready by an empty Read": Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.READ),
    "revision 2, ready by an empty Write": Startup(ird=4, ord=4, peer_to_peer=True, rtr=Rtr.WRITE, crc=True),
}


def main() -> None:
    address, port = sys.argv[1], int(sys.argv[2])
    for name, start in STARTS.items():
        if start.revision == 1:
            continue
        with iwarp.connect(address, port) as endpoint:
            reply = endpoint.start(start)
            for size in (64, 23, 10007, 65535):
                client(endpoint, 3, size)
                endpoint.regions.clear()
        print(f"{name}: verified; the reply was {reply}", flush=True)


if __name__ == "__main__":
    main()
