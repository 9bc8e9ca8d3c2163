"""The hostile peer of softnd's tests is softverbs' too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "softnd"))
pytest.register_assert_rewrite("attacks", "building")
