"""The monitor of memory that no Python object owns. cdefs/verbs/userfaultfd.c says how it works."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.resource import Uncopied
from ndpy.platforms.verbs.native_calls import ffi, lib, new_eventfd
from ndpy.vocabulary import system_files

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

_INSTEAD = "register it without the cache, or say raw=True and call invalidate() before it changes"
_WHY_NOT = {
    errno.EPERM: (
        "userfaultfd() is not permitted: allow it in the container's seccomp profile, or give this user access "
        "to /dev/userfaultfd, or set vm.unprivileged_userfaultfd=1 with sysctl"
    ),
    errno.ENOSYS: "the kernel was built without userfaultfd (CONFIG_USERFAULTFD)",
    errno.EOPNOTSUPP: "the kernel's userfaultfd cannot write-protect, which Linux 5.7 can on x86-64 and 6.10 on arm64",
}


class Monitor(Uncopied):
    """See ndpy/cache/monitor.py. The adapter's thread calls on_change() when a watched range has changed."""

    changed = staticmethod(lib.ndpy_watch_changed)
    unwatch = staticmethod(lib.ndpy_unwatch)

    def __init__(self, adapter: VerbsAdapter, on_change: Callable[[], None]) -> None:
        number = lib.ndpy_monitor_start()
        if number:
            reason = _WHY_NOT.get(number, os.strerror(number))
            raise errors.UnsupportedError(f"memory cannot be monitored: {reason}", operation="monitor", native=number)
        self._events = adapter._events
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = False
        self._event = new_eventfd("monitor")
        self._fd = self._event.fileno()
        self._events.watch(self._fd, self._on_event)

    def _on_event(self) -> None:
        with self._lock:
            if self._closed:
                return
            os.eventfd_read(self._fd)
        self._on_change()

    def watch(self, start: int, end: int) -> Any:
        """Watch the pages of a range from now on. Raises UnsupportedError, with the reason, if this is impossible."""
        first, last = start & -mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        refuse_mapped_files(first, last)
        watch = lib.ndpy_watch(first, last, self._fd)
        if watch == ffi.NULL:
            number = ffi.errno
            if number == errno.ENOMEM:
                raise errors.InsufficientResourcesError(
                    f"no memory to watch {end - start} bytes", operation="monitor", native=number
                )
            reason = {
                errno.EBUSY: "another userfaultfd of this process has it",
                errno.EINVAL: "the kernel has no events for memory of its kind",
            }.get(number, os.strerror(number))
            raise _unwatchable(start, end, reason, number)
        return watch

    def close(self) -> None:
        """Call this after the last unwatch(). Harmless when repeated."""
        lib.ndpy_monitor_wait_for_reader()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._events.forget(self._fd)
            self._event.close()


def _unwatchable(start: int, end: int, reason: str, number: int = 0) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"the {end - start} bytes at {start:#x} cannot be monitored: {reason}; {_INSTEAD}",
        operation="monitor",
        native=number,
    )


def refuse_mapped_files(start: int, end: int) -> None:
    """Raise UnsupportedError unless a range is anonymous memory. Truncating a file causes no event."""
    for inode, name in _mappings(start, end):
        if inode and name != "/dev/zero (deleted)":
            raise _unwatchable(start, end, f"{name or 'a file'} is mapped there, which others can truncate")
        if inode and not lib.ndpy_monitor_takes_shared_memory():
            raise _unwatchable(start, end, "it is shared memory, which the kernel watches from Linux 5.19 on")


def _mappings(start: int, end: int) -> Iterator[tuple[int, str]]:
    """(inode, name) of each mapping in a range. Memory without a file has inode 0."""
    with system_files.path("/proc/self/maps").open() as maps:
        for line in maps:
            addresses, _, _, _, inode, *name = line.rstrip("\n").split(None, 5)
            first, _, last = addresses.partition("-")
            if int(first, 16) >= end:
                return
            if int(last, 16) > start:
                yield int(inode), name[0] if name else ""
