"""Races of Poller.wait(): each event comes at each point between two native calls."""

from __future__ import annotations

import time
import weakref

import pytest
from racing import DEADLINE_S, GRACE_S, LOSSES, Elsewhere, Queue, at_each_point, wait_until

import ndpy

WAIT_S = DEADLINE_S / 2


class Polled:
    """Two queues in a poller. arrive() brings a completion to the first queue."""

    def __init__(self, fake, adapter, receives: int = 16, others=None) -> None:
        self.first = Queue(fake, adapter, receives)
        self.second = Queue(fake, others or adapter)
        self.poller = ndpy.Poller()
        self.poller.add(self.first.queue)
        self.poller.add(self.second.queue)
        self.fake = fake
        self.taken: dict = {self.first.queue: [], self.second.queue: []}

    def begin(self, points, chosen, action, *, ends=False):
        """Call wait() in a watched thread.

        If it sleeps before the chosen point, first a spurious event wakes it, then a completion of the first queue. If
        it sleeps after the point, a completion wakes it, unless the action itself ends the wait (`ends`).
        """

        def asleep() -> None:
            if points.sleeps == 1 and not points.reached:
                self.fake.spurious_event(self.first.queue)
            elif not (points.reached and ends):
                self.arrive()

        waiter = Elsewhere(lambda: self.poller.wait(WAIT_S))
        points.watch(waiter.thread, chosen, action, asleep)
        return waiter.start()

    def arrive(self) -> None:
        self.first.arrive()

    def keep(self, ready) -> bool:
        """Note what was delivered. Returns whether anything was."""
        assert len({id(queue) for queue, _ in ready}) == len(ready)
        for queue, completions in ready:
            assert completions
            self.taken[queue].append(completions)
        return bool(ready)

    def check(self) -> None:
        for scene in (self.first, self.second):
            if not scene.queue.closed:
                scene.check(*self.taken[scene.queue])

    def close(self) -> None:
        self.poller.close()
        self.first.close()
        self.second.close()

    def check_and_close(self) -> None:
        self.check()
        self.close()


@at_each_point(least=30)
def test_a_completion_that_comes_at_any_point_ends_the_wait(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    assert scene.keep(scene.begin(points, chosen, scene.arrive, ends=True).result())
    points.stop()
    scene.check_and_close()


@at_each_point(least=30)
def test_completions_of_both_queues_at_any_point_are_delivered_once(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)

    def arrive() -> None:
        scene.second.arrive()
        scene.arrive()

    assert scene.keep(scene.begin(points, chosen, arrive, ends=True).result())
    points.stop()
    while sum(len(each) for lists in scene.taken.values() for each in lists) < (
        scene.first.arrived + scene.second.arrived
    ):
        scene.keep(scene.poller.wait(WAIT_S))
    scene.check_and_close()


@at_each_point(least=30)
def test_a_completion_that_another_thread_takes_at_any_point_is_no_loss(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    others = []

    def steal() -> None:
        scene.arrive()
        others.append(points.elsewhere(scene.first.queue.poll))

    assert scene.keep(scene.begin(points, chosen, steal).result())
    points.stop()
    scene.taken[scene.first.queue] += [other.result() for other in others]
    scene.check_and_close()


@at_each_point(least=30)
def test_a_wait_of_the_queue_at_any_point_gets_completions_too(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    second = Elsewhere(lambda: scene.first.queue.wait(WAIT_S, 1))

    def join() -> None:
        second.start().thread.join(GRACE_S)
        scene.arrive()

    first = scene.begin(points, chosen, join)
    for other in (first, second):
        deadline = time.monotonic() + WAIT_S
        while other.thread.is_alive() and time.monotonic() < deadline:
            other.thread.join(GRACE_S / 2)
            # A waiter that has got nothing yet gets the next completion, once all before it were taken.
            if points.reached and other.thread.is_alive() and scene.first.queue._taken == scene.first.arrived:
                scene.arrive()
    scene.keep(first.result())
    points.stop()
    if points.reached:
        scene.taken[scene.first.queue].append(second.result())
    scene.check_and_close()


@pytest.mark.parametrize("end", ["close", "remove"])
@at_each_point(least=30)
def test_a_queue_that_goes_at_any_point_leaves_the_others(fake, adapter, points, end, chosen):
    scene = Polled(fake, adapter, receives=0)
    former = scene.second.queue

    def go() -> None:
        points.elsewhere(scene.second.close if end == "close" else lambda: scene.poller.remove(former))
        third.arrive()

    # This queue ends the wait.
    third = Queue(fake, adapter)
    scene.taken[third.queue] = []
    scene.poller.add(third.queue)
    scene.arrive = third.arrive
    fresh = scene.begin(points, chosen, go, ends=True)
    assert scene.keep(fresh.result())
    points.stop()
    while not scene.taken[third.queue]:
        scene.keep(scene.poller.wait(WAIT_S))
    third.check_and_close(*scene.taken[third.queue])
    scene.close()


@at_each_point(least=30)
def test_a_queue_that_is_added_at_any_point_is_heard_of(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    third = Queue(fake, adapter)
    scene.taken[third.queue] = []

    def add() -> None:
        third.arrive()
        points.elsewhere(lambda: scene.poller.add(third.queue))

    assert scene.keep(scene.begin(points, chosen, add, ends=True).result())
    points.stop()
    while points.reached and not scene.taken[third.queue]:
        scene.keep(scene.poller.wait(WAIT_S))
    scene.check()
    third.check_and_close(*scene.taken[third.queue])
    scene.close()


@at_each_point(least=4)
def test_a_queue_that_is_added_while_it_is_closed_is_refused_or_removed(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    third = Queue(fake, adapter, receives=0)
    third.queue_pair.close()
    adding = Elsewhere(lambda: scene.poller.add(third.queue))
    points.watch(adding.thread, chosen, lambda: points.elsewhere(third.queue.close))
    adding.start().outcome()
    points.stop()
    third.queue.close()
    # The next queue gets the same descriptors.
    fourth = Queue(fake, adapter)
    scene.taken[fourth.queue] = []
    scene.poller.add(fourth.queue)
    with pytest.raises(ndpy.TimeoutError):
        scene.poller.wait(0)
    fourth.arrive()
    assert scene.keep(scene.poller.wait(WAIT_S))
    fourth.check_and_close(*scene.taken[fourth.queue])
    scene.close()


@at_each_point(least=30)
def test_wake_at_any_point_ends_the_wait(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)
    ready = scene.begin(points, chosen, lambda: points.elsewhere(scene.poller.wake), ends=True).result()
    points.stop()
    assert scene.keep(ready) or points.reached
    scene.check_and_close()


@at_each_point(least=30)
def test_closing_the_poller_at_any_point_ends_the_wait(fake, adapter, points, chosen):
    scene = Polled(fake, adapter)

    def close() -> None:
        points.elsewhere(scene.poller.close)

    result = scene.begin(points, chosen, close, ends=True).outcome()
    points.stop()
    # Completions that were already taken are delivered in any case.
    assert isinstance(result, ndpy.ClosedError) or scene.keep(result)
    scene.check_and_close()


@pytest.mark.parametrize("pulled", LOSSES)
@at_each_point(least=20)
def test_the_loss_of_a_queue_at_any_point_is_told_and_costs_the_others_nothing(fake, points, pulled, chosen):
    lost, stays = fake.open(), fake.open()
    scene = Polled(fake, lost, receives=0, others=stays)
    told = []

    def lose() -> None:
        scene.second.arrive()
        scene.first.lose(points, pulled)

    scene.arrive = lose
    result = scene.begin(points, chosen, lose, ends=True).outcome()
    points.stop()
    # The loss is reported again when the queue itself notices it, and once for each of its queue pairs.
    for _ in range(5):
        if isinstance(result, ndpy.NdpyError):
            assert isinstance(result, LOSSES[pulled])
            told.append(result)
        else:
            scene.keep(result)
        if told and scene.taken[scene.second.queue]:
            break
        result = Elsewhere(lambda: scene.poller.wait(WAIT_S)).start().outcome()
    assert told
    scene.second.check(*scene.taken[scene.second.queue])
    scene.close()
    lost.close()
    stays.close()


def test_one_removed_adapter_costs_the_other_queues_neither_completions_nor_turns(fake):
    """The poller looks at its queues in any order, so this uses many of them."""
    stays = fake.open()
    for _ in range(8):
        lost = fake.open()
        gone = lost.create_completion_queue(16)
        poller = ndpy.Poller()
        scenes = [Queue(fake, stays) for _ in range(8)]
        for scene in scenes:
            poller.add(scene.queue)
            scene.arrive()
        poller.add(gone)
        fake.remove(lost)
        wait_until(lambda gone=gone: gone._defunct, "the queue knows")
        taken = {scene.queue: [] for scene in scenes}
        told = turns = 0
        while not told or not all(taken.values()):
            turns += 1
            assert turns < 20
            try:
                for queue, completions in poller.wait(WAIT_S):
                    taken[queue].append(completions)
            except ndpy.DeviceRemovedError:
                told += 1
        for scene in scenes:
            scene.check_and_close(*taken[scene.queue])
        poller.close()
        gone.close()
        lost.close()
    stays.close()


def test_a_poller_that_takes_a_queue_while_the_queue_tells_its_pollers_harms_neither(fake, adapter):
    """The queue tells its pollers of an event one after the other. Meanwhile another thread adds it to one more."""
    scene = Polled(fake, adapter)
    queue = scene.first.queue
    late = ndpy.Poller()
    adding = []

    class Told(weakref.WeakSet):
        def __iter__(self):
            for poller in super().__iter__():
                if not adding:
                    adding.append(Elsewhere(lambda: late.add(queue)).start())
                    adding[0].thread.join(GRACE_S)
                yield poller

    queue._pollers = Told(queue._pollers)
    queue._end_and_wake([])
    adding[0].result()
    scene.arrive()
    assert [ready for ready, _ in late.wait(WAIT_S)] == [queue]
    late.close()
    scene.close()
