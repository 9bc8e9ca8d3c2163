"""What a table in the code decides is in the pages as the code has it."""

from __future__ import annotations

import re
from pathlib import Path

import tables

from ndpy.vocabulary.queue_pair_attributes import VERBS_NAMES, QueuePairAttributes

ROOT = Path(__file__).resolve().parents[2]


def test_the_parts_of_pages_that_tables_decide_are_up_to_date() -> None:
    pages = tables.pages()
    assert {name for text, _ in pages.values() for _, name, _ in tables.PART.findall(text)} == set(tables.MAKERS)
    stale = [str(page) for page, (text, made) in pages.items() if text != made]
    assert stale == [], "run docs/tables.py --write"


def test_the_page_on_pyverbs_has_each_attribute_of_a_queue_pair() -> None:
    header = (ROOT / "cdefs/verbs/ibverbs.h").read_text("utf-8")
    (struct,) = re.findall(r"^struct ibv_qp_attr \{(.*?)^\};", header, re.M | re.S)
    fields = set(re.findall(r"(\w+);", struct))
    page = (ROOT / "docs/howto/port_pyverbs.md").read_text("utf-8")
    table = [line for line in page.partition("## The attributes")[2].splitlines() if line.startswith("| `")]
    rows = [re.findall(r"`(\w+)`", line) for line in table]
    names = {name for row in rows for name in row}
    assert names >= fields | set(QueuePairAttributes.__dataclass_fields__)
    for field in fields - {"cap", "sq_draining"}:
        ours = VERBS_NAMES.get(field, field)
        assert ours in QueuePairAttributes.__dataclass_fields__
        assert any({field, ours} <= set(row) for row in rows)
    assert set(VERBS_NAMES) <= fields
