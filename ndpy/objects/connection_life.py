"""The life of a connector: the table in connection_states.py drives it.

Every call of the program is an Event, and so is everything that the adapter reports. _move() looks up the state and the
event in the table, and sets the next state. The method that passes an event does the rest. A platform supplies the
native steps, and reports back through the _on_… methods.

All of it happens under the state lock. So a call finds the connector either before an event or after it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection_parameters import (
    ConnectionParameters,
    ReadLimits,
    cap_read_limits,
    lower_limits,
)
from ndpy.objects.connection_states import CALLS, TRANSITIONS, Event, State
from ndpy.objects.native_steps import ConnectorSteps
from ndpy.objects.pending import Pending
from ndpy.objects.resource import AdapterObject
from ndpy.vocabulary.addresses import Address, numeric_host, resolve_destinations
from ndpy.vocabulary.loggers import logger

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.queue_pair import QueuePair
    from ndpy.objects.queue_pair_connection import QueuePairConnection

_log = logger("ndpy.connections")

# In these states there is a connection, or one is being made.
_ACTIVE = ("connecting", "offered", "completing", "accepting", "established")

# In these states messages may have come, so the queue pair can serve no other connection.
_SPENDS_QUEUE_PAIR = ("completing", "accepting", "established", "disconnected")


class ConnectionLife(AdapterObject, ConnectorSteps):
    """All of a Connector but the calls of the program."""

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

    def _at_its_address(self, message: str) -> str:
        """A message about the peer, with its address if that is known."""
        with contextlib.suppress(errors.NdpyError, OSError):
            address = self._native_address(peer=True)
            if address is not None:
                return f"{message}; it was {address[0]} port {address[1]}"
        return message

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
        former, self._state = self._state, TRANSITIONS[self._state, event]
        if self._state != former:
            _log.debug("%s: from %s to %s: %s", self._name(), former, self._state, event.value)
        return True

    def _name(self) -> str:
        """What the log calls it: its adapter, and a number that no other object has."""
        return f"{self._adapter.info.name}: connector {self._serial}"

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
            _log.debug("%s: address %d of the name: %s", self._name(), self._tried, self._target)
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
        _log.debug("%s: connecting to %s failed: %s", self._name(), self._target, error)
        pending = self._end_attempt(event, spent=spent)
        if pending is not None:
            pending.fail(error)

    def _on_requested(self, private_data: bytes, limits: ReadLimits) -> None:
        """A client asks for a connection, with these limits."""
        if self._move(Event.REQUESTED):
            self._private_data = private_data
            self._read_limits = cap_read_limits(self._adapter.info, *limits)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s: %s", self._name(), self._at_its_address("the client has an address"))

    def _on_established(self) -> None:
        """Both sides have agreed."""
        if self._move(Event.ESTABLISHED):
            assert self.queue_pair is not None
            self.queue_pair._begin_connection()
            self._native_established()
            self._succeed_pending()

    def _on_message(self, queue_pair: QueuePairConnection) -> None:
        """A message of the peer proves the connection. Requests can be posted, though accept() may not have returned
        yet.
        """
        with self._state_lock:
            if self.queue_pair is queue_pair and self._state in ("accepting", "completing"):
                queue_pair._begin_connection()

    def _on_lost(self, error: errors.NdpyError) -> None:
        """The peer refused or vanished before the connection was established."""
        _log.debug("%s: %s", self._name(), error)
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

    def _stop_watching(self, pending: Pending[None]) -> None:
        with self._state_lock, contextlib.suppress(ValueError):
            self._watching.remove(pending)

    def _release_queue_pair(self) -> None:
        if self.queue_pair is not None:
            self.queue_pair.connector = None
            self.queue_pair = None

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


def resolve_name(reference: weakref.ref[ConnectionLife], pending: Pending[None], host: str, port: int) -> None:
    """Resolve the name of a connect(), in a thread of its own.
    A program that drops its connector gives the attempt up.
    """
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


def _on_silence(reference: weakref.ref[ConnectionLife], pending: Pending[None], tried: int, share_s: float) -> None:
    """The time of an address is over."""
    connector = reference()
    if connector is None:
        return
    with connector._state_lock:
        is_current = connector._pending is pending and connector._tried == tried and connector._state == "connecting"
        if is_current and connector._rest:
            connector._native_abandon_attempt(
                errors.TimeoutError(
                    f"{connector._target} has not answered within {share_s:.3g} s",
                    operation="connect",
                    problem="connect-timeout",
                )
            )
