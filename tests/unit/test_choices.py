"""The choice among several adapters, ports or GIDs, and the explanation of a path's failure."""

from __future__ import annotations

import dataclasses
import ipaddress
import types

import pytest
from kit import linux_only as linux_only

import ndpy
from ndpy import Status
from ndpy.platforms import choose
from ndpy.platforms.verbs.endpoint import active_port, explain, local_endpoint_of, path_mtu
from ndpy.platforms.verbs.native_calls import lib
from ndpy.tools.doctor.linux import routable
from ndpy.vocabulary.addresses import Reach, reach
from ndpy.vocabulary.endpoint import MTUS, Endpoint
from ndpy.vocabulary.info import Gid
from ndpy.vocabulary.quirks import quirks_of

V1 = Gid(0, bytes(10) + b"\xff\xff\xc0\x00\x02\x01", "RoCE v1", "192.0.2.1")
LINK_LOCAL = Gid(1, b"\xfe\x80" + bytes(13) + b"\x01", "RoCE v2", "fe80::1")
IPV6 = Gid(2, b"\x20\x01\x0d\xb8" + bytes(11) + b"\x01", "RoCE v2", "2001:db8::1")
IPV4 = Gid(3, bytes(10) + b"\xff\xff\xc0\x00\x02\x01", "RoCE v2", "192.0.2.1")


@pytest.fixture
def info(fake):
    with fake.open() as adapter:
        return dataclasses.replace(adapter.info, addresses=("192.0.2.1", "fe80::1%eth0"), transport="RoCE")


def with_ports(info, *ports, **others):
    """A stand-in for an adapter with these ports. It has what endpoints look at, and uses port 2."""
    first = info.ports[0]
    made = tuple(dataclasses.replace(first, **{"number": number, **port}) for number, port in enumerate(ports, 1))
    info = dataclasses.replace(info, ports=made, **others)
    states = dict.fromkeys((1, 2), "active")
    return types.SimpleNamespace(info=info, _port=2, states=states, _state_of_port=states.get, _quirks=quirks_of(info))


# ---- adapters ----


def test_an_adapter_is_named_or_the_first_that_is_active_or_serves_the_address(info):
    down = dataclasses.replace(info, name="a", state="down", addresses=())
    other = dataclasses.replace(info, name="b", state="active", addresses=("192.0.2.2", "2001:db8::2"))
    third = dataclasses.replace(info, name="c", state="active")
    adapters = [down, other, third]
    assert choose(adapters, None) is other
    assert [choose(adapters, name) for name in "abc"] == adapters
    for address in ("192.0.2.2", "2001:db8::2", "2001:db8:0::2"):
        assert choose(adapters, address) is other
    for address in ("192.0.2.1", "fe80::1", "fe80::1%eth0"):
        assert choose(adapters, address) is third
    with pytest.raises(ndpy.AdapterNotFoundError, match="fe80::1%eth1"):
        choose(adapters, "fe80::1%eth1")


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (None, ["no adapter has an active port", "a (down; no address)"]),
        ("z", ["no adapter 'z'", "a (down; no address)"]),
        ("192.0.2.9", ["no adapter serves the address 192.0.2.9", "a (down; no address)"]),
    ],
)
def test_where_none_can_be_chosen_those_that_there_are_are_named(info, which, words):
    down = dataclasses.replace(info, name="a", state="down", addresses=())
    with pytest.raises(ndpy.AdapterNotFoundError) as caught:
        choose([down], which)
    assert [part for part in words if part not in str(caught.value)] == []
    with pytest.raises(ndpy.AdapterNotFoundError) as caught:
        choose([], which)
    assert str(caught.value).startswith(f"{f'no adapter {which!r}: ' if which else ''}this machine has no RDMA adapter")


# ---- endpoints ----


def test_path_mtus_have_the_codes_of_the_library():
    assert [getattr(lib, f"IBV_MTU_{mtu}") for mtu in MTUS] == [1, 2, 3, 4, 5]
    for mtu in (0, *MTUS):
        assert Endpoint(0, 1, 1, bytes(16), mtu=mtu).mtu == mtu
    for mtu in (1, 128, 513, 8192):
        with pytest.raises(ValueError, match="512, 1024"):
            Endpoint(0, 1, 1, bytes(16), mtu=mtu)


def test_an_endpoint_says_nothing_that_it_was_not_told():
    told = Endpoint(1, 2, 3, IPV4.value)
    assert (told.gid_index, told.gid_type, told.mtu, told.port, told.inbound_read_limit) == (0, "", 0, 1, None)
    assert str(told) == "QPN 0x2 at GID 192.0.2.1, LID 1, MTU unknown"
    assert str(dataclasses.replace(told, gid_type="RoCE v2", gid_index=3, mtu=1024)) == (
        "QPN 0x2 at GID 192.0.2.1, RoCE v2, index 3, LID 1, MTU 1024"
    )


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ((V1, LINK_LOCAL, IPV6, IPV4), IPV4),
        ((V1, LINK_LOCAL, IPV6), IPV6),
        ((V1, LINK_LOCAL), LINK_LOCAL),
        ((V1,), V1),
        ((dataclasses.replace(IPV4, index=9), IPV4), IPV4),
        ((dataclasses.replace(V1, type="of another kind", index=0), V1), V1),
    ],
)
def test_the_gid_is_the_best_or_the_one_that_is_asked_for(info, gids, best):
    adapter = with_ports(info, {"gids": ()}, {"gids": gids, "lid": 5, "mtu": 2048})
    made = local_endpoint_of(adapter, 7, None, None)
    assert (made.gid, made.gid_index, made.gid_type) == (best.value, best.index, best.type)
    assert (made.port, made.lid, made.mtu, made.qp_number) == (2, 5, 2048, 7)
    assert made.inbound_read_limit == info.max_inbound_read_limit
    for gid in gids:
        assert local_endpoint_of(adapter, 7, gid.index, 0x1234567).gid == gid.value
    assert local_endpoint_of(adapter, 7, None, 0x1234567).psn == 0x234567
    numbers = {local_endpoint_of(adapter, 7, None, None).psn for _ in range(50)}
    assert len(numbers) > 1
    assert max(numbers) < 1 << 24


def test_a_gid_is_named_by_its_address(info):
    """Of those with one address, the best by rank."""
    adapter = with_ports(info, {"gids": ()}, {"gids": (V1, LINK_LOCAL, IPV6, IPV4)})
    for wanted, gid in (("192.0.2.1", IPV4), ("2001:DB8:0::1", IPV6), ("fe80::1", LINK_LOCAL), (0, V1)):
        assert local_endpoint_of(adapter, 7, wanted, None).gid_index == gid.index
    for name in ("192.0.2.2", "eth0", "fe80::1%eth0"):
        known = r"it has 0 \(192\.0\.2\.1, RoCE v1\), 1"
        with pytest.raises(ndpy.AddressUnreachableError, match=rf"has no GID of {name}; {known}"):
            local_endpoint_of(adapter, 7, name, None)


def test_a_gid_is_named_by_its_interface(info):
    """Two interfaces have the same link-local address. Without one that is named, the best is taken."""
    of_interfaces = [(LINK_LOCAL, "eth0"), (LINK_LOCAL, "lo"), (IPV6, "lo")]
    gids = tuple(dataclasses.replace(gid, index=place, netdev=name) for place, (gid, name) in enumerate(of_interfaces))
    adapter = with_ports(info, {"gids": ()}, {"gids": gids})
    for wanted, index in (("eth0", 0), ("lo", 2), ("fe80::1%lo", 1), ("fe80::1%eth0", 0), ("fe80::1", 0)):
        assert local_endpoint_of(adapter, 7, wanted, None).gid_index == index
    with pytest.raises(ndpy.AddressUnreachableError, match=r"GID of fe80::1%eth9; it has 0 \(fe80::1, RoCE v2, eth0\)"):
        local_endpoint_of(adapter, 7, "fe80::1%eth9", None)


def test_an_endpoint_that_cannot_be_says_what_there_is(info):
    adapter = with_ports(info, {}, {"gids": (V1, IPV4)})
    with pytest.raises(ndpy.AddressUnreachableError, match=r"index 7; it has 0 .*RoCE v1.*, 3 .*RoCE v2"):
        local_endpoint_of(adapter, 7, 7, None)
    adapter = with_ports(info, {}, {"gids": ()})
    with pytest.raises(ndpy.AddressUnreachableError, match="index 0; it has none"):
        local_endpoint_of(adapter, 7, 0, None)
    with pytest.raises(ndpy.AddressUnreachableError, match=r"give .* an IP address"):
        local_endpoint_of(adapter, 7, None, None)
    with pytest.raises(ndpy.UnsupportedError, match="librdmacm"):
        local_endpoint_of(with_ports(info, {"gids": (IPV4,)}, transport="iWARP"), 7, None, None)


def test_infiniband_needs_no_gid(info):
    made = local_endpoint_of(with_ports(info, {}, {"link_layer": "InfiniBand", "lid": 5}), 7, None, None)
    assert (made.lid, made.gid, made.gid_index, made.gid_type) == (5, bytes(16), 0, "")


def test_the_port_is_the_one_in_use_or_the_first(info):
    adapter = with_ports(info, {}, {}, {})
    assert active_port(adapter).number == 2
    adapter._port = 9
    assert active_port(adapter).number == 1


def test_the_path_mtu_is_the_lesser_of_those_known():
    def end(mtu):
        return Endpoint(1, 2, 3, bytes(16), mtu=mtu)

    assert [path_mtu(end(1024), end(mtu)) for mtu in (512, 2048, 0)] == [512, 1024, 1024]


@pytest.mark.parametrize("transport", ["RoCE", "InfiniBand", "iWARP"])
def test_a_lost_request_is_explained_with_both_ends_and_the_transports_causes(info, transport):
    adapter = with_ports(info, {}, {}, transport=transport)
    ends = Endpoint(1, 2, 3, bytes(16)), Endpoint(1, 4, 3, bytes(16))
    addresses = ("192.0.2.1", 1), ("192.0.2.2", 4)
    told = explain(adapter, Status.IO_TIMEOUT, ends, None, 1024)
    assert told.startswith(f"from {ends[0]} to {ends[1]}, with path MTU 1024 on this end; likely causes:")
    assert ("4791" in told) == (transport == "RoCE")
    told = explain(adapter, Status.IO_TIMEOUT, None, addresses, 0)
    assert told.startswith("from 192.0.2.1 port 1 to 192.0.2.2 port 4 on fake0; likely causes:")
    assert explain(adapter, Status.IO_TIMEOUT, None, None, 0).startswith("likely causes:")
    adapter.states[2] = "down"
    other = dataclasses.replace(ends[0], port=2), ends[1]
    assert explain(adapter, Status.IO_TIMEOUT, other, None, 1024).startswith("port 2 of fake0 is down")
    assert explain(adapter, Status.IO_TIMEOUT, ends, None, 1024).startswith(f"from {ends[0]}")
    assert explain(adapter, Status.IO_TIMEOUT, None, None, 1024).startswith("port 2 of fake0 is down")


def test_a_lost_connection_is_explained_by_the_port_of_its_address(info):
    leads = [ndpy.NetworkInterface(f"eth{n}", "ethernet", None, None, (f"192.0.{n}.1",)) for n in (1, 2)]
    adapter = with_ports(info, {"interfaces": leads[:1]}, {"interfaces": leads[1:]})
    adapter.states[2] = "down"
    addresses = [((f"192.0.{n}.1", 1), (f"192.0.{n}.2", 4)) for n in (1, 2)]
    assert explain(adapter, Status.IO_TIMEOUT, None, addresses[0], 0).startswith("from 192.0.1.1 port 1")
    assert explain(adapter, Status.IO_TIMEOUT, None, addresses[1], 0).startswith("port 2 of fake0 is down")


def test_a_cancelled_request_names_the_ends_of_its_connection(info):
    adapter = with_ports(info, {}, {})
    assert explain(adapter, Status.CANCELED, None, None, 0) == ""
    told = explain(adapter, Status.CANCELED, None, (("192.0.2.1", 1), ("192.0.2.2", 4)), 1024)
    assert told == "connection from 192.0.2.1 port 1 to 192.0.2.2 port 4 on fake0"


@pytest.mark.parametrize("status", list(Status))
def test_another_mtu_is_suspected_where_the_program_connected_the_ends(info, status):
    adapter = with_ports(info, {}, {})
    ends = Endpoint(1, 2, 3, bytes(16)), Endpoint(1, 4, 3, bytes(16))
    suspects = (Status.DATA_OVERRUN, Status.BUFFER_OVERFLOW, Status.REMOTE_ERROR)
    if status not in (Status.IO_TIMEOUT, Status.CANCELED):
        assert ("another path MTU" in explain(adapter, status, ends, None, 1024)) == (status in suspects)
        assert explain(adapter, status, None, (("192.0.2.1", 1), ("192.0.2.2", 4)), 1024) == ""


# ---- from where an address is reached ----


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", Reach.ROUTABLE),
        ("2001:db8::1", Reach.ROUTABLE),
        ("fd00::1", Reach.ROUTABLE),
        ("169.254.3.4", Reach.LINK_LOCAL),
        ("fe80::1%eth0.100", Reach.LINK_LOCAL),
        ("127.3.4.5", Reach.LOOPBACK),
        ("::1", Reach.LOOPBACK),
        ("239.1.2.3", Reach.MULTICAST),
        ("ff02::1%eth0", Reach.MULTICAST),
        ("0.0.0.0", Reach.UNSPECIFIED),
        ("::", Reach.UNSPECIFIED),
    ],
)
def test_an_ipv4_address_within_a_gid_counts_as_what_it_is(address, expected):
    """Python's own predicates say of ::ffff:169.254.3.4 that it is not link-local."""
    assert reach(address) is expected
    plain = ipaddress.ip_address(address.partition("%")[0])
    gid = plain.packed if plain.version == 6 else bytes(10) + b"\xff\xff" + plain.packed
    assert reach(gid) is expected
    assert reach(str(ipaddress.IPv6Address(gid))) is expected


@pytest.mark.parametrize("near", ["169.254.3.4", "127.0.0.1"])
def test_a_gid_that_leads_nowhere_else_is_not_the_best(info, near):
    """It is the first of its table."""
    mapped = Gid(0, bytes(10) + b"\xff\xff" + ipaddress.ip_address(near).packed, "RoCE v2", near)
    adapter = with_ports(info, {}, {"gids": (mapped, IPV6)})
    assert local_endpoint_of(adapter, 7, None, None).gid == IPV6.value
    assert not routable(mapped)
