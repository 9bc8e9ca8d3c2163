"""Shared receive queues over NetworkDirect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.platforms.networkdirect.native_calls import (
    CANCELED,
    PENDING,
    SUCCESS,
    check,
    create,
    ffi,
    lib,
    release_once,
    status_error,
)
from ndpy.platforms.networkdirect.overlapped import Request, cancel_all

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter


class NetworkDirectSharedReceiveQueue(SharedReceiveQueue):
    _adapter: NetworkDirectAdapter
    _lib = lib
    _ffi = ffi

    def _native_create(self) -> Any:
        #: Every Notify that the provider may hold, including those that nobody waits for any more.
        self._requests: set[Request] = set()
        return create(
            "create shared receive queue",
            "IND2SharedReceiveQueue",
            lib.IND2Adapter_CreateSharedReceiveQueue,
            self._adapter._native,
            self._adapter._file,
            self.depth,
            self.max_sge,
            self._threshold,
            0,
            0,
        )

    def _native_destroy(self) -> None:
        release_once(self, "_srq")

    def _native_modify(self, depth: int, threshold: int) -> None:
        check("modify", lib.IND2SharedReceiveQueue_Modify(self._srq, depth, threshold))

    def _native_arm(self) -> Any:
        for request in self._requests:
            # Its arm() was cancelled, but a native cancel would have ended all other requests too. So use it again.
            if request not in self._armed:
                return request
        request = Request(self._srq, self._adapter._events)
        request.call_at_end(self, NetworkDirectSharedReceiveQueue._on_notify_end)
        self._requests.add(request)
        status = request.issue(lambda overlapped: lib.IND2SharedReceiveQueue_Notify(self._srq, overlapped))
        if status == PENDING:
            return request
        self._requests.discard(request)
        if status != SUCCESS:
            raise status_error("arm", status)
        return None

    def _on_notify_end(self, request: Request, status: int) -> None:
        with self._lock:
            self._requests.discard(request)
        error: errors.NdpyError | None = None
        if status == CANCELED:
            what = "cancelled" if self._defunct is None else "the shared receive queue was closed"
            error = errors.CanceledError(what, operation="arm", native=status, native_name="ND_CANCELED")
        elif status != SUCCESS:
            error = status_error("shared receive queue", status)
        self._end_armed(error, request)

    def _native_cancel_notifications(self) -> None:
        requests = list(self._requests)
        cancel_all(requests)
        for request in requests:
            request.ignore_end()
        self._requests.clear()

    def _native_refusal(self, operation: str, number: int) -> errors.NdpyError:
        return status_error(operation, number)
