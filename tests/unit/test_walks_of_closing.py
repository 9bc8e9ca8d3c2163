"""Races of a completion queue's and a queue pair's close(), and a close() that fails.

Each event comes at each point between two native calls.
"""

from __future__ import annotations

import errno

import pytest
from racing import DEADLINE_S, GRACE_S, Elsewhere, Queue, at_each_point, wait_until

import ndpy
from ndpy.platforms.verbs.native_calls import lib

WAIT_S = DEADLINE_S / 2


@pytest.fixture(autouse=True)
def _address(fake):
    fake.have_address()


def closing(points, chosen, resource, action):
    """Call close(), with the action at the chosen point. Returns its value or its exception."""
    closer = Elsewhere(resource.close)
    points.watch(closer.thread, chosen, action)
    return closer.start().outcome()


def gone(call):
    """The value of the call, or None if it raised the error of a closed object."""
    try:
        return call()
    except (ndpy.ClosedError, ndpy.CanceledError):
        return None


# ---- a completion queue ----


@pytest.mark.parametrize("use", ["poll", "wait", "arm", "resize", "create_queue_pair", "close"])
@at_each_point(least=6)
def test_using_a_queue_at_any_point_of_its_close_is_refused_or_is_done_before(fake, adapter, points, use, chosen):
    queue = adapter.create_completion_queue(64)
    # After a wait there is a descriptor that a thread has slept on. The close must close that too.
    with pytest.raises(ndpy.TimeoutError):
        queue.wait(0)
    calls = {
        "poll": queue.poll,
        "wait": lambda: queue.wait(WAIT_S),
        "arm": lambda: queue.arm().result(WAIT_S),
        "resize": lambda: queue.resize(32),
        "create_queue_pair": lambda: adapter.create_queue_pair(queue),
        "close": queue.close,
    }
    others = []
    result = closing(points, chosen, queue, lambda: others.append(points.elsewhere(lambda: gone(calls[use]))))
    points.stop()
    for other in others:
        made = other.result()
        if isinstance(made, ndpy.QueuePair):
            made.close()
    assert result is None or (use == "create_queue_pair" and isinstance(result, ndpy.DeviceBusyError))
    queue.close()


@at_each_point(least=8)
def test_a_poller_and_a_wait_at_any_point_of_a_close_hear_of_it(fake, adapter, points, chosen):
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair.close()
    stays = Queue(fake, adapter)
    poller = ndpy.Poller()
    poller.add(scene.queue)
    poller.add(stays.queue)
    waiter = Elsewhere(lambda: scene.queue.wait(WAIT_S)).start()
    polling = Elsewhere(lambda: poller.wait(WAIT_S)).start()
    wait_until(lambda: scene.queue._waiters, "the thread waits")
    assert closing(points, chosen, scene.queue, stays.arrive) is None
    points.stop()
    with pytest.raises(ndpy.ClosedError):
        waiter.result()
    if not points.reached:
        stays.arrive()
    ((queue, completions),) = polling.result()
    assert queue is stays.queue
    stays.check(completions)
    poller.close()
    stays.close()


@at_each_point(least=8)
def test_the_removal_of_the_device_at_any_point_of_a_close_does_not_stop_it(fake, points, chosen):
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair.close()
    armed = scene.queue.arm()
    assert closing(points, chosen, scene.queue, lambda: scene.lose(points, "removal")) is None
    points.stop()
    with pytest.raises((ndpy.CanceledError, ndpy.DeviceRemovedError)):
        armed.result(WAIT_S)
    with pytest.raises(ndpy.ClosedError):
        scene.queue.poll()
    adapter.close()


# ---- a queue pair ----


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("use", ["completion", "receive", "send", "flush", "poll", "wait", "disconnect", "close"])
@at_each_point(least=8)
def test_using_a_queue_pair_at_any_point_of_its_close_loses_nothing(fake, adapter, points, use, connected, chosen):
    """Each posted request completes once, with any status. A post after the close is refused."""
    scene = Queue(fake, adapter, receives=4)
    queue_pair = scene.queue_pair
    posted = [4]
    connector = None
    if connected:
        connector = adapter.connect(queue_pair, ("127.0.0.1", 4000), timeout_s=WAIT_S)
    taken = []

    def post(call) -> None:
        call()
        posted[0] += 1

    def disconnect() -> None:
        if connector is not None:
            gone(connector.begin_disconnect)

    calls = {
        "completion": lambda: fake.complete(queue_pair),
        "receive": lambda: post(lambda: queue_pair.receive([], context=4)),
        "send": lambda: post(lambda: queue_pair.send([], context=4)) if connected else None,
        "flush": queue_pair.flush,
        "poll": lambda: taken.append(scene.queue.poll()),
        "wait": lambda: taken.append(scene.queue.wait(WAIT_S)),
        "disconnect": disconnect,
        "close": queue_pair.close,
    }
    assert closing(points, chosen, queue_pair, lambda: points.elsewhere(lambda: gone(calls[use]))) is None
    points.stop()
    assert queue_pair.closed
    scene.arrived = posted[0]
    scene.check(*taken)
    if connector is not None:
        assert connector.state == "disconnected"
        connector.close()
    scene.queue.close()


@at_each_point(least=8)
def test_the_removal_of_the_device_at_any_point_of_the_close_of_a_queue_pair_does_not_stop_it(fake, points, chosen):
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=4)
    assert closing(points, chosen, scene.queue_pair, lambda: scene.lose(points, "removal")) is None
    points.stop()
    scene.queue.close()
    adapter.close()


@pytest.mark.parametrize("kind", ["IBV_EVENT_QP_FATAL", "IBV_EVENT_COMM_EST"])
@at_each_point(least=8)
def test_an_event_of_a_queue_pair_at_any_point_of_its_close_finds_no_freed_memory(fake, adapter, points, kind, chosen):
    scene = Queue(fake, adapter, receives=4)
    pair, event = scene.queue_pair, getattr(lib, kind)
    assert closing(points, chosen, pair, lambda: fake.device_event(adapter, event, pair)) is None
    points.stop()
    scene.arrived = 4
    scene.check()
    scene.queue.close()


# ---- a close() that fails ----


def test_a_close_of_a_queue_that_fails_leaves_it_usable(fake, adapter):
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair.close()
    fake.failures.destroy_cq = errno.EIO
    with pytest.raises(ndpy.ProviderError):
        scene.queue.close()
    assert not scene.queue.closed
    assert scene.queue.poll() == []
    scene.queue_pair = adapter.create_queue_pair(scene.queue, receive_queue_depth=4)
    scene.queue_pair.receive([], context=0)
    armed = scene.queue.arm()
    scene.arrive()
    armed.result(WAIT_S)
    scene.check_and_close()


@pytest.mark.parametrize("removed", ["before", "meanwhile"])
@pytest.mark.parametrize("kind", ["queue", "queue pair"])
def test_a_close_that_fails_does_not_forget_that_the_device_was_removed(fake, points, kind, removed):
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=0)
    if kind == "queue":
        scene.queue_pair.close()
    resource = scene.queue if kind == "queue" else scene.queue_pair

    def remove() -> None:
        fake.remove(adapter)
        wait_until(lambda: adapter._defunct, "the adapter knows")

    if removed == "before":
        remove()
        wait_until(lambda: resource._defunct, "it knows")
    fake.failures.destroy_cq = fake.failures.destroy_qp = errno.EIO
    result = closing(points, 0, resource, remove if removed == "meanwhile" else lambda: None)
    assert isinstance(result, ndpy.ProviderError)
    assert not resource.closed
    fake.failures.destroy_cq = fake.failures.destroy_qp = 0
    with pytest.raises(ndpy.DeviceRemovedError):
        resource.poll() if kind == "queue" else resource.receive([])
    points.stop()
    scene.close()
    adapter.close()


def test_a_close_that_a_waiting_thread_holds_up_loses_nothing(fake, adapter, monkeypatch):
    scene = Queue(fake, adapter, receives=4)
    scene.queue_pair.close()
    scene.queue.poll()
    armed = scene.queue.arm()
    # As if a thread were in the wait and did not get to run.
    waiter = scene.queue._native_new_waiter()
    scene.queue._waiters.append(waiter)
    monkeypatch.setattr("ndpy.objects.completion_queue._LEAVE_S", GRACE_S)
    with pytest.raises(ndpy.DeviceBusyError, match="does not leave"):
        scene.queue.close()
    scene.queue._waiters.remove(waiter)
    assert not armed.done()
    scene.queue_pair = adapter.create_queue_pair(scene.queue, receive_queue_depth=4)
    scene.queue_pair.receive([], context=0)
    scene.arrive()
    armed.result(WAIT_S)
    scene.check_and_close()
