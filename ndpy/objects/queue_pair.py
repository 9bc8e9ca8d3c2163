"""Queue pairs: flush and close, and the windows that are bound to them. queue_pair_connection.py has begin and end of
the connection.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar

from ndpy import _core, errors
from ndpy.objects import window_requests
from ndpy.objects.completion import FailedRequest
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.objects.operations import MARKER, READ
from ndpy.objects.queue_pair_connection import QueuePairConnection
from ndpy.objects.work_queues import BAD_FLAGS, QueuePairLimits
from ndpy.vocabulary.flags import Access, Capability, Flags, Operation
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from collections.abc import Callable

    from ndpy.objects.adapter import Adapter
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue

# How long close() waits for the provider to end the queue pair's requests.
_FLUSH_S = 1.0

# How long _revoke() waits for the earlier requests, and then for its invalidation.
_IDLE_S = 0.02
_REVOKE_S = 5.0


class QueuePair(QueuePairConnection):
    """One end of a connection, made by Adapter.create_queue_pair().

    A call that posts a request queues it and returns at once. A Completion with the same context reports its end.
    Completions come in the order of posting. A posted request keeps its regions and their buffers alive until it ends,
    whatever the program drops.

    Attributes:
        connector: the connector that it is connected through, or None.
        limits: the depths and sizes that it was created with. See QueuePairLimits.
        type: its transport service, a QueuePairType.
        srq: the shared receive queue that it takes its receives from, or None.
        receive_cq, initiator_cq: the completion queues of its receives and of its other requests.
        context: free for the program.
        failure: on Linux, the adapter's word for an error of the queue pair itself. "" if there was none.
    Source: IND2QueuePair (contract section F); ibv_create_qp(3), ibv_post_send(3), ibv_post_recv(3).
    """

    _release_order = 20
    __slots__ = ("_all_ended", "_joined", "_slots", "context")
    #: The slots of a queue pair that is being closed: _rings, until they are freed.
    _slots: Any
    #: The status of a bind or invalidate that the contract forbids. None: the provider's own status.
    _status_if_forbidden: ClassVar[int | None] = None
    #: When the queue pair is closed, completions of a shared receive queue may be left. They then get a new number:
    #: this one plus the serial number. The sum has to differ from every `_number` of a queue pair that may be created
    #: later.
    _renumbered_from: ClassVar[int] = 0

    def __init__(
        self,
        adapter: Adapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
        type: QueuePairType = QueuePairType.RC,
    ) -> None:
        super().__init__(adapter, receive_cq, initiator_cq, limits, srq, type)
        self.context: Any = None
        #: Whether the provider had ended every request when the native queue pair was destroyed.
        self._all_ended = True
        #: How many of its queues count it as a user: first its completion queues, then the shared receive queue. It
        #: leaves each of them once, even if Ctrl-C ends a close() half-way.
        self._joined = 0
        self._slots = None
        self._qp = self._native_create()
        try:
            self._begin_posting(self._new_slots())
            self._native_set_up()
            self._join_queues()
            self._opened()
            self._inherit_failure()
        except BaseException:
            if self.closed:
                # Report the first failure.
                with contextlib.suppress(errors.ProviderError):
                    self._native_destroy()
                self._leave_queues()
                if self._rings is not None:
                    self._native_free_slots(self._end_posting())
            raise

    def _new_slots(self) -> Any:
        limits = self.limits
        native = self._lib.ndpy_queue_pair_new(
            self._qp,
            self._serial,
            limits.initiator_queue_depth,
            limits.receive_queue_depth,
            limits.max_initiator_sge,
            limits.max_receive_sge,
            limits.inline_data_size,
            self._max_length,
        )
        if not native:
            raise errors.InsufficientResourcesError("out of memory", operation="create queue pair")
        self._lib.ndpy_queue_pair_offer(native, self._offered())
        self._lib.ndpy_queue_pair_limit_reads(native, self._most_elements(READ))
        return native

    def data_in_order(self, operation: Operation = Operation.WRITE) -> bool:
        """Whether the adapter promises to write the bytes of a message from its first to its last.

        If so, a program may poll the last byte of memory that a peer writes to. Capability.IN_ORDER_DMA is a property
        of the transport, and this is a promise for this queue pair, machine and operation. Many adapters promise
        nothing.

        Parameters:
            operation: WRITE or RECEIVE for data that peers write and send, READ for data that this side reads.
        Raises:
            ValueError: the operation writes no message.
            UnsupportedError: info.capabilities lacks DATA_IN_ORDER, as on every NetworkDirect adapter.
        Source: ibv_query_qp_data_in_order(3).
        """
        self._adapter._require(Capability.DATA_IN_ORDER, "data_in_order")
        if operation not in (Operation.WRITE, Operation.RECEIVE, Operation.READ):
            raise ValueError(f"{Operation(operation).name} writes no message; WRITE, RECEIVE and READ do")
        with self._lock:
            self._check()
            return self._native_data_in_order(Operation(operation))

    # ---- the end ----

    def flush(self) -> None:
        """Cancel everything that is outstanding in both directions. Completions with CANCELED follow, in the order of
        posting.

        On a connected queue pair later requests complete CANCELED too. A queue pair that was never connected stays
        usable.
        Source: IND2QueuePair::Flush (contract F.7); ibv_modify_qp(3) to IBV_QPS_ERR.
        """
        self._check()
        with self._lock:
            self._check()
            cancelled = self._native_flush()
            if not self._never_connected:
                self._set_ended()
        if cancelled:
            self._wake_queues()

    def close(self) -> None:
        for dependant in self._living_dependants():
            dependant._on_queue_pair_closing(self)
        super().close()

    def _release(self) -> None:
        with self._lock:
            # From now on no connector accepts this queue pair.
            self._defunct = self._closed_error
        connector = self.connector
        if connector is not None:
            connector._on_queue_pair_closing()
        with self._lock:
            if self._qp is not None:
                self._wait_until_given_back()
                self._all_ended = not self._in_flight()
                self._native_destroy()
            # None if Ctrl-C ended an earlier close() further on.
            if self._rings is not None:
                self._drain_queues()
                self._cancel_rest()
                # Not before the drain, because a drained bind may have begun its binding.
                for binding in list(self._bindings or ()):
                    binding.end()
                # From now on both _qp and _rings are None for the threads that get the lock.
                self._slots = self._rings
                self._end_posting()
        self._leave_queues()
        slots, self._slots = self._slots, None
        if slots is not None:
            self._native_free_slots(slots)
        self._wake_queues()

    def _wait_until_given_back(self) -> None:
        """Have the provider end all requests, and wait for that for a limited time. Under the lock."""
        self._native_begin_flush()
        marked = self._never_connected or not self._native_completes_late_requests()
        deadline = time.monotonic() + self._native_flush_limit_s()
        pause = 0.0
        while True:
            self._drain_queues()
            # The requests that have ended make room for the marker.
            marked = marked or self._post_marker()
            if (not self._in_flight() and self._native_has_last_receive()) or time.monotonic() > deadline:
                return
            # The provider flushes in its own time, and there is no event for "all done".
            time.sleep(pause)
            pause = min(2 * pause + 0.0002, 0.02)

    def _post_marker(self) -> bool:
        """Post a request behind silent ones, if there are any and there is a slot.
        Its end shows that they have ended.
        """
        self._posted_requests.initiator.append(None)
        if self._native_post_marker(self._rings):
            return True
        self._posted_requests.initiator.pop()
        return False

    def _in_flight(self) -> int:
        """How many requests the provider has not ended."""
        in_flight = self._lib.ndpy_queue_pair_in_flight
        return int(in_flight(self._rings, 0) + in_flight(self._rings, 1))

    def _awaits_answers(self) -> bool:
        """Whether initiator requests of the connection are outstanding, and none has failed."""
        with self._lock:
            if self._rings is None or self._ended:
                return False
            with self.initiator_cq._lock:
                self.initiator_cq._drain()
            return not self._lib.ndpy_queue_pair_ended(self._rings, self._count_posted(self._rings))

    def _refuse_calls(self, failure: Callable[[], errors.NdpyError]) -> None:
        """One of its completion queues has failed. From now on only close() works. Called without locks held."""
        with self._lock:
            if self._defunct is None:
                self._defunct = failure

    def _on_queue_failed(self) -> None:
        """One of its completion queues has failed, and everybody is told so. Called without locks held."""
        with self._lock:
            self._inherit_failure()
        self._end_connection()
        self._on_failed_completion()

    def _inherit_failure(self) -> None:
        for queue in self._completion_queues:
            if self._defunct is None:
                self._defunct = queue._failure

    def _mark_still_open(self) -> None:
        super()._mark_still_open()
        self._inherit_failure()

    def _different_queues(self) -> list[CompletionQueue]:
        return list(dict.fromkeys(self._completion_queues))

    def _drain_queues(self) -> None:
        for queue in self._different_queues():
            with queue._lock:
                queue._drain()

    def _cancel_rest(self) -> None:
        """Cancel the requests that the provider never completed. Call this only when it no longer uses them."""
        for receive, queue in ((1, self.receive_cq), (0, self.initiator_cq)):
            with queue._lock:
                cancelled = self._lib.ndpy_cancel_rest(self._rings, receive, queue._native)
                if cancelled < 0:
                    raise errors.from_errno("flush", -cancelled)

    def _join_queues(self) -> None:
        for queue in self._different_queues():
            with queue._lock:
                if queue._failure is not None:
                    raise queue._failure()
                queue._posted_requests[self._serial] = self._posted_requests
                queue._users += 1
                self._joined += 1
        srq = self.srq
        if srq is not None:
            with srq._lock:
                srq._users += 1
                self._joined += 1
            self.receive_cq._shared_receivers[self._number] = (self._posted_requests, srq)

    def _leave_queues(self) -> None:
        """Leave the queues that were joined. Their completions of this queue pair stay with them."""
        queues = self._different_queues()
        if self.srq is not None and self._joined > len(queues):
            self._leave_shared_queue(self.srq)
        while self._joined:
            queue = queues[self._joined - 1]
            with queue._lock:
                stored = self._lib.ndpy_stored_of(queue._native, self._serial)
                if stored:
                    self._posted_requests.stored[queue._serial] = stored
                    self._posted_requests.watched = True
                else:
                    queue._posted_requests.pop(self._serial, None)
                queue._users -= 1
                self._joined -= 1

    def _leave_shared_queue(self, srq: SharedReceiveQueue) -> None:
        queue = self.receive_cq
        with queue._lock:
            number = self._renumbered_from + self._serial
            entry = (self._posted_requests, srq)
            # The provider may have given its number to another queue pair already. That one has no completions yet.
            if queue._shared_receivers.get(self._number) == entry:
                del queue._shared_receivers[self._number]
            stored = self._lib.ndpy_renumber_stored(queue._native, self._number, number)
            if stored:
                self._posted_requests.stored_shared = stored
                queue._shared_receivers[number] = entry
        with srq._lock:
            srq._users -= 1
            self._joined -= 1

    def _on_removed(self) -> None:
        self._wake_queues()

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = _core.Lock()
        self._singly = None

    # ---- windows ----

    def bind(
        self,
        window: MemoryWindow,
        memory: MemoryRegion | Sge,
        access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Give this connection's peer rights to memory through a window, and return as soon as the request is queued.

        window.remote() has the new token when bind() returns. So a send that carries it can be posted next. A bind of a
        window that is bound completes INVALID_REQUEST and ends the connection.

        Parameters:
            window: a window of this adapter that is not bound.
            memory: a region, or a slice of one: `region[offset:stop]`. At least one byte.
            access: REMOTE_READ, REMOTE_WRITE, both, or NONE (a window that grants nothing). A window that lets the peer
                write needs a region with LOCAL_WRITE. The region needs no remote right of its own.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            AccessViolationError: the region cannot carry these rights.
            ElementRangeError: the slice is empty.
            ForeignObjectError, NotConnectedError, QueueFullError, ClosedError: as for send(). The window is then as it
                was before.
        Source: IND2QueuePair::Bind (contract E.2); ibv_post_send(3) with IBV_WR_BIND_MW.
        """
        self._check_window_request(Operation.BIND, flags)
        window_requests.bind(self, window, memory, access, context, flags)

    def _expose(self, window: MemoryWindow, memory: Sge, access: Access) -> None:
        """Do bind(). The program gets a completion only if it fails."""
        window_requests.bind(self, window, memory, access, 0, MARKER | Flags.SILENT_SUCCESS)

    def _check_window_request(self, operation: Operation, flags: int) -> None:
        self._require_offered(operation)
        if isinstance(flags, int) and flags & MARKER:
            raise self._refusal(operation, BAD_FLAGS, [], flags)

    def invalidate(self, window: MemoryWindow, *, context: int = 0, flags: int = 0) -> None:
        """Take back what bind() gave, and return as soon as the request is queued.

        Once the request has completed, the adapter refuses what the peer does with the window's token, and ends the
        connection. An invalidate of a window that is not bound to this queue pair completes INVALID_REQUEST and ends
        the connection too.

        Parameters:
            window: a window that is bound to this queue pair.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            ForeignObjectError, NotConnectedError, QueueFullError, ClosedError: as for send().
        Source: IND2QueuePair::Invalidate (contract E.6); ibv_post_send(3) with IBV_WR_LOCAL_INV.
        """
        self._check_window_request(Operation.INVALIDATE, flags)
        window_requests.invalidate(self, window, context, flags)

    def _revoke(self, window: MemoryWindow) -> bool:
        """Invalidate a window and wait for the end of that. The program gets no completion.

        Returns False if the connection has ended, or if earlier requests are still under way. Then closing the window
        takes the peer's right away. Once an invalidate is posted, the window has to stay open until that has ended.
        """
        binding = window._binding
        if binding is None or binding.queue_pair is not self or self._wait_until_ended(_IDLE_S) != 1:
            return False
        try:
            window_requests.invalidate(self, window, 0, MARKER)
        except errors.NdpyError:
            return False
        if self._wait_until_ended(_REVOKE_S) != 1:
            return False
        binding.end()
        return True

    def _wait_until_ended(self, seconds: float) -> int:
        """Wait until all requests that are in the initiator queue now have ended.

        Returns 1 if all have succeeded, -1 if one has failed, 0 at the deadline.
        """
        deadline = time.monotonic() + seconds
        pause = 0.0
        with self._lock:
            last = 0 if self._rings is None else self._count_posted(self._rings)
        while True:
            self.initiator_cq._retire_silent_requests()
            with self._lock:
                gone = self._rings is None or self._ended
                state = -1 if gone else int(self._lib.ndpy_queue_pair_ended(self._rings, last))
            if state or time.monotonic() > deadline:
                break
            # No event reports the end of a single request.
            time.sleep(pause)
            pause = min(2 * pause + 0.00002, 0.005)
        # The waiting threads may take the other completions that came meanwhile.
        self.initiator_cq._wake_all()
        return state

    def _count_posted(self, native: Any) -> int:
        """How many initiator requests were posted, modulo 2**32."""
        return int(self._lib.ndpy_queue_pair_posted(native))

    def _on_window_lost(self, token: int) -> None:
        """The peer has invalidated the window that is bound here with this token."""
        for binding in list(self._bindings or ()):
            if binding.token == token:
                binding.end()

    def _describe(self) -> str:
        state = "never connected" if self._never_connected else "ended" if self._ended else "connected"
        return f"QueuePair ({state})"

    def _native_post_marker(self, native: Any) -> int:
        return int(self._lib.ndpy_post_marker(native))

    def _native_flush_limit_s(self) -> float:
        has_failed = any(queue._failure is not None for queue in self._completion_queues)
        return 0.0 if has_failed else _FLUSH_S

    def _first_failure(self) -> FailedRequest | None:
        """The request of the initiator queue that failed first. None if none has, or if the queue pair was closed."""
        found = self._ffi.new("struct ndpy_failed_request *")
        with self._lock:
            if self._rings is None or not self._lib.ndpy_first_failure(self._rings, found):
                return None
        return FailedRequest(found.context, found.operation, RemoteMemory(found.address, found.length, found.token))
