"""docs/reference/capabilities.json has what this adapter can do."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path

import pytest

import ndpy

SEEN = Path(__file__).resolve().parents[2] / "docs/reference/capabilities.json"


def test_the_reference_lists_what_this_adapter_can_do(adapter: ndpy.Adapter) -> None:
    info = adapter.info
    if os.environ.get("NDPY_PROVIDER_VERSION") == "1":
        pytest.skip("the reference has no adapters of NetworkDirect version 1")
    match = re.match(r"\d+\.\d+", platform.release())
    systems = ["any", f"Linux {match[0] if match else platform.release()}"]
    listed = [each for each in json.loads(SEEN.read_text("utf-8")) if each["driver"] == info.driver]
    here = [each for each in listed if each["system"] in systems]
    if not here:
        pytest.skip(f"the reference has no {info.driver} of this system")
    assert sorted(here[0]["capabilities"]) == info.capabilities.names()
