"""Whether Ctrl-C ends a program of asyncio.run()."""

from __future__ import annotations

import asyncio
import functools
import signal
import weakref
from typing import Any


class Interrupts:
    """What came for the program of a loop. Make it while the loop runs.

    asyncio.run() and asyncio.Runner handle Ctrl-C by a cancellation of the main task, which looks like that of a time
    limit. They count what came in an attribute that is theirs. Where there is no such count, as in Python 3.10 or in a
    program that runs its loop by itself, Ctrl-C is a cancellation like any other.
    """

    __slots__ = ("_main_task", "_runner")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._runner: weakref.ref[Any] | None = None
        self._main_task: weakref.ref[Any] | None = None
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, functools.partial):
            main_task = handler.keywords.get("main_task")
            runner = getattr(handler.func, "__self__", None)
            # A loop of another thread has no such handler.
            if isinstance(main_task, asyncio.Task) and main_task.get_loop() is loop and runner is not None:
                self._runner, self._main_task = weakref.ref(runner), weakref.ref(main_task)

    @property
    def is_ending(self) -> bool:
        """Whether Ctrl-C came, and the program did not take it back by Task.uncancel()."""
        if self._runner is None or self._main_task is None or not getattr(self._runner(), "_interrupt_count", 0):
            return False
        main_task = self._main_task()
        return main_task is None or main_task.done() or main_task.cancelling() > 0
