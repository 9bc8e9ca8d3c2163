"""Completion queues and what they deliver."""

from __future__ import annotations

import abc
import struct
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.flags import Notify, Operation, Status
from ndpy.memory import MemoryWindow
from ndpy.pending import Pending
from ndpy.resource import Resource, busy

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.poller import Poller
    from ndpy.queue_pair import QueuePair

# struct ndpy_completion of cdefs/ndpy_abi.h.
_ENTRY = struct.Struct("=QQIIIIIIII")
_HIDDEN = 1
_FROM_SHARED_QUEUE = 2
_INVALIDATED = 4
_IMMEDIATE = 8
_WRITTEN = 16
_OUT_OF_THE_ORDINARY = _HIDDEN | _INVALIDATED | _WRITTEN

_RECEIVE = int(Operation.RECEIVE)
_RECEIVE_RDMA_WITH_IMMEDIATE = int(Operation.RECEIVE_RDMA_WITH_IMMEDIATE)
_WINDOW_OPERATIONS = (int(Operation.BIND), int(Operation.INVALIDATE))
_OPERATIONS = tuple(Operation)
_STATUSES = tuple(Status)
_SUCCESS = int(Status.SUCCESS)
_CANCELED = int(Status.CANCELED)

_EXCEPTIONS: dict[Status, type[errors.ProviderError]] = {
    Status.CANCELED: errors.CanceledError,
    Status.ACCESS_VIOLATION: errors.AccessViolationError,
    Status.IO_TIMEOUT: errors.TimeoutError,
}

_MEANINGS: dict[Status, str] = {
    Status.CANCELED: "swept away by an earlier failure, a flush, or the end of the connection",
    Status.ACCESS_VIOLATION: "memory was used beyond its rights or bounds, here or at the peer",
    Status.BUFFER_OVERFLOW: "the message is longer than the receive that took it",
    Status.DATA_OVERRUN: "the message is longer than the adapter or the peer's receive can take",
    Status.IO_TIMEOUT: "the peer did not answer, or had no receive posted for too long",
    Status.REMOTE_ERROR: "the request broke the peer's queue pair",
    Status.INVALID_REQUEST: "the request was malformed, such as binding a window that is bound",
    Status.INTERNAL_ERROR: "the adapter failed",
    Status.UNKNOWN: "a status that ndpy has no name for",
}


class Source:
    """Where completions come from: the requests of one queue pair that the adapter still works on, oldest first.

    It outlives the queue pair's object for as long as completions of it can be taken.
    """

    __slots__ = ("failed", "initiator", "kept", "kept_shared", "queue_pair", "receive")

    def __init__(self, queue_pair: QueuePair) -> None:
        self.queue_pair = weakref.ref(queue_pair)
        #: Whether a completion of it has failed; what fails then is what the first one takes with it.
        self.failed = False
        self.initiator: deque[Any] = deque()
        self.receive: deque[Any] = deque()
        #: After the queue pair was closed: how many completions of it are still to be taken, by queue.
        self.kept: dict[int, int] = {}
        self.kept_shared = 0


class Completion:
    """The result of one request. Its fields are decoded when they are read.

    Fields:
        context: the value that was given with the request.
        operation: an Operation.
        status: a Status.
        nbytes: the bytes that a successful request moved; for RECEIVE_RDMA_WITH_IMMEDIATE those that the peer wrote.
        native_status: the provider's own number for the status.
        vendor_status: the adapter's detail of an error, or 0.
    """

    __slots__ = ("_entry", "_source")

    #: The fields of struct ndpy_completion.
    _entry: tuple[int, ...]
    _source: Source

    @property
    def context(self) -> int:
        return self._entry[0]

    @property
    def nbytes(self) -> int:
        return self._entry[1]

    @property
    def native_status(self) -> int:
        return self._entry[4]

    @property
    def vendor_status(self) -> int:
        return 0 if self._entry[3] == _SUCCESS else self._entry[5]

    @property
    def immediate(self) -> int | None:
        """The 32 bits that the peer sent beside its message or write, in host order; None if it sent none."""
        return self._entry[5] if self._entry[9] & _IMMEDIATE else None

    @property
    def operation(self) -> Operation:
        return _OPERATIONS[self._entry[2]]

    @property
    def status(self) -> Status:
        return _STATUSES[self._entry[3]]

    @property
    def ok(self) -> bool:
        return self._entry[3] == _SUCCESS

    @property
    def queue_pair(self) -> QueuePair | None:
        """The queue pair of the request; None if the program dropped it."""
        return self._source.queue_pair()

    def raise_for_status(self) -> None:
        """Raise the exception that fits a failed request; nothing for a successful one."""
        if self._entry[3] == _SUCCESS:
            return
        status = self.status
        message, name = _MEANINGS[status], ""
        queue_pair = self.queue_pair
        if queue_pair is not None:
            hint = queue_pair._explain(status)
            message += f"; {hint}" if hint else ""
            name = queue_pair._native_status_name(self.native_status)
        if self.vendor_status:
            message += f" (vendor status {self.vendor_status:#x})"
        error = _EXCEPTIONS.get(status, errors.ProviderError)
        raise error(message, operation=self.operation.name.lower(), native=self.native_status, native_name=name)

    def __repr__(self) -> str:
        return (
            f"<Completion {self.operation.name} {self.status.name} context={self.context:#x} nbytes={self.nbytes}"
            f"{'' if self.immediate is None else f' immediate={self.immediate:#x}'}"
            f"{'' if self.ok else f' native_status={self.native_status}'}>"
        )


_new = object.__new__


class CompletionQueue(Resource):
    """Where requests report, made by Adapter.create_completion_queue(). Safe from many threads.

    depth: completions it was asked to hold. More than it can hold is an overrun: the queue and its queue pairs are then
    unusable (contract G.3). Source: IND2CompletionQueue; ibv_create_cq(3).
    """

    _release_order = 30
    _poll_native: Any
    _poll_hidden: Any
    _native: Any

    def __init__(self, adapter: Adapter, depth: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        #: Sources by the provider's queue pair number, for completions of shared receive queues.
        self._shared_sources: dict[int, tuple[Source, Any]] = {}
        self._users = 0
        #: Changed and read under the lock.
        self._pollers: weakref.WeakSet[Poller] = weakref.WeakSet()
        #: Completions taken since creation.
        self._taken = 0
        self._resize_entries(64)

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    def _resize_entries(self, count: int) -> None:
        self._entries, self._entries_view = self._new_entries(count)
        self._entry_count = count

    def _on_forked(self) -> None:
        super()._on_forked()
        self._lock = threading.Lock()

    @abc.abstractmethod
    def _new_entries(self, count: int) -> tuple[Any, memoryview]:
        """An array of `count` struct ndpy_completion, and its bytes."""

    def poll(self, max_entries: int = 64) -> list[Completion]:
        """Take up to max_entries completions, oldest first, without waiting; fewer means that the queue was empty.

        Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).
        """
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            wanted = max(0, min(max_entries, self.depth + 64))
            if wanted > self._entry_count:
                self._resize_entries(wanted)
            count = self._poll_native(self._native, self._entries, wanted)
            if count <= 0:
                if count:
                    raise errors.from_errno("poll", -count)
                return []
            failed: list[Source] = []
            completions = self._collect(count, failed)
            self._taken += len(completions)
        for source in failed:
            queue_pair = source.queue_pair()
            if queue_pair is not None:
                queue_pair._on_failed_completion()
        return completions

    def _settle(self) -> None:
        """Take what the provider has, and let go of what silent requests used; the rest waits for poll()."""
        failed: list[Source] = []
        with self._lock:
            if self._defunct is not None:
                return
            self._drain()
            while count := self._poll_hidden(self._native, self._entries, self._entry_count):
                self._collect(count, failed)
        for source in failed:
            queue_pair = source.queue_pair()
            if queue_pair is not None:
                queue_pair._on_failed_completion()

    def _collect(self, count: int, failed: list[Source]) -> list[Completion]:
        completions = []
        sources = self._sources
        for entry in _ENTRY.iter_unpack(self._entries_view[: count * 48]):
            flags = entry[9]
            if flags & _FROM_SHARED_QUEUE:
                if flags & _HIDDEN:
                    self._lose_window(entry)
                    continue
                source = self._take_shared(entry)
            else:
                source = sources[entry[6]]
                operation = entry[2]
                records = source.receive if operation == _RECEIVE else source.initiator
                if entry[7] == 1 and operation not in _WINDOW_OPERATIONS:
                    record = records.popleft()
                else:
                    status, record = _retire(records, entry)
                    if status != entry[3]:
                        entry = (*entry[:3], status, *entry[4:])
                if entry[3] >= _CANCELED:
                    entry = self._judge(entry, record, source)
                if source.kept:
                    self._take_kept(source, entry[6])
            if entry[3] > _CANCELED:
                failed.append(source)
            if flags & _OUT_OF_THE_ORDINARY:
                if flags & _WRITTEN:
                    entry = (*entry[:2], _RECEIVE_RDMA_WITH_IMMEDIATE, *entry[3:])
                elif flags & _INVALIDATED:
                    queue_pair = source.queue_pair()
                    if queue_pair is not None:
                        queue_pair._on_window_lost(entry[5])
                else:
                    continue
            completion = _new(Completion)
            completion._entry = entry
            completion._source = source
            completions.append(completion)
        return completions

    def _lose_window(self, entry: tuple[int, ...]) -> None:
        """A provider's word that the peer has invalidated a window; the entry's slot is the window's number."""
        window = self._adapter._children.get(entry[8])
        if entry[3] == _SUCCESS and isinstance(window, MemoryWindow) and window._binding is not None:
            window._binding.end()

    def _judge(self, entry: tuple[int, ...], record: Any, source: Source) -> tuple[int, ...]:
        """The completion of a failed request, with a status that fits better where more is known of the adapter.

        record: what the request used (see QueuePair), None if it is not known.
        """
        return entry

    def _take_kept(self, source: Source, number: int) -> None:
        left = source.kept.get(self._serial, 0) - 1
        if left > 0:
            source.kept[self._serial] = left
        elif left == 0:
            del source.kept[self._serial]
            del self._sources[number]

    def _take_shared(self, entry: tuple[int, ...]) -> Source:
        source, shared = self._shared_sources[entry[6]]
        shared._taken(entry[8])
        if source.kept_shared:
            source.kept_shared -= 1
            if not source.kept_shared:
                del self._shared_sources[entry[6]]
        return source

    def wait(self, timeout_s: float | None = None, max_entries: int = 64) -> list[Completion]:
        """Wait until there are completions and take up to max_entries of them.

        Raises TimeoutError after timeout_s seconds. Any number of threads may wait; close() ends their waits with
        ClosedError. No completion is missed and none is seen twice.
        """
        completions = self.poll(max_entries)
        if completions:
            return completions
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._wait_for_notification(deadline)
            completions = self.poll(max_entries)
            if completions:
                self._pass_on()
                return completions

    @abc.abstractmethod
    def _drain(self) -> int:
        """Take what the provider has; returns how many completions wait to be taken. Under the lock."""

    @abc.abstractmethod
    def _changed(self) -> None:
        """Completions were added without an event, or the state changed: everybody is to look."""

    @abc.abstractmethod
    def _wait_for_notification(self, deadline: float | None) -> None:
        """Arm the queue and wait until it may have completions; TimeoutError at the deadline."""

    @abc.abstractmethod
    def _pass_on(self) -> None:
        """Wake another waiting thread, which looks for what this one left."""

    @abc.abstractmethod
    def arm(self, kind: Notify = Notify.ANY) -> Pending[None]:
        """Ask for one notification of the next completion of that kind; a failed one satisfies ANY and SOLICITED.

        Completions that came after the queue was last found empty satisfy it at once; those that ended an earlier
        notification do not (contract G.2). On verbs a wait() may leave the queue armed for any completion, so that the next
        plain message ends a SOLICITED request too. Source: IND2CompletionQueue::Notify; ibv_req_notify_cq(3).
        """

    @abc.abstractmethod
    def resize(self, depth: int) -> None:
        """Change how many completions it holds, while in use. UnsupportedError where the adapter cannot.

        Raises LimitExceededError beyond the adapter's limit or below the completions that wait (contract G.4).
        """

    def _refuse_if_used(self) -> None:
        if self._users:
            users = [
                child._describe()
                for child in self._adapter._open_children()
                if self in getattr(child, "_completion_queues", ())
            ]
            raise busy(self, users)

    def _describe(self) -> str:
        return f"CompletionQueue of depth {self.depth}"


def _retire(records: deque[Any], entry: tuple[int, ...]) -> tuple[int, Any]:
    """Let go of what the ended requests used, silent ones included, and tell windows how their requests ended.

    Returns the status of the last one, which a window request may correct, and what it used.
    """
    status, record = entry[3], None
    for left in range(entry[7] - 1, -1, -1):
        record = records.popleft()
        ended = getattr(record, "ended", None)
        if ended is not None:
            result = ended(status if left == 0 else _SUCCESS)
            if left == 0:
                status = result
    return status, record
