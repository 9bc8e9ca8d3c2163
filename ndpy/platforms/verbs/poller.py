"""Waiting for many completion queues with epoll. It watches their channels' descriptors, and an eventfd for wake()."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time

from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.poller import Poller
from ndpy.objects.timeouts import seconds
from ndpy.platforms.verbs.completion_queue import VerbsCompletionQueue
from ndpy.platforms.verbs.native_calls import new_eventfd, system_calls

#: epoll_wait(2) waits no longer than 2**31 ms. A longer wait ends without an event, and goes on.
LONGEST_S = 86400.0


class VerbsPoller(Poller):
    def __init__(self, *, spin_s: float = 0.0) -> None:
        # Before anything is open.
        spin_s = seconds(spin_s, "spin_s")
        self._by_fd: dict[int, VerbsCompletionQueue] = {}
        with system_calls("poller"):
            self._epoll = select.epoll()
        self._wake_event = new_eventfd("poller")
        self._wake_fd = self._wake_event.fileno()
        # From here on the poller is open: its end frees the two, and so does a fork in the child.
        super().__init__(spin_s=spin_s)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def _native_add(self, queue: CompletionQueue) -> int:
        assert isinstance(queue, VerbsCompletionQueue)
        fd = queue.fileno()
        self._epoll.register(fd, select.EPOLLIN)
        self._by_fd[fd] = queue
        return fd

    def _native_remove(self, queue: CompletionQueue, watched: int) -> None:
        del self._by_fd[watched]
        self._epoll.unregister(watched)

    def _native_arm(self, queue: CompletionQueue, watched: int) -> bool:
        assert isinstance(queue, VerbsCompletionQueue)
        queue._native_arm_channel(solicited=False)
        return False

    def _native_wait(self, deadline: float | None) -> bool:
        left_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        events = self._epoll.poll(min(left_s, LONGEST_S))
        for fd, _ in events:
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
                continue
            with self._lock:
                queue = self._by_fd.get(fd)
            if queue is not None:
                # This marks the queue ready for all its pollers, this one included.
                queue._on_event(self)
        return bool(events) or left_s > LONGEST_S

    def fileno(self) -> int:
        with self._lock:
            self._check()
            # What a wait() has left in a queue, which is not armed, has to make the descriptor readable.
            self._wakes_itself = True
            if self._maybe_ready:
                self._native_wake()
            return self._epoll.fileno()

    def _native_wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _on_forked(self) -> None:
        was_open = not self._closed
        super()._on_forked()
        if was_open:
            # This closes only the child's copies.
            self._native_free()

    def _native_free(self) -> None:
        self._epoll.close()
        self._wake_event.close()
