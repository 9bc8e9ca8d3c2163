"""`ndpy fleet` started by Open MPI and by MPICH on this machine. `rig/setup.sh fleet` installs them."""

from __future__ import annotations

import json
import os
import sys

import psutil
import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import Process, free_port

from ndpy.fleet.engines.mpi import MEET_S

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("MPI libraries: NDPY_STRESS", allow_module_level=True)

pytestmark = pytest.mark.timeout(patient(120))

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
MPICH = ("mpirun.mpich",)


# mpi4py loads one library. Ranks of the other one's launcher still meet, because they are all on one machine.
@pytest.mark.parametrize(("launcher", "engine"), [(OPEN_MPI, "mpi"), (MPICH, "rendezvous")])
def test_ranks_of_mpirun_meet(tmp_path, launcher, engine):
    report = tmp_path / "report.json"
    words = (*launcher, "-n", "3", sys.executable, "-m", "ndpy", "fleet", "soft0", "--json", str(report))
    with Process(*words, variables={"MASTER_PORT": str(free_port())}) as process:
        process.succeed(PROGRAM_DEADLINE_S)
    told = json.loads(report.read_text("utf-8"))
    assert (told["engine"], told["ranks"], told["suspects"]) == (engine, 3, [])
    assert len({frozenset(row[3:5]) for row in told["measurements"]}) == 3


def test_when_a_rank_dies_and_mpirun_ends_the_others_rank_0_has_written_its_report(tmp_path):
    report = tmp_path / "report.json"
    words = (*OPEN_MPI, "-n", "4", sys.executable, "-m", "ndpy", "fleet", "soft0", "--json", str(report))
    with Process(*words, variables={"MASTER_PORT": str(free_port())}) as process:
        process.wait_for("round 1:", PROGRAM_DEADLINE_S, stream="err")
        (rank,) = (
            each
            for each in psutil.Process(process.popen.pid).children()
            if each.environ().get("OMPI_COMM_WORLD_RANK") == "2"
        )
        rank.kill()
        assert process.finish(PROGRAM_DEADLINE_S).status != 0
    (suspect,) = json.loads(report.read_text("utf-8"))["suspects"]
    assert suspect["name"].startswith("rank 2 on ")


def test_a_rank_that_never_begins_is_named(tmp_path):
    """MPI waits for it without end, and so do the processes that rank 0 and the others have for MPI."""
    report = tmp_path / "report.json"
    fleet = (sys.executable, "-m", "ndpy", "fleet", "soft0", "--join", "5s", "--json", str(report))
    hanging = (
        "import os, sys, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '2': time.sleep(1000)\nos.execv(sys.argv[1], "
        "sys.argv[1:])"
    )
    with Process(
        *OPEN_MPI, "-n", "4", sys.executable, "-c", hanging, *fleet, variables={"MASTER_PORT": str(free_port())}
    ) as process:
        assert process.finish(MEET_S + PROGRAM_DEADLINE_S).status != 0
    (suspect,) = json.loads(report.read_text("utf-8"))["suspects"]
    assert suspect["reason"] == "rank 2: it did not come within 5 s"
