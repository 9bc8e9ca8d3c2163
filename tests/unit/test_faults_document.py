"""docs/faults.md has the kinds of faults, and its examples work.

python test_faults_document.py --write   writes the tables
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ndpy.faults import Fault, Scenario, kinds

DOCUMENT = Path(__file__).parents[2] / "docs/faults.md"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def words(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table_of_kinds() -> str:
    text = row("at", "do", "values", "what happens", "the adapter afterwards", "by", "shown by")
    text += row(*["---"] * 7)
    for kind in kinds.KINDS:
        values = ", ".join([*(f"`{name}`" for name in kind.values), *(f"[`{name}`]" for name in kind.optional)])
        who = " ".join(kind.executors)
        text += row(kind.at, f"`{kind.do}`", values, kind.meaning, kind.afterwards, who, kind.reference)
    return text


def table_of_statuses() -> str:
    text = row("status", "operations", "by", "reference") + row(*["---"] * 4)
    for status in kinds.STATUSES:
        text += row(f"`{status.name}`", words(status.operations), " ".join(status.executors), status.reference)
    return text


def table_of_refusals() -> str:
    text = row("at", "do", "not by", "because") + row(*["---"] * 4)
    for kind in kinds.KINDS:
        for reason in dict.fromkeys(reason for _, reason in kind.refused):
            who = [name for name, why in kind.refused if why == reason]
            text += row(kind.at, f"`{kind.do}`", " ".join(who), reason)
    return text


def table_of_softnds_calls() -> str:
    text = row("softnd", "calls") + row(*["---"] * 2)
    for word, what in (
        ("full", "`slow`; `errno` with `ENOMEM`; `limit` if the call makes objects"),
        ("slow", "`slow`"),
    ):
        text += row(what, words(tuple(call.name for call in kinds.CALLS if call.softnd == word)))
    return text


def with_tables(text: str) -> str:
    for name, make in TABLES.items():
        table = make()
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL
        )
    return text


TABLES = {
    "kinds": table_of_kinds,
    "refusals": table_of_refusals,
    "softnd": table_of_softnds_calls,
    "statuses": table_of_statuses,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)


def test_the_tables_are_those_of_the_kinds():
    text = DOCUMENT.read_text("utf-8")
    assert with_tables(text) == text, f"run python {__file__} --write"


def test_the_scenarios_in_toml_and_in_python_are_the_same():
    (toml,) = blocks("toml")
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    if sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    assert Scenario.parse(toml) == names["scenario"]


def test_the_example_of_hypothesis_works():
    hypothesis = pytest.importorskip("hypothesis")
    names: dict[str, object] = {}
    exec(blocks("python")[2], names)
    # A busy machine is slow.
    patient = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    patient(names["test_every_scenario_is_possible"])()


def test_every_word_of_a_fault_is_explained():
    text = DOCUMENT.read_text("utf-8")
    for name in Fault.__dataclass_fields__:
        assert f"`{name}`" in text, name


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"]
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text("utf-8")), "utf-8")
