"""Waiting for many completion queues on a completion port.

The packets of a queue come to the completion port of its adapter. Some of them are for a poller's requests. The
adapter's thread passes these on to the poller's own port. So a queue may be in several pollers, and a poller may have
queues of several adapters.
"""

from __future__ import annotations

from typing import Any

from ndpy import errors
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.poller import Poller
from ndpy.platforms.networkdirect.completion_queue import NetworkDirectCompletionQueue
from ndpy.platforms.networkdirect.native_calls import ffi, lib, win32_error
from ndpy.platforms.networkdirect.overlapped import Request, next_wait
from ndpy.vocabulary.flags import Notify

_BATCH = 64


class NetworkDirectPoller(Poller):
    def __init__(self, *, spin_s: float = 0.0) -> None:
        super().__init__(spin_s=spin_s)
        self._port = lib.CreateIoCompletionPort(ffi.cast("void *", -1), ffi.NULL, 0, 0)
        if self._port == ffi.NULL:
            self._closed = True
            raise win32_error("poller", lib.GetLastError(), "no completion port")
        self._packets = ffi.new("struct ndpy_packet[]", _BATCH)
        #: How many of them may not have been handled. Ctrl-C may come as soon as they were taken.
        self._packets_left = 0
        self._by_key: dict[int, NetworkDirectCompletionQueue] = {}
        #: The keys of requests whose packet has not come here yet.
        self._on_their_way: set[int] = set()

    def _native_add(self, queue: CompletionQueue) -> Request:
        assert isinstance(queue, NetworkDirectCompletionQueue)
        queue._refuse_own_file("add")
        request = queue._take_left_behind(self._port)
        if request is not None:
            self._on_their_way.add(request.key)
        else:
            request = Request(queue._cq, queue._adapter._events, forward=self._port)
        self._by_key[request.key] = queue
        return request

    def _native_remove(self, queue: Any, watched: Request) -> None:
        del self._by_key[watched.key]
        self._on_their_way.discard(watched.key)
        queue._leave_behind(watched)

    def _native_arm(self, queue: CompletionQueue, watched: Request) -> bool:
        assert isinstance(queue, NetworkDirectCompletionQueue)
        if watched.key in self._on_their_way:
            return False
        self._on_their_way.add(watched.key)
        satisfied = True
        try:
            satisfied = queue._issue(Notify.ANY, watched)
        finally:
            if satisfied:
                self._on_their_way.discard(watched.key)
        return satisfied

    def _native_wait(self, deadline: float | None) -> bool:
        if self._packets_left:
            self._handle_packets()
            return True
        wait_ms, last = next_wait(deadline)
        self._packets_left = _BATCH
        count = lib.ndpy_take_packets(self._port, self._packets, _BATCH, wait_ms)
        self._packets_left = max(count, 0)
        if count < 0:
            self._check()
            raise win32_error("wait", -count, "the completion port failed")
        self._handle_packets()
        return bool(count) or not last

    def _handle_packets(self) -> None:
        failure: errors.NdpyError | None = None
        for index in range(self._packets_left):
            packet = self._packets[index]
            request = packet.request
            if request != ffi.NULL:
                try:
                    self._on_packet(packet.key)
                except errors.NdpyError as error:
                    failure = error
                packet.request = ffi.NULL
                lib.ndpy_request_stop(request)
        self._packets_left = 0
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback refers to this frame.
                del failure

    def _on_packet(self, key: int) -> None:
        with self._lock:
            queue = self._by_key.get(key)
            request: Request | None = self._queues.get(queue) if queue is not None else None
            if queue is None or request is None:
                self._on_their_way.discard(key)
                return
        status = request.take()
        if status is None and request.running:
            # Another phase has begun, which brings another packet.
            return
        with self._lock:
            self._on_their_way.discard(key)
            if queue in self._queues:
                self._maybe_ready.add(queue)
        if status is not None:
            queue._check_end(request, status)

    @property
    def completion_port(self) -> int:
        self._check()
        return int(ffi.cast("uintptr_t", self._port))

    def _native_wake(self) -> None:
        lib.ndpy_post_packet(self._port, 0)

    def _native_free(self) -> None:
        self._handle_packets()
        # Take the packets that were passed on before their requests were detached. Until then the requests stay
        # allocated.
        while (count := lib.ndpy_take_packets(self._port, self._packets, _BATCH, 0)) > 0:
            for index in range(count):
                if self._packets[index].request != ffi.NULL:
                    lib.ndpy_request_stop(self._packets[index].request)
        lib.CloseHandle(self._port)
