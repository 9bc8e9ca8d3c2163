"""The native steps of connectors over librdmacm.

All connections of an adapter report to one event channel. The adapter's thread reads it and calls the handlers here.

librdmacm does not know the queue pair, because its identifier has none. So connecting takes two steps, and ndpy moves
the queue pair through its states. On iWARP the kernel moves it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection import Connector
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy
from ndpy.objects.connection_states import Event, State
from ndpy.objects.queue_pair import QueuePair
from ndpy.platforms.verbs.addresses import bind_identifier, new_identifier, unpack_address
from ndpy.platforms.verbs.connect_call import ConnectCall
from ndpy.platforms.verbs.endpoint import finite_retry_count
from ndpy.platforms.verbs.manager import NO_IWARP, CmEvent, ManagerClient, Way, parameters_with
from ndpy.platforms.verbs.memory import native_access
from ndpy.platforms.verbs.native_calls import check_errno, ffi, lib
from ndpy.platforms.verbs.queue_pair import VerbsQueuePair
from ndpy.vocabulary.addresses import Address, listening_address
from ndpy.vocabulary.endpoint import MTUS
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

_RETRY_COUNT = 7
# How often a sender tries again when the peer has not posted a receive. It waits for the peer's timer before each try.
# All tries take 0.7 s with the timer that ndpy sets, and 4 s with the longest one (contract F.3.5).
_RNR_RETRY_COUNT = 6
_RNR_TIMER_123_MS = 27
# A request has failed, and the peer was told. If it does not answer, the connection ends here after so many seconds.
# The connection manager would ask again for 102 s (seen on Linux 6.1).
_FAREWELL_S = 2.0
# See Quirk.RXE_ANSWERS_LATE.
_LATE_ANSWERS_S = 0.2
# Bits of rdma_init_qp_attr()'s mask that kernels leave set by mistake on InfiniBand.
_ROCE_MASK_BITS = 0xE00000


class VerbsConnector(Connector, ManagerClient):
    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter, identifier: Any = None, key: int = 0) -> None:
        super().__init__(adapter)
        if key:
            self._serial = key
        self._id = identifier
        #: rdma_connect() in a thread of its own. None if there was no such call for this identifier.
        self._connect_call: ConnectCall | None = None
        #: The peer receives from a shared receive queue, so a message may wait for ever (contract F.3.6).
        self._peer_shares = False
        self._disconnect_sent = False
        #: The peer has disconnected, and the queue pair still waits for answers that the peer's adapter sent before.
        self._peer_left = False
        #: When the queue pair is flushed and when the connection ends, if the peer says nothing. Times of
        #: time.monotonic().
        self._flush_at = self._end_at = math.inf
        #: The peer left before complete_connect(), on a transport whose connection is up before that call. The peer's
        #: messages have arrived.
        self._left_early = False
        self._quirks = adapter._quirks
        self._answers_late = Quirk.RXE_ANSWERS_LATE in self._quirks
        self._up_at_the_reply = Quirk.IWARP_UP_AT_THE_REPLY in self._quirks
        self._kernel_moves_queue_pair = Quirk.IWARP_KERNEL_MOVES_QUEUE_PAIRS in self._quirks
        self._offer_spends_queue_pair = self._up_at_the_reply
        # By then the kernel has not moved the queue pair yet, but ndpy has.
        self._refused_accept_spends_queue_pair = not self._kernel_moves_queue_pair
        self._opened()

    def _native_address(self, peer: bool) -> Address | None:
        if peer and self._state in ("idle", "bound"):
            return None
        if self._id is None:
            # A failed attempt has freed the identifier. The next one is bound to the same address.
            return None if peer else self._bound_to
        return unpack_address(self._id, peer)

    def _addresses(self) -> tuple[Address, Address] | None:
        """This side's address and the peer's. None if one of them is not known."""
        with self._state_lock:
            own, peer = self._native_address(peer=False), self._native_address(peer=True)
        return (own, peer) if own is not None and peer is not None else None

    def _release_queue_pair(self) -> None:
        if isinstance(self.queue_pair, VerbsQueuePair) and not self.queue_pair._never_connected:
            self.queue_pair._former_addresses = self._addresses()
        super()._release_queue_pair()

    # ---- the active side ----

    def _native_bind(self, address: Address) -> Address:
        host, port = listening_address(self._adapter.info.addresses, address)
        identifier = new_identifier(self._adapter, self._serial)
        try:
            bind_identifier(self._adapter, identifier, (host, port))
        except BaseException:
            lib.rdma_destroy_id(identifier)
            raise
        self._replace_identifier(identifier)
        bound = unpack_address(identifier, peer=False)
        return host, bound[1] if bound else port

    def _replace_identifier(self, identifier: Any) -> None:
        former, self._id = self._id, identifier
        if former is not None and not self._give_up_call():
            lib.rdma_destroy_id(former)

    def _give_up_call(self) -> bool:
        """End rdma_connect() if it still runs in a thread. Returns whether that thread destroys the identifier."""
        call, self._connect_call = self._connect_call, None
        return call is not None and call.give_up()

    def _native_connect(self, queue_pair: QueuePair, family: int, destination: tuple[Any, ...]) -> None:
        if self._id is None:
            self._id = new_identifier(self._adapter, self._serial)
            if self._bound_to is not None:
                bind_identifier(self._adapter, self._id, self._bound_to)
        self._way.resolve_address(self._id, family, destination, is_bound=self._bound_to is not None)

    @property
    def _way(self) -> Way:
        return Way(self._adapter, self._target, "connect")

    def _native_parameters(self) -> tuple[Any, Any]:
        """The parameters of connect() or accept() as a struct rdma_conn_param, and the memory that this points to."""
        data, limits, _ = self._parameters
        queue_pair = self.queue_pair
        assert isinstance(queue_pair, VerbsQueuePair)
        parameters, kept = parameters_with(data)
        parameters.responder_resources = limits.inbound
        parameters.initiator_depth = limits.outbound
        parameters.flow_control = 1
        # How often the peer's adapter tries again. The peer's program can lower it.
        parameters.retry_count = finite_retry_count(self._adapter, _RETRY_COUNT)
        parameters.rnr_retry_count = RetryPolicy.ENDLESS
        parameters.srq = int(queue_pair.srq is not None)
        parameters.qp_num = queue_pair._number
        return parameters, kept

    def _native_forget_attempt(self) -> None:
        self._replace_identifier(None)

    def _native_abandon_attempt(self, error: errors.NdpyError) -> None:
        self._native_withdraw("connecting")
        self._try_next(error)

    def _native_withdraw(self, former: State) -> None:
        if self._id is None:
            return
        if former == "connecting" and Quirk.IWARP_DESTROY_WAITS in self._quirks:
            identifier, self._id = self._id, None
            if not self._give_up_call():
                self._adapter._in_background(lambda: lib.rdma_destroy_id(identifier))
            return
        if former == "requested" or (former in ("offered", "completing") and not self._up_at_the_reply):
            lib.rdma_reject(self._id, ffi.NULL, 0)
        self._replace_identifier(None)

    def _native_complete(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair, VerbsQueuePair)
        if not self._up_at_the_reply:
            self._make_queue_pair_ready(queue_pair)
            check_errno("complete_connect", lib.rdma_establish(self._id))
        self._on_established()

    def _native_established(self) -> None:
        if self._left_early:
            self._on_disconnected()

    def _make_queue_pair_ready(self, queue_pair: VerbsQueuePair) -> None:
        """Move it to INIT, then ready to receive, then ready to send, with the values that both peers agreed on."""
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
                attributes.qp_access_flags = native_access(queue_pair._access(), False)
            elif state == lib.IBV_QPS_RTR:
                queue_pair._path_mtu = MTUS[attributes.path_mtu - 1]
                attributes.max_dest_rd_atomic = self._read_limits.inbound
                attributes.min_rnr_timer = _RNR_TIMER_123_MS if retry.min_rnr_timer is None else retry.min_rnr_timer
            else:
                attributes.max_rd_atomic = self._read_limits.outbound
                if retry.retry_count is not None:
                    attributes.retry_cnt = retry.retry_count
                attributes.retry_cnt = finite_retry_count(self._adapter, attributes.retry_cnt)
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
        """The connector was made for the client's request in this event."""
        self._peer_shares = event.srq
        self._on_requested(event.private_data, ReadLimits(event.responder_resources, event.initiator_depth))

    def _native_accept(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair, VerbsQueuePair)
        try:
            if not self._kernel_moves_queue_pair:
                self._make_queue_pair_ready(queue_pair)
            parameters, _kept = self._native_parameters()
            check_errno("accept", lib.rdma_accept(self._id, parameters))
        except errors.ProviderError as error:
            if error.native in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
                # With these errnos the kernel says that the client has gone.
                raise errors.ConnectionAbortedError(
                    self._at_its_address("the client has given up"), operation="accept", native=error.native
                ) from None
            raise

    def _native_reject(self, private_data: bytes) -> None:
        if self._state == "offered" and self._up_at_the_reply:
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
        self._flush_soon()
        number = self._tell_peer()
        if number:
            raise errors.from_errno("disconnect", number)

    def _flush_soon(self) -> None:
        """Flush now. If the adapter may have answers to send, flush when the peer is heard from, or soon after all."""
        if not self._answers_late:
            self._flush_unless_the_queue_is_sent()
            return
        # When the peer is heard from, the adapter has sent its answers.
        self._flush_at = min(self._flush_at, time.monotonic() + _LATE_ANSWERS_S)
        self._look_at_the_clock()

    def _native_on_failed_completion(self) -> None:
        if self._peer_left:
            self._on_disconnected()
            return
        # The failure may be one of a receive, and the peer has yet to hear of it.
        self._flush_soon()
        # If this fails now, disconnect() reports it. The thread that polled gets the completions.
        if not self._tell_peer() and self._state == "established":
            self._end_at = min(self._end_at, time.monotonic() + _FAREWELL_S)
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        self._adapter._events.look_regularly(self._on_time)

    def _on_time(self) -> bool:
        """Flush the queue pair and end the connection when it is time. Returns whether there is more to wait for."""
        with self._state_lock:
            if self._state != "established" or self._id is None or self.closed:
                return False
            now = time.monotonic()
            late = now >= self._flush_at
            if now >= self._end_at or (self._peer_left and (late or not self._awaits_answers())):
                self._on_disconnected()
                return False
            if late:
                self._flush_at = math.inf
                if self.queue_pair is not None:
                    self.queue_pair._end_connection()
            return min(self._flush_at, self._end_at) < math.inf

    def _awaits_answers(self) -> bool:
        if self.queue_pair is not None:
            # A queue that has failed has no answers.
            with contextlib.suppress(errors.NdpyError):
                return self.queue_pair._awaits_answers()
        return False

    def _flush_unless_the_queue_is_sent(self) -> None:
        """Flush the queue pair, unless this transport sends the queue before it disconnects.

        It cannot send from a queue pair in the error state.
        """
        if Quirk.IWARP_DISCONNECT_SENDS_THE_QUEUE not in self._quirks and self.queue_pair is not None:
            self.queue_pair._end_connection()

    def _native_tell_peer(self) -> None:
        self._tell_peer()

    def _tell_peer(self) -> int:
        """Tell the peer once that the connection is over. Returns 0, or the errno of a failure."""
        if self._disconnect_sent:
            return 0
        self._disconnect_sent = True
        if not self._port_is_active():
            # See Quirk.RXE_CLOSED_PORT_ENDS_MANAGER.
            self._adapter._tell_when_port_is_active(self)
            self._on_disconnected()
        elif lib.rdma_disconnect(self._id):
            number = int(ffi.errno)
            if number not in (errno.EINVAL, errno.ENOTCONN):
                self._disconnect_sent = False
                return number
            self._on_disconnected()
        return 0

    def _port_is_active(self) -> bool:
        """Whether the port of this connection is. Its number is 0 in a library that does not tell it."""
        return self._id is None or self._adapter._state_of_port(self._id.port_num) == "active"

    def _on_port_active(self) -> bool:
        """Tell the peer, if the port is back. Returns False if it is not, so that this has to be called again."""
        with self._state_lock:
            if not self._port_is_active():
                return False
            if self._id is not None:
                lib.rdma_disconnect(self._id)
        return True

    def _native_free(self) -> None:
        self._replace_identifier(None)

    # ---- events ----

    def _on_first_message(self) -> None:
        """A message came before the event that says that the connection is up. So the connection is up."""
        with self._state_lock:
            if self._id is not None:
                lib.rdma_notify(self._id, lib.IBV_EVENT_COMM_EST)

    def _on_event(self, event: CmEvent) -> None:
        with self._state_lock:
            if self._id is None or self.closed:
                return
            self._handle(event)

    def _handle(self, event: CmEvent) -> None:
        kind = event.type
        if self._state == "connecting":
            self._handle_connecting(event)
        elif kind == lib.RDMA_CM_EVENT_ESTABLISHED:
            self._on_established()
        elif kind == lib.RDMA_CM_EVENT_DISCONNECTED and self._state == "established":
            # Answer the peer's request. Without this the peer waits until its retries have run out.
            lib.rdma_disconnect(self._id)
            if self._answers_late and not self._disconnect_sent and self._awaits_answers():
                self._disconnect_sent = self._peer_left = True
                self._flush_at = time.monotonic() + _LATE_ANSWERS_S
                self._look_at_the_clock()
            else:
                self._on_disconnected()
        elif self._up_at_the_reply and kind in _ENDINGS and self._state == "offered":
            # The peer may have sent messages before it left. They count, so complete_connect() will succeed.
            lib.rdma_disconnect(self._id)
            self._left_early = True
        elif kind in _ENDINGS and self._has_transition(Event.LOST):
            self._on_lost(self._loss(event))

    def _handle_connecting(self, event: CmEvent) -> None:
        kind = event.type
        error: errors.NdpyError | None
        try:
            if kind == lib.RDMA_CM_EVENT_ADDR_RESOLVED:
                self._way.resolve_route(self._id)
                return
            if kind == lib.RDMA_CM_EVENT_ROUTE_RESOLVED:
                parameters, kept = self._native_parameters()
                if Quirk.SIW_CONNECT_BLOCKS in self._quirks:
                    self._connect_call = ConnectCall(
                        self._id, parameters, kept, self._state_lock, self._on_connect_call_failed
                    )
                    self._adapter._in_background(self._connect_call.run)
                elif lib.rdma_connect(self._id, parameters):
                    raise self._connect_error(ffi.errno)
                return
            if kind in (lib.RDMA_CM_EVENT_CONNECT_RESPONSE, lib.RDMA_CM_EVENT_ESTABLISHED):
                self._peer_shares = event.srq
                limits = ReadLimits(event.responder_resources, event.initiator_depth)
                if Quirk.SIW_SWAPS_READ_LIMITS in self._quirks:
                    limits = ReadLimits(limits.outbound, limits.inbound)
                self._on_offered(event.private_data, limits)
                return
            error = self._attempt_error(event)
        except errors.NdpyError as failure:
            # Drop the traceback: its frames refer to the error.
            error = failure.with_traceback(None)
        if error is not None:
            spends = Quirk.IWARP_ATTEMPT_USES_QUEUE_PAIR_UP in self._quirks
            self._on_connect_failed(error, spent=spends and kind == lib.RDMA_CM_EVENT_REJECTED)

    def _on_connect_call_failed(self, number: int) -> None:
        """rdma_connect() has failed in its thread, with this errno."""
        self._on_connect_failed(self._connect_error(number))

    def _connect_error(self, number: int) -> errors.NdpyError:
        """The error for an rdma_connect() that failed with this errno."""
        if number in _NO_ANSWER:
            return self._way.unreachable(number)
        return errors.from_errno("connect", number, f"{self._target} cannot be reached")

    def _attempt_error(self, event: CmEvent) -> errors.NdpyError | None:
        """The error that the event reports. None if the event does not end the attempt."""
        kind, status = event.type, event.status
        number = -status if status < 0 else status
        if kind == lib.RDMA_CM_EVENT_REJECTED:
            self._private_data = event.private_data
            why, problem = "the listener rejected the request", "rejected"
            if number == (errno.ECONNREFUSED if self._refusals_are_errnos else _REJECT_NO_LISTENER):
                why, problem = "nobody listens there", "refused"
            elif not self._refusals_are_errnos and number == _REJECT_OTHER_TRANSPORT:
                why, problem = NO_IWARP, "manager-rejected"
            elif not self._refusals_are_errnos and number != _REJECT_CONSUMER:
                why = f"the peer's connection manager rejected the request with reason {number}"
                problem = "manager-rejected"
            return self._refusal(f"{self._target}: {why}", "connect", number, problem)
        if kind == lib.RDMA_CM_EVENT_UNREACHABLE:
            return self._way.unreachable(number)
        if kind in (lib.RDMA_CM_EVENT_CONNECT_ERROR, lib.RDMA_CM_EVENT_DISCONNECTED):
            if number in (errno.ECONNREFUSED, *errors.SHORTAGES, errno.EPERM):
                return self._way.unreachable(number)
            return errors.ConnectionAbortedError(
                f"the connection to {self._target} broke while it was made",
                operation="connect",
                native=number,
                problem="connect-error",
            )
        return self._way.resolution_error(event)

    @property
    def _refusals_are_errnos(self) -> bool:
        return Quirk.IWARP_REFUSALS_ARE_ERRNOS in self._quirks

    def _refusal(self, message: str, operation: str, number: int, problem: str = "rejected") -> errors.NdpyError:
        name = None if self._refusals_are_errnos else _REJECT_NAMES.get(number, "")
        return errors.ConnectionRefusedError(
            message, operation=operation, native=number, native_name=name, problem=problem
        )

    def _loss(self, event: CmEvent) -> errors.NdpyError:
        """The error for a peer that refused or vanished before the connection was established."""
        number = abs(event.status)
        if event.type == lib.RDMA_CM_EVENT_REJECTED:
            self._private_data = event.private_data
            return self._refusal(self._at_its_address("the client rejected the offer"), "accept", number)
        if event.type == lib.RDMA_CM_EVENT_UNREACHABLE:
            message = self._at_its_address("the client did not complete the connection")
            return errors.TimeoutError(message, operation="accept", native=number)
        message = self._at_its_address("the client has gone")
        return errors.ConnectionAbortedError(message, operation="accept", native=number)


# Errnos of rdma_connect() on iWARP. There the kernel opens a TCP connection, and may know at once that nobody answers.
_NO_ANSWER = (
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
    errno.EAGAIN,
)

_REJECT_NO_LISTENER = 8
_REJECT_OTHER_TRANSPORT = 9
_REJECT_CONSUMER = 28
# Reasons of the InfiniBand connection manager, as the architecture's specification names them (volume 1, 12.6.7.2).
_REJECT_NAMES = {
    3: "no resources",
    4: "timeout",
    8: "invalid service ID",
    9: "invalid transport service type",
    10: "stale connection",
    28: "consumer reject",
}

_ENDINGS = (
    lib.RDMA_CM_EVENT_REJECTED,
    lib.RDMA_CM_EVENT_UNREACHABLE,
    lib.RDMA_CM_EVENT_CONNECT_ERROR,
    lib.RDMA_CM_EVENT_DISCONNECTED,
)
