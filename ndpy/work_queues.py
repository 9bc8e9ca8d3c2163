"""Work queues: posting sends, receives, reads and writes. The hot path of posting stands here, once for all platforms."""

from __future__ import annotations

import abc
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion import PostedRequests
from ndpy.flags import Capability, Flags, Operation
from ndpy.memory import Elements, InlineElements, MemoryRegion, RemoteMemory, Sge, address_of
from ndpy.resource import Resource

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.shared_receive_queue import SharedReceiveQueue

# enum ndpy_refusal of cdefs/ndpy_abi.h.
QUEUE_FULL, NOT_CONNECTED, TOO_MANY_ELEMENTS, TOO_LONG, INLINE_TOO_LONG, BAD_FLAGS, NO_READS = range(-1, -8, -1)

RECEIVE = int(Operation.RECEIVE)
SEND = int(Operation.SEND)
READ = int(Operation.READ)
WRITE = int(Operation.WRITE)
# enum ndpy_operation: a send that completes as one.
SEND_AND_INVALIDATE = 16
_INLINE = int(Flags.INLINE)
# enum ndpy_internal_flag of cdefs/ndpy_abi.h.
_UNWRITABLE = 0x100
MARKER = 0x200

# struct ndpy_element of cdefs/ndpy_abi.h.
ELEMENT = struct.Struct("=QII")

#: Names of the flags that an operation takes.
_FLAGS_OF: dict[int, str] = {
    SEND: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    SEND_AND_INVALIDATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    WRITE: "SILENT_SUCCESS, READ_FENCE and INLINE",
}


def is_writable(local: Any) -> bool:
    """Whether all of these elements may be written to. Not every provider says that a request failed for this reason."""
    if type(local) is Sge:
        return bool(local.region._writable)
    return all(getattr(getattr(element, "region", element), "_writable", True) for element in flatten(local))


def operation_name(operation: int) -> str:
    """Return the name of the method that posts this operation."""
    return "send_and_invalidate" if operation == SEND_AND_INVALIDATE else Operation(operation).name.lower()


def flatten(local: Any) -> list[Any]:
    """Return the elements as a list. A region is an element with all of its bytes. So is a buffer, with INLINE only."""
    if isinstance(local, (Sge, MemoryRegion, bytes, bytearray, memoryview)):
        return [local]
    return list(local)


def new_elements(ffi: Any, kind: str, count: int) -> tuple[Any, memoryview]:
    """Make a native array of elements. Returns it and a view of its bytes.

    The provider copies a posted list of elements during the call. So one array, used under a lock, serves all calls.
    """
    elements = ffi.new(kind, max(count, 1))
    return elements, memoryview(ffi.buffer(elements)).cast("B")


@dataclass(frozen=True)
class QueuePairLimits:
    """The limits of a queue pair: outstanding requests, elements of one request, and bytes that are sent inline."""

    receive_queue_depth: int
    initiator_queue_depth: int
    max_receive_sge: int
    max_initiator_sge: int
    inline_data_size: int


class WorkQueues(Resource):
    """The two queues of a queue pair, and the requests that are posted to them. Base of QueuePair."""

    #: The platform's extension module, with the functions of cdefs/ndpy_abi.h.
    _lib: Any
    _ffi: Any
    #: Its functions of the hot path.
    _post_one: Any
    _post_list: Any
    #: struct ndpy_queue_pair. None before it exists and after the release.
    _native: Any
    _element_type = "struct ndpy_element[]"
    _element_layout = ELEMENT

    def __init__(self, adapter: Adapter, limits: QueuePairLimits, srq: SharedReceiveQueue | None) -> None:
        super().__init__(adapter)
        self.limits = limits
        self.srq = srq
        #: Guards the native queue pair and its posted requests.
        self._lock = threading.Lock()
        #: The connection is over. Requests that are posted now are cancelled.
        self._ended = False
        self._posted_requests = PostedRequests(self)  # type: ignore[arg-type]
        self._initiator_records = self._posted_requests.initiator
        self._receive_records = self._posted_requests.receive
        count = max(limits.max_receive_sge, limits.max_initiator_sge)
        self._elements, self._elements_view = new_elements(self._ffi, self._element_type, count)
        self._native = None

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @abc.abstractmethod
    def _cancel_late_request(self, operation: int) -> None:
        """Have the provider cancel a request that was posted after the end of the connection."""

    def send(self, sges: InlineElements, *, context: int = 0, flags: int = 0) -> None:
        """Send a message to the peer's oldest posted receive, and return as soon as it is queued.

        Without INLINE the memory belongs to the adapter until the completion is taken. After the connection has ended the
        request completes CANCELED.

        Parameters:
            sges: a region, a slice of one, or a sequence of them. At most limits.max_initiator_sge elements and
                info.max_transfer_length bytes in total. With INLINE also buffers that are not registered, and at most
                limits.inline_data_size bytes.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE.
        Raises:
            NotConnectedError: there was no connection yet.
            QueueFullError: no initiator slot is free. Take completions, then try again.
            LimitExceededError: there are too many elements or bytes.
            InvalidFlagsError: a flag is not one of these.
            ForeignObjectError: a region belongs to another adapter.
            ClosedError: the queue pair or a region is closed.
        Source: IND2QueuePair::Send (contract F.3); ibv_post_send(3) with IBV_WR_SEND.
        """
        self._post(SEND, self._initiator_records, sges, context, flags, 0, 0)

    def receive(self, sges: Elements, *, context: int = 0) -> None:
        """Post memory for one message of the peer. This is possible at any time, also before connecting.

        A message that is longer than the memory completes BUFFER_OVERFLOW and ends the connection.

        Parameters:
            sges: a region, a slice of one, or a sequence of them; at most limits.max_receive_sge elements. The regions need
                Access.LOCAL_WRITE.
            context: 0 to 2**64 - 1; comes back in the Completion.
        Raises:
            QueueFullError: no receive slot is free. Take completions, then try again.
            UnsupportedError: the queue pair takes its receives from a shared receive queue.
            LimitExceededError, ForeignObjectError, ClosedError: as for send().
        Source: IND2QueuePair::Receive; ibv_post_recv(3).
        """
        if self.srq is not None:
            raise errors.UnsupportedError(
                "this queue pair takes its receives from a shared receive queue; call receive() of that queue",
                operation="receive",
            )
        self._post(RECEIVE, self._receive_records, sges, context, 0 if is_writable(sges) else _UNWRITABLE, 0, 0)

    def read(self, sges: Elements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Start an RDMA read of the first bytes of `remote` into `sges`, and return as soon as it is queued.

        The elements are filled in order, and decide how much is read.

        Parameters:
            sges: a region, a slice of one, or a sequence of them; at most remote.length bytes in total. The regions need
                Access.LOCAL_WRITE, and Access.READ_SINK where info.capabilities has READ_SINK_REQUIRED.
            remote: memory of the peer that it has given the right to read.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            ElementRangeError: there are more bytes than `remote` has.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: IND2QueuePair::Read; ibv_post_send(3) with IBV_WR_RDMA_READ.
        """
        self._post(READ, self._initiator_records, sges, context, flags, remote.address, remote.token, remote)

    def write(self, sges: InlineElements, remote: RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        """Start an RDMA write of `sges` into the first bytes of `remote`, and return as soon as it is queued.

        The peer takes no part in it and sees no completion.

        Parameters:
            sges: as for send(); at most remote.length bytes in total.
            remote: memory of the peer that it has given the right to write.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS, READ_FENCE and INLINE.
        Raises:
            ElementRangeError: there are more bytes than `remote` has.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: IND2QueuePair::Write; ibv_post_send(3) with IBV_WR_RDMA_WRITE.
        """
        self._post(WRITE, self._initiator_records, sges, context, flags, remote.address, remote.token, remote)

    def send_and_invalidate(
        self, sges: InlineElements, remote: RemoteMemory, *, context: int = 0, flags: int = 0
    ) -> None:
        """Send a message, and have the peer's adapter invalidate a window when the message arrives.

        The window has to be bound to the peer's end of this connection. On the peer's side, is_bound is False as soon as the
        completion of the message's receive was taken. The request completes as a SEND.

        Parameters:
            sges, context, flags: as for send().
            remote: memory that the window gives access to.
        Raises:
            UnsupportedError: info.capabilities lacks SEND_INVALIDATE, or the provider refuses it all the same.
            NotConnectedError, QueueFullError and so on: as for send().
        Source: INDEndpoint::SendAndInvalidate (contract I.4.2); ibv_post_send(3) with IBV_WR_SEND_WITH_INV.
        """
        self._check()
        if Capability.SEND_INVALIDATE not in self._adapter.info.capabilities:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} cannot invalidate a peer's window with a message; use send(), and let the peer "
                "call invalidate() itself",
                operation="send_and_invalidate",
            )
        self._post_invalidating(sges, remote, context, flags)

    def _post_invalidating(self, sges: InlineElements, remote: RemoteMemory, context: int, flags: int) -> None:
        self._post_many(SEND_AND_INVALIDATE, self._initiator_records, sges, context, flags, 0, remote.token, None)

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
        if remote is not None and local.length > remote.length:
            raise self._exceeds_remote(local.length, remote)
        region = local.region
        # Keeps inline data alive until the provider has copied it. Another thread may close the region meanwhile.
        _owner = region._owner
        if region._defunct is not None or region._adapter is not self._adapter:
            self._require_same_adapter(region, "the region")
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            # Record it first. Another thread may take the completion before the call returns.
            records.append(local)
            try:
                refused = self._post_one(
                    self._native, operation, flags, context, local.address, local.length, local.token, address, token
                )
            except (OverflowError, TypeError) as error:
                records.pop()
                # An exception keeps this frame.
                _owner = None
                raise self._misfit(error, operation, [local], local.length, context, flags) from None
            if refused:
                records.pop()
        if refused:
            _owner = None
            raise self._refusal(operation, refused, [local], flags)
        if self._ended:
            self._cancel_late_request(operation)

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
        inline = operation in (SEND, WRITE, SEND_AND_INVALIDATE) and flags & _INLINE
        limits = self.limits
        limit = limits.max_receive_sge if operation == RECEIVE else limits.max_initiator_sge
        if len(elements) > limit:
            raise self._refusal(operation, TOO_MANY_ELEMENTS, elements, flags)
        # An export keeps inline data from being resized or freed until the provider has copied it.
        exports: list[memoryview] | None = [] if inline else None
        try:
            triples = [self._element(element, exports) for element in elements]
            total = sum(length for _, length, _ in triples)
            if remote is not None and total > remote.length:
                raise self._exceeds_remote(total, remote)
            with self._lock:
                if self._defunct is not None:
                    raise self._defunct()
                layout = self._element_layout
                try:
                    for index, triple in enumerate(triples):
                        layout.pack_into(self._elements_view, index * layout.size, *triple)
                except struct.error as error:
                    raise self._misfit(error, operation, elements, total, context, flags) from None
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
            self._cancel_late_request(operation)

    def _element(self, element: Any, exports: list[memoryview] | None) -> tuple[int, int, int]:
        """The address, length and token of an element.

        exports: an export of memory that is sent inline is added to it. None where memory has to be registered.
        """
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
            "register the buffer, or send up to limits.inline_data_size bytes with Flags.INLINE"
        )

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> errors.NdpyError:
        name = operation_name(operation)
        limits = self.limits
        if refused == QUEUE_FULL:
            queue, depth = ("receive", limits.receive_queue_depth) if operation == RECEIVE else (
                "initiator", limits.initiator_queue_depth
            )  # fmt: skip
            return errors.QueueFullError(
                f"all {depth} slots of the {queue} queue are taken; take completions from its completion queue, then try again",
                operation=name,
            )
        if refused == NOT_CONNECTED:
            return errors.NotConnectedError(
                "the queue pair is not connected yet; connect() and complete_connect(), or accept(), come first",
                operation=name,
            )
        if refused == TOO_MANY_ELEMENTS:
            limit = limits.max_receive_sge if operation == RECEIVE else limits.max_initiator_sge
            return errors.LimitExceededError(
                f"{name}: {len(elements)} elements are more than the {limit} that this queue pair was created for"
            )
        total = sum(element.length if hasattr(element, "length") else len(element) for element in elements)
        if refused == TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {self._adapter.info.max_transfer_length} that the adapter moves at once"
            )
        if refused == INLINE_TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {limits.inline_data_size} that this queue pair sends inline "
                "(inline_data_size of create_queue_pair)"
            )
        if refused == NO_READS:
            return errors.LimitExceededError(
                "read: the connection was made with an outbound read limit of 0; the two sides' read limits decide it"
            )
        if refused == BAD_FLAGS:
            taken = _FLAGS_OF.get(operation, "SILENT_SUCCESS and READ_FENCE")
            return errors.InvalidFlagsError(f"{name} takes the flags {taken}, not {Flags(flags)!r}")
        return self._native_refusal(name, refused)

    @abc.abstractmethod
    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        """Return the exception for an error number of the provider."""

    def _misfit(
        self, error: Exception, operation: int, elements: list[Any], length: int, context: int, flags: int
    ) -> Exception:
        """The exception for a request of which a value does not fit its native field. Lengths have 32 bits."""
        if length >> 32:
            return self._refusal(operation, TOO_LONG, elements, flags)
        return self._bad_argument(error, context, flags)

    @staticmethod
    def _bad_argument(error: Exception, context: int, flags: int) -> Exception:
        if not isinstance(context, int) or not isinstance(flags, int):
            return TypeError("context and flags are integers")
        if not 0 <= context < 1 << 64:
            return ValueError(f"context is 0 to 2**64-1, not {context}")
        return ValueError(f"an address, token or flag does not fit its field: {error}")

    @staticmethod
    def _exceeds_remote(length: int, remote: RemoteMemory) -> errors.ElementRangeError:
        return errors.ElementRangeError(
            f"{length} bytes do not fit the {remote.length} bytes of remote memory; slice one of the two"
        )
