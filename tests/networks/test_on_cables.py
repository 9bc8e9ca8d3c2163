"""Several adapters of the kernel in one machine: a cable between two, VLANs on it, a bond. In the VM.

By what each is opened, from where it connects, where it listens, and which GID its packets have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from kit.helpers import (
    DEADLINE_S,
    Keeper,
    assert_works,
    create_end,
    memory,
    only_under_stress,
    send_message,
    succeed,
)

if sys.platform != "linux":
    pytest.skip("these adapters are Linux's", allow_module_level=True)

from networks.cables import CONNECT_S, Cables, connect, ip, kind_under_test, sent, wait_for_addresses

import ndpy
from ndpy import Capability, platforms
from ndpy.tools.cli import devices
from ndpy.vocabulary.quirks import Quirk

# Of each end: the addresses of the cable itself, of a second subnet without a gateway, and of VLAN 10 on the cable.
NEAR, FAR = "203.0.113.1", "203.0.113.2"
NEAR_TOO, FAR_TOO = "203.0.113.65", "203.0.113.66"
NEAR_VLAN, FAR_VLAN = "203.0.113.129", "203.0.113.130"
NEAR_BOND, FAR_BOND = "203.0.113.193", "203.0.113.194"


@dataclass
class Ends:
    """The names of the adapters at both ends of a cable, and all adapters of the machine."""

    near: str
    far: str
    all: dict[str, ndpy.AdapterInfo]

    def by(self, what: str) -> tuple[str, str | None, str]:
        """The adapter that this opens, its interface and its first address."""
        info = platforms.choose(list(self.all.values()), what)
        return info.name, info.netdev, info.addresses[0]


@pytest.fixture(scope="module")
def cables(adapter_name: str) -> Iterator[Cables]:
    kind = kind_under_test(adapter_name)
    with contextlib.ExitStack() as stack:
        yield Cables(kind, stack)


@pytest.fixture(scope="module")
def cable(cables: Cables) -> Ends:
    """A cable with an adapter and two subnets at each end, and a VLAN on it."""
    cables.lay("near0", "far0")
    for lower, vlan in (("near0", "near0.10"), ("far0", "far0.10")):
        cables.add(vlan, "link", lower, "type", "vlan", "id", "10")
    cables.up("near0", f"{NEAR}/26", f"{NEAR_TOO}/26", "2001:db8:7::1/64")
    cables.up("far0", f"{FAR}/26", f"{FAR_TOO}/26", "2001:db8:7::2/64")
    cables.up("near0.10", f"{NEAR_VLAN}/26")
    cables.up("far0.10", f"{FAR_VLAN}/26")
    near, far = cables.adapter("near0"), cables.adapter("far0")
    found = wait_for_addresses(
        **{near: (NEAR, NEAR_TOO, NEAR_VLAN, "2001:db8:7::1"), far: (FAR, FAR_TOO, FAR_VLAN, "2001:db8:7::2")}
    )
    return Ends(near, far, found)


def bonded(stack: contextlib.ExitStack, adapter_name: str, netdev: str) -> Ends:
    """A cable of which one end, near1, is in a bond. The adapter there is on `netdev`."""
    cables = Cables(kind_under_test(adapter_name), stack)
    cables.lay("near1", "far1")
    cables.add("ndpybond", "mtu", "4200", "type", "bond", "mode", "active-backup")
    ip("link set near1 master ndpybond")
    cables.up("ndpybond", f"{NEAR_BOND}/26")
    cables.up("far1", f"{FAR_BOND}/26")
    near, far = cables.adapter(netdev), cables.adapter("far1")
    return Ends(near, far, wait_for_addresses(**{near: (NEAR_BOND,), far: (FAR_BOND,)}))


@pytest.fixture
def keep() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def by_cable(adapter: ndpy.Adapter) -> bool:
    """Whether packets between two adapters of one machine go by the cable. TCP's go by the loopback interface."""
    return adapter.info.transport == "RoCE"


def test_each_adapter_is_opened_by_its_interfaces_and_addresses(cable, adapter_name):
    own = cable.all[cable.near].addresses
    near = next(address for address in own if address.endswith("%near0"))
    near_vlan = next(address for address in own if address.endswith("%near0.10"))
    # An interface gives its addresses; the first is one that can be reached from elsewhere.
    assert cable.by(cable.near) == cable.by("near0") == (cable.near, "near0", NEAR)
    assert cable.by("near0.10") == (cable.near, "near0.10", NEAR_VLAN)
    assert cable.by("far0.10") == (cable.far, "far0.10", FAR_VLAN)
    for host, netdev in {NEAR_TOO: "near0", NEAR_VLAN: "near0.10", near: "near0", near_vlan: "near0.10"}.items():
        assert cable.by(host) == (cable.near, netdev, host)
    # Both interfaces have the same one, because they have the same hardware address.
    assert near.partition("%")[0] == near_vlan.partition("%")[0]
    assert cable.by(FAR) == cable.by("far0") == (cable.far, "far0", FAR)
    assert cable.by(adapter_name)[0] == adapter_name


def test_devices_show_which_interface_an_address_is_of(cable):
    shown = CliRunner().invoke(devices.command, ["-v", "near0.10"])
    assert shown.exit_code == 0
    rows = [row.strip() for row in shown.output.splitlines()]
    assert any(row.startswith(f"near0.10: vlan 10 on near0: {NEAR_VLAN}") for row in rows)
    assert any(row.startswith(f"near0: ethernet: {NEAR}, {NEAR_TOO}") for row in rows)
    if "RoCE" in shown.output:
        assert any(row.endswith(f": {NEAR_VLAN} (RoCE v2), near0.10, VLAN 10") for row in rows)
        assert any(row.endswith(f": {NEAR} (RoCE v2), near0") for row in rows)
    everything = CliRunner().invoke(devices.command, []).output
    assert all(any(row.startswith(f"{name} ") for row in everything.splitlines()) for name in cable.all)


def test_a_listener_of_one_adapter_takes_peers_of_all_its_subnets(cable, keep):
    near, far = keep(ndpy.open_adapter(cable.near)), keep(ndpy.open_adapter(cable.far))
    listener = keep(near.listen(("", 0)))
    for host, source, netdev in ((NEAR, FAR, "far0"), (NEAR_TOO, FAR_TOO, "far0"), (NEAR_VLAN, FAR_VLAN, "far0.10")):
        before = sent(netdev)
        connection = connect(keep, far, near, host, listener)
        assert (connection.source, connection.seen_from) == (source, source)
        assert_works(keep, connection.pair)
        if by_cable(near):
            assert connection.pair.client.queue_pair.path.local_gid.netdev == netdev
            assert sent(netdev) > before
    # It is not at the other adapter's addresses.
    with pytest.raises(ndpy.ConnectionRefusedError, match="nobody listens there"):
        connector = keep(near.create_connector())
        connector.connect(create_end(keep, near).queue_pair, (FAR, listener.address[1]), timeout_s=CONNECT_S)


def test_an_adapter_opened_by_a_vlan_uses_it(cable, keep):
    near, far = keep(ndpy.open_adapter("near0.10")), keep(ndpy.open_adapter("far0.10"))
    # The first address is where a peer that was told nothing else comes to.
    listener = keep(far.listen(("", 0)))
    before = sent("near0.10")
    connection = connect(keep, near, far, far.info.addresses[0], listener)
    assert (connection.source, connection.seen_from) == (NEAR_VLAN, NEAR_VLAN)
    assert_works(keep, connection.pair)
    if by_cable(near):
        assert sent("near0.10") > before
        assert [end.queue_pair.path.local_gid.vlan for end in connection.pair] == [10, 10]


def test_link_local_addresses_are_those_of_their_vlan(cable, keep):
    """The interface and the VLAN on it have the same one, and a listener each at the same port."""
    near = keep(ndpy.open_adapter(cable.near))
    hosts = [host for host in near.info.addresses if host.startswith("fe80")]
    first = keep(near.listen((hosts[0], 0)))
    listeners = [first, keep(near.listen((hosts[1], first.address[1])))]
    for host, listener in list(zip(hosts, listeners, strict=True))[::-1]:
        connection = connect(keep, near, near, host, listener)
        assert (connection.source, connection.seen_from) == (host, host)
        if by_cable(near):
            gids = {end.queue_pair.path.local_gid.netdev for end in connection.pair}
            assert gids == {host.partition("%")[2]}
        assert_works(keep, connection.pair)


@pytest.mark.parametrize("own", [NEAR_VLAN, "near0.10"], ids=["address", "interface"])
def test_endpoints_by_hand_go_by_the_vlan_of_their_gid(cable, keep, own):
    if cable.all[cable.near].transport == "iWARP":
        pytest.skip(Quirk.IWARP_MANAGER_ONLY.value.summary)
    near, far = keep(ndpy.open_adapter(cable.near)), keep(ndpy.open_adapter(cable.far))
    ends = create_end(keep, near), create_end(keep, far)
    endpoints = [end.queue_pair.local_endpoint(gid=gid) for end, gid in zip(ends, (own, FAR_VLAN), strict=True)]
    for end, other in zip(ends, endpoints[::-1], strict=True):
        end.queue_pair.connect_endpoint(ndpy.Endpoint.from_bytes(other.to_bytes()))
    before = sent("near0.10"), sent("far0.10")
    send_message(keep, ends[0], ends[1], b"there" * 1000)
    send_message(keep, ends[1], ends[0], b"and back" * 1000)
    assert sent("near0.10") > before[0] and sent("far0.10") > before[1]
    assert {end.queue_pair.path.local_gid.vlan for end in ends} == {10}


def test_datagrams_go_by_the_vlan_of_their_gid(cable, keep):
    if Capability.DATAGRAMS not in cable.all[cable.near].capabilities:
        pytest.skip(f"{cable.near} does not claim DATAGRAMS")
    near, far = keep(ndpy.open_adapter(cable.near)), keep(ndpy.open_adapter(cable.far))
    stations = []
    for adapter in (near, far):
        queue = keep(adapter.create_completion_queue(8))
        stations.append((queue, keep(adapter.create_datagram_queue_pair(queue))))
    (near_queue, source), (far_queue, sink) = stations
    inbox = memory(keep, far, 100)
    sink.receive(inbox)
    source.local_endpoint(gid=NEAR_VLAN)
    there = keep(source.destination(sink.local_endpoint(gid=FAR_VLAN)))
    before = sent("near0.10")
    source.send(memory(keep, near, b"datagram"), there)
    succeed(near_queue)
    (received,) = succeed(far_queue)
    assert bytes(inbox.buffer[: received.nbytes]) == b"datagram"
    assert sent("near0.10") > before


def test_an_adapter_on_a_bond_uses_it(adapter_name, keep):
    with contextlib.ExitStack() as stack:
        ends = bonded(stack, adapter_name, "ndpybond")
        assert ends.by("ndpybond") == ends.by(NEAR_BOND) == (ends.near, "ndpybond", NEAR_BOND)
        assert ("ndpybond", "bond") in [(entry.name, entry.kind) for entry in ends.all[ends.near].ports[0].interfaces]
        near, far = keep(ndpy.open_adapter("ndpybond")), keep(ndpy.open_adapter("far1"))
        before = sent("near1")
        connection = connect(keep, far, near, NEAR_BOND, keep(near.listen(("", 0))))
        assert (connection.source, connection.seen_from) == (FAR_BOND, FAR_BOND)
        assert_works(keep, connection.pair)
        if by_cable(near):
            assert sent("near1") > before
        keep.close()


@only_under_stress
def test_an_adapter_on_a_member_of_a_bond_has_the_addresses_of_the_bond(adapter_name, keep):
    with contextlib.ExitStack() as stack:
        ends = bonded(stack, adapter_name, "near1")
        for what in (ends.near, "near1", "ndpybond", NEAR_BOND):
            assert ends.by(what)[::2] == (ends.near, NEAR_BOND)
        interfaces = {entry.name: (entry.kind, entry.parent) for entry in ends.all[ends.near].ports[0].interfaces}
        assert interfaces == {"ndpybond": ("bond", "near1"), "near1": ("ethernet", None)}
        near, far = keep(ndpy.open_adapter("ndpybond")), keep(ndpy.open_adapter("far1"))
        if not by_cable(near):
            # On RoCE nothing arrives: what comes in at a member is the bond's, and rxe looks for an adapter there.
            assert_works(keep, connect(keep, far, near, NEAR_BOND).pair)
        keep.close()


def test_a_refusal_and_a_silence_are_told_apart(cable, keep):
    near, far = keep(ndpy.open_adapter(cable.near)), keep(ndpy.open_adapter(cable.far))
    # A host that is there, and takes no packet of any kind.
    ip("neighbour replace 203.0.113.3 lladdr 02:00:00:00:00:03 dev near0")
    for host, kind in ((FAR, ndpy.ConnectionRefusedError), ("203.0.113.3", ndpy.TimeoutError)):
        connector = keep(near.create_connector())
        timeout_s = DEADLINE_S if host == FAR else 1.0
        with pytest.raises(kind):
            connector.connect(create_end(keep, near).queue_pair, (host, 7), timeout_s=timeout_s)
    assert_works(keep, connect(keep, near, far, FAR).pair)
