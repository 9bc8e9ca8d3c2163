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
from ndpy.connection import (
    Address,
    Connector,
    ReadLimits,
    RetryPolicy,
    limit_private_data,
    resolve_destination,
    source_host,
)
from ndpy.endpoint import MTUS
from ndpy.pending import Pending
from ndpy.queue_pair import QueuePair
from ndpy.verbs.addresses import bind_identifier, new_identifier, pack_address, unpack_address
from ndpy.verbs.devices import MAX_CALLEE_DATA, MAX_CALLER_DATA
from ndpy.verbs.library import check_errno, ffi, lib, text
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
        self._request: tuple[bytes, ReadLimits] = (b"", ReadLimits(0, 0))
        self._retry = RetryPolicy()
        #: The peer receives from a shared receive queue, so a message may wait without end (contract F.3.6).
        self._peer_shares = False
        self._disconnect_sent = False
        #: iWARP: the peer has left before complete_connect(); what it sent until then has arrived.
        self._left_early = False
        self._iwarp = adapter.info.transport == "iWARP"
        self._target = ""
        #: The address of bind(), for every attempt.
        self._bound_to: Address | None = None
        self._opened()

    # ---- what can be asked ----

    @property
    def local_address(self) -> Address:
        return self._address(peer=False)

    @property
    def peer_address(self) -> Address:
        return self._address(peer=True)

    def _address(self, peer: bool) -> Address:
        self._check()
        with self._state_lock:
            address = unpack_address(self._id, peer) if self._id is not None else None
        if address is None or (peer and self._state in ("idle", "bound")):
            which = "peer" if peer else "local"
            raise errors.NotConnectedError(f"there is no {which} address yet", operation=f"{which}_address")
        return address

    # ---- the active side ----

    def bind(self, address: Address) -> None:
        with self._state_lock:
            self._expect("bind", "idle", "bound")
            identifier = new_identifier(self._adapter, self._serial)
            try:
                bind_identifier(self._adapter, identifier, address)
            except BaseException:
                lib.rdma_destroy_id(identifier)
                raise
            self._replace_identifier(identifier)
            bound = unpack_address(identifier, peer=False)
            self._bound_to = (address[0], bound[1] if bound else address[1])
            self._move("bound")

    def _replace_identifier(self, identifier: Any) -> None:
        former, self._id = self._id, identifier
        if former is not None:
            lib.rdma_destroy_id(former)

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
        self._check()
        policy = self._check_policy(retry, "connect")
        limits = self._own_limits(inbound_read_limit, outbound_read_limit)
        data = limit_private_data(private_data, MAX_CALLER_DATA, "connect")
        family, resolved = resolve_destination(address)
        with self._state_lock:
            self._expect("connect", "idle", "bound")
            self._take_queue_pair(queue_pair)
            self._request = (data, limits)
            self._retry = policy
            self._target = f"{address[0]} port {address[1]}"
            self._private_data = self._read_limits = None
            pending: Pending[None] = Pending("connect", lambda: self._give_up(pending))
            self._pending = pending
            try:
                source = None
                if self._id is None:
                    self._id = new_identifier(self._adapter, self._serial)
                    if self._bound_to is not None:
                        bind_identifier(self._adapter, self._id, self._bound_to)
                    else:
                        source = self._source_address(family, resolved)
                self._move("connecting")
                packed = pack_address(family, resolved)
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
            except BaseException:
                self._failed_attempt()
                raise
        return pending

    def _source_address(self, family: int, destination: tuple[Any, ...]) -> Any:
        """An address of this adapter to come from: the destination itself, or one of its network, or any."""
        host = source_host(self._adapter.info.name, self._adapter.info.addresses, destination[0])
        found = socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
        return pack_address(family, found[0][4])

    def _parameters(self) -> tuple[Any, Any]:
        """A struct rdma_conn_param of what is asked for, and the memory that it points to."""
        data, limits = self._request
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

    def _failed_attempt(self) -> None:
        """A connect did not lead to an offer: connector and queue pair can try again (contract H.4.4)."""
        self._release_queue_pair()
        if self._state == "connecting":
            self._move("bound" if self._bound_to else "idle")
        self._pending = None
        self._replace_identifier(None)

    def _give_up(self, pending: Pending[None]) -> None:
        """cancel() of a connect or accept."""
        with self._state_lock:
            if self._pending is not pending or self._state not in ("connecting", "accepting"):
                return
            self._abandon()

    def _abandon(self, *, queue_pair_untouched: bool = False) -> None:
        former, queue_pair = self._state, self.queue_pair
        self._pending = None
        self._release_queue_pair()
        self._move("failed")
        if former == "connecting" and self._iwarp and self._id is not None:
            # The kernel holds this call until the peer has answered, or for ten seconds.
            identifier, self._id = self._id, None
            self._adapter._in_background(lambda: lib.rdma_destroy_id(identifier))
        else:
            self._replace_identifier(None)
        if former == "accepting" and isinstance(queue_pair, VerbsQueuePair) and not queue_pair_untouched:
            queue_pair._end_connection()

    def begin_complete_connect(self) -> Pending[None]:
        pending: Pending[None] = Pending("complete_connect")
        with self._state_lock:
            self._expect("complete_connect", "offered")
            queue_pair = self.queue_pair
            assert isinstance(queue_pair, VerbsQueuePair)
            if not self._iwarp:
                try:
                    self._ready_queue_pair(queue_pair)
                    check_errno("complete_connect", lib.rdma_establish(self._id))
                except BaseException:
                    self._abandon()
                    queue_pair._end_connection()
                    raise
            self._move("established")
            queue_pair._begin_connection()
            if self._left_early:
                self._on_disconnected()
        pending.succeed(None)
        return pending

    def _ready_queue_pair(self, queue_pair: VerbsQueuePair) -> None:
        """INIT, ready to receive, ready to send, with what the connection manager knows of both ends."""
        assert self._read_limits is not None
        retry = self._retry
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

    def _requested(self, event: CmEvent) -> None:
        info = self._adapter.info
        self._private_data = event.private_data
        self._read_limits = ReadLimits(
            min(event.responder_resources, info.max_inbound_read_limit),
            min(event.initiator_depth, info.max_outbound_read_limit),
        )
        self._peer_shares = event.srq
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
        self._check()
        policy = self._check_policy(retry, "accept")
        mine = self._own_limits(inbound_read_limit, outbound_read_limit)
        data = limit_private_data(private_data, MAX_CALLEE_DATA, "accept")
        with self._state_lock:
            if self._state == "failed":
                raise errors.ConnectionAbortedError("the client has given up", operation="accept")
            self._expect("accept", "requested")
            self._take_queue_pair(queue_pair)
            assert isinstance(queue_pair, VerbsQueuePair)
            assert self._read_limits is not None
            self._read_limits = ReadLimits(*map(min, mine, self._read_limits))
            self._request = (data, self._read_limits)
            self._retry = policy
            pending: Pending[None] = Pending("accept", lambda: self._give_up(pending))
            self._pending = pending
            self._move("accepting")
            try:
                if not self._iwarp:
                    self._ready_queue_pair(queue_pair)
                parameters, _kept = self._parameters()
                check_errno("accept", lib.rdma_accept(self._id, parameters))
            except errors.ProviderError as error:
                self._abandon(queue_pair_untouched=self._iwarp)
                if error.native in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
                    # The kernel's words for a request whose client has gone.
                    raise errors.ConnectionAbortedError(
                        "the client has given up", operation="accept", native=error.native
                    ) from None
                raise
            except BaseException:
                self._abandon(queue_pair_untouched=self._iwarp)
                raise
        return pending

    def reject(self, private_data: bytes = b"") -> None:
        self._check()
        data = limit_private_data(private_data, MAX_CALLEE_DATA, "reject")
        with self._state_lock:
            self._expect("reject", "requested", "offered")
            offered = self._state == "offered"
            if offered and self._iwarp:
                # The MPA exchange is over when the reply arrives; only ending the connection is left.
                lib.rdma_disconnect(self._id)
                self._drop_offer()
                return
            kept = ffi.new("char[]", data) if data else ffi.NULL
            if lib.rdma_reject(self._id, kept, len(data)):
                number = ffi.errno
                self._move("failed")
                raise errors.ConnectionAbortedError("the peer has gone", operation="reject", native=number)
            if offered:
                self._drop_offer()
            else:
                self._move("failed")
                self._replace_identifier(None)

    def _drop_offer(self) -> None:
        queue_pair = self.queue_pair
        self._move("failed")
        self._release_queue_pair()
        self._replace_identifier(None)
        if self._iwarp and isinstance(queue_pair, VerbsQueuePair):
            queue_pair._end_connection()

    # ---- the end ----

    def begin_disconnect(self) -> Pending[None]:
        with self._state_lock:
            self._expect("disconnect", "established", "disconnected")
            if self._disconnect_called:
                raise errors.NotConnectedError("disconnect() was called before", operation="disconnect")
            self._disconnect_called = True
            pending: Pending[None] = Pending("disconnect")
            if self._state == "disconnected":
                pending.succeed(None)
                return pending
            self._disconnecting = pending
            number = self._disconnect_natively()
            if number:
                # It can be called again.
                self._disconnect_called, self._disconnecting = False, None
                raise errors.from_errno("disconnect", number)
        return pending

    def _disconnect_natively(self) -> int:
        queue_pair = self.queue_pair
        # iWARP sends what is queued before it closes, unless the queue pair is in the error state by then.
        if not self._iwarp and isinstance(queue_pair, VerbsQueuePair):
            queue_pair._end_connection()
        return self._tell_peer()

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

    def _on_disconnected(self) -> None:
        """The connection is over, from whichever side."""
        queue_pair = self.queue_pair
        if isinstance(queue_pair, VerbsQueuePair):
            queue_pair._end_connection()
        if self._state != "established":
            return
        self._move("disconnected")
        ended, self._watching = self._watching, []
        if self._disconnecting is not None:
            ended.append(self._disconnecting)
            self._disconnecting = None
        for pending in ended:
            pending.succeed(None)

    def _on_failed_completion(self) -> None:
        """A request failed, which ends the connection (contract F.6.1): the peer is told."""
        with self._state_lock:
            if self._state == "established" and self._id is not None:
                # If the peer cannot be told now, disconnect() says so; whoever polled gets his completions.
                self._disconnect_natively()

    def _on_queue_pair_closing(self) -> None:
        """The queue pair is being closed: the connection ends, or the attempt does."""
        with self._state_lock:
            if self._state in ("connecting", "accepting", "offered"):
                pending = self._pending
                if self._state == "offered" and not self._iwarp:
                    lib.rdma_reject(self._id, ffi.NULL, 0)
                self._abandon()
                if pending is not None:
                    pending.fail(errors.CanceledError("the queue pair was closed", operation="connect"))
            elif self._state == "established":
                self._tell_peer()
                self._on_disconnected()
            self._release_queue_pair()

    def _on_removed(self) -> None:
        error = self._removed_error()
        with self._state_lock:
            waiting = self._take_waiting()
        for pending in waiting:
            pending.fail(error)

    def _release(self) -> None:
        with self._state_lock:
            waiting = self._take_waiting()
            queue_pair = self.queue_pair
            if isinstance(queue_pair, VerbsQueuePair) and self._state in (
                "established",
                "accepting",
                "offered",
                "disconnected",
            ):
                if self._id is not None and self._state == "established":
                    self._tell_peer()
                elif self._id is not None and self._state == "offered" and not self._iwarp:
                    lib.rdma_reject(self._id, ffi.NULL, 0)
                if self._state != "offered":
                    queue_pair._end_connection()
            elif self._id is not None and self._state == "requested":
                lib.rdma_reject(self._id, ffi.NULL, 0)
            if self._state == "connecting":
                self._abandon()
            self._release_queue_pair()
            self._replace_identifier(None)
        for pending in waiting:
            pending.fail(errors.CanceledError("the connector was closed", operation=pending._operation))

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
            finished = self._handle(event)
            # Under the lock: cancel() gives the attempt up before this, or comes after its end.
            if finished is not None:
                pending, error = finished
                if error is None:
                    pending.succeed(None)
                else:
                    pending.fail(error)

    def _handle(self, event: CmEvent) -> tuple[Pending[None], errors.NdpyError | None] | None:
        kind = event.type
        if self._state == "connecting":
            return self._handle_connecting(event)
        if kind == lib.RDMA_CM_EVENT_ESTABLISHED and self._state == "accepting":
            queue_pair = self.queue_pair
            assert isinstance(queue_pair, VerbsQueuePair)
            self._move("established")
            queue_pair._begin_connection()
            pending, self._pending = self._pending, None
            return (pending, None) if pending else None
        if kind == lib.RDMA_CM_EVENT_DISCONNECTED and self._state == "established":
            # The answer to the peer's request; without it the peer waits for its retries to run out.
            lib.rdma_disconnect(self._id)
            self._on_disconnected()
        elif self._iwarp and kind in _ENDINGS and self._state == "offered":
            # The connection is up since the reply came, so the peer may have sent and left: its messages count.
            lib.rdma_disconnect(self._id)
            self._left_early = True
        elif kind in _ENDINGS and self._state in ("accepting", "offered", "requested"):
            return self._handle_loss(event)
        return None

    def _handle_connecting(self, event: CmEvent) -> tuple[Pending[None], errors.NdpyError | None] | None:
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
                return None
            if kind == lib.RDMA_CM_EVENT_ROUTE_RESOLVED:
                parameters, _kept = self._parameters()
                if lib.rdma_connect(self._id, parameters):
                    number = ffi.errno
                    if number in _NO_ANSWER:
                        raise self._unreachable(number)
                    raise errors.from_errno("connect", number)
                return None
            if kind in (lib.RDMA_CM_EVENT_CONNECT_RESPONSE, lib.RDMA_CM_EVENT_ESTABLISHED):
                self._private_data = event.private_data
                self._peer_shares = event.srq
                mine = self._request[1]
                inbound, outbound = event.responder_resources, event.initiator_depth
                if self._adapter.info.driver == "siw":
                    # It reports the reply's limits as the server sees them (siw_cm.c, siw_proc_mpareply()).
                    inbound, outbound = outbound, inbound
                self._read_limits = ReadLimits(min(mine.inbound, inbound), min(mine.outbound, outbound))
                self._move("offered")
                pending, self._pending = self._pending, None
                return (pending, None) if pending else None
            error = self._attempt_error(event)
        except errors.NdpyError as failure:
            # Without its frames, of which this one refers to it.
            error = failure.with_traceback(None)
        if error is None:
            return None
        pending, queue_pair = self._pending, self.queue_pair
        self._failed_attempt()
        if self._iwarp and kind == lib.RDMA_CM_EVENT_REJECTED and isinstance(queue_pair, VerbsQueuePair):
            # The kernel has moved it to the error state, from which iWARP knows no way back.
            queue_pair._end_connection()
        return (pending, error) if pending else None

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

    def _handle_loss(self, event: CmEvent) -> tuple[Pending[None], errors.NdpyError | None] | None:
        """The peer refused, or vanished, before the connection was established."""
        pending, queue_pair, state = self._pending, self.queue_pair, self._state
        number = abs(event.status)
        if event.type == lib.RDMA_CM_EVENT_REJECTED:
            self._private_data = event.private_data
            error: errors.NdpyError = errors.ConnectionRefusedError(
                "the client rejected the offer",
                operation="accept",
                native=number,
                native_name=None if self._iwarp else _REJECT_NAMES.get(number, ""),
            )
        elif event.type == lib.RDMA_CM_EVENT_UNREACHABLE:
            error = errors.TimeoutError("the client did not complete the connection", operation="accept", native=number)
        else:
            error = errors.ConnectionAbortedError("the client has gone", operation="accept", native=number)
        self._pending = None
        self._release_queue_pair()
        self._move("failed")
        if isinstance(queue_pair, VerbsQueuePair) and state == "accepting":
            queue_pair._end_connection()
        return (pending, error) if pending else None


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
