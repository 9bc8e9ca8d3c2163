"""The caches of the tests of the registration cache."""

from __future__ import annotations

import sys

import pytest

import ndpy


@pytest.fixture
def cache(keep, adapter):
    """A cache with room for all of a test."""
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64))


@pytest.fixture
def monitored(keep, adapter):
    """A cache with a monitor, which Linux has."""
    if sys.platform != "linux":
        pytest.skip("this system does not tell of unmapping")
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64, monitor=True))
