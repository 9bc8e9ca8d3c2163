"""Endpoints: the data that one end of a connection needs of the other end, if there is no connection manager."""

from __future__ import annotations

import dataclasses
import ipaddress
import struct

# Path MTUs in the order of their codes, from 1 on.
MTUS = (256, 512, 1024, 2048, 4096)

# qp_number, psn, lid, mtu, inbound_read_limit, gid.
_WIRE = struct.Struct(">IIHHH16s")
_UNKNOWN_LIMIT = 0xFFFF
_NUMBERS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One end of a connection. QueuePair.local_endpoint() makes it, and the other end's connect_endpoint() takes it.

    Parameters:
        lid: the address on InfiniBand. 0 on Ethernet.
        qp_number: the queue pair's number, 24 bits.
        psn: the sequence number of the first packet, 24 bits.
        gid: 16 bytes.
        gid_index, gid_type, port: of this side. A remote end needs none of them.
        mtu: 256, 512, 1024, 2048 or 4096 bytes; 0 if it is not known.
        inbound_read_limit: how many reads this end serves at once; None if that is not known.
    Raises:
        ValueError: mtu is another number.
    """

    lid: int
    qp_number: int
    psn: int
    gid: bytes
    gid_index: int = 0
    gid_type: str = ""
    mtu: int = 0
    port: int = 1
    inbound_read_limit: int | None = None

    def __post_init__(self) -> None:
        if self.mtu and self.mtu not in MTUS:
            raise ValueError(f"mtu is {', '.join(map(str, MTUS))}, or 0 for an unknown one, not {self.mtu!r}")

    def __str__(self) -> str:
        gid = str(ipaddress.IPv6Address(self.gid).ipv4_mapped or ipaddress.IPv6Address(self.gid))
        kind = f", {self.gid_type}, index {self.gid_index}" if self.gid_type else ""
        return f"QPN {self.qp_number:#x} at GID {gid}{kind}, LID {self.lid}, MTU {self.mtu or 'unknown'}"

    def to_bytes(self) -> bytes:
        """The 30 bytes to send to the peer. They have everything but gid_index, gid_type and port.

        In network order: qp_number and psn with 4 bytes each; lid, mtu and inbound_read_limit with 2 bytes each, where
        0xFFFF stands for None; gid.
        """
        limit = _UNKNOWN_LIMIT if self.inbound_read_limit is None else self.inbound_read_limit
        return _WIRE.pack(self.qp_number, self.psn, self.lid, self.mtu, limit, self.gid)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Endpoint:
        """Read what to_bytes() wrote.

        Raises:
            ValueError: to_bytes() cannot have written these bytes.
        """
        if len(data) != _WIRE.size:
            raise ValueError(f"an endpoint has {_WIRE.size} bytes, not {len(data)}")
        qp_number, psn, lid, mtu, limit, gid = _WIRE.unpack(data)
        if max(qp_number, psn) >= _NUMBERS:
            raise ValueError(f"an endpoint's numbers have 24 bits, not QPN {qp_number:#x} and PSN {psn:#x}")
        return cls(lid, qp_number, psn, gid, mtu=mtu, inbound_read_limit=None if limit == _UNKNOWN_LIMIT else limit)
