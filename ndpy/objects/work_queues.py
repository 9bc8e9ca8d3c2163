"""Work queues: posting sends, receives, reads and writes.

cdefs/core/work_queues.c posts one element of a region by itself. Here stands what it leaves: several elements, bytes
that are sent inline, and what a refusal means.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ndpy import _core, errors
from ndpy._core import Batch as Batch
from ndpy.objects.completion import PostedRequests
from ndpy.objects.memory import Elements, MemoryRegion, RemoteMemory, Sge, address_of, plain_view
from ndpy.objects.operations import (
    FILLS_LOCAL,
    IS_ALIGNED,
    NAMES_REMOTE,
    READ,
    RECEIVE,
    SEND,
    SEND_TO,
    TABLE,
    UNWRITABLE,
    operations_of,
    words_of_flags,
)
from ndpy.objects.resource import AdapterObject
from ndpy.vocabulary.flags import Capability, Flags
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue

# enum ndpy_refusal of cdefs/ndpy_abi.h.
QUEUE_FULL, NOT_CONNECTED, TOO_MANY_ELEMENTS, TOO_LONG, INLINE_TOO_LONG, BAD_FLAGS, NO_READS, BAD_TOKEN = range(
    -1, -9, -1
)
UNSUPPORTED, NOT_ATOMIC, UNALIGNED, NOT_WRITABLE = range(-10, -14, -1)

_DOES = {
    QueuePairType.UC: "sends and writes only",
    QueuePairType.UD: "sends datagrams only",
    QueuePairType.XRC_SEND: (
        "sends to a shared receive queue that it names, by send_to() and write_to(); it also reads, writes and "
        "does atomic operations; it receives nothing"
    ),
    QueuePairType.XRC_RECV: "posts no requests; receives are those of its domain's shared receive queues",
}
# What an adapter without these is told about.
_LACKS = {
    Capability.ATOMICS: "has no atomic operations",
    Capability.ATOMIC_WRITE: "has no atomic writes",
    Capability.FLUSH: "cannot flush memory of its peer; a read of the last byte comes after all writes",
    Capability.IMMEDIATE_DATA: "has no immediate data; put the number into a message",
    Capability.SEND_INVALIDATE: (
        "cannot invalidate a peer's window with a message; use send(), and let the peer call invalidate() itself"
    ),
}
_ATOMIC_SIZE = 8
#: The immediate data and both operands of a request that has none.
Words = tuple[int, int, int]
_NO_WORDS: Words = (0, 0, 0)
#: An element, or the address, the length and the token of memory that is sent inline.
Piece: TypeAlias = Sge | MemoryRegion | tuple[int, int, int]
_INLINE = int(Flags.INLINE)


def is_writable(local: Any) -> bool:
    """Whether all of these elements may be written to.
    Not every provider says that a request failed for this reason.
    """
    if type(local) is Sge:
        return bool(local.region._writable)
    for element in flatten(local):
        if not getattr(element.region if type(element) is Sge else element, "_writable", True):
            return False
    return True


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
        region = element.region if is_slice else element
        if exports is not None and region._is_elsewhere:
            raise errors.InvalidBufferError(
                "the provider copies what is sent inline, and the memory of this region is not at the addresses of its "
                "elements; send it without Flags.INLINE"
            )
        owner = region._owner
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


def total_length(elements: list[Any]) -> int:
    """How many bytes these elements are, of regions and of buffers."""
    return sum(element.length if hasattr(element, "length") else len(element) for element in elements)


@dataclass(frozen=True)
class QueuePairLimits:
    """The limits of a queue pair.

    Parameters:
        receive_queue_depth: how many receives may be outstanding.
        initiator_queue_depth: how many other requests may be outstanding.
        max_receive_sge: how many elements a receive may have.
        max_initiator_sge: how many elements another request may have.
        inline_data_size: how many bytes a request with Flags.INLINE may have.
    """

    receive_queue_depth: int
    initiator_queue_depth: int
    max_receive_sge: int
    max_initiator_sge: int
    inline_data_size: int


#: Most queue pairs of a program have the same ones.
_shared_limits = functools.lru_cache(maxsize=64, typed=True)(QueuePairLimits)


class PostingQueue(_core.PostingQueue, AdapterObject):
    """A queue to which requests are posted: what every way of posting checks, and what a refusal means."""

    #: The platform's extension module, with the functions of cdefs/ndpy_abi.h.
    _lib: Any
    _ffi: Any
    __slots__ = ()

    def _native_provider(self) -> Any:
        """struct ndpy_provider."""
        return self._lib.ndpy_provider_table()

    def _post_to(self, native: Any, *posted: PostedRequests) -> None:
        """Requests go to this struct of cdefs/rings.h from now on. posted: that of a queue pair."""
        provider, address = (int(self._ffi.cast("uintptr_t", each)) for each in (self._native_provider(), native))
        self._attach(provider, address, *posted)

    @abc.abstractmethod
    def _queue_of(self, operation: int) -> tuple[str, int]:
        """The name and the depth of the queue that an operation goes to."""

    @abc.abstractmethod
    def _most_elements(self, operation: int) -> int:
        """How many elements a request of this operation may have."""

    @property
    def _max_length(self) -> int:
        """How many bytes one request may move."""
        return self._adapter.info.max_transfer_length

    def _require_offered(self, operation: int) -> None:
        """Raise unless the queue takes this operation."""

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
        row = TABLE[operation]
        elements = flatten(local)
        if len(elements) > self._most_elements(operation):
            self._require_offered(operation)
            raise self._refusal(operation, TOO_MANY_ELEMENTS, elements, flags)
        inline = flags & row.flags & _INLINE
        # An export keeps inline data from being resized or freed until the provider has copied it.
        exports: list[memoryview] | None = [] if inline else None
        try:
            pieces = [_piece(element, exports) for element in elements]
            if remote is not None and row.traits & NAMES_REMOTE:
                total = sum(piece[1] if isinstance(piece, tuple) else piece.length for piece in pieces)
                needed = max(total, _ATOMIC_SIZE if row.traits & IS_ALIGNED else 0)
                if needed > remote.length:
                    raise self._exceeds_remote(needed, remote)
            if row.traits & FILLS_LOCAL and not is_writable(elements):
                if self._sinks_must_be_writable:
                    self._check()
                    for element in elements:
                        getattr(element, "region", element)._check()
                    raise self._not_writable(operation)
                flags |= row.flags & UNWRITABLE
            if destination is not None:
                elements = [*elements, destination]
            self._post_elements(operation, elements, pieces, context, flags, remote, words, destination)
        finally:
            if exports:
                for export in exports:
                    export.release()

    @staticmethod
    def _not_writable(operation: int) -> errors.AccessViolationError:
        return errors.AccessViolationError(
            "the memory was registered without Access.LOCAL_WRITE", operation=TABLE[operation].words
        )

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> Exception:
        name = TABLE[operation].words
        if refused == QUEUE_FULL:
            queue, depth = self._queue_of(operation)
            return errors.QueueFullError(
                f"all {depth} slots of the {queue} queue are taken; take completions of its requests, then try again",
                operation=name,
            )
        if refused == TOO_MANY_ELEMENTS:
            return errors.LimitExceededError(
                f"{name}: {len(elements)} elements are more than the {self._most_elements(operation)} that this queue "
                "was created for"
            )
        if refused == TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total_length(elements)} bytes are more than the {self._max_length} that the adapter moves "
                "at once"
            )
        if refused == BAD_TOKEN:
            tokens = [element.token for element in elements if isinstance(element, Sge)]
            return ValueError(f"{name}: a token of this adapter is 0 to 2**32-1, not {max(tokens, default=0):#x}")
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


class WorkQueues(_core.WorkQueues, PostingQueue):
    """The two queues of a queue pair, and the requests that are posted to them. Base of QueuePair."""

    # What each object has, so that an idle one needs no dictionary.
    __slots__ = ("_rings", "_singly", "limits", "type")
    #: struct ndpy_queue_pair. None before it exists and after the release.
    _rings: Any
    #: Its transport service.
    type: QueuePairType
    #: Held while the requests of a batch are posted one by one, so that those of two batches do not share the last
    #: room. None until then.
    _singly: _core.Lock | None
    #: What its requests go to, if they name a destination.
    _destinations: Any = None

    def __init__(
        self, adapter: Adapter, limits: QueuePairLimits, srq: SharedReceiveQueue | None, type: QueuePairType
    ) -> None:
        super().__init__(adapter)
        self.limits = _shared_limits(*vars(limits).values())
        self.srq = srq
        self.type = type
        self._lock = _core.Lock()
        self._singly = None
        self._rings = None

    def _begin_posting(self, native: Any) -> None:
        """Requests go to this struct ndpy_queue_pair from now on."""
        self._rings = native
        self._post_to(native, PostedRequests(self))

    def _end_posting(self) -> Any:
        """No request is posted any longer. Returns the struct ndpy_queue_pair. Under the lock."""
        native = self._rings
        self._detach()
        self._rings = None
        return native

    @abc.abstractmethod
    def _cancel_late_request(self, operation: int) -> None:
        """Have the provider cancel a request that was posted after the end of the connection."""

    def _offered(self) -> int:
        """The operations that it takes, each as the bit of its number."""
        offered = operations_of(self.type, self._adapter.info.capabilities)
        return offered if self.srq is None else offered & ~(1 << RECEIVE)

    def _require_offered(self, operation: int) -> None:
        if not self._offered() >> operation & 1:
            self._check()
            raise self._unsupported(operation)

    def _check_destination(self, destination: Any) -> None:
        """Raise unless requests of this queue pair can go to such an object."""
        if self._destinations is None:
            self._check()
            raise self._unsupported(SEND_TO)
        if not isinstance(destination, self._destinations):
            name = self._destinations.__name__
            raise TypeError(f"a destination is a{'n' * (name[0] == 'X')} {name}, not {type(destination).__name__}")

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
        with self._lock:
            self._singly = self._singly or _core.Lock()
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
            used = self._lib.ndpy_queue_pair_in_flight(self._rings, int(receive))
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
        limits = self.limits
        if operation == RECEIVE:
            return "receive", limits.receive_queue_depth
        return "initiator", limits.initiator_queue_depth

    def _does_not(self, name: str) -> errors.UnsupportedError:
        """The error for a method that queue pairs of this type do not have."""
        does = _DOES.get(self.type, "does not take it")
        return errors.UnsupportedError(f"a queue pair of type {self.type.name} {does}", operation=name)

    def _unsupported(self, operation: int) -> errors.UnsupportedError:
        row = TABLE[operation]
        if operation == RECEIVE and self.srq is not None:
            reason = "this queue pair takes its receives from a shared receive queue; call receive() of that queue"
        elif not row.is_taken_by(self.type, row.capability):
            return self._does_not(row.words)
        else:
            reason = f"{self._adapter.info.name} {_LACKS.get(row.capability, 'does not take it')}"
        return errors.UnsupportedError(reason, operation=row.words)

    def _most_elements(self, operation: int) -> int:
        if operation == RECEIVE:
            return self.limits.max_receive_sge
        most = self.limits.max_initiator_sge
        return min(most, self._adapter.info.max_read_sge) if operation == READ else most

    def _refusal(self, operation: int, refused: int, elements: list[Any], flags: int) -> Exception:
        name, limit = TABLE[operation].words, self._most_elements(operation)
        if refused == NOT_CONNECTED:
            return errors.NotConnectedError(
                "the queue pair is not connected yet; connect() and complete_connect(), or accept(), come first",
                operation=name,
            )
        if refused == TOO_MANY_ELEMENTS and operation == READ and limit < self.limits.max_initiator_sge:
            return errors.LimitExceededError(
                f"{name}: {len(elements)} elements are more than the {limit} that {self._adapter.info.name} reads into "
                "at once (info.max_read_sge); post a read for each part"
            )
        if refused == INLINE_TOO_LONG:
            return errors.LimitExceededError(
                f"{name}: {total_length(elements)} bytes are more than the {self.limits.inline_data_size} that this "
                "queue pair sends inline (inline_data_size of create_queue_pair)"
            )
        if refused == NO_READS:
            return errors.LimitExceededError(
                f"{name}: the connection was made with an outbound read limit of 0; the two sides' read limits decide "
                "it"
            )
        if refused == UNSUPPORTED:
            return self._unsupported(operation)
        if refused == NOT_ATOMIC:
            return errors.ElementRangeError(
                f"{name}: an atomic operation has one element of 8 bytes, not {len(elements)} of "
                f"{total_length(elements)} bytes"
            )
        if refused == UNALIGNED:
            return errors.ElementRangeError(f"{name}: the address of the peer's memory is not a multiple of 8")
        if refused == NOT_WRITABLE:
            return self._not_writable(operation)
        if refused == BAD_FLAGS:
            taken = words_of_flags(operation, self.type)
            return errors.InvalidFlagsError(f"{name} takes the flags {taken}, not {Flags(flags)!r}")
        return super()._refusal(operation, refused, elements, flags)
