"""Code that runs in the middle of a call in C, because the garbage collector runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kit.helpers import HAS_GIL


@contextmanager
def in_next_collection(action: Callable[[], Any], after: int = 1) -> Iterator[list[bool]]:
    """Run the action in the next collection, which starts after so many allocations. Before Python 3.12 that is inside
    of a call in C.

    Without the GIL a thread tells the collector of each 512 allocations only, so a short call may see none.
    """
    ran: list[bool] = []

    def run(phase: str, _: Any) -> None:
        if phase == "start" and not ran:
            ran.append(True)
            action()

    former = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(run)
    # Without the GIL, the other zero has the collector start although there are many old objects.
    gc.set_threshold(after, 0 if not HAS_GIL else former[1])
    try:
        yield ran
    finally:
        gc.set_threshold(*former)
        gc.callbacks.remove(run)
