"""Hypothesis strategies for scenarios."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="the package hypothesis is not installed")

from hypothesis import HealthCheck, Phase, find, given, settings

from ndpy.faults import Fault, Scenario, kinds
from ndpy.testing import strategies

few = settings(
    database=None, deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)  # fmt: skip


@few
@given(strategies.scenarios())
def test_scenarios_can_be_made_by_the_executor(scenario):
    assert 1 <= len(scenario.faults) <= 3
    assert scenario.plain("engine").count("fault ") == len(scenario.faults)


def test_every_kind_is_among_them():
    for kind in kinds.kinds_for("engine"):
        found = find(strategies.faults([kind.do]), lambda fault, kind=kind: fault.kind == kind, settings=few)
        assert found.nth in (None, 1)


@few
@given(strategies.faults(["errno", "status"], calls=["reg_mr"], operations=["read"], most=4))
def test_they_keep_to_what_was_asked_for(fault):
    assert fault.do in ("errno", "status")
    assert fault.call in (None, "reg_mr") and fault.operation in (None, "read")
    assert 1 <= fault.nth <= 4


def test_what_is_found_is_made_smaller():
    def is_bad(scenario: Scenario) -> bool:
        return any(fault.do == "delay" and fault.nth >= 3 and fault.ms >= 5 for fault in scenario.faults)

    delays = strategies.scenarios(strategies.faults(["delay", "silent"], operations=["send"], most=8))
    found = find(delays, is_bad, settings=settings(few, max_examples=1000))
    assert found.seed == 0
    (fault,) = found.faults
    assert fault == Fault("delay", at="request", operation="send", nth=3, ms=5)


def test_kinds_that_nobody_makes_are_refused():
    with pytest.raises(ValueError, match="shim makes no faults of these kinds: split"):
        strategies.faults(["split"], executor="shim")
