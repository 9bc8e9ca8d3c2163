"""File descriptors that Ctrl-C cannot lose."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def owned(make: Callable[..., int], *arguments: Any) -> io.FileIO:
    """A file that owns the descriptor that make(*arguments) returns. Dropped or closed, it closes the descriptor.

    Ctrl-C comes when a call has returned, and what it returned is lost then. So one call makes the descriptor and its
    owner.

    Parameters:
        make: a function in C. Inside one in Python Ctrl-C would come too. What it opens is not a folder.
    """
    return next(map(io.FileIO, map(make, *zip(arguments))))
