"""What an adapter is and what it can do."""

from __future__ import annotations

import dataclasses
from typing import Any


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
    flags: capabilities, of MEMORY_WINDOWS, SHARED_RECEIVE_QUEUES, RESIZE_COMPLETION_QUEUE, IN_ORDER_DMA,
    LOOPBACK_CONNECTIONS, ATOMICS, READ_SINK_REQUIRED, GIDS (ports have tables of them), REFUSE_OFFER (a client can take
    back its request, and refuse what the server accepted), REGION_ACCESS (regions have the rights that register() gives
    them, remote ones too; without it peers reach memory through windows only, and remote rights given to register() are
    only kept), INLINE (Flags.INLINE), SEND_INVALIDATE (send_and_invalidate()), BIND_RESERVES_PORT (a connector's bind()
    finds a port that is taken, else connect() does), REREGISTRATION (MemoryRegion.reregister()), ON_DEMAND_PAGING
    (Access.ON_DEMAND), IMPLICIT_ON_DEMAND (Adapter.register_implicit()), DMABUF (Adapter.register_dmabuf()) and RETRY_POLICY
    (RetryPolicy of connect() and accept()).
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
    flags: frozenset[str]
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
        values["flags"] = sorted(self.flags)
        for port in values["ports"]:
            for gid in port["gids"]:
                gid["value"] = gid["value"].hex()
        return values
