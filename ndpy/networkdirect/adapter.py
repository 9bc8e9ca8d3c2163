"""An open NetworkDirect adapter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ndpy import errors
from ndpy.adapter import Adapter
from ndpy.addresses import Address
from ndpy.completion_queue import CompletionQueue
from ndpy.flags import Access
from ndpy.memory import is_written, span
from ndpy.networkdirect.adapter_info import NetworkDirectAdapterInfo
from ndpy.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.networkdirect.connection import NetworkDirectConnector
from ndpy.networkdirect.events import EventThread
from ndpy.networkdirect.listener import NetworkDirectListener
from ndpy.networkdirect.memory import NetworkDirectMemoryRegion, NetworkDirectMemoryWindow, validate_access
from ndpy.networkdirect.native_calls import check, create, ffi, lib, release
from ndpy.networkdirect.overlapped import OverlappedPending
from ndpy.networkdirect.provider_dll import Provider
from ndpy.networkdirect.queue_pair import NetworkDirectQueuePair
from ndpy.networkdirect.shared_receive_queue import NetworkDirectSharedReceiveQueue
from ndpy.pending import Pending
from ndpy.resource import prevent_close
from ndpy.shared_receive_queue import SharedReceiveQueue
from ndpy.work_queues import QueuePairLimits


class NetworkDirectAdapter(Adapter):
    info: NetworkDirectAdapterInfo
    _pending_type = OverlappedPending
    _region_class: type[NetworkDirectMemoryRegion] = NetworkDirectMemoryRegion
    _window_class: type[NetworkDirectMemoryWindow] = NetworkDirectMemoryWindow
    _completion_queue_class: type[NetworkDirectCompletionQueue] = NetworkDirectCompletionQueue
    _queue_pair_class: type[NetworkDirectQueuePair] = NetworkDirectQueuePair
    _connector_class: type[NetworkDirectConnector] = NetworkDirectConnector
    _listener_class: type[NetworkDirectListener] = NetworkDirectListener

    def __init__(self, info: NetworkDirectAdapterInfo) -> None:
        super().__init__(info)
        self._registering: set[NetworkDirectMemoryRegion] = set()
        self._native: Any = None
        self._file: Any = None
        self._own_file: Any = None
        self._events: EventThread | None = None  # type: ignore[assignment]
        self._provider = Provider.use(info.provider_path)
        try:
            self._native = self._open_native()
            self._file = self._new_file()
            self._events = EventThread(info.name, self._orphans, weakref.ref(self))
            self._events.add_file(self._file)
        except BaseException:
            self._free()
            raise
        self._opened()

    _events: EventThread

    def _open_native(self) -> Any:
        info = self.info
        return self._provider.open(info.adapter_id, info.addresses, info.provider_id)

    def _new_file(self) -> Any:
        out = ffi.new("void **")
        try:
            check("open adapter", lib.IND2Adapter_CreateOverlappedFile(self._native, out))
        except errors.ProviderError as failure:
            raise self._provider.named(failure) from None
        return out[0]

    @property
    def completion_port(self) -> int:
        """The handle of the completion port on which the adapter's overlapped requests complete."""
        self._check()
        return int(ffi.cast("uintptr_t", self._events.port))

    @property
    def overlapped_file(self) -> int:
        """The handle of an overlapped file for a completion port of the program's own (CreateIoCompletionPort).

        A completion queue made on it reports there; see CompletionQueue.notify(). It belongs to the adapter
        and is closed with it. Source: IND2Adapter::CreateOverlappedFile (contract C.1).
        """
        self._check()
        if self._own_file is None:
            self._own_file = self._new_file()
        return int(ffi.cast("uintptr_t", self._own_file))

    def _close_files(self) -> None:
        for file in (self._file, self._own_file):
            if file is not None:
                lib.CloseHandle(file)
        self._file = self._own_file = None

    # ---- making objects ----

    def _prepare_region(self, buffer: Any, access: Access) -> NetworkDirectMemoryRegion:
        self._check()
        access = validate_access(access)
        owner, address, length = span(buffer, is_written(access))
        if length > self.info.max_registration_size:
            raise errors.LimitExceededError(
                f"{length} bytes are more than the {self.info.max_registration_size} that {self.info.name} registers at once"
            )
        return self._region_class(self, owner, buffer, address, length, access)

    def _register(self, buffer: Any, access: Access) -> NetworkDirectMemoryRegion:
        def make(adapter: NetworkDirectAdapter) -> NetworkDirectMemoryRegion:
            region = adapter._prepare_region(buffer, access)
            region._register_now()
            return region

        return self._make(make)

    def begin_register(  # type: ignore[override]
        self, buffer: Any, access: Access = Access.LOCAL_WRITE
    ) -> Pending[NetworkDirectMemoryRegion]:
        return self._make(lambda adapter: adapter._prepare_region(buffer, access)._begin_register())

    def _monitor(self, on_change: Callable[[], None]) -> Any:
        raise errors.UnsupportedError(
            "Windows does not tell a program when memory is unmapped. Providers secure what is registered, so that it cannot "
            "be freed meanwhile, unless DO_NOT_SECURE_VM says otherwise; say raw=True and call invalidate() before the memory "
            "goes",
            operation="monitor",
        )

    def create_memory_window(self) -> NetworkDirectMemoryWindow:
        self._check()
        return self._make(self._window_class)

    def create_completion_queue(
        self, depth: int, *, overlapped_file: int | None = None
    ) -> NetworkDirectCompletionQueue:
        # overlapped_file: this adapter's; the queue's notify() then brings packets to the program's own port.
        self._check()
        self._limit("a completion queue's depth", depth, self.info.max_completion_queue_depth)
        return self._make(self._completion_queue_class, depth, overlapped_file)

    def create_shared_receive_queue(
        self, depth: int, *, max_sge: int = 1, threshold: int = 0
    ) -> NetworkDirectSharedReceiveQueue:
        self._check()
        self._limit_shared_receive_queue(depth, max_sge, threshold)
        return self._make(NetworkDirectSharedReceiveQueue, depth, max_sge, threshold)

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
    ) -> NetworkDirectQueuePair:
        self._check()
        initiator_cq = initiator_cq or receive_cq
        limits = QueuePairLimits(
            receive_queue_depth, initiator_queue_depth, max_receive_sge, max_initiator_sge, inline_data_size
        )
        limits = self._limit_queue_pair(receive_cq, initiator_cq, limits, srq)
        with prevent_close(receive_cq, initiator_cq, srq):
            return self._queue_pair_class(self, receive_cq, initiator_cq, limits, srq)

    def create_connector(self) -> NetworkDirectConnector:
        self._check()
        return self._make(self._connector_class)

    def _new_native_connector(self) -> Any:
        return create("create connector", "IND2Connector", lib.IND2Adapter_CreateConnector, self._native, self._file)

    def listen(self, address: Address, *, backlog: int = 128) -> NetworkDirectListener:
        self._check()
        return self._make(self._listener_class, address, backlog)

    # ---- events, and the end ----

    def _release(self) -> None:
        registering = list(self._registering)
        for region in registering:
            region._cancel_registration()
        for region in registering:
            region._give_up()
        self._refuse_if_used()
        self._free()

    def _free(self) -> None:
        # The thread takes the packets that are on their way; after it nothing refers to a request.
        if self._events is not None:
            self._events.stop()
        self._close_files()
        if self._native is not None:
            release(self._native)
            self._native = None
        self._provider.drop()
