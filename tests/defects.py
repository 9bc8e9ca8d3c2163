"""Defects of drivers that the tests know of: the expectations come from the table of the smoke test."""

from __future__ import annotations

import platform

import pytest

import ndpy
from ndpy.cli.smoke import known

# (driver, what is done): what kernels have been seen to die of.
DEADLY = {
    (
        "rdma_rxe",
        "invalidate an unbound window",
    ): "rxe panics when a message invalidates a window that is not bound (seen on Linux 6.1; 6.12.107 and 7.2.13 have the same "
    "code): drivers/infiniband/sw/rxe/rxe_mw.c, rxe_do_invalidate_mw() puts the queue pair that it has not",
}


# (driver, what is done): what drivers let through.
LAX = {
    (
        "rdma_rxe",
        "invalidate a window of another connection",
    ): "rxe does not ask whose window a message invalidates (seen on Linux 6.1, 6.12.107 and 7.2.13): "
    "drivers/infiniband/sw/rxe/rxe_mw.c, rxe_check_invalidate_mw()",
}


def lax_driver(request: pytest.FixtureRequest, adapter: ndpy.Adapter, deed: str) -> None:
    """Expect this test to fail on a driver that does not check this."""
    reason = LAX.get((adapter.info.driver, deed))
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def deadly_defect(adapter: ndpy.Adapter, deed: str) -> None:
    """Skip a test that would end the machine."""
    reason = DEADLY.get((adapter.info.driver, deed))
    if reason is not None:
        pytest.skip(reason)


def known_defect(request: pytest.FixtureRequest, adapter: ndpy.Adapter, check: str) -> None:
    """Expect this test to fail on a driver of which the table lists this check; if it passes, that is told too."""
    defect = known.listed(adapter.info.driver, platform.release(), check)
    if defect is not None:
        reason = f"{defect.sentence} ({defect.reference})"
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
