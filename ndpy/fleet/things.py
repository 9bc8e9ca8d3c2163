"""What can be at fault, and which results speak of it: ends, adapters, nodes, groups and paths. It needs numpy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndpy.fleet.results import End, Kind
from ndpy.fleet.topology import kind_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Mode(str, enum.Enum):
    """Which results a thing is judged by."""

    ALL = ""
    SENDS = "when it sends"
    RECEIVES = "when it receives"
    ACROSS = "to and from others outside of it"


@dataclasses.dataclass(frozen=True)
class Thing:
    """Something that can be at fault: its kind, its name, and its nodes."""

    kind: Kind
    name: str
    nodes: tuple[str, ...]


class Observations:
    """Results as columns. A unit is all of them between two ends in one round: they share their noise."""

    def __init__(self, source: Ints, target: Ints, round_: Ints, y: Floats) -> None:
        self.source, self.target, self.y = source, target, y
        most = int(max(source.max(initial=0), target.max(initial=0))) + 1
        low, high = np.minimum(source, target), np.maximum(source, target)
        keys, self.unit = np.unique((round_ * most + low) * most + high, return_inverse=True)
        self.a, self.b = (keys // most) % most, keys % most
        self.sizes = np.bincount(self.unit, minlength=len(keys))

    def results(self, rows: Ints, by_unit: bool) -> Ints:
        """The results of these rows, which are units or results already."""
        if not by_unit:
            return rows
        chosen = np.zeros(len(self.a), bool)
        chosen[rows] = True
        return np.flatnonzero(chosen[self.unit]).astype(np.int64)

    def per_unit(self, values: Floats) -> Floats:
        return np.bincount(self.unit, values, minlength=len(self.a)) / np.maximum(self.sizes, 1)


class Family:
    """Things of one sort, and which end belongs to which of them. A label of -1 is not a thing."""

    def __init__(
        self, kind: Kind, things: Sequence[tuple[str, Sequence[int]]], ends: Sequence[End], mode: Mode
    ) -> None:
        self.kind, self.things, self.mode, self._ends = kind, things, mode, ends
        self.label = np.full(len(ends), -1, np.int64)
        for number, (_, members) in enumerate(things):
            self.label[list(members)] = number

    by_unit = property(lambda self: self.mode in (Mode.ALL, Mode.ACROSS))

    def rows(self, data: Observations) -> tuple[Ints, Ints]:
        """(row, label) of each result that belongs to a thing.
        Rows are units, or results where the direction counts.
        """
        if self.mode is Mode.SENDS or self.mode is Mode.RECEIVES:
            labels = self.label[data.source if self.mode is Mode.SENDS else data.target]
            rows = np.arange(len(labels))
        else:
            one, other = self.label[data.a], self.label[data.b]
            both = one != other
            rows = np.arange(len(one))
            first = both if self.mode is Mode.ACROSS else np.ones(len(one), bool)
            labels = np.concatenate([one[first], other[both]])
            rows = np.concatenate([rows[first], rows[both]])
        return rows[labels >= 0], labels[labels >= 0]

    def members(self, label: int) -> frozenset[int]:
        return frozenset(self.things[label][1])

    def thing(self, label: int) -> Thing:
        name, members = self.things[label]
        nodes = tuple(sorted({self._ends[place].node for place in members}))
        return Thing(self.kind, name, () if self.kind is Kind.PATH else nodes)


class Paths(Family):
    """What lies between two groups, or between two ends that were measured in several rounds."""

    def __init__(self, whole: Family, data: Observations) -> None:
        self.kind, self.mode, self._ends = Kind.PATH, Mode.ALL, whole._ends
        one, other = whole.label[data.a], whole.label[data.b]
        between = (one >= 0) & (other >= 0) & (one != other)
        codes = np.minimum(one, other) * len(whole.things) + np.maximum(one, other)
        known, labels, counts = np.unique(codes[between], return_inverse=True, return_counts=True)
        # Fewer than three units say nothing about a path that its ends do not say too.
        kept = np.flatnonzero(counts >= 3)
        number = np.full(len(known), -1, np.int64)
        number[kept] = np.arange(len(kept))
        self._rows, self._labels = np.flatnonzero(between), number[labels]
        self._whole, self._codes = whole, known[kept]
        self.things = _PathThings(whole, self._codes)

    def rows(self, data: Observations) -> tuple[Ints, Ints]:
        kept = self._labels >= 0
        return self._rows[kept], self._labels[kept]


class _PathThings(Sequence[Any]):
    """The names and members of paths, made when somebody asks: there may be thousands."""

    def __init__(self, whole: Family, codes: Ints) -> None:
        self._whole, self._codes = whole, codes

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, at: Any) -> Any:
        one, other = divmod(int(self._codes[at]), len(self._whole.things))
        things = self._whole.things
        return f"{things[one][0]} - {things[other][0]}", [*things[one][1], *things[other][1]]


def families(ends: Sequence[End], data: Observations, *, directed: bool) -> list[Family]:
    """Everything that can be at fault. A thing that has the same ends as a larger one is the larger one."""
    levels: list[tuple[Kind, dict[str, list[int]]]] = [(Kind.NODE, {}), (Kind.ADAPTER, {}), (Kind.RANK, {})]
    groups: dict[str, dict[str, list[int]]] = {}
    for place, end in enumerate(ends):
        adapter = f"{end.node}/{end.adapter}" if end.adapter else end.node
        for (_, things), name in zip(levels, (end.node, adapter, f"{adapter} rank {end.rank}"), strict=True):
            things.setdefault(name, []).append(place)
        for group in end.groups:
            groups.setdefault(kind_of(group), {}).setdefault(group, []).append(place)
    modes = [Mode.ALL, Mode.SENDS, Mode.RECEIVES] if directed else [Mode.ALL]
    made: list[Family] = []
    taken: set[tuple[int, ...]] = set()
    for kind, things in levels:
        new = [(name, places) for name, places in things.items() if tuple(places) not in taken]
        taken.update(tuple(places) for _, places in new)
        if new:
            made += [Family(kind, new, ends, mode) for mode in modes]
    finest = Family(Kind.RANK, [(_short(ends, place), [place]) for place in range(len(ends))], ends, Mode.ALL)
    for each in groups.values():
        new = [
            (name, places)
            for name, places in each.items()
            if len(places) < len(ends) and len({ends[place].node for place in places}) > 1
        ]
        if new:
            paths = Paths(Family(Kind.GROUP, new, ends, Mode.ALL), data)
            made += [paths] if len(paths.things) else []
            made += [Family(Kind.GROUP, new, ends, mode) for mode in [Mode.ALL, Mode.ACROSS, *modes[1:]]]
    paths = Paths(finest, data)
    return made + ([paths] if len(paths.things) else [])


def _short(ends: Sequence[End], place: int) -> str:
    end = ends[place]
    of_node = [other for other in ends if other.node == end.node] if len(ends) <= 64 else [end, end]
    return end.node if len(of_node) == 1 or not end.adapter else f"{end.node}/{end.adapter}"
