"""Registrations and windows of version 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.memory import RemoteMemory
from ndpy.networkdirect.memory import NetworkDirectMemoryRegion, NetworkDirectMemoryWindow
from ndpy.networkdirect.native_calls import create_version1, ffi, lib
from ndpy.networkdirect.overlapped import Request

if TYPE_CHECKING:
    from ndpy.networkdirect.version1.adapter import Version1Adapter


class Version1MemoryRegion(NetworkDirectMemoryRegion):
    """local_token is the registration's handle. The provider knows no rights: ndpy holds to those given here, and remote
    ones are for windows (contract I.2.1)."""

    _adapter: Version1Adapter

    def _new_native(self) -> Any:
        # Registrations are requests of the adapter.
        return self._adapter._native

    def _release_native(self, native: Any) -> None:
        pass

    def _register(self, overlapped: Any) -> int:
        # The handle's place is beside the OVERLAPPED, which stays until the provider has let go of both.
        handle = ffi.addressof(ffi.cast("struct ndpy_request *", overlapped), "region")
        return int(
            lib.INDAdapter_RegisterMemory(
                self._native, ffi.cast("void *", self.address), self.length, overlapped, handle
            )
        )

    def _deregister(self, overlapped: Any) -> int:
        handle = ffi.cast("void *", self.local_token)
        return int(lib.INDAdapter_DeregisterMemory(self._native, handle, overlapped))

    def _take_tokens(self, request: Request) -> None:
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
            "a region of NetworkDirect version 1 gives peers nothing by itself; bind a memory window to it, and give them "
            "window.remote()",
            operation=operation,
        )


class Version1MemoryWindow(NetworkDirectMemoryWindow):
    _adapter: Version1Adapter

    def _new_native(self) -> Any:
        # Where the provider tells that the peer has invalidated it, for as long as there is a window (contract I.3.1).
        slot = lib.version1_window_new(self._serial)
        if slot == ffi.NULL:
            raise errors.InsufficientResourcesError("out of memory", operation="create memory window")
        self._slot = ffi.gc(slot, lib.version1_window_free)
        return create_version1(
            "create memory window",
            "IUnknown",
            lib.INDAdapter_CreateMemoryWindow,
            self._adapter._native,
            lib.version1_window_result(self._slot),
        )

    def _release(self) -> None:
        binding = self._binding
        super()._release()
        if binding is not None:
            # The peer may have invalidated it meanwhile, and the completion that says so may be on its way.
            binding.queue_pair._closed_windows.append(self._slot)  # type: ignore[attr-defined]

    def _granted(self) -> RemoteMemory:
        """What the last bind gave."""
        return RemoteMemory.from_bytes(bytes(ffi.buffer(lib.version1_window_descriptor(self._slot), 20)))
