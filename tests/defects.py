"""Defects of drivers that the tests know of: the expectations come from the table of the smoke test."""

from __future__ import annotations

import platform

import pytest

import ndpy
from ndpy.cli.smoke import known


def known_defect(request: pytest.FixtureRequest, adapter: ndpy.Adapter, check: str) -> None:
    """Expect this test to fail on a driver of which the table lists this check; if it passes, that is told too."""
    defect = known.listed(adapter.info.driver, platform.release(), check)
    if defect is not None:
        reason = f"{defect.sentence} ({defect.reference})"
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
