"""Defects of drivers that are known and that no release of ndpy can mend: the one table behind the verdict KNOWN.

A failure that is not listed here is a FAIL. An entry fits a failure of its check whose reason contains `symptom`, so
that another failure of the same check is not taken for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """driver: kernel driver of the adapter. first, last: the kernels that have it, both included; () is open."""

    driver: str
    check: str
    symptom: str
    sentence: str
    reference: str
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


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
        "siw",
        "notification/solicited",
        "not finished within",
        "siw never notifies for solicited messages",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_rqe_complete(): a receive counts as SIGNALLED, never as "
        "SOLICITED; seen on 6.1",
        first=(5, 3),
    ),
    Defect(
        "siw",
        "connect/read-limits",
        "this side was told",
        "siw's server serves as many reads at once as the client asks for, whatever limit it was accepted with",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_accept(): relaxed_ird_negotiation; seen on 6.1",
        first=(5, 3),
    ),
    Defect(
        "siw",
        "read-write/read-of-writable",
        "was not refused",
        "siw lets a peer read a region that has no right to be read",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_qp_sq_proc_tx(): a read response is checked for no right; "
        "seen on 6.1",
        first=(5, 3),
    ),
)


def kernel_version(release: str) -> tuple[int, ...]:
    """The leading numbers of a kernel release: (6, 1, 0) of "6.1.0-50-amd64"."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def listed(driver: str, release: str, check: str) -> Defect | None:
    """The defect of this driver in this kernel that the check would find."""
    kernel = kernel_version(release)
    for defect in DEFECTS:
        in_range = kernel >= defect.first and (not defect.last or kernel[: len(defect.last)] <= defect.last)
        if defect.driver == driver and defect.check == check and in_range:
            return defect
    return None
