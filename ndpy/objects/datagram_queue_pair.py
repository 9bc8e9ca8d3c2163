"""Queue pairs for datagrams, and where datagrams go."""

from __future__ import annotations

import abc
import contextlib
from typing import Any

from ndpy import _core, errors
from ndpy.objects.connection_parameters import check_private_data
from ndpy.objects.memory import InlineElements
from ndpy.objects.multicast_group import MulticastGroup
from ndpy.objects.native_steps import DatagramSteps, DestinationSteps
from ndpy.objects.pending import Pending, wait_or_cancel
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import Resource, refuse_if_used
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.addresses import Address, is_multicast, resolve, resolve_destination
from ndpy.vocabulary.datagram import DatagramSource
from ndpy.vocabulary.endpoint import Endpoint
from ndpy.vocabulary.queue_pair_attributes import AddressVector

MULTICAST_NUMBER = 0xFFFFFF
#: The Q_Key of all datagrams whose way the connection manager finds by IP addresses.
MANAGER_QKEY = 0x01234567
#: How many bytes of private data a request for a queue pair takes, and the answer to it.
MAX_REQUEST_DATA = 180
MAX_ANSWER_DATA = 136


class Destination(_core.Destination, Resource, DestinationSteps):
    """Where datagrams go. DatagramQueuePair.destination() and resolve() make one.

    Close it when the last send to it has completed.

    Attributes:
        vector: the path, an AddressVector.
        qp_number: the number of the peer's queue pair.
        qkey: the Q_Key that the datagrams carry.
        private_data: what the peer's listener has sent with its answer to resolve().
        length: 0, because a destination has no bytes.
    Source: ibv_create_ah(3).
    """

    _release_order = 22

    #: For an error's count of bytes, which is over all that a request uses.
    length = 0
    private_data = b""
    #: The native address handle, None after the release.
    _handle: Any = None

    def __init__(self, queue_pair: DatagramQueuePair, vector: AddressVector, qp_number: int, qkey: int) -> None:
        super().__init__(queue_pair.adapter)
        for name, value, most in (("qp_number", qp_number, MULTICAST_NUMBER), ("qkey", qkey, 0xFFFFFFFF)):
            if not isinstance(value, int) or not 0 <= value <= most:
                raise ValueError(f"{name} is 0 to {most}, not {value!r}")
        self.vector = vector
        self.qp_number = qp_number
        self.qkey = qkey
        self._native_create()
        self._words = self._address(), qp_number | qkey << 32
        self._opened()

    def _release(self) -> None:
        # A post looks at this. No request goes to a handle that is being destroyed.
        self._defunct = self._closed_error
        try:
            self._native_destroy()
        except BaseException:
            if self._handle is not None:
                self._mark_still_open()
            raise

    def _describe(self) -> str:
        return f"Destination QPN {self.qp_number:#x}"

    @abc.abstractmethod
    def _address(self) -> int:
        """The address of the native handle."""


class DatagramQueuePair(QueuePair, DatagramSteps):
    """A queue pair that sends datagrams to any queue pair of its kind, made by Adapter.create_datagram_queue_pair().

    It has no connection: it can send and receive from the start. A datagram has at most max_datagram bytes. It may get
    lost, come twice or out of order, and its sender does not learn of it. One that finds no receive is dropped, and so
    is one that is longer than its receive, or that does not carry this queue pair's Q_Key.

    A receive gets the data only. The 40 bytes of the header that other programs see before them are kept apart:
    `completion.source` tells where a datagram came from, and `completion.source.header` are these bytes.

    Attributes:
        max_datagram: the most bytes of a datagram, which is the MTU of the port.
        qkey: the Q_Key that it was made with.
    Others are those of QueuePair. Of its requests it has send(), receive(), receive_many() and post(). A Batch has
    send_to() and receive() for it.
    Source: ibv_create_qp(3) with IBV_QPT_UD.
    """

    _destination_class: type[Destination]
    _destinations = Destination

    max_datagram = 0
    qkey = 0

    def __init__(self, *arguments: Any) -> None:
        #: Calls of resolve() and join_multicast() that have not ended. Each has a method fail(error).
        self._calls: set[Any] = set()
        #: GID and LID of each multicast group that it is attached to.
        self._groups: set[tuple[bytes, int]] = set()
        super().__init__(*arguments)

    @property
    def _max_length(self) -> int:
        return self.max_datagram

    def destination(
        self,
        peer: Endpoint | DatagramSource | AddressVector,
        *,
        qp_number: int | None = None,
        qkey: int | None = None,
    ) -> Destination:
        """Make a destination for send().

        Parameters:
            peer: the peer's endpoint, the source of a datagram that is to be answered, or any path.
            qp_number: the peer's queue pair. None for that of `peer`. For a multicast group it is 0xFFFFFF.
            qkey: what the peer's queue pair was made with. None for this one's own.
        Raises:
            ValueError: a number is out of range, or an AddressVector comes without qp_number.
            AddressUnreachableError: this port has no GID for an answer.
            ProviderError: the adapter refused the path.
        Source: ibv_create_ah(3); ibv_init_ah_from_wc(3).
        """
        self._check()
        if isinstance(peer, AddressVector):
            vector = peer
            if qp_number is None:
                raise ValueError("an AddressVector names no queue pair; give qp_number")
        else:
            vector = self._vector_to(peer) if isinstance(peer, Endpoint) else self._vector_back(peer)
            qp_number = peer.qp_number if qp_number is None else qp_number
        return self._destination_class(self, vector, qp_number, self.qkey if qkey is None else qkey)

    def resolve(self, address: Address, *, private_data: bytes = b"", timeout_s: float | None = None) -> Destination:
        """Ask the connection manager at an address where a queue pair for datagrams is.

        There a DatagramListener answers, or any program that listens in the port space RDMA_PS_UDP.

        Parameters:
            address: (host, port) of the listener.
            private_data: up to 180 bytes for the listener.
            timeout_s: how long to wait. None waits until the connection manager gives up, about 65 s.
        Returns: a Destination, with the listener's private_data.
        Raises:
            ConnectionRefusedError: nobody listens there, or the listener refused.
            AddressUnreachableError: there is no way from this adapter to the address.
            TimeoutError: there was no answer in time.
            LimitExceededError: there is too much private data.
            CanceledError: the queue pair was closed meanwhile.
        Source: rdma_connect(3) in RDMA_PS_UDP; InfiniBand Architecture, volume 1, 12.11 (SIDR).
        """
        timeout_s = timeout(timeout_s)
        pending = self.begin_resolve(address, private_data=private_data)
        try:
            return wait_or_cancel(pending, timeout_s)
        except errors.TimeoutError as error:
            if error.native or timeout_s is None:
                raise
            target = f"{address[0]} port {address[1]}"
            raise errors.TimeoutError(
                f"{target} has not answered within {timeout_s:g} s", operation="resolve", problem="connect-timeout"
            ) from None

    def begin_resolve(self, address: Address, *, private_data: bytes = b"") -> Pending[Destination]:
        """Start resolve(). Many may be under way.

        Returns: a Pending of the Destination.
        """
        self._check()
        data = check_private_data(private_data, MAX_REQUEST_DATA, "resolve")
        family, resolved = resolve_destination(address)
        with self._lifetime:
            self._check()
            return self._native_resolve(family, resolved, f"{address[0]} port {address[1]}", data)

    def join_multicast(self, group: str, *, timeout_s: float | None = None) -> MulticastGroup:
        """Join a multicast group, and receive what is sent to it.

        On RoCE the connection manager tells the switches (IGMP), on InfiniBand the subnet manager.

        Parameters:
            group: its IP address. The adapter needs an address of the same family.
            timeout_s: how long to wait. None waits for ever.
        Returns: the membership. Its `destination` is for send().
        Raises:
            ValueError: this is not an address of a multicast group, or the queue pair's qkey is not MANAGER_QKEY.
            AddressUnreachableError: the adapter has no address of that family.
            TimeoutError: there was no answer in time.
            ProviderError: the connection manager or the adapter refused.
            CanceledError: the queue pair was closed meanwhile.
        Source: rdma_join_multicast(3).
        """
        timeout_s = timeout(timeout_s)
        return wait_or_cancel(self.begin_join_multicast(group), timeout_s)

    def begin_join_multicast(self, group: str) -> Pending[MulticastGroup]:
        """Start join_multicast().

        Returns: a Pending of the membership.
        """
        self._check()
        self._require_manager_qkey("join_multicast")
        family, resolved = resolve((group, 0))
        if not is_multicast(resolved[0]):
            raise ValueError(f"{group} is not the address of a multicast group")
        with self._lifetime:
            self._check()
            return self._native_join(family, resolved)

    def _require_manager_qkey(self, operation: str) -> None:
        if self.qkey != MANAGER_QKEY:
            raise ValueError(
                f"{operation}: the connection manager gives every sender the Q_Key {MANAGER_QKEY:#x}, and this queue "
                f"pair was made with {self.qkey:#x}, so it would receive nothing; make it with qkey={MANAGER_QKEY:#x}"
            )

    def _vector_to(self, peer: Endpoint) -> AddressVector:
        own = self._local or self.local_endpoint()
        has_route = any(peer.gid) and (bool(own.gid_type and own.gid_type != "InfiniBand") or not peer.lid)
        return AddressVector(gid=peer.gid if has_route else None, gid_index=own.gid_index, lid=peer.lid, port=own.port)

    def _vector_back(self, source: DatagramSource) -> AddressVector:
        ports = self._adapter.info.ports
        port = next((port for port in ports if port.number == self._local_port()), ports[0])
        plain = AddressVector(
            lid=source.lid, port=port.number, service_level=source.service_level, source_path_bits=source.path_bits
        )
        if source.gid is None:
            return plain
        own = [gid for gid in port.gids if gid.value == source.local_gid and source.gid_type in ("", gid.type)]
        if not own:
            # A datagram to a multicast group came to none of this port's addresses.
            best = self._local or self.local_endpoint()
            index = best.gid_index
        else:
            index = own[0].index
        return AddressVector(
            gid=source.gid,
            gid_index=index,
            lid=source.lid,
            port=port.number,
            service_level=source.service_level,
            source_path_bits=source.path_bits,
            traffic_class=source.traffic_class,
            flow_label=source.flow_label,
        )

    def send(  # type: ignore[override]
        self,
        sges: InlineElements,
        destination: Destination,
        *,
        context: int = 0,
        flags: int = 0,
        immediate: int | None = None,
    ) -> None:
        """Send a datagram, and return as soon as it is queued.

        Its completion says that it has left, not that it has arrived.

        Parameters:
            sges: as for QueuePair.send(); at most max_datagram bytes.
            destination: where it goes. It stays alive until the request ends.
            context: 0 to 2**64 - 1; comes back in the Completion.
            flags: SILENT_SUCCESS, SOLICITED and INLINE.
            immediate: as for QueuePair.send().
        Raises:
            LimitExceededError: there are more than max_datagram bytes, or too many elements.
            TypeError: destination is not a Destination.
            QueueFullError and so on: as for QueuePair.send().
        Source: ibv_post_send(3), wr.ud.
        """
        self.send_to(sges, destination, context=context, flags=flags, immediate=immediate)

    def attach_multicast(self, group: bytes, *, lid: int = 0) -> None:
        """Receive what is sent to a multicast group.

        On InfiniBand the port has to be a member of the group already.

        Parameters:
            group: its GID, 16 bytes. On RoCE v2 an IPv6 multicast address, or an IPv4 one mapped to IPv6.
            lid: its LID on InfiniBand.
        Raises:
            ValueError: group is not 16 bytes.
            ProviderError: the adapter refused it.
        Source: ibv_attach_mcast(3).
        """
        self._multicast("attach_multicast", group, lid)

    def detach_multicast(self, group: bytes, *, lid: int = 0) -> None:
        """No longer receive what is sent to a group.

        Parameters:
            group, lid: as for attach_multicast().
        Raises:
            ValueError: group is not 16 bytes.
            ProviderError: the adapter refused it, such as if the queue pair is not attached to the group.
        Source: ibv_detach_mcast(3).
        """
        self._multicast("detach_multicast", group, lid)

    def _multicast(self, operation: str, group: bytes, lid: int) -> None:
        if not isinstance(group, bytes) or len(group) != 16:
            raise ValueError(f"a group is a GID of 16 bytes, not {group!r}")
        with self._lock:
            self._check()
            self._native_multicast(operation, group, lid)
            if operation == "attach_multicast":
                self._groups.add((group, lid))
            else:
                self._groups.discard((group, lid))

    def _forget_multicast(self, group: bytes, lid: int) -> None:
        """detach_multicast() of a membership that ends. Nothing is left to do if the queue pair has gone."""
        with self._lock:
            if self._qp is not None and (group, lid) in self._groups:
                self._leave_group(group, lid)

    def _leave_group(self, group: bytes, lid: int) -> None:
        # An adapter that was removed refuses it.
        with contextlib.suppress(errors.ProviderError):
            self._native_multicast("detach_multicast", group, lid)
        self._groups.discard((group, lid))

    # ---- the end ----

    def _refuse_if_used(self) -> None:
        refuse_if_used(self, "queue_pair")

    def _release(self) -> None:
        self._end_calls(errors.CanceledError("the queue pair was closed", operation="close"))
        super()._release()

    def _end_calls(self, error: errors.NdpyError) -> None:
        for call in list(self._calls):
            call.fail(error)

    def _on_removed(self) -> None:
        super()._on_removed()
        self._end_calls(self._removed_error())

    def _on_forked(self) -> None:
        super()._on_forked()
        self._calls.clear()

    def _describe(self) -> str:
        return "DatagramQueuePair"
