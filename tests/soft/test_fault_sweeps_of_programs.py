"""Sweeps of both ends of real programs on soft0. tests/soft/swept_programs.py makes the table of docs/faults.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import STRESS, only_under_stress
from two_ended import PROGRAMS

from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario

#: A run takes two to three seconds, and there are twelve sweeps of examples.
MOST_RUNS = 50 if STRESS else 6
pytestmark = pytest.mark.timeout(patient(60 + 10 * MOST_RUNS))

ENDS = Path(__file__).with_name("two_ended.py")


def sweep(
    folder: Path, name: str, end: str, runs: int, *options: str, deadline_s: float | None = patient(20)
) -> list[dict]:
    """Sweep a program. Returns its runs."""
    program = PROGRAMS[name][0][0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: make setup")
    report = folder / "report.json"
    words = [sys.executable, "-m", "ndpy", "faults", "sweep", "--max-runs", str(runs)]
    words += ["--deadline", str(deadline_s)] if deadline_s else []
    done = subprocess.run(
        [*words, *options, "--json", report, "--", sys.executable, ENDS, name, end],
        capture_output=True,
        text=True,
        timeout=patient(30 * runs),
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(report.read_text())["runs"]


def test_fi_pingpong_ends_when_a_request_fails(tmp_path):
    runs = sweep(tmp_path, "fi_pingpong", "client", 6, "--only", "status")
    assert len(runs) == 6
    assert {run["outcome"] for run in runs} <= {"succeeded", "failed"}
    assert all(len(run["fired"]) == 1 for run in runs)


@only_under_stress
@pytest.mark.parametrize("do", ["mute", "port_down"])
def test_a_program_that_is_told_of_the_end_in_time_does_not_hang(tmp_path, do):
    """soft0 gives up to connect after 21 to 54 s. rdma_client prints an error then, and ends."""
    (run,) = sweep(tmp_path, "rdma_server", "client", 1, "--only", do, deadline_s=None)
    assert run["outcome"] == "failed", run


@pytest.mark.parametrize("end", ["client", "server"])
@pytest.mark.parametrize(
    "name", ["echo", "key_value_store", "file_server", "publish_array", "sharded_tensor", "block_transfer"]
)
def test_examples_of_aio_end_cleanly_under_every_fault(tmp_path, name, end):
    if not STRESS and (name, end) != ("echo", "client"):
        pytest.skip("with NDPY_STRESS=1 only: each run takes a second")
    runs = sweep(tmp_path, name, end, MOST_RUNS if STRESS else 3)
    bad = [run for run in runs if run["outcome"] not in ("succeeded", "failed", "not reached")]
    assert not bad
    # An error that is told, and no traceback of what nobody has foreseen.
    assert not [run for run in runs if "Traceback" in run["output"]]


OPENS = "import ndpy; ndpy.open_adapter('soft0').close()"


def opened(folder: Path, fault: Fault) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How a process ends that opens soft0, and what it leaks."""
    statistics = folder / "statistics"
    with Injection(Scenario([fault])) as injection:
        environment = injection.environment() | {"SOFTVERBS_STATISTICS": str(statistics)}
        done = subprocess.run(
            [sys.executable, "-c", OPENS], env=environment, capture_output=True, text=True, timeout=patient(60)
        )
        injection.report().check()
    # The connection manager keeps its adapter.
    left = re.findall(r"^(?!adapter:).*, [1-9]\d* leaked$", statistics.read_text(), re.MULTILINE)
    return done, left


@pytest.mark.parametrize("nth", [1, 2])
def test_an_adapter_that_refuses_to_deregister_once_is_opened_and_nothing_leaks(tmp_path, nth):
    """Opening registers memory to see what the adapter can do."""
    done, left = opened(tmp_path, Fault("errno", call="dereg_mr", errno="EBUSY", nth=nth))
    assert (done.returncode, left) == (0, []), done.stderr


def test_an_adapter_that_refuses_to_deregister_at_all_is_not_opened(tmp_path):
    done, _ = opened(tmp_path, Fault("errno", call="dereg_mr", errno="EBUSY"))
    assert done.returncode == 1
    assert "DeviceBusyError: open adapter" in done.stderr
