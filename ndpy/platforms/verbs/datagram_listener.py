"""Answers to requests for a queue pair for datagrams, over librdmacm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy.objects.datagram_listener import DatagramListener
from ndpy.objects.datagram_queue_pair import DatagramQueuePair
from ndpy.platforms.verbs.listening import Ears
from ndpy.platforms.verbs.manager import CmEvent, ManagerClient, parameters_with
from ndpy.platforms.verbs.native_calls import check, lib, text
from ndpy.vocabulary.addresses import Address

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

_BACKLOG = 1024


class VerbsDatagramListener(DatagramListener, ManagerClient):
    _adapter: VerbsAdapter

    def __init__(
        self, adapter: VerbsAdapter, queue_pair: DatagramQueuePair, address: Address, private_data: bytes
    ) -> None:
        super().__init__(queue_pair, private_data)
        self._answer, self._kept = parameters_with(private_data)
        self._answer.qp_num = queue_pair._number
        self._ears: Ears | None = None
        # The adapter must know the listener before the first request comes.
        self._opened()
        try:
            self._ears = Ears(adapter, self._serial, address, _BACKLOG, datagrams=True)
            self._address = self._ears.address
        except BaseException:
            self._mark_closed()
            raise

    def _on_event(self, event: CmEvent) -> None:
        if event.type != lib.RDMA_CM_EVENT_CONNECT_REQUEST:
            return
        ours = text(lib.ndpy_cm_device(event.id)) == self._adapter.info.name
        # If this fails, the program that asks has gone, or its request comes again.
        if not self.closed and ours and not lib.rdma_accept(event.id, self._answer):
            self.answered += 1
        lib.rdma_destroy_id(event.id)

    def _release(self) -> None:
        if self._ears is not None:
            check("close listener", self._ears.close())
