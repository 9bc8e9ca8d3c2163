"""Queue pairs for datagrams, and where datagrams go."""

from __future__ import annotations

import abc
from typing import Any, NoReturn

from ndpy import errors
from ndpy.datagram import DatagramSource
from ndpy.endpoint import Endpoint
from ndpy.memory import InlineElements
from ndpy.queue_pair import QueuePair
from ndpy.queue_pair_attributes import AddressVector
from ndpy.resource import Resource
from ndpy.work_queues import SEND_DATAGRAM, SEND_DATAGRAM_WITH_IMMEDIATE

MULTICAST_NUMBER = 0xFFFFFF


class Destination(Resource):
    """Where datagrams go, made by DatagramQueuePair.destination(). Close it when the last send to it has completed.

    Attributes:
        vector: the path, an AddressVector.
        qp_number: the number of the peer's queue pair.
        qkey: the Q_Key that the datagrams carry.
    Source: ibv_create_ah(3).
    """

    _release_order = 22

    #: For an error's count of bytes, which is over all that a request uses.
    length = 0
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
        self._opened()

    @property
    def _words(self) -> tuple[int, int]:
        """The operands of a request. See struct ndpy_remote."""
        self._check()
        return self._address(), self.qp_number | self.qkey << 32

    def _describe(self) -> str:
        return f"Destination QPN {self.qp_number:#x}"

    @abc.abstractmethod
    def _address(self) -> int:
        """The address of the native handle."""

    @abc.abstractmethod
    def _native_create(self) -> None:
        """Make the native handle."""


class DatagramQueuePair(QueuePair):
    """A queue pair that sends datagrams to any queue pair of its kind, made by Adapter.create_datagram_queue_pair().

    It has no connection: it can send and receive from the start. A datagram has at most max_datagram bytes. It may get lost, come
    twice or out of order, and its sender does not learn of it. One that finds no receive is dropped, and so is one that is longer
    than its receive, or that does not carry this queue pair's Q_Key.

    A receive gets the data only. The 40 bytes of the header that other programs see before them are kept apart:
    `completion.source` tells where a datagram came from, and `completion.source.header` are these bytes.

    Attributes:
        max_datagram: the most bytes of a datagram, which is the MTU of the port.
        qkey: the Q_Key that it was made with.
    Others are those of QueuePair. Of its requests it has send(), receive(), receive_many() and post(). A Batch has send_to() and
    receive() for it.
    Source: ibv_create_qp(3) with IBV_QPT_UD.
    """

    _destination_class: type[Destination]

    max_datagram = 0
    qkey = 0

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
            TypeError: destination is no Destination.
            QueueFullError and so on: as for QueuePair.send().
        Source: ibv_post_send(3), wr.ud.
        """
        if not isinstance(destination, Destination):
            raise TypeError(f"a destination is a Destination, not {type(destination).__name__}")
        self._check()
        self._require_same_adapter(destination, "the destination")
        if immediate is not None and not (isinstance(immediate, int) and 0 <= immediate < 1 << 32):
            raise ValueError(f"immediate is 0 to 4294967295, not {immediate!r}")
        operation = SEND_DATAGRAM if immediate is None else SEND_DATAGRAM_WITH_IMMEDIATE
        words = (immediate or 0, *destination._words)
        self._post_many(operation, sges, context, flags, None, words, destination)

    def _refuse(self, operation: str) -> NoReturn:
        self._check()
        raise errors.UnsupportedError("a queue pair of type UD sends datagrams only", operation=operation)

    def read(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("read")

    def write(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("write")

    def send_and_invalidate(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("send_and_invalidate")

    def compare_and_swap(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("compare_and_swap")

    def fetch_and_add(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("fetch_and_add")

    def bind(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("bind")

    def connect_endpoint(self, *arguments: Any, **options: Any) -> None:
        """UnsupportedError."""
        self._refuse("connect_endpoint")

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

        Source: ibv_detach_mcast(3).
        """
        self._multicast("detach_multicast", group, lid)

    def _multicast(self, operation: str, group: bytes, lid: int) -> None:
        if not isinstance(group, bytes) or len(group) != 16:
            raise ValueError(f"a group is a GID of 16 bytes, not {group!r}")
        with self._lock:
            self._check()
            self._native_multicast(operation, group, lid)

    def _describe(self) -> str:
        return "DatagramQueuePair"

    @abc.abstractmethod
    def _local_port(self) -> int:
        """The number of the port that it uses."""

    @abc.abstractmethod
    def _native_multicast(self, operation: str, group: bytes, lid: int) -> None:
        """Attach to or detach from a multicast group. Under the lock."""
