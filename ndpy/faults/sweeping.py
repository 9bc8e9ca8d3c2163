"""Which single faults there are for a program whose passages of places are known, and a choice of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ndpy.faults import kinds
from ndpy.faults.kinds import Kind
from ndpy.faults.places import Passages
from ndpy.faults.scenario import Fault

#: The milliseconds of slow calls and late completions: longer than a program waits by chance, shorter than timeouts.
_MS = 300
#: For each operation, the first of these with which it can end.
_STATUSES = ("RETRY_EXC_ERR", "LOC_LEN_ERR", "MW_BIND_ERR")


@dataclass(frozen=True)
class Group:
    """The single faults of a kind at one place: one for each time that the program passes it."""

    kind: Kind
    place: Passages

    def __len__(self) -> int:
        return self.place.count

    def fault(self, nth: int) -> Fault:
        at = self.place.at
        return Fault(
            self.kind.do,
            at=at,
            nth=nth,
            call=self.place.name if at == "call" else None,
            operation=self.place.name or None if at in ("request", "message") else None,
            queue_pair=self.place.queue_pair or None,
            errno=self._errno(),
            status=self._status(),
            ms=_MS if "ms" in (*self.kind.values, *self.kind.optional) else None,
        )

    def _errno(self) -> str | None:
        call = kinds.call_named(self.place.name)
        return call.errnos[0] if call is not None and "errno" in self.kind.values else None

    def _status(self) -> str | None:
        if "status" not in self.kind.values:
            return None
        possible = kinds.statuses_of(self.place.name)
        return next(status for status in (*_STATUSES, *possible) if status in possible)


def groups(places: Sequence[Passages], executor: str, only: Sequence[str] = ()) -> list[Group]:
    """All single faults that an executor can make at these places.

    only: names of kinds. Empty: all except those for datagrams, which the counts do not tell from other messages.
    """
    return [
        Group(kind, place)
        for place in places
        for kind in kinds.kinds_for(executor)
        if kind.at == place.at and _is_single(kind, place, executor)
        if (kind.do in only if only else not kind.for_datagrams)
    ]


def _is_single(kind: Kind, place: Passages, executor: str) -> bool:
    # A limit is an errno at a number of objects.
    if kind.do == "limit" or (kind.do == "late_receive" and place.name != "receive"):
        return False
    call = kinds.call_named(place.name)
    if call is None:
        return True
    return executor in call.who(kind.do) and (not place.queue_pair or call.of_queue_pair)


def choose(found: Sequence[Group], most: int, seed: int) -> Iterator[Fault]:
    """All faults of the groups, if there are at most `most`. Otherwise the first and the last of each group, and then
    others by chance, up to `most` faults.
    """
    draw = random.Random(seed)
    left = [_order(len(group), draw) for group in found]
    order = list(range(len(found)))
    chosen = 0
    while order and chosen < most:
        if len(found) > most:
            draw.shuffle(order)
        for index in list(order):
            nth = next(left[index], None)
            if nth is None:
                order.remove(index)
            elif chosen < most:
                chosen += 1
                yield found[index].fault(nth)


def _order(count: int, draw: random.Random) -> Iterator[int]:
    """The numbers from 1: the first, the last, and then the others by chance."""
    yield 1
    if count > 1:
        yield count
    middle = range(2, count)
    # range objects can be sampled without a list of millions.
    yield from draw.sample(middle, min(len(middle), 10_000))
