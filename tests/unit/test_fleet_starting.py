"""How `ndpy fleet` learns who it is from its environment, and which machines are unlike the majority."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest

from ndpy.fleet import compare
from ndpy.fleet.engines import detect, ssh
from ndpy.fleet.engines.start import EngineError, Start
from ndpy.fleet.results import Kind, Machine, Quantity, Suspect

TOKEN = {"NDPY_FLEET_TOKEN": "a secret"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "7471"}, (1, 2, ("n0",), 7471)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n0"}, (1, 2, ("n0",), 18522)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[4-7]"}, (3, 4, ("n4",), 18522)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n4"}, (0, 2, ("127.0.0.1",), 18522)),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}, (1, 2, ("job-0",), 18522)),
    ],
)
def test_each_launcher_says_which_rank_this_is_and_where_rank_0_is(environment, expected):
    rank, size, hosts, port = expected
    assert detect({**environment, **TOKEN}) == Start("rendezvous", rank, size, hosts, port, b"a secret")


def test_the_innermost_launcher_counts():
    """mpirun in an allocation of Slurm: all ranks of a node have one SLURM_PROCID."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n4"}
    start = detect({**slurm, "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n4", **TOKEN})
    assert start is not None and (start.rank, start.size) == (5, 8)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, "RANK is 2, but WORLD_SIZE is 2; ranks count from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}, "RANK is '-1'; it must be a number from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "nothing says where rank 0 is; set MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "0"}, "set WORLD_SIZE to the Job's completions too"),
    ],
)
def test_what_is_wrong_is_told_with_the_variable(environment, message):
    with pytest.raises(EngineError, match=message):
        detect({**environment, **TOKEN})


@pytest.mark.parametrize("host", ["n0", "192.0.2.1", "::", "0.0.0.0"])
def test_without_a_token_rank_0_is_on_the_loopback_interface(host):
    with pytest.raises(EngineError, match="which others may reach too; give all ranks one secret"):
        detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host})
    for loopback in ("127.0.0.1", "::1", "localhost"):
        assert detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": loopback}) is not None


def machines(*values):
    return [Machine(f"n{at}", (at,), {"mlx5_0 MTU": value}) for at, value in enumerate(values)]


def test_a_machine_unlike_the_majority_is_a_suspect():
    (suspect,) = compare.unlike(machines("4096", "4096", "1024", "4096"))
    assert (suspect.nodes, suspect.measurements, suspect.confidence) == (("n2",), 4, 0.75)
    assert suspect.reason == "mlx5_0 MTU is 1024 on n2, and 4096 on 3 of 4 machines"


def test_a_machine_with_an_adapter_of_another_name_is_compared_if_each_has_one():
    several = machines("4096", "4096", "1024")
    several[2] = Machine("n2", (2,), {"ibp7s0 MTU": "1024"})
    (suspect,) = compare.unlike(several)
    assert suspect.reason == "ibp7s0 MTU is 1024 on n2, and 4096 on 2 of 3 machines"
    several[0].facts["mlx5_1 MTU"] = "4096"
    assert compare.unlike(several) == []


def test_a_suspect_is_told_with_what_its_machine_counted_more_than_the_others():
    counters = (
        {"a0 retries": 3},
        {"a1 retries": 40, "b1 retries": 2, "a1 drops": 1},
        {"a2 retries": 41, "a2 drops": 1},
    )
    several = [Machine(f"n{at}", (at,), {}, (), grown) for at, grown in enumerate(counters)]
    slow = Suspect(Kind.NODE, "n1", ("n1",), Quantity.BANDWIDTH, 0.5, 0.99, 9, "It is slow.", "look there")
    told = compare.with_counters(slow, several)
    assert told.reason == "It is slow. Meanwhile n1 counted more than any other machine: retries +42."
    assert replace(told, reason=slow.reason) == slow
    for other in (replace(slow, nodes=("n0",)), replace(slow, nodes=("n1", "n2")), replace(slow, nodes=("n7",))):
        assert compare.with_counters(other, several) == other


@pytest.mark.parametrize(
    "values", [("4096", "1024"), ("4096", "4096", "1024", "1024"), ("1", "2", "3"), ("1", "1", "1")]
)
def test_without_a_majority_nobody_is_a_suspect(values):
    assert compare.unlike(machines(*values)) == []


@pytest.mark.parametrize(
    ("platform", "message"),
    [("linux", r"pip install 'ndpy\[fleet\]'"), ("win32", "with RANK, WORLD_SIZE, MASTER_ADDR")],
)
def test_without_clustershell_hosts_says_what_to_do(monkeypatch, platform, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(EngineError, match=message):
        ssh.hosts_of("n[1-4]")


@pytest.mark.parametrize("wrong", ["n[1", "", "-oProxyCommand=x"])
def test_what_is_no_node_set_is_told(wrong):
    pytest.importorskip("ClusterShell", reason="ClusterShell is not installed")
    with pytest.raises(EngineError, match="--hosts"):
        ssh.hosts_of(wrong)


def test_a_member_is_told_where_rank_0_is_with_the_best_address_first():
    start = ssh.start_of(["n1", "n2"], {"MASTER_ADDR": "192.0.2.7", **TOKEN}, 18522, b"")
    assert (start.size, start.hosts[0], start.token) == (2, "192.0.2.7", b"a secret")
    assert len(ssh.start_of(["n1"], {}, 18522, b"").token) == 32
