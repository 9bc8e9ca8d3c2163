"""A set of objects that it does not keep alive, for several threads."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWeakSet(Generic[T]):
    """A weak set to which one thread may add while another one looks through it.

    Iterating over a weakref.WeakSet raises RuntimeError if it grows meanwhile. This set needs no lock, which another
    thread might hold while the process forks.
    """

    # By id(). None while it is empty, because most sets stay empty.
    _members: weakref.WeakValueDictionary[int, T] | None = None

    def add(self, member: T) -> None:
        if self._members is None:
            # One step: another thread may add its first member too.
            vars(self).setdefault("_members", weakref.WeakValueDictionary())
        assert self._members is not None
        self._members[id(member)] = member

    def members(self) -> list[T]:
        """Those that are alive now."""
        if self._members is None:
            return []
        # valuerefs() is one step that other threads cannot disturb.
        return [member for reference in self._members.valuerefs() if (member := reference()) is not None]

    def take(self) -> list[T]:
        """Remove those that are alive now, and return them."""
        taken = self.members()
        for member in taken:
            assert self._members is not None
            self._members.pop(id(member), None)
        return taken
