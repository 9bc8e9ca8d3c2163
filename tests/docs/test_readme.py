"""The README is a door: short, with links that work on a package index and lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]


def test_it_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_each_link_is_absolute_and_leads_to_a_page_or_a_file() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        if link.startswith(URLS["Documentation"]):
            page = link.removeprefix(URLS["Documentation"])
            assert (ROOT / "docs" / page).with_suffix(".md").is_file(), link
        else:
            assert link.startswith(URLS["Source"]), link
            assert (ROOT / link.removeprefix(URLS["Source"])).is_file(), link


def test_links_of_pages_to_the_sources_lead_to_files() -> None:
    found = 0
    for page in (ROOT / "docs").rglob("*.md"):
        if "_build" not in page.parts:
            for name in re.findall(rf"\]\({re.escape(URLS['Source'])}([^)]+)\)", page.read_text("utf-8")):
                assert (ROOT / name).exists(), f"{page.name}: {name}"
                found += 1
    assert found > 5


def test_its_program_is_the_example() -> None:
    program = (ROOT / "examples/hello.py").read_text("utf-8").partition('"""\n\n')[2]
    assert f"```python\n{program}```" in README


def test_the_picture_of_the_smoke_test_shows_checks_that_exist() -> None:
    """docs/smoke_picture.py makes it again."""
    listed = subprocess.run(
        [sys.executable, "-m", "ndpy", "smoke", "--list"], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    names = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    picture = (ROOT / "docs/_static/smoke.svg").read_text("utf-8").replace("&#160;", " ")
    shown = set(re.findall(r"\b([a-z]+(?:-[a-z]+)*/[a-z0-9-]+) ", picture))
    assert len(shown) > 15
    assert shown <= names
