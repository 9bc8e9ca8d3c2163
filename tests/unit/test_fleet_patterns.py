"""Who writes to whom in a pattern, and which receivers are slow in it."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndpy.fleet import patterns
from ndpy.fleet.results import End, Measurement, Pattern, Quantity


def ends(count, on_each=1):
    return [End(at, f"n{at // on_each}", "mlx5_0") for at in range(count)]


@given(st.integers(0, 60), st.integers(1, 3), st.integers(0, 9))
def test_in_incast_each_end_receives_once_from_several_that_send_to_nobody_else(count, on_each, seed):
    fleet, received = ends(count, on_each), collections.Counter()
    for pairs in patterns.incast(fleet, range(count), seed):
        sources, targets = [source for source, _ in pairs], {target for _, target in pairs}
        assert len(set(sources)) == len(sources) and targets.isdisjoint(sources)
        senders = collections.Counter(target for _, target in pairs)
        assert all(2 <= each <= patterns.FAN_IN for each in senders.values())
        received.update(targets)
    assert set(received.values()) <= {1}
    if count > 2 * on_each and on_each == 1:
        assert len(received) == count


@given(st.integers(0, 40), st.integers(1, 3))
def test_all_at_once_each_end_sends_to_one_and_receives_from_one(count, on_each):
    for pairs in patterns.all_at_once(ends(count, on_each), range(count)):
        for side in (0, 1):
            places = [pair[side] for pair in pairs]
            assert len(set(places)) == len(places)
        assert all(source != target for source, target in pairs)


def measured(slow=(), *, count=32, share=0.5, noise=0.05, seed=0):
    """What a fleet measures that has these slow receivers: once each, and the doubtful ones twice more."""
    fleet, chance, found = ends(count), random.Random(seed), []

    def measure(pairs):
        turn = found[-1].round + 1 if found else 0
        # A receiver's link has noise that all of its senders share.
        link = {target: 100 * (share if target in slow else 1) * (1 + chance.gauss(0, noise)) for _, target in pairs}
        senders = collections.Counter(target for _, target in pairs)
        for source, target in pairs:
            value = link[target] / senders[target]
            found.append(Measurement(turn, Pattern.INCAST, Quantity.BANDWIDTH, source, target, value))

    for pairs in patterns.incast(fleet, range(count)):
        measure(pairs)
    for target in patterns.doubtful(found):
        for again in (1, 2):
            measure(patterns.again(fleet, range(count), target, again))
    return fleet, found


@pytest.mark.parametrize("slow", [(), (3,), (3, 17)])
def test_slow_receivers_are_named_and_no_others(slow):
    for seed in range(30):
        suspects = patterns.slow_receivers(*measured(slow, seed=seed))
        assert {suspect.nodes for suspect in suspects} == {(f"n{at}",) for at in slow}
        for suspect in suspects:
            assert suspect.factor == pytest.approx(0.5, abs=0.1)
            assert (suspect.measurements, suspect.confidence >= 0.99) == (3, True)


def test_a_receiver_that_was_slow_once_is_not_named():
    fleet, found = measured((3,))
    first = min(each.round for each in found if each.target == 3)
    once = [each for each in found if each.target != 3 or each.round == first]
    assert patterns.doubtful(once) == [3]
    assert patterns.slow_receivers(fleet, once) == []


def test_a_round_with_a_failed_sender_does_not_count():
    fleet, found = measured((3,))
    failed = [
        each
        if each.target != 3
        else Measurement(each.round, each.pattern, each.quantity, each.source, 3, None, "it failed")
        for each in found
    ]
    assert patterns.slow_receivers(fleet, failed) == []


def test_four_receivers_are_too_few():
    assert patterns.slow_receivers(*measured((3,), count=4)) == []
