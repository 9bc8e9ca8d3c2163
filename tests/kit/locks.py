"""Calls that may not wait for a lock: they are made while another thread holds every lock of an adapter's objects."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import ndpy
from kit.helpers import DEADLINE_S


def _locks_of(adapter: ndpy.Adapter) -> list[Any]:
    """Every lock of every open object of the adapter, and of the pollers of its queues."""
    objects = adapter._device._open_children()
    objects += [poller for child in objects for poller in list(getattr(child, "_pollers", None) or ())]
    names = ("_lifetime", "_lock", "_state_lock", "_singly")
    return [lock for one in objects for name in names if (lock := getattr(one, name, None)) is not None]


@contextlib.contextmanager
def locks_held(adapter: ndpy.Adapter) -> Iterator[None]:
    """Hold all of them. Other threads take them in other orders, so this waits for none while it holds one."""

    def taken(lock: Any) -> bool:
        held: bool = lock.acquire(False)
        if held:
            stack.callback(lock.release)
        return held

    deadline = time.monotonic() + DEADLINE_S
    with contextlib.ExitStack() as stack:
        while not all(map(taken, _locks_of(adapter))):
            stack.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield


def elsewhere(adapter: ndpy.Adapter, call: Callable[[], object]) -> None:
    """Make a call in another thread, while this one holds every lock. The test fails if that waits, and says where."""
    caller = threading.Thread(target=call)
    waits_at = ""
    with locks_held(adapter):
        caller.start()
        caller.join(DEADLINE_S)
        if caller.is_alive():
            waits_at = "".join(stack_of(thread) for thread in threading.enumerate())
    caller.join(DEADLINE_S)
    assert not waits_at, waits_at


def stack_of(thread: threading.Thread) -> str:
    """Where a thread is, the innermost call last."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}:\n{''.join(traceback.format_stack(frame))}" if frame else f"{thread.name} has ended\n"
