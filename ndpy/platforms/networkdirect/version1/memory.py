"""Registrations and windows of version 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.memory import RemoteMemory
from ndpy.objects.resource import Owned
from ndpy.platforms.networkdirect.memory import NetworkDirectMemoryRegion, NetworkDirectMemoryWindow
from ndpy.platforms.networkdirect.native_calls import create_version1, ffi, lib
from ndpy.platforms.networkdirect.overlapped import Request

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter


class Version1MemoryRegion(NetworkDirectMemoryRegion):
    """A registration. local_token is its handle.

    The provider knows no rights (contract I.2.1). So ndpy enforces local rights, and remote rights come from windows.
    """

    _adapter: Version1Adapter

    def _native_create(self) -> Any:
        # Registrations are requests of the adapter.
        return self._adapter._native

    def _native_free(self) -> None:
        self._native = self._deregistering = None

    def _request_register(self, overlapped: Any) -> int:
        # The provider writes the handle beside the OVERLAPPED. Both stay until the provider has let go of them.
        handle = ffi.addressof(ffi.cast("struct ndpy_request *", overlapped), "region")
        return int(
            lib.INDAdapter_RegisterMemory(
                self._native, ffi.cast("void *", self.address), self.length, overlapped, handle
            )
        )

    def _request_deregister(self, overlapped: Any) -> int:
        handle = ffi.cast("void *", self.local_token)
        return int(lib.INDAdapter_DeregisterMemory(self._native, handle, overlapped))

    def _read_tokens(self, request: Request) -> None:
        self.local_token = int(ffi.cast("uintptr_t", request.region_handle[0]))
        self._registered = True

    @property
    def remote_token(self) -> int:  # type: ignore[override]
        raise self._no_remote("remote_token")

    def remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory:
        self._check()
        raise self._no_remote("remote")

    @staticmethod
    def _no_remote(operation: str) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            "a region of NetworkDirect version 1 grants nothing to peers; bind a memory window to it, and give them "
            "window.remote()",
            operation=operation,
        )


class Version1MemoryWindow(NetworkDirectMemoryWindow):
    _adapter: Version1Adapter

    def _native_create(self) -> Any:
        # While the window exists, the provider notes in this slot that the peer has invalidated it (contract I.3.1).
        slot = lib.version1_window_new(self._serial)
        if slot == ffi.NULL:
            raise errors.InsufficientResourcesError("out of memory", operation="create memory window")
        self._slot = slot
        self._owner = Owned(lib.version1_window_free, (slot,))
        return create_version1(
            "create memory window",
            "IUnknown",
            lib.INDAdapter_CreateMemoryWindow,
            self._adapter._native,
            lib.version1_window_result(self._slot),
        )

    def _native_free(self) -> None:
        # Read it only once: a thread that takes a completion may end it meanwhile.
        binding = self._binding
        super()._native_free()
        if binding is not None:
            # The peer may have invalidated the window, and the completion for that may be on its way.
            binding.queue_pair._closed_windows.append(self._owner)  # type: ignore[attr-defined]

    def _granted(self) -> RemoteMemory:
        """The memory and token of the last bind."""
        return RemoteMemory.from_bytes(bytes(ffi.buffer(lib.version1_window_descriptor(self._slot), 20)))
