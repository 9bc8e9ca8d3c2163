"""Calls of the connection manager for queue pairs of datagrams: where a peer's queue pair is, and multicast groups.

The adapter's thread handles their events. The program's threads begin and cancel them.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ndpy import errors
from ndpy.objects.datagram_queue_pair import DatagramQueuePair, Destination
from ndpy.objects.multicast_group import MulticastGroup
from ndpy.objects.pending import Pending
from ndpy.objects.resource import Resource, next_serial
from ndpy.platforms.verbs.addresses import bind_identifier, new_identifier, pack_address
from ndpy.platforms.verbs.manager import CmEvent, ManagerClient, Way, parameters_with, route_of
from ndpy.platforms.verbs.native_calls import check_errno, ffi, free_once, lib
from ndpy.platforms.verbs.queue_pair_attributes import read_vector

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

T = TypeVar("T", bound=Resource)

# What the answer to a request for a queue pair says (InfiniBand Architecture, volume 1, 12.11.2).
_REFUSALS = {
    2: "the listener rejected the request",
    3: "the listener has no queue pair",
    4: "the listener names another place, which ndpy does not follow",
    5: "the peer's connection manager has another version",
}
_NOT_SUPPORTED = 1
# How long the adapter's thread may take from having a result to handing it over.
_DELIVERY_S = 5.0


class DatagramCall(ManagerClient, Generic[T]):
    """A call with an identifier of its own. begin() starts it. pending: its result."""

    def __init__(self, adapter: VerbsAdapter, queue_pair: DatagramQueuePair, operation: str) -> None:
        self._queue_pair = queue_pair
        self._adapter = adapter
        self._operation = operation
        #: Whoever ends the call takes the identifier under this lock.
        self._lock = threading.RLock()
        self._serial = next_serial()
        self.pending: Pending[T] = self._adapter._pending_type(operation, self._cancel)
        self._id: Any = None
        #: Whether the adapter's thread has the result, and is about to end `pending` with it.
        self._has_result = False

    def begin(self) -> Pending[T]:
        with self._lock:
            # The events go to those that the adapter knows.
            self._queue_pair._calls.add(self)
            self._adapter._datagram_calls[self._serial] = self
            try:
                self._id = new_identifier(self._adapter, self._serial, datagrams=True)
                self._start()
            except BaseException:
                self._end()
                raise
        return self.pending

    def _end(self) -> None:
        """Forget it, and free the identifier unless somebody else has it."""
        with self._lock:
            identifier, self._id = self._id, None
            self._queue_pair._calls.discard(self)
            self._adapter._datagram_calls.pop(self._serial, None)
            if identifier is not None:
                lib.rdma_destroy_id(identifier)

    def _cancel(self) -> None:
        self._end()
        if self._has_result:
            # Otherwise the result would be closed only after cancel() has returned.
            with contextlib.suppress(errors.TimeoutError):
                self.pending.exception(_DELIVERY_S)

    def fail(self, error: BaseException) -> None:
        """End it, because its queue pair or its adapter goes."""
        self._end()
        self.pending.fail(error)

    def _on_event(self, event: CmEvent) -> None:
        value, error = None, None
        with self._lock:
            if self._id is None:
                return
            try:
                value = self._handle(event)
            except errors.NdpyError as failure:
                # Drop the traceback: its frames refer to the error.
                error = failure.with_traceback(None)
            if value is None and error is None:
                return
            self._has_result = value is not None
            self._end()
        if error is not None:
            self.pending.fail(error)
        elif value is not None and not self.pending.succeed(value):
            value.close()

    def _destination(self, event: CmEvent) -> Destination:
        return self._queue_pair._destination_class(
            self._queue_pair, read_vector(event.path), event.qp_number, event.qkey
        )

    @abc.abstractmethod
    def _start(self) -> None:
        """Make the first native call."""

    @abc.abstractmethod
    def _handle(self, event: CmEvent) -> T | None:
        """Go on. Returns the result, or None if there is more to wait for. Raises the error that ends the call."""


class ResolveCall(DatagramCall[Destination]):
    """DatagramQueuePair.resolve()."""

    def __init__(
        self,
        adapter: VerbsAdapter,
        queue_pair: DatagramQueuePair,
        family: int,
        destination: tuple[Any, ...],
        target: str,
        private_data: bytes,
    ) -> None:
        super().__init__(adapter, queue_pair, "resolve")
        self._address = family, destination
        self._way = Way(self._adapter, target, "resolve")
        self._private_data = private_data

    def _start(self) -> None:
        family, destination = self._address
        self._way.resolve_address(self._id, family, destination, is_bound=False)

    def _handle(self, event: CmEvent) -> Destination | None:
        kind = event.type
        if kind == lib.RDMA_CM_EVENT_ADDR_RESOLVED:
            self._way.resolve_route(self._id)
        elif kind == lib.RDMA_CM_EVENT_ROUTE_RESOLVED:
            self._ask()
        elif kind == lib.RDMA_CM_EVENT_ESTABLISHED:
            found = self._destination(event)
            found.private_data = event.private_data
            return found
        elif kind == lib.RDMA_CM_EVENT_UNREACHABLE:
            raise self._refusal(event.status)
        elif (error := self._way.resolution_error(event)) is not None:
            raise error
        return None

    def _ask(self) -> None:
        parameters, _kept = parameters_with(self._private_data)
        check_errno("resolve", lib.rdma_connect(self._id, parameters))

    def _refusal(self, status: int) -> errors.NdpyError:
        if status < 0:
            return self._way.unreachable(-status)
        if status == _NOT_SUPPORTED:
            return self._way.nobody_listens(status)
        why = _REFUSALS.get(status, f"the peer's connection manager refused with reason {status}")
        return errors.ConnectionRefusedError(f"{self._way.target}: {why}", operation="resolve", native=status)


class JoinCall(DatagramCall[MulticastGroup]):
    """DatagramQueuePair.join_multicast()."""

    def __init__(
        self, adapter: VerbsAdapter, queue_pair: DatagramQueuePair, family: int, group: tuple[Any, ...]
    ) -> None:
        super().__init__(adapter, queue_pair, "join_multicast")
        self._group = family, group

    def _start(self) -> None:
        family, group = self._group
        info = self._adapter.info
        route = route_of(self._adapter, family, group, "join_multicast")
        bind_identifier(self._adapter, self._id, (route.source, 0))
        packed = pack_address(family, route.destination)
        check_errno(
            "join_multicast",
            lib.rdma_join_multicast(self._id, ffi.cast("struct sockaddr *", packed), ffi.NULL),
            f"{info.name} cannot join {group[0]}",
        )

    def _handle(self, event: CmEvent) -> MulticastGroup | None:
        host = self._group[1][0]
        if event.type == lib.RDMA_CM_EVENT_MULTICAST_ERROR:
            raise errors.from_errno(
                "join_multicast", abs(event.status), f"{self._adapter.info.name} cannot join {host}"
            )
        if event.type != lib.RDMA_CM_EVENT_MULTICAST_JOIN:
            return None
        destination = self._destination(event)
        try:
            group = VerbsMulticastGroup(self._queue_pair, host, destination, self._id, self._serial)
        except BaseException:
            destination.close()
            raise
        # It is the group's now.
        self._id = None
        return group


class VerbsMulticastGroup(MulticastGroup, ManagerClient):
    _adapter: VerbsAdapter

    def __init__(
        self, queue_pair: DatagramQueuePair, address: str, destination: Destination, identifier: Any, key: int
    ) -> None:
        super().__init__(queue_pair, address, destination)
        self._serial = key
        queue_pair.attach_multicast(self.gid, lid=self.lid)
        self._id = identifier
        self._is_attached = True
        self._opened()

    def _on_event(self, event: CmEvent) -> None:
        if event.type == lib.RDMA_CM_EVENT_MULTICAST_ERROR:
            self.failure = str(errors.from_errno("multicast", abs(event.status)))

    def _release(self) -> None:
        if self._is_attached:
            self.queue_pair._forget_multicast(self.gid, self.lid)
            self._is_attached = False
        self.destination.close()
        # The connection manager leaves the group.
        free_once(self, "_id", "close group", lib.rdma_destroy_id)
