"""Groups load and enumerate: the library is there, and the adapter is what the system says."""

from __future__ import annotations

import ipaddress
import platform

import ndpy
from ndpy import Capability
from ndpy.cli.smoke.catalog import Failure, check
from ndpy.cli.smoke.lab import Lab, expect, refusal


@check("load", "library")
def library(lab: Lab) -> str:
    """The provider's libraries are there and list adapters."""
    count = len(ndpy.list_adapters())
    return f"{count} adapter{'s' if count != 1 else ''}; ndpy {ndpy.__version__}, kernel {platform.release()}"


@check("load", "open-twice")
def open_twice(lab: Lab) -> str:
    """The adapter can be opened a second time, and closing that leaves the first alone."""
    with ndpy.open_adapter(lab.info.name) as second:
        second.register(bytearray(4096)).close()
    lab.adapter.register(bytearray(4096)).close()
    return "both work, each with its own regions"


@check("load", "peer")
def peer(lab: Lab) -> str:
    """A second process comes up with the adapter and answers."""
    greeting = lab.peer.greeting
    return f"{lab.peer.where}, {greeting.adapter} ({greeting.driver}) on {greeting.system}, ndpy {greeting.version}"


@check("enumerate", "listed")
def listed(lab: Lab) -> str:
    """The adapter is among those that are listed, with the same properties as the open one."""
    found = [info for info in ndpy.list_adapters() if info.name == lab.info.name]
    expect(len(found) == 1, f"{lab.info.name} is listed {len(found)} times")
    expect(
        found[0].capabilities == lab.info.capabilities,
        f"listed with {found[0].capabilities.names()}, opened with {lab.info.capabilities.names()}",
    )
    expect(found[0].addresses == lab.info.addresses, "listed and opened adapter have different addresses")
    return f"{lab.info.name}: {', '.join(lab.info.capabilities.names()) or 'no capabilities'}"


@check("enumerate", "by-address")
def by_address(lab: Lab) -> str:
    """Each of the adapter's addresses opens it."""
    expect(lab.info.addresses, f"{lab.info.name} has no IP address; give {lab.info.netdev or 'its interface'} one")
    for address in lab.info.addresses:
        with ndpy.open_adapter(address) as same:
            expect(same.info.name == lab.info.name, f"{address} opens {same.info.name}")
    return ", ".join(lab.info.addresses)


@check("enumerate", "unknown-name")
def unknown_name(lab: Lab) -> str:
    """An adapter that is not there is refused with a list of those that are."""
    with refusal(ndpy.AdapterNotFoundError, "opening an adapter without existence") as said:
        ndpy.open_adapter("no-such-adapter")
    expect(lab.info.name in said[0], f"the refusal does not name {lab.info.name}: {said[0]}")
    return "refused, naming those that are there"


@check("enumerate", "port-active")
def port_active(lab: Lab) -> str:
    """A port is active."""
    info = lab.info
    if info.state != "active":
        raise Failure(f"the port is {info.state}; bring the link up: ip link set {info.netdev or 'NETDEV'} up")
    port = next(port for port in info.ports if port.state == "active")
    return f"port {port.number}, {port.link_layer}, MTU {port.mtu} of {port.max_mtu}, {port.netdev or 'no netdev'}"


@check("enumerate", "gids", needs=(Capability.GIDS,))
def gids(lab: Lab) -> str:
    """The active port has GIDs, distinct and of a type that fits the transport."""
    found = [gid for port in lab.info.ports if port.state == "active" for gid in port.gids]
    expect(found, "no GID on an active port")
    expect(len({(gid.value, gid.type) for gid in found}) == len(found), "a GID stands in the table twice")
    fitting = {"RoCE": {"RoCE v1", "RoCE v2"}, "iWARP": {"iWARP"}, "InfiniBand": {"IB", "InfiniBand"}}[
        lab.info.transport
    ]
    for gid in found:
        expect(gid.type in fitting, f"GID {gid.index} is of type {gid.type!r} on {lab.info.transport}")
        expect(len(gid.value) == 16, f"GID {gid.index} has {len(gid.value)} bytes")
    if lab.info.transport == "RoCE":
        values = {gid.value for gid in found}
        for address in lab.info.addresses:
            ip = ipaddress.ip_address(address.partition("%")[0])
            mapped = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
            expect(mapped in values, f"the address {address} has no GID, so RoCE cannot use it")
    return ", ".join(f"{gid.index} {gid.address} ({gid.type})" for gid in found[:4]) + (
        " ..." if len(found) > 4 else ""
    )


@check("enumerate", "limits")
def limits(lab: Lab) -> str:
    """The limits that the adapter reports are enough to work with."""
    info = lab.info
    least = {
        "max_registration_size": 1 << 20,
        "max_transfer_length": 1 << 20,
        "max_initiator_sge": 1,
        "max_receive_sge": 1,
        "max_inbound_read_limit": 1,
        "max_outbound_read_limit": 1,
        "max_receive_queue_depth": 64,
        "max_initiator_queue_depth": 64,
        "max_completion_queue_depth": 128,
        "max_caller_data": 16,
        "max_callee_data": 16,
    }
    for name, value in least.items():
        expect(getattr(info, name) >= value, f"{name} is {getattr(info, name)}, less than {value}")
    return (
        f"{info.max_initiator_sge} elements, inline {info.max_inline_data_size}, {info.max_outbound_read_limit} reads, "
        f"queues of {info.max_initiator_queue_depth}, completion queues of {info.max_completion_queue_depth}"
    )
