"""Fleets that were really measured: what each pair did in each round, and who was made bad.

`python tests/kit/measured.py NAME BAD REPORT` prints the lines of a report of `ndpy fleet --json`, for
tests/unit/measured_fleets.txt:

    fleet NAME of SIZE ends, bad: PLACES
    ROUND SOURCE TARGET LATENCY_US GBPS_THERE GBPS_BACK

A - is a measurement that failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ndpy.fleet.results import End, Measurement, Pattern, Quantity

FILE = Path(__file__).resolve().parent.parent / "unit" / "measured_fleets.txt"


@dataclasses.dataclass(frozen=True)
class Measured:
    name: str
    ends: tuple[End, ...]
    bad: frozenset[str]
    measurements: tuple[Measurement, ...]


def read() -> list[Measured]:
    found: list[Measured] = []
    for part in FILE.read_text("utf-8").split("fleet ")[1:]:
        head, *lines = part.strip().splitlines()
        name, _, rest = head.partition(" of ")
        size, _, bad = rest.partition(" ends, bad:")
        ends = tuple(End(place, f"n{place}", "soft0") for place in range(int(size)))
        rows = tuple(each for line in lines for each in _row(*line.split()))
        found.append(Measured(name, ends, frozenset(f"n{place}" for place in bad.split()), rows))
    return found


def _row(round_: str, one: str, other: str, latency: str, there: str, back: str) -> Iterator[Measurement]:
    for quantity, source, target, value in (
        (Quantity.LATENCY, one, other, latency),
        (Quantity.BANDWIDTH, one, other, there),
        (Quantity.BANDWIDTH, other, one, back),
    ):
        number = None if value == "-" else float(value)
        error = "" if number is not None else "it failed"
        yield Measurement(int(round_), Pattern.PAIRS, quantity, int(source), int(target), number, error)


def lines(name: str, bad: str, report: Path) -> Iterator[str]:
    document = json.loads(report.read_text("utf-8"))
    yield f"fleet {name} of {len(document['ends'])} ends, bad: {bad}".strip()
    rows = [row for row in document["measurements"] if row[1] == "pairs"]
    for there in range(0, len(rows), 3):
        values = ("-" if row[5] is None else f"{row[5]:.4g}" for row in rows[there : there + 3])
        yield " ".join([*map(str, (rows[there][0], *rows[there][3:5])), *values])


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
