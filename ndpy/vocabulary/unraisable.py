"""Reporting an exception that no caller can catch, for example in a thread of ndpy."""

from __future__ import annotations

import threading
import weakref


class _Callback:
    """The callback that raises for report(). The report shows its name."""

    def __init__(self, error: BaseException, where: str) -> None:
        self._error: BaseException | None = error
        self._where = where

    def __repr__(self) -> str:
        return self._where

    def __call__(self, _: object) -> None:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            # Its traceback refers to this frame.
            del error


def report(error: BaseException, where: str) -> None:
    """Give an exception to sys.unraisablehook, as "Exception ignored in: {where}". Never raises.

    The default hook takes only arguments that the interpreter made. It makes them when the callback of a weak reference
    raises.
    """
    subject: set[None] = set()
    reference = weakref.ref(subject, _Callback(error, where))
    # The exception's traceback refers to this frame, as the caller of the callback's frame.
    del error
    del subject, reference


def must_propagate(error: BaseException) -> bool:
    """Whether the exception is Ctrl-C or sys.exit() in the main thread. In a thread of ndpy it would only end that
    thread.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
