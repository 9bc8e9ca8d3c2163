"""Bad nodes, cards, leafs and paths in synthetic fleets are named, and good ones are not.
The counts are full in stress.
"""

from __future__ import annotations

import time

import psutil
import pytest

pytest.importorskip("numpy")

from ndpy.fleet.model import analyse
from ndpy.fleet.results import Measurement, Pattern, Quantity
from ndpy.fleet.search import Search
from tests.kit.fleets import Count, Fleet, fleet, searched
from tests.kit.helpers import STRESS


def runs(full: int, share: int) -> range:
    return range(full if STRESS else share)


def test_one_node_of_1024_that_is_10_percent_slow_is_named_in_12_rounds():
    """The standard deviation is 5 %, with heavy tails. A share of the fleets is run here, and 300 in stress."""
    ends, count = fleet(1024, leaf=32), Count()
    for seed in runs(300, 4):
        bad = f"n{(seed * 37) % 1024}"
        named, rounds = searched(Search(ends, rounds=12, seed=seed), Fleet(ends, {bad: 1 / 0.9}, seed=seed))
        assert rounds <= 12
        count.add(named, {bad}, rounds)
    assert count.recall >= 0.99 and count.precision >= 0.99


FAULTS = {
    "node": ["n5"],
    "sender": ["n5 sends"],
    "receiver": ["n5 receives"],
    "two nodes": ["n5", "n14"],
    "leaf": ["leaf l2"],
    "leaf and node": ["leaf l2", "n5"],
    "path": ["leaf l0 - leaf l1"],
    "none": [],
}


# Of more than 32 nodes, a path between two leafs carries too few pairs to show in 12 rounds.
CASES = [(nodes, fault) for nodes in (16, 128, 1024) for fault in FAULTS if fault != "path"] + [(32, "path")]


@pytest.mark.parametrize(("nodes", "fault"), CASES)
def test_what_was_planted_is_named_and_nothing_else(nodes, fault):
    ends, count = fleet(nodes, leaf=4 if nodes == 16 else 8), Count()
    bad = {name.split(" sends")[0].split(" receives")[0] for name in FAULTS[fault]}
    for seed in runs(50, 2 if nodes < 1024 else 1):
        planted = dict.fromkeys(FAULTS[fault], 1.3)
        count.add(searched(Search(ends, seed=seed), Fleet(ends, planted, seed=seed))[0], bad)
    assert count.wrong <= 0.01 * count.runs and count.missed <= 0.02 * count.runs


@pytest.mark.parametrize("bad", ["n3", "n3/mlx5_1", "rail 2"])
def test_a_card_a_node_with_all_its_cards_and_a_rail_are_told_apart(bad):
    ends, count = fleet(64, cards=4, leaf=16), Count()
    for seed in runs(50, 2):
        count.add(searched(Search(ends, seed=seed), Fleet(ends, {bad: 1.25}, seed=seed))[0], {bad})
    assert count.wrong <= 0.01 * count.runs and count.missed <= 0.02 * count.runs


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 16])
def test_few_ends_are_enough_for_a_large_difference(nodes):
    ends, count = fleet(nodes), Count()
    for seed in runs(100, 5):
        bad = f"n{seed % nodes}"
        count.add(searched(Search(ends, seed=seed), Fleet(ends, {bad: 1.5}, seed=seed))[0], {bad})
    assert count.missed <= 0.02 * count.runs and count.wrong <= 0.01 * count.runs


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 16, 64])
def test_confidence_means_what_it_says_in_good_fleets(nodes):
    """At 0.9 at most one run in ten may name anything. The bound is an upper one, so it is fewer."""
    ends, false = fleet(nodes, leaf=8), 0
    both = (Quantity.BANDWIDTH, Quantity.LATENCY)
    for seed in runs(400, 10):
        measured = Fleet(ends, natural=0.01, seed=seed, quantities=both)
        false += bool(searched(Search(ends, seed=seed, sure=0.9), measured)[0])
    assert false <= 0.1 * len(runs(400, 10))


def test_none_of_1024_good_nodes_is_named():
    ends = fleet(1024, leaf=32)
    for seed in runs(100, 1):
        assert searched(Search(ends, seed=seed), Fleet(ends, natural=0.01, seed=seed))[0] == set()


@pytest.mark.parametrize("nodes", [4, 8, 64])
def test_an_end_that_never_answers_is_named_by_the_failures_of_its_partners(nodes):
    ends = fleet(nodes)
    search = Search(ends, seed=1)
    assert searched(search, Fleet(ends, dead=["n2"], seed=1))[0] == {"n2"}
    (suspect,) = search.suspects()
    assert suspect.quantity is None and suspect.factor is None and "no answer within 5 s" in suspect.reason


def test_of_two_ends_that_fail_one_is_at_fault_and_nobody_knows_which():
    ends = fleet(2)
    search = Search(ends)
    assert searched(search, Fleet(ends, dead=["n1"]))[0] == {"one of n0 and n1"}
    assert search.suspects()[0].nodes == ("n0", "n1")
    assert search.suspects()[0].reason.endswith("do not tell which of them it is.")


def test_a_round_gives_each_end_one_partner_of_another_node():
    ends = fleet(100, cards=3, leaf=10)
    search, measured = Search(ends, rounds=8), Fleet(ends, {"n1": 2, "n2": 2, "n3/mlx5_0": 2})
    for number in range(8):
        meets = search.next_round()
        if meets is None:
            break
        places = [place for pair in meets for place in pair]
        assert len(places) == len(set(places)) >= 298
        assert all(ends[one].node != ends[other].node for one, other in meets)
        search.add(measured.measure(number, meets))


def test_suspects_are_not_partners_of_each_other():
    ends = fleet(200)
    bad = [0, 1, 2, 3, 4, 5]
    search, measured = Search(ends, rounds=12, least=0.001), Fleet(ends, {f"n{place}": 2 for place in bad}, noise=0.02)
    for number in range(12):
        meets = search.next_round()
        assert meets is not None
        if number >= 4:
            assert not any(one in bad and other in bad for one, other in meets)
        search.add(measured.measure(number, meets))


def test_rails_that_stay_apart_are_searched_apart():
    ends = fleet(64, cards=2)
    meets = Search(ends, across_rails=False).next_round()
    assert meets and all(ends[one].groups == ends[other].groups for one, other in meets)


def test_the_search_stops_when_all_are_cleared_and_at_the_last_round():
    ends = fleet(64)
    quiet = Search(ends, rounds=20)
    _, rounds = searched(quiet, Fleet(ends, noise=0.005))
    assert rounds < 8 and "each end was named or cleared" in quiet.why
    loud = Search(ends, rounds=4)
    assert searched(loud, Fleet(ends, noise=0.5))[1] == 4 and "all 4 rounds" in loud.why


def test_the_search_goes_on_while_an_end_is_doubted():
    ends = fleet(16)
    measured = Fleet(ends, noise=0.001)
    search, rounds = Search(ends), 0
    search.doubt([3])
    while (meets := search.next_round()) is not None:
        search.add(measured.measure(rounds, meets))
        rounds += 1
        if rounds == 9:
            search.doubt([])
    assert rounds == 9 and "named or cleared after 9 of 12" in search.why
    assert searched(Search(ends), measured)[1] < 9


def test_ends_that_left_are_not_asked_again():
    ends = fleet(40)
    search = Search(ends, rounds=3)
    search.without(3, 4, 5)
    for _ in range(3):
        assert not {3, 4, 5} & {place for pair in search.next_round() for place in pair}
    search.without(*range(39))
    other = Search(ends)
    other.without(*range(39))
    assert other.next_round() is None and "no two ends" in other.why


def test_one_node_measures_its_own_ends():
    ends = fleet(1, cards=4)
    assert Search(ends).next_round()


def test_no_ends_and_no_results_are_no_error():
    for count in (0, 1):
        search = Search(fleet(count))
        assert search.next_round() is None and search.suspects() == ()
    assert Search(fleet(4)).suspects() == ()


def test_other_patterns_are_left_to_others():
    ends = fleet(8)
    search = Search(ends)
    search.add(
        Measurement(number, Pattern.INCAST, Quantity.BANDWIDTH, place, 0, 1.0)
        for number in range(9)
        for place in range(1, 8)
    )
    assert search.suspects() == ()


@pytest.mark.parametrize("nodes", [4096 if STRESS else 1024])
def test_large_fleets_are_analysed_in_seconds_of_processor_and_2_gib(nodes):
    """12 rounds of both quantities in both directions. An analysis takes a small part of this."""
    ends = fleet(nodes, leaf=32)
    search, measured = Search(ends), Fleet(ends, {"n7": 1.2}, quantities=tuple(Quantity))
    results = [each for number in range(12) for each in measured.measure(number, search._drawn())]
    began = time.process_time()
    assert [suspect.name for suspect in analyse(ends, results, looks=12)] == ["n7"]
    assert time.process_time() - began < 10
    assert psutil.Process().memory_info().rss < 2 << 30


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.02])
def test_in_a_quiet_fleet_nobody_is_cleared_for_being_far_out(noise):
    """Far-out results are cut before they are averaged. The cut lies above the slowness that is looked for."""
    ends, count = fleet(1024, leaf=32), Count()
    for seed in runs(30, 3):
        bad = {f"n{(seed * 37 + number * 251) % 1024}" for number in range(4)}
        count.add(
            searched(Search(ends, seed=seed), Fleet(ends, dict.fromkeys(bad, 1.25), noise=noise, seed=seed))[0], bad
        )
    assert count.missed == 0 and count.wrong == 0
