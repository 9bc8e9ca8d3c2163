"""The links of two ends, compared: every difference in both directions, and which end it names."""

from __future__ import annotations

import dataclasses

import pytest

from ndpy.tools.cli.smoke.views import View, describe, disagreements, plain, translated_control
from ndpy.tools.doctor.ends import agreement, compare, roce_payload
from ndpy.tools.doctor.findings import Verdict
from ndpy.tools.doctor.link import LinkDescription

GOOD = LinkDescription(
    adapter="mlx5_0", transport="RoCE", addresses=("192.0.2.1",), port=1, port_state="active", link_layer="Ethernet",
    netdev="enp1s0", link_mtu=4200, physical="enp1s0", physical_mtu=4200, rdma_mtu=4096, gid="192.0.2.1", gid_index=3,
    gid_type="RoCE v2", vlan=0, pfc=(),
    pause_receive=False, pause_send=False, ecn_notification=(), ecn_reaction=(), traffic_class=0,
)  # fmt: skip
OTHER = dataclasses.replace(
    GOOD, adapter="mlx5_7", netdev="eth1", physical="eth1", addresses=("192.0.2.2",), gid="192.0.2.2"
)


def changed(end, **values):
    return dataclasses.replace(end, **values)


def only(near, far, connected=True):
    (finding,) = compare(near, far, connected=connected)
    return finding


def test_ends_that_agree_have_no_findings():
    assert compare(GOOD, OTHER, connected=True) == []


def test_what_is_not_known_is_not_compared_and_said():
    known = [
        field.name
        for field in dataclasses.fields(LinkDescription)
        if field.name not in ("adapter", "transport", "addresses")
    ]
    nothing = changed(OTHER, **dict.fromkeys(known))
    assert compare(GOOD, nothing, connected=True) == []
    assert compare(nothing, GOOD, connected=False) == []
    words = agreement(GOOD, nothing)
    assert "link MTU: this end 4200, the peer not known" in words
    assert "PFC: this end off, the peer not known" in words
    assert agreement(nothing, nothing).count("not known") == 7


BETTER, WORSE = "better", "worse"
# The values of the end that is right, those of the end that is wrong, the verdict, and words of the remedy.
DIFFERENCES = {
    "link MTU": ({}, {"link_mtu": 1500, "rdma_mtu": 1024}, Verdict.FAIL, "ip link set {netdev} mtu 4200"),
    "link MTU that RDMA does not feel": ({"link_mtu": 9000}, {}, Verdict.WARN, "ip link set {netdev} mtu 9000"),
    "RDMA MTU": ({"link_mtu": None}, {"link_mtu": None, "rdma_mtu": 1024}, Verdict.FAIL, "mtu 4200"),
    "GID type": ({}, {"gid_type": "RoCE v1"}, Verdict.FAIL,
    "mkdir -p /sys/kernel/config/rdma_cm/{adapter}; echo \"RoCE v2\" > "),
    "VLAN": ({"vlan": 100}, {}, Verdict.WARN, "ip link add link {netdev} name {netdev}.100 type vlan id 100"),
    "PFC": ({"pfc": (3, 4)}, {"pfc": (4,)}, Verdict.WARN, "dcb pfc set dev {netdev} prio-pfc 3:on"),
    "pause frames": ({"pause_receive": True, "pause_send": True}, {}, Verdict.WARN, "ethtool -A {netdev} rx on tx on"),
    "ECN notification": ({"ecn_notification": (3,)}, {}, Verdict.WARN, "/sys/class/net/{netdev}/ecn/roce_np/enable/3"),
    "ECN reaction": ({"ecn_reaction": (3, 5)}, {}, Verdict.WARN, "/sys/class/net/{netdev}/ecn/roce_rp/enable/5"),
    "traffic class": ({"traffic_class": 106}, {}, Verdict.WARN,
    "mkdir -p /sys/kernel/config/rdma_cm/{adapter}; echo 106 > "),
    "port": ({}, {"port_state": "down"}, Verdict.FAIL, "ip link set {netdev} up"),
}  # fmt: skip


@pytest.mark.parametrize("setting", DIFFERENCES)
@pytest.mark.parametrize("wrong", ["this end", "the peer"])
def test_each_difference_names_the_end_that_is_wrong(setting, wrong):
    right_values, wrong_values, verdict, remedy = DIFFERENCES[setting]
    values = (wrong_values, right_values) if wrong == "this end" else (right_values, wrong_values)
    near, far = changed(GOOD, **values[0]), changed(OTHER, **values[1])
    finding = only(near, far)
    assert finding.verdict is verdict
    other = "the peer" if wrong == "this end" else "this end"
    assert f"Probably {wrong} is wrong" in finding.message or finding.message.startswith(f"{wrong}:")
    assert f"Probably {other}" not in finding.message
    end = near if wrong == "this end" else far
    assert remedy.format(netdev=end.netdev, adapter=end.adapter) in finding.remedy
    assert finding.remedy.startswith("on this machine: " if wrong == "this end" else "on the peer: ")


# An end whose address is a VLAN's. Frames leave by the interface below.
TAGGED = {"netdev": "eth1.100", "physical": "eth1", "physical_mtu": 9000, "vlan": 100}


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("PFC", "dcb pfc set dev eth1 prio-pfc 3:on"),
        ("pause frames", "ethtool -A eth1 rx on tx on"),
        ("ECN notification", "/sys/class/net/eth1/ecn/roce_np/enable/3"),
        ("ECN reaction", "/sys/class/net/eth1/ecn/roce_rp/enable/5"),
        ("port", "ip link set eth1 up"),
    ],
)
def test_what_is_set_for_the_interface_below_a_vlan_names_that_interface(setting, remedy):
    right_values, wrong_values, _, _ = DIFFERENCES[setting]
    finding = only(changed(GOOD, vlan=100, **right_values), changed(OTHER, **TAGGED, **wrong_values))
    assert remedy in finding.remedy
    assert "eth1.100" not in finding.message + finding.remedy


def test_pause_frames_beside_flow_control_name_the_interface_below_a_vlan():
    both = changed(OTHER, **TAGGED, pfc=(3,), pause_receive=True)
    findings = compare(changed(GOOD, vlan=100, pfc=(3,)), both, connected=True)
    assert [finding.remedy for finding in findings] == ["on the peer: ethtool -A eth1 rx off tx off"]


@pytest.mark.parametrize(
    ("below", "remedy"),
    [
        (1500, "ip link set eth1 mtu 4200, then ip link set eth1.100 mtu 4200"),
        (None, "ip link set eth1 mtu 4200, then ip link set eth1.100 mtu 4200"),
        (4200, "on the peer: ip link set eth1.100 mtu 4200"),
    ],
)
def test_the_interface_below_a_vlan_is_raised_first(below, remedy):
    small = changed(OTHER, **{**TAGGED, "physical_mtu": below}, link_mtu=1500, rdma_mtu=1024)
    assert remedy in only(changed(GOOD, vlan=100), small).remedy


def test_an_mtu_of_1500_says_both_numbers_and_what_gets_lost():
    finding = only(changed(GOOD, link_mtu=1500, rdma_mtu=1024), OTHER)
    assert finding.message.startswith("this end: MTU 1500 (enp1s0), the peer: 4200 (eth1).")
    assert "more than 1024 bytes get lost" in finding.message


@pytest.mark.parametrize(
    ("near", "far", "verdict"),
    [
        ((4200, None), (9000, None), Verdict.WARN),
        ((4200, 4096), (9000, None), Verdict.WARN),
        ((1500, None), (9000, None), Verdict.FAIL),
        ((1500, 1024), (9000, 1024), Verdict.WARN),
        ((4180, 2048), (4200, 4096), Verdict.FAIL),
    ],
)
def test_different_link_mtus_fail_only_if_packets_of_rdma_get_lost(near, far, verdict):
    """Each end is (link MTU, RDMA MTU). A switch on the way may have forced two ports to the same small packets."""
    ends = [changed(end, link_mtu=link, rdma_mtu=rdma) for end, (link, rdma) in ((GOOD, near), (OTHER, far))]
    assert only(*ends).verdict is verdict


@pytest.mark.parametrize(
    ("mtu", "payload"),
    [(4200, 4096), (4176, 4096), (4175, 2048), (1500, 1024), (9000, 4096), (336, 256), (335, 0), (0, 0)],
)
def test_the_payload_of_a_link(mtu, payload):
    """80 bytes are for headers: 40 (IPv6) + 8 (UDP) + 12 (BTH) + 16 (RETH) + 4 (ICRC)."""
    assert roce_payload(mtu) == payload


def test_a_port_that_sends_more_than_its_own_link_carries_is_wrong():
    finding = only(changed(GOOD, link_mtu=1500), changed(OTHER, link_mtu=1500, rdma_mtu=1024))
    assert finding.verdict is Verdict.FAIL
    assert finding.message.startswith("this end: mlx5_0 sends packets of 4096 bytes")


def test_different_vlans_fail_if_there_is_no_connection():
    tagged = changed(OTHER, vlan=100)
    assert only(GOOD, tagged, connected=True).verdict is Verdict.WARN
    assert only(GOOD, tagged, connected=False).verdict is Verdict.FAIL
    two = only(changed(GOOD, vlan=7), tagged, connected=False)
    assert "VLAN 7 (enp1s0)" in two.message and "VLAN 100 (eth1)" in two.message
    assert "One of the two is wrong" in two.message


@pytest.mark.parametrize("setting", ["pfc", "ecn_notification", "ecn_reaction"])
def test_if_each_end_lacks_something_no_end_is_named(setting):
    finding = only(changed(GOOD, **{setting: (3,)}), changed(OTHER, **{setting: (4,)}))
    assert "One of the two is wrong" in finding.message


@pytest.mark.parametrize("wrong", [0, 1])
def test_pause_frames_beside_flow_control_are_wrong_on_the_end_that_has_both(wrong):
    ends = [changed(GOOD, pfc=(3,)), changed(OTHER, pfc=(3,))]
    ends[wrong] = changed(ends[wrong], pause_receive=True)
    finding = only(*ends)
    assert finding.message.startswith(("this end:", "the peer:")[wrong])
    assert "rx off tx off" in finding.remedy


def test_different_transports_are_the_only_finding():
    finding = only(GOOD, changed(OTHER, transport="iWARP", link_mtu=1500, vlan=3))
    assert finding.verdict is Verdict.FAIL
    assert "this end speaks RoCE (mlx5_0), the peer iWARP (mlx5_7)" in finding.message


def test_windows_does_not_tell_its_transport():
    windows = LinkDescription("softnd0", "NetworkDirect", link_mtu=1500)
    finding = only(changed(GOOD, transport="iWARP"), windows)
    assert finding.verdict is Verdict.WARN
    assert finding.remedy.startswith("on the peer: set the MTU of the interface of softnd0 to 4200")


def test_an_mtu_that_differs_only_warns_on_iwarp():
    """TCP agrees on the smaller segment."""
    assert (
        only(changed(GOOD, transport="iWARP", link_mtu=1500), changed(OTHER, transport="iWARP")).verdict is Verdict.WARN
    )


# What each end sees of the other.

NEAR = View("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.2", None, None, ("192.0.2.1", "198.51.100.1"))
FAR = View("192.0.2.2", "192.0.2.1", "192.0.2.2", "192.0.2.1", None, None, ("192.0.2.2",))


def views(near=None, far=None):
    return list(disagreements(dataclasses.replace(NEAR, **near or {}), dataclasses.replace(FAR, **far or {})))


def test_ends_that_see_each_other_as_they_are():
    assert views() == []
    assert views({"own_gid": None}, {"other_gid": None}) == []
    assert "GID 192.0.2.1 to 192.0.2.2" in describe(NEAR)


@pytest.mark.parametrize(
    ("near", "far", "words"),
    [
        ({}, {"other": "203.0.113.9"},
         "the peer sees this end at 203.0.113.9, but this end says that it is 192.0.2.1. An address translator"),
        ({}, {"other": "198.51.100.1"}, "this end sends over the wrong one"),
        ({"other": "203.0.113.9"}, {},
         "this end sees the peer at 203.0.113.9, but the peer says that it is 192.0.2.2. An address translator"),
        ({}, {"own": "192.0.2.2", "addresses": ("203.0.113.1",)},
         "the peer connects over 192.0.2.2, which is not an address of its adapter (203.0.113.1)"),
        ({"addresses": ("203.0.113.1",)}, {},
         "this end connects over 192.0.2.1, which is not an address of its adapter"),
        ({}, {"other_gid": "fe80::1"},
         "the peer sends to the GID fe80::1, but this end says that its GID is 192.0.2.1"),
        ({"other_gid": "fe80::1"}, {},
         "this end sends to the GID fe80::1, but the peer says that its GID is 192.0.2.2"),
    ],
)  # fmt: skip
def test_what_an_end_sees_differently_is_said(near, far, words):
    (sentence,) = views(near, far)
    assert words in sentence


def test_a_translated_control_connection_is_a_note():
    def note(mine, theirs):
        near = dataclasses.replace(NEAR, control_own=mine[0], control_other=mine[1])
        return translated_control(near, dataclasses.replace(FAR, control_own=theirs[0], control_other=theirs[1]))

    assert note(("192.0.2.1", "192.0.2.2"), ("192.0.2.2", "192.0.2.1")) == ""
    assert "sees 203.0.113.9 (NAT)" in note(("192.0.2.1", "192.0.2.2"), ("192.0.2.2", "203.0.113.9"))
    assert "receives it at 10.0.0.2 (NAT)" in note(("192.0.2.1", "192.0.2.2"), ("10.0.0.2", "192.0.2.1"))
    assert note((None, None), (None, None)) == ""


def test_addresses_are_compared_in_their_usual_form():
    assert plain("fe80::1%eth0") == plain("FE80:0::1") == "fe80::1"
    assert plain("::ffff:192.0.2.1") == plain(bytes(10) + b"\xff\xff\xc0\0\2\1") == "192.0.2.1"
    for nonsense in ("", "x", "1" * 100_000, b"short", 5, None, [], "\x1b[2J", "fe80::1\n"):
        assert plain(nonsense) is None


def test_a_view_of_the_peer_takes_addresses_only():
    found = View.from_dict(
        {"own": "\x1b[2J", "other": ["192.0.2.1"], "own_gid": "192.0.2.2", "extra": 1}, ("192.0.2.2",)
    )
    assert found == View(None, None, "192.0.2.2", addresses=("192.0.2.2",))
