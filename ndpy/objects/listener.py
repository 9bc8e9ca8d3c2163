"""Listeners: connection requests that clients send to an address."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ndpy import errors
from ndpy.objects.connection import Connector
from ndpy.objects.native_steps import ListenerSteps
from ndpy.objects.pending import Pending, await_or_cancel, wait_or_cancel
from ndpy.objects.resource import AdapterObject
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.addresses import Address
from ndpy.vocabulary.integers import integer
from ndpy.vocabulary.loggers import logger

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter

_log = logger("ndpy.connections")


class Listener(AdapterObject, ListenerSteps):
    """Takes connection requests at an address of an adapter. Adapter.listen() makes one.

    If no get_request() waits for a request, the listener queues it. When the backlog is full, it refuses further
    requests. `refused` counts the refusals, and the next get_request() after the first refusal gives a RuntimeWarning.

    Closing the listener refuses the queued requests. Connectors that get_request() has returned live on.

    Source: IND2Listener (contract H.3); rdma_listen(3).
    """

    _release_order = 5

    def __init__(self, adapter: Adapter, backlog: int) -> None:
        super().__init__(adapter)
        if integer(backlog, "backlog") < 0:
            raise ValueError(f"a backlog is 0 or more, not {backlog}")
        self._backlog = backlog
        #: Requests and calls, the oldest first. At most one of the two has entries.
        self._queued: deque[Connector] = deque()
        self._calls: deque[Pending[Connector]] = deque()
        self._refused = 0
        self._warned = False
        #: With the real port, once it listens.
        self._address: Address = ("?", 0)

    def _listens(self) -> None:
        """It has its address now."""
        _log.debug("%s: listens", self._name())

    def _name(self) -> str:
        return f"{self._adapter.info.name}: {self._describe()}"

    @property
    def address(self) -> Address:
        """The (host, port) at which it listens. The port is never 0."""
        self._check()
        return self._address

    @property
    def refused(self) -> int:
        """How many requests this listener refused because the backlog was full.

        On Linux there may be more. While this process cannot run, the kernel queues up to 1,024 requests
        (net.rdma_ucm.max_backlog). It refuses the others and tells nobody. The refusals of the whole adapter are in
        /sys/class/infiniband/ADAPTER/ports/PORT/cm_tx_msgs/rej.
        """
        return self._refused

    def get_request(self, timeout_s: float | None = None) -> Connector:
        """Wait for the next request.

        Parameters:
            timeout_s: how long to wait. None waits for ever. To soft0 a connection is a file descriptor. Without a free
                one, requests wait until there is one, and only the TimeoutError tells why.
        Returns: a connector in the state requested.
        Raises:
            TimeoutError: no request came within timeout_s seconds.
            CanceledError: the listener was closed meanwhile.
        Source: IND2Listener::GetConnectionRequest (contract H.3); rdma_get_cm_event(3).
        """
        timeout_s = timeout(timeout_s)
        self._warn_of_refusals()
        return wait_or_cancel(self.begin_get_request(), timeout_s)

    def begin_get_request(self) -> Pending[Connector]:
        """Start get_request(). Many calls may be outstanding. The oldest one gets the next request.

        Returns: a Pending of the connector.
        """
        self._check()
        self._warn_of_refusals()
        pending: Pending[Connector] = self._adapter._pending_type("get_request", lambda: self._forget_call(pending))
        with self._lifetime:
            self._check()
            if self._queued:
                pending.succeed(self._queued.popleft())
                return pending
            self._calls.append(pending)
            try:
                self._native_expect_request()
            except BaseException:
                self._forget_call(pending)
                # A request may have come before the failure.
                if not pending.done():
                    raise
        return pending

    async def get_request_async(self, timeout_s: float | None = None) -> Connector:
        """Do what get_request() does, in a task of asyncio. Cancelling it loses no request.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Returns: a connector in the state requested.
        Raises: what get_request() raises.
        """
        timeout_s = timeout(timeout_s)
        pending = self.begin_get_request()
        try:
            return await await_or_cancel(pending, timeout_s)
        except GeneratorExit:
            # The garbage collector closes a coroutine that was dropped, in any thread, with any lock held.
            self._adapter._events.call_soon(lambda: self._take_back(pending))
            raise
        except BaseException:
            self._take_back(pending)
            raise

    def _take_back(self, pending: Pending[Connector]) -> None:
        """End a call whose task has gone. If it got a request, that is the oldest one."""
        if not pending.cancel() and pending.exception(0) is None:
            connector = pending.result(0)
            with self._lifetime:
                taken = not self.closed
                if taken:
                    while self._calls and not self._calls[0].succeed(connector):
                        self._calls.popleft()
                    if self._calls:
                        self._calls.popleft()
                    else:
                        self._queued.appendleft(connector)
            if not taken:
                connector.close()

    async def __aiter__(self) -> AsyncIterator[Connector]:
        """Yield requests as they come, until the listener is closed."""
        while True:
            try:
                connector = await self.get_request_async()
            except (errors.CanceledError, errors.ClosedError):
                if self._defunct is None:
                    # The provider cancelled the call, and the listener goes on.
                    raise
                return
            yield connector

    def _on_forked(self) -> None:
        super()._on_forked()
        self._calls.clear()

    def _forget_call(self, pending: Pending[Connector]) -> None:
        with self._lifetime, contextlib.suppress(ValueError):
            self._calls.remove(pending)

    def _on_request(self, connector: Connector) -> None:
        """A request has come: give it to the oldest call, queue it, or refuse it."""
        with self._lifetime:
            taken = not self.closed and self._give_or_queue(connector)
        if not taken:
            connector.close()

    def _give_or_queue(self, connector: Connector) -> bool:
        while self._calls:
            if self._calls.popleft().succeed(connector):
                return True
        if self._backlog and len(self._queued) >= self._backlog:
            self._refused += 1
            _log.debug("%s: refuses a request, because %d wait already", self._name(), self._backlog)
            return False
        self._queued.append(connector)
        return True

    def _fail_oldest_call(self, error: errors.NdpyError) -> None:
        with self._lifetime:
            if self._calls:
                self._calls.popleft().fail(error)

    def _fail_calls(self, error: errors.NdpyError) -> None:
        with self._lifetime:
            calls, self._calls = self._calls, deque()
        for pending in calls:
            pending.fail(error)

    def _on_removed(self) -> None:
        self._fail_calls(self._removed_error())

    def _release(self) -> None:
        # After Ctrl-C the program closes it again. So each entry stays in its list until it is done.
        self._queued += self._native_close()
        # A callback of a call that ends now may ask again.
        self._defunct = self._closed_error
        while self._queued:
            self._queued[0].close()
            self._queued.popleft()
        error = errors.CanceledError("the listener was closed", operation="get_request")
        while self._calls:
            self._calls[0].fail(error)
            self._calls.popleft()
        _log.debug("%s: closed", self._name())

    def _warn_of_refusals(self) -> None:
        """Warn once. Called in a thread of the program, so that the program sees the warning."""
        if self._refused and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._describe()} has refused {self._refused} connection requests, since {self._backlog} waited "
                f"already; "
                "take them sooner, or listen with a larger backlog",
                RuntimeWarning,
                stacklevel=3,
            )

    def _describe(self) -> str:
        host, port = self._address
        return f"Listener at {host} port {port}"
