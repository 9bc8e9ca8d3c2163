"""Connectors: the two ends of a connection. connection_life.py has what happens between the calls here."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from ndpy import errors
from ndpy.objects.connection_life import ConnectionLife, resolve_name
from ndpy.objects.connection_parameters import (
    ConnectionParameters,
    ReadLimits,
    RetryPolicy,
    cap_read_limits,
    check_private_data,
    lower_limits,
)
from ndpy.objects.connection_states import Event, State
from ndpy.objects.pending import Pending, wait_or_cancel
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.addresses import Address, check_address, numeric_destination
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

if TYPE_CHECKING:
    from ndpy.objects.queue_pair import QueuePair


class Connector(ConnectionLife):
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

    Attributes:
        queue_pair: the one that it connects. None before it has one, and after the end.
    Source: IND2Connector (contract section H); rdma_cm(7).
    """

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
            timeout_s: how long all of it may take. None waits for ever. The addresses of a name are tried in turn, and
                one that does not answer gets an equal share of the time that is left.
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
        parameters = self._parameters_of("connect", private_data, inbound_read_limit, outbound_read_limit, retry)
        pending = self._begin_connect(queue_pair, address, parameters, end)
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
        Raises: what connect() raises, if that is known at once. A later error ends the Pending. So does a name that
            cannot be resolved, because names are looked up in a thread.
        """
        parameters = self._parameters_of("connect", private_data, inbound_read_limit, outbound_read_limit, retry)
        return self._begin_connect(queue_pair, address, parameters, None)

    def _begin_connect(
        self, queue_pair: QueuePair, address: Address, parameters: ConnectionParameters, end: float | None
    ) -> Pending[None]:
        """Do begin_connect(). end: the time.monotonic() by which all of it has to end. Several addresses share the
        time.
        """
        host, port = check_address(address)
        known = numeric_destination(host, port)
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
                        target=resolve_name,
                        args=(weakref.ref(self), pending, host, port),
                        name="ndpy-resolve",
                        daemon=True,
                    )
                    look_up.start()
            except BaseException as error:
                # After Ctrl-C the provider may be connecting.
                self._end_attempt(self._refused if isinstance(error, Exception) else Event.WITHDRAWN)
                raise
        return pending

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

        Post receives before this call, because messages may come before it returns. Once the completion of the first
        one is taken, the queue pair can send too.

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
        parameters = self._parameters_of("accept", private_data, inbound_read_limit, outbound_read_limit, retry)
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

    # ---- the connection ----

    def disconnect(self, timeout_s: float | None = None) -> None:
        """End the connection, and wait until the peer knows. All outstanding requests complete CANCELED.

        This also succeeds if the peer disconnected first. On rxe the requests are cancelled when the peer has answered,
        or 0.2 s later. Until then its adapter acknowledges what it has received.

        If the peer's host has died, the connection manager asks again for up to 102 s (Linux 6.1). If a request has
        failed before, this takes at most 2 s.

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

    def _parameters_of(
        self, operation: str, private_data: bytes, inbound: int | None, outbound: int | None, retry: RetryPolicy | None
    ) -> ConnectionParameters:
        """Check what connect() or accept() was given."""
        self._check()
        info = self._adapter.info
        if retry is not None:
            self._adapter._require(Capability.RETRY_POLICY, operation)
        limits = cap_read_limits(info, inbound, outbound)
        max_length = info.max_caller_data if operation == "connect" else info.max_callee_data
        data = check_private_data(private_data, max_length, operation)
        return ConnectionParameters(data, limits, retry or RetryPolicy())
