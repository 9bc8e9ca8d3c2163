"""What CONTRIBUTING.md and SECURITY.md tell people to run, to read and to call exists, and the first test passes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import public_names
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["CONTRIBUTING.md", "SECURITY.md"]


def code(document: str) -> list[str]:
    """The commands and names of a document: its indented lines, and what stands between backticks."""
    text = (ROOT / document).read_text("utf-8")
    return re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`]+)`", text)


def sources(*folders: str) -> str:
    return "".join(
        path.read_text("utf-8")
        for folder in folders
        for path in (ROOT / folder).rglob("*.[cp]*")
        if path.suffix in (".py", ".c")
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_paths_exist(document):
    tops = {path.name for path in ROOT.iterdir()} - {".venv", ".rig"}
    words = {word.strip("\"'") for each in code(document) for word in each.split()}
    missing = {word for word in words if word.split("/")[0] in tops and not (ROOT / word).exists()}
    assert missing == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_links_lead_to_headings(document):
    for path, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", (ROOT / document).read_text("utf-8")):
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_exist(document):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    listed = public_names.LIST.read_text("utf-8").splitlines()
    for each in code(document):
        for target in re.findall(r"\bmake ([a-z-]+)", each):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), each
        for command in re.findall(r"\bndpy ([a-z]+)", each):
            assert any(line.startswith(f"command ndpy {command}") for line in listed), each
        for option in re.findall(r"\bndpy (?:smoke|perf|doctor)\b.*?(--\w+)", each):
            assert any(f" {option}" in line for line in listed), each
        for part in re.findall(r"rig/setup\.sh (\w+)", each):
            assert f"\n{part})" in (ROOT / "rig/setup.sh").read_text("utf-8"), each


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_functions_and_tests_exist(document):
    text = sources("ndpy", "tests", "cdefs")
    for name in {name for each in code(document) for name in re.findall(r"^\.?(\w+)\([^)]*\)$|^(test_\w+)$", each)}:
        assert re.search(rf"^[\w ]*[ *]{''.join(name)}\(", text, re.MULTILINE), name


def test_the_one_test_passes():
    (command,) = [each for each in code("CONTRIBUTING.md") if " -k " in each]
    words = shlex.split(command)
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
