"""64 ranks of this machine, on soft0 by the rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import Process, free_port

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("64 processes and 64 that measure: NDPY_STRESS", allow_module_level=True)

pytestmark = pytest.mark.timeout(patient(400))

SIZE = 64


def test_64_ranks_meet_and_nobody_is_lost(tmp_path):
    """32 pairs at once on a few processors say nothing about who is slow, so only their answers are looked at."""
    report = tmp_path / "report.json"
    common = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:

        def start(rank: int, *words: str) -> Process:
            variables = {**common, "RANK": str(rank), "NDPY_FLEET_NODE": f"n{rank}", "NDPY_ADAPTER": "soft0"}
            command = (sys.executable, "-m", "ndpy", "fleet", "soft0", "--join", "300s", *words)
            return stack.enter_context(Process(*command, variables=variables))

        others = [start(rank) for rank in range(1, SIZE)]
        first = start(0, "--rounds", "4", "--timeout", "120", "--json", str(report))
        first.finish(5 * PROGRAM_DEADLINE_S)
        for other in others:
            assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    told = json.loads(report.read_text("utf-8"))
    assert (told["ranks"], len(told["ends"]), told["rounds"]) == (SIZE, SIZE, 4)
    assert [suspect for suspect in told["suspects"] if suspect["kind"] == "rank"] == []
    assert len(told["measurements"]) == 4 * SIZE // 2 * 3
    assert [row for row in told["measurements"] if row[5] is None] == []
