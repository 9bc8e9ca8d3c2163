"""The thread of an open adapter: it waits for file descriptors and closes what was dropped.

It refers to the adapter weakly, so that an adapter that the program drops is found by the garbage collector; the list of
orphans is the thread's own for the same reason.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable

from ndpy.resource import Orphans
from ndpy.unraisable import report

# Seconds between two looks for what no event tells of.
_LOOK_S = 0.05


class EventThread:
    """Calls handlers when their file descriptors are readable. Handlers are bound methods, held weakly."""

    def __init__(self, name: str, orphans: Orphans) -> None:
        self._orphans = orphans
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        #: What is in the dictionary is in the epoll, for whoever holds this.
        self._watching = threading.Lock()
        self._regular: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._stopping = False
        #: Nobody writes to the descriptor after it was told to stop. A finalizer may come while its own thread holds this.
        self._waking = threading.RLock()
        #: It has stopped itself, and nobody waits for it.
        self._closes_all = False
        self._thread = threading.Thread(target=self._run, name=f"ndpy-{name}", daemon=True)
        self._thread.start()

    def watch(self, fd: int, handler: Callable[[], None], *, once: bool = False) -> None:
        """Call handler() whenever fd is readable, or the next time only; asking again replaces the former handler."""
        mask = select.EPOLLIN | (select.EPOLLONESHOT if once else 0)
        with self._watching:
            known = fd in self._handlers
            self._handlers[fd] = weakref.WeakMethod(handler)
            if known:
                self._epoll.modify(fd, mask)
            else:
                self._epoll.register(fd, mask)

    def look_regularly(self, handler: Callable[[], bool]) -> None:
        """Call handler() now and then, until it returns False."""
        reference = weakref.WeakMethod(handler)
        with self._waking:
            if reference not in self._regular:
                self._regular.append(reference)
        self.wake()

    def forget(self, fd: int) -> None:
        """Watch fd no more; harmless when it was not watched. Call before closing it."""
        with self._watching:
            if self._handlers.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Look for orphans. Safe in a finalizer."""
        with self._waking:
            if not self._stopping:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and wait for it, unless this is it; harmless when repeated."""
        with self._waking:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is self._thread:
            self._closes_all = True
            return
        self._thread.join()
        os.close(self._wake)

    def abandon(self) -> None:
        """In a forked child: there is no thread, and what is written to the descriptors would reach the parent's."""
        self._watching, self._waking = threading.Lock(), threading.RLock()
        self._handlers.clear()
        # One that was being stopped may have closed them, and their numbers may be others' by now.
        if not self._stopping:
            self._stopping = True
            self._epoll.close()
            os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for fd, _ in self._epoll.poll(_LOOK_S if self._regular else None):
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                        self._orphans.close_in_thread()
                        continue
                    self._handle(fd)
                self._look()
        finally:
            self._epoll.close()
            if self._closes_all:
                os.close(self._wake)

    def _look(self) -> None:
        with self._waking:
            regular, self._regular = self._regular, []
        for reference in regular:
            handler = reference()
            if handler is not None and self._call(handler):
                with self._waking:
                    if reference not in self._regular:
                        self._regular.append(reference)

    def _handle(self, fd: int) -> None:
        with self._watching:
            reference = self._handlers.get(fd)
            handler = reference() if reference is not None else None
            if reference is not None and handler is None:
                del self._handlers[fd]
                self._epoll.unregister(fd)
        if handler is None:
            return
        self._call(handler)

    def _call(self, handler: Callable[[], bool | None]) -> bool | None:
        try:
            return handler()
        except Exception as error:
            # One object's trouble must not stop the events of all others.
            report(error, f"an event of {handler.__self__!r}")  # type: ignore[attr-defined]
            return None
