"""Registering beside the calling thread.

ibv_reg_mr() returns when the kernel has pinned the pages and the device knows them: microseconds for a small buffer or a quick
device, milliseconds for a large or slow one. Handing it to a thread takes a while too, some 50 us on a quick machine and
milliseconds on an emulated one. Which of the two is quicker is not known beforehand, so both are measured (Pace): begin_register()
makes at once what took no longer than the handing over the last time, and leaves the rest to a few threads. With a single
processor nothing is gained by them, but that begin_register() returns. Whoever waits for one that no thread has begun makes
it himself.

The threads end with their adapter. They are daemons: a program that ends does not wait for what it asked for and left.
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
from ndpy.pending import Pending
from ndpy.unraisable import report

if TYPE_CHECKING:
    from ndpy.verbs.memory import VerbsMemoryRegion

_THREADS = 4
# Below this length a registration is taken for quick until it has been measured.
_SMALL = 1 << 16
# What handing over takes until it has been measured, and the longest that begin_register() may take knowingly.
_HANDING_OVER_NS = 100_000
_LONGEST_NS = 2_000_000

_Make = Callable[[], "VerbsMemoryRegion"]


class Pace:
    """Whether a registration is made sooner than handed over. Lengths are told apart by their number of bits."""

    def __init__(self, processors: int) -> None:
        self._took_ns: dict[int, int] = {}
        self._alone = processors == 1
        self._handing_over_ns: float = _LONGEST_NS if self._alone else _HANDING_OVER_NS
        #: The numbers of bits of the lengths that are made at once.
        self.quick = set(range(_SMALL.bit_length()))

    def took(self, length: int, nanoseconds: int) -> None:
        """The last time counts, so that one that was slow by chance is tried again when a thread finds it quick."""
        bits = length.bit_length()
        self._took_ns[bits] = nanoseconds
        if nanoseconds <= self._handing_over_ns and nanoseconds <= _LONGEST_NS:
            self.quick.add(bits)
        else:
            self.quick.discard(bits)

    def handed_over(self, nanoseconds: int) -> None:
        """An idle thread took so long to begin. The quickest count most: others waited for the interpreter's lock."""
        if self._alone:
            return
        former = self._handing_over_ns
        self._handing_over_ns = nanoseconds if nanoseconds < former else former + (nanoseconds - former) / 16
        for bits, took in list(self._took_ns.items()):
            self.took((1 << bits) - 1, took)


class Registration(Pending["VerbsMemoryRegion"]):
    """A registration that waits for a thread, or is being made."""

    def __init__(self, threads: RegisteringThreads) -> None:
        super().__init__("register", lambda: threads.withdraw(self))
        self._threads = threads
        #: When an idle thread was woken for it.
        self.woken_ns = 0

    def _wait(self, timeout_s: float | None) -> None:
        # Making it here cannot be given up at a deadline.
        if timeout_s is None:
            self._threads.help(self)
        super()._wait(timeout_s)


class Registered(Pending["VerbsMemoryRegion"]):
    """A registration that was made at once. object.__new__() and its region make all of it; a lock is made if somebody
    asks for one."""

    _operation = "register"
    _state = FINISHED
    _exception = None
    _result: VerbsMemoryRegion

    # setdefault(): two threads that ask at once get the same.
    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        made: threading.Condition = self.__dict__.setdefault("condition", threading.Condition())
        return made

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        made: list[Any] = self.__dict__.setdefault("waiters", [])
        return made

    def result(self, timeout_s: float | None = None) -> VerbsMemoryRegion:
        return self._result


class RegisteringThreads:
    """At most _THREADS threads, started when there is something for them; idle ones refer to no adapter."""

    def __init__(self, adapter_name: str) -> None:
        self._adapter_name = adapter_name
        self.pace = Pace(len(os.sched_getaffinity(0)))
        self._renew_locks()
        self._waiting: dict[Registration, _Make] = {}
        self._running: dict[Registration, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._stopping = False

    def _renew_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)

    def begin(self, make: _Make) -> Registration:
        """Have make() called, once, unless its registration is cancelled first."""
        registration = Registration(self)
        with self._lock:
            if self._stopping:
                raise errors.ClosedError(f"adapter {self._adapter_name} is being closed")
            self._waiting[registration] = make
            if self._idle:
                # Counted here, so that the next one finds another thread.
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
        # A process may be at its limit of threads; fewer do as well.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)

    def took(self, length: int, nanoseconds: int) -> None:
        """A registration took so long. Where several are made at once, they share a processor, or else gain by it."""
        self.pace.took(length, nanoseconds // max(1, len(self._running)))

    def help(self, registration: Registration) -> None:
        """Make it in the calling thread, if nobody has begun it."""
        with self._lock:
            make = self._waiting.pop(registration, None)
            if make is None:
                return
            self._running[registration] = threading.current_thread()
        self._make(registration, make)

    def withdraw(self, registration: Registration) -> None:
        """It was cancelled: unless somebody has begun it, its memory is let go now."""
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
                make = self._waiting.pop(registration)
                self._running[registration] = threading.current_thread()
            if registration.woken_ns:
                self.pace.handed_over(time.monotonic_ns() - registration.woken_ns)
            try:
                self._make(registration, make)
            except Exception as error:
                # There may be more to register.
                report(error, "the end of a registration")
            # While this thread waits, nothing of it may stay alive.
            del registration, make

    def _make(self, registration: Registration, make: _Make) -> None:
        try:
            try:
                region = make()
            except BaseException as error:
                registration.fail(error)
                return
            if not registration.succeed(region):
                # Cancelled meanwhile. What cannot be deregistered is dropped, and so left to the adapter.
                with contextlib.suppress(errors.NdpyError):
                    region.close()
        finally:
            with self._lock:
                self._running.pop(registration, None)
                self._ended.notify_all()

    def settle(self) -> None:
        """Wait until those that were cancelled while they were being made have gone."""
        with self._lock:
            self._ended.wait_for(lambda: not any(pending.done() for pending in self._others()))

    def _others(self) -> list[Registration]:
        own = threading.current_thread()
        return [registration for registration, thread in self._running.items() if thread is not own]

    def stop(self) -> None:
        """Cancel what waits or runs, and wait until it has gone and the threads have ended."""
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
        """The adapter stays open after all."""
        with self._lock:
            self._stopping = False
            self._idle = 0

    def abandon(self, error: Callable[[], errors.NdpyError]) -> None:
        """In a forked child: no thread is here, and the lock may be held by one of the parent's."""
        self._renew_locks()
        for registration in [*self._waiting, *self._running]:
            registration.abandon(error())
        self._waiting.clear()
        self._running.clear()
        self._threads.clear()
        self._idle = 0
