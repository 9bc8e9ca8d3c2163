"""Completion queues on completion channels.

A channel's event is one shot and may come for a completion that is taken already. So a waiter arms, looks again, and only
then sleeps. Events are taken and acknowledged in one C call, under the queue's lock, by whoever sees the channel
readable first: a wait(), a poller, or the adapter's thread for arm(). That one tells all others (`_on_event`), since the
channel is no longer readable for them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.completion import PostedRequests
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Access, Notify, Operation, Status
from ndpy.memory import MemoryRegion
from ndpy.pending import Pending
from ndpy.verbs.native_calls import check, check_pointer, ffi, lib

if TYPE_CHECKING:
    from ndpy.verbs.adapter import VerbsAdapter

# Room beyond the depth asked for: completions of silent requests that are signaled now and then take a place too.
_SLACK = 64

# Longest wait of close() for the threads that wait on the queue.
_LEAVE_S = 5.0

_DATA_OPERATIONS = (int(Operation.SEND), int(Operation.READ), int(Operation.WRITE))


class VerbsCompletionQueue(CompletionQueue):
    _adapter: VerbsAdapter
    _poll_native = staticmethod(lib.ndpy_poll)
    _poll_internal = staticmethod(lib.ndpy_poll_internal)

    def __init__(self, adapter: VerbsAdapter, depth: int) -> None:
        super().__init__(adapter, depth)
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiters = 0
        self._no_waiters = threading.Condition(self._lock)
        self._armed: list[tuple[Notify, Pending[None]]] = []
        # How many completions had come since creation when the oldest of them was armed.
        self._armed_at = 0
        # The last completion that ended a notification, counted since creation as _taken is.
        self._notified = 0
        self._overrun = False
        self._channel: Any = None
        self._cq: Any = None
        self._native: Any = None
        try:
            self._channel = check_pointer("create completion queue", lib.ibv_create_comp_channel(adapter._context))
            os.set_blocking(self._channel.fd, False)
            self._cq = check_pointer(
                "create completion queue",
                lib.ibv_create_cq(
                    adapter._context, self._native_depth(depth), ffi.cast("void *", self._serial), self._channel, 0
                ),
            )
            self._native = check_pointer("create completion queue", lib.ndpy_completion_queue_new(self._cq))
        except BaseException:
            self._destroy()
            raise
        self._opened()

    def _native_depth(self, depth: int) -> int:
        return min(depth + max(_SLACK, depth // 4), self._adapter.info.max_completion_queue_depth)

    def _new_entries(self, count: int) -> tuple[Any, memoryview]:
        entries = ffi.new("struct ndpy_completion[]", count)
        return entries, memoryview(ffi.buffer(entries))

    def _refine_status(self, entry: tuple[int, ...], record: Any, posted: PostedRequests) -> tuple[int, ...]:
        _, _, operation, status, native = entry[:5]
        first = not posted.failed
        if operation != Operation.RECEIVE:
            posted.failed = True
        if status == Status.CANCELED:
            if first and operation in _DATA_OPERATIONS and self._is_own_fault(record, posted):
                entry = (*entry[:3], int(Status.ACCESS_VIOLATION), *entry[4:])
            return entry
        intact = record is not None and _intact(record, operation in (Operation.READ, Operation.RECEIVE))
        if operation == Operation.RECEIVE:
            if record is not None and not intact:
                status = Status.ACCESS_VIOLATION
        elif native == lib.IBV_WC_LOC_QP_OP_ERR and operation in _DATA_OPERATIONS:
            # The software adapters have one word for a request that they cannot send: rxe whether its memory or
            # the port is the reason, siw whether its memory or the loss of the connection.
            lost = intact if self._adapter.info.transport == "iWARP" else self._adapter.port_state != "active"
            if lost:
                status = Status.IO_TIMEOUT
        return (*entry[:3], int(status), *entry[4:])

    def _is_own_fault(self, record: Any, posted: PostedRequests) -> bool:
        """Whether a flushed request, the first to fail, failed by its own memory: rxe of Linux 6.12 and 7.2 reports it as flushed,
        as those behind it (rxe_req.c, rxe_requester(); rxe_comp.c, flush_send_wqe())."""
        queue_pair = posted.queue_pair()
        if self._adapter.info.driver != "rdma_rxe" or queue_pair is None or queue_pair.connection_ended:
            return False
        return not _intact(record, sink=False)

    def fileno(self) -> int:
        """The completion channel's file descriptor, for programs with an event loop of their own; use arm() with it."""
        self._check()
        return int(self._channel.fd)

    def _wait_for_notification(self, deadline: float | None) -> None:
        with self._lock:
            if self._arm_and_look():
                return
            self._waiters += 1
        try:
            poll = select.poll()
            poll.register(self._channel.fd, select.POLLIN)
            poll.register(self._kick, select.POLLIN)
            timeout_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = poll.poll(timeout_ms)
            if not ready:
                raise errors.TimeoutError("no completion within the time allowed", operation="wait")
            for fd, _ in ready:
                if fd == self._kick:
                    self._take_kick()
                else:
                    self._on_event(waiting=1)
        finally:
            with self._lock:
                self._waiters -= 1
                if not self._waiters:
                    self._no_waiters.notify_all()

    def _arm_and_look(self) -> bool:
        """Arm, and whether there are completions all the same: those that came before raise no event. Under the lock."""
        if self._defunct is not None:
            raise self._defunct()
        if self._overrun:
            raise self._overrun_error()
        self._arm_native(solicited=False)
        return bool(self._drain())

    def _take_kick(self) -> None:
        try:
            os.eventfd_read(self._kick)
        except BlockingIOError:
            return
        # One write wakes one reader of many; a state that all must see is passed on from each to the next.
        if self._defunct is not None or self._overrun:
            os.eventfd_write(self._kick, 1)

    def _wake_another_waiter(self) -> None:
        self._wake_waiters()

    def _wake_waiters(self, waiting: int = 0) -> None:
        """waiting: 1 if the caller counts as one of them."""
        if self._waiters > waiting:
            # close() waits for the waiters under the lock, and then closes the descriptor.
            with self._lock:
                if self._waiters > waiting:
                    os.eventfd_write(self._kick, 1)

    def _arm_native(self, solicited: bool) -> None:
        check("arm", lib.ndpy_arm(self._cq, int(solicited)))

    def _drain(self) -> int:
        added = lib.ndpy_drain(self._native)
        if added < 0:
            raise errors.from_errno("poll", -added)
        return int(lib.ndpy_undelivered(self._native))

    def _on_event(self, waiting: int = 0) -> None:
        """Take the channel's events and tell everybody else who waits for one."""
        with self._lock:
            if self._channel is None or not lib.ndpy_take_cq_events(self._channel):
                return
            ended = self._end_notified()
        self._announce(ended, waiting)

    def _end_armed(self) -> list[Pending[None]]:
        ended = [pending for kind, pending in self._armed if kind is not Notify.ERRORS]
        self._armed = [entry for entry in self._armed if entry[0] is Notify.ERRORS]
        return ended

    def _end_notified(self) -> list[Pending[None]]:
        """An event came. It may be late, of an earlier arming: of a wait() that found something without it, say."""
        kinds = {kind for kind, _ in self._armed if kind is not Notify.ERRORS}
        if not kinds:
            return []
        if self._taken + self._drain() <= self._armed_at:
            self._arm_native(solicited=Notify.ANY not in kinds)
            if self._taken + self._drain() <= self._armed_at:
                return []
        # The completion that raised the event is the first that came after arming; later ones count as fresh.
        self._notified = max(self._notified, self._armed_at + 1)
        return self._end_armed()

    def _announce(self, ended: list[Pending[None]], waiting: int = 0) -> None:
        for pending in ended:
            pending.succeed(None)
        self._wake_waiters(waiting)
        with self._lock:
            pollers = list(self._pollers)
        for poller in pollers:
            poller._mark_ready(self)

    def _wake_all(self) -> None:
        with self._lock:
            ended = self._end_armed() if self._native is not None and self._drain() else []
        self._announce(ended)

    def arm(self, kind: Notify = Notify.ANY) -> Pending[None]:
        self._check()
        kind = Notify(kind)
        pending: Pending[None] = Pending("arm", lambda: self._disarm(pending))
        with self._lock:
            if self._defunct is not None:
                raise self._defunct()
            if self._overrun:
                raise self._overrun_error()
            if kind is not Notify.ERRORS:
                outstanding = [armed for armed, _ in self._armed if armed is not Notify.ERRORS]
                self._arm_native(solicited=kind is Notify.SOLICITED and Notify.ANY not in outstanding)
                waiting = self._drain()
                if not outstanding:
                    self._armed_at = self._taken + waiting
                if not outstanding and self._taken + waiting > max(self._notified, self._taken):
                    self._notified = self._taken + waiting
                    pending.succeed(None)
                    return pending
            self._armed.append((kind, pending))
            self._watch_channel()
        if kind is Notify.SOLICITED and self._adapter.info.driver == "rdma_rxe":
            self._adapter._events.look_regularly(self._look_for_failures)
        return pending

    def _watch_channel(self) -> None:
        """Have the adapter's thread take the next event. Under the lock, since close() forgets the channel."""
        self._adapter._events.watch(self._channel.fd, self._on_armed_event, once=True)

    def _look_for_failures(self) -> bool:
        """A failed completion satisfies SOLICITED, which rxe does not tell of: not of requests of the initiator queue, and
        on Linux 6.12 and 7.2 not of flushed receives either. False when nobody waits for that any more."""
        with self._lock:
            kinds = {kind for kind, _ in self._armed}
            if self._native is None or Notify.SOLICITED not in kinds:
                return False
            waiting = self._drain()
            place = lib.ndpy_undelivered_failure(self._native, max(0, self._notified - self._taken)) if waiting else 0
            if not place:
                return True
            self._notified = self._taken + place
            ended = self._end_armed()
        self._announce(ended)
        return False

    def _disarm(self, pending: Pending[None]) -> None:
        with self._lock:
            self._armed = [entry for entry in self._armed if entry[1] is not pending]

    def _on_armed_event(self) -> None:
        with self._lock:
            if self._channel is None or not self._armed:
                return
            ended = self._end_notified() if lib.ndpy_take_cq_events(self._channel) else []
            if self._armed:
                self._watch_channel()
        self._announce(ended)

    def resize(self, depth: int) -> None:
        self._check()
        maximum = self._adapter.info.max_completion_queue_depth
        if not 1 <= depth <= maximum:
            raise errors.LimitExceededError(
                f"a completion queue of {self._adapter.info.name} holds 1 to {maximum}, not {depth}"
            )
        with self._lock:
            self._check()
            waiting = self._drain()
            if waiting > depth:
                raise errors.LimitExceededError(f"{waiting} completions wait in the queue; it cannot shrink to {depth}")
            result = lib.ibv_resize_cq(self._cq, self._native_depth(depth))
            if result:
                number = result if result > 0 else ffi.errno
                raise errors.from_errno("resize", number)
            self.depth = depth

    def _on_overrun(self) -> None:
        """The provider found no room for a completion (IBV_EVENT_CQ_ERR)."""
        with self._lock:
            self._overrun = True
            ended, self._armed = [pending for _, pending in self._armed], []
        for pending in ended:
            pending.fail(self._overrun_error())
        for child in self._adapter._open_children():
            if self in getattr(child, "_completion_queues", ()):
                child._end_connection()  # type: ignore[attr-defined]
                child._on_failed_completion()  # type: ignore[attr-defined]
        self._announce([])

    def _overrun_error(self) -> errors.ProviderError:
        return errors.CompletionQueueOverrunError(
            f"more completions arrived than this queue of depth {self.depth} holds; some are lost, and its queue pairs are "
            "unusable: close them, and create the queue with room for all requests that are outstanding at once",
            operation="wait",
        )

    def _on_forked(self) -> None:
        super()._on_forked()
        self._no_waiters = threading.Condition(self._lock)
        self._waiters = 0
        self._armed = []

    def _on_removed(self) -> None:
        with self._lock:
            ended, self._armed = [pending for _, pending in self._armed], []
        for pending in ended:
            pending.fail(self._removed_error())
        self._announce([])

    def _release(self) -> None:
        with self._lock:
            self._defunct = self._closed_error
            if self._waiters:
                os.eventfd_write(self._kick, 1)
            # A thread that sleeps on the channel's descriptor has to leave before the number can be another file's.
            if not self._no_waiters.wait_for(lambda: not self._waiters, _LEAVE_S):
                self._mark_still_open()
                raise errors.DeviceBusyError("a thread waits on the queue and does not leave", operation="close")
            ended, self._armed = [pending for _, pending in self._armed], []
            pollers = list(self._pollers)
        for pending in ended:
            pending.fail(errors.CanceledError("the completion queue was closed", operation="arm"))
        for poller in pollers:
            poller.remove(self)
        self._adapter._events.forget(self._channel.fd)
        # Under the lock: a queue pair that was just closed may be telling this queue so from another thread.
        with self._lock:
            try:
                self._destroy()
            except BaseException:
                if self._cq is not None:
                    self._mark_still_open()
                raise
        os.close(self._kick)

    def _destroy(self) -> None:
        """Free what there is, the youngest first."""
        if self._cq is not None:
            if self._channel is not None:
                lib.ndpy_take_cq_events(self._channel)
            check("close completion queue", lib.ibv_destroy_cq(self._cq))
            self._cq = None
        if self._native is not None:
            lib.ndpy_completion_queue_free(self._native)
            self._native = None
        if self._channel is not None:
            check("close completion queue", lib.ibv_destroy_comp_channel(self._channel))
            self._channel = None
        if self._released:
            os.close(self._kick)


def _intact(record: Any, sink: bool) -> bool:
    """Whether all memory of a request is still registered, with the right to be written to if it is a sink."""
    for element in record if isinstance(record, list) else [record]:
        region = getattr(element, "region", element)
        if not isinstance(region, MemoryRegion):
            continue
        if region.closed or (region is not element and element.token != region.local_token):
            return False
        if sink and not region.access & Access.LOCAL_WRITE:
            return False
    return True
