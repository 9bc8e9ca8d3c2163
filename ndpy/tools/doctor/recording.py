"""Writes down what this machine shows of its RDMA adapters, as a description of tests/machines, without personal data.

What is recorded is listed here line by line. Nothing else is read. pseudonyms.py replaces names and addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from ndpy.errors import NdpyError
from ndpy.platforms.verbs import distribution
from ndpy.platforms.verbs.adapter_info import device_names, folder_of
from ndpy.platforms.verbs.device_files import KUBERNETES_SECRETS, in_container, in_pod
from ndpy.platforms.verbs.interfaces import Interfaces, is_up
from ndpy.platforms.verbs.interfaces import folder_of as interface_folder
from ndpy.tools.doctor.linux_gpu import OPEN_MODULES, bar_size
from ndpy.tools.doctor.linux_link import look_up
from ndpy.tools.doctor.linux_system import control_group_files, kernel_release
from ndpy.tools.doctor.pseudonyms import Pseudonyms
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.gpus import Gpu, bridges, gpus
from ndpy.vocabulary.info import AdapterInfo
from ndpy.vocabulary.system_files import names, path, read, refusal, shown

_MODULES = ("ib_uverbs", "rdma_ucm", "rdma_rxe", "siw", "nvidia", "nvidia_peermem", "nv_peer_mem")
_RELEASE = re.compile(
    r"\d+\.\d+[\d.]*(-\d[\d.]*)*"
    r"([-.](amd64|arm64|cloud|generic|lowlatency|aws|azure|gcp|el\d\w*|fc\d+|x86_64|aarch64))*"
)
_GROUPS = re.compile(r"(docker|kubepods|lxc|libpod|system|user|machine|init)\b")
_CONTROLLED = (
    ("rdma", ("rdma.max", "rdma.current")),
    ("pids", ("pids.max", "pids.current")),
    ("memory", ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes")),
)


def record() -> str:
    """The description of this machine. Nothing that is broken on it makes this raise."""
    addresses = psutil.net_if_addrs()
    own = [entry for entries in addresses.values() for entry in _with_networks(entries)]
    replace = Pseudonyms(entry for entry in own if isinstance(entry, ipaddress.IPv4Interface))
    lines = ["# Recorded by `ndpy doctor --record`. Names, addresses and GUIDs were replaced.", ""]
    lines += [*_system(replace), *_process(replace), *_files_of_devices(replace), ""]
    listed = _listed()
    present = names(path("/sys/class/infiniband"))
    for name in dict.fromkeys([*present, *listed]):
        lines += [*_device(name, listed.get(name), replace), ""]
    for gpu in gpus():
        lines += [*_gpu(gpu), ""]
    for netdev in names(path("/sys/class/net")):
        lines += [*_interface(netdev, _with_networks(addresses.get(netdev, [])), replace), ""]
    lines += _routes(replace)
    return "\n".join(lines).rstrip("\n") + "\n"


# ---- files ----


def _system(replace: Pseudonyms) -> Iterator[str]:
    family = distribution.read()
    if family.file:
        yield f"file {family.file} = ID={family.id}"
    release = kernel_release()
    known = release if _RELEASE.fullmatch(release) else (re.match(r"[\d.]*\d", release) or [""])[0]
    yield f"file /proc/sys/kernel/osrelease = {known}"
    for module in _MODULES:
        if path("/sys/module", module).exists():
            yield f"file /sys/module/{module}/refcnt"
    for name in ("modules.builtin", "modules.dep"):
        text = read(path("/lib/modules", release, name))
        found = [
            line.partition(":") for line in text.splitlines() if re.search(rf"/({'|'.join(_MODULES)})\.ko\b", line)
        ]
        if found:
            yield f"file /lib/modules/{known}/{name}"
            yield from (f"    {module}{colon}" for module, colon, _ in found)
    drivers = set()
    settings = path("/etc/libibverbs.d")
    for name in names(settings, "*.driver"):
        for line in read(settings / name).splitlines():
            driver = line.partition("driver ")[2]
            if "/" in driver:
                driver = f"/{replace.other('path', driver)}"
            drivers.add(driver)
            if driver:
                yield f"file /etc/libibverbs.d/{driver.strip('/')}.driver = driver {driver}"
    for folder in [path("/usr/lib"), path("/usr/lib64"), path("/lib64"), *path("/usr/lib").glob("*-linux-gnu*")]:
        yield from (
            f"file {shown(folder)}/libibverbs/{name}" for name in names(folder / "libibverbs", "lib*-rdmav*.so")
        )
    yield from _lines_of("/proc/meminfo", "HugePages_", "Hugepagesize")
    if OPEN_MODULES in read(path("/proc/driver/nvidia/version")):
        yield f"file /proc/driver/nvidia/version = {OPEN_MODULES}"


def _lines_of(file: str, *beginnings: str) -> Iterator[str]:
    """A file with those of its lines that begin so."""
    yield f"file {file}"
    lines = read(path(file)).splitlines()
    yield from (f"    {' '.join(line.split())}" for line in lines if line.startswith(beginnings))


def _process(replace: Pseudonyms) -> Iterator[str]:
    yield from _lines_of("/proc/self/limits", "Max locked memory", "Max open files")
    yield from _lines_of("/proc/self/status", "CapEff:", "VmPin:", "VmLck:")
    whole = read(path("/proc/self/uid_map")).split() == ["0", "0", "4294967295"]
    yield f"file /proc/self/uid_map = {'0 0 4294967295' if whole else '0 1000 1'}"
    if sign := in_container():
        other = KUBERNETES_SECRETS if in_pod() else "/.dockerenv"
        yield f"file {sign if sign.startswith('/') else other}"
    yield "file /proc/self/cgroup"
    for line in read(path("/proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        yield f"    {number}:{controllers}:{_group(group, replace)}"
    for controller, wanted in _CONTROLLED:
        for name in wanted:
            for file in control_group_files(controller, name):
                text = read(file)
                if controller == "rdma":
                    text = re.sub(r"^\S+", lambda match: replace.device(match[0]), text, flags=re.MULTILINE)
                yield f"file {_group(shown(file.parent), replace)}/{name}"
                yield from (f"    {line}" for line in text.splitlines())


def _group(group: str, replace: Pseudonyms) -> str:
    """The path of a control group. Its parts can be names of users, jobs, pods and services."""
    parts = []
    for part in group.split("/"):
        known = _GROUPS.match(part)
        if part in ("", "sys", "fs", "cgroup", "unified", *(controller for controller, _ in _CONTROLLED)):
            parts.append(part)
        else:
            parts.append(replace.other(f"{known[0]}-" if known else "group", part))
    return "/".join(parts)


def _files_of_devices(replace: Pseudonyms) -> Iterator[str]:
    folder = path("/dev/infiniband")
    for name in names(folder):
        if re.fullmatch(r"uverbs\d+|rdma_cm", name):
            yield f"file /dev/infiniband/{name}"
            error = refusal(folder / name)
            if error is not None:
                yield f"refused /dev/infiniband/{name} {errno.errorcode.get(error.errno or 0, 'EIO')}"
    if path("/dev/nvidiactl").exists():
        yield "file /dev/nvidiactl"
        error = refusal(path("/dev/nvidiactl"))
        if error is not None:
            yield f"refused /dev/nvidiactl {errno.errorcode.get(error.errno or 0, 'EIO')}"
    if os.geteuid():
        yield "user 1000"


# ---- devices ----


def _listed() -> dict[str, AdapterInfo | Exception]:
    """What libibverbs says of each of its devices, or how that fails."""
    found: dict[str, AdapterInfo | Exception] = {}
    try:
        listed = device_names()
    except (NdpyError, OSError):
        return {}
    for name in listed:
        try:
            found[name] = look_up(name)
        except (NdpyError, OSError) as error:
            found[name] = error
    return found


def _below(folder: Path) -> Iterator[str]:
    if found := bridges(folder):
        yield f"    under {'/'.join(found)}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    yield f"gpu {gpu.function}"
    yield from _below(gpu.folder)
    for name, file in (("numa", "numa_node"), ("class", "class"), ("iommu", "iommu_group/type")):
        if text := read(gpu.folder / file):
            yield f"    {name} {text}"
    yield f"    bar {bar_size(gpu)}"


def _device(name: str, said: AdapterInfo | Exception | None, replace: Pseudonyms) -> Iterator[str]:
    folder = folder_of(name)
    yield f"device {replace.device(name)}"
    kind = read(folder / "node_type")
    yield f"    type {kind}"
    if parent := read(folder / "parent"):
        yield f"    parent {replace.interface(parent)}"
    driver = folder / "device" / "driver"
    if driver.exists():
        yield f"    driver {driver.resolve().name}"
        yield f"    function {(folder / 'device').resolve().name}"
        yield from _below(folder / "device")
    node = read(folder / "device/numa_node")
    if node:
        yield f"    numa {node}"
    guid = read(folder / "node_guid").replace(":", "")
    if re.fullmatch("[0-9a-f]{16}", guid):
        made = replace.identifier(bytes.fromhex(guid)).hex()
        yield f"    guid {':'.join(made[place : place + 4] for place in range(0, 16, 4))}"
    verbs = path("/sys/class/infiniband_verbs")
    for file in names(verbs, "uverbs*"):
        if read(verbs / file / "ibdev") == name:
            yield f"    uverbs {file}"
    if isinstance(said, AdapterInfo):
        yield f"    vendor {said.vendor_id:#x}"
        yield f"    part {said.device_id}"
        yield f"    firmware {said.firmware}"
        if Capability.RELIABLE_CONNECTIONS not in said.capabilities:
            yield "    queue_pairs datagrams"
    elif said is None:
        yield "    library none"
    else:
        number = getattr(said, "native", 0) or getattr(said, "errno", 0) or errno.EIO
        fails = "query" if "query" in (getattr(said, "operation", "") or "") else "open"
        yield f"    {fails}_fails {errno.errorcode.get(abs(number), 'EIO')}"
    ports = {port.number: port for port in said.ports} if isinstance(said, AdapterInfo) else {}
    for number in sorted(map(int, names(folder / "ports", "[0-9]*"))):
        yield from _port(folder / "ports" / str(number), number, kind.startswith("4"), replace)
        if number in ports:
            yield f"        mtu {ports[number].mtu} of {ports[number].max_mtu}"


def _port(folder: Path, number: int, iwarp: bool, replace: Pseudonyms) -> Iterator[str]:
    layer = read(folder / "link_layer")
    yield f"    port {number}"
    yield f"        state {read(folder / 'state')}"
    yield f"        layer {layer if layer in ('InfiniBand', 'Ethernet') else 'Unspecified'}"
    if rate := read(folder / "rate"):
        yield f"        rate {rate}"
    lid = int(read(folder / "lid") or "0", 0)
    yield f"        lid {int(replace.other('', f'lid {lid}')) if lid else 0}"
    pkeys = [read(folder / "pkeys" / str(index)) for index in range(len(names(folder / "pkeys")))]
    while pkeys and not int(pkeys[-1] or "0", 0):
        pkeys.pop()
    yield f"        pkeys {' '.join(pkeys)}"
    indexes = sorted(map(int, names(folder / "gids", "[0-9]*")))
    yield f"        gids {len(indexes)}"
    for index in indexes:
        try:
            value = ipaddress.IPv6Address(read(folder / "gids" / str(index))).packed
        except ValueError:
            continue
        said = read(folder / "gid_attrs/types" / str(index))
        if not any(value) or not said:
            continue
        kind = "RoCE v2" if said == "RoCE v2" else "RoCE v1" if layer == "Ethernet" and not iwarp else "IB"
        made = ipaddress.IPv6Address(replace.gid(value, iwarp))
        netdev = read(folder / "gid_attrs/ndevs" / str(index))
        yield (
            f"        gid {index} {made.ipv4_mapped or made} {kind}{f' {replace.interface(netdev)}' if netdev else ''}"
        )


# ---- interfaces and routes ----


def _interface(
    netdev: str, own: list[ipaddress.IPv4Interface | ipaddress.IPv6Interface], replace: Pseudonyms
) -> Iterator[str]:
    folder = interface_folder(netdev)
    yield f"interface {replace.interface(netdev)}"
    if (folder / "device").exists():
        yield f"    function {(folder / 'device').resolve().name}"
    for name in ("type", "mtu", "dev_port", "dev_id", "phys_port_name"):
        text = read(folder / name)
        if text and (name != "phys_port_name" or re.fullmatch(r"(c\d+)?p[f\d]?\d*([vs]f\d+)?", text)):
            yield f"    {name} {text}"
    if parent := read(folder / "parent"):
        yield f"    parent {replace.interface(parent)}"
    for line in read(folder / "uevent").splitlines():
        if line.startswith("DEVTYPE="):
            yield f"    devtype {line.partition('=')[2]}"
    if vlan := Interfaces().vlan_of(netdev):
        yield f"    vlan {vlan}"
    if lower := names(folder, "lower_*"):
        yield f"    below {' '.join(replace.interface(name[len('lower_') :]) for name in lower)}"
    hardware = read(folder / "address").replace(":", "")
    if re.fullmatch("([0-9a-f]{12}){1}|[0-9a-f]{40}", hardware):
        yield f"    hardware {replace.hardware(bytes.fromhex(hardware)).hex(':')}"
    if not is_up(netdev):
        yield "    state down"
    elif read(folder / "carrier") == "0":
        yield "    state no-carrier"
    for entry in own if netdev != "lo" else ():
        yield f"    address {replace.address(str(entry.ip))}/{entry.network.prefixlen}"


def _with_networks(entries: Iterable[Any]) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """The IP addresses among those of an interface, as psutil has them, with their networks."""
    found: list[ipaddress.IPv4Interface | ipaddress.IPv6Interface] = []
    for entry in entries:
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            bits = bin(int(ipaddress.ip_address(entry.netmask))).count("1") if entry.netmask else 0
            found.append(ipaddress.ip_interface(f"{entry.address.partition('%')[0]}/{bits}"))
    return found


def _routes(replace: Pseudonyms) -> Iterator[str]:
    """The routes by a gateway. Those to the networks of interfaces follow from the addresses."""
    for line in read(path("/proc/net/route")).splitlines()[1:]:
        netdev, network, gateway, *_, mask, _, _, _ = line.split()
        if int(gateway, 16):
            bits = bin(int(mask, 16)).count("1")
            to = replace.ipv4(_little(network))
            where = f"{ipaddress.IPv4Network((to, bits), strict=False)}" if bits else "default"
            yield f"route {where} via {replace.ipv4(_little(gateway))} dev {replace.interface(netdev)}"
    for line in read(path("/proc/net/ipv6_route")).splitlines():
        network, prefix, _, _, gateway, *_, netdev = line.split()
        if int(gateway, 16) and netdev != "lo":
            bits = int(prefix, 16)
            to6 = replace.ipv6(ipaddress.IPv6Address(int(network, 16)))
            where = f"{ipaddress.IPv6Network((to6, bits), strict=False)}" if bits else "default"
            via = replace.ipv6(ipaddress.IPv6Address(int(gateway, 16)))
            yield f"route {where} via {via} dev {replace.interface(netdev)}"


def _little(text: str) -> ipaddress.IPv4Address:
    """An address of /proc/net/route, which is in the byte order of the processor."""
    return ipaddress.IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))
