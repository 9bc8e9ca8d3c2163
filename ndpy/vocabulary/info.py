"""Descriptions of adapters, their ports, and the paths of their connections."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable
from typing import Any

from ndpy.vocabulary.addresses import plain_address
from ndpy.vocabulary.flags import Capability


@dataclasses.dataclass(frozen=True)
class NetworkInterface:
    """A network interface that leads to a port of an adapter.

    Parameters:
        name: its name, such as "eth0.10".
        kind: "ethernet", "ipoib", "loopback", "vlan", "bond", "bridge" or another word of Linux for it. A macvlan is
            "ethernet", with a parent. "unknown" on Windows.
        parent: the interface that it lies on, the first one if there are several. None if it lies on none.
        vlan: the ID of the VLAN, 1 to 4094. None if it is not that of a VLAN, or the system does not say.
        addresses: its IP addresses. Those that only hosts of the same link reach come last.
    """

    name: str
    kind: str
    parent: str | None
    vlan: int | None
    addresses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table.

    Parameters:
        index: its index in the table.
        value: its 16 bytes.
        type: "RoCE v2", "RoCE v1", "InfiniBand" or "iWARP".
        address: the value as an IP address.
        netdev: the network interface that it belongs to. None if there is none in this network namespace, as on
            InfiniBand.
        vlan: the ID of the VLAN whose tag packets from it get. None if that interface does not belong to a VLAN.
    """

    index: int
    value: bytes
    type: str
    address: str
    netdev: str | None = None
    vlan: int | None = None


@dataclasses.dataclass(frozen=True)
class PortInfo:
    """A port of an adapter.

    Parameters:
        number: its number, from 1.
        state: "active", "down", "init", "armed" or "unknown".
        link_layer: "Ethernet", "InfiniBand" or, of adapters with a network of their own, "unspecified". "unknown" on
            Windows.
        mtu: the largest payload of a packet, in bytes.
        max_mtu: the largest MTU that can be configured.
        lid: its local identifier on InfiniBand.
        netdev: its network interface, the first one if there are several. None if there is none.
        gids: its GID table.
        pkeys: its table of P_Keys, by index, without the unused entries at its end. Empty if the system tells none.
        speed_gbps: how fast it is, in 10**9 bits per second, as the driver says. None if the system does not tell.
        interfaces: all network interfaces that lead to it, such as VLANs and bonds.
        max_transfer_length: the longest message, in bytes. 0 if the port does not tell, as on Windows.
    Source: ibv_query_port(3), ibv_query_pkey(3), ibv_query_port_speed(3).
    """

    number: int
    state: str
    link_layer: str
    mtu: int
    max_mtu: int
    lid: int
    netdev: str | None
    gids: tuple[Gid, ...]
    pkeys: tuple[int, ...] = ()
    speed_gbps: float | None = None
    interfaces: tuple[NetworkInterface, ...] = ()
    max_transfer_length: int = 0


@dataclasses.dataclass(frozen=True)
class PathInfo:
    """The path of a connection, as the adapter itself has it. See QueuePair.path.

    Parameters:
        mtu: the largest payload of a packet, in bytes.
        port: the number of the local port.
        local_gid: this end's GID. None if the packets carry no GIDs, as within a subnet of InfiniBand, or if the GID
            has gone.
        remote_gid: the peer's GID, 16 bytes. None if the packets carry no GIDs.
        remote_qp_number: the number of the peer's queue pair.
        remote_lid: the peer's address on InfiniBand. 0 on Ethernet.
        service_level: 0 to 15. On Ethernet it chooses the priority of a tagged frame.
        traffic_class: 0 to 255. On RoCE v2 it is the IP header's byte of that name, or TOS. 0 without GIDs.
        flow_label: 0 to 2**20 - 1. 0 without GIDs.
        hop_limit: how many routers a packet may pass. 0 without GIDs.
    Source: ibv_query_qp(3).
    """

    mtu: int
    port: int
    local_gid: Gid | None
    remote_gid: bytes | None
    remote_qp_number: int
    remote_lid: int
    service_level: int
    traffic_class: int
    flow_label: int
    hop_limit: int


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """The identity and the limits of an adapter. Sizes are in bytes and depths in requests.

    Parameters:
        name: its name, which open_adapter() takes.
        provider: "verbs" or "networkdirect".
        transport: "RoCE", "InfiniBand", "iWARP", "unspecified" for a vendor's own or, on Windows, "NetworkDirect".
        driver: the kernel driver, or the provider's DLL.
        vendor_id, device_id: the numbers of its maker and model, as the adapter tells them. 0 if it tells none.
        firmware: its version, in the words of its maker. "" if it tells none.
        addresses: the IP addresses that connections can use: those of all its ports, or of the port that was asked for.
            Those that only hosts of the same link reach come last.
        numa_node: its NUMA node. None if the system does not say.
        netdev: the network interface that was asked for, or the first one of the port. None if there is none.
        mtu: the MTU of the port.
        state: the state of the port.
        capabilities: what this adapter can do and others cannot. Example:
            `ndpy.Capability.MEMORY_WINDOWS in info.capabilities`.
        ports: its ports.
        port: the number of the port that it uses where an address does not decide, and whose transport, netdev, mtu and
            state these are: the one that was asked for, or the first active one, or the first one.
        asked_for: the network interface or the address that open_adapter() was given. "" if it was a name, or nothing.
        max_device_memory_size: how much memory alloc_device_memory() can give at most, in all. 0 if there is none.
        max_…: the limits, with NetworkDirect's names.
    Source: ND2_ADAPTER_INFO, ND_ADAPTER_INFO1 (contract B.6, B.7); ibv_query_device(3), ibv_query_port(3).
    """

    name: str
    provider: str
    transport: str
    driver: str
    addresses: tuple[str, ...]
    vendor_id: int
    device_id: int
    firmware: str
    numa_node: int | None
    netdev: str | None
    mtu: int
    state: str
    capabilities: Capability
    ports: tuple[PortInfo, ...]
    max_registration_size: int
    max_window_size: int
    max_initiator_sge: int
    max_receive_sge: int
    max_read_sge: int
    max_transfer_length: int
    max_inline_data_size: int
    max_inbound_read_limit: int
    max_outbound_read_limit: int
    max_receive_queue_depth: int
    max_initiator_queue_depth: int
    max_shared_receive_queue_depth: int
    max_completion_queue_depth: int
    max_caller_data: int
    max_callee_data: int
    max_device_memory_size: int = 0
    port: int = 1
    asked_for: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON.

        Returns: a dictionary. Capabilities are a list of names, and GIDs hexadecimal strings.
        """
        values = dataclasses.asdict(self)
        values["capabilities"] = self.capabilities.names()
        for port in values["ports"]:
            for gid in port["gids"]:
                gid["value"] = gid["value"].hex()
        return values


def port_in_use(info: AdapterInfo) -> PortInfo | None:
    """The port that AdapterInfo.port names. None if the adapter has no ports."""
    return next((port for port in info.ports if port.number == info.port), next(iter(info.ports), None))


def port_with(info: AdapterInfo, address: str) -> int:
    """The number of the port that an address leads to, or else of the port in use."""
    for port in info.ports:
        if any(is_same_address(own, address) for interface in port.interfaces for own in interface.addresses):
            return port.number
    return info.port


def as_named(info: AdapterInfo, which: str) -> AdapterInfo | None:
    """The adapter as `which` names it: by name, by name and port ("mlx5_0:2"), by network interface or by an IP
    address.

    Returns: `info` for the name alone. Otherwise `info` as it is seen from the port: its addresses are those of that
        port. The address that was given comes first, or those of the interface that was given. None if `which` is not
        this adapter.
    """
    if which == info.name:
        return info
    if number := port_number(info, which):
        port = next((port for port in info.ports if port.number == number), None)
        return None if port is None else _seen_from(info, port, port.netdev)
    # An active port first, should several have the interface.
    for port in sorted(info.ports, key=lambda port: port.state != "active"):
        for interface in port.interfaces:
            own = [address for address in interface.addresses if is_same_address(address, which)]
            if own or interface.name == which:
                return _seen_from(info, port, interface.name, which, own or interface.addresses)
    return info if any(is_same_address(own, which) for own in info.addresses) else None


def port_number(info: AdapterInfo, which: str) -> int | None:
    """The port's number in "NAME:PORT", if `which` is of that form and the name is this adapter's."""
    name, _, number = which.rpartition(":")
    return int(number) if name == info.name and number.isascii() and number.isdigit() and len(number) < 4 else None


#: The transports of adapters that are not iWARP's, by link layer.
TRANSPORTS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE", "unspecified": "unspecified"}


def _seen_from(
    info: AdapterInfo, port: PortInfo, netdev: str | None, asked_for: str = "", first: Iterable[str] = ()
) -> AdapterInfo:
    own = {address for interface in port.interfaces for address in interface.addresses}
    transport = info.transport
    others = {
        address for other in info.ports for interface in other.interfaces for address in interface.addresses
    } - own
    return dataclasses.replace(
        info,
        port=port.number,
        asked_for=asked_for,
        transport=TRANSPORTS.get(port.link_layer, transport) if transport in TRANSPORTS.values() else transport,
        netdev=netdev,
        mtu=port.mtu,
        state=port.state,
        max_transfer_length=port.max_transfer_length or info.max_transfer_length,
        addresses=tuple(dict.fromkeys([*first, *(address for address in info.addresses if address not in others)])),
    )


def is_address(text: str) -> bool:
    """Whether this is an IP address, perhaps with a scope."""
    try:
        plain_address(text)
    except ValueError:
        return False
    return True


def is_same_address(one: str, other: str) -> bool:
    """Whether two texts are the same IP address. If only one has a scope, it does not count."""
    if not (is_address(one) and is_address(other)) or plain_address(one) != plain_address(other):
        return False
    scopes = {_scope(text) for text in (one, other) if "%" in text}
    return len(scopes) < 2


def _scope(text: str) -> int | str:
    scope = text.partition("%")[2]
    try:
        return int(scope) if scope.isdigit() else socket.if_nametoindex(scope)
    except OSError:
        return scope
