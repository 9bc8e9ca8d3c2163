"""The commands of ndpy faults, with a program that does as if it had an adapter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from kit.deadlines import patient

from ndpy.faults import Fault, ScenarioError, kinds, places, sweeping
from ndpy.faults.places import Passages
from ndpy.platforms.verbs import softverbs
from ndpy.tools.cli import main

PROGRAM = Path(__file__).with_name("swept_program.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not softverbs.is_there(), reason="softverbs is for Linux, and has to be built"
)


def ndpy(*words: object) -> list[str]:
    return [sys.executable, "-m", "ndpy", "faults", *map(str, words)]


def run(*words: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(ndpy(*words), capture_output=True, text=True, timeout=patient(timeout))


def invoke(*words: object) -> Result:
    """In this process: a sweep ends all descendants of its process, but the other commands do not."""
    return CliRunner().invoke(main, ["faults", *map(str, words)])


def living(folder: Path) -> list[int]:
    """The processes of the program that still run."""
    numbers = [int(path.stem) for path in folder.glob("*.pid")]
    assert numbers
    return [number for number in numbers if psutil.pid_exists(number)]


def test_a_sweep_tells_apart_how_a_program_can_end(tmp_path):
    report = tmp_path / "report.json"
    done = run(
        "sweep", "--deadline", patient(0.8), "--json", report, "--lost-data", "WRONG DATA", "--only", "errno", "--only",
        "status",
        "--only", "delay", "--only", "silent", "--only", "hold", "--only", "slow", "--max-runs", 12, "--",
        sys.executable, PROGRAM, tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "2 places, 26 single faults; running 12" in done.stderr
    values = json.loads(report.read_text())
    assert values["left_out"] == 14
    outcomes = {run["fault"]["do"]: run["outcome"] for run in values["runs"] if run["fault"]["nth"] == "1"}
    assert outcomes == {
        "errno": "failed", "slow": "succeeded", "status": "lost data", "delay": "hung", "silent": "crashed",
        "hold": "leaked",
    }  # fmt: skip
    assert {run["outcome"] for run in values["runs"] if run["fault"]["do"] == "slow"} == {"succeeded", "not reached"}
    assert "crashed: do=silent at=request operation=send queue_pair=1 nth=" in done.stdout
    assert "  silent at send 1 of queue pair 1" in done.stdout
    assert living(tmp_path) == []


def test_ctrl_c_ends_a_sweep_within_a_second_with_all_that_it_has_started(tmp_path):
    words = ndpy("sweep", "--only", "delay", "--", sys.executable, PROGRAM, tmp_path)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + patient(60)
    # The run that counts, the one that hangs, and what it has started.
    while len(list(tmp_path.glob("*.pid"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, told = process.communicate(timeout=patient(30))
    assert time.monotonic() - began < patient(1)
    assert process.returncode == 130, told
    assert living(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--", "false"], 125, "without a fault, false ends with status 1"),
        (["--", "true"], 125, "true has made no call that engine has seen"),
        (["--deadline", "0.2", "--", "sleep", "600"], 125, "without a fault, sleep does not end within"),
        (["--", "/nowhere/there"], 127, "/nowhere/there cannot be run"),
        (["--", "/"], 126, "/ cannot be run"),
    ],
    ids=str,
)
def test_a_sweep_that_cannot_begin_says_why(words, status, said):
    done = run("sweep", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_a_pattern_that_is_none_is_refused():
    done = invoke("sweep", "--lost-data", "(", "--", "true")
    assert done.exit_code == 2
    assert "not a regular expression" in done.stderr


# ---- the choice ----


def test_a_few_faults_are_all_run():
    found = sweeping.groups([Passages("call", "post_send", 2, 3)], "engine")
    faults = list(sweeping.choose(found, 100, 1))
    assert {(fault.do, fault.nth) for fault in faults} == {(do, nth) for do in ("errno", "slow") for nth in (1, 2, 3)}
    assert {(fault.call, fault.queue_pair) for fault in faults} == {("post_send", 2)}


def test_of_many_each_place_has_its_share_and_the_seed_decides():
    passed = [Passages("call", "poll_cq", 0, 1_000_000), Passages("call", "reg_mr", 0, 2)]
    found = sweeping.groups(passed, "engine", only=("errno",))
    chosen = list(sweeping.choose(found, 10, 1))
    assert len(chosen) == 10
    assert {fault.nth for fault in chosen if fault.call == "reg_mr"} == {1, 2}
    assert {1, 1_000_000} < {fault.nth for fault in chosen if fault.call == "poll_cq"}
    assert chosen == list(sweeping.choose(found, 10, 1)) != list(sweeping.choose(found, 10, 2))


@pytest.mark.parametrize("executor", kinds.EXECUTORS)
def test_every_place_has_faults_that_can_be(executor):
    passed = [Passages("call", call.name, 1 if call.of_queue_pair else 0, 1) for call in kinds.CALLS]
    passed += [Passages(at, name, 1, 1) for at in ("request", "message") for name in kinds.OPERATIONS]
    passed += [Passages("connection", "", 1, 1), Passages("adapter", "", 1, 1)]
    try:
        faults = list(sweeping.choose(sweeping.groups(passed, executor), 10_000, 1))
    except ScenarioError as error:
        pytest.fail(str(error))
    singly = {(fault.at, fault.do) for fault in faults}
    wanted = {(kind.at, kind.do) for kind in kinds.kinds_for(executor) if not kind.for_datagrams}
    assert singly == wanted - {("call", "limit")}
    assert all(isinstance(fault, Fault) for fault in faults)


def test_datagrams_come_twice_only_if_that_is_asked_for_by_name():
    passed = [Passages("message", "send", 1, 3)]
    assert len(sweeping.groups(passed, "shim", only=("duplicate",))) == 1
    assert {group.kind.do for group in sweeping.groups(passed, "shim")} == {"corrupt"}


def test_counts_of_another_version_are_refused(tmp_path):
    path = tmp_path / "counts"
    assert places.read(path) == []
    path.write_bytes(b"ndpcount" + bytes(8))
    with pytest.raises(ValueError, match="of another version"):
        places.read(path)


# ---- run and list ----


def write(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


FIRES = '[[fault]]\ndo = "{}"\noperation = "send"\nnth = 1\n'


def test_run_reports_what_fired_and_has_the_status_of_the_program(tmp_path):
    report = tmp_path / "report.json"
    scenario = write(tmp_path, FIRES.format("silent"))
    done = run("run", "-f", scenario, "--json", report, "--", sys.executable, PROGRAM, tmp_path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "fired: silent at send 1 of queue pair 1" in done.stderr
    assert json.loads(report.read_text())["never_fired"] == []


@pytest.mark.parametrize(("option", "status"), [((), 124), (("--allow-unfired",), 0)], ids=str)
def test_a_fault_that_never_fired_is_an_error_unless_it_is_allowed(tmp_path, option, status):
    done = invoke("run", "-f", write(tmp_path, FIRES.format("silent")), *option, "--", "true")
    assert done.exit_code == status
    assert "never fired: do=silent at=request operation=send nth=1" in done.stderr


@pytest.mark.parametrize(
    ("text", "words", "status", "said"),
    [
        ('[[fault]]\ndo = "silnt"\n', ["true"], 125, "line 2: 'silnt' is not a kind of fault"),
        (
            '[[fault]]\ndo = "path_migrated"\n',
            ["true"],
            125,
            "fault 1: engine cannot make it, because a connection of soft0 and softnd has one path; shim can: do=",
        ),
        ("", ["/nowhere/there"], 127, "/nowhere/there cannot be run"),
        ("", ["sh", "-c", "exit 7"], 7, "no faults"),
    ],
    ids=str,
)
def test_run_says_what_is_wrong(tmp_path, text, words, status, said):
    done = invoke("run", "-f", write(tmp_path, text), "--", *words)
    assert done.exit_code == status
    assert said in done.stderr


def test_the_program_of_run_has_soft0_and_the_scenario(tmp_path):
    code = "import os; print(os.environ['NDPY_ADAPTER'], open(os.environ['NDPY_FAULTS']).read())"
    done = run("run", "-f", write(tmp_path, "seed = 9"), "--", sys.executable, "-c", code)
    assert done.stdout.startswith("soft0 scenario 1\nseed 9\nreport "), done.stderr


def test_list_has_every_kind():
    rows = json.loads(invoke("list", "--json").stdout)
    assert [(row["at"], row["do"]) for row in rows] == [(kind.at, kind.do) for kind in kinds.KINDS]
    text = invoke("list").stdout
    assert all(kind.meaning in text for kind in kinds.KINDS)


def test_sigterm_ends_a_sweep_too(tmp_path):
    words = ndpy("sweep", "--only", "delay", "--", sys.executable, PROGRAM, tmp_path)
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + patient(60)
    while len(list(tmp_path.glob("*.pid"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    assert process.wait(patient(30)) == 128 + signal.SIGTERM
    assert living(tmp_path) == []
