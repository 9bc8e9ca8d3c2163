"""rig/run_tests.py, of which all that it would start is a stand-in."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit import linux_only as linux_only
from kit.deadlines import patient
from kit.helpers import wait_until
from kit.rig import RIG

LIMIT_S = patient(30)
PROGRAMS = (
    ".venv/bin/python",
    ".venv/bin/ndpy",
    "rig/wine-python",
    "rig/kernels.sh",
    "rig/sanitized.sh",
    "rig/windows/extension.sh",
    "bin/make",
)

# A program that leaves its process group, one that does not end when it is asked to, and a shell that waits for both.
SLEEPER = """#!/bin/sh
case "$0 $*" in
*extension.sh* | *compileall* | *programs.py* | *--collect-only* | *softnd.dll* | *providers*) exit 0 ;;
esac
echo $$ >>pids
setsid sh -c 'echo $$ >>pids; exec sleep 300' &
sh -c 'trap "" TERM; echo $$ >>pids; while :; do sleep 1; done' &
wait
"""
# Tells what it was called with, and fails if that has the word $FAILS.
TELLER = """#!/bin/sh
echo "$0 $* counts=$NDPY_STRESS,$NDPY_TEST_REQUESTS"
case "$*" in *"${FAILS:-nothing}"*) echo "this went wrong"; exit 3 ;; esac
"""


def ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def start(tmp_path):
    """start(program, *parts, **variables) runs it, where all that it starts is this program."""
    runs = []

    def once(program, *parts, **variables):
        (tmp_path / "rig").mkdir()
        for name in ("run_tests.py", "results.py"):
            shutil.copy(RIG / name, tmp_path / "rig")
        for name in PROGRAMS:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(program)
            path.chmod(0o755)
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "rig/run_tests.py", *parts]
        runs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes))
        return runs[-1]

    yield once
    for run in runs:
        run.kill()
        run.wait()
        run.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_nothing_that_it_started_runs_on(start, tmp_path, number):
    pids = tmp_path / "pids"
    run = start(SLEEPER)
    try:
        # Three rows, each with three processes.
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 9, "all rows have begun", LIMIT_S)
        began = time.monotonic()
        run.send_signal(number)
        assert run.wait(LIMIT_S) == 130
        left = [pid for pid in map(int, pids.read_text().split()) if not ended(pid)]
        assert not left, f"after {time.monotonic() - began:.1f} s"
        assert "Traceback" not in run.communicate()[0]
    finally:
        for pid in map(int, pids.read_text().split()) if pids.exists() else ():
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_part_that_failed_is_named_with_the_end_of_what_it_printed(start):
    run = start(TELLER, FAILS="tests/softnd/test_siw.py", PARTS="soft0 softnd-siw vm")
    said = run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 1
    assert said.splitlines()[-1] == "failed: softnd-siw"
    # Each log once, and the end of the failed one again.
    assert said.count("== soft0 (after") == 1
    assert said.count("== softnd-siw (after") == said.count("this went wrong") == 2
    assert said.index("--adapter soft0") < said.index("== the other rows") < said.index("test_vm.py")


def begun(said):
    return [line.split()[1] for line in said.splitlines() if line.startswith("== ") and "(after" in line]


def test_there_are_only_the_parts_of_the_table(start):
    run = start(TELLER, PARTS="unit rxe1")
    assert "there is no part rxe1; there are: soft0 wheels rxe0 unit" in run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 2


def test_arguments_of_pytest_may_be_quoted(start):
    run = start(TELLER, "hosts", ARGS="tests/x.py -k 'two words'", ADAPTER="siw", CPUS="3")
    said = run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 0, said
    assert "--adapter siw --cpus 3" in said and "tests/x.py -k two words" in said and "tests/hosts" not in said


def test_a_stress_run_has_more_parts_and_full_counts(start):
    run = start(TELLER, NDPY_STRESS="1")
    said = run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 0, said
    assert {"aarch64", "tsan", "faults", "rxe0", "siw0"} < set(begun(said)) and "kernels" not in begun(said)
    # In some parts all counts are full, in some only those of random requests, in some none.
    counts = [
        (name, line.split("counts=")[1])
        for line in said.splitlines()
        for name in ("rxe0", "siw0", "asan")
        if f"{name}.xml" in line
    ]
    assert set(counts) == {("rxe0", "1,"), ("siw0", ",100000")} | {("asan", ",")}


def test_a_row_that_has_ended_takes_parts_of_others_but_none_before_what_it_needs(start):
    run = start(TELLER, PARTS="wheels rxe0 newest-kernel vm softverbs aarch64")
    said = run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 0, said
    took = next(line for line in said.splitlines() if line.startswith("parts: ")).split()[1::3]
    assert took.index("wheels") < took.index("rxe0")
    assert took.index("wheels") < took.index("aarch64")
    assert sorted(took) == ["aarch64", "newest-kernel", "rxe0", "softverbs", "vm", "wheels"]
