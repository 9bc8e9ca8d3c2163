"""Small C programs on plain verbs show what the driver does. The table of quirks must say the same."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from kit.processes import foreign_environment
from kit.programs import built
from kit.quirks import skip_where

from ndpy import Capability
from ndpy.vocabulary import quirks
from ndpy.vocabulary.quirks import Quirk

PROGRAMS = Path(__file__).with_name("programs")
AS_SPECIFIED, OTHERWISE = 0, 1


@pytest.mark.parametrize(
    ("program", "needs"),
    [
        ("failure_notifies", None),
        ("plain_passes", None),
        ("plain_passes armed", None),
        ("local_fault", None),
        ("remote_fault", None),
        ("fenced_retry", None),
        ("fenced_retry plain", None),
        ("on_demand page", Capability.ON_DEMAND_PAGING),
        ("on_demand offset", Capability.ON_DEMAND_PAGING),
        ("on_demand across", Capability.ON_DEMAND_PAGING),
    ],
)
def test_the_driver_does_what_the_table_of_quirks_says(adapter, program, needs):
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    if needs and needs not in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} does not claim {needs}")
    name, *words = program.split()
    done = subprocess.run(
        [built(PROGRAMS / f"{name}.c"), adapter.info.name, *words],
        env=foreign_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    print(done.stdout)
    known = [
        quirk.summary for quirk in quirks.known(adapter.info.driver, platform.release()) if program in quirk.programs
    ]
    said = f"the table says: {known}"
    assert done.returncode == (OTHERWISE if known else AS_SPECIFIED), f"{done.stdout}{done.stderr}{said}"


def test_each_program_of_the_table_exists():
    for quirk in Quirk:
        for program in quirk.value.programs:
            assert (PROGRAMS / f"{program.split()[0]}.c").exists()
