"""Ctrl-C ends every wait, although no Windows wait ends by itself then."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from kit.processes import start_python
from own_softnd import SOFTND

WAITS = Path(__file__).with_name("waits.py")
# Longer than one slice of a wait. The program's waits last a minute.
LIMIT_S = 20.0


@pytest.mark.parametrize("version", [2, 1], ids=lambda number: f"version {number}")
def test_ctrl_c_ends_every_wait(monkeypatch, version):
    monkeypatch.setenv("NDPY_PROVIDER", str(SOFTND))
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", str(version))
    ended = []
    with start_python(WAITS) as process:
        while True:
            line = process.wait_for(rf"(?s)^(?:.*\n){{{2 * len(ended)}}}(?:waiting for (.*?)|(still works))\n")
            if line[2]:
                break
            ended.append(line[1])
            # Give the program time to begin its wait. If it has not begun, the interrupt still ends it.
            time.sleep(0.1)
            process.interrupt()
            process.wait_for(f"interrupted {re.escape(line[1])}\n", LIMIT_S)
        process.succeed()
    assert len(ended) >= 10
