"""Listeners: connection requests that clients send to an address."""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections import deque
from typing import TYPE_CHECKING

from ndpy import errors
from ndpy.addresses import Address
from ndpy.connection import Connector
from ndpy.pending import Pending, wait_or_cancel
from ndpy.resource import Resource

if TYPE_CHECKING:
    from ndpy.adapter import Adapter


class Listener(Resource):
    """Takes connection requests at an address of an adapter, made by Adapter.listen().

    Requests that nobody has asked for wait here, up to the backlog; more are refused. The first refusal is told by a
    RuntimeWarning of the next get_request(), and `refused` counts them. Closing the listener refuses the requests that wait;
    connectors already given out live on. Source: IND2Listener (contract H.3); rdma_listen(3).
    """

    _release_order = 5

    def __init__(self, adapter: Adapter, backlog: int) -> None:
        super().__init__(adapter)
        if backlog < 0:
            raise ValueError(f"a backlog is 0 or more, not {backlog}")
        self._backlog = backlog
        #: Requests that nobody has asked for yet, and the calls of get_request() that wait, both the oldest first.
        self._waiting: deque[Connector] = deque()
        self._asked: deque[Pending[Connector]] = deque()
        self._refused = 0
        self._warned = False
        #: The real one, once it listens.
        self._address: Address = ("?", 0)

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @property
    def address(self) -> Address:
        """Where it listens, with the real port."""
        self._check()
        return self._address

    @property
    def refused(self) -> int:
        """How many requests were refused because the backlog was full.

        On Linux, the kernel keeps those that arrive while this process cannot run, and refuses beyond 1,024
        (net.rdma_ucm.max_backlog); it tells nobody. All refusals of the adapter are in
        /sys/class/infiniband/ADAPTER/ports/PORT/cm_tx_msgs/rej.
        """
        return self._refused

    def get_request(self, timeout_s: float | None = None) -> Connector:
        """Wait for the next request; its connector is in state requested.

        TimeoutError at the deadline, CanceledError when the listener is closed meanwhile.
        """
        self._warn_of_refusals()
        return wait_or_cancel(self.begin_get_request(), timeout_s)

    def begin_get_request(self) -> Pending[Connector]:
        """Ask for the next request; many may be outstanding and are served in their order."""
        self._check()
        self._warn_of_refusals()
        pending: Pending[Connector] = self._adapter._pending_type("get_request", lambda: self._stop_asking(pending))
        with self._lifetime:
            self._check()
            if self._waiting:
                pending.succeed(self._waiting.popleft())
                return pending
            self._asked.append(pending)
            try:
                self._native_ask()
            except BaseException:
                self._stop_asking(pending)
                if not pending.done():
                    raise
        return pending

    def _on_forked(self) -> None:
        super()._on_forked()
        self._asked.clear()

    def _stop_asking(self, pending: Pending[Connector]) -> None:
        with self._lifetime, contextlib.suppress(ValueError):
            self._asked.remove(pending)

    def _arrive(self, connector: Connector) -> None:
        """A request has come: give it to whoever asked first, let it wait, or refuse it."""
        with self._lifetime:
            kept = not self._released and self._hand_over(connector)
        if not kept:
            connector.close()

    def _hand_over(self, connector: Connector) -> bool:
        while self._asked:
            if self._asked.popleft().succeed(connector):
                return True
        if self._backlog and len(self._waiting) >= self._backlog:
            self._refused += 1
            return False
        self._waiting.append(connector)
        return True

    def _fail_asked(self, error: errors.NdpyError) -> None:
        with self._lifetime:
            asked, self._asked = self._asked, deque()
        for pending in asked:
            pending.fail(error)

    def _on_removed(self) -> None:
        self._fail_asked(self._removed_error())

    def _release(self) -> None:
        late = self._native_close()
        waiting, self._waiting = self._waiting, deque()
        for connector in [*waiting, *late]:
            connector.close()
        self._fail_asked(errors.CanceledError("the listener was closed", operation="get_request"))

    def _warn_of_refusals(self) -> None:
        """Once, in a thread of the program, which can see it. Called by what the program calls."""
        if self._refused and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._describe()} has refused {self._refused} connection requests, since {self._backlog} waited already; "
                "take them sooner, or listen with a larger backlog",
                RuntimeWarning,
                stacklevel=3,
            )

    def _describe(self) -> str:
        host, port = self._address
        return f"Listener at {host} port {port}"

    # ---- what the platform does ----

    def _native_ask(self) -> None:
        """Somebody waits for a request. Under the lifetime's lock."""

    @abc.abstractmethod
    def _native_close(self) -> list[Connector]:
        """Listen no more, and free what listened; returns the requests that came meanwhile. If it raises, nothing has
        changed."""
