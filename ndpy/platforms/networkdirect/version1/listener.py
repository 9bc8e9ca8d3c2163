"""Listeners of version 1. A new native listener already listens, at the adapter's address."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from ndpy.platforms.networkdirect.listener import NetworkDirectListener
from ndpy.platforms.networkdirect.native_calls import create_version1, ffi, lib
from ndpy.platforms.networkdirect.version1.connection import TCP, own_host
from ndpy.vocabulary.addresses import Address

if TYPE_CHECKING:
    from ndpy.platforms.networkdirect.version1.adapter import Version1Adapter


class Version1Listener(NetworkDirectListener):
    _adapter: Version1Adapter

    def _listen(self, local: Address, where: str) -> tuple[Any, Address]:
        host = own_host(self._adapter, local[0], "listen")
        port = ffi.new("uint16_t *", socket.htons(local[1]))
        native = create_version1(
            "listen",
            "INDListen",
            lib.INDAdapter_Listen,
            self._adapter._native,
            0,
            TCP,
            port[0],
            port,
            where=where,
        )
        return native, (host, socket.ntohs(port[0]))

    def _get_request_native(self, connector: Any, overlapped: Any) -> int:
        return int(lib.INDListen_GetConnectionRequest(self._native, connector, overlapped))
