"""The shim over the driver of the adapter: inline posting and polling, and `ibv_wr_*` where the driver has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.every_fault import limits
from kit.helpers import host_of, require, sample
from kit.processes import foreign_environment
from kit.programs import built
from kit.quirks import has_quirk, skip_where

from ndpy import Capability
from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario
from ndpy.vocabulary.quirks import Quirk

PROGRAM = Path(__file__).parents[1] / "soft/programs/completions.c"
EACH_CALL = PROGRAM.with_name("each_call.c")
DATAGRAMS = Path(__file__).with_name("datagram_row.py")
DATAGRAM_BATCHES = PROGRAM.with_name("datagram_batches.c")
COUNT, RETRIES, FLUSHED = 6, 12, 5
WAYS_OF_DATAGRAMS = ["", "silent", "inline", "silent list", "builder", "builder inline", "builder silent together"]


def gid_index(adapter) -> str:
    gids = [gid for gid in adapter.info.ports[0].gids if not gid.address.startswith("fe80")]
    return str(min(gids, key=lambda gid: (gid.type != "RoCE v2", gid.index)).index)


def run(adapter, options: str, injection: Injection | None = None) -> dict[str, list[str]]:
    """What completions.c prints, by the first word of its lines."""
    way = host_of(adapter) if has_quirk(adapter, Quirk.IWARP_MANAGER_ONLY) else gid_index(adapter)
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


def came(adapter, faults: list[Fault], options: str = "") -> list[int]:
    """The numbers of the datagrams that come. Each has one completion, in the order of the sends.

    By datagram_row.py, or datagram_batches.c if the options have `builder`.
    """
    require(adapter, Capability.DATAGRAMS)
    if "builder" in options:
        program = [built(DATAGRAM_BATCHES), adapter.info.name, gid_index(adapter)]
    else:
        program = [sys.executable, str(DATAGRAMS), adapter.info.name]
    with Injection(Scenario(faults), "shim") as injection:
        done = subprocess.run(
            [*program, str(COUNT), *options.removeprefix("builder").split()],
            env=injection.environment(foreign_environment()),
            capture_output=True,
            text=True,
            timeout=patient(60),
        )
        if "ibv_create_qp_ex failed" in done.stdout:
            pytest.skip(f"{adapter.info.name} has no queue pairs for ibv_wr_*")
        assert done.returncode == 0, done.stdout + done.stderr
        injection.report().check()
    found = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in done.stdout.splitlines()}
    assert found["sent"] == ([COUNT] if "silent" in options else list(range(1, COUNT + 1)))
    return found["came"]


@pytest.mark.parametrize("options", WAYS_OF_DATAGRAMS)
def test_every_datagram_comes_twice(adapter, options):
    """The queue of the sends has no room for the second ones.
    All have their data although the program has changed it.
    """
    numbers = came(adapter, [Fault("duplicate", every=1)], options)
    assert sorted(numbers) == sorted([*range(1, COUNT + 1)] * 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", [1, 2, 3, 3, 4, 5, 6]),
        ("builder", [1, 2, 3, 3, 4, 5, 6]),
        ("builder together", [1, 2, 3, 4, 5, 6, 3]),
    ],
)
def test_one_datagram_comes_twice(adapter, options, expected):
    assert came(adapter, [Fault("duplicate", nth=COUNT // 2)], options) == expected


@pytest.mark.parametrize("options", WAYS_OF_DATAGRAMS)
def test_datagrams_come_in_another_order(adapter, options):
    """The first two wait for the third, and the last one for 100 ms."""
    faults = [Fault("reorder", nth=1, times=2), Fault("reorder", nth=COUNT)]
    assert came(adapter, faults, options) == [3, 1, 2, 4, 5, 6]


def test_what_can_be_limited_is(adapter):
    """What librdmacm makes for itself does not count."""
    capabilities = adapter.info.capabilities
    without = ["create_ah", *(["alloc_mw"] if Capability.MEMORY_WINDOWS not in capabilities else [])]
    for fault, line in limits(without):
        with Injection(Scenario([fault]), "shim") as injection:
            done = subprocess.run(
                [built(EACH_CALL, "-lrdmacm"), adapter.info.name, host_of(adapter)],
                env=injection.environment(foreign_environment()),
                capture_output=True,
                text=True,
                timeout=patient(60),
            )
            assert done.returncode == 0, done.stdout + done.stderr
            injection.report().check()
        assert line in done.stdout.splitlines(), (fault, done.stdout)
