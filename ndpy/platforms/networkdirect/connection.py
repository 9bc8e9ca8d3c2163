"""The native steps of connectors over NetworkDirect.

Each step is an overlapped request. The adapter's thread learns of its end and calls a handler here. Each new connection
gets one NotifyDisconnect at once, so that ndpy learns of its end even if the program does not ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection import Connector
from ndpy.objects.connection_parameters import ReadLimits
from ndpy.objects.connection_states import Event, State
from ndpy.objects.queue_pair import QueuePair
from ndpy.platforms.networkdirect import interfaces
from ndpy.platforms.networkdirect.addresses import get_sized_buffer, pack_address, pack_resolved, unpack_address
from ndpy.platforms.networkdirect.native_calls import (
    BUFFER_OVERFLOW,
    CANCELED,
    CONNECTION_ABORTED,
    CONNECTION_REFUSED,
    HOST_UNREACHABLE,
    IO_TIMEOUT,
    NETWORK_UNREACHABLE,
    PENDING,
    SUCCESS,
    TIMEOUT,
    check,
    ffi,
    lib,
    release,
    release_once,
    status_error,
)
from ndpy.platforms.networkdirect.overlapped import Request, cancel_all
from ndpy.platforms.networkdirect.queue_pair import NetworkDirectQueuePair
from ndpy.vocabulary.addresses import Address, listening_address
from ndpy.vocabulary.routes import find_route

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.adapter import NetworkDirectAdapter

# After these the same connector and queue pair may try again (contract H.4.2).
_MAY_RETRY = (CONNECTION_REFUSED, IO_TIMEOUT, TIMEOUT, NETWORK_UNREACHABLE, HOST_UNREACHABLE)

# No provider transports more bytes (contract H.7).
_PRIVATE_DATA = 512

# The range of ports that ndpy chooses from (contract H.2.1).
_FIRST_PORT = 49152
_PORTS = 16384


class NetworkDirectConnector(Connector):
    _adapter: NetworkDirectAdapter
    #: The native interface, and the type of its sizes. Version 1 replaces both.
    _interface = "IND2Connector"
    _size_type = "uint32_t *"

    def __init__(self, adapter: NetworkDirectAdapter, native: Any = None) -> None:
        super().__init__(adapter)
        self._native = native if native is not None else adapter._new_native_connector()
        self._requests: set[Request] = set()
        #: Why connect() goes on to the next address when its request has ended.
        self._abandoned: errors.NdpyError | None = None
        #: Where the native connector is bound, by bind() or by connect().
        self._bound_at: Address | None = None
        self._addresses: dict[str, Address] = {}
        #: The address that connect() goes to, as the provider takes it.
        self._destination = b""
        self._opened()

    def _call(self, method: str, *arguments: Any) -> int:
        """Call a method of the native connector. Returns its status."""
        return int(getattr(lib, f"{self._interface}_{method}")(self._native, *arguments))

    # ---- where version 1 differs ----

    def _get_private_data(self, buffer: Any, size: Any) -> int:
        return self._call("GetPrivateData", buffer, size)

    def _get_read_limits(self, inbound: Any, outbound: Any) -> int:
        return self._call("GetReadLimits", inbound, outbound)

    def _connect_native(self, queue_pair: Any, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        return self._call(
            "Connect",
            queue_pair._qp,
            self._destination,
            len(self._destination),
            *limits,
            data or ffi.NULL,
            len(data),
            overlapped,
        )

    def _accept_native(self, queue_pair: Any, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        return self._call("Accept", queue_pair._qp, *limits, data or ffi.NULL, len(data), overlapped)

    def _cancel_native(self) -> None:
        lib.IND2Overlapped_CancelOverlappedRequests(ffi.cast("struct IND2Overlapped *", self._native))

    def _prepare_connection(self, queue_pair: QueuePair, limits: ReadLimits) -> None:
        """Called before the queue pair is used to connect or accept."""

    def _expect_messages(self, queue_pair: QueuePair) -> None:
        """Called before the last step of this side. Messages may come after that step."""

    # ---- what can be asked ----

    def _native_address(self, peer: bool) -> Address | None:
        which = "peer" if peer else "local"
        return self._addresses.get(which) or self._query_address(which)

    def _query_address(self, which: str) -> Address | None:
        method = "GetPeerAddress" if which == "peer" else "GetLocalAddress"
        try:
            data = get_sized_buffer("address", lambda buffer, size: self._call(method, buffer, size), self._size_type)
        except errors.ProviderError:
            return None
        return None if data == ffi.NULL else unpack_address(bytes(ffi.buffer(data)))

    def _remember_addresses(self) -> None:
        """Keep the addresses. Providers give them only while there is a connection, but ndpy also afterwards."""
        for which in ("local", "peer"):
            address = self._query_address(which)
            if address is not None:
                self._addresses[which] = address

    def _fetch_private_data(self) -> None:
        """Keep the peer's private data, if the provider has any in this state (contract H.7)."""
        size = ffi.new(self._size_type, _PRIVATE_DATA)
        buffer = ffi.new("unsigned char[]", _PRIVATE_DATA)
        status = self._get_private_data(buffer, size) & 0xFFFFFFFF
        if status in (SUCCESS, BUFFER_OVERFLOW):
            self._private_data = bytes(ffi.buffer(buffer, min(size[0], _PRIVATE_DATA)))

    def _fetch_read_limits(self) -> ReadLimits:
        inbound, outbound = ffi.new(self._size_type), ffi.new(self._size_type)
        check("read_limits", self._get_read_limits(inbound, outbound))
        return ReadLimits(inbound[0], outbound[0])

    # ---- requests ----

    def _issue(self, operation: str, call: Callable[[Any], int], on_end: Callable[[Any, int], None]) -> None:
        """Start a request of the native connector. Raises if the provider refuses it.

        Parameters:
            call: call(overlapped) starts it.
            on_end: on_end(connector, status) is called under the state lock when the request ends. If the request ends
                inline, that is at once.
        """

        def ended(connector: NetworkDirectConnector, request: Request, status: int) -> None:
            with connector._state_lock:
                # After close() the set is empty, and the native connector may be gone.
                if request in connector._requests:
                    connector._requests.discard(request)
                    on_end(connector, status)

        request = Request(self._native, self._adapter._events)
        request.call_at_end(self, ended)
        self._requests.add(request)
        status = request.issue(call)
        if status == PENDING:
            return
        self._requests.discard(request)
        if status != SUCCESS:
            raise status_error(operation, status)
        on_end(self, status)

    def _issue_with_queue_pair(
        self, operation: str, call: Callable[[Any, ReadLimits, bytes, Any], int], on_end: Callable[[Any, int], None]
    ) -> None:
        """_issue() for a call that takes the queue pair. The request ends CANCELED if the queue pair was closed."""
        queue_pair, (data, limits, _) = self.queue_pair, self._parameters
        assert isinstance(queue_pair, NetworkDirectQueuePair)
        unless_closed = queue_pair._unless_closed
        self._issue(
            operation, lambda overlapped: unless_closed(lambda: call(queue_pair, limits, data, overlapped)), on_end
        )

    # ---- the active side ----

    def _native_bind(self, address: Address) -> Address:
        host, port = listening_address(self._adapter.info.addresses, address)
        if port:
            self._bind((host, port))
        else:
            port = self._bind_to_some_port(host)
        self._addresses["local"] = (host, port)
        return host, port

    def _bind_to_some_port(self, host: str) -> int:
        """Choose a port here, because providers do not tell their choice before connect() (contract H.7.7)."""
        start = random.randrange(_PORTS)
        for offset in range(_PORTS):
            port = _FIRST_PORT + (start + offset) % _PORTS
            try:
                self._bind((host, port))
                return port
            except errors.AddressInUseError:
                continue
        raise errors.AddressInUseError(f"no port of {host} is free", operation="bind")

    def _bind(self, address: Address) -> None:
        packed = pack_address(address)
        if self._bound_at is not None:
            # Not every provider can bind a bound connector again (contract H.2.4).
            self._renew()
        check("bind", self._call("Bind", packed, len(packed)), where=f"{address[0]} port {address[1]}")
        self._bound_at = address

    def _renew(self) -> None:
        """Take a native connector that is as new."""
        native = self._adapter._new_native_connector()
        release(self._native)
        self._native = native
        self._bound_at = None

    def _native_connect(self, queue_pair: QueuePair, family: int, destination: tuple[Any, ...]) -> None:
        local = self._bound_to
        if local is None:
            source, destination = find_route(self._adapter.info, family, destination, interfaces.addresses)
            local = source, 0
        self._destination = pack_resolved(family, destination)
        try:
            # An earlier attempt or a bind() that failed may have left it bound elsewhere, or not at all.
            if self._bound_at != local:
                self._bind(local)
            self._prepare_connection(queue_pair, self._parameters.read_limits)
            self._start_attempt()
        except errors.ProviderError as failure:
            raise self._attempt_error(failure.native, failure.message) if failure.native else failure from None

    def _start_attempt(self) -> None:
        self._issue_with_queue_pair(
            "connect", self._connect_native, lambda connector, status: connector._on_connect_end(status)
        )

    def _on_connect_end(self, status: int) -> None:
        if not self._has_transition(Event.OFFERED):
            return
        abandoned, self._abandoned = self._abandoned, None
        if status != SUCCESS and abandoned is not None:
            try:
                # The cancellation has finished the native connector (contract H.4.2).
                self._renew()
            except errors.ProviderError as failure:
                self._on_connect_failed(failure.with_traceback(None), again=False)
            else:
                self._on_connect_failed(abandoned)
            return
        if status != SUCCESS:
            if status == CONNECTION_REFUSED:
                self._fetch_private_data()
            self._on_connect_failed(self._attempt_error(status), again=status in _MAY_RETRY)
            return
        try:
            self._fetch_private_data()
            limits = self._fetch_read_limits()
            self._remember_addresses()
        except errors.ProviderError as failure:
            # The provider has put the queue pair into a connection. Drop the traceback: its frames refer to the error.
            self._on_connect_failed(failure.with_traceback(None), again=False, spent=True)
            return
        self._on_offered(self._private_data or b"", limits)

    def _attempt_error(self, status: int, said: str = "") -> errors.ProviderError:
        """The error of an attempt. said: the text of a status that needs no other."""
        messages = {
            CONNECTION_REFUSED: (
                f"{self._target}: nobody listens there, the listener rejected the request, or what listens "
                "there speaks no RDMA"
            ),
            IO_TIMEOUT: (
                f"{self._target} does not answer; it is down, has no adapter at that address, or a firewall is between"
            ),
            NETWORK_UNREACHABLE: f"there is no route to the network of {self._target} from {self._adapter.info.name}",
            HOST_UNREACHABLE: f"there is no route to {self._target} from {self._adapter.info.name}",
            CONNECTION_ABORTED: f"the connection to {self._target} broke while it was made",
        }
        status = IO_TIMEOUT if status == TIMEOUT else status
        message = messages.get(status, said)
        return status_error("connect", status, message, where="" if message else self._target)

    def _native_abandon_attempt(self, error: errors.NdpyError) -> None:
        if self._requests:
            # The provider ends the request, and then the next address is tried.
            self._abandoned = error
            self._cancel_native()
        else:
            # Version 1 pauses between two requests.
            self._try_next(error)

    def _native_withdraw(self, former: State) -> None:
        if former in ("connecting", "accepting"):
            self._cancel_native()

    def _native_complete(self, queue_pair: QueuePair) -> None:
        self._expect_messages(queue_pair)
        self._issue("complete_connect", partial(self._call, "CompleteConnect"), NetworkDirectConnector._on_complete_end)

    def _on_complete_end(self, status: int) -> None:
        if status == SUCCESS:
            self._on_established()
        else:
            self._on_lost(status_error("complete_connect", status))

    def _native_established(self) -> None:
        self._remember_addresses()
        try:
            self._issue(
                "wait_disconnected", partial(self._call, "NotifyDisconnect"), NetworkDirectConnector._on_notified
            )
        except errors.ProviderError:
            # The connection is over already.
            self._on_disconnected(told=False)

    # ---- the passive side ----

    def _on_request(self) -> None:
        """A client's request has filled the native connector."""
        self._fetch_private_data()
        try:
            limits = self._fetch_read_limits()
        except errors.ProviderError:
            # The client has given up meanwhile. accept() says so.
            limits = ReadLimits(0, 0)
        self._remember_addresses()
        self._on_requested(self._private_data or b"", limits)

    def _native_accept(self, queue_pair: QueuePair) -> None:
        try:
            self._prepare_connection(queue_pair, self._parameters.read_limits)
            self._expect_messages(queue_pair)
            self._issue_with_queue_pair("accept", self._accept_native, NetworkDirectConnector._on_accept_end)
        except errors.ProviderError as failure:
            raise self._accept_error(failure.native) from None

    def _on_accept_end(self, status: int) -> None:
        if status == SUCCESS:
            self._on_established()
        else:
            self._on_lost(self._accept_error(status))

    def _accept_error(self, status: int) -> errors.ProviderError:
        messages = {
            CONNECTION_REFUSED: "the client rejected the offer",
            CONNECTION_ABORTED: "the client has given up",
            IO_TIMEOUT: "the client did not complete the connection",
        }
        message = messages.get(status, "")
        return status_error("accept", status, self._at_its_address(message) if message else "")

    def _native_reject(self, private_data: bytes) -> None:
        status = self._call("Reject", private_data or ffi.NULL, len(private_data))
        check("reject", status, "" if status & 0xFFFFFFFF != CONNECTION_ABORTED else "the peer has gone")

    # ---- the end ----

    def _native_disconnect(self) -> None:
        if self.queue_pair is not None:
            self.queue_pair._end_connection()
        try:
            self._issue("disconnect", partial(self._call, "Disconnect"), NetworkDirectConnector._on_disconnect_end)
        except errors.ProviderError:
            # Some providers refuse to disconnect after the peer has left (contract H.8.6).
            self._on_disconnected()

    def _on_disconnect_end(self, status: int) -> None:
        # Whatever the status, the connection is over.
        self._on_disconnected()

    def _on_notified(self, status: int) -> None:
        if status != CANCELED:
            self._on_disconnected(told=False)

    def _native_on_failed_completion(self) -> None:
        # The provider has ended the connection and told the peer.
        self._on_disconnected(told=False)

    def _native_end_requests(self) -> None:
        with self._state_lock:
            requests = list(self._requests)
            self._requests.clear()
        try:
            cancel_all(requests)
        except BaseException:
            self._requests.update(requests)
            raise
        for request in requests:
            request.ignore_end()

    def _native_free(self) -> None:
        release_once(self, "_native")
