"""MPI tells all ranks where rank 0 is and a token. After that it is finalized: the ranks speak by the rendezvous.

A rank that dies is a result. MPI's own communication would end the others with it.
"""

from __future__ import annotations

import importlib.util
import socket
import warnings

from ndpy.fleet.engines.start import own_addresses, random_token

_LOOPBACK = "127.0.0.1"


class MpiError(Exception):
    """MPI does not work here. The text says why, and what to do."""


def agree(rank: int, size: int, port: int, token: bytes, launcher: str) -> tuple[tuple[str, ...], int, bytes] | None:
    """What rank 0 tells all: its addresses, its port and its token, or a new one if it has none. All ranks call it.

    Returns None without mpi4py. Raises MpiError if mpi4py finds no MPI library, or another one than the launcher's.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    with warnings.catch_warnings():
        # mpi4py warns of another library's launcher. The error below says what to do.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise MpiError(
                f"mpi4py cannot load an MPI library ({error}); install that of {launcher}, or set MASTER_ADDR and NDPY_FLEET_TOKEN"
            ) from None
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        raise MpiError(
            f"{launcher} started rank {rank} of {size}, but mpi4py uses {library}, which says rank {world.rank} of "
            f"{world.size}; use the mpirun of that library"
        )
    own = ((socket.gethostname(), *own_addresses(), _LOOPBACK), port, token or random_token())
    told: tuple[tuple[str, ...], int, bytes] = world.bcast(own)
    MPI.Finalize()
    return told
