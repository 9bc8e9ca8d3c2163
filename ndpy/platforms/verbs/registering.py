"""Registering in worker threads.

ibv_reg_mr() returns when the kernel has pinned the pages and the device knows them. That takes microseconds for a small
buffer, and milliseconds for a large one. So begin_register() registers less than _SMALL bytes in the calling thread,
and leaves the others to a few worker threads. If a thread waits for a registration that no worker has begun, that
thread makes it. With a single processor the workers save no time, and only let begin_register() return. So fewer of the
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
# The calling thread registers what is shorter: with several processors what takes no longer than a hand-off to a
# worker, with a single one what takes no more than about 2 ms.
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
        self._renew()

    def _renew(self) -> None:
        #: Threads wait on it for work, and stop() for the end of the work.
        self._changed = threading.Condition(threading.Lock())
        self._waiting: dict[QueuedRegistration, VerbsMemoryRegion] = {}
        self._running: dict[QueuedRegistration, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def begin(self, region: VerbsMemoryRegion) -> Pending[VerbsMemoryRegion]:
        """Register the region, now or in a worker, unless the result is cancelled before a worker begins."""
        # A stream of a device may take any time.
        if region.length < self._small and not region._is_on_device:
            region._register_now()
            done: Pending[VerbsMemoryRegion] = Pending("register")
            done.succeed(region)
            return done
        registration = QueuedRegistration(self)
        with self._changed:
            if self._stopping:
                raise errors.ClosedError(f"adapter {self._adapter_name} is being closed")
            self._waiting[registration] = region
            self._changed.notify()
            if len(self._threads) < min(_THREADS, len(self._waiting) + len(self._running)):
                name = f"ndpy-{self._adapter_name}-register-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                # A process may be at its limit of threads. Fewer are enough.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._threads.append(thread)
            started = bool(self._threads)
        if not started:
            self.help(registration)
        return registration

    def help(self, registration: QueuedRegistration) -> None:
        """Register in the calling thread, unless another one has begun."""
        with self._changed:
            region = self._waiting.pop(registration, None)
            if region is None:
                return
            self._running[registration] = threading.current_thread()
        self._register(registration, region)

    def withdraw(self, registration: QueuedRegistration) -> None:
        """Let go of a cancelled registration's memory now, unless a worker has begun."""
        with self._changed:
            self._waiting.pop(registration, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                registration = next(iter(self._waiting))
            try:
                self.help(registration)
            except BaseException as error:
                # The thread goes on: there may be more to register.
                report(error, "the end of a registration")
            # An idle thread must not keep the last region.
            del registration

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
            with self._changed:
                self._running.pop(registration, None)
                if self._stopping:
                    self._changed.notify_all()

    def stop(self) -> None:
        """Cancel all registrations, wait until none runs, and end the threads."""
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *self._running]
        for registration in left:
            registration.cancel()
        own = threading.current_thread()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not set(self._running.values()) - {own})
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not own:
                thread.join()

    def start(self) -> None:
        """Take registrations again after stop(), because the adapter stays open."""
        with self._changed:
            self._stopping = False

    def abandon(self, error: Callable[[], errors.NdpyError]) -> None:
        """End all registrations in a forked child. It has no worker, and a worker of the parent may hold the lock."""
        left = [*self._waiting, *self._running]
        self._renew()
        for registration in left:
            registration.abandon(error())
