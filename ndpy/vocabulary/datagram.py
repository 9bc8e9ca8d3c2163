"""Where a datagram came from."""

from __future__ import annotations

import dataclasses
import struct

# struct ndpy_details from source_number on: number, LID, index of the P_Key, service level, path bits, has_header,
# kinds, header.
_NATIVE = struct.Struct("=IHHBBBB40s")
_BEFORE = 28
_GRH = struct.Struct(">IHBB16s16s")
_IPV4 = struct.Struct(">BBHHHBBH4s4s")
_UDP = 17


@dataclasses.dataclass(frozen=True)
class DatagramSource:
    """Where a datagram came from. Completion.source has it.

    DatagramQueuePair.destination() makes a Destination of it, for an answer.

    Parameters:
        qp_number: the number of the queue pair that sent it.
        lid: its address on InfiniBand. 0 on Ethernet.
        service_level, path_bits: those of the packet, on InfiniBand.
        pkey_index: the entry of the port's table of P_Keys.
        header: the 40 bytes before the data: the global route header (GRH) or, on RoCE v2 with IPv4, 20 bytes that mean
            nothing and the IP header. None if the packet had none, within a subnet of InfiniBand.
        gid, local_gid: the sender's GID and this side's, 16 bytes each. On RoCE v2 with IPv4, IPv4 addresses mapped to
            IPv6. None without a header.
        gid_type: "RoCE v2", or "" if the header does not tell.
        traffic_class, flow_label, hop_limit: those of the header. 0 without one.
    Source: ibv_poll_cq(3); InfiniBand Architecture, volume 1, 8.3; annex A17.
    """

    qp_number: int
    lid: int = 0
    service_level: int = 0
    path_bits: int = 0
    pkey_index: int = 0
    header: bytes | None = None

    @classmethod
    def from_native(cls, data: bytes) -> DatagramSource:
        """Read a struct ndpy_details. For the implementation.

        Parameters:
            data: its bytes.
        """
        number, lid, pkey_index, service_level, path_bits, has_header, _, header = _NATIVE.unpack_from(data, _BEFORE)
        return cls(number, lid, service_level, path_bits, pkey_index, header if has_header else None)

    @property
    def _is_ipv4(self) -> bool:
        return self.header is not None and self.header[0] >> 4 != 6 and self.header[20] == 0x45

    def _grh(self) -> tuple[int, int, int, bytes, bytes]:
        """Version with class and label, next header, hop limit, sender, receiver."""
        if self.header is None:
            return 0, 0, 0, b"", b""
        first, _, next_header, hop_limit, sender, receiver = _GRH.unpack(self.header)
        return first, next_header, hop_limit, sender, receiver

    def _ip(self) -> tuple[int, int, bytes, bytes]:
        """Type of service, time to live, sender, receiver."""
        assert self.header is not None
        _, service, _, _, _, lifetime, _, _, sender, receiver = _IPV4.unpack_from(self.header, 20)
        mapped = bytes(10) + b"\xff\xff"
        return service, lifetime, mapped + sender, mapped + receiver

    @property
    def gid(self) -> bytes | None:
        return (self._ip()[2] if self._is_ipv4 else self._grh()[3]) or None

    @property
    def local_gid(self) -> bytes | None:
        return (self._ip()[3] if self._is_ipv4 else self._grh()[4]) or None

    @property
    def gid_type(self) -> str:
        return "RoCE v2" if self._is_ipv4 or self._grh()[1] == _UDP else ""

    @property
    def traffic_class(self) -> int:
        return self._ip()[0] if self._is_ipv4 else self._grh()[0] >> 20 & 0xFF

    @property
    def flow_label(self) -> int:
        return 0 if self._is_ipv4 else self._grh()[0] & 0xFFFFF

    @property
    def hop_limit(self) -> int:
        return self._ip()[1] if self._is_ipv4 else self._grh()[2]
