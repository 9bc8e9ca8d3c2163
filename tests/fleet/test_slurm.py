"""`ndpy fleet` started by Slurm: a controller and two node daemons of this machine.
`rig/setup.sh fleet` installs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient, wait_until
from kit.processes import Process, free_ports

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("Slurm: NDPY_STRESS", allow_module_level=True)

pytestmark = pytest.mark.timeout(patient(180))

CONFIGURATION = """\
ClusterName=ndpy
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n[0-1] Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm():
    """The environment in which srun reaches the cluster."""
    # munge refuses a socket in a folder that others cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="ndpy-slurm-"))
    folder.chmod(0o755)
    for node in ("n0", "n1"):
        (folder / f"spool-{node}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=platform.node().partition(".")[0], folder=folder, ports=free_ports(3)))
    environment = {"SLURM_CONF": str(file), "NDPY_ADAPTER": "soft0"}
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}"
        for name in ("key-file", "log-file", "pid-file", "seed-file")
    ]
    daemons = [
        ["munged", "--foreground", "--num-threads=4", f"--socket={folder}/munge.sock", *munge],
        ["slurmctld", "-D", "-f", str(file)],
        *(["slurmd", "-D", "-N", node, "-f", str(file)] for node in ("n0", "n1")),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for words in daemons:
            stack.enter_context(Process(*words, variables=environment))
            if words[0] == "munged":
                wait_until((folder / "munge.sock").exists, "munge listens", PROGRAM_DEADLINE_S)

        def is_idle() -> bool:
            command = ["sinfo", "--noheader", "--format=%D %T"]
            shown = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PROGRAM_DEADLINE_S
            )
            return shown.stdout.split() == ["2", "idle"]

        wait_until(is_idle, "both nodes are idle", PROGRAM_DEADLINE_S)
        yield environment


def test_ranks_of_srun_meet_and_have_slurms_names(slurm, tmp_path):
    """The nodes' names lead nowhere here, so MASTER_ADDR says where rank 0 is."""
    report = tmp_path / "report.json"
    words = ("srun", "-N", "2", "--ntasks-per-node=1", sys.executable, "-m", "ndpy", "fleet", "--json", str(report))
    (port,) = free_ports(1)
    variables = {**slurm, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Process(*words, "--full-mesh", variables=variables) as process:
        process.succeed(PROGRAM_DEADLINE_S)
    told = json.loads(report.read_text("utf-8"))
    assert [machine["node"] for machine in told["machines"]] == ["n0", "n1"]
    assert (told["suspects"], len(told["measurements"])) == ([], 3)


def test_ranks_on_several_nodes_need_a_token(slurm):
    with Process("srun", "-N", "2", sys.executable, "-m", "ndpy", "fleet", variables=slurm) as process:
        result = process.finish(PROGRAM_DEADLINE_S)
    assert result.status == 1
    assert "rank 0 is at n0, which others may reach too; give all ranks one secret" in result.err
