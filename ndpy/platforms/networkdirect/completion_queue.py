"""Completion queues of NetworkDirect and their notifications.

Any number of Notify requests may be outstanding, and each ends with the next completion (contract G.2). A waiting
thread has its own request. When it ends, it sets an event and brings no packet, so nothing stands between the provider
and the thread. The packets of arm() come to the adapter's thread, and those of a poller to the poller's own port
(poller.py).

A request that is not needed any more stays with the provider, because cancelling it would cancel all others too. The
next thread that waits or arms uses it, and so does the next poller.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.pending import Pending
from ndpy.objects.resource import with_own_methods
from ndpy.platforms.networkdirect.native_calls import (
    BUFFER_OVERFLOW,
    CANCELED,
    DEVICE_REMOVED,
    INTERNAL_ERROR,
    PENDING,
    SUCCESS,
    check,
    create,
    ffi,
    lib,
    release,
    status_error,
)
from ndpy.platforms.networkdirect.overlapped import Request, cancel_all, wait_for_event
from ndpy.vocabulary.flags import Notify

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter


@with_own_methods
class NetworkDirectCompletionQueue(CompletionQueue):
    _adapter: NetworkDirectAdapter
    _ffi = ffi
    _native_provider = staticmethod(lib.ndpy_provider_table)
    _native_drain = staticmethod(lib.ndpy_drain)
    _native_undelivered = staticmethod(lib.ndpy_undelivered)

    def __init__(self, adapter: NetworkDirectAdapter, depth: int, overlapped_file: int | None = None) -> None:
        super().__init__(adapter, depth)
        self._file = adapter._file if overlapped_file is None else ffi.cast("void *", overlapped_file)
        #: Whether that file reports to the program's own completion port.
        self._own_file = overlapped_file is not None
        #: The request of notify().
        self._own_request: Request | None = None
        #: Every Notify that the provider may hold.
        self._requests: set[Request] = set()
        #: The requests of arm(), and what each was issued for. Somebody may have given up the Pending meanwhile.
        self._arm_requests: dict[Request, tuple[Notify, Pending[None]]] = {}
        #: Requests of pollers that have left. No call cancels one request alone, so the next poller takes them over.
        self._left_behind: deque[Request] = deque()
        #: Memory of closed queue pairs that the provider may still refer to. It is freed with the queue.
        self._freed_with_queue: list[Any] = []
        #: The request of _look_for_failure(), made when it is needed.
        self._look: Request | None = None
        self._create()

    def _native_create(self, depth: int) -> None:
        self._cq = self._new_cq(depth)
        native = lib.ndpy_completion_queue_new(self._cq)
        if native == ffi.NULL:
            raise errors.InsufficientResourcesError("out of memory", operation="create completion queue")
        self._native = native

    def _new_cq(self, depth: int) -> Any:
        return create(
            "create completion queue",
            "IND2CompletionQueue",
            lib.IND2Adapter_CreateCompletionQueue,
            self._adapter._native,
            self._file,
            depth,
            0,
            0,
        )

    def _native_notify(self, kind: int, overlapped: Any) -> int:
        return int(lib.IND2CompletionQueue_Notify(self._cq, kind, overlapped))

    def _native_resize(self, depth: int) -> None:
        check("resize", lib.IND2CompletionQueue_Resize(self._cq, depth))

    # ---- requests ----

    def _issue(self, kind: Notify, request: Request) -> bool:
        """Issue a Notify. Returns whether there are completions already. Call under the lock."""
        self._requests.add(request)
        status = request.issue(lambda overlapped: self._native_notify(int(kind), overlapped))
        if status == PENDING:
            return False
        self._requests.discard(request)
        if status != SUCCESS:
            raise self._notify_error("arm", status)
        return True

    def _check_end(self, request: Request, status: int) -> None:
        """A Notify has ended. Raise if its status reports a fault of the queue."""
        self._requests.discard(request)
        # A provider may cancel an older request when a newer one comes (contract M.19). Then it is issued again.
        if status not in (SUCCESS, CANCELED):
            raise self._notify_error("wait", status)

    def _notify_error(self, operation: str, status: int) -> errors.NdpyError:
        """The exception for a Notify that failed. If that is the end of the queue, all others learn of it too."""
        failure: Callable[[], errors.NdpyError]
        if status == BUFFER_OVERFLOW:
            failure = partial(self._overrun_error, status, "ND_BUFFER_OVERFLOW")
        else:
            failure = partial(status_error, operation, status)
        if status == DEVICE_REMOVED:
            self._adapter._events.call_soon(self._adapter._on_removal)
        elif status in (BUFFER_OVERFLOW, INTERNAL_ERROR):
            self._adapter._events.call_soon(partial(self._on_failure, failure))
        return failure()

    def _look_for_failure(self) -> None:
        """Ask whether the queue has failed, because a connection has ended. The provider tells it only to a Notify."""
        with self._lock, contextlib.suppress(errors.NdpyError):
            # While the queue is closed, all that the provider holds was asked for before.
            if self._native is None or self._defunct is not None or self._own_file or self._failure is not None:
                return
            request = self._look
            if request is None:
                request = self._look = Request(self._cq, self._adapter._events)
            if not request.running:
                request.call_at_end(self, NetworkDirectCompletionQueue._on_unwanted)
                self._issue(Notify.ERRORS, request)

    def _on_unwanted(self, request: Request, status: int) -> None:
        with self._lock:
            self._forget_unwanted(request, status)

    def _forget_unwanted(self, request: Request, status: int) -> None:
        """A request that nobody waits for has ended. Call under the lock."""
        self._requests.discard(request)
        with contextlib.suppress(ValueError):
            self._left_behind.remove(request)
        if status not in (SUCCESS, CANCELED):
            self._notify_error("completion queue", status)
        elif status == SUCCESS and self._native is not None:
            # The provider reports a completion once. Store it for the next arm().
            self._drain()

    # ---- pollers that come and go ----

    def _leave_behind(self, request: Request) -> None:
        """A poller leaves its request. Takes no lock, because finalizers call this."""
        request.call_at_end(self, NetworkDirectCompletionQueue._on_unwanted)
        request.forward_to(ffi.NULL)
        if request.running:
            self._left_behind.append(request)

    def _take_left_behind(self, port: Any) -> Request | None:
        """A request that an earlier poller has left and that runs. This port gets its packet. Call under the lock."""
        while self._left_behind:
            request = self._left_behind.pop()
            # From now on the packet of a request that has not ended comes to the port.
            request.forward_to(port)
            status = request.take()
            if status is None and request.running:
                request.ignore_end()
                return request
            request.forward_to(ffi.NULL)
            if status is not None:
                request.ignore_end()
                self._forget_unwanted(request, status)
        return None

    # ---- waiting ----

    def _native_sleep(self, deadline: float | None) -> bool:
        taken: list[Request] = []
        in_time, failure = False, None
        # Ctrl-C may come between any two lines. close() waits until no thread waits any more.
        try:
            if self._begin_sleep(taken):
                return True
            in_time = wait_for_event(taken[0].event, deadline)
        finally:
            if taken:
                with self._lock:
                    if taken[0] in self._waiters:
                        self._waiters.remove(taken[0])
                    self._idle_waiters.append(taken[0])
                    failure = self._end_sleep(taken[0])
                    if self._left is not None:
                        self._left.notify_all()
        if in_time and failure is not None:
            raise failure()
        return in_time

    def _begin_sleep(self, taken: list[Request]) -> bool:
        """Ask for a notification that sets the event of the request that `taken` gets. Returns whether there are
        completions already.
        """
        with self._lock:
            self._check()
            if self._failure is not None:
                # Nothing wakes the waiter any more. The next poll takes what is left, or raises.
                return True
            waiter = self._idle_waiters.pop() if self._idle_waiters else Request(self._cq)
            ready = True
            try:
                ready = (not waiter.running and self._issue(Notify.ANY, waiter)) or bool(self._drain())
            finally:
                if ready:
                    self._idle_waiters.append(waiter)
            if not ready:
                taken.append(waiter)
                self._waiters.append(waiter)
        return ready

    def _end_sleep(self, waiter: Request) -> Callable[[], errors.NdpyError] | None:
        """Prepare a request for the next thread. Returns None, or what makes the exception if its end says that the
        queue has failed. Under the lock.
        """
        # _native_wake() sets the event too. The status says whether the provider did.
        lib.ResetEvent(waiter.event)
        status = waiter.take()
        if status is None:
            return None
        self._requests.discard(waiter)
        if self._defunct is not None:
            return self._defunct
        return None if status in (SUCCESS, CANCELED) else partial(self._notify_error, "wait", status)

    def _native_wake(self, waiter: Request) -> None:
        lib.SetEvent(waiter.event)

    # ---- arming ----

    def _native_arm(self, kind: Notify, pending: Pending[None]) -> bool:
        self._refuse_own_file("arm")
        if kind is not Notify.ERRORS and self._notify_of_stored():
            return True
        request = next(
            (
                held
                for held, (its, given_up) in self._arm_requests.items()
                if its is kind and given_up not in self._armed
            ),
            None,
        )
        if request is None:
            request = Request(self._cq, self._adapter._events)
            request.call_at_end(self, NetworkDirectCompletionQueue._on_arm_ended)
            if self._issue(kind, request):
                return True
        self._arm_requests[request] = kind, pending
        return False

    def _on_arm_ended(self, request: Request, status: int) -> None:
        """Called in the adapter's thread."""
        with self._lock:
            given_up = len(self._arm_requests) > len(self._armed)
            self._requests.discard(request)
            failure = None if status in (SUCCESS, CANCELED) else self._notify_error("arm", status)
            _, pending = self._arm_requests.pop(request, (None, None))
            armed = pending in self._armed
            if status == SUCCESS and self._native is not None:
                # The provider reports a completion once. If nobody waited for this report, store what is there for the
                # next arm().
                stored = self._drain() if given_up else self._undelivered()
                if armed:
                    self._notified = max(self._notified, self._taken + min(stored, 1))
            if pending is None or not armed or (status == CANCELED and self._defunct is not None):
                # The thread that closes the queue, or finds the adapter gone, ends it.
                return
            del self._armed[pending]
        if failure is None and status == SUCCESS:
            pending.succeed(None)
        elif failure is None:
            # Another Notify pushed it out.
            pending.fail(errors.CanceledError("cancelled", operation="arm", native=status, native_name="ND_CANCELED"))
        else:
            pending.fail(failure)

    def _native_rearm(self) -> list[Pending[None]]:
        # Some requests were cancelled, or ended before they could be cancelled.
        self._drain()
        for request in [request for request in self._arm_requests if not request.running]:
            del self._arm_requests[request]
        running = {pending for _, pending in self._arm_requests.values()}
        ended = [
            pending
            for pending, kind in self._armed.items()
            if pending not in running and self._native_arm(kind, pending)
        ]
        # Only now: if one cannot be armed, the caller ends all.
        for pending in ended:
            del self._armed[pending]
        return ended

    # ---- a completion port of the program's own ----

    def notify(self, kind: Notify = Notify.ANY) -> int:
        with self._lock:
            self._check()
            if not self._own_file:
                raise errors.UnsupportedError(
                    "this queue reports to the adapter's own completion port; use arm(), wait() or a Poller, or create "
                    "it with overlapped_file=adapter.overlapped_file",
                    operation="notify",
                )
            request = self._own_request
            if request is None:
                request = self._own_request = Request(self._cq, quiet=False)
            status = request.take()
            if status is not None:
                self._check_end(request, status)
            if request.running:
                raise errors.DeviceBusyError("the packet that was asked for before has not come", operation="notify")
            if self._undelivered() or self._issue(kind, request):
                return 0
            return int(ffi.cast("uintptr_t", request.overlapped))

    def _refuse_own_file(self, operation: str) -> None:
        if self._own_file:
            raise errors.UnsupportedError(
                "this queue reports to a completion port of the program's own; use notify()", operation=operation
            )

    # ---- the end ----

    def _native_end_requests(self) -> None:
        cancel_all(list(self._requests))

    def _native_free(self) -> None:
        self._requests.clear()
        self._arm_requests.clear()
        self._left_behind.clear()
        self._idle_waiters.clear()
        self._look = None
        # Ctrl-C may come after the native queue has gone. Nobody may use it or free it a second time.
        cq, native = self._cq, self._native
        self._cq = self._native = None
        self._detach()
        if cq is not None:
            release(cq)
        if native is not None:
            lib.ndpy_completion_queue_free(native)
        self._freed_with_queue.clear()
