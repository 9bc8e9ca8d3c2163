"""The thread of an adapter: the calls that others leave to it, and its end."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from racing import DEADLINE_S, GRACE_S, Elsewhere, wait_until

from ndpy.objects import adapter_thread
from ndpy.objects.resource import Orphans
from ndpy.platforms.verbs.events import EventThread


@pytest.fixture
def thread():
    thread = EventThread("test", Orphans())
    yield thread
    thread.stop()


def test_calls_are_made_in_the_thread_in_their_order(thread):
    made: list[tuple[int, bool]] = []
    done = threading.Event()
    for number in range(10):
        thread.call_soon(lambda number=number: made.append((number, thread.is_current())))
    thread.call_soon(done.set)
    assert done.wait(DEADLINE_S)
    assert made == [(number, True) for number in range(10)]
    assert not thread.is_current()


@pytest.mark.parametrize(("call", "kind"), [(lambda: 1 // 0, ZeroDivisionError), (sys.exit, SystemExit)])
def test_a_call_that_raises_is_reported_and_ends_nothing(thread, unraisable, call, kind):
    done = threading.Event()
    thread.call_soon(call)
    thread.call_soon(done.set)
    assert done.wait(DEADLINE_S)
    assert [reported for reported, _ in unraisable] == [kind]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_the_programs_thread_is_ended_by_a_call_that_it_makes_itself(thread, kind):
    """A call that is left when the adapter is closed runs in the program's thread, and so may Ctrl-C."""

    def interrupt() -> None:
        raise kind

    thread.stop()
    thread._calls.append(interrupt)
    with pytest.raises(kind):
        thread.make_calls()


class Reader:
    """Reads one byte for each event of a descriptor. The first one raises an exception."""

    def __init__(self, fd: int) -> None:
        self.fd, self.read = fd, 0

    def on_readable(self) -> None:
        os.read(self.fd, 1)
        self.read += 1
        if self.read == 1:
            raise ZeroDivisionError


def test_an_event_handler_that_raises_is_reported_and_ends_nothing(thread, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append((type(what.exc_value), repr(what.object))))
    fd, other = os.pipe()
    reader = Reader(fd)
    thread.watch(fd, reader.on_readable)
    os.write(other, b"ab")
    wait_until(lambda: reader.read == 2, "the second event is handled")
    thread.forget(fd)
    os.close(fd)
    os.close(other)
    ((kind, where),) = reported
    assert kind is ZeroDivisionError
    assert "Reader" in where


def test_a_thread_that_cannot_wait_any_more_is_reported_and_ends(monkeypatch, unraisable):
    def fail(self) -> bool:
        raise OSError("no epoll")

    monkeypatch.setattr(EventThread, "_native_turn", fail)
    thread = EventThread("test", Orphans())
    wait_until(lambda: not thread._thread.is_alive(), "the thread ends")
    assert unraisable == [(OSError, "no epoll")]
    thread.stop()


def test_a_call_that_is_left_by_a_call_is_made_too(thread):
    done = threading.Event()
    thread.call_soon(lambda: thread.call_soon(done.set))
    assert done.wait(DEADLINE_S)


def test_a_thread_that_is_told_to_stop_by_itself_ends():
    thread = EventThread("test", Orphans())
    thread.call_soon(thread.stop)
    wait_until(lambda: not thread._thread.is_alive(), "the thread ends")
    thread.stop()


def test_after_its_end_no_call_is_made_and_nothing_fails():
    thread = EventThread("test", Orphans())
    thread.stop()
    made: list[int] = []
    thread.call_soon(lambda: made.append(1))
    assert not made


def test_a_thread_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    freed = []

    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    native_free = EventThread._native_free
    monkeypatch.setattr(EventThread, "_native_free", lambda self: freed.append(native_free(self)))
    with pytest.raises(RuntimeError):
        EventThread("test", Orphans())
    assert len(freed) == 1


def test_who_makes_the_calls_waits_for_the_one_that_is_being_made(thread):
    begun, go_on, made = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        go_on.wait(DEADLINE_S)
        made.append(1)

    thread.call_soon(call)
    assert begun.wait(DEADLINE_S)
    waiting = Elsewhere(thread.make_calls).start()
    waiting.thread.join(GRACE_S)
    assert waiting.thread.is_alive()
    go_on.set()
    waiting.result()
    assert made == [1]


def test_calls_that_are_left_can_be_made_by_another_thread(thread, monkeypatch):
    monkeypatch.setattr(thread, "wake", lambda: None)
    made: list[bool] = []
    thread.call_soon(lambda: made.append(thread.is_current()))
    thread.make_calls()
    assert made == [False]


def test_a_thread_that_rests_handles_nothing(thread):
    made: list[int] = []
    with thread.resting(DEADLINE_S):
        thread.call_soon(lambda: made.append(1))
        time.sleep(GRACE_S)
        assert made == []
    wait_until(lambda: made == [1], "the thread goes on")


def test_who_asks_a_busy_thread_to_rest_waits_for_a_limited_time(thread):
    begun, go_on, made = threading.Event(), threading.Event(), []
    thread.call_soon(lambda: (begun.set(), go_on.wait(DEADLINE_S)))
    assert begun.wait(DEADLINE_S)
    with thread.resting(GRACE_S):
        made.append(1)
    go_on.set()
    thread.call_soon(lambda: made.append(2))
    wait_until(lambda: made == [1, 2], "the thread goes on")


def test_what_is_done_while_a_thread_rests_can_wait_for_it(thread, monkeypatch):
    """As a finalizer of the program may, which a garbage collection runs."""
    monkeypatch.setattr(adapter_thread, "_LONGEST_REST_S", GRACE_S)
    done = threading.Event()
    with thread.resting(DEADLINE_S):
        thread.call_soon(done.set)
        assert done.wait(DEADLINE_S)


def test_ctrl_c_while_a_thread_is_asked_to_rest_lets_it_go_on(thread, monkeypatch):
    def wake() -> None:
        type(thread).wake(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "wake", wake)
        patch.setattr(adapter_thread, "_LONGEST_REST_S", None)
        with pytest.raises(KeyboardInterrupt), thread.resting(DEADLINE_S):
            pass
    done = threading.Event()
    thread.call_soon(done.set)
    assert done.wait(DEADLINE_S)


def test_a_thread_that_has_ended_or_that_asks_itself_does_not_rest():
    thread = EventThread("test", Orphans())
    done = threading.Event()

    def ask() -> None:
        with thread.resting(DEADLINE_S):
            done.set()

    thread.call_soon(ask)
    assert done.wait(DEADLINE_S)
    thread.stop()
    with thread.resting(DEADLINE_S):
        pass


def test_a_thread_that_stops_itself_handles_none_of_the_events_that_came_with_its_last_call(thread, unraisable):
    """It closes an adapter that the program has dropped. The handlers of the adapter's events use what is gone then."""
    busy, waits, stopped = threading.Event(), threading.Event(), threading.Event()

    class Handler:
        def on_first(self) -> None:
            os.read(first, 1)
            busy.set()
            assert waits.wait(DEADLINE_S)

        def on_second(self) -> None:
            raise AssertionError("an event after the end")

    def stop() -> None:
        thread.stop()
        stopped.set()

    handler = Handler()
    first, wakes_first = os.pipe()
    second, wakes_second = os.pipe()
    try:
        thread.watch(first, handler.on_first)
        thread.watch(second, handler.on_second)
        os.write(wakes_first, b"a")
        assert busy.wait(DEADLINE_S)
        # The epoll gives both at once, in this order.
        thread.call_soon(stop)
        os.write(wakes_second, b"b")
        waits.set()
        assert stopped.wait(DEADLINE_S)
        thread._thread.join(DEADLINE_S)
        assert unraisable == []
    finally:
        for fd in (first, wakes_first, second, wakes_second):
            os.close(fd)
