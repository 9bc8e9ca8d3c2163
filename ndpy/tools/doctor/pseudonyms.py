"""Replaces what tells where a machine is or whose it is: names, IP and hardware addresses, GUIDs.

The same thing is replaced the same way everywhere. Two addresses share as many leading bits afterwards as before, so
subnets, gateways and routes still fit. Link-local, private and other addresses stay of their kind. The key is random
and is thrown away.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable

_MOST_TRIES = 10_000
# IPv4 networks that have a meaning of their own. Their own bits stay.
_KINDS = tuple(
    map(
        ipaddress.IPv4Network,
        [
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.2.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
        ],
    )
)
_KEPT = tuple(map(ipaddress.IPv4Network, ("0.0.0.0/32", "127.0.0.0/8", "224.0.0.0/4")))
# Other addresses get first octets from here on.
_FIRST_PUBLIC = 20
# Names that the kernel and systemd make of numbers, or that everybody uses. Others, and those made of hardware
# addresses, go.
_PLACE = r"(P\d+)?(p\d+s\d+(f\d+)?|s\d+(f\d+)?|o\d+)(np?\w?\d+|[dv]\d+|u\d+)*"
_INTERFACE = re.compile(rf"lo|(eth|ib|bond|br|team|vlan|docker|virbr)\d+|(en|ib)({_PLACE})|ib\d+|docker0")
_DEVICE = re.compile(
    rf"(mlx4|mlx5|mlx5_bond|bnxt_re|cxgb4|hns|mana|efa|erdma|irdma|i40iw|ionic|qedr|hfi1|ocrdma|vmw_pvrdma)_?\d+"
    r"|(rxe|siw)\d+"
    rf"|(roce|ib|iw|rdma)({_PLACE})"
)


class Pseudonyms:
    """The pseudonyms of one description.

    own: the addresses of the machine's interfaces, with their networks. None becomes the address of a network or a
        broadcast.
    """

    def __init__(self, own: Iterable[ipaddress.IPv4Interface] = ()) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: dict[tuple[str, object], int] = {}
        own = [entry for entry in own if entry.network.prefixlen < 31]
        for _ in range(_MOST_TRIES):
            self._key = secrets.token_bytes(16)
            made = (ipaddress.IPv4Interface(f"{self.ipv4(entry.ip)}/{entry.network.prefixlen}") for entry in own)
            if not any(entry.ip in (entry.network[0], entry.network[-1]) for entry in made):
                return

    def _number(self, kind: str, of: object) -> int:
        """1 for the first thing of a kind, 2 for the next one, and so on."""
        known = [key for key in self._numbers if key[0] == kind]
        return self._numbers.setdefault((kind, of), len(known) + 1)

    # ---- names ----

    def interface(self, name: str) -> str:
        """The name of a network interface. What a VLAN's or an IPoIB child's has after the point stays."""
        base, point, tag = name.partition(".")
        base = base if _INTERFACE.fullmatch(base) else f"net{self._number('interface', base)}"
        return f"{base}{point}{tag if re.fullmatch('[0-9a-f]{1,4}', tag) else 'x' if point else ''}"

    def device(self, name: str) -> str:
        return name if _DEVICE.fullmatch(name) else f"device{self._number('device', name)}"

    def other(self, kind: str, name: str) -> str:
        """A name of another kind."""
        return f"{kind}{self._number(kind, name)}"

    # ---- addresses ----

    def address(self, text: str) -> str:
        """An IP address in words, without its scope."""
        parsed = ipaddress.ip_address(text.partition("%")[0])
        return str(self.ipv4(parsed) if isinstance(parsed, ipaddress.IPv4Address) else self.ipv6(parsed))

    def ipv4(self, address: ipaddress.IPv4Address) -> ipaddress.IPv4Address:
        if any(address in network for network in _KEPT):
            return address
        kept = next((network.prefixlen for network in _KINDS if address in network), 0)
        number = int(address)
        if not kept:
            octet = _FIRST_PUBLIC + self._number("octet", number >> 24) - 1
            number, kept = octet << 24 | number & 0xFFFFFF, 8
        return ipaddress.IPv4Address(self._scramble(number, 32, kept))

    def ipv6(self, address: ipaddress.IPv6Address) -> ipaddress.IPv6Address:
        if address.ipv4_mapped is not None:
            return ipaddress.IPv6Address(f"::ffff:{self.ipv4(address.ipv4_mapped)}")
        number = int(address)
        if number < 1 << 64 or address.is_multicast:
            return address
        network, ending = number >> 64, self.identifier((number & (1 << 64) - 1).to_bytes(8, "big"))
        if address.is_link_local or address.is_site_local:
            pass
        elif address in ipaddress.IPv6Network("fc00::/7"):
            network = self._scramble(network, 64, 8)
        else:
            site = 0x2001_0DB8_0000 + self._number("site", network >> 16)
            network = self._scramble(site << 16 | network & 0xFFFF, 64, 48)
        return ipaddress.IPv6Address(network << 64 | int.from_bytes(ending, "big"))

    def _scramble(self, number: int, bits: int, kept: int) -> int:
        """Flip each bit or not, by the bits before it. The first `kept` bits stay."""
        made = number
        for place in range(kept, bits):
            before = number >> (bits - place)
            digest = hashlib.blake2b(f"{bits} {place} {before}".encode(), key=self._key, digest_size=1).digest()
            made ^= (digest[0] & 1) << (bits - place - 1)
        return made

    def hardware(self, octets: bytes) -> bytes:
        """A MAC address, or the longer one of IPoIB, which ends with a GID."""
        if not any(octets):
            return octets
        if len(octets) == 20:
            return octets[:1] + bytes(3) + self.gid(octets[4:])
        return b"\x02\0\0" + self._number("hardware address", octets).to_bytes(3, "big")

    def identifier(self, octets: bytes) -> bytes:
        """The 8 bytes of a GUID, or of the second half of an IPv6 address. Small numbers stay."""
        if int.from_bytes(octets, "big") < 1 << 16:
            return octets
        if octets[3:5] == b"\xff\xfe":
            # It is made of a MAC address, with one bit changed.
            hardware = self.hardware(bytes([octets[0] ^ 2]) + octets[1:3] + octets[5:])
            return bytes([hardware[0] ^ 2]) + hardware[1:3] + b"\xff\xfe" + hardware[3:]
        return b"\x02\0\0\0\0" + self._number("identifier", octets).to_bytes(3, "big")

    def gid(self, value: bytes, iwarp: bool = False) -> bytes:
        """A GID. Those of iWARP are a MAC address and zeros."""
        if iwarp:
            return self.hardware(value[:6]) + value[6:]
        return self.ipv6(ipaddress.IPv6Address(value)).packed
