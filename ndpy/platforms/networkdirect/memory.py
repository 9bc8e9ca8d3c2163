"""Regions and windows on Windows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.memory import MemoryRegion, MemoryWindow
from ndpy.objects.pending import Pending
from ndpy.platforms.networkdirect.native_calls import (
    ACCESS_VIOLATION,
    DEVICE_REMOVED,
    INSUFFICIENT_RESOURCES,
    NO_MEMORY,
    PENDING,
    SUCCESS,
    create,
    ffi,
    lib,
    release_once,
    status_error,
)
from ndpy.platforms.networkdirect.overlapped import OverlappedPending, Request, cancel_all, run
from ndpy.vocabulary.flags import Access

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter

# The longest wait until the adapter's thread has handled an end that it has taken.
_HANDLED_S = 10.0


def registration_error(status: int, address: int, length: int, access: int) -> errors.ProviderError:
    """The exception for a Register that was refused or failed (contract D.2)."""
    if status == ACCESS_VIOLATION:
        writable = " and writable" if access & Access.LOCAL_WRITE else ""
        return status_error("register", status, f"the {length} bytes at {address:#x} are not all mapped{writable}")
    if status in (INSUFFICIENT_RESOURCES, NO_MEMORY):
        return status_error(
            "register",
            status,
            f"{length} bytes could not be pinned; the adapter or the system is short of memory or of registrations: "
            "close regions that are not needed, or register less at once",
        )
    return status_error("register", status)


class NetworkDirectMemoryRegion(MemoryRegion):
    _adapter: NetworkDirectAdapter
    _native: Any = None
    #: The registration that was begun: its request, its result, and whether its end has been handled.
    _registration: tuple[Request, Pending[Any], threading.Event] | None = None
    _deregistering: Request | None = None
    #: Whether there is something to deregister.
    _registered = False

    def __init__(
        self, adapter: NetworkDirectAdapter, owner: Any, buffer: Any, address: int, length: int, access: Access
    ) -> None:
        super().__init__(adapter, owner, buffer, address, length, access)
        self._native = self._native_create()

    def _native_create(self) -> Any:
        """Return the native object that registers the memory."""
        adapter = self._adapter
        return create(
            "register", "IND2MemoryRegion", lib.IND2Adapter_CreateMemoryRegion, adapter._native, adapter._file
        )

    def _request_register(self, overlapped: Any) -> int:
        address = ffi.cast("void *", self.address)
        flags = int(self.access)
        return int(lib.IND2MemoryRegion_Register(self._native, address, self.length, flags, overlapped))

    def _request_deregister(self, overlapped: Any) -> int:
        return int(lib.IND2MemoryRegion_Deregister(self._native, overlapped))

    def _read_tokens(self, request: Request) -> None:
        """The registration has succeeded."""
        self.local_token = lib.IND2MemoryRegion_GetLocalToken(self._native)
        self.remote_token = lib.ndpy_region_remote_token(self._native)
        self._registered = True

    def _native_register(self) -> None:
        request = Request(self._native)

        def undo() -> None:
            self._read_tokens(request)
            self._native_deregister()

        try:
            run("register", request, self._request_register, undo)
        except errors.ProviderError as failure:
            if not failure.native:
                raise
            raise registration_error(failure.native, self.address, self.length, self.access) from None
        self._read_tokens(request)

    def _native_begin_register(self) -> Pending[Any]:
        pending: Pending[Any] = OverlappedPending("register", lambda: request.cancel())

        def on_end(status: int) -> None:
            failure = None
            try:
                if status == SUCCESS:
                    self._read_tokens(request)
                else:
                    failure = registration_error(status, self.address, self.length, self.access)
                self._on_registered(pending, failure)
            finally:
                self._registration = None
                self._adapter._registering.discard(self)
                handled.set()

        try:
            request = Request(self._native, self._adapter._events, on_end)
        except BaseException:
            self._release_memory()
            raise
        handled = threading.Event()
        self._registration = (request, pending, handled)
        self._adapter._registering.add(self)
        status = request.issue(self._request_register)
        if status == SUCCESS:
            on_end(status)
        elif status != PENDING:
            self._adapter._registering.discard(self)
            self._release_memory()
            raise registration_error(status, self.address, self.length, self.access)
        return pending

    def _cancel_registration(self) -> None:
        """The adapter is being closed: nobody gets the region, even if the provider makes it."""
        registration = self._registration
        if registration is not None:
            registration[1].cancel()

    def _await_registration(self) -> None:
        """Wait until the provider has let go of the memory. Call this after _cancel_registration()."""
        registration = self._registration
        if registration is not None:
            request, _, handled = registration
            for _, status in cancel_all([request]):
                request.finish(status)
            if not self._adapter._events.is_current():
                # The adapter's thread may be handling its end.
                handled.wait(_HANDLED_S)

    def _native_deregister(self) -> None:
        def note() -> None:
            self._registered = False

        if self._registered:
            # After Ctrl-C too: the provider refuses a second time (contract D.6.5).
            with contextlib.suppress(errors.DeviceRemovedError):
                run("deregister", Request(self._native), self._request_deregister, note)
            note()

    def _native_begin_deregister(self, on_end: Callable[[errors.NdpyError | None], None]) -> bool:
        def on_status(status: int) -> None:
            failure = _deregistration_error(status)
            if failure is None:
                on_end(None)
                return
            with self._lifetime:
                # close() may try again from here on.
                self._deregistering = None
                on_end(failure)

        request = Request(self._native, self._adapter._events, on_status)
        status = request.issue(self._request_deregister)
        if status == PENDING:
            self._deregistering = request
            return True
        failure = _deregistration_error(status)
        if failure is not None:
            raise failure
        return False

    def _native_finish_deregister(self) -> bool:
        request = self._deregistering
        if request is None:
            return False
        status = request.wait()
        # None: the adapter's thread took the result. It waits for the lock that this thread holds, and then does the
        # rest.
        if status is not None:
            request.finish(status)
            if self._native is not None:
                raise status_error("deregister", status)
        return True

    def _native_free(self) -> None:
        self._deregistering = None
        release_once(self, "_native")


def _deregistration_error(status: int) -> errors.ProviderError | None:
    return None if status in (SUCCESS, DEVICE_REMOVED) else status_error("deregister", status)


class NetworkDirectMemoryWindow(MemoryWindow):
    _adapter: NetworkDirectAdapter

    def _native_create(self) -> Any:
        return create(
            "create memory window", "IND2MemoryWindow", lib.IND2Adapter_CreateMemoryWindow, self._adapter._native
        )

    def _native_free(self) -> None:
        release_once(self, "_native")
