"""The switches of softverbs, which are environment variables. Each scenario fails without its switch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).with_name("switched.py")
SWITCHES = {
    "delayed_registration": ("DELAY_REGISTRATION_MS", "300"),
    "refused_registration": ("REFUSE_REGISTRATIONS_AFTER", "3"),
    "cut_connection": ("CUT_AFTER_BYTES", "50000"),
    "removed_device": ("REMOVE_AFTER_REQUESTS", "7"),
    "removed_device_of_connections": ("REMOVE_AFTER_REQUESTS", "300"),
    "unfinished_answer": ("START_UP_MS", "300"),
    "no_answer": ("START_UP_MS", "300"),
    "no_first_message": ("START_UP_MS", "300"),
    "no_request": ("START_UP_MS", "300"),
    "required_crc": ("CRC", "required"),
    "exact_elements": ("SGE", "exact"),
    "one_address": ("ADDRESSES", "127.0.0.1"),
}

pytestmark = pytest.mark.timeout(120)


def run(scenario: str, **switches: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SOFTVERBS_")}
    return subprocess.run(
        [sys.executable, SCENARIOS, scenario],
        env={**environment, **switches},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("scenario", SWITCHES)
def test_switch(scenario):
    name, value = SWITCHES[scenario]
    done = run(scenario, **{f"SOFTVERBS_{name}": value})
    assert done.returncode == 0, done.stderr


# Without the switch the start-up is limited too, to 10 s and more.
@pytest.mark.parametrize("scenario", [name for name, (switch, _) in SWITCHES.items() if switch != "START_UP_MS"])
def test_without_the_switch_it_does_not_happen(scenario):
    # What is waited for never comes, so the deadlines are short.
    assert run(scenario, NDPY_TEST_PATIENCE="0.2").returncode != 0


def test_the_statistics_name_what_was_never_released(tmp_path):
    file = tmp_path / "statistics"
    done = run("delayed_registration", SOFTVERBS_DELAY_REGISTRATION_MS="300", SOFTVERBS_STATISTICS=str(file))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^memory region: [1-9]\d* created, 0 leaked$", file.read_text(), re.MULTILINE)


def test_the_trace_has_a_line_for_each_event(tmp_path):
    file = tmp_path / "trace"
    # The scenario needs no switch to make a connection, and fails for the lack of it.
    run("cut_connection", SOFTVERBS_TRACE=str(file))
    lines = file.read_text().splitlines()
    for event in (r"region \S+: register \S+\+1000 ", r"stream \S+: request of revision 2", "queue pair .* released"):
        assert any(re.search(event, line) for line in lines), (event, lines)
    # The time of day, the process and the thread.
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} \d+\.\d+ \S", line) for line in lines), lines
