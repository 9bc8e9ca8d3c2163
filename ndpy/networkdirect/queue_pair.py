"""Queue pairs and shared receive queues over NetworkDirect."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Access, Operation, Status
from ndpy.memory import Binding, MemoryRegion, MemoryWindow, Sge
from ndpy.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.networkdirect.memory import NetworkDirectMemoryWindow
from ndpy.networkdirect.native_calls import (
    CANCELED,
    PENDING,
    SUCCESS,
    check,
    create,
    ffi,
    lib,
    release,
    status_error,
    status_name,
)
from ndpy.networkdirect.overlapped import OverlappedPending, Request, cancel_all
from ndpy.pending import Pending
from ndpy.queue_pair import (
    QueuePair,
    QueuePairLimits,
    SharedReceiveQueue,
)

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter

_SUCCESS = int(Status.SUCCESS)

# Longest wait for a closing queue pair to give back its requests.
_FLUSH_S = 1.0


class _BindRequest:
    """A posted bind; keeps window and region alive, and undoes the binding if it failed."""

    __slots__ = ("binding", "misuse")

    def __init__(self, binding: Binding, misuse: bool) -> None:
        self.binding = binding
        self.misuse = misuse

    def ended(self, status: int) -> int:
        if status != _SUCCESS and not self.misuse:
            self.binding.end()
        elif status == _SUCCESS and self.misuse:
            # It was none: the peer had invalidated the former binding, which was not known here.
            former = self.binding.window._binding
            if former is not None:
                former.end()
            self.binding.begin()
        return status


class _InvalidateRequest:
    """A posted invalidate; ends the binding when it succeeded."""

    __slots__ = ("binding", "window")

    def __init__(self, window: MemoryWindow, binding: Binding | None) -> None:
        self.window = window
        self.binding = binding

    def ended(self, status: int) -> int:
        if self.binding is not None:
            if status == _SUCCESS:
                self.binding.end()
            else:
                self.binding.invalidating = False
        return status


class NetworkDirectQueuePair(QueuePair):
    _adapter: NetworkDirectAdapter
    _post_one = staticmethod(lib.ndpy_post_one)
    _post_list = staticmethod(lib.ndpy_post)
    _initiator_posted = staticmethod(lib.ndpy_queue_pair_posted)
    _initiator_ended = staticmethod(lib.ndpy_queue_pair_ended)
    _post_marker = staticmethod(lib.ndpy_post_marker)
    _free_slots = staticmethod(lib.ndpy_queue_pair_free)
    _element_type = "struct ndpy_element[]"
    receive_cq: NetworkDirectCompletionQueue
    initiator_cq: NetworkDirectCompletionQueue

    def __init__(
        self,
        adapter: NetworkDirectAdapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
    ) -> None:
        super().__init__(adapter, receive_cq, initiator_cq, limits, srq)
        # A posted element list is copied during the call; one array, under the lock, serves all calls.
        count = max(limits.max_receive_sge, limits.max_initiator_sge, 1)
        self._elements = ffi.new(self._element_type, count)
        self._elements_view = memoryview(ffi.buffer(self._elements)).cast("B")
        #: Whether the provider had given back all requests when it was closed.
        self._given_back = False
        self._qp = self._new_native()
        self._native: Any = lib.ndpy_queue_pair_new(
            self._qp,
            self._serial,
            limits.initiator_queue_depth,
            limits.receive_queue_depth,
            limits.max_initiator_sge,
            limits.max_receive_sge,
            limits.inline_data_size,
            adapter.info.max_transfer_length,
        )
        if self._native == ffi.NULL:
            self._release_native()
            raise errors.InsufficientResourcesError("out of memory", operation="create queue pair")
        for queue in {receive_cq, initiator_cq}:
            with queue._lock:
                queue._posted_requests[self._serial] = self._posted_requests
                queue._users += 1
        if srq is not None:
            with srq._lock:
                srq._users += 1
            receive_cq._shared_receivers[self._serial] = (self._posted_requests, srq)
        self._opened()

    def _new_native(self) -> Any:
        """The native queue pair, which the slots' owner posts to."""
        limits = self.limits
        # The completions of shared receive queues bring it back.
        context = ffi.cast("void *", self._serial)
        initiator = (max(limits.initiator_queue_depth, 1), max(limits.max_initiator_sge, 1), limits.inline_data_size)
        if self.srq is None:
            return create(
                "create queue pair",
                "IND2QueuePair",
                lib.IND2Adapter_CreateQueuePair,
                self._adapter._native,
                self.receive_cq._cq,
                self.initiator_cq._cq,
                context,
                max(limits.receive_queue_depth, 1),
                initiator[0],
                max(limits.max_receive_sge, 1),
                *initiator[1:],
            )
        return create(
            "create queue pair",
            "IND2QueuePair",
            lib.IND2Adapter_CreateQueuePairWithSrq,
            self._adapter._native,
            self.receive_cq._cq,
            self.initiator_cq._cq,
            self.srq._srq,  # type: ignore[attr-defined]
            context,
            *initiator,
        )

    def _release_native(self) -> None:
        release(self._qp)
        self._qp = None

    def _flush_native(self) -> int:
        return int(lib.IND2QueuePair_Flush(self._qp))

    def _begin_connection(self) -> None:
        """The connection exists: initiator requests may be posted."""
        with self._lock:
            if self._native is None:
                return
            self._never_connected = False
            # Not the property, which refuses what was removed meanwhile.
            connector = self.connector
            limits = connector._read_limits if connector is not None else None
            if limits is not None and not limits.outbound:
                lib.ndpy_queue_pair_refuse_reads(self._native)
            lib.ndpy_queue_pair_set_connection(self._native, lib.NDPY_CONNECTED)

    def _lend(self, call: Callable[[], int]) -> int:
        """call(), which gives the native queue pair to a connector; CANCELED if it was closed."""
        with self._lock:
            return CANCELED if self._qp is None else call()

    def _end_connection(self) -> None:
        """The connection is over; the provider cancels what is outstanding and what will be posted (contract F.2.4)."""
        self._set_ended()

    def _on_posted_after_end(self, operation: int) -> None:
        pass

    def _on_failed_completion(self) -> None:
        # The provider ends the connection and tells the peer (contract F.6.1).
        self._set_ended()
        # Looked at once: another thread may take it away.
        connector = self.connector
        if connector is not None:
            connector._on_failed_completion()

    def flush(self) -> None:
        self._check()
        with self._lock:
            self._check()
            check("flush", self._flush_native())
            if not self._never_connected:
                self._set_ended()

    def _take_back(self) -> None:
        """Have the provider give back what it holds, for a limited time."""
        self._flush_native()
        marked = self._never_connected
        deadline = time.monotonic() + _FLUSH_S
        pause = 0.0
        while True:
            self._drain_queues()
            # What came back makes room for the marker.
            marked = marked or self._mark()
            if not self._in_flight() or time.monotonic() > deadline:
                return
            # The provider flushes in its own time and there is no event for "all done".
            time.sleep(pause)
            pause = min(2 * pause + 0.0002, 0.02)

    def _mark(self) -> bool:
        """Post a request behind silent ones that left no trace, if there are any and there is room for it."""
        self._initiator_records.append(None)
        if self._post_marker(self._native):
            return True
        self._initiator_records.pop()
        return False

    def _in_flight(self) -> int:
        return int(lib.ndpy_queue_pair_in_flight(self._native, 0) + lib.ndpy_queue_pair_in_flight(self._native, 1))

    def _drain_queues(self) -> None:
        for queue in {self.receive_cq, self.initiator_cq}:
            with queue._lock:
                queue._drain()

    def _cancel_rest(self) -> None:
        """Requests that the provider never gave back; only when it has let go of them."""
        for receive, queue in ((1, self.receive_cq), (0, self.initiator_cq)):
            with queue._lock:
                cancelled = lib.ndpy_cancel_rest(self._native, receive, queue._native)
                if cancelled < 0:
                    raise errors.from_errno("flush", -cancelled)

    def _release(self) -> None:
        with self._lock:
            # From here on no connector takes it.
            self._defunct = self._closed_error
        connector = self.connector
        with self._lock:
            if self._qp is not None:
                self._take_back()
                self._given_back = not self._in_flight()
                self._release_native()
            self._drain_queues()
            self._cancel_rest()
            for binding in list(self._bindings):
                binding.end()
            # Whoever gets the lock next finds neither of the two.
            native, self._native = self._native, None
        if connector is not None:
            connector._on_queue_pair_closing()
        if self.srq is not None:
            self._leave_shared_queue()
        for queue in {self.receive_cq, self.initiator_cq}:
            with queue._lock:
                kept = lib.ndpy_stored_of(queue._native, self._serial)
                if kept:
                    self._posted_requests.stored[queue._serial] = kept
                else:
                    queue._posted_requests.pop(self._serial, None)
                queue._users -= 1
        self._leave_slots(native)
        for queue in {self.receive_cq, self.initiator_cq}:
            queue._wake_all()

    def _leave_slots(self, native: Any) -> None:
        """Free what the provider knows requests by, now or when no queue can bring a completion that names it any more."""
        if self._given_back:
            self._free_slots(native)
        else:
            self._leave_behind(ffi.gc(native, self._free_slots))

    def _leave_behind(self, slots: Any) -> None:
        for queue in {self.receive_cq, self.initiator_cq}:
            queue._freed_with_queue.append(slots)

    def _leave_shared_queue(self) -> None:
        assert self.srq is not None
        queue = self.receive_cq
        with queue._lock:
            kept = lib.ndpy_renumber_stored(queue._native, self._serial, self._serial)
            if kept:
                self._posted_requests.stored_shared = kept
            else:
                del queue._shared_receivers[self._serial]
        with self.srq._lock:
            self.srq._users -= 1

    def _on_removed(self) -> None:
        for queue in {self.receive_cq, self.initiator_cq}:
            queue._wake_all()

    # ---- windows ----

    def _post_bind(
        self, window: MemoryWindow, region: MemoryRegion, element: Sge, access: Access, context: int, flags: int
    ) -> None:
        assert isinstance(window, NetworkDirectMemoryWindow)
        allowed = (lib.ND_OP_FLAG_ALLOW_READ if access & Access.REMOTE_READ else 0) | (
            lib.ND_OP_FLAG_ALLOW_WRITE if access & Access.REMOTE_WRITE & ~Access.LOCAL_WRITE else 0
        )
        with self._lock:
            self._check()
            bound = window._binding
            misuse = bound is not None and not bound.invalidating
            binding = Binding(window, self, region, element, access, 0)
            if not misuse:
                binding.begin()
            self._initiator_records.append(_BindRequest(binding, misuse))
            try:
                refused = self._bind_native(flags, context, region, window, element, allowed)
            except (OverflowError, TypeError) as failure:
                self._withdraw(binding, bound, misuse)
                raise self._bad_argument(failure, context, flags) from None
            if refused:
                self._withdraw(binding, bound, misuse)
            else:
                self._take_token(binding, window)
        if refused:
            raise self._refusal(Operation.BIND, refused, [], flags)

    def _bind_native(
        self, flags: int, context: int, region: Any, window: NetworkDirectMemoryWindow, element: Sge, allowed: int
    ) -> int:
        return int(
            lib.ndpy_post_bind(
                self._native,
                flags,
                context,
                region._native,
                window._native,
                element.address,
                element.length,
                allowed,
            )
        )

    def _take_token(self, binding: Binding, window: NetworkDirectMemoryWindow) -> None:
        # The token of the new binding is there before the bind completes (contract E.2.8).
        binding.token = lib.ndpy_window_remote_token(window._native)

    def _invalidate_native(self, flags: int, context: int, window: NetworkDirectMemoryWindow) -> int:
        return int(lib.ndpy_post_invalidate(self._native, flags, context, window._native))

    def _withdraw(self, binding: Binding, former: Binding | None, misuse: bool) -> None:
        """A bind was not posted: the window is as it was."""
        self._initiator_records.pop()
        if not misuse:
            binding.end()
            binding.window._binding = former

    def _post_invalidate(self, window: MemoryWindow, context: int, flags: int) -> None:
        self._check()
        self._require_same_adapter(window, "the window")
        assert isinstance(window, NetworkDirectMemoryWindow)
        with window._lifetime, self._lock:
            window._check()
            self._check()
            binding = window._binding
            if binding is not None and (binding.queue_pair is not self or binding.invalidating):
                binding = None
            self._initiator_records.append(_InvalidateRequest(window, binding))
            try:
                refused = self._invalidate_native(flags, context, window)
            except (OverflowError, TypeError) as failure:
                self._initiator_records.pop()
                raise self._bad_argument(failure, context, flags) from None
            if not refused:
                if binding is not None:
                    binding.invalidating = True
                return
            self._initiator_records.pop()
        raise self._refusal(Operation.INVALIDATE, refused, [], flags)

    # ---- what went wrong ----

    def _explain(self, status: Status) -> str:
        connector = self.connector
        if status is not Status.IO_TIMEOUT or connector is None:
            return ""
        try:
            host, port = connector.peer_address
        except (errors.NdpyError, OSError):
            return ""
        return f"the peer is {host} port {port}: is its process alive, does it post receives, and is the link up?"

    def _native_status_name(self, native_status: int) -> str:
        return status_name(native_status)

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return status_error(operation, number)


class NetworkDirectSharedReceiveQueue(SharedReceiveQueue):
    _adapter: NetworkDirectAdapter
    _post_shared = staticmethod(lib.ndpy_post_shared)

    def __init__(self, adapter: NetworkDirectAdapter, depth: int, max_sge: int, threshold: int) -> None:
        super().__init__(adapter, depth, max_sge, threshold)
        self._elements = ffi.new("struct ndpy_element[]", max(max_sge, 1))
        self._elements_view = memoryview(ffi.buffer(self._elements)).cast("B")
        self._armed: dict[Request, Pending[None]] = {}
        self._requests: set[Request] = set()
        self._srq = create(
            "create shared receive queue",
            "IND2SharedReceiveQueue",
            lib.IND2Adapter_CreateSharedReceiveQueue,
            adapter._native,
            adapter._file,
            depth,
            max_sge,
            threshold,
            0,
            0,
        )
        self._native = lib.ndpy_shared_queue_new(self._srq, depth, max_sge, adapter.info.max_transfer_length)
        if self._native == ffi.NULL:
            release(self._srq)
            raise errors.InsufficientResourcesError("out of memory", operation="create shared receive queue")
        self._opened()

    def _modify_native(self, depth: int, threshold: int) -> None:
        check("modify", lib.IND2SharedReceiveQueue_Modify(self._srq, depth, threshold))

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return status_error(operation, number)

    def arm(self) -> Pending[None]:
        self._check()
        if not self._threshold:
            raise errors.InvalidFlagsError(
                "the queue has no threshold; give one to create_shared_receive_queue() or modify()"
            )
        pending: Pending[None] = OverlappedPending("arm", lambda: self._disarm(request))
        owner = weakref.ref(self)

        def on_end(status: int) -> None:
            queue = owner()
            if queue is not None:
                queue._end_armed(request, status)

        with self._lock:
            self._check()
            given_up = next((held for held in self._requests if held not in self._armed), None)
            if given_up is not None:
                request = given_up
                self._armed[request] = pending
                return pending
            request = Request(self._srq, self._adapter._events, on_end)
            self._armed[request] = pending
            self._requests.add(request)
            status = request.issue(lambda overlapped: lib.IND2SharedReceiveQueue_Notify(self._srq, overlapped))
            if status != PENDING:
                self._armed.pop(request, None)
                self._requests.discard(request)
        if status == SUCCESS:
            pending.succeed(None)
        elif status != PENDING:
            raise status_error("arm", status)
        return pending

    def _end_armed(self, request: Request, status: int) -> None:
        with self._lock:
            self._requests.discard(request)
            pending = self._armed.pop(request, None)
        if pending is None:
            return
        if status == SUCCESS:
            pending.succeed(None)
        elif status == CANCELED:
            pending.fail(errors.CanceledError("cancelled", operation="arm", native=status, native_name="ND_CANCELED"))
        else:
            pending.fail(status_error("shared receive queue", status))

    def _disarm(self, request: Request) -> None:
        # Cancelling natively would cancel the requests of all others: it stays, for the next one who asks.
        with self._lock:
            self._armed.pop(request, None)

    def _take_armed(self) -> list[Pending[None]]:
        with self._lock:
            armed = list(self._armed.values())
            self._armed.clear()
        return armed

    def _on_removed(self) -> None:
        for pending in self._take_armed():
            pending.fail(self._removed_error())

    def _release(self) -> None:
        with self._lock:
            self._defunct = self._closed_error
            armed = dict(self._armed)
            self._armed.clear()
        requests = list(self._requests)
        try:
            cancel_all(requests)
        except errors.DeviceBusyError:
            self._armed.update(armed)
            self._mark_still_open()
            raise
        for request in requests:
            request.ignore_end()
        self._requests.clear()
        release(self._srq)
        lib.ndpy_shared_queue_free(self._native)
        self._srq = self._native = None
        for pending in armed.values():
            pending.fail(errors.CanceledError("the shared receive queue was closed", operation="arm"))
        self._records.clear()
