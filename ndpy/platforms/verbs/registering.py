"""Registering in worker threads, if that is quicker than in the calling thread.

ibv_reg_mr() returns when the kernel has pinned the pages and the device knows them. That takes microseconds for a small
buffer or a quick device, and milliseconds for a large buffer or a slow device. A hand-off to a thread takes about 50 us
on a quick machine, and milliseconds on an emulated one. Nobody knows beforehand which of the two is quicker, so
QuickLengths measures both. begin_register() registers in the calling thread if that was no slower than a hand-off the
last time. Otherwise it leaves the registration to a few worker threads. If a thread waits for a registration that no
worker has begun, that thread makes it. With a single processor the workers save no time. They only let
begin_register() return.

The workers end with their adapter. They are daemons, so the end of a program does not wait for a registration. A
ThreadPoolExecutor would wait. It would also hold the memory of a cancelled registration until a worker looks at it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures._base import FINISHED
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects.pending import Pending
from ndpy.vocabulary.unraisable import report

if TYPE_CHECKING:
    from ndpy.platforms.verbs.memory import VerbsMemoryRegion

_THREADS = 4
# A registration below this length counts as quick until it has been measured.
_SMALL = 1 << 16
# How long a hand-off takes, until it has been measured.
_HAND_OFF_NS = 100_000
# begin_register() leaves a registration to the workers if it took longer the last time.
_LONGEST_NS = 2_000_000

_new = object.__new__


class QuickLengths:
    """Knows for which lengths registering is quicker than a hand-off. A length counts by its number of bits."""

    def __init__(self, processors: int) -> None:
        self._took_ns: dict[int, int] = {}
        self._alone = processors == 1
        self._hand_off_ns: float = _LONGEST_NS if self._alone else _HAND_OFF_NS
        #: The numbers of bits of the lengths that the calling thread registers.
        self.bits = set(range(_SMALL.bit_length()))

    def note_registration(self, length: int, nanoseconds: int) -> None:
        """Note how long a registration took. Only the last one counts.

        A length that was slow by chance gets another try when a worker finds it quick.
        """
        bits = length.bit_length()
        self._took_ns[bits] = nanoseconds
        if nanoseconds <= self._hand_off_ns and nanoseconds <= _LONGEST_NS:
            self.bits.add(bits)
        else:
            self.bits.discard(bits)

    def note_hand_off(self, nanoseconds: int) -> None:
        """Note how long an idle worker took to begin. Quick ones count most: slow ones waited for the GIL."""
        if self._alone:
            return
        former = self._hand_off_ns
        self._hand_off_ns = nanoseconds if nanoseconds < former else former + (nanoseconds - former) / 16
        for bits, took in list(self._took_ns.items()):
            self.note_registration((1 << bits) - 1, took)


class QueuedRegistration(Pending["VerbsMemoryRegion"]):
    """A registration that waits for a worker, or that a worker has begun."""

    def __init__(self, workers: RegistrationWorkers) -> None:
        super().__init__("register", lambda: workers.withdraw(self))
        self._workers = workers
        #: When an idle worker was woken for it.
        self.woken_ns = 0

    def _wait(self, timeout_s: float | None) -> None:
        # This thread could not give up its own registration at a deadline.
        if timeout_s is None:
            self._workers.help(self)
        super()._wait(timeout_s)


class FinishedRegistration(Pending["VerbsMemoryRegion"]):
    """A registration that the calling thread has made.

    object.__new__() makes it, and it gets nothing but its region. That takes a fraction of the time of a Future. It
    gets a lock when somebody asks for one.
    """

    _operation = "register"
    _state = FINISHED
    _exception = None
    _result: VerbsMemoryRegion

    # With setdefault(), two threads that ask at once get the same object.
    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        made: threading.Condition = self.__dict__.setdefault("condition", threading.Condition())
        return made

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        made: list[Any] = self.__dict__.setdefault("waiters", [])
        return made

    def result(self, timeout_s: float | None = None) -> VerbsMemoryRegion:
        return self._result if timeout_s is None else super().result(timeout_s)


class RegistrationWorkers:
    """Up to _THREADS threads that register. Each starts when there is work for it. An idle one refers to no adapter."""

    def __init__(self, adapter_name: str) -> None:
        self._adapter_name = adapter_name
        self.quick_lengths = QuickLengths(len(os.sched_getaffinity(0)))
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
        if region.length.bit_length() in self.quick_lengths.bits:
            region._register_now()
            self.note_duration(region.length, region._took_ns)
            done = _new(FinishedRegistration)
            done._result = region
            return done
        registration = QueuedRegistration(self)
        with self._lock:
            if self._stopping:
                raise errors.ClosedError(f"adapter {self._adapter_name} is being closed")
            self._waiting[registration] = region
            if self._idle:
                # Count it here, so that the next registration finds another thread.
                self._idle -= 1
                registration.woken_ns = time.monotonic_ns()
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

    def note_duration(self, length: int, nanoseconds: int) -> None:
        """Note how long a registration took.

        If several run at once, each counts for its part: they share a processor, or gain from each other.
        """
        self.quick_lengths.note_registration(length, nanoseconds // max(1, len(self._running)))

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
            if registration.woken_ns:
                self.quick_lengths.note_hand_off(time.monotonic_ns() - registration.woken_ns)
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
                self.note_duration(region.length, region._took_ns)
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
