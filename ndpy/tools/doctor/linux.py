"""Examines RDMA on this Linux machine: libraries, drivers, devices and their ports.

linux_system.py examines the kernel, the device files and the limits of this process. Whatever calls libibverbs runs in
a process of its own, so that a broken driver becomes a finding and does not break the examination.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from ndpy.errors import NdpyError, ProviderNotFoundError
from ndpy.platforms.verbs import device_files, distribution, softverbs
from ndpy.platforms.verbs.adapter_info import SILENT
from ndpy.platforms.verbs.interfaces import is_up
from ndpy.platforms.verbs.native_calls import LIBRARIES, has_symbol, lib, load
from ndpy.tools.doctor.findings import Finding, examine, examine_apart, failed, passed, split_remedy, warned
from ndpy.tools.doctor.linux_drivers import examine_unlisted, list_devices
from ndpy.tools.doctor.linux_gpu import examine_gpus
from ndpy.tools.doctor.linux_link import look_up
from ndpy.tools.doctor.linux_system import examine_nofile, examine_system
from ndpy.vocabulary.addresses import Reach, reach
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.info import AdapterInfo, Gid, PortInfo, as_named, is_address, port_in_use
from ndpy.vocabulary.placement import placement_warning
from ndpy.vocabulary.quirks import Quirk, quirks_of
from ndpy.vocabulary.system_files import names, path, read, read_number

# The optional symbols of ibverbs.h: what happens without them, and the version of rdma-core that has them.
OPTIONAL = {
    "ibv_qp_to_qp_ex": ("there are neither atomic writes nor flushes of a peer's memory", 24),
    "ibv_reg_mr_iova2": ("regions have the addresses of their memory, and no relaxed ordering", 28),
    "_ibv_query_gid_table": ("GIDs are read from /sys one by one", 32),
    "_ibv_query_gid_ex": ("the GID of a connection is read from /sys", 32),
    "ibv_reg_dmabuf_mr": ("memory of other devices cannot be registered", 34),
    "ibv_is_fork_initialized": ("nobody can say whether a fork() is harmless", 35),
    "ibv_query_qp_data_in_order": ("nobody can say whether messages are written in order", 36),
}

# Below this much payload in a packet, headers and per-packet work show in the bandwidth.
_GOOD_MTU = 2048
# A RoCE packet of MTU 4096 needs this much of the interface, headers included.
_ROCE_NETDEV_MTU = 4200
_LAYERS = {"unspecified": "a link layer of the vendor's own"}


def diagnose(adapter: str | None = None) -> list[Finding]:
    """Examine everything.

    adapter: a name or address, to leave out other adapters. If the environment asks for soft0, which needs nothing of
    the system but file descriptors, only soft0 and their limit are examined.
    """
    if softverbs.is_asked_for():
        return [*examine_apart(softverbs.NAME, __name__, "examine_softverbs"), *examine("open files", examine_nofile)]
    found = [
        *examine_apart("libraries", __name__, "examine_libraries"),
        *examine("drivers", examine_drivers),
        *examine_system(adapter or ""),
        *examine_apart("adapters", __name__, "examine_devices", adapter or ""),
        *examine("GPUs", examine_gpus, adapter or ""),
    ]
    return found if adapter else [*found, *examine_apart(softverbs.NAME, __name__, "examine_softverbs")]


def examine_libraries() -> Iterator[Finding]:
    """Examine whether libibverbs and librdmacm can be loaded, from where, and have the functions that ndpy calls."""
    usable = True
    for variable, name, thing in LIBRARIES:
        library = os.environ.get(variable) or name
        check = name.partition(".")[0]
        try:
            ctypes.CDLL(library)
        except OSError as error:
            usable = False
            yield failed(check, f"{library} cannot be loaded ({error})", _install(thing, variable))
        else:
            named = f", which {variable} names" if os.environ.get(variable) else ""
            yield passed(check, f"{_mapped(library)} can be loaded{named}")
    if not usable:
        return
    try:
        load()
    except ProviderNotFoundError as error:
        yield failed(
            "symbols",
            *split_remedy(str(error), distribution.read().install(*(thing for _, _, thing in LIBRARIES), again=True)),
        )
        return
    missing = [name for name in OPTIONAL if not has_symbol(name.encode())]
    for name in missing:
        without, version = OPTIONAL[name]
        yield warned("symbols", f"libibverbs has no {name}: {without}", f"rdma-core {version} and later have it")
    if not missing:
        yield passed("symbols", "the libraries have every function that ndpy can use")


def _install(thing: str, variable: str) -> str:
    return f"{distribution.read().install(thing)}, or set {variable} to the library's path"


def _mapped(library: str) -> str:
    """Return the file of a library that this process has loaded."""
    name = Path(library).name
    for line in read(path("/proc/self/maps")).splitlines():
        file = line.split(maxsplit=5)[-1]
        if Path(file).name.startswith(name):
            return file
    return library


def examine_drivers() -> Iterator[Finding]:
    """Examine libibverbs' own drivers. A .driver file names each; the driver is a shared library beside libibverbs."""
    settings = path("/etc/libibverbs.d")
    named = {
        line.split()[1]
        for file in names(settings, "*.driver")
        for line in read(settings / file).splitlines()
        if line.startswith("driver ")
    }
    folders = [path("/usr/lib"), path("/usr/lib64"), path("/lib64"), *path("/usr/lib").glob("*-linux-gnu*")]
    files = {file.name for folder in folders for file in (folder / "libibverbs").glob("lib*.so")}
    there = {driver for driver in named if any(file.startswith(f"lib{driver}-rdmav") for file in files)}
    # A name with a slash is the path of a driver in another folder.
    absent = {driver for driver in named - there if "/" not in driver}
    here = distribution.read()
    if not named:
        yield warned(
            "drivers",
            "/etc/libibverbs.d names no driver, so libibverbs finds no adapter unless it was built with its drivers "
            "inside",
            here.install(distribution.LIBIBVERBS),
        )
    elif absent:
        yield warned(
            "drivers",
            f"/etc/libibverbs.d names {', '.join(sorted(absent))}, but there is no library of that name",
            here.install(distribution.LIBIBVERBS, again=True),
        )
    else:
        yield passed("drivers", f"libibverbs has drivers for {', '.join(sorted(named))}")


def examine_devices(adapter: str = "") -> list[Finding]:
    """Examine the devices that libibverbs sees, and each of their ports. adapter: only the one with this name or
    address.
    """
    try:
        listed = list_devices()
    except (NdpyError, OSError) as error:
        message, remedy = split_remedy(str(error), "see the findings above")
        return [failed("adapters", f"the adapters cannot be listed: {message}", remedy)]
    files = device_files.all_files()
    found = list(examine_unlisted(listed, files, adapter))
    if not listed.devices:
        if listed.general is not None:
            return [failed("adapters", *listed.general)]
        message, _, remedy = device_files.why_no_adapter().partition(": ")
        return found or [failed("adapters", message, remedy)]
    infos: list[AdapterInfo] = []
    others = device_files.of_others(files, adapter)
    for name in listed.devices:
        try:
            infos.append(look_up(name))
        except (NdpyError, OSError) as error:
            otherwise = "read the driver's messages in the kernel's log (dmesg)"
            named = adapter in ("", name) or adapter.rpartition(":")[0] == name
            # The findings about device files say it of the adapters of others.
            if named and name not in {file.adapter for file in others}:
                found.append(failed(name, *split_remedy(str(error), otherwise)))
    if adapter:
        infos = [_only(chosen, adapter) for info in infos if (chosen := as_named(info, adapter))]
    for info in infos:
        found += examine(info.name, examine_adapter, info)
    if infos and not any(port.state == "active" for info in infos for port in info.ports):
        found.append(
            failed(
                "active port",
                f"no port of {adapter or 'any adapter'} is active",
                "do what is said of its ports above",
            )
        )
    return [*found, *examine("fork", examine_fork)]


def _only(info: AdapterInfo, adapter: str) -> AdapterInfo:
    """An adapter with the port that was named alone, if one was."""
    port = port_in_use(info)
    return info if adapter == info.name or port is None else dataclasses.replace(info, ports=(port,))


def examine_softverbs() -> Iterator[Finding]:
    """Examine soft0, the software adapter of this package."""
    name = softverbs.NAME
    try:
        info = look_up(name)
    except (NdpyError, OSError) as error:
        verdict = failed if softverbs.is_asked_for() else warned
        yield verdict(name, *split_remedy(str(error), "install ndpy again with pip"))
        return
    what = f"the software adapter of this package works: {info.transport} over TCP, without a module of the kernel"
    if softverbs.is_asked_for():
        what += "; it was asked for, so the kernel and its devices were not examined"
    else:
        what += (
            f"; it is taken only by name: ndpy.open_adapter({name!r}), NDPY_ADAPTER={name}, or `ndpy soft run -- "
            "COMMAND`"
        )
    yield passed(name, f"{what}; {', '.join(info.addresses) or 'no IP address'}")


def examine_adapter(info: AdapterInfo) -> Iterator[Finding]:
    """Examine one adapter: its state, MTU, GIDs and place in the machine."""
    addresses = ", ".join(info.addresses) or "no IP address"
    yield passed(
        info.name, f"{info.transport} adapter, driver {info.driver}, firmware {info.firmware or '-'}; {addresses}"
    )
    if Capability.RELIABLE_CONNECTIONS not in info.capabilities:
        yield failed(
            f"{info.name} connections",
            "it has no reliable connections (queue pairs of type RC), which programs of ndpy and rdma_cm need"
            + (", only datagrams" if Capability.DATAGRAMS in info.capabilities else ""),
            "take another adapter, or a library that speaks this vendor's own protocol (for EFA: libfabric)",
        )
    for port in info.ports:
        check = f"{info.name} port {port.number}"
        if port.link_layer == SILENT:
            yield failed(check, "it does not answer", "read the driver's messages in the kernel's log (dmesg)")
            continue
        yield _state(check, port)
        if port.link_layer == "unspecified":
            continue
        if Quirk.IWARP_NO_PATH_MTU not in quirks_of(info):
            yield _mtu(f"{check} MTU", port)
        if port.link_layer != "InfiniBand":
            yield _gids(f"{check} GIDs", info, port)
    warning = placement_warning(info)
    if warning:
        message, _, remedy = warning.partition(". ")
        yield warned(f"{info.name} placement", message, remedy)
    elif info.numa_node is None:
        yield passed(f"{info.name} placement", "the system names no NUMA node for it")
    else:
        yield passed(f"{info.name} placement", f"on NUMA node {info.numa_node}, where this process may run too")


def _state(check: str, port: PortInfo) -> Finding:
    where = f"{_LAYERS.get(port.link_layer, port.link_layer)}, {_interfaces(port) or 'no network interface'}"
    if port.state == "active":
        return passed(check, f"active, {where}")
    remedy = "check the cable and the switch's port"
    if port.netdev and not is_up(port.netdev):
        remedy = f"bring it up: ip link set {port.netdev} up"
    if port.link_layer == "InfiniBand":
        remedy = "check the cable, and that a subnet manager runs (opensm, or the switch's)"
    return warned(check, f"{port.state}, {where}", remedy)


def _interfaces(port: PortInfo) -> str:
    return ", ".join(interface.name for interface in port.interfaces) or port.netdev or ""


def _mtu(check: str, port: PortInfo) -> Finding:
    limit = read_number(path("/sys/class/net", port.netdev or "-", "mtu"))
    of = f" (the MTU of {port.netdev} is {limit})" if limit else ""
    if port.mtu >= min(_GOOD_MTU, port.max_mtu):
        return passed(check, f"packets carry {port.mtu} of at most {port.max_mtu} bytes{of}")
    remedy = "raise the subnet's MTU in the subnet manager's configuration"
    if port.link_layer != "InfiniBand":
        remedy = (
            f"ip link set {port.netdev or 'NETDEV'} mtu {_ROCE_NETDEV_MTU}, on both ends and every switch between them"
        )
    return warned(check, f"packets carry only {port.mtu} of at most {port.max_mtu} bytes{of}", remedy)


def routable(gid: Gid) -> bool:
    """Return whether routers forward a RoCE GID."""
    return is_address(gid.address) and reach(gid.address) is Reach.ROUTABLE


def _shown(gid: Gid, with_interface: bool) -> str:
    return f"{gid.address} on {gid.netdev}" if with_interface and gid.netdev else gid.address


def _gids(check: str, info: AdapterInfo, port: PortInfo) -> Finding:
    netdev = port.netdev or "NETDEV"
    several = len({gid.netdev for gid in port.gids}) > 1
    if port.netdev is None:
        return warned(
            check,
            "its network interface cannot be seen from here, so connections find no address; it may be in another "
            "network namespace",
            "run in that namespace: ip netns exec NAME COMMAND, or docker run --network=host",
        )
    give = f"give the interface an address: ip address add ADDRESS/PREFIX dev {netdev}"
    if Quirk.IWARP_MANAGER_ONLY in quirks_of(info):
        of_port = [address for interface in port.interfaces for address in interface.addresses]
        own = [entry.partition("%")[0] for entry in of_port or info.addresses]
        if any(reach(entry) is not Reach.LINK_LOCAL for entry in own):
            return passed(check, f"iWARP uses the interface's addresses: {', '.join(own)}")
        return warned(check, f"{netdev} has no address beyond the link", give)
    kinds = {kind: [gid for gid in port.gids if gid.type == kind] for kind in sorted({gid.type for gid in port.gids})}
    shown = ", ".join(
        f"{len(gids)} of {kind} ({', '.join(_shown(gid, several) for gid in gids if routable(gid)) or 'none routable'})"
        for kind, gids in kinds.items()
    )
    if not any(routable(gid) for gid in port.gids):
        return warned(
            check, f"none is routable, so only peers on the same link are reached: {shown or 'no GID at all'}", give
        )
    if not any(routable(gid) for gid in kinds.get("RoCE v2", [])):
        return warned(
            check,
            f"no routable GID of RoCE v2: {shown}",
            "reach only peers on the same link, because version 1 does not pass routers, or take an adapter with "
            "version 2",
        )
    return passed(check, shown)


def examine_fork() -> Iterator[Finding]:
    """Examine what fork() does to registered memory."""
    if not has_symbol(b"ibv_is_fork_initialized"):
        return
    state = lib.ibv_is_fork_initialized()
    if state == lib.IBV_FORK_UNNEEDED:
        yield passed("fork", "the kernel copies registered pages for a forked child, so fork() is harmless")
    elif state == lib.IBV_FORK_ENABLED:
        yield passed("fork", "libibverbs keeps registered memory from forked children (RDMAV_FORK_SAFE)")
    else:
        yield warned(
            "fork",
            "after a fork(), writing to registered memory can take the page from the adapter, which then uses stale "
            "bytes",
            "start processes by the spawn method, or set RDMAV_FORK_SAFE=1, or use Linux 5.12 or later",
        )
