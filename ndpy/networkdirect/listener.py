"""Listeners over NetworkDirect.

Requests that nobody has asked for wait in the provider's backlog. A get_request() that is given up leaves its native request
with the provider, since cancelling would end those of all others; what it brings goes to the next one who asks.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.connection import Address, Connector, Listener, listening_address
from ndpy.networkdirect.addresses import pack_address, sized, unpack_address
from ndpy.networkdirect.library import CANCELED, PENDING, SUCCESS, check, create, ffi, lib, release, status_error
from ndpy.networkdirect.overlapped import OverlappedPending, Request, cancel_all
from ndpy.pending import Pending

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter
    from ndpy.networkdirect.connection import NetworkDirectConnector


class NetworkDirectListener(Listener):
    _adapter: NetworkDirectAdapter

    def __init__(self, adapter: NetworkDirectAdapter, address: Address, backlog: int) -> None:
        super().__init__(adapter)
        self._waiting: deque[NetworkDirectConnector] = deque()
        #: With the provider, each with the native connector that it will fill.
        self._requests: dict[Request, Any] = {}
        local = listening_address(adapter.info.addresses, address)
        self._native, self._address = self._listen(local, backlog, f"cannot listen at {local[0]} port {local[1]}")
        self._opened()

    def _listen(self, local: Address, backlog: int, where: str) -> tuple[Any, Address]:
        """A native listener, and where it listens; where: for errors."""
        adapter = self._adapter
        packed = pack_address(local)
        native = create("listen", "IND2Listener", lib.IND2Adapter_CreateListener, adapter._native, adapter._file)
        try:
            check("listen", lib.IND2Listener_Bind(native, packed, len(packed)), where)
            check("listen", lib.IND2Listener_Listen(native, backlog), where)
            data = sized("listen", lambda out, size: lib.IND2Listener_GetLocalAddress(native, out, size))
            bound = unpack_address(bytes(ffi.buffer(data)))
            assert bound is not None
        except BaseException:
            release(native)
            raise
        return native, bound

    def _get_request_native(self, connector: Any, overlapped: Any) -> int:
        return int(lib.IND2Listener_GetConnectionRequest(self._native, connector, overlapped))

    @property
    def address(self) -> Address:
        self._check()
        return self._address

    def begin_get_request(self) -> Pending[Connector]:
        self._check()
        pending: Pending[Connector] = OverlappedPending("get_request", lambda: self._stop_asking(pending))
        with self._lifetime:
            self._check()
            if self._waiting:
                pending.succeed(self._waiting.popleft())
                return pending
            self._asked.append(pending)
            while len(self._requests) < len(self._asked):
                self._ask()
        return pending

    def _ask(self) -> None:
        """Give the provider one more connector to fill."""
        connector = self._adapter._new_native_connector()
        owner = weakref.ref(self)

        def on_end(status: int) -> None:
            listener = owner()
            if listener is not None:
                listener._on_request(request, status)

        request = Request(self._native, self._adapter._events, on_end)
        self._requests[request] = connector
        status = request.issue(lambda overlapped: self._get_request_native(connector, overlapped))
        if status == SUCCESS:
            self._on_request(request, status)
        elif status != PENDING:
            del self._requests[request]
            release(connector)
            self._asked.pop()
            raise status_error("get_request", status)

    def _on_request(self, request: Request, status: int) -> None:
        with self._lifetime:
            native = self._requests.pop(request, None)
            if native is None:
                return
            if status != SUCCESS:
                release(native)
                asked = self._asked.popleft() if self._asked else None
                if asked is not None:
                    kind = errors.CanceledError if status == CANCELED else None
                    asked.fail(
                        kind("cancelled", operation="get_request") if kind else status_error("get_request", status)
                    )
                return
            connector = self._adapter._connector_class(self._adapter, native)
            connector._requested()
            while self._asked:
                if self._asked.popleft().succeed(connector):
                    return
            self._waiting.append(connector)

    def _on_removed(self) -> None:
        with self._lifetime:
            asked, self._asked = self._asked, deque()
        for pending in asked:
            pending.fail(self._removed_error())

    def _release(self) -> None:
        requests = list(self._requests)
        ended = cancel_all(requests)
        asked, self._asked = self._asked, deque()
        waiting, self._waiting = self._waiting, deque()
        for request, status in ended:
            if status == SUCCESS:
                # It came while it was cancelled: refused like the others that wait.
                waiting.append(self._adapter._connector_class(self._adapter, self._requests.pop(request)))
        for native in self._requests.values():
            release(native)
        for request in requests:
            request.ignore_end()
        self._requests.clear()
        release(self._native)
        self._native = None
        for connector in waiting:
            connector.close()
        for pending in asked:
            pending.fail(errors.CanceledError("the listener was closed", operation="get_request"))

    def _describe(self) -> str:
        host, port = getattr(self, "_address", ("?", 0))
        return f"Listener at {host} port {port}"
