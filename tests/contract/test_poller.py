"""Pollers: one thread that waits for many completion queues."""

from __future__ import annotations

import select
import sys
import threading
import time

import pytest
from kit.helpers import CLOCK_TICK_S, DEADLINE_S, connect_pair, create_end, require, succeed
from kit.threads import Elsewhere, beside

import ndpy
from ndpy import Flags


@pytest.fixture
def poller(adapter, keep):
    return keep(ndpy.Poller())


def message(pair, context: int = 0) -> None:
    pair.server.queue_pair.receive([], context=context)
    pair.client.queue_pair.send([], flags=Flags.SILENT_SUCCESS)


def test_wait_delivers_completions_with_their_queue(adapter, keep, poller, pair):
    second = connect_pair(keep, adapter)
    poller.add(pair.server.cq)
    poller.add(second.server.cq)
    for turn, context in ((pair, 1), (second, 2), (pair, 3)):
        message(turn, context)
        ((cq, completions),) = poller.wait(DEADLINE_S)
        assert cq is turn.server.cq
        assert [completion.context for completion in completions] == [context]


def test_what_a_queue_holds_already_is_delivered(poller, pair):
    message(pair, 5)
    succeed_later = time.monotonic() + 0.3
    while time.monotonic() < succeed_later:
        pass
    poller.add(pair.server.cq)
    ((cq, completions),) = poller.wait(DEADLINE_S)
    assert cq is pair.server.cq
    assert [completion.context for completion in completions] == [5]


@pytest.mark.skipif(sys.platform == "win32", reason="a poller has a descriptor on Linux only")
@pytest.mark.parametrize("asked", ["before", "afterwards"])
def test_the_descriptor_is_readable_while_a_queue_is_not_armed(pair, poller, asked):
    """What a wait() has delivered from is armed by the next wait() only."""
    poller.add(pair.server.cq)
    descriptor = poller.fileno() if asked == "before" else -1
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0.05)
    for context in range(8):
        message(pair, context)
        if descriptor >= 0:
            assert select.select([descriptor], [], [], 1.0)[0]
        while not (ready := poller.wait(DEADLINE_S)):
            pass
        assert [(cq, [completion.context for completion in taken]) for cq, taken in ready] == [
            (pair.server.cq, [context])
        ]
        descriptor = poller.fileno() if descriptor < 0 else descriptor


@pytest.mark.skipif(sys.platform == "win32", reason="a completion port takes packets one by one")
def test_an_event_wakes_a_poller_once(pair, poller, monkeypatch):
    count, native_wait = [0], poller._native_wait

    def counting(deadline):
        count[0] += 1
        return native_wait(deadline)

    monkeypatch.setattr(poller, "_native_wait", counting)
    poller.add(pair.server.cq)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0.05)
    count[0] = 0
    for context in range(8):
        message(pair, context)
        ((_, completions),) = poller.wait(DEADLINE_S)
        assert [completion.ok for completion in completions] == [True]
        # This arms the queue, so that the next message makes an event.
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0.02)
    # One for the event, and one that nothing ends.
    assert count[0] <= 2 * 8


def test_more_than_one_wait_takes_of_a_queue_is_lost_by_none(adapter, keep, poller):
    end = create_end(keep, adapter, cq_depth=256, receive_queue_depth=150)
    poller.add(end.cq)
    for context in range(150):
        end.queue_pair.receive([], context=context)
    end.queue_pair.flush()
    taken: list[int] = []
    while len(taken) < 150:
        for cq, completions in poller.wait(DEADLINE_S):
            assert cq is end.cq
            assert 1 <= len(completions) <= 64
            taken += [completion.context for completion in completions]
    assert taken == list(range(150))


def test_no_wake_up_is_lost(adapter, keep, poller):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter, cq_depth=256, receive_queue_depth=150)
    poller.add(pair.server.cq)
    taken: list[int] = []

    def wait() -> None:
        while len(taken) < 150:
            for _, completions in poller.wait(DEADLINE_S):
                taken.extend(completion.context for completion in completions)

    with beside(wait):
        for context in range(150):
            pair.server.queue_pair.receive([], context=context)
            pair.client.queue_pair.send([])
            succeed(pair.client.cq)
    assert taken == list(range(150))


def test_wait_times_out(poller):
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        poller.wait(0.2)
    assert 0.2 - CLOCK_TICK_S <= time.monotonic() - begin < DEADLINE_S
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)


def test_wake_from_another_thread_ends_the_wait(poller, pair):
    poller.add(pair.server.cq)
    waiter = Elsewhere(lambda: poller.wait(DEADLINE_S)).start()
    time.sleep(0.2)
    assert not waiter.over
    poller.wake()
    assert waiter.result() == []


def test_a_wake_before_the_wait_is_not_lost(poller):
    poller.wake()
    assert poller.wait(DEADLINE_S) == []
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)


def test_removing_stops_the_delivery(poller, pair):
    poller.add(pair.server.cq)
    poller.add(pair.server.cq)
    poller.remove(pair.server.cq)
    poller.remove(pair.server.cq)
    message(pair, 7)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0.2)
    assert [completion.context for completion in succeed(pair.server.cq)] == [7]


def test_adding_while_another_thread_waits(poller, pair):
    waiter = Elsewhere(lambda: poller.wait(DEADLINE_S)).start()
    time.sleep(0.1)
    poller.add(pair.server.cq)
    message(pair, 8)
    assert [cq for cq, _ in waiter.result()] == [pair.server.cq]


def test_closing_a_queue_removes_it(adapter, poller, pair):
    gone = adapter.create_completion_queue(8)
    poller.add(gone)
    poller.add(pair.server.cq)
    gone.close()
    message(pair, 9)
    ((cq, _),) = poller.wait(DEADLINE_S)
    assert cq is pair.server.cq
    with pytest.raises(ndpy.ClosedError):
        poller.add(gone)


def test_queues_of_several_adapters(adapter, keep, poller, pair, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    second = connect_pair(keep, other)
    poller.add(pair.server.cq)
    poller.add(second.server.cq)
    for turn in (pair, second):
        message(turn)
        ((cq, _),) = poller.wait(DEADLINE_S)
        assert cq is turn.server.cq


def test_closing_ends_a_wait(adapter):
    poller = ndpy.Poller()
    waiter = Elsewhere(lambda: poller.wait(DEADLINE_S)).start()
    time.sleep(0.1)
    poller.close()
    poller.close()
    with pytest.raises(ndpy.ClosedError):
        waiter.result()
    assert poller.closed
    with pytest.raises(ndpy.ClosedError):
        poller.wait()
    poller.wake()


def test_the_queues_survive_the_poller(adapter, pair):
    with ndpy.Poller() as poller:
        poller.add(pair.server.cq)
    message(pair, 3)
    assert [completion.context for completion in succeed(pair.server.cq)] == [3]


def test_an_idle_wait_uses_no_processor_time(poller, pair):
    poller.add(pair.server.cq)
    poller.add(pair.client.cq)
    before = time.process_time()
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(1.0)
    assert time.process_time() - before < 0.1


def test_an_idle_wait_on_a_queue_uses_no_processor_time(pair):
    before = time.process_time()
    with pytest.raises(ndpy.TimeoutError):
        pair.server.cq.wait(1.0)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("what", ["poller", "completion queue"])
def test_other_threads_run_while_one_waits(poller, pair, what):
    """A wait releases the interpreter's lock. Another thread counts, and then sends the message that ends the wait."""
    call = pair.server.cq.wait
    if what == "poller":
        poller.add(pair.server.cq)
        call = poller.wait
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        call(DEADLINE_S)

    waiter = Elsewhere(wait).start()
    assert begun.wait(DEADLINE_S)
    # After this sleep the thread is in its wait. If it held the lock, this thread would stand still until the deadline.
    time.sleep(0.3)
    for _ in range(100_000):
        pass
    assert not waiter.over
    message(pair, 1)
    waiter.result(2 * DEADLINE_S)


def test_a_poller_that_is_closed_in_the_middle_of_a_call_of_its_queue_is_freed(poller, pair, monkeypatch):
    """As a finalizer may close it."""
    freed = []
    native_free = poller._native_free
    monkeypatch.setattr(poller, "_native_free", lambda: freed.append(native_free()))
    poller.add(pair.server.cq)
    with pair.server.cq._lock, pytest.raises(RuntimeError, match="within another call"):
        poller.close()
    poller.close()
    assert (poller.closed, len(freed)) == (True, 1)
    message(pair, 7)
    assert [completion.context for completion in succeed(pair.server.cq)] == [7]
