"""Completion queues, and how waiting for them works on Windows.

Notify is one shot, any number may be outstanding, and each ends for the next completion (contract G.2). A wait() uses a
request of its own that sets an event and brings no packet, so nothing stands between the provider and the waiting thread.
A request that was armed and not needed stays armed for the next wait(): cancelling it would cancel all others as well.
arm() goes through the adapter's thread, a poller's requests through the poller's own port (poller.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Capability, Notify
from ndpy.networkdirect.native_calls import (
    BUFFER_OVERFLOW,
    CANCELED,
    PENDING,
    SUCCESS,
    check,
    create,
    ffi,
    lib,
    release,
    status_error,
)
from ndpy.networkdirect.overlapped import OverlappedPending, Request, cancel_all, wait_for_event
from ndpy.pending import Pending

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter

# Room beyond the depth asked for: completions of silent requests that are signaled now and then take a place too.
_SLACK = 64


class NetworkDirectCompletionQueue(CompletionQueue):
    _adapter: NetworkDirectAdapter
    _poll_native = staticmethod(lib.ndpy_poll)
    _poll_internal = staticmethod(lib.ndpy_poll_internal)
    _drain_native = staticmethod(lib.ndpy_drain)

    def __init__(self, adapter: NetworkDirectAdapter, depth: int, overlapped_file: int | None = None) -> None:
        super().__init__(adapter, depth)
        self._own_file = overlapped_file is not None
        self._own_request: Request | None = None
        #: Every Notify that the provider may hold.
        self._requests: set[Request] = set()
        self._idle_waiters: list[Request] = []
        self._waiting: list[Request] = []
        self._no_waiters = threading.Condition(self._lock)
        self._armed: dict[Request, Pending[None]] = {}
        #: What those of arm() that the provider holds ask for; one that is not in _armed was given up.
        self._kinds: dict[Request, Notify] = {}
        # The last completion kept here that ended a notification, counted since creation as _taken is.
        self._notified = 0
        #: Slots of closed queue pairs that the provider has not given back; they go with the queue.
        self._freed_with_queue: list[Any] = []
        file = adapter._file if overlapped_file is None else ffi.cast("void *", overlapped_file)
        self._cq = self._new_native(file, self._native_depth(depth))
        self._native = lib.ndpy_completion_queue_new(self._cq)
        if self._native == ffi.NULL:
            release(self._cq)
            raise errors.InsufficientResourcesError("out of memory", operation="create completion queue")
        self._opened()

    def _new_native(self, file: Any, depth: int) -> Any:
        return create(
            "create completion queue",
            "IND2CompletionQueue",
            lib.IND2Adapter_CreateCompletionQueue,
            self._adapter._native,
            file,
            depth,
            0,
            0,
        )

    def _notify_native(self, kind: int, overlapped: Any) -> int:
        return int(lib.IND2CompletionQueue_Notify(self._cq, kind, overlapped))

    def _resize_native(self, depth: int) -> int:
        return int(lib.IND2CompletionQueue_Resize(self._cq, depth))

    def _native_depth(self, depth: int) -> int:
        return min(depth + max(_SLACK, depth // 4), self._adapter.info.max_completion_queue_depth)

    def _new_entries(self, count: int) -> tuple[Any, memoryview]:
        entries = ffi.new("struct ndpy_completion[]", count)
        return entries, memoryview(ffi.buffer(entries))

    def _drain(self) -> int:
        """Take what the provider has; returns how many completions wait to be taken."""
        added = self._drain_native(self._native)
        if added < 0:
            raise errors.from_errno("poll", -added)
        return int(lib.ndpy_undelivered(self._native))

    # ---- notifications ----

    def _notify(self, kind: Notify, request: Request) -> int:
        """Issue a Notify: PENDING, or SUCCESS when there is something already."""
        self._requests.add(request)
        status = request.issue(lambda overlapped: self._notify_native(int(kind), overlapped))
        if status != PENDING:
            self._requests.discard(request)
            if status != SUCCESS:
                raise self._notify_error("arm", status)
        return status

    def _ended(self, request: Request, status: int) -> None:
        """A Notify has ended; raise if that says something bad of the queue."""
        self._requests.discard(request)
        # A provider may cancel an older request when a newer one comes (contract M.19); then it is issued again.
        if status not in (SUCCESS, CANCELED):
            raise self._notify_error("wait", status)

    def _notify_error(self, operation: str, status: int) -> errors.ProviderError:
        if status != BUFFER_OVERFLOW:
            return status_error(operation, status)
        return errors.CompletionQueueOverrunError(
            f"more completions arrived than this queue of depth {self.depth} holds; some are lost, and its queue pairs are "
            "unusable: close them, and create the queue with room for all requests that are outstanding at once",
            operation=operation,
            native=status,
            native_name="ND_BUFFER_OVERFLOW",
        )

    def _wait_for_notification(self, deadline: float | None) -> None:
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            request = self._idle_waiters.pop() if self._idle_waiters else Request(self._cq)
            try:
                if not request.running and self._notify(Notify.ANY, request) == SUCCESS:
                    self._idle_waiters.append(request)
                    return
                if self._drain():
                    self._idle_waiters.append(request)
                    return
            except BaseException:
                self._idle_waiters.append(request)
                raise
            self._waiting.append(request)
        try:
            if not wait_for_event(request.event, deadline):
                raise errors.TimeoutError("no completion within the time allowed", operation="wait")
        finally:
            with self._lock:
                # Whoever wanted this thread to look set the event too; the provider's own signal is in the status.
                lib.ResetEvent(request.event)
                status = request.take()
                self._waiting.remove(request)
                self._idle_waiters.append(request)
                self._no_waiters.notify_all()
                if status is not None:
                    self._requests.discard(request)
        if self._defunct is not None:
            raise self._defunct()
        if status is not None:
            self._ended(request, status)

    def _wake_another_waiter(self) -> None:
        with self._lock:
            if self._waiting:
                lib.SetEvent(self._waiting[0].event)

    def _wake_all(self) -> None:
        with self._lock:
            waiting = bool(self._native is not None and lib.ndpy_undelivered(self._native))
            ended = list(self._armed.values()) if waiting else []
            if waiting:
                self._armed.clear()
            for request in self._waiting:
                lib.SetEvent(request.event)
            pollers = list(self._pollers)
        for pending in ended:
            pending.succeed(None)
        for poller in pollers:
            poller._mark_ready(self)

    def arm(self, kind: Notify = Notify.ANY) -> Pending[None]:
        self._check()
        self._refuse_own_file("arm")
        kind = Notify(kind)
        pending: Pending[None] = OverlappedPending("arm", lambda: self._disarm(request))
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            kept = int(lib.ndpy_undelivered(self._native))
            if kind is not Notify.ERRORS and kept and self._taken + kept > max(self._notified, self._taken):
                # Taken from the provider already, which has forgotten them.
                self._notified = self._taken + kept
                pending.succeed(None)
                return pending
            given_up = next(
                (held for held, its in self._kinds.items() if its is kind and held not in self._armed), None
            )
            if given_up is not None:
                request = given_up
                self._armed[request] = pending
                return pending
            request = Request(self._cq, self._adapter._events)
            request.on_end = self._on_armed_end(weakref.ref(self), weakref.ref(request))
            self._armed[request] = pending
            try:
                status = self._notify(kind, request)
            except BaseException:
                del self._armed[request]
                raise
            if status == SUCCESS:
                self._armed.pop(request, None)
                pending.succeed(None)
            else:
                self._kinds[request] = kind
        return pending

    def notify(self, kind: Notify = Notify.ANY) -> int:
        """Ask for one packet on the program's own completion port; the address of the OVERLAPPED that it will carry, or 0
        when there are completions already and no packet comes.

        For a queue made with overlapped_file. One is outstanding at a time: DeviceBusyError before its packet has come.
        Source: IND2CompletionQueue::Notify (contract G.2).
        """
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            if not self._own_file:
                raise errors.UnsupportedError(
                    "this queue reports to the adapter's own completion port; use arm(), wait() or a Poller, or create it "
                    "with overlapped_file=adapter.overlapped_file",
                    operation="notify",
                )
            request = self._own_request
            if request is None:
                request = self._own_request = Request(self._cq, quiet=False)
            status = request.take()
            if status is not None:
                self._ended(request, status)
            if request.running:
                raise errors.DeviceBusyError("the packet that was asked for before has not come", operation="notify")
            if lib.ndpy_undelivered(self._native) or self._notify(kind, request) == SUCCESS:
                return 0
            return int(ffi.cast("uintptr_t", request.overlapped))

    def _refuse_own_file(self, operation: str) -> None:
        if self._own_file:
            raise errors.UnsupportedError(
                "this queue reports to a completion port of the program's own; use notify()", operation=operation
            )

    @staticmethod
    def _on_armed_end(owner: weakref.ref[Any], request: weakref.ref[Request]) -> Callable[[int], None]:
        def on_end(status: int) -> None:
            queue, ended = owner(), request()
            if queue is not None and ended is not None:
                queue._end_armed(ended, status)

        return on_end

    def _end_armed(self, request: Request, status: int) -> None:
        with self._lock:
            given_up = len(self._kinds) > len(self._armed)
            self._requests.discard(request)
            self._kinds.pop(request, None)
            pending = self._armed.pop(request, None)
            if status == SUCCESS and self._native is not None:
                # The provider tells of a completion once. What it told to nobody is kept here, for the next arm().
                kept = self._drain() if given_up else int(lib.ndpy_undelivered(self._native))
                if pending is not None:
                    self._notified = max(self._notified, self._taken + min(kept, 1))
        if pending is None:
            return
        if status == SUCCESS:
            pending.succeed(None)
        elif status == CANCELED and self._defunct is None:
            # Not by close(): another Notify pushed it out, and whoever asked still waits.
            pending.fail(errors.CanceledError("cancelled", operation="arm", native=status, native_name="ND_CANCELED"))
        else:
            pending.fail(self._notify_error("arm", status))

    def _disarm(self, request: Request) -> None:
        # Cancelling natively would cancel the requests of all others: it stays, for the next one who asks for its kind.
        with self._lock:
            self._armed.pop(request, None)

    def resize(self, depth: int) -> None:
        self._check()
        maximum = self._adapter.info.max_completion_queue_depth
        if not 1 <= depth <= maximum:
            raise errors.LimitExceededError(
                f"a completion queue of {self._adapter.info.name} holds 1 to {maximum}, not {depth}"
            )
        if Capability.RESIZE_COMPLETION_QUEUE not in self._adapter.info.capabilities:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} cannot resize completion queues", operation="resize"
            )
        with self._lock:
            self._check()
            waiting = self._drain()
            if waiting > depth:
                raise errors.LimitExceededError(f"{waiting} completions wait in the queue; it cannot shrink to {depth}")
            check("resize", self._resize_native(self._native_depth(depth)))
            self.depth = depth

    # ---- the end ----

    def _on_removed(self) -> None:
        with self._lock:
            ended = list(self._armed.values())
            self._armed.clear()
            for request in self._waiting:
                lib.SetEvent(request.event)
        for pending in ended:
            pending.fail(self._removed_error())

    def _release(self) -> None:
        with self._lock:
            self._defunct = self._closed_error
            for request in self._waiting:
                lib.SetEvent(request.event)
            if not self._no_waiters.wait_for(lambda: not self._waiting, 5):
                self._mark_still_open()
                raise errors.DeviceBusyError("a thread waits on the queue and does not leave", operation="close")
            ended = list(self._armed.values())
            self._armed.clear()
            pollers = list(self._pollers)
        for pending in ended:
            pending.fail(errors.CanceledError("the completion queue was closed", operation="arm"))
        for poller in pollers:
            poller.remove(self)
        try:
            cancel_all(list(self._requests))
        except errors.DeviceBusyError:
            self._mark_still_open()
            raise
        # Under the lock: a queue pair that was just closed may be telling this queue so from another thread.
        with self._lock:
            self._requests.clear()
            self._kinds.clear()
            self._idle_waiters.clear()
            release(self._cq)
            lib.ndpy_completion_queue_free(self._native)
            self._cq = self._native = None
            self._freed_with_queue.clear()
