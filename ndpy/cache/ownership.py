"""Whose memory a buffer is: what a cache of registrations has to watch, so that it never outlives the memory."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ndpy import _lease, errors
from ndpy.memory import exporter, pointer_of, span

_lone_view = memoryview(bytearray(1))
# What sys.getrefcount() says of an object that nothing but one memoryview refers to.
_ALONE = sys.getrefcount(_lone_view.obj)


class _Monitored:
    """Stands for the owner of memory that a monitor watches."""


MONITORED = _Monitored()


class Span:
    """A range of memory that was asked for, with an export of its buffer, which keeps the memory in place.

    start, end: addresses; length in bytes. root: the object that the memory goes with; None for a range that the caller
    watches, MONITORED for one that a monitor does. entry: where it was found.
    """

    __slots__ = ("end", "entry", "length", "root", "start", "view", "watchable")

    def __init__(self, buffer: Any, writable: bool, raw: bool, monitored: bool = False) -> None:
        self.view, self.start, self.length = span(buffer, writable)
        self.end = self.start + self.length
        self.entry: Any = None
        self.root: Any = None
        self.watchable = False
        if isinstance(self.view, memoryview):
            self.root, self.watchable = _root(self.view)
        if self.root is None and not raw:
            if not monitored:
                raise errors.UnsupportedError(
                    f"nothing tells when the {self.length} bytes at {self.start:#x} go back to the system, since no Python "
                    "object owns them; register them without the cache, or make the cache with monitor=True (Linux), or "
                    "say raw=True and call invalidate() before they go",
                    operation="cache",
                )
            self.root = MONITORED


class KnownBuffer(_lease.KnownBuffer):
    """A buffer object whose entry was found before, by which it is found again without looking at it much.

    start, length: its bytes. export(subject), or export(buffer) where that is None, makes what keeps the buffer as it is;
    None if nothing has to. pointer: what the export has to be equal to, for a buffer whose memory may be replaced while it
    lives (mmap, NumPy array, monitored memory); None for one whose memory cannot (memoryview, and whatever the cache holds
    an export of). A buffer that can shrink where it is (mmap) has to have its length as well.
    """

    __slots__ = ("length", "reference", "start")

    def __init__(
        self,
        span: Span,
        entry: Any,
        export: Callable[[Any], Any] | None,
        subject: Any,
        pointer: Any,
        reference: Any,
    ) -> None:
        readonly = isinstance(span.view, memoryview) and span.view.readonly
        size = span.length if isinstance(span.root, mmap.mmap) else -1
        super().__init__(entry, 0 if readonly else entry.rights, export, subject, pointer, size)
        self.start = span.start
        self.length = span.length
        self.reference = reference


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
        if root is not None and root is not MONITORED:
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


def remember_buffer(
    buffer: Any, span: Span, entry: Any, known: dict[Any, KnownBuffer], changed: Callable[[Any], int] | None
) -> None:
    """Remember which entry a buffer object was found in, for as long as that object lives.

    An (address, length) is remembered by its value, and with it whether the caller watches it, for the whole of an entry.
    changed: the monitor's, if there is one.
    """
    if entry.queue_pairs is not None:
        return
    key: Any = id(buffer)
    subject = pointer = reference = None
    export: Callable[[Any], Any] | None = memoryview
    if type(buffer) is tuple:
        if (span.start, span.end) != (entry.start, entry.end):
            return
        key = (buffer, True) if span.root is None else buffer
        if changed is None or entry.watch is None:
            export = None
        else:
            # 0 unless it has changed.
            export, subject, pointer = changed, entry.watch, 0
    elif span.root is None or span.root is MONITORED:
        return
    # What the cache holds an export of lives as long as it is cached.
    elif entry.owner.view is None or buffer is not span.root:
        try:
            reference = weakref.ref(buffer, lambda _: known.pop(key, None))
        except TypeError:
            return
        if type(buffer) is not memoryview:
            pointer = pointer_of(span.view)
            export = exporter()
    known[key] = KnownBuffer(span, entry, export, subject, pointer, reference)
