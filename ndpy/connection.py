"""Connections: connectors, and the states that they go through."""

from __future__ import annotations

import abc
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.addresses import Address, resolve_destination
from ndpy.connection_parameters import (
    ConnectionParameters,
    ReadLimits,
    RetryPolicy,
    cap_read_limits,
    check_private_data,
    lower_limits,
)
from ndpy.flags import Capability
from ndpy.pending import Pending, wait_or_cancel
from ndpy.resource import Resource

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.queue_pair import QueuePair

# Every state of a connector and those it can go to (contract H.1.4). "failed" attempts may be retried where H.4.2 says so.
TRANSITIONS: dict[str, frozenset[str]] = {
    "idle": frozenset({"bound", "connecting", "requested"}),
    "bound": frozenset({"bound", "connecting"}),
    "connecting": frozenset({"offered", "idle", "bound", "failed"}),
    "offered": frozenset({"established", "failed"}),
    "requested": frozenset({"accepting", "failed"}),
    "accepting": frozenset({"established", "failed"}),
    "established": frozenset({"disconnected"}),
    "disconnected": frozenset(),
    "failed": frozenset(),
}


class Connector(Resource):
    """One end of a connection in the making, made, or ended: Adapter.create_connector() or Listener.get_request().

    The active side: bind() if it wants a certain local address, connect(), then complete_connect(), or reject() instead;
    in between it can read the server's private data. The passive side: accept() or reject().

    state: idle, bound, connecting, offered (the server accepted; complete_connect() is next), requested (the client asks;
    accept() is next), accepting, established, disconnected, failed.
    Source: IND2Connector (contract section H); rdma_cm(7).
    """

    _release_order = 10

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._state = "idle"
        self._state_lock = threading.RLock()
        self.queue_pair: QueuePair | None = None
        self._private_data: bytes | None = None
        self._read_limits: ReadLimits | None = None
        #: What connect() or accept() was asked for.
        self._parameters = ConnectionParameters()
        #: Where connect() goes, for errors.
        self._target = ""
        #: The address of bind(), for every attempt.
        self._bound_to: Address | None = None
        #: The connect, complete_connect or accept, the disconnect, and the waits for the end that are under way.
        self._pending: Pending[None] | None = None
        self._disconnecting: Pending[None] | None = None
        self._watching: list[Pending[None]] = []
        self._disconnect_called = False

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @property
    def state(self) -> str:
        return self._state

    def _move(self, state: str) -> None:
        if state not in TRANSITIONS[self._state]:
            raise AssertionError(f"a connector cannot go from {self._state} to {state}")
        self._state = state

    @property
    def private_data(self) -> bytes:
        """What the peer sent with its connect, accept or reject; b"" if nothing.

        InfiniBand and RoCE pad it with zero bytes. NotConnectedError before anything came (contract H.7.1).
        """
        self._check()
        if self._private_data is None:
            raise errors.NotConnectedError("the peer has sent nothing yet", operation="private_data")
        return self._private_data

    @property
    def read_limits(self) -> ReadLimits:
        """What the peer wants and offers, capped by this adapter; after the connection was made, what holds.

        NotConnectedError before the peer said it (contract H.7.5, H.7.6).
        """
        self._check()
        if self._read_limits is None:
            raise errors.NotConnectedError("the peer has not said its read limits yet", operation="read_limits")
        return self._read_limits

    @property
    def local_address(self) -> Address:
        """This side's address and port; NotConnectedError before there is one."""
        return self._address("local")

    @property
    def peer_address(self) -> Address:
        """The other side's address and port; NotConnectedError before there is one."""
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
        """Choose the local address for connect(); port 0 lets the system choose.

        AddressInUseError, AddressUnreachableError for an address that is not this adapter's.
        """
        with self._state_lock:
            self._expect("bind", "idle", "bound")
            self._bound_to = self._native_bind(address)
            self._move("bound")

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
        """Ask the listener at `address` for a connection, and wait until it accepted; complete_connect() comes next.

        private_data: up to info.max_caller_data bytes for the server. Read limits: None for the adapter's; larger ones
        are lowered silently, negative ones are a ValueError. retry: see RetryPolicy. After a failure the queue pair is as it was, its posted receives
        included.

        Raises ConnectionRefusedError (nobody listens, or rejected: see private_data), TimeoutError,
        AddressUnreachableError, LimitExceededError, NotConnectedError in a wrong state, and UnsupportedError for a policy
        where info.capabilities lacks RETRY_POLICY.
        Source: IND2Connector::Connect (contract H.4); rdma_connect(3).
        """
        wait_or_cancel(
            self.begin_connect(
                queue_pair,
                address,
                private_data=private_data,
                inbound_read_limit=inbound_read_limit,
                outbound_read_limit=outbound_read_limit,
                retry=retry,
            ),
            timeout_s,
        )

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
        """Start connect(); cancelling gives the attempt up."""
        self._check()
        policy = self._check_policy(retry, "connect")
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        data = check_private_data(private_data, self._adapter.info.max_caller_data, "connect")
        family, resolved = resolve_destination(address)
        with self._state_lock:
            self._expect("connect", "idle", "bound")
            self._take_queue_pair(queue_pair)
            self._parameters = ConnectionParameters(data, limits, policy)
            self._target = f"{address[0]} port {address[1]}"
            self._private_data = self._read_limits = None
            pending = self._begin("connect")
            self._move("connecting")
            try:
                self._native_connect(queue_pair, family, resolved)
            except BaseException:
                self._end_attempt("bound" if self._bound_to else "idle")
                raise
        return pending

    def _on_offered(self, private_data: bytes, limits: ReadLimits) -> None:
        """The server has accepted. limits: what it says."""
        self._private_data = private_data
        self._read_limits = lower_limits(self._parameters.read_limits, limits)
        self._move("offered")
        self._finish(None)

    def _on_attempt_failed(self, error: errors.NdpyError, *, again: bool = True) -> None:
        """A connect led to no offer. again: connector and queue pair can try again (contract H.4.2)."""
        self._end_attempt(("bound" if self._bound_to else "idle") if again else "failed", error)

    def _end_attempt(self, state: str, error: errors.NdpyError | None = None) -> None:
        self._release_queue_pair()
        self._move(state)
        self._native_attempt_over()
        pending, self._pending = self._pending, None
        if pending is not None and error is not None:
            pending.fail(error)

    def complete_connect(self, timeout_s: float | None = None) -> None:
        """Take the server's offer: the queue pair is connected when this returns.

        NotConnectedError unless there is an offer. Source: IND2Connector::CompleteConnect; rdma_establish(3).
        """
        wait_or_cancel(self.begin_complete_connect(), timeout_s)

    def begin_complete_connect(self) -> Pending[None]:
        """Start complete_connect()."""
        with self._state_lock:
            self._expect("complete_connect", "offered")
            if self._pending is not None:
                raise errors.NotConnectedError("complete_connect() was called before", operation="complete_connect")
            pending = self._begin("complete_connect")
            try:
                assert self.queue_pair is not None
                self._native_complete(self.queue_pair)
            except BaseException:
                self._lose()
                raise
        return pending

    # ---- the passive side ----

    def _requested(self, private_data: bytes, limits: ReadLimits) -> None:
        """A client asks. limits: what it says."""
        self._private_data = private_data
        self._read_limits = cap_read_limits(self._adapter.info, *limits)
        self._move("requested")

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
        """Accept the client's request and wait until it has completed the connection.

        private_data: up to info.max_callee_data bytes for the client. retry: as for connect(). Post receives before, since
        messages may come before this returns. Raises ConnectionRefusedError when the client rejects the offer, ConnectionAbortedError when
        it has gone, LimitExceededError with the request intact, NotConnectedError in a wrong state.
        Source: IND2Connector::Accept (contract H.5); rdma_accept(3).
        """
        wait_or_cancel(
            self.begin_accept(
                queue_pair,
                private_data=private_data,
                inbound_read_limit=inbound_read_limit,
                outbound_read_limit=outbound_read_limit,
                retry=retry,
            ),
            timeout_s,
        )

    def begin_accept(
        self,
        queue_pair: QueuePair,
        *,
        private_data: bytes = b"",
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Pending[None]:
        """Start accept(); cancelling abandons the connection."""
        self._check()
        policy = self._check_policy(retry, "accept")
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        data = check_private_data(private_data, self._adapter.info.max_callee_data, "accept")
        with self._state_lock:
            if self._state == "failed":
                raise errors.ConnectionAbortedError("the client has given up", operation="accept")
            self._expect("accept", "requested")
            self._take_queue_pair(queue_pair)
            assert self._read_limits is not None
            self._read_limits = lower_limits(limits, self._read_limits)
            self._parameters = ConnectionParameters(data, self._read_limits, policy)
            pending = self._begin("accept")
            self._move("accepting")
            try:
                self._native_accept(queue_pair)
            except BaseException:
                self._lose(refused=True)
                raise
        return pending

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the client's request, or as a client the server's offer; up to info.max_callee_data bytes say why.

        NotConnectedError in another state. Source: IND2Connector::Reject; rdma_reject(3).
        """
        self._check()
        data = check_private_data(private_data, self._adapter.info.max_callee_data, "reject")
        with self._state_lock:
            self._expect("reject", "requested", "offered")
            offered, queue_pair = self._state == "offered", self.queue_pair
            pending, self._pending = self._pending, None
            try:
                self._native_reject(data, offered)
            finally:
                self._release_queue_pair()
                self._move("failed")
                self._native_attempt_over()
                if pending is not None:
                    pending.fail(errors.CanceledError("the offer was rejected", operation=pending._operation))
            if queue_pair is not None and self._offer_uses_queue_pair:
                queue_pair._end_connection()

    # ---- the connection ----

    def _on_established(self) -> None:
        """Both sides have agreed."""
        assert self.queue_pair is not None
        self._move("established")
        self.queue_pair._begin_connection()
        self._native_established()
        self._finish(None)

    def _on_lost(self, error: errors.NdpyError) -> None:
        """The peer refused, or vanished, before the connection was established."""
        pending = self._pending
        self._lose(taking_back=False)
        if pending is not None:
            pending.fail(error)

    def _lose(self, *, taking_back: bool = True, refused: bool = False) -> None:
        """The connection in the making is lost. taking_back: by this side. refused: this side's last step was not taken."""
        former, queue_pair, under_way = self._state, self.queue_pair, self._pending is not None
        self._pending = None
        self._release_queue_pair()
        self._move("failed")
        if taking_back:
            self._native_give_up(former)
        used = former == "accepting" or (former == "offered" and under_way)
        if queue_pair is not None and used and not (refused and not self._refused_step_uses_queue_pair):
            queue_pair._end_connection()

    def _begin(self, operation: str) -> Pending[None]:
        pending: Pending[None] = self._adapter._pending_type(operation, lambda: self._give_up(pending))
        self._pending = pending
        return pending

    def _finish(self, error: errors.NdpyError | None) -> None:
        """End what is under way. Under the state lock: cancel() gives it up before this, or comes after its end."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.succeed(None) if error is None else pending.fail(error)

    def _give_up(self, pending: Pending[None]) -> None:
        """cancel() of a connect or accept. A complete_connect goes on."""
        with self._state_lock:
            if self._pending is pending and self._state in ("connecting", "accepting"):
                self._lose()

    def disconnect(self, timeout_s: float | None = None) -> None:
        """End the connection: everything outstanding completes CANCELED, the peer is told, and this waits until it knows.

        It succeeds when the peer disconnected first. NotConnectedError when there never was a connection or this was
        called before. Source: IND2Connector::Disconnect (contract H.8); rdma_disconnect(3).
        """
        self.begin_disconnect().result(timeout_s)

    def begin_disconnect(self) -> Pending[None]:
        """Start disconnect(). Cancelling ends the wait, not the disconnect."""
        with self._state_lock:
            self._expect("disconnect", "established", "disconnected")
            if self._disconnect_called:
                raise errors.NotConnectedError("disconnect() was called before", operation="disconnect")
            self._disconnect_called = True
            pending: Pending[None] = self._adapter._pending_type("disconnect")
            self._disconnecting = pending
            try:
                self._native_disconnect()
            except BaseException:
                # It can be called again.
                self._disconnect_called, self._disconnecting = False, None
                raise
        return pending

    def _on_disconnected(self, *, told: bool = True) -> None:
        """The connection is over, from whichever side. told: the peer knows, so a disconnect() has ended."""
        queue_pair = self.queue_pair
        if queue_pair is not None:
            queue_pair._end_connection()
        ended: list[Pending[None]] = []
        if self._state == "established":
            self._move("disconnected")
            ended, self._watching = self._watching, []
        if told and self._disconnecting is not None:
            ended.append(self._disconnecting)
            self._disconnecting = None
        for pending in ended:
            pending.succeed(None)

    def _on_failed_completion(self) -> None:
        """A request failed, which ends the connection (contract F.6.1)."""
        with self._state_lock:
            if self._state == "established":
                self._native_on_failed_completion()

    def _on_queue_pair_closing(self) -> None:
        """The queue pair is being closed: the connection ends, or the attempt does."""
        with self._state_lock:
            pending = self._pending
            if self._state in ("connecting", "accepting", "offered"):
                self._lose()
            elif self._state == "established":
                self._native_tell_peer()
                self._on_disconnected()
            self._release_queue_pair()
        if pending is not None:
            pending.fail(errors.CanceledError("the queue pair was closed", operation=pending._operation))

    def wait_disconnected(self, timeout_s: float | None = None) -> None:
        """Wait until the connection has ended, from whichever side. NotConnectedError if there never was one."""
        wait_or_cancel(self.begin_wait_disconnected(), timeout_s)

    def begin_wait_disconnected(self) -> Pending[None]:
        """Ask for one notification of the connection's end. Source: IND2Connector::NotifyDisconnect."""
        with self._state_lock:
            self._expect("wait_disconnected", "established", "disconnected")
            pending = self._adapter._pending_type("wait_disconnected", lambda: self._stop_watching(pending))
            if self._state == "disconnected":
                pending.succeed(None)
            else:
                self._watching.append(pending)
        return pending

    def _stop_watching(self, pending: Pending[None]) -> None:
        with self._state_lock, contextlib.suppress(ValueError):
            self._watching.remove(pending)

    def _expect(self, operation: str, *states: str) -> None:
        self._check()
        if self._state not in states:
            active = self._state in ("connecting", "offered", "accepting", "established") and operation in (
                "connect",
                "accept",
                "bind",
            )
            kind = errors.ConnectionActiveError if active else errors.NotConnectedError
            raise kind(f"the connector is {self._state}; this needs {' or '.join(states)}", operation=operation)

    def _take_queue_pair(self, queue_pair: QueuePair) -> None:
        self._require_same_adapter(queue_pair, "the queue pair")
        with queue_pair._lock:
            queue_pair._check()
            if queue_pair.connector is not None or not queue_pair._never_connected or queue_pair._ended:
                raise errors.ConnectionActiveError(
                    "the queue pair is or was connected; a queue pair has one connection in its life",
                    operation="connect",
                )
            queue_pair.connector = self
        self.queue_pair = queue_pair

    def _check_policy(self, retry: RetryPolicy | None, operation: str) -> RetryPolicy:
        """The policy, or the one that changes nothing."""
        if retry is None:
            return RetryPolicy()
        self._adapter._require(Capability.RETRY_POLICY, operation)
        return retry

    def _release_queue_pair(self) -> None:
        if self.queue_pair is not None:
            self.queue_pair.connector = None
            self.queue_pair = None

    def _on_forked(self) -> None:
        super()._on_forked()
        self._state_lock = threading.RLock()
        self._take_waiting()

    def _take_waiting(self) -> list[Pending[None]]:
        """What is under way, which the caller ends."""
        waiting = [pending for pending in (self._pending, self._disconnecting, *self._watching) if pending is not None]
        self._pending = self._disconnecting = None
        self._watching = []
        return waiting

    def _on_removed(self) -> None:
        error = self._removed_error()
        with self._state_lock:
            waiting = self._take_waiting()
        for pending in waiting:
            pending.fail(error)

    def _release(self) -> None:
        with self._state_lock:
            self._defunct = self._closed_error
            waiting = self._take_waiting()
        try:
            self._native_end_requests()
        except errors.DeviceBusyError:
            self._mark_still_open()
            for pending in waiting:
                pending.fail(errors.CanceledError("the connector was being closed", operation=pending._operation))
            raise
        with self._state_lock:
            former, queue_pair = self._state, self.queue_pair
            if former == "established":
                self._native_tell_peer()
            elif former in ("connecting", "offered", "requested", "accepting"):
                self._move("failed")
                self._native_give_up(former)
            self._release_queue_pair()
            if queue_pair is not None and former in ("established", "accepting", "disconnected"):
                queue_pair._end_connection()
            self._native_free()
        for pending in waiting:
            pending.fail(errors.CanceledError("the connector was closed", operation=pending._operation))

    def _describe(self) -> str:
        return f"Connector ({self._state})"

    # ---- what the platform does; all of it under the state lock ----

    #: Whether an offer that is rejected or lost has used the queue pair up.
    _offer_uses_queue_pair = False
    #: Whether an accept() that was refused at once has used the queue pair up.
    _refused_step_uses_queue_pair = False

    @abc.abstractmethod
    def _native_address(self, peer: bool) -> Address | None:
        """The peer's or this side's address; None before there is one."""

    @abc.abstractmethod
    def _native_bind(self, address: Address) -> Address:
        """Choose the local address; returns it with the real port."""

    @abc.abstractmethod
    def _native_connect(self, queue_pair: QueuePair, family: int, destination: tuple[Any, ...]) -> None:
        """Start to connect as self._parameters says. Ends with _on_offered() or _on_attempt_failed(); raises if refused."""

    @abc.abstractmethod
    def _native_complete(self, queue_pair: QueuePair) -> None:
        """Take the offer. Ends with _on_established() or _on_lost(); raises if refused."""

    @abc.abstractmethod
    def _native_accept(self, queue_pair: QueuePair) -> None:
        """Accept as self._parameters says. Ends with _on_established() or _on_lost(); raises if refused."""

    def _native_established(self) -> None:
        """The connection was just made; nobody has been told yet."""

    @abc.abstractmethod
    def _native_reject(self, private_data: bytes, offered: bool) -> None:
        """Refuse the request, or what was offered."""

    def _native_attempt_over(self) -> None:
        """An attempt has ended without an offer, or what was asked or offered was rejected."""

    @abc.abstractmethod
    def _native_give_up(self, state: str) -> None:
        """Take back what was begun, in the state that the connector had."""

    @abc.abstractmethod
    def _native_disconnect(self) -> None:
        """Start to disconnect. Ends with _on_disconnected(); raises if the peer cannot be told now."""

    def _native_tell_peer(self) -> None:
        """The connection ends because connector or queue pair are closed."""

    @abc.abstractmethod
    def _native_on_failed_completion(self) -> None:
        """A request of the established connection has failed."""

    def _native_end_requests(self) -> None:
        """Have the provider let go of what it still does for this connector. Not under the state lock."""

    @abc.abstractmethod
    def _native_free(self) -> None:
        """Free the native connector."""
