"""Waiting for many completion queues on a completion port.

A queue is looked at when it was added, delivered something, or had a notification; then a Notify is issued for it, and it is
looked at once more before it counts as idle. A queue's file has the port of its adapter; the adapter's thread passes the
packets of a poller's requests on to the poller's own port, so a queue may be in several pollers, and a poller may have
queues of several adapters.
"""

from __future__ import annotations

import time
from typing import Any

from ndpy import errors
from ndpy.completion import Completion, CompletionQueue
from ndpy.flags import Notify
from ndpy.networkdirect.completion import NetworkDirectCompletionQueue
from ndpy.networkdirect.library import PENDING, ffi, lib, win32_error
from ndpy.networkdirect.overlapped import Request, next_wait
from ndpy.poller import Poller

_BATCH = 64


class NetworkDirectPoller(Poller):
    def __init__(self) -> None:
        super().__init__()
        self._port = lib.CreateIoCompletionPort(ffi.cast("void *", -1), ffi.NULL, 0, 0)
        if self._port == ffi.NULL:
            self._closed = True
            raise win32_error("poller", lib.GetLastError(), "no completion port")
        self._packets = ffi.new("struct ndpy_packet[]", _BATCH)
        self._queues: dict[NetworkDirectCompletionQueue, Request] = {}
        self._by_key: dict[int, NetworkDirectCompletionQueue] = {}
        #: Native requests whose packet has not come here yet.
        self._on_their_way: set[int] = set()
        self._to_look_at: set[NetworkDirectCompletionQueue] = set()
        self._woken = False
        self._waiters = 0

    def add(self, completion_queue: CompletionQueue) -> None:
        assert isinstance(completion_queue, NetworkDirectCompletionQueue)
        # A queue that is being closed leaves the pollers that it knows of once nobody can add it any more.
        with self._lock, completion_queue._lock:
            self._check()
            completion_queue._check()
            completion_queue._refuse_own_file("add")
            if completion_queue not in self._queues:
                request = Request(completion_queue._cq, completion_queue._adapter._events, forward=self._port)
                self._queues[completion_queue] = request
                self._by_key[request.key] = completion_queue
                completion_queue._pollers.add(self)
        self._look_at(completion_queue)

    def remove(self, completion_queue: CompletionQueue) -> None:
        assert isinstance(completion_queue, NetworkDirectCompletionQueue)
        with self._lock:
            request = self._queues.pop(completion_queue, None)
            if request is None:
                return
            del self._by_key[request.key]
            request.detach()
            with completion_queue._lock:
                completion_queue._pollers.discard(self)
            self._to_look_at.discard(completion_queue)

    def _look_at(self, queue: NetworkDirectCompletionQueue) -> None:
        """The queue may have completions although no notification says so."""
        with self._lock:
            if not self._closed and queue in self._queues:
                self._to_look_at.add(queue)
                lib.ndpy_post_packet(self._port, 0)

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._check()
            self._waiters += 1
        try:
            while True:
                ready = self._collect()
                with self._lock:
                    # What was taken is delivered although the poller was closed meanwhile: nobody else gets it.
                    if not ready:
                        self._check()
                    woken, self._woken = self._woken, False
                if ready or woken:
                    return ready
                self._sleep(deadline)
        finally:
            with self._lock:
                self._waiters -= 1
                if self._closed and not self._waiters:
                    self._free()

    def _collect(self) -> list[tuple[CompletionQueue, list[Completion]]]:
        with self._lock:
            self._check()
            candidates, self._to_look_at = self._to_look_at, set()
        ready: list[tuple[CompletionQueue, list[Completion]]] = []
        while candidates:
            queue = candidates.pop()
            try:
                completions = queue.poll()
                if not completions:
                    self._arm(queue)
                    completions = queue.poll()
            except errors.ClosedError:
                # Closed while it was looked at; closing removes it.
                continue
            except errors.NdpyError:
                # One queue's trouble must not cost the others what they have; it is told when nothing else is to be.
                with self._lock:
                    self._to_look_at |= candidates | ({queue} if ready else set())
                    self._to_look_at &= self._queues.keys()
                if ready:
                    return ready
                raise
            if completions:
                ready.append((queue, completions))
                with self._lock:
                    if queue in self._queues:
                        self._to_look_at.add(queue)
        return ready

    def _arm(self, queue: NetworkDirectCompletionQueue) -> None:
        with self._lock:
            request = self._queues.get(queue)
            if request is None or request.key in self._on_their_way:
                return
            self._on_their_way.add(request.key)
        with queue._lock:
            if queue._defunct is not None:
                raise queue._defunct()
            try:
                status = queue._notify(Notify.ANY, request)
            except BaseException:
                self._on_their_way.discard(request.key)
                raise
        if status != PENDING:
            self._on_their_way.discard(request.key)
            self._look_at(queue)

    def _sleep(self, deadline: float | None) -> None:
        wait_ms, last = next_wait(deadline)
        count = lib.ndpy_take_packets(self._port, self._packets, _BATCH, wait_ms)
        if count < 0:
            self._check()
            raise win32_error("wait", -count, "the completion port failed")
        if not count and last:
            raise errors.TimeoutError("no completion within the time allowed", operation="wait")
        failure: errors.NdpyError | None = None
        for index in range(count):
            packet = self._packets[index]
            if packet.request != ffi.NULL:
                try:
                    self._on_packet(packet.key)
                except errors.NdpyError as error:
                    failure = error
                lib.ndpy_request_stop(packet.request)
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback refers to this frame.
                del failure

    def _on_packet(self, key: int) -> None:
        with self._lock:
            queue = self._by_key.get(key)
            request: Any = self._queues.get(queue) if queue is not None else None
            if queue is None or request is None:
                self._on_their_way.discard(key)
                return
        status = request.take()
        if status is None and request.running:
            # Another phase, with another packet.
            return
        with self._lock:
            self._on_their_way.discard(key)
            if queue in self._queues:
                self._to_look_at.add(queue)
        if status is not None:
            queue._ended(request, status)

    @property
    def completion_port(self) -> int:
        """The handle of the completion port, for programs that wait for it together with what is theirs."""
        self._check()
        return int(ffi.cast("uintptr_t", self._port))

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._woken = True
                lib.ndpy_post_packet(self._port, 0)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for queue, request in self._queues.items():
                request.detach()
                with queue._lock:
                    queue._pollers.discard(self)
            self._queues.clear()
            self._by_key.clear()
            self._to_look_at.clear()
            # A thread that still waits on the port is woken, and frees it when it leaves.
            if self._waiters:
                lib.ndpy_post_packet(self._port, 0)
            else:
                self._free()

    def _free(self) -> None:
        # What was passed on before the requests were detached still counts as the provider's.
        while (count := lib.ndpy_take_packets(self._port, self._packets, _BATCH, 0)) > 0:
            for index in range(count):
                if self._packets[index].request != ffi.NULL:
                    lib.ndpy_request_stop(self._packets[index].request)
        lib.CloseHandle(self._port)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
