"""Descriptions of adapters, their ports, and the paths of their connections."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any

from ndpy.flags import Capability


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table.

    Parameters:
        index: its index in the table.
        value: its 16 bytes.
        type: "RoCE v2", "RoCE v1", "InfiniBand" or "iWARP".
        address: the value as an IP address.
    """

    index: int
    value: bytes
    type: str
    address: str


@dataclasses.dataclass(frozen=True)
class PortInfo:
    """A port of an adapter.

    Parameters:
        number: its number, from 1.
        state: "active", "down", "init", "armed" or "unknown".
        link_layer: for example "Ethernet" or "InfiniBand".
        mtu: the largest payload of a packet, in bytes.
        max_mtu: the largest MTU that can be configured.
        lid: its local identifier on InfiniBand.
        netdev: its network interface. None if there is none.
        gids: its GID table.
        pkeys: its table of P_Keys, by index, without the unused entries at its end. Empty if the system tells none.
        speed_gbps: how fast it is, in 10**9 bits per second, as the driver says. None if the system does not tell.
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


@dataclasses.dataclass(frozen=True)
class PathInfo:
    """The path of a connection, as the adapter itself has it. See QueuePair.path.

    Parameters:
        mtu: the largest payload of a packet, in bytes.
        port: the number of the local port.
        local_gid: this end's GID. None if the packets carry no GIDs, as within a subnet of InfiniBand, or if the GID has gone.
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
        transport: "RoCE", "InfiniBand", "iWARP" or, on Windows, "NetworkDirect".
        driver: the kernel driver, or the provider's DLL.
        addresses: the IP addresses that connections can use.
        numa_node: its NUMA node. None if the system does not say.
        netdev: the network interface of its first active port. None if there is none.
        mtu: the MTU of its first active port.
        state: the state of that port, or of the first port if none is active.
        capabilities: what this adapter can do and others cannot. Example:
            `ndpy.Capability.MEMORY_WINDOWS in info.capabilities`.
        ports: its ports.
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


def serves(info: AdapterInfo, which: str) -> bool:
    """Whether `which` is this adapter's name or one of its addresses."""
    return which == info.name or (is_address(which) and any(_plain(own) == _plain(which) for own in info.addresses))


def is_address(text: str) -> bool:
    """Whether this is an IP address, perhaps with a scope."""
    try:
        _plain(text)
    except ValueError:
        return False
    return True


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])
