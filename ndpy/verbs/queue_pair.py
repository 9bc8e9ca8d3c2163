"""RC queue pairs and shared receive queues over verbs.

The native queue pair is created without librdmacm and moved through its states here, so that receives can be posted before
there is a connection, and so that a refused connection leaves it as it was.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion_queue import CompletionQueue
from ndpy.connection_parameters import ReadLimits, RetryPolicy, cap_read_limits
from ndpy.endpoint import Endpoint
from ndpy.flags import Access, Capability, Operation, Status
from ndpy.memory import Binding, MemoryRegion, MemoryWindow, Sge
from ndpy.pending import Pending
from ndpy.queue_pair import (
    QueuePair,
    QueuePairLimits,
    SharedReceiveQueue,
)
from ndpy.verbs.completion_queue import VerbsCompletionQueue
from ndpy.verbs.endpoint import explain, make_ready_to_receive, make_ready_to_send, observe, path_mtu, with_defaults
from ndpy.verbs.memory import VerbsMemoryWindow, native_access
from ndpy.verbs.native_calls import check, check_pointer, ffi, lib, text

if TYPE_CHECKING:
    from ndpy.verbs.adapter import VerbsAdapter

_SUCCESS = int(Status.SUCCESS)
_CANCELED = int(Status.CANCELED)
_INVALID_REQUEST = int(Status.INVALID_REQUEST)

# Renumbered completions of shared receive queues: above every native number, which has 24 bits.
_CLAIMED = 1 << 24

# Longest wait for a queue pair in the error state to flush; what is left then is cancelled here.
_FLUSH_S = 1.0


class _BindRequest:
    """A posted bind; keeps window and region alive, and undoes the binding if it failed."""

    __slots__ = ("binding", "former_rkey", "misuse")

    def __init__(self, binding: Binding, misuse: bool) -> None:
        self.binding = binding
        self.misuse = misuse
        self.former_rkey = 0

    def posted(self, native: Any) -> None:
        """The provider finds the window by its present key, which posting a bind of type 2 does not change."""
        if not self.misuse:
            self.former_rkey = native.rkey
            native.rkey = self.binding.token

    def ended(self, status: int) -> int:
        if status == _SUCCESS:
            return status
        if self.misuse:
            # Kernels differ in what they call a bind of a bound window: an error of its own, or a flush.
            return _INVALID_REQUEST
        self.binding.window._take_key_back(self.binding.token, self.former_rkey)  # type: ignore[attr-defined]
        self.binding.end()
        return status


class _InvalidateRequest:
    """A posted invalidate; ends the binding when it succeeded."""

    __slots__ = ("binding", "window")

    def __init__(self, window: MemoryWindow, binding: Binding | None) -> None:
        self.window = window
        self.binding = binding

    def ended(self, status: int) -> int:
        if self.binding is None:
            return _INVALID_REQUEST if status != _SUCCESS else status
        if status == _SUCCESS:
            self.binding.end()
        else:
            self.binding.invalidating = False
        return status


class VerbsQueuePair(QueuePair):
    _adapter: VerbsAdapter
    _post_one = staticmethod(lib.ndpy_post_one)
    _post_list = staticmethod(lib.ndpy_post)
    _initiator_posted = staticmethod(lib.ndpy_queue_pair_posted)
    _initiator_ended = staticmethod(lib.ndpy_queue_pair_ended)
    receive_cq: VerbsCompletionQueue
    initiator_cq: VerbsCompletionQueue

    def __init__(
        self,
        adapter: VerbsAdapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
    ) -> None:
        super().__init__(adapter, receive_cq, initiator_cq, limits, srq)
        # A posted element list is copied during the call; one array, under the lock, serves all calls.
        count = max(limits.max_receive_sge, limits.max_initiator_sge, 1)
        self._elements = ffi.new("struct ndpy_element[]", count)
        self._elements_view = memoryview(ffi.buffer(self._elements)).cast("B")
        #: The adapter's word for an error of the queue pair itself, "" if there was none.
        self.failure = ""
        self._iwarp = adapter.info.transport == "iWARP"
        self._path: tuple[Endpoint, Endpoint] | None = None
        self._path_mtu = 0
        self._local: Endpoint | None = None
        self._path_limits: ReadLimits | None = None
        request = ffi.new("struct ibv_qp_init_attr *")
        request.qp_context = ffi.cast("void *", self._serial)
        request.send_cq = self.initiator_cq._cq
        request.recv_cq = self.receive_cq._cq
        request.qp_type = lib.IBV_QPT_RC
        request.cap.max_send_wr = max(limits.initiator_queue_depth, 1)
        request.cap.max_send_sge = max(limits.max_initiator_sge, 1)
        request.cap.max_inline_data = limits.inline_data_size
        if srq is not None:
            request.srq = srq._srq  # type: ignore[attr-defined]
        else:
            request.cap.max_recv_wr = max(limits.receive_queue_depth, 1)
            request.cap.max_recv_sge = max(limits.max_receive_sge, 1)
        self._qp = check_pointer("create queue pair", lib.ibv_create_qp(adapter._domain, request))
        self._native: Any = None
        try:
            self._native = check_pointer(
                "create queue pair",
                lib.ndpy_queue_pair_new(
                    self._qp,
                    self._serial,
                    limits.initiator_queue_depth,
                    limits.receive_queue_depth,
                    limits.max_initiator_sge,
                    limits.max_receive_sge,
                    limits.inline_data_size,
                    adapter.info.max_transfer_length,
                ),
            )
            if adapter.info.driver == "siw":
                # It completes what was posted after a read ahead of it, and it cannot fence a read.
                lib.ndpy_queue_pair_fence_all(self._native)
            self._initialise()
        except BaseException:
            lib.ibv_destroy_qp(self._qp)
            lib.ndpy_queue_pair_free(self._native or ffi.NULL)
            raise
        # Kept, because completions are sorted by it after the native queue pair has gone.
        self._number = int(self._qp.qp_num)
        for queue in {receive_cq, initiator_cq}:
            with queue._lock:
                queue._posted_requests[self._serial] = self._posted_requests
                queue._users += 1
        if srq is not None:
            with srq._lock:
                srq._users += 1
            receive_cq._shared_receivers[self._number] = (self._posted_requests, srq)
        self._opened()

    @property
    def number(self) -> int:
        self._check()
        return self._number

    # Receives can only be posted from the state INIT on.
    def _initialise(self) -> None:
        if self._iwarp:
            return
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = lib.IBV_QPS_INIT
        attributes.port_num = self._adapter._port
        attributes.qp_access_flags = self._access_flags()
        mask = lib.IBV_QP_STATE | lib.IBV_QP_PKEY_INDEX | lib.IBV_QP_PORT | lib.IBV_QP_ACCESS_FLAGS
        self._modify(attributes, mask, "create queue pair")

    def _access_flags(self) -> int:
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        if Capability.ATOMICS in self._adapter.info.capabilities:
            access |= Access.REMOTE_ATOMIC
        return native_access(access, self._iwarp)

    # What follows uses the native queue pair: it is called under the lock, and by the constructor.

    def _modify(self, attributes: Any, mask: int, operation: str) -> None:
        check(operation, lib.ibv_modify_qp(self._qp, attributes, mask))

    def _to_state(self, state: int) -> int:
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = state
        return int(lib.ibv_modify_qp(self._qp, attributes, lib.IBV_QP_STATE))

    def _begin_connection(self) -> None:
        """The connection exists: initiator requests may be posted."""
        with self._lock:
            if self._native is not None:
                self._connected()

    def _connected(self) -> None:
        self._never_connected = False
        # Not the connector's property, which refuses what was removed meanwhile.
        limits = self._path_limits or (None if self.connector is None else self.connector._read_limits)
        if limits is not None and not limits.outbound:
            lib.ndpy_queue_pair_refuse_reads(self._native)
        lib.ndpy_queue_pair_set_connection(self._native, lib.NDPY_CONNECTED)

    def _end_connection(self, natively: bool = True) -> None:
        """The connection is over: what is outstanding and what will be posted is cancelled.

        natively: False when the provider ends the queue pair by itself.
        """
        with self._lock:
            if self._released or self._ended or self._qp is None:
                return
            self._set_ended()
            if natively:
                self._to_state(lib.IBV_QPS_ERR)
            if not self._never_connected:
                self._tell_data_path()
            if self._iwarp:
                self._drain_queues()
                self._cancel_rest()
        if self._iwarp:
            self._tell_queues()

    def _tell_data_path(self) -> None:
        # siw has flushed when the state has changed, and does not complete what is posted after that.
        state = lib.NDPY_ENDED_UNPOSTED if self._iwarp else lib.NDPY_ENDED
        lib.ndpy_queue_pair_set_connection(self._native, state)

    def _on_posted_after_end(self, operation: int) -> None:
        with self._lock:
            if self._qp is None:
                return
            if not self._iwarp:
                if operation == Operation.RECEIVE:
                    # rxe flushes receives when the state is set, and not when they are posted later.
                    self._to_state(lib.IBV_QPS_ERR)
                return
            self._drain_queues()
            self._cancel_rest()
        self._tell_queues()

    def _on_failed_completion(self) -> None:
        # Looked at once: another thread may take it away.
        connector = self.connector
        if connector is not None:
            connector._on_failed_completion()

    def flush(self) -> None:
        self._check()
        with self._lock:
            self._check()
            if not self._never_connected:
                self._set_ended()
                check("flush", self._to_state(lib.IBV_QPS_ERR))
                self._tell_data_path()
                return
            self._flush_natively()
            check("flush", self._to_state(lib.IBV_QPS_RESET))
            self._cancel_rest()
            self._initialise()
        self._tell_queues()

    def _flush_natively(self) -> None:
        """Have the provider give back what it holds, for a limited time."""
        self._to_state(lib.IBV_QPS_ERR)
        if not self._iwarp and not self._never_connected:
            self._initiator_records.append(None)
            if not lib.ndpy_post_marker(self._native):
                self._initiator_records.pop()
        # An iWARP provider gives nothing back before there was a connection.
        deadline = time.monotonic() + (0 if self._iwarp and self._never_connected else _FLUSH_S)
        pause = 0.0
        while True:
            self._drain_queues()
            if (
                not (lib.ndpy_queue_pair_in_flight(self._native, 0) or lib.ndpy_queue_pair_in_flight(self._native, 1))
                or time.monotonic() > deadline
            ):
                return
            # The provider flushes in its own time and there is no event for "all done".
            time.sleep(pause)
            pause = min(2 * pause + 0.0002, 0.02)

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

    def _tell_queues(self) -> None:
        """Wake whoever waits for the queues: completions came without an event, or nothing will come any more."""
        for queue in {self.receive_cq, self.initiator_cq}:
            queue._wake_all()

    def _release(self) -> None:
        with self._lock:
            # From here on no connector takes it.
            self._defunct = self._closed_error
        connector = self.connector
        if connector is not None:
            connector._on_queue_pair_closing()
        with self._lock:
            if self._qp is not None:
                self._destroy()
            self._drain_queues()
            self._cancel_rest()
            # Whoever gets the lock next finds neither of the two.
            native, self._native = self._native, None
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
        lib.ndpy_queue_pair_free(native)
        self._tell_queues()

    def _destroy(self) -> None:
        self._flush_natively()
        # Freed before their queue pair: rxe hangs for 51 s if it is the other way round.
        for binding in list(self._bindings):
            binding.window._free()  # type: ignore[attr-defined]
            binding.end()
        result = lib.ibv_destroy_qp(self._qp)
        if result:
            self._mark_still_open()
            check("close queue pair", result)
        self._qp = None

    def _leave_shared_queue(self) -> None:
        assert self.srq is not None
        queue = self.receive_cq
        with queue._lock:
            number = self._number
            claimed = _CLAIMED + self._serial
            entry = queue._shared_receivers.pop(number)
            kept = lib.ndpy_renumber_stored(queue._native, number, claimed)
            if kept:
                self._posted_requests.stored_shared = kept
                queue._shared_receivers[claimed] = entry
        with self.srq._lock:
            self.srq._users -= 1

    def _on_removed(self) -> None:
        self._tell_queues()

    # ---- windows ----

    def _post_bind(
        self, window: MemoryWindow, region: MemoryRegion, element: Sge, access: Access, context: int, flags: int
    ) -> None:
        assert isinstance(window, VerbsMemoryWindow)
        with self._lock:
            self._check()
            bound = window._binding
            misuse = bound is not None and not bound.invalidating
            if bound is None:
                window._prepare(self._serial)
            former_key = window._key
            token = window._next_key()
            binding = Binding(window, self, region, element, access, token)
            if not misuse:
                binding.begin()
            request = _BindRequest(binding, misuse)
            self._initiator_records.append(request)
            try:
                refused = lib.ndpy_post_bind(
                    self._native,
                    flags,
                    context,
                    window._native,
                    region._native,  # type: ignore[attr-defined]
                    element.address,
                    element.length,
                    native_access(access & ~Access.LOCAL_WRITE, self._iwarp),
                    token,
                )
            except (OverflowError, TypeError) as error:
                self._withdraw(binding, bound, former_key, misuse)
                raise self._bad_argument(error, context, flags) from None
            if refused:
                self._withdraw(binding, bound, former_key, misuse)
            else:
                request.posted(window._native)
        if refused:
            raise self._refusal(Operation.BIND, refused, [], flags)

    def _withdraw(self, binding: Binding, former: Binding | None, key: int, misuse: bool) -> None:
        """A bind was not posted: the window is as it was."""
        self._initiator_records.pop()
        window = binding.window
        assert isinstance(window, VerbsMemoryWindow)
        window._key = key
        if not misuse:
            binding.end()
            window._binding = former

    def _post_invalidate(self, window: MemoryWindow, context: int, flags: int) -> None:
        self._check()
        self._require_same_adapter(window, "the window")
        assert isinstance(window, VerbsMemoryWindow)
        with self._lock:
            self._check()
            binding = window._binding
            if binding is not None and (binding.queue_pair is not self or binding.invalidating):
                binding = None
            # Providers do not all check whose window it is; a token that cannot exist is refused by each.
            token = binding.token if binding is not None else 0
            self._initiator_records.append(_InvalidateRequest(window, binding))
            try:
                refused = lib.ndpy_post_invalidate(self._native, flags, context, token)
            except (OverflowError, TypeError) as error:
                self._initiator_records.pop()
                raise self._bad_argument(error, context, flags) from None
            if not refused:
                if binding is not None:
                    binding.invalidating = True
                return
            self._initiator_records.pop()
        raise self._refusal(Operation.INVALIDATE, refused, [], flags)

    # ---- connecting without librdmacm, and what went wrong ----

    def local_endpoint(self, gid_index: int | None = None, psn: int | None = None) -> Endpoint:
        with self._lock:
            self._check()
            former = self._local
            if former is None or gid_index is not None:
                kept = former.psn if former is not None and psn is None else psn
                endpoint = observe(self._adapter, self._number, gid_index, kept)
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
        self._check_unused()
        local = self._local or self.local_endpoint()
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        if remote.inbound_read_limit is not None:
            limits = limits._replace(outbound=min(limits.outbound, remote.inbound_read_limit))
        with self._lock:
            # Another thread may have connected it meanwhile.
            self._check_unused()
            policy = with_defaults(retry)
            make_ready_to_receive(self._qp, self._adapter, local, remote, limits, policy)
            try:
                make_ready_to_send(self._qp, local, limits, policy)
            except BaseException:
                # Messages may have come already, so the queue pair is used up.
                self._set_ended()
                self._to_state(lib.IBV_QPS_ERR)
                raise
            self._path, self._path_mtu = (local, remote), path_mtu(local, remote)
            self._path_limits = limits
            self._connected()

    def _check_unused(self) -> None:
        self._check()
        if not self._never_connected or self._ended or self.connector is not None:
            raise errors.ConnectionActiveError(
                "the queue pair is or was connected; create another one", operation="connect_endpoint"
            )

    @property
    def read_limits(self) -> ReadLimits:
        """The RDMA reads of the peer and of this side that may run at once; NotConnectedError before there is a connection."""
        self._check()
        if self._path_limits is not None:
            return self._path_limits
        connector = self.connector
        if connector is None or self._never_connected:
            raise errors.NotConnectedError("the queue pair has no connection", operation="read_limits")
        return connector.read_limits

    def _explain(self, status: Status) -> str:
        return explain(self._adapter, status, self._path, self.connector, self._path_mtu)

    def _native_status_name(self, native_status: int) -> str:
        return text(lib.ibv_wc_status_str(native_status))

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return errors.from_errno(operation, number)


class VerbsSharedReceiveQueue(SharedReceiveQueue):
    _adapter: VerbsAdapter
    _post_shared = staticmethod(lib.ndpy_post_shared)

    def __init__(self, adapter: VerbsAdapter, depth: int, max_sge: int, threshold: int) -> None:
        super().__init__(adapter, depth, max_sge, threshold)
        self._elements = ffi.new("struct ndpy_element[]", max(max_sge, 1))
        self._elements_view = memoryview(ffi.buffer(self._elements)).cast("B")
        self._armed: list[Pending[None]] = []
        request = ffi.new("struct ibv_srq_init_attr *")
        request.srq_context = ffi.cast("void *", self._serial)
        request.attr.max_wr = depth
        request.attr.max_sge = max_sge
        self._srq = check_pointer("create shared receive queue", lib.ibv_create_srq(adapter._domain, request))
        self._native = lib.ndpy_shared_queue_new(self._srq, depth, max_sge, adapter.info.max_transfer_length)
        if self._native == ffi.NULL:
            lib.ibv_destroy_srq(self._srq)
            raise errors.InsufficientResourcesError("out of memory", operation="create shared receive queue")
        self._opened()

    def _modify_native(self, depth: int, threshold: int) -> None:
        """The provider's queue keeps the depth that it was made with; its limit is set by arm()."""

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return errors.from_errno(operation, number)

    def arm(self) -> Pending[None]:
        self._check()
        pending: Pending[None] = Pending("arm", lambda: self._disarm(pending))
        if not self._threshold:
            raise errors.InvalidFlagsError(
                "the queue has no threshold; give one to create_shared_receive_queue() or modify()"
            )
        with self._lock:
            self._check()
            if len(self._records) < self._threshold:
                pending.succeed(None)
                return pending
            attributes = ffi.new("struct ibv_srq_attr *")
            attributes.srq_limit = min(self._threshold, self.depth)
            check("arm", lib.ibv_modify_srq(self._srq, attributes, lib.IBV_SRQ_LIMIT))
            self._armed.append(pending)
        return pending

    def _disarm(self, pending: Pending[None]) -> None:
        with self._lock:
            self._armed = [armed for armed in self._armed if armed is not pending]

    def _take_armed(self) -> list[Pending[None]]:
        with self._lock:
            armed, self._armed = self._armed, []
        return armed

    def _on_limit(self) -> None:
        """Fewer receives than the threshold are left (IBV_EVENT_SRQ_LIMIT_REACHED)."""
        for pending in self._take_armed():
            pending.succeed(None)

    def _on_error(self) -> None:
        for pending in self._take_armed():
            pending.fail(
                errors.ProviderError("the adapter reports an error of the queue", operation="shared receive queue")
            )

    def _on_forked(self) -> None:
        super()._on_forked()
        self._armed = []

    def _on_removed(self) -> None:
        for pending in self._take_armed():
            pending.fail(self._removed_error())

    def _release(self) -> None:
        with self._lock:
            check("close shared receive queue", lib.ibv_destroy_srq(self._srq))
            self._defunct = self._closed_error
            lib.ndpy_shared_queue_free(self._native)
            self._srq = self._native = None
        for pending in self._take_armed():
            pending.fail(errors.CanceledError("the shared receive queue was closed", operation="arm"))
        self._records.clear()
