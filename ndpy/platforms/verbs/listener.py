"""Listeners over librdmacm. Their events come through the adapter's thread, like the events of connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy.objects.connection import Connector
from ndpy.objects.listener import Listener
from ndpy.platforms.verbs.connection import VerbsConnector
from ndpy.platforms.verbs.listening import Ears
from ndpy.platforms.verbs.manager import CmEvent, ManagerClient
from ndpy.platforms.verbs.native_calls import check, ffi, lib, text
from ndpy.vocabulary.addresses import Address

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter


# The kernel has its own backlog of requests that the adapter's thread has not taken yet. When that is full, the kernel
# refuses requests and tells nobody. So the kernel gets the largest backlog that it takes by default
# (net.rdma_ucm.max_backlog), and ndpy refuses requests.
_KERNEL_BACKLOG = 1024


class VerbsListener(Listener, ManagerClient):
    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter, address: Address, backlog: int) -> None:
        super().__init__(adapter, backlog)
        self._ears: Ears | None = None
        # The adapter must know the listener before the first request comes.
        self._opened()
        try:
            self._ears = Ears(adapter, self._serial, address, max(backlog, _KERNEL_BACKLOG))
            self._address = self._ears.address
        except BaseException:
            self._mark_closed()
            raise

    def _on_event(self, event: CmEvent) -> None:
        if event.type != lib.RDMA_CM_EVENT_CONNECT_REQUEST:
            return
        if text(lib.ndpy_cm_device(event.id)) != self._adapter.info.name:
            lib.rdma_reject(event.id, ffi.NULL, 0)
            lib.rdma_destroy_id(event.id)
            return
        connector = VerbsConnector(self._adapter, event.id, event.key)
        connector._on_request(event)
        self._on_request(connector)

    def _native_close(self) -> list[Connector]:
        if self._ears is not None:
            check("close listener", self._ears.close())
        return []
