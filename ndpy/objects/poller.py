"""Waiting for many completion queues at once."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ndpy._core import Uncopied
from ndpy.errors import ClosedError, NdpyError, UnsupportedError
from ndpy.objects.completion import no_completion
from ndpy.objects.native_steps import PollerSteps
from ndpy.objects.timeouts import seconds, timeout
from ndpy.vocabulary.forking import renew_in_child

if TYPE_CHECKING:
    from ndpy.objects.completion import Completion
    from ndpy.objects.completion_queue import CompletionQueue

P = TypeVar("P", bound="Poller")


class Poller(Uncopied, PollerSteps):
    """Waits for any of its completion queues. They may belong to several adapters.

    Only one thread may wait at a time. Any other thread may call add(), remove(), wake() and close(). Connections and
    device events need no poller, because each adapter's own thread handles them.

    Parameters:
        spin_s: for how long wait() looks again and again before it sleeps. This costs a processor, and answers sooner.
    Source: epoll(7) and ibv_get_cq_event(3); GetQueuedCompletionStatus and IND2CompletionQueue::Notify.
    """

    # A queue is polled after it was added, after it delivered something, and after a notification. If it has nothing,
    # it is armed and polled once more, because a notification comes only for completions after the arming.

    #: Returns the platform's class; ndpy/platforms/__init__.py sets it.
    _implementation: ClassVar[Callable[[], type[Any]]]

    def __new__(cls: type[P], *, spin_s: float = 0.0) -> P:
        if cls is Poller:
            cls = cls._implementation()
        return super().__new__(cls)

    def __init__(self, *, spin_s: float = 0.0) -> None:
        self._spin_s = seconds(spin_s, "spin_s")
        # Reentrant, so that a signal handler may call wake() in a thread that holds the lock.
        self._lock = threading.RLock()
        self._closed = False
        self._forked = False
        #: The queues, each with the result of _native_add(). None: see _add_silently().
        self._queues: dict[CompletionQueue, Any] = {}
        #: The queues to poll next.
        self._maybe_ready: set[CompletionQueue] = set()
        #: The queues that were removed since the last look, for an event loop that looks. None: nobody looks.
        self._removed: set[CompletionQueue] | None = None
        self._woken = False
        #: Whether an event that this poller handles makes its descriptor readable again.
        self._wakes_itself = False
        self._waiters = 0
        renew_in_child(self)

    def _on_forked(self) -> None:
        """Close it in a forked child, without touching the parent's descriptors."""
        self._lock = threading.RLock()
        self._closed = self._forked = True
        self._queues, self._maybe_ready = {}, set()

    def add(self, completion_queue: CompletionQueue) -> None:
        """Wait for this queue too. Harmless if it was added before.

        The next wait() also delivers completions that the queue has already.

        Parameters:
            completion_queue: a queue of any adapter.
        Raises:
            ClosedError: the poller or the queue is closed.
            UnsupportedError: the queue was made with overlapped_file.
        """
        self._add(completion_queue, self._native_add)

    def _add_silently(self, completion_queue: CompletionQueue) -> None:
        """Hear of its failure and of its end, but not of its notifications."""
        self._add(completion_queue, lambda _: None)

    def _add(self, completion_queue: CompletionQueue, add: Callable[[CompletionQueue], Any]) -> None:
        # Hold the queue's lock. A queue that is being closed leaves its pollers, and nobody may add it after that.
        with self._lock, completion_queue._lock:
            self._check()
            completion_queue._check()
            if completion_queue not in self._queues:
                self._queues[completion_queue] = add(completion_queue)
                if completion_queue._pollers is None:
                    completion_queue._pollers = weakref.WeakSet()
                completion_queue._pollers.add(self)
        self._mark_ready(completion_queue)

    def remove(self, completion_queue: CompletionQueue) -> None:
        """Stop waiting for this queue. Harmless if it was not added. Closing a queue removes it too.

        Parameters:
            completion_queue: a queue of any adapter.
        """
        with self._lock:
            if completion_queue not in self._queues:
                return
            watched = self._queues.pop(completion_queue)
            if watched is not None:
                self._native_remove(completion_queue, watched)
            self._maybe_ready.discard(completion_queue)
            with completion_queue._lock:
                if completion_queue._pollers is not None:
                    completion_queue._pollers.discard(self)
            if self._removed is not None:
                self._removed.add(completion_queue)
                self._native_wake()

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        """Wait until queues have completions, and take up to 64 from each queue.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Returns: the queues that have completions, each with its completions. An empty list after wake().
        Raises:
            TimeoutError: there was no completion within timeout_s seconds.
            ClosedError: the poller was closed.
            CompletionQueueOverrunError, DeviceRemovedError: a queue failed, as in CompletionQueue.wait().
        """
        timeout_s = timeout(timeout_s)
        now = time.monotonic()
        deadline = None if timeout_s is None else now + timeout_s
        spin_until = now + (self._spin_s if timeout_s is None else min(self._spin_s, timeout_s))
        counted = False
        try:
            with self._lock:
                self._check()
                self._waiters += 1
                counted = True
            while True:
                ready = self._collect()
                with self._lock:
                    # Deliver completions that were taken even if the poller was closed meanwhile. Nobody else gets
                    # them.
                    if not ready:
                        self._check()
                    woken, self._woken = self._woken, False
                if ready or woken:
                    return ready
                if self._spin_s and (now := time.monotonic()) < spin_until:
                    self._native_wait(now)
                elif not self._native_wait(deadline):
                    with self._lock:
                        queues = list(self._queues)
                    raise no_completion(timeout_s, queues)
        finally:
            if counted:
                with self._lock:
                    self._waiters -= 1
                    if self._closed and not self._waiters:
                        self._native_free()

    def _collect(self) -> list[tuple[CompletionQueue, list[Completion]]]:
        candidates: set[CompletionQueue] = set()
        ready: list[tuple[CompletionQueue, list[Completion]]] = []
        try:
            with self._lock:
                self._check()
                candidates, self._maybe_ready = self._maybe_ready, candidates
            for queue in list(candidates):
                try:
                    completions = queue.poll()
                    if not completions and self._arm(queue):
                        completions = queue.poll()
                except ClosedError:
                    # The queue is being closed, and that removes it.
                    completions = []
                except NdpyError:
                    # Deliver the other queues' completions first. The next wait() polls this queue again and raises.
                    if ready:
                        return ready
                    candidates.discard(queue)
                    raise
                if completions:
                    ready.append((queue, completions))
                else:
                    candidates.discard(queue)
        finally:
            # The next wait() polls the others, also after Ctrl-C.
            with self._lock:
                self._maybe_ready |= candidates
                self._maybe_ready &= self._queues.keys()
        return ready

    def _arm(self, queue: CompletionQueue) -> bool:
        """Ask for a notification and look again. Returns whether the queue has completions."""
        with self._lock:
            if queue not in self._queues:
                return False
            watched = self._queues[queue]
        with queue._lock:
            queue._check()
            if queue._failure is not None:
                return True
            satisfied = self._native_arm(queue, watched)
            waiting = queue._drain()
        if satisfied:
            # No notification will come, and another thread may have taken the completion that satisfied this one.
            self._mark_ready(queue)
        return bool(waiting)

    def _mark_ready(self, queue: CompletionQueue, by: object = None) -> None:
        """Poll the queue next. It may have completions for which no notification comes.

        by: the poller whose thread does this, and looks at the queue itself.
        """
        with self._lock:
            if not self._closed and queue in self._queues:
                self._maybe_ready.add(queue)
                if by is not self or self._wakes_itself:
                    self._native_wake()

    def wake(self) -> None:
        """Make the present or the next wait() return. Safe in any thread and in a signal handler."""
        with self._lock:
            if not self._closed:
                self._woken = True
                self._native_wake()

    def fileno(self) -> int:
        """Return the file descriptor of an epoll. It is readable when wait() has something to do.

        Raises:
            UnsupportedError: on Windows. Use completion_port.
        """
        self._check()
        raise UnsupportedError("a poller has no file descriptor on Windows; use completion_port", operation="fileno")

    @property
    def completion_port(self) -> int:
        """The handle of the completion port, for programs that wait for it together with other things.

        Raises:
            UnsupportedError: on Linux. Use fileno().
        """
        self._check()
        raise UnsupportedError("a poller has no completion port on Linux; use fileno()", operation="completion_port")

    def close(self) -> None:
        """Stop. A waiting thread gets ClosedError. The completion queues stay open."""
        with self._lock:
            if self._closed:
                return
            queues = self._stop()
            try:
                for queue in queues:
                    with queue._lock:
                        if queue._pollers is not None:
                            queue._pollers.discard(self)
            finally:
                # If a thread still waits, it frees the native object when it leaves.
                if self._waiters:
                    self._native_wake()
                else:
                    self._native_free()

    def _stop(self) -> list[CompletionQueue]:
        """Stop waiting for queues. Returns the queues that were added."""
        self._closed = True
        queues, self._queues = self._queues, {}
        self._maybe_ready.clear()
        for queue, watched in queues.items():
            if watched is not None:
                self._native_remove(queue, watched)
        return list(queues)

    def __del__(self) -> None:
        # Do not take the queues' locks: the finalizer may run in a thread that holds one.
        if not getattr(self, "_closed", True):
            # Ctrl-C may have kept a queue that was closed from leaving.
            with contextlib.suppress(OSError):
                self._stop()
            self._native_free()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def spin_s(self) -> float:
        return self._spin_s

    @spin_s.setter
    def spin_s(self, spin_s: float) -> None:
        self._spin_s = seconds(spin_s, "spin_s")

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
        # The garbage collector may be closing the generator or coroutine of the block. Then the finalizer stops the
        # poller.
        if kind is not GeneratorExit:
            self.close()
