"""A process of tests/soak/busy_connections.py, on either host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A packet that rxe loses costs seconds, and a conversation loses several.
HANG_S = 400
SCRIPT = Path(__file__).parents[1] / "soak" / "busy_connections.py"


class Process:
    """Runs for this time, besides its start and its end."""

    def __init__(self, seconds: float, *words: str) -> None:
        environment = {**os.environ, "SOAK_S": str(seconds), "SOAK_LONGEST": "20000", "HANG_S": str(HANG_S)}
        command = [sys.executable, str(SCRIPT), *words]
        # A pipe that nobody reads before the end would hold up a process that has much to say.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=subprocess.STDOUT)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Its exit status and output. It is killed if it does not end by itself."""
        ended = ""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            ended = f"\nkilled after {timeout_s:g} s"
        with self._output:
            self._output.seek(0)
            output = self._output.read() + ended
        return self._process.returncode, output
