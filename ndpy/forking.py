"""What a forked child does before anything else of the program runs in it.

Nothing that the parent has open works there, and the threads that would end what is under way are the parent's. A lock
may be held by one of them, which never releases it in the child. So every object that has locks renews them there.
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
    """Have call() made in every forked child. Nothing on Windows, which has no fork()."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def tell(thing: Inherited) -> None:
    """Have thing._on_forked() called in every forked child, while there is the thing."""
    _inherited.add(thing)


def _tell_all() -> None:
    for thing in list(_inherited):
        thing._on_forked()


in_child(_tell_all)
