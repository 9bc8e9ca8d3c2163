"""What is proven against stand-ins only, as docs/explained/frozen.md and docstrings say: no adapter in software has
it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ndpy
from ndpy import Capability
from ndpy.vocabulary.clock import DeviceClock

ROOT = Path(__file__).resolve().parents[2]
IN_SOFTWARE = ("softverbs", "rdma_rxe", "siw", "softnd.dll")
ONLY_STAND_INS = (
    Capability.XRC
    | Capability.DEVICE_MEMORY
    | Capability.TIMESTAMPS
    | Capability.WALL_CLOCK_TIMESTAMPS
    | Capability.CLOCK
    | Capability.FLOW_TAGS
)


def test_no_adapter_in_software_has_what_is_proven_against_stand_ins_only(adapter):
    if adapter.info.driver not in IN_SOFTWARE:
        pytest.skip(f"{adapter.info.driver} is not one of {', '.join(IN_SOFTWARE)}")
    assert (adapter.info.capabilities & ONLY_STAND_INS).names() == []


def test_the_page_names_these_capabilities():
    text = (ROOT / "docs/explained/frozen.md").read_text(encoding="utf-8")
    table = text.partition("## Proven against stand-ins only")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\|.+\|(.+)\|$", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(ONLY_STAND_INS.names())


@pytest.mark.parametrize("kind", [ndpy.XrcDomain, ndpy.DeviceMemory, ndpy.CompletionDetails, DeviceClock])
def test_each_docstring_says_so(kind):
    assert "ran against a stand-in for a driver only" in " ".join(kind.__doc__.split())
