"""A set of objects that it does not keep alive, for several threads."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWeakSet(Generic[T]):
    """A weak set to which one thread may add while another one looks through it.

    Iterating over a weakref.WeakSet raises RuntimeError if it grows meanwhile. This set needs no lock, which another thread
    might hold while the process forks.
    """

    def __init__(self) -> None:
        # By id(). valuerefs() is one step that other threads cannot disturb.
        self._members: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, member: T) -> None:
        self._members[id(member)] = member

    def members(self) -> list[T]:
        """Those that are alive now."""
        return [member for reference in self._members.valuerefs() if (member := reference()) is not None]

    def take(self) -> list[T]:
        """Remove those that are alive now, and return them."""
        taken = self.members()
        for member in taken:
            self._members.pop(id(member), None)
        return taken
