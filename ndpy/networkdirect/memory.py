"""Regions, windows and allocation on Windows."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.flags import Access
from ndpy.memory import MemoryRegion, MemoryWindow
from ndpy.networkdirect.native_calls import (
    ACCESS_VIOLATION,
    DEVICE_REMOVED,
    INSUFFICIENT_RESOURCES,
    NO_MEMORY,
    PENDING,
    SUCCESS,
    create,
    ffi,
    lib,
    release,
    status_error,
)
from ndpy.networkdirect.overlapped import OverlappedPending, Request, cancel_all, run
from ndpy.pending import Pending

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter

# Longest wait for the adapter's thread to handle an end that it has taken.
_HANDLED_S = 10.0

_REGION_FLAGS = (
    Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK | Access.DO_NOT_SECURE_VM
)


def validate_access(access: int) -> Access:
    """The rights; InvalidFlagsError for bits that are none, UnsupportedError for what NetworkDirect has not."""
    if access & (Access.REMOTE_ATOMIC & ~Access.LOCAL_WRITE):
        raise errors.UnsupportedError("NetworkDirect has no atomic operations", operation="register")
    if access & Access.ON_DEMAND:
        raise errors.UnsupportedError("NetworkDirect has no on-demand paging", operation="register")
    if access & ~_REGION_FLAGS:
        raise errors.InvalidFlagsError(f"register: {access:#x} has bits that are no Access flags")
    return Access(access)


def registration_error(status: int, address: int, length: int, access: int) -> errors.ProviderError:
    """What a refused or failed Register means (contract D.2)."""
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

    def __init__(
        self, adapter: NetworkDirectAdapter, owner: Any, buffer: Any, address: int, length: int, access: Access
    ) -> None:
        super().__init__(adapter, buffer, address, length, access)
        self._owner = owner
        self._registered = False
        self._native = self._new_native()

    def _new_native(self) -> Any:
        """What registrations are requests of."""
        adapter = self._adapter
        return create(
            "register", "IND2MemoryRegion", lib.IND2Adapter_CreateMemoryRegion, adapter._native, adapter._file
        )

    def _release_native(self, native: Any) -> None:
        release(native)

    def _register(self, overlapped: Any) -> int:
        address = ffi.cast("void *", self.address)
        flags = int(self.access)
        return int(lib.IND2MemoryRegion_Register(self._native, address, self.length, flags, overlapped))

    def _deregister(self, overlapped: Any) -> int:
        return int(lib.IND2MemoryRegion_Deregister(self._native, overlapped))

    def _register_now(self) -> None:
        try:
            request = Request(self._native)
            run("register", request, self._register, lambda: self._undo(request))
        except errors.ProviderError as failure:
            self._drop()
            if not failure.native:
                raise
            raise registration_error(failure.native, self.address, self.length, self.access) from None
        except BaseException:
            self._drop()
            raise
        self._take_tokens(request)
        self._opened()

    def _take_tokens(self, request: Request) -> None:
        """The registration has succeeded."""
        self.local_token = lib.IND2MemoryRegion_GetLocalToken(self._native)
        self.remote_token = lib.ndpy_region_remote_token(self._native)
        self._registered = True

    def _undo(self, request: Request) -> None:
        """It was registered, and nobody wants it any more."""
        self._take_tokens(request)
        run("deregister", Request(self._native), self._deregister)

    def _begin_register(self) -> Pending[NetworkDirectMemoryRegion]:
        """Start to register. The request holds the region, and with it the buffer, until it has ended."""
        pending: Pending[NetworkDirectMemoryRegion] = OverlappedPending("register", lambda: request.cancel())

        def on_end(status: int) -> None:
            try:
                if status != SUCCESS:
                    self._drop()
                    pending.fail(registration_error(status, self.address, self.length, self.access))
                    return
                self._take_tokens(request)
                if not pending.succeed(self, prepare=self._opened):
                    # Cancelled meanwhile: it never was a region for anybody.
                    run("deregister", Request(self._native), self._deregister)
                    self._drop()
            finally:
                self._registration = None
                self._adapter._registering.discard(self)
                handled.set()

        try:
            request = Request(self._native, self._adapter._events, on_end)
        except BaseException:
            self._drop()
            raise
        handled = threading.Event()
        self._registration = (request, pending, handled)
        self._adapter._registering.add(self)
        status = request.issue(self._register)
        if status == SUCCESS:
            on_end(status)
        elif status != PENDING:
            self._adapter._registering.discard(self)
            self._drop()
            raise registration_error(status, self.address, self.length, self.access)
        return pending

    def _cancel_registration(self) -> None:
        """The adapter is being closed: the region is not to be, even if the provider goes on to make it."""
        registration = self._registration
        if registration is not None:
            registration[1].cancel()

    def _give_up(self) -> None:
        """The same; wait until the provider has let go of it."""
        registration = self._registration
        if registration is not None:
            request, _, handled = registration
            for _, status in cancel_all([request]):
                request.finish(status)
            if not self._adapter._events.is_current():
                # Its end may be with the adapter's thread.
                handled.wait(_HANDLED_S)

    def begin_deregister(self) -> Pending[None]:
        pending: Pending[None] = OverlappedPending("deregister")

        def on_end(status: int) -> None:
            with self._lifetime:
                self._deregistering = None
                if status not in (SUCCESS, DEVICE_REMOVED):
                    self._mark_still_open()
                    pending.fail(status_error("deregister", status))
                    return
                self._drop()
                self._mark_closed()
            pending.succeed(None)

        with self._lifetime:
            if self._released:
                pending.succeed(None)
                return pending
            self._refuse_if_used()
            request = Request(self._native, self._adapter._events, on_end)
            self._defunct = self._closed_error
            status = request.issue(self._deregister)
            if status == PENDING:
                self._deregistering = request
                return pending
            if status not in (SUCCESS, DEVICE_REMOVED):
                self._mark_still_open()
                raise status_error("deregister", status)
        on_end(status)
        return pending

    _registration: tuple[Request, Pending[NetworkDirectMemoryRegion], threading.Event] | None = None
    _deregistering: Request | None = None

    def _release(self) -> None:
        request = self._deregistering
        if request is not None:
            # Begun before.
            status = request.wait()
            if status is None:
                # The adapter's thread took the end, waits for the lock held here, and finishes the rest.
                return
            request.finish(status)
            if self._native is not None:
                raise status_error("deregister", status)
            return
        if self._registered:
            with contextlib.suppress(errors.DeviceRemovedError):
                run("deregister", Request(self._native), self._deregister)
        # Before the buffer goes: who posts looks at the buffer first.
        self._defunct = self._closed_error
        self._drop()

    def _drop(self) -> None:
        """Let go of the native object, and then of the buffer: an exported memoryview keeps a bytearray from moving."""
        native, self._native = self._native, None
        if native is not None:
            self._release_native(native)
        self._owner = None


class NetworkDirectMemoryWindow(MemoryWindow):
    _adapter: NetworkDirectAdapter

    def __init__(self, adapter: NetworkDirectAdapter) -> None:
        super().__init__(adapter)
        self._native = self._new_native()
        self._opened()

    def _new_native(self) -> Any:
        return create(
            "create memory window", "IND2MemoryWindow", lib.IND2Adapter_CreateMemoryWindow, self._adapter._native
        )

    def _release(self) -> None:
        release(self._native)
        self._native = None
        if self._binding is not None:
            self._binding.end()
