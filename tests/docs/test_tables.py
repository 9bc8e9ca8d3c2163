"""What a table in the code decides is in the pages as the code has it."""

from __future__ import annotations

import tables


def test_the_parts_of_pages_that_tables_decide_are_up_to_date() -> None:
    pages = tables.pages()
    assert {name for text, _ in pages.values() for _, name, _ in tables.PART.findall(text)} == set(tables.MAKERS)
    stale = [str(page) for page, (text, made) in pages.items() if text != made]
    assert stale == [], "run docs/tables.py --write"
