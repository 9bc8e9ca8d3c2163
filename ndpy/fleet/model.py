"""What the measurements say about each end, node, group and path. `evidence.py` has the mathematics.

Confidence means: of a hundred good fleets that are measured with `sure=0.99`, at most one has any suspect.
"""

from __future__ import annotations

import collections
import importlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ndpy.fleet.results import End, Kind, Measurement, Quantity, Suspect

if TYPE_CHECKING:
    from ndpy.fleet.evidence import Finding

_WHAT = {Quantity.LATENCY: "latency", Quantity.BANDWIDTH: "bandwidth"}
_REMEDY = {
    Kind.NODE: "Take {nodes} out of use. Run `ndpy doctor` on it, then look at its adapter, cable and switch port.",
    Kind.ADAPTER: "Run `ndpy doctor` on {nodes}, then look at this adapter, its slot, its cable and its switch port.",
    Kind.RANK: "Look at the process on {nodes}: its cores, its memory's NUMA node, and what else runs there.",
    Kind.GROUP: "Look at the switch and its uplinks: port counters, speed, pause frames and ECN. The nodes seem good.",
    Kind.PATH: "Look at the links and the routing between the two. Each of them is good with others.",
}


class ModelError(RuntimeError):
    """The model cannot be computed. The message says what to do."""


def mathematics() -> Any:
    """The module `evidence`. Raises ModelError without numpy."""
    try:
        return importlib.import_module("ndpy.fleet.evidence")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ModelError('To tell who is slow, this Python needs numpy: pip install "ndpy[fleet]"') from None


def analyse(
    ends: Sequence[End], measurements: Iterable[Measurement], *, sure: float = 0.99, looks: int = 1
) -> tuple[Suspect, ...]:
    """What is unlike the others, the most certain first.

    Parameters:
        ends: in the order of their places.
        measurements: those of pairs count. A value of None is evidence too.
        sure: the least confidence of a suspect, below 1.
        looks: how many times the measurements are analysed during the run.
    Raises:
        ModelError: numpy is missing, or `sure` is not between 0 and 1.
    """
    if not 0 < sure < 1:
        raise ModelError(f"sure is {sure}: give a number between 0 and 1, such as 0.99")
    found, _ = mathematics().find(ends, list(measurements), sure, looks)
    return suspects(found)


def limits(ends: Sequence[End]) -> tuple[str, ...]:
    """Sentences about what cannot be told apart with so few ends, or without a topology."""
    said = []
    if len(ends) < 2:
        said.append("One end has nobody to be compared with: start at least 2, better 5.")
    elif len(ends) == 2:
        said.append(
            "Two ends have only each other: if both are slow nothing tells, and a failure is of one of the two."
        )
    elif len(ends) < 5:
        said.append(f"Of {len(ends)} ends at most one can be told to be slow: start at least 5.")
    if len(ends) > 4 and not any(end.groups for end in ends):
        said.append("The topology is unknown: a slow leaf shows as slow nodes. Give it by --topology FILE.")
    return tuple(said)


def suspects(found: Sequence[Finding]) -> tuple[Suspect, ...]:
    """Findings in words. A thing is named once, with its strongest finding first."""
    by_name: dict[str, list[Finding]] = {}
    for each in sorted(found, key=lambda each: (each.quantity is not None, -each.evidence)):
        by_name.setdefault(_name(each), []).append(each)
    named = [_suspect(name, each) for name, each in by_name.items()]
    order = {name: max(each.evidence for each in those) for name, those in by_name.items()}
    return tuple(sorted(named, key=lambda each: (-each.confidence, -order[each.name])))


def _name(found: Finding) -> str:
    names = [thing.name for thing in found.things]
    return names[0] if len(names) == 1 else f"one of {', '.join(names[:-1])} and {names[-1]}"


def _suspect(name: str, found: Sequence[Finding]) -> Suspect:
    first = found[0]
    nodes = tuple(sorted({node for thing in first.things for node in thing.nodes}))
    problem = collections.Counter(word for _, word in first.errors if word).most_common(1)
    sentences = [_reason(each) for each in found]
    if len(first.things) > 1:
        sentences.append("The measurements do not tell which of them it is.")
    return Suspect(
        kind=first.things[0].kind,
        name=name,
        nodes=nodes,
        quantity=first.quantity,
        factor=None if first.quantity is None else round(_factor(first), 4),
        confidence=max(each.confidence for each in found),
        measurements=sum(each.measurements for each in found),
        reason=" ".join(sentences),
        remedy=_REMEDY[first.things[0].kind].format(nodes=", ".join(nodes[:8]) + (" ..." if len(nodes) > 8 else "")),
        problem=problem[0][0] if problem else "",
    )


def _factor(found: Finding) -> float:

    return math.exp(found.effect if found.quantity is Quantity.LATENCY else -found.effect)


def _reason(found: Finding) -> str:
    mode = f" {found.mode.value}" if found.mode.value else ""
    partners = f"{found.partners} partner{'s' * (found.partners != 1)}"
    with_ = (
        f"{found.measurements} measurements with {partners}" if found.partners else f"{found.measurements} measurements"
    )
    if found.quantity is None:
        errors = collections.Counter(error for error, _ in found.errors if error).most_common(1)
        said = f", mostly with: {errors[0][0].rstrip('.')}" if errors else ""
        return f"{found.effect:.0%} of the measurements with it failed{mode} ({with_}){said}."
    change = abs(_factor(found) - 1)
    word = "above" if found.quantity is Quantity.LATENCY else "below"
    return f"Its {_WHAT[found.quantity]}{mode} is {change:.1%} {word} that of the others ({with_})."
