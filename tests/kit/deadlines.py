"""How long a test waits for what should come at once.

A deadline ends a test that hangs. It is never what a test is about, so it is generous: PATIENCE multiplies every
deadline, also pytest's own. NDPY_TEST_PATIENCE sets it. Without that, it is how many times more programs want to run
than there are processors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: A machine that is busier than this is not fit for tests.
_MOST_PATIENCE = 8.0


def load() -> float:
    """How many programs want to run, on the average of the last minute. 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _patience() -> float:
    asked = os.environ.get("NDPY_TEST_PATIENCE")
    if asked:
        return float(asked)
    return min(max(load() / (os.cpu_count() or 1), 1.0), _MOST_PATIENCE)


PATIENCE = _patience()


def patient(seconds: float) -> float:
    """The deadline on this machine for what takes at most `seconds` on a quiet one."""
    return PATIENCE * seconds


#: The deadline for something that should come at once. Emulated machines are slow.
DEADLINE_S = patient(20.0)
#: The same for a program: an emulated machine takes seconds to start a Python process, not tenths of a second.
PROGRAM_DEADLINE_S = patient(60.0)


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = DEADLINE_S) -> Any:
    """Call condition() until it is true, and return its value. The test fails at the deadline, and says what it waited
    for. A function says what was outstanding then.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.002)
    return value
