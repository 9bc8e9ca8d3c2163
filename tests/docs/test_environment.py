"""The reference has a row for each environment variable that the code reads, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pages import ROOT

PAGE = ROOT / "docs/reference/environment.md"
#: They belong to others: libibverbs and the desktop.
OTHERS = {"RDMAV_FORK_SAFE"}
PYTHON = [*(ROOT / "ndpy").rglob("*.py"), *(ROOT / "tests/kit").glob("*.py"), ROOT / "pytest_ndpy.py"]
SETTING = re.compile(r"\b(?:settings_\w+|milliseconds|has_value)\(\"([A-Z_]+)\"")


def shown() -> set[str]:
    return set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE.read_text("utf-8"), re.M))


def of_python(path: Path) -> set[str]:
    words = (node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant))
    return {word for word in words if isinstance(word, str) and re.fullmatch(r"NDPY_[A-Z_]+[A-Z]", word)}


def of_c() -> set[str]:
    """What the software adapters say of themselves, each with a test in tests/soft or tests/softnd."""
    pages = (ROOT / "softrdma/verbs/README.md", ROOT / "softrdma/networkdirect/README.md")
    return {name for page in pages for name in re.findall(r"^\| `(SOFT[A-Z_]+)", page.read_text("utf-8"), re.M)}


def test_each_variable_has_a_row() -> None:
    read = set().union(*map(of_python, PYTHON)) | of_c()
    assert sorted(read - shown()) == []
    assert sorted(shown() - read - OTHERS) == []


def test_each_setting_of_the_software_adapters_is_in_their_pages() -> None:
    """In C a setting's name is a string that begins no sentence: ADDRESSES in the engine, for both adapters."""
    sources = [
        path
        for part in ("engine", "verbs", "networkdirect", "system")
        for path in (ROOT / "softrdma" / part).rglob("*.c")
    ]
    words = {word for path in sources for word in SETTING.findall(path.read_text("utf-8"))}
    named = {name.partition("_")[2] for name in of_c()}
    assert words and sorted(words - named) == []
