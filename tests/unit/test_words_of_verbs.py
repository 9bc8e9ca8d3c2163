"""docs/verbs.md names what exists, and all that only verbs has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ndpy

TEXT = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8")
ROWS = [row for row in re.findall(r"^\| (.*) \| (.*) \|$", TEXT, re.MULTILINE) if row != ("verbs", "ndpy")]
NAMES = sorted({name for _, words in ROWS for name in re.findall(r"`([A-Za-z_.]+)`", words)} - {"None", "context"})


@pytest.mark.parametrize("name", NAMES)
def test_it_names_what_exists(name):
    first, *rest = name.split(".")
    thing = getattr(ndpy, first)
    for attribute in rest:
        assert hasattr(thing, attribute) or attribute in getattr(thing, "__annotations__", {}), name
        thing = getattr(thing, attribute, None)


@pytest.mark.parametrize("operation", ndpy.Operation)
def test_it_names_every_operation(operation):
    plain = {"RECEIVE", "SEND", "READ", "WRITE", "BIND", "INVALIDATE", "COMPARE_AND_SWAP", "FETCH_AND_ADD"}
    assert f"`Operation.{operation.name}`" in TEXT or (
        operation.name in plain and f"`QueuePair.{operation.name.lower()}`" in TEXT
    )
