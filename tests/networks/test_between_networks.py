"""Two hosts that reach each other in ways that a tidy machine does not have: routers, several subnets, scopes, small
packets.

Each network is used by connectors, by ndpy.aio, by the smoke test with an end on each host, and by ndpy perf.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

if sys.platform != "linux":
    pytest.skip("network namespaces are Linux's", allow_module_level=True)

from networks.namespaces import Host, Network

pytestmark = pytest.mark.timeout(120)


@dataclass
class Ends:
    """Two hosts. server: the addresses by which the near one reaches the far one, with the address that it must come
    from.
    """

    near: Host
    far: Host
    server: dict[str, str]


IPV6 = "2001:db8:1::2", "2001:db8:1::1", "2001:db8:2::1", "2001:db8:2::7"


def behind_a_router(network: Network) -> Ends:
    """The address with the most bits in common with the destination is not the one to come from."""
    addresses = "172.17.0.2", "172.17.0.1", "10.0.0.1", "10.0.0.7"
    near, _, far = network.behind_a_router(*addresses, near_length=16, far_length=24)
    return Ends(near, far, {"10.0.0.7": "172.17.0.2"})


def two_subnets(network: Network) -> Ends:
    """Two cables. Behind the second one is a router to a network whose addresses are more like the first one's."""
    near, router, far = (network.host(name) for name in ("near", "router", "far"))
    network.cable(near, "eth0", far, "eth0")
    network.cable(near, "eth1", router, "eth0")
    network.cable(router, "eth1", far, "eth1")
    near.ip(
        "address add 10.1.0.1/24 dev eth0",
        "address add 192.168.7.1/24 dev eth1",
        "route add 10.1.1.0/24 via 192.168.7.254",
    )
    router.ip("address add 192.168.7.254/24 dev eth0", "address add 10.1.1.254/24 dev eth1")
    router.forward()
    far.ip(
        "address add 10.1.0.2/24 dev eth0",
        "address add 10.1.1.2/24 dev eth1",
        "route add 192.168.7.0/24 via 10.1.1.254",
    )
    return Ends(near, far, {"10.1.1.2": "192.168.7.1", "10.1.0.2": "10.1.0.1"})


def ipv6_only(network: Network) -> Ends:
    near, _, far = network.behind_a_router(*IPV6, near_length=64, far_length=64)
    return Ends(near, far, {"2001:db8:2::7": "2001:db8:1::2"})


def link_local(network: Network) -> Ends:
    """Nothing but link-local addresses. Both interfaces of a host have the same one, as two VLANs of a card have."""
    near, far = (network.host(name) for name in ("near", "far"))
    network.cable(near, "eth0", far, "wire7")
    network.cable(near, "eth0.100", far, "wire9")
    for host, own, names in ((near, "fe80::1", ("eth0", "eth0.100")), (far, "fe80::2", ("wire7", "wire9"))):
        host.ip(
            *(f"address flush dev {name}" for name in names), *(f"address add {own}/64 dev {name}" for name in names)
        )
    return Ends(near, far, {f"fe80::2%{name}": f"fe80::1%{name}" for name in ("eth0.100", "eth0")})


def there_and_back(network: Network) -> Ends:
    """Packets go by one router and come back by the other."""
    near, there, back, far = (network.host(name) for name in ("near", "there", "back", "far"))
    for router, own, name in ((there, "1", "eth0"), (back, "2", "eth1")):
        network.cable(near, name, router, "near")
        network.cable(router, "far", far, name)
        router.ip(f"address add 10.{own}.0.254/24 dev near", f"address add 10.{own}.1.254/24 dev far")
        router.forward()
        for host in (near, far, router):
            host.set("net/ipv4/conf/all/rp_filter", 0)
            host.set("net/ipv4/conf/default/rp_filter", 0)
    near.ip(
        "address add 10.1.0.1/24 dev eth0", "address add 10.2.0.1/24 dev eth1", "route add 10.1.1.0/24 via 10.1.0.254"
    )
    far.ip(
        "address add 10.1.1.7/24 dev eth0", "address add 10.2.1.7/24 dev eth1", "route add 10.1.0.0/24 via 10.2.1.254"
    )
    back.ip("route add 10.1.0.0/24 via 10.2.0.1")
    return Ends(near, far, {"10.1.1.7": "10.1.0.1"})


def small_packets(network: Network) -> Ends:
    """Between the hosts is a link with the smallest MTU of IPv6."""
    near, router, far = network.behind_a_router(*IPV6, near_length=64, far_length=64)
    router.ip("link set eth1 mtu 1280")
    far.ip("link set eth0 mtu 1280")
    return Ends(near, far, {"2001:db8:2::7": "2001:db8:1::2"})


@pytest.fixture(params=[behind_a_router, two_subnets, ipv6_only, link_local, there_and_back, small_packets])
def ends(request: pytest.FixtureRequest, network: Network) -> Ends:
    made: Ends = request.param(network)
    return made


def test_connections_come_from_where_the_routes_say(ends):
    far = ends.far.call("networks.ends:serve", "")
    for server, own in ends.server.items():
        assert ends.near.call("networks.ends:exchange", server, far.address[1])[0] == own
    seen = [peer.partition("%")[0] for peer in list(far.peers)]
    assert seen == [own.partition("%")[0] for own in ends.server.values()]
    # ndpy.aio
    port = ends.far.call("networks.ends:serve_aio", "")
    for server in ends.server:
        ends.near.call("networks.ends:exchange_aio", server, port)


def test_the_commands_work_with_an_end_on_each_host(ends):
    host = next(iter(ends.server))
    there = host.replace("%eth0.100", "%wire9")
    smoke = ends.far.ndpy("smoke", "--serve", "soft0", "--listen", ":7001")
    perf = ends.far.ndpy("perf", "--serve", "soft0", "--listen", f"[{there}]:7002")
    smoke.wait_for("Press Ctrl-C")
    near = ends.near.ndpy("smoke", "soft0", "--peer", f"[{host}]:7001", "--only", "link", "--only", "connect")
    verdict = near.finish()
    assert verdict.status == 0, verdict.out
    assert f"PASS  connect/ipv{6 if ':' in host else 4}" in verdict.out
    perf.wait_for("Press Ctrl-C")
    near = ends.near.ndpy("perf", "write_lat", "soft0", "--peer", f"[{host}]:7002", "--iterations", "50")
    verdict = near.finish()
    assert verdict.status == 0, verdict.out
