"""Which ends share a leaf or a rail: files, LLDP, and what is wrong with them."""

from __future__ import annotations

import pytest

from ndpy.fleet import topology
from ndpy.fleet.results import End
from ndpy.fleet.topology import TopologyError, from_lldp, node_set, read, unknown


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib, m", ["n1-ib", "n2-ib", "m"]),
    ],
)
def test_a_node_set_has_these_nodes(text, nodes):
    assert node_set(text) == nodes


@pytest.mark.parametrize(
    "text", ["", "n[", "n]1[", "n[3-1]", "n[a-b]", "n[1-2", "a,,b", "n[]", "n[1-999999999]", "a b"]
)
def test_what_is_no_node_set_is_refused(text):
    with pytest.raises(TopologyError):
        node_set(text)


def ends() -> list[End]:
    return [End(2 * node + card, f"n{node}", f"mlx5_{card}") for node in range(1, 5) for card in range(2)]


def written(tmp_path, text: str):
    path = tmp_path / "topology"
    path.write_text(text)
    return path


def test_toml_gives_leafs_and_rails(tmp_path):
    path = written(
        tmp_path,
        '[leaf]\nl1 = "n[1-2]"\nl2 = ["n3", "n4"]\n[rail]\n0 = "*/mlx5_0"\n1 = "*/mlx5_1"\n[rack]\n"r 1" = "n[1-4]"\n',
    )
    placed = read(path).place(ends())
    assert set(placed[0].groups) == {"rail 0", "leaf l1", "rack r 1"}
    assert set(placed[7].groups) == {"rail 1", "leaf l2", "rack r 1"}
    assert read(path).missing([*ends(), End(9, "n9", "mlx5_7")]) == ("n9",)


def test_an_adapters_own_leaf_goes_before_that_of_its_node(tmp_path):
    path = written(tmp_path, '[leaf]\nl1 = "n[1-4]"\nl9 = "n2/mlx5_1"\n')
    assert [end.groups for end in read(path).place(ends())][2:4] == [("leaf l1",), ("leaf l9",)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[leaf]\nl1 = "n[1-2]"\n\nl2 = "n2"\n', [":4: n2 is in leaf l2", "leaf l1 by line 2"]),
        ('[leaf]\nl1 = "n[1-x]"\n', [":2:", "leaf l1", "'1-x'"]),
        ("[leaf]\nl1 = 7\n", [":2:", "leaf l1", "7"]),
        ('leaf = "n1"\n', [":1:", "'leaf'", "[leaf]"]),
        ("what is this", ["neither TOML nor Slurm's topology.conf"]),
        ("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n2\n", [":2: n2 is in leaf s2", "leaf s1 by line 1"]),
        ("SwitchName=s1\n", [":1:", "s1", "neither Nodes= nor Switches="]),
        ("# a\nSwitchName=s1 Nodes\n", [":2:", "'Nodes'"]),
        ("SwitchName=s1 Nodes=n[1-\n", [":1:", "leaf s1"]),
        ("SwitchName=a Nodes=n1 Switches=b\nSwitchName=b Switches=a\n", ["is above itself"]),
        ("SwitchName=a Nodes=n1\nLinkSpeed=1\n", [":2:", "neither SwitchName="]),
    ],
)
def test_an_error_says_file_line_and_node(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(TopologyError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(TopologyError, match="nowhere"):
        read(tmp_path / "nowhere")


def test_slurms_tree_gives_leafs_and_the_switches_above_that_tell_nodes_apart(tmp_path):
    path = written(
        tmp_path,
        "# a tree\n"
        "SwitchName=s1 Nodes=n[1-2] LinkSpeed=100\n"
        "switchname=s2 \\\n  nodes=n3\n"
        "SwitchName=s3 Nodes=n4\n"
        "SwitchName=core1 Switches=s[1-2]\n"
        "SwitchName=top Switches=core1,s3\n",
    )
    groups = {end.node: end.groups for end in read(path).place(ends())}
    assert groups == {
        "n1": ("leaf s1", "switch core1"),
        "n2": ("leaf s1", "switch core1"),
        "n3": ("leaf s2", "switch core1"),
        "n4": ("leaf s3",),
    }


def test_slurms_blocks_are_groups(tmp_path):
    path = written(tmp_path, "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n")
    assert [end.groups for end in read(path).place(ends())] == [("block b1",)] * 4 + [("block b2",)] * 4


def test_lldp_names_the_leaf_of_each_adapter():
    switches = {
        "n1": {"eth0": "sw1", "eth1": "sw2"},
        "n2": {"eth0": "sw1"},
        "n3": {"eth0": "sw3", "eth1": "sw3"},
        "n4": {},
    }
    interfaces = {
        ("n1", "mlx5_0"): "eth0",
        ("n1", "mlx5_1"): "eth1",
        ("n4", "mlx5_0"): "eth0",
        ("n9", "mlx5_0"): "eth0",
    }
    placed = from_lldp(switches, interfaces).place(ends())
    assert [end.groups for end in placed] == [
        ("leaf sw1",),
        ("leaf sw2",),
        ("leaf sw1",),
        ("leaf sw1",),
        ("leaf sw3",),
        ("leaf sw3",),
        (),
        (),
    ]
    assert from_lldp(switches).place(ends())[0].groups == ()


def test_without_a_topology_nothing_is_shared():
    assert unknown().place(ends()) == tuple(ends())
    assert topology.kind_of("leaf l3") == "leaf"
