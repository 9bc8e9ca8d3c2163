"""What tests expect of an adapter with quirks. The expectations come from ndpy's table."""

from __future__ import annotations

import platform

import pytest

import ndpy
from ndpy.vocabulary.quirks import Quirk


def has_quirk(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Whether the table lists this quirk for the adapter."""
    return quirk in adapter._quirks


def skip_where(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Skip if the table lists this quirk for the adapter."""
    if has_quirk(adapter, quirk):
        pytest.skip(f"{adapter.info.name}: {quirk.value.summary}")


def expect_quirk(request: pytest.FixtureRequest, adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Expect this test to fail if driver and kernel are known to have the quirk.

    If it passes there, that is a failure too. A test that would bring the machine down is skipped.
    Returns whether they are known to, so that the test need not wait long for what never comes.
    """
    facts = quirk.value
    if not has_quirk(adapter, quirk) or not facts.is_in(platform.release()):
        return False
    reason = f"{facts.summary} ({facts.reference})"
    if facts.crashes_machine:
        pytest.skip(reason)
    request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    return True
