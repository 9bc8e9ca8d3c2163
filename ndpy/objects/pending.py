"""The result of an operation that is under way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar, cast

from ndpy._core import Uncopied
from ndpy.errors import CanceledError, ClosedError, TimeoutError, not_finished
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.forking import in_child
from ndpy.vocabulary.unraisable import must_propagate, report

T = TypeVar("T")

#: Stands for this process. A Pending keeps it, to know in which process it began.
_process = object()


def _begin_process() -> None:
    global _process
    _process = object()


in_child(_begin_process)


class Pending(Uncopied, concurrent.futures.Future[T]):
    """An operation that ends once, with a value or an exception. Any thread may use it, and it can be awaited.

    It is a concurrent.futures.Future: wait(), as_completed() and asyncio.wrap_future() take it. There are two
    differences. First, an operation that is under way can be cancelled: ndpy asks the adapter to stop, and the
    operation ends with CanceledError unless it has ended before. Second, each result() raises a new exception.

    The operation's memory and objects are released only when the adapter has let go of them.

    Parameters:
        operation: its name, for errors.
        cancel: what cancel() calls to have the adapter stop. None if the operation just ends.
    """

    _done_callbacks: list[Callable[[Any], object]]

    def __init__(self, operation: str, cancel: Callable[[], object] | None = None) -> None:
        """For the implementation of an operation."""
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
        """Whether it has ended, with a value or an exception."""
        # Do not take the lock. In a forked child, a thread that is not there may hold it.
        if self._state != FINISHED and self._process is not _process:
            self.abandon(
                ClosedError(
                    f"{self._operation} was begun by the parent process and ends there; start workers with the 'spawn' "
                    "method and open the adapter there"
                )
            )
        return self._state == FINISHED

    def running(self) -> bool:
        """Whether it is still under way."""
        return not self.done()

    def cancelled(self) -> bool:
        """Whether it ended with CanceledError."""
        return self.done() and isinstance(self._exception, CanceledError)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the end. Raises TimeoutError after timeout_s seconds, which timeout() has read."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            left_s = None if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if timeout_s is not None and left_s is not None and left_s <= 0:
                raise not_finished(self._operation, timeout_s)
            with self._condition:
                if not self.done():
                    self._condition.wait(self._at_a_stretch(left_s))

    def _at_a_stretch(self, left_s: float | None) -> float | None:
        """How much of the remaining time this thread may wait before it has to look at something else."""
        return left_s

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the end. Return the value, or raise the exception, a new one each time.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            TimeoutError: timeout_s has passed. The operation goes on.
        """
        self._wait(timeout(timeout_s))
        if self._exception is not None:
            raise _another(self._exception)
        return cast(T, self._result)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end. Return the exception, a new one each time, or None if there is a value.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            TimeoutError: timeout_s has passed. The operation goes on.
        """
        self._wait(timeout(timeout_s))
        return None if self._exception is None else _another(self._exception)

    def cancel(self) -> bool:
        """Ask the operation to stop.

        Returns: True if the operation has ended with CanceledError now. False if it ended by itself before.
        """
        if self.done():
            return False
        cancel = self._cancel
        if cancel is not None:
            cancel()
        self.fail(CanceledError("cancelled", operation=self._operation))
        return self.cancelled()

    def add_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Call callback(self) when the operation ends, in the thread that ends it. If it has ended, call it at once.

        That thread may hold locks of the objects concerned. So the callback should only pass the news on, and leave the
        work to another thread. An exception of the callback goes to sys.unraisablehook. Only Ctrl-C and sys.exit() in
        the main thread are raised there.

        Parameters:
            callback: gets this Pending.
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
        except BaseException as error:
            if must_propagate(error):
                raise
            report(error, f"a callback of {self!r}")

    def succeed(self, value: T, prepare: Callable[[], object] | None = None) -> bool:
        """End it with a value. For the implementation of an operation.

        Parameters:
            value: what result() returns.
            prepare: called before anybody sees the value. Not called if the operation had ended before.
        Returns: False if it had ended before.
        """
        return self._finish(value, None, prepare)

    def fail(self, error: BaseException) -> bool:
        """End it with an exception. For the implementation of an operation.

        Parameters:
            error: result() raises a copy of it.
        Returns: False if it had ended before.
        """
        _forget_frames(error)
        return self._finish(None, error)

    def abandon(self, error: BaseException) -> None:
        """End it in a forked child, without callbacks and without the lock that the parent may hold. For the
        implementation.

        Parameters:
            error: result() raises a copy of it.
        """
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
            # It refers to memory and objects of the operation. They must go even if somebody keeps the result.
            self._cancel = None
            self._condition.notify_all()
        for callback in callbacks:
            self._call(callback)
        return True

    def __await__(self) -> Generator[Any, None, T]:
        if self.done():
            return self.result(0)
        import asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def on_done(_: Pending[T]) -> None:
            # The loop may have been closed meanwhile. Then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)


# A traceback refers to frames, and a frame refers to all its variables. With a traceback, a Pending would keep the
# program's buffers. If the program has the Pending in a variable too, they would stay until the garbage collector runs.
# So the exception in a Pending has no traceback, and result() raises a copy of it.


def _forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an exception and of the exceptions that led to it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += [found.__cause__, found.__context__]


def _another(error: BaseException) -> BaseException:
    """A copy of an exception. The exception itself if it cannot be copied."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error.with_traceback(None)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def wait_or_cancel(pending: Pending[T], timeout_s: float | None) -> T:
    """Return the result of an operation. Cancel the operation if a deadline or Ctrl-C ends the wait early."""
    try:
        return pending.result(timeout_s)
    except TimeoutError:
        if pending.cancel():
            raise
    except BaseException:
        pending.cancel()
        raise
    # The operation ended by itself at the last moment.
    return pending.result(0)


async def await_or_cancel(pending: Pending[T], timeout_s: float | None) -> T:
    """Do what wait_or_cancel() does, in a task of asyncio."""
    timeout_s = timeout(timeout_s)
    if timeout_s is None:
        return await pending
    import asyncio

    expired = False

    def expire() -> None:
        nonlocal expired
        expired = pending.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, expire)
    try:
        return await pending
    except CanceledError:
        if not expired:
            raise
    finally:
        timer.cancel()
    raise not_finished(pending._operation, timeout_s)
