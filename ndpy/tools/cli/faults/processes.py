"""Programs that a command runs and waits for."""

from __future__ import annotations

import signal
import subprocess
from types import FrameType


def run_to_its_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program. Ctrl-C reaches it by the terminal, and SIGTERM is passed on, so it decides how it ends.

    Returns its status, below 0 for a signal.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    former = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, pass_on)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, former[0])
        signal.signal(signal.SIGTERM, former[1])


def status_of(code: int) -> int:
    """The exit status of a process, as a shell has it."""
    return code if code >= 0 else 128 - code
