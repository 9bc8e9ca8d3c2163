"""Full meshes of a fleet: everybody meets everybody once, with one partner in a round."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from ndpy.fleet.results import End
from ndpy.fleet.schedule import circle, full_mesh
from tests.kit.helpers import STRESS


def meets_all_once(count: int, rounds: list) -> None:
    seen = bytearray(count * count)
    for meets in rounds:
        places = [place for pair in meets for place in pair]
        assert len(set(places)) == len(places), "an end has two partners in one round"
        for one, other in meets:
            seen[min(one, other) * count + max(one, other)] += 1
    for one in range(count):
        row = seen[one * count : (one + 1) * count]
        assert row[one + 1 :] == b"\1" * (count - one - 1) and not any(row[: one + 1])


@pytest.mark.parametrize("counts", [range(50), range(50, 100), range(100, 131), range(131, 257) if STRESS else [256]])
def test_everybody_meets_everybody_once_in_the_fewest_rounds(counts):
    for count in counts:
        rounds = list(circle(count))
        assert len(rounds) == (0 if count < 2 else count - 1 if count % 2 == 0 else count)
        meets_all_once(count, rounds)


@pytest.mark.parametrize("count", [4096, 4095] if STRESS else [1024])
def test_large_fleets_meet_too(count):
    meets_all_once(count, list(circle(count)))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 31, 64])
def test_each_sends_in_half_of_its_pairs(count):
    sends = Counter(one for meets in circle(count) for one, _ in meets)
    assert all(abs(2 * sends[player] - (count - 1)) <= 1 for player in range(count))


def fleet(sizes: list[int]) -> list[End]:
    return [
        End(rank, f"n{node}", f"mlx5_{number}", (f"rail {number}",))
        for rank, (node, number) in enumerate(
            (node, number) for node, size in enumerate(sizes) for number in range(size)
        )
    ]


@pytest.mark.parametrize("sizes", [[1] * 5, [2] * 6, [8] * 8, [4] * 7, [1, 2, 3, 4], [64] + [1] * 9, [3]])
def test_ends_of_one_node_do_not_meet_unless_asked_for(sizes):
    ends = fleet(sizes)
    pairs = [frozenset(pair) for meets in full_mesh(ends) for pair in meets]
    wanted = {
        frozenset(pair)
        for pair in itertools.combinations(range(len(ends)), 2)
        if len({ends[p].node for p in pair}) == 2
    }
    assert len(pairs) == len(set(pairs)) and set(pairs) == wanted
    meets_all_once(len(ends), list(full_mesh(ends, same_node=True)))


@pytest.mark.parametrize("sizes", [[2] * 6, [1, 2, 3, 4], [64] + [1] * 9])
def test_an_end_has_one_partner_in_a_round_with_several_adapters(sizes):
    for meets in full_mesh(fleet(sizes)):
        places = [place for pair in meets for place in pair]
        assert len(set(places)) == len(places)


def test_eight_nodes_of_eight_adapters_need_no_round_that_leaves_an_end_out():
    rounds = list(full_mesh(fleet([8] * 8)))
    assert len(rounds) == 7 * 8 and all(len(meets) == 32 for meets in rounds)


def test_rails_that_stay_apart_are_measured_at_the_same_time():
    ends = fleet([4] * 6)
    rounds = list(full_mesh(ends, across_rails=False))
    assert len(rounds) == 5
    for meets in rounds:
        assert len(meets) == 4 * 3
        assert all(ends[one].groups == ends[other].groups for one, other in meets)
