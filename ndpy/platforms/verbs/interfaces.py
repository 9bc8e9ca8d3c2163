"""The network interfaces that lead to the ports of an adapter, as the kernel shows them in /sys.

A port has more than one: the interfaces of its GIDs, those of its device, and whatever lies on them, such as VLANs,
bonds and bridges. The kernel gives a port a GID for each address of any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import itertools
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ndpy import errors
from ndpy.vocabulary.addresses import reach
from ndpy.vocabulary.info import Gid, NetworkInterface
from ndpy.vocabulary.system_files import Snapshot, path, read

# The kinds of interfaces that use the ones below them without a tunnel. The kernel names no kind for a macvlan, so it
# counts as Ethernet.
_ABOVE = ("vlan", "bond", "team", "bridge", "ethernet", "ipvlan")
_LONGEST_NAME = 15
_IFF_UP = 1
_LARGEST_VLAN = 4094
# Of enum ARPHRD_… in linux/if_arp.h.
_TYPES = {"1": "ethernet", "32": "ipoib", "772": "loopback"}
# What the driver calls the interface of a virtual function or a subfunction on the side of the switch.
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


def folder_of(netdev: str) -> Path:
    """What the kernel shows of an interface."""
    return path("/sys/class/net", netdev)


def is_name(text: str) -> bool:
    """Whether the kernel would take this for an interface's name."""
    return 0 < len(text) <= _LONGEST_NAME and "/" not in text and text not in (".", "..")


def ask_interfaces(operation: str = "open adapter") -> dict[str, list[Any]]:
    """What psutil.net_if_addrs() returns. Raises as the provider's calls do."""
    try:
        return psutil.net_if_addrs()
    except OSError as error:
        what = "the addresses of this machine cannot be listed"
        raise errors.from_errno(operation, error.errno or 0, what) from None


def addresses_here() -> dict[str, tuple[str, ...]]:
    """The IP addresses of this network namespace, by interface. Link-local IPv6 addresses have their scope."""
    return {
        netdev: tuple(entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
        for netdev, entries in ask_interfaces().items()
    }


def gid_of(address: str) -> bytes:
    """The GID that the kernel makes of an IP address on RoCE."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (b"\0" * 10 + b"\xff\xff" if parsed.version == 4 else b"") + parsed.packed


def is_up(netdev: str) -> bool:
    """Whether an interface was brought up, with a link or without. True if the kernel does not say."""
    text = read(folder_of(netdev) / "flags")
    return not re.fullmatch("0x[0-9a-f]+", text) or bool(int(text, 16) & _IFF_UP)


@dataclasses.dataclass(frozen=True)
class Place:
    """A port of the adapter that the kernel shows in a folder. ports: how many the adapter has."""

    folder: Path
    number: int
    ports: int


class Interfaces:
    """The interfaces of this network namespace, as they are while an adapter is described.

    They come and go. Make a new one for each description, and keep none.

    Attributes:
        files: what has been read of them. Whatever else belongs to the description is read by it too.
    """

    def __init__(self) -> None:
        self.files = Snapshot()

    @functools.cached_property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """As addresses_here()."""
        return addresses_here()

    # ---- one interface ----

    def _read(self, netdev: str, name: str) -> str:
        return self.files.read(folder_of(netdev) / name)

    def kind_of(self, netdev: str) -> str | None:
        """The kind of an interface: "vlan", "bond", "ethernet" and so on. None if the kernel does not show it."""
        text = self._read(netdev, "uevent")
        if "INTERFACE=" not in text:
            return None
        kind = next((line[len("DEVTYPE=") :] for line in text.splitlines() if line.startswith("DEVTYPE=")), "")
        return kind or _TYPES.get(self._read(netdev, "type"), "unknown")

    def vlan_of(self, netdev: str) -> int | None:
        """The ID of a VLAN's interface, 0 for any other interface. None if the kernel does not say."""
        kind = self.kind_of(netdev)
        if kind is None:
            return None
        if kind != "vlan":
            return 0
        for line in self.files.read(path("/proc/net/vlan", netdev)).splitlines():
            for name, value in itertools.pairwise(line.split()):
                if name == "VID:" and value.isascii() and value.isdigit() and 0 < int(value) <= _LARGEST_VLAN:
                    return int(value)
        return None

    def below(self, netdev: str) -> list[str]:
        """The interfaces that one lies on. Several below a bond or a bridge."""
        parent = self._read(netdev, "parent")
        if is_name(parent):
            # An IPoIB child.
            return [parent]
        return [entry[len("lower_") :] for entry in self.files.names(folder_of(netdev), "lower_*")]

    def above(self, netdev: str) -> list[str]:
        """The interfaces that lie on one."""
        return [entry[len("upper_") :] for entry in self.files.names(folder_of(netdev), "upper_*")]

    def children_of(self, netdev: str) -> list[str]:
        """The IPoIB interfaces of other partitions that were made of one."""
        if self.kind_of(netdev) != "ipoib":
            return []
        return [entry for entry in self._names() if self._read(entry, "parent") == netdev]

    def _names(self) -> list[str]:
        return self.files.names(path("/sys/class/net"))

    # ---- from addresses and adapters to interfaces ----

    def with_any_of(self, addresses: Iterable[str]) -> tuple[NetworkInterface, ...]:
        """The interfaces that have any of these addresses, with these."""
        wanted = set(addresses)
        here = {netdev: tuple(filter(wanted.__contains__, own)) for netdev, own in self.addresses.items()}
        return tuple(self._describe(netdev, (), here) for netdev, own in here.items() if own)

    def of_port(
        self, place: Place, gids: Sequence[Gid], hardware_address: str | None = None
    ) -> tuple[NetworkInterface, ...]:
        """The interfaces that lead to a port. Those of its GIDs come first.

        hardware_address: the one of its interface, if its GIDs are made of that.
        """
        of_gids = [gid.netdev for gid in gids if gid.netdev]
        # Where all GIDs of RoCE are of another network namespace, so is the name of the interface.
        elsewhere = not of_gids and any(gid.type.startswith("RoCE") for gid in gids)
        found = [
            *of_gids,
            *([] if elsewhere else self._named_by_adapter(place)),
            *self._with_hardware_address(hardware_address),
            *self._of_device(place),
        ]
        found = list(dict.fromkeys(found))
        # The list grows while it is read.
        for netdev in found:
            found += [upper for upper in self.above(netdev) if upper not in found and self.kind_of(upper) in _ABOVE]
            found += [child for child in self.children_of(netdev) if child not in found]
        for netdev in dict.fromkeys(of_gids):
            found += [member for member in self._members(netdev) if member not in found]
        here: Mapping[str, tuple[str, ...]] = self.addresses
        if of_gids:
            # RoCE takes an address only while it is in the table. Of the ports of a bond, the active one may have it.
            table = {gid.value for gid in gids}
            here = {netdev: tuple(own for own in here.get(netdev, ()) if gid_of(own) in table) for netdev in found}
        return tuple(self._describe(netdev, found, here) for netdev in found)

    def _describe(self, netdev: str, others: Iterable[str], here: Mapping[str, tuple[str, ...]]) -> NetworkInterface:
        lower = self.below(netdev)
        return NetworkInterface(
            name=netdev,
            kind=self.kind_of(netdev) or "unknown",
            parent=next((entry for entry in lower if entry in others), next(iter(lower), None)),
            vlan=self.vlan_of(netdev) or None,
            addresses=tuple(sorted(here.get(netdev, ()), key=reach)),
        )

    def _members(self, bond: str) -> list[str]:
        """The interfaces in a bond that the adapter makes of its ports. Any other has an adapter of its own."""
        if self.kind_of(bond) not in ("bond", "team"):
            return []
        adapters = path("/sys/class/infiniband")
        names = self.files.names
        taken = {netdev for name in names(adapters) for netdev in names(adapters / name / "device/net")}
        return [member for member in self.below(bond) if member not in taken]

    def _named_by_adapter(self, place: Place) -> list[str]:
        """Adapters in software name the interface that they were made on."""
        parent = self.files.read(place.folder / "parent")
        return [parent] if is_name(parent) else []

    def _with_hardware_address(self, wanted: str | None) -> list[str]:
        if not wanted:
            return []
        found = [entry for entry in self._names() if self._read(entry, "address").lower() == wanted]
        # A VLAN has the address of the interface that it lies on.
        return sorted(found, key=lambda netdev: len(self.below(netdev)))[:1]

    def _of_device(self, place: Place) -> list[str]:
        """The interfaces of the same device that use this port, by the number that their driver gives."""
        found = [
            netdev
            for netdev in self.files.names(place.folder / "device/net")
            if not _REPRESENTOR.fullmatch(self._read(netdev, "phys_port_name"))
        ]
        if place.ports == 1:
            return found
        ports = {netdev: self.files.read_number(folder_of(netdev) / "dev_port") or 0 for netdev in found}
        if not any(ports.values()):
            # Older drivers number their ports here.
            ports = {netdev: _hexadecimal(self._read(netdev, "dev_id")) for netdev in found}
        return [netdev for netdev in found if ports[netdev] == place.number - 1] if any(ports.values()) else []


class GidInterfaces:
    """Which interfaces the GIDs of a port belong to.

    The kernel tells the interface's name as it is in the namespace where that is. An interface of this namespace can
    have the same name. It is the GID's if it has the GID's address, or made the GID of its hardware address.
    """

    def __init__(self, place: Place, here: Interfaces) -> None:
        self._folder = place.folder / "ports" / str(place.number) / "gid_attrs/ndevs"
        self._here = here
        self._known: dict[str, tuple[set[bytes], int | None]] = {}

    def of(self, index: int, value: bytes) -> tuple[str | None, int | None]:
        """The interface of the GID at this index, and its VLAN. None if it has none, or one of another network
        namespace.
        """
        netdev = self._here.files.read(self._folder / str(index))
        if not is_name(netdev):
            return None, None
        if netdev not in self._known:
            self._known[netdev] = self._gids_of(netdev), self._here.vlan_of(netdev) or None
        gids, vlan = self._known[netdev]
        return (netdev, vlan) if value in gids else (None, None)

    def _gids_of(self, netdev: str) -> set[bytes]:
        addresses = self._here.addresses
        made = set(map(gid_of, addresses.get(netdev, ())))
        hardware = self._here.files.read(folder_of(netdev) / "address").replace(":", "")
        if len(hardware) == 12 and netdev in addresses:
            octets = bytes.fromhex(hardware)
            made.add(b"\xfe\x80" + bytes(6) + bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:])
        return made


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
