"""What the model says of single cases: whole or member, failures, numpy that is missing."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("numpy")

from ndpy.fleet import model
from ndpy.fleet.model import ModelError, analyse
from ndpy.fleet.results import End, Kind, Measurement, Pattern, Quantity
from ndpy.fleet.schedule import full_mesh
from tests.kit.fleets import Fleet, fleet


def mesh(ends: list[End], faults: dict[str, float], *, rounds: int = 12, **more) -> list[Measurement]:
    measured, made = Fleet(ends, faults, **more), []
    for number, meets in zip(range(rounds), full_mesh(ends), strict=False):
        made += measured.measure(number, meets)
    return made


def test_a_suspect_says_what_how_much_and_from_how_many():
    ends = fleet(32)
    (suspect,) = analyse(ends, mesh(ends, {"n5": 1.25}))
    assert (suspect.kind, suspect.name, suspect.nodes) == (Kind.NODE, "n5", ("n5",))
    assert suspect.quantity is Quantity.BANDWIDTH and suspect.factor == pytest.approx(0.8, abs=0.04)
    assert 0.99 <= suspect.confidence < 1 and suspect.measurements == 24
    assert (
        suspect.reason
        == f"Its bandwidth is {1 - suspect.factor:.1%} below that of the others (24 measurements with 12 partners)."
    )
    assert "n5" in suspect.remedy and "ndpy doctor" in suspect.remedy


def test_more_latency_is_a_factor_above_one():
    ends = fleet(32)
    (suspect,) = analyse(ends, mesh(ends, {"n5": 1.25}, quantities=(Quantity.LATENCY,)))
    assert suspect.quantity is Quantity.LATENCY and suspect.factor == pytest.approx(1.25, abs=0.07)
    assert "latency" in suspect.reason and "above" in suspect.reason


def test_one_thing_that_is_slow_in_both_quantities_is_one_suspect():
    ends = fleet(32)
    (suspect,) = analyse(ends, mesh(ends, {"n5": 1.3}, quantities=tuple(Quantity)))
    assert "bandwidth" in suspect.reason and "latency" in suspect.reason


@pytest.mark.parametrize("way", ["sends", "receives"])
def test_a_slow_direction_is_told(way):
    ends = fleet(64)
    (suspect,) = analyse(ends, mesh(ends, {f"n5 {way}": 1.3}))
    assert suspect.name == "n5" and f"when it {way}" in suspect.reason and suspect.measurements == 12


def test_two_ranks_on_one_adapter_are_told_from_the_adapter():
    ends = [End(rank, f"n{rank // 2}", "mlx5_0") for rank in range(32)]
    measured = Fleet(ends)
    slow = []
    for number, meets in zip(range(12), full_mesh(ends), strict=False):
        for each in measured.measure(number, meets):
            factor = 0.7 if 5 in (each.source, each.target) else 1.0
            slow.append(
                Measurement(number, Pattern.PAIRS, each.quantity, each.source, each.target, each.value * factor)
            )
    (suspect,) = analyse(ends, slow)
    assert (suspect.kind, suspect.name) == (Kind.RANK, "n2/mlx5_0 rank 5")


def test_a_faster_end_is_no_suspect():
    ends = fleet(32)
    assert analyse(ends, mesh(ends, {"n5": 0.7})) == ()


def test_a_word_of_explain_comes_along():
    ends = fleet(8)
    made = [
        Measurement(each.round, each.pattern, each.quantity, each.source, each.target, None, "it timed out.", "timeout")
        if 3 in (each.source, each.target)
        else each
        for each in mesh(ends, {}, rounds=7)
    ]
    (suspect,) = analyse(ends, made)
    assert suspect.problem == "timeout" and suspect.reason.endswith("mostly with: it timed out.")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_value_that_is_no_measurement_breaks_nothing(value):
    ends = fleet(16)
    made = mesh(ends, {})
    made[3] = Measurement(0, Pattern.PAIRS, Quantity.BANDWIDTH, made[3].source, made[3].target, value)
    assert analyse(ends, made) == ()


def test_equal_values_name_nobody():
    ends = fleet(16)
    made = [Measurement(e.round, e.pattern, e.quantity, e.source, e.target, 100.0) for e in mesh(ends, {})]
    assert analyse(ends, made) == () and analyse(ends, []) == () and analyse([], []) == ()


def test_without_numpy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "ndpy.fleet.evidence", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModelError, match=r'pip install "ndpy\[fleet\]"'):
        analyse(fleet(4), [])


@pytest.mark.parametrize("sure", [0, 1, -1, 2, float("nan")])
def test_a_confidence_that_cannot_be_reached_is_refused(sure):
    with pytest.raises(ModelError, match="between 0 and 1"):
        analyse(fleet(4), [], sure=sure)


def test_limits_say_what_few_ends_cannot_tell():
    assert "nobody to be compared with" in model.limits(fleet(1))[0]
    assert "one of the two" in model.limits(fleet(2))[0]
    assert "at most one" in model.limits(fleet(3))[0]
    assert "topology is unknown" in model.limits(fleet(8))[0]
    assert model.limits(fleet(8, leaf=4)) == ()
