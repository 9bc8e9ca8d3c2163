"""Connectors: the two ends of a connection, from the first request to the end.

The table in connection_states.py drives a connector. Every call of the program is an Event, and so is everything that
the adapter reports. _move() looks up the state and the event in the table, and sets the next state. The method that
passes an event does the rest. A platform supplies the native steps, and reports back through the _on_… methods.

All of it happens under the state lock. So a call finds the connector either before an event or after it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection_parameters import (
    ConnectionParameters,
    ReadLimits,
    RetryPolicy,
    cap_read_limits,
    check_private_data,
    lower_limits,
)
from ndpy.objects.connection_states import CALLS, TRANSITIONS, Event, State
from ndpy.objects.native_steps import ConnectorSteps
from ndpy.objects.pending import Pending, wait_or_cancel
from ndpy.objects.resource import Resource
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.addresses import Address, check_address, is_numeric, numeric_host, resolve_destinations
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.queue_pair import QueuePair

# In these states there is a connection, or one is being made.
_ACTIVE = ("connecting", "offered", "completing", "accepting", "established")
# In these states messages may have come, so the queue pair can serve no other connection.
_SPENDS_QUEUE_PAIR = ("completing", "accepting", "established", "disconnected")


class Connector(Resource, ConnectorSteps):
    """One end of a connection. Adapter.create_connector() makes the client's, and Listener.get_request() the server's.

    A client calls connect(), and then complete_connect() to take the server's offer or reject() to refuse it. In
    between it can read the server's private data. If it needs a certain local address, it calls bind() first. A server
    calls accept() or reject().

    These are the states and the calls that each one allows. Every state allows close().
        idle: bind(), connect().
        bound: bind(), connect(). The local address is chosen.
        connecting: nothing until the server answers.
        offered: complete_connect(), reject(). The server accepted.
        completing: reject(). The offer is being taken.
        requested: accept(), reject(). A client asks.
        accepting: nothing until the client completes the connection.
        established: disconnect(), wait_disconnected().
        disconnected: disconnect(), wait_disconnected().
        failed: nothing.
    If a connect() failed and may be tried again, the state is idle or bound afterwards. Otherwise it is failed.

    Source: IND2Connector (contract section H); rdma_cm(7).
    """

    _release_order = 10

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._state: State = "idle"
        self._state_lock = threading.RLock()
        self.queue_pair: QueuePair | None = None
        #: The peer's private data and read limits.
        self._private_data: bytes | None = None
        self._read_limits: ReadLimits | None = None
        #: Whether the server has accepted the last connect().
        self._was_offered = False
        #: The parameters of the last connect() or accept().
        self._parameters = ConnectionParameters()
        #: The address that connect() goes to, for error messages.
        self._target = ""
        #: The name that connect() was given, its addresses that were not tried yet, and how many were.
        self._host = ""
        self._rest: list[tuple[int, tuple[Any, ...]]] = []
        self._tried = 0
        #: The time.monotonic() by which connect() has to end, or None.
        self._end: float | None = None
        #: The address of bind(). It holds for every attempt.
        self._bound_to: Address | None = None
        #: The connect, complete_connect or accept that has not ended.
        self._pending: Pending[None] | None = None
        self._pending_disconnect: Pending[None] | None = None
        #: The calls of wait_disconnected() that have not ended.
        self._watching: list[Pending[None]] = []
        self._disconnect_called = False
        #: The calls that close() ends. After Ctrl-C the next close() ends the rest.
        self._ending: list[Pending[None]] = []

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @property
    def state(self) -> State:
        """The present state: one of the words that the class lists."""
        return self._state

    @property
    def private_data(self) -> bytes:
        """The bytes that the peer sent with its connect, accept or reject. b"" if it sent none.

        InfiniBand and RoCE pad it with zero bytes.

        Raises:
            NotConnectedError: the peer has sent nothing yet (contract H.7.1).
        """
        self._check()
        if self._private_data is None:
            raise errors.NotConnectedError("the peer has sent nothing yet", operation="private_data")
        return self._private_data

    @property
    def read_limits(self) -> ReadLimits:
        """The limits that the peer asks for and offers, capped by this adapter. Once connected, the limits that hold.

        Raises:
            NotConnectedError: the peer has not sent its limits yet (contract H.7.5, H.7.6).
        """
        self._check()
        if self._read_limits is None:
            raise errors.NotConnectedError("the peer has not sent its read limits yet", operation="read_limits")
        return self._read_limits

    @property
    def local_address(self) -> Address:
        """This side's address and port.

        Raises:
            NotConnectedError: there is no local address yet.
        """
        return self._address("local")

    @property
    def peer_address(self) -> Address:
        """The other side's address and port.

        Raises:
            NotConnectedError: there is no peer yet.
        """
        return self._address("peer")

    def _address(self, which: str) -> Address:
        self._check()
        with self._state_lock:
            self._check()
            address = self._native_address(which == "peer")
        if address is None:
            raise errors.NotConnectedError(f"there is no {which} address yet", operation=f"{which}_address")
        return address

    def _at_its_address(self, message: str) -> str:
        """A message about the peer, with its address if that is known."""
        with contextlib.suppress(errors.NdpyError, OSError):
            address = self._native_address(peer=True)
            if address is not None:
                return f"{message}; it was {address[0]} port {address[1]}"
        return message

    # ---- the table ----

    def _has_transition(self, event: Event) -> bool:
        return (self._state, event) in TRANSITIONS

    def _require_transition(self, event: Event) -> None:
        """Raise unless the program can make this call in this state. Calls come here before they change anything."""
        self._check()
        if self._has_transition(event):
            return
        if event is Event.ACCEPT and self._state == "failed":
            raise errors.ConnectionAbortedError(self._at_its_address("the client has given up"), operation=event.value)
        if event is Event.COMPLETE_CONNECT and self._state == "failed" and self._was_offered:
            raise errors.ConnectionAbortedError("the server has taken its offer back", operation=event.value)
        active = self._state in _ACTIVE and event in (Event.BIND, Event.CONNECT, Event.ACCEPT)
        kind = errors.ConnectionActiveError if active else errors.NotConnectedError
        possible = [f"{call.value}()" for call in CALLS if self._has_transition(call)]
        raise kind(f"the connector is {self._state} and takes only {' or '.join(possible)}", operation=event.value)

    def _move(self, event: Event) -> bool:
        """Go to the next state. Returns False if the table has no row for this state and event."""
        if not self._has_transition(event):
            return False
        self._state = TRANSITIONS[self._state, event]
        return True

    # ---- the active side ----

    def bind(self, address: Address) -> None:
        """Choose the local address for connect().

        Parameters:
            address: (host, port). The system chooses a port for 0.
        Raises:
            AddressInUseError: another socket or connector has this address.
            AddressUnreachableError: this adapter does not have this address.
            ConnectionActiveError, NotConnectedError: the connector's state does not allow this.
        Source: IND2Connector::Bind (contract H.2); rdma_bind_addr(3).
        """
        with self._state_lock:
            self._require_transition(Event.BIND)
            self._bound_to = self._native_bind(address)
            self._move(Event.BIND)

    def connect(
        self,
        queue_pair: QueuePair,
        address: Address,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Ask the listener at `address` for a connection, and wait until it accepts. Call complete_connect() next.

        After a failure the queue pair is as it was before, with its posted receives.

        Parameters:
            queue_pair: one that was never connected.
            address: (host, port) of the listener.
            private_data: up to info.max_caller_data bytes for the server.
            inbound_read_limit, outbound_read_limit: how many reads the peer and this side may have outstanding. None
                asks for the adapter's limit. The adapter's limit replaces a larger number.
            retry: see RetryPolicy.
            timeout_s: how long all of it may take. None waits for ever. The addresses of a name are tried in turn, and one that
                does not answer gets an equal share of the time that is left.
        Raises:
            ConnectionRefusedError: nobody listens there, or the server rejected the request. private_data says why.
            TimeoutError: there was no answer in time.
            AddressUnreachableError: there is no way from this adapter to the address.
            LimitExceededError: there is too much private data.
            ValueError: a read limit is negative or not a number.
            ConnectionActiveError, NotConnectedError: the state of the connector or queue pair does not allow this.
            UnsupportedError: `retry` was given, but info.capabilities lacks RETRY_POLICY.
        Source: IND2Connector::Connect (contract H.4); rdma_connect(3).
        """
        timeout_s = timeout(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pending = self._begin_connect(
            queue_pair, address, private_data, inbound_read_limit, outbound_read_limit, retry, end
        )
        try:
            wait_or_cancel(pending, timeout_s)
        except errors.TimeoutError as error:
            raise self._no_answer(error, timeout_s) from None

    def _no_answer(self, error: errors.TimeoutError, timeout_s: float | None) -> errors.TimeoutError:
        """What a connect() raises that ended with this error. Not called under the state lock."""
        return error if error.native or timeout_s is None else self._native_no_answer(self._target, timeout_s)

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
        """Start connect().

        Parameters:
            queue_pair, address, private_data, inbound_read_limit, outbound_read_limit, retry: see connect().
        Returns: a Pending that ends when the server has accepted. Cancelling it gives up the attempt.
        Raises: what connect() raises, if that is known at once. A later error ends the Pending. So does a name that cannot be
            resolved, because names are looked up in a thread.
        """
        return self._begin_connect(
            queue_pair, address, private_data, inbound_read_limit, outbound_read_limit, retry, None
        )

    def _begin_connect(
        self,
        queue_pair: QueuePair,
        address: Address,
        private_data: bytes,
        inbound_read_limit: int | None,
        outbound_read_limit: int | None,
        retry: RetryPolicy | None,
        end: float | None,
    ) -> Pending[None]:
        """Do begin_connect(). end: the time.monotonic() by which all of it has to end. Several addresses share the time."""
        max_length = self._adapter.info.max_caller_data
        parameters = self._check_parameters(
            "connect", private_data, max_length, inbound_read_limit, outbound_read_limit, retry
        )
        host, port = check_address(address)
        known = resolve_destinations(host, port)[0] if not port or is_numeric(host) else None
        with self._state_lock:
            self._require_transition(Event.CONNECT)
            self._take_queue_pair(queue_pair)
            self._parameters = parameters
            self._target = f"{host} port {port}"
            self._rest, self._tried, self._end = [], 0, end
            self._private_data = self._read_limits = None
            self._was_offered = False
            pending = self._begin_pending("connect")
            self._move(Event.CONNECT)
            try:
                if known is not None:
                    self._native_connect(queue_pair, *known)
                else:
                    look_up = threading.Thread(
                        target=_look_up, args=(weakref.ref(self), pending, host, port), name="ndpy-resolve", daemon=True
                    )
                    look_up.start()
            except BaseException as error:
                # After Ctrl-C the provider may be connecting.
                self._end_attempt(self._refused if isinstance(error, Exception) else Event.WITHDRAWN)
                raise
        return pending

    def _on_resolved(self, host: str, found: list[tuple[int, tuple[Any, ...]]], error: errors.NdpyError | None) -> None:
        """These are the addresses of the name. Called under the state lock."""
        self._host, self._rest = host, found
        self._try_next(error)

    def _try_next(self, error: errors.NdpyError | None) -> None:
        """Connect to the next address of the name. If there is none, connect() has failed with this error."""
        queue_pair = self.queue_pair
        assert queue_pair is not None
        while self._rest:
            family, resolved = self._rest.pop(0)
            self._tried += 1
            self._target = f"{self._host} ({numeric_host(resolved)}) port {resolved[1]}"
            try:
                self._native_connect(queue_pair, family, resolved)
            except errors.NdpyError as failure:
                # Drop the traceback: its frames refer to the error.
                error = failure.with_traceback(None)
                self._native_forget_attempt()
            else:
                self._watch_silence()
                return
        assert error is not None
        self._end_connect(self._refused, error)

    def _watch_silence(self) -> None:
        """Give an address that does not answer its share of the time that is left."""
        if self._rest and self._end is not None:
            share_s = max(0.0, self._end - time.monotonic()) / (len(self._rest) + 1)
            timer = threading.Timer(share_s, _on_silence, (weakref.ref(self), self._pending, self._tried, share_s))
            timer.daemon = True
            timer.start()

    @property
    def _refused(self) -> Event:
        return Event.REFUSED if self._bound_to is None else Event.REFUSED_WHEN_BOUND

    def _on_offered(self, private_data: bytes, limits: ReadLimits) -> None:
        """The server has accepted, with these limits."""
        if self._move(Event.OFFERED):
            self._was_offered = True
            self._private_data = private_data
            self._read_limits = lower_limits(self._parameters.read_limits, limits)
            self._succeed_pending()

    def _on_connect_failed(self, error: errors.NdpyError, *, again: bool = True, spent: bool = False) -> None:
        """connect() has failed.

        Parameters:
            again: connector and queue pair can try again (contract H.4.2).
            spent: the adapter has put the queue pair into a connection, so it can serve no other one.
        """
        if self._tried and again and not spent and self._state == "connecting":
            self._native_forget_attempt()
            self._try_next(error)
            return
        self._end_connect(self._refused if again else Event.LOST, error, spent=spent)

    def _end_connect(self, event: Event, error: errors.NdpyError, *, spent: bool | None = None) -> None:
        """connect() has failed with this error. event, spent: as for _end_attempt()."""
        if self._tried > 1 and not self._rest and isinstance(error, errors.ProviderError):
            error.message += f" (all {self._tried} addresses of {self._host} were tried)"
        pending = self._end_attempt(event, spent=spent)
        if pending is not None:
            pending.fail(error)

    def complete_connect(self, timeout_s: float | None = None) -> None:
        """Take the server's offer. The queue pair is connected when this returns.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            NotConnectedError: there is no offer, or this was called before.
            ConnectionAbortedError: the server has gone.
            TimeoutError: timeout_s has passed. The connection may still be established later.
        Source: IND2Connector::CompleteConnect (contract H.5); rdma_establish(3).
        """
        timeout_s = timeout(timeout_s)
        wait_or_cancel(self.begin_complete_connect(), timeout_s)

    def begin_complete_connect(self) -> Pending[None]:
        """Start complete_connect().

        Returns: a Pending that ends when the queue pair is connected. Cancelling it ends the wait, but not the step.
        """
        with self._state_lock:
            self._require_transition(Event.COMPLETE_CONNECT)
            pending = self._begin_pending("complete_connect")
            self._move(Event.COMPLETE_CONNECT)
            try:
                assert self.queue_pair is not None
                self.queue_pair._expect_message()
                self._native_complete(self.queue_pair)
            except BaseException:
                self._end_attempt(Event.WITHDRAWN)
                raise
        return pending

    # ---- the passive side ----

    def _on_requested(self, private_data: bytes, limits: ReadLimits) -> None:
        """A client asks for a connection, with these limits."""
        if self._move(Event.REQUESTED):
            self._private_data = private_data
            self._read_limits = cap_read_limits(self._adapter.info, *limits)

    def accept(
        self,
        queue_pair: QueuePair,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Accept the client's request, and wait until the client has completed the connection.

        Post receives before this call, because messages may come before it returns. Once the completion of the first one is taken,
        the queue pair can send too.

        Parameters:
            queue_pair: one that was never connected.
            private_data: up to info.max_callee_data bytes for the client.
            inbound_read_limit, outbound_read_limit, retry, timeout_s: as for connect().
        Raises:
            ConnectionRefusedError: the client rejected the offer.
            ConnectionAbortedError: the client has gone.
            LimitExceededError: there is too much private data. The request can still be accepted.
            TimeoutError: the client did not complete the connection in time.
            ConnectionActiveError, NotConnectedError: there is no request to accept.
        Source: IND2Connector::Accept (contract H.5); rdma_accept(3).
        """
        timeout_s = timeout(timeout_s)
        pending = self.begin_accept(
            queue_pair,
            private_data=private_data,
            inbound_read_limit=inbound_read_limit,
            outbound_read_limit=outbound_read_limit,
            retry=retry,
        )
        wait_or_cancel(pending, timeout_s)

    def begin_accept(
        self,
        queue_pair: QueuePair,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Pending[None]:
        """Start accept().

        Parameters:
            queue_pair, private_data, inbound_read_limit, outbound_read_limit, retry: see accept().
        Returns: a Pending that ends when the client has completed the connection. Cancelling it ends the attempt.
        Raises: what accept() raises, if that is known at once. A later error ends the Pending.
        """
        max_length = self._adapter.info.max_callee_data
        parameters = self._check_parameters(
            "accept", private_data, max_length, inbound_read_limit, outbound_read_limit, retry
        )
        with self._state_lock:
            self._require_transition(Event.ACCEPT)
            self._take_queue_pair(queue_pair)
            assert self._read_limits is not None
            self._read_limits = lower_limits(parameters.read_limits, self._read_limits)
            self._parameters = parameters._replace(read_limits=self._read_limits)
            pending = self._begin_pending("accept")
            self._move(Event.ACCEPT)
            queue_pair._expect_message()
            try:
                self._native_accept(queue_pair)
            except BaseException:
                self._end_attempt(Event.WITHDRAWN, spent=self._refused_accept_spends_queue_pair)
                raise
        return pending

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the client's request. As a client, refuse the server's offer.

        Parameters:
            private_data: up to info.max_callee_data bytes for the peer.
        Raises:
            NotConnectedError: there is neither a request nor an offer.
            LimitExceededError: there is too much private data. Nothing was rejected.
        Source: IND2Connector::Reject (contract H.6); rdma_reject(3).
        """
        self._check()
        data = check_private_data(private_data, self._adapter.info.max_callee_data, "reject")
        with self._state_lock:
            self._require_transition(Event.REJECT)
            try:
                self._native_reject(data)
            finally:
                pending = self._end_attempt(Event.REJECT)
                if pending is not None:
                    pending.fail(errors.CanceledError("the offer was rejected", operation=pending._operation))

    # ---- from an attempt to a connection, or back ----

    def _on_established(self) -> None:
        """Both sides have agreed."""
        if self._move(Event.ESTABLISHED):
            assert self.queue_pair is not None
            self.queue_pair._begin_connection()
            self._native_established()
            self._succeed_pending()

    def _on_message(self, queue_pair: QueuePair) -> None:
        """A message of the peer proves the connection. Requests can be posted, though accept() may not have returned yet."""
        with self._state_lock:
            if self.queue_pair is queue_pair and self._state in ("accepting", "completing"):
                queue_pair._begin_connection()

    def _on_lost(self, error: errors.NdpyError) -> None:
        """The peer refused or vanished before the connection was established."""
        pending = self._end_attempt(Event.LOST)
        if pending is not None:
            pending.fail(error)

    def _end_attempt(self, event: Event, *, spent: bool | None = None) -> Pending[None] | None:
        """Pass an event that ends the attempt or the connection. Let go of the queue pair and of native resources.

        Parameters:
            spent: whether the queue pair can serve no other connection. None leaves that to the state.
        Returns: the call that had not ended, or None. The caller ends it.
        """
        former, queue_pair = self._state, self.queue_pair
        if not self._move(event):
            return None
        pending, self._pending = self._pending, None
        self._rest = []
        self._release_queue_pair()
        if event in (Event.WITHDRAWN, Event.CLOSE):
            if former in ("connecting", "offered", "completing", "requested", "accepting"):
                self._native_withdraw(former)
        elif former == "connecting" or event is Event.REJECT:
            self._native_forget_attempt()
        if spent is None:
            spent = former in _SPENDS_QUEUE_PAIR or (former == "offered" and self._offer_spends_queue_pair)
        if spent and queue_pair is not None:
            queue_pair._end_connection()
        return pending

    def _begin_pending(self, operation: str) -> Pending[None]:
        pending: Pending[None] = self._adapter._pending_type(operation, lambda: self._cancel(pending))
        self._pending = pending
        return pending

    def _succeed_pending(self) -> None:
        """End connect, complete_connect or accept. cancel() needs the state lock too, so it comes before or after."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.succeed(None)

    def _cancel(self, pending: Pending[None]) -> None:
        """The program cancels a connect or an accept. A complete_connect goes on."""
        with self._state_lock:
            if self._pending is pending and self._state != "completing":
                self._end_attempt(Event.WITHDRAWN)

    # ---- the connection ----

    def disconnect(self, timeout_s: float | None = None) -> None:
        """End the connection, and wait until the peer knows. All outstanding requests complete CANCELED.

        This also succeeds if the peer disconnected first. On rxe the requests are cancelled when the peer has answered, or
        0.2 s later. Until then its adapter acknowledges what it has received.

        If the peer's host has died, the connection manager asks again for up to 102 s (Linux 6.1). If a request has failed
        before, this takes at most 2 s.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            NotConnectedError: there never was a connection, or this was called before.
            TimeoutError: timeout_s has passed. The connection ends anyway.
        Source: IND2Connector::Disconnect (contract H.8); rdma_disconnect(3).
        """
        timeout_s = timeout(timeout_s)
        self.begin_disconnect().result(timeout_s)

    def begin_disconnect(self) -> Pending[None]:
        """Start disconnect().

        Returns: a Pending that ends when the peer knows. Cancelling it ends only the wait. The connection ends anyway.
        """
        with self._state_lock:
            self._require_transition(Event.DISCONNECT)
            if self._disconnect_called:
                raise errors.NotConnectedError("disconnect() was called before", operation="disconnect")
            self._disconnect_called = True
            pending: Pending[None] = self._adapter._pending_type("disconnect")
            self._pending_disconnect = pending
            self._move(Event.DISCONNECT)
            try:
                self._native_disconnect()
            except BaseException:
                # disconnect() can be called again.
                self._disconnect_called, self._pending_disconnect = False, None
                raise
        return pending

    def _on_disconnected(self, *, told: bool = True) -> None:
        """The connection is over, whichever side ended it. told: the peer knows, so disconnect() has ended."""
        if not self._has_transition(Event.ENDED):
            return
        if self.queue_pair is not None:
            self.queue_pair._end_connection()
        self._move(Event.ENDED)
        ended, self._watching = self._watching, []
        if told and self._pending_disconnect is not None:
            ended.append(self._pending_disconnect)
            self._pending_disconnect = None
        for pending in ended:
            pending.succeed(None)

    def _on_failed_completion(self) -> None:
        """A request failed, which ends the connection (contract F.6.1)."""
        with self._state_lock:
            if self._state == "established":
                self._native_on_failed_completion()

    def _on_queue_pair_closing(self) -> None:
        """The queue pair is being closed. This ends the connection, or the attempt."""
        with self._state_lock:
            pending = self._pending
            if self._state == "established":
                self._native_tell_peer()
                self._on_disconnected()
            else:
                self._end_attempt(Event.WITHDRAWN)
            self._release_queue_pair()
        if pending is not None:
            pending.fail(errors.CanceledError("the queue pair was closed", operation=pending._operation))

    def wait_disconnected(self, timeout_s: float | None = None) -> None:
        """Wait until the connection has ended, whichever side ends it.

        If the peer's host dies, it cannot say so. Then the connection ends at most 2 s after a request of this side has
        failed (see QueuePair.retry) and the program has taken its completion.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            NotConnectedError: there never was a connection.
            TimeoutError: timeout_s has passed, and the connection still exists.
        """
        timeout_s = timeout(timeout_s)
        wait_or_cancel(self.begin_wait_disconnected(), timeout_s)

    def begin_wait_disconnected(self) -> Pending[None]:
        """Start wait_disconnected().

        Returns: a Pending that ends when the connection has ended.
        Source: IND2Connector::NotifyDisconnect (contract H.8).
        """
        with self._state_lock:
            self._require_transition(Event.WAIT_DISCONNECTED)
            pending = self._adapter._pending_type("wait_disconnected", lambda: self._stop_watching(pending))
            self._move(Event.WAIT_DISCONNECTED)
            if self._state == "disconnected":
                pending.succeed(None)
            else:
                self._watching.append(pending)
        return pending

    def _stop_watching(self, pending: Pending[None]) -> None:
        with self._state_lock, contextlib.suppress(ValueError):
            self._watching.remove(pending)

    # ---- the queue pair and the parameters ----

    def _take_queue_pair(self, queue_pair: QueuePair) -> None:
        self._require_same_device(queue_pair, "the queue pair")
        with queue_pair._lock:
            queue_pair._check()
            if queue_pair.type is not QueuePairType.RC:
                raise errors.UnsupportedError(
                    f"a connector connects queue pairs of type RC, not {queue_pair.type.name}; use connect_endpoint()",
                    operation="connect",
                )
            if queue_pair.connector is not None or not queue_pair._never_connected or queue_pair._ended:
                raise errors.ConnectionActiveError(
                    "the queue pair is or was connected; a queue pair has one connection in its life",
                    operation="connect",
                )
            # Both at once: after Ctrl-C here, closing the connector lets the queue pair go.
            queue_pair.connector, self.queue_pair = self, queue_pair

    def _release_queue_pair(self) -> None:
        if self.queue_pair is not None:
            self.queue_pair.connector = None
            self.queue_pair = None

    def _check_parameters(
        self,
        operation: str,
        private_data: bytes,
        max_length: int,
        inbound_read_limit: int | None,
        outbound_read_limit: int | None,
        retry: RetryPolicy | None,
    ) -> ConnectionParameters:
        self._check()
        if retry is not None:
            self._adapter._require(Capability.RETRY_POLICY, operation)
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        data = check_private_data(private_data, max_length, operation)
        return ConnectionParameters(data, limits, retry or RetryPolicy())

    # ---- the end ----

    def _on_forked(self) -> None:
        super()._on_forked()
        self._state_lock = threading.RLock()
        self._take_pending()

    def _take_pending(self) -> list[Pending[None]]:
        """Take all calls that have not ended. The caller ends them."""
        taken = [
            pending for pending in (self._pending, self._pending_disconnect, *self._watching) if pending is not None
        ]
        self._pending = self._pending_disconnect = None
        self._watching = []
        return taken

    def _on_removed(self) -> None:
        error = self._removed_error()
        with self._state_lock:
            taken = self._take_pending()
        for pending in taken:
            pending.fail(error)

    def _release(self) -> None:
        with self._state_lock:
            self._defunct = self._closed_error
            self._ending += self._take_pending()
        message = "the connector was being closed"
        try:
            try:
                self._native_end_requests()
            except BaseException:
                self._mark_still_open()
                raise
            with self._state_lock:
                if self._state == "established":
                    self._native_tell_peer()
                self._end_attempt(Event.CLOSE)
                self._native_free()
            message = "the connector was closed"
        finally:
            while self._ending:
                pending = self._ending[0]
                pending.fail(errors.CanceledError(message, operation=pending._operation))
                del self._ending[0]

    def _describe(self) -> str:
        return f"Connector ({self._state})"


def _look_up(reference: weakref.ref[Connector], pending: Pending[None], host: str, port: int) -> None:
    """Resolve the name of a connect(), in a thread of its own. A program that drops its connector gives the attempt up."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    error: errors.NdpyError | None = None
    try:
        found = resolve_destinations(host, port)
    except errors.NdpyError as failure:
        error = failure.with_traceback(None)
    connector = reference()
    if connector is not None:
        with connector._state_lock:
            if connector._pending is pending and connector._state == "connecting":
                connector._on_resolved(host, found, error)


def _on_silence(reference: weakref.ref[Connector], pending: Pending[None], tried: int, share_s: float) -> None:
    """The time of an address is over."""
    connector = reference()
    if connector is None:
        return
    with connector._state_lock:
        is_current = connector._pending is pending and connector._tried == tried and connector._state == "connecting"
        if is_current and connector._rest:
            connector._native_abandon_attempt(
                errors.TimeoutError(f"{connector._target} has not answered within {share_s:.3g} s", operation="connect")
            )
