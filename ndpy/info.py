"""What an adapter is and what it can do."""

from __future__ import annotations

import dataclasses
from typing import Any

from ndpy.flags import Capability


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table. type: "RoCE v2", "RoCE v1", "InfiniBand" or "iWARP"; address: as text."""

    index: int
    value: bytes
    type: str
    address: str


@dataclasses.dataclass(frozen=True)
class PortInfo:
    """A port. state: "active", "down", "init", "armed" or "unknown"; mtu and max_mtu: bytes of payload in a packet."""

    number: int
    state: str
    link_layer: str
    mtu: int
    max_mtu: int
    lid: int
    netdev: str | None
    gids: tuple[Gid, ...]


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """An adapter's identity and limits; sizes in bytes, depths in requests. Limits have NetworkDirect's names.

    addresses: the IP addresses that connections can use. numa_node: None where the system does not say.
    capabilities: what it can do beyond what all adapters can, for example
    `ndpy.Capability.MEMORY_WINDOWS in info.capabilities`.
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

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        values = dataclasses.asdict(self)
        values["capabilities"] = self.capabilities.names()
        for port in values["ports"]:
            for gid in port["gids"]:
                gid["value"] = gid["value"].hex()
        return values
