"""docs/contract has every clause that a test or a comment names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "docs" / "contract"
#: A clause number such as A.1, A.1.2 or M.3, at the start of a clause, a heading or a table row.
DEFINED = re.compile(r"^(?:- \*\*|## |\| )([A-M](?:\.\d+)+)", re.MULTILINE)
NAMED_BY_TEST = re.compile(r"\bdef test_([a-m])_(\d+)_(?:(\d+)_)?")
#: In these sections the clauses have no number below the heading's.
FLAT = "JM"
NAMED_IN_TEXT = re.compile(r"\bcontract ([A-M](?:\.\d+)+)((?:(?:,| and| to) [A-M](?:\.\d+)+)*)")


def defined() -> set[str]:
    return {clause for file in CONTRACT.glob("?-*.md") for clause in DEFINED.findall(file.read_text())}


def sources(*folders: str) -> list[Path]:
    kinds = {".py", ".c", ".h", ".md"}
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds]


def test_each_section_has_clauses_and_none_is_there_twice():
    clauses = [clause for file in CONTRACT.glob("?-*.md") for clause in DEFINED.findall(file.read_text())]
    assert {clause[0] for clause in clauses} == set("ABCDEFGHIJKM")
    assert len(clauses) == len(set(clauses)), sorted({each for each in clauses if clauses.count(each) > 1})


def test_every_test_that_carries_a_number_belongs_to_a_clause():
    clauses = defined()
    unknown = []
    for path in sources("tests"):
        for letter, first, second in NAMED_BY_TEST.findall(path.read_text()):
            section = letter.upper()
            clause = f"{section}.{first}" if section in FLAT or not second else f"{section}.{first}.{second}"
            if clause not in clauses:
                unknown.append(f"{path.relative_to(ROOT)}: {clause}")
    assert not unknown


def test_every_clause_that_the_code_names_exists():
    clauses = defined()
    unknown = []
    for path in sources("ndpy", "cdefs", "softrdma", "tests", "examples"):
        for first, others in NAMED_IN_TEXT.findall(path.read_text()):
            for clause in [first, *re.findall(r"[A-M](?:\.\d+)+", others)]:
                if clause not in clauses:
                    unknown.append(f"{path.relative_to(ROOT)}: {clause}")
    assert not unknown
