"""A process of tests/soak/busy_connections.py, on either host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# rxe of Linux 6.1 keeps an emulated machine's only processor busy for two minutes at times.
HANG_S = 400
SCRIPT = Path(__file__).parents[1] / "soak" / "busy_connections.py"


class Process:
    """Runs for this time, besides its start and its end."""

    def __init__(self, seconds: float, *words: str) -> None:
        environment = {**os.environ, "SOAK_S": str(seconds), "SOAK_LONGEST": "20000", "HANG_S": str(HANG_S)}
        command = [sys.executable, str(SCRIPT), *words]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Its exit status and output. It is killed if it does not end by itself."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            output += f"\nkilled after {timeout_s:g} s"
        return self._process.returncode, output
