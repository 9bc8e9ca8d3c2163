"""The JSON form of a report. `schema.json` describes it, and from_json() takes nothing else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from ndpy.fleet.report.schema import problems
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

# So many of the things that are wrong are named.
_NAMED = 5
_COUNT = len(dataclasses.fields(Measurement))
# A report of thousands of nodes has a hundred thousand of each, and to call an enumeration takes ten times as long.
_PATTERNS = {each.value: each for each in Pattern}
_QUANTITIES = {each.value: each for each in Quantity}


class ReportError(ValueError):
    """A file that is not a report of `ndpy fleet`. The message says which field of it, and why."""


@functools.lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    """The JSON Schema of the form, draft 2020-12."""
    text = resources.files("ndpy.fleet.report").joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def to_text(report: Report) -> str:
    """The report as JSON, with a line for each measurement.

    Raises:
        ValueError: a number is not finite. JSON lacks those.
    """
    document = to_json(report)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in document["measurements"])
    rest = json.dumps({**document, "measurements": []}, indent=1, allow_nan=False)
    return rest.replace('"measurements": []', f'"measurements": [\n  {rows}\n ]' if rows else '"measurements": []', 1)


def read(path: Path) -> Report:
    """The report in a file.

    Raises:
        ReportError: the file is not such a report. The message names it.
        OSError: it cannot be read.
    """
    try:
        return from_json(json.loads(path.read_bytes(), parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        # ReportError, JSONDecodeError and UnicodeDecodeError are such.
        raise ReportError(f"{path}: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ReportError(f"{name} is not a number of JSON")


def from_json(document: Any) -> Report:
    """The report of which to_json() made this. Fields that are not in the schema are ignored.

    Raises:
        ReportError: the document does not follow the schema.
    """
    if isinstance(document, dict) and type(document.get("schema")) is int and document["schema"] != SCHEMA:
        raise ReportError(f"the report has version {document['schema']}, and this ndpy reads version {SCHEMA}")
    _refuse(list(itertools.islice(problems(document, schema()), _NAMED + 1)))
    _refuse(list(itertools.islice(_contradictions(document), _NAMED + 1)))
    return Report(
        began=document["began"],
        took_s=document["took_s"],
        engine=document["engine"],
        version=document["version"],
        ranks=int(document["ranks"]),
        rounds=int(document["rounds"]),
        machines=tuple(_machine(each) for each in document["machines"]),
        ends=tuple(_end(each) for each in document["ends"]),
        measurements=tuple(_measurement(each) for each in document["measurements"]),
        suspects=tuple(_suspect(each) for each in document["suspects"]),
        notes=tuple(document["notes"]),
    )


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ReportError("; ".join(wrong[:_NAMED]) + ("; and more" if len(wrong) > _NAMED else ""))


def _contradictions(document: dict[str, Any]) -> Any:
    """What is wrong with a document that follows the schema."""
    count = len(document["ends"])
    for place, row in enumerate(document["measurements"]):
        for field, name in ((3, "source"), (4, "target")) if max(row[3], row[4]) >= count else ():
            if row[field] >= count:
                yield f"measurements[{place}]: there is no end {row[field]}, its {name}. There are {count} ends"
    seen: dict[str, int] = {}
    for place, machine in enumerate(document["machines"]):
        first = seen.setdefault(machine["node"], place)
        if first != place:
            yield f"machines[{place}].node: {machine['node']!r} is the name of machines[{first}] too"


def _machine(each: dict[str, Any]) -> Machine:
    return Machine(
        node=each["node"],
        ranks=tuple(int(rank) for rank in each["ranks"]),
        facts=dict(each["facts"]),
        findings=tuple(dict(finding) for finding in each["findings"]),
        counters={name: int(value) for name, value in each["counters"].items()},
        counter_rounds={
            name: {turn: int(value) for turn, value in rounds.items()}
            for name, rounds in each.get("counter_rounds", {}).items()
        },
    )


def _end(each: dict[str, Any]) -> End:
    return End(int(each["rank"]), each["node"], each["adapter"], tuple(each["groups"]))


def _measurement(row: list[Any]) -> Measurement:
    turn, pattern, quantity, source, target, value, error, problem = row[:_COUNT]
    return Measurement(
        int(turn), _PATTERNS[pattern], _QUANTITIES[quantity], int(source), int(target), value, error, problem
    )


def _suspect(each: dict[str, Any]) -> Suspect:
    known = {field.name: each[field.name] for field in dataclasses.fields(Suspect)}
    known |= {"kind": Kind(each["kind"]), "nodes": tuple(each["nodes"]), "measurements": int(each["measurements"])}
    known["quantity"] = None if each["quantity"] is None else Quantity(each["quantity"])
    return Suspect(**known)
