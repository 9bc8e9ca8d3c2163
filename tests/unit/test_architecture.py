"""The files and identifiers that docs/architecture.md names exist where it says. Long files say why they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()
SOURCES = [
    path
    for folder in ("ndpy", "cdefs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".pyi", ".c", ".h"}
]


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".py", ".md", ".c", ".h"))


def passages() -> list[tuple[list[str], list[str]]]:
    """(paths, identifiers) of each paragraph, list item and table row. Names with a blank are commands and left out."""
    found = []
    for passage in re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) )|\n(?=\|)", TEXT):
        names = [name for name in re.findall(r"`([^`]+)`", passage) if " " not in name]
        found.append(([name for name in names if is_path(name)], [name for name in names if not is_path(name)]))
    return found


def files_below(path: str) -> list[Path]:
    place = ROOT / path
    return [source for source in SOURCES if source == place or place in source.parents]


def defines(source: str, identifier: str) -> bool:
    """Whether a file defines, declares or assigns this name."""
    name = re.escape(identifier)
    return bool(
        re.search(rf"\b(?:class|def|struct|enum)\s+{name}\b", source)
        or re.search(rf"^\s*(?:self\.)?{name}\s*(?::[^=\n]+)?=", source, re.MULTILINE)
        or re.search(rf"^[\w*\s]+[\s*]{name}\(", source, re.MULTILINE)
    )


@pytest.mark.parametrize("path", sorted({path for paths, _ in passages() for path in paths}))
def test_it_names_files_that_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("identifier", "paths"),
    sorted({(identifier, tuple(paths)) for paths, identifiers in passages() for identifier in identifiers}),
)
def test_it_names_identifiers_that_are_defined_in_the_files_beside_them(identifier, paths):
    """If a passage names no source, the identifier may be anywhere in ndpy/ and cdefs/."""
    sources = [source for path in paths for source in files_below(path)] or SOURCES
    texts = [source.read_text() for source in sources]
    for part in identifier.removesuffix("()").split("."):
        assert any(defines(text, part) for text in texts), f"{part} is not defined in {', '.join(paths) or 'ndpy/'}"


def test_the_check_sees_what_does_not_exist():
    assert defines("class QueuePair(Resource):\n    def write(self): ...\n    _order = 3\n", "write")
    assert not defines("class QueuePair(Resource):\n    # write\n    other = write\n", "write")
    assert defines("static int post_initiator(struct x *qp)\n", "post_initiator")


LONG = 700
FOLDERS = ("ndpy", "cdefs", "softrdma", "rig", "benchmarks", "tests", "docs", "examples")


def long_files() -> list[Path]:
    made = {"build", "__pycache__", "node_modules"}
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".pyi", ".c", ".h", ".sh", ".js"}
        and made.isdisjoint(path.parts)
        and len(path.read_text(errors="replace").splitlines()) > LONG
    ]


@pytest.mark.parametrize("path", long_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_of_many_lines_says_in_its_head_why_it_is_one(path):
    head = " ".join(path.read_text().splitlines()[:30])
    assert re.search(r"one file", head, re.IGNORECASE), f"more than {LONG} lines"
