"""Waiting for many completion queues over epoll."""

from __future__ import annotations

import contextlib
import os
import select
import time

from ndpy.completion import Completion, CompletionQueue
from ndpy.errors import ClosedError, NdpyError, TimeoutError
from ndpy.poller import Poller
from ndpy.verbs.completion import VerbsCompletionQueue


class VerbsPoller(Poller):
    """A queue is looked at when it was added, delivered something, or had an event; then it is armed, and looked at once
    more before it counts as idle, because an event comes only for completions after arming."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._queues: dict[int, VerbsCompletionQueue] = {}
        self._to_look_at: set[VerbsCompletionQueue] = set()
        self._woken = False
        self._waiters = 0

    def add(self, completion_queue: CompletionQueue) -> None:
        assert isinstance(completion_queue, VerbsCompletionQueue)
        # A queue that is being closed leaves the pollers that it knows of once nobody can add it any more.
        with self._lock, completion_queue._lock:
            self._check()
            fd = completion_queue.fileno()
            if fd not in self._queues:
                self._epoll.register(fd, select.EPOLLIN)
                self._queues[fd] = completion_queue
                completion_queue._pollers.add(self)
        self._look_at(completion_queue)

    def remove(self, completion_queue: CompletionQueue) -> None:
        with self._lock:
            for fd, queue in list(self._queues.items()):
                if queue is completion_queue:
                    del self._queues[fd]
                    if not self._closed:
                        self._epoll.unregister(fd)
                    with queue._lock:
                        queue._pollers.discard(self)
                    self._to_look_at.discard(queue)

    def _look_at(self, queue: VerbsCompletionQueue) -> None:
        """The queue may have completions although its channel is not readable."""
        with self._lock:
            if not self._closed and queue in self._queues.values():
                self._to_look_at.add(queue)
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._check()
            self._waiters += 1
        try:
            while True:
                ready = self._collect()
                with self._lock:
                    # What was taken is delivered although the poller was closed meanwhile: nobody else gets it.
                    if not ready:
                        self._check()
                    woken, self._woken = self._woken, False
                if ready or woken:
                    return ready
                self._sleep(deadline)
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    self._free()

    def _collect(self) -> list[tuple[CompletionQueue, list[Completion]]]:
        with self._lock:
            self._check()
            candidates, self._to_look_at = self._to_look_at, set()
        ready: list[tuple[CompletionQueue, list[Completion]]] = []
        while candidates:
            queue = candidates.pop()
            try:
                completions = queue.poll()
                if not completions:
                    with queue._lock:
                        waiting = queue._arm_and_look()
                    completions = queue.poll() if waiting else []
            except ClosedError:
                # Closed while it was looked at; closing removes it.
                continue
            except NdpyError:
                # One queue's trouble must not cost the others what they have; it is told when nothing else is to be.
                with self._lock:
                    self._to_look_at |= candidates | ({queue} if ready else set())
                    self._to_look_at &= set(self._queues.values())
                if ready:
                    return ready
                raise
            if completions:
                ready.append((queue, completions))
                with self._lock:
                    if queue in self._queues.values():
                        self._to_look_at.add(queue)
        return ready

    def _sleep(self, deadline: float | None) -> None:
        timeout_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        events = self._epoll.poll(timeout_s)
        if not events:
            raise TimeoutError("no completion within the time allowed", operation="wait")
        for fd, _ in events:
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
                continue
            with self._lock:
                queue = self._queues.get(fd)
            if queue is not None:
                queue._on_event()

    def fileno(self) -> int:
        """An epoll descriptor that is readable when wait() has something to do."""
        self._check()
        return self._epoll.fileno()

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queues, self._queues = list(self._queues.values()), {}
            self._to_look_at.clear()
            for queue in queues:
                with queue._lock:
                    queue._pollers.discard(self)
            # A thread that still sleeps on the descriptors is woken, and frees them when it leaves.
            if self._waiters:
                os.eventfd_write(self._wake_fd, 1)
            else:
                self._free()

    def _on_forked(self) -> None:
        was_open = not self._closed
        super()._on_forked()
        if was_open:
            # The child's copies.
            self._free()

    def _free(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._closed = True
            self._free()
