"""Defects of drivers that are known and that no release of ndpy can mend: the one table behind the verdict KNOWN.

A failure that is not listed here is a FAIL. An entry fits a failure of its check whose reason contains `symptom`, so
that another failure of the same check is not taken for it. Where ndpy spares its users the effect, the entry says how, and
the check passes; tests/verbs/programs shows the driver's own behaviour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """driver: kernel driver of the adapter. first, last: the kernels that have it, both included; () is open. Where it is not
    known when it came, first is the oldest kernel on which it was seen.

    spared: what ndpy does about it, "" for nothing; such an entry excuses no failure. program: the program of
    tests/verbs/programs, with its words, that shows it.
    """

    driver: str
    check: str
    symptom: str
    sentence: str
    reference: str
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    spared: str = ""
    program: str = ""

    def is_in(self, release: str) -> bool:
        """Whether this kernel has it."""
        kernel = kernel_version(release)
        return kernel >= self.first and (not self.last or kernel[: len(self.last)] <= self.last)


_RXE_BOUNDS = "rxe does not enforce a window's bounds: the peer reaches all of the region that the window is bound to"
_RXE_BOUNDS_REFERENCE = (
    "Linux drivers/infiniband/sw/rxe/rxe_resp.c, check_rkey(): the range is compared with the region's, not the "
    "window's; seen on 6.1.192, 6.12.107 and 7.2.13"
)

DEFECTS = (
    *(
        Defect("rdma_rxe", f"windows/{name}", "was not refused", _RXE_BOUNDS, _RXE_BOUNDS_REFERENCE, first=(5, 14))
        for name in ("write-past-end", "write-before-start", "write-across-end", "read-past-end")
    ),
    Defect(
        "rdma_rxe",
        "notification/failure-tells",
        "not finished within",
        "rxe does not notify for solicited completions when receives are flushed",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, flush_recv_wqe(): posted as not solicited; seen on 6.12.107 and 7.2.13",
        first=(6, 12),
        spared="ndpy looks for failed completions every 50 ms while that is asked for",
        program="failure_notifies",
    ),
    Defect(
        "rdma_rxe",
        "read-write/own-unknown-token",
        "completed CANCELED",
        "rxe reports a request that fails by its own memory as flushed, as those behind it",
        "Linux drivers/infiniband/sw/rxe/rxe_comp.c, flush_send_wqe(): the status that rxe_requester() has set is dropped; "
        "seen on 6.12.107 and 7.2.13",
        first=(6, 12),
        spared="ndpy looks at the memory of the first flushed request",
        program="local_fault",
    ),
    *(
        Defect(
            "rdma_rxe",
            "register/on-demand",
            "memory on demand",
            "rxe's on-demand paging moves data to and from the start of the page, whatever the address",
            "Linux drivers/infiniband/sw/rxe/rxe_odp.c, __rxe_odp_mr_copy(): the offset in the page is not added; seen on "
            "7.2.13",
            first=(7, 2),
            spared="ndpy pins the memory",
            program=f"on_demand {where}",
        )
        for where in ("offset", "across")
    ),
    Defect(
        "siw",
        "notification/solicited",
        "not finished within",
        "siw never notifies for solicited messages",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_rqe_complete(): a receive counts as SIGNALLED, never as "
        "SOLICITED; seen on 6.1 and 7.2.13",
        first=(5, 3),
    ),
    Defect(
        "siw",
        "connect/read-limits",
        "this side was told",
        "siw's server serves as many reads at once as the client asks for, whatever limit it was accepted with",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_accept(): relaxed_ird_negotiation; seen on 6.1 and 7.2.13",
        first=(5, 3),
    ),
    Defect(
        "siw",
        "read-write/read-of-writable",
        "was not refused",
        "siw lets a peer read a region that has no right to be read",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_qp_sq_proc_tx(): a read response is checked for no right; "
        "seen on 6.1 and 7.2.13",
        first=(5, 3),
    ),
)


def kernel_version(release: str) -> tuple[int, ...]:
    """The leading numbers of a kernel release: (6, 1, 0) of "6.1.0-50-amd64"."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _of(driver: str, release: str) -> list[Defect]:
    return [defect for defect in DEFECTS if defect.driver == driver and defect.is_in(release)]


def listed(driver: str, release: str, check: str) -> Defect | None:
    """The defect of this driver in this kernel that the check would find."""
    return next((defect for defect in _of(driver, release) if defect.check == check and not defect.spared), None)


def spared(driver: str, release: str, check: str) -> Defect | None:
    """The defect of this driver in this kernel that the check would find if ndpy did not spare its users the effect."""
    return next((defect for defect in _of(driver, release) if defect.check == check and defect.spared), None)


def shown_by(driver: str, release: str, program: str) -> Defect | None:
    """The defect of this driver in this kernel that a program of tests/verbs/programs shows."""
    return next((defect for defect in _of(driver, release) if defect.program == program), None)
