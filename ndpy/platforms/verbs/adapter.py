"""An open verbs device."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ndpy import errors
from ndpy.objects.adapter import Adapter
from ndpy.objects.events import make_event
from ndpy.objects.native_steps import Classes
from ndpy.objects.protection_domain import ProtectionDomain
from ndpy.objects.resource import next_serial
from ndpy.platforms.verbs import device_files, reserved_page, softverbs
from ndpy.platforms.verbs.adapter_info import open_context
from ndpy.platforms.verbs.addresses import bind_identifier, new_identifier
from ndpy.platforms.verbs.clock import read_clock
from ndpy.platforms.verbs.completion_queue import VerbsCompletionQueue
from ndpy.platforms.verbs.connection import VerbsConnector
from ndpy.platforms.verbs.counters import read_counters
from ndpy.platforms.verbs.datagram_calls import DatagramCall
from ndpy.platforms.verbs.datagram_listener import VerbsDatagramListener
from ndpy.platforms.verbs.datagram_queue_pair import VerbsDatagramQueuePair
from ndpy.platforms.verbs.device_memory import VerbsDeviceMemory
from ndpy.platforms.verbs.events import EventThread
from ndpy.platforms.verbs.listener import VerbsListener
from ndpy.platforms.verbs.manager import CmEvent, ManagerClient
from ndpy.platforms.verbs.memory import (
    EVERYTHING,
    VerbsMemoryRegion,
    VerbsMemoryWindow,
    plain_rights,
    register_at,
    register_dmabuf,
    register_everything,
    register_null,
)
from ndpy.platforms.verbs.monitor import Monitor
from ndpy.platforms.verbs.native_calls import check_pointer, ffi, free_once, lib, load_for, text
from ndpy.platforms.verbs.queue_pair import VerbsQueuePair
from ndpy.platforms.verbs.registering import RegistrationWorkers
from ndpy.platforms.verbs.shared_receive_queue import VerbsSharedReceiveQueue
from ndpy.platforms.verbs.xrc import VerbsXrcDomain, VerbsXrcSender
from ndpy.vocabulary import system_files
from ndpy.vocabulary.clock import DeviceClock
from ndpy.vocabulary.counters import Counters
from ndpy.vocabulary.flags import Access
from ndpy.vocabulary.quirks import Quirk
from ndpy.vocabulary.weak_set import SharedWeakSet


class VerbsAdapter(Adapter):
    _takes_devices = True
    _events: EventThread
    _context: Any = None
    _domain: Any = None
    _reserved: Any = None
    _channel: Any = None
    _sentinel: Any = None

    def _native_open(self) -> None:
        info = self.info
        # First: _native_close() looks at it, whatever fails here.
        self._background: set[threading.Thread] = set()
        self._port = info.port
        self._registering = RegistrationWorkers(info.name)
        self._port_states: dict[int, str] = {port.number: port.state for port in info.ports}
        #: Connectors whose connections ended while the port was down. They tell their peers when it is active again.
        self._waiting_for_port: SharedWeakSet[VerbsConnector] = SharedWeakSet()
        #: By the keys of their identifiers.
        self._datagram_calls: weakref.WeakValueDictionary[int, DatagramCall[Any]] = weakref.WeakValueDictionary()
        #: Whether the driver tells when a queue pair has taken its last shared receive. None until one has been waited
        #: for.
        self._tells_last_receives: bool | None = None
        if self._quirks & {Quirk.RXE_TELLS_NO_LAST_RECEIVE, Quirk.SIW_TELLS_NO_LAST_RECEIVE}:
            self._tells_last_receives = False
        self._cm_event = ffi.new("struct ndpy_cm_event *")
        self._async_event = ffi.new("struct ndpy_async_event *")
        self._context = open_context(info.name)
        if Quirk.SIW_REFUSES_A_PAGE in self._quirks:
            self._reserved = reserved_page.occupy(self._context)
        self._domain = check_pointer("open adapter", lib.ibv_alloc_pd(self._context))
        self._channel = self._open_channel()
        os.set_blocking(self._channel.fd, False)
        os.set_blocking(self._context.async_fd, False)
        self._events = EventThread(info.name, self._orphans)
        self._events.watch(self._channel.fd, self._on_connection_events)
        self._events.watch(self._context.async_fd, self._on_device_events)
        self._sentinel = self._bind_sentinel()
        self._offer_registrar()

    def _offer_registrar(self) -> None:
        self._attach_registrar(
            int(ffi.cast("uintptr_t", lib.ndpy_registrar())),
            int(ffi.cast("uintptr_t", self._domain)),
            plain_rights(self),
            self.info.max_registration_size,
            VerbsMemoryRegion,
        )

    @property
    def _verbs_device(self) -> VerbsAdapter:
        """_device, with its class."""
        return self

    def _open_channel(self) -> Any:
        def explain(number: int) -> errors.ProviderError | None:
            file = device_files.look_at("rdma_cm")
            if self.info.name == softverbs.NAME or number in errors.SHORTAGES or file.error is None:
                return None
            reason, remedy = device_files.why_refused(file)
            text = f"connections need {system_files.shown(file.place)}, and {reason}; {remedy}"
            if isinstance(file.error, FileNotFoundError):
                return errors.UnsupportedError(text, operation="open adapter", native=number)
            return errors.with_errno("open adapter", file.error.errno or number, text)

        return check_pointer("open adapter", lib.ndpy_create_event_channel(load_for(self.info.name)), explain)

    def _bind_sentinel(self) -> Any:
        """Bind an identifier to the device.

        The connection manager announces the removal of a device only to identifiers that are bound to it.
        """
        for address in self.info.addresses:
            identifier = new_identifier(self, self._serial)
            try:
                bind_identifier(self, identifier, (address, 0))
                return identifier
            except (errors.NdpyError, OSError):
                lib.rdma_destroy_id(identifier)
        return None

    def _native_port_state(self) -> str:
        return self._state_of_port(self._port)

    def _state_of_port(self, number: int) -> str:
        """The state of a port as of the last event. 0 is the port that is used where an address does not decide."""
        return self._port_states.get(number or self._port, "unknown")

    def _native_completion_port(self) -> int:
        raise self._lacks("completion_port", "completion ports")

    def _native_overlapped_file(self) -> int:
        raise self._lacks("overlapped_file", "overlapped files")

    def _native_counters(self) -> Counters:
        return read_counters(self.info.name)

    def _native_clock(self) -> DeviceClock:
        return read_clock(self._context)

    # ---- registering ----

    def _native_register_implicit(self, access: Access) -> VerbsMemoryRegion:
        return VerbsMemoryRegion(self, None, None, 0, EVERYTHING, access)._registered_by(register_everything)

    def _native_register_null(self) -> VerbsMemoryRegion:
        region = VerbsMemoryRegion(self, None, None, 0, EVERYTHING, Access.LOCAL_WRITE)
        return region._registered_by(register_null, elsewhere=True)

    def _native_register_at(
        self, owner: Any, buffer: Any, start: int, length: int, address: int, access: Access
    ) -> VerbsMemoryRegion:
        region = VerbsMemoryRegion(self, owner, buffer, address, length, access)
        return region._registered_by(register_at(start), elsewhere=address != start)

    def _native_register_dmabuf(
        self, fd: int, offset: int, length: int, iova: int, access: Access
    ) -> VerbsMemoryRegion:
        region = VerbsMemoryRegion(self, None, None, iova, length, access)
        return region._registered_by(register_dmabuf(fd, offset), elsewhere=True)

    def _native_stop_registering(self) -> None:
        self._registering.stop()

    def _native_resume_registering(self) -> None:
        self._registering.start()

    def _monitor(self, on_change: Callable[[], None]) -> Monitor:
        return Monitor(self, on_change)

    # ---- events ----

    def _tell_when_port_is_active(self, connector: VerbsConnector) -> None:
        self._waiting_for_port.add(connector)
        # The port may have become active meanwhile, and the thread may have handled this already.
        connector._on_port_active()

    def _in_background(self, call: Callable[[], Any]) -> None:
        """Run a native call that may block for a long time. Closing the adapter waits for it."""
        # Whichever thread comes first takes the call from the iterator.
        background, left = self._background, iter((call,))

        def run() -> None:
            try:
                for todo in left:
                    todo()
            finally:
                background.discard(thread)

        thread = threading.Thread(target=run, name=f"ndpy-{self.info.name}-release", daemon=True)
        background.add(thread)
        try:
            thread.start()
        except BaseException as error:
            # The system starts no more threads, or Ctrl-C came. Make the call here, unless the thread makes it.
            run()
            if not isinstance(error, RuntimeError):
                raise

    def _on_connection_events(self) -> None:
        event = self._cm_event
        while not lib.ndpy_next_cm_event(self._channel, next_serial(), event):
            copied = CmEvent(
                event.type,
                event.status,
                event.key,
                event.id,
                bytes(ffi.buffer(event.private_data, event.private_data_length)),
                event.responder_resources,
                event.initiator_depth,
                bool(event.srq),
                event.path,
                event.qp_num,
                event.qkey,
            )
            if copied.type == lib.RDMA_CM_EVENT_DEVICE_REMOVAL:
                self._on_removal()
                continue
            request = copied.type == lib.RDMA_CM_EVENT_CONNECT_REQUEST
            key = event.listener if request else copied.key
            target = self._child(key) or self._datagram_calls.get(key)
            if isinstance(target, ManagerClient):
                target._on_event(copied)
            elif request:
                lib.rdma_destroy_id(copied.id)

    def _on_device_events(self) -> None:
        event = self._async_event
        while not lib.ndpy_next_async_event(self._context, event):
            kind = event.type
            target = self._child(event.key) if event.key else None
            if kind == lib.IBV_EVENT_DEVICE_FATAL:
                self._on_removal()
                continue
            self._tell_native(kind, event.port, target)
            if kind in (lib.IBV_EVENT_PORT_ACTIVE, lib.IBV_EVENT_PORT_ERR):
                self._port_states[event.port] = "active" if kind == lib.IBV_EVENT_PORT_ACTIVE else "down"
                for connector in self._waiting_for_port.take():
                    if not connector._on_port_active():
                        self._waiting_for_port.add(connector)
            elif kind == lib.IBV_EVENT_CQ_ERR and isinstance(target, VerbsCompletionQueue):
                target._on_failure(target._overrun_error)
            elif isinstance(target, VerbsSharedReceiveQueue):
                target._on_limit() if kind == lib.IBV_EVENT_SRQ_LIMIT_REACHED else target._on_error()
            elif isinstance(target, VerbsQueuePair):
                self._on_queue_pair_event(kind, target)

    def _tell_native(self, kind: int, port: int, subject: Any) -> None:
        event = make_event(kind, port, subject, text(lib.ibv_event_type_str(kind)))
        if event is not None:
            self._tell(event)

    def _on_removal(self) -> None:
        """The connection manager tells it, and so does the device. Whichever comes first."""
        if self._defunct is None:
            self._tell_native(lib.IBV_EVENT_DEVICE_FATAL, 0, None)
            self._mark_removed()

    def _on_queue_pair_event(self, kind: int, queue_pair: VerbsQueuePair) -> None:
        if kind == lib.IBV_EVENT_COMM_EST:
            connector = queue_pair.connector
            if isinstance(connector, VerbsConnector):
                connector._on_first_message()
        elif kind == lib.IBV_EVENT_QP_LAST_WQE_REACHED:
            queue_pair._has_last_receive = self._tells_last_receives = True
        elif kind in (lib.IBV_EVENT_QP_FATAL, lib.IBV_EVENT_QP_REQ_ERR, lib.IBV_EVENT_QP_ACCESS_ERR):
            queue_pair.failure = text(lib.ibv_event_type_str(kind))
            # A peer had no right to an access. rxe still has to answer it, and then ends the queue pair itself (see
            # Quirk.RXE_ACCESS_EVENT_COMES_EARLY). iWARP has no such answer.
            answers = kind == lib.IBV_EVENT_QP_ACCESS_ERR and Quirk.IWARP_NO_ACKNOWLEDGEMENT not in self._quirks
            queue_pair._end_connection(natively=not answers)

    # ---- the end ----

    def _on_forked(self) -> None:
        super()._on_forked()
        self._registering.abandon(self._forked_error)
        self._events.abandon()

    def _native_close(self) -> None:
        self._wait_for_background()
        if self._events is not None:
            self._events.stop()
        if self._sentinel is not None:
            if self._defunct == self._removed_error:
                lib.ndpy_cm_let_go(self._sentinel)
            lib.rdma_destroy_id(self._sentinel)
            self._sentinel = None
        if self._channel is not None:
            lib.ndpy_destroy_event_channel(self._channel)
            self._channel = None
        self._free_domain()
        if self._reserved is not None:
            reserved_page.release([self._reserved])
            self._reserved = None
        free_once(self, "_context", "close adapter", lib.ibv_close_device)

    def _wait_for_background(self) -> None:
        for thread in list(self._background):
            thread.join()

    def _free_domain(self) -> None:
        free_once(self, "_domain", "close adapter", lib.ibv_dealloc_pd)


class VerbsProtectionDomain(ProtectionDomain, VerbsAdapter):
    """It has an ibv_pd, and shares the rest with its device."""

    device: VerbsAdapter

    @property
    def _verbs_device(self) -> VerbsAdapter:
        return self.device

    def _native_open(self) -> None:
        device = self.device
        self._background = set()
        self._registering = RegistrationWorkers(self.info.name)
        self._orphans = device._orphans
        self._events = device._events
        self._context = device._context
        self._channel = device._channel
        self._port = device._port
        self._port_states = device._port_states
        self._waiting_for_port = device._waiting_for_port
        self._datagram_calls = device._datagram_calls
        self._domain = check_pointer("create protection domain", lib.ibv_alloc_pd(self._context))
        self._offer_registrar()

    def _native_close(self) -> None:
        self._wait_for_background()
        self._free_domain()

    def _on_forked(self) -> None:
        Adapter._on_forked(self)
        self._registering.abandon(self._forked_error)


VerbsAdapter._classes = Classes(
    region=VerbsMemoryRegion,
    window=VerbsMemoryWindow,
    completion_queue=VerbsCompletionQueue,
    shared_receive_queue=VerbsSharedReceiveQueue,
    queue_pair=VerbsQueuePair,
    connector=VerbsConnector,
    listener=VerbsListener,
    datagram_queue_pair=VerbsDatagramQueuePair,
    datagram_listener=VerbsDatagramListener,
    protection_domain=VerbsProtectionDomain,
    device_memory=VerbsDeviceMemory,
    xrc_domain=VerbsXrcDomain,
    xrc_sender=VerbsXrcSender,
)
