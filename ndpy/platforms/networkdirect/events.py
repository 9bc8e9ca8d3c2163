"""The thread of a NetworkDirect adapter.

It takes packets from the adapter's completion port, and waits without the interpreter's lock.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from ndpy.objects.adapter_thread import AdapterThread
from ndpy.objects.resource import Orphans
from ndpy.platforms.networkdirect.native_calls import DEVICE_REMOVED, ffi, lib, win32_error
from ndpy.platforms.networkdirect.overlapped import Request

_BATCH = 64
_FOR_EVER = 0xFFFFFFFF
# Keys of packets that ndpy posts itself. The keys of requests are serial numbers, which start at 1.
_WAKE = 0
_STOP = 1 << 63


class EventThread(AdapterThread):
    def __init__(self, name: str, orphans: Orphans, adapter: weakref.ref[Any]) -> None:
        super().__init__(name, orphans)
        self._adapter = adapter
        self._requests: dict[int, Request] = {}
        self._packets = ffi.new("struct ndpy_packet[]", _BATCH)
        self.port = lib.CreateIoCompletionPort(ffi.cast("void *", -1), ffi.NULL, 0, 0)
        if self.port == ffi.NULL:
            raise win32_error("open adapter", lib.GetLastError(), "no completion port")
        self._start()

    def add_file(self, file: Any) -> None:
        """Receive the packets of requests on this overlapped file from now on."""
        if lib.CreateIoCompletionPort(file, self.port, 0, 0) == ffi.NULL:
            raise win32_error("open adapter", lib.GetLastError(), "the overlapped file takes no completion port")

    def expect(self, request: Request) -> None:
        """Note that a packet of this request may come."""
        self._requests[request.key] = request

    def forget(self, request: Request) -> None:
        """Ignore a later packet of this request, because its end is known."""
        self._requests.pop(request.key, None)

    def _native_turn(self) -> bool:
        count = lib.ndpy_take_packets(self.port, self._packets, _BATCH, _FOR_EVER)
        if count < 0:
            raise win32_error("wait", -count, "the completion port gives no packets")
        stopped = False
        for index in range(count):
            packet = self._packets[index]
            if packet.request != ffi.NULL:
                self._call(partial(self._on_packet, packet.key), "the end of an overlapped request")
                lib.ndpy_request_stop(packet.request)
            elif packet.key == _STOP:
                stopped = True
            else:
                self._on_woken()
        return not stopped

    def _native_wake(self) -> None:
        lib.ndpy_post_packet(self.port, _STOP if self._stopping else _WAKE)

    def _native_free(self) -> None:
        lib.CloseHandle(self.port)

    def _on_packet(self, key: int) -> None:
        request = self._requests.get(key)
        status = request.take() if request is not None else None
        if request is None or status is None:
            # Another thread took the end. Or another phase began, and its end brings another packet.
            return
        if status == DEVICE_REMOVED:
            adapter = self._adapter()
            if adapter is not None:
                adapter._on_removal()
        request.finish(status)
