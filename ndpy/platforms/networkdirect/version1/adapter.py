"""An open adapter of version 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ndpy import errors
from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter
from ndpy.platforms.networkdirect.native_calls import create_version1, ffi, lib
from ndpy.platforms.networkdirect.provider_dll import Provider
from ndpy.platforms.networkdirect.version1 import adapter_info
from ndpy.platforms.networkdirect.version1.completion_queue import Version1CompletionQueue
from ndpy.platforms.networkdirect.version1.connection import Version1Connector
from ndpy.platforms.networkdirect.version1.listener import Version1Listener
from ndpy.platforms.networkdirect.version1.memory import Version1MemoryRegion, Version1MemoryWindow
from ndpy.platforms.networkdirect.version1.queue_pair import Version1QueuePair

_INVALID_HANDLE = -1


class Version1Adapter(NetworkDirectAdapter):
    _classes = replace(
        NetworkDirectAdapter._classes,
        region=Version1MemoryRegion,
        window=Version1MemoryWindow,
        completion_queue=Version1CompletionQueue,
        queue_pair=Version1QueuePair,
        connector=Version1Connector,
        listener=Version1Listener,
    )

    def _open_native(self, provider: Provider) -> Any:
        info = self.info
        return adapter_info.open_native(provider, info.provider_id, info.addresses[0])

    def _new_file(self, provider: Provider) -> Any:
        # The adapter's one file (contract I.1.2).
        file = lib.INDAdapter_GetFileHandle(self._native)
        if file in (ffi.NULL, ffi.cast("void *", _INVALID_HANDLE)):
            raise provider.named(
                errors.ProviderError("the adapter gives no file for overlapped requests", operation="open adapter")
            )
        return file

    def _close_files(self) -> None:
        """The provider closes its file itself (contract I.1.2)."""

    def _native_overlapped_file(self) -> int:
        raise errors.UnsupportedError(
            "an adapter of NetworkDirect version 1 has one file for overlapped requests, which reports to ndpy's own "
            "completion port; use a Poller, whose completion_port can be waited for",
            operation="overlapped_file",
        )

    def _new_native_connector(self) -> Any:
        return create_version1("create connector", "INDConnector", lib.INDAdapter_CreateConnector, self._native)

    def _native_stop_registering(self) -> None:
        # Registrations are requests of the adapter itself.
        if self._registering:
            lib.INDOverlapped_CancelOverlappedRequests(ffi.cast("struct INDOverlapped *", self._native))
        super()._native_stop_registering()
