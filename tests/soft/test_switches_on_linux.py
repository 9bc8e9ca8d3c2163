"""The settings of softverbs, which are environment variables, and faults that it takes from a scenario. Each case fails
without its setting or fault.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.scenarios import cut, refused_registrations, removal, slow_call, write_scenario

SCENARIOS = Path(__file__).with_name("switched.py")
FAULTS = {
    "delayed_registration": slow_call("reg_mr", 300),
    "refused_registration": refused_registrations(after=3),
    "cut_connection": cut(after=50_000),
    "removed_device": removal(after=7),
    "removed_device_of_connections": removal(after=300),
}
SETTINGS = {
    "unfinished_answer": ("START_UP_MS", "300"),
    "no_answer": ("START_UP_MS", "300"),
    "no_first_message": ("START_UP_MS", "300"),
    "no_request": ("START_UP_MS", "300"),
    "required_crc": ("CRC", "required"),
    "exact_elements": ("SGE", "exact"),
    "one_address": ("ADDRESSES", "127.0.0.1"),
}

pytestmark = pytest.mark.timeout(120)


def run(scenario: str, **settings: str) -> subprocess.CompletedProcess[str]:
    given = ("SOFTVERBS_", "NDPY_FAULTS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    return subprocess.run(
        [sys.executable, SCENARIOS, scenario],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("scenario", SETTINGS)
def test_setting(scenario):
    name, value = SETTINGS[scenario]
    done = run(scenario, **{f"SOFTVERBS_{name}": value})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", FAULTS)
def test_fault(scenario, tmp_path):
    report = tmp_path / "report"
    done = run(scenario, NDPY_FAULTS=str(write_scenario(tmp_path, FAULTS[scenario], report=report)))
    assert done.returncode == 0, done.stderr
    assert report.read_text().count("\n") >= 1


# Without the setting the start-up is limited too, to 10 s and more.
OTHERS = [name for name, (setting, _) in SETTINGS.items() if setting != "START_UP_MS"]


@pytest.mark.parametrize("scenario", [*OTHERS, *FAULTS])
def test_without_it_nothing_happens(scenario):
    # What is waited for never comes, so the deadlines are short.
    assert run(scenario, NDPY_TEST_PATIENCE="0.2").returncode != 0


def test_the_statistics_name_what_was_never_released(tmp_path):
    file = tmp_path / "statistics"
    done = run("exact_elements", SOFTVERBS_SGE="exact", SOFTVERBS_STATISTICS=str(file))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^queue pair: [1-9]\d* created, 0 leaked$", file.read_text(), re.MULTILINE)


def test_the_trace_has_a_line_for_each_event(tmp_path):
    file = tmp_path / "trace"
    # The scenario needs no fault to make a connection, and fails for the lack of it.
    run("cut_connection", SOFTVERBS_TRACE=str(file))
    lines = file.read_text().splitlines()
    for event in (r"region \S+: register \S+\+1000 ", r"stream \S+: request of revision 2", "queue pair .* released"):
        assert any(re.search(event, line) for line in lines), (event, lines)
    # The time of day, the process and the thread.
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} \d+\.\d+ \S", line) for line in lines), lines
