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
    """Waits for any of its completion queues, which may be of several adapters.

    One thread waits at a time; add(), remove(), wake() and close() may be called from any other. Connection and device
    events are handled by each adapter's own thread and need no poller.
    """

    # A queue is looked at when it was added, delivered something, or had a notification. One that has nothing is armed and
    # looked at once more before it counts as idle, because a notification comes only for completions after the arming.

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
        #: With what _native_add() returned for each.
        self._queues: dict[CompletionQueue, Any] = {}
        self._maybe_ready: set[CompletionQueue] = set()
        self._woken = False
        self._waiters = 0
        tell(self)

    def _on_forked(self) -> None:
        """This is a forked child: nothing may reach the parent's descriptors."""
        self._lock = threading.RLock()
        self._closed = self._forked = True
        self._queues, self._maybe_ready = {}, set()

    def add(self, completion_queue: CompletionQueue) -> None:
        """Wait for this queue too; harmless when repeated. What it holds already is delivered by the next wait()."""
        # Under the queue's lock: one that is being closed leaves its pollers once nobody can add it any more.
        with self._lock, completion_queue._lock:
            self._check()
            completion_queue._check()
            if completion_queue not in self._queues:
                self._queues[completion_queue] = self._native_add(completion_queue)
                completion_queue._pollers.add(self)
        self._mark_ready(completion_queue)

    def remove(self, completion_queue: CompletionQueue) -> None:
        """Wait for it no more; harmless if it was not added. Closing a queue removes it."""
        with self._lock:
            if completion_queue not in self._queues:
                return
            self._native_remove(completion_queue, self._queues.pop(completion_queue))
            self._maybe_ready.discard(completion_queue)
            with completion_queue._lock:
                completion_queue._pollers.discard(self)

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        """Wait until queues have completions, and take up to 64 of each.

        Returns an empty list after wake(). Raises TimeoutError after timeout_s seconds, ClosedError when closed.
        """
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
                # Closed while it was looked at; closing removes it.
                continue
            except NdpyError:
                # One queue's trouble must not cost the others what they have; it is told when nothing else is to be.
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
        """Make the present or next wait() return; safe from any thread and from a signal handler."""
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
        """Stop; a waiting thread gets ClosedError. The completion queues are not closed."""
        with self._lock:
            if self._closed:
                return
            queues = self._stop()
            for queue in queues:
                with queue._lock:
                    queue._pollers.discard(self)
            # A thread that still waits natively is woken, and frees what it waits on when it leaves.
            if self._waiters:
                self._native_wake()
            else:
                self._native_free()

    def _stop(self) -> list[CompletionQueue]:
        """Nothing is waited for any more; returns what was."""
        self._closed = True
        queues, self._queues = self._queues, {}
        self._maybe_ready.clear()
        for queue, watched in queues.items():
            self._native_remove(queue, watched)
        return list(queues)

    def __del__(self) -> None:
        # No lock of a queue: the finalizer may run in a thread that holds it.
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
        """Get ready to be notified of this queue; what _native_remove() needs. Under both locks."""
        raise NotImplementedError

    def _native_remove(self, queue: CompletionQueue, watched: Any) -> None:
        """Its notifications no longer come here."""
        raise NotImplementedError

    def _native_arm(self, queue: CompletionQueue, watched: Any) -> bool:
        """Ask for one notification of the queue; whether it has completions already. Under the queue's lock."""
        raise NotImplementedError

    def _native_wait(self, deadline: float | None) -> bool:
        """Wait for notifications or _native_wake(), and note which queues to look at; False at the deadline."""
        raise NotImplementedError

    def _native_wake(self) -> None:
        """Make the present or next _native_wait() return."""
        raise NotImplementedError

    def _native_free(self) -> None:
        """Free what the poller waits on."""
        raise NotImplementedError
