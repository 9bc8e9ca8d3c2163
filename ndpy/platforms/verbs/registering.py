"""Registering in worker threads.

ibv_reg_mr() returns when the kernel has pinned the pages and the device knows them. That takes microseconds for a small
buffer, and milliseconds for a large one. So begin_register() registers less than _SMALL bytes in the calling thread, and
leaves the others to a few worker threads. If a thread waits for a registration that no worker has begun, that thread
makes it. With a single processor the workers save no time, and only let begin_register() return. So fewer of the
registrations are theirs.

The workers end with their adapter. They are daemons, so the end of a program does not wait for a registration. A
ThreadPoolExecutor would wait. It would also hold the memory of a cancelled registration until a worker looks at it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ndpy import errors
from ndpy.objects.pending import Pending
from ndpy.vocabulary.placement import usable_processors
from ndpy.vocabulary.unraisable import report

if TYPE_CHECKING:
    from ndpy.platforms.verbs.memory import VerbsMemoryRegion

_THREADS = 4
# The calling thread registers what is shorter: with several processors what takes no longer than a hand-off to a worker,
# with a single one what takes no more than about 2 ms.
_SMALL, _SMALL_ALONE = 1 << 16, 1 << 22


class QueuedRegistration(Pending["VerbsMemoryRegion"]):
    """A registration that waits for a worker, or that a worker has begun."""

    def __init__(self, workers: RegistrationWorkers) -> None:
        super().__init__("register", lambda: workers.withdraw(self))
        self._workers = workers

    def _wait(self, timeout_s: float | None) -> None:
        # This thread could not give up its own registration at a deadline.
        if timeout_s is None:
            self._workers.help(self)
        super()._wait(timeout_s)


class RegistrationWorkers:
    """Up to _THREADS threads that register. Each starts when there is work for it. An idle one refers to no adapter."""

    def __init__(self, adapter_name: str) -> None:
        self._adapter_name = adapter_name
        self._small = _SMALL if usable_processors() > 1 else _SMALL_ALONE
        self._renew_locks()
        self._waiting: dict[QueuedRegistration, VerbsMemoryRegion] = {}
        self._running: dict[QueuedRegistration, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._stopping = False

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)

    def begin(self, region: VerbsMemoryRegion) -> Pending[VerbsMemoryRegion]:
        """Register the region, now or in a worker, unless the result is cancelled before a worker begins."""
        if region.length < self._small:
            region._register_now()
            done: Pending[VerbsMemoryRegion] = Pending("register")
            done.succeed(region)
            return done
        registration = QueuedRegistration(self)
        with self._lock:
            if self._stopping:
                raise errors.ClosedError(f"adapter {self._adapter_name} is being closed")
            self._waiting[registration] = region
            if self._idle:
                # Count it here, so that the next registration finds another thread.
                self._idle -= 1
                self._work.notify()
            elif len(self._threads) < _THREADS:
                self._start_thread()
            started = bool(self._threads)
        if not started:
            self.help(registration)
        return registration

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"ndpy-{self._adapter_name}-register-{len(self._threads)}", daemon=True
        )
        # A process may be at its limit of threads. Fewer are enough.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)

    def help(self, registration: QueuedRegistration) -> None:
        """Register in the calling thread, unless a worker has begun."""
        with self._lock:
            region = self._waiting.pop(registration, None)
            if region is None:
                return
            self._running[registration] = threading.current_thread()
        self._register(registration, region)

    def withdraw(self, registration: QueuedRegistration) -> None:
        """Let go of a cancelled registration's memory now, unless a worker has begun."""
        with self._lock:
            self._waiting.pop(registration, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting:
                    if self._stopping:
                        return
                    self._idle += 1
                    self._work.wait()
                registration = next(iter(self._waiting))
                region = self._waiting.pop(registration)
                self._running[registration] = threading.current_thread()
            try:
                self._register(registration, region)
            except BaseException as error:
                # The thread goes on: there may be more to register.
                report(error, "the end of a registration")
            # An idle thread must not keep the last region.
            del registration, region

    def _register(self, registration: QueuedRegistration, region: VerbsMemoryRegion) -> None:
        failure: BaseException | None = None
        try:
            try:
                region._adapter._check()
                region._native_register()
            except BaseException as error:
                failure = error
            region._on_registered(registration, failure)
        except BaseException as error:
            if region.closed:
                # Ctrl-C came before anybody had the region.
                region._release_memory()
                registration.fail(error)
            raise
        finally:
            # It refers to this frame.
            del failure
            with self._lock:
                self._running.pop(registration, None)
                self._ended.notify_all()

    def _others(self) -> list[QueuedRegistration]:
        own = threading.current_thread()
        return [registration for registration, thread in self._running.items() if thread is not own]

    def stop(self) -> None:
        """Cancel all registrations, wait until none runs, and end the threads."""
        with self._lock:
            self._stopping = True
            left = [*self._waiting, *self._running]
        for registration in left:
            registration.cancel()
        with self._lock:
            self._work.notify_all()
            self._ended.wait_for(lambda: not self._others())
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def start(self) -> None:
        """Take registrations again after stop(), because the adapter stays open."""
        with self._lock:
            self._stopping = False
            self._idle = 0

    def abandon(self, error: Callable[[], errors.NdpyError]) -> None:
        """End all registrations in a forked child. It has no worker, and a worker of the parent may hold the lock."""
        self._renew_locks()
        for registration in [*self._waiting, *self._running]:
            registration.abandon(error())
        self._waiting.clear()
        self._running.clear()
        self._threads.clear()
        self._idle = 0
