"""Lists the verbs devices of this machine, opens them, and describes what they can do."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ndpy import errors
from ndpy.platforms.verbs import device_files, interfaces, softverbs
from ndpy.platforms.verbs.addresses import unpack_socket_address
from ndpy.platforms.verbs.interfaces import GidInterfaces, Interfaces, Place
from ndpy.platforms.verbs.native_calls import check, ffi, has_symbol, lib, load, load_for, text
from ndpy.platforms.verbs.probing import on_demand, probe, resizing
from ndpy.vocabulary import system_files
from ndpy.vocabulary.addresses import Reach, reach
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.info import TRANSPORTS, AdapterInfo, Gid, PortInfo, as_named
from ndpy.vocabulary.quirks import Quirk

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
# Of a port that does not tell.
_LONGEST = 1 << 31
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
    """The adapters among which `which` chooses. None if softverbs is not asked for: then it is those of
    list_adapters().
    """
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
    """Raise the reason why list_adapters() leaves out the device of this name, or of "NAME:PORT", if there is such a
    device.
    """
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
    here = Interfaces()
    iwarp = _is_iwarp(name)
    ports = _ports(context, name, attributes.phys_port_cnt, iwarp, here)
    answering = [port for port in ports if port.link_layer != SILENT]
    best = next((port for port in answering if port.state == "active"), answering[0])
    probed = probe(context, name, attributes)
    transport = "iWARP" if iwarp else TRANSPORTS[best.link_layer]
    driver = _driver(name, attributes.vendor_id)
    capabilities = _capabilities(attributes, iwarp, driver) | on_demand(context) | probed.capabilities
    if Quirk.SIW_KEEPS_ADDRESSES.value.is_of(driver, transport):
        capabilities &= ~Capability.CHOSEN_ADDRESS
    addresses = _addresses(ports)
    if name == softverbs.NAME:
        addresses = _addresses_of_softverbs()
        best = _with_interfaces_of_machine(best, addresses, here)
        ports = (best,)
        # The processor writes to the memory, in the order in which the bytes come.
        capabilities |= Capability.IN_ORDER_DMA | resizing(context)
    if has_symbol(b"ibv_query_qp_data_in_order", load_for(name)):
        capabilities |= Capability.DATA_IN_ORDER
    if any((folder_of(name) / "ports").glob("*/*counters/*")):
        capabilities |= Capability.COUNTERS
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
        numa_node=_numa_node(name, ports, here),
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
        max_transfer_length=_longest_everywhere(answering),
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


def _driver(name: str, vendor: int) -> str:
    if name == softverbs.NAME:
        return softverbs.DRIVER
    driver = folder_of(name) / "device" / "driver"
    if driver.exists():
        return driver.resolve().name
    return {_RXE_VENDOR: "rdma_rxe", _SIW_VENDOR: "siw"}.get(vendor, "unknown")


def _with_interfaces_of_machine(port: PortInfo, addresses: Iterable[str], here: Interfaces) -> PortInfo:
    """The port of soft0, whose GIDs are the machine's addresses."""
    found = here.with_any_of(addresses)
    netdevs = {interfaces.gid_of(address): entry.name for entry in found for address in entry.addresses}
    vlans = {entry.name: entry.vlan for entry in found}
    gids = [
        dataclasses.replace(gid, netdev=(netdev := netdevs.get(gid.value)), vlan=vlans.get(netdev or ""))
        for gid in port.gids
    ]
    return dataclasses.replace(port, interfaces=found, gids=tuple(gids))


def _numa_node(name: str, ports: Iterable[PortInfo], here: Interfaces) -> int | None:
    netdevs = (interface.name for port in ports for interface in port.interfaces)
    for folder in (folder_of(name), *map(interfaces.folder_of, netdevs)):
        node = here.files.read_number(folder / "device/numa_node")
        if node is not None:
            return node
    return None


def _ports(context: Any, name: str, count: int, iwarp: bool, here: Interfaces) -> tuple[PortInfo, ...]:
    """The ports. One that does not answer must not keep the program from the others. Raises if none answers."""
    answers: dict[int, Any] = {}
    failures: list[errors.NdpyError] = []
    for number in range(1, count + 1):
        try:
            answers[number] = _ask_port(context, name, number)
        except errors.NdpyError as failure:
            failures.append(failure)
    if failures and not answers:
        raise failures[0]
    tables = _gid_tables(context, name, {number: answer.gid_tbl_len for number, answer in answers.items()}, count)
    return tuple(
        _port(context, name, Place(folder_of(name), number, count), answers[number], tables[number], iwarp, here)
        if number in answers
        else PortInfo(number, "unknown", SILENT, 0, 0, 0, None, ())
        for number in range(1, count + 1)
    )


def _longest_everywhere(ports: Iterable[PortInfo]) -> int:
    """The longest message that any port of these carries, whichever a connection takes. Active ones count, if there are
    any.
    """
    told = [(port.state != "active", port.max_transfer_length) for port in ports if port.max_transfer_length]
    return min(told)[1] if told else _LONGEST


def _ask_port(context: Any, name: str, number: int) -> Any:
    attributes = ffi.new("struct ibv_port_attr *")
    check("ibv_query_port", lib.ndpy_query_port(context, number, attributes), f"{name} port {number} does not answer")
    return attributes


def _port(
    context: Any, name: str, place: Place, attributes: Any, table: Iterable[_Entry], iwarp: bool, here: Interfaces
) -> PortInfo:
    number = place.number
    gids = _gids(name, place, table, iwarp, here)
    # The GIDs of other iWARP adapters are made of the hardware address.
    own = gids[0].address if gids and iwarp and name != softverbs.NAME else None
    found = here.of_port(place, gids, own)
    return PortInfo(
        number=number,
        state=_STATES.get(attributes.state, "unknown"),
        link_layer=_LINK_LAYERS.get(attributes.link_layer, "Ethernet" if iwarp else "unspecified"),
        mtu=mtu_bytes(attributes.active_mtu),
        max_mtu=mtu_bytes(attributes.max_mtu),
        lid=attributes.lid,
        netdev=found[0].name if found else None,
        gids=gids,
        pkeys=_pkeys(name, number, here),
        speed_gbps=_speed_gbps(context, name, number, here),
        interfaces=found,
        max_transfer_length=attributes.max_msg_sz,
    )


def _speed_gbps(context: Any, name: str, port: int, here: Interfaces) -> float | None:
    if has_symbol(b"ibv_query_port_speed", load_for(name)):
        speed = ffi.new("uint64_t *")
        if not lib.ibv_query_port_speed(context, port, speed) and speed[0]:
            return int(speed[0]) / 10
    # For example "2.5 Gb/sec (1X SDR)".
    number, _, unit = here.files.read(folder_of(name) / "ports" / str(port) / "rate").partition(" ")
    try:
        return float(number) if unit.startswith("Gb/sec") else None
    except ValueError:
        return None


def _pkeys(name: str, port: int, here: Interfaces) -> tuple[int, ...]:
    """The table of P_Keys. Its unused entries are 0."""
    if name == softverbs.NAME:
        return (_DEFAULT_PKEY,)
    folder = folder_of(name) / "ports" / str(port) / "pkeys"
    places = sorted(map(int, here.files.names(folder, "[0-9]*")))
    found = [int(here.files.read(folder / str(place)) or "0", 16) for place in places]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


class _Entry(NamedTuple):
    """An entry of a GID table. place: its index. kind: the type of its GID."""

    place: int
    value: bytes
    kind: str


def _gids(name: str, place: Place, table: Iterable[_Entry], iwarp: bool, here: Interfaces) -> tuple[Gid, ...]:
    """The GIDs of a port, from its table. Free places of the table have zeros."""
    gids = []
    of_gids = GidInterfaces(place, here)
    for index, value, kind in table:
        if any(value):
            # The GIDs of other iWARP adapters begin with the MAC address.
            address = value[:6].hex(":") if iwarp and name != softverbs.NAME else gid_address(value)
            netdev, vlan = (None, None) if iwarp else of_gids.of(index, value)
            gids.append(Gid(index, value, "iWARP" if iwarp else kind, address, netdev, vlan))
    return tuple(gids)


def gid_at(context: Any, name: str, port: int, index: int) -> Gid | None:
    """The entry of a port's GID table, as it is now. None if that place is free."""
    entry = _gid_entry(context, name, port, index)
    table = () if entry is None else (entry,)
    return next(iter(_gids(name, Place(folder_of(name), port, 0), table, _is_iwarp(name), Interfaces())), None)


_GID_TYPES = {
    lib.IBV_GID_TYPE_IB: "InfiniBand",
    lib.IBV_GID_TYPE_ROCE_V1: "RoCE v1",
    lib.IBV_GID_TYPE_ROCE_V2: "RoCE v2",
}


def _gid_tables(context: Any, name: str, sizes: Mapping[int, int], ports: int) -> dict[int, list[_Entry]]:
    """The GID tables of ports. Most of their thousand places are free. sizes: by port.
    ports: how many the adapter has.
    """
    if has_symbol(b"_ibv_query_gid_table", load_for(name)):
        # It tells the entries of all ports at once, also of those that do not answer, or nothing if there is not room
        # for all.
        room = max(1, *sizes.values()) * ports
        entries = ffi.new("struct ibv_gid_entry[]", room)
        found = lib._ibv_query_gid_table(context, entries, room, 0, ffi.sizeof("struct ibv_gid_entry"))
        if found >= 0:
            tables: dict[int, list[_Entry]] = {number: [] for number in sizes}
            for entry in entries[0:found]:
                if entry.port_num in tables:
                    tables[entry.port_num].append(_read_entry(entry))
            return tables
    return {
        number: [entry for index in range(size) if (entry := _gid_entry(context, name, number, index)) is not None]
        for number, size in sizes.items()
    }


def _gid_entry(context: Any, name: str, port: int, index: int) -> _Entry | None:
    """One entry of a port's GID table. None if that place is free."""
    if has_symbol(b"_ibv_query_gid_ex", load_for(name)):
        entry = ffi.new("struct ibv_gid_entry *")
        if not lib._ibv_query_gid_ex(context, port, index, entry, 0, ffi.sizeof("struct ibv_gid_entry")):
            return _read_entry(entry)
    types = folder_of(name) / "ports" / str(port) / "gid_attrs" / "types"
    kind = softverbs.DRIVER if name == softverbs.NAME else system_files.read(types / str(index))
    gid = ffi.new("union ibv_gid *")
    if not kind or lib.ibv_query_gid(context, port, index, gid):
        return None
    return _Entry(index, bytes(ffi.buffer(gid.raw)), "RoCE v1" if kind == "IB/RoCE v1" else kind)


def _read_entry(entry: Any) -> _Entry:
    return _Entry(entry.gid_index, bytes(ffi.buffer(entry.gid.raw)), _GID_TYPES.get(entry.gid_type, "unknown"))


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
    found = [address for netdev, here in interfaces.addresses_here().items() if netdev in own for address in here]
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
