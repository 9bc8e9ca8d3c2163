"""Connectors of version 1.

They have no Bind, so the native Connect takes the local port. Read limits belong to the endpoint.

A provider may end a connect with ND_TIMEOUT, which is a success code, if the peer has not answered yet (contract
I.6.6). Then ndpy connects again, until the program gives up.
"""

from __future__ import annotations

import random
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.connection_parameters import ReadLimits
from ndpy.objects.queue_pair import QueuePair
from ndpy.platforms.networkdirect.connection import _FIRST_PORT, _PORTS, NetworkDirectConnector
from ndpy.platforms.networkdirect.native_calls import TIMEOUT, ffi, lib
from ndpy.platforms.networkdirect.version1.queue_pair import Version1QueuePair
from ndpy.vocabulary.addresses import Address, is_wildcard, listening_address, resolve
from ndpy.vocabulary.loggers import logger

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter

_log = logger("ndpy.connections")

#: IANA's number for TCP. Connections use TCP's port numbers.
TCP = 6

# The shortest time from one connect to the next, for providers that answer at once.
_PAUSE_S = 0.1
_SHARING_VIOLATION = 0xC0000043
# How many ports connect() tries before it says that none is free.
_CHOICES = 256


def own_host(adapter: Version1Adapter, host: str, operation: str) -> str:
    """Return the adapter's address. Raises AddressUnreachableError if the host is another one.

    An adapter of version 1 uses only the address that it was opened with.
    """
    (own,) = adapter.info.addresses
    numeric = str(resolve((host, 0))[1][0])
    if not is_wildcard(numeric) and numeric.partition("%")[0] != own.partition("%")[0]:
        raise errors.AddressUnreachableError(
            f"{host} is not the address of {adapter.info.name}, which is {own}", operation=operation
        )
    return own


class Version1Connector(NetworkDirectConnector):
    _adapter: Version1Adapter
    _interface = "INDConnector"
    _size_type = "size_t *"

    def __init__(self, adapter: Version1Adapter, native: Any = None) -> None:
        self._local_port = 0
        #: How many more ports connect() may try. 0 if the program chose the port.
        self._choices = 0
        self._issued = 0.0
        self._attempts = 0
        #: How often the provider said that the peer has not answered this connect() yet.
        self._unanswered = 0
        super().__init__(adapter, native)

    # ---- the native calls ----

    def _get_private_data(self, buffer: Any, size: Any) -> int:
        return self._call("GetConnectionData", ffi.NULL, ffi.NULL, buffer, size)

    def _get_read_limits(self, inbound: Any, outbound: Any) -> int:
        return self._call("GetConnectionData", inbound, outbound, ffi.NULL, ffi.NULL)

    def _connect_native(self, queue_pair: Any, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        self._issued = time.monotonic()
        return self._call(
            "Connect",
            queue_pair._endpoint,
            self._destination,
            len(self._destination),
            TCP,
            socket.htons(self._local_port),
            data or ffi.NULL,
            len(data),
            overlapped,
        )

    def _accept_native(self, queue_pair: Any, limits: ReadLimits, data: Any, overlapped: Any) -> int:
        return self._call("Accept", queue_pair._endpoint, data or ffi.NULL, len(data), overlapped)

    def _cancel_native(self) -> None:
        lib.INDOverlapped_CancelOverlappedRequests(ffi.cast("struct INDOverlapped *", self._native))

    def _prepare_connection(self, queue_pair: QueuePair, limits: ReadLimits) -> None:
        assert isinstance(queue_pair, Version1QueuePair)
        queue_pair._make_endpoint(self._native, limits)

    def _expect_messages(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair, Version1QueuePair)
        queue_pair._use_endpoint()

    def _release_queue_pair(self) -> None:
        queue_pair = self.queue_pair
        super()._release_queue_pair()
        if isinstance(queue_pair, Version1QueuePair):
            queue_pair._leave_connector()

    # ---- the active side ----

    def _native_bind(self, address: Address) -> Address:
        host, port = listening_address(self._adapter.info.addresses, address)
        host = own_host(self._adapter, host, "bind")
        self._choices = 0 if port else _CHOICES
        self._local_port = port or _some_port()
        self._addresses["local"] = (host, self._local_port)
        return host, self._local_port

    def _bind(self, address: Address) -> None:
        # connect() without bind(): the provider chooses the port.
        own_host(self._adapter, address[0], "connect")

    def _native_no_answer(self, target: str, timeout_s: float) -> errors.TimeoutError:
        native, name = (TIMEOUT, "ND_TIMEOUT") if self._unanswered else (0, "")
        return errors.TimeoutError(
            f"{target} has not answered {self._adapter.info.addresses[0]} within {timeout_s:g} s; it is down, "
            "has no adapter at that address, or a firewall is between",
            operation="connect",
            native=native,
            native_name=name,
        )

    def _start_attempt(self) -> None:
        self._unanswered = 0
        self._attempts += 1
        self._try()

    def _try(self) -> None:
        """Issue the connect. Raises if it is refused for good."""
        while True:
            try:
                super()._start_attempt()
            except errors.ProviderError as failure:
                if failure.native == TIMEOUT:
                    self._try_later()
                elif failure.native == _SHARING_VIOLATION and self._another_port():
                    continue
                else:
                    raise
            return

    def _another_port(self) -> bool:
        """Choose another port, if bind() chose the last one. Returns False if no other port may be tried."""
        if not self._choices:
            return False
        self._choices -= 1
        self._local_port = _some_port()
        self._addresses["local"] = (self._addresses["local"][0], self._local_port)
        return True

    def _on_connect_end(self, status: int) -> None:
        if self._state == "connecting" and self._abandoned is None:
            if status == TIMEOUT:
                self._try_later()
                return
            if status == _SHARING_VIOLATION and self._another_port():
                self._retry(self._attempts)
                return
        super()._on_connect_end(status)

    def _try_later(self) -> None:
        self._unanswered += 1
        _log.debug("%s: %s has not answered, and is asked again", self._name(), self._target)
        # The timer must not keep a connector that the program has dropped.
        owner, attempt = weakref.ref(self), self._attempts

        def due() -> None:
            connector = owner()
            if connector is not None:
                with connector._state_lock:
                    connector._retry(attempt)

        timer = threading.Timer(max(0.0, _PAUSE_S - (time.monotonic() - self._issued)), due)
        timer.daemon = True
        timer.start()

    def _retry(self, attempt: int) -> None:
        if self._attempts != attempt or self._pending is None or self._state != "connecting":
            return
        try:
            self._try()
        except errors.ProviderError as failure:
            if failure.native:
                super()._on_connect_end(failure.native)
            else:
                # ndpy itself refused. The number 0 would stand for success.
                self._on_connect_failed(failure.with_traceback(None), again=False)


def _some_port() -> int:
    return _FIRST_PORT + random.randrange(_PORTS)
