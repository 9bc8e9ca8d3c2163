"""The memory windows of a registration cache."""

from __future__ import annotations

import threading

from ndpy._core import Sge
from ndpy.objects.adapter import Adapter
from ndpy.objects.memory import MemoryWindow
from ndpy.objects.queue_pair import QueuePair
from ndpy.vocabulary.flags import Access


class WindowPool:
    """Windows that are not bound. The next one is bound through the same queue pair. A lock guards them."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        #: The key is the serial number of the queue pair. None after close().
        self._idle: dict[int, list[MemoryWindow]] | None = {}
        self._lock = threading.Lock()

    def bind(self, queue_pair: QueuePair, element: Sge, access: Access) -> MemoryWindow:
        with self._lock:
            idle = self._idle and self._idle.get(queue_pair._serial)
            window = idle.pop() if idle else None
        if window is None:
            window = self._adapter.create_memory_window()
        try:
            queue_pair._expose(window, element, access)
        except BaseException:
            self._keep(queue_pair, window)
            raise
        return window

    def revoke(self, queue_pair: QueuePair, window: MemoryWindow) -> None:
        if queue_pair._revoke(window):
            self._keep(queue_pair, window)
        else:
            window.close()

    def _keep(self, queue_pair: QueuePair, window: MemoryWindow) -> None:
        with self._lock:
            if self._idle is not None and not queue_pair.closed:
                self._idle.setdefault(queue_pair._serial, []).append(window)
                return
        window.close()

    def close_those_of(self, queue_pair: QueuePair) -> None:
        with self._lock:
            windows = self._idle.pop(queue_pair._serial, []) if self._idle else []
        for window in windows:
            window.close()

    def close(self) -> None:
        """Close all, also those that are revoked later. Harmless when repeated."""
        with self._lock:
            idle, self._idle = self._idle, None
        for windows in (idle or {}).values():
            for window in windows:
                window.close()

    def on_forked(self) -> None:
        self._lock = threading.Lock()
