"""The background thread of an open adapter.

It waits for the adapter's native events, closes what the program dropped, and makes the calls that others leave to it. It
refers to the adapter weakly, so that the garbage collector finds an adapter that the program drops; the list of orphans is
the thread's own for the same reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ndpy.resource import Orphans
from ndpy.unraisable import report


class AdapterThread:
    """A platform supplies what it waits on: _native_turn(), _native_wake() and _native_free()."""

    def __init__(self, name: str, orphans: Orphans) -> None:
        self._orphans = orphans
        self._calls: deque[Callable[[], object]] = deque()
        self._calling = threading.RLock()
        self._stopping = False
        #: Once it has been told to stop, nobody wakes it: it frees its handles then, and their numbers may be used anew. A
        #: finalizer may come while its own thread holds this.
        self._waking = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=f"ndpy-{name}", daemon=True)

    def _start(self) -> None:
        """Called last by the platform's constructor."""
        try:
            self._thread.start()
        except BaseException:
            self._native_free()
            raise

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make this call in the thread; never, if the thread stops before. Safe in a finalizer, from any thread.

        What it raises goes to sys.unraisablehook.
        """
        self._calls.append(call)
        self.wake()

    def make_calls(self) -> None:
        """Make the calls that are left now, and wait for the thread if it is at one."""
        with self._calling:
            while self._calls:
                self._call(self._calls.popleft(), "a call left to the thread of an adapter")

    def wake(self) -> None:
        """Have the thread look for orphans and calls. Safe in a finalizer."""
        with self._waking:
            if not self._stopping:
                self._native_wake()

    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Handle the events that are there, end the thread and wait for it, unless this is it."""
        with self._waking:
            if not self._stopping:
                self._stopping = True
                self._native_wake()
        if not self.is_current():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: there is no thread, and what is written to its handles would reach the parent's."""
        self._waking, self._calling = threading.RLock(), threading.RLock()
        self._calls.clear()
        # One that was being stopped may have freed them, and their numbers may be others' by now.
        if not self._stopping:
            self._stopping = True
            self._native_free()

    def _run(self) -> None:
        try:
            while self._native_turn():
                pass
        finally:
            with self._waking:
                self._stopping = True
                self._native_free()

    def _on_woken(self) -> None:
        """Do what it was woken for."""
        self._orphans.close_in_thread()
        self.make_calls()

    def _call(self, call: Callable[[], object], what: str) -> object:
        """One object's trouble must not stop the events of all others."""
        try:
            return call()
        except Exception as error:
            report(error, what)
            return None

    # ---- what the platform does ----

    def _native_turn(self) -> bool:
        """Wait for events or _native_wake(), and handle what has come; False once it was told to stop."""
        raise NotImplementedError

    def _native_wake(self) -> None:
        """Make the present or next _native_turn() return, after a call of _on_woken(). Under _waking."""
        raise NotImplementedError

    def _native_free(self) -> None:
        """Free what it waits on. Under _waking."""
        raise NotImplementedError
