"""How the ranks were started: who is which, and where rank 0 is. Then all of them speak by the rendezvous.

MPI, Slurm, Kubernetes and torchrun say a rank's number and how many there are. What they say of rank 0 differs: MPI
broadcasts anything, Slurm names the nodes, others have MASTER_ADDR. With `--hosts`, `ssh.py` starts the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ndpy.fleet.engines import mpi
from ndpy.fleet.engines.start import EngineError, Start
from ndpy.fleet.measure import DEFAULT_PORT
from ndpy.fleet.topology import TopologyError, node_set

#: Environment variables of a rank's number and of the number of ranks, the innermost launcher first, with its name.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "RANK and WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_RANK", "PMI_SIZE", "PMI (MPICH, Intel MPI, MS-MPI)"),
    ("SLURM_PROCID", "SLURM_NTASKS", "Slurm"),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "a Kubernetes indexed Job"),
)
_LOOPBACK = "127.0.0.1"
_MOST_RANKS = 1 << 20

HOW_TO = """`ndpy fleet` measures between ranks, one for each machine. Something starts them:

  mpirun -n 8 --map-by ppr:1:node ndpy fleet       Open MPI; MPICH: mpiexec -n 8 -ppn 1
  srun -N 8 --ntasks-per-node=1 ndpy fleet         Slurm
  ndpy fleet --hosts "n[1-8]"                      ssh

Or start it on each machine with these variables, and with one NDPY_FLEET_TOKEN for all:

  RANK=0 WORLD_SIZE=8 MASTER_ADDR=n1 ndpy fleet"""


def detect(environment: Mapping[str, str] = os.environ, token: bytes = b"") -> Start | None:
    """How the environment says that this rank was started. None if nothing started it. Raises EngineError."""
    for rank_name, size_name, launcher in LAUNCHERS:
        if environment.get(rank_name) and environment.get(size_name):
            rank = _number(environment, rank_name, 0)
            size = _number(environment, size_name, 1)
            if rank >= size:
                raise EngineError(f"{rank_name} is {rank}, but {size_name} is {size}; ranks count from 0")
            token = token or environment.get("NDPY_FLEET_TOKEN", "").encode()
            port = port_of(environment)
            if "MPI" in launcher and not environment.get("MASTER_ADDR"):
                try:
                    agreed = mpi.agree(rank, size, port, token, launcher)
                except mpi.MpiError as error:
                    if not _are_together(environment, size):
                        raise EngineError(str(error)) from None
                    agreed = None
                if agreed is not None:
                    return Start("mpi", rank, size, *agreed)
            return Start("rendezvous", rank, size, _hosts(environment, launcher, size), port, token)
    if environment.get("JOB_COMPLETION_INDEX"):
        raise EngineError("JOB_COMPLETION_INDEX says this rank's number; set WORLD_SIZE to the Job's completions too")
    return None


def port_of(environment: Mapping[str, str]) -> int:
    """The port of the rendezvous. Raises EngineError."""
    return _number(environment, "MASTER_PORT", 1, DEFAULT_PORT)


def _hosts(environment: Mapping[str, str], launcher: str, size: int) -> tuple[str, ...]:
    """Where rank 0 is."""
    if environment.get("MASTER_ADDR"):
        return (environment["MASTER_ADDR"],)
    if _are_together(environment, size):
        return (_LOOPBACK,)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if launcher == "Slurm" and nodes:
        try:
            names: Sequence[str] = node_set(nodes)
        except TopologyError as error:
            raise EngineError(f"Slurm's list of nodes cannot be read: {error}") from None
        return (_LOOPBACK,) if len(names) == 1 else (names[0],)
    raise EngineError(
        f"{launcher} started this rank, but nothing says where rank 0 is; set MASTER_ADDR to its address"
        + ('. With MPI, pip install "ndpy[fleet]" lets the ranks tell each other' if "MPI" in launcher else "")
    )


def _are_together(environment: Mapping[str, str], size: int) -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    local = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environment.get("MPI_LOCALNRANKS")
    return size == 1 or local == str(size)


def _number(environment: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or not least <= int(text) < _MOST_RANKS:
        raise EngineError(f"{name} is {text!r}; it must be a number from {least} on")
    return int(text)
