"""rig/test.sh that is ended: nothing that it started runs on. All that it would start are stand-ins that sleep."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import patient
from helpers import wait_until

if sys.platform != "linux":
    pytest.skip("the scripts are for Linux", allow_module_level=True)

RIG = Path(__file__).parents[2] / "rig"
if not RIG.is_dir():
    pytest.skip("the tests of a wheel have no rig", allow_module_level=True)
LIMIT_S = patient(30)

# A program that leaves its process group, one that does not end when it is asked to, and a shell that waits for both.
SLEEPER = """#!/bin/sh
case "$*" in *compileall* | *programs.py* | *--collect-only*) exit 0 ;; esac
echo $$ >>pids
setsid sh -c 'echo $$ >>pids; exec sleep 300' &
sh -c 'trap "" TERM; echo $$ >>pids; while :; do sleep 1; done' &
wait
"""


def ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_nothing_that_it_started_runs_on(tmp_path, number):
    (tmp_path / "rig").mkdir()
    shutil.copy(RIG / "test.sh", tmp_path / "rig")
    for program in (".venv/bin/python", ".venv/bin/ndpy", "rig/test-softnd.sh", "rig/test-kernels.sh", "bin/make"):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" if program == "bin/make" else SLEEPER)
        path.chmod(0o755)
    run = subprocess.Popen(
        ["rig/test.sh"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = tmp_path / "pids"
    try:
        # Three rows, each with three processes.
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 9, "all rows have begun", LIMIT_S)
        began = time.monotonic()
        run.send_signal(number)
        assert run.wait(LIMIT_S) == 130
        left = [pid for pid in map(int, pids.read_text().split()) if not ended(pid)]
        assert not left, f"after {time.monotonic() - began:.1f} s"
    finally:
        for pid in map(int, pids.read_text().split()) if pids.exists() else ():
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()
