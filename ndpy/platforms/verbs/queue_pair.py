"""RC queue pairs over verbs.

This module creates the native queue pair without librdmacm, and moves it through its states. So receives can be posted
before there is a connection, and a refused connection leaves the queue pair as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy
from ndpy.objects.memory import Binding, MemoryWindow
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import with_own_methods
from ndpy.objects.window_requests import BindRequest
from ndpy.platforms.verbs.completion_queue import VerbsCompletionQueue
from ndpy.platforms.verbs.endpoint import (
    Reliability,
    explain,
    finite_retry_count,
    local_endpoint_of,
    make_ready_to_receive,
    make_ready_to_send,
    path_mtu,
    path_of,
    with_defaults,
)
from ndpy.platforms.verbs.memory import VerbsMemoryWindow, native_access
from ndpy.platforms.verbs.native_calls import check, ffi, free_once, lib, new_pointer, newer_operations, text
from ndpy.platforms.verbs.queue_pair_attributes import NATIVE_TYPES, modify, query, state_of
from ndpy.vocabulary.endpoint import Endpoint
from ndpy.vocabulary.flags import Access, Capability, Operation, Status
from ndpy.vocabulary.queue_pair_attributes import QueuePairAttributes, QueuePairState, QueuePairType
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter
    from ndpy.vocabulary.addresses import Address
    from ndpy.vocabulary.info import PathInfo


# What the peer may do besides reading and writing, where the adapter has it.
_RIGHTS_OF_PEERS = {
    Capability.ATOMICS: Access.REMOTE_ATOMIC,
    Capability.FLUSH: Access.FLUSH_GLOBAL,
    Capability.FLUSH_PERSISTENT: Access.FLUSH_PERSISTENT,
}


_OWN_MEMORY = (
    "this side's memory lacks the right that the request needs (LOCAL_WRITE, READ_SINK), or is not registered any more"
)
_MEANINGS = {
    (Status.IO_TIMEOUT, lib.IBV_WC_RETRY_EXC_ERR): "the peer did not answer",
    (Status.IO_TIMEOUT, lib.IBV_WC_RESP_TIMEOUT_ERR): "the peer did not answer",
    (
        Status.IO_TIMEOUT,
        lib.IBV_WC_RNR_RETRY_EXC_ERR,
    ): "the peer answers, but had no receive posted for the message in time; "
    "post receives there before this side sends",
    (
        Status.ACCESS_VIOLATION,
        lib.IBV_WC_REM_ACCESS_ERR,
    ): "the peer's adapter refused access to its memory: the token is wrong or "
    "was released, the range leaves the memory, or a right is missing",
    (Status.ACCESS_VIOLATION, lib.IBV_WC_LOC_PROT_ERR): _OWN_MEMORY,
    (Status.ACCESS_VIOLATION, lib.IBV_WC_LOC_ACCESS_ERR): _OWN_MEMORY,
    (Status.DATA_OVERRUN, lib.IBV_WC_REM_INV_REQ_ERR): "the message is longer than the peer's receive",
    (Status.REMOTE_ERROR, lib.IBV_WC_REM_INV_REQ_ERR): "the peer refused the request as one that it does not serve",
    (
        Status.REMOTE_ERROR,
        lib.IBV_WC_REM_OP_ERR,
    ): "the peer failed to carry out the request; if it was a send, the peer's receive "
    "may have been shorter than the message",
}

#: The words of `ndpy explain`.
_PROBLEMS = {
    lib.IBV_WC_LOC_LEN_ERR: "local-length",
    lib.IBV_WC_LOC_QP_OP_ERR: "local-operation",
    lib.IBV_WC_LOC_EEC_OP_ERR: "reliable-datagram",
    lib.IBV_WC_LOC_PROT_ERR: "local-protection",
    lib.IBV_WC_WR_FLUSH_ERR: "flushed",
    lib.IBV_WC_MW_BIND_ERR: "window-bind",
    lib.IBV_WC_BAD_RESP_ERR: "bad-response",
    lib.IBV_WC_LOC_ACCESS_ERR: "local-access",
    lib.IBV_WC_REM_INV_REQ_ERR: "remote-invalid-request",
    lib.IBV_WC_REM_ACCESS_ERR: "remote-access",
    lib.IBV_WC_REM_OP_ERR: "remote-operation",
    lib.IBV_WC_RETRY_EXC_ERR: "retry-exceeded",
    lib.IBV_WC_RNR_RETRY_EXC_ERR: "rnr-retry",
    lib.IBV_WC_LOC_RDD_VIOL_ERR: "reliable-datagram",
    lib.IBV_WC_REM_INV_RD_REQ_ERR: "reliable-datagram",
    lib.IBV_WC_REM_ABORT_ERR: "remote-abort",
    lib.IBV_WC_INV_EECN_ERR: "reliable-datagram",
    lib.IBV_WC_INV_EEC_STATE_ERR: "reliable-datagram",
    lib.IBV_WC_FATAL_ERR: "adapter-fatal",
    lib.IBV_WC_RESP_TIMEOUT_ERR: "response-timeout",
    lib.IBV_WC_GENERAL_ERR: "general-error",
}


@with_own_methods
class VerbsQueuePair(QueuePair):
    _adapter: VerbsAdapter
    _lib = lib
    _ffi = ffi
    # Some kernels report a bind of a bound window as a special error, and others as a flush.
    _status_if_forbidden = int(Status.INVALID_REQUEST)
    # Above every native number. A native number has 24 bits, and another queue pair may get it soon.
    _renumbered_from = 1 << 24
    receive_cq: VerbsCompletionQueue
    initiator_cq: VerbsCompletionQueue
    _has_endpoints = True
    __slots__ = ("_former_addresses", "_has_last_receive", "_path_mtu")

    def __init__(self, *arguments: Any) -> None:
        #: Whether it takes no more receives of its shared receive queue, in the error state.
        self._has_last_receive = False
        #: The path MTU of the connection, made with or without librdmacm.
        self._path_mtu = 0
        #: This side's address and the peer's, of the connection whose connector has let go of the queue pair.
        self._former_addresses: tuple[Address, Address] | None = None
        super().__init__(*arguments)

    # ---- creation and states ----

    def _native_request(self) -> Any:
        """struct ibv_qp_init_attr."""
        limits = self.limits
        request = ffi.new("struct ibv_qp_init_attr *")
        request.qp_context = ffi.cast("void *", self._serial)
        request.send_cq = self.initiator_cq._cq
        request.recv_cq = self.receive_cq._cq
        request.qp_type = NATIVE_TYPES[self.type]
        request.cap.max_send_wr = max(limits.initiator_queue_depth, 1)
        request.cap.max_send_sge = max(limits.max_initiator_sge, 1)
        request.cap.max_inline_data = limits.inline_data_size
        if self.srq is not None:
            request.srq = self.srq._srq
        else:
            request.cap.max_recv_wr = max(limits.receive_queue_depth, 1)
            request.cap.max_recv_sge = max(self._receive_elements(), 1)
        return request

    def _native_create(self) -> Any:
        request = self._native_request()
        operations = newer_operations(self._adapter.info.capabilities) if self.type is QueuePairType.RC else 0
        if operations:
            call = lib.ndpy_create_queue_pair
            return new_pointer("create queue pair", call, self._adapter._domain, request, operations)
        return new_pointer("create queue pair", lib.ibv_create_qp, self._adapter._domain, request)

    def _receive_elements(self) -> int:
        """How many elements of a receive the provider gets at most."""
        return self.limits.max_receive_sge

    def _native_set_up(self) -> None:
        if {Quirk.SIW_OVERTAKES_READS, Quirk.SIW_STUMBLES_OVER_EMPTY_ELEMENTS} & self._adapter._quirks:
            lib.ndpy_queue_pair_work_around_siw(self._rings)
        self._initialise()
        # Completions are sorted by this number, even after the native queue pair has gone.
        self._number = int(self._qp.qp_num)

    # Receives can only be posted from the state INIT on.
    def _initialise(self) -> None:
        if Quirk.IWARP_MANAGER_ONLY in self._adapter._quirks:
            return
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = lib.IBV_QPS_INIT
        attributes.port_num = self._adapter._port
        attributes.qp_access_flags = native_access(self._access(), False)
        mask = lib.IBV_QP_STATE | lib.IBV_QP_PKEY_INDEX | lib.IBV_QP_PORT | lib.IBV_QP_ACCESS_FLAGS
        self._modify(attributes, mask, "create queue pair")

    def _access(self) -> Access:
        if self.type is QueuePairType.UC:
            return Access.REMOTE_WRITE
        if self.type is QueuePairType.XRC_SEND:
            return Access.NONE
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        capabilities = self._adapter.info.capabilities
        for capability, right in _RIGHTS_OF_PEERS.items():
            if capability in capabilities:
                access |= right
        return access

    def _modify(self, attributes: Any, mask: int, operation: str) -> None:
        check(operation, lib.ibv_modify_qp(self._qp, attributes, mask))

    def _to_state(self, state: int) -> int:
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = state
        return int(lib.ibv_modify_qp(self._qp, attributes, lib.IBV_QP_STATE))

    # ---- the end ----

    def _native_end_connection(self, natively: bool) -> bool:
        if natively:
            self._native_begin_flush()
        if not self._never_connected:
            self._tell_data_path()
        return self._cancel_unless_flushed()

    def _tell_data_path(self) -> None:
        state = lib.NDPY_ENDED if self._native_completes_late_requests() else lib.NDPY_ENDED_UNPOSTED
        lib.ndpy_queue_pair_set_connection(self._rings, state)

    def _cancel_unless_flushed(self) -> bool:
        """If the provider will never flush what is left, cancel it. Returns whether it was cancelled."""
        if self._native_completes_late_requests():
            return False
        self._drain_queues()
        self._cancel_rest()
        return True

    def _native_cancel_late_request(self, operation: int) -> bool:
        if operation == Operation.RECEIVE and Quirk.RXE_KEEPS_LATE_RECEIVES in self._adapter._quirks:
            self._native_begin_flush()
        return self._cancel_unless_flushed()

    def _native_begin_flush(self) -> None:
        self._to_state(lib.IBV_QPS_ERR)

    def _native_flush(self) -> bool:
        if not self._never_connected:
            # Do this first: a thread that takes a completion meanwhile judges it by this.
            self._set_ended()
            check("flush", self._to_state(lib.IBV_QPS_ERR))
            self._tell_data_path()
            return self._cancel_unless_flushed()
        self._reset("flush")
        self._initialise()
        return True

    def _reset(self, operation: str) -> None:
        self._wait_until_given_back()
        check(operation, self._to_state(lib.IBV_QPS_RESET))
        self._has_last_receive = False
        self._cancel_rest()

    def _native_reset(self) -> None:
        self._reset("modify")

    def _native_state(self) -> QueuePairState:
        return state_of(self._qp)

    def _native_modify(self, given: dict[str, Any]) -> None:
        if "retry_count" in given:
            given = {**given, "retry_count": finite_retry_count(self._adapter, given["retry_count"])}
        modify(self._qp, given)
        self._path_mtu = given.get("path_mtu", self._path_mtu)

    def _native_query(self) -> QueuePairAttributes:
        return query(self._qp, self.type)

    def _native_completes_late_requests(self) -> bool:
        return Quirk.IWARP_KEEPS_LATE_REQUESTS not in self._adapter._quirks

    def _native_flush_limit_s(self) -> float:
        if self._never_connected and Quirk.IWARP_KEEPS_UNCONNECTED_REQUESTS in self._adapter._quirks:
            return 0.0
        return super()._native_flush_limit_s()

    def _native_has_last_receive(self) -> bool:
        # Until IBV_EVENT_QP_LAST_WQE_REACHED, the adapter may still take a receive for it (ibv_get_async_event(3)).
        device = self._adapter._verbs_device
        if self.srq is None or self._never_connected or device._tells_last_receives is False:
            return True
        if device._events.is_current():
            # Nobody else handles the event.
            device._on_device_events()
        return self._has_last_receive

    def _wait_until_given_back(self) -> None:
        super()._wait_until_given_back()
        device = self._adapter._verbs_device
        if self._native_has_last_receive() or self._in_flight() or not self._native_flush_limit_s():
            return
        if device._tells_last_receives is None:
            # This driver does not tell it. That was the only wait for it.
            device._tells_last_receives = False

    def _native_destroy(self) -> None:
        # Free windows before their queue pair (Quirk.RXE_WINDOW_OUTLIVES_QUEUE_PAIR).
        for binding in list(self._bindings or ()):
            binding.window._native_free()
            binding.end()
        try:
            free_once(self, "_qp", "close queue pair", lib.ibv_destroy_qp)
        except errors.ProviderError:
            self._mark_still_open()
            raise

    def _native_free_slots(self, native: Any) -> None:
        # The queue pair's completions went with it.
        lib.ndpy_queue_pair_free(native)

    # ---- windows ----

    def _native_choose_token(self, window: MemoryWindow) -> int:
        assert isinstance(window, VerbsMemoryWindow)
        if window._binding is None:
            window._prepare(self._serial)
        return window._next_key()

    def _native_return_token(self, binding: Binding) -> None:
        binding.window._return_key(binding.token)  # type: ignore[attr-defined]

    def _native_post_bind(self, binding: Binding, context: int, flags: int) -> int:
        window = binding.window
        assert isinstance(window, VerbsMemoryWindow)
        if window._is_of_type_1:
            window._former_key = int(window._native.rkey)
            rights = native_access(binding.access & ~Access.LOCAL_WRITE, False)
            refused = self._post_bind_of_type_1(
                Operation.BIND, binding, binding.address, binding.length, rights, context, flags
            )
            if not refused:
                # The provider has chosen it.
                binding.token = window._key = int(window._native.rkey)
            return refused
        return int(
            lib.ndpy_post_bind(
                self._rings,
                flags,
                context,
                binding.window._native,
                binding.region._native,
                binding.address,
                binding.length,
                native_access(binding.access & ~Access.LOCAL_WRITE, False),
                binding.token,
            )
        )

    def _post_bind_of_type_1(
        self, operation: Operation, binding: Binding, address: int, length: int, rights: int, context: int, flags: int
    ) -> int:
        window: Any = binding.window
        region: Any = binding.region
        post = lib.ndpy_post_bind_of_type_1
        return int(
            post(self._rings, flags, context, window._native, region._native, address, length, rights, operation)
        )

    def _native_bind_posted(self, request: BindRequest) -> None:
        # The provider finds the window by its present key. Posting a bind of type 2 does not change this key.
        window = request.binding.window
        assert isinstance(window, VerbsMemoryWindow)
        with window._using:
            if window._native is None:
                # The queue pair that it was bound to has been closed meanwhile.
                return
            request.former_key = window._former_key if window._is_of_type_1 else window._native.rkey
            if not (request.of_bound_window or request.failed):
                window._native.rkey = request.binding.token

    def _native_bind_failed(self, request: BindRequest) -> None:
        request.binding.window._replace_key(request.binding.token, request.former_key)  # type: ignore[attr-defined]

    def _native_bind_took_effect(self, request: BindRequest) -> None:
        request.binding.window._replace_key(request.former_key, request.binding.token)  # type: ignore[attr-defined]

    def _native_post_invalidate(self, window: MemoryWindow, binding: Binding | None, context: int, flags: int) -> int:
        if binding is not None and window._is_of_type_1:  # type: ignore[attr-defined]
            return self._post_bind_of_type_1(Operation.INVALIDATE, binding, binding.address, 0, 0, context, flags)
        # Not every provider checks whose window it is. But each one refuses a token that cannot exist.
        return int(lib.ndpy_post_invalidate(self._rings, flags, context, 0 if binding is None else binding.token))

    # ---- connecting without librdmacm, and what went wrong ----

    def _native_endpoint(self, gid: int | str | None, psn: int | None) -> Endpoint:
        return local_endpoint_of(self._adapter, self._number, gid, psn)

    def _native_connect_endpoint(
        self, local: Endpoint, remote: Endpoint, limits: ReadLimits, retry: RetryPolicy
    ) -> None:
        reliability = Reliability(limits, with_defaults(self._adapter, retry))
        make_ready_to_receive(self._qp, self.type, self._adapter, local, remote, reliability)
        try:
            make_ready_to_send(self._qp, self.type, local, reliability)
        except BaseException:
            # Messages may have come already, so the queue pair is used up.
            self._set_ended()
            self._to_state(lib.IBV_QPS_ERR)
            raise
        self._path_mtu = path_mtu(local, remote)

    def _native_retry(self) -> RetryPolicy:
        attributes, initial = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        wanted = lib.IBV_QP_RETRY_CNT | lib.IBV_QP_RNR_RETRY | lib.IBV_QP_MIN_RNR_TIMER | lib.IBV_QP_TIMEOUT
        check("retry", lib.ibv_query_qp(self._qp, attributes, wanted, initial))
        return RetryPolicy(attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer, attributes.timeout)

    def _native_data_in_order(self, operation: Operation) -> bool:
        opcodes = {Operation.WRITE: lib.IBV_WR_RDMA_WRITE, Operation.READ: lib.IBV_WR_RDMA_READ}
        return bool(lib.ibv_query_qp_data_in_order(self._qp, opcodes.get(operation, lib.IBV_WR_SEND), 0))

    def _native_path(self) -> PathInfo | None:
        if Quirk.IWARP_NO_PATH_MTU in self._adapter._quirks:
            return None
        return path_of(self._adapter, self._qp)

    def _explain(self, status: Status, native_status: int = 0) -> str:
        addresses, connector = self._former_addresses, self.connector
        if connector is not None:
            addresses = connector._addresses()  # type: ignore[attr-defined]
        answers = native_status == lib.IBV_WC_RNR_RETRY_EXC_ERR
        return explain(self._adapter, status, self._path, addresses, self._path_mtu, answers=answers)

    def _native_meaning(self, status: Status, native_status: int) -> str:
        return _MEANINGS.get((status, native_status), "")

    def _native_status_name(self, native_status: int) -> str:
        return text(lib.ibv_wc_status_str(native_status))

    def _native_problem(self, native_status: int) -> str:
        return _PROBLEMS.get(native_status, "")

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return errors.from_errno(operation, number)
