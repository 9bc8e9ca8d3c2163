"""What a loop does while it has nothing else to do: it looks after the other side and the time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: How often a loop that waits looks at the control connection.
_LOOK_S = 0.02

_yield: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))


#: What a loop calls when it has waited in vain for a moment, with a number that changes when something comes.
Idle = Callable[[int], None]


class Ended(Exception):
    """The other side has said that it is done. Watch.take_message() returns its message."""


class Stalled(Exception):
    """Nothing has come for too long, or the connection has ended."""


class NothingCame(Stalled):
    """Nothing has come for too long."""


class Watch:
    """Looks after a wait of any length.

    look: returns the next message of the control connection, or None. It raises if the other side is gone.
    problem: says what is wrong with the connections, or "".
    """

    def __init__(self, look: Callable[[], dict[str, Any] | None], problem: Callable[[], str], timeout_s: float) -> None:
        self._look = look
        self._problem = problem
        self._timeout_s = timeout_s
        self._message: dict[str, Any] | None = None
        #: What the loop said last of its progress.
        self.progress = -1
        self._deadline = self._next_look = 0.0

    def restart(self) -> None:
        """Another loop begins, whose progress starts anew. Without this, its wait may look like a part of the last
        loop's.
        """
        self.progress = -1
        self._next_look = 0.0

    def idle(self, progress: int) -> None:
        """Look after the other side and the time. A message of the other side is kept.

        Raises Stalled, and what `look` raises.
        """
        _yield()
        now = time.monotonic()
        if progress != self.progress:
            self.progress, self._deadline = progress, now + self._timeout_s
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        self.look()
        problem = self._problem()
        if problem and self._message is None:
            raise Stalled(problem)
        if now > self._deadline:
            raise NothingCame(f"nothing has come for {self._timeout_s:g} s")

    def look(self) -> None:
        """Look whether the other side has said something, and keep its message. Raises what `look` raises."""
        if self._message is None:
            self._message = self._look()

    def idle_until_told(self, progress: int) -> None:
        """The same. Raises Ended when there is a message of the other side."""
        self.idle(progress)
        if self._message is not None:
            raise Ended

    def take_message(self) -> dict[str, Any] | None:
        """The message that came while a loop ran, if one did."""
        message, self._message = self._message, None
        return message
