"""Races of a completion queue's wait(): each event comes at each point between two native calls."""

from __future__ import annotations

import math
import threading
import time
from functools import partial

import pytest
from racing import DEADLINE_S, GRACE_S, LOSSES, Elsewhere, Queue, at_each_point, play_sleep, wait_until

import ndpy
from ndpy.platforms.verbs import poller

# If a thread sleeps when it should not, this limit shows it before the call counts as hanging.
WAIT_S = DEADLINE_S / 2


def begin(points, chosen, scene, action, *, ends=False, max_entries=64):
    """Call wait() in a watched thread.

    If it sleeps before the chosen point, first a spurious event wakes it, then a completion. If it sleeps after the
    point, a completion wakes it, unless the action itself ends the wait (`ends`).
    """

    def asleep() -> None:
        if points.sleeps == 1 and not points.reached:
            scene.fake.spurious_event(scene.queue)
        elif not (points.reached and ends):
            scene.arrive()

    waiter = Elsewhere(lambda: scene.queue.wait(WAIT_S, max_entries))
    points.watch(waiter.thread, chosen, action, asleep)
    return waiter.start()


@at_each_point(least=20)
def test_a_completion_that_comes_at_any_point_ends_the_wait(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    taken = begin(points, chosen, scene, scene.arrive, ends=True).result()
    points.stop()
    assert taken
    scene.check_and_close(taken)


@at_each_point(least=20)
def test_a_completion_that_another_thread_takes_at_any_point_is_no_loss(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    others = []

    def steal() -> None:
        scene.arrive()
        others.append(points.elsewhere(scene.queue.poll))

    taken = begin(points, chosen, scene, steal).result()
    points.stop()
    assert taken
    scene.check_and_close(taken, *(other.result() for other in others))


@at_each_point(least=20)
def test_two_waits_share_two_completions_wherever_the_second_begins(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    second = Elsewhere(lambda: scene.queue.wait(WAIT_S, 1))

    def join() -> None:
        second.start().thread.join(GRACE_S)
        scene.arrive()
        scene.arrive()

    first = begin(points, chosen, scene, join, ends=True, max_entries=1)
    taken = [first.result()]
    if points.reached:
        taken.append(second.result())
    points.stop()
    assert [len(completions) for completions in taken] == [1] * len(taken)
    scene.check_and_close(*taken)


@at_each_point(least=15)
def test_closing_the_queue_at_any_point_ends_the_wait(fake, adapter, points, chosen):
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair.close()
    closing = []

    def close() -> None:
        closing.append(points.elsewhere(scene.queue.close))

    scene.arrive = close
    waiter = begin(points, chosen, scene, close, ends=True)
    with pytest.raises(ndpy.ClosedError):
        waiter.result()
    points.stop()
    closing[0].result()
    assert scene.queue.closed


@at_each_point(least=20)
def test_closing_the_queue_pair_at_any_point_gives_what_was_posted_to_the_wait(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)

    def close() -> None:
        points.elsewhere(scene.queue_pair.close)
        scene.arrived = 16

    taken = begin(points, chosen, scene, close, ends=True).result()
    points.stop()
    assert taken
    scene.check_and_close(taken)


@pytest.mark.parametrize("pulled", LOSSES)
@at_each_point(least=15)
def test_the_loss_of_the_device_or_the_queue_at_any_point_ends_the_wait(fake, points, pulled, chosen):
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=0)
    lose = partial(scene.lose, points, pulled)
    scene.arrive = lose
    waiter = begin(points, chosen, scene, lose, ends=True)
    with pytest.raises(LOSSES[pulled]):
        waiter.result()
    points.stop()
    scene.close()
    adapter.close()


@at_each_point(least=20)
def test_arming_at_any_point_and_waiting_both_hear_of_completions(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    arming = []

    def arm() -> None:
        arming.append(points.elsewhere(scene.queue.arm))
        scene.arrive()

    taken = [begin(points, chosen, scene, arm, ends=True).result()]
    points.stop()
    if arming:
        # arm() may have come after the wait had taken the first completion.
        scene.arrive()
        arming[0].result().result(WAIT_S)
    scene.check_and_close(*taken)


@at_each_point(least=20)
def test_a_poller_that_waits_too_and_the_wait_both_get_completions(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    poller = ndpy.Poller()
    poller.add(scene.queue)
    polling = Elsewhere(lambda: poller.wait(WAIT_S))

    def join() -> None:
        polling.start().thread.join(GRACE_S)
        scene.arrive()

    waiter = begin(points, chosen, scene, join, max_entries=1)
    # Each may take all that is there. The next completion is for the one that has got nothing.
    wait_until(lambda: waiter.over or polling.over, "one of them ends")
    if points.reached:
        scene.arrive()
    taken = [waiter.result()]
    points.stop()
    if points.reached:
        ((queue, completions),) = polling.result()
        assert queue is scene.queue
        taken.append(completions)
    scene.check(*taken)
    poller.close()
    scene.close()


def test_a_wait_arms_once_and_sleeps_once(fake, adapter, points):
    scene = Queue(fake, adapter)
    for _ in range(4):
        before = fake.counts.armed
        waiter = Elsewhere(lambda: scene.queue.wait(WAIT_S))
        # Complete a request once the thread really sleeps. If something left over wakes it at once, it sleeps twice.
        later = threading.Timer(GRACE_S, scene.arrive)
        points.watch(waiter.thread, -1, lambda: None, lambda later=later: points.sleeps > 1 or later.start())
        assert len(waiter.start().result()) == 1
        points.stop()
        assert (fake.counts.armed - before, points.sleeps) == (1, 1)
    scene.close()


def test_a_thread_that_took_the_event_wakes_the_others_that_wait(fake, adapter, points):
    scene = Queue(fake, adapter)
    waiters = [Elsewhere(lambda: scene.queue.wait(WAIT_S, 1)).start() for _ in range(3)]
    wait_until(lambda: len(scene.queue._waiters) == 3, "all wait")
    for _ in waiters:
        scene.arrive()
    scene.check_and_close(*(waiter.result() for waiter in waiters))


def test_a_wait_for_which_another_thread_leaves_nothing_ends_at_its_deadline(fake, adapter, points, monkeypatch):
    """Whenever the wait has found a completion, the other thread is quicker."""
    scene = Queue(fake, adapter)
    sleep = scene.queue._native_sleep
    taken = []

    def wait_and_lose(deadline):
        scene.arrive()
        assert sleep(deadline)
        taken.append(Elsewhere(scene.queue.poll).start().result())
        assert scene.arrived < 16, "the wait goes on"
        # Now the deadline has passed.
        time.sleep(GRACE_S)
        return True

    monkeypatch.setattr(scene.queue, "_native_sleep", wait_and_lose)
    with pytest.raises(ndpy.TimeoutError):
        scene.queue.wait(GRACE_S / 2)
    scene.check_and_close(*taken)


@pytest.mark.parametrize("completions", [0, 1])
def test_a_wait_for_no_completion_is_refused(fake, adapter, points, completions):
    scene = Queue(fake, adapter)
    for _ in range(completions):
        scene.arrive()
    waiting = Elsewhere(lambda: scene.queue.wait(GRACE_S, 0)).start()
    waiting.thread.join(WAIT_S)
    if waiting.thread.is_alive():
        scene.queue.poll()
        pytest.fail("the wait has passed its deadline")
    with pytest.raises(ValueError, match="at least one"):
        waiting.result()
    scene.check_and_close()


@pytest.mark.parametrize("longest_s", [GRACE_S, poller.LONGEST_S])
@pytest.mark.parametrize("timeout_s", [30 * 86400, math.inf])
@pytest.mark.parametrize("how", ["queue", "poller"])
def test_a_wait_may_be_longer_than_the_system_waits_at_once(fake, adapter, monkeypatch, how, timeout_s, longest_s):
    def sleep(real, native, waiter, milliseconds):
        slept.append(milliseconds)
        return real(native, waiter, min(milliseconds, int(longest_s * 1000)))

    slept = []
    play_sleep(monkeypatch, sleep)
    monkeypatch.setattr(poller, "LONGEST_S", longest_s)
    scene = Queue(fake, adapter)
    with ndpy.Poller() as polling:
        polling.add(scene.queue)
        call = scene.queue.wait if how == "queue" else lambda timeout_s: polling.wait(timeout_s)[0][1]
        waiter = Elsewhere(lambda: call(timeout_s)).start()
        waiter.thread.join(5 * GRACE_S)
        scene.arrive()
        scene.check(waiter.result())
    assert all(0 < milliseconds < 2**31 for milliseconds in slept)
    assert how == "poller" or len(slept) > (longest_s == GRACE_S)
    scene.close()


def test_a_wait_that_slept_asks_once_and_reads_one_event(fake, scene):
    """Each sleep has one event. A second look at the channel would be a system call in vain."""
    calls = fake.calls_of("ibv_req_notify_cq", "ibv_get_cq_event")
    waiter = Elsewhere(lambda: scene.queue.wait(DEADLINE_S)).start()
    wait_until(lambda: scene.queue._waiters and "ibv_req_notify_cq" in calls, "the thread sleeps")
    scene.arrive()
    assert len(waiter.result()) == 1
    assert calls == ["ibv_req_notify_cq", "ibv_get_cq_event"]
