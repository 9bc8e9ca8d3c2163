"""Completion queues on completion channels.

A channel has one event for all who wait. The event may come for a completion that was taken before. A waiting thread, a
poller, or the adapter's thread (for arm()) may see first that the channel is readable. The first one takes the events
and acknowledges them in one C call, under the queue's lock. The channel is not readable for the others then, so the
first one tells them.
"""

from __future__ import annotations

import copy
import io
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.completion import PostedRequests
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.memory import MemoryRegion
from ndpy.objects.pending import Pending
from ndpy.objects.resource import with_own_methods
from ndpy.platforms.verbs.native_calls import check, check_pointer, ffi, free_once, lib, new_eventfd, new_pointer
from ndpy.vocabulary.flags import Access, CompletionDetails, Notify, Operation, Status
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

_DATA_OPERATIONS = (int(Operation.SEND), int(Operation.READ), int(Operation.WRITE))
# Drivers with these quirks do not notify of some failures when armed for SOLICITED.
_SILENT_FAILURES = {Quirk.RXE_SILENT_REQUEST_FAILURES, Quirk.RXE_SILENT_FLUSHED_RECEIVES}


@with_own_methods
class VerbsCompletionQueue(CompletionQueue):
    _adapter: VerbsAdapter
    _ffi = ffi
    _native_provider = staticmethod(lib.ndpy_provider_table)
    _native_drain = staticmethod(lib.ndpy_drain)
    _native_undelivered = staticmethod(lib.ndpy_undelivered)

    def __init__(
        self,
        adapter: VerbsAdapter,
        depth: int,
        details: CompletionDetails = CompletionDetails.NONE,
        single_threaded: bool = False,
    ) -> None:
        super().__init__(adapter, depth)
        self._details = details
        self._single_threaded = single_threaded
        if details or single_threaded:
            self._native_provider = lib.ndpy_extended_provider_table
        self._channel: Any = None
        #: They own what _waiters and _idle_waiters have as numbers.
        self._events_of_waiters: list[io.FileIO] = []
        #: How many completions had come since creation when the oldest Pending was armed.
        self._armed_at = 0
        self._create()

    def _native_create(self, depth: int) -> None:
        adapter, operation = self._adapter, "create completion queue"
        self._channel = check_pointer(operation, lib.ibv_create_comp_channel(adapter._context))
        os.set_blocking(self._channel.fd, False)
        serial = ffi.cast("void *", self._serial)
        if self._details or self._single_threaded:
            details, single = self._details.value, int(self._single_threaded)
            create, context = lib.ndpy_create_extended_queue, adapter._context
            self._cq = new_pointer(operation, create, context, depth, serial, self._channel, details, single)
            singly = Quirk.RXE_NEXT_POLL_GOES_TOO_FAR in adapter._quirks
            self._native = check_pointer(operation, lib.ndpy_extended_queue_new(self._cq, details, int(singly)))
            return
        self._cq = new_pointer(operation, lib.ibv_create_cq, adapter._context, depth, serial, self._channel, 0)
        self._native = check_pointer(operation, lib.ndpy_completion_queue_new(self._cq))

    def fileno(self) -> int:
        self._check()
        return int(self._channel.fd)

    # ---- waiting ----

    def _native_new_waiter(self) -> int:
        """What _native_sleep(), which is in C, sleeps on. Called under the lock."""
        event = new_eventfd("wait")
        self._events_of_waiters.append(event)
        return event.fileno()

    def _native_arm_channel(self, solicited: bool) -> None:
        check("arm", lib.ndpy_arm(self._cq, int(solicited)))

    def _native_wake(self, waiter: int) -> None:
        os.eventfd_write(waiter, 1)

    def _count_stored(self) -> int:
        # Drivers do not notify of every completion that satisfies SOLICITED.
        return self._drain()

    # ---- events of the channel ----

    def _on_event(self, waiter: Any = None) -> None:
        """The channel is readable. Take its events, and tell everybody else who waits. waiter: what the caller waits
        with.
        """
        ended: list[Pending[None]] = []
        try:
            with self._lock:
                if self._channel is None or not lib.ndpy_take_cq_events(self._channel):
                    return
                ended = self._end_armed()
            self._end_and_wake(ended, waiter)
        except errors.NdpyError as failure:
            self._on_failed_event(failure, waiter)
        except BaseException:
            # Ctrl-C. The channel is not readable any more, so nobody else would look.
            self._end_and_wake(ended)
            self._wake_all()
            raise

    def _on_armed_event(self) -> None:
        """Do what _on_event() does, in the adapter's thread."""
        try:
            with self._lock:
                if self._channel is None or not self._armed:
                    return
                ended = self._end_armed() if lib.ndpy_take_cq_events(self._channel) else []
                if self._armed:
                    self._watch_channel()
        except errors.NdpyError as failure:
            self._on_failed_event(failure)
        else:
            self._end_and_wake(ended)

    def _on_failed_event(self, failure: errors.NdpyError, waiter: Any = None) -> None:
        """The provider failed after the events were taken. Fail what is armed, and have all others look."""
        self._fail_armed(partial(copy.copy, failure))
        self._end_and_wake([], waiter)

    def _end_armed(self) -> list[Pending[None]]:
        """Return what an event has ended. Arm again if the event was for an earlier arming. Call under the lock."""
        kinds = self._armed_kinds() if self._armed else None
        if not kinds:
            return []
        if self._taken + self._drain() <= self._armed_at:
            self._native_arm_channel(solicited=Notify.ANY not in kinds)
            if self._taken + self._drain() <= self._armed_at:
                return []
        # The event is for the first completion after the arming. Later ones end other notifications.
        self._notified = max(self._notified, self._armed_at + 1)
        return self._take_armed()

    def _armed_kinds(self) -> set[Notify]:
        return set(self._armed.values()) - {Notify.ERRORS}

    # ---- arming ----

    def _native_arm(self, kind: Notify, pending: Pending[None]) -> bool:
        if kind is not Notify.ERRORS:
            others = self._armed_kinds()
            if not (others or self._waiters or self._pollers):
                # An event of an earlier arming is for nobody now. After the next completion it would look like that
                # one's.
                lib.ndpy_take_cq_events(self._channel)
            self._native_arm_channel(solicited=kind is Notify.SOLICITED and Notify.ANY not in others)
            waiting = self._drain()
            if not others:
                self._armed_at = self._taken + waiting
                if self._notify_of_stored():
                    return True
        self._watch_channel()
        if kind is Notify.SOLICITED and self._adapter._quirks & _SILENT_FAILURES:
            self._adapter._events.look_regularly(self._look_for_failures)
        return False

    def _native_rearm(self) -> list[Pending[None]]:
        # close() has acknowledged the events that were there.
        ended = self._end_armed()
        if self._armed:
            self._watch_channel()
        return ended

    def _watch_channel(self) -> None:
        """Have the adapter's thread take the next event. Call under the lock, because close() forgets the channel."""
        self._adapter._events.watch(self._channel.fd, self._on_armed_event, once=True)

    def _look_for_failures(self) -> bool:
        """Look for failed completions that the driver did not notify of. Returns whether somebody still waits."""
        with self._lock:
            if self._native is None or Notify.SOLICITED not in self._armed_kinds():
                return False
            waiting = self._drain()
            first = max(0, self._notified - self._taken)
            place = self._find_failure(first) if waiting else 0
            if not place:
                return True
            self._notified = self._taken + place
            ended = self._take_armed()
        self._end_and_wake(ended)
        return False

    def _find_failure(self, first: int) -> int:
        """The place of the first stored completion after `first` others that failed, counted from 1, or 0. Under the
        lock.
        """
        kept = self._kept
        for place, completion in enumerate(kept[first:], first + 1):
            if not completion.ok:
                return place
        place = int(lib.ndpy_undelivered_failure(self._native, max(0, first - len(kept))))
        return place + len(kept) if place else 0

    # ---- changes and the end ----

    def _native_resize(self, depth: int) -> None:
        result = lib.ibv_resize_cq(self._cq, depth)
        if result:
            raise errors.from_errno("resize", result if result > 0 else ffi.errno)

    def _native_free(self) -> None:
        if self._cq is not None:
            self._adapter._events.forget(self._channel.fd)
            lib.ndpy_take_cq_events(self._channel)
        native, self._native = self._native, None
        try:
            free_once(self, "_cq", "close completion queue", lib.ibv_destroy_cq)
        except BaseException:
            # The provider refused, or Ctrl-C came before the call.
            if self._cq is not None:
                self._native = native
            raise
        self._detach()
        if native is not None:
            lib.ndpy_completion_queue_free(native)
        free_once(self, "_channel", "close completion queue", lib.ibv_destroy_comp_channel)
        self._idle_waiters.clear()
        for event in self._events_of_waiters:
            event.close()

    # ---- better statuses ----

    def _refine_status(self, entry: tuple[int, ...], record: Any, posted: PostedRequests) -> tuple[int, ...]:
        _, _, operation, status, native = entry[:5]
        first = not posted.failed
        if operation != Operation.RECEIVE:
            posted.failed = True
        if status == Status.CANCELED:
            if first and operation in _DATA_OPERATIONS and self._is_own_fault(record, posted):
                status = Status.ACCESS_VIOLATION
        elif operation == Operation.RECEIVE:
            if record is not None and not _is_intact(record, sink=True):
                status = Status.ACCESS_VIOLATION
        elif native == lib.IBV_WC_LOC_QP_OP_ERR and operation in _DATA_OPERATIONS and self._is_loss(record, operation):
            status = Status.IO_TIMEOUT
        return (*entry[:3], int(status), *entry[4:])

    def _is_own_fault(self, record: Any, posted: PostedRequests) -> bool:
        """Whether a flushed request, the first to fail, failed because of its own memory."""
        queue_pair = posted.queue_pair()
        if queue_pair is None or queue_pair.connection_ended:
            return False
        return Quirk.RXE_FLUSHES_ITS_OWN_FAULT in self._adapter._quirks and not _is_intact(record, sink=False)

    def _is_loss(self, record: Any, operation: int) -> bool:
        """Whether a request was not sent because the connection was lost, and not because of its memory."""
        quirks = self._adapter._quirks
        if Quirk.IWARP_ONE_STATUS_FOR_LOSS_AND_MEMORY in quirks:
            return record is not None and _is_intact(record, operation == Operation.READ)
        return Quirk.RXE_ONE_STATUS_FOR_PORT_AND_MEMORY in quirks and self._adapter.port_state != "active"


def _is_intact(record: Any, sink: bool) -> bool:
    """Whether all memory of a request is still registered. sink: it must also be writable."""
    for element in record if isinstance(record, list) else [record]:
        region = getattr(element, "region", element)
        if not isinstance(region, MemoryRegion):
            continue
        if region.closed or (region is not element and element.token != region.local_token):
            return False
        if sink and not region.access & Access.LOCAL_WRITE:
            return False
    return True
