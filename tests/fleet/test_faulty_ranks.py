"""Ranks with faults that are really made: each is named, and nobody else is. On soft0, by the rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import Process, free_port

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("20 runs of each fault: NDPY_STRESS", allow_module_level=True)

pytestmark = pytest.mark.timeout(patient(180))

RUNS = 20
SLOW = '[[fault]]\ndo = "delay"\nat = "request"\nevery = 4\nms = 2\n'
# TCP sends a lost packet again after some time.
LOSSY = '[[fault]]\ndo = "delay"\nat = "message"\nprobability = 0.1\nms = 15\n'
CORRUPT = '[[fault]]\ndo = "corrupt"\noperation = "write"\nevery = 5\n'
FAILING = '[[fault]]\ndo = "status"\noperation = "send"\nevery = 20\nstatus = "RETRY_EXC_ERR"\n'
REFUSING = '[[fault]]\ndo = "errno"\ncall = "reg_mr"\nerrno = "ENOMEM"\nevery = 1\n'
#: What is wrong at which ranks: a scenario of faults, or a signal after the first round.
CASES: dict[str, dict[int, str | signal.Signals]] = {
    "none": {},
    "slow": {2: SLOW},
    "lossy": {2: LOSSY},
    "wrong bytes": {3: CORRUPT},
    "failing": {1: FAILING},
    "no memory": {4: REFUSING},
    "killed": {2: signal.SIGKILL},
    "hanging": {2: signal.SIGSTOP},
    "slow and killed": {1: SLOW, 5: signal.SIGKILL},
    "slow and wrong bytes": {1: SLOW, 6: CORRUPT},
}


@pytest.mark.parametrize("run", range(RUNS), ids=lambda run: f"run{run}")
@pytest.mark.parametrize("case", CASES)
def test_each_bad_rank_is_named_and_no_good_one(tmp_path, case, run):
    bad, file = CASES[case], tmp_path / "report.json"
    size = 8 if len(bad) > 1 else 5
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NDPY_ADAPTER": "soft0",
    }
    with contextlib.ExitStack() as stack:

        def start(rank: int, *words: str) -> Process:
            command = [sys.executable, "-m", "ndpy"]
            fault = bad.get(rank)
            if isinstance(fault, str):
                scenario = tmp_path / f"{rank}.toml"
                scenario.write_text(fault)
                command += ["faults", "run", "--allow-unfired", "-f", str(scenario), "--", *command]
            variables = {**common, "RANK": str(rank), "NDPY_FLEET_NODE": f"n{rank}"}
            return stack.enter_context(Process(*command, "fleet", "soft0", *words, variables=variables))

        others = {rank: start(rank) for rank in range(1, size)}
        first = start(0, "--timeout", "5", "--json", str(file))
        signals = {others[rank]: what for rank, what in bad.items() if isinstance(what, signal.Signals)}
        if signals:
            first.wait_for("round 1:", PROGRAM_DEADLINE_S, stream="err")
        for process, what in signals.items():
            process.popen.send_signal(what)
        try:
            status = first.finish(2 * PROGRAM_DEADLINE_S).status
        finally:
            for process in signals:
                process.popen.send_signal(signal.SIGCONT)
    report = json.loads(file.read_text("utf-8"))
    reasons = [(suspect["name"], suspect["confidence"], suspect["reason"]) for suspect in report["suspects"]]
    assert report["drain"] == [f"n{rank}" for rank in sorted(bad)], reasons
    assert status == int(bool(bad))
