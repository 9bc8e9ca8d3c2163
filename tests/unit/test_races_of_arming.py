"""Races of arm() and of the notification that it returns: each event comes at each point between two native calls."""

from __future__ import annotations

from functools import partial

import pytest
from racing import DEADLINE_S, GRACE_S, LOSSES, Elsewhere, Queue, at_each_point, wait_until

import ndpy
from ndpy import Notify

WAIT_S = DEADLINE_S / 2


def armed(points, chosen, queue, action):
    """Call arm(), with the action at the chosen point. Returns the Pending, or the exception that arm() raised."""
    arming = Elsewhere(queue.arm)
    points.watch(arming.thread, chosen, action)
    return arming.start().outcome()


def end_of(pending):
    """The value or the exception that a Pending ended with. An exception in its place is returned."""
    if isinstance(pending, ndpy.NdpyError):
        return pending
    try:
        return pending.result(WAIT_S)
    except ndpy.NdpyError as error:
        return error


# ---- events while arm() runs ----


@at_each_point(least=6)
def test_a_completion_that_comes_at_any_point_of_arm_ends_it(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    pending = armed(points, chosen, scene.queue, scene.arrive)
    if not points.reached:
        scene.arrive()
    assert pending.result(WAIT_S) is None
    points.stop()
    scene.check_and_close()


@pytest.mark.parametrize("kind", list(Notify))
@at_each_point(least=6)
def test_another_thread_that_arms_first_too_at_any_point_fares_no_worse(fake, adapter, points, kind, chosen):
    scene = Queue(fake, adapter)
    others = []

    def arm() -> None:
        others.append(points.elsewhere(lambda: scene.queue.arm(kind)))

    pendings = [armed(points, chosen, scene.queue, arm)]
    points.stop()
    pendings += [other.result() for other in others]
    scene.arrive()
    assert pendings[0].result(WAIT_S) is None
    if kind is Notify.ANY:
        assert [pending.result(WAIT_S) for pending in pendings[1:]] == [None] * len(others)
    scene.check_and_close()
    if kind is Notify.ERRORS:
        assert [type(end_of(pending)) for pending in pendings[1:]] == [ndpy.CanceledError] * len(others)


@at_each_point(least=6)
def test_a_wait_that_begins_at_any_point_of_arm_gets_the_completion_too(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    waiter = Elsewhere(lambda: scene.queue.wait(WAIT_S))

    def wait() -> None:
        waiter.start().thread.join(GRACE_S)
        scene.arrive()

    pending = armed(points, chosen, scene.queue, wait)
    points.stop()
    taken = [waiter.result()] if points.reached else []
    # The wait may have taken the completion before the queue was armed.
    scene.arrive()
    assert pending.result(WAIT_S) is None
    scene.check_and_close(*taken)


@at_each_point(least=6)
def test_closing_the_queue_at_any_point_of_arm_ends_it(fake, adapter, points, chosen):
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair.close()
    pending = armed(points, chosen, scene.queue, lambda: points.elsewhere(scene.queue.close))
    points.stop()
    scene.queue.close()
    assert isinstance(end_of(pending), (ndpy.ClosedError, ndpy.CanceledError))


@pytest.mark.parametrize("pulled", LOSSES)
@at_each_point(least=6)
def test_the_loss_of_the_device_or_the_queue_at_any_point_of_arm_ends_it(fake, points, pulled, chosen):
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=0)
    lose = partial(scene.lose, points, pulled)
    pending = armed(points, chosen, scene.queue, lose)
    if not points.reached:
        lose()
    points.stop()
    assert isinstance(end_of(pending), LOSSES[pulled])
    scene.close()
    adapter.close()


# ---- events while the adapter's thread handles the event ----


def handled(points, chosen, scene, adapter, action):
    """Call arm(), then complete a request. Returns the Pending.

    The action runs at the chosen point of the adapter's thread.
    """
    pending = scene.queue.arm()
    points.watch(adapter._events._thread, chosen, action)
    scene.arrive()
    wait_until(lambda: points.reached or points.sleeps, "the adapter's thread has handled it")
    return pending


@at_each_point(least=8)
def test_a_completion_at_any_point_of_the_event_is_not_lost(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    assert end_of(handled(points, chosen, scene, adapter, scene.arrive)) is None
    points.stop()
    scene.check()
    again = scene.queue.arm()
    scene.arrive()
    assert end_of(again) is None
    scene.close()


@at_each_point(least=8)
def test_arming_again_at_any_point_of_the_event_is_answered(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    others = []
    first = handled(points, chosen, scene, adapter, lambda: others.append(points.elsewhere(scene.queue.arm)))
    assert end_of(first) is None
    points.stop()
    # It may have been armed after that completion.
    scene.arrive()
    assert [end_of(other.result()) for other in others] == [None] * len(others)
    scene.check_and_close()


@at_each_point(least=8)
def test_cancelling_at_any_point_of_the_event_ends_it_once(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    ended = []
    pending = scene.queue.arm()
    pending.add_done_callback(ended.append)
    points.watch(adapter._events._thread, chosen, lambda: points.elsewhere(pending.cancel))
    scene.arrive()
    wait_until(lambda: points.reached or points.sleeps, "the adapter's thread has handled it")
    points.stop()
    assert end_of(pending) is None or isinstance(end_of(pending), ndpy.CanceledError)
    # Who waits is told before the callbacks are called.
    wait_until(lambda: ended, "the callback")
    assert len(ended) == 1
    again = scene.queue.arm()
    scene.arrive()
    assert end_of(again) is None
    scene.check_and_close()


@at_each_point(least=8)
def test_a_wait_at_any_point_of_the_event_gets_the_completion(fake, adapter, points, chosen):
    scene = Queue(fake, adapter)
    taken = []
    waiting = lambda: taken.append(points.elsewhere(lambda: scene.queue.wait(WAIT_S)))  # noqa: E731
    assert end_of(handled(points, chosen, scene, adapter, waiting)) is None
    wait_until(lambda: taken or not points.reached, "the wait has begun")
    results = [other.result() for other in taken]
    points.stop()
    scene.check_and_close(*results)


@at_each_point(least=8)
def test_closing_the_queue_at_any_point_of_the_event_ends_it(fake, adapter, points, chosen):
    scene = Queue(fake, adapter, receives=1)

    def close() -> None:
        points.elsewhere(scene.close)

    pending = handled(points, chosen, scene, adapter, close)
    points.stop()
    scene.close()
    assert end_of(pending) is None or isinstance(end_of(pending), ndpy.CanceledError)
    assert scene.queue.closed
    # The next queue's channel gets the same descriptor. Nothing may be left for the former one.
    again = Queue(fake, adapter)
    pending = again.queue.arm()
    again.arrive()
    assert end_of(pending) is None
    again.close()


# ---- which completions notify ----


def test_g_2_a_completion_that_came_before_arming_is_told_at_once_after_others_were_taken(fake, adapter):
    scene = Queue(fake, adapter)
    for context in range(4):
        pending = scene.queue.arm()
        scene.arrive()
        assert end_of(pending) is None
        assert [completion.context for completion in scene.queue.poll()] == [3 * context]
        for _ in range(2):
            scene.arrive()
            assert end_of(scene.queue.arm()) is None
        assert len(scene.queue.poll()) == 2
    scene.close()


def test_g_2_a_completion_that_ended_one_notification_does_not_end_the_next(fake, adapter):
    scene = Queue(fake, adapter)
    first = scene.queue.arm()
    scene.arrive()
    assert end_of(first) is None
    second = scene.queue.arm()
    assert not second.done()
    scene.arrive()
    assert end_of(second) is None
    scene.check_and_close()
