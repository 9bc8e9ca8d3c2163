"""The interfaces, addresses and GIDs of adapters with several: VLANs, bonds, bridges, two ports, network namespaces."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import os
import shutil
import types

import click
import pytest
from click.testing import CliRunner
from kit import linux_only as linux_only
from kit.helpers import DEADLINE_S

import ndpy
from ndpy import Capability, platforms
from ndpy.platforms.verbs import adapter_info, endpoint, interfaces, listening
from ndpy.platforms.verbs.addresses import unpack_address
from ndpy.platforms.verbs.native_calls import ffi, lib
from ndpy.tools.cli import main, sources
from ndpy.tools.doctor import linux
from ndpy.tools.doctor.findings import Verdict
from ndpy.vocabulary import system_files

DOWN, ACTIVE = lib.IBV_PORT_DOWN, lib.IBV_PORT_ACTIVE


class Machine:
    """A machine's interfaces, as files below the fake's /sys and /proc and as addresses."""

    def __init__(self, fake, monkeypatch):
        self.fake = fake
        self.addresses = {}
        root = system_files.path("/")
        for name in ("sys/class/net", "proc"):
            (root / name).unlink()
            (root / name).mkdir(parents=True)
        monkeypatch.setattr(interfaces, "addresses_here", lambda: dict(self.addresses))

    def interface(self, name, *addresses, kind="", on=(), vlan=None, hardware="02:00:00:00:00:01", **files):
        """An interface of this network namespace."""
        folder = interfaces.folder_of(name)
        folder.mkdir()
        (folder / "uevent").write_text(f"{f'DEVTYPE={kind}' if kind else ''}\nINTERFACE={name}\nIFINDEX=9\n")
        (folder / "type").write_text("1\n")
        (folder / "address").write_text(f"{hardware}\n")
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")
        for lower in on:
            (folder / f"lower_{lower}").symlink_to(f"../{lower}")
            (interfaces.folder_of(lower) / f"upper_{name}").symlink_to(f"../{name}")
        if vlan is not None:
            table = system_files.path("/proc/net/vlan")
            table.mkdir(parents=True, exist_ok=True)
            (table / name).write_text(f"{name}  VID: {vlan}\t REORDER_HDR: 1  dev->priv_flags: 1021\n")
        self.addresses[name] = addresses

    def of_device(self, *names):
        """Interfaces of the adapter's own device."""
        for name in names:
            (self.fake.folder / "device/net" / name).mkdir(parents=True)


@pytest.fixture
def machine(fake, monkeypatch):
    return Machine(fake, monkeypatch)


@pytest.fixture
def vlans(machine, fake):
    """eth2 with two VLANs; the table begins with the GID that is made of the hardware address."""
    machine.interface("eth2", "10.0.0.1", "fe80::1%eth2")
    machine.interface("eth2.10", "10.0.10.1", kind="vlan", on=["eth2"], vlan=10)
    machine.interface("eth2.20", "10.0.20.1", "2001:db8:20::1", kind="vlan", on=["eth2"], vlan=20)
    fake.have_gid("fe80::ff:fe00:1", 0, netdev="eth2")
    fake.have_gid("10.0.0.1", 1, netdev="eth2")
    fake.have_gid("10.0.10.1", 2, netdev="eth2.10")
    fake.have_gid("10.0.20.1", 3, netdev="eth2.20")
    fake.have_gid("2001:db8:20::1", 4, netdev="eth2.20")
    fake.have_gid("fe80::1", 5, netdev="eth2")
    return machine


@pytest.fixture
def two_ports(machine, fake):
    """One device with two ports: eth2, with 10.0.1.1, and eth3, with a VLAN. Both have addresses of one subnet."""
    fake.settings.ports = 2
    machine.interface("eth2", "10.0.1.1", "10.9.0.1")
    machine.interface("eth3", "10.0.2.1", "10.9.0.2", hardware="02:00:00:00:00:03")
    machine.interface("eth3.30", "10.0.30.1", kind="vlan", on=["eth3"], vlan=30, hardware="02:00:00:00:00:03")
    fake.ports[1].mtu = lib.IBV_MTU_1024
    for index, (port, netdev, address) in enumerate(
        [
            (1, "eth2", "10.0.1.1"),
            (1, "eth2", "10.9.0.1"),
            (2, "eth3", "10.0.2.1"),
            (2, "eth3", "10.9.0.2"),
            (2, "eth3.30", "10.0.30.1"),
        ]
    ):
        fake.have_gid(address, index, port, netdev=netdev)
    return machine


def endpoint_of(adapter):
    with adapter.create_completion_queue(8) as queue, adapter.create_queue_pair(queue) as queue_pair:
        return queue_pair.local_endpoint()


# ---- VLANs ----


def test_a_port_leads_to_its_vlans_with_their_ids_and_addresses(vlans):
    (port,) = platforms.find("fake0").ports
    assert [(entry.name, entry.kind, entry.parent, entry.vlan, entry.addresses) for entry in port.interfaces] == [
        ("eth2", "ethernet", None, None, ("10.0.0.1", "fe80::1%eth2")),
        ("eth2.10", "vlan", "eth2", 10, ("10.0.10.1",)),
        ("eth2.20", "vlan", "eth2", 20, ("10.0.20.1", "2001:db8:20::1")),
    ]
    assert port.netdev == "eth2"


def test_the_addresses_are_those_of_all_interfaces_and_link_local_ones_come_last(vlans):
    info = platforms.find("fake0")
    assert info.addresses == ("10.0.0.1", "10.0.10.1", "10.0.20.1", "2001:db8:20::1", "fe80::1%eth2")


def test_each_gid_tells_its_interface_and_vlan(vlans):
    (port,) = platforms.find("fake0").ports
    told = [(gid.index, gid.netdev, gid.vlan) for gid in port.gids]
    assert told == [
        (0, "eth2", None),
        (1, "eth2", None),
        (2, "eth2.10", 10),
        (3, "eth2.20", 20),
        (4, "eth2.20", 20),
        (5, "eth2", None),
    ]


@pytest.mark.parametrize(
    "which", ["eth2", "eth2.10", "eth2.20", "10.0.0.1", "10.0.20.1", "2001:db8:20:0::1", "fake0:1"]
)
def test_an_adapter_opens_by_interface_port_and_every_address(vlans, which):
    assert platforms.find(which).name == "fake0"


@pytest.mark.parametrize(
    ("which", "netdev", "first", "gid"),
    [
        ("fake0", "eth2", "10.0.0.1", "10.0.0.1"),
        ("eth2.20", "eth2.20", "10.0.20.1", "10.0.20.1"),
        ("2001:db8:20::1", "eth2.20", "2001:db8:20::1", "2001:db8:20::1"),
        ("10.0.10.1", "eth2.10", "10.0.10.1", "10.0.10.1"),
    ],
)
def test_what_an_adapter_was_opened_by_comes_first_and_chooses_the_gid(vlans, fake, which, netdev, first, gid):
    fake.name = which
    with fake.open() as adapter:
        assert (adapter.info.netdev, adapter.info.addresses[0]) == (netdev, first)
        assert len(adapter.info.addresses) == 5
        assert endpoint_of(adapter).gid == interfaces.gid_of(gid)


def test_devices_shows_the_interface_and_vlan_of_each_gid_and_address(vlans, fake):
    said = CliRunner().invoke(main, ["devices", "-v", "fake0"]).output
    assert "eth2.20: vlan 20 on eth2: 10.0.20.1, 2001:db8:20::1" in said
    assert "GID 3: 10.0.20.1 (RoCE v2), eth2.20, VLAN 20" in said
    assert "GID 1: 10.0.0.1 (RoCE v2), eth2\n" in said


def test_a_link_local_address_chooses_the_interface_of_its_scope(vlans, fake):
    vlans.addresses["eth2.10"] += ("fe80::1%eth2.10",)
    fake.have_gid("fe80::1", 6, netdev="eth2.10")
    for which, netdev, index in (("fe80::1%eth2", "eth2", 5), ("fe80::1%eth2.10", "eth2.10", 6)):
        fake.name = which
        with fake.open() as adapter:
            assert (adapter.info.netdev, endpoint_of(adapter).gid_index) == (netdev, index)


# ---- sources ----


def test_a_command_opens_an_adapter_with_one_address_as_its_source(vlans):
    adapter, source = sources.open_from("fake0", "10.0.20.1", None)
    with adapter:
        assert (adapter.info.addresses, source.host, source.gid) == (("10.0.20.1",), "10.0.20.1", None)
    adapter, source = sources.open_from(None, None, None)
    with adapter:
        assert (len(adapter.info.addresses), source.host) == (5, None)


@pytest.mark.parametrize("wanted", ["2", "10.0.10.1"])
def test_a_gid_by_index_or_address_is_a_source(vlans, wanted):
    adapter, source = sources.open_from("fake0", None, wanted)
    with adapter:
        assert source.gid is not None
        assert (adapter.info.addresses, source.gid.index, source.gid.vlan) == (("10.0.10.1",), 2, 10)
        assert endpoint_of(adapter).gid_index == 2


@pytest.mark.parametrize(
    ("source", "gid", "words"),
    [
        ("10.0.0.9", None, "10.0.0.9 is not an address of fake0; its addresses are 10.0.0.1"),
        (None, "9", "fake0 has no GID 9; it has 0 (fe80::ff:fe00:1, RoCE v2), 1 (10.0.0.1"),
        (None, "0", "GID 0 (fe80::ff:fe00:1, RoCE v2) is not an address of fake0"),
        ("10.0.0.1", "1", "exclude each other"),
    ],
)
def test_a_source_that_is_none_is_refused_with_those_that_there_are(vlans, source, gid, words):
    with pytest.raises(click.UsageError) as caught:
        sources.open_from("fake0", source, gid)
    assert words in caught.value.message


def test_a_connection_that_uses_another_gid_is_told():
    one = ndpy.Gid(2, bytes(16), "RoCE v1", "10.0.10.1")
    other = dataclasses.replace(one, index=3, type="RoCE v2")
    path = ndpy.PathInfo(1024, 1, one, bytes(16), 7, 0, 0, 0, 0, 64)
    queue_pair = types.SimpleNamespace(path=path)
    assert sources.Source("10.0.10.1", one).difference(queue_pair) == ""
    assert "uses GID 2 (10.0.10.1, RoCE v1) instead of 3" in sources.Source("10.0.10.1", other).difference(queue_pair)


def test_a_second_process_opens_the_same_port(two_ports):
    assert sources.peer_name(platforms.find("eth3")) == "fake0:2"


def test_the_counters_of_the_port_that_is_asked_for_are_shown(two_ports, fake):
    for port, value in ((1, 11), (2, 22)):
        (fake.folder / f"ports/{port}/counters").mkdir(parents=True)
        (fake.folder / f"ports/{port}/counters/port_rcv_packets").write_text(f"{value}\n")

    def lines(which):
        return CliRunner().invoke(main, ["devices", "--counters", which]).output.splitlines()

    assert [line.split()[0] for line in lines("fake0")] == ["fake0/1", "fake0/2"]
    for which in ("fake0:2", "eth3.30", "10.9.0.2"):
        assert [line.split() for line in lines(which)] == [["fake0/2", "port_rcv_packets", "22"]]


# ---- bonds, bridges, macvlans ----


def test_what_lies_on_an_interface_leads_to_its_port_and_tunnels_do_not(machine, fake):
    machine.interface("eth2")
    machine.interface("bond0", "10.0.0.1", kind="bond", on=["eth2"])
    machine.interface("bond0.7", "10.0.7.1", kind="vlan", on=["bond0"], vlan=7)
    machine.interface("br0", "10.0.8.1", kind="bridge", on=["bond0.7"])
    machine.interface("mv0", "10.0.9.1", on=["eth2"])
    machine.interface("vx0", "10.99.0.1", kind="vxlan", on=["eth2"])
    machine.of_device("eth2")
    (port,) = platforms.find("fake0").ports
    assert {(entry.name, entry.kind, entry.parent) for entry in port.interfaces} == {
        ("eth2", "ethernet", None),
        ("bond0", "bond", "eth2"),
        ("bond0.7", "vlan", "bond0"),
        ("br0", "bridge", "bond0.7"),
        ("mv0", "ethernet", "eth2"),
    }
    assert set(platforms.find("bond0.7").addresses) == {"10.0.0.1", "10.0.7.1", "10.0.8.1", "10.0.9.1"}


def test_a_bonds_address_is_the_one_adapters_whose_table_has_it(machine, fake):
    machine.interface("eth2", hardware="02:00:00:00:00:01")
    machine.interface("bond0", "10.0.0.1", kind="bond", on=["eth2"], hardware="02:00:00:00:00:07")
    fake.have_gid("fe80::ff:fe00:1", 0, netdev="eth2")
    assert platforms.find("bond0").addresses == ()
    fake.have_gid("10.0.0.1", 1, netdev="bond0")
    assert platforms.find("bond0").addresses == ("10.0.0.1",)


def test_the_members_of_a_bond_are_the_adapters_unless_they_have_one_of_their_own(machine, fake):
    """One adapter for both ports of a card has the GIDs of the bond. A member of another card has its own adapter."""
    for name in ("eth2", "eth3", "eth4"):
        machine.interface(name)
    system_files.path("/sys/class/infiniband/mlx5_7/device/net/eth4").mkdir(parents=True)
    machine.interface("bond0", "10.0.0.1", kind="bond", on=["eth2", "eth3", "eth4"])
    fake.have_gid("10.0.0.1", 0, netdev="bond0")
    assert [entry.name for entry in platforms.find("fake0").ports[0].interfaces] == ["bond0", "eth2", "eth3"]
    assert platforms.find("eth3").addresses == ("10.0.0.1",)


def test_a_child_of_an_ipoib_interface_leads_to_its_port(machine, fake):
    fake.ports[0].link_layer = lib.IBV_LINK_LAYER_INFINIBAND
    machine.interface("ib0", "10.1.0.1", type="32")
    machine.interface("ib0.8001", "10.1.1.1", type="32", parent="ib0")
    machine.of_device("ib0")
    assert platforms.find("ib0.8001").addresses[0] == "10.1.1.1"


def test_representors_of_virtual_functions_are_not_the_ports(machine, fake):
    machine.interface("enp1s0f0np0", "10.0.0.1", phys_port_name="p0")
    machine.interface("enp1s0f0r1", "10.7.0.1", phys_port_name="pf0vf1")
    machine.interface("enp1s0f0r2", "10.8.0.1", phys_port_name="c1pf0sf88")
    machine.of_device("enp1s0f0np0", "enp1s0f0r1", "enp1s0f0r2")
    assert platforms.find("fake0").addresses == ("10.0.0.1",)


# ---- InfiniBand ----


def test_ports_of_infiniband_have_their_ipoib_interfaces_by_dev_port(machine, fake):
    fake.settings.ports = 2
    for port in fake.ports[:2]:
        port.link_layer = lib.IBV_LINK_LAYER_INFINIBAND
    machine.interface("ib0", "10.1.0.1", type="32", dev_port=0)
    machine.interface("ib0.8001", "10.1.1.1", type="32", dev_port=0, parent="ib0")
    machine.interface("ib1", "10.2.0.1", type="32", dev_port=1)
    machine.of_device("ib0", "ib0.8001", "ib1")
    first, second = platforms.find("fake0").ports
    assert [(entry.name, entry.kind, entry.parent) for entry in first.interfaces] == [
        ("ib0", "ipoib", None),
        ("ib0.8001", "ipoib", "ib0"),
    ]
    assert [entry.name for entry in second.interfaces] == ["ib1"]
    assert platforms.find("10.2.0.1").port == 2
    assert platforms.find("ib0.8001").port == 1


def test_older_drivers_number_ports_by_dev_id(machine, fake):
    fake.settings.ports = 2
    machine.interface("eth2", "10.1.0.1", dev_id="0x0")
    machine.interface("eth3", "10.2.0.1", dev_id="0x1")
    machine.of_device("eth2", "eth3")
    assert [port.netdev for port in platforms.find("fake0").ports] == ["eth2", "eth3"]


# ---- network namespaces ----


@pytest.mark.parametrize("in_software", [False, True])
def test_an_interface_of_the_same_name_in_another_namespace_is_not_the_gids(machine, fake, in_software):
    machine.interface("eth0", "10.244.0.7", hardware="02:00:00:00:00:99")
    if in_software:
        # The kernel shows the name of the interface that rxe was made on everywhere.
        (fake.folder / "parent").write_text("eth0\n")
    fake.have_gid("fe80::ff:fe00:1", 0, netdev="eth0")
    fake.have_gid("192.0.2.1", 1, netdev="eth0")
    info = platforms.find("fake0")
    assert (info.addresses, info.netdev, [gid.netdev for gid in info.ports[0].gids]) == ((), None, [None, None])


# ---- what it takes ----


@contextlib.contextmanager
def looking(monkeypatch):
    """Counts how often each file is opened and each folder is listed."""
    seen = collections.Counter()
    with monkeypatch.context() as patch:
        for name in ("open", "listdir"):
            call = getattr(os, name)
            patch.setattr(os, name, lambda place, *more, call=call: (seen.update([str(place)]), call(place, *more))[1])
        asked = interfaces.addresses_here
        patch.setattr(interfaces, "addresses_here", lambda: (seen.update(["addresses"]), asked())[1])
        yield seen


def bond_of_two(machine, fake):
    for name in ("eth2", "eth3"):
        machine.interface(name)
    machine.interface("bond0", "10.0.0.1", kind="bond", on=["eth2", "eth3"])
    machine.interface("bond0.7", "10.0.7.1", "fe80::1%bond0.7", kind="vlan", on=["bond0"], vlan=7)
    for index, (netdev, address) in enumerate([("bond0", "10.0.0.1"), ("bond0.7", "10.0.7.1"), ("bond0.7", "fe80::1")]):
        fake.have_gid(address, index, netdev=netdev)
    machine.of_device("eth2", "eth3")


def two_with_children(machine, fake):
    fake.settings.ports = 2
    for number, name in enumerate(("ib0", "ib1")):
        fake.ports[number].link_layer = lib.IBV_LINK_LAYER_INFINIBAND
        machine.interface(name, f"10.{number}.0.1", type="32", dev_port=number)
        machine.interface(f"{name}.8001", f"10.{number}.1.1", type="32", dev_port=number, parent=name)
        machine.of_device(name, f"{name}.8001")


def iwarp_with_a_vlan(machine, fake):
    fake.speak_iwarp()
    machine.interface("eth2", "10.0.0.1", hardware="02:00:00:00:00:01")
    machine.interface("eth2.10", "10.0.1.1", kind="vlan", on=["eth2"], vlan=10, hardware="02:00:00:00:00:01")
    fake.have_gid("200:0:1::", 0)
    machine.of_device("eth2")


@pytest.mark.parametrize("kind", [bond_of_two, two_with_children, iwarp_with_a_vlan])
def test_a_description_looks_at_no_file_twice(machine, fake, monkeypatch, kind):
    kind(machine, fake)
    platforms.find("fake0")
    with looking(monkeypatch) as seen:
        (info,) = platforms.list_adapters()
    assert len(info.addresses) > 1
    assert {name for name in seen if "/class/net/" in name} and seen["addresses"] == 1
    assert [name for name, count in seen.items() if count > 1] == []


def test_the_next_description_looks_again(vlans):
    platforms.find("fake0")
    vlans.addresses["eth2.10"] = ()
    (system_files.path("/proc/net/vlan") / "eth2.20").write_text("eth2.20  VID: 21\n")
    (port,) = platforms.find("fake0").ports
    found = {entry.name: (entry.vlan, entry.addresses[:1]) for entry in port.interfaces}
    assert (found["eth2.10"], found["eth2.20"]) == ((10, ()), (21, ("10.0.20.1",)))


# ---- tables of GIDs ----


def test_full_tables_of_two_ports_are_asked_for_once(two_ports, fake):
    fake.settings.places = 3
    fake.have_gid("10.9.0.3", 5, netdev="eth2")
    before = fake.seen.gid_tables
    first, second = platforms.find("fake0").ports
    assert [len(port.gids) for port in (first, second)] == [3, 3]
    assert (fake.seen.gid_tables - before, fake.seen.gids) == (1, 0)


def test_a_library_without_tables_of_gids_is_asked_for_each(two_ports, fake, monkeypatch):
    asked = platforms.find("fake0").ports
    has = adapter_info.has_symbol
    monkeypatch.setattr(adapter_info, "has_symbol", lambda name, of: name != b"_ibv_query_gid_table" and has(name, of))
    assert platforms.find("fake0").ports == asked
    assert fake.seen.gids == 2 * 1024


def test_the_gid_of_a_path_is_asked_for_alone(two_ports, fake):
    with fake.open() as adapter:
        before = fake.seen.gid_tables
        gid = adapter_info.gid_at(adapter._context, "fake0", 2, 4)
        assert gid == next(gid for gid in adapter.info.ports[1].gids if gid.index == 4)
        assert (gid.address, gid.netdev, gid.vlan) == ("10.0.30.1", "eth3.30", 30)
        assert adapter_info.gid_at(adapter._context, "fake0", 2, 9) is None
        assert (fake.seen.gid_tables - before, fake.seen.gids) == (0, 2)


# ---- one address, several interfaces ----


@pytest.fixture
def bond_and_tunnel(machine, fake):
    machine.interface("bond0", "10.0.0.1", "fe80::1%bond0", kind="bond")
    machine.interface("vx0", "10.0.0.1", "fe80::1%vx0", kind="vxlan", on=["bond0"])
    for index, (kind, netdev, address) in enumerate(
        [
            ("RoCE v1", "vx0", "10.0.0.1"),
            ("RoCE v2", "vx0", "10.0.0.1"),
            ("RoCE v2", "bond0", "10.0.0.1"),
            ("RoCE v2", "bond0", "fe80::1"),
            ("RoCE v2", "vx0", "fe80::1"),
        ]
    ):
        fake.have_gid(address, index, kind=kind, netdev=netdev)


def index_of(adapter, gid=None):
    with adapter.create_completion_queue(8) as queue, adapter.create_queue_pair(queue) as queue_pair:
        return queue_pair.local_endpoint(gid=gid).gid_index


def test_of_one_address_at_two_interfaces_the_one_of_the_routes_is_taken(bond_and_tunnel, fake, monkeypatch):
    with fake.open() as adapter:
        for netdev, index in (("bond0", 2), ("vx0", 1)):
            monkeypatch.setattr(endpoint, "interface_from", lambda address, _, netdev=netdev: netdev)
            assert [index_of(adapter), index_of(adapter, "10.0.0.1")] == [index, index]
        assert [index_of(adapter, wanted) for wanted in (0, "bond0", "fe80::1%bond0")] == [0, 2, 3]


def test_if_the_routes_decide_nothing_both_indexes_are_named(bond_and_tunnel, fake, monkeypatch):
    monkeypatch.setattr(endpoint, "interface_from", lambda address, _: "")
    with fake.open() as adapter:
        assert index_of(adapter) == 1
        with pytest.raises(
            ndpy.AddressUnreachableError, match=r"10\.0\.0\.1 is the address of several .*: 1 \(vx0\), 2 \(bond0\)"
        ):
            index_of(adapter, "10.0.0.1")
        # One link-local address is common to a VLAN's interface and the one that it lies on.
        assert [index_of(adapter, wanted) for wanted in ("fe80::1", "fe80::1%vx0")] == [3, 4]


def test_the_same_address_in_another_namespace_does_not_count(machine, fake):
    machine.interface("eth0", "10.0.0.1")
    fake.have_gid("10.0.0.1", 0, netdev="eth7")
    fake.have_gid("10.0.0.1", 1, netdev="eth0")
    with fake.open() as adapter:
        assert [index_of(adapter), index_of(adapter, "10.0.0.1")] == [1, 1]


def test_of_several_gids_with_the_address_of_a_command_rdma_cm_chooses(bond_and_tunnel, fake):
    adapter, source = sources.open_from("fake0", None, "10.0.0.1")
    with adapter:
        assert (source.host, source.gid) == ("10.0.0.1", None)


class NotYet:
    """The library, where some addresses can be bound and not listened at."""

    def __init__(self, *addresses):
        self.refused, self.listening = addresses, []

    def __getattr__(self, name):
        return getattr(lib, name)

    def rdma_listen(self, identifier, backlog):
        host, _ = unpack_address(identifier, peer=False)
        if host in self.refused:
            ffi.errno = errno.EADDRNOTAVAIL
            return -1
        self.listening.append(host)
        return lib.rdma_listen(identifier, backlog)


def test_an_address_that_is_no_use_yet_is_left_out_by_a_listener(machine, fake, monkeypatch):
    """siw looks at an address when it listens. A link-local one is tentative for a second."""
    own = ["10.0.0.1", "10.0.0.2"]
    machine.interface("eth0", *own)
    for index, address in enumerate(own):
        fake.have_gid(address, index, netdev="eth0")
    for refused, left in (((), own), (own[:1], own[1:]), (own[1:], own[:1])):
        stand_in = NotYet(*refused)
        monkeypatch.setattr(listening, "lib", stand_in)
        with fake.open() as adapter, adapter.listen(("", 0)):
            assert stand_in.listening == left
    monkeypatch.setattr(listening, "lib", NotYet(*own))
    with fake.open() as adapter, pytest.raises(ndpy.AddressUnreachableError, match="cannot listen at"):
        adapter.listen(("", 0))


# ---- two ports ----


def test_the_adapter_has_the_addresses_of_both_ports(two_ports):
    info = platforms.find("fake0")
    assert info.addresses == ("10.0.1.1", "10.9.0.1", "10.0.2.1", "10.9.0.2", "10.0.30.1")
    assert (info.port, info.netdev, info.mtu) == (1, "eth2", 4096)


@pytest.mark.parametrize(
    ("which", "netdev", "first"),
    [
        ("fake0:2", "eth3", "10.0.2.1"),
        ("eth3", "eth3", "10.0.2.1"),
        ("eth3.30", "eth3.30", "10.0.30.1"),
        ("10.9.0.2", "eth3", "10.9.0.2"),
    ],
)
def test_what_is_asked_for_is_the_port_of_everything(two_ports, fake, which, netdev, first):
    fake.name = which
    with fake.open() as adapter:
        info = adapter.info
        assert (info.name, info.port, info.netdev, info.mtu, info.state) == ("fake0", 2, netdev, 1024, "active")
        assert set(info.addresses) == {"10.0.2.1", "10.9.0.2", "10.0.30.1"}
        assert info.addresses[0] == first
        end = endpoint_of(adapter)
        assert (end.port, end.gid, end.mtu) == (2, interfaces.gid_of(first), 1024)
        assert adapter.port_state == "active"
        with adapter.events() as events:
            fake.device_event(adapter, lib.IBV_EVENT_PORT_ERR)
            assert events.get(DEADLINE_S).port == 1
        with adapter.create_completion_queue(8) as queue, adapter.create_datagram_queue_pair(queue) as datagrams:
            assert datagrams.max_datagram == 1024
            assert datagrams.local_endpoint().port == 2
        # The events were about port 1. The second one comes when the first one has been handled.
        with adapter.events() as events:
            fake.device_event(adapter, lib.IBV_EVENT_PORT_ERR)
            events.get(DEADLINE_S)
        assert adapter.port_state == "active"


def test_a_down_first_port_is_not_the_one_unless_it_is_asked_for(two_ports, fake):
    fake.ports[0].state = DOWN
    info = platforms.find("fake0")
    assert (info.port, info.netdev, info.state, info.mtu) == (2, "eth3", "active", 1024)
    assert info.addresses == ("10.0.2.1", "10.9.0.2", "10.0.30.1", "10.0.1.1", "10.9.0.1")
    asked = platforms.find("eth2")
    assert (asked.port, asked.netdev, asked.state, asked.mtu) == (1, "eth2", "down", 4096)


def test_each_port_has_the_transport_of_its_link_layer(two_ports, fake):
    fake.ports[0].link_layer = lib.IBV_LINK_LAYER_INFINIBAND
    assert [platforms.find(which).transport for which in ("fake0", "fake0:1", "fake0:2")] == [
        "InfiniBand",
        "InfiniBand",
        "RoCE",
    ]


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("fake0:3", ["no port 'fake0:3'", "fake0 has 1 (active), 2 (active)"]),
        (
            "eth33",
            ["no adapter 'eth33' (did you mean eth3?)", "port 1 active at eth2", "port 2 active at eth3, eth3.30"],
        ),
        ("10.0.2.2", ["no adapter serves the address 10.0.2.2", "10.0.2.1"]),
    ],
)
def test_the_error_of_an_unknown_name_lists_what_there_is(two_ports, which, words):
    with pytest.raises(ndpy.AdapterNotFoundError) as caught:
        platforms.find(which)
    for word in words:
        assert word in str(caught.value)


def test_a_name_is_an_adapters_before_it_is_an_interfaces(two_ports):
    info = platforms.find("fake0")
    other = dataclasses.replace(info, name="eth3", ports=())
    assert platforms.choose([info, other], "eth3") is other


def test_the_doctor_examines_the_port_that_is_asked_for(two_ports, fake):
    def ports(which):
        return {finding.check for finding in linux.examine_devices(which) if " port " in finding.check}

    assert {check.partition(" port ")[2][0] for check in ports("fake0")} == {"1", "2"}
    assert {check.partition(" port ")[2][0] for check in ports("eth3.30")} == {"2"}
    assert {check.partition(" port ")[2][0] for check in ports("fake0:1")} == {"1"}


# ---- a network of the vendor's own ----


def test_a_link_layer_that_is_not_told_is_not_infiniband(machine, fake):
    fake.settings.unconnected = 1
    fake.ports[0].link_layer = -1
    fake.ports[0].state = DOWN
    info = platforms.find("fake0")
    assert (info.transport, info.ports[0].link_layer) == ("unspecified", "unspecified")
    assert Capability.RELIABLE_CONNECTIONS not in info.capabilities
    found = linux.examine_devices("fake0")
    assert not any("subnet manager" in finding.message + finding.remedy for finding in found)
    (connections,) = [finding for finding in found if finding.check == "fake0 connections"]
    assert connections.verdict is Verdict.FAIL
    with (
        fake.open() as adapter,
        adapter.create_completion_queue(8) as queue,
        pytest.raises(ndpy.UnsupportedError, match="no queue pairs of type RC"),
    ):
        adapter.create_queue_pair(queue)


def test_every_one_of_a_thousand_addresses_opens_the_adapter(machine, fake):
    machine.interface("eth2", *(f"10.1.{place >> 8}.{place & 255}" for place in range(1024)))
    for index in range(1024):
        fake.have_gid(f"10.1.{index >> 8}.{index & 255}", index, netdev="eth2")
    info = platforms.find("10.1.3.255")
    assert (info.addresses[0], len(info.addresses), len(info.ports[0].gids)) == ("10.1.3.255", 1024, 1024)


def test_interfaces_that_have_just_gone_are_not_an_error(vlans):
    shutil.rmtree(interfaces.folder_of("eth2.20"))
    (port,) = platforms.find("fake0").ports
    assert [entry.kind for entry in port.interfaces] == ["ethernet", "vlan", "unknown"]


# ---- the longest message ----


@pytest.mark.parametrize(
    ("ports", "longest"),
    [
        ([(ACTIVE, 1 << 20), (ACTIVE, 1 << 16)], 1 << 16),
        ([(ACTIVE, 1 << 20), (DOWN, 1 << 16)], 1 << 20),
        ([(DOWN, 1 << 20), (DOWN, 1 << 16)], 1 << 16),
        ([(ACTIVE, 1 << 20), (ACTIVE, -1)], 1 << 20),
        ([(ACTIVE, -1), (ACTIVE, -1)], 1 << 31),
    ],
)
def test_whichever_port_a_connection_takes_the_longest_message_fits(two_ports, fake, ports, longest):
    for port, (state, own) in zip(fake.ports, ports, strict=False):
        port.state, port.longest = state, own
    info = platforms.find("fake0")
    assert info.max_transfer_length == longest
    assert [port.max_transfer_length for port in info.ports] == [max(own, 0) for _, own in ports]


@pytest.mark.parametrize(("which", "longest"), [("fake0:1", 1 << 20), ("eth3.30", 1 << 16), ("10.0.1.1", 1 << 20)])
def test_the_longest_message_is_that_of_the_port_that_was_asked_for(two_ports, fake, which, longest):
    fake.ports[0].longest, fake.ports[1].longest = 1 << 20, 1 << 16
    fake.name = which
    with fake.open() as adapter:
        assert adapter.info.max_transfer_length == longest
