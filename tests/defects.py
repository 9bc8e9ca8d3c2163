"""What tests expect of an adapter that behaves differently. The expectations come from ndpy's table of differences."""

from __future__ import annotations

import platform

import pytest

import ndpy
from ndpy.vocabulary.quirks import Quirk


def differs(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Whether the table lists this difference for the adapter."""
    return quirk in adapter._differences


def skip_where(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Skip if the table lists this difference for the adapter."""
    if differs(adapter, quirk):
        pytest.skip(f"{adapter.info.name}: {quirk.value.sentence}")


def expect_defect(request: pytest.FixtureRequest, adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Expect this test to fail if driver and kernel are known to have the defect.

    If it passes there, that is a failure too. A test that would bring the machine down is skipped.
    Returns whether they are known to, so that the test need not wait long for what never comes.
    """
    defect = quirk.value
    if not differs(adapter, quirk) or not defect.is_in(platform.release()):
        return False
    reason = f"{defect.sentence} ({defect.reference})"
    if defect.deadly:
        pytest.skip(reason)
    request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    return True
