"""The connection of a queue pair: by a connector, by two endpoints, or by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ndpy import errors
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy, cap_read_limits
from ndpy.objects.memory import Binding
from ndpy.objects.native_steps import QueuePairSteps
from ndpy.objects.work_queues import QueuePairLimits, WorkQueues
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.loggers import logger
from ndpy.vocabulary.queue_pair_attributes import (
    QueuePairAttributes,
    QueuePairState,
    QueuePairType,
    check_change,
    check_names,
)
from ndpy.vocabulary.weak_set import SharedWeakSet

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.connection import Connector
    from ndpy.objects.shared_receive_queue import SharedReceiveQueue
    from ndpy.vocabulary.endpoint import Endpoint
    from ndpy.vocabulary.info import PathInfo

_log = logger("ndpy.connections")

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_RETRYING_TYPES = (QueuePairType.RC, QueuePairType.XRC_SEND)


class QueuePairConnection(WorkQueues, QueuePairSteps):
    """The part of QueuePair that begins and ends its connection."""

    __slots__ = (
        "_bindings",
        "_by_hand",
        "_dependants",
        "_endpoint_limits",
        "_local",
        "_never_connected",
        "_path",
        "_qp",
        "connector",
        "failure",
        "initiator_cq",
        "receive_cq",
    )
    #: The native queue pair. None before it exists, and after it was destroyed.
    _qp: Any
    #: The windows that are bound to it. None before the first one is.
    _bindings: set[Binding] | None
    #: Their _on_queue_pair_closing() is called before the close, and _on_connection_ended() when the connection ends.
    #: None before there is one.
    _dependants: SharedWeakSet[Any] | None
    #: Whether it can be connected without a connection manager.
    _has_endpoints: ClassVar[bool] = False

    def __init__(
        self,
        adapter: Adapter,
        receive_cq: CompletionQueue,
        initiator_cq: CompletionQueue,
        limits: QueuePairLimits,
        srq: SharedReceiveQueue | None,
        type: QueuePairType,
    ) -> None:
        super().__init__(adapter, limits, srq, type)
        self._qp = None
        self.receive_cq = receive_cq
        self.initiator_cq = initiator_cq
        self.connector: Connector | None = None
        self.failure = ""
        self._number = self._serial
        self._never_connected = True
        #: The last result of local_endpoint(). The two ends and the read limits of connect_endpoint().
        self._local: Endpoint | None = None
        self._path: tuple[Endpoint, Endpoint] | None = None
        self._endpoint_limits: ReadLimits | None = None
        #: What modify() has set since the last RESET.
        self._by_hand = _NOTHING
        self._bindings = self._dependants = None

    @property
    def connection_ended(self) -> bool:
        """Whether its connection has ended. A flush() during the connection ends it too."""
        return self._ended

    @property
    def path(self) -> PathInfo | None:
        """The path of its connection. Each look asks the adapter, even after the connection has ended.

        Returns: None if the transport does not tell: on iWARP, whose connections are those of TCP, and on
            NetworkDirect.
        Raises:
            NotConnectedError: there was no connection yet.
            ProviderError: the adapter does not answer.
        Source: ibv_query_qp(3).
        """
        with self._lock:
            self._check()
            if self._never_connected:
                raise errors.NotConnectedError("there was no connection yet", operation="path")
            return self._native_path()

    @property
    def read_limits(self) -> ReadLimits:
        """How many RDMA reads of the peer and of this side may run at once.

        Raises:
            NotConnectedError: there is no connection.
        """
        self._check()
        if self._endpoint_limits is not None:
            return self._endpoint_limits
        connector = self.connector
        if connector is None or self._never_connected:
            raise errors.NotConnectedError("the queue pair has no connection", operation="read_limits")
        return connector.read_limits

    @property
    def retry(self) -> RetryPolicy:
        """How often and how long the adapter tries again on this connection, as the adapter itself reports it.

        retry.gives_up_s is the time after which a request to a dead host fails. The values may differ from the policy
        that the program asked for: an adapter rounds, a connection manager lowers, and 7 is not possible on rxe.

        All fields are None on adapters without RETRY_POLICY in info.capabilities: iWARP leaves retries to TCP, and
        NetworkDirect leaves them to its provider and does not tell them.

        Raises:
            NotConnectedError: there never was a connection.
        Source: ibv_query_qp(3).
        """
        self._check()
        with self._lock:
            self._check()
            if self._never_connected:
                raise errors.NotConnectedError("the queue pair has no connection", operation="retry")
            if Capability.RETRY_POLICY not in self._adapter.info.capabilities or self.type not in _RETRYING_TYPES:
                return RetryPolicy()
            return self._native_retry()

    @property
    def _completion_queues(self) -> tuple[CompletionQueue, CompletionQueue]:
        return self.receive_cq, self.initiator_cq

    def _begin_connection(self) -> None:
        """The connection exists. From now on initiator requests may be posted."""
        with self._lock:
            if self._rings is not None:
                self._set_connected()

    def _expect_message(self) -> None:
        """The connector takes the last step of this side. The peer's first message may come before that has ended."""
        self._posted_requests.watched = True

    def _on_message(self) -> None:
        """A message has come. Called without locks held."""
        connector = self.connector
        if connector is not None:
            connector._on_message(self)

    def _set_connected(self) -> None:
        self._never_connected = False
        self._posted_requests.watched = False
        # Not the connector's property, which raises if the adapter was removed meanwhile.
        limits = self._endpoint_limits or (None if self.connector is None else self.connector._read_limits)
        if limits is not None and not limits.outbound:
            self._lib.ndpy_queue_pair_refuse_reads(self._rings)
        self._lib.ndpy_queue_pair_set_connection(self._rings, self._lib.NDPY_CONNECTED)

    def _set_ended(self) -> None:
        """The connection is over. Called with locks held."""
        if self._ended:
            return
        self._ended = True
        for dependant in self._living_dependants():
            dependant._on_connection_ended(self)

    def _add_dependant(self, dependant: Any) -> None:
        if self._dependants is None:
            with self._lock:
                self._dependants = self._dependants or SharedWeakSet()
        self._dependants.add(dependant)

    def _living_dependants(self) -> list[Any]:
        return [] if self._dependants is None else self._dependants.members()

    def _end_connection(self, natively: bool = True) -> None:
        """The connection is over. Cancel the outstanding requests. Later requests are cancelled too.

        natively: False when the provider ends the queue pair by itself.
        """
        with self._lock:
            if self._ended or self._qp is None:
                return
            self._set_ended()
            cancelled = self._native_end_connection(natively)
        if cancelled:
            self._wake_queues()

    def _cancel_late_request(self, operation: int) -> None:
        with self._lock:
            if self._qp is None:
                return
            cancelled = self._native_cancel_late_request(operation)
        if cancelled:
            self._wake_queues()

    def _on_failed_completion(self) -> None:
        """A request failed for another reason than a cancel. Called without locks held."""
        _log.debug("%s: queue pair %d: a request has failed, see its completion", self._adapter.info.name, self._serial)
        self._native_on_failed_completion()
        # Read it only once, because another thread may set it to None.
        connector = self.connector
        if connector is not None:
            connector._on_failed_completion()

    def _wake_queues(self) -> None:
        """Wake everyone who waits for the completion queues.
        Completions came without an event, or no more will come.
        """
        for queue in set(self._completion_queues):
            queue._wake_all()

    @property
    def number(self) -> int:
        """The queue pair number (QPN), on Linux.

        Raises:
            UnsupportedError: NetworkDirect adapters do not tell it.
        """
        self._require_endpoints("number")
        return self._number

    def local_endpoint(
        self, gid_index: int | None = None, psn: int | None = None, *, gid: int | str | None = None
    ) -> Endpoint:
        """This side's part of a connection without a connection manager. The other side gives it to connect_endpoint().

        Later calls return the same endpoint, since the peer may have it already. Only the values that the arguments
        give change.

        Parameters:
            gid_index: the GID to use, as ibv_rc_pingpong's -g. None chooses by rank: RoCE v2 before v1, routable before
                link-local before loopback, IPv4 before IPv6.
            psn: the first packet's sequence number, 24 bits. None for a random one.
            gid: the GID to use, by its index, its address such as "192.0.2.1" or "fe80::1%eth0", or its network
                interface such as "eth0.10". The best one by rank, if there are several. Of several interfaces with the
                address, it is the one by which this machine's routes lead to the address's subnet.
        Raises:
            ValueError: there are a gid and a gid_index.
            UnsupportedError: iWARP adapters other than soft0, and NetworkDirect's, connect through connectors only.
            ConnectionActiveError: the queue pair is connected with other values than these.
            AddressUnreachableError: the adapter has no such GID, or the routes prefer none of several interfaces with
                the address.
        """
        self._require_endpoints("local_endpoint")
        if gid_index is not None and gid is not None:
            raise ValueError(f"gid_index={gid_index!r} and gid={gid!r} both choose the GID; give one of them")
        wanted = gid_index if gid is None else gid
        with self._lock:
            self._check()
            former = self._local
            if former is None or wanted is not None:
                endpoint = self._native_endpoint(wanted, former.psn if former is not None and psn is None else psn)
            else:
                endpoint = former if psn is None else dataclasses.replace(former, psn=psn & 0xFFFFFF)
            if self._path is not None and endpoint != self._path[0]:
                raise errors.ConnectionActiveError(
                    f"the queue pair is connected as {self._path[0]} with PSN {self._path[0].psn:#x}",
                    operation="local_endpoint",
                )
            self._local = endpoint
            return endpoint

    def connect_endpoint(
        self,
        remote: Endpoint,
        *,
        inbound_read_limit: int | None = None,
        outbound_read_limit: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connect to a peer without a connection manager. The program has brought the two endpoints across by itself.

        This side's endpoint is what local_endpoint() returned last, and the peer has to know it. The path MTU is the
        smaller one of the two ends. Nothing is negotiated: more reads at once than the peer serves end the connection.

        Parameters:
            remote: the peer's endpoint.
            inbound_read_limit: how many reads of the peer may run at once. None for the adapter's limit. A larger limit
                is lowered to that.
            outbound_read_limit: how many reads of this side may run at once. None for the adapter's limit. A larger
                limit is lowered to that, and to the number that the remote endpoint serves. read_limits has both
                results.
            retry: see RetryPolicy. Fields that are None are as in ibv_rc_pingpong: retry_count 7 (6 on rxe),
                rnr_retry_count ENDLESS, min_rnr_timer 12, ack_timeout 14.
        Raises:
            UnsupportedError: iWARP adapters other than soft0, and NetworkDirect's, connect through connectors only.
            ConnectionActiveError: the queue pair is connected, or was, or a connector has it.
            ProviderError: the adapter cannot reach that endpoint.
        """
        self._require_endpoints("connect_endpoint")
        if self.type is QueuePairType.UD:
            raise self._does_not("connect_endpoint")
        self._require_unused()
        if retry is not None and self.type not in (*_RETRYING_TYPES, QueuePairType.XRC_RECV):
            raise errors.UnsupportedError(
                f"a queue pair of type {self.type.name} does not try again, so it has no RetryPolicy",
                operation="connect_endpoint",
            )
        local = self._local or self.local_endpoint()
        limits = cap_read_limits(self._adapter.info, inbound_read_limit, outbound_read_limit)
        if self.type is QueuePairType.XRC_SEND:
            limits = limits._replace(inbound=0)
        elif self.type is QueuePairType.XRC_RECV:
            limits = limits._replace(outbound=0)
        elif self.type is not QueuePairType.RC:
            limits = ReadLimits(0, 0)
        if remote.inbound_read_limit is not None:
            limits = limits._replace(outbound=min(limits.outbound, remote.inbound_read_limit))
        with self._lock:
            # Another thread may have connected it meanwhile.
            self._require_unused()
            self._native_connect_endpoint(local, remote, limits, retry or RetryPolicy())
            self._path, self._endpoint_limits = (local, remote), limits
            self._set_connected()
        _log.debug("%s: queue pair %d: connected to %s", self._adapter.info.name, self._serial, remote)

    def modify(self, **attributes: Any) -> None:
        """Set attributes of the queue pair by hand, and change its state.

        The queue pair is in the state INIT when it is made. A program that connects it by hand makes it ready to
        receive (RTR) and then to send (RTS), on both sides. It takes either this way, or connect_endpoint(), or a
        connector. A queue pair of a connector can be modified between RTS and SQD, and to ERROR.

        Parameters:
            attributes: those of QueuePairAttributes, by name. Which ones a change of state needs and takes depends on
                the type of the queue pair. The page "Queue pairs by hand" has the table. For RTS, the defaults of
                connect_endpoint() are good values.
        Raises:
            QueuePairAttributesError: an attribute is missing, or one is too many; the message names them. Or there is
                no such change of state.
            ValueError, TypeError: a value is out of range or of a wrong type, or no attribute has this name.
            UnsupportedError: info.capabilities lacks MODIFY.
            ConnectionActiveError: a connector has the queue pair.
            DeviceBusyError: RESET, while windows are bound to the queue pair.
            ProviderError: the adapter refused the values.
        After RESET the queue pair is as if it was new, and its outstanding requests complete CANCELED. After ERROR they
        do so too, and later requests as well.
        Source: ibv_modify_qp(3).
        """
        check_names(attributes)
        given = QueuePairAttributes(**attributes).given()
        self._require_modify("modify")
        with self._lock:
            self._check()
            present = self._native_state()
            check_change(self.type, present, given)
            state = given.get("state", present)
            if (
                self.connector is not None
                and state is not QueuePairState.ERROR
                and not (self._never_connected is False and state in (QueuePairState.RTS, QueuePairState.SQD))
            ):
                raise errors.ConnectionActiveError("a connector has the queue pair", operation="modify")
            cancelled = self._change(state, given)
        if cancelled:
            self._wake_queues()

    def _change(self, state: QueuePairState, given: dict[str, Any]) -> bool:
        """Do modify(), under the lock. Returns whether completions were added of which the provider does not notify."""
        if state is QueuePairState.ERROR:
            self._never_connected = False
            cancelled = self._native_flush()
            self._set_ended()
            return cancelled
        if state is QueuePairState.RESET:
            if self._bindings:
                raise errors.DeviceBusyError(
                    f"{len(self._bindings)} windows are bound to the queue pair; invalidate or close them first",
                    operation="modify",
                )
            self._native_reset()
            self._never_connected, self._ended, self.failure = True, False, ""
            self._local = self._path = self._endpoint_limits = None
            self._by_hand = _NOTHING
            self._posted_requests.failed = False
            self._lib.ndpy_queue_pair_restart(self._rings)
            return True
        self._native_modify(given)
        self._by_hand = {**self._by_hand, **given}
        if state is QueuePairState.RTS and self._never_connected:
            limits = [self._by_hand.get(f"{side}_read_limit", 0) for side in ("inbound", "outbound")]
            self._endpoint_limits = ReadLimits(*limits)
            self._set_connected()
        return False

    def query(self) -> QueuePairAttributes:
        """The attributes that the queue pair has now, as the adapter tells them. Those that it does not tell are None.

        Raises:
            UnsupportedError: info.capabilities lacks MODIFY.
        Source: ibv_query_qp(3).
        """
        self._require_modify("query")
        with self._lock:
            self._check()
            return self._native_query()

    def _require_modify(self, operation: str) -> None:
        self._check()
        self._adapter._require(Capability.MODIFY, operation)

    def _require_endpoints(self, operation: str) -> None:
        self._check()
        if not self._has_endpoints:
            raise errors.UnsupportedError(
                f"{self._adapter.info.name} connects through connectors only; use Adapter.connect() and listen()",
                operation=operation,
            )

    def _require_unused(self) -> None:
        self._check()
        if not self._never_connected or self._ended or self.connector is not None:
            raise errors.ConnectionActiveError(
                "the queue pair is or was connected; create another one", operation="connect_endpoint"
            )
