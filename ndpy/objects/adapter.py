"""An open adapter, from which all other objects are made."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ndpy import errors
from ndpy.objects.adapter_thread import AdapterThread
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.connection import Connector
from ndpy.objects.connection_parameters import RetryPolicy, check_private_data
from ndpy.objects.datagram_listener import DatagramListener
from ndpy.objects.datagram_queue_pair import MANAGER_QKEY, MAX_ANSWER_DATA, DatagramQueuePair
from ndpy.objects.events import AdapterEvent, EventStream
from ndpy.objects.listener import Listener
from ndpy.objects.memory import MemoryWindow
from ndpy.objects.pending import Pending
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.registrar import Registrar
from ndpy.objects.resource import Orphans, Resource, busy, prevent_close
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.objects.timeouts import timeout
from ndpy.objects.work_queues import QueuePairLimits
from ndpy.objects.xrc import XrcDomain, XrcReceiveQueue, XrcSender
from ndpy.vocabulary import quirks
from ndpy.vocabulary.addresses import Address
from ndpy.vocabulary.clock import DeviceClock
from ndpy.vocabulary.counters import Counters
from ndpy.vocabulary.flags import Capability, CompletionDetails
from ndpy.vocabulary.forking import renew_in_child
from ndpy.vocabulary.info import AdapterInfo
from ndpy.vocabulary.loggers import logger
from ndpy.vocabulary.queue_pair_attributes import QueuePairType
from ndpy.vocabulary.weak_set import SharedWeakSet

if TYPE_CHECKING:
    from ndpy.objects.protection_domain import ProtectionDomain

_log = logger("ndpy.adapters")

_CAPABILITIES_OF_DETAILS = {
    CompletionDetails.TIMESTAMP: Capability.TIMESTAMPS,
    CompletionDetails.WALL_CLOCK: Capability.WALL_CLOCK_TIMESTAMPS,
    CompletionDetails.FLOW_TAG: Capability.FLOW_TAGS,
}

_MADE_ELSEWHERE = {
    QueuePairType.UD: "create_datagram_queue_pair()",
    QueuePairType.XRC_SEND: "create_xrc_sender()",
    QueuePairType.XRC_RECV: "XrcDomain.create_receiver()",
}

_SERVICES = {
    QueuePairType.RC: Capability.RELIABLE_CONNECTIONS,
    QueuePairType.UC: Capability.UNRELIABLE_CONNECTIONS,
}

_open_adapters: SharedWeakSet[Adapter] = SharedWeakSet()

# How long close() waits for its turn to collect garbage.
_COLLECTING_S = 1.0
# How long close() waits for an event that the adapter's thread is handling.
_HANDLING_S = 1.0


def _collect_garbage() -> None:
    """Run a whole garbage collection that begins after this call. Give up if the collector stays busy.

    While another thread is inside a collection, gc.collect() returns at once and does nothing. That thread may stay
    there, in somebody's finalizer.
    """
    own = threading.get_ident()
    begun = False

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        begun = begun or (phase == "start" and info["generation"] == 2 and threading.get_ident() == own)

    deadline = time.monotonic() + _COLLECTING_S
    gc.callbacks.append(note)
    try:
        while True:
            gc.collect()
            if begun or time.monotonic() >= deadline:
                return
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


@atexit.register
def _on_exit() -> None:
    for adapter in _open_adapters.members():
        adapter._on_exit()


class Adapter(Registrar):
    """An RDMA adapter, opened by open_adapter().

    Objects that are made from it work together. They do not work with objects of another adapter. All its memory is in
    one protection domain; create_protection_domain() makes more. The adapter has one background thread, which waits for
    connection and device events. It costs nothing while there are no events.

    While objects that were made from it are open, close() raises DeviceBusyError and the adapter stays open. close()
    cancels registrations that are under way. It first closes objects that the program has dropped, if necessary by a
    garbage collection.

    Attributes:
        info: the adapter's identity, limits and capabilities. See AdapterInfo.
    Source: IND2Adapter (contract section B); ibv_open_device(3).
    """

    _release_order = 99
    _pending_type: ClassVar[type[Pending[Any]]] = Pending
    #: None until _native_open() has made it.
    _events: AdapterThread = None  # type: ignore[assignment]

    def __init__(self, info: AdapterInfo) -> None:
        self.info = info
        #: The quirks of its driver and transport.
        self._quirks = quirks.quirks_of(info)
        #: Objects that the program dropped. The adapter's thread holds them too, so that it closes even the adapter
        #: itself after the program drops it.
        self._orphans = Orphans()
        #: Its protection domains besides the first one.
        self._domains: SharedWeakSet[ProtectionDomain] = SharedWeakSet()
        super().__init__(self)
        try:
            self._native_open()
        except BaseException:
            self._native_close()
            raise
        self._opened()

    def _opened(self) -> None:
        super()._opened()
        renew_in_child(self)
        _open_adapters.add(self)
        _log.debug("%s: opened; its driver is %s", self.info.name, self.info.driver)

    # ---- making objects ----

    def create_protection_domain(self) -> ProtectionDomain:
        """Make a protection domain, to keep memory of several clients apart. See ProtectionDomain.

        Raises:
            UnsupportedError: info.capabilities lacks PROTECTION_DOMAINS, as on every NetworkDirect adapter.
            InsufficientResourcesError: the adapter has no room for it.
        Source: ibv_alloc_pd(3).
        """
        self._require(Capability.PROTECTION_DOMAINS, "create protection domain")
        return self._make(self._classes.protection_domain)

    def create_memory_window(self) -> MemoryWindow:
        """Make a window. It grants nothing until QueuePair.bind() gives it memory.

        Raises:
            UnsupportedError: info.capabilities lacks MEMORY_WINDOWS.
        Source: IND2Adapter::CreateMemoryWindow (contract E.1); ibv_alloc_mw(3).
        """
        self._require(Capability.MEMORY_WINDOWS, "create memory window")
        return self._make(self._classes.window)

    def create_completion_queue(
        self,
        depth: int,
        *,
        overlapped_file: int | None = None,
        details: CompletionDetails = CompletionDetails.NONE,
        single_threaded: bool = False,
    ) -> CompletionQueue:
        """Make a completion queue.

        Parameters:
            depth: how many completions it holds, 1 to info.max_completion_queue_depth.
            overlapped_file: only NetworkDirect version 2: this adapter's overlapped_file. CompletionQueue.notify() then
                brings its packets to the program's own completion port.
            details: what each completion brings in addition. Polling such a queue takes longer.
            single_threaded: the adapter takes no lock for this queue. The program promises that one thread at a time
                uses it or closes one of its queue pairs.
        Raises:
            LimitExceededError: the depth is out of range.
            UnsupportedError: the adapter has no overlapped_file, or info.capabilities lacks what CompletionDetails
                names, or SINGLE_THREADED_QUEUES.
        Source: IND2Adapter::CreateCompletionQueue (contract G.1); ibv_create_cq(3), ibv_create_cq_ex(3).
        """
        self._check()
        self._limit("a completion queue's depth", depth, self.info.max_completion_queue_depth)
        if details or single_threaded:
            self._require_extended_queues(details, single_threaded)
            return self._make(self._classes.completion_queue, depth, details, single_threaded)
        if overlapped_file is None:
            return self._make(self._classes.completion_queue, depth)
        self._native_overlapped_file()
        return self._make(self._classes.completion_queue, depth, overlapped_file)

    def _require_extended_queues(self, details: CompletionDetails, single_threaded: bool) -> None:
        operation = "create completion queue"
        for detail, capability in _CAPABILITIES_OF_DETAILS.items():
            if detail in CompletionDetails(details):
                self._require(capability, operation)
        if single_threaded:
            self._require(Capability.SINGLE_THREADED_QUEUES, operation)

    def create_shared_receive_queue(self, depth: int, *, max_sge: int = 1, threshold: int = 0) -> SharedReceiveQueue:
        """Make a queue of receives for several queue pairs.

        Parameters:
            depth: how many receives it holds, 1 to info.max_shared_receive_queue_depth.
            max_sge: the most elements of one receive, 1 to info.max_receive_sge.
            threshold: 0 for none, at most depth. See SharedReceiveQueue.arm().
        Raises:
            LimitExceededError: a value is out of range.
            UnsupportedError: info.capabilities lacks SHARED_RECEIVE_QUEUES.
        Source: IND2Adapter::CreateSharedReceiveQueue (contract G.5); ibv_create_srq(3).
        """
        self._require(Capability.SHARED_RECEIVE_QUEUES, "create shared receive queue")
        self._check_shared_receive_queue(depth, max_sge, threshold)
        return self._make(self._classes.shared_receive_queue, depth, max_sge, threshold)

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
        type: QueuePairType = QueuePairType.RC,
    ) -> QueuePair:
        """Make a queue pair. It is not connected yet.

        Parameters:
            receive_cq: takes the completions of receives.
            initiator_cq: takes the completions of all other requests. None for receive_cq.
            receive_queue_depth, initiator_queue_depth, max_receive_sge, max_initiator_sge, inline_data_size: 0 to the
                limit of that name in info.
            srq: a shared receive queue. Then the queue pair has no receive queue of its own.
            type: its transport service, for all of its life.
        Raises:
            LimitExceededError: a value is out of range.
            ValueError: srq is an XrcReceiveQueue, or another call makes queue pairs of this type; the message names it.
            UnsupportedError: the adapter has no queue pairs of this type.
            ForeignObjectError: a queue belongs to another adapter.
            InsufficientResourcesError: the adapter or the system has no room for it.
        Source: IND2Adapter::CreateQueuePair (contract F.1); rdma_create_qp(3), ibv_create_qp(3).
        """
        self._check()
        initiator_cq = initiator_cq or receive_cq
        self._require_same_device(receive_cq, "the receive completion queue")
        self._require_same_device(initiator_cq, "the initiator completion queue")
        if srq is not None:
            self._require_same_adapter(srq, "the shared receive queue")
            if isinstance(srq, XrcReceiveQueue):
                raise ValueError(
                    "an XrcReceiveQueue takes what peers send to its number; no queue pair is created with it"
                )
        if not isinstance(type, QueuePairType):
            raise TypeError(f"type is a QueuePairType, such as QueuePairType.UC, not {type!r:.80}")
        if type in _MADE_ELSEWHERE:
            raise ValueError(f"{_MADE_ELSEWHERE[type]} makes queue pairs of type {type.name}")
        self._require(_SERVICES[type], "create queue pair")
        limits = QueuePairLimits(
            receive_queue_depth if srq is None else 0,
            initiator_queue_depth,
            max_receive_sge,
            max_initiator_sge,
            inline_data_size,
        )
        self._check_limits(replace(limits, receive_queue_depth=receive_queue_depth))
        with prevent_close(receive_cq, initiator_cq, srq):
            return self._classes.queue_pair(self, receive_cq, initiator_cq, limits, srq, type)

    def create_datagram_queue_pair(
        self,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue | None = None,
        *,
        receive_queue_depth: int = 64,
        initiator_queue_depth: int = 64,
        max_receive_sge: int = 1,
        max_initiator_sge: int = 1,
        inline_data_size: int = 0,
        qkey: int = MANAGER_QKEY,
        pkey_index: int = 0,
    ) -> DatagramQueuePair:
        """Make a queue pair for datagrams. It can send and receive at once.

        Parameters:
            receive_cq, initiator_cq: as for create_queue_pair().
            receive_queue_depth, initiator_queue_depth, max_receive_sge, max_initiator_sge, inline_data_size: as for
                create_queue_pair(). max_receive_sge is one less than info.max_receive_sge and 31 at most, because the
                header of a datagram takes an element.
            qkey: 0 to 2**32 - 1. It takes only datagrams that carry it. From 2**31 on it needs the privilege
                CAP_NET_RAW. The default, MANAGER_QKEY, is that of the connection manager. That of ibv_ud_pingpong is
                0x11111111.
            pkey_index: which entry of the port's table of P_Keys the datagrams carry.
        Raises:
            UnsupportedError: info.capabilities lacks DATAGRAMS.
            LimitExceededError, ForeignObjectError, InsufficientResourcesError: as for create_queue_pair().
            ProviderError: the adapter refused the Q_Key or the P_Key.
        Source: ibv_create_qp(3) with IBV_QPT_UD.
        """
        self._require(Capability.DATAGRAMS, "create queue pair")
        initiator_cq = initiator_cq or receive_cq
        self._require_same_device(receive_cq, "the receive completion queue")
        self._require_same_device(initiator_cq, "the initiator completion queue")
        limits = QueuePairLimits(
            receive_queue_depth, initiator_queue_depth, max_receive_sge, max_initiator_sge, inline_data_size
        )
        self._check_limits(limits)
        self._limit("max_receive_sge", max_receive_sge, min(self.info.max_receive_sge - 1, 31), least=0)
        self._limit("qkey", qkey, 0xFFFFFFFF, least=0)
        self._limit("pkey_index", pkey_index, 0xFFFF, least=0)
        with prevent_close(receive_cq, initiator_cq):
            return self._classes.datagram_queue_pair(self, receive_cq, initiator_cq, limits, qkey, pkey_index)

    def open_xrc_domain(self, path: str | os.PathLike[str] | None = None) -> XrcDomain:
        """Open a domain of XRC. See XrcDomain.

        Parameters:
            path: a file that stands for the domain, so that other processes can open the same one. It is made if it
                does not exist, and its content does not matter. None for a domain of this process.
        Raises:
            UnsupportedError: info.capabilities lacks XRC, as on rxe, siw, soft0 and every NetworkDirect adapter.
            AccessViolationError, ProviderError: the file cannot be opened.
            InsufficientResourcesError: the adapter or the system has no room for it.
        Source: ibv_open_xrcd(3).
        """
        self._require(Capability.XRC, "open XRC domain")
        return self._make(self._classes.xrc_domain, path)

    def create_xrc_sender(
        self,
        initiator_cq: CompletionQueue,
        *,
        initiator_queue_depth: int = 64,
        max_initiator_sge: int = 1,
        inline_data_size: int = 0,
    ) -> XrcSender:
        """Make the sending end of an extended reliable connection. It is not connected yet. See XrcSender.

        Parameters:
            initiator_cq: takes the completions of its requests.
            initiator_queue_depth, max_initiator_sge, inline_data_size: as for create_queue_pair().
        Raises:
            UnsupportedError: info.capabilities lacks XRC.
            LimitExceededError, ForeignObjectError, InsufficientResourcesError: as for create_queue_pair().
        Source: ibv_create_qp(3) with IBV_QPT_XRC_SEND.
        """
        self._require(Capability.XRC, "create queue pair")
        self._require_same_device(initiator_cq, "the initiator completion queue")
        limits = QueuePairLimits(0, initiator_queue_depth, 0, max_initiator_sge, inline_data_size)
        self._check_limits(limits)
        with prevent_close(initiator_cq):
            return self._classes.xrc_sender(self, initiator_cq, limits)

    def _check_shared_receive_queue(self, depth: int, max_sge: int, threshold: int) -> None:
        self._limit("a shared receive queue's depth", depth, self.info.max_shared_receive_queue_depth)
        self._limit("max_sge", max_sge, self.info.max_receive_sge)
        self._limit("threshold", threshold, depth, least=0)

    def _check_limits(self, limits: QueuePairLimits) -> None:
        for name, value in vars(limits).items():
            # The interpreter keeps each string that an attribute was looked up by.
            most = getattr(self.info, sys.intern(f"max_{name.removeprefix('max_')}"))
            self._limit(name, value, most, least=0)

    def create_connector(self) -> Connector:
        """Make a connector, which connects a queue pair of this side to a listener.

        Source: IND2Adapter::CreateConnector (contract H.1); rdma_create_id(3).
        """
        self._check()
        return self._make(self._classes.connector)

    def listen(self, address: Address, *, backlog: int = 128) -> Listener:
        """Listen for connections.

        Parameters:
            address: (host, port). Host "" stands for every address of this adapter, and port 0 for a free port.
            backlog: how many requests may wait. 0 means no limit. Further requests are refused. See Listener.refused.
        Raises:
            AddressInUseError: the port is taken.
            AddressUnreachableError: the adapter does not have this address.
        Source: IND2Listener (contract H.2); rdma_listen(3).
        """
        self._check()
        listener: Listener = self._make(self._classes.listener, address, backlog)
        listener._listens()
        return listener

    def listen_for_datagrams(
        self, queue_pair: DatagramQueuePair, address: Address, *, private_data: bytes = b""
    ) -> DatagramListener:
        """Tell programs that ask at an address where a queue pair for datagrams is.

        Parameters:
            queue_pair: one whose qkey is MANAGER_QKEY, the default.
            address: as for listen(). Ports of datagrams are others than those of connections.
            private_data: up to 136 bytes, which each answer carries.
        Raises:
            ValueError: the queue pair has another qkey, so it would receive nothing.
            AddressInUseError, AddressUnreachableError: as for listen().
            LimitExceededError: there is too much private data.
        Source: rdma_listen(3) and rdma_accept(3) in the port space RDMA_PS_UDP.
        """
        self._check()
        self._require_same_device(queue_pair, "the queue pair")
        queue_pair._require_manager_qkey("listen_for_datagrams")
        data = check_private_data(private_data, MAX_ANSWER_DATA, "listen_for_datagrams")
        with prevent_close(queue_pair):
            return self._make(self._classes.datagram_listener, queue_pair, address, data)

    # ---- what only one system has ----

    def events(self) -> EventStream:
        """Make a stream of the adapter's events from now on. See EventStream and EventKind.

            with adapter.events() as events:
                for event in events:
                    print(event.kind.name, event.port, event.subject)

        Raises:
            UnsupportedError: info.capabilities lacks EVENTS.
        Source: ibv_get_async_event(3).
        """
        self._require(Capability.EVENTS, "events")
        return self._make(EventStream)

    def _tell(self, event: AdapterEvent) -> None:
        """Give an event to every stream."""
        _log.debug("%s: %s", self.info.name, event)
        for child in self._open_children():
            if isinstance(child, EventStream):
                child._on_event(event)

    def counters(self) -> Counters:
        """Read the counters of the adapter's ports.

        Returns: for each port's number a dictionary of the counters, with the names that the driver gives them. They
            count since the driver was loaded, or since they were reset, for all programs. port_xmit_data and
            port_rcv_data count in units of 4 bytes. ndpy.vocabulary.counters.is_error() tells whether a name counts
            errors.
        Raises:
            UnsupportedError: info.capabilities lacks COUNTERS.
        Source: /sys/class/infiniband/NAME/ports/PORT/counters and hw_counters; rdma-statistic(8).
        """
        self._require(Capability.COUNTERS, "counters")
        return self._native_counters()

    def clock(self) -> DeviceClock:
        """Read the adapter's clock, in whose ticks Completion.timestamp is.

        Raises:
            UnsupportedError: info.capabilities lacks CLOCK, as on every NetworkDirect adapter.
        Source: ibv_query_rt_values_ex(3).
        """
        self._require(Capability.CLOCK, "clock")
        return self._native_clock()

    @property
    def port_state(self) -> str:
        """The state of the port that connections use, as of the last event: "active" or "down". Linux only.

        Raises:
            UnsupportedError: on Windows.
        Source: IBV_EVENT_PORT_ACTIVE and IBV_EVENT_PORT_ERR, ibv_get_async_event(3).
        """
        return self._native_port_state()

    @property
    def completion_port(self) -> int:
        """The handle of the completion port on which the adapter's overlapped requests complete. Windows only.

        Raises:
            UnsupportedError: on Linux.
        """
        self._check()
        return self._native_completion_port()

    @property
    def overlapped_file(self) -> int:
        """The handle of an overlapped file for the program's own completion port (CreateIoCompletionPort).

        A completion queue made on it reports to that port. See CompletionQueue.notify(). The file belongs to the
        adapter and is closed with it.

        Raises:
            UnsupportedError: on Linux, and on NetworkDirect version 1, where an adapter has one file only.
        Source: IND2Adapter::CreateOverlappedFile (contract C.1).
        """
        self._check()
        return self._native_overlapped_file()

    # ---- connecting ----

    def connect(
        self,
        queue_pair: QueuePair,
        address: Address,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> Connector:
        """Connect a queue pair and complete the connection in one call.

        Parameters:
            queue_pair, address, private_data, inbound_read_limit, outbound_read_limit, retry: see Connector.connect().
            timeout_s: how long both steps may take together. None waits for ever.
        Returns: the connector. The caller closes it.
        Raises: what Connector.connect() and Connector.complete_connect() raise.
        """
        timeout_s = timeout(timeout_s)
        end = time.monotonic() + (timeout_s or 0.0)
        connector = self.create_connector()
        try:
            connector.connect(
                queue_pair,
                address,
                private_data=private_data,
                inbound_read_limit=inbound_read_limit,
                outbound_read_limit=outbound_read_limit,
                retry=retry,
                timeout_s=timeout_s,
            )
            connector.complete_connect(None if timeout_s is None else max(0.0, end - time.monotonic()))
        except BaseException:
            connector.close()
            raise
        return connector

    def _open_children(self) -> list[Resource]:
        """The open objects that were made from this adapter and from its protection domains."""
        return [child for adapter in (self, *self._domains.members()) for child in adapter._own_children()]

    def _child(self, serial: int) -> Resource | None:
        """The open object with this number. It may belong to a protection domain."""
        for adapter in (self, *self._domains.members()):
            child = adapter._own_child(serial)
            if child is not None:
                return child
        return None

    def _refuse_if_used(self) -> None:
        users = self._users_left()
        if users:
            # A queue pair and its connector refer to each other, so dropped ones wait for the garbage collector. The
            # adapter's thread refers to an object while it handles an event.
            with self._events.resting(_HANDLING_S):
                _collect_garbage()
            users = self._users_left()
        if not users:
            self._closing = True
            users = self._users_left()
        if users:
            self._closing = False
            raise busy(self, users)

    def _users_left(self) -> list[str]:
        self._events.make_calls()
        self._orphans.close(again=True)
        if not self._is_used:
            return []
        # An adapter and its protection domains have the same orphans.
        orphans = [orphan for orphan in self._orphans.waiting() if self in (orphan._adapter, orphan._adapter._device)]
        left = {*self._own_children(), *orphans} - {self}
        return [child._describe() for child in left] or ["objects that are being made or released"]

    def _adopt(self, orphan: Resource) -> None:
        """Take over an object that was dropped without close(). Finalizers call this, so it only makes a note."""
        self._orphans.add(orphan)
        self._wake()

    def _wake(self) -> None:
        """Make the adapter's thread close orphans. Safe in a finalizer."""
        self._events.wake()

    def _mark_removed(self) -> None:
        """The device has gone: from now on all objects of this adapter raise DeviceRemovedError, except in close()."""
        self._defunct = self._removed_error
        _log.debug("%s: it was removed", self.info.name)
        # Before their objects, so that those that are being made see it.
        for domain in self._domains.members():
            domain._defunct = domain._removed_error
        # Completion queues last: a poll that raises tells that posting is refused.
        for child in sorted(self._open_children(), key=lambda child: isinstance(child, CompletionQueue)):
            if not child.closed:
                child._defunct = child._removed_error
        for child in self._open_children():
            child._on_removed()

    def _on_exit(self) -> None:
        for child in self._own_children():
            # Whatever happens, the interpreter ends.
            with contextlib.suppress(Exception):
                child._on_exit()

    def _on_forked(self) -> None:
        for child in [*self._own_children(), *self._orphans.take_all_in_child()]:
            if child is not self:
                child._on_forked()
        super()._on_forked()

    def _release(self) -> None:
        self._native_stop_registering()
        try:
            # A registration may have succeeded just before.
            self._refuse_if_used()
        except errors.DeviceBusyError:
            self._native_resume_registering()
            raise
        self._native_close()
        _log.debug("%s: closed", self.info.name)

    def _describe(self) -> str:
        return f"Adapter {self.info.name}"

    def _lacks(self, operation: str, things: str) -> errors.UnsupportedError:
        return errors.UnsupportedError(f"{self.info.name} ({self.info.driver}) has no {things}", operation=operation)
