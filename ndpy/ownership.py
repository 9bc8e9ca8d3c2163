"""Whose memory a buffer is: what a cache of registrations has to watch, so that it never outlives the memory."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ndpy import errors
from ndpy.memory import span

_lone_view = memoryview(bytearray(1))
# What sys.getrefcount() says of an object that nothing but one memoryview refers to.
_ALONE = sys.getrefcount(_lone_view.obj)


class Span:
    """A range of memory that was asked for, with an export of its buffer, which keeps the memory in place.

    start, end: addresses. root: the object that the memory goes with; None for a range that the caller watches.
    """

    __slots__ = ("end", "root", "start", "view", "watchable")

    def __init__(self, buffer: Any, writable: bool, raw: bool) -> None:
        self.view, self.start, length = span(buffer, writable)
        self.end = self.start + length
        self.root: Any = None
        self.watchable = False
        if isinstance(self.view, memoryview):
            self.root, self.watchable = _root(self.view)
        if self.root is None and not raw:
            raise errors.UnsupportedError(
                f"nothing tells when the {length} bytes at {self.start:#x} go back to the system, since no Python object "
                "owns them; register them without the cache, or say raw=True and call invalidate() before they go",
                operation="cache",
            )


def _root(view: memoryview) -> tuple[Any, bool]:
    """(object that the memory of a view goes with, or None; whether a weak reference to it tells the memory's end)."""
    found: Any = view.obj
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(found, numpy.ndarray):
        base = found.base
        if isinstance(base, memoryview):
            base = base.obj
        if base is None:
            # NumPy refuses to resize an array that has weak references, so it dies with its first memory.
            return (found, True) if found.base is None and found.flags.owndata else (None, False)
        try:
            memoryview(base).release()
        except (TypeError, ValueError, BufferError):
            return found, False
        found = base
    # What alloc() made is an mmap or cffi's buffer: the memory lives as long as the object. Anything else may be resized
    # (array, bytearray) or is not known.
    return found, isinstance(found, mmap.mmap) or type(found).__module__ == "_cffi_backend"


class Owner:
    """The owner of cached memory: watched by a weak reference, or kept from freeing and resizing by an export.

    entries: what is cached of it, in ascending order, without overlaps. A callback of the weak reference only marks.
    """

    __slots__ = ("dead", "entries", "key", "length", "starts", "view", "watch")

    def __init__(self, request: Span, on_death: Callable[[Owner], None]) -> None:
        root = request.root
        self.key = id(root)
        self.dead = False
        self.entries: list[Any] = []
        self.starts: list[int] = []
        self.watch: Callable[[], Any] | None = None
        self.view: memoryview | None = None
        self.length = _resizable_length(root)
        if request.watchable:

            def died(_: Any) -> None:
                self.dead = True
                on_death(self)

            try:
                self.watch = weakref.ref(root, died)
            except TypeError:
                pass
            else:
                return
        if root is not None:
            self.view = memoryview(root)

    def is_of(self, request: Span) -> bool:
        """Whether this is still the owner of the range, with the memory that it had."""
        if self.dead:
            return False
        if self.watch is not None:
            return self.watch() is request.root and self.length == _resizable_length(request.root)
        return self.view is None or self.view.obj is request.root

    @property
    def abandoned(self) -> bool:
        """Whether the export is the last that refers to the owner."""
        return self.view is not None and sys.getrefcount(self.view.obj) <= _ALONE


def _resizable_length(root: Any) -> int:
    return len(root) if isinstance(root, mmap.mmap) else 0
