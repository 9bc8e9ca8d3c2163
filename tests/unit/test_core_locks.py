"""The two locks of ndpy._core: that of an object, which its thread may take again, and the plain one."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kit.deadlines import DEADLINE_S
from kit.helpers import wait_until
from kit.walking import Elsewhere

from ndpy import _core

LOCKS = pytest.mark.parametrize("kind", [_core.Lock, _core.RLock])


@contextlib.contextmanager
def held(lock: Any) -> Iterator[threading.Event]:
    """Another thread has the lock. It lets go when the event is set, and at the end."""
    is_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            let_go.wait(DEADLINE_S)

    holder = Elsewhere(hold).start()
    assert is_held.wait(DEADLINE_S)
    try:
        yield let_go
    finally:
        let_go.set()
        holder.result()


# ---- who has it ----


def test_a_lock_is_held_by_one():
    lock = _core.Lock()
    assert lock.acquire()
    assert lock.locked()
    assert not lock.acquire(False)
    assert not lock.acquire(timeout=0.01)
    lock.release()
    assert not lock.locked()
    with lock:
        assert lock.locked()
    with pytest.raises(RuntimeError, match="nobody holds"):
        lock.release()


def test_a_thread_that_has_a_lock_does_not_wait_for_it():
    lock = _core.Lock()
    with lock, pytest.raises(RuntimeError, match="within another call"), lock:
        pass
    with lock, pytest.raises(RuntimeError, match="within another call"):
        lock.acquire()
    assert not lock.locked()


def test_the_thread_that_holds_a_lock_may_take_it_again():
    lock = _core.RLock()
    with lock:
        assert lock.acquire()
        lock.release()
        assert Elsewhere(lambda: lock.acquire(False)).start().result() is False
    assert Elsewhere(lambda: lock.acquire(False) and lock.release() is None).start().result()


def test_only_its_thread_releases_a_lock():
    lock = _core.RLock()
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()
    with lock:
        other = Elsewhere(lock.release).start()
        with pytest.raises(RuntimeError, match="does not hold"):
            other.result()
    assert Elsewhere(lambda: lock.acquire(False)).start().result()


@LOCKS
def test_of_many_threads_one_at_a_time_has_the_lock(kind):
    lock, inside, most = kind(), [], []

    def work() -> None:
        for _ in range(200):
            with lock, lock if kind is _core.RLock else contextlib.nullcontext():
                inside.append(1)
                # Other threads run now, and wait.
                time.sleep(0)
                most.append(len(inside))
                inside.pop()

    for thread in [Elsewhere(work).start() for _ in range(8)]:
        thread.result()
    assert (set(most), len(most)) == ({1}, 8 * 200)
    assert lock.acquire(False)


def test_a_condition_works_with_it():
    condition, ready = threading.Condition(_core.Lock()), []

    def tell() -> None:
        with condition:
            ready.append(1)
            condition.notify_all()

    with condition:
        telling = Elsewhere(tell).start()
        assert condition.wait_for(lambda: ready, DEADLINE_S)
    telling.result()


# ---- those who wait ----


@LOCKS
def test_whoever_waits_for_a_lock_gets_it(kind):
    lock, got = kind(), threading.Event()

    def wait() -> None:
        with lock:
            got.set()

    with lock:
        waiting = Elsewhere(wait).start()
        assert not got.wait(0.05)
    waiting.result()
    assert got.is_set() and lock.acquire(False)


def in_line(lock: Any, call: Any) -> Elsewhere:
    """A thread that makes a call, and that waits for the lock now."""
    before = lock._waiters
    waiting = Elsewhere(call).start()
    wait_until(lambda: lock._waiters == before + 1 or waiting.over, "the thread waits for the lock")
    return waiting


@LOCKS
def test_who_leaves_a_lock_for_which_another_thread_waits_does_not_get_it_again_before(kind):
    lock, order = kind(), []

    def take() -> None:
        with lock:
            order.append("the other one")

    for _ in range(50):
        lock.acquire()
        waiting = in_line(lock, take)
        lock.release()
        # However often this one asks meanwhile.
        with lock:
            order.append("this one")
        waiting.result()
    assert order == ["the other one", "this one"] * 50
    assert lock._waiters == 0


@LOCKS
def test_a_thread_that_asks_without_waiting_does_not_overtake_those_who_wait(kind):
    lock, stay = kind(), threading.Event()

    def take() -> None:
        with lock:
            stay.wait(DEADLINE_S)

    lock.acquire()
    waiting = in_line(lock, take)
    lock.release()
    results = [lock.acquire(False) for _ in range(100)]
    stay.set()
    waiting.result()
    assert not any(results)
    with lock:
        pass


@LOCKS
def test_threads_get_a_lock_in_the_order_in_which_they_came(kind):
    lock, order = kind(), []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    lock.acquire()
    line = [in_line(lock, partial(take, number)) for number in range(8)]
    lock.release()
    for waiting in line:
        waiting.result()
    assert order == list(range(8))


def line_of_three(lock: Any, got: list, gives_up: int, patience_s: float) -> list[Elsewhere]:
    """Three threads that wait for the lock, which this one has. Empty if the one that gives up has done so too early.

    got: what acquire() returns in each.
    """

    def take(number: int) -> None:
        got[number] = lock.acquire(timeout=patience_s if number == gives_up else DEADLINE_S)
        if got[number]:
            lock.release()

    lock.acquire()
    line = []
    for number in range(3):
        line.append(Elsewhere(partial(take, number)).start())
        wait_until(lambda length=number + 1: lock._waiters == length or got[gives_up] is False, "the line grows")
        if got[gives_up] is False:
            lock.release()
            for waiting in line:
                waiting.result()
            return []
    return line


@LOCKS
@pytest.mark.parametrize("gives_up", range(3))
def test_a_thread_that_gives_up_leaves_the_line_of_the_others(kind, gives_up):
    # On a busy machine it may give up before the others are in line.
    for patience_s in (0.05, 0.5, 5):
        lock, got = kind(), [None] * 3
        line = line_of_three(lock, got, gives_up, patience_s)
        if line:
            break
    line[gives_up].result()
    assert (got[gives_up], lock._waiters) == (False, 2)
    lock.release()
    for waiting in line:
        waiting.result()
    assert got == [number != gives_up for number in range(3)]
    assert lock._waiters == 0 and lock.acquire(False)


# ---- how long ----


@LOCKS
def test_a_wait_for_a_lock_ends_at_its_deadline(kind):
    lock = kind()
    with held(lock):
        began = time.monotonic()
        assert lock.acquire(timeout=0.05) is False
        assert time.monotonic() - began >= 0.05
    assert lock.acquire(timeout=DEADLINE_S)


def test_a_thread_that_is_woken_too_late_waits_for_the_rest_of_its_time_only():
    lock, stop, is_held = _core.RLock(), threading.Event(), threading.Event()

    def wake_in_vain() -> None:
        lock.acquire()
        is_held.set()
        for _ in range(int(DEADLINE_S / 0.02)):
            if stop.wait(0.02):
                break
            # No other thread runs between these two.
            lock.release()
            lock.acquire()
        lock.release()

    waking = Elsewhere(wake_in_vain).start()
    assert is_held.wait(DEADLINE_S)
    began = time.monotonic()
    got = lock.acquire(timeout=0.3)
    took = time.monotonic() - began
    stop.set()
    if got:
        lock.release()
    waking.result()
    assert got or took >= 0.3
    assert took < DEADLINE_S / 2


@LOCKS
def test_a_wait_for_a_lock_may_be_as_long_as_one_likes(kind):
    lock = kind()
    with held(lock) as let_go:
        threading.Timer(0.05, let_go.set).start()
        assert lock.acquire(timeout=1e18)
        lock.release()


@LOCKS
def test_a_lock_refuses_to_wait_for_nan_seconds(kind):
    with pytest.raises(ValueError, match="not nan"):
        kind().acquire(timeout=math.nan)


# ---- signals ----


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pthread_kill")
def test_the_handler_of_a_signal_may_take_the_lock_for_which_its_thread_waits():
    lock, seen = _core.Lock(), []

    def handle(*_: object) -> None:
        seen.append(lock._waiters)
        lock.release()
        with lock:
            seen.append("taken")
        lock.acquire()
        threading.Timer(0.02, lock.release).start()

    former = signal.signal(signal.SIGUSR1, handle)
    try:
        lock.acquire()
        timer = threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1])
        timer.start()
        assert lock.acquire(timeout=DEADLINE_S)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [0, "taken"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pthread_kill")
@LOCKS
@pytest.mark.parametrize(
    "take",
    [lambda lock: lock.acquire(), lambda lock: lock.__enter__(), lambda lock: lock.acquire(timeout=DEADLINE_S)],
)
def test_ctrl_c_ends_the_wait_for_a_lock(kind, take):
    lock = kind()
    with held(lock):
        timer = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            take(lock)
        assert time.monotonic() - began < DEADLINE_S
        timer.join()
    with lock:
        pass
