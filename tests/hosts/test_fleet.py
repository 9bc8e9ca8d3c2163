"""`ndpy fleet` between two hosts, with one rank on each, on a good network and on a bad one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts.conftest import NETDEV
from kit.deadlines import patient
from kit.helpers import DEADLINE_S, only_under_stress
from kit.processes import Process

pytestmark = [pytest.mark.timeout(patient(600)), only_under_stress]
PORT = 18522
# In seconds, on an emulated machine.
JOIN_S, PAIR_S, RUN_S = 120, 60, 300


@pytest.fixture
def fleet(peer_host, adapter_name) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs between both hosts: its exit status and output. Rank 0 is here. The ranks speak by the other network."""
    common = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": os.environ["NDPY_CONTROL_ADDRESS"],
        "MASTER_PORT": PORT,
        "NDPY_FLEET_TOKEN": "of-this-test",
    }

    def command(rank: int, *words: object) -> list[str]:
        variables = {**common, "RANK": rank, "NDPY_FLEET_NODE": f"n{rank}"}
        program = ("-m", "ndpy", "fleet", adapter_name, "--join", f"{JOIN_S}s", "--timeout", PAIR_S)
        settings = [f"{name}={value}" for name, value in variables.items()]
        return ["env", *settings, sys.executable, *map(str, (*program, *words))]

    def run(*words: object) -> tuple[int, str]:
        with contextlib.ExitStack() as stack:
            other = peer_host.call("kit.processes:Process", *command(1))
            stack.callback(other.__exit__, None, None, None)
            first = stack.enter_context(Process(*command(0, *words)))
            done = first.finish(patient(RUN_S))
            assert other.finish(DEADLINE_S).status == 0
        return done.status, done.out

    yield run


def _report(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def _kinds_of_loss(report: dict[str, Any], node: str) -> set[str]:
    (machine,) = (each for each in report["machines"] if each["node"] == node)
    return {name.partition(" ")[2] for name in machine["counters"]}


def test_a_slow_network_is_worse_than_the_good_one_before(fleet, network, tmp_path):
    """Two ends have only each other, so that nobody is named. The run before says what is good."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    status, out = fleet("--json", good)
    assert (status, _report(good)["suspects"]) == (0, []), out
    assert [row for row in _report(good)["measurements"] if row[5] is None] == []
    network.run_there("tc", "qdisc", "add", "dev", NETDEV, "root", "netem", "delay", "20ms")
    status, out = fleet("--json", bad, "--baseline", good)
    assert (status, _report(bad)["suspects"]) == (1, []), out
    assert "worse: pairs: the latency of all is" in out


def test_packets_that_get_lost_are_counted_at_their_sender(fleet, network, tmp_path, adapter_name):
    if "rxe" not in adapter_name:
        pytest.skip("this adapter has no counters")
    file = tmp_path / "report.json"
    network.run_there("tc", "qdisc", "add", "dev", NETDEV, "root", "netem", "loss", "0.5%")
    _, out = fleet("--json", file)
    report = _report(file)
    assert "rcvd_seq_err" in _kinds_of_loss(report, "n1"), out
    assert "rcvd_seq_err" not in _kinds_of_loss(report, "n0"), out
