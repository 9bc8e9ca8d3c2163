"""The page of a siw context at which no queue may begin."""

from __future__ import annotations

import pytest

from ndpy.platforms.verbs import reserved_page


@pytest.mark.parametrize("page", [4096, 16384, 65536])
@pytest.mark.parametrize("first", [0, 1])
def test_the_last_queue_has_the_page_inside_it(page, first):
    begins = first
    for entries in reserved_page.plan(page):
        start, begins = begins, begins + reserved_page.pages_of(entries, page)
        assert start != 0x90000 // page
    assert start < 0x90000 // page < begins
    assert (begins - start) * page <= 5 * page
