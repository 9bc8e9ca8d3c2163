"""Numbers about many measurements, for all forms of the report."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ndpy.fleet.results import Kind, Measurement, Pattern, Quantity, Report, Suspect

_MOST_ROUNDS = 8
#: What each quantity is called.
NAMES = {Quantity.LATENCY: "latency", Quantity.BANDWIDTH: "bandwidth"}


@dataclasses.dataclass(frozen=True)
class Summary:
    """All measurements of a quantity in a pattern.

    Attributes:
        values: those that succeeded, sorted.
        failed: how many failed.
    """

    pattern: Pattern
    quantity: Quantity
    values: tuple[float, ...]
    failed: int

    def at(self, share: float) -> float | None:
        """The value below which this share of all lies: 0 is the least, 1 the most. None if all failed."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)] if self.values else None


def summaries(measurements: Iterable[Measurement]) -> list[Summary]:
    """One for each pattern and quantity that was measured, in the order of their classes."""
    found: dict[tuple[Pattern, Quantity], list[float | None]] = {}
    for each in measurements:
        found.setdefault((each.pattern, each.quantity), []).append(each.value)
    return [
        Summary(
            pattern,
            quantity,
            tuple(sorted(value for value in found[pattern, quantity] if value is not None)),
            sum(value is None for value in found[pattern, quantity]),
        )
        for pattern in Pattern
        for quantity in Quantity
        if (pattern, quantity) in found
    ]


def medians(report: Report) -> dict[tuple[int, Quantity, str], float]:
    """The median of each end in pairs, by (place, quantity, "sends" or "receives")."""
    found: dict[tuple[int, Quantity, str], list[float]] = {}
    for each in report.measurements:
        if each.pattern is Pattern.PAIRS and each.value is not None:
            found.setdefault((each.source, each.quantity, "sends"), []).append(each.value)
            found.setdefault((each.target, each.quantity, "receives"), []).append(each.value)
    ordered = sorted(found, key=lambda key: (key[1].name, key[0], key[2]))
    return {key: statistics.median(found[key]) for key in ordered}


def grew_in(rounds: Mapping[str, int]) -> str:
    """The rounds in which a counter grew, for people: " in rounds 3, 7". Nothing if the report does not have them."""
    shown = list(rounds)
    more = f" and {len(shown) - _MOST_ROUNDS} more" if len(shown) > _MOST_ROUNDS else ""
    return f" in round{'s' if len(shown) > 1 else ''} {', '.join(shown[:_MOST_ROUNDS])}{more}" if shown else ""


def plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def figure(value: float | None, quantity: Quantity) -> str:
    """A value with its unit."""
    return "-" if value is None else f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f} {quantity.value}"


def title(suspect: Suspect) -> str:
    """Its name after its kind, such as "node n17". The names of groups and paths say what they are."""
    kind = suspect.kind.value
    plain = suspect.kind in {Kind.GROUP, Kind.PATH} or suspect.name.startswith(f"{kind} ")
    return suspect.name if plain else f"{kind} {suspect.name}"


def percent(confidence: float) -> str:
    """A confidence. It is never rounded up to certainty."""
    return f"{int(confidence * 1000) / 10:g} %"


def nodes(report: Report) -> list[str]:
    """All nodes, in the order of machines and ends, each once."""
    return list(dict.fromkeys([machine.node for machine in report.machines] + [end.node for end in report.ends]))


def headline(report: Report) -> str:
    """The run in one line."""
    return (
        f"{plural(report.ranks, 'rank')} on {plural(len(nodes(report)), 'node')}, {plural(report.rounds, 'round')}, "
        f"{plural(len(report.measurements), 'measurement')} in {report.took_s:.1f} s ({report.engine}, ndpy "
        f"{report.version})"
    )


def verdict(suspects: Sequence[object]) -> str:
    """The result in one line."""
    return f"fleet: {plural(len(suspects), 'suspect')}" if suspects else "fleet: no suspects"
