"""The model on fleets that were really measured, on soft0 on a busy machine, and on the noise that they had."""

from __future__ import annotations

import dataclasses
import random

import pytest

pytest.importorskip("numpy")

from kit.measured import read

from ndpy.fleet.model import analyse
from ndpy.fleet.results import End, Measurement, Pattern, Quantity
from ndpy.fleet.schedule import full_mesh

FLEETS = read()
GOOD = [fleet for fleet in FLEETS if not fleet.bad]


def named(ends, measurements):
    return {node for suspect in analyse(ends, measurements, looks=12) for node in suspect.nodes}


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
def test_who_was_made_bad_is_named_and_nobody_else(fleet):
    assert named(fleet.ends, fleet.measurements) == fleet.bad


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
def test_the_order_of_the_ends_does_not_matter(fleet):
    """The places of the ends are exchanged, ten times."""
    for seed in range(10):
        order = list(range(len(fleet.ends)))
        random.Random(seed).shuffle(order)
        moved = [
            dataclasses.replace(each, source=order[each.source], target=order[each.target])
            for each in fleet.measurements
        ]
        bad = {f"n{order[int(node[1:])]}" for node in fleet.bad}
        assert named(fleet.ends, moved) == bad, seed


@pytest.mark.parametrize("slow", [None, 5], ids=["none", "one"])
@pytest.mark.parametrize("size", [16, 32])
def test_one_of_many_is_named_in_noise_as_measured(size, slow):
    """Each bandwidth is one of a good fleet, drawn by lot: 0.4 to 7.8 Gb/s. The slow one has a quarter of it."""
    drawn = [each.value for fleet in GOOD for each in fleet.measurements if each.quantity is Quantity.BANDWIDTH]
    ends = [End(at, f"n{at}", "soft0") for at in range(size)]
    for seed in range(20):
        chance = random.Random(seed)
        measurements = [
            Measurement(
                turn,
                Pattern.PAIRS,
                Quantity.BANDWIDTH,
                source,
                target,
                chance.choice(drawn) / (4 if slow in (source, target) else 1),
            )
            for turn, pairs in zip(range(12), full_mesh(ends), strict=False)
            for pair in pairs
            for source, target in (pair, pair[::-1])
        ]
        assert named(ends, measurements) == ({"n5"} if slow else set()), seed


@pytest.mark.parametrize("dies", [False, True], ids=["all stay", "one dies"])
def test_of_a_hundred_good_fleets_of_five_at_most_one_has_a_suspect(dies):
    """What each pair measured in a round is that of a pair of a good fleet, drawn by lot.
    n2 dies in the second round.
    """
    (good,) = GOOD
    pairs = [good.measurements[at : at + 3] for at in range(0, len(good.measurements), 3)]
    mesh = list(full_mesh(good.ends))
    wrong = []
    for seed in range(100):
        chance = random.Random(seed)
        measurements: list[Measurement] = []
        for turn in range(12):
            for source, target in mesh[turn % len(mesh)]:
                is_dead = dies and 2 in (source, target)
                if is_dead and turn > 1:
                    continue
                latency, *bandwidths = chance.choice(pairs)
                chance.shuffle(bandwidths)
                both = ((source, target), (source, target), (target, source))
                measurements += [
                    dataclasses.replace(
                        each, round=turn, source=one, target=other, value=None if is_dead and turn else each.value
                    )
                    for each, (one, other) in zip((latency, *bandwidths), both, strict=True)
                ]
        found = named(good.ends, measurements)
        wrong += [(seed, found)] if found else []
    assert len(wrong) <= 1, wrong
