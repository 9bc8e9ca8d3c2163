"""Which counters grew in which round, from readings before and after each."""

from __future__ import annotations

from ndpy.fleet.counting import Counting
from ndpy.fleet.report.statistics import grew_in

NODES = {0: "n0", 1: "n1", 2: "n1"}


def counted(*readings):
    counting = Counting()
    for turn, reading in enumerate((readings[0], *readings)):
        counting.add(max(turn - 1, 0), reading, NODES)
    return counting


def test_growth_is_told_for_each_round():
    """Round 0 changes nothing."""
    found = counted(*({0: {"mlx5_0": {"discards": value, "ecn": 5}}} for value in (3, 3, 7, 7, 9)))
    assert found.of("n0") == {"mlx5_0 discards": {"2": 4, "4": 2}}
    assert found.of("n1") == {}


def test_two_ranks_of_a_node_count_its_adapter_once():
    readings = ({rank: {"mlx5_0": {"discards": value}} for rank in (1, 2)} for value in (0, 5))
    assert counted(*readings).of("n1") == {"mlx5_0 discards": {"1": 5}}


def test_a_rank_or_adapter_that_comes_later_has_no_growth_before_that():
    assert counted({}, {0: {"mlx5_0": {"discards": 100}}}, {0: {"mlx5_0": {"discards": 101}}}).of("n0") == {
        "mlx5_0 discards": {"2": 1}
    }


def test_what_is_not_a_number_is_left_out():
    readings = ({0: {"mlx5_0": {"a": value, "b": 1, "c\n": at}}} for at, value in enumerate(("x", True, 7)))
    assert counted(*readings).of("n0") == {"mlx5_0 c ": {"1": 1, "2": 1}}


def test_a_counter_that_did_not_grow_is_known():
    found = counted({0: {"mlx5_0": {"discards": 3, "word": "x"}}}, {0: {"mlx5_0": {"discards": 3}}})
    assert (found.known("n0"), found.known("n1")) == ({"mlx5_0 discards"}, frozenset())


def test_the_rounds_are_told_to_people():
    assert grew_in({}) == ""
    assert grew_in({"3": 1}) == " in round 3"
    assert grew_in({str(turn): 1 for turn in range(12)}) == " in rounds 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
