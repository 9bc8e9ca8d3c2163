"""Reads the integers that programs give."""

from __future__ import annotations

import operator
from typing import Any


def integer(value: Any, what: str) -> int:
    """An integer of any type. Raises TypeError for anything else; `what` names it in the error."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an integer, not {value!r:.80}") from None
