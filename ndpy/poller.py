"""Waiting for many completion queues at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from ndpy.completion import Completion
from ndpy.completion_queue import CompletionQueue
from ndpy.errors import ClosedError, NdpyError, TimeoutError, UnsupportedError
from ndpy.forking import tell

P = TypeVar("P", bound="Poller")


class Poller:
    """Waits for any of its completion queues. They may be of several adapters.

    One thread waits at a time. Any other thread may call add(), remove(), wake() and close(). Connections and device events need
    no poller, since each adapter's own thread handles them.
    """

    # A queue is polled when it was added, when it delivered something, and when it had a notification. If it has nothing, it is
    # armed and polled once more, because a notification comes only for completions after the arming.

    #: The platform's class; ndpy/platforms.py says how to find it.
    _implementation: ClassVar[Callable[[], type[Any]]]

    def __new__(cls: type[P]) -> P:
        if cls is Poller:
            cls = cls._implementation()
        return super().__new__(cls)

    def __init__(self) -> None:
        # Reentrant, so that a signal handler may call wake() in a thread that holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._forked = False
        #: For each what _native_add() returned.
        self._queues: dict[CompletionQueue, Any] = {}
        #: Those to poll next.
        self._maybe_ready: set[CompletionQueue] = set()
        self._woken = False
        self._waiters = 0
        tell(self)

    def _on_forked(self) -> None:
        """In a forked child, where nothing may reach the parent's descriptors."""
        self._lock = threading.RLock()
        self._closed = self._forked = True
        self._queues, self._maybe_ready = {}, set()

    def add(self, completion_queue: CompletionQueue) -> None:
        """Wait for this queue too. The next wait() delivers what it holds already. Does nothing if it was added before.

        Raises:
            ClosedError: the poller or the queue is closed.
            UnsupportedError: the queue was made with overlapped_file.
        """
        # Under the queue's lock, because a queue that is being closed leaves its pollers when nobody can add it any more.
        with self._lock, completion_queue._lock:
            self._check()
            completion_queue._check()
            if completion_queue not in self._queues:
                self._queues[completion_queue] = self._native_add(completion_queue)
                completion_queue._pollers.add(self)
        self._mark_ready(completion_queue)

    def remove(self, completion_queue: CompletionQueue) -> None:
        """Wait for this queue no more. Does nothing if it was not added. Closing a queue removes it."""
        with self._lock:
            if completion_queue not in self._queues:
                return
            self._native_remove(completion_queue, self._queues.pop(completion_queue))
            self._maybe_ready.discard(completion_queue)
            with completion_queue._lock:
                completion_queue._pollers.discard(self)

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        """Wait until queues have completions, and take up to 64 of each.

        Parameters:
            timeout_s: how long to wait; None is for ever.
        Returns: the queues that have completions, each with these; an empty list after wake().
        Raises:
            TimeoutError: there were none in that time.
            ClosedError: the poller was closed.
            CompletionQueueOverrunError, DeviceRemovedError: of a queue, as from CompletionQueue.wait().
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._check()
            self._waiters += 1
        try:
            while True:
                ready = self._collect()
                with self._lock:
                    # What was taken is delivered even if the poller was closed meanwhile, because nobody else gets it.
                    if not ready:
                        self._check()
                    woken, self._woken = self._woken, False
                if ready or woken:
                    return ready
                if not self._native_wait(deadline):
                    raise TimeoutError("no completion within the time allowed", operation="wait")
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    self._native_free()

    def _collect(self) -> list[tuple[CompletionQueue, list[Completion]]]:
        with self._lock:
            self._check()
            candidates, self._maybe_ready = self._maybe_ready, set()
        ready: list[tuple[CompletionQueue, list[Completion]]] = []
        while candidates:
            queue = candidates.pop()
            try:
                completions = queue.poll()
                if not completions and self._arm(queue):
                    completions = queue.poll()
            except ClosedError:
                # It is being closed, which removes it.
                continue
            except NdpyError:
                # The others' completions are delivered first. The next wait() polls this one again and raises.
                with self._lock:
                    self._maybe_ready |= candidates | ({queue} if ready else set())
                    self._maybe_ready &= self._queues.keys()
                if ready:
                    return ready
                raise
            if completions:
                ready.append((queue, completions))
                with self._lock:
                    if queue in self._queues:
                        self._maybe_ready.add(queue)
        return ready

    def _arm(self, queue: CompletionQueue) -> bool:
        """Ask for a notification and look again; whether the queue has completions."""
        with self._lock:
            if queue not in self._queues:
                return False
            watched = self._queues[queue]
        with queue._lock:
            queue._check_usable()
            satisfied = self._native_arm(queue, watched)
            waiting = queue._drain()
        if satisfied:
            # Nothing is asked for, and another thread may have taken what satisfied it.
            self._mark_ready(queue)
        return bool(waiting)

    def _mark_ready(self, queue: CompletionQueue) -> None:
        """The queue may have completions of which no notification tells."""
        with self._lock:
            if not self._closed and queue in self._queues:
                self._maybe_ready.add(queue)
                self._native_wake()

    def wake(self) -> None:
        """Make the present or the next wait() return. Safe in any thread and in a signal handler."""
        with self._lock:
            if not self._closed:
                self._woken = True
                self._native_wake()

    def fileno(self) -> int:
        """The file descriptor of an epoll that is readable when wait() has something to do.

        Raises:
            UnsupportedError: on Windows; use completion_port.
        """
        self._check()
        raise UnsupportedError("a poller has no file descriptor on Windows; use completion_port", operation="fileno")

    @property
    def completion_port(self) -> int:
        """The handle of the completion port, for programs that wait for it together with what is theirs.

        Raises:
            UnsupportedError: on Linux; use fileno().
        """
        self._check()
        raise UnsupportedError("a poller has no completion port on Linux; use fileno()", operation="completion_port")

    def close(self) -> None:
        """Stop. A waiting thread gets ClosedError. The completion queues stay open."""
        with self._lock:
            if self._closed:
                return
            queues = self._stop()
            for queue in queues:
                with queue._lock:
                    queue._pollers.discard(self)
            # A thread that still waits frees what it waits on when it leaves.
            if self._waiters:
                self._native_wake()
            else:
                self._native_free()

    def _stop(self) -> list[CompletionQueue]:
        """Wait for nothing any more; returns the queues that were added."""
        self._closed = True
        queues, self._queues = self._queues, {}
        self._maybe_ready.clear()
        for queue, watched in queues.items():
            self._native_remove(queue, watched)
        return list(queues)

    def __del__(self) -> None:
        # Without the queues' locks, because the finalizer may run in a thread that holds one.
        if not getattr(self, "_closed", True):
            self._stop()
            self._native_free()

    @property
    def closed(self) -> bool:
        return self._closed

    def _check(self) -> None:
        if self._forked:
            raise ClosedError(
                "the poller is the parent process's and does not work in a forked child; make another one"
            )
        if self._closed:
            raise ClosedError("the poller is closed")

    def __enter__(self: P) -> P:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what the platform does ----

    def _native_add(self, queue: CompletionQueue) -> Any:
        """Get ready for notifications of this queue; returns what _native_remove() needs. Under both locks."""
        raise NotImplementedError

    def _native_remove(self, queue: CompletionQueue, watched: Any) -> None:
        """Get no more notifications of this queue."""
        raise NotImplementedError

    def _native_arm(self, queue: CompletionQueue, watched: Any) -> bool:
        """Ask for one notification of the queue; whether it has completions already. Under the queue's lock."""
        raise NotImplementedError

    def _native_wait(self, deadline: float | None) -> bool:
        """Wait for notifications or _native_wake(), and note which queues to poll; False at the deadline."""
        raise NotImplementedError

    def _native_wake(self) -> None:
        """Make the present or next _native_wait() return."""
        raise NotImplementedError

    def _native_free(self) -> None:
        """Free what the poller waits on."""
        raise NotImplementedError
