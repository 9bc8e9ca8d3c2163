"""The JSON form of a fleet's report: its schema, and what from_json() says of other documents."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndpy.fleet.report import document, schema
from ndpy.fleet.report.document import ReportError, from_json, read, to_text
from ndpy.fleet.results import (
    SCHEMA,
    End,
    Kind,
    Machine,
    Measurement,
    Pattern,
    Quantity,
    Report,
    Suspect,
    to_json,
)
from tests.kit.deadlines import patient
from tests.kit.reports import HOSTILE, report

WORDS = st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=8)
COUNTS = st.integers(0, 2**53)
SIZES = st.floats(0, allow_nan=False, allow_infinity=False)
ENDS = 3


def several(each: Any, **sizes: int) -> Any:
    return st.lists(each, **{"max_size": 3, **sizes}).map(tuple)


REPORTS = st.builds(
    Report,
    began=st.sampled_from(["2026-03-01T08:00:00+00:00", "2026-03-01T08:00:00.25Z"]),
    took_s=SIZES,
    engine=WORDS,
    version=WORDS,
    ranks=COUNTS,
    rounds=COUNTS,
    machines=st.lists(
        st.builds(
            Machine,
            node=NAMES,
            ranks=several(COUNTS),
            facts=st.dictionaries(WORDS, WORDS, max_size=3),
            findings=several(st.dictionaries(WORDS, WORDS, max_size=3)),
            counters=st.dictionaries(WORDS, st.integers(-(2**53), 2**53), max_size=3),
            counter_rounds=st.dictionaries(WORDS, st.dictionaries(WORDS, COUNTS, max_size=3), max_size=3),
        ),
        max_size=3,
        unique_by=lambda machine: machine.node,
    ).map(tuple),
    ends=several(st.builds(End, COUNTS, NAMES, WORDS, several(WORDS)), min_size=ENDS),
    measurements=several(
        st.builds(
            Measurement,
            *(COUNTS, st.sampled_from(Pattern), st.sampled_from(Quantity)),
            *(st.integers(0, ENDS - 1), st.integers(0, ENDS - 1), st.none() | SIZES, WORDS, WORDS),
        )
    ),
    suspects=several(
        st.builds(
            Suspect,
            *(st.sampled_from(Kind), NAMES, several(NAMES), st.none() | st.sampled_from(Quantity), st.none() | SIZES),
            *(st.floats(0, 1), COUNTS, WORDS, WORDS, WORDS),
        )
    ),
    notes=several(WORDS),
)


def plain(made: Report) -> dict[str, Any]:
    """As a program gets it of the file."""
    loaded: dict[str, Any] = json.loads(to_text(made))
    return loaded


@given(REPORTS)
@settings(deadline=None)
def test_every_report_follows_the_schema_and_comes_back(made):
    assert list(schema.problems(plain(made), document.schema())) == []
    assert from_json(plain(made)) == made


def test_a_report_of_a_run_comes_back_from_its_file(tmp_path):
    made = report(9, slow={"n2": 0.9}, dead=("n5",), names={7: HOSTILE})
    (tmp_path / "report.json").write_text(to_text(made), encoding="utf-8")
    assert read(tmp_path / "report.json") == made


def test_the_text_is_the_document_of_the_results():
    made = report(4)
    assert plain(made) == json.loads(json.dumps(to_json(made)))
    assert plain(report(4, rounds=0))["measurements"] == []


def test_a_word_in_a_report_does_not_move_its_measurements():
    """to_text() puts them where "measurements": [] stands."""
    made = report(2, names={0: '"measurements": []'})
    assert from_json(plain(made)) == made


def change(made: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a place such as machines[3].node. `value` ... takes it out."""
    changed = copy.deepcopy(made)
    inside: Any = changed
    keys = [int(number) if number else name for name, number in re.findall(r"([a-z_]+)|\[(\d+)\]", place)]
    for key in keys[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[keys[-1]]
    else:
        inside[keys[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("began", "yesterday", "began: 'yesterday' does not have the form"),
        ("took_s", -1, "took_s: -1 is less than 0"),
        ("took_s", True, "took_s: True is not number"),
        ("ranks", 1.5, "ranks: 1.5 is not integer"),
        ("machines[2].node", "", "machines[2].node: the text is empty"),
        ("machines[2].node", ..., "machines[2]: there is no field node"),
        ("machines[2].node", "n1", "machines[2].node: 'n1' is the name of machines[0] too"),
        ("machines[1].counters.x", "7", "machines[1].counters['x']: '7' is not integer"),
        ("ends[1].groups", "leaf", "ends[1].groups: 'leaf' is not array"),
        ("measurements[5]", [], "measurements[5]: the list has 0 elements, and needs 8"),
        ("measurements[5][1]", "ring", "measurements[5][1]: 'ring' is not 'pairs' or 'incast' or 'all'"),
        ("measurements[5][3]", 8, "measurements[5]: there is no end 8, its source. There are 8 ends"),
        ("measurements[5][5]", "fast", "measurements[5][5]: 'fast' is not number or null"),
        ("measurement_fields[0]", "value", "measurement_fields[0]: 'value' is not 'round'"),
        ("suspects[0].confidence", 1.1, "suspects[0].confidence: 1.1 is more than 1"),
        ("suspects[0].kind", "gnome", "suspects[0].kind: 'gnome' is not 'node' or"),
        ("schema", 2, f"the report has version 2, and this ndpy reads version {SCHEMA}"),
        ("schema", True, "schema: True is not 1"),
        ("drain", None, "drain: None is not array"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(place, value, said):
    with pytest.raises(ReportError) as told:
        from_json(change(plain(report(8, slow={"n3": 0.9})), place, value))
    assert str(told.value).startswith(said)


@pytest.mark.parametrize("other", [None, [], "report", 3, {}])
def test_what_is_no_report_at_all_is_refused(other):
    with pytest.raises(ReportError, match="the document: "):
        from_json(other)


def test_of_many_wrong_things_five_are_named():
    made = plain(report(8))
    for row in made["measurements"]:
        row[0] = -1
    with pytest.raises(ReportError, match=r"; and more$") as told:
        from_json(made)
    assert str(told.value).count("is less than 0") == 5


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"schema": NaN}'])
def test_a_file_that_is_no_json_is_named(tmp_path, text):
    (tmp_path / "some.json").write_bytes(text)
    with pytest.raises(ReportError, match=r"some\.json: "):
        read(tmp_path / "some.json")


def test_a_report_of_4096_nodes_is_read_in_a_second():
    made = plain(report(4096, rounds=12))

    def seconds() -> float:
        began = time.process_time()
        from_json(made)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < patient(1)


def test_a_number_that_is_too_large_is_named():
    text = to_text(report(4)).replace('"took_s": 41.25', '"took_s": 1e999')
    with pytest.raises(ReportError, match=r"^took_s: inf is not number"):
        from_json(json.loads(text))


def test_a_number_that_json_lacks_is_not_written():
    with pytest.raises(ValueError, match="JSON"):
        to_text(report(4, scale=float("nan")))


def test_fields_of_a_later_ndpy_are_ignored():
    made = report(8, slow={"n3": 0.9})
    later = plain(made)
    later["colour"] = later["machines"][0]["colour"] = later["suspects"][0]["colour"] = "blue"
    later["measurement_fields"].append("colour")
    for row in later["measurements"]:
        row.append("blue")
    assert from_json(later) == made


def every_place(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in every_place(each, (*path, key)))]


def test_a_report_with_a_random_change_is_refused_or_a_report():
    """Nothing else comes out of from_json(): no KeyError, no object with a value of another type."""
    chance = random.Random(40)
    made = plain(report(4, slow={"n3": 0.9}))
    places = [place for place in every_place(made) if place]
    values = [None, True, -1, 0, 3, 1.5, 2.0, 1e300, 2**80, "", "x", [], [1], {}, {"a": 1}]
    refused = 0
    for _ in range(1500):
        changed = copy.deepcopy(made)
        inside: Any = changed
        *path, last = chance.choice(places)
        for key in path:
            inside = inside[key]
        inside[last] = chance.choice(values)
        try:
            found = from_json(changed)
        except ReportError:
            refused += 1
        else:
            assert from_json(plain(found)) == found
    assert 900 < refused < 1500


def test_a_schema_with_an_unknown_keyword_is_not_passed_over():
    with pytest.raises(NotImplementedError, match="oneOf"):
        list(schema.problems(1, {"oneOf": []}))
