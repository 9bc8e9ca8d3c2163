"""Races that a test makes happen. An action of another thread or of the provider comes between two chosen native calls.

A point is the moment before or after a native call of the watched thread. walk() runs a scenario once for each point.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from kit.deadlines import DEADLINE_S as DEADLINE_S
from kit.threads import Elsewhere as Elsewhere

# Another thread gets this much time for its work. A lock of the stopped thread may be in its way.
GRACE_S = 0.01

_inside = threading.local()


class Points:
    """Counts the points of the watched thread. At the chosen point action() runs in that thread."""

    def __init__(self) -> None:
        self._watched: threading.Thread | None = None
        self._asleep: Callable[[], None] | None = None
        self._chosen = -1
        self._action: Callable[[], None] = lambda: None
        self._started: list[Elsewhere] = []
        self._acting = threading.Lock()
        self.names: list[str] = []
        self.reached = False
        self.sleeps = 0
        self.failure: BaseException | None = None

    def watch(
        self,
        thread: threading.Thread,
        chosen: int,
        action: Callable[[], object],
        asleep: Callable[[], object] | None = None,
    ) -> None:
        """Watch a thread from now on. asleep() is called each time before the thread sleeps."""
        self.names, self.reached, self.sleeps, self.failure = [], False, 0, None
        self._chosen, self._action, self._asleep = chosen, action, asleep
        self._watched = thread

    def stop(self) -> None:
        """Stop watching, and wait for the action and the threads that it started.

        Raises the exception of one of them, or of an event in the adapter's thread.
        """
        with self._acting:
            self._watched = None
        started, self._started = self._started, []
        for other in started:
            other.outcome()
        if self.failure is not None:
            raise self.failure

    def where(self) -> str:
        return self.names[self._chosen] if 0 <= self._chosen < len(self.names) else f"after {len(self.names)} points"

    def elsewhere(self, call: Callable[[], Any]) -> Elsewhere:
        """Call it in another thread, and go on after GRACE_S at the latest."""
        other = Elsewhere(call).start()
        self._started.append(other)
        other.thread.join(GRACE_S)
        return other

    def native(self, name: bytes, after: int) -> None:
        self.point(name.decode(), bool(after))

    def point(self, name: str, after: bool) -> None:
        if threading.current_thread() is not self._watched or getattr(_inside, "action", False):
            return
        with self._acting:
            if self._watched is None:
                return
            _inside.action = True
            try:
                self._pass(name, after)
            except BaseException as error:
                self.failure = error
            finally:
                _inside.action = False

    def _pass(self, name: str, after: bool) -> None:
        index = len(self.names)
        self.names.append(f"{'after' if after else 'before'} {name}")
        if index == self._chosen:
            self.reached = True
            self._action()
        if name == "sleep" and not after:
            self.sleeps += 1
            if self._asleep is not None:
                self._asleep()

    def unraisable(self, what: Any) -> None:
        """Takes the place of sys.unraisablehook: an event of the adapter's thread raised an exception."""
        self.failure = what.exc_value


class Calls:
    """Stands in for an object or a module. The calls with these names are points."""

    def __init__(self, inner: Any, points: Points, names: dict[str, str]) -> None:
        self._inner, self._points, self._names = inner, points, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*arguments: Any, **more: Any) -> Any:
            self._points.point(self._names[name], False)
            try:
                return value(*arguments, **more)
            finally:
                self._points.point(self._names[name], True)

        return call


def walk(run: Callable[[int], bool], points: Points, least: int) -> None:
    """Call run(0), run(1), … until one returns False, because the thread has no such point.

    The test fails if the thread has fewer than `least` points. A run may miss its point, if the thread wakes up for
    something else and sleeps again. So one that ends too early is repeated a few times.
    """
    chosen, repetitions = 0, 5
    while True:
        try:
            further = run(chosen)
        except BaseException:
            print(f"at point {chosen}, {points.where()}, of {points.names}")
            raise
        if further:
            chosen += 1
        elif chosen < least and repetitions:
            repetitions -= 1
        else:
            break
    assert chosen >= least, f"only {chosen} points"


def at_each_point(least: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """walk() with a test that has the fixture `points`. Each run gets the number of its point as `chosen`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def walking(**fixtures: Any) -> None:
            points = fixtures["points"]

            def run(chosen: int) -> bool:
                test(chosen=chosen, **fixtures)
                return bool(points.reached)

            walk(run, points, least)

        signature = inspect.signature(test)
        shown = [parameter for name, parameter in signature.parameters.items() if name != "chosen"]
        walking.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return walking

    return decorate
