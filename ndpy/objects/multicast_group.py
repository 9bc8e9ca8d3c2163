"""Memberships in multicast groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy.objects.resource import Resource

if TYPE_CHECKING:
    from ndpy.objects.datagram_queue_pair import DatagramQueuePair, Destination


class MulticastGroup(Resource):
    """The membership of a queue pair in a multicast group. DatagramQueuePair.join_multicast() makes one.

    The queue pair receives what is sent to the group, also what it sends itself. close() leaves the group.

    Attributes:
        queue_pair: the member. It cannot be closed before the membership.
        address: the group's IP address.
        gid: the group's GID, 16 bytes.
        lid: the group's LID on InfiniBand. 0 on Ethernet.
        destination: where DatagramQueuePair.send() sends to the group. It is closed with the membership.
        failure: "" while the membership holds. Otherwise why it has ended.
    Source: rdma_join_multicast(3), rdma_leave_multicast(3).
    """

    _release_order = 15

    def __init__(self, queue_pair: DatagramQueuePair, address: str, destination: Destination) -> None:
        super().__init__(queue_pair._adapter)
        vector = destination.vector
        assert vector.gid is not None
        self.queue_pair = queue_pair
        self.address = address
        self.gid: bytes = vector.gid
        self.lid = vector.lid
        self.destination = destination
        self.failure = ""

    def _describe(self) -> str:
        return f"MulticastGroup {self.address}"
