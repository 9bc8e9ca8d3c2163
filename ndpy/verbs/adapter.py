"""An open verbs device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ndpy import errors
from ndpy.adapter import Adapter
from ndpy.addresses import Address
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Access, Capability
from ndpy.info import AdapterInfo
from ndpy.memory import is_written, span
from ndpy.pending import Pending
from ndpy.quirks import Quirk
from ndpy.resource import _serials, prevent_close
from ndpy.shared_receive_queue import SharedReceiveQueue
from ndpy.verbs.adapter_info import open_context
from ndpy.verbs.addresses import bind_identifier, new_identifier
from ndpy.verbs.completion_queue import VerbsCompletionQueue
from ndpy.verbs.connection import VerbsConnector
from ndpy.verbs.events import EventThread
from ndpy.verbs.listener import VerbsListener
from ndpy.verbs.memory import (
    EVERYTHING,
    VerbsMemoryRegion,
    VerbsMemoryWindow,
    native_access,
    register_everything,
    validate_access,
)
from ndpy.verbs.monitor import Monitor
from ndpy.verbs.native_calls import check, check_pointer, ffi, lib, text
from ndpy.verbs.queue_pair import VerbsQueuePair
from ndpy.verbs.registering import Registered, RegisteringThreads
from ndpy.verbs.shared_receive_queue import VerbsSharedReceiveQueue
from ndpy.weak_set import SharedWeakSet
from ndpy.work_queues import QueuePairLimits

_new = object.__new__


class CmEvent(NamedTuple):
    """A connection event, copied; see struct ndpy_cm_event."""

    type: int
    status: int
    key: int
    id: Any
    private_data: bytes
    responder_resources: int
    initiator_depth: int
    srq: bool


class VerbsAdapter(Adapter):
    def __init__(self, info: AdapterInfo) -> None:
        super().__init__(info)
        active = [port.number for port in info.ports if port.state == "active"]
        self._port = active[0] if active else info.ports[0].number
        self._registering = RegisteringThreads(info.name)
        self._background: set[threading.Thread] = set()
        self._port_states: dict[int, str] = {port.number: port.state for port in info.ports}
        #: Their connections ended while the port was down. They tell their peers when it is active again.
        self._waiting_for_port: SharedWeakSet[VerbsConnector] = SharedWeakSet()
        self._context = self._domain = self._channel = self._sentinel = None
        self._cm_event = ffi.new("struct ndpy_cm_event *")
        self._async_event = ffi.new("struct ndpy_async_event *")
        self._events: EventThread | None = None  # type: ignore[assignment]
        try:
            self._context = open_context(info.name)
            self._domain = check_pointer("open adapter", lib.ibv_alloc_pd(self._context))
            self._channel = self._open_channel()
            os.set_blocking(self._channel.fd, False)
            os.set_blocking(self._context.async_fd, False)
            self._events = EventThread(info.name, self._orphans)
            self._events.watch(self._channel.fd, self._on_connection_events)
            self._events.watch(self._context.async_fd, self._on_device_events)
            self._sentinel = self._bind_sentinel()
        except BaseException:
            self._free()
            raise
        self._opened()

    _events: EventThread

    def _open_channel(self) -> Any:
        def explain(number: int) -> errors.ProviderError | None:
            if not os.path.exists("/dev/infiniband/rdma_cm"):
                return errors.UnsupportedError(
                    "there is no /dev/infiniband/rdma_cm; run `modprobe rdma_ucm`",
                    operation="open adapter",
                    native=number,
                )
            return None

        return check_pointer("open adapter", lib.rdma_create_event_channel(), explain)

    def _bind_sentinel(self) -> Any:
        """The connection manager announces the removal of a device to identifiers that are bound to it, and only to them."""
        for address in self.info.addresses:
            identifier = new_identifier(self, self._serial)
            try:
                bind_identifier(self, identifier, (address, 0))
                return identifier
            except (errors.NdpyError, OSError):
                lib.rdma_destroy_id(identifier)
        return None

    @property
    def port_state(self) -> str:
        """The state of the port that connections use, as of the last event."""
        return self._port_states[self._port]

    # ---- making objects ----

    def _memory(self, buffer: Any, access: Access) -> tuple[Any, Any, int, int, Access]:
        """What a region of it is made from."""
        self._check()
        access = validate_access(access, self.info)
        owner, address, length = span(buffer, is_written(access))
        if length > self.info.max_registration_size:
            raise errors.LimitExceededError(
                f"{length} bytes are more than the {self.info.max_registration_size} that {self.info.name} registers at once"
            )
        return owner, buffer, address, length, access

    def _register(self, buffer: Any, access: Access) -> VerbsMemoryRegion:
        return self._make(VerbsMemoryRegion, *self._memory(buffer, access))

    def begin_register(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> Pending[VerbsMemoryRegion]:  # type: ignore[override]
        memory = self._memory(buffer, access)
        _, _, _, length, _ = memory
        if length.bit_length() in self._registering.pace.quick:
            done = _new(Registered)
            done._result = self._make(VerbsMemoryRegion, *memory)
            return done

        def make() -> VerbsMemoryRegion:
            self._check()
            return VerbsMemoryRegion(self, *memory)

        return self._registering.begin(make)

    def _register_implicit(self, access: Access) -> VerbsMemoryRegion:
        access = validate_access(access | Access.ON_DEMAND, self.info)
        return self._make(VerbsMemoryRegion, None, None, 0, EVERYTHING, access, register_everything)

    def _register_dmabuf(self, fd: int, offset: int, length: int, iova: int, access: Access) -> VerbsMemoryRegion:
        access = validate_access(access, self.info)

        def register(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
            rights = native_access(access, self.info.transport == "iWARP")
            number = lib.ndpy_register_dmabuf(self._domain, offset, length, address, fd, rights, out)
            check("register dma-buf", number)

        return self._make(VerbsMemoryRegion, None, None, iova, length, access, register)

    def _monitor(self, on_change: Callable[[], None]) -> Monitor:
        return Monitor(self, on_change)

    def create_memory_window(self) -> VerbsMemoryWindow:
        self._check()
        if Capability.MEMORY_WINDOWS not in self.info.capabilities:
            raise errors.UnsupportedError(
                f"{self.info.name} ({self.info.driver}) has no type 2 memory windows; register with remote access instead",
                operation="create memory window",
            )
        return self._make(VerbsMemoryWindow)

    def create_completion_queue(self, depth: int) -> VerbsCompletionQueue:
        self._check()
        self._limit("a completion queue's depth", depth, self.info.max_completion_queue_depth)
        return self._make(VerbsCompletionQueue, depth)

    def create_shared_receive_queue(
        self, depth: int, *, max_sge: int = 1, threshold: int = 0
    ) -> VerbsSharedReceiveQueue:
        self._check()
        self._limit_shared_receive_queue(depth, max_sge, threshold)
        return self._make(VerbsSharedReceiveQueue, depth, max_sge, threshold)

    def create_queue_pair(
        self,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue | None = None,
        *,
        receive_queue_depth: int = 64,
        initiator_queue_depth: int = 64,
        max_receive_sge: int = 1,
        max_initiator_sge: int = 1,
        inline_data_size: int = 0,
        srq: SharedReceiveQueue | None = None,
    ) -> VerbsQueuePair:
        self._check()
        initiator_cq = initiator_cq or receive_cq
        limits = QueuePairLimits(
            receive_queue_depth, initiator_queue_depth, max_receive_sge, max_initiator_sge, inline_data_size
        )
        limits = self._limit_queue_pair(receive_cq, initiator_cq, limits, srq)
        with prevent_close(receive_cq, initiator_cq, srq):
            return VerbsQueuePair(self, receive_cq, initiator_cq, limits, srq)

    def create_connector(self) -> VerbsConnector:
        self._check()
        return self._make(VerbsConnector)

    def listen(self, address: Address, *, backlog: int = 128) -> VerbsListener:
        self._check()
        return self._make(VerbsListener, address, backlog)

    # ---- events ----

    def _tell_when_port_is_active(self, connector: VerbsConnector) -> None:
        self._waiting_for_port.add(connector)
        if self.port_state == "active":
            # Since it was looked at last; the thread may have told the others already.
            connector._on_port_active()

    def _in_background(self, call: Callable[[], Any]) -> None:
        """Run a native call that may block for long; closing the adapter waits for it."""
        background = self._background

        def run() -> None:
            try:
                call()
            finally:
                background.discard(thread)

        thread = threading.Thread(target=run, name=f"ndpy-{self.info.name}-release", daemon=True)
        background.add(thread)
        thread.start()

    def _on_connection_events(self) -> None:
        event = self._cm_event
        while not lib.ndpy_next_cm_event(self._channel, next(_serials), event):
            copied = CmEvent(
                event.type,
                event.status,
                event.key,
                event.id,
                bytes(ffi.buffer(event.private_data, event.private_data_length)),
                event.responder_resources,
                event.initiator_depth,
                bool(event.srq),
            )
            if copied.type == lib.RDMA_CM_EVENT_DEVICE_REMOVAL:
                if self._defunct is None:
                    self._mark_removed()
                continue
            request = copied.type == lib.RDMA_CM_EVENT_CONNECT_REQUEST
            target = self._children.get(event.listener if request else copied.key)
            if isinstance(target, (VerbsConnector, VerbsListener)):
                target._on_event(copied)
            elif request:
                lib.rdma_destroy_id(copied.id)

    def _on_device_events(self) -> None:
        event = self._async_event
        while not lib.ndpy_next_async_event(self._context, event):
            kind = event.type
            target = self._children.get(event.key) if event.key else None
            if kind == lib.IBV_EVENT_DEVICE_FATAL:
                if self._defunct is None:
                    self._mark_removed()
            elif kind in (lib.IBV_EVENT_PORT_ACTIVE, lib.IBV_EVENT_PORT_ERR):
                self._port_states[event.port] = "active" if kind == lib.IBV_EVENT_PORT_ACTIVE else "down"
                if self.port_state == "active":
                    for connector in self._waiting_for_port.take():
                        connector._on_port_active()
            elif kind == lib.IBV_EVENT_CQ_ERR and isinstance(target, VerbsCompletionQueue):
                target._on_overrun()
            elif isinstance(target, VerbsSharedReceiveQueue):
                target._on_limit() if kind == lib.IBV_EVENT_SRQ_LIMIT_REACHED else target._on_error()
            elif isinstance(target, VerbsQueuePair):
                self._on_queue_pair_event(kind, target)

    def _on_queue_pair_event(self, kind: int, queue_pair: VerbsQueuePair) -> None:
        if kind == lib.IBV_EVENT_COMM_EST:
            connector = queue_pair.connector
            if isinstance(connector, VerbsConnector):
                connector._on_first_message()
        elif kind in (lib.IBV_EVENT_QP_FATAL, lib.IBV_EVENT_QP_REQ_ERR, lib.IBV_EVENT_QP_ACCESS_ERR):
            queue_pair.failure = text(lib.ibv_event_type_str(kind))
            # A peer's wrong access: rxe has yet to answer it, and ends the queue pair itself after that (Quirk.
            # RXE_ACCESS_EVENT_COMES_EARLY). iWARP has no such answer.
            answers = kind == lib.IBV_EVENT_QP_ACCESS_ERR and Quirk.IWARP_NO_ACKNOWLEDGEMENT not in self._differences
            queue_pair._end_connection(natively=not answers)

    # ---- the end ----

    def _refuse_if_used(self) -> None:
        self._registering.settle()
        super()._refuse_if_used()

    def _release(self) -> None:
        self._registering.stop()
        try:
            # A registration may have succeeded just before.
            self._refuse_if_used()
        except errors.DeviceBusyError:
            self._registering.start()
            raise
        self._free()

    def _on_forked(self) -> None:
        super()._on_forked()
        self._registering.abandon(self._forked_error)
        self._events.abandon()

    def _free(self) -> None:
        for thread in list(self._background):
            thread.join()
        if self._events is not None:
            self._events.stop()
        if self._sentinel is not None:
            if self._defunct == self._removed_error:
                lib.ndpy_cm_let_go(self._sentinel)
            lib.rdma_destroy_id(self._sentinel)
            self._sentinel = None
        if self._channel is not None:
            lib.rdma_destroy_event_channel(self._channel)
            self._channel = None
        if self._domain is not None:
            check("close adapter", lib.ibv_dealloc_pd(self._domain))
            self._domain = None
        if self._context is not None:
            check("close adapter", lib.ibv_close_device(self._context))
            self._context = None
