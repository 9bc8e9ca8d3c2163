"""Reporting an exception that has nobody to go to, as in a thread of ndpy's own."""

from __future__ import annotations

import weakref


class _Callback:
    """What raises for report(); its name is what the report shows."""

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
    """Give an exception to sys.unraisablehook, as "Exception ignored in: {where}"; never raises.

    The default hook takes only arguments that the interpreter made, as it does for what a weak reference's callback raises.
    """
    subject: set[None] = set()
    reference = weakref.ref(subject, _Callback(error, where))
    # The exception's traceback leads to this frame, as the caller of the callback's.
    del error
    del subject, reference
