"""Which counters grew in which round."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from ndpy.tools.cli.channel import printable

#: Of each rank and adapter, the counters by name.
Readings = Mapping[int, Mapping[str, Mapping[str, Any]]]


class Counting:
    """Takes a reading before the first round and one after each. Nothing in a reading is believed to be a number."""

    def __init__(self) -> None:
        self._last: dict[int, Mapping[str, Mapping[str, Any]]] = {}
        self._grown: dict[str, dict[str, dict[int, int]]] = collections.defaultdict(dict)
        self._known: dict[str, set[str]] = collections.defaultdict(set)

    def add(self, turn: int, readings: Readings, nodes: Mapping[int, str]) -> None:
        """What was read after round `turn`. A rank's first reading is what the next one is compared with."""
        for rank, adapters in readings.items():
            for name, by in _grown(self._last.get(rank, {}), adapters):
                rounds = self._grown[nodes[rank]].setdefault(name, {})
                # Ranks of one node may read the same adapter.
                rounds[turn] = max(rounds.get(turn, 0), by)
            self._known[nodes[rank]].update(_names(adapters))
            self._last[rank] = adapters

    def known(self, node: str) -> frozenset[str]:
        """The counters of a node that could be read, grown or not."""
        return frozenset(self._known.get(node, ()))

    def of(self, node: str) -> dict[str, dict[str, int]]:
        """By how much each counter of a node grew in which rounds. The rounds are strings, as in JSON."""
        grown = self._grown.get(node, {})
        return {name: {str(turn): by for turn, by in sorted(rounds.items())} for name, rounds in grown.items()}


def _name(adapter: str, counter: str) -> str:
    return f"{printable(adapter, 64)} {printable(counter, 64)}"


def _names(adapters: Mapping[str, Any]) -> Iterator[str]:
    for adapter, counters in adapters.items():
        yield from (_name(adapter, name) for name, value in counters.items() if type(value) is int)


def _grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Counters that have grown, with the adapter's name before theirs."""
    for adapter in before.keys() & after.keys():
        for name, value in after[adapter].items():
            was = before[adapter].get(name, 0)
            if type(value) is int and type(was) is int and value > was:
                yield _name(adapter, name), value - was
