"""Waiting for completion queues in an event loop of asyncio.

Each loop has one Poller for all queues that its tasks wait for. On Linux the loop itself watches the poller's
descriptor. Where the poller has no descriptor, a thread waits on it and wakes the loop.

A task polls, arms the queue, polls again, and only then waits for a notification. So a notification without a waiting
task may be forgotten: the next task polls first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ndpy.errors import ClosedError, NdpyError, TimeoutError, UnsupportedError
from ndpy.objects.completion import no_completion
from ndpy.objects.poller import Poller
from ndpy.objects.resource import Uncopied

if TYPE_CHECKING:
    from ndpy.objects.completion import Completion
    from ndpy.objects.completion_queue import CompletionQueue

# A task that always finds completions lets others run after so many calls.
_CALLS_AT_A_STRETCH = 16
_DAY_S = 86400.0


class _Pollers(threading.local):
    """The pollers of the loops that have run in this thread. The loop keeps its poller until it is closed."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopPoller]] = (
            weakref.WeakKeyDictionary()
        )


_pollers = _Pollers()


def poller_of_loop() -> LoopPoller:
    """The poller of the running loop. It is made at the first call, and ends with the loop."""
    loop, pollers = asyncio.get_running_loop(), _pollers.of
    reference = pollers.get(loop)
    found = None if reference is None else reference()
    if found is None or found.closed:
        found = LoopPoller(loop)
        pollers[loop] = weakref.ref(found)
    return found


class LoopPoller(Uncopied):
    """What the tasks of one loop wait with. Use it in the loop's thread only. The loop refers to it, and nothing else
    has to.
    """

    _has_thread = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._poller = Poller()
        self._poller._removed = set()
        #: The tasks that wait for a queue, the longest waiting first.
        self._waiting: dict[CompletionQueue, deque[asyncio.Future[None]]] = {}
        self._watching: dict[CompletionQueue, Callable[[], object]] = {}
        #: The descriptors of the queues that the loop watches itself.
        self._descriptors: dict[CompletionQueue, int] = {}
        self._calls = 0
        try:
            descriptor = self._poller.fileno()
        except UnsupportedError:
            arguments = (self._poller, weakref.ref(self), weakref.ref(loop))
            threading.Thread(target=_wait_for, args=arguments, name="ndpy-event-loop", daemon=True).start()
            self._has_thread = True
            self._stay(loop)
        else:
            # wake_tasks() looks at everything.
            self._poller._wakes_itself = False
            loop.add_reader(descriptor, self._on_readable)

    def _stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop keep it without a reader."""
        loop.call_later(_DAY_S, self._stay, loop)

    @property
    def closed(self) -> bool:
        return self._poller.closed

    def __del__(self) -> None:
        # The poller goes with this, or its thread closes it. That thread wakes up by itself if somebody else has the
        # lock.
        poller = self._poller if self._has_thread else None
        if poller is not None and poller._lock.acquire(blocking=False):
            try:
                if not poller.closed:
                    poller._native_wake()
            finally:
                poller._lock.release()

    def _on_readable(self) -> None:
        try:
            self._poller._native_wait(0.0)
        except ClosedError:
            # A queue was closed meanwhile, and its tasks have to learn of it.
            self.wake_tasks()
        else:
            self.wake_tasks()

    def wake_tasks(self) -> None:
        """Wake those who wait for queues that may have completions, or that were closed."""
        poller = self._poller
        with poller._lock:
            ready, poller._maybe_ready = poller._maybe_ready, set()
            removed, poller._removed = poller._removed, set()
        for queue in ready:
            self._wake(queue)
        for queue in removed or ():
            watcher = self._watching.pop(queue, None)
            if watcher is not None:
                watcher()
            for future in self._waiting.pop(queue, ()):
                if not future.done():
                    future.set_result(None)

    def _wake(self, queue: CompletionQueue) -> None:
        watcher = self._watching.get(queue)
        if watcher is not None:
            watcher()
        waiting = self._waiting.get(queue)
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def arm(self, queue: CompletionQueue) -> bool:
        """Ask for a notification, and look again. Returns whether the queue has completions."""
        poller = self._poller
        if queue not in poller._queues:
            poller.add(queue)
        return poller._arm(queue)

    def watch(self, queue: CompletionQueue, watcher: Callable[[Callable[[], object]], object]) -> None:
        """Call watcher(renew) now, after each notification of this queue, and once when it fails or is closed.

        The watcher calls renew() before it polls. This asks for the next notification, which comes only for later
        completions. Nobody else may wait for the queue.
        """
        if self._has_thread:
            call = functools.partial(watcher, functools.partial(self._renew, queue))
        else:
            # The loop watches the descriptor itself, because each level between the two costs some microseconds.
            call = functools.partial(watcher, queue._renew)
            self._poller._add_silently(queue)
            descriptor = self._descriptors[queue] = queue.fileno()
            asyncio.get_running_loop().add_reader(descriptor, call)
        self._watching[queue] = call
        call()

    def _renew(self, queue: CompletionQueue) -> None:
        """See watch(). Completions that the provider still has would end the notification at once."""
        if queue._failure is None:
            queue._retire_silent_requests()
        self.arm(queue)

    def unwatch(self, queue: CompletionQueue) -> None:
        """Stop that. Call it before the queue is closed."""
        self._watching.pop(queue, None)
        self._poller.remove(queue)
        descriptor = self._descriptors.pop(queue, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)

    async def wait(self, queue: CompletionQueue, timeout_s: float | None, max_entries: int) -> list[Completion]:
        """See CompletionQueue.wait_async()."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        self._calls += 1
        if self._calls >= _CALLS_AT_A_STRETCH:
            self._calls = 0
            await asyncio.sleep(0)
        while True:
            completions = queue.poll(max_entries)
            if not completions and self.arm(queue):
                completions = queue.poll(max_entries)
            if completions:
                # Another task may take the completions that this one has left.
                if queue in self._waiting:
                    self._wake(queue)
                return completions
            try:
                await self._sleep(loop, queue, deadline)
            except TimeoutError:
                raise no_completion(timeout_s, [queue]) from None

    async def _sleep(self, loop: asyncio.AbstractEventLoop, queue: CompletionQueue, deadline: float | None) -> None:
        future: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(queue, deque())
        waiting.append(future)
        timer = None if deadline is None else loop.call_at(deadline, _expire, future)
        self._calls = 0
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None and not loop.is_closed():
                # It was woken and cancelled at once. The completions are for another task.
                self._wake(queue)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            with contextlib.suppress(ValueError):
                waiting.remove(future)
            if not waiting and self._waiting.get(queue) is waiting:
                del self._waiting[queue]


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(TimeoutError("", operation="wait"))


def _wait_for(poller: Poller, owner: weakref.ref[LoopPoller], loop: weakref.ref[asyncio.AbstractEventLoop]) -> None:
    """The thread of a poller without a descriptor. It ends when the poller or the loop is closed."""
    with poller._lock:
        if poller.closed:
            return
        # close() leaves the native object to a waiting thread.
        poller._waiters += 1
    try:
        while not poller.closed:
            # A queue's failure is told to the task that polls the queue.
            with contextlib.suppress(NdpyError):
                poller._native_wait(None)
            if not _pass_on(owner, loop):
                break
    finally:
        with poller._lock:
            poller._waiters -= 1
            if poller.closed and not poller._waiters:
                poller._native_free()
        poller.close()


def _pass_on(owner: weakref.ref[LoopPoller], loop: weakref.ref[asyncio.AbstractEventLoop]) -> bool:
    """Wake the loop. Returns False if it has gone. In a function of its own, so that the thread keeps neither."""
    waker, running = owner(), loop()
    if waker is None or running is None:
        return False
    try:
        running.call_soon_threadsafe(waker.wake_tasks)
    except RuntimeError:
        # The loop is closed.
        return False
    return True
