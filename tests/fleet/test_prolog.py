"""`ndpy fleet --prolog` on soft0: one machine against a report of before."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import Process
from kit.reports import report

from ndpy.fleet.report.document import to_text
from ndpy.fleet.results import Machine

pytestmark = pytest.mark.timeout(patient(120))


@pytest.fixture
def prolog(tmp_path):
    """prolog(*words) runs it against three good machines with this adapter."""
    machines = tuple(Machine(f"n{at}", (at,), {"soft0 transport": "iWARP"}) for at in range(3))
    baseline = tmp_path / "good.json"
    baseline.write_text(to_text(dataclasses.replace(report(3), machines=machines)))

    def run(*words, scenario: str = ""):
        command = [sys.executable, "-m", "ndpy"]
        if scenario:
            (tmp_path / "faults.toml").write_text(scenario)
            command += ["faults", "run", "-f", str(tmp_path / "faults.toml"), "--", *command]
        command += ["fleet", "--prolog", "--baseline", str(baseline), *words]
        with Process(*command, variables={"NDPY_ADAPTER": "soft0", "NDPY_FLEET_NODE": "n9"}) as process:
            result = process.finish(PROGRAM_DEADLINE_S)
        return result.status, result.out.splitlines()

    return run


def test_a_good_machine_has_no_faults(prolog, tmp_path):
    assert prolog("--json", str(tmp_path / "n9.json")) == (0, ["fleet: no suspects"])
    told = json.loads((tmp_path / "n9.json").read_text("utf-8"))
    assert (told["engine"], [machine["node"] for machine in told["machines"]]) == ("prolog", ["n9"])
    assert told["machines"][0]["facts"]["soft0 transport"] == "iWARP"


def test_an_adapter_whose_messages_fail_is_named_in_one_line_with_what_to_do(prolog):
    fault = '[[fault]]\ndo = "status"\noperation = "send"\nnth = 3\nstatus = "RETRY_EXC_ERR"\n'
    status, (line, last, *_) = prolog(scenario=fault)
    assert (status, last) == (1, "fleet: 1 suspect")
    assert line.startswith("fleet: soft0 of n9 does not work: at the peer: ")
    assert line.endswith("; run `ndpy doctor` there")


def test_an_adapter_that_is_not_there_is_named(prolog):
    status, lines = prolog("mlx5_9")
    assert (status, len(lines)) == (1, 2)
    assert lines[0].startswith("fleet: mlx5_9 of n9 does not work: ")


def test_without_a_baseline_it_says_that_it_needs_one():
    with Process(sys.executable, "-m", "ndpy", "fleet", "--prolog") as process:
        result = process.finish(PROGRAM_DEADLINE_S)
    assert (result.status, "--prolog needs --baseline" in result.err) == (2, True)


@pytest.mark.skipif(not os.environ.get("NDPY_STRESS"), reason="a minute: NDPY_STRESS")
def test_an_adapter_that_hangs_is_named_within_a_minute(prolog):
    began = time.monotonic()
    status, lines = prolog(scenario='[[fault]]\ndo = "delay"\nat = "request"\nms = 100000\n')
    assert time.monotonic() - began < 60
    assert (status, len(lines[0].splitlines())) == (1, 1)
    assert lines[0].startswith("fleet: soft0 of n9 does not work: ")
