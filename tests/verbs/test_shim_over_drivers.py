"""The shim over the driver of the adapter: inline posting and polling, and `ibv_wr_*` where the driver has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit.helpers import host_of, sample
from kit.processes import foreign_environment
from kit.programs import built
from kit.quirks import has_quirk, skip_where

from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario
from ndpy.vocabulary.quirks import Quirk

PROGRAM = Path(__file__).parents[1] / "soft/programs/completions.c"
COUNT, RETRIES, FLUSHED = 6, 12, 5


def run(adapter, options: str, injection: Injection | None = None) -> dict[str, list[str]]:
    """What completions.c prints, by the first word of its lines."""
    if has_quirk(adapter, Quirk.IWARP_MANAGER_ONLY):
        way = host_of(adapter)
    else:
        gids = [gid for gid in adapter.info.ports[0].gids if not gid.address.startswith("fe80")]
        way = str(min(gids, key=lambda gid: (gid.type != "RoCE v2", gid.index)).index)
    program = built(PROGRAM, "-rdynamic")
    environment = foreign_environment()
    done = subprocess.run(
        [program, adapter.info.name, way, str(COUNT), *options.split()],
        env=injection.environment(environment) if injection else environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "ibv_create_qp_ex failed" in done.stdout:
        pytest.skip(f"{adapter.info.name} has no queue pairs for ibv_wr_*")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


@pytest.mark.parametrize("options", sample(["events silent=3", "write list silent=3 room=2", "builder list", "srq"], 2))
def test_a_scenario_without_faults_changes_nothing(adapter, options):
    if "room" in options:
        skip_where(adapter, Quirk.SIW_RESIZES_NO_QUEUE)
    with Injection(Scenario([]), "shim") as injection:
        with_shim = run(adapter, options, injection)
    plain = run(adapter, options)
    # How often it is woken depends on how fast it is.
    with_shim.pop("events")
    plain.pop("events")
    assert with_shim == plain


@pytest.mark.parametrize("options", sample(["builder list", "events"], 1))
def test_the_third_send_fails_and_the_rest_is_flushed(adapter, options):
    fault = Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")
    with Injection(Scenario([fault]), "shim") as injection:
        found = run(adapter, options, injection)
        injection.report().check()
    assert found["a"] == ["0 0", "1 0", f"2 {RETRIES}", *(f"{i} {FLUSHED}" for i in range(3, COUNT))]
    assert found["b"] == ["1000 0", "1001 0", *(f"{i} {FLUSHED}" for i in range(1002, 1000 + COUNT))]
