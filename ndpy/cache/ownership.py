"""The owner of a buffer's memory, which the registration cache watches so that it never outlives the memory."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ndpy import _core, errors
from ndpy.memory import buffer_range, exporter, pointer_of

_lone_view = memoryview(bytearray(1))
# The sys.getrefcount() of an object to which only one memoryview refers.
_ALONE = sys.getrefcount(_lone_view.obj)


class _Monitored:
    """Takes the place of the owner for memory that a monitor watches."""


MONITORED = _Monitored()


class MemoryRange:
    """A requested range of memory, with an export of its buffer, which keeps the memory in place.

    Attributes:
        start, end: addresses.
        length: in bytes.
        view: the export.
        root: the object that owns the memory. None for memory that the caller watches, MONITORED for memory that a monitor
            watches.
        watchable: whether a weak reference to the root tells of the end of the memory.
        entry: the entry in which it was found.
    """

    __slots__ = ("end", "entry", "length", "root", "start", "view", "watchable")

    def __init__(self, buffer: Any, writable: bool, raw: bool, monitored: bool = False) -> None:
        self.view, self.start, self.length = buffer_range(buffer, writable)
        self.end = self.start + self.length
        self.entry: Any = None
        self.root: Any = None
        self.watchable = False
        if isinstance(self.view, memoryview):
            self.root, self.watchable = _root(self.view)
        if self.root is None and not raw:
            if not monitored:
                raise errors.UnsupportedError(
                    f"no Python object owns the {self.length} bytes at {self.start:#x}, so the cache does not learn when they "
                    "are freed; register them without the cache, or make the cache with monitor=True (Linux), or pass "
                    "raw=True and call invalidate() before they are freed",
                    operation="cache",
                )
            self.root = MONITORED


class KnownBuffer(_core.KnownBuffer):
    """A buffer object whose entry was found before. The next request for it is a hit.

    Attributes:
        start, length: its bytes.
    Parameters:
        found: the range with which it was found.
        entry: the entry.
        export: export(subject), or export(buffer) if the subject is None, makes what keeps the buffer in place. None if
            nothing has to.
        pointer: the export must be equal to it. It is set if the memory of the buffer may be replaced (mmap, NumPy array,
            monitored memory). None if it cannot be replaced (memoryview, and objects of which the cache has an export). A
            buffer that can shrink in place (mmap) must have the same length too.
        reference: a weak reference whose callback forgets the buffer.
    """

    __slots__ = ("length", "reference", "start")

    def __init__(
        self,
        found: MemoryRange,
        entry: Any,
        export: Callable[[Any], Any] | None,
        subject: Any,
        pointer: Any,
        reference: Any,
    ) -> None:
        readonly = isinstance(found.view, memoryview) and found.view.readonly
        size = found.length if isinstance(found.root, mmap.mmap) else -1
        super().__init__(entry, 0 if readonly else entry.rights, export, subject, pointer, size)
        self.start = found.start
        self.length = found.length
        self.reference = reference


def _root(view: memoryview) -> tuple[Any, bool]:
    """Return (the object that owns the memory of a view, or None; whether the memory ends when that object dies)."""
    found: Any = view.obj
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(found, numpy.ndarray):
        base = found.base
        if isinstance(base, memoryview):
            base = base.obj
        if base is None:
            # NumPy does not resize an array that has weak references. So the array dies with its first memory.
            return (found, True) if found.base is None and found.flags.owndata else (None, False)
        try:
            memoryview(base).release()
        except (TypeError, ValueError, BufferError):
            return found, False
        found = base
    # alloc() makes an mmap or a buffer of cffi. Their memory lives as long as the object. Other objects may be resized, such as
    # an array or a bytearray, or nobody knows how long their memory lives.
    return found, isinstance(found, mmap.mmap) or type(found).__module__ == "_cffi_backend"


class Owner:
    """The owner of cached memory. A weak reference watches it, or an export keeps its memory in place.

    The callback of the weak reference only marks the owner as dead.

    Attributes:
        entries: the entries in its memory, in ascending order, without overlaps.
    """

    __slots__ = ("dead", "entries", "key", "length", "starts", "view", "watch")

    def __init__(self, request: MemoryRange, on_death: Callable[[Owner], None]) -> None:
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

    def is_of(self, request: MemoryRange) -> bool:
        """Whether this is still the owner of the range, with the same memory."""
        if self.dead:
            return False
        if self.watch is not None:
            return self.watch() is request.root and self.length == _resizable_length(request.root)
        return self.view is None or self.view.obj is request.root

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

    An (address, length) is remembered only if it is exactly an entry. The key is its value, and whether the caller watches
    the memory (raw).

    changed: Monitor.changed, or None if there is no monitor.
    """
    if entry.queue_pairs is not None:
        return
    key: Any = _core.identity(buffer)
    subject = pointer = reference = None
    export: Callable[[Any], Any] | None = memoryview
    if type(buffer) is tuple:
        if (found.start, found.end) != (entry.start, entry.end):
            return
        key = (buffer, True) if found.root is None else buffer
        if changed is None or entry.watch is None:
            export = None
        else:
            # The "export" is 0 unless the memory has changed.
            export, subject, pointer = changed, entry.watch, 0
    elif found.root is None or found.root is MONITORED:
        return
    # If the cache has an export of the object, the object lives as long as the entry.
    elif entry.owner.view is None or buffer is not found.root:
        try:
            reference = weakref.ref(buffer, lambda _: known.pop(key, None))
        except TypeError:
            return
        if type(buffer) is not memoryview:
            pointer = pointer_of(found.view)
            export = exporter()
    known[key] = KnownBuffer(found, entry, export, subject, pointer, reference)
