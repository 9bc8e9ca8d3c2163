"""One end's link: recorded trees of /sys, answers of the kernel, and descriptions that come from another machine."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct

import pytest
from faked_machine import make_info

import ndpy
from ndpy.tools.doctor import linux_link
from ndpy.tools.doctor.link import LinkDescription
from ndpy.vocabulary import system_files
from ndpy.vocabulary.info import port_in_use

PORT = "sys/class/infiniband/mlx5_0/ports/1"
NET = "sys/class/net"
PLAIN = "INTERFACE=enp1s0\nIFINDEX=2\n"
VLAN_WORDS = (
    "enp1s0.100  VID: 100\t REORDER_HDR: 1  dev->priv_flags: 1021\n\ttotal frames received            0\nDevice: "
    "enp1s0\n"
)


def gid(index, address, kind="RoCE v2"):
    packed = (
        bytes(10) + b"\xff\xff" + socket.inet_aton(address)
        if "." in address
        else socket.inet_pton(socket.AF_INET6, address)
    )
    return ndpy.Gid(index, packed, kind, address)


GIDS = (gid(0, "fe80::1"), gid(3, "192.0.2.1"), gid(5, "198.51.100.1"))


def adapter(**changes):
    port = ndpy.PortInfo(1, "active", "Ethernet", 4096, 4096, 0, "enp1s0", GIDS)
    values = {"provider": "verbs", "transport": "RoCE", "state": "active", "netdev": "enp1s0", "ports": (port,)}
    return make_info(**({"addresses": ("192.0.2.1",), **values} | changes))


def good_files():
    """What a mlx5 adapter with a VLAN's interface has.
    GID 3 is that of the plain interface, GID 5 that of the VLAN's.
    """
    files = {
        f"{PORT}/rate": "100 Gb/sec (4X EDR)\n",
        f"{PORT}/gid_attrs/ndevs/3": "enp1s0\n",
        f"{PORT}/gid_attrs/ndevs/5": "enp1s0.100\n",
        f"{NET}/enp1s0/mtu": "9000\n",
        f"{NET}/enp1s0/uevent": PLAIN,
        f"{NET}/enp1s0.100/mtu": "4200\n",
        f"{NET}/enp1s0.100/uevent": "DEVTYPE=vlan\nINTERFACE=enp1s0.100\nIFINDEX=7\n",
        f"{NET}/enp1s0.100/lower_enp1s0": "",
        "proc/net/vlan/enp1s0.100": VLAN_WORDS,
        "sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos": "106\n",
    }
    for priority in range(8):
        files[f"{NET}/enp1s0/ecn/roce_np/enable/{priority}"] = "1\n"
        files[f"{NET}/enp1s0/ecn/roce_rp/enable/{priority}"] = "1\n" if priority == 3 else "0\n"
    return files


def read_link(info, gid_index, root, pause_of=lambda netdev: None, pfc_of=lambda netdev: None):
    """The link on the machine with these files. Its kernel answers nothing by default."""
    with system_files.below(root):
        return linux_link.read_link(info, gid_index, pause_of, pfc_of)


def whole():
    return LinkDescription(
        adapter="mlx5_0", transport="RoCE", addresses=("192.0.2.1",), port=1, port_state="active",
        link_layer="Ethernet",
        speed="100 Gb/sec (4X EDR)", netdev="enp1s0", link_mtu=9000, physical="enp1s0", physical_mtu=9000,
        rdma_mtu=4096, gid="192.0.2.1", gid_index=3,
        gid_type="RoCE v2", vlan=0, pfc=(3,), pause_receive=True, pause_send=False, ecn_notification=(3,),
        ecn_reaction=(),
        traffic_class=0,
    )  # fmt: skip


def test_a_whole_tree_is_described(tree):
    found = read_link(
        adapter(), 3, tree(good_files()), pause_of={"enp1s0": (True, False)}.get, pfc_of={"enp1s0": (3, 4)}.get
    )
    assert found == dataclasses.replace(
        whole(), pfc=(3, 4), ecn_notification=tuple(range(8)), ecn_reaction=(3,), traffic_class=106
    )


def test_the_gid_of_a_vlan_has_its_interface_and_the_flow_control_of_the_one_below(tree):
    asked = []
    found = read_link(adapter(), 5, tree(good_files()), pfc_of=lambda name: asked.append(name) or (3,))
    assert (found.netdev, found.vlan, found.link_mtu, found.gid) == ("enp1s0.100", 100, 4200, "198.51.100.1")
    assert (found.physical, found.physical_mtu) == ("enp1s0", 9000)
    assert asked == ["enp1s0"]
    assert (found.pfc, found.ecn_reaction) == ((3,), (3,))


def test_without_an_index_it_is_the_gid_that_connections_choose(tree):
    assert read_link(adapter(), None, tree(good_files())).gid_index == 3


def test_an_empty_tree_tells_nothing_and_nothing_is_guessed(tree):
    found = read_link(adapter(), 3, tree({}))
    assert found.netdev == "enp1s0"
    for name in (
        "speed",
        "link_mtu",
        "vlan",
        "pfc",
        "pause_receive",
        "pause_send",
        "ecn_notification",
        "ecn_reaction",
        "traffic_class",
    ):
        assert getattr(found, name) is None, name


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        (f"{NET}/enp1s0/mtu", "many\n", "link_mtu"),
        (f"{NET}/enp1s0/mtu", "9" * 5000, "link_mtu"),
        (f"{NET}/enp1s0/mtu", "\u0661\u0665\u0660\u0660", "link_mtu"),
        (f"{NET}/enp1s0/mtu", b"\xff\xfe\0", "link_mtu"),
        (f"{PORT}/rate", "\x1b[2J", "speed"),
        (f"{NET}/enp1s0/uevent", "", "vlan"),
        (f"{NET}/enp1s0/ecn/roce_np/enable/7", "2\n", "ecn_notification"),
        (f"{NET}/enp1s0/ecn/roce_np/enable/7", "\n", "ecn_notification"),
        ("sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", "256\n", "traffic_class"),
    ],
)
def test_odd_files_are_not_known(tree, name, content, field):
    assert getattr(read_link(adapter(), 3, tree(good_files() | {name: content})), field) is None


@pytest.mark.parametrize("words", ["", "VID:", "VID: 0", "VID: 4095", "VID: x", "enp1s0.100 VID 100"])
def test_a_vlan_without_a_number_is_not_known(tree, words):
    assert read_link(adapter(), 5, tree(good_files() | {"proc/net/vlan/enp1s0.100": words})).vlan is None


@pytest.mark.parametrize("name", ["../../etc", "..", "x" * 16, "a/b"])
def test_a_name_that_leads_elsewhere_is_not_followed(tree, name):
    found = read_link(adapter(), 3, tree(good_files() | {f"{PORT}/gid_attrs/ndevs/3": name}), pfc_of=lambda name: (1,))
    assert (found.netdev, found.link_mtu, found.pfc) == (None, None, None)


def test_a_pipe_or_a_folder_in_place_of_a_file_holds_nothing_up(tree):
    root = tree(good_files())
    for name in ("mtu", "uevent"):
        (root / NET / "enp1s0" / name).unlink()
    os.mkfifo(root / NET / "enp1s0/mtu")
    (root / NET / "enp1s0/uevent").mkdir()
    found = read_link(adapter(), 3, root)
    assert (found.link_mtu, found.vlan) == (None, None)


def test_iwarp_has_no_gid_and_no_size_of_packets_of_its_own(tree):
    found = read_link(adapter(transport="iWARP"), None, tree(good_files()))
    assert (found.gid, found.gid_type, found.rdma_mtu, found.link_mtu) == (None, None, None, 9000)


def test_an_adapter_without_ports_is_described(tree):
    found = read_link(adapter(ports=(), netdev=None), None, tree({}))
    assert (found.adapter, found.port, found.netdev) == ("mlx5_0", None, None)


def test_the_kernel_is_asked_about_interfaces_of_this_machine_without_harm():
    for name in ("lo", "absent0", "x" * 15, "%s", "\x01"):
        assert linux_link.pause_frames(name) is None
        assert linux_link.flow_control(name) is None


# The answer of the kernel, as linux/dcbnl.h and linux/netlink.h lay it out.


def attribute(kind, data):
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def answer(*attributes, kind=78):
    body = struct.pack("=BBH", 0, 21, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def pfc(enabled):
    return attribute(2, struct.pack("=BBBxH2x", 8, enabled, 0, 0) + bytes(128))


IEEE = 13


@pytest.mark.parametrize(("enabled", "expected"), [(0, ()), (0b1000, (3,)), (0x81, (0, 7))])
@pytest.mark.parametrize("nested", [0, 0x8000])
def test_priorities_with_flow_control_are_read(enabled, expected, nested):
    found = answer(attribute(1, b"enp1s0\0"), attribute(IEEE | nested, attribute(1, bytes(30)) + pfc(enabled)))
    assert linux_link.parse_flow_control(found) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(20),
        answer(),
        answer(attribute(IEEE, b"")),
        answer(attribute(IEEE, attribute(2, b"\x08"))),
        answer(attribute(IEEE, pfc(8)), kind=2),
        answer(attribute(IEEE, pfc(8)))[:60],
        answer(struct.pack("=HH", 0, IEEE)),
        answer(struct.pack("=HH", 999, IEEE)),
    ],
)
def test_other_answers_tell_nothing(data):
    assert linux_link.parse_flow_control(data) is None


# What comes from the other machine.


def test_a_description_crosses_the_wire():
    assert LinkDescription.from_dict(json.loads(json.dumps(whole().to_dict()))) == whole()
    little = LinkDescription("softnd0", "NetworkDirect")
    assert LinkDescription.from_dict(json.loads(json.dumps(little.to_dict()))) == little


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LinkDescription)])
@pytest.mark.parametrize(
    "value",
    ["\x1b]0;x\x07", "x" * 100_000, "$(reboot)", "a\nb", "\u202egnp", -1, 10**30, 1.5, True, None, [], [8], [True],
     ["\x1b"], {"a": 1}, [[1]]],
)  # fmt: skip
def test_what_the_peer_says_is_refused_or_harmless(field, value):
    try:
        found = LinkDescription.from_dict(whole().to_dict() | {field: value})
    except ValueError as error:
        assert len(str(error)) < 200 and str(error).isprintable()
        return
    texts = [str(part) for part in vars(found).values()]
    assert all(text.isprintable() and len(text) < 200 for text in texts)
    assert not any(mark in text for text in texts for mark in ("$", ";", "`", "\x1b"))


@pytest.mark.parametrize("values", [[], "x", None, 3, {"\x1b[2J": 1}, {"addresses": ["192.0.2.1"] * 65}])
def test_what_is_no_description_is_refused(values):
    with pytest.raises(ValueError) as caught:
        LinkDescription.from_dict(values)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("field", ["pfc", "ecn_notification", "ecn_reaction"])
@pytest.mark.parametrize("value", [[-1], [8], [3, 8], [True], [1.0], ["3"], list(range(9))])
def test_priorities_that_do_not_exist_are_refused(field, value):
    with pytest.raises(ValueError, match=r"priorit"):
        LinkDescription.from_dict(whole().to_dict() | {field: value})


def test_priorities_are_a_set():
    assert LinkDescription.from_dict(whole().to_dict() | {"pfc": [7, 0, 7]}).pfc == (0, 7)


def test_the_port_in_use_is_the_one_that_the_adapter_names():
    ports = [
        ndpy.PortInfo(n, state, "Ethernet", 4096, 4096, 0, f"eth{n}", ())
        for n, state in enumerate(("down", "active", "active"))
    ]
    assert port_in_use(adapter(ports=tuple(ports), port=1)) is ports[1]
    assert port_in_use(adapter(ports=tuple(ports), port=2)) is ports[2]
    assert port_in_use(adapter(ports=tuple(ports[:1]), port=1)) is ports[0]
    assert port_in_use(adapter(ports=())) is None
