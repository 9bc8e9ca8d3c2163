"""Lists the verbs devices of this machine, opens them, and describes what they can do."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import mmap
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ndpy import errors, system_files
from ndpy.addresses import Reach, reach
from ndpy.flags import Capability
from ndpy.info import TRANSPORTS, AdapterInfo, Gid, PortInfo, as_named
from ndpy.quirks import Quirk
from ndpy.verbs import device_files, interfaces, softverbs
from ndpy.verbs.addresses import unpack_socket_address
from ndpy.verbs.interfaces import GidInterfaces, Place
from ndpy.verbs.native_calls import check, ffi, has_symbol, lib, load, load_for, text

# How many bytes of private data rdma_cm carries. The first number is for a connection request, without the bytes that
# rdma_cm uses itself. The second is for a reply or a rejection, whichever carries less.
MAX_CALLER_DATA = 56
MAX_CALLEE_DATA = 148

_STATES = {
    lib.IBV_PORT_DOWN: "down",
    lib.IBV_PORT_INIT: "init",
    lib.IBV_PORT_ARMED: "armed",
    lib.IBV_PORT_ACTIVE: "active",
    lib.IBV_PORT_ACTIVE_DEFER: "active",
}
_LINK_LAYERS = {lib.IBV_LINK_LAYER_INFINIBAND: "InfiniBand", lib.IBV_LINK_LAYER_ETHERNET: "Ethernet"}
#: The link layer of a port that does not answer.
SILENT = "unknown"
_RXE_VENDOR = 0xFFFFFF
_SIW_VENDOR = 0x626D74


def mtu_bytes(mtu: int) -> int:
    """Return the bytes of an enum ibv_mtu."""
    return 128 << mtu if mtu else 0


def device_names() -> list[str]:
    """Return the names of the system's verbs devices."""
    load()
    return _names(lib.NDPY_SYSTEM)


def _names(library: int) -> list[str]:
    return [text(lib.ibv_get_device_name(device)) for device in _DeviceList(library)]


class _DeviceList:
    """The devices of one of the libraries. Its list exists only during an iteration."""

    def __init__(self, library: int) -> None:
        self._library = library

    def __iter__(self) -> Any:
        count = ffi.new("int *")
        devices = lib.ndpy_get_device_list(self._library, count)
        if devices == ffi.NULL:
            if ffi.errno == errno.ENOSYS:
                # The kernel has no RDMA module loaded, so there are no devices.
                return
            raise errors.from_errno("ibv_get_device_list", ffi.errno)
        try:
            for index in range(count[0]):
                yield devices[index]
        finally:
            lib.ndpy_free_device_list(self._library, devices)


def open_context(name: str) -> Any:
    """Open a device. Raises PermissionError, which names the file, if this user may not open it."""
    library = load_for(name)
    for device in _DeviceList(library):
        if text(lib.ibv_get_device_name(device)) == name:
            context = lib.ndpy_open_device(library, device)
            if context == ffi.NULL:
                raise _open_error(name, ffi.errno)
            return context
    raise errors.AdapterNotFoundError(f"adapter {name!r} has gone; there is {', '.join(_names(library)) or 'none'}")


def _open_error(name: str, number: int) -> Exception:
    file = next((file for file in device_files.all_files() if file.adapter == name), None)
    if file is None or file.error is None or file.error.errno in errors.SHORTAGES:
        return errors.from_errno("ibv_open_device", number, f"{name} cannot be opened")
    reason, remedy = device_files.why_refused(file)
    return errors.with_errno(
        "ibv_open_device",
        file.error.errno or number,
        f"{name} is {system_files.shown(file.place)}, and {reason}; {remedy}",
    )


_DEFAULT_PKEY = 0xFFFF


def folder_of(name: str) -> Path:
    """What the kernel shows of a device."""
    return system_files.path("/sys/class/infiniband", name)


def list_adapters() -> list[AdapterInfo]:
    """List the devices that can be used. Raises the reason for the first one if none can.

    softverbs has the only one if the environment asks for it.
    """
    return [_examine(softverbs.NAME)] if softverbs.is_asked_for() else _list_system()


def list_named(which: str | None) -> list[AdapterInfo] | None:
    """The adapters among which `which` chooses. None if softverbs is not asked for: then it is those of list_adapters()."""
    if softverbs.is_listed_by_name_only(which):
        return [_examine(softverbs.NAME)]
    if which is None or not softverbs.is_asked_for():
        return None
    # The program asks for another one than the environment. An address that both have is soft0's.
    infos = list_adapters()
    if as_named(infos[0], which) is None:
        with contextlib.suppress(errors.NdpyError, OSError):
            infos += [info for info in _list_system() if info.name != softverbs.NAME]
    return infos


def _list_system() -> list[AdapterInfo]:
    infos = []
    failures: list[Exception] = []
    for name in device_names():
        try:
            infos.append(_examine(name))
        except (errors.NdpyError, OSError) as error:
            # This one must not keep the program from the others. `ndpy doctor` reports it.
            failures.append(error)
    if failures and not infos:
        raise failures[0]
    return infos


def explain_absence(name: str) -> None:
    """Raise the reason why list_adapters() leaves out the device of this name, or of "NAME:PORT", if there is such a device."""
    try:
        names = device_names()
    except errors.ProviderNotFoundError:
        if softverbs.is_asked_for():
            # The system's libraries need not be there.
            return
        raise
    for wanted in (name, name.rpartition(":")[0]):
        if wanted in names:
            _examine(wanted)
        if reason := device_files.why_unlisted(wanted):
            raise errors.AdapterNotFoundError(f"no adapter {name!r}: {reason}")


def _examine(name: str) -> AdapterInfo:
    context = open_context(name)
    try:
        return describe(context, name)
    finally:
        lib.ibv_close_device(context)


def describe(context: Any, name: str) -> AdapterInfo:
    """Ask an open device for everything that AdapterInfo contains."""
    attributes = ffi.new("struct ibv_device_attr *")
    check("ibv_query_device", lib.ibv_query_device(context, attributes), f"{name} does not answer")
    iwarp = _is_iwarp(name)
    ports = _ports(context, name, attributes.phys_port_cnt, iwarp)
    answering = [port for port in ports if port.link_layer != SILENT]
    best = next((port for port in answering if port.state == "active"), answering[0])
    probed = _probe(context, name, attributes)
    transport = "iWARP" if iwarp else TRANSPORTS[best.link_layer]
    driver = _driver(name, attributes.vendor_id)
    capabilities = _capabilities(attributes, iwarp, driver) | _on_demand(context) | probed.capabilities
    if Quirk.SIW_KEEPS_ADDRESSES.value.is_of(driver, transport):
        capabilities &= ~Capability.CHOSEN_ADDRESS
    addresses = _addresses(ports)
    if name == softverbs.NAME:
        addresses = _addresses_of_softverbs()
        best = _with_interfaces_of_machine(best, addresses)
        ports = (best,)
        # The processor writes to the memory, in the order in which the bytes come.
        capabilities |= Capability.IN_ORDER_DMA | _resizing(context)
    if has_symbol(b"ibv_query_qp_data_in_order", load_for(name)):
        capabilities |= Capability.DATA_IN_ORDER
    if any((folder_of(name) / "ports").glob("*/*counters/*")):
        capabilities |= Capability.COUNTERS
    port_attributes = ffi.new("struct ibv_port_attr *")
    check("ibv_query_port", lib.ndpy_query_port(context, best.number, port_attributes))
    registration = int(attributes.max_mr_size)
    return AdapterInfo(
        name=name,
        provider="verbs",
        transport=transport,
        driver=driver,
        addresses=tuple(dict.fromkeys(addresses)),
        vendor_id=attributes.vendor_id,
        device_id=attributes.vendor_part_id,
        firmware=text(attributes.fw_ver),
        numa_node=_numa_node(name, ports),
        netdev=best.netdev,
        mtu=best.mtu,
        state=best.state,
        capabilities=capabilities,
        ports=ports,
        max_registration_size=registration,
        max_window_size=registration if Capability.MEMORY_WINDOWS in capabilities else 0,
        max_initiator_sge=attributes.max_sge,
        max_receive_sge=attributes.max_sge,
        max_read_sge=min(attributes.max_sge_rd or attributes.max_sge, attributes.max_sge),
        max_transfer_length=port_attributes.max_msg_sz or (1 << 31),
        max_inline_data_size=probed.inline_size,
        max_inbound_read_limit=min(attributes.max_qp_rd_atom, 255),
        max_outbound_read_limit=min(attributes.max_qp_init_rd_atom, 255),
        max_receive_queue_depth=attributes.max_qp_wr,
        max_initiator_queue_depth=attributes.max_qp_wr,
        max_shared_receive_queue_depth=attributes.max_srq_wr if attributes.max_srq else 0,
        max_completion_queue_depth=attributes.max_cqe,
        max_caller_data=MAX_CALLER_DATA,
        max_callee_data=MAX_CALLEE_DATA,
        max_device_memory_size=lib.ndpy_device_memory_size(context),
        port=best.number,
    )


def _is_iwarp(name: str) -> bool:
    return name == softverbs.NAME or system_files.read(folder_of(name) / "node_type").startswith("4")


def _capabilities(attributes: Any, iwarp: bool, driver: str) -> Capability:
    found = (
        Capability.GIDS
        | Capability.LOOPBACK_CONNECTIONS
        | Capability.REGION_ACCESS
        | Capability.BIND_RESERVES_PORT
        | Capability.EVENTS
        | Capability.PROTECTION_DOMAINS
    )
    windows = lib.IBV_DEVICE_MEM_WINDOW_TYPE_2A | lib.IBV_DEVICE_MEM_WINDOW_TYPE_2B
    if not attributes.device_cap_flags & windows:
        if attributes.device_cap_flags & lib.IBV_DEVICE_MEM_WINDOW and attributes.max_mw:
            found |= Capability.MEMORY_WINDOWS | Capability.TYPE_1_WINDOWS
    elif attributes.max_mw:
        found |= Capability.MEMORY_WINDOWS
        # Without windows, a peer could only invalidate regions.
        if attributes.device_cap_flags & lib.IBV_DEVICE_MEM_MGT_EXTENSIONS:
            found |= Capability.SEND_INVALIDATE
    if attributes.max_srq:
        found |= Capability.SHARED_RECEIVE_QUEUES
    if attributes.atomic_cap != lib.IBV_ATOMIC_NONE:
        found |= Capability.ATOMICS
        if attributes.atomic_cap == lib.IBV_ATOMIC_GLOB:
            found |= Capability.GLOBAL_ATOMICS
    if iwarp and Quirk.IWARP_READ_SINK_NEEDS_REMOTE_WRITE.value.is_of(driver, "iWARP"):
        found |= Capability.READ_SINK_REQUIRED
    if iwarp and not Quirk.IWARP_UP_AT_THE_REPLY.value.is_of(driver, "iWARP"):
        found |= Capability.REFUSE_OFFER
    if iwarp:
        return found | (Capability.NONE if Quirk.IWARP_MANAGER_ONLY.value.is_of(driver, "iWARP") else Capability.MODIFY)
    return (
        found
        | Capability.IMMEDIATE_DATA
        | Capability.MODIFY
        | Capability.IN_ORDER_DMA
        | Capability.REFUSE_OFFER
        | Capability.RESIZE_COMPLETION_QUEUE
        | Capability.RETRY_POLICY
    )


def _resizing(context: Any) -> Capability:
    """Try whether a completion queue can be resized."""
    queue = lib.ibv_create_cq(context, 1, ffi.NULL, ffi.NULL, 0)
    if queue == ffi.NULL:
        return Capability.NONE
    failed = lib.ibv_resize_cq(queue, 16)
    lib.ibv_destroy_cq(queue)
    return Capability.NONE if failed else Capability.RESIZE_COMPLETION_QUEUE


def _on_demand(context: Any) -> Capability:
    general, connected = ffi.new("uint64_t *"), ffi.new("uint32_t *")
    wanted = lib.IBV_ODP_SUPPORT_SEND | lib.IBV_ODP_SUPPORT_RECV | lib.IBV_ODP_SUPPORT_WRITE | lib.IBV_ODP_SUPPORT_READ
    if lib.ndpy_query_on_demand(context, general, connected) or not general[0] & lib.IBV_ODP_SUPPORT:
        return Capability.NONE
    if connected[0] & wanted != wanted:
        return Capability.NONE
    implicit = general[0] & lib.IBV_ODP_SUPPORT_IMPLICIT
    return Capability.ON_DEMAND_PAGING | (Capability.IMPLICIT_ON_DEMAND if implicit else Capability.NONE)


def _driver(name: str, vendor: int) -> str:
    if name == softverbs.NAME:
        return softverbs.DRIVER
    driver = folder_of(name) / "device" / "driver"
    if driver.exists():
        return driver.resolve().name
    return {_RXE_VENDOR: "rdma_rxe", _SIW_VENDOR: "siw"}.get(vendor, "unknown")


def _with_interfaces_of_machine(port: PortInfo, addresses: Iterable[str]) -> PortInfo:
    """The port of soft0, whose GIDs are the machine's addresses."""
    found = interfaces.all_with(addresses)
    netdevs = {interfaces.gid_of(address): entry.name for entry in found for address in entry.addresses}
    vlans = {entry.name: entry.vlan for entry in found}
    gids = [
        dataclasses.replace(gid, netdev=(netdev := netdevs.get(gid.value)), vlan=vlans.get(netdev or ""))
        for gid in port.gids
    ]
    return dataclasses.replace(port, interfaces=found, gids=tuple(gids))


def _numa_node(name: str, ports: Iterable[PortInfo]) -> int | None:
    netdevs = (interface.name for port in ports for interface in port.interfaces)
    for folder in (folder_of(name), *map(interfaces.folder_of, netdevs)):
        node = system_files.read_number(folder / "device/numa_node")
        if node is not None:
            return node
    return None


def _ports(context: Any, name: str, count: int, iwarp: bool) -> tuple[PortInfo, ...]:
    """The ports. One that does not answer must not keep the program from the others. Raises if none answers."""
    ports = []
    failures: list[errors.NdpyError] = []
    for number in range(1, count + 1):
        try:
            ports.append(_port(context, name, Place(folder_of(name), number, count), iwarp))
        except errors.NdpyError as failure:
            failures.append(failure)
            ports.append(PortInfo(number, "unknown", SILENT, 0, 0, 0, None, ()))
    if failures and len(failures) == len(ports):
        raise failures[0]
    return tuple(ports)


def _port(context: Any, name: str, place: Place, iwarp: bool) -> PortInfo:
    attributes = ffi.new("struct ibv_port_attr *")
    number = place.number
    check("ibv_query_port", lib.ndpy_query_port(context, number, attributes), f"{name} port {number} does not answer")
    gids = _gids(context, name, place, attributes.gid_tbl_len, iwarp)
    # The GIDs of other iWARP adapters are made of the hardware address.
    own = gids[0].address if gids and iwarp and name != softverbs.NAME else None
    found = interfaces.interfaces_of(place, gids, own)
    return PortInfo(
        number=number,
        state=_STATES.get(attributes.state, "unknown"),
        link_layer=_LINK_LAYERS.get(attributes.link_layer, "Ethernet" if iwarp else "unspecified"),
        mtu=mtu_bytes(attributes.active_mtu),
        max_mtu=mtu_bytes(attributes.max_mtu),
        lid=attributes.lid,
        netdev=found[0].name if found else None,
        gids=gids,
        pkeys=_pkeys(name, number),
        speed_gbps=_speed_gbps(context, name, number),
        interfaces=found,
    )


def _speed_gbps(context: Any, name: str, port: int) -> float | None:
    if has_symbol(b"ibv_query_port_speed", load_for(name)):
        speed = ffi.new("uint64_t *")
        if not lib.ibv_query_port_speed(context, port, speed) and speed[0]:
            return int(speed[0]) / 10
    # For example "2.5 Gb/sec (1X SDR)".
    number, _, unit = system_files.read(folder_of(name) / "ports" / str(port) / "rate").partition(" ")
    try:
        return float(number) if unit.startswith("Gb/sec") else None
    except ValueError:
        return None


def _pkeys(name: str, port: int) -> tuple[int, ...]:
    """The table of P_Keys. Its unused entries are 0."""
    if name == softverbs.NAME:
        return (_DEFAULT_PKEY,)
    folder = folder_of(name) / "ports" / str(port) / "pkeys"
    places = sorted(int(path.name) for path in folder.glob("[0-9]*"))
    found = [int(system_files.read(folder / str(place)) or "0", 16) for place in places]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _gids(context: Any, name: str, place: Place, count: int, iwarp: bool, only: int | None = None) -> tuple[Gid, ...]:
    """The entries of a port's GID table, or only the one at an index."""
    gids = []
    of_gids = GidInterfaces(place)
    for index, value, kind in _gid_table(context, name, place.number, count):
        if any(value) and only in (None, index):
            # The GIDs of other iWARP adapters begin with the MAC address.
            address = value[:6].hex(":") if iwarp and name != softverbs.NAME else gid_address(value)
            netdev, vlan = (None, None) if iwarp else of_gids.of(index, value)
            gids.append(Gid(index, value, "iWARP" if iwarp else kind, address, netdev, vlan))
    return tuple(gids)


def gid_at(context: Any, name: str, port: int, index: int) -> Gid | None:
    """The entry of a port's GID table, as it is now. None if that place is free."""
    attributes = ffi.new("struct ibv_port_attr *")
    if lib.ndpy_query_port(context, port, attributes):
        return None
    place = Place(folder_of(name), port, 0)
    return next(iter(_gids(context, name, place, attributes.gid_tbl_len, _is_iwarp(name), index)), None)


_GID_TYPES = {
    lib.IBV_GID_TYPE_IB: "InfiniBand",
    lib.IBV_GID_TYPE_ROCE_V1: "RoCE v1",
    lib.IBV_GID_TYPE_ROCE_V2: "RoCE v2",
}


def _gid_table(context: Any, name: str, port: int, count: int) -> list[tuple[int, bytes, str]]:
    """Return (index, GID, type) of a port's entries. Most of a table's thousand places are free."""
    if has_symbol(b"_ibv_query_gid_table", load_for(name)):
        entries = ffi.new("struct ibv_gid_entry[]", max(count, 1))
        found = lib._ibv_query_gid_table(context, entries, count, 0, ffi.sizeof("struct ibv_gid_entry"))
        if found >= 0:
            return [
                (entry.gid_index, bytes(ffi.buffer(entry.gid.raw)), _GID_TYPES.get(entry.gid_type, "unknown"))
                for entry in entries[0:found]
                if entry.port_num == port
            ]
    types = folder_of(name) / "ports" / str(port) / "gid_attrs" / "types"
    table = []
    gid = ffi.new("union ibv_gid *")
    for index in range(count):
        kind = softverbs.DRIVER if name == softverbs.NAME else system_files.read(types / str(index))
        if kind and not lib.ibv_query_gid(context, port, index, gid):
            kind = "RoCE v1" if kind == "IB/RoCE v1" else kind
            table.append((index, bytes(ffi.buffer(gid.raw)), kind))
    return table


def gid_address(value: bytes) -> str:
    """Return the IP address that a RoCE GID stands for."""
    address = ipaddress.IPv6Address(value)
    return str(address.ipv4_mapped or address)


def _addresses_of_softverbs() -> list[str]:
    """Return the addresses of soft0, which are those of the machine: routable ones first, link-local ones last."""
    library, most, found = load_for(softverbs.NAME), 16, 0
    entry = ffi.sizeof("struct ndpy_socket_address")
    while True:
        table = ffi.new("struct ndpy_socket_address[]", most)
        found = lib.ndpy_softverbs_addresses(library, table, most)
        if found < most:
            break
        # There may be more than fitted.
        most = 2 * max(found, most)
    raw = bytes(ffi.buffer(table))
    addresses = [unpack_socket_address(raw[place : place + entry]) for place in range(0, max(found, 0) * entry, entry)]
    hosts = [address[0] for address in addresses if address is not None]

    # A program without a network has loopback, which needs no interface to be named.
    order = (Reach.ROUTABLE, Reach.LOOPBACK, Reach.LINK_LOCAL)
    return sorted(hosts, key=lambda host: order.index(reach(host)))


def addresses_now(info: AdapterInfo) -> tuple[str, ...]:
    """The addresses that an adapter has by now. They come and go while it is open. Those that were asked for stay."""
    if info.asked_for:
        return info.addresses
    if info.name == softverbs.NAME:
        return tuple(dict.fromkeys(_addresses_of_softverbs()))
    own = {interface.name for port in info.ports for interface in port.interfaces}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in own and entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return tuple(sorted(dict.fromkeys(found), key=reach))


def _addresses(ports: Iterable[PortInfo]) -> list[str]:
    """Return the IP addresses that connections through any port can use, routable ones of active ports first."""
    found = [
        (reach(address), port.state != "active", address)
        for port in ports
        for interface in port.interfaces
        for address in interface.addresses
    ]
    return [address for _, _, address in sorted(found, key=lambda entry: entry[:2])]


class _Probed(NamedTuple):
    """Properties that verbs does not report. inline_size is the largest inline size that a queue pair can have."""

    inline_size: int
    capabilities: Capability


_probed: dict[tuple[str, int], _Probed] = {}


def _probe(context: Any, name: str, attributes: Any) -> _Probed:
    """Find out by trying, once for each device."""
    key = name, int(attributes.node_guid)
    if key not in _probed:
        domain = lib.ibv_alloc_pd(context)
        if domain == ffi.NULL:
            return _Probed(0, Capability.NONE)
        try:
            inline = _probe_inline(context, domain)
            capabilities = _probe_registration(domain, load_for(name)) | _probe_types(context, domain)
            capabilities |= _probe_extended_queues(context)
            if inline:
                capabilities |= Capability.INLINE
            _probed[key] = _Probed(inline, capabilities)
        finally:
            lib.ibv_dealloc_pd(domain)
    return _probed[key]


def _probe_registration(domain: Any, library: int) -> Capability:
    """Try whether a region's rights can be changed, whether it can have any address, and whether dma-bufs are supported.

    If they are, a bad descriptor gives EBADF.
    """
    found = Capability.NONE
    with mmap.mmap(-1, mmap.PAGESIZE) as page, ffi.from_buffer(page) as start:
        region = lib.ibv_reg_mr(domain, start, mmap.PAGESIZE, lib.IBV_ACCESS_LOCAL_WRITE)
        if region != ffi.NULL:
            change = lib.IBV_REREG_MR_CHANGE_ACCESS
            if not lib.ibv_rereg_mr(region, change, ffi.NULL, ffi.NULL, 0, 0):
                found |= Capability.REREGISTRATION
            lib.ibv_dereg_mr(region)
        if has_symbol(b"ibv_reg_mr_iova2", library):
            # Libraries with this function know the rights that an adapter may ignore.
            found |= Capability.RELAXED_ORDERING
            region = lib.ibv_reg_mr_iova2(domain, start, mmap.PAGESIZE, 0, lib.IBV_ACCESS_LOCAL_WRITE)
            if region != ffi.NULL:
                found |= Capability.CHOSEN_ADDRESS
                lib.ibv_dereg_mr(region)
    out = ffi.new("struct ndpy_registration *")
    if not lib.ndpy_register_null(domain, out):
        found |= Capability.NULL_REGIONS
        lib.ibv_dereg_mr(ffi.cast("struct ibv_mr *", out.region))
    if has_symbol(b"ibv_reg_dmabuf_mr", library):
        region = lib.ibv_reg_dmabuf_mr(domain, 0, mmap.PAGESIZE, 0, -1, lib.IBV_ACCESS_LOCAL_WRITE)
        if region != ffi.NULL:
            lib.ibv_dereg_mr(region)
        elif ffi.errno == errno.EBADF:
            found |= Capability.DMABUF
    return found


def _probe_extended_queues(context: Any) -> Capability:
    """Try what completion queues can be created by the extended call, and whether the clock can be read."""
    kinds = {
        (lib.NDPY_TIMESTAMP, 0): Capability.TIMESTAMPS,
        (lib.NDPY_WALL_CLOCK, 0): Capability.WALL_CLOCK_TIMESTAMPS,
        (lib.NDPY_FLOW_TAG, 0): Capability.FLOW_TAGS,
        (0, 1): Capability.SINGLE_THREADED_QUEUES,
    }
    found = Capability.NONE
    for (details, single_threaded), capability in kinds.items():
        queue = lib.ndpy_create_extended_queue(context, 1, ffi.NULL, ffi.NULL, details, single_threaded)
        if queue != ffi.NULL:
            found |= capability
            lib.ibv_destroy_cq(queue)
    if lib.ndpy_device_memory_size(context):
        found |= Capability.DEVICE_MEMORY
    if not lib.ndpy_query_clock(context, ffi.new("struct ndpy_clock *")):
        found |= Capability.CLOCK
    return found


def _probe_types(context: Any, domain: Any) -> Capability:
    """Try which queue pairs can be created."""
    queue = lib.ibv_create_cq(context, 1, ffi.NULL, ffi.NULL, 0)
    if queue == ffi.NULL:
        return Capability.NONE
    try:
        found = Capability.NONE
        types = {
            lib.IBV_QPT_RC: Capability.RELIABLE_CONNECTIONS,
            lib.IBV_QPT_UC: Capability.UNRELIABLE_CONNECTIONS,
            lib.IBV_QPT_UD: Capability.DATAGRAMS,
        }
        for kind, capability in types.items():
            if _try_to_create(domain, queue, 0, kind) is not None:
                found |= capability
        if (domain_of_xrc := lib.ndpy_open_xrc_domain(context, -1)) != ffi.NULL:
            found |= Capability.XRC
            lib.ndpy_close_xrc_domain(domain_of_xrc)
        return found | _newer_operations(context, domain, queue)
    finally:
        lib.ibv_destroy_cq(queue)


def _probe_inline(context: Any, domain: Any) -> int:
    """Return the largest inline size that a queue pair can have."""
    queue = lib.ibv_create_cq(context, 1, ffi.NULL, ffi.NULL, 0)
    if queue == ffi.NULL:
        return 0
    try:
        low, high = 0, 4096
        while low < high:
            size = (low + high + 1) // 2
            granted = _try_to_create(domain, queue, size)
            if granted is None:
                high = size - 1
            else:
                low = max(size, min(granted, high))
        return low
    finally:
        lib.ibv_destroy_cq(queue)


def _newer_operations(context: Any, domain: Any, queue: Any) -> Capability:
    """Try for which operations beyond those of ibv_post_send(3) queue pairs can be created."""
    said = lib.ndpy_newer_operations(context)
    kinds = {
        Capability.ATOMIC_WRITE: (lib.NDPY_CAN_WRITE_ATOMICALLY, lib.NDPY_WITH_ATOMIC_WRITE),
        Capability.FLUSH: (lib.NDPY_CAN_FLUSH_GLOBALLY, lib.NDPY_WITH_FLUSH),
        Capability.FLUSH_PERSISTENT: (lib.NDPY_CAN_FLUSH_PERSISTENTLY, lib.NDPY_WITH_FLUSH),
    }
    found = Capability.NONE
    for capability, (bit, operations) in kinds.items():
        if said & bit and _try_to_create(domain, queue, 0, operations=operations) is not None:
            found |= capability
    return found


def _try_to_create(domain: Any, queue: Any, size: int, kind: int = lib.IBV_QPT_RC, operations: int = 0) -> int | None:
    """Create a queue pair and destroy it. Returns the inline size that it has, or None if it cannot be created."""
    request = ffi.new("struct ibv_qp_init_attr *")
    request.send_cq = request.recv_cq = queue
    request.qp_type = kind
    request.cap.max_send_wr = request.cap.max_recv_wr = 1
    request.cap.max_send_sge = request.cap.max_recv_sge = 1
    request.cap.max_inline_data = size
    if operations:
        queue_pair = lib.ndpy_create_queue_pair(domain, request, operations)
    else:
        queue_pair = lib.ibv_create_qp(domain, request)
    if queue_pair == ffi.NULL:
        return None
    lib.ibv_destroy_qp(queue_pair)
    return int(request.cap.max_inline_data)
