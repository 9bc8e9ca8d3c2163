"""Connectors over librdmacm.

Every connection of an adapter reports to one event channel, which the adapter's thread reads; the handlers here run in
that thread. A connector's queue pair is not given to librdmacm (its identifier has no queue pair), so that connecting has
two steps and the queue pair's states are moved here; on iWARP the kernel moves them.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.addresses import Address, source_host
from ndpy.connection import Connector, Event, State
from ndpy.connection_parameters import ReadLimits, RetryPolicy
from ndpy.endpoint import MTUS
from ndpy.queue_pair import QueuePair
from ndpy.verbs.addresses import bind_identifier, new_identifier, pack_address, unpack_address
from ndpy.verbs.native_calls import check_errno, ffi, lib, text
from ndpy.verbs.queue_pair import VerbsQueuePair

if TYPE_CHECKING:
    from ndpy.verbs.adapter import CmEvent, VerbsAdapter

_RESOLVE_MS = 4000
_RETRY_COUNT = 7
# A sender that finds no receive posted tries again this often, each time after the receiver's timer. With the timer of
# ndpy's peers that is 0.7 s, with the longest one 4 s (contract F.3.5).
_RNR_RETRY_COUNT = 6
_RNR_TIMER_123_MS = 27
# Bits of rdma_init_qp_attr()'s mask that kernels leave set by mistake on InfiniBand.
_ROCE_MASK_BITS = 0xE00000


class VerbsConnector(Connector):
    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter, identifier: Any = None, key: int = 0) -> None:
        super().__init__(adapter)
        if key:
            self._serial = key
        self._id = identifier
        #: The peer receives from a shared receive queue, so a message may wait without end (contract F.3.6).
        self._peer_shares = False
        self._disconnect_sent = False
        #: iWARP: the peer has left before complete_connect(); what it sent until then has arrived.
        self._left_early = False
        self._iwarp = adapter.info.transport == "iWARP"
        # On iWARP the kernel has moved the queue pair when the reply comes, and not yet when accept() is refused.
        self._offer_spends_queue_pair = self._iwarp
        self._refused_accept_spends_queue_pair = not self._iwarp
        self._opened()

    def _native_address(self, peer: bool) -> Address | None:
        if self._id is None or (peer and self._state in ("idle", "bound")):
            return None
        return unpack_address(self._id, peer)

    # ---- the active side ----

    def _native_bind(self, address: Address) -> Address:
        identifier = new_identifier(self._adapter, self._serial)
        try:
            bind_identifier(self._adapter, identifier, address)
        except BaseException:
            lib.rdma_destroy_id(identifier)
            raise
        self._replace_identifier(identifier)
        bound = unpack_address(identifier, peer=False)
        return address[0], bound[1] if bound else address[1]

    def _replace_identifier(self, identifier: Any) -> None:
        former, self._id = self._id, identifier
        if former is not None:
            lib.rdma_destroy_id(former)

    def _native_connect(self, queue_pair: QueuePair, family: int, destination: tuple[Any, ...]) -> None:
        source = None
        if self._id is None:
            self._id = new_identifier(self._adapter, self._serial)
            if self._bound_to is not None:
                bind_identifier(self._adapter, self._id, self._bound_to)
            else:
                source = self._source_address(family, destination)
        packed = pack_address(family, destination)
        check_errno(
            "connect",
            lib.rdma_resolve_addr(
                self._id,
                ffi.cast("struct sockaddr *", source) if source is not None else ffi.NULL,
                ffi.cast("struct sockaddr *", packed),
                _RESOLVE_MS,
            ),
            f"there is no way from {self._adapter.info.name} to {self._target}",
        )

    def _source_address(self, family: int, destination: tuple[Any, ...]) -> Any:
        """An address of this adapter to come from: the destination itself, or one of its network, or any."""
        host = source_host(self._adapter.info.name, self._adapter.info.addresses, destination[0])
        found = socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
        return pack_address(family, found[0][4])

    def _native_parameters(self) -> tuple[Any, Any]:
        """A struct rdma_conn_param of what is asked for, and the memory that it points to."""
        data, limits, _ = self._parameters
        queue_pair = self.queue_pair
        assert isinstance(queue_pair, VerbsQueuePair)
        kept = ffi.new("char[]", data) if data else ffi.NULL
        parameters = ffi.new("struct rdma_conn_param *")
        parameters.private_data = kept
        parameters.private_data_len = len(data)
        parameters.responder_resources = limits.inbound
        parameters.initiator_depth = limits.outbound
        parameters.flow_control = 1
        # What the peer's adapter is to do for the peer's messages: whatever the peer wants.
        parameters.retry_count = _RETRY_COUNT
        parameters.rnr_retry_count = RetryPolicy.ENDLESS
        parameters.srq = int(queue_pair.srq is not None)
        parameters.qp_num = queue_pair._number
        return parameters, kept

    def _native_forget_attempt(self) -> None:
        self._replace_identifier(None)

    def _native_withdraw(self, former: State) -> None:
        if self._id is None:
            return
        if former == "connecting" and self._iwarp:
            # The kernel holds this call until the peer has answered, or for ten seconds.
            identifier, self._id = self._id, None
            self._adapter._in_background(lambda: lib.rdma_destroy_id(identifier))
            return
        if former == "requested" or (former in ("offered", "completing") and not self._iwarp):
            lib.rdma_reject(self._id, ffi.NULL, 0)
        self._replace_identifier(None)

    def _native_complete(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair, VerbsQueuePair)
        if not self._iwarp:
            self._ready_queue_pair(queue_pair)
            check_errno("complete_connect", lib.rdma_establish(self._id))
        self._on_established()

    def _native_established(self) -> None:
        if self._left_early:
            self._on_disconnected()

    def _ready_queue_pair(self, queue_pair: VerbsQueuePair) -> None:
        """INIT, ready to receive, ready to send, with what the connection manager knows of both ends."""
        assert self._read_limits is not None
        retry = self._parameters.retry
        for state in (lib.IBV_QPS_INIT, lib.IBV_QPS_RTR, lib.IBV_QPS_RTS):
            attributes = ffi.new("struct ibv_qp_attr *")
            mask = ffi.new("int *")
            attributes.qp_state = state
            check_errno("connect", lib.rdma_init_qp_attr(self._id, attributes, mask))
            wanted = mask[0]
            if self._adapter.info.transport == "InfiniBand":
                wanted &= ~_ROCE_MASK_BITS
            if state == lib.IBV_QPS_INIT:
                attributes.qp_access_flags = queue_pair._access_flags()
            elif state == lib.IBV_QPS_RTR:
                queue_pair._path_mtu = MTUS[attributes.path_mtu - 1]
                attributes.max_dest_rd_atomic = self._read_limits.inbound
                attributes.min_rnr_timer = _RNR_TIMER_123_MS if retry.min_rnr_timer is None else retry.min_rnr_timer
            else:
                attributes.max_rd_atomic = self._read_limits.outbound
                if retry.retry_count is not None:
                    attributes.retry_cnt = retry.retry_count
                if retry.rnr_retry_count is not None:
                    attributes.rnr_retry = retry.rnr_retry_count
                elif not self._peer_shares:
                    attributes.rnr_retry = min(attributes.rnr_retry, _RNR_RETRY_COUNT)
                if retry.ack_timeout is not None:
                    attributes.timeout = retry.ack_timeout
            with queue_pair._lock:
                queue_pair._check()
                queue_pair._modify(attributes, wanted, "connect")

    # ---- the passive side ----

    def _on_request(self, event: CmEvent) -> None:
        """It was made for a client's request, which the event tells of."""
        self._peer_shares = event.srq
        self._on_requested(event.private_data, ReadLimits(event.responder_resources, event.initiator_depth))

    def _native_accept(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair, VerbsQueuePair)
        try:
            if not self._iwarp:
                self._ready_queue_pair(queue_pair)
            parameters, _kept = self._native_parameters()
            check_errno("accept", lib.rdma_accept(self._id, parameters))
        except errors.ProviderError as error:
            if error.native in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
                # The kernel's words for a request whose client has gone.
                raise errors.ConnectionAbortedError(
                    "the client has given up", operation="accept", native=error.native
                ) from None
            raise

    def _native_reject(self, private_data: bytes) -> None:
        if self._state == "offered" and self._iwarp:
            # The MPA exchange is over when the reply arrives; only ending the connection is left.
            lib.rdma_disconnect(self._id)
            return
        kept = ffi.new("char[]", private_data) if private_data else ffi.NULL
        if lib.rdma_reject(self._id, kept, len(private_data)):
            raise errors.ConnectionAbortedError("the peer has gone", operation="reject", native=ffi.errno)

    # ---- the end ----

    def _native_disconnect(self) -> None:
        if self._state == "disconnected":
            self._on_disconnected()
            return
        number = self._disconnect()
        if number:
            raise errors.from_errno("disconnect", number)

    def _disconnect(self) -> int:
        queue_pair = self.queue_pair
        # iWARP sends what is queued before it closes, unless the queue pair is in the error state by then.
        if not self._iwarp and queue_pair is not None:
            queue_pair._end_connection()
        return self._tell_peer()

    def _native_tell_peer(self) -> None:
        self._tell_peer()

    def _native_on_failed_completion(self) -> None:
        # If the peer cannot be told now, disconnect() says so; whoever polled gets his completions.
        self._disconnect()

    def _tell_peer(self) -> int:
        """Tell the peer, once, that the connection is over; the errno if that failed."""
        if self._disconnect_sent:
            return 0
        self._disconnect_sent = True
        if self._adapter.port_state != "active":
            # A datagram of the connection manager that meets a closed port leaves rxe's manager dead for good.
            self._adapter._tell_when_port_is_active(self)
            self._on_disconnected()
        elif lib.rdma_disconnect(self._id):
            number = int(ffi.errno)
            if number not in (errno.EINVAL, errno.ENOTCONN):
                self._disconnect_sent = False
                return number
            self._on_disconnected()
        return 0

    def _disconnect_late(self) -> None:
        """The port is back: tell the peer now."""
        with self._state_lock:
            if self._id is not None:
                lib.rdma_disconnect(self._id)

    def _native_free(self) -> None:
        self._replace_identifier(None)

    # ---- events ----

    def _on_first_message(self) -> None:
        """A message came before the word that the connection is up, which it stands for."""
        with self._state_lock:
            if self._id is not None:
                lib.rdma_notify(self._id, lib.IBV_EVENT_COMM_EST)

    def _on_event(self, event: CmEvent) -> None:
        with self._state_lock:
            if self._id is None or self._released:
                return
            self._handle(event)

    def _handle(self, event: CmEvent) -> None:
        kind = event.type
        if self._state == "connecting":
            self._handle_connecting(event)
        elif kind == lib.RDMA_CM_EVENT_ESTABLISHED:
            self._on_established()
        elif kind == lib.RDMA_CM_EVENT_DISCONNECTED and self._state == "established":
            # The answer to the peer's request; without it the peer waits for its retries to run out.
            lib.rdma_disconnect(self._id)
            self._on_disconnected()
        elif self._iwarp and kind in _ENDINGS and self._state == "offered":
            # The connection is up since the reply came, so the peer may have sent and left: its messages count.
            lib.rdma_disconnect(self._id)
            self._left_early = True
        elif kind in _ENDINGS and self._has_transition(Event.LOST):
            self._on_lost(self._loss(event))

    def _handle_connecting(self, event: CmEvent) -> None:
        kind = event.type
        error: errors.NdpyError | None = None
        try:
            if kind == lib.RDMA_CM_EVENT_ADDR_RESOLVED:
                device = text(lib.ndpy_cm_device(self._id))
                if device != self._adapter.info.name:
                    raise errors.AddressUnreachableError(
                        f"{self._target} is reached through {device or 'no RDMA adapter'}, not {self._adapter.info.name}",
                        operation="connect",
                    )
                check_errno("connect", lib.rdma_resolve_route(self._id, _RESOLVE_MS))
                return
            if kind == lib.RDMA_CM_EVENT_ROUTE_RESOLVED:
                parameters, _kept = self._native_parameters()
                if lib.rdma_connect(self._id, parameters):
                    number = ffi.errno
                    if number in _NO_ANSWER:
                        raise self._unreachable(number)
                    raise errors.from_errno("connect", number)
                return
            if kind in (lib.RDMA_CM_EVENT_CONNECT_RESPONSE, lib.RDMA_CM_EVENT_ESTABLISHED):
                self._peer_shares = event.srq
                limits = ReadLimits(event.responder_resources, event.initiator_depth)
                if self._adapter.info.driver == "siw":
                    # It reports the reply's limits as the server sees them (siw_cm.c, siw_proc_mpareply()).
                    limits = ReadLimits(limits.outbound, limits.inbound)
                self._on_offered(event.private_data, limits)
                return
            error = self._attempt_error(event)
        except errors.NdpyError as failure:
            # Without its frames, of which this one refers to it.
            error = failure.with_traceback(None)
        if error is None:
            return
        # On iWARP the kernel has moved the queue pair to the error state, and knows no way back.
        self._on_connect_failed(error, spent=self._iwarp and kind == lib.RDMA_CM_EVENT_REJECTED)

    def _attempt_error(self, event: CmEvent) -> errors.NdpyError | None:
        """What a failed attempt's event means; None for an event that says nothing of it."""
        kind, status = event.type, event.status
        number = -status if status < 0 else status
        if kind == lib.RDMA_CM_EVENT_REJECTED:
            self._private_data = event.private_data
            why = "the listener rejected the request"
            if (self._iwarp and number == errno.ECONNREFUSED) or (not self._iwarp and number == _REJECT_NO_LISTENER):
                why = "nobody listens there"
            elif not self._iwarp and number != _REJECT_CONSUMER:
                why = f"the peer's connection manager rejected the request with reason {number}"
            name = None if self._iwarp else _REJECT_NAMES.get(number, "")
            return errors.ConnectionRefusedError(
                f"{self._target}: {why}", operation="connect", native=number, native_name=name
            )
        if kind in (lib.RDMA_CM_EVENT_ADDR_ERROR, lib.RDMA_CM_EVENT_ROUTE_ERROR):
            return errors.AddressUnreachableError(
                f"{self._target} does not answer address resolution from {self._adapter.info.name}; "
                "check the address, the link and `ip neigh`",
                operation="connect",
                native=number,
            )
        if kind == lib.RDMA_CM_EVENT_UNREACHABLE:
            return self._unreachable(number)
        if kind in (lib.RDMA_CM_EVENT_CONNECT_ERROR, lib.RDMA_CM_EVENT_DISCONNECTED):
            if number == errno.ECONNREFUSED:
                return self._unreachable(number)
            return errors.ConnectionAbortedError(
                f"the connection to {self._target} broke while it was made", operation="connect", native=number
            )
        return None

    def _unreachable(self, number: int) -> errors.NdpyError:
        """What the errno of an attempt that led to no answer of a listener means."""
        if number in (errno.ECONNREFUSED, errno.ECONNRESET):
            return errors.ConnectionRefusedError(
                f"{self._target}: nobody listens there", operation="connect", native=number
            )
        if number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return errors.AddressUnreachableError(
                f"there is no way to {self._target}", operation="connect", native=number
            )
        blocked = {"iWARP": ", or a firewall drops its TCP port", "RoCE": ", or UDP port 4791 is blocked"}
        return errors.TimeoutError(
            f"{self._target} does not answer; it is down, or has no RDMA adapter at that address"
            f"{blocked.get(self._adapter.info.transport, '')}",
            operation="connect",
            native=number,
        )

    def _loss(self, event: CmEvent) -> errors.NdpyError:
        """The peer refused, or vanished, before the connection was established."""
        number = abs(event.status)
        if event.type == lib.RDMA_CM_EVENT_REJECTED:
            self._private_data = event.private_data
            name = None if self._iwarp else _REJECT_NAMES.get(number, "")
            return errors.ConnectionRefusedError(
                "the client rejected the offer", operation="accept", native=number, native_name=name
            )
        if event.type == lib.RDMA_CM_EVENT_UNREACHABLE:
            return errors.TimeoutError("the client did not complete the connection", operation="accept", native=number)
        return errors.ConnectionAbortedError("the client has gone", operation="accept", native=number)


# What the kernel answers at once where it opens a TCP connection itself (iWARP).
_NO_ANSWER = (
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
    errno.EAGAIN,
)

_REJECT_NO_LISTENER = 8
_REJECT_CONSUMER = 28
# Reasons of the InfiniBand connection manager, as the architecture's specification names them (volume 1, 12.6.7.2).
_REJECT_NAMES = {
    3: "no resources",
    4: "timeout",
    8: "invalid service ID",
    10: "stale connection",
    28: "consumer reject",
}

_ENDINGS = (
    lib.RDMA_CM_EVENT_REJECTED,
    lib.RDMA_CM_EVENT_UNREACHABLE,
    lib.RDMA_CM_EVENT_CONNECT_ERROR,
    lib.RDMA_CM_EVENT_DISCONNECTED,
)
