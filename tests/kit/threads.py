"""Calls in threads of their own. What they raise comes back to the test, and one that hangs fails it.

This imports nothing of ndpy, so that softnd's own tests can use it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from kit.deadlines import DEADLINE_S, patient


class Elsewhere:
    """call() in a thread of its own. result() returns its value or raises its exception, and fails if it hangs."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.over = False
        self.thread = threading.Thread(target=self._run, name="elsewhere", daemon=True)

    def start(self) -> Elsewhere:
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self.over = True

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"a call hangs:\n{stacks()}"
        if self._error is not None:
            raise self._error
        return self._value

    def outcome(self) -> Any:
        """Its value, or the NdpyError that it raised."""
        import ndpy

        try:
            return self.result()
        except ndpy.NdpyError as error:
            return error


@contextlib.contextmanager
def beside(*calls: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Iterator[list[Elsewhere]]:
    """Make each call in a thread while the block runs. At its end they must end within the time, and none may have
    raised.
    """
    running = [Elsewhere(call).start() for call in calls]
    yield running
    for one in running:
        one.thread.join(timeout_s)
    # What one raised may be why another hangs.
    for one in sorted(running, key=lambda one: one.thread.is_alive()):
        one.result(0)


def in_threads(count: int, work: Callable[[int], Any], timeout_s: float = patient(100)) -> None:
    """Run work(number) in `count` threads that start together. Raises the first exception of one of them."""
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait(DEADLINE_S)
        work(number)

    with beside(*(functools.partial(run, number) for number in range(count)), timeout_s=timeout_s):
        pass


def stacks() -> str:
    """The last frames of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-6:])}"
        for ident, frame in sys._current_frames().items()
    )
