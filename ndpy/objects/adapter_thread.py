"""The background thread of an open adapter.

It waits for the adapter's native events and handles them. It closes what the program dropped. And it makes the calls
that other threads leave to it with call_soon().

It refers to the adapter weakly, so that the garbage collector finds an adapter that the program drops. For the same
reason it has the list of orphans itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from ndpy.objects.native_steps import ThreadSteps
from ndpy.objects.resource import Orphans, Uncopied
from ndpy.vocabulary.unraisable import must_propagate, report

# How long a resting thread waits. What is done meanwhile may run finalizers of the program, which may wait for this
# thread.
_LONGEST_REST_S = 5.0


class AdapterThread(Uncopied, ThreadSteps):
    """A platform supplies what the thread waits on: _native_turn(), _native_wake() and _native_free().

    An exception of a call or of an event handler goes to sys.unraisablehook, and the thread goes on.
    """

    def __init__(self, name: str, orphans: Orphans) -> None:
        self._orphans = orphans
        self._calls: deque[Callable[[], object]] = deque()
        self._calling = threading.RLock()
        self._stopping = False
        #: Held to wake the thread, and to set _stopping, after which nobody wakes it: the thread frees its handles
        #: then, and the system may give their numbers to others. A finalizer may come while its own thread holds this.
        self._waking = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=f"ndpy-{name}", daemon=True)

    def _start(self) -> None:
        """The platform's constructor calls this last."""
        try:
            self._thread.start()
        except BaseException:
            self._native_free()
            raise

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make this call in the thread. Safe in a finalizer, and from any thread.

        The call is dropped if the thread stops first. What it raises goes to sys.unraisablehook.
        """
        self._calls.append(call)
        self.wake()

    def make_calls(self) -> None:
        """Make the calls that are left in the caller's thread. Wait for the one that the adapter's thread is making."""
        with self._calling:
            while self._calls:
                self._call(self._calls.popleft(), "a call left to the thread of an adapter")

    @contextlib.contextmanager
    def resting(self, timeout_s: float) -> Iterator[None]:
        """While the block lasts, the thread handles no event. So it refers to none of the adapter's objects.

        Waits for the handler that runs, up to timeout_s seconds. The block runs in any case. If it lasts longer than
        _LONGEST_REST_S seconds, the thread goes on.
        """
        if self.is_current() or not self._thread.is_alive():
            yield
            return
        rests, go_on = threading.Event(), threading.Event()

        def rest() -> None:
            rests.set()
            # Another thread may make the call.
            if self.is_current():
                go_on.wait(_LONGEST_REST_S)

        try:
            self.call_soon(rest)
            rests.wait(timeout_s)
            yield
        finally:
            go_on.set()

    def wake(self) -> None:
        """Have the thread look for orphans and calls. Safe in a finalizer."""
        with self._waking:
            if not self._stopping:
                self._native_wake()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Handle the events that have come, end the thread, and wait for its end unless the caller runs in it."""
        with self._waking:
            if not self._stopping:
                self._stopping = True
                self._native_wake()
        if not self.is_current():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child there is no thread, and what is written to its handles would reach the parent's."""
        self._waking, self._calling = threading.RLock(), threading.RLock()
        self._calls.clear()
        # A thread that was being stopped may have freed its handles, and their numbers may be others' by now.
        if not self._stopping:
            self._stopping = True
            self._native_free()

    def _run(self) -> None:
        try:
            while self._native_turn():
                pass
        except Exception as error:
            report(error, "the thread of an adapter, which has ended")
        finally:
            with self._waking:
                self._stopping = True
                self._native_free()

    def _on_woken(self) -> None:
        """Do what the thread was woken for."""
        self._orphans.close_in_thread()
        self.make_calls()

    def _call(self, call: Callable[[], object], what: str) -> object:
        """Make a call. If it raises, report that and return None, because the events of other objects must go on."""
        try:
            return call()
        except BaseException as error:
            if must_propagate(error):
                raise
            report(error, what)
            return None
