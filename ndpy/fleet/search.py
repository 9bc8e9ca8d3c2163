"""The rounds that are chosen from what is known so far.

Every round measures all ends at once, each with one partner. If a full mesh fits into the rounds, its rounds are taken,
over and over. Otherwise the first rounds are drawn by lot. Then those that look slow get partners that look good, in
other leafs, and never the same one twice while there are others. So the results of a suspect speak of the suspect
alone. Every fourth round keeps to the leafs, which tells a leaf's uplinks from the leaf.

The search ends when each end is named or cleared and none is doubted, or when no rounds are left. numpy is needed from
the first round on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from ndpy.fleet import model
from ndpy.fleet.results import End, Measurement, Suspect
from ndpy.fleet.schedule import Round, full_mesh, rail
from ndpy.fleet.topology import kind_of

#: An end that looks slower than the others by this many standard errors gets a partner that looks good.
_LOOKS_SLOW = 1.5
#: How many possible partners are looked at.
_TRIES = 40
#: No verdict is given earlier.
_FIRST_ROUNDS = 3


class Search:
    """Chooses rounds, takes their results, and says when the verdict is certain.

    Parameters:
        ends: in the order of their places.
        rounds: how many rounds there are at most.
        sure: the least confidence of a suspect.
        least: how much slower an end has to be to be looked for: 0.1 is 10 %. It decides when the search may end, and
            not who is named.
        across_rails: whether ends of different rails may be partners.
        seed: decides what is drawn by lot.

    Attributes:
        why: a sentence about the end of the search, or "" while it goes on.
    """

    def __init__(
        self,
        ends: Sequence[End],
        *,
        rounds: int = 12,
        sure: float = 0.99,
        least: float = 0.1,
        across_rails: bool = True,
        seed: int = 0,
    ) -> None:
        self.ends, self.rounds, self.sure, self.least = tuple(ends), rounds, sure, least
        self.across_rails = across_rails
        self.why = ""
        self._random = random.Random(seed)
        self._away: set[int] = set()
        self._number = 0
        self._met: set[tuple[int, int]] = set()
        self._suspicion = [0.0] * len(self.ends)
        self._results: list[Measurement] = []
        self._suspects: tuple[Suspect, ...] | None = ()
        self._certain = False
        self._doubted: frozenset[int] = frozenset()
        self._one_node = len({end.node for end in self.ends}) == 1
        self._leaf = [next((group for group in end.groups if kind_of(group) != "rail"), "") for end in self.ends]
        self._leafs = len(set(self._leaf)) > 1
        self._mesh = list(self._small_mesh())

    def _small_mesh(self) -> Iterable[Round]:
        if len(self.ends) <= 2 * self.rounds + 2:
            mesh = list(full_mesh(self.ends, same_node=self._one_node, across_rails=self.across_rails))
            if len(mesh) <= self.rounds:
                return mesh
        return ()

    def without(self, *places: int) -> None:
        """Leave these ends out of the rounds that follow: nobody answers there. What they measured stays."""
        self._away.update(places)

    def doubt(self, places: Iterable[int]) -> None:
        """Go on while there are rounds: something else than the results speaks against these ends.
        Replaces those of before.
        """
        self._doubted = frozenset(places)

    def next_round(self) -> Round | None:
        """The next pairs, or None if the search is over; then `why` says why."""
        if self._certain and not self._doubted - self._away:
            self.why = f"each end was named or cleared after {self._number} of {self.rounds} rounds"
        elif self._number >= self.rounds:
            self.why = f"all {self.rounds} rounds were measured"
        else:
            meets = self._from_mesh() if self._mesh else self._drawn()
            if meets:
                self._number += 1
                self._met.update((min(pair), max(pair)) for pair in meets)
                return meets
            self.why = "no two ends are left that can be measured with each other"
        return None

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Take the results of a round, those that failed too."""
        self._results.extend(measurements)
        self._suspects = None
        if self._number >= _FIRST_ROUNDS:
            self._learn()

    def suspects(self) -> tuple[Suspect, ...]:
        """Who is named so far, the most certain first."""
        if self._suspects is None:
            self._learn()
        assert self._suspects is not None
        return self._suspects

    def _learn(self) -> None:
        evidence = model.mathematics()
        found, slow = evidence.find(self.ends, self._results, self.sure, self.rounds)
        self._suspects = model.suspects(found)
        # One of several is named: all of them stay open.
        named = {place for each in found if len(each.things) == 1 for place in each.ends}
        known = evidence.standing(self.ends, self._results, slow.values(), named, self.least)
        self._suspicion = known.suspicion.tolist()
        for place in named:
            self._suspicion[place] = max(self._suspicion[place], 2 * _LOOKS_SLOW)
        still = {int(place) for place in known.open.nonzero()[0]} - self._away
        self._certain = bool(slow) and not still and len(self.ends) - len(named) >= 4

    def _from_mesh(self) -> Round:
        for step in range(len(self._mesh)):
            meets = self._mesh[(self._number + step) % len(self._mesh)]
            kept = tuple(pair for pair in meets if not self._away & set(pair))
            if kept:
                return kept
        return ()

    def _drawn(self) -> Round:
        places = [place for place in range(len(self.ends)) if place not in self._away]
        self._random.shuffle(places)
        places.sort(key=lambda place: max(self._suspicion[place], _LOOKS_SLOW), reverse=True)
        slow = [place for place in places if self._suspicion[place] > _LOOKS_SLOW][: len(places) // 3]
        good = [place for place in places if place not in set(slow)]
        within = self._leafs and self._number % 4 == 3
        pairs: list[tuple[int, int]] = []
        free = dict.fromkeys(good)
        for place in slow:
            partner = self._partner(place, free, within)
            if partner is None:
                free[place] = None
            else:
                del free[partner]
                pairs.append((place, partner))
        while len(free) > 1:
            place = next(iter(free))
            del free[place]
            partner = self._partner(place, free, within)
            if partner is not None:
                del free[partner]
                pairs.append((place, partner))
        # Who sends first is drawn too.
        return tuple(pair if self._random.random() < 0.5 else pair[::-1] for pair in pairs)

    def _partner(self, place: int, free: dict[int, None], within: bool) -> int | None:
        """The best of the first few that are free, if any of all can be a partner."""
        best, cost = None, 99
        for seen, other in enumerate(free):
            if best is not None and (cost == 0 or seen >= _TRIES):
                break
            price = self._price(place, other, within)
            if price is not None and price < cost:
                best, cost = other, price
        return best

    def _price(self, place: int, other: int, within: bool) -> int | None:
        if self.ends[place].node == self.ends[other].node and not self._one_node:
            return None
        if not self.across_rails and rail(self.ends[place]) != rail(self.ends[other]):
            return None
        same = self._leaf[place] == self._leaf[other]
        return 2 * ((min(place, other), max(place, other)) in self._met) + (self._leafs and same is not within)
