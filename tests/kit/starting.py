"""Starting a process, also under Wine on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# Wine's error when a process ends before its program runs. This happens on a busy machine. The program is not at fault.
_ERROR_INTERNAL_ERROR = 1359
_ATTEMPTS = 5

T = TypeVar("T")


def create_process(create: Callable[[], T]) -> T:
    """Call create(), which starts a process. Call it again if Wine could not start one. Returns its result."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return create()
        except OSError as error:
            if getattr(error, "winerror", None) != _ERROR_INTERNAL_ERROR:
                raise
            print(f"attempt {attempt} to start a process: {error}")
            time.sleep(attempt)
    return create()
