"""An open NetworkDirect adapter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ndpy import errors
from ndpy.objects.adapter import Adapter
from ndpy.objects.native_steps import Classes
from ndpy.platforms.networkdirect.adapter_info import NetworkDirectAdapterInfo
from ndpy.platforms.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.platforms.networkdirect.connection import NetworkDirectConnector
from ndpy.platforms.networkdirect.events import EventThread
from ndpy.platforms.networkdirect.listener import NetworkDirectListener
from ndpy.platforms.networkdirect.memory import NetworkDirectMemoryRegion, NetworkDirectMemoryWindow
from ndpy.platforms.networkdirect.native_calls import check, create, ffi, lib, release_once
from ndpy.platforms.networkdirect.overlapped import OverlappedPending
from ndpy.platforms.networkdirect.provider_dll import Provider
from ndpy.platforms.networkdirect.queue_pair import NetworkDirectQueuePair
from ndpy.platforms.networkdirect.shared_receive_queue import NetworkDirectSharedReceiveQueue
from ndpy.vocabulary.flags import Access


class NetworkDirectAdapter(Adapter):
    info: NetworkDirectAdapterInfo
    _pending_type = OverlappedPending
    _classes = Classes(
        region=NetworkDirectMemoryRegion,
        window=NetworkDirectMemoryWindow,
        completion_queue=NetworkDirectCompletionQueue,
        shared_receive_queue=NetworkDirectSharedReceiveQueue,
        queue_pair=NetworkDirectQueuePair,
        connector=NetworkDirectConnector,
        listener=NetworkDirectListener,
    )

    _events: EventThread
    _provider: Provider | None = None
    _native: Any = None
    _file: Any = None
    #: The program's overlapped file, made when the program asks for it.
    _own_file: Any = None

    def _native_open(self) -> None:
        info = self.info
        self._registering: set[NetworkDirectMemoryRegion] = set()
        self._provider = Provider.use(info.provider_path)
        self._native = self._open_native(self._provider)
        self._file = self._new_file(self._provider)
        self._events = EventThread(info.name, self._orphans, weakref.ref(self))
        self._events.add_file(self._file)

    def _open_native(self, provider: Provider) -> Any:
        info = self.info
        return provider.open(info.adapter_id, info.addresses, info.provider_id)

    def _new_file(self, provider: Provider) -> Any:
        out = ffi.new("void **")
        try:
            check("open adapter", lib.IND2Adapter_CreateOverlappedFile(self._native, out))
        except errors.ProviderError as failure:
            raise provider.named(failure) from None
        return out[0]

    def _native_port_state(self) -> str:
        raise self._lacks("port_state", "events of ports")

    def _native_completion_port(self) -> int:
        return int(ffi.cast("uintptr_t", self._events.port))

    def _native_overlapped_file(self) -> int:
        assert self._provider is not None
        if self._own_file is None:
            self._own_file = self._new_file(self._provider)
        return int(ffi.cast("uintptr_t", self._own_file))

    def _close_files(self) -> None:
        for file in (self._file, self._own_file):
            if file is not None:
                lib.CloseHandle(file)
        self._file = self._own_file = None

    def _known_access(self, access: int) -> Access:
        if access & (Access.REMOTE_ATOMIC & ~Access.LOCAL_WRITE):
            raise errors.UnsupportedError("NetworkDirect has no atomic operations", operation="register")
        return super()._known_access(access)

    def _monitor(self, on_change: Callable[[], None]) -> Any:
        raise errors.UnsupportedError(
            "Windows does not tell a program when memory is unmapped. Providers keep registered memory from being "
            "freed, unless DO_NOT_SECURE_VM says otherwise; pass raw=True and call invalidate() before the memory is "
            "freed",
            operation="monitor",
        )

    def _new_native_connector(self) -> Any:
        return create("create connector", "IND2Connector", lib.IND2Adapter_CreateConnector, self._native, self._file)

    def _connector_of(self, native: Any) -> NetworkDirectConnector:
        """Make the connector of a request that has come."""
        connector = self._classes.connector(self, native)
        assert isinstance(connector, NetworkDirectConnector)
        return connector

    def _on_removal(self) -> None:
        """A request ended with ND_DEVICE_REMOVED."""
        if self._defunct is None:
            self._mark_removed()

    def _native_stop_registering(self) -> None:
        registering = list(self._registering)
        for region in registering:
            region._cancel_registration()
        for region in registering:
            region._await_registration()

    def _native_close(self) -> None:
        # The thread takes the packets that are on their way. After that nothing refers to a request.
        if self._events is not None:
            self._events.stop()
        self._close_files()
        release_once(self, "_native")
        if self._provider is not None:
            self._provider.drop()
