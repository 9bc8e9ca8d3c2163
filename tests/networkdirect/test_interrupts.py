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
# Its loop reads nothing until it is interrupted.
FULL = """
import asyncio, contextlib, time

async def main():
    with contextlib.suppress(BlockingIOError):
        while True:
            asyncio.get_running_loop()._csock.send(bytes(65536))
    print("full", flush=True)
    while not getattr(asyncio.current_task(), "cancelling", int)():
        time.sleep(0.01)
    await asyncio.sleep(0)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


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


def test_ctrl_c_says_nothing_of_a_loop_that_has_many_wake_ups(tmp_path):
    program = tmp_path / "full.py"
    program.write_text(FULL)
    with start_python(program) as process:
        process.wait_for("full\n")
        process.interrupt()
        result = process.succeed()
    assert (result.out, result.err) == ("full\ninterrupted\n", "")
