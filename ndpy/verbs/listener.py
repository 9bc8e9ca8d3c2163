"""Listeners over librdmacm. Their events come through the adapter's thread, like the events of connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ndpy.addresses import Address, listening_address
from ndpy.connection import Connector
from ndpy.listener import Listener
from ndpy.verbs.addresses import bind_identifier, new_identifier, unpack_address
from ndpy.verbs.connection import VerbsConnector
from ndpy.verbs.manager import CmEvent, ManagerClient
from ndpy.verbs.native_calls import check, check_errno, ffi, lib, text

if TYPE_CHECKING:
    from ndpy.verbs.adapter import VerbsAdapter


# The kernel has its own backlog of requests that the adapter's thread has not taken yet. When that is full, the kernel
# refuses requests and tells nobody. So the kernel gets the largest backlog that it takes by default
# (net.rdma_ucm.max_backlog), and ndpy refuses requests.
_KERNEL_BACKLOG = 1024


class VerbsListener(Listener, ManagerClient):
    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter, address: Address, backlog: int) -> None:
        super().__init__(adapter, backlog)
        self._id = new_identifier(adapter, self._serial)
        # The adapter must know the listener before the first request comes.
        self._opened()
        try:
            bind_identifier(adapter, self._id, listening_address(adapter.info.addresses, address))
            check_errno(
                "listen", lib.rdma_listen(self._id, max(backlog, _KERNEL_BACKLOG)), f"cannot listen at {address}"
            )
            bound = unpack_address(self._id, peer=False)
            assert bound is not None
            self._address = bound
        except BaseException:
            self._mark_closed()
            lib.rdma_destroy_id(self._id)
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
        identifier, self._id = self._id, None
        if identifier is not None and (result := lib.rdma_destroy_id(identifier)):
            self._id = identifier
            check("close listener", result)
        return []
