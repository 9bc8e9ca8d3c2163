"""Connectors over NetworkDirect. The ends of their overlapped requests are handled in the adapter's thread.

As soon as a connection is made one NotifyDisconnect is issued for it, so that its end is known without anybody asking.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.connection import (
    Address,
    Connector,
    ReadLimits,
    RetryPolicy,
    limit_private_data,
    listening_address,
    resolve_destination,
    source_host,
)
from ndpy.networkdirect.addresses import pack_address, pack_resolved, sized, unpack_address
from ndpy.networkdirect.library import (
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
    status_error,
)
from ndpy.networkdirect.overlapped import OverlappedPending, Request, cancel_all
from ndpy.networkdirect.queue_pair import NetworkDirectQueuePair
from ndpy.pending import Pending
from ndpy.queue_pair import QueuePair

if TYPE_CHECKING:
    from ndpy.networkdirect.adapter import NetworkDirectAdapter

# After these the same connector and queue pair may try again (contract H.4.2).
_MAY_RETRY = (CONNECTION_REFUSED, IO_TIMEOUT, TIMEOUT, NETWORK_UNREACHABLE, HOST_UNREACHABLE)

# Where ports are chosen from (contract H.2.1).
_FIRST_PORT = 49152
_PORTS = 16384


class NetworkDirectConnector(Connector):
    _adapter: NetworkDirectAdapter
    _get_local_address = staticmethod(lib.IND2Connector_GetLocalAddress)
    _get_peer_address = staticmethod(lib.IND2Connector_GetPeerAddress)
    _size_type = "uint32_t *"

    def __init__(self, adapter: NetworkDirectAdapter, native: Any = None) -> None:
        super().__init__(adapter)
        self._native = native if native is not None else adapter._new_native_connector()
        self._requests: set[Request] = set()
        self._target = ""
        self._bound = False
        self._addresses: dict[str, Address] = {}
        #: The present connect(): its native call, and the limits that this side asked for.
        self._attempt: Callable[[Any], int] | None = None
        self._attempt_limits = ReadLimits(0, 0)
        self._completing: Pending[None] | None = None
        self._opened()

    # ---- what can be asked ----

    @property
    def local_address(self) -> Address:
        return self._address("local", self._get_local_address)

    @property
    def peer_address(self) -> Address:
        return self._address("peer", self._get_peer_address)

    def _address(self, which: str, getter: Callable[..., int]) -> Address:
        self._check()
        with self._state_lock:
            self._check()
            address = self._addresses.get(which) or self._query_address(getter)
        if address is None:
            raise errors.NotConnectedError(f"there is no {which} address yet", operation=f"{which}_address")
        return address

    def _query_address(self, getter: Callable[..., int]) -> Address | None:
        try:
            data = sized("address", lambda buffer, size: getter(self._native, buffer, size), self._size_type)
        except errors.ProviderError:
            return None
        return None if data == ffi.NULL else unpack_address(bytes(ffi.buffer(data)))

    def _remember_addresses(self) -> None:
        """Providers give the addresses while there is a connection; ndpy also after it."""
        for which, getter in (("local", self._get_local_address), ("peer", self._get_peer_address)):
            address = self._query_address(getter)
            if address is not None:
                self._addresses[which] = address

    def _fetch_private_data(self) -> None:
        """The peer's private data, if the provider has any in this state (contract H.7)."""
        size = ffi.new("uint32_t *", 512)
        buffer = ffi.new("unsigned char[]", 512)
        status = lib.IND2Connector_GetPrivateData(self._native, buffer, size) & 0xFFFFFFFF
        if status in (SUCCESS, BUFFER_OVERFLOW):
            self._private_data = bytes(ffi.buffer(buffer, min(size[0], 512)))

    def _fetch_read_limits(self) -> ReadLimits:
        inbound, outbound = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        check("read_limits", lib.IND2Connector_GetReadLimits(self._native, inbound, outbound))
        return ReadLimits(inbound[0], outbound[0])

    # ---- the native calls ----

    def _connect_native(self, queue_pair: Any, address: bytes, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        return int(
            lib.IND2Connector_Connect(
                self._native,
                queue_pair._qp,
                address,
                len(address),
                limits.inbound,
                limits.outbound,
                data or ffi.NULL,
                len(data),
                overlapped,
            )
        )

    def _complete_native(self, overlapped: Any) -> int:
        return int(lib.IND2Connector_CompleteConnect(self._native, overlapped))

    def _accept_native(self, queue_pair: Any, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        return int(
            lib.IND2Connector_Accept(
                self._native,
                queue_pair._qp,
                limits.inbound,
                limits.outbound,
                data or ffi.NULL,
                len(data),
                overlapped,
            )
        )

    def _reject_native(self, data: bytes) -> int:
        return int(lib.IND2Connector_Reject(self._native, data or ffi.NULL, len(data)))

    def _notify_native(self, overlapped: Any) -> int:
        return int(lib.IND2Connector_NotifyDisconnect(self._native, overlapped))

    def _disconnect_native(self, overlapped: Any) -> int:
        return int(lib.IND2Connector_Disconnect(self._native, overlapped))

    def _cancel_native(self) -> None:
        lib.IND2Overlapped_CancelOverlappedRequests(ffi.cast("struct IND2Overlapped *", self._native))

    def _prepare_connection(self, queue_pair: QueuePair, limits: ReadLimits) -> None:
        """Before the queue pair is used to connect or accept."""

    def _expect_messages(self, queue_pair: QueuePair) -> None:
        """Before the last step of this side, after which messages may come."""

    # ---- requests ----

    def _issue(self, operation: str, call: Callable[[Any], int], on_end: Callable[[Any, int], None]) -> None:
        """Start a request of the native connector; on_end(connector, status) under the state lock, at once if it ended
        inline. Raises if it was refused."""
        owner = weakref.ref(self)

        def ended(status: int) -> None:
            connector = owner()
            if connector is not None:
                with connector._state_lock:
                    # close() has forgotten it, and may have released what it was a request of.
                    if request in connector._requests:
                        connector._requests.discard(request)
                        on_end(connector, status)

        request = Request(self._native, self._adapter._events, ended)
        self._requests.add(request)
        status = request.issue(call)
        if status == PENDING:
            return
        self._requests.discard(request)
        if status != SUCCESS:
            raise status_error(operation, status)
        on_end(self, status)

    # ---- the active side ----

    def bind(self, address: Address) -> None:
        with self._state_lock:
            self._expect("bind", "idle", "bound")
            host, port = listening_address(self._adapter.info.addresses, address)
            if port:
                self._bind((host, port))
            else:
                port = self._bind_to_some_port(host)
            self._addresses["local"] = (host, port)
            self._move("bound")

    def _bind_to_some_port(self, host: str) -> int:
        """Providers do not tell what they chose before connect() (contract H.7.7), so the choice is made here."""
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
        if self._bound:
            # Providers differ in whether a bound connector can be bound again (contract H.2.4).
            native = self._adapter._new_native_connector()
            release(self._native)
            self._native = native
            self._bound = False
        check(
            "bind",
            lib.IND2Connector_Bind(self._native, packed, len(packed)),
        )
        self._bound = True

    def begin_connect(
        self,
        queue_pair: QueuePair,
        address: Address,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Pending[None]:
        self._check_policy(retry, "connect")
        limits = self._own_limits(inbound_read_limit, outbound_read_limit)
        data = limit_private_data(private_data, self._adapter.info.max_caller_data, "connect")
        family, resolved = resolve_destination(address)
        with self._state_lock:
            self._expect("connect", "idle", "bound")
            self._take_queue_pair(queue_pair)
            assert isinstance(queue_pair, NetworkDirectQueuePair)
            lend = queue_pair._lend
            try:
                self._target = f"{address[0]} port {address[1]}"
                self._private_data = self._read_limits = None
                if not self._bound:
                    self._bind((source_host(self._adapter.info.name, self._adapter.info.addresses, resolved[0]), 0))
                self._prepare_connection(queue_pair, limits)
                former = self._state
                self._move("connecting")
                pending: Pending[None] = OverlappedPending("connect", lambda: self._give_up(pending))
                self._pending = pending
                packed = pack_resolved(family, resolved)
                self._attempt = lambda overlapped: lend(
                    lambda: self._connect_native(queue_pair, packed, limits, data, overlapped)
                )
                self._attempt_limits = limits
                self._start_attempt()
            except errors.ProviderError as failure:
                self._refused_attempt(former if self._state == "connecting" else None)
                raise self._attempt_error(failure.native) if failure.native else failure from None
            except BaseException:
                self._refused_attempt(former if self._state == "connecting" else None)
                raise
        return pending

    def _start_attempt(self) -> None:
        assert self._attempt is not None
        self._issue("connect", self._attempt, lambda connector, status: connector._on_connect_end(status))

    def _refused_attempt(self, former: str | None) -> None:
        """A connect was not started: everything is as it was."""
        self._attempt = None
        self._release_queue_pair()
        self._pending = None
        if former is not None:
            self._move(former)

    def _on_connect_end(self, status: int) -> None:
        if self._state != "connecting":
            return
        pending, self._pending = self._pending, None
        self._attempt = None
        failure: errors.NdpyError | None = None
        if status == SUCCESS:
            try:
                self._fetch_private_data()
                self._private_data = self._private_data or b""
                theirs = self._fetch_read_limits()
                self._read_limits = ReadLimits(*map(min, self._attempt_limits, theirs))
                self._remember_addresses()
                self._move("offered")
            except errors.ProviderError as error_of_query:
                # Without its frames, of which this one refers to it.
                failure = error_of_query.with_traceback(None)
                self._lose("failed")
        else:
            if status == CONNECTION_REFUSED:
                self._fetch_private_data()
            failure = self._attempt_error(status)
            self._release_queue_pair()
            self._move("bound" if status in _MAY_RETRY else "failed")
        if pending is None:
            return
        if failure is None:
            pending.succeed(None)
        else:
            pending.fail(failure)

    def _attempt_error(self, status: int) -> errors.ProviderError:
        messages = {
            CONNECTION_REFUSED: f"{self._target}: nobody listens there, or the listener rejected the request",
            IO_TIMEOUT: f"{self._target} does not answer; it is down, has no adapter at that address, or a firewall is between",
            NETWORK_UNREACHABLE: f"there is no way to the network of {self._target} from {self._adapter.info.name}",
            HOST_UNREACHABLE: f"there is no way to {self._target} from {self._adapter.info.name}",
            CONNECTION_ABORTED: f"the connection to {self._target} broke while it was made",
        }
        return status_error("connect", IO_TIMEOUT if status == TIMEOUT else status, messages.get(status, ""))

    def _give_up(self, pending: Pending[None]) -> None:
        """cancel() of a connect or accept."""
        with self._state_lock:
            if self._pending is not pending or self._state not in ("connecting", "accepting"):
                return
            accepting = self._state == "accepting"
            queue_pair = self.queue_pair
            self._pending = self._attempt = None
            self._cancel_native()
            self._release_queue_pair()
            self._move("failed")
            if accepting and isinstance(queue_pair, NetworkDirectQueuePair):
                queue_pair._end_connection()

    def begin_complete_connect(self) -> Pending[None]:
        pending: Pending[None] = OverlappedPending("complete_connect")
        with self._state_lock:
            self._expect("complete_connect", "offered")
            if self._completing is not None:
                raise errors.NotConnectedError("complete_connect() was called before", operation="complete_connect")
            self._completing = pending
            try:
                assert self.queue_pair is not None
                self._expect_messages(self.queue_pair)
                self._issue("complete_connect", self._complete_native, NetworkDirectConnector._on_complete_end)
            except BaseException:
                self._completing = None
                self._lose("failed")
                raise
        return pending

    def _on_complete_end(self, status: int) -> None:
        pending, self._completing = self._completing, None
        if self._state != "offered":
            return
        if status == SUCCESS:
            self._establish()
            if pending is not None:
                pending.succeed(None)
            return
        self._lose("failed")
        if pending is not None:
            pending.fail(status_error("complete_connect", status))

    def _establish(self) -> None:
        queue_pair = self.queue_pair
        assert isinstance(queue_pair, NetworkDirectQueuePair)
        self._remember_addresses()
        self._move("established")
        queue_pair._begin_connection()
        try:
            self._issue("wait_disconnected", self._notify_native, NetworkDirectConnector._on_notified)
        except errors.ProviderError:
            # It is over already.
            self._on_disconnected()

    def _lose(self, state: str) -> None:
        """The connection in the making is lost, and with it the queue pair."""
        queue_pair = self.queue_pair
        self._release_queue_pair()
        self._move(state)
        if isinstance(queue_pair, NetworkDirectQueuePair):
            queue_pair._end_connection()

    # ---- the passive side ----

    def _requested(self) -> None:
        self._fetch_private_data()
        self._private_data = self._private_data or b""
        try:
            self._read_limits = self._fetch_read_limits()
        except errors.ProviderError:
            # The client has given up meanwhile; accept() says so.
            self._read_limits = ReadLimits(0, 0)
        self._remember_addresses()
        self._move("requested")

    def begin_accept(
        self,
        queue_pair: QueuePair,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Pending[None]:
        self._check_policy(retry, "accept")
        mine = self._own_limits(inbound_read_limit, outbound_read_limit)
        data = limit_private_data(private_data, self._adapter.info.max_callee_data, "accept")
        with self._state_lock:
            if self._state == "failed":
                raise errors.ConnectionAbortedError("the client has given up", operation="accept")
            self._expect("accept", "requested")
            self._take_queue_pair(queue_pair)
            assert isinstance(queue_pair, NetworkDirectQueuePair)
            lend = queue_pair._lend
            assert self._read_limits is not None
            self._read_limits = ReadLimits(*map(min, mine, self._read_limits))
            pending: Pending[None] = OverlappedPending("accept", lambda: self._give_up(pending))
            self._pending = pending
            self._move("accepting")
            limits = self._read_limits
            try:
                self._prepare_connection(queue_pair, limits)
                self._expect_messages(queue_pair)
                self._issue(
                    "accept",
                    lambda overlapped: lend(lambda: self._accept_native(queue_pair, limits, data, overlapped)),
                    NetworkDirectConnector._on_accept_end,
                )
            except BaseException as failure:
                self._pending = None
                self._release_queue_pair()
                self._move("failed")
                if isinstance(failure, errors.ProviderError):
                    raise self._accept_error(failure.native) from None
                raise
        return pending

    def _on_accept_end(self, status: int) -> None:
        if self._state != "accepting":
            return
        pending, self._pending = self._pending, None
        if status == SUCCESS:
            self._establish()
            if pending is not None:
                pending.succeed(None)
            return
        self._lose("failed")
        if pending is not None:
            pending.fail(self._accept_error(status))

    @staticmethod
    def _accept_error(status: int) -> errors.ProviderError:
        messages = {
            CONNECTION_REFUSED: "the client rejected the offer",
            CONNECTION_ABORTED: "the client has given up",
            IO_TIMEOUT: "the client did not complete the connection",
        }
        return status_error("accept", status, messages.get(status, ""))

    def reject(self, private_data: bytes = b"") -> None:
        self._check()
        data = limit_private_data(private_data, self._adapter.info.max_callee_data, "reject")
        with self._state_lock:
            self._expect("reject", "requested", "offered")
            status = self._reject_native(data)
            completing, self._completing = self._completing, None
            if completing is not None:
                completing.fail(errors.CanceledError("the offer was rejected", operation="complete_connect"))
            self._release_queue_pair()
            self._move("failed")
            check("reject", status, "" if status & 0xFFFFFFFF != CONNECTION_ABORTED else "the peer has gone")

    # ---- the end ----

    def begin_disconnect(self) -> Pending[None]:
        with self._state_lock:
            self._expect("disconnect", "established", "disconnected")
            if self._disconnect_called:
                raise errors.NotConnectedError("disconnect() was called before", operation="disconnect")
            self._disconnect_called = True
            pending: Pending[None] = OverlappedPending("disconnect")
            self._disconnecting = pending
            queue_pair = self.queue_pair
            if isinstance(queue_pair, NetworkDirectQueuePair):
                queue_pair._end_connection()
            try:
                self._issue("disconnect", self._disconnect_native, NetworkDirectConnector._on_disconnect_end)
            except errors.ProviderError:
                # Providers that count a connection as none once the peer has left (contract H.8.6).
                self._on_disconnected()
                if not pending.done():
                    self._disconnecting = None
                    pending.succeed(None)
        return pending

    def _on_disconnect_end(self, status: int) -> None:
        """Whatever it says, the connection is over."""
        self._on_disconnected()
        pending, self._disconnecting = self._disconnecting, None
        if pending is not None:
            pending.succeed(None)

    def _on_notified(self, status: int) -> None:
        if status != CANCELED:
            self._on_disconnected()

    def _on_disconnected(self) -> None:
        """The connection is over, from whichever side."""
        queue_pair = self.queue_pair
        if isinstance(queue_pair, NetworkDirectQueuePair):
            queue_pair._end_connection()
        if self._state != "established":
            return
        self._move("disconnected")
        ended, self._watching = self._watching, []
        for pending in ended:
            pending.succeed(None)

    def _on_failed_completion(self) -> None:
        """A request failed, which has ended the connection (contract F.6.1)."""
        with self._state_lock:
            self._on_disconnected()

    def _on_queue_pair_closed(self) -> None:
        """The queue pair is gone: the connection has ended, or the attempt has."""
        with self._state_lock:
            pending, self._pending = self._pending, None
            completing, self._completing = self._completing, None
            if self._state in ("connecting", "accepting", "offered"):
                self._move("failed")
            elif self._state == "established":
                self._on_disconnected()
            self._release_queue_pair()
        for waiting in (pending, completing):
            if waiting is not None:
                waiting.fail(errors.CanceledError("the queue pair was closed", operation=waiting._operation))

    def _on_removed(self) -> None:
        failure = self._removed_error()
        with self._state_lock:
            waiting = self._take_waiting()
        for pending in waiting:
            pending.fail(failure)

    def _take_waiting(self) -> list[Pending[None]]:
        completing, self._completing = self._completing, None
        return super()._take_waiting() + ([] if completing is None else [completing])

    def _release(self) -> None:
        with self._state_lock:
            self._defunct = self._closed_error
            waiting = self._take_waiting()
            requests = list(self._requests)
            self._requests.clear()
        try:
            cancel_all(requests)
        except errors.DeviceBusyError:
            self._requests.update(requests)
            self._stays_open()
            for pending in waiting:
                pending.fail(errors.CanceledError("the connector was being closed", operation=pending._operation))
            raise
        with self._state_lock:
            queue_pair = self.queue_pair
            if isinstance(queue_pair, NetworkDirectQueuePair) and self._state in (
                "established",
                "accepting",
                "disconnected",
            ):
                queue_pair._end_connection()
            self._release_queue_pair()
            release(self._native)
            self._native = None
        for request in requests:
            request.ignore_end()
        for pending in waiting:
            pending.fail(errors.CanceledError("the connector was closed", operation=pending._operation))
