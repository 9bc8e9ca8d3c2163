"""`ndpy fleet` on Windows: ranks of this machine on softnd, which meet by TCP.

The variables of MS-MPI are set here as its smpd sets them. MS-MPI itself does not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.helpers import only_under_stress
from kit.processes import INTERRUPTIBLE
from kit.ranks import Ranks

import ndpy

pytestmark = pytest.mark.timeout(patient(200))
COMMAND = Path(ndpy.__file__).with_name("__main__.py")
ADAPTER = "softnd0"
LIMIT_S = 2 * PROGRAM_DEADLINE_S


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:
        yield lambda size, **variables: Ranks(stack, tmp_path, size, **variables)


def test_the_ranks_of_ms_mpi_meet_and_nobody_is_a_suspect(ranks):
    run = ranks(3, RANK="", WORLD_SIZE="", PMI_SIZE="3")
    others = [run.start(rank, adapter=ADAPTER, RANK="", PMI_RANK=str(rank)) for rank in (1, 2)]
    words = ("--timeout", 60, "--json", run.file, "--full-mesh")
    run.start(0, *words, adapter=ADAPTER, RANK="", PMI_RANK="0").succeed(LIMIT_S)
    for other in others:
        assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    report = run.report()
    assert (report["engine"], report["ranks"], report["suspects"]) == ("rendezvous", 3, [])
    assert [(end["node"], end["adapter"]) for end in report["ends"]] == [(f"n{rank}", ADAPTER) for rank in range(3)]
    assert {frozenset(row[3:5]) for row in report["measurements"]} == {
        frozenset(pair) for pair in ([0, 1], [0, 2], [1, 2])
    }
    assert all(row[5] > 0 for row in report["measurements"])


@only_under_stress
def test_a_rank_that_is_killed_is_named_and_the_others_go_on(ranks):
    run = ranks(3)
    others = [run.start(rank, adapter=ADAPTER) for rank in (1, 2)]
    first = run.first("--rounds", 4, adapter=ADAPTER, pair_s=30)
    first.wait_for("round 1:", LIMIT_S, stream="err")
    others[0].popen.kill()
    assert first.finish(LIMIT_S).status == 1
    (suspect,) = run.report()["suspects"]
    assert (suspect["kind"], suspect["nodes"]) == ("rank", ["n1"])
    assert "ended during the run" in suspect["reason"]


def test_ctrl_c_at_rank_0_writes_the_report_and_ends_all(ranks):
    run = ranks(2)
    other = run.start(1, adapter=ADAPTER)
    first = run.first("--full-mesh", "--rounds", 12, adapter=ADAPTER, pair_s=60, program=(INTERRUPTIBLE, COMMAND))
    first.wait_for("2 of 2 ranks", LIMIT_S, stream="err")
    first.interrupt()
    result = first.finish(PROGRAM_DEADLINE_S)
    assert (result.status, "interrupted" in result.err) == (130, True)
    assert [machine["node"] for machine in run.report()["machines"]] == ["n0", "n1"]
    assert other.succeed(PROGRAM_DEADLINE_S).err == ""
