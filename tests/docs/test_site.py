"""The site of the documentation builds without a warning, and each of its pages is there as plain Markdown too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "html"
    done = subprocess.run(
        [sys.executable, DOCS / "build.py", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert not done.returncode, done.stdout
    return folder


def sources() -> list[Path]:
    pages = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return [page for page in pages if page.parts[0] not in ("_build", "README.md")]


@pytest.mark.timeout(600)
def test_each_page_is_html_and_plain_markdown_and_in_the_list_of_all(site: Path) -> None:
    listed = (site / "llms.txt").read_text("utf-8")
    for page in sources():
        assert (site / page.with_suffix(".html")).is_file()
        assert (site / page).is_file()
        assert f"]({page.as_posix()})" in listed


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for word in ('src="http', 'rel="stylesheet" href="http', "@import url(http"):
            assert word not in page.read_text("utf-8"), page
