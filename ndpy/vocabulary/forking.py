"""What a forked child does before the program runs in it.

The parent's open objects do not work in the child. Operations that are under way never end there, because the threads
that would end them exist only in the parent. One of these threads may have held a lock, which nobody releases in the
child. So every object that has locks renews them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Inherited(Protocol):
    def _on_forked(self) -> None: ...


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def in_child(call: Callable[[], None]) -> None:
    """Have call() called in every forked child. This does nothing on Windows, which has no fork()."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def renew_in_child(thing: Inherited) -> None:
    """Have thing._on_forked() called in every forked child, as long as the thing lives."""
    _inherited.add(thing)


def _tell_all() -> None:
    for thing in list(_inherited):
        thing._on_forked()


in_child(_tell_all)
