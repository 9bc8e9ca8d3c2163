"""Queue pairs and shared receive queues: posting requests. The hot path of posting stands here, once for all providers."""

from __future__ import annotations

import abc
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion import PostedRequests
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Access, Capability, Flags, Operation, Status
from ndpy.memory import Binding, Elements, InlineElements, MemoryRegion, MemoryWindow, RemoteMemory, Sge, address_of
from ndpy.pending import Pending
from ndpy.resource import Resource, busy
from ndpy.weak_set import SharedWeakSet

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.connection import Connector
    from ndpy.connection_parameters import RetryPolicy
    from ndpy.endpoint import Endpoint

# enum ndpy_refusal of cdefs/ndpy_abi.h.
_QUEUE_FULL, _NOT_CONNECTED, _TOO_MANY_ELEMENTS, _TOO_LONG, _INLINE_TOO_LONG, _BAD_FLAGS, _NO_READS = range(-1, -8, -1)

_RECEIVE = int(Operation.RECEIVE)
_SEND = int(Operation.SEND)
_READ = int(Operation.READ)
_WRITE = int(Operation.WRITE)
# enum ndpy_operation: a send that completes as one.
_SEND_AND_INVALIDATE = 16
_INLINE = int(Flags.INLINE)
# enum ndpy_internal_flag of cdefs/ndpy_abi.h.
_UNWRITABLE = 0x100
_MARKER = 0x200

# Longest wait for the requests before an invalidation of ndpy's own, and for it.
_IDLE_S = 0.02
_REVOKE_S = 5.0

_ELEMENT = struct.Struct("=QII")

_TAKEN_FLAGS: dict[int, str] = {
    _SEND: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    _SEND_AND_INVALIDATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    _WRITE: "SILENT_SUCCESS, READ_FENCE and INLINE",
}


def _writable(local: Any) -> bool:
    """Whether all of these elements may be written; providers do not all say that it was this that failed."""
    if type(local) is Sge:
        return bool(local.region._writable)
    return all(getattr(getattr(element, "region", element), "_writable", True) for element in flatten(local))


def operation_name(operation: int) -> str:
    """What the method is called that posts it."""
    return "send_and_invalidate" if operation == _SEND_AND_INVALIDATE else Operation(operation).name.lower()


def flatten(local: Any) -> list[Any]:
    """Elements as a list; a region alone stands for all of it, a buffer (inline only) for itself."""
    if isinstance(local, (Sge, MemoryRegion, bytes, bytearray, memoryview)):
        return [local]
    return list(local)


@dataclass(frozen=True)
class QueuePairLimits:
    """What a queue pair takes: requests outstanding, elements of one request, bytes sent inline."""

    receive_queue_depth: int
    initiator_queue_depth: int
    max_receive_sge: int
    max_initiator_sge: int
    inline_data_size: int


class QueuePair(Resource):
    """One end of a reliable connection, made by Adapter.create_queue_pair().

    Requests are queued and return at once; how they ended comes as a Completion with the same context, in the order of
    posting. A posted request keeps its regions and their buffers alive until then, whatever the program drops.

    connector: the connector it is connected through, or None. limits: see QueuePairLimits. context: free for the program.
    Source: IND2QueuePair (contract section F); ibv_create_qp(3), ibv_post_send(3), ibv_post_recv(3).
    """

    _release_order = 20

    _native: Any
    _post_one: Any
    _post_list: Any
    _initiator_posted: Any
    _initiator_ended: Any
    _elements: Any
    _elements_view: memoryview
    _element_layout = _ELEMENT

    def __init__(
        self,
        adapter: Adapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
    ) -> None:
        super().__init__(adapter)
        self.receive_cq = receive_cq
        self.initiator_cq = initiator_cq
        self.limits = limits
        self.srq = srq
        self.context: Any = None
        self.connector: Connector | None = None
        self._lock = threading.Lock()
        self._never_connected = True
        #: The connection is over; what is posted is cancelled.
        self._ended = False
        self._posted_requests = PostedRequests(self)
        self._initiator_records = self._posted_requests.initiator
        self._receive_records = self._posted_requests.receive
        self._bindings: set[Binding] = set()
        #: Whose _on_queue_pair_closing() is called before it is closed, and _on_connection_ended() when that happens.
        self._dependants: SharedWeakSet[Any] = SharedWeakSet()

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @property
    def connection_ended(self) -> bool:
        """Whether it had a connection that has ended, or was flushed while it had one."""
        return self._ended

    @abc.abstractmethod
    def _begin_connection(self) -> None:
        """The connection exists: initiator requests may be posted."""

    @abc.abstractmethod
    def _end_connection(self) -> None:
        """The connection is over: what is outstanding is cancelled, and what will be posted."""

    def _set_ended(self) -> None:
        """Its connection is over. Called with locks held."""
        self._ended = True
        for dependant in self._dependants.members():
            dependant._on_connection_ended(self)

    @property
    def _completion_queues(self) -> tuple[CompletionQueue, CompletionQueue]:
        return self.receive_cq, self.initiator_cq

    def send(self, sges: InlineElements, *, context: int = 0, flags: int = 0) -> None:
        """Send a message to the peer's oldest posted receive; return once it is queued.

        sges: an Sge, a region, or a sequence of them, together 0 to info.max_transfer_length bytes; with INLINE also
        bytes that are not registered, up to limits.inline_data_size. context: 0 to 2**64-1.
        Without INLINE the memory belongs to the adapter until the completion is taken.

        Raises NotConnectedError before the connection, QueueFullError when no initiator slot is free,
        LimitExceededError, InvalidFlagsError, ForeignObjectError, ClosedError. After the connection has ended the
        request completes CANCELED. Source: IND2QueuePair::Send; ibv_post_send(3) with IBV_WR_SEND.
        """
        self._post(_SEND, self._initiator_records, sges, context, flags, 0, 0)

    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message of the peer; possible at any time, also before connecting.

        The memory needs Access.LOCAL_WRITE. A message longer than it completes BUFFER_OVERFLOW and ends the connection.
        Raises QueueFullError, LimitExceededError, ForeignObjectError, ClosedError, and UnsupportedError on a queue pair
        with a shared receive queue. Source: IND2QueuePair::Receive; ibv_post_recv(3).
        """
        if self.srq is not None:
            raise errors.UnsupportedError(
                "this queue pair takes its receives from a shared receive queue; post them there", operation="receive"
            )
        self._post(_RECEIVE, self._receive_records, sges, context, 0 if _writable(sges) else _UNWRITABLE, 0, 0)

    def read(self, sges: Elements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Start an RDMA read of the first bytes of `remote` into `sges`; return once it is queued.

        The elements, scattered in order, decide how much is read: at most remote.length bytes; they need
        Access.LOCAL_WRITE, and Access.READ_SINK where info.capabilities has READ_SINK_REQUIRED.
        Errors as for send(). Source: IND2QueuePair::Read; ibv_post_send(3) with IBV_WR_RDMA_READ.
        """
        if type(sges) is Sge and sges.length > remote.length:
            raise self._beyond(sges.length, remote)
        self._post(_READ, self._initiator_records, sges, context, flags, remote.address, remote.token, remote)

    def write(self, sges: InlineElements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Start an RDMA write of `sges` into the first bytes of `remote`; return once it is queued.

        The peer takes no part in it and sees no completion. Errors as for send().
        Source: IND2QueuePair::Write; ibv_post_send(3) with IBV_WR_RDMA_WRITE.
        """
        if type(sges) is Sge and sges.length > remote.length:
            raise self._beyond(sges.length, remote)
        self._post(_WRITE, self._initiator_records, sges, context, flags, remote.address, remote.token, remote)

    def send_and_invalidate(
        self, sges: InlineElements, remote: RemoteMemory, *, context: int = 0, flags: int = 0
    ) -> None:
        """Send a message, and have the peer's adapter invalidate the window that `remote` reaches once it has arrived.

        The window has to be bound to the peer's end of this connection. There, is_bound is False as soon as the message's
        receive completion was taken. Completes as a SEND; sges, context, flags and errors as for send().

        Raises UnsupportedError where info.capabilities lacks SEND_INVALIDATE, or where the provider refuses it all the same.
        Source: INDEndpoint::SendAndInvalidate (contract I.4.2); ibv_post_send(3) with IBV_WR_SEND_WITH_INV.
        """
        self._check()
        if Capability.SEND_INVALIDATE not in self._adapter.info.capabilities:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} cannot invalidate a peer's window with a message; send one, and let the peer "
                "invalidate() the window itself",
                operation="send_and_invalidate",
            )
        self._post_invalidating(sges, remote, context, flags)

    def _post_invalidating(self, sges: InlineElements, remote: RemoteMemory, context: int, flags: int) -> None:
        self._post_many(_SEND_AND_INVALIDATE, self._initiator_records, sges, context, flags, 0, remote.token, None)

    def _on_window_lost(self, token: int) -> None:
        """The peer has invalidated the window that is bound here with this token."""
        for binding in list(self._bindings):
            if binding.token == token:
                binding.end()

    def _post(
        self,
        operation: int,
        records: Any,
        local: Any,
        context: int,
        flags: int,
        address: int,
        token: Any,
        remote: RemoteMemory | None = None,
    ) -> None:
        if type(local) is not Sge:
            self._post_many(operation, records, local, context, flags, address, token, remote)
            return
        region = local.region
        # Kept until the provider has copied what is sent inline; another thread may close the region meanwhile.
        _owner = region._owner
        if region._defunct is not None or region._adapter is not self._adapter:
            self._require_same_adapter(region, "the region")
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            # Recorded first: the completion may be taken by another thread before the call returns.
            records.append(local)
            try:
                refused = self._post_one(
                    self._native, operation, flags, context, local.address, local.length, local.token, address, token
                )
            except (OverflowError, TypeError) as error:
                records.pop()
                # An exception keeps this frame.
                _owner = None
                raise self._bad_argument(error, context, flags) from None
            if refused:
                records.pop()
        if refused:
            _owner = None
            raise self._refusal(operation, refused, [local], flags)
        if self._ended:
            self._on_posted_after_end(operation)

    def _post_many(
        self,
        operation: int,
        records: Any,
        local: Any,
        context: int,
        flags: int,
        address: int,
        token: Any,
        remote: RemoteMemory | None,
    ) -> None:
        elements = flatten(local)
        inline = operation in (_SEND, _WRITE, _SEND_AND_INVALIDATE) and flags & _INLINE
        limits = self.limits
        limit = limits.max_receive_sge if operation == _RECEIVE else limits.max_initiator_sge
        if len(elements) > limit:
            raise self._refusal(operation, _TOO_MANY_ELEMENTS, elements, flags)
        # Exports of what is sent inline: it can be neither resized nor freed until the provider has copied it.
        exports: list[memoryview] | None = [] if inline else None
        try:
            triples = [self._element(element, exports) for element in elements]
            total = sum(length for _, length, _ in triples)
            if remote is not None and total > remote.length:
                raise self._beyond(total, remote)
            with self._lock:
                if self._defunct is not None:
                    raise self._defunct()
                layout = self._element_layout
                for index, triple in enumerate(triples):
                    layout.pack_into(self._elements_view, index * layout.size, *triple)
                records.append(elements)
                try:
                    refused = self._post_list(
                        self._native, operation, flags, context, self._elements, len(triples), address, token
                    )
                except (OverflowError, TypeError) as error:
                    records.pop()
                    raise self._bad_argument(error, context, flags) from None
                if refused:
                    records.pop()
        finally:
            if exports:
                for export in exports:
                    export.release()
        if refused:
            raise self._refusal(operation, refused, elements, flags)
        if self._ended:
            self._on_posted_after_end(operation)

    def _element(self, element: Any, exports: list[memoryview] | None) -> tuple[int, int, int]:
        """(address, length, token); exports: to be added to, None where memory has to be registered."""
        is_slice = isinstance(element, Sge)
        if is_slice or isinstance(element, MemoryRegion):
            region = element.region if is_slice else element
            owner = region._owner
            self._require_same_adapter(region, "the region")
            if exports is not None and isinstance(owner, memoryview):
                exports.append(memoryview(owner))
            return element.address, element.length, element.token if is_slice else element.local_token
        if exports is not None and isinstance(element, (bytes, bytearray, memoryview)):
            view = memoryview(element)
            exports.append(view)
            return (address_of(view) if view.nbytes else 0), view.nbytes, 0
        raise TypeError(
            f"an element is a region or a slice of one, not {type(element).__name__}; "
            "register the buffer, or send up to limits.inline_data_size bytes of it with Flags.INLINE"
        )

    def bind(
        self,
        window: MemoryWindow,
        memory: MemoryRegion | Sge,
        access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE,
        *,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Give this connection's peer rights to a region, or to a slice of one, through a window; return once it is queued.

        window.remote() holds the new token as soon as bind() returns, so that a send which carries it can be posted right
        after. Binding a bound window completes INVALID_REQUEST and ends the connection.

        Parameters:
            memory: a region, or a slice of one: `region[offset:stop]`. At least one byte.
            access: REMOTE_READ, REMOTE_WRITE, both, or NONE (a window that grants nothing). A window that lets the peer
                write needs a region with LOCAL_WRITE. The region needs no remote right of its own.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            AccessViolationError: the region cannot carry these rights.
            ElementRangeError: the slice is empty.
            ForeignObjectError, NotConnectedError, QueueFullError, ClosedError: as for send().
            The window then is as it was before.
        Source: IND2QueuePair::Bind (contract E.2); ibv_post_send(3) with IBV_WR_BIND_MW.
        """
        self._refuse_marker(Operation.BIND, flags)
        self._bind(window, memory, access, context, flags)

    def _expose(self, window: MemoryWindow, memory: Sge, access: Access) -> None:
        """bind() with no completion for the program, unless it fails."""
        self._bind(window, memory, access, 0, _MARKER | Flags.SILENT_SUCCESS)

    def _refuse_marker(self, operation: Operation, flags: int) -> None:
        if isinstance(flags, int) and flags & _MARKER:
            raise self._refusal(operation, _BAD_FLAGS, [], flags)

    def _bind(self, window: MemoryWindow, memory: MemoryRegion | Sge, access: Access, *rest: int) -> None:
        self._check()
        element = memory[:] if isinstance(memory, MemoryRegion) else memory
        if not isinstance(element, Sge):
            raise TypeError(
                f"a window is bound to a region or to a slice of one (region[a:b]), not to a {type(memory).__name__}"
            )
        region = element.region
        self._require_same_adapter(region, "the region")
        self._require_same_adapter(window, "the window")
        if not element.length:
            raise errors.ElementRangeError("a window has at least one byte")
        offset = element.address - region.address
        if not 0 <= offset <= offset + element.length <= region.length:
            raise errors.ElementRangeError(f"{element!r} is outside of {region._describe()}")
        access = Access(access)
        if access & ~(Access.REMOTE_READ | Access.REMOTE_WRITE):
            raise errors.InvalidFlagsError(f"a window grants REMOTE_READ and REMOTE_WRITE, not {access!r}")
        if access & ~Access.LOCAL_WRITE & Access.REMOTE_WRITE and not region.access & Access.LOCAL_WRITE:
            raise errors.AccessViolationError(
                "a window that lets the peer write needs a region with Access.LOCAL_WRITE", operation="bind"
            )
        # Neither can be closed meanwhile.
        with window._lifetime, region._lifetime:
            window._check()
            region._check()
            self._post_bind(window, region, element, access, *rest)

    @abc.abstractmethod
    def _post_bind(
        self, window: MemoryWindow, region: MemoryRegion, element: Sge, access: Access, context: int, flags: int
    ) -> None: ...

    def invalidate(self, window: MemoryWindow, *, context: int = 0, flags: int = 0) -> None:
        """Take back what bind() gave; once it completes, the peer's accesses are refused and end its connection.

        Invalidating a window that is not bound to this queue pair completes INVALID_REQUEST and ends the connection.
        Source: IND2QueuePair::Invalidate (contract E.6); ibv_post_send(3) with IBV_WR_LOCAL_INV.
        """
        self._refuse_marker(Operation.INVALIDATE, flags)
        self._post_invalidate(window, context, flags)

    @abc.abstractmethod
    def _post_invalidate(self, window: MemoryWindow, context: int, flags: int) -> None: ...

    def _revoke(self, window: MemoryWindow) -> bool:
        """Invalidate a window and wait until that has happened, with no completion for the program.

        False if it is not certain that it would happen soon: the connection has ended, or earlier requests are under way.
        Closing the window then takes the peer's right away. Once an invalidation is posted, the window must stay for it.
        """
        binding = window._binding
        if binding is None or binding.queue_pair is not self or self._wait_until_ended(_IDLE_S) != 1:
            return False
        try:
            self._post_invalidate(window, 0, _MARKER)
        except errors.NdpyError:
            return False
        if self._wait_until_ended(_REVOKE_S) != 1:
            return False
        binding.end()
        return True

    def _wait_until_ended(self, seconds: float) -> int:
        """Wait until what is posted now in the initiator queue has ended: 1 if well, -1 if not, 0 at the deadline."""
        deadline = time.monotonic() + seconds
        pause = 0.0
        with self._lock:
            last = 0 if self._native is None else self._initiator_posted(self._native)
        while True:
            self.initiator_cq._retire_silent_requests()
            with self._lock:
                gone = self._native is None or self._ended
                state = -1 if gone else int(self._initiator_ended(self._native, last))
            if state or time.monotonic() > deadline:
                break
            # There is no event for one request of many.
            time.sleep(pause)
            pause = min(2 * pause + 0.00002, 0.005)
        # What else came is for whoever waits for the queue.
        self.initiator_cq._wake_all()
        return state

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = threading.Lock()

    # ---- connections without a connection manager ----

    @property
    def number(self) -> int:
        """The queue pair number (QPN); UnsupportedError on NetworkDirect adapters, which do not tell it."""
        raise self._no_endpoints("number")

    def local_endpoint(self, gid_index: int | None = None, psn: int | None = None) -> Endpoint:
        """This side's part of a connection made without a connection manager, for connect_endpoint() on the other side.

        Called again it is the same one, which the peer may have already, except for what the arguments ask for.
        gid_index: None chooses by rank: RoCE v2 before v1, routable before link-local, IPv4 before IPv6
        (ibv_rc_pingpong takes it as -g). psn: the first packet's sequence number, 24 bits; None for a random one.
        UnsupportedError on iWARP and NetworkDirect adapters, which connect through connectors only; ConnectionActiveError for other values than those of the
        connection that there is.
        """
        raise self._no_endpoints("local_endpoint")

    def connect_endpoint(
        self,
        remote: Endpoint,
        *,
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connect to a peer whose endpoint came by other means: no connection manager takes part.

        This side's end is what local_endpoint() gave last; the peer has to know it. The path MTU is the smaller one of
        the two ends. Nothing is negotiated: more reads at once than the peer serves end the connection.

        Parameters:
            remote: the peer's end.
            inbound_read_limit, outbound_read_limit: reads of the peer and of this side that may run at once. None for the
                adapter's limits; larger ones are lowered, the outbound one also to what the remote endpoint says that it
                serves. read_limits has what holds.
            retry: see RetryPolicy. What it leaves open is as in ibv_rc_pingpong: retry_count 7, rnr_retry_count ENDLESS,
                min_rnr_timer 12, ack_timeout 14.
        Raises:
            UnsupportedError: iWARP and NetworkDirect adapters, which connect through connectors only.
            ConnectionActiveError: the queue pair is connected, or was, or a connector has it.
            ProviderError: the adapter cannot reach that end.
        """
        raise self._no_endpoints("connect_endpoint")

    def _no_endpoints(self, operation: str) -> errors.NdpyError:
        self._check()
        return errors.UnsupportedError(
            f"{self._adapter.info.name} connects through connectors only; use Adapter.connect() and listen()",
            operation=operation,
        )

    def close(self) -> None:
        for dependant in self._dependants.members():
            dependant._on_queue_pair_closing(self)
        super().close()

    @abc.abstractmethod
    def flush(self) -> None:
        """Cancel everything outstanding in both directions; completions with CANCELED follow, in posting order.

        On a connected queue pair later requests complete CANCELED too; one that never was connected stays usable.
        Source: IND2QueuePair::Flush (contract F.7); ibv_modify_qp(3) to IBV_QPS_ERR.
        """

    @abc.abstractmethod
    def _on_posted_after_end(self, operation: int) -> None:
        """A request was posted after the end of the connection."""

    @abc.abstractmethod
    def _on_failed_completion(self) -> None:
        """A request of it failed for another reason than being cancelled; called without locks held."""

    @abc.abstractmethod
    def _explain(self, status: Status) -> str:
        """Likely causes of a failed completion on this connection, or ""."""

    @abc.abstractmethod
    def _native_status_name(self, native_status: int) -> str:
        """The provider's name of a completion status, or ""."""

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> errors.NdpyError:
        name = operation_name(operation)
        limits = self.limits
        if refused == _QUEUE_FULL:
            queue, depth = ("receive", limits.receive_queue_depth) if operation == _RECEIVE else (
                "initiator", limits.initiator_queue_depth
            )  # fmt: skip
            return errors.QueueFullError(
                f"all {depth} slots of the {queue} queue are taken; take completions from its completion queue, then try again",
                operation=name,
            )
        if refused == _NOT_CONNECTED:
            return errors.NotConnectedError(
                "the queue pair is not connected yet; connect() and complete_connect(), or accept(), come first",
                operation=name,
            )
        if refused == _TOO_MANY_ELEMENTS:
            limit = limits.max_receive_sge if operation == _RECEIVE else limits.max_initiator_sge
            return errors.LimitExceededError(
                f"{name}: {len(elements)} elements are more than the {limit} that this queue pair was created for"
            )
        total = sum(element.length if hasattr(element, "length") else len(element) for element in elements)
        if refused == _TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {self._adapter.info.max_transfer_length} that the adapter moves at once"
            )
        if refused == _INLINE_TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {limits.inline_data_size} that this queue pair sends inline "
                "(inline_data_size of create_queue_pair)"
            )
        if refused == _NO_READS:
            return errors.LimitExceededError(
                "read: the connection was made with an outbound read limit of 0; the two sides' read limits decide it"
            )
        if refused == _BAD_FLAGS:
            taken = _TAKEN_FLAGS.get(operation, "SILENT_SUCCESS and READ_FENCE")
            return errors.InvalidFlagsError(f"{name} takes the flags {taken}, not {Flags(flags)!r}")
        return self._native_refusal(name, refused)

    @abc.abstractmethod
    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        """The exception for a number of the provider's own."""

    @staticmethod
    def _bad_argument(error: Exception, context: int, flags: int) -> Exception:
        if not isinstance(context, int) or not isinstance(flags, int):
            return TypeError("context and flags are integers")
        if not 0 <= context < 1 << 64:
            return ValueError(f"context is 0 to 2**64-1, not {context}")
        return ValueError(f"an address, token or flag does not fit its field: {error}")

    @staticmethod
    def _beyond(length: int, remote: RemoteMemory) -> errors.ElementRangeError:
        return errors.ElementRangeError(
            f"{length} bytes do not fit the {remote.length} bytes of remote memory; slice one of the two"
        )

    def _describe(self) -> str:
        state = "never connected" if self._never_connected else "ended" if self._ended else "connected"
        return f"QueuePair ({state})"


class SharedReceiveQueue(Resource):
    """Receives that several queue pairs draw from, made by Adapter.create_shared_receive_queue().

    A message takes the oldest receive; its completion goes to the receive queue of the queue pair that it came for.
    An empty queue makes senders wait; nothing fails. Source: IND2SharedReceiveQueue (contract G.5, G.6); ibv_create_srq(3).
    """

    _release_order = 25

    _native: Any
    _post_shared: Any
    _elements: Any
    _elements_view: memoryview

    def __init__(self, adapter: Adapter, depth: int, max_sge: int, threshold: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        self.max_sge = max_sge
        self._threshold = threshold
        self._lock = threading.Lock()
        self._users = 0
        # Receives of several queue pairs complete in any order, so what they use is kept by slot.
        self._capacity = depth
        self._free = list(range(depth - 1, -1, -1))
        #: Beyond the present depth.
        self._held: list[int] = []
        self._records: dict[int, Any] = {}

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message to any of the queue pairs; see QueuePair.receive().

        Raises QueueFullError, LimitExceededError, ForeignObjectError, ClosedError.
        """
        elements = flatten(sges)
        if len(elements) > self.max_sge:
            raise self._refusal(_TOO_MANY_ELEMENTS, len(elements))
        triples = []
        for element in elements:
            region = element if isinstance(element, MemoryRegion) else getattr(element, "region", None)
            if region is None:
                raise TypeError(f"an element is a region or a slice of one, not {type(element).__name__}")
            self._require_same_adapter(region, "the region")
            token = element.local_token if isinstance(element, MemoryRegion) else element.token
            triples.append((element.address, element.length, token))
        if not isinstance(context, int) or not 0 <= context < 1 << 64:
            raise ValueError(f"context is 0 to 2**64-1, not {context!r}")
        with self._lock:
            self._check()
            if not self._free:
                raise self._refusal(_QUEUE_FULL, 0)
            slot = self._free.pop()
            for index, triple in enumerate(triples):
                _ELEMENT.pack_into(self._elements_view, index * _ELEMENT.size, *triple)
            # Recorded first: its completion may be taken by another thread before the call returns.
            self._records[slot] = elements
            refused = self._post_shared(self._native, slot, context, self._elements, len(triples))
            if refused:
                self._taken(slot)
                raise self._refusal(refused, len(elements))

    def _taken(self, slot: int) -> None:
        """The receive in this slot has ended."""
        self._records.pop(slot, None)
        self._free.append(slot)

    def _refusal(self, refused: int, count: int) -> errors.NdpyError:
        if refused == _QUEUE_FULL:
            return errors.QueueFullError(
                f"all {self.depth} receives are outstanding; take completions, then try again", operation="receive"
            )
        if refused == _TOO_MANY_ELEMENTS:
            return errors.LimitExceededError(
                f"receive: {count} elements are more than the {self.max_sge} of this queue"
            )
        if refused == _TOO_LONG:
            return errors.LimitExceededError(
                f"receive: more bytes than the {self._adapter.info.max_transfer_length} that the adapter moves at once"
            )
        return self._native_refusal("receive", refused)

    @abc.abstractmethod
    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        """The exception for a number of the provider's own."""

    def modify(self, depth: int = 0, threshold: int = 0) -> None:
        """Change the depth and the threshold of arm(); 0 leaves one as it is (contract G.5.3).

        LimitExceededError beyond the adapter's limit or below what is outstanding.
        """
        self._check()
        maximum = self._adapter.info.max_shared_receive_queue_depth
        if not 0 <= depth <= maximum:
            raise errors.LimitExceededError(f"a shared receive queue of this adapter holds 1 to {maximum}, not {depth}")
        with self._lock:
            self._check()
            # Whoever takes completions gives slots back without the lock: there are only more free ones.
            outstanding = self.depth - len(self._free)
            if depth and depth < outstanding:
                raise errors.LimitExceededError(f"{outstanding} receives are outstanding; the depth cannot be {depth}")
            if depth > self._capacity:
                raise errors.UnsupportedError(
                    f"the queue was created for {self._capacity} receives and cannot grow beyond that",
                    operation="modify",
                )
            self._modify_native(depth, threshold)
            if depth:
                for _ in range(self.depth, depth):
                    self._free.append(self._held.pop())
                for _ in range(depth, self.depth):
                    self._held.append(self._free.pop())
                self.depth = depth
            if threshold:
                self._threshold = threshold

    @abc.abstractmethod
    def _modify_native(self, depth: int, threshold: int) -> None:
        """Tell the provider; under the lock."""

    @abc.abstractmethod
    def arm(self) -> Pending[None]:
        """Ask for one notification of fewer than `threshold` receives being outstanding (contract G.6.3)."""

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = threading.Lock()

    def _refuse_if_used(self) -> None:
        if self._users:
            users = [
                child._describe() for child in self._adapter._open_children() if getattr(child, "srq", None) is self
            ]
            raise busy(self, users)

    def _describe(self) -> str:
        return f"SharedReceiveQueue of depth {self.depth}"
