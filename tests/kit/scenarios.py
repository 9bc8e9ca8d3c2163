"""Scenarios of faults in their plain form (softrdma/faults/README.md), for the adapters in software."""

from __future__ import annotations

import tempfile
from pathlib import Path

# The overlapped calls of NetworkDirect.
OVERLAPPED = (
    "reg_mr",
    "dereg_mr",
    "req_notify_cq",
    "rdma_connect",
    "rdma_establish",
    "rdma_accept",
    "rdma_get_cm_event",
    "rdma_disconnect",
    "rdma_get_request",
)
FOREVER = 1_000_000_000


def slow_call(call: str, ms: int) -> str:
    """This call takes so much longer. `cancel`: the requests that it cancels complete so much later."""
    return f"at=call call={call} do=slow ms={ms}"


def slow_completions(ms: int) -> list[str]:
    """Every overlapped request of NetworkDirect completes so much later."""
    return [slow_call(call, ms) for call in OVERLAPPED]


def refused_registrations(after: int) -> str:
    """So many registrations succeed, and later ones lack memory."""
    return f"at=call call=reg_mr do=errno errno=ENOMEM nth={after + 1} times={FOREVER}"


def removal(after: int) -> str:
    """The adapter is gone after so many requests."""
    return f"at=adapter do=remove nth={after + 1}"


def connect_timeouts(count: int) -> str:
    """So many first attempts to connect time out at once."""
    return f"at=connection do=time_out nth=1 times={count}"


def cut(after: int) -> str:
    """Connections are lost after so many bytes."""
    return f"at=connection do=lose bytes={after}"


def write_scenario(folder: Path | str, *faults: str, seed: int = 1, report: Path | None = None) -> Path:
    """A new file with these faults. NDPY_FAULTS has to name it when the adapter is opened."""
    lines = ["scenario 1", f"seed {seed}", *([f"report {report}"] if report else []), *(f"fault {it}" for it in faults)]
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".scenario", delete=False, newline="\n") as file:
        file.write("\n".join(lines) + "\n")
    return Path(file.name)
