"""Which ends are partners in which round. An end has at most one partner in a round, so no result disturbs another.

The circle method: one player stays, the others move on by one place. With an even number of players each meets every
other one in one round fewer than there are players. With an odd number one player rests in each round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ndpy.fleet.results import End

#: Pairs that are measured at the same time: the places in `Report.ends` of the one that sends, and of its partner.
Round = tuple[tuple[int, int], ...]


def circle(count: int) -> Iterator[Round]:
    """Rounds in which each of `count` players meets every other one once.

    There are count - 1 rounds for an even count, and count for an odd one. The lower count is the least possible.
    The first of a pair sends. Each player is the first in half of its pairs, give or take one.
    """
    turning = count - 1 + count % 2
    for turn in range(turning if count > 1 else 0):
        meets = [] if count % 2 else [_directed(turn, turning, count)]
        for step in range(1, (turning + 1) // 2):
            meets.append(_directed((turn + step) % turning, (turn - step) % turning, count))
        yield tuple(meets)


def _directed(one: int, other: int, count: int) -> tuple[int, int]:
    """Who sends: the one from whom the way round the table to the other is shorter."""
    ahead = (other - one) % count
    if 2 * ahead == count:
        return (one, other) if one < other else (other, one)
    return (one, other) if 2 * ahead < count else (other, one)


def rail(end: End) -> str:
    """The rail of an end, or "" if the topology does not tell."""
    return next((group for group in end.groups if group.startswith("rail ")), "")


def full_mesh(ends: Sequence[End], *, same_node: bool = False, across_rails: bool = True) -> Iterator[Round]:
    """Rounds in which every end meets every other one once.

    Parameters:
        ends: the ends, in the order of their places.
        same_node: whether ends of one node meet too.
        across_rails: whether ends of different rails meet. If not, all rails are measured at the same time.
    """
    if not across_rails:
        rails: dict[str, list[int]] = {}
        for place, end in enumerate(ends):
            rails.setdefault(rail(end), []).append(place)
        meshes = [_mesh(ends, places, same_node) for places in rails.values()]
        yield from (tuple(itertools.chain(*parts)) for parts in itertools.zip_longest(*meshes, fillvalue=()))
    else:
        yield from _mesh(ends, range(len(ends)), same_node)


def _mesh(ends: Sequence[End], places: Sequence[int], same_node: bool) -> Iterator[Round]:
    nodes: dict[str, list[int]] = {}
    for place in places:
        nodes.setdefault(ends[place].node, []).append(place)
    widest = max(map(len, nodes.values()), default=0)
    by_nodes = (len(nodes) - 1 + len(nodes) % 2) * widest
    by_ends = len(places) - 1 + len(places) % 2
    if not same_node and by_nodes < by_ends:
        yield from _node_by_node(list(nodes.values()), widest)
        return
    for meets in circle(len(places)):
        pairs = [(places[one], places[other]) for one, other in meets]
        kept = tuple(pair for pair in pairs if same_node or ends[pair[0]].node != ends[pair[1]].node)
        if kept:
            yield kept


def _node_by_node(nodes: Sequence[Sequence[int]], widest: int) -> Iterator[Round]:
    """The nodes meet in a circle, once for each shift of their ends: first the ends of the same number meet."""
    for shift in range(widest):
        for meets in circle(len(nodes)):
            pairs = []
            for one, other in meets:
                for number in range(widest):
                    partner = (number + shift) % widest
                    if number < len(nodes[one]) and partner < len(nodes[other]):
                        pairs.append((nodes[one][number], nodes[other][partner]))
            if pairs:
                yield tuple(pairs)
