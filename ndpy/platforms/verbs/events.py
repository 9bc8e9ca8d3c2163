"""The thread of a verbs adapter. It waits for file descriptors with epoll."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable

from ndpy.objects.adapter_thread import AdapterThread
from ndpy.objects.resource import Orphans
from ndpy.platforms.verbs.native_calls import new_eventfd, system_calls

# Seconds between two calls of the handlers of look_regularly().
_LOOK_S = 0.05


class EventThread(AdapterThread):
    """Calls handlers when their file descriptors are readable. Handlers are bound methods, held by weak references."""

    def __init__(self, name: str, orphans: Orphans) -> None:
        super().__init__(name, orphans)
        with system_calls("open adapter"):
            self._epoll = select.epoll()
        self._wake_event = new_eventfd("open adapter")
        self._wake = self._wake_event.fileno()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        #: Under this lock, the dictionary and the epoll have the same descriptors.
        self._watching = threading.Lock()
        self._regular: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._start()

    def watch(self, fd: int, handler: Callable[[], None], *, once: bool = False) -> None:
        """Call handler() whenever fd is readable, or only the next time. Replaces the former handler of fd."""
        mask = select.EPOLLIN | (select.EPOLLONESHOT if once else 0)
        with self._watching:
            known, reference = fd in self._handlers, weakref.WeakMethod(handler)
            self._handlers[fd] = reference
            try:
                if known:
                    self._epoll.modify(fd, mask)
                else:
                    self._epoll.register(fd, mask)
            except OSError:
                if not known:
                    del self._handlers[fd]
                raise

    def look_regularly(self, handler: Callable[[], bool]) -> None:
        """Call handler() regularly until it returns False. For changes without an event."""
        reference = weakref.WeakMethod(handler)
        with self._waking:
            if reference not in self._regular:
                self._regular.append(reference)
        self.wake()

    def forget(self, fd: int) -> None:
        """Stop watching fd. Harmless if it was not watched. Call this before closing fd."""
        with self._watching:
            if self._handlers.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def stop(self) -> None:
        super().stop()
        # A thread that stops itself may have more events at hand. The caller frees what their handlers use.
        with self._watching:
            self._handlers.clear()

    def abandon(self) -> None:
        self._watching = threading.Lock()
        self._handlers.clear()
        super().abandon()

    def _native_turn(self) -> bool:
        for fd, _ in self._epoll.poll(_LOOK_S if self._regular else None):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                self._on_woken()
            else:
                self._handle(fd)
        self._call_regular_handlers()
        return not self._stopping

    def _native_wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _native_free(self) -> None:
        self._epoll.close()
        self._wake_event.close()

    def _call_regular_handlers(self) -> None:
        with self._waking:
            regular, self._regular = self._regular, []
        for reference in regular:
            handler = reference()
            if handler is not None and self._call(handler, _event_of(handler)):
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
        if handler is not None:
            self._call(handler, _event_of(handler))


def _event_of(handler: Callable[[], object]) -> str:
    return f"an event of {handler.__self__!r}"  # type: ignore[attr-defined]
