"""Patterns after the pairs: many to one (incast), and all at once.
By then the pairs have shown who is slow with one partner.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence

from ndpy.fleet.results import End, Kind, Measurement, Pattern, Quantity, Suspect
from ndpy.fleet.schedule import Round

#: So many ends write to one. More do not tell more: a receiver has one link.
FAN_IN = 8
#: In so many rounds all send at once, each time to another one.
_SHIFTS = 4
_FEWEST = 5
#: A receiver is a suspect if it gets at most this share of the others' median, and again when it is measured again.
_SLOW = 0.8
_LEAST_NOISE = 0.05
_DOUBT = 3.0
_SURE = 0.99
#: A deviation from the median distance, if the noise is normal.
_OF_DISTANCE = 1.4826


def incast(ends: Sequence[End], places: Sequence[int], seed: int = 0) -> Iterator[Round]:
    """Rounds of (source, target) in which each of these ends once receives from up to FAN_IN others."""
    order = list(places)
    random.Random(seed).shuffle(order)
    groups = math.ceil(len(order) / (FAN_IN + 1))
    members = [order[group::groups] for group in range(groups)]
    for turn in range(max(map(len, members), default=0)):
        flows: list[tuple[int, int]] = []
        for group in members:
            if turn < len(group):
                flows += _to_one(ends, group, group[turn])
        if flows:
            yield tuple(flows)


def again(ends: Sequence[End], places: Sequence[int], target: int, seed: int) -> Round:
    """A round for this receiver alone, with senders that are drawn anew."""
    others = [place for place in places if place != target]
    random.Random(seed).shuffle(others)
    return tuple(_to_one(ends, [target, *others], target))[:FAN_IN]


def _to_one(ends: Sequence[End], group: Sequence[int], target: int) -> list[tuple[int, int]]:
    flows = [(place, target) for place in group if place != target and _are_apart(ends, place, target)]
    return flows if len(flows) > 1 else []


def all_at_once(ends: Sequence[End], places: Sequence[int]) -> Iterator[Round]:
    """Rounds in which each of these ends sends to one and receives from one at the same time."""
    for shift in range(1, min(_SHIFTS, len(places) - 1) + 1):
        turned = [*places[shift:], *places[:shift]]
        flows = tuple(pair for pair in zip(places, turned, strict=True) if _are_apart(ends, *pair))
        if flows:
            yield flows


def _are_apart(ends: Sequence[End], one: int, other: int) -> bool:
    """Whether two ends meet: those of one node do not, unless there is no other node."""
    return ends[one].node != ends[other].node or len({end.node for end in ends}) == 1


def totals(measurements: Iterable[Measurement]) -> dict[int, list[float]]:
    """What each receiver got in all, in Gb/s, for each of its rounds in which every sender succeeded."""
    found: dict[tuple[int, int], list[float | None]] = {}
    for each in measurements:
        if each.pattern is Pattern.INCAST:
            found.setdefault((each.target, each.round), []).append(each.value)
    sums: dict[int, list[float]] = {}
    for (target, _), values in found.items():
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            sums.setdefault(target, []).append(sum(known))
    return sums


def doubtful(measurements: Sequence[Measurement]) -> list[int]:
    """The receivers that look slow, and should be measured again."""
    received = totals(measurements)
    return [
        target
        for target, scores in _scores(received).items()
        if min(scores) > _DOUBT and _share(received, target) <= _SLOW
    ]


def slow_receivers(ends: Sequence[End], measurements: Sequence[Measurement]) -> list[Suspect]:
    """The receivers that were slow each time. One measurement is not enough."""
    received, found = totals(measurements), []
    for target, scores in _scores(received).items():
        share = _share(received, target)
        chance = len(received) * math.prod(map(_tail, scores))
        if len(scores) < 2 or share > _SLOW or chance > 1 - _SURE:
            continue
        end, name = ends[target], f"{ends[target].node}/{ends[target].adapter}"
        reason = (
            f"{name} receives {100 * (1 - share):.0f} % less than the others when many write to it at the same time: "
            f"{statistics.median(received[target]):.3g} Gb/s in all"
        )
        remedy = "look at pause frames, ECN and discards in its counters, and at the buffers of its switch port"
        found.append(
            Suspect(Kind.ADAPTER, name, (end.node,), Quantity.BANDWIDTH, share, 1 - chance, len(scores), reason, remedy)
        )
    return found


def _share(received: dict[int, list[float]], target: int) -> float:
    return statistics.median(received[target]) / statistics.median(values[0] for values in received.values())


def _scores(received: dict[int, list[float]]) -> dict[int, list[float]]:
    """How many deviations of the noise each result is below the median. Without enough receivers nothing is known."""
    if len(received) < _FEWEST:
        return {}
    first = [math.log(values[0]) for values in received.values()]
    middle = statistics.median(first)
    noise = max(_LEAST_NOISE, _OF_DISTANCE * statistics.median(abs(value - middle) for value in first))
    return {target: [(middle - math.log(value)) / noise for value in values] for target, values in received.items()}


def _tail(score: float) -> float:
    """How often noise with heavy tails, Student's t with three degrees of freedom, is so far below."""
    turned = score / math.sqrt(3)
    return 0.5 - (turned / (1 + turned * turned) + math.atan(turned)) / math.pi
