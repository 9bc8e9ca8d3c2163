"""MPI tells all ranks where rank 0 is and a token. After that it is finalized: the ranks speak by the rendezvous.

A rank that dies is a result. MPI's own communication would end the others with it. Nor does MPI give up when a rank
does not come, and mpi4py lets no other thread run while it waits for that. So MPI has a process of its own.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import importlib.util
import json
import queue
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import IO

from ndpy.fleet.engines.start import own_addresses, random_token
from ndpy.tools.cli.channel import WAKE_S, printable

_LOOPBACK = "127.0.0.1"
#: How long the ranks have to meet, and then to leave MPI.
MEET_S = 60.0
_LEAVE_S = 5.0
_PROGRAM = "from ndpy.fleet.engines.mpi import meet; meet()"

#: Rank 0's addresses, its port and the token.
Agreed = tuple[tuple[str, ...], int, bytes]


class MpiError(Exception):
    """MPI does not work here. The text says why, and what to do."""


def agree(rank: int, size: int, port: int, token: bytes, launcher: str, timeout_s: float = MEET_S) -> Agreed | None:
    """What rank 0 tells all: its addresses, its port and its token, or a new one if it has none. All ranks call it.

    Returns None without mpi4py. Raises MpiError if mpi4py finds no MPI library, or another one than the launcher's, and
    if the ranks do not meet within `timeout_s` seconds.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    token = token or random_token()
    own = {
        "hosts": [socket.gethostname(), *own_addresses(), _LOOPBACK],
        "port": port,
        "token": base64.b64encode(token).decode(),
    }
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    # Not earlier: mpirun ends all ranks when a process leaves MPI this way.
    atexit.register(process.kill)
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(json.dumps({"rank": rank, "size": size, "launcher": launcher, "own": own}).encode())
    line = _first_line(process.stdout, timeout_s)
    if line is None:
        raise MpiError(
            f"the {size} ranks of {launcher} did not meet within {timeout_s:g} s; with MASTER_ADDR and "
            "NDPY_FLEET_TOKEN rank 0 does without MPI and names those that do not come"
        )
    process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)
    return _read(line)


def _first_line(stream: IO[bytes], timeout_s: float) -> bytes | None:
    """The first line, or b"" at the end of the stream. None after `timeout_s` seconds."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(stream.readline()), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=min(left, WAKE_S))
    return None


def _read(line: bytes) -> Agreed:
    try:
        told = json.loads(line)
        if "error" not in told:
            return tuple(map(str, told["hosts"])), int(told["port"]), base64.b64decode(told["token"])
        why = printable(told["error"])
    except (ValueError, TypeError, KeyError):
        why = "its process ended"
    raise MpiError(
        f"MPI does not work here: {why}; use the mpirun of that library, or set MASTER_ADDR and NDPY_FLEET_TOKEN"
    )


def meet() -> None:
    """What MPI's process does. It answers before it leaves MPI, because that waits for all ranks too."""
    asked = json.load(sys.stdin)
    rank, size, launcher = asked["rank"], asked["size"], asked["launcher"]
    try:
        with warnings.catch_warnings():
            # mpi4py warns of another library's launcher. The error below says it.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
        world = MPI.COMM_WORLD
        if (world.rank, world.size) == (rank, size):
            answer = world.bcast(asked["own"])
        else:
            library = MPI.Get_library_version().split(",")[0].splitlines()[0]
            answer = {
                "error": (
                    f"{launcher} started rank {rank} of {size}, but mpi4py uses {library}, which says rank "
                    f"{world.rank} of {world.size}"
                )
            }
    except (ImportError, RuntimeError) as error:
        answer = {"error": f"mpi4py: {error}"}
    print(json.dumps(answer), flush=True)
