"""The result of an operation that is under way."""

from __future__ import annotations

import concurrent.futures
import copy
import threading
from collections.abc import Callable, Generator
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar, cast

from ndpy.errors import CanceledError, ClosedError, TimeoutError
from ndpy.forking import in_child
from ndpy.unraisable import report

T = TypeVar("T")

#: This process, for what was begun in it.
_process = object()


def _begin_process() -> None:
    global _process
    _process = object()


in_child(_begin_process)


class Pending(concurrent.futures.Future[T]):
    """An operation that ends once, with a value or an exception. Safe from any thread; can be awaited.

    It is a concurrent.futures.Future: wait(), as_completed() and asyncio.wrap_future() take it. Two things differ. An
    operation that is under way can be cancelled: the adapter is asked to stop, and the operation ends with CanceledError
    unless it had ended already. And each result() raises an exception of its own.

    What the operation uses is released only when the adapter has let go of it.
    """

    _done_callbacks: list[Callable[[Any], object]]

    def __init__(self, operation: str, cancel: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._operation = operation
        self._process = _process
        self._cancel = cancel
        self._state = RUNNING

    def __repr__(self) -> str:
        if not self.done():
            state = "running"
        elif self._exception is not None:
            state = f"failed: {self._exception}"
        else:
            state = "done"
        return f"<Pending {self._operation} {state}>"

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        # Without the lock, which in a forked child may be held by a thread that is not there.
        if self._state != FINISHED and self._process is not _process:
            self.abandon(
                ClosedError(
                    f"{self._operation} was begun by the parent process and ends there; start workers with the 'spawn' "
                    "method and open the adapter there"
                )
            )
        return self._state == FINISHED

    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.done()

    def cancelled(self) -> bool:
        """Whether it ended with CanceledError."""
        return self.done() and isinstance(self._exception, CanceledError)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the end; TimeoutError after timeout_s seconds."""
        if self.done():
            return
        with self._condition:
            if not self._condition.wait_for(self.done, timeout_s):
                raise TimeoutError(f"not finished within {timeout_s:g} s", operation=self._operation)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the end; return its value or raise its exception, a new one each time.

        Raises TimeoutError after timeout_s seconds (None waits for ever); the operation then goes on.
        """
        self._wait(timeout_s)
        if self._exception is not None:
            raise _another(self._exception)
        return cast(T, self._result)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end; return its exception, a new one each time, or None if it has a value.

        Raises TimeoutError after timeout_s seconds (None waits for ever); the operation then goes on.
        """
        self._wait(timeout_s)
        return None if self._exception is None else _another(self._exception)

    def cancel(self) -> bool:
        """Ask the operation to stop; True if it ended with CanceledError or had not ended by itself before."""
        if self.done():
            return False
        cancel = self._cancel
        if cancel is not None:
            cancel()
        self.fail(CanceledError("cancelled", operation=self._operation))
        return self.cancelled()

    def add_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Call callback(self) at the end, in the thread that ends it; at once if it has ended.

        The thread may hold locks of the objects concerned: pass the news on, and do the work elsewhere. What the callback
        raises goes to sys.unraisablehook.
        """
        if not self.done():
            with self._condition:
                if not self.done():
                    self._done_callbacks.append(callback)
                    return
        self._call(callback)

    def _call(self, callback: Callable[[Pending[T]], object]) -> None:
        try:
            callback(self)
        except Exception as error:
            report(error, f"a callback of {self!r}")

    def succeed(self, value: T, prepare: Callable[[], object] | None = None) -> bool:
        """End it with a value; False if it had ended before. For the implementation of an operation.

        prepare: called before anybody sees the value, and not at all if it had ended.
        """
        return self._finish(value, None, prepare)

    def fail(self, error: BaseException) -> bool:
        """End it with an exception; False if it had ended before. For the implementation of an operation."""
        _forget_frames(error)
        return self._finish(None, error)

    def abandon(self, error: BaseException) -> None:
        """End it in a forked child, where nobody else will, without callbacks and without the lock, which may be held."""
        self._process = _process
        self._condition = threading.Condition()
        self._waiters.clear()
        self._done_callbacks.clear()
        self.fail(error)

    def _finish(
        self, value: T | None, error: BaseException | None, prepare: Callable[[], object] | None = None
    ) -> bool:
        if self.done():
            return False
        with self._condition:
            if self.done():
                return False
            if prepare is not None:
                prepare()
            self._result, self._exception, self._state = value, error, FINISHED
            for waiter in self._waiters:
                waiter.add_result(self) if error is None else waiter.add_exception(self)
            callbacks = self._done_callbacks.copy()
            self._done_callbacks.clear()
            # It refers to what the operation needed, which goes although somebody keeps the result.
            self._cancel = None
            self._condition.notify_all()
        for callback in callbacks:
            self._call(callback)
        return True

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_done(_: Pending[T]) -> None:
            # The loop may have been closed meanwhile; then nobody waits any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)


# A traceback refers to frames, and they to all that was in use where the exception was raised and in every caller. So the
# exception that a Pending keeps has none, and is never raised itself: a program's buffers would stay with the Pending,
# and, where the program has that in a variable too, until the garbage collector runs.


def _forget_frames(error: BaseException) -> None:
    """Take the tracebacks away from an exception and from those that led to it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += [found.__cause__, found.__context__]


def _another(error: BaseException) -> BaseException:
    """An exception that says the same; the same one where its class cannot be copied."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error.with_traceback(None)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def wait_or_cancel(pending: Pending[T], timeout_s: float | None) -> T:
    """The result of an operation that is to be given up when the wait for it ends early, by deadline or Ctrl-C."""
    try:
        return pending.result(timeout_s)
    except TimeoutError:
        if pending.cancel():
            raise
    except BaseException:
        pending.cancel()
        raise
    # It ended by itself at the last moment.
    return pending.result(0)
