"""Defects of drivers that the tests know of: the expectations come from the table of the smoke test."""

from __future__ import annotations

import pytest

import ndpy


def known_defect(request: pytest.FixtureRequest, adapter: ndpy.Adapter, claim: str) -> None:
    """Expect this test to fail on a driver of which the table says that it breaks the claim."""
    table = {("rdma_rxe", "window bounds"): "rxe does not enforce a window's bounds"}
    reason = table.get((adapter.info.driver, claim))
    if reason:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
