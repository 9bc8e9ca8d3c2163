"""The thread of an open adapter: it takes the packets of the adapter's completion port and closes what was dropped.

It refers to the adapter weakly, so that an adapter that the program drops is found by the garbage collector; the list of
orphans is the thread's own for the same reason.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from ndpy.networkdirect.library import DEVICE_REMOVED, ffi, lib, win32_error
from ndpy.networkdirect.overlapped import Request
from ndpy.resource import Orphans
from ndpy.unraisable import report

_BATCH = 64
_FOR_EVER = 0xFFFFFFFF
# Keys of packets that ndpy posts itself; the keys of requests are serial numbers, which start at 1.
_WAKE = 0
_STOP = 1 << 63


class EventThread:
    """Waits on a completion port without the interpreter's lock."""

    def __init__(self, name: str, orphans: Orphans, adapter: weakref.ref[Any]) -> None:
        self._orphans = orphans
        self._adapter = adapter
        self._requests: dict[int, Request] = {}
        self._stopping = False
        #: Nobody posts to the port after it was told to stop, since its handle is closed then and may become another
        #: file's. A finalizer may come while its own thread holds this.
        self._posting = threading.RLock()
        self.port = lib.CreateIoCompletionPort(ffi.cast("void *", -1), ffi.NULL, 0, 0)
        if self.port == ffi.NULL:
            raise win32_error("open adapter", lib.GetLastError(), "no completion port")
        self._thread = threading.Thread(target=self._run, name=f"ndpy-{name}", daemon=True)
        self._thread.start()

    def add_file(self, file: Any) -> None:
        """Take the packets of requests on this overlapped file."""
        if lib.CreateIoCompletionPort(file, self.port, 0, 0) == ffi.NULL:
            raise win32_error("open adapter", lib.GetLastError(), "the overlapped file takes no completion port")

    def expect(self, request: Request) -> None:
        """A packet of this request may come."""
        self._requests[request.key] = request

    def forget(self, request: Request) -> None:
        """Its end is known; a packet that still comes is for nobody."""
        self._requests.pop(request.key, None)

    def wake(self) -> None:
        """Look for orphans. Safe in a finalizer."""
        with self._posting:
            if not self._stopping:
                lib.ndpy_post_packet(self.port, _WAKE)

    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Take the packets that are on their way, end the thread and wait for it, unless this is it."""
        with self._posting:
            if not self._stopping:
                self._stopping = True
                lib.ndpy_post_packet(self.port, _STOP)
        if not self.is_current():
            self._thread.join()

    def _run(self) -> None:
        packets = ffi.new("struct ndpy_packet[]", _BATCH)
        stopped = False
        while not stopped:
            count = lib.ndpy_take_packets(self.port, packets, _BATCH, _FOR_EVER)
            if count < 0:
                print(f"ndpy: completion port: {win32_error('wait', -count, 'no packet')}", file=sys.stderr)
                break
            for index in range(count):
                packet = packets[index]
                if packet.request != ffi.NULL:
                    self._on_packet(packet.key)
                    lib.ndpy_request_stop(packet.request)
                elif packet.key == _STOP:
                    stopped = True
                else:
                    self._orphans.close_in_thread()
        with self._posting:
            self._stopping = True
            lib.CloseHandle(self.port)

    def _on_packet(self, key: int) -> None:
        request = self._requests.get(key)
        status = request.take() if request is not None else None
        if request is None or status is None:
            # Somebody else took the end, or another phase began, whose end brings another packet.
            return
        try:
            if status == DEVICE_REMOVED:
                adapter = self._adapter()
                if adapter is not None and adapter._defunct is None:
                    adapter._mark_removed()
            request.finish(status)
        except Exception as error:
            # One object's trouble must not stop the events of all others.
            report(error, "the end of an overlapped request")
