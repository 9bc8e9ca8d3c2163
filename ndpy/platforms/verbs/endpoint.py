"""Connections without librdmacm: endpoints of queue pairs, and likely faults of the path to a peer."""

from __future__ import annotations

import dataclasses
import ipaddress
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ndpy import errors
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy
from ndpy.platforms.verbs.adapter_info import gid_at, mtu_bytes
from ndpy.platforms.verbs.interfaces import ask_interfaces
from ndpy.platforms.verbs.native_calls import check, ffi, lib
from ndpy.platforms.verbs.queue_pair_attributes import modify
from ndpy.vocabulary.addresses import Reach, reach
from ndpy.vocabulary.endpoint import Endpoint
from ndpy.vocabulary.flags import Status
from ndpy.vocabulary.info import AdapterInfo, Gid, PathInfo, PortInfo, is_same_address, port_with
from ndpy.vocabulary.queue_pair_attributes import CHANGES, AddressVector, Change, QueuePairState, QueuePairType
from ndpy.vocabulary.quirks import Quirk
from ndpy.vocabulary.routes import interface_from

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter
    from ndpy.vocabulary.addresses import Address


def rank(gid: Gid) -> tuple[int, int, int, int]:
    """A sort key, smallest for the best GID: RoCE v2 before v1, routable before others, IPv4 before IPv6."""
    version = {"RoCE v2": 0, "InfiniBand": 0, "RoCE v1": 1}.get(gid.type, 2)
    return version, reach(gid.value), int(ipaddress.IPv6Address(gid.value).ipv4_mapped is None), gid.index


def _is_named(gid: Gid, name: str) -> bool:
    """Whether a GID has this address, with its interface if that is in it, or belongs to this network interface."""
    address, _, scope = name.partition("%")
    if name == gid.netdev:
        return True
    return is_same_address(address, gid.address) and (not scope or is_same_address(name, f"{address}%{gid.netdev}"))


def best_gid(info: AdapterInfo, port: PortInfo) -> Gid | None:
    """The best GID of a port: of the interface or the address that the adapter was asked for by, if there is one."""
    wanted = [gid for gid in port.gids if _is_named(gid, info.asked_for)] if info.asked_for else []
    return next(iter(_best(wanted or port.gids)), None)


def _best(gids: Sequence[Gid]) -> list[Gid]:
    """The best of these by rank. Several if that is an address of several interfaces, and the routes prefer none of
    them.

    Interfaces may have a link-local address in common, such as a VLAN's and the one that it lies on. The first one is
    the best then.
    """
    ranked = sorted(gids, key=rank)
    same = [gid for gid in ranked if (gid.value, gid.type) == (ranked[0].value, ranked[0].type)]
    # Interfaces of other network namespaces may have the address too.
    same = [gid for gid in same if gid.netdev] or same[:1]
    if same and reach(same[0].value) is Reach.LINK_LOCAL:
        return same[:1]
    if len(same) > 1:
        out = interface_from(same[0].address, ask_interfaces("connect"))
        same = [gid for gid in same if gid.netdev == out] or same
    return same


def find_gid(adapter: VerbsAdapter, port: PortInfo, wanted: int | str) -> Gid:
    """The GID of a port with this index, or the best one with this address or of this network interface.

    Raises:
        AddressUnreachableError: there is none, or several interfaces have the address.
    """
    if isinstance(wanted, str):
        found = [gid for gid in port.gids if _is_named(gid, wanted)]
        what = f"of {wanted}"
    else:
        found = [gid for gid in port.gids if gid.index == wanted]
        what = f"with index {wanted}"
    if not found:
        known = ", ".join(
            f"{gid.index} ({gid.address}, {gid.type}{f', {gid.netdev}' if gid.netdev else ''})" for gid in port.gids
        )
        raise errors.AddressUnreachableError(
            f"port {port.number} of {adapter.info.name} has no GID {what}; it has {known or 'none'}",
            operation="local_endpoint",
            problem="gid-index",
        )
    best = _best(found)
    if len(best) > 1:
        raise errors.AddressUnreachableError(
            f"{wanted} is the address of several interfaces of port {port.number} of {adapter.info.name}, and the "
            "routes lead to its subnet by none of them; choose a GID by its index: "
            f"{', '.join(f'{gid.index} ({gid.netdev})' for gid in best)}",
            operation="local_endpoint",
            problem="gid-index",
        )
    return best[0]


def local_endpoint_of(adapter: VerbsAdapter, qp_number: int, wanted: int | str | None, psn: int | None) -> Endpoint:
    """The local endpoint of a queue pair."""
    port = active_port(adapter)
    if Quirk.IWARP_MANAGER_ONLY in adapter._quirks:
        raise errors.UnsupportedError(
            "iWARP connects through librdmacm only; use Adapter.connect() and listen()", operation="local_endpoint"
        )
    best = best_gid(adapter.info, port) if wanted is None else find_gid(adapter, port, wanted)
    if best is None and port.link_layer != "InfiniBand":
        raise errors.AddressUnreachableError(
            f"{adapter.info.name} has no GID; give {port.netdev} an IP address",
            operation="local_endpoint",
            problem="gid-index",
        )
    return Endpoint(
        lid=port.lid,
        qp_number=qp_number,
        psn=random.getrandbits(24) if psn is None else psn & 0xFFFFFF,
        gid=best.value if best else bytes(16),
        gid_index=best.index if best else 0,
        gid_type=best.type if best else "",
        mtu=port.mtu,
        port=port.number,
        inbound_read_limit=adapter.info.max_inbound_read_limit,
    )


def active_port(adapter: VerbsAdapter) -> PortInfo:
    """The port that connections use."""
    ports = adapter.info.ports
    return next((port for port in ports if port.number == adapter._port), ports[0])


# The values of ibv_rc_pingpong.
_DEFAULTS = RetryPolicy(retry_count=7, rnr_retry_count=RetryPolicy.ENDLESS, min_rnr_timer=12, ack_timeout=14)


def with_defaults(adapter: VerbsAdapter, retry: RetryPolicy) -> RetryPolicy:
    """The policy that connect_endpoint() uses: the program's values, and defaults for the others."""
    chosen = {name: value for name, value in vars(retry).items() if value is not None}
    policy = dataclasses.replace(_DEFAULTS, **chosen)
    assert policy.retry_count is not None
    return dataclasses.replace(policy, retry_count=finite_retry_count(adapter, policy.retry_count))


def finite_retry_count(adapter: VerbsAdapter, count: int) -> int:
    """The retry count to set if `count` is asked for. With it the adapter gives up some day."""
    return min(count, 6) if Quirk.RXE_RETRIES_FOR_EVER in adapter._quirks else count


def path_mtu(local: Endpoint, remote: Endpoint) -> int:
    """The path MTU that this end uses."""
    return min(local.mtu, remote.mtu) if remote.mtu else local.mtu


class Reliability(NamedTuple):
    """What only a reliable connection has. Each end takes what its type needs."""

    limits: ReadLimits
    retry: RetryPolicy


def _needed(kind: QueuePairType, change: Change, given: dict[str, Any]) -> dict[str, Any]:
    names = CHANGES[kind][change][0]
    return {"state": change[1], **{name: value for name, value in given.items() if name in names}}


def make_ready_to_receive(
    queue_pair: Any,
    kind: QueuePairType,
    adapter: VerbsAdapter,
    local: Endpoint,
    remote: Endpoint,
    reliability: Reliability,
) -> None:
    """Move a native queue pair from INIT to RTR. If this raises, it is still in INIT."""
    has_route = any(remote.gid) and (active_port(adapter).link_layer != "InfiniBand" or not remote.lid)
    given = {
        "path": AddressVector(
            gid=remote.gid if has_route else None, gid_index=local.gid_index, lid=remote.lid, port=local.port
        ),
        "path_mtu": path_mtu(local, remote),
        "remote_number": remote.qp_number,
        "receive_psn": remote.psn,
        "inbound_read_limit": reliability.limits.inbound,
        "min_rnr_timer": reliability.retry.min_rnr_timer,
    }
    given = _needed(kind, (QueuePairState.INIT, QueuePairState.RTR), given)
    modify(queue_pair, given, "connect_endpoint", f"the queue pair cannot be set up between {local} and {remote}")


def make_ready_to_send(queue_pair: Any, kind: QueuePairType, local: Endpoint, reliability: Reliability) -> None:
    """Move a native queue pair from RTR to RTS."""
    limits, retry = reliability
    given = {
        "send_psn": local.psn,
        "ack_timeout": retry.ack_timeout,
        "retry_count": retry.retry_count,
        "rnr_retry_count": retry.rnr_retry_count,
        "outbound_read_limit": limits.outbound,
    }
    modify(queue_pair, _needed(kind, (QueuePairState.RTR, QueuePairState.RTS), given), "connect_endpoint")


def path_of(adapter: VerbsAdapter, queue_pair: Any) -> PathInfo:
    """The path of a connected native queue pair, as the driver tells it."""
    attributes = ffi.new("struct ibv_qp_attr *")
    wanted = lib.IBV_QP_PATH_MTU | lib.IBV_QP_AV | lib.IBV_QP_PORT | lib.IBV_QP_DEST_QPN
    check("path", lib.ibv_query_qp(queue_pair, attributes, wanted, ffi.new("struct ibv_qp_init_attr *")))
    vector = attributes.ah_attr
    route = vector.grh if vector.is_global else None
    number = vector.port_num or attributes.port_num or adapter._port
    # The table may have changed since the adapter was opened.
    own = gid_at(adapter._context, adapter.info.name, number, route.sgid_index) if route is not None else None
    return PathInfo(
        mtu=mtu_bytes(attributes.path_mtu),
        port=number,
        local_gid=own,
        remote_gid=bytes(ffi.buffer(route.dgid.raw)) if route is not None else None,
        remote_qp_number=attributes.dest_qp_num,
        remote_lid=vector.dlid,
        service_level=vector.sl,
        traffic_class=route.traffic_class if route is not None else 0,
        flow_label=route.flow_label if route is not None else 0,
        hop_limit=route.hop_limit if route is not None else 0,
    )


_CAUSES = {
    "iWARP": "likely causes: the peer died, or the network between lost the TCP connection",
    "InfiniBand": (
        "likely causes: the peer died or closed its queue pair, no receive was posted there in time, a LID of another "
        "subnet, an MTU that the network does not carry"
    ),
    "RoCE": (
        "likely causes: the peer died or closed its queue pair, no receive was posted there in time, a GID of another "
        "network or type (RoCE v1 and v2 do not talk), an MTU that the network does not carry, UDP port 4791 blocked"
    ),
}

# Two ends with different path MTUs refuse each other's packets in these ways.
_MAY_BE_THE_MTU = (Status.DATA_OVERRUN, Status.BUFFER_OVERFLOW, Status.REMOTE_ERROR)


def explain(
    adapter: VerbsAdapter,
    status: Status,
    path: tuple[Endpoint, Endpoint] | None,
    addresses: tuple[Address, Address] | None,
    mtu: int,
    *,
    answers: bool = False,
) -> str:
    """Describe the path that a request failed on, and the likely causes. "" if the path is not a likely cause.

    Parameters:
        path: the two ends, if the program has connected them without a connector.
        addresses: the two ends of a connector's connection.
        mtu: the path MTU of this end, 0 if there is none.
        answers: whether the peer has answered. Then the path works.
    """
    ends = ""
    if path is not None:
        ends = f"from {path[0]} to {path[1]}"
    elif addresses is not None:
        (own_host, own_port), (host, port) = addresses
        ends = f"from {own_host} port {own_port} to {host} port {port} on {adapter.info.name}"
    if status is Status.CANCELED:
        # On iWARP this may be all that is heard of a peer that died.
        return ends and f"connection {ends}"
    if answers:
        return ends
    if ends:
        ends += f", with path MTU {mtu} on this end; " if mtu else "; "
    if status is Status.IO_TIMEOUT:
        number = path[0].port if path is not None else adapter._port
        if path is None and addresses is not None:
            number = port_with(adapter.info, addresses[0][0])
        if adapter._state_of_port(number) != "active":
            return f"port {number} of {adapter.info.name} is down: see `ip link` and the cable"
        return ends + _CAUSES.get(adapter.info.transport, _CAUSES["RoCE"])
    # A connection manager gives both ends the same path MTU.
    if status in _MAY_BE_THE_MTU and path is not None:
        return f"{ends}the peer may use another path MTU, and both ends need the same one"
    return ""
