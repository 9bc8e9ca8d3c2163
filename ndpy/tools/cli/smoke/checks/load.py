"""Groups load and enumerate: the libraries load, and the adapter is described correctly."""

from __future__ import annotations

import platform

import ndpy
from ndpy import Capability
from ndpy.tools.cli.smoke.catalog import Failure, check
from ndpy.tools.cli.smoke.testbed import Testbed, expect, refusal
from ndpy.vocabulary.addresses import plain_address
from ndpy.vocabulary.info import port_in_use


@check("load", "library")
def library(testbed: Testbed) -> str:
    """The provider's libraries can be loaded, and list adapters."""
    count = len(ndpy.list_adapters())
    return f"{count} adapter{'s' if count != 1 else ''}; ndpy {ndpy.__version__}, kernel {platform.release()}"


@check("load", "open-twice")
def open_twice(testbed: Testbed) -> str:
    """The adapter can be opened twice, and closing one does not affect the other."""
    with ndpy.open_adapter(testbed.info.name) as second:
        second.register(bytearray(4096)).close()
    testbed.adapter.register(bytearray(4096)).close()
    return "both work, each with its own regions"


@check("load", "peer")
def peer(testbed: Testbed) -> str:
    """A second process opens the adapter and answers."""
    description = testbed.peer.description
    return (
        f"{testbed.peer.where}, {description.adapter} ({description.driver}) on {description.system}, ndpy "
        f"{description.version}"
    )


@check("enumerate", "listed")
def listed(testbed: Testbed) -> str:
    """The list of adapters contains this one, with the same properties as the open adapter."""
    found = [info for info in ndpy.list_adapters() if info.name == testbed.info.name]
    expect(len(found) == 1, f"{testbed.info.name} is listed {len(found)} times")
    expect(
        found[0].capabilities == testbed.info.capabilities,
        f"listed with {found[0].capabilities.names()}, opened with {testbed.info.capabilities.names()}",
    )
    expect(
        set(testbed.info.addresses) <= set(found[0].addresses),
        "the open adapter has addresses that the listed one has not",
    )
    return f"{testbed.info.name}: {', '.join(testbed.info.capabilities.names()) or 'no capabilities'}"


@check("enumerate", "by-address")
def by_address(testbed: Testbed) -> str:
    """Opening by address finds this adapter, for each of its addresses."""
    expect(
        testbed.info.addresses,
        f"{testbed.info.name} has no IP address. Give {testbed.info.netdev or 'its interface'} one",
    )
    for address in testbed.info.addresses:
        with ndpy.open_adapter(address) as same:
            expect(same.info.name == testbed.info.name, f"{address} opens {same.info.name}")
    return ", ".join(testbed.info.addresses)


@check("enumerate", "unknown-name")
def unknown_name(testbed: Testbed) -> str:
    """Opening an unknown name fails, with a message that lists the adapters."""
    with refusal(ndpy.AdapterNotFoundError, "opening an adapter that does not exist") as said:
        ndpy.open_adapter("no-such-adapter")
    expect(testbed.info.name in said[0], f"the refusal does not name {testbed.info.name}: {said[0]}")
    return "refused, with the names of the adapters"


@check("enumerate", "port-active")
def port_active(testbed: Testbed) -> str:
    """The adapter has an active port."""
    info = testbed.info
    if info.state != "active":
        raise Failure(f"the port is {info.state}. Bring the link up: ip link set {info.netdev or 'NETDEV'} up")
    port = port_in_use(info)
    if port is None:
        raise Failure("it has no ports")
    return f"port {port.number}, {port.link_layer}, MTU {port.mtu} of {port.max_mtu}, {info.netdev or 'no netdev'}"


@check("enumerate", "gids", needs=(Capability.GIDS,))
def gids(testbed: Testbed) -> str:
    """The port in use has GIDs. They differ, and their type fits the transport."""
    port = port_in_use(testbed.info)
    found = port.gids if port is not None else ()
    expect(found, "no GID on the port in use")
    # Interfaces on one card may have the same link-local address.
    own = {(gid.value, gid.type, gid.netdev) for gid in found}
    expect(len(own) == len(found), "the table has the same GID twice")
    fitting = {"RoCE": {"RoCE v1", "RoCE v2"}, "iWARP": {"iWARP"}, "InfiniBand": {"IB", "InfiniBand"}}.get(
        testbed.info.transport
    )
    for gid in found:
        expect(
            fitting is None or gid.type in fitting,
            f"GID {gid.index} is of type {gid.type!r} on {testbed.info.transport}",
        )
        expect(len(gid.value) == 16, f"GID {gid.index} has {len(gid.value)} bytes")
    if testbed.info.transport == "RoCE":
        values = {gid.value for port in testbed.info.ports for gid in port.gids}
        for address in testbed.info.addresses:
            ip = plain_address(address)
            mapped = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
            expect(mapped in values, f"the address {address} has no GID, so RoCE cannot use it")
    return ", ".join(f"{gid.index} {gid.address} ({gid.type})" for gid in found[:4]) + (
        " ..." if len(found) > 4 else ""
    )


@check("enumerate", "limits")
def limits(testbed: Testbed) -> str:
    """The limits that the adapter reports are high enough for most programs."""
    info = testbed.info
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
