"""Listeners over NetworkDirect.

A provider refuses requests beyond its backlog and tells nobody. So ndpy gives the provider no limit, and always keeps
one native request outstanding. ndpy.objects.listener queues connection requests, or refuses and counts them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection import Connector
from ndpy.objects.listener import Listener
from ndpy.platforms.networkdirect.addresses import get_sized_buffer, pack_address, unpack_address
from ndpy.platforms.networkdirect.native_calls import (
    PENDING,
    SUCCESS,
    check,
    create,
    ffi,
    lib,
    release,
    release_once,
    status_error,
)
from ndpy.platforms.networkdirect.overlapped import Request, cancel_all, request_error
from ndpy.vocabulary.addresses import Address, listening_address

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter


class NetworkDirectListener(Listener):
    _adapter: NetworkDirectAdapter

    def __init__(self, adapter: NetworkDirectAdapter, address: Address, backlog: int) -> None:
        super().__init__(adapter, backlog)
        #: Native requests that the provider has. Each has the native connector that it will fill. There is one request,
        #: except after a failure.
        self._requests: dict[Request, Any] = {}
        local = listening_address(adapter.info.addresses, address)
        self._native, self._address = self._listen(local, f"cannot listen at {local[0]} port {local[1]}")
        self._opened()
        try:
            with self._lifetime:
                self._native_expect_request()
        except BaseException:
            self.close()
            raise

    def _listen(self, local: Address, where: str) -> tuple[Any, Address]:
        """Make a native listener. Returns it and its address. where: for error messages."""
        adapter = self._adapter
        packed = pack_address(local)
        native = create("listen", "IND2Listener", lib.IND2Adapter_CreateListener, adapter._native, adapter._file)
        try:
            check("listen", lib.IND2Listener_Bind(native, packed, len(packed)), where=where)
            check("listen", lib.IND2Listener_Listen(native, 0), where=where)
            data = get_sized_buffer("listen", lambda out, size: lib.IND2Listener_GetLocalAddress(native, out, size))
            bound = unpack_address(bytes(ffi.buffer(data)))
            assert bound is not None
        except BaseException:
            release(native)
            raise
        return native, bound

    def _get_request_native(self, connector: Any, overlapped: Any) -> int:
        return int(lib.IND2Listener_GetConnectionRequest(self._native, connector, overlapped))

    def _native_expect_request(self) -> None:
        # Give the provider a connector to fill, unless it has one.
        while not self._requests:
            request = Request(self._native, self._adapter._events)
            request.call_at_end(self, NetworkDirectListener._on_native_end)
            connector = self._adapter._new_native_connector()
            self._requests[request] = connector
            status = request.issue(lambda overlapped: self._get_request_native(connector, overlapped))  # noqa: B023
            if status == PENDING:
                return
            del self._requests[request]
            if status != SUCCESS:
                release(connector)
                raise status_error("get_request", status)
            self._take(connector)

    def _take(self, native: Any) -> None:
        """A client's request has filled this native connector."""
        connector = self._adapter._connector_of(native)
        connector._on_request()
        self._on_request(connector)

    def _on_native_end(self, request: Request, status: int) -> None:
        with self._lifetime:
            native = self._requests.pop(request, None)
            if native is None:
                return
            try:
                if status == SUCCESS:
                    self._take(native)
                    self._native_expect_request()
                    return
                release(native)
                self._fail_oldest_call(request_error("get_request", status))
                if self._calls:
                    self._native_expect_request()
            except errors.NdpyError as refusal:
                # The next get_request() tries again.
                self._fail_calls(refusal)

    def _native_close(self) -> list[Connector]:
        if self._native is None:
            return []
        requests = list(self._requests)
        late: list[Connector] = [
            self._adapter._connector_of(self._requests.pop(request))
            # A connection request may have come before the native request was cancelled. It is refused, like queued
            # ones.
            for request, status in cancel_all(requests)
            if status == SUCCESS
        ]
        for native in self._requests.values():
            release(native)
        for request in requests:
            request.ignore_end()
        self._requests.clear()
        release_once(self, "_native")
        return late
