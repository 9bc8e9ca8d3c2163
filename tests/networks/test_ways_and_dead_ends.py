"""Addresses, routes and names on two hosts: which are served, which are taken, and what is said of those that lead
nowhere.
"""

from __future__ import annotations

import sys

import pytest
from kit.deadlines import patient

if sys.platform != "linux":
    pytest.skip("network namespaces are Linux's", allow_module_level=True)

from networks.namespaces import Host, Network

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def hosts(network: Network) -> tuple[Host, Host, Host]:
    """Two hosts and the router between them. The far host has more addresses than one."""
    addresses = "172.17.0.2", "172.17.0.1", "10.0.0.1", "10.0.0.7"
    return network.behind_a_router(*addresses, near_length=16, far_length=24)


def test_a_listener_takes_peers_of_all_addresses(network):
    near, far = network.host("near"), network.host("far")
    network.cable(near, "eth0", far, "wire7")
    for host, name, own in ((near, "eth0", 1), (far, "wire7", 2)):
        host.ip(
            f"address flush dev {name}",
            *(f"address add {own_address} dev {name}" for own_address in (f"192.0.2.{own}/24", f"198.51.100.{own}/24")),
            *(f"address add {own_address}/64 dev {name}" for own_address in (f"2001:db8::{own}", f"fe80::{own}")),
        )
    server = far.call("networks.ends:serve", "")
    for host in ("192.0.2.2", "198.51.100.2", "2001:db8::2", "fe80::2%eth0"):
        near.call("networks.ends:exchange", host, server.address[1])
    assert list(server.peers) == ["192.0.2.1", "198.51.100.1", "2001:db8::1", "fe80::1%wire7"]
    # An address that the machine got later is soft0's too, at both ends.
    near.call("networks.ends:open_early")
    far.ip("address add 203.0.113.2/24 dev wire7")
    near.ip("address add 203.0.113.1/24 dev eth0")
    assert near.call("networks.ends:exchange", "203.0.113.2", server.address[1])[0] == "203.0.113.1"


def test_link_local_addresses_are_taken_by_interface(network):
    """Two interfaces of a host have the same one. Without a scope nothing is guessed."""
    near, far = network.two_links()
    assert near.call("networks.ends:addresses")[-2:] == ["fe80::1%eth0", "fe80::1%eth1"]
    one = far.call("networks.ends:serve", "fe80::2%eth0")
    port = one.address[1]
    # The same port at the same address of the other interface is another one.
    other = far.call("networks.ends:serve", "fe80::2%eth1", port)
    assert near.call("networks.ends:exchange", "fe80::2%eth1", port) == ("fe80::1%eth1", "fe80::2%eth1")
    assert near.call("networks.ends:exchange", "fe80::2%eth0", port) == ("fe80::1%eth0", "fe80::2%eth0")
    assert (list(one.peers), list(other.peers)) == (["fe80::1%eth0"], ["fe80::1%eth1"])
    kind, message = near.call("networks.ends:refusal", "fe80::2", port, 5)
    assert kind == "AddressUnreachableError"
    assert "as in fe80::2%eth0" in message
    assert "fe80::1%eth0, fe80::1%eth1" in message
    # On one link there is only one way.
    near.ip("link set eth0 down")
    assert near.call("networks.ends:exchange", "fe80::2", port)[0] == "fe80::1%eth1"


def test_endpoints_by_hand_use_the_link_of_their_gid(network):
    near, far = network.two_links()
    pairs = []
    for (own, _), (other, _) in zip(
        *([gid for gid in host.call("networks.ends:gids") if gid[1].startswith("fe80")] for host in (near, far)),
        strict=True,
    ):
        client, server = near.call("networks.ends:by_hand", own), far.call("networks.ends:by_hand", other)
        server.connect(client.endpoint)
        client.connect(server.endpoint)
        pairs.append((client, server))
    # Each pair has a link of its own.
    near.ip("link set eth1 down")
    client, server = pairs[0]
    client.speak()
    server.answer()
    client.hear()


def test_an_adapter_that_the_routes_do_not_choose_is_used_by_its_own(network):
    """The default route leads through another interface.
    What comes from the adapter's address has a table of its own.
    """
    near, router, far = (network.host(name) for name in ("near", "router", "far"))
    for name in ("eth0", "eth1"):
        network.cable(near, name, router, name)
    network.cable(router, "eth2", far, "eth0")
    router.ip(
        "address add 10.1.0.254/24 dev eth0", "address add 10.2.0.254/24 dev eth1", "address add 10.9.0.254/24 dev eth2"
    )
    router.forward()
    far.ip("address add 10.9.0.7/24 dev eth0", "route add default via 10.9.0.254")
    near.ip(
        "address add 10.1.0.1/24 dev eth0",
        "address add 10.2.0.1/24 dev eth1",
        "route add default via 10.1.0.254",
        "route add default via 10.2.0.254 table 102",
    )
    server = far.call("networks.ends:serve", "")
    near.call("networks.ends:restrict", "10.2.0.1")
    kind, message = near.call("networks.ends:refusal", "10.9.0.7", server.address[1], 5)
    assert kind == "AddressUnreachableError"
    assert (
        "leaves from 10.1.0.1 of eth0, which is not an address of soft0; `ip route get 10.9.0.7` shows the route"
        in message
    )
    near.ip("rule add from 10.2.0.1 lookup 102")
    assert near.call("networks.ends:exchange", "10.9.0.7", server.address[1])[0] == "10.2.0.1"
    assert list(server.peers) == ["10.2.0.1"]
    # A peer in the adapter's own subnet needs no rule.
    near.ip("rule delete from 10.2.0.1 lookup 102", "route add 10.2.0.254 via 10.1.0.254")
    assert near.call("networks.ends:refusal", "10.2.0.254", 9, 5)[0] == "ConnectionRefusedError"


def test_refusals_and_silence_are_told_apart(hosts):
    near, router, far = hosts
    server = far.call("networks.ends:serve", "10.0.0.7")
    port = server.address[1]
    kind, message = near.call("networks.ends:refusal", "10.0.0.7", 9, patient(10.0))
    assert (kind, "nobody listens there" in message) == ("ConnectionRefusedError", True)
    # A firewall that drops.
    router.ip("route add blackhole 10.0.0.7")
    assert near.call("networks.ends:refusal", "10.0.0.7", port, 0.5)[0] == "TimeoutError"
    router.ip("route delete blackhole 10.0.0.7")
    # One that says so, and a router that knows no way.
    for kind in ("prohibit", "unreachable"):
        router.ip(f"route add {kind} 10.0.0.7")
        told, message = near.call("networks.ends:refusal", "10.0.0.7", port, patient(10.0))
        assert (told, "a router or a firewall on the way" in message) == ("AddressUnreachableError", True), message
        router.ip(f"route delete {kind} 10.0.0.7")
    # This machine itself knows none.
    for kind in ("prohibit", "unreachable", "blackhole"):
        near.ip(f"route add {kind} 10.0.0.7")
        told, message = near.call("networks.ends:refusal", "10.0.0.7", port, patient(10.0))
        assert (told, f'no route to 10.0.0.7 (the one to it is {"a " * (kind == "blackhole")}"{kind}")' in message) == (
            "AddressUnreachableError",
            True,
        ), message
        near.ip(f"route delete {kind} 10.0.0.7")
    near.call("networks.ends:exchange", "10.0.0.7", port)


def test_the_third_address_of_a_name_works(hosts, tmp_path):
    near, router, far = hosts
    far.ip("address add 10.0.0.8/24 dev eth0")
    server = far.call("networks.ends:serve", "10.0.0.7")
    serving = far.call("networks.ends:serve_aio", "10.0.0.7")
    router.ip("route add unreachable 10.0.0.66")
    wanted = ["10.0.0.1", "10.0.0.66", "10.0.0.7", "10.0.0.8"]
    names = tmp_path / "hosts"
    names.write_text("".join(f"{host} four.example\n" for host in wanted))
    near.hosts_file = names
    assert near.call("networks.ends:lookup", "four.example") == wanted
    assert near.call("networks.ends:exchange", "four.example", server.address[1]) == ("172.17.0.2", "10.0.0.7")
    near.call("networks.ends:exchange_aio", "four.example", serving)
