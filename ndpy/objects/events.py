"""Events of an adapter: ports that go up and down, changed addresses, queue pairs that fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.pending import Pending, wait_or_cancel
from ndpy.objects.resource import AdapterObject
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.flags import NamedInt

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter

_MOST_QUEUED = 1000


class EventKind(NamedInt):
    """What has happened. The numbers are those of enum ibv_event_type.

    Names:
        COMPLETION_QUEUE_ERROR: the queue was overrun (contract G.3.1).
        QUEUE_PAIR_FATAL, QUEUE_PAIR_REQUEST_ERROR, QUEUE_PAIR_ACCESS_ERROR: the queue pair failed, because of the
            adapter, of a wrong request of the peer, or of one beyond its rights.
        CONNECTION_ESTABLISHED: a queue pair that is ready to receive got its first message.
        SEND_QUEUE_DRAINED: a queue pair in SQD has ended what it had begun.
        PATH_MIGRATED, PATH_MIGRATION_FAILED: the queue pair uses its alternate path, or could not.
        DEVICE_FATAL: the adapter failed, or was removed. It is the last event.
        PORT_ACTIVE, PORT_DOWN: the port's state.
        LID_CHANGED, PKEY_CHANGED, SUBNET_MANAGER_CHANGED, CLIENT_REREGISTER, GID_CHANGED: the port has other addresses
            or keys, or another subnet manager.
        SHARED_RECEIVE_QUEUE_ERROR, SHARED_RECEIVE_QUEUE_LIMIT: the queue failed, or has fewer receives than its
            threshold.
        LAST_RECEIVE_TAKEN: a queue pair that failed takes no more receives from its shared receive queue.
    Source: ibv_get_async_event(3).
    """

    COMPLETION_QUEUE_ERROR = 0
    QUEUE_PAIR_FATAL = 1
    QUEUE_PAIR_REQUEST_ERROR = 2
    QUEUE_PAIR_ACCESS_ERROR = 3
    CONNECTION_ESTABLISHED = 4
    SEND_QUEUE_DRAINED = 5
    PATH_MIGRATED = 6
    PATH_MIGRATION_FAILED = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_DOWN = 10
    LID_CHANGED = 11
    PKEY_CHANGED = 12
    SUBNET_MANAGER_CHANGED = 13
    SHARED_RECEIVE_QUEUE_ERROR = 14
    SHARED_RECEIVE_QUEUE_LIMIT = 15
    LAST_RECEIVE_TAKEN = 16
    CLIENT_REREGISTER = 17
    GID_CHANGED = 18


_OF_PORT = range(EventKind.PORT_ACTIVE, EventKind.SUBNET_MANAGER_CHANGED + 1)


@dataclasses.dataclass(frozen=True)
class AdapterEvent:
    """Something that an adapter tells.

    Parameters:
        kind: what it is.
        port: the number of the port. None if it is about none.
        subject: the queue pair, completion queue or shared receive queue. None if it is about none, or was closed.
        name: the library's words for it.
    """

    kind: EventKind
    port: int | None = None
    subject: Any = None
    name: str = ""


def make_event(native: int, port: int, subject: Any, name: str) -> AdapterEvent | None:
    """The event of a native one. None for a kind that is not known."""
    try:
        kind = EventKind(native)
    except ValueError:
        return None
    about_port = kind in _OF_PORT or kind in (EventKind.CLIENT_REREGISTER, EventKind.GID_CHANGED)
    return AdapterEvent(kind, port if about_port else None, subject, name)


class EventStream(AdapterObject):
    """The events of an adapter from its creation on, made by Adapter.events().

    get() takes the next one. The stream is an iterator too, for `for` and for `async for`. Iteration ends when the
    stream is closed, and after DEVICE_FATAL. What ndpy itself does because of an event, it does in any case.

    A stream keeps up to 1000 events that nobody has taken. Then the oldest ones are lost.

    Attributes:
        lost: how many were lost.
    Source: ibv_get_async_event(3).
    """

    _release_order = 1

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.lost = 0
        self._queued: deque[AdapterEvent] = deque()
        self._calls: deque[Pending[AdapterEvent]] = deque()
        self._opened()

    def get(self, timeout_s: float | None = None) -> AdapterEvent:
        """Wait for the next event.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            TimeoutError: none came within timeout_s seconds.
            CanceledError: the stream was closed meanwhile.
            DeviceRemovedError: the adapter was removed, and all events were taken.
        """
        timeout_s = timeout(timeout_s)
        return wait_or_cancel(self.begin_get(), timeout_s)

    def begin_get(self) -> Pending[AdapterEvent]:
        """Start get(). The oldest of several calls gets the next event.

        Returns: a Pending of the event, which can be awaited.
        """
        pending: Pending[AdapterEvent] = self._adapter._pending_type("get event", lambda: self._forget(pending))
        with self._lifetime:
            if self._queued:
                pending.succeed(self._queued.popleft())
                return pending
            self._check()
            self._calls.append(pending)
        return pending

    def _forget(self, pending: Pending[AdapterEvent]) -> None:
        with self._lifetime, contextlib.suppress(ValueError):
            self._calls.remove(pending)

    def __iter__(self) -> Iterator[AdapterEvent]:
        return self

    def __next__(self) -> AdapterEvent:
        try:
            return self.get()
        except (errors.ClosedError, errors.CanceledError, errors.DeviceRemovedError):
            raise StopIteration from None

    def __aiter__(self) -> AsyncIterator[AdapterEvent]:
        return self

    async def __anext__(self) -> AdapterEvent:
        try:
            return await self.begin_get()
        except (errors.ClosedError, errors.CanceledError, errors.DeviceRemovedError):
            raise StopAsyncIteration from None

    def _on_event(self, event: AdapterEvent) -> None:
        with self._lifetime:
            while self._calls:
                if self._calls.popleft().succeed(event):
                    return
            if len(self._queued) == _MOST_QUEUED:
                self._queued.popleft()
                self.lost += 1
            self._queued.append(event)

    def _end_calls(self, error: errors.NdpyError) -> None:
        with self._lifetime:
            calls, self._calls = self._calls, deque()
        for pending in calls:
            pending.fail(error)

    def _on_removed(self) -> None:
        self._end_calls(self._removed_error())

    def _on_forked(self) -> None:
        super()._on_forked()
        self._calls.clear()

    def _release(self) -> None:
        self._end_calls(errors.CanceledError("the stream of events was closed", operation="get event"))
        self._queued.clear()

    def _describe(self) -> str:
        return "EventStream"
