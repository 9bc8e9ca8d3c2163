"""Work queues: posting sends, receives, reads and writes.

cdefs/core/work_queues.c posts one element of a region by itself. Here stands what it leaves: several elements, bytes that are
sent inline, and what a refusal means.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ndpy import _core, errors
from ndpy.objects.completion import PostedRequests
from ndpy.objects.memory import Elements, InlineElements, MemoryRegion, RemoteMemory, Sge, address_of, plain_view
from ndpy.objects.resource import Resource
from ndpy.vocabulary.flags import Capability, Flags, FlushKind, Operation
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue

# enum ndpy_refusal of cdefs/ndpy_abi.h.
QUEUE_FULL, NOT_CONNECTED, TOO_MANY_ELEMENTS, TOO_LONG, INLINE_TOO_LONG, BAD_FLAGS, NO_READS, BAD_TOKEN = range(
    -1, -9, -1
)
UNSUPPORTED, NOT_ATOMIC, UNALIGNED, NOT_WRITABLE = range(-10, -14, -1)

RECEIVE = int(Operation.RECEIVE)
SEND = int(Operation.SEND)
READ = int(Operation.READ)
WRITE = int(Operation.WRITE)
COMPARE_AND_SWAP = int(Operation.COMPARE_AND_SWAP)
FETCH_AND_ADD = int(Operation.FETCH_AND_ADD)
ATOMIC_WRITE = int(Operation.ATOMIC_WRITE)
FLUSH_MEMORY = int(Operation.FLUSH_MEMORY)
# enum ndpy_operation: sends and a write, which complete as such.
SEND_AND_INVALIDATE, SEND_WITH_IMMEDIATE, WRITE_WITH_IMMEDIATE = 16, 17, 18
SEND_TO, SEND_TO_WITH_IMMEDIATE, WRITE_TO_WITH_IMMEDIATE = 19, 20, 21
_ATOMIC = (COMPARE_AND_SWAP, FETCH_AND_ADD)
_ATOMIC_SIZE = 8
_MAY_BE_INLINE = (SEND, WRITE, *range(SEND_AND_INVALIDATE, WRITE_TO_WITH_IMMEDIATE + 1))
# What an adapter needs for the operations beyond WRITE.
_NEEDS = {
    COMPARE_AND_SWAP: Capability.ATOMICS,
    FETCH_AND_ADD: Capability.ATOMICS,
    ATOMIC_WRITE: Capability.ATOMIC_WRITE,
    FLUSH_MEMORY: Capability.FLUSH,
    SEND_AND_INVALIDATE: Capability.SEND_INVALIDATE,
    SEND_WITH_IMMEDIATE: Capability.IMMEDIATE_DATA,
    WRITE_WITH_IMMEDIATE: Capability.IMMEDIATE_DATA,
}
# What queue pairs of each type take of these.
_TAKEN_BY = {
    QueuePairType.RC: {
        COMPARE_AND_SWAP,
        FETCH_AND_ADD,
        ATOMIC_WRITE,
        FLUSH_MEMORY,
        SEND_AND_INVALIDATE,
        SEND_WITH_IMMEDIATE,
        WRITE_WITH_IMMEDIATE,
    },
    QueuePairType.UC: {SEND_WITH_IMMEDIATE, WRITE_WITH_IMMEDIATE},
    QueuePairType.UD: {SEND_TO, SEND_TO_WITH_IMMEDIATE},
    QueuePairType.XRC_SEND: {
        COMPARE_AND_SWAP,
        FETCH_AND_ADD,
        SEND_TO,
        SEND_TO_WITH_IMMEDIATE,
        WRITE_TO_WITH_IMMEDIATE,
    },
    QueuePairType.XRC_RECV: set(),
}
_DOES = {
    QueuePairType.UC: "sends and writes only",
    QueuePairType.UD: "sends datagrams only",
    QueuePairType.XRC_SEND: "names a shared receive queue with what it sends, by send_to() and write_to(); besides it reads, writes "
    "and does atomic operations",
    QueuePairType.XRC_RECV: "posts no requests",
}
#: The immediate data and both operands of a request that has none.
Words = tuple[int, int, int]
_NO_WORDS: Words = (0, 0, 0)
#: An element, or the address, the length and the token of memory that is sent inline.
Piece: TypeAlias = Sge | MemoryRegion | tuple[int, int, int]
_INLINE = int(Flags.INLINE)
# enum ndpy_internal_flag of cdefs/ndpy_abi.h.
_UNWRITABLE = 0x100
MARKER = 0x200

#: Names of the flags that an operation takes.
_FLAGS_OF: dict[int, str] = {
    SEND: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    SEND_AND_INVALIDATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    SEND_WITH_IMMEDIATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    WRITE_WITH_IMMEDIATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    SEND_TO: "SILENT_SUCCESS, SOLICITED and INLINE, and READ_FENCE with XRC",
    SEND_TO_WITH_IMMEDIATE: "SILENT_SUCCESS, SOLICITED and INLINE, and READ_FENCE with XRC",
    WRITE_TO_WITH_IMMEDIATE: "SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE",
    WRITE: "SILENT_SUCCESS, READ_FENCE and INLINE",
}


def is_writable(local: Any) -> bool:
    """Whether all of these elements may be written to. Not every provider says that a request failed for this reason."""
    if type(local) is Sge:
        return bool(local.region._writable)
    return all(getattr(getattr(element, "region", element), "_writable", True) for element in flatten(local))


def operation_name(operation: int) -> str:
    """Return the name of the method that posts this operation."""
    names = {
        SEND_AND_INVALIDATE: "send_and_invalidate",
        SEND_WITH_IMMEDIATE: "send with immediate data",
        WRITE_WITH_IMMEDIATE: "write with immediate data",
        SEND_TO: "send",
        SEND_TO_WITH_IMMEDIATE: "send with immediate data",
        WRITE_TO_WITH_IMMEDIATE: "write with immediate data",
    }
    return names.get(operation) or Operation(operation).name.lower()


def flatten(local: Any) -> list[Any]:
    """Return the elements as a list. A region is an element with all of its bytes. So is a buffer, with INLINE only."""
    if isinstance(local, (Sge, MemoryRegion, bytes, bytearray, memoryview)):
        return [local]
    try:
        return list(local)
    except TypeError:
        raise TypeError(
            f"what is posted is a region, a slice of one, or a sequence of these, not {type(local).__name__}"
        ) from None


def _piece(element: Any, exports: list[memoryview] | None) -> Piece:
    """What _core.WorkQueues._post_elements() takes for an element.

    exports: an export of memory that is sent inline is added to it. None where memory has to be registered.
    """
    is_slice = isinstance(element, Sge)
    if is_slice or isinstance(element, MemoryRegion):
        owner = (element.region if is_slice else element)._owner
        if exports is not None and isinstance(owner, memoryview):
            exports.append(memoryview(owner))
        found: Piece = element
        return found
    if exports is not None and isinstance(element, (bytes, bytearray, memoryview)):
        view = plain_view(element)
        exports.append(view)
        return (address_of(view) if view.nbytes else 0), view.nbytes, 0
    raise TypeError(
        f"an element is a region or a slice of one, not {type(element).__name__}; "
        "register the buffer, or send up to limits.inline_data_size bytes with Flags.INLINE"
    )


def bad_token(name: str, elements: list[Any]) -> ValueError:
    """The error for an element's token that is larger than those of the provider."""
    tokens = [element.token for element in elements if isinstance(element, Sge)]
    return ValueError(f"{name}: a token of this adapter is 0 to 2**32-1, not {max(tokens, default=0):#x}")


def _calls_of(batch: _core.Batch, first: int) -> list[Any]:
    """The arguments of the requests of a batch from number `first` on. At least one."""
    calls = batch._calls(first)
    if not calls:
        # Another thread has cleared it.
        raise RuntimeError("the batch was changed while it was posted")
    return calls


def _in_batch(error: Exception, place: int, posted: int) -> Exception:
    """Say in an error which request of a batch it is about."""
    remark = (
        f" (request {place} of the batch; the {posted} before it were posted)"
        if posted
        else f" (request {place} of the batch)"
    )
    if isinstance(error, errors.ProviderError):
        error.message += remark
    else:
        error.args = (f"{error.args[0]}{remark}", *error.args[1:])
    return error


@dataclass(frozen=True)
class QueuePairLimits:
    """The limits of a queue pair: outstanding requests, elements of one request, and bytes that are sent inline."""

    receive_queue_depth: int
    initiator_queue_depth: int
    max_receive_sge: int
    max_initiator_sge: int
    inline_data_size: int


class WorkQueues(_core.WorkQueues, Resource):
    """The two queues of a queue pair, and the requests that are posted to them. Base of QueuePair."""

    #: The platform's extension module, with the functions of cdefs/ndpy_abi.h.
    _lib: Any
    _ffi: Any
    #: struct ndpy_queue_pair. None before it exists and after the release.
    _native: Any
    #: Its transport service.
    type = QueuePairType.RC

    def __init__(self, adapter: Adapter, limits: QueuePairLimits, srq: SharedReceiveQueue | None) -> None:
        super().__init__(adapter)
        self.limits = limits
        self.srq = srq
        self._lock = _core.Lock()
        #: Held while the requests of a batch are posted one by one, so that those of two batches do not share the last room.
        self._singly = _core.Lock()
        self._posted_requests = PostedRequests(self)
        self._initiator_records = self._posted_requests.initiator
        self._receive_records = self._posted_requests.receive
        self._native = None

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    def _begin_posting(self, native: Any) -> None:
        """Requests go to this struct ndpy_queue_pair from now on."""
        self._native = native
        address = int(self._ffi.cast("uintptr_t", native))
        self._attach(int(self._ffi.cast("uintptr_t", self._native_provider())), address, self._posted_requests)

    def _end_posting(self) -> Any:
        """No request is posted any more. Returns the struct ndpy_queue_pair. Under the lock."""
        native = self._native
        self._detach()
        self._native = None
        return native

    def _native_provider(self) -> Any:
        """struct ndpy_provider."""
        return self._lib.ndpy_provider_table()

    @abc.abstractmethod
    def _cancel_late_request(self, operation: int) -> None:
        """Have the provider cancel a request that was posted after the end of the connection."""

    def _no_own_receives(self) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            "this queue pair takes its receives from a shared receive queue; call receive() of that queue",
            operation="receive",
        )

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
        self._post_many(SEND_AND_INVALIDATE, sges, context, flags, remote)

    def atomic_write(self, remote: RemoteMemory, value: int, *, context: int = 0, flags: int = 0) -> None:
        """Write 8 bytes to the peer at once, so that nobody sees a part of them. Return as soon as the request is queued.

        Parameters:
            remote: where the first 8 bytes go. The address must be a multiple of 8. The peer's memory needs REMOTE_WRITE.
            value: an integer of 64 bits, signed or unsigned, written in this host's byte order.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            UnsupportedError: info.capabilities lacks ATOMIC_WRITE.
            ElementRangeError: the address is not a multiple of 8, or there are fewer than 8 bytes.
            NotConnectedError, QueueFullError and so on: as for write().
        Source: ibv_wr_post(3), ibv_wr_atomic_write().
        """
        self._check()
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"value is an integer of 64 bits, signed or unsigned, not {value}")
        self._post_many(ATOMIC_WRITE, [], context, flags, remote, (0, value % (1 << 64), 0))

    def flush_memory(
        self,
        remote: RemoteMemory,
        kind: FlushKind = FlushKind.GLOBAL,
        *,
        whole_region: bool = False,
        context: int = 0,
        flags: int = 0,
    ) -> None:
        """Have the peer's adapter finish the earlier writes of this queue pair. Return as soon as the request is queued.

        Its completion says that they are where `kind` wants them. Without it, the completion of a write says only that the peer's
        adapter has the bytes.

        Parameters:
            remote: the memory that was written to. It needs Access.FLUSH_GLOBAL or FLUSH_PERSISTENT.
            kind: GLOBAL, PERSISTENT, or both.
            whole_region: flush all of the region that the token of `remote` stands for.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS and READ_FENCE.
        Raises:
            UnsupportedError: info.capabilities lacks FLUSH.
            NotConnectedError, QueueFullError and so on: as for write().
        Source: ibv_wr_post(3), ibv_wr_flush().
        """
        self._check()
        if not isinstance(kind, FlushKind):
            raise TypeError(f"kind is a FlushKind, not {kind!r}")
        self._post_many(FLUSH_MEMORY, [], context, flags, remote, (0, kind.value, int(whole_region)))

    def _offered(self) -> int:
        """The operations beyond WRITE that the adapter has, each as the bit of its number."""
        capabilities = self._adapter.info.capabilities
        taken = _TAKEN_BY[self.type]
        return sum(1 << operation for operation in taken if _NEEDS.get(operation, Capability.NONE) in capabilities)

    @property
    def _max_length(self) -> int:
        """How many bytes one request may move."""
        return self._adapter.info.max_transfer_length

    def receive_many(self, sges: Iterable[Elements], *, contexts: Iterable[int] | None = None) -> None:
        """Post memory for several messages of the peer, in one call of the provider where that has such a call.

        A Batch of receives with post() is quicker for receives that are posted again and again.

        Parameters:
            sges: for each receive a region, a slice of one, or a sequence of them.
            contexts: for each receive 0 to 2**64 - 1. None for 0.
        Raises: as for post() and receive().
        Source: ibv_post_recv(3) with a list.
        """
        all_elements = [flatten(elements) for elements in sges]
        if not all_elements:
            return
        batch = _core.Batch(len(all_elements), max_sge=max(map(len, all_elements)))
        for elements in all_elements:
            batch.receive(elements)
        if contexts is not None:
            batch.contexts = list(contexts)
        self.post(batch)

    def _post_singly(self, batch: _core.Batch, first: int) -> None:
        """Post the requests of a batch from number `first` on, one by one."""
        calls = _calls_of(batch, first)
        with self._singly:
            self._require_room(batch, calls[0][0] == RECEIVE, len(calls))
            for place, (operation, sges, remote, context, flags, words, destination) in enumerate(calls, first):
                try:
                    self._check()
                    self._post_many(operation, sges, context, flags, remote, words, destination)
                except errors.NdpyError as error:
                    raise _in_batch(error, place, place) from None

    def _require_room(self, batch: _core.Batch, receive: bool, count: int) -> None:
        """Raise unless all of `count` requests can be posted."""
        _, depth = self._queue_of(RECEIVE if receive else SEND)
        with self._lock:
            self._check()
            used = self._lib.ndpy_queue_pair_in_flight(self._native, int(receive))
        if used + count > depth:
            raise self._refuse_batch(batch, QUEUE_FULL, len(batch) - count, len(batch) - count)

    def _refuse_batch(self, batch: _core.Batch, refused: int, bad: int, posted: int) -> Exception:
        """The error for a refused post(). bad: the number of the request that was refused."""
        operation, sges, _, _, flags, *_ = _calls_of(batch, bad)[0]
        queue, depth = self._queue_of(operation)
        if refused == QUEUE_FULL and len(batch) > depth:
            return errors.LimitExceededError(
                f"post: the {len(batch)} requests of the batch are more than the {depth} slots of the {queue} queue"
            )
        return _in_batch(self._refusal(operation, refused, flatten(sges), flags), bad, posted)

    def _queue_of(self, operation: int) -> tuple[str, int]:
        """The name and the depth of the queue that an operation goes to."""
        limits = self.limits
        if operation == RECEIVE:
            return "receive", limits.receive_queue_depth
        return "initiator", limits.initiator_queue_depth

    def _post_many(
        self,
        operation: int,
        local: Any,
        context: int,
        flags: int,
        remote: RemoteMemory | None,
        words: Words = _NO_WORDS,
        destination: Any = None,
    ) -> None:
        """Post any elements: a region, a slice, a buffer to send inline, or a sequence of these.

        destination: what else the request refers to, and keeps alive.
        """
        elements = flatten(local)
        if len(elements) > self._most_elements(operation):
            raise self._refusal(operation, TOO_MANY_ELEMENTS, elements, flags)
        inline = operation in _MAY_BE_INLINE and flags & _INLINE
        # An export keeps inline data from being resized or freed until the provider has copied it.
        exports: list[memoryview] | None = [] if inline else None
        try:
            pieces = [_piece(element, exports) for element in elements]
            total = sum(piece[1] if isinstance(piece, tuple) else piece.length for piece in pieces)
            if remote is not None and operation != SEND_AND_INVALIDATE and total > remote.length:
                raise self._exceeds_remote(total, remote)
            if operation == ATOMIC_WRITE and remote is not None and remote.length < _ATOMIC_SIZE:
                raise self._exceeds_remote(_ATOMIC_SIZE, remote)
            if operation in (RECEIVE, READ, *_ATOMIC) and not is_writable(elements):
                if self._sinks_must_be_writable:
                    self._check()
                    raise self._not_writable(operation)
                if operation != READ:
                    flags |= _UNWRITABLE
            if destination is not None:
                elements = [*elements, destination]
            self._post_elements(operation, elements, pieces, context, flags, remote, words, destination)
        finally:
            if exports:
                for export in exports:
                    export.release()

    def _unsupported(self, operation: int) -> errors.UnsupportedError:
        if self.type is not QueuePairType.RC and operation not in _TAKEN_BY[self.type]:
            return errors.UnsupportedError(
                f"a queue pair of type {self.type.name} {_DOES[self.type]}", operation=operation_name(operation)
            )
        adapter = self._adapter.info.name
        reasons = {
            Capability.ATOMICS: f"{adapter} has no atomic operations",
            Capability.ATOMIC_WRITE: f"{adapter} has no atomic writes",
            Capability.FLUSH: f"{adapter} cannot flush memory of its peer; a read of the last byte comes after all writes",
            Capability.IMMEDIATE_DATA: f"{adapter} has no immediate data; put the number into a message",
            Capability.SEND_INVALIDATE: f"{adapter} cannot invalidate a peer's window with a message; use send(), and let the "
            "peer call invalidate() itself",
        }
        if operation not in _NEEDS or _NEEDS[operation] not in reasons:
            return errors.UnsupportedError(
                f"a queue pair of type {self.type.name} does not take it", operation=operation_name(operation)
            )
        return errors.UnsupportedError(reasons[_NEEDS[operation]], operation=operation_name(operation))

    @staticmethod
    def _not_writable(operation: int) -> errors.AccessViolationError:
        return errors.AccessViolationError(
            "the memory was registered without Access.LOCAL_WRITE", operation=operation_name(operation)
        )

    def _most_elements(self, operation: int) -> int:
        """How many elements a request of this operation may have."""
        if operation == RECEIVE:
            return self.limits.max_receive_sge
        most = self.limits.max_initiator_sge
        return min(most, self._adapter.info.max_read_sge) if operation == READ else most

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> Exception:
        name = operation_name(operation)
        limits = self.limits
        if refused == QUEUE_FULL:
            queue, depth = self._queue_of(operation)
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
            limit, whose = self._most_elements(operation), "that this queue pair was created for"
            if operation == READ and limit < limits.max_initiator_sge:
                whose = (
                    f"that {self._adapter.info.name} reads into at once (info.max_read_sge); post a read for each part"
                )
            return errors.LimitExceededError(f"{name}: {len(elements)} elements are more than the {limit} {whose}")
        total = sum(element.length if hasattr(element, "length") else len(element) for element in elements)
        if refused == TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {self._max_length} that the adapter moves at once"
            )
        if refused == INLINE_TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total} bytes are more than the {limits.inline_data_size} that this queue pair sends inline "
                "(inline_data_size of create_queue_pair)"
            )
        if refused == NO_READS and self.type is not QueuePairType.RC:
            return self._unsupported(operation)
        if refused == NO_READS:
            return errors.LimitExceededError(
                f"{name}: the connection was made with an outbound read limit of 0; the two sides' read limits decide it"
            )
        if refused == UNSUPPORTED:
            return self._unsupported(operation)
        if refused == NOT_ATOMIC:
            return errors.ElementRangeError(
                f"{name}: an atomic operation has one element of 8 bytes, not {len(elements)} of {total} bytes"
            )
        if refused == UNALIGNED:
            return errors.ElementRangeError(f"{name}: the address of the peer's memory is not a multiple of 8")
        if refused == NOT_WRITABLE:
            return self._not_writable(operation)
        if refused == BAD_TOKEN:
            return bad_token(name, elements)
        if refused == BAD_FLAGS:
            taken = _FLAGS_OF.get(operation, "SILENT_SUCCESS and READ_FENCE")
            return errors.InvalidFlagsError(f"{name} takes the flags {taken}, not {Flags(flags)!r}")
        return self._native_refusal(name, refused)

    @abc.abstractmethod
    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        """Return the exception for an error number of the provider."""

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
