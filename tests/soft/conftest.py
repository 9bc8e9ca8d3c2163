"""The hostile peer of softnd's tests is softverbs' too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit.helpers import Keeper

import ndpy

sys.path.append(str(Path(__file__).parents[1] / "softnd"))
pytest.register_assert_rewrite("attacks", "building")


@pytest.fixture(scope="module")
def adapter():
    with ndpy.open_adapter("soft0") as opened:
        yield opened


@pytest.fixture
def keep():
    """keep(thing) returns the thing and closes it at the end. It needs no adapter of the test's."""
    keeper = Keeper()
    yield keeper
    keeper.close()
