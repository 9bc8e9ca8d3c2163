"""Synthetic fleets: ends in leafs, with planted faults, and noise with heavy tails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ndpy.fleet.results import End, Measurement, Pattern, Quantity
from ndpy.fleet.schedule import Round
from ndpy.fleet.search import Search


def fleet(nodes: int, *, cards: int = 1, leaf: int = 0) -> list[End]:
    """Nodes n0, n1 ... with cards mlx5_0 ... and `leaf` nodes to a leaf."""
    return [
        End(
            node * cards + card,
            f"n{node}",
            f"mlx5_{card}",
            ((f"leaf l{node // leaf}",) if leaf else ()) + ((f"rail {card}",) if cards > 1 else ()),
        )
        for node in range(nodes)
        for card in range(cards)
    ]


class Fleet:
    """Measures pairs of a fleet that is not there.

    Parameters:
        faults: how many times slower what is named is: a node, a card "n3/mlx5_0", a leaf "leaf l2", a path
            "leaf l1 - leaf l2". After the name may come " sends" or " receives".
        noise: the standard deviation. It is shared by both directions of a pair: the worst case.
        natural: the standard deviation between good ends.
    """

    def __init__(
        self,
        ends: list[End],
        faults: Mapping[str, float] | None = None,
        *,
        noise: float = 0.05,
        natural: float = 0.0,
        dead: Iterable[str] = (),
        seed: int = 0,
        quantities: tuple[Quantity, ...] = (Quantity.BANDWIDTH,),
    ) -> None:
        self.ends, self.faults, self.noise, self.dead = ends, dict(faults or {}), noise, set(dead)
        self.random = np.random.default_rng(seed)
        self.natural = natural * self.random.standard_normal(len(ends))
        self.quantities = quantities

    def slower(self, source: int, target: int) -> float:
        one, other = self.ends[source], self.ends[target]
        passed = {self._names(one, " sends"): 1, self._names(other, " receives"): 1}
        names = {name for names in passed for name in names}
        leafs = [next((group for group in end.groups if group.startswith("leaf")), "") for end in (one, other)]
        names |= {f"{leafs[0]} - {leafs[1]}", f"{leafs[1]} - {leafs[0]}"}
        return float(np.prod([factor for name, factor in self.faults.items() if name in names]))

    @staticmethod
    def _names(end: End, way: str) -> tuple[str, ...]:
        names = (end.node, f"{end.node}/{end.adapter}", *end.groups)
        return (*names, *(name + way for name in names))

    def measure(self, number: int, meets: Round) -> list[Measurement]:
        made = []
        for quantity in self.quantities:
            noise = self.noise * self.random.standard_t(3, len(meets)) / np.sqrt(3)
            for (one, other), disturbed in zip(meets, noise, strict=True):
                for source, target in ((one, other), (other, one)):
                    failed = bool(self.dead & {self.ends[source].node, self.ends[target].node})
                    slow = np.log(self.slower(source, target)) if self.faults else 0.0
                    slow += disturbed + self.natural[source] + self.natural[target]
                    value = 5 * np.exp(slow) if quantity is Quantity.LATENCY else 100 * np.exp(-slow)
                    made.append(
                        Measurement(
                            number,
                            Pattern.PAIRS,
                            quantity,
                            source,
                            target,
                            None if failed else float(value),
                            "no answer within 5 s" if failed else "",
                        )
                    )
        return made


def searched(search: Search, measured: Fleet) -> tuple[set[str], int]:
    """Run a search to its end: who is named, and after how many rounds."""
    number = 0
    while (meets := search.next_round()) is not None:
        search.add(measured.measure(number, meets))
        number += 1
    return {suspect.name for suspect in search.suspects()}, number


class Count:
    """How well the named are those that are bad, over many runs."""

    def __init__(self) -> None:
        self.right = self.wrong = self.missed = self.rounds = self.runs = self.false_runs = 0

    def add(self, named: set[str], bad: set[str], rounds: int = 0) -> None:
        self.right += len(named & bad)
        self.wrong += len(named - bad)
        self.missed += len(bad - named)
        self.false_runs += bool(named - bad)
        self.rounds, self.runs = self.rounds + rounds, self.runs + 1

    recall = property(lambda self: self.right / max(1, self.right + self.missed))
    precision = property(lambda self: self.right / max(1, self.right + self.wrong))
