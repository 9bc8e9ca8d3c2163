"""Listeners that tell other programs where a queue pair for datagrams is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy.objects.resource import Resource
from ndpy.vocabulary.addresses import Address

if TYPE_CHECKING:
    from ndpy.objects.datagram_queue_pair import DatagramQueuePair


class DatagramListener(Resource):
    """Tells every program that asks at its address where the queue pair is. Adapter.listen_for_datagrams() makes one.

    It answers by itself, and keeps nothing about those that ask: the datagrams that they send name their senders. A
    program asks with DatagramQueuePair.resolve(), or with rdma_connect(3) in the port space RDMA_PS_UDP.

    Attributes:
        queue_pair: the one that it names. It cannot be closed before the listener.
        private_data: the private data of each answer.
        answered: how many requests it has answered. It counts a program twice if the first answer was lost.
    Source: rdma_accept(3); InfiniBand Architecture, volume 1, 12.11 (SIDR).
    """

    _release_order = 5

    def __init__(self, queue_pair: DatagramQueuePair, private_data: bytes) -> None:
        super().__init__(queue_pair._adapter)
        self.queue_pair = queue_pair
        self.private_data = private_data
        self.answered = 0
        #: With the real port, once it listens.
        self._address: Address = ("?", 0)

    @property
    def address(self) -> Address:
        """The (host, port) at which it listens. The port is never 0."""
        self._check()
        return self._address

    def _describe(self) -> str:
        host, port = self._address
        return f"DatagramListener at {host} port {port}"
