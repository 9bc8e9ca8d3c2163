"""Queue pairs: begin and end of the connection, flush and close, and the windows that are bound to them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, ClassVar

from ndpy import _core, errors
from ndpy.objects import window_requests
from ndpy.objects.completion import FailedRequest
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy, cap_read_limits
from ndpy.objects.memory import Binding, MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.objects.native_steps import QueuePairSteps
from ndpy.objects.operations import MARKER, READ
from ndpy.objects.work_queues import BAD_FLAGS, QueuePairLimits, WorkQueues
from ndpy.vocabulary.flags import Access, Capability, Flags, Operation
from ndpy.vocabulary.queue_pair_attributes import QueuePairAttributes, QueuePairState, QueuePairType, check_change
from ndpy.vocabulary.weak_set import SharedWeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from ndpy.objects.adapter import Adapter
    from ndpy.objects.connection import Connector
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue
    from ndpy.vocabulary.endpoint import Endpoint
    from ndpy.vocabulary.info import PathInfo

# How long close() waits for the provider to end the queue pair's requests.
_FLUSH_S = 1.0

# How long _revoke() waits for the earlier requests, and then for its invalidation.
_IDLE_S = 0.02
_REVOKE_S = 5.0


_RETRYING_TYPES = (QueuePairType.RC, QueuePairType.XRC_SEND)


class QueuePair(WorkQueues, QueuePairSteps):
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

    #: The native queue pair. None before it exists, and after it was destroyed.
    _qp: Any = None
    #: The slots of a queue pair that is being closed: _native, until they are freed.
    _slots: Any = None
    #: Whether it can be connected without a connection manager.
    _has_endpoints: ClassVar[bool] = False
    #: The status of a bind or invalidate that the contract forbids. None: the provider's own status.
    _status_if_forbidden: ClassVar[int | None] = None
    #: When the queue pair is closed, completions of a shared receive queue may be left. They then get a new number: this
    #: one plus the serial number. The sum has to differ from every `_number` of a queue pair that may be created later.
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
        super().__init__(adapter, limits, srq)
        self.type = type
        self.receive_cq = receive_cq
        self.initiator_cq = initiator_cq
        self.context: Any = None
        self.connector: Connector | None = None
        self.failure = ""
        #: The provider's completions of a shared receive queue carry this number.
        self._number = self._serial
        self._never_connected = True
        #: The last result of local_endpoint(). The two ends and the read limits of connect_endpoint().
        self._local: Endpoint | None = None
        self._path: tuple[Endpoint, Endpoint] | None = None
        self._endpoint_limits: ReadLimits | None = None
        #: What modify() has set since the last RESET.
        self._by_hand: dict[str, Any] = {}
        self._bindings: set[Binding] = set()
        #: Their _on_queue_pair_closing() is called before the close, and _on_connection_ended() when the connection ends.
        self._dependants: SharedWeakSet[Any] = SharedWeakSet()
        #: Whether the provider had ended every request when the native queue pair was destroyed.
        self._all_ended = True
        #: The queues that count it as a user. It leaves each of them once, even if Ctrl-C ends a close() half-way.
        self._joined: list[CompletionQueue | SharedReceiveQueue] = []
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
                if self._native is not None:
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
        self._offers = self._offered()
        self._lib.ndpy_queue_pair_offer(native, self._offers)
        self._lib.ndpy_queue_pair_limit_reads(native, self._most_elements(READ))
        return native

    @property
    def connection_ended(self) -> bool:
        """Whether its connection has ended. A flush() during the connection ends it too."""
        return self._ended

    @property
    def path(self) -> PathInfo | None:
        """The path of its connection, which the adapter is asked for at each look. It also tells of an ended connection.

        Returns: None if the transport does not tell: on iWARP, whose connections are those of TCP, and on NetworkDirect.
        Raises:
            NotConnectedError: there was no connection yet.
            ProviderError: the adapter does not answer.
        Source: ibv_query_qp(3).
        """
        with self._lock:
            self._check()
            if self._never_connected:
                raise errors.NotConnectedError("there was no connection yet", operation="path")
            return self._native_path()

    def data_in_order(self, operation: Operation = Operation.WRITE) -> bool:
        """Whether the adapter promises to write the bytes of a message from its first to its last.

        If so, a program may poll the last byte of memory that a peer writes to. Capability.IN_ORDER_DMA is a property of the
        transport, and this is a promise for this queue pair, machine and operation. Many adapters promise nothing.

        Parameters:
            operation: WRITE or RECEIVE for what peers write and send, READ for what this side reads.
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

    @property
    def read_limits(self) -> ReadLimits:
        """How many RDMA reads of the peer and of this side may run at once.

        Raises:
            NotConnectedError: there is no connection.
        """
        self._check()
        if self._endpoint_limits is not None:
            return self._endpoint_limits
        connector = self.connector
        if connector is None or self._never_connected:
            raise errors.NotConnectedError("the queue pair has no connection", operation="read_limits")
        return connector.read_limits

    @property
    def retry(self) -> RetryPolicy:
        """How often and how long the adapter tries again on this connection, as the adapter itself reports it.

        retry.gives_up_s is the time after which a request to a dead host fails. The values may differ from the policy that
        the program asked for: an adapter rounds, a connection manager lowers, and 7 is not possible on rxe.

        All fields are None on adapters without RETRY_POLICY in info.capabilities: iWARP leaves retries to TCP, and
        NetworkDirect leaves them to its provider and does not tell them.

        Raises:
            NotConnectedError: there never was a connection.
        Source: ibv_query_qp(3).
        """
        self._check()
        with self._lock:
            self._check()
            if self._never_connected:
                raise errors.NotConnectedError("the queue pair has no connection", operation="retry")
            if Capability.RETRY_POLICY not in self._adapter.info.capabilities or self.type not in _RETRYING_TYPES:
                return RetryPolicy()
            return self._native_retry()

    @property
    def _completion_queues(self) -> tuple[CompletionQueue, CompletionQueue]:
        return self.receive_cq, self.initiator_cq

    # ---- the connection ----

    def _begin_connection(self) -> None:
        """The connection exists. From now on initiator requests may be posted."""
        with self._lock:
            if self._native is not None:
                self._set_connected()

    def _expect_message(self) -> None:
        """The connector takes the last step of this side. The peer's first message may come before that has ended."""
        self._posted_requests.watched = True

    def _on_message(self) -> None:
        """A message has come. Called without locks held."""
        connector = self.connector
        if connector is not None:
            connector._on_message(self)

    def _set_connected(self) -> None:
        self._never_connected = False
        self._posted_requests.watched = False
        # Not the connector's property, which raises if the adapter was removed meanwhile.
        limits = self._endpoint_limits or (None if self.connector is None else self.connector._read_limits)
        if limits is not None and not limits.outbound:
            self._lib.ndpy_queue_pair_refuse_reads(self._native)
        self._lib.ndpy_queue_pair_set_connection(self._native, self._lib.NDPY_CONNECTED)

    def _set_ended(self) -> None:
        """The connection is over. Called with locks held."""
        if self._ended:
            return
        self._ended = True
        for dependant in self._dependants.members():
            dependant._on_connection_ended(self)

    def _end_connection(self, natively: bool = True) -> None:
        """The connection is over. Cancel the outstanding requests. Later requests are cancelled too.

        natively: False when the provider ends the queue pair by itself.
        """
        with self._lock:
            if self._ended or self._qp is None:
                return
            self._set_ended()
            cancelled = self._native_end_connection(natively)
        if cancelled:
            self._wake_queues()

    def _cancel_late_request(self, operation: int) -> None:
        with self._lock:
            if self._qp is None:
                return
            cancelled = self._native_cancel_late_request(operation)
        if cancelled:
            self._wake_queues()

    def _on_failed_completion(self) -> None:
        """A request failed for another reason than a cancel. Called without locks held."""
        self._native_on_failed_completion()
        # Read it only once, because another thread may set it to None.
        connector = self.connector
        if connector is not None:
            connector._on_failed_completion()

    # ---- the end ----

    def flush(self) -> None:
        """Cancel everything that is outstanding in both directions. Completions with CANCELED follow, in the order of posting.

        On a connected queue pair later requests complete CANCELED too. A queue pair that was never connected stays usable.
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
        for dependant in self._dependants.members():
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
            if self._native is not None:
                self._drain_queues()
                self._cancel_rest()
                # Not before the drain, because a drained bind may have begun its binding.
                for binding in list(self._bindings):
                    binding.end()
                # From now on both _qp and _native are None for the threads that get the lock.
                self._slots = self._native
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
        """Post a request behind silent ones, if there are any and there is a slot. Its end shows that they have ended."""
        self._initiator_records.append(None)
        if self._native_post_marker(self._native):
            return True
        self._initiator_records.pop()
        return False

    def _in_flight(self) -> int:
        """How many requests the provider has not ended."""
        in_flight = self._lib.ndpy_queue_pair_in_flight
        return int(in_flight(self._native, 0) + in_flight(self._native, 1))

    def _awaits_answers(self) -> bool:
        """Whether initiator requests of the connection are outstanding, and none has failed."""
        with self._lock:
            if self._native is None or self._ended:
                return False
            with self.initiator_cq._lock:
                self.initiator_cq._drain()
            return not self._lib.ndpy_queue_pair_ended(self._native, self._count_posted(self._native))

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

    def _drain_queues(self) -> None:
        for queue in set(self._completion_queues):
            with queue._lock:
                queue._drain()

    def _cancel_rest(self) -> None:
        """Cancel the requests that the provider never completed. Call this only when it does not use them any more."""
        for receive, queue in ((1, self.receive_cq), (0, self.initiator_cq)):
            with queue._lock:
                cancelled = self._lib.ndpy_cancel_rest(self._native, receive, queue._native)
                if cancelled < 0:
                    raise errors.from_errno("flush", -cancelled)

    def _join_queues(self) -> None:
        for queue in set(self._completion_queues):
            with queue._lock:
                if queue._failure is not None:
                    raise queue._failure()
                queue._posted_requests[self._serial] = self._posted_requests
                queue._users += 1
                self._joined.append(queue)
        srq = self.srq
        if srq is not None:
            with srq._lock:
                srq._users += 1
                self._joined.append(srq)
            self.receive_cq._shared_receivers[self._number] = (self._posted_requests, srq)

    def _leave_queues(self) -> None:
        """Leave the queues that were joined. Their completions of this queue pair stay with them."""
        if self.srq is not None and self.srq in self._joined:
            self._leave_shared_queue(self.srq)
        for queue in set(self._completion_queues).intersection(self._joined):
            with queue._lock:
                stored = self._lib.ndpy_stored_of(queue._native, self._serial)
                if stored:
                    self._posted_requests.stored[queue._serial] = stored
                    self._posted_requests.watched = True
                else:
                    queue._posted_requests.pop(self._serial, None)
                queue._users -= 1
                self._joined.remove(queue)

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
            self._joined.remove(srq)

    def _wake_queues(self) -> None:
        """Wake everyone who waits for the completion queues. Completions came without an event, or no more will come."""
        for queue in set(self._completion_queues):
            queue._wake_all()

    def _on_removed(self) -> None:
        self._wake_queues()

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = _core.Lock()
        self._singly = _core.Lock()

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
        connection. An invalidate of a window that is not bound to this queue pair completes INVALID_REQUEST and ends the
        connection too.

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

        Returns False if the connection has ended, or if earlier requests are still under way. Then closing the window takes
        the peer's right away. Once an invalidate is posted, the window has to stay open until that has ended.
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
            last = 0 if self._native is None else self._count_posted(self._native)
        while True:
            self.initiator_cq._retire_silent_requests()
            with self._lock:
                gone = self._native is None or self._ended
                state = -1 if gone else int(self._lib.ndpy_queue_pair_ended(self._native, last))
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
        for binding in list(self._bindings):
            if binding.token == token:
                binding.end()

    # ---- connections without a connection manager ----

    @property
    def number(self) -> int:
        """The queue pair number (QPN), on Linux.

        Raises:
            UnsupportedError: NetworkDirect adapters do not tell it.
        """
        self._require_endpoints("number")
        return self._number

    def local_endpoint(
        self, gid_index: int | None = None, psn: int | None = None, *, gid: int | str | None = None
    ) -> Endpoint:
        """This side's part of a connection without a connection manager. The other side gives it to connect_endpoint().

        Later calls return the same endpoint, since the peer may have it already, except for what the arguments ask for.

        Parameters:
            gid_index: the GID to use, as ibv_rc_pingpong's -g. None chooses by rank: RoCE v2 before v1, routable before
                link-local before loopback, IPv4 before IPv6.
            psn: the first packet's sequence number, 24 bits. None for a random one.
            gid: the GID to use, by its index, its address such as "192.0.2.1" or "fe80::1%eth0", or its network interface such as
                "eth0.10". The best one by rank, if there are several. Of several interfaces with the address, it is the one by which
                this machine's routes lead to the address's subnet.
        Raises:
            ValueError: there are a gid and a gid_index.
            UnsupportedError: iWARP adapters other than soft0, and NetworkDirect's, connect through connectors only.
            ConnectionActiveError: the queue pair is connected with other values than these.
            AddressUnreachableError: the adapter has no such GID, or the routes prefer none of several interfaces with the address.
        """
        self._require_endpoints("local_endpoint")
        if gid_index is not None and gid is not None:
            raise ValueError(f"gid_index={gid_index!r} and gid={gid!r} both choose the GID; give one of them")
        wanted = gid_index if gid is None else gid
        with self._lock:
            self._check()
            former = self._local
            if former is None or wanted is not None:
                endpoint = self._native_endpoint(wanted, former.psn if former is not None and psn is None else psn)
            else:
                endpoint = former if psn is None else dataclasses.replace(former, psn=psn & 0xFFFFFF)
            if self._path is not None and endpoint != self._path[0]:
                raise errors.ConnectionActiveError(
                    f"the queue pair is connected as {self._path[0]} with PSN {self._path[0].psn:#x}",
                    operation="local_endpoint",
                )
            self._local = endpoint
            return endpoint

    def connect_endpoint(
        self,
        remote: Endpoint,
        *,
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connect to a peer without a connection manager. The program has brought the two endpoints across by itself.

        This side's endpoint is what local_endpoint() returned last, and the peer has to know it. The path MTU is the smaller
        one of the two ends. Nothing is negotiated: more reads at once than the peer serves end the connection.

        Parameters:
            remote: the peer's endpoint.
            inbound_read_limit: how many reads of the peer may run at once. None for the adapter's limit. A larger limit is
                lowered to that.
            outbound_read_limit: how many reads of this side may run at once. None for the adapter's limit. A larger limit is
                lowered to that, and to what the remote endpoint says that it serves. read_limits has both results.
            retry: see RetryPolicy. Fields that are None are as in ibv_rc_pingpong: retry_count 7 (6 on rxe),
                rnr_retry_count ENDLESS, min_rnr_timer 12, ack_timeout 14.
        Raises:
            UnsupportedError: iWARP adapters other than soft0, and NetworkDirect's, connect through connectors only.
            ConnectionActiveError: the queue pair is connected, or was, or a connector has it.
            ProviderError: the adapter cannot reach that endpoint.
        """
        self._require_endpoints("connect_endpoint")
        if self.type is QueuePairType.UD:
            raise self._does_not("connect_endpoint")
        self._require_unused()
        if retry is not None and self.type not in (*_RETRYING_TYPES, QueuePairType.XRC_RECV):
            raise errors.UnsupportedError(
                f"a queue pair of type {self.type.name} does not try again, so it has no RetryPolicy",
                operation="connect_endpoint",
            )
        local = self._local or self.local_endpoint()
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        if self.type is QueuePairType.XRC_SEND:
            limits = limits._replace(inbound=0)
        elif self.type is QueuePairType.XRC_RECV:
            limits = limits._replace(outbound=0)
        elif self.type is not QueuePairType.RC:
            limits = ReadLimits(0, 0)
        if remote.inbound_read_limit is not None:
            limits = limits._replace(outbound=min(limits.outbound, remote.inbound_read_limit))
        with self._lock:
            # Another thread may have connected it meanwhile.
            self._require_unused()
            self._native_connect_endpoint(local, remote, limits, retry or RetryPolicy())
            self._path, self._endpoint_limits = (local, remote), limits
            self._set_connected()

    # ---- by hand ----

    def modify(self, **attributes: Any) -> None:
        """Set attributes of the queue pair by hand, and change its state.

        The queue pair is in the state INIT when it is made. A program that connects it by hand makes it ready to receive (RTR)
        and then to send (RTS), on both sides. It takes either this way, or connect_endpoint(), or a connector. A queue pair of
        a connector can be modified between RTS and SQD, and to ERROR.

        Parameters:
            attributes: those of QueuePairAttributes, by name. Which ones a change of state needs and takes depends on the type
                of the queue pair. CHANGES in ndpy/vocabulary/queue_pair_attributes.py has the table. For RTS, the defaults of
                connect_endpoint() are good values.
        Raises:
            QueuePairAttributesError: an attribute is missing, or one is too many; the message names them. Or there is no such
                change of state.
            ValueError, TypeError: a value is out of range, or of a wrong type.
            UnsupportedError: info.capabilities lacks MODIFY.
            ConnectionActiveError: a connector has the queue pair.
            DeviceBusyError: RESET, while windows are bound to the queue pair.
            ProviderError: the adapter refused the values.
        After RESET the queue pair is as if it was new, and its outstanding requests complete CANCELED. After ERROR they do so
        too, and later requests as well.
        Source: ibv_modify_qp(3).
        """
        given = QueuePairAttributes(**attributes).given()
        self._require_modify("modify")
        with self._lock:
            self._check()
            present = self._native_state()
            check_change(self.type, present, given)
            state = given.get("state", present)
            if (
                self.connector is not None
                and state is not QueuePairState.ERROR
                and not (self._never_connected is False and state in (QueuePairState.RTS, QueuePairState.SQD))
            ):
                raise errors.ConnectionActiveError("a connector has the queue pair", operation="modify")
            cancelled = self._change(state, given)
        if cancelled:
            self._wake_queues()

    def _change(self, state: QueuePairState, given: dict[str, Any]) -> bool:
        """Do modify(), under the lock. Returns whether completions were added of which the provider does not notify."""
        if state is QueuePairState.ERROR:
            self._never_connected = False
            cancelled = self._native_flush()
            self._set_ended()
            return cancelled
        if state is QueuePairState.RESET:
            if self._bindings:
                raise errors.DeviceBusyError(
                    f"{len(self._bindings)} windows are bound to the queue pair; invalidate or close them first",
                    operation="modify",
                )
            self._native_reset()
            self._never_connected, self._ended, self.failure = True, False, ""
            self._local = self._path = self._endpoint_limits = None
            self._by_hand = {}
            self._posted_requests.failed = False
            self._lib.ndpy_queue_pair_restart(self._native)
            return True
        self._native_modify(given)
        self._by_hand |= given
        if state is QueuePairState.RTS and self._never_connected:
            limits = [self._by_hand.get(f"{side}_read_limit", 0) for side in ("inbound", "outbound")]
            self._endpoint_limits = ReadLimits(*limits)
            self._set_connected()
        return False

    def query(self) -> QueuePairAttributes:
        """The attributes that the queue pair has now, as the adapter tells them. Those that it does not tell are None.

        Raises:
            UnsupportedError: info.capabilities lacks MODIFY.
        Source: ibv_query_qp(3).
        """
        self._require_modify("query")
        with self._lock:
            self._check()
            return self._native_query()

    def _require_modify(self, operation: str) -> None:
        self._check()
        if Capability.MODIFY not in self._adapter.info.capabilities:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} connects through connectors only, which set all attributes",
                operation=operation,
            )

    def _require_endpoints(self, operation: str) -> None:
        self._check()
        if not self._has_endpoints:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} connects through connectors only; use Adapter.connect() and listen()",
                operation=operation,
            )

    def _require_unused(self) -> None:
        self._check()
        if not self._never_connected or self._ended or self.connector is not None:
            raise errors.ConnectionActiveError(
                "the queue pair is or was connected; create another one", operation="connect_endpoint"
            )

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
            if self._native is None or not self._lib.ndpy_first_failure(self._native, found):
                return None
        return FailedRequest(found.context, found.operation, RemoteMemory(found.address, found.length, found.token))
