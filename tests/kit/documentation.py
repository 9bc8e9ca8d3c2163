"""The examples of the documentation's pages, for tests that run them on other adapters than soft0, as tests/docs
does.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def example(page: str, word: str) -> str:
    """The only example in Python of the page docs/PAGE that has this word."""
    blocks = (DOCS / page).read_text("utf-8").split("```python\n")[1:]
    (found,) = [code for block in blocks if word in (code := block.partition("```")[0])]
    return found
