"""The shim over soft0: what programs get of a scenario, and that they get nothing else."""

from __future__ import annotations

import pytest
from c_programs import run

from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario

RETRIES, FLUSHED = 12, 5
WAYS = ["", "events", "solicited", "list", "silent=3", "events silent=3", "srq", "write", "write events silent=2"]

pytestmark = pytest.mark.timeout(120)


def completions(faults: list[Fault], options: str = "", count: int = 6, *, fires: bool = True) -> dict[str, list[str]]:
    """What completions.c prints over the shim, by its first words. The order is that of each queue."""
    with Injection(Scenario(faults), "shim") as injection:
        text = run("completions", "soft0", 0, count, *options.split(), **injection.environment({}))
        if fires:
            injection.report().check()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


@pytest.mark.parametrize("options", WAYS)
def test_a_scenario_without_faults_changes_nothing(options):
    with_shim = completions([], options)
    plain: dict[str, list[str]] = {}
    for line in run("completions", "soft0", 0, 6, *options.split()).splitlines():
        name, _, rest = line.partition(" ")
        plain.setdefault(name, []).append(rest)
    assert with_shim == plain


@pytest.mark.parametrize("options", ["", "events", "list"])
def test_the_third_send_fails_and_the_rest_is_flushed(options):
    found = completions([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")], options)
    assert found["a"] == ["0 0", "1 0", f"2 {RETRIES}", *(f"{i} {FLUSHED}" for i in range(3, 6))]
    assert found["b"] == ["1000 0", "1001 0", *(f"{i} {FLUSHED}" for i in range(1002, 1006))]


def test_silent_requests_before_a_failed_one_stay_silent():
    found = completions([Fault("status", operation="write", nth=5, status="REM_ACCESS_ERR")], "write silent=3")
    assert found["a"] == ["2 0", "4 10", f"5 {FLUSHED}"]


def test_a_call_fails_with_its_errno():
    with Injection(Scenario([Fault("errno", call="reg_mr", nth=1, errno="ENOMEM")]), "shim") as injection:
        with pytest.raises(AssertionError, match="ibv_reg_mr failed: Cannot allocate memory"):
            run("completions", "soft0", 0, 1, **injection.environment({}))
        assert [fired.place for fired in injection.report().fired] == ["reg_mr"]
