"""Who counts lost or damaged packets in most of its rounds, where the others count none. It need not be slow.

A counter is looked at in two ways:

- by itself: each card in each of its rounds. A bad cable shows at the card that it belongs to.
- with its partner: each pair in each round, whichever of the two counted. Some adapters tell only the receiver what
  the sender loses.

The chance is that of Fisher's exact test: if the rounds with a loss fell anywhere, how often would the suspect
have at least its number of them? It pays for each counter that grew, for both ways, and for each choice of suspects.
Incast and all-at-once do not count: a healthy network may drop packets there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from ndpy.fleet.results import End, Kind, Machine, Measurement, Pattern, Suspect
from ndpy.vocabulary.counters import is_loss

#: Fewer cards do not tell which of them is unlike the others.
_FEWEST_CARDS = 3
#: In fewer rounds it may be chance, however many others there are.
_FEWEST_ROUNDS = 3
#: The others may count a loss in this share of their rounds.
_MOST_OF_OTHERS = 0.1
#: A group is named instead of its cards if this share of them would be.
_MOST_OF_GROUP = 0.8
_SURE = 0.999
#: As sure as the model ever is.
_MOST_SURE = 0.9999
_MOST_COUNTERS = 4
_REMEDY = (
    "Look at the cable and the transceiver of {nodes}, and at both ends' port counters and speed. Exchange the cable, "
    "then the port, then the adapter."
)
_REMEDY_OF_GROUP = "Look at the switch and its uplinks: port counters, cables and transceivers. The nodes seem good."

#: (node, adapter)
_Card = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _Thing:
    kind: Kind
    name: str
    cards: frozenset[_Card]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for node, _ in self.cards}))


@dataclasses.dataclass(frozen=True)
class _Finding:
    """What one counter says of a thing, in one of the two ways.

    Attributes:
        with_partners: whether those that the partners counted are among them.
        lost, rounds: in how many rounds there was a loss, of how many.
        others_lost, others_rounds: the same where the thing took no part.
    """

    counter: str
    with_partners: bool
    chance: float
    lost: int
    rounds: int
    others_lost: int
    others_rounds: int


def suspects(
    machines: Sequence[Machine],
    ends: Sequence[End],
    measurements: Sequence[Measurement],
    known: Mapping[str, Collection[str]],
) -> list[Suspect]:
    """Those that alone count losses.

    known: of each node the counters that were read, named as in Machine.counters. A machine without a counter is not
    one that counted nothing.
    """
    grown = _grown({machine.node: machine.counter_rounds for machine in machines})
    having: dict[str, set[_Card]] = collections.defaultdict(set)
    cards = {_card(end) for end in ends}
    if not grown:
        return []
    for machine in machines:
        for name in known.get(machine.node, ()):
            adapter, _, counter = name.partition(" ")
            if (machine.node, adapter) in cards:
                having[counter].add((machine.node, adapter))
    rounds, things = _rounds(ends, measurements), _things(ends)
    found: dict[_Thing, list[_Finding]] = collections.defaultdict(list)
    for counter, lost in grown.items():
        for with_partners in (False, True):
            looks = list(_looks(rounds, having[counter], lost, with_partners))
            for thing, finding in _unlike(counter, with_partners, looks, things, having[counter], 2 * len(grown)):
                found[thing].append(finding)
    # A leaf that loses packets is one suspect, and its nodes are none.
    whole = [thing.cards for thing in found if thing.kind is Kind.GROUP]
    return [
        _suspect(thing, findings, machines)
        for thing, findings in found.items()
        if not any(thing.cards < cards for cards in whole)
    ]


def doubtful(
    counted: Mapping[str, Mapping[str, Mapping[str, int]]], ends: Sequence[End], measurements: Sequence[Measurement]
) -> set[int]:
    """The places of the ends that count losses in most of their rounds so far. More rounds make it certain.

    counted: of each node, what Machine.counter_rounds has. If more than a quarter of the ends do, nobody is doubtful.
    """
    grown = _grown(counted)
    if not grown:
        return set()
    took_part: dict[_Card, set[int]] = collections.defaultdict(set)
    for turn, *both in _rounds(ends, measurements):
        for card in both:
            took_part[card].add(turn)
    bad = {
        card
        for lost in grown.values()
        for card, turns in lost.items()
        if len(turns & took_part[card]) > max(1, len(took_part[card]) // 2)
    }
    places = {place for place, end in enumerate(ends) if _card(end) in bad}
    return places if len(places) <= max(1, len(ends) // 4) else set()


def _grown(counted: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, dict[_Card, frozenset[int]]]:
    """Of each counter of losses the cards at which it grew, and in which rounds."""
    grown: dict[str, dict[_Card, frozenset[int]]] = collections.defaultdict(dict)
    for node, counters in counted.items():
        for name, turns in counters.items():
            adapter, _, counter = name.partition(" ")
            if is_loss(counter):
                grown[counter][node, adapter] = frozenset(map(int, turns))
    return grown


def together(slow: Suspect, losing: Sequence[Suspect]) -> Suspect | None:
    """A suspect that is slow, with what its counters say and what to do about that. None if they say nothing."""
    for each in losing:
        if each.nodes == slow.nodes:
            confidence = max(slow.confidence, each.confidence)
            reason = f"{slow.reason} {each.reason}"
            return dataclasses.replace(slow, confidence=confidence, reason=reason, remedy=each.remedy)
    return None


def _card(end: End) -> _Card:
    return end.node, end.adapter


def _rounds(ends: Sequence[End], measurements: Sequence[Measurement]) -> set[tuple[int, _Card, _Card]]:
    """Which two cards met in which round, without those whose measurements failed: these are evidence themselves."""
    met, failed = set(), set()
    for each in measurements:
        one, other = sorted((_card(ends[each.source]), _card(ends[each.target])))
        if each.pattern is Pattern.PAIRS and one != other:
            met.add((each.round, one, other))
            if each.value is None:
                failed.add((each.round, one, other))
    return met - failed


def _things(ends: Sequence[End]) -> list[_Thing]:
    """The groups and the nodes that have several cards, the largest first, and then all cards."""
    groups: dict[str, set[_Card]] = collections.defaultdict(set)
    nodes: dict[str, set[_Card]] = collections.defaultdict(set)
    for end in ends:
        nodes[end.node].add(_card(end))
        for group in end.groups:
            groups[group].add(_card(end))
    made = [
        _Thing(Kind.GROUP, name, frozenset(cards))
        for name, cards in groups.items()
        if len({node for node, _ in cards}) > 1
    ]
    made += [_Thing(Kind.NODE, node, frozenset(cards)) for node, cards in nodes.items()]
    made += [
        _Thing(Kind.ADAPTER, f"{node}/{adapter}", frozenset([(node, adapter)]))
        for node, cards in nodes.items()
        for _, adapter in cards
        if len(cards) > 1
    ]
    return sorted(made, key=lambda thing: (thing.kind is not Kind.GROUP, -len(thing.cards), thing.name))


#: The cards that took part, and whether there was a loss.
_Look = tuple[frozenset[_Card], bool]


def _looks(
    rounds: Collection[tuple[int, _Card, _Card]],
    having: Collection[_Card],
    lost: Mapping[_Card, frozenset[int]],
    with_partners: bool,
) -> Iterator[_Look]:
    none: frozenset[int] = frozenset()
    if with_partners:
        for turn, one, other in rounds:
            if one in having and other in having:
                yield frozenset((one, other)), turn in lost.get(one, none) or turn in lost.get(other, none)
    else:
        # The ranks of one card may have several partners in a round.
        for turn, card in {(turn, card) for turn, *both in rounds for card in both if card in having}:
            yield frozenset([card]), turn in lost.get(card, none)


def _unlike(
    counter: str,
    with_partners: bool,
    looks: Sequence[_Look],
    things: Sequence[_Thing],
    having: Collection[_Card],
    questions: int,
) -> Iterator[tuple[_Thing, _Finding]]:
    """The things that one counter speaks of, in one of the two ways."""
    if len(having) < _FEWEST_CARDS:
        return
    of_card: dict[_Card, list[int]] = collections.defaultdict(list)
    for place, (cards, _) in enumerate(looks):
        for card in cards:
            of_card[card].append(place)
    losses = {card: sum(looks[place][1] for place in places) for card, places in of_card.items()}
    bad = {card for card, lost in losses.items() if lost >= _FEWEST_ROUNDS and 2 * lost > len(of_card[card])}
    named = _cover(bad, things, frozenset(having))
    # More are not the exception, and nothing is left to compare with.
    if not named or len(named) > max(1, len(having) // 4) or 2 * len(bad) > len(having):
        return
    suspected = frozenset[_Card]().union(*(thing.cards for thing in named))
    others = [loss for cards, loss in looks if not cards & suspected]
    if not others or sum(others) > _MOST_OF_OTHERS * len(others):
        return
    choices = questions * math.comb(len(things), len(named))
    for thing in named:
        own = [looks[place][1] for place in {place for card in thing.cards for place in of_card[card]}]
        chance = choices * _at_least(sum(own), len(own), sum(others), len(others))
        if chance <= 1 - _SURE:
            yield (
                thing,
                _Finding(counter, with_partners, chance, sum(own), len(own), sum(others), len(others)),
            )


def _cover(bad: Collection[_Card], things: Sequence[_Thing], having: frozenset[_Card]) -> list[_Thing]:
    """The fewest things that bad cards are: groups and nodes instead of their cards."""
    left, named = set(bad), []
    for thing in things:
        cards = thing.cards & having
        least = _MOST_OF_GROUP if thing.kind is Kind.GROUP else 1
        if cards and len(cards) < len(having) and len(cards & left) >= max(1, least * len(cards)):
            named.append(thing)
            left -= cards
    return named


def _at_least(lost: int, rounds: int, others_lost: int, others_rounds: int) -> float:
    """How often at least `lost` of all losses would fall on these rounds by chance."""
    all_lost, all_rounds = lost + others_lost, rounds + others_rounds
    return sum(
        math.exp(_ways(rounds, count) + _ways(others_rounds, all_lost - count) - _ways(all_rounds, all_lost))
        for count in range(lost, min(rounds, all_lost) + 1)
    )


def _ways(of: int, chosen: int) -> float:
    """The logarithm of the number of ways to choose them. The numbers themselves have thousands of digits."""
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)


def _suspect(thing: _Thing, findings: Sequence[_Finding], machines: Sequence[Machine]) -> Suspect:
    first, *more = sorted(findings, key=lambda each: (each.chance, each.counter))
    nodes = ", ".join(thing.nodes[:8]) + (" ..." if len(thing.nodes) > 8 else "")
    if first.with_partners:
        reason = (
            f"With it, the counter {first.counter} of one of the two grew in {first.lost} of {first.rounds} rounds. "
            f"Between others it grew in {first.others_lost} of {first.others_rounds}."
        )
    else:
        total = sum(
            by
            for machine in machines
            for name, by in machine.counters.items()
            if (machine.node, name.partition(" ")[0]) in thing.cards and name.partition(" ")[2] == first.counter
        )
        reason = (
            f"Its counter {first.counter} grew in {first.lost} of {first.rounds} rounds, by {total} in all. "
            f"That of the others grew in {first.others_lost} of {first.others_rounds}."
        )
    names = sorted({each.counter for each in more} - {first.counter})[: _MOST_COUNTERS - 1]
    if names:
        reason += f" So did {', '.join(names)}."
    return Suspect(
        kind=thing.kind,
        name=thing.name,
        nodes=thing.nodes,
        quantity=None,
        factor=None,
        confidence=min(1 - first.chance, _MOST_SURE),
        measurements=first.rounds,
        reason=reason,
        remedy=_REMEDY_OF_GROUP if thing.kind is Kind.GROUP else _REMEDY.format(nodes=nodes),
    )
