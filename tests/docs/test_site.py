"""The site of the documentation builds without a warning. Each of its pages is there as plain Markdown too, and no link
is dead.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
# These tests build the site, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(600)


def sources() -> list[Path]:
    pages = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return [page for page in pages if page.parts[0] not in ("_build", "README.md")]


def test_each_page_is_html_and_plain_markdown_and_in_the_list_of_all(site: Path) -> None:
    listed = (site / "llms.txt").read_text("utf-8")
    for page in sources():
        assert (site / page.with_suffix(".html")).is_file()
        assert (site / page).is_file()
        assert f"]({page.as_posix()})" in listed


def test_what_a_page_hides_is_not_in_its_plain_form(site: Path) -> None:
    hidden = 0
    for page in sources():
        text = (site / page).read_text("utf-8")
        assert "<!--" not in text and "&lt;!--" not in text and "\\<!--" not in text, page
        for comment in re.findall(r"^<!--(.*?)-->$", (DOCS / page).read_text("utf-8"), re.M | re.S):
            lines = {line for line in comment.splitlines() if len(line) > 20}
            shown = (DOCS / page).read_text("utf-8").replace(comment, "")
            hidden += len(lines)
            assert not [line for line in lines if line in text and line not in shown], page
    assert hidden > 20


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for word in ('src="http', 'rel="stylesheet" href="http', "@import url(http"):
            assert word not in page.read_text("utf-8"), page


def test_no_link_within_the_site_is_dead(site: Path) -> None:
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]*)"', text)) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for link in set(re.findall(r'<a\b[^>]*\bhref="([^"]*)"', text)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = places.get(target)
            if not target.is_file() or (parts.fragment and known is not None and unquote(parts.fragment) not in known):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, "\n".join(sorted(dead))
