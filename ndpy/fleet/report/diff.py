"""What got worse and better from one report to another. A change counts if it is beyond the noise of both runs."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ndpy.fleet.report.node_sets import fold
from ndpy.fleet.report.statistics import NAMES, Summary, figure, nodes, summaries, title
from ndpy.fleet.results import Measurement, Pattern, Quantity, Report, Suspect

# A smaller change does not count, however sure it is.
_LEAST = 0.05
# Fewer values do not tell how much they vary.
_FEWEST = 8
# How often a comparison of two equal runs may find a change, if the noise is normal.
_WRONG = 0.001
# The standard deviation divided by the median distance, and that of a median divided by that of a mean.
_OF_DISTANCE = 1.4826
_OF_MEDIAN = 1.2533
# A deviation from the distances of neighbours is as certain as one from squares of this share of the values.
_EFFICIENCY = 0.3

# A card, the quantity, and whether it sends or receives.
_Key = tuple[str, Quantity, str]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Sentences about two reports.

    Attributes:
        worse: what got worse, the largest change of bandwidth and latency first.
        better: what got better.
        changed: what differs and is neither, such as a firmware.
    """

    worse: tuple[str, ...]
    better: tuple[str, ...]
    changed: tuple[str, ...]

    def lines(self) -> list[str]:
        """A line for each sentence, and one with the result."""
        found = [f"{name}: {each}" for name in ("worse", "better", "changed") for each in getattr(self, name)]
        return [*found, f"diff: {len(self.worse)} worse, {len(self.better)} better, {len(self.changed)} changed"]


def compare(before: Report, after: Report) -> Comparison:
    """What differs from the first run to the second."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for worse, sentence in (
        *_suspects(before, after), *_failures(before, after), *_whole(before, after), *_cards(before, after)
    ):  # fmt: skip
        found[worse].append(sentence)
    return Comparison(tuple(found[True]), tuple(found[False]), tuple(_changed(before, after)))


def _suspects(before: Report, after: Report) -> Iterator[tuple[bool, str]]:
    old, new = ({_identity(each): each for each in run.suspects} for run in (before, after))
    for key in new.keys() - old.keys():
        yield True, f"{title(new[key])} is a suspect: {new[key].reason}"
    there = set(nodes(after))
    for key in old.keys() - new.keys():
        # Nothing is known of what took no part.
        if there.issuperset(old[key].nodes):
            yield False, f"{title(old[key])} is no longer a suspect. It was: {old[key].reason}"


def _identity(suspect: Suspect) -> tuple[str, str, str]:
    return suspect.kind.value, suspect.name, suspect.quantity.name if suspect.quantity else ""


def _failures(before: Report, after: Report) -> Iterator[tuple[bool, str]]:
    for old, new in _both(before, after):
        counts = [(each.failed, each.failed + len(each.values)) for each in (old, new)]
        if _shares_differ(*counts):
            (was, of), (now, all_) = counts
            text = (
                f"{new.pattern.value}: {now} of {all_} measurements of {NAMES[new.quantity]} failed, before {was} of "
                f"{of}"
            )
            yield now / all_ > was / of, text


def _shares_differ(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """A first failure is never noise. With some in both runs, their numbers vary by chance."""
    (was, of), (now, all_) = before, after
    if not was or not now:
        return was != now
    share = (was + now) / (of + all_)
    noise = math.sqrt(share * (1 - share) * (1 / of + 1 / all_))
    return abs(now / all_ - was / of) > _limit(1) * noise


def _whole(before: Report, after: Report) -> Iterator[tuple[bool, str]]:
    """The medians of all measurements of a quantity in a pattern."""
    pairs = [each for each in _both(before, after) if min(len(run.values) for run in each) >= _FEWEST]
    for old, new in pairs:
        noise = math.hypot(*(_noise(each.values) / math.sqrt(len(each.values)) for each in (old, new)))
        sentence = _change(
            old.values, new.values, new.quantity, _limit(len(pairs), min(len(old.values), len(new.values))) * noise
        )
        if sentence is not None:
            worse, text = sentence
            yield worse, f"{new.pattern.value}: the {NAMES[new.quantity]} of all is {text}"


def _cards(before: Report, after: Report) -> Iterator[tuple[bool, str]]:
    """The medians of each card with its partners.

    A card counts if it changed, and changed more than all together did: what all of them share is one sentence.
    """
    old, new = _values(before), _values(after)
    keys = sorted(old.keys() & new.keys(), key=lambda key: (key[0], key[1].name, key[2]))
    found: list[tuple[float, bool, str]] = []
    for quantity in Quantity:
        mine = [key for key in keys if key[1] is quantity]
        noises = [_within([run[key] for key in mine]) for run in (old, new)]
        distances = sorted([*_distances(before, old, quantity), *_distances(after, new, quantity)])
        known = min(sum(len(run[key]) for key in mine) for run in (old, new))
        changes = {key: _ratio(old[key], new[key]) for key in mine}
        common = statistics.median(changes.values()) if mine else 0.0
        for key in mine:
            noise = math.hypot(*(part / math.sqrt(len(run[key])) for part, run in zip(noises, (old, new), strict=True)))
            limit = _limit(len(mine), known) * noise
            own = changes[key] - common
            sentence = _change(old[key], new[key], quantity, limit)
            if sentence is None or own * changes[key] <= 0 or abs(own) <= max(limit, math.log1p(_LEAST)):
                continue
            least = min(abs(own), abs(changes[key]))
            chance = sum(_chance(distances, least, len(run[key])) for run in (old, new))
            if chance * len(mine) < _WRONG:
                worse, text = sentence
                found.append((-abs(changes[key]), worse, f"{key[0]} {key[2]}: its {NAMES[quantity]} is {text}"))
    for _, worse, text in sorted(found):
        yield worse, text


def _values(report: Report) -> dict[_Key, list[float]]:
    """What was measured of each card in pairs. The ranks of a node that share a card are one."""
    found: dict[_Key, list[float]] = {}
    for each in report.measurements:
        if each.pattern is Pattern.PAIRS and each.value:
            for key in _keys(report, each):
                found.setdefault(key, []).append(each.value)
    return found


def _keys(report: Report, measurement: Measurement) -> tuple[_Key, _Key]:
    """The card that sends, and the one that receives."""
    cards = [report.ends[place] for place in (measurement.source, measurement.target)]
    source, target = (f"{end.node}/{end.adapter}" if end.adapter else end.node for end in cards)
    return (source, measurement.quantity, "sends"), (target, measurement.quantity, "receives")


def _change(
    before: Sequence[float], after: Sequence[float], quantity: Quantity, limit: float
) -> tuple[bool, str] | None:
    """Whether it got worse, and how much. None if it is within the limit, which is that of a logarithm."""
    change = _ratio(before, after)
    if not abs(change) > max(limit, math.log1p(_LEAST)):
        return None
    old, new = (figure(statistics.median(each), quantity) for each in (before, after))
    text = f"{new}, before {old} ({100 * math.expm1(change):+.0f} %)"
    return (change > 0) is (quantity is Quantity.LATENCY), text


def _ratio(before: Sequence[float], after: Sequence[float]) -> float:
    """The logarithm of the factor by which the median changed. A median of 0 is as the smallest number."""
    old, new = (max(statistics.median(each), 1e-9) for each in (before, after))
    return math.log(new / old)


def _noise(values: Sequence[float]) -> float:
    """The standard deviation of the median of one value, relative to it. Few far values do not change it."""
    middle = statistics.median(values)
    distance = statistics.median(abs(value - middle) for value in values)
    return _OF_MEDIAN * _OF_DISTANCE * distance / middle if middle else 0.0


def _within(groups: Iterable[Sequence[float]]) -> float:
    """The same of values within their groups: one card has too few of them to tell.

    It is taken from the distances of neighbours in a group. Those from the group's median would be too small: in a
    group of three, one of them is always 0. Without enough values nothing is known, and no change is beyond it.
    """
    distances = []
    for values in groups:
        middle = max(statistics.median(values), 1e-9)
        neighbours = (
            zip(values, [*values[1:], values[0]], strict=True) if len(values) > 2 else [values] * (len(values) - 1)
        )
        distances += [abs(one - other) / (math.sqrt(2) * middle) for one, other in neighbours]
    return _OF_MEDIAN * _OF_DISTANCE * statistics.median(distances) if len(distances) >= _FEWEST else math.inf


def _distances(report: Report, values: Mapping[_Key, Sequence[float]], quantity: Quantity) -> Iterator[float]:
    """How far each measurement is from what its two cards let expect, as a logarithm."""
    medians = {key: math.log(max(statistics.median(of), 1e-9)) for key, of in values.items() if key[1] is quantity}
    middle = statistics.median(medians.values()) if medians else 0.0
    for each in report.measurements:
        if each.pattern is Pattern.PAIRS and each.quantity is quantity and each.value:
            source, target = _keys(report, each)
            yield abs(math.log(max(each.value, 1e-9)) - medians[source] - medians[target] + middle)


def _chance(distances: Sequence[float], least: float, count: int) -> float:
    """The chance that half of `count` values are this far out, and their median with them. Noise has heavy tails.

    distances: of all, sorted. What was never seen counts as seen half a time.
    """
    share = (len(distances) - bisect.bisect_left(distances, least) + 0.5) / (len(distances) + 1)
    half = range((count + 1) // 2, count + 1)
    return sum(math.comb(count, far) * share**far * (1 - share) ** (count - far) for far in half)


def _limit(comparisons: int, values: int | None = None) -> float:
    """How many standard deviations are beyond chance, in a run with this number of comparisons.

    values: from how many of them the deviation is known. Fewer make it less certain, as in Student's distribution,
        whose quantile this is to the second order (Cornish and Fisher).
    """
    z = statistics.NormalDist().inv_cdf(1 - _WRONG / (2 * max(comparisons, 1)))
    if values is None:
        return z
    freedom = _EFFICIENCY * values
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _both(before: Report, after: Report) -> list[tuple[Summary, Summary]]:
    """What both runs measured. With another number of ranks, each gets another share in all patterns but pairs."""
    old = {(each.pattern, each.quantity): each for each in summaries(before.measurements)}
    return [
        (old[each.pattern, each.quantity], each)
        for each in summaries(after.measurements)
        if (each.pattern, each.quantity) in old and (each.pattern is Pattern.PAIRS or before.ranks == after.ranks)
    ]


def _changed(before: Report, after: Report) -> Iterator[str]:
    for name in ("engine", "version", "ranks"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            yield f"{name} is {now}, before {was}"
    for one, other in _both(before, after):
        least = min(len(one.values), len(other.values))
        if least < _FEWEST:
            yield (
                f"{other.pattern.value}: {least} measurements of {NAMES[other.quantity]} are too few to tell a change "
                f"from noise, which takes {_FEWEST} in each run"
            )
    yield from _too_few_of_a_card(before, after)
    old, new = ({each.node: each for each in run.machines} for run in (before, after))
    gone, come = set(nodes(before)) - set(nodes(after)), set(nodes(after)) - set(nodes(before))
    if gone:
        yield f"{fold(gone)} took no part"
    if come:
        yield f"{fold(come)} took part, and did not before"
    facts: dict[str, set[str]] = {}
    for node in old.keys() & new.keys():
        was, now = old[node], new[node]
        for name in was.facts.keys() | now.facts.keys():
            here, there = now.facts.get(name, "unknown"), was.facts.get(name, "unknown")
            if here != there:
                facts.setdefault(f"{name} is {here}, before {there}", set()).add(node)
        for name in was.counters.keys() & now.counters.keys():
            if (was.counters[name] > 0) is not (now.counters[name] > 0):
                said = "grew, and did not before" if now.counters[name] > 0 else "did not grow, and did before"
                facts.setdefault(f"the counter {name} {said}", set()).add(node)
    for fact in sorted(facts):
        yield f"{fold(facts[fact])}: {fact}"


def _too_few_of_a_card(before: Report, after: Report) -> Iterator[str]:
    """What was measured too seldom to tell that one card changed, however large the change is."""
    old, new = _values(before), _values(after)
    for quantity in Quantity:
        counts = [min(len(old[key]), len(new[key])) for key in old.keys() & new.keys() if key[1] is quantity]
        known = [0.0] * sum(counts)
        if len(known) >= _FEWEST and 2 * len(counts) * _chance(known, math.inf, max(counts)) >= _WRONG:
            yield (
                f"pairs: {max(counts)} measurements of the {NAMES[quantity]} of a card are too few to tell a change of "
                "one card from noise; measure more rounds"
            )
