"""docs/pyverbs_tests.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/pyverbs_tests.md").read_text("utf-8")
NAMES = sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", TEXT)))
ROWS = [row for row in re.findall(r"^\| (.*) \| (.*) \|$", TEXT, re.MULTILINE) if row[1] not in ("ndpy", "---")]


@pytest.mark.parametrize("name", NAMES)
def test_it_names_tests_that_exist(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_row_has_a_test_or_a_reason(row):
    assert "::" in row[1] or row[1].startswith(("not in rxe", "not yet", "see "))
