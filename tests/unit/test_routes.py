"""Which address of an adapter a connection comes from. What the system says is stood in for."""

from __future__ import annotations

import dataclasses
import errno
import socket
import sys
from types import SimpleNamespace

import pytest

import ndpy
from ndpy.vocabulary import routes
from ndpy.vocabulary.addresses import listening_addresses
from ndpy.vocabulary.routes import find_route

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Linux's errnos, and a host model that is not Windows'")

LO = socket.if_nametoindex("lo") if sys.platform != "win32" else 1
INTERFACES = {
    "eth0": [SimpleNamespace(family=socket.AF_INET, address="192.0.2.1", netmask="255.255.255.0")],
    "eth1": [
        SimpleNamespace(family=socket.AF_INET, address="198.51.100.1", netmask="255.255.255.0"),
        SimpleNamespace(family=socket.AF_INET6, address="2001:db8::1", netmask="ffff:ffff:ffff:ffff::"),
    ],
    "ppp0": [SimpleNamespace(family=socket.AF_INET, address="203.0.113.1", netmask=None)],
}


@dataclasses.dataclass
class System:
    """What the routes say: the source for a destination, or an errno; and the interface by which an own address leads
    there.
    """

    sources: dict[str, str | int] = dataclasses.field(default_factory=dict)
    interfaces: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def ask(self, _operation, family, destination, source=None):
        answer = self.sources.get(destination[0], errno.ENETUNREACH)
        return (None, answer) if isinstance(answer, int) else (routes._parse(answer), 0)

    def out_interface(self, family, source, destination):
        return self.interfaces.get((str(source), str(destination)), "")


@pytest.fixture
def system(monkeypatch) -> System:
    made = System()
    monkeypatch.setattr(routes, "_ask", made.ask)
    monkeypatch.setattr(routes, "_out_interface", made.out_interface)
    return made


def source_of(destination, *addresses):
    info = SimpleNamespace(name="card0", addresses=addresses)
    family, _, _, _, resolved = socket.getaddrinfo(destination, 4000, type=socket.SOCK_STREAM)[0]
    return find_route(info, int(family), resolved, lambda: INTERFACES).source


def test_the_routes_decide_and_not_how_addresses_look(system):
    system.sources["192.0.2.9"] = "198.51.100.1"
    assert source_of("192.0.2.9", "192.0.2.1", "198.51.100.1") == "198.51.100.1"


@pytest.mark.parametrize("answer", ["203.0.113.1", errno.ENETUNREACH])
def test_otherwise_an_address_whose_own_interface_leads_there(system, answer):
    system.sources["10.9.0.7"] = answer
    system.interfaces = {("192.0.2.1", "10.9.0.7"): "eth1", ("198.51.100.1", "10.9.0.7"): "eth1"}
    assert source_of("10.9.0.7", "192.0.2.1", "198.51.100.1") == "198.51.100.1"


def test_otherwise_one_whose_subnet_has_it(system):
    system.sources["198.51.100.9"] = system.sources["203.0.113.9"] = "192.0.2.1"
    assert source_of("198.51.100.9", "203.0.113.1", "198.51.100.1") == "198.51.100.1"
    with pytest.raises(
        ndpy.AddressUnreachableError, match=r"leaves from 192\.0\.2\.1 of eth0, which is not an address of card0"
    ):
        source_of("203.0.113.9", "203.0.113.1", "198.51.100.1")


def test_of_interfaces_with_one_address_it_is_the_one_that_leads_to_its_subnet(system):
    def have(mask):
        return [SimpleNamespace(family=socket.AF_INET, address="192.0.2.1", netmask=mask)]

    both = {**INTERFACES, "tunnel0": have("255.255.255.255"), "bond0": have("255.255.255.0"), "eth0": []}
    # The second address of the subnet is this machine's too.
    system.interfaces = {("192.0.2.1", "192.0.2.2"): "lo", ("192.0.2.1", "192.0.2.3"): "bond0"}
    assert routes.interface_from("192.0.2.1", both) == "bond0"
    system.interfaces = {("192.0.2.1", "192.0.2.2"): "eth7"}
    assert routes.interface_from("192.0.2.1", both) == ""
    assert routes.interface_from("192.0.2.1", {"tunnel0": have("255.255.255.255")}) == ""
    assert routes.interface_from("2001:db8::1", INTERFACES) == ""
    system.interfaces = {("2001:db8::1", "2001:db8::2"): "eth1", ("fe80::1", "fe80::2"): "eth1"}
    assert routes.interface_from("2001:db8::1", INTERFACES) == "eth1"
    near = SimpleNamespace(family=socket.AF_INET6, address="fe80::1", netmask="ffff:ffff:ffff:ffff::")
    assert routes.interface_from("fe80::1", {"eth1": [near]}) == ""


def test_a_subnet_counts_for_nothing_where_the_routes_forbid_it(system):
    for number, why in ((errno.EINVAL, "blackhole"), (errno.EACCES, "prohibit"), (errno.EHOSTUNREACH, "unreachable")):
        system.sources["192.0.2.9"] = number
        with pytest.raises(ndpy.AddressUnreachableError, match=f'the one to it is (a )?"{why}"') as caught:
            source_of("192.0.2.9", "192.0.2.1")
        assert caught.value.native == number


def test_addresses_of_this_machine_and_groups_need_no_route(system):
    # Its own, with and without an answer of the system.
    assert source_of("198.51.100.1", "192.0.2.1", "198.51.100.1") == "198.51.100.1"
    # Another adapter's.
    system.sources["203.0.113.1"] = "203.0.113.1"
    assert source_of("203.0.113.1", "192.0.2.1", "198.51.100.1") == "192.0.2.1"
    assert source_of("239.1.2.3", "192.0.2.1", "198.51.100.1") == "192.0.2.1"
    # The other end of a cable between two adapters of this machine.
    system.sources["198.51.100.2"] = "198.51.100.2"
    assert source_of("198.51.100.2", "192.0.2.1", "198.51.100.1") == "198.51.100.1"


def test_a_family_that_the_adapter_does_not_have_is_named(system):
    with pytest.raises(
        ndpy.AddressUnreachableError, match=r"card0 has no IPv6 address .* its addresses are 192\.0\.2\.1"
    ):
        source_of("2001:db8::9", "192.0.2.1")
    with pytest.raises(ndpy.AddressUnreachableError, match="its addresses are none"):
        source_of("192.0.2.9")


def test_link_local_addresses_are_those_of_the_link(system):
    near = f"fe80::1%{LO}"
    system.sources["fe80::9"] = near
    assert source_of(f"fe80::9%{LO}", "2001:db8::1", near) == near
    # Without a scope it is the only link that there is.
    assert source_of("fe80::9", "2001:db8::1", near) == near
    with pytest.raises(ndpy.AddressUnreachableError, match=r"as in fe80::9%eth0; card0 has no such address"):
        source_of("fe80::9", "2001:db8::1")
    # The routes choose another link's.
    with pytest.raises(ndpy.AddressUnreachableError, match="which is not an address of card0"):
        source_of(f"fe80::9%{LO}", "2001:db8::1", "fe80::1%4000000000")


def test_the_kernel_answers_what_it_is_asked():
    """Without a stand-in."""
    info = SimpleNamespace(name="card0", addresses=("127.0.0.1", "::1"))
    for host in ("127.0.0.1", "127.9.9.9"):
        assert find_route(info, socket.AF_INET, (host, 4000), dict).source == "127.0.0.1"
    loopback = routes.plain_address("127.0.0.1")
    assert routes._out_interface(socket.AF_INET, loopback, loopback) == "lo"
    assert routes._out_interface(socket.AF_INET6, *[routes.plain_address("::1")] * 2) == "lo"
    assert routes._out_interface(socket.AF_INET, routes.plain_address("240.0.0.1"), loopback) == ""


@pytest.mark.parametrize(
    ("addresses", "host", "places"),
    [
        ([], "", ["0.0.0.0"]),
        (["192.0.2.1"], "", ["192.0.2.1"]),
        (["fe80::1%eth0"], "", ["fe80::1%eth0"]),
        (["192.0.2.1", "2001:db8::1", "fe80::1%eth0"], "*", ["192.0.2.1", "2001:db8::1", "fe80::1%eth0"]),
        (["192.0.2.1", "127.0.0.1"], "", ["0.0.0.0"]),
        (["192.0.2.1", "127.0.0.1", "fe80::1%eth0"], "", ["::"]),
        ([f"192.0.2.{number}" for number in range(1, 20)], "", ["0.0.0.0"]),
        (["192.0.2.1", "2001:db8::1"], "0.0.0.0", ["192.0.2.1"]),
        (["192.0.2.1", "2001:db8::1"], "192.0.2.1", ["192.0.2.1"]),
    ],
)
def test_a_listener_is_at_all_addresses(addresses, host, places):
    assert listening_addresses(addresses, (host, 4000)) == [(place, 4000) for place in places]
