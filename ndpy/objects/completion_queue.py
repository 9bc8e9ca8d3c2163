"""Completion queues: taking completions, waiting for them, and being notified of them.

A notification is one shot and comes only for completions after the arming. So whoever waits arms, looks again, and only
then sleeps. Any number of threads, Pendings of arm() and pollers may wait for one queue:

- A waiting thread has a waiter of its own. It sleeps on the waiter, and others wake it through the waiter.
- The adapter's thread ends a Pending of arm().
- A poller has its own native waiting (poller.py).

Sometimes completions have to be taken from the provider before the program asks for them. They are stored with the
queue (_drain()). The provider has forgotten them then, so arm() counts which of them have ended a notification already.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ndpy import _core, errors
from ndpy.objects.completion import Completion, PostedRequests, no_completion, requests_of_nobody
from ndpy.objects.memory import MemoryWindow
from ndpy.objects.native_steps import CompletionQueueSteps
from ndpy.objects.pending import Pending
from ndpy.objects.resource import AdapterObject, busy
from ndpy.objects.timeouts import seconds, timeout
from ndpy.vocabulary.flags import Capability, Notify, Operation, Status
from ndpy.vocabulary.placement import usable_processors

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.poller import Poller
    from ndpy.objects.xrc import XrcReceiveQueue

# Flags of struct ndpy_completion, as in cdefs/ndpy_abi.h.
_INTERNAL = 1
_FROM_SHARED_QUEUE = 2
_INVALIDATED = 4
_WRITTEN = 16
_SPECIAL = _INTERNAL | _INVALIDATED | _WRITTEN

_RECEIVE = int(Operation.RECEIVE)
_RECEIVE_RDMA_WITH_IMMEDIATE = int(Operation.RECEIVE_RDMA_WITH_IMMEDIATE)
_SUCCESS = int(Status.SUCCESS)
_CANCELED = int(Status.CANCELED)

# Room beyond the depth that the program asked for. Some silent requests are signaled, and their completions need a
# place too.
_SLACK = 64

# wait() polls so long before it sleeps.
_SPIN_S = 50e-6
# Shorter tries are not worth their cost.
_SHORTEST_SPIN_S = 2e-6

# How long close() waits until no thread waits for the queue.
_LEAVE_S = 5.0


class CompletionQueue(_core.CompletionQueue, AdapterObject, CompletionQueueSteps):
    """Holds the completions of requests. Made by Adapter.create_completion_queue(). Many threads may use it.

    If more completions arrive than the queue holds, it is overrun (contract G.3). It still gives what it kept. Then
    every call that takes completions or waits raises CompletionQueueOverrunError, and so do all calls of its queue
    pairs except close().

    Attributes:
        depth: how many completions the program asked it to hold.
        spin_s: for how long wait() polls at most before it sleeps. It polls for less while that finds nothing. 0: it
            does not.
    Source: IND2CompletionQueue; ibv_create_cq(3).
    """

    _release_order = 30

    def __init__(self, adapter: Adapter, depth: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        # On a single processor nothing would come meanwhile.
        self._spin_s = _SPIN_S if usable_processors() > 1 else 0.0
        #: For how long wait() polls next.
        self._present_spin_s = self._spin_s
        self._lock = _core.Lock()
        #: The provider's queue, and the extension module's record of it. None before the creation and after the close.
        self._cq: Any = None
        self._native: Any = None
        #: The key is the provider's number of the queue pair. The second value is the shared receive queue of the
        #: receives.
        self._shared_receivers: dict[int, tuple[PostedRequests, Any]] = {}
        #: The shared receive queues of XRC whose completions come here, by the name that these carry. None before the
        #: first one.
        self._xrc_queues: weakref.WeakValueDictionary[int, XrcReceiveQueue] | None = None
        #: How many queue pairs have their completions here.
        self._users = 0
        #: None before the first one. Use this only under the lock.
        self._pollers: weakref.WeakSet[Poller] | None = None
        #: The waiters that threads sleep on, and those that are free for the next threads.
        self._waiters: list[Any] = []
        self._idle_waiters: list[Any] = []
        #: close() waits on it until no thread waits for the queue.
        self._left: threading.Condition | None = None
        #: The Pendings of arm() that have not ended, the oldest first.
        self._armed: dict[Pending[None], Notify] = {}
        #: The number of the last completion that ended a notification. _taken counts in the same way.
        self._notified = 0
        #: None until the provider has given the queue up. Then it makes the exception to raise when nothing is left to
        #: take.
        self._failure: Callable[[], errors.NdpyError] | None = None

    def _create(self) -> None:
        """Called last by the platform's constructor."""
        try:
            self._native_create(self._native_depth(self.depth))
            provider, native = self._native_provider(), self._native
            self._attach(int(self._ffi.cast("uintptr_t", provider)), int(self._ffi.cast("uintptr_t", native)))
        except BaseException:
            self._native_free()
            raise
        self._opened()

    def _native_depth(self, depth: int) -> int:
        return min(depth + max(_SLACK, depth // 4), self._adapter.info.max_completion_queue_depth)

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = _core.Lock()
        self._left = None
        self._waiters = []
        self._armed = {}

    # ---- taking completions ----

    def _retire_silent_requests(self) -> None:
        """Store the provider's completions, and forget the silent requests that have ended. poll() takes the others."""
        with self._lock:
            if self._defunct is not None:
                return
            self._drain()
            news = self._collect_internal()
        self._tell_of_news(news)

    @staticmethod
    def _poll_error(number: int) -> errors.NdpyError:
        return errors.from_errno("poll", number)

    @staticmethod
    def _arm_error(number: int) -> errors.NdpyError:
        return errors.from_errno("arm", number)

    @staticmethod
    def _tell_of_news(news: list[tuple[PostedRequests, bool]]) -> None:
        for posted, failed in news:
            queue_pair = posted.queue_pair()
            if queue_pair is not None:
                queue_pair._on_failed_completion() if failed else queue_pair._on_message()

    def _drain(self) -> int:
        """Store the provider's completions. Returns how many the program can take. Under the lock."""
        added = self._native_drain(self._native)
        if added < 0:
            # A close() that one refusal interrupts would leave memory behind.
            added = self._native_drain(self._native)
        if added < 0:
            raise errors.from_errno("poll", -added)
        return self._undelivered()

    def _undelivered(self) -> int:
        """How many completions the program can take that the provider has handed over. Under the lock."""
        return len(self._kept) + int(self._native_undelivered(self._native))

    def _collect_one(self, entry: tuple[int, ...], news: list[tuple[PostedRequests, bool]]) -> Completion | None:
        """What the program gets for one struct ndpy_completion, or None. Under the lock.

        cdefs/core/completion_queue.c handles most completions by itself. Here come the failed ones, those of a shared
        receive queue, those of requests that change windows, and those of queue pairs that are watched.

        news: (requests, whether one has failed) is added to it. The queue pair handles these later, without the lock.
        """
        flags = entry[9]
        if flags & _FROM_SHARED_QUEUE:
            if flags & _INTERNAL:
                self._lose_window(entry)
                return None
            posted = self._take_shared(entry)
        else:
            posted = self._posted_requests[entry[6]]
            status, record = posted.retire(entry)
            if status != entry[3]:
                entry = (*entry[:3], status, *entry[4:])
            if entry[3] >= _CANCELED:
                entry = self._refine_status(entry, record, posted)
            if posted.stored:
                self._take_stored(posted, entry[6])
        if entry[3] > _CANCELED:
            news.append((posted, True))
        elif posted.watched and entry[2] == _RECEIVE and entry[3] == _SUCCESS:
            news.append((posted, False))
        if flags & _SPECIAL:
            if flags & _WRITTEN:
                entry = (*entry[:2], _RECEIVE_RDMA_WITH_IMMEDIATE, *entry[3:])
            elif flags & _INVALIDATED:
                queue_pair = posted.queue_pair()
                if queue_pair is not None:
                    queue_pair._on_window_lost(entry[5])
            else:
                return None
        return Completion(entry, posted)

    def _lose_window(self, entry: tuple[int, ...]) -> None:
        """The provider says that the peer has invalidated a window. The entry's slot is the window's serial number."""
        window = self._adapter._device._child(entry[8])
        if entry[3] == _SUCCESS and isinstance(window, MemoryWindow) and window._binding is not None:
            window._binding.end()

    def _take_stored(self, posted: PostedRequests, number: int) -> None:
        left = posted.stored.get(self._serial, 0) - 1
        if left > 0:
            posted.stored[self._serial] = left
        elif left == 0:
            del posted.stored[self._serial]
            posted.watched = bool(posted.stored)
            del self._posted_requests[number]

    def _take_shared(self, entry: tuple[int, ...]) -> PostedRequests:
        if entry[7]:
            queue = self._xrc_queues.get(entry[7]) if self._xrc_queues is not None else None
            if queue is None:
                return requests_of_nobody()
            queue._free_slot(entry[8])
            return queue._receiver_of(entry[6])
        posted, shared = self._shared_receivers[entry[6]]
        shared._free_slot(entry[8])
        if posted.stored_shared:
            posted.stored_shared -= 1
            if not posted.stored_shared:
                del self._shared_receivers[entry[6]]
        return posted

    # ---- waiting ----

    @property
    def spin_s(self) -> float:
        return self._spin_s

    @spin_s.setter
    def spin_s(self, spin_s: float) -> None:
        self._spin_s = seconds(spin_s, "spin_s")

    def wait(self, timeout_s: float | None = None, max_entries: int = 64) -> list[Completion]:
        """Wait until there are completions, and take some. Any number of threads may wait.

        No completion is missed, and none is seen twice. close() ends the wait.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
            max_entries: how many completions to take at most. At least 1.
        Returns: at least one completion, the oldest first.
        Raises:
            ValueError: max_entries is less than 1.
            TimeoutError: there was no completion within timeout_s seconds.
            ClosedError: the queue was closed.
            CompletionQueueOverrunError: more completions arrived than the queue holds.
            DeviceRemovedError: the adapter has gone.
        """
        timeout_s = timeout(timeout_s)
        completions = self.poll(max_entries)
        if completions:
            return completions
        if max_entries < 1:
            raise ValueError(f"wait() takes at least one completion, not {max_entries}")
        began = time.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        if self._spin_s and self._present_spin_s:
            spin_s = min(self._present_spin_s, self._spin_s, math.inf if timeout_s is None else timeout_s)
            completions = self.poll(max_entries, spin_s=spin_s)
            if completions:
                return completions
        while True:
            if not self._native_sleep(deadline):
                raise no_completion(timeout_s, [self])
            completions = self.poll(max_entries)
            if completions:
                if self._spin_s:
                    self._learn_to_spin(time.monotonic() - began)
                if self._waiters:
                    self._wake_another_waiter()
                return completions
            # Another thread has taken the completions, and may take the next ones too.
            if deadline is not None and time.monotonic() >= deadline:
                raise no_completion(timeout_s, [self])

    async def wait_async(self, timeout_s: float | None = None, max_entries: int = 64) -> list[Completion]:
        """Do what wait() does, in a task of asyncio. Any number of tasks and threads may wait.

        Cancelling it loses no completion. If there are completions already, it returns without letting other tasks run,
        up to 16 times in a row.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
            max_entries: how many completions to take at most. At least 1.
        Returns: at least one completion, the oldest first.
        Raises:
            UnsupportedError: the queue was made with overlapped_file.
            Otherwise what wait() raises.
        """
        from ndpy.objects.event_loop import poller_of_loop

        if max_entries < 1:
            raise ValueError(f"wait_async() takes at least one completion, not {max_entries}")
        return await poller_of_loop().wait(self, timeout(timeout_s), max_entries)

    async def __aiter__(self) -> AsyncIterator[list[Completion]]:
        """Yield completions as they come, several at a time, until the queue is closed."""
        while True:
            try:
                completions = await self.wait_async()
            except errors.ClosedError:
                return
            yield completions

    def _learn_to_spin(self, slept_s: float) -> None:
        """A wait() had to sleep. Choose for how long the next one polls."""
        if slept_s < 2 * self._spin_s:
            self._present_spin_s = self._spin_s
        elif self._present_spin_s:
            half = self._present_spin_s / 2
            self._present_spin_s = half if half > _SHORTEST_SPIN_S else 0.0

    def _wake_another_waiter(self) -> None:
        """Wake another waiting thread. It looks for the completions that this thread has left."""
        if self._waiters:
            with self._lock:
                if self._waiters:
                    self._native_wake(self._waiters[0])

    def _wake_all(self) -> None:
        """Wake everyone who waits. Completions came without a notification, or the state has changed."""
        with self._lock:
            ended = self._take_armed() if self._native is not None and self._count_stored() else []
        self._end_and_wake(ended)

    def _count_stored(self) -> int:
        """How many stored completions the program can take. The provider does not notify of these. Under the lock."""
        return self._undelivered()

    def _end_and_wake(self, ended: list[Pending[None]], waiter: Any = None) -> None:
        """End these Pendings, and wake the waiting threads and pollers. `waiter` is what the caller's thread waits
        with, or its
        poller: it looks at the queue itself.
        """
        for pending in ended:
            pending.succeed(None)
        with self._lock:
            for other in self._waiters:
                if other != waiter:
                    self._native_wake(other)
            pollers = self._pollers
            is_only_one = pollers and len(pollers) == 1 and waiter in pollers
            marked = [waiter] if is_only_one else list(pollers or ())
        for poller in marked:
            poller._mark_ready(self, waiter)

    # ---- notifications ----

    def arm(self, kind: Notify = Notify.ANY) -> Pending[None]:
        """Ask for one notification of the next completion of a kind. A failed one satisfies ANY and SOLICITED.

        Completions that came after the queue was last found empty satisfy it at once. Those that ended an earlier
        notification do not (contract G.2). On Linux a wait() may leave the queue armed for any completion. Then the
        next message that is not solicited ends a SOLICITED request too.

        Parameters:
            kind: what the notification is for. See Notify.
        Returns: a Pending that ends with None.
        Raises:
            UnsupportedError: the queue was made with overlapped_file; use notify().
            CompletionQueueOverrunError: more completions arrived than the queue holds.
        Source: IND2CompletionQueue::Notify; ibv_req_notify_cq(3).
        """
        self._check()
        kind = Notify(kind)
        pending: Pending[None] = self._adapter._pending_type("arm", lambda: self._give_up(pending))
        with self._lock:
            self._check()
            if self._failure is not None:
                raise self._failure()
            if self._native_arm(kind, pending):
                pending.succeed(None)
            else:
                self._armed[pending] = kind
        return pending

    def _give_up(self, pending: Pending[None]) -> None:
        with self._lock:
            self._armed.pop(pending, None)

    def _take_armed(self) -> list[Pending[None]]:
        """Remove the Pendings that completions end, and return them. Under the lock."""
        ended = [pending for pending, kind in self._armed.items() if kind is not Notify.ERRORS]
        for pending in ended:
            del self._armed[pending]
        return ended

    def _fail_armed(self, failure: Callable[[], errors.NdpyError]) -> None:
        with self._lock:
            ended, self._armed = list(self._armed), {}
        for pending in ended:
            pending.fail(failure())

    def _notify_of_stored(self) -> bool:
        """Whether a stored completion has not ended a notification yet.
        From now on all stored ones count as notified.
        """
        last = self._taken + self._undelivered()
        if last <= max(self._notified, self._taken):
            return False
        self._notified = last
        return True

    def fileno(self) -> int:
        """The file descriptor of the completion channel, for programs with an event loop of their own. Use arm() with
        it.

        Raises:
            UnsupportedError: on Windows, where notify() serves such programs.
        """
        raise self._unsupported("fileno", "has no file descriptor; use notify() or Poller.completion_port")

    def notify(self, kind: Notify = Notify.ANY) -> int:
        """Ask for one packet on the program's own completion port. The queue has to be made with overlapped_file.

        One packet is outstanding at a time.

        Parameters:
            kind: what the packet is for. See Notify.
        Returns: the address of the OVERLAPPED that the packet will carry, or 0 if there are completions already. Then
            no packet comes.
        Raises:
            DeviceBusyError: the packet of an earlier call has not come yet.
            UnsupportedError: on Linux, where fileno() serves such programs. Or the queue was made without
                overlapped_file.
        Source: IND2CompletionQueue::Notify (contract G.2).
        """
        raise self._unsupported("notify", "reports to no completion port; use fileno() or Poller.fileno()")

    def _unsupported(self, operation: str, reason: str) -> errors.NdpyError:
        self._check()
        return errors.UnsupportedError(f"a completion queue of {self._adapter.info.name} {reason}", operation=operation)

    # ---- changes ----

    def resize(self, depth: int) -> None:
        """Change how many completions it holds, while it is in use (contract G.4).

        Parameters:
            depth: how many, 1 to info.max_completion_queue_depth.
        Raises:
            LimitExceededError: depth is beyond the adapter's limit, or below the number of completions in the queue.
            UnsupportedError: the adapter lacks Capability.RESIZE_COMPLETION_QUEUE.
        Source: IND2CompletionQueue::Resize; ibv_resize_cq(3).
        """
        self._check()
        info = self._adapter.info
        if not 1 <= depth <= info.max_completion_queue_depth:
            raise errors.LimitExceededError(
                f"a completion queue of {info.name} holds 1 to {info.max_completion_queue_depth}, not {depth}"
            )
        self._adapter._require(Capability.RESIZE_COMPLETION_QUEUE, "resize")
        with self._lock:
            self._check()
            waiting = self._drain()
            if waiting > depth:
                raise errors.LimitExceededError(f"{waiting} completions wait in the queue; it cannot shrink to {depth}")
            self._native_resize(self._native_depth(depth))
            self.depth = depth

    def _on_failure(self, failure: Callable[[], errors.NdpyError]) -> None:
        """The provider has given the queue up, with its queue pairs. Not called under locks. failure: makes the
        exception.
        """
        for queue_pair in self._queue_pairs():
            # A poll that raises tells that posting is refused.
            queue_pair._refuse_calls(failure)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        self._fail_armed(failure)
        for queue_pair in self._queue_pairs():
            queue_pair._on_queue_failed()
        self._end_and_wake([])

    def _overrun_error(self, native: int = 0, native_name: str = "") -> errors.NdpyError:
        return errors.CompletionQueueOverrunError(
            f"more completions arrived than this queue of depth {self.depth} holds; some are lost, and its queue pairs "
            f"are "
            "unusable: close them, and create the queue with room for all requests that are outstanding at once",
            operation="completion queue",
            native=native,
            native_name=native_name,
        )

    def _on_removed(self) -> None:
        self._fail_armed(self._removed_error)
        self._end_and_wake([])

    # ---- the end ----

    def _queue_pairs(self) -> list[Any]:
        """The queue pairs that have their completions here."""
        children = self._adapter._device._open_children()
        return [child for child in children if self in getattr(child, "_completion_queues", ())]

    def _refuse_if_used(self) -> None:
        if self._users:
            raise busy(self, [queue_pair._describe() for queue_pair in self._queue_pairs()])

    def _release(self) -> None:
        with self._lock:
            self._defunct = self._closed_error
            for waiter in self._waiters:
                self._native_wake(waiter)
            # The waiters' handles are freed after this, and the system may give their numbers to others.
            self._left = threading.Condition(self._lock)  # type: ignore[arg-type]
            have_left = self._left.wait_for(lambda: not self._waiters, _LEAVE_S)
            pollers = list(self._pollers or ()) if have_left else []
        if not have_left:
            self._resume_waiting([])
            raise errors.DeviceBusyError("a thread waits on the queue and does not leave", operation="close")
        for poller in pollers:
            poller.remove(self)
        try:
            self._native_end_requests()
            # In another thread, a queue pair that was just closed may be waking this queue.
            with self._lock:
                self._native_free()
        finally:
            if self._cq is None:
                self._fail_armed(lambda: errors.CanceledError("the completion queue was closed", operation="arm"))
            else:
                self._resume_waiting(pollers)

    def _resume_waiting(self, pollers: list[Poller]) -> None:
        """A close has failed. Pendings and pollers wait as before."""
        self._mark_still_open()
        ended: list[Pending[None]] = []
        if self._defunct is None:
            try:
                with self._lock:
                    ended = self._native_rearm()
            except errors.NdpyError as failure:
                self._fail_armed(partial(copy.copy, failure))
        self._end_and_wake(ended)
        for poller in pollers:
            with contextlib.suppress(errors.NdpyError):
                poller.add(self)

    def _describe(self) -> str:
        return f"CompletionQueue of depth {self.depth}"
