"""What tests expect of an adapter with quirks. The expectations come from ndpy's table."""

from __future__ import annotations

import pytest

import ndpy
from ndpy.testing import session
from ndpy.vocabulary.quirks import Quirk


def has_quirk(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Whether the table lists this quirk for the adapter."""
    return quirk in adapter._quirks


def skip_where(adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """Skip if the table lists this quirk for the adapter."""
    if has_quirk(adapter, quirk):
        pytest.skip(f"{adapter.info.name}: {quirk.value.summary}")


def expect_quirk(request: pytest.FixtureRequest, adapter: ndpy.Adapter, quirk: Quirk) -> bool:
    """As @pytest.mark.rdma(quirk=...), for a test that learns first which adapter it has. Returns whether driver and
    kernel are known to have the quirk, so that the test need not wait long for what never comes.
    """
    return session.expect_quirk(request.node, adapter.info, quirk)
