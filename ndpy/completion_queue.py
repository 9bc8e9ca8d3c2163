"""Completion queues."""

from __future__ import annotations

import abc
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion import Completion, PostedRequests
from ndpy.flags import Notify, Operation, Status
from ndpy.memory import MemoryWindow
from ndpy.pending import Pending
from ndpy.resource import Resource, busy

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.poller import Poller

# struct ndpy_completion of cdefs/ndpy_abi.h, and its flags.
_ENTRY = struct.Struct("=QQIIIIIIII")
_INTERNAL = 1
_FROM_SHARED_QUEUE = 2
_INVALIDATED = 4
_WRITTEN = 16
_SPECIAL = _INTERNAL | _INVALIDATED | _WRITTEN

_RECEIVE = int(Operation.RECEIVE)
_RECEIVE_RDMA_WITH_IMMEDIATE = int(Operation.RECEIVE_RDMA_WITH_IMMEDIATE)
_WINDOW_OPERATIONS = (int(Operation.BIND), int(Operation.INVALIDATE))
_SUCCESS = int(Status.SUCCESS)
_CANCELED = int(Status.CANCELED)

_new = object.__new__


class CompletionQueue(Resource):
    """Where requests report, made by Adapter.create_completion_queue(). Safe from many threads.

    depth: completions it was asked to hold. More than it can hold is an overrun: the queue and its queue pairs are then
    unusable (contract G.3). Source: IND2CompletionQueue; ibv_create_cq(3).
    """

    _release_order = 30
    _poll_native: Any
    _poll_internal: Any
    _native: Any

    def __init__(self, adapter: Adapter, depth: int) -> None:
        super().__init__(adapter)
        self.depth = depth
        self._lock = threading.Lock()
        self._posted_requests: dict[int, PostedRequests] = {}
        #: Sources by the provider's queue pair number, for completions of shared receive queues.
        self._shared_receivers: dict[int, tuple[PostedRequests, Any]] = {}
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
            failed: list[PostedRequests] = []
            completions = self._collect(count, failed)
            self._taken += len(completions)
        for posted in failed:
            queue_pair = posted.queue_pair()
            if queue_pair is not None:
                queue_pair._on_failed_completion()
        return completions

    def _retire_silent_requests(self) -> None:
        """Take what the provider has, and let go of what silent requests used; the rest waits for poll()."""
        failed: list[PostedRequests] = []
        with self._lock:
            if self._defunct is not None:
                return
            self._drain()
            while count := self._poll_internal(self._native, self._entries, self._entry_count):
                self._collect(count, failed)
        for posted in failed:
            queue_pair = posted.queue_pair()
            if queue_pair is not None:
                queue_pair._on_failed_completion()

    def _collect(self, count: int, failed: list[PostedRequests]) -> list[Completion]:
        completions = []
        posted_requests = self._posted_requests
        for entry in _ENTRY.iter_unpack(self._entries_view[: count * 48]):
            flags = entry[9]
            if flags & _FROM_SHARED_QUEUE:
                if flags & _INTERNAL:
                    self._lose_window(entry)
                    continue
                posted = self._take_shared(entry)
            else:
                posted = posted_requests[entry[6]]
                operation = entry[2]
                records = posted.receive if operation == _RECEIVE else posted.initiator
                if entry[7] == 1 and operation not in _WINDOW_OPERATIONS:
                    record = records.popleft()
                else:
                    status, record = posted.retire(entry)
                    if status != entry[3]:
                        entry = (*entry[:3], status, *entry[4:])
                if entry[3] >= _CANCELED:
                    entry = self._refine_status(entry, record, posted)
                if posted.stored:
                    self._take_stored(posted, entry[6])
            if entry[3] > _CANCELED:
                failed.append(posted)
            if flags & _SPECIAL:
                if flags & _WRITTEN:
                    entry = (*entry[:2], _RECEIVE_RDMA_WITH_IMMEDIATE, *entry[3:])
                elif flags & _INVALIDATED:
                    queue_pair = posted.queue_pair()
                    if queue_pair is not None:
                        queue_pair._on_window_lost(entry[5])
                else:
                    continue
            completion = _new(Completion)
            completion._entry = entry
            completion._posted_requests = posted
            completions.append(completion)
        return completions

    def _lose_window(self, entry: tuple[int, ...]) -> None:
        """A provider's word that the peer has invalidated a window; the entry's slot is the window's number."""
        window = self._adapter._children.get(entry[8])
        if entry[3] == _SUCCESS and isinstance(window, MemoryWindow) and window._binding is not None:
            window._binding.end()

    def _refine_status(self, entry: tuple[int, ...], record: Any, posted: PostedRequests) -> tuple[int, ...]:
        """The completion of a failed request, with a status that fits better where more is known of the adapter.

        record: what the request used (see QueuePair), None if it is not known.
        """
        return entry

    def _take_stored(self, posted: PostedRequests, number: int) -> None:
        left = posted.stored.get(self._serial, 0) - 1
        if left > 0:
            posted.stored[self._serial] = left
        elif left == 0:
            del posted.stored[self._serial]
            del self._posted_requests[number]

    def _take_shared(self, entry: tuple[int, ...]) -> PostedRequests:
        posted, shared = self._shared_receivers[entry[6]]
        shared._taken(entry[8])
        if posted.stored_shared:
            posted.stored_shared -= 1
            if not posted.stored_shared:
                del self._shared_receivers[entry[6]]
        return posted

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
                self._wake_another_waiter()
                return completions

    @abc.abstractmethod
    def _drain(self) -> int:
        """Take what the provider has; returns how many completions wait to be taken. Under the lock."""

    @abc.abstractmethod
    def _wake_all(self) -> None:
        """Completions were added without an event, or the state changed: everybody is to look."""

    @abc.abstractmethod
    def _wait_for_notification(self, deadline: float | None) -> None:
        """Arm the queue and wait until it may have completions; TimeoutError at the deadline."""

    @abc.abstractmethod
    def _wake_another_waiter(self) -> None:
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
