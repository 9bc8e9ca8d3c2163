"""The man pages say what the command's help says."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if sys.platform != "linux" or not (ROOT / "rig/man_pages.py").exists():
    pytest.skip("the tests of a wheel, and Windows, have no man pages", allow_module_level=True)

sys.path.insert(0, str(ROOT / "rig"))
man_pages = importlib.import_module("man_pages")


def test_the_pages_are_those_of_the_help():
    """If this fails, run .venv/bin/python rig/man_pages.py."""
    assert {path.name: path.read_text(encoding="utf-8") for path in man_pages.FOLDER.iterdir()} == man_pages.pages()


def test_each_command_has_a_page_with_its_options():
    pages = man_pages.pages()
    named = {name.removesuffix(".1") for name in pages}
    assert {"ndpy", "ndpy-smoke", "ndpy-vm"} <= named
    for name in named - {"ndpy"}:
        assert f".BR {man_pages.escaped(name)} (1)" in pages["ndpy.1"]
    assert r"\-\-keep\-log FILE" in pages["ndpy-vm.1"]


def test_groff_has_nothing_to_say():
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    for path in man_pages.FOLDER.iterdir():
        command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        # A long word that a narrow line leaves no room for is none of the page's faults.
        said = [
            line for line in done.stderr.splitlines() if "can't break line" not in line and "cannot adjust" not in line
        ]
        assert said == [] and done.returncode == 0


def test_a_line_that_begins_with_a_dot_is_text():
    assert man_pages.escaped(".SH\n'x\n\\n -a") == "\\&.SH\n\\&'x\n\\en \\-a"
