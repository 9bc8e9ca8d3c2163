"""The owner of a buffer's memory, which the registration cache watches so that it never outlives the memory."""

from __future__ import annotations

import mmap
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from ndpy import _core, errors
from ndpy.objects.arrays import ArrayMemory
from ndpy.objects.memory import buffer_range, device_error, plain_view, range_on_device
from ndpy.objects.resource import Uncopied

_lone_view = memoryview(bytearray(1))
# The sys.getrefcount() of an object to which only one memoryview refers.
_ALONE = sys.getrefcount(_lone_view.obj)


class _Monitored:
    """Takes the place of the owner for memory that a monitor watches."""


MONITORED = _Monitored()


class MemoryRange(Uncopied):
    """A requested range of memory, with an export of its buffer, which keeps the memory in place.

    Attributes:
        start, end: addresses.
        length: in bytes.
        view: the export.
        root: the object that owns the memory. None for memory that the caller watches, MONITORED for memory that a
            monitor watches.
        watchable: whether a weak reference to the root shows the end of the memory.
        is_whole: whether the root is an array that has no other memory than this, and may get other memory.
        is_on_device: whether a device has the memory. Then the view is an ArrayMemory.
        entry: the entry in which it was found.
    """

    __slots__ = ("end", "entry", "is_on_device", "is_whole", "length", "root", "start", "view", "watchable")

    def __init__(self, buffer: Any, writable: bool, raw: bool, monitored: bool = False) -> None:
        self.view, self.start, self.length = buffer_range(buffer, writable, on_device=True)
        self.end = self.start + self.length
        self.entry: Any = None
        self.root: Any = None
        self.watchable = self.is_whole = self.is_on_device = False
        if isinstance(self.view, memoryview):
            self.root, self.watchable, self.is_whole = _root(self.view)
        elif isinstance(self.view, ArrayMemory):
            self.root, self.watchable, self.is_whole, self.is_on_device = self.view.producer, True, True, True
            if not _is_watchable(self.root):
                raise device_error(
                    self.view, "the cache does not learn when it is freed, so register it without the cache"
                )
        if self.root is None and not raw:
            if not monitored:
                raise errors.UnsupportedError(
                    f"no Python object owns the {self.length} bytes at {self.start:#x}, so the cache does not learn "
                    f"when they "
                    "are freed; register them without the cache, or make the cache with monitor=True (Linux), or pass "
                    "raw=True and call invalidate() before they are freed",
                    operation="cache",
                )
            self.root = MONITORED

    def part(self, start: int, length: int) -> Any:
        """A range of this memory, as Adapter.register() takes it. It keeps no memory."""
        return range_on_device(self.view, start, length) if self.is_on_device else (start, length)


class KnownBuffer(_core.KnownBuffer):
    """A buffer object whose entry was found before. The next request for it is a hit.

    Attributes:
        start, length: its bytes.
    Parameters:
        found: the range with which it was found.
        entry: the entry.
        is_exported: whether a lease needs an export of the buffer, which must have the same memory as before.
        changed, watch: changed(watch) tells whether the memory has changed. None if nobody watches it.
        reference: a weak reference whose callback forgets the buffer.
    """

    __slots__ = ("reference",)

    def __init__(
        self,
        found: MemoryRange,
        entry: Any,
        is_exported: bool,
        changed: Callable[[Any], Any] | None,
        watch: Any,
        reference: Any,
    ) -> None:
        readonly = isinstance(found.view, memoryview) and found.view.readonly
        super().__init__(entry, 0 if readonly else entry.rights, found.start, found.length, is_exported, changed, watch)
        self.reference = reference


def _is_watchable(root: Any) -> bool:
    try:
        weakref.ref(root)
    except TypeError:
        return False
    return True


def _root(view: memoryview) -> tuple[Any, bool, bool]:
    """Return (the object that owns the memory of a view, or None; MemoryRange.watchable; MemoryRange.is_whole)."""
    found: Any = view.obj
    numpy = sys.modules.get("numpy")
    if isinstance(found, ArrayMemory):
        found = found.producer
        if numpy is None or not isinstance(found, numpy.ndarray):
            return found, True, True
    while numpy is not None and isinstance(found, numpy.ndarray):
        base = found.base
        if isinstance(base, memoryview):
            base = base.obj
        if base is None:
            # NumPy does not resize an array that has weak references. So the array dies with its first memory.
            return (found, True, False) if found.base is None and found.flags.owndata else (None, False, False)
        if not isinstance(base, numpy.ndarray):
            try:
                memoryview(base).release()
            except (TypeError, ValueError, BufferError):
                return found, False, False
        found = base
    # alloc() makes an mmap or a buffer of cffi. Their memory lives as long as the object. Other objects may be resized,
    # such as an array or a bytearray, or nobody knows how long their memory lives.
    return found, isinstance(found, mmap.mmap) or type(found).__module__ == "_cffi_backend", False


class Owner(Uncopied):
    """The owner of cached memory. A weak reference watches it, or an export keeps its memory in place.

    The callback of the weak reference only marks the owner as dead.

    Attributes:
        entries: the entries in its memory, in ascending order, without overlaps.
    """

    __slots__ = ("dead", "entries", "key", "length", "starts", "view", "watch", "whole")

    def __init__(self, request: MemoryRange, on_death: Callable[[Owner], None]) -> None:
        root = request.root
        self.key = id(root)
        self.dead = False
        self.entries: list[Any] = []
        self.starts: list[int] = []
        self.watch: Callable[[], Any] | None = None
        self.view: memoryview | None = None
        self.length = _resizable_length(root)
        self.whole = (request.start, request.length) if request.is_whole else None
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
            self.view = plain_view(root)

    def is_of(self, request: MemoryRange) -> bool:
        """Whether this is still the owner of the range, with the same memory."""
        if self.dead or (request.is_whole and self.whole != (request.start, request.length)):
            return False
        if self.watch is not None:
            return self.watch() is request.root and self.length == _resizable_length(request.root)
        return self.view is None or self.view.obj is request.root or request.is_whole

    def last_before(self, start: int) -> Any:
        """The last entry that begins at this address or before it, or None."""
        place = bisect_right(self.starts, start)
        return self.entries[place - 1] if place else None

    def overlapping(self, start: int, end: int) -> list[Any]:
        first = max(bisect_right(self.starts, start) - 1, 0)
        return [entry for entry in self.entries[first : bisect_left(self.starts, end)] if entry.end > start]

    def remove(self, entry: Any) -> None:
        place = bisect_left(self.starts, entry.start)
        # The entry that has just replaced it may have the same start.
        while self.entries[place] is not entry:
            place += 1
        del self.entries[place], self.starts[place]

    @property
    def abandoned(self) -> bool:
        """Whether only the export refers to the owner."""
        return self.view is not None and sys.getrefcount(self.view.obj) <= _ALONE


def _resizable_length(root: Any) -> int:
    return len(root) if isinstance(root, mmap.mmap) else 0


def remember_buffer(
    buffer: Any, found: MemoryRange, entry: Any, known: dict[Any, KnownBuffer], changed: Callable[[Any], int] | None
) -> None:
    """Remember the entry of a buffer object as long as that object lives.

    An (address, length) is remembered only if it is exactly an entry. The key is its value, and whether the caller
    watches the memory (raw).

    changed: Monitor.changed, or None if there is no monitor.
    """
    if entry.queue_pairs is not None:
        return
    key: Any = _core.identity(buffer)
    reference = None
    if type(buffer) is tuple:
        if (found.start, found.end) != (entry.start, entry.end):
            return
        key = (buffer, True) if found.root is None else buffer
        watch = entry.watch
        known[key] = KnownBuffer(found, entry, False, None if watch is None else changed, watch, None)
        return
    # An array is asked for its memory each time.
    if found.root is None or found.root is MONITORED or found.is_on_device or isinstance(found.view.obj, ArrayMemory):
        return
    # If the cache has an export of the object, the object lives as long as the entry.
    if entry.owner.view is None or buffer is not found.root:
        try:
            reference = weakref.ref(buffer, lambda _: known.pop(key, None))
        except TypeError:
            return
    known[key] = KnownBuffer(found, entry, True, None, None, reference)
