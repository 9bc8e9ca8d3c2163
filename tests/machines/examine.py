"""Examines the machines of this folder with ndpy, and prints what it finds, as JSON or into the files of expectations.

python examine.py --write [NAME…] writes NAME.expected. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
from machine import Machine, all_machines, settled

import ndpy
from ndpy import platforms
from ndpy.platforms.verbs import native_calls, probing
from ndpy.platforms.verbs.endpoint import best_gid
from ndpy.tools.doctor import findings, linux, linux_link, recording
from ndpy.vocabulary import addresses, gpus, system_files
from ndpy.vocabulary.info import AdapterInfo, as_named, port_in_use
from ndpy.vocabulary.routes import find_route

UNIT = Path(__file__).parent.parent / "unit"
# They tell of the libraries of the machine where the tests run.
_OF_THIS_MACHINE = ("libibverbs", "librdmacm", "symbols", "soft0", "fork")
# So many GIDs or addresses are shown one by one.
_MOST = 12
# The exit status if there is an obstacle.
CANNOT = 77


def obstacle() -> str:
    """What this needs and does not have here. "" if it can run."""
    if os.geteuid():
        return "making network namespaces needs root"
    absent = [tool for tool in ("gcc", "objcopy", "ip") if not shutil.which(tool)]
    if absent or not Path("/usr/include/rdma/rdma_cma.h").exists():
        return "this needs gcc, objcopy, ip, libibverbs-dev and librdmacm-dev"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "name", "x0", "type", "veth", "peer", "name", "x1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return tried.stderr.strip() and f"network namespaces with veth interfaces: {tried.stderr.strip()}"


def build(folder: Path) -> Path:
    """Build the library of devices."""
    names = ("get_device_list", "open_device", "query_device", "query_port", "query_port_speed", "create_qp")
    renamed = [f"--redefine-sym=ibv_{name}=one_{name}" for name in names]
    renamed += [f"--redefine-sym=_ibv_{name}=one_{name}" for name in ("query_gid_table", "query_gid_ex")]
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fPIC", f"-I{UNIT}"]
    objects = []
    for part in ("verbs", "points", "queues", "completions", "connections", "xrc"):
        objects.append(folder / f"{part}.o")
        subprocess.run(["gcc", *flags, "-c", "-o", objects[-1], UNIT / f"fake_{part}.c"], check=True, timeout=60)
        subprocess.run(["objcopy", *renamed, objects[-1]], check=True, timeout=60)
    path = folder / "devices.so"
    own = Path(__file__).with_name("devices.c")
    libraries = ["-Wl,--no-as-needed", "-libverbs", "-lrdmacm"]
    subprocess.run(["gcc", *flags, "-shared", "-o", path, own, *objects, *libraries], check=True, timeout=60)
    return path


# ---- what is examined ----


def devices(infos: list[AdapterInfo]) -> Iterator[str]:
    """What `ndpy devices -v` shows of each adapter."""
    for info in infos:
        node = "no NUMA node" if info.numa_node is None else f"NUMA node {info.numa_node}"
        yield f"{info.name}: {info.transport}, {info.driver}, firmware {info.firmware or '-'}, {node}"
        yield f"    {info.state}, MTU {info.mtu}, {info.netdev or 'no interface'}, {_some(info.addresses)}"
        for distance, near in gpus.by_distance(info.name).items():
            yield f"    GPUs {distance}: {', '.join(gpu.function for gpu in near)}"
        for port in info.ports:
            speed = "" if port.speed_gbps is None else f", {port.speed_gbps:g} Gbit/s"
            yield (
                f"    port {port.number}: {port.state}, {port.link_layer}, MTU {port.mtu} of {port.max_mtu}, LID "
                f"{port.lid}{speed}"
            )
            for interface in port.interfaces:
                tag = f" {interface.vlan}" if interface.vlan else ""
                on = f" on {interface.parent}" if interface.parent else ""
                yield f"        {interface.name}: {interface.kind}{tag}{on}, {_some(interface.addresses)}"
            for gid in port.gids[:_MOST]:
                at = f", {gid.netdev}" if gid.netdev else ""
                yield f"        GID {gid.index}: {gid.address}, {gid.type}{at}"
            if len(port.gids) > _MOST:
                yield f"        and {len(port.gids) - _MOST} more GIDs"


def _some(addresses: tuple[str, ...]) -> str:
    shown = ", ".join(addresses[:_MOST]) or "no address"
    return shown if len(addresses) <= _MOST else f"{shown} and {len(addresses) - _MOST} more"


def doctor() -> Iterator[str]:
    """The verdicts, and what is said and advised where it is not PASS."""
    found = [finding for finding in linux.diagnose() if finding.check not in _OF_THIS_MACHINE]
    for finding in found:
        yield f"{finding.verdict.value} {finding.check}"
        if finding.remedy:
            yield f"    {finding.message}"
            yield f"    remedy: {finding.remedy}"
    yield f"exit status {int(any(finding.verdict is findings.Verdict.FAIL for finding in found))}"


def opened(infos: list[AdapterInfo], names: list[str | None]) -> Iterator[str]:
    """What open_adapter() opens by each name."""
    for name in names:
        try:
            # As platforms.find() does, with the adapters that were listed once.
            info = platforms.choose(infos, name)
        except (ndpy.NdpyError, OSError) as error:
            yield f"{name or '-'}: {type(error).__name__}"
            continue
        yield f"{name or '-'}: {info.name} port {info.port}, {info.netdev or 'no interface'}, {info.state}"


def sources(infos: list[AdapterInfo], destinations: list[str]) -> Iterator[str]:
    """From which address, port and GID each adapter connects to each destination."""
    for info in filter(lambda info: info.addresses, infos):
        for destination in destinations:
            family, resolved = addresses.resolve((destination, 1))
            try:
                source = find_route(info, family, resolved, psutil.net_if_addrs).source
            except ndpy.AddressUnreachableError:
                yield f"{info.name} to {destination}: unreachable"
                continue
            named = as_named(info, source) or info
            port = port_in_use(named)
            gid = best_gid(named, port) if port is not None and info.transport != "iWARP" else None
            by = f", GID {gid.index} ({gid.address}, {gid.type})" if gid else ""
            yield f"{info.name} to {destination}: {source}, port {named.port}{by}"


def listened(infos: list[AdapterInfo]) -> Iterator[str]:
    """Where listen(("", PORT)) binds."""
    for info in filter(lambda info: info.addresses, infos):
        bound = tuple(host for host, _ in addresses.listening_addresses(info.addresses, ("", 1)))
        yield f"{info.name}: {_some(bound)}"


def examine(machine: Machine) -> str:
    """All that is found on the machine that was put in place of this one."""
    names: list[str | None] = [None, *machine.devices]
    for name, device in machine.devices.items():
        if len(device.all("port")) > 1:
            names += [f"{name}:{port.words[1]}" for port in device.all("port")]
    names += machine.interfaces
    names += [
        item.words[1].partition("/")[0]
        for interface in machine.interfaces.values()
        for item in interface.all("address")
        if not item.words[1].startswith("fe80")
    ]
    try:
        infos = ndpy.list_adapters()
    except (ndpy.NdpyError, OSError) as error:
        none = f"none: {type(error).__name__}"
        parts = {"devices": iter([none]), "doctor": doctor(), "open_adapter": iter([none])}
    else:
        parts = {
            "devices": devices(infos),
            "doctor": doctor(),
            "open_adapter": opened(infos, list(dict.fromkeys(names))),
            "source": sources(infos, machine.destinations),
            "listen": listened(infos),
        }
    lines = []
    for part, found in parts.items():
        lines += settled(machine.unsettled, part, found)
    return "\n".join(lines) + "\n"


# ---- in place of this machine ----


def _examine_here(
    check: str, module: str, function: str, *arguments: str, limit_s: float = 0
) -> list[findings.Finding]:
    """In place of examine_apart(): a process of its own would see this machine."""
    del limit_s
    return findings.examine(check, getattr(sys.modules[module], function), *arguments)


def _refuse(machine: Machine, root: Path) -> object:
    opens = system_files.refusal

    def refusal(place: Path) -> OSError | None:
        number = machine.refused.get(f"/{place.relative_to(root)}")
        return opens(place) if number is None else OSError(number, os.strerror(number))

    return refusal


def on(
    machine: Machine, library: ctypes.CDLL, libc: ctypes.CDLL, root: Path, recorded: bool = False
) -> tuple[str, str]:
    """Put the machine in place of this one, and examine it.
    Returns what is found, and if asked for, what is recorded.
    """
    machine.write_files(root)
    machine.give_devices(library)
    machine.enter_namespace(libc)
    probing._probed.clear()
    refusal = _refuse(machine, root)
    with contextlib.ExitStack() as stack:
        stack.enter_context(system_files.below(root))
        for module, name, value in (
            (linux, "examine_apart", _examine_here),
            (linux, "examine_softverbs", list),
            (system_files, "refusal", refusal),
            (recording, "refusal", refusal),
            (linux_link, "pause_frames", lambda netdev: None),
            (linux_link, "flow_control", lambda netdev: None),
            (os, "geteuid", lambda: machine.user),
            (os, "getuid", lambda: machine.user),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        found = examine(machine).replace(str(root), "")
        return found, recording.record() if recorded else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the machines, without .machine; all by default")
    parser.add_argument("--write", action="store_true", help="write what is found into NAME.expected")
    parser.add_argument("--record", nargs="*", default=[], metavar="NAME", help="record these, and examine the records")
    arguments = parser.parse_args()
    if why := obstacle():
        print(why, file=sys.stderr)
        sys.exit(CANNOT)
    paths = [path for path in all_machines() if not arguments.names or path.stem in arguments.names]
    libc = ctypes.CDLL(None, use_errno=True)
    answers = {}
    # Thousands of small files are written, which a busy disk takes long for.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        path = str(build(Path(folder)))
        os.environ["NDPY_LIBIBVERBS"] = os.environ["NDPY_LIBRDMACM"] = path
        os.environ.pop("NDPY_ADAPTER", None)
        native_calls.load()
        library = ctypes.CDLL(path)
        for described in paths:
            root = Path(folder) / described.stem
            machine = Machine(described)
            found, recorded = on(machine, library, libc, root, described.stem in arguments.record)
            answers[described.stem] = {"found": found}
            if recorded:
                description = Path(folder) / f"{described.stem}.recorded"
                description.write_text(recorded, encoding="utf-8")
                again = Machine(description)
                again.unsettled = machine.unsettled
                shutil.rmtree(root)
                answers[described.stem] |= {"recorded": recorded, "again": on(again, library, libc, root)[0]}
    if arguments.write:
        for described in paths:
            described.with_suffix(".expected").write_text(answers[described.stem]["found"], encoding="utf-8")
    else:
        json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
