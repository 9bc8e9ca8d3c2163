"""Reads the description of a machine, README.md says in which form, and puts it in place of this one.

The files are written below a folder, the devices are given to the library of devices.c, and the interfaces, addresses
and routes are made in a network namespace. So what ndpy asks of files, of the drivers' library and of the kernel is
that machine's.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
_CLONE_NEWNET = 0x40000000
_LAYERS = {"InfiniBand": 1, "Ethernet": 2, "Unspecified": 0}
_GID_TYPES = {"IB": 0, "RoCE v1": 1, "RoCE v2": 2}
# What /sys says of each type.
_GID_TYPE_FILES = {"IB": "IB/RoCE v1", "RoCE v1": "IB/RoCE v1", "RoCE v2": "RoCE v2"}


@dataclass
class Item:
    """A line, and those that are indented below it."""

    words: list[str]
    rest: str
    below: list[Item] = field(default_factory=list)

    def get(self, key: str, default: str = "") -> str:
        return next((item.rest for item in self.below if item.words[0] == key), default)

    def all(self, key: str) -> list[Item]:
        return [item for item in self.below if item.words[0] == key]


def read(path: Path) -> Item:
    """The lines of a description, with those of the parts that it includes."""
    top = Item([], "")
    open_items = [top]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        if depth >= len(open_items):
            raise ValueError(f"{path.name}:{number}: this is indented too far")
        words = text.split()
        item = Item(words, text[len(words[0]) :].strip())
        if words[0] == "include":
            top.below += read(path.with_name(words[1])).below
            continue
        open_items[depth].below.append(item)
        del open_items[depth + 1 :]
        open_items.append(item)
    return top


class Machine:
    """One machine. Its parts are lines of the description."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        top = read(path)
        self.devices = {item.words[1]: item for item in top.all("device")}
        self.gpus = {item.words[1]: item for item in top.all("gpu")}
        self.interfaces = {item.words[1]: item for item in top.all("interface")}
        self.routes = [item.rest for item in top.all("route")]
        self.destinations = [item.rest for item in top.all("destination")]
        self.printed = [item.rest for item in top.all("prints")]
        self.user = next((int(item.words[1]) for item in top.all("user")), 0)
        self.unsettled = [item.rest for item in top.all("unsettled")]
        self.files: dict[str, str] = {}
        for item in top.all("file"):
            name, _, text = item.rest.partition(" = ")
            below = "".join(f"{' '.join(line.words)}\n" for line in item.below)
            self.files[name] = below or (f"{text}\n" if text else "")
        self.links = {item.words[1]: item.words[3] for item in top.all("link")}
        self.refused = {item.words[1]: int(getattr(errno, item.words[2])) for item in top.all("refused")}
        absent = {item.words[1] for item in top.all("absent")}
        self._generate()
        self.files = {name: text for name, text in self.files.items() if not any(name.startswith(a) for a in absent)}
        self.links = {name: to for name, to in self.links.items() if not any(name.startswith(a) for a in absent)}

    # ---- files ----

    def _generate(self) -> None:
        """Add the files of /sys that follow from devices and interfaces."""
        files: dict[str, str] = {}
        functions: dict[str, str] = {}
        # Where the PCI functions are below their bridges.
        self._under = {item.get("function"): item.get("under", "pci") for item in self.devices.values()}
        for index, (name, device) in enumerate(self.devices.items()):
            folder = f"/sys/class/infiniband/{name}"
            files[f"{folder}/node_type"] = device.get("type", "1: CA")
            if device.get("guid"):
                files[f"{folder}/node_guid"] = device.get("guid")
            uverbs = device.get("uverbs", f"uverbs{index}")
            files[f"/sys/class/infiniband_verbs/{uverbs}/ibdev"] = name
            if device.get("parent"):
                files[f"{folder}/parent"] = device.get("parent")
            if function := device.get("function"):
                functions[function] = device.get("driver")
                self.links[f"{folder}/device"] = self._place(function)
                if device.get("numa"):
                    files[f"{self._place(function)}/numa_node"] = device.get("numa")
            for port in device.all("port"):
                files |= _files_of_port(f"{folder}/ports/{port.words[1]}", port)
        for function, gpu in self.gpus.items():
            folder = f"/sys/devices/{gpu.get('under', 'pci')}/{function}"
            files[f"{folder}/vendor"] = "0x10de"
            files[f"{folder}/class"] = gpu.get("class", "0x030200")
            files[f"{folder}/resource"] = (
                f"0x0 0x0 0x0\n0x10000000000 {0x10000000000 + int(gpu.get('bar')) - 1:#x} 0x14220c"
            )
            for name, file in (("numa", "numa_node"), ("iommu", "iommu_group/type")):
                if gpu.get(name):
                    files[f"{folder}/{file}"] = gpu.get(name)
            self.links[f"/sys/bus/pci/devices/{function}"] = folder
        files["/proc/net/route"], files["/proc/net/ipv6_route"] = self._default_routes()
        for name, interface in self.interfaces.items():
            files |= self._files_of_interface(name, interface, functions)
        for function, driver in functions.items():
            if driver:
                files[f"/sys/bus/pci/drivers/{driver}/module"] = ""
                self.links[f"{self._place(function)}/driver"] = f"/sys/bus/pci/drivers/{driver}"
        self.files = {**{path: f"{text}\n" if text else "" for path, text in files.items()}, **self.files}

    def _place(self, function: str) -> str:
        return f"/sys/devices/{self._under.get(function, 'pci')}/{function}"

    def _files_of_interface(self, name: str, interface: Item, functions: dict[str, str]) -> dict[str, str]:
        folder = f"/sys/class/net/{name}"
        kind = interface.get("devtype")
        files = {
            f"{folder}/uevent": f"DEVTYPE={kind}\nINTERFACE={name}" if kind else f"INTERFACE={name}",
            f"{folder}/type": interface.get("type", "1"),
            f"{folder}/mtu": interface.get("mtu", "1500"),
            f"{folder}/address": interface.get("hardware", "02:00:00:00:00:00"),
            f"{folder}/dev_port": interface.get("dev_port", "0"),
            f"{folder}/dev_id": interface.get("dev_id", "0x0"),
            f"{folder}/flags": "0x1002" if interface.get("state") == "down" else "0x1003",
        }
        if interface.get("state") != "down":
            files[f"{folder}/carrier"] = "0" if interface.get("state") == "no-carrier" else "1"
        for key in ("phys_port_name", "parent"):
            if interface.get(key):
                files[f"{folder}/{key}"] = interface.get(key)
        for lower in interface.get("below").split():
            files[f"{folder}/lower_{lower}/ifindex"] = "1"
            files[f"/sys/class/net/{lower}/upper_{name}/ifindex"] = "1"
        if vlan := interface.get("vlan"):
            files[f"/proc/net/vlan/{name}"] = f"{name}  VID: {vlan}\t REORDER_HDR: 1"
        if function := interface.get("function"):
            functions.setdefault(function, "")
            self.links[f"{folder}/device"] = self._place(function)
            files[f"{self._place(function)}/net/{name}/ifindex"] = "1"
        return files

    def _default_routes(self) -> tuple[str, str]:
        """The routes "default via ADDRESS dev INTERFACE", as /proc/net shows those of each family."""
        ipv4, ipv6 = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"], []
        for line in self.routes:
            words = line.split()
            gateway = ipaddress.ip_address(words[2])
            netdev = words[4] if len(words) > 4 else self._towards(gateway)
            if gateway.version == 4:
                number = int.from_bytes(gateway.packed, sys.byteorder)
                ipv4.append(f"{netdev} 00000000 {number:08X} 0003 0 0 0 00000000 0 0 0")
            else:
                none = "0" * 32
                ipv6.append(f"{none} 00 {none} 00 {gateway.packed.hex()} 00000400 1 0 00000003 {netdev}")
        return "\n".join(ipv4), "\n".join(ipv6)

    def _towards(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
        """The interface whose network has this address."""
        return next(
            name
            for name, interface in self.interfaces.items()
            if any(address in ipaddress.ip_interface(own).network for own in addresses_of(interface))
        )

    def write_files(self, root: Path) -> None:
        """Write the machine's files below a folder."""
        for name, text in self.files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name, target in self.links.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
            path.symlink_to(root / target.lstrip("/"))

    # ---- what the drivers' library answers ----

    def listed(self) -> Iterator[tuple[str, Item]]:
        """The devices that libibverbs lists: those with a driver and a device file. Older ones list those without a
        file too.
        """
        for index, (name, device) in enumerate(self.devices.items()):
            if device.get("library") == "none":
                continue
            there = f"/dev/infiniband/{device.get('uverbs', f'uverbs{index}')}" in self.files
            if there or device.get("library") == "lists all":
                yield name, device

    def give_devices(self, library: ctypes.CDLL) -> None:
        """Put the devices into the library's table."""
        library.machine_clear()
        library.machine_print("".join(f"{line}\n" for line in self.printed).encode())
        for name, device in self.listed():
            added = library.machine_add_device(
                name.encode(),
                device.get("firmware").encode(),
                int(device.get("vendor", "0"), 0),
                int(device.get("part", "0"), 0),
                ctypes.c_uint64(int(device.get("guid", "0").replace(":", ""), 16)),
                int(device.get("queue_pairs") == "datagrams"),
                _errno(device.get("open_fails")),
                _errno(device.get("query_fails")),
            )
            assert added, "the table of devices is full"
            for port in device.all("port"):
                mtu, most = _mtus(port)
                added = library.machine_add_port(
                    int(port.get("state").partition(":")[0]),
                    _LAYERS[port.get("layer")],
                    mtu,
                    most,
                    int(port.get("lid", "0"), 0),
                    int(port.get("gids", "16")),
                    0,
                    _errno(port.get("query_fails")),
                )
                assert added, "the table of ports is full"
                for gid in _gids_of(port):
                    assert library.machine_add_gid(gid.packed, gid.index, _GID_TYPES[gid.kind]), "too many GIDs"

    # ---- the kernel ----

    def enter_namespace(self, libc: ctypes.CDLL) -> None:
        """Give this thread a network namespace with the machine's interfaces, addresses and routes."""
        if libc.unshare(_CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        commands = ["link set lo up"]
        for index, (name, interface) in enumerate(self.interfaces.items()):
            if name == "lo":
                continue
            hardware = interface.get("hardware")
            plain = f"address {hardware}" if len(hardware) == 17 else ""
            # What a name is of is in the files. To the kernel's routes only addresses and names count.
            commands.append(f"link add name {name} {plain} type veth peer name other{index}")
            commands.append(f"link set {name} mtu {interface.get('mtu', '1500')} addrgenmode none")
            commands.append(f"link set other{index} mtu {interface.get('mtu', '1500')} addrgenmode none")
            state = interface.get("state", "up")
            if state != "down":
                commands.append(f"link set {name} up")
            if state == "up":
                commands.append(f"link set other{index} up")
            for address in addresses_of(interface):
                ending = "nodad" if ":" in address else ""
                commands.append(f"address add {address} dev {name} {ending}")
        commands += [f"route add {route}" for route in self.routes]
        done = subprocess.run(
            ["ip", "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stderr.strip()}")


def addresses_of(interface: Item) -> Iterator[str]:
    """The addresses of an interface with their prefixes. "ADDRESS/PREFIX and NUMBER more" has the NUMBER next ones as
    well.
    """
    for item in interface.all("address"):
        first = ipaddress.ip_interface(item.words[1])
        count = int(item.words[3]) if len(item.words) > 2 else 0
        for number in range(count + 1):
            yield f"{first.ip + number}/{first.network.prefixlen}"


@dataclass(frozen=True)
class _Gid:
    index: int
    packed: bytes
    kind: str
    netdev: str


def _gids_of(port: Item) -> Iterator[_Gid]:
    """The lines "gid INDEX ADDRESS TYPE INTERFACE". INDEX can be a range, for copies with rising addresses."""
    for item in port.all("gid"):
        match = re.fullmatch(r"(\d+)(?:-(\d+))? (\S+) (IB|RoCE v1|RoCE v2)(?: (\S+))?", item.rest)
        assert match, f"gid {item.rest}: this is not INDEX ADDRESS TYPE INTERFACE"
        first, last, text, kind, netdev = match.groups()
        address = ipaddress.ip_address(text)
        for index in range(int(first), int(last or first) + 1):
            own = address + index - int(first)
            packed = own.packed if own.version == 6 else bytes(10) + b"\xff\xff" + own.packed
            yield _Gid(index, packed, kind, netdev or "")


def _files_of_port(folder: str, port: Item) -> dict[str, str]:
    files = {
        f"{folder}/state": port.get("state"),
        f"{folder}/link_layer": port.get("layer").replace("Unspecified", "Unknown"),
        f"{folder}/lid": hex(int(port.get("lid", "0"), 0)),
    }
    if port.get("rate"):
        files[f"{folder}/rate"] = port.get("rate")
    for index, pkey in enumerate(port.get("pkeys").split()):
        files[f"{folder}/pkeys/{index}"] = pkey
    for gid in _gids_of(port):
        files[f"{folder}/gids/{gid.index}"] = ipaddress.IPv6Address(gid.packed).exploded
        files[f"{folder}/gid_attrs/types/{gid.index}"] = _GID_TYPE_FILES[gid.kind]
        if gid.netdev:
            files[f"{folder}/gid_attrs/ndevs/{gid.index}"] = gid.netdev
    return files


def _mtus(port: Item) -> tuple[int, int]:
    """The line "mtu ACTIVE of LARGEST", as numbers of enum ibv_mtu."""
    words = port.get("mtu", "4096 of 4096").split()
    return int(words[0]).bit_length() - 8, int(words[2]).bit_length() - 8


def _errno(name: str) -> int:
    return int(getattr(errno, name)) if name else 0


def all_machines() -> list[Path]:
    return sorted(FOLDER.glob("*.machine"))


def settled(unsettled: list[str], part: str, rows: Iterator[str]) -> Iterator[str]:
    """A part's heading and rows, without those that are unsettled and what is indented below them."""
    if part in unsettled:
        return
    yield f"== {part}"
    marks = [mark[len(part) + 1 :] for mark in unsettled if mark.startswith(f"{part} ")]
    depth: int | None = None
    for line in rows:
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent > depth:
            continue
        row = line.strip()
        depth = indent if any(row == mark or row.startswith(f"{mark}:") for mark in marks) else None
        if depth is None:
            yield line
