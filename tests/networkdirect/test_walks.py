"""wait(), Poller.wait(), arm(), close(), connect() and disconnect(), each against other events.

Each event comes at each point between two native calls, in the calling thread and in the adapter's thread.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
from kit.deadlines import wait_until
from kit.helpers import STRESS, Keeper, create_end, host_of, sample
from kit.scenarios import removal
from kit.walking import DEADLINE_S, GRACE_S, Elsewhere, walk
from native_points import Scene, points  # noqa: F401

import ndpy
from ndpy.platforms.networkdirect import completion_queue, connection

# ruff: noqa: F811

WAIT_S = DEADLINE_S / 2


@pytest.fixture
def scene(softnd, points):
    scene = Scene(softnd)
    yield scene
    scene.keep.close()
    # Each lock is a handle, and pytest keeps the fixture until all others have ended.
    vars(scene).clear()


def end_of(pending):
    """The value or the exception that a Pending ended with. An exception in its place is returned."""
    if isinstance(pending, ndpy.NdpyError):
        return pending
    try:
        return pending.result(WAIT_S)
    except ndpy.NdpyError as error:
        return error


# ---- wait() ----


@pytest.mark.parametrize("event", ["completion", "stolen", "second waiter", "arm", "poller"])
def test_g_2_no_completion_is_lost_or_seen_twice_whatever_comes_at_any_point_of_wait(scene, points, event):
    def run(chosen: int) -> bool:
        scene.renew()
        others = []
        poller = ndpy.Poller()
        poller.add(scene.queue)

        def come() -> None:
            if event == "completion":
                scene.arrive()
            elif event == "stolen":
                scene.arrive()
                others.append(points.elsewhere(scene.queue.poll))
            elif event == "second waiter":
                others.append(points.elsewhere(lambda: scene.queue.wait(WAIT_S, 1)))
                scene.arrive()
                scene.arrive()
            elif event == "arm":
                others.append(points.elsewhere(scene.queue.arm))
                scene.arrive()
            else:
                others.append(points.elsewhere(lambda: poller.wait(WAIT_S)))
                scene.arrive()

        ends = event in ("completion", "second waiter", "arm")
        waiter = scene.wait(points, chosen, lambda: scene.queue.wait(WAIT_S, 1), come, ends=ends)
        while event == "poller" and scene.arrived < scene.first + 12:
            still = [other for other in (waiter, *others) if other.thread.is_alive()]
            if not still:
                break
            still[0].thread.join(5 * GRACE_S)
            # A waiter that has got nothing yet gets the next message.
            if points.reached and still[0].thread.is_alive():
                scene.arrive()
        taken = [waiter.result()]
        points.stop()
        if event == "arm" and others:
            # arm() may have come after the wait had taken the first message.
            scene.arrive()
            assert end_of(others[0].result()) is None
        elif event == "poller":
            for other in others:
                ((_, completions),) = other.result()
                taken.append(completions)
        else:
            taken += [other.result() for other in others]
        assert taken[0]
        scene.check(*taken)
        poller.close()
        return points.reached

    walk(run, points, 12)


def test_closing_a_queue_at_any_point_of_wait_ends_it(scene, points):
    def run(chosen: int) -> bool:
        queue = scene.adapter.create_completion_queue(16)
        closing = []

        def close() -> None:
            closing.append(points.elsewhere(queue.close))

        waiter = Elsewhere(lambda: queue.wait(WAIT_S))
        points.watch(
            waiter.thread, chosen, close, lambda: points.reached or (points.sleeps < 2 and queue._wake_all()) or close()
        )
        with pytest.raises(ndpy.ClosedError):
            waiter.start().result()
        points.stop()
        queue.close()
        return points.reached

    walk(run, points, 10)


# ---- Poller.wait() ----


@pytest.mark.parametrize("event", ["completion", "stolen", "close", "remove", "add", "wake", "close poller"])
def test_whatever_comes_at_any_point_of_a_pollers_wait_costs_no_completion(scene, points, event):
    def run(chosen: int) -> bool:
        scene.renew()
        others, taken = [], []
        poller = ndpy.Poller()
        third = scene.adapter.create_completion_queue(16)
        poller.add(scene.queue)
        if event != "add":
            poller.add(third)

        def come() -> None:
            calls = {
                "stolen": scene.queue.poll,
                "close": third.close,
                "remove": lambda: poller.remove(third),
                "add": lambda: poller.add(third),
                "wake": poller.wake,
                "close poller": poller.close,
            }
            if event not in ("wake", "close poller"):
                scene.arrive()
            if event in calls:
                others.append(points.elsewhere(calls[event]))

        waiter = scene.wait(points, chosen, lambda: poller.wait(WAIT_S), come, ends=event != "stolen")
        result = waiter.outcome()
        points.stop()
        if isinstance(result, ndpy.NdpyError):
            assert event == "close poller"
            assert isinstance(result, ndpy.ClosedError)
        else:
            assert result or event == "wake"
            taken += [completions for _, completions in result]
        if event == "stolen":
            taken += [other.result() for other in others]
        scene.check(*taken)
        poller.close()
        third.close()
        return points.reached

    walk(run, points, 20)


def test_adding_a_queue_to_a_poller_while_it_is_closed_leaves_the_poller_usable(scene, points):
    def run(chosen: int) -> bool:
        scene.renew()
        poller = ndpy.Poller()
        poller.add(scene.queue)
        third = scene.adapter.create_completion_queue(16)
        adding = Elsewhere(lambda: poller.add(third))
        points.watch(adding.thread, chosen, lambda: points.elsewhere(third.close))
        adding.start().outcome()
        points.stop()
        third.close()
        scene.arrive()
        ((queue, completions),) = poller.wait(WAIT_S)
        assert queue is scene.queue
        scene.check(completions)
        poller.close()
        return points.reached

    walk(run, points, 4)


@pytest.mark.parametrize("call", ["wait", "poller", "arm"])
def test_b_7_7_the_removal_of_the_device_at_any_point_ends_the_wait(softnd, points, call):
    def run(chosen: int) -> bool:
        with (
            softnd.open(removal(after=1)) as adapter,
            adapter.create_completion_queue(16) as queue,
            adapter.create_completion_queue(16) as spare_queue,
            adapter.create_queue_pair(spare_queue) as spare,
            ndpy.Poller() as poller,
        ):
            poller.add(queue)

            def remove() -> None:
                with contextlib.suppress(ndpy.DeviceRemovedError):
                    for _ in range(4):
                        spare.receive([])

            calls = {
                "wait": lambda: queue.wait(WAIT_S),
                "poller": lambda: poller.wait(WAIT_S),
                "arm": lambda: queue.arm().result(WAIT_S),
            }
            waiter = Elsewhere(calls[call])
            points.watch(waiter.thread, chosen, remove, lambda: points.reached or remove())
            waiter.start()
            if call == "arm":
                wait_until(lambda: points.reached or len(points.names) >= 8, "it is armed")
                remove()
            result = waiter.outcome()
            points.stop()
            assert isinstance(result, ndpy.DeviceRemovedError), result
            return points.reached

    # On a removed adapter, the queue pair's close waits a second each time for requests that never come back.
    walk(run if STRESS else lambda number: run(4 * number), points, 8 if STRESS else 2)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("kind", ["queue", "connector"])
def test_a_close_that_fails_leaves_the_object_as_it_was_or_removed(softnd, monkeypatch, kind, removed):
    with softnd.open() as adapter:
        resource = adapter.create_completion_queue(16) if kind == "queue" else adapter.create_connector()

        def fail(requests) -> None:
            if removed:
                adapter._mark_removed()
            raise ndpy.DeviceBusyError("the provider did not let go", operation="cancel")

        with monkeypatch.context() as broken:
            broken.setattr(completion_queue if kind == "queue" else connection, "cancel_all", fail)
            with pytest.raises(ndpy.DeviceBusyError):
                resource.close()
        use = resource.poll if kind == "queue" else lambda: resource.bind((host_of(adapter), 0))
        if removed:
            with pytest.raises(ndpy.DeviceRemovedError):
                use()
        else:
            use()
        resource.close()


# ---- arm() ----


@pytest.mark.parametrize("event", ["completion", "arm", "wait", "close"])
@pytest.mark.parametrize("role", ["caller", "adapter's thread"])
def test_what_is_armed_ends_whatever_comes_at_any_point(scene, points, event, role):
    def run(chosen: int) -> bool:
        scene.renew()
        queue = scene.queue if event != "close" else scene.adapter.create_completion_queue(16)
        others = []

        def come() -> None:
            if event == "completion":
                scene.arrive()
            else:
                calls = {"arm": queue.arm, "wait": lambda: queue.wait(WAIT_S), "close": queue.close}
                others.append(points.elsewhere(calls[event]))

        arming = Elsewhere(queue.arm)
        if role == "caller":
            points.watch(arming.thread, chosen, come)
            pending = arming.start().outcome()
        else:
            pending = arming.start().outcome()
            points.watch(scene.adapter._events._thread, chosen, come)
            if event == "close":
                # The notification ends only when the queue is closed.
                scene.adapter._wake()
            else:
                scene.arrive()
            wait_until(lambda: points.reached or points.sleeps, "the adapter's thread has handled it")
            points.stop()
        if event == "close":
            points.stop()
            queue.close()
            assert isinstance(end_of(pending), (ndpy.CanceledError, ndpy.ClosedError))
            return points.reached
        # The first message may have come before the queue was armed, or the wait may have taken it.
        for _ in range(2):
            scene.arrive()
        taken = [other.result() for other in others] if event == "wait" else []
        scene.arrive()
        assert end_of(pending) is None
        points.stop()
        if event == "arm":
            scene.arrive()
            assert [end_of(other.result()) for other in others] == [None] * len(others)
        scene.check(*taken)
        return points.reached

    walk(run, points, 2)


def test_cancelling_at_any_point_of_the_event_ends_what_was_armed_once(scene, points):
    def run(chosen: int) -> bool:
        scene.renew()
        ended = []
        pending = scene.queue.arm()
        pending.add_done_callback(ended.append)
        handled = threading.Event()

        def asleep() -> None:
            # Before that, the thread may still be on its way from what woke it last.
            if pending.done():
                handled.set()

        points.watch(scene.adapter._events._thread, chosen, lambda: points.elsewhere(pending.cancel), asleep)
        scene.arrive()
        wait_until(lambda: points.reached or handled.is_set(), "the adapter's thread has handled it")
        points.stop()
        assert end_of(pending) is None or isinstance(end_of(pending), ndpy.CanceledError)
        assert len(ended) == 1
        scene.check()
        return points.reached

    walk(run, points, 4)


# ---- close() ----


@pytest.mark.parametrize("use", ["poll", "wait", "arm", "create_queue_pair", "close", "poller"])
def test_using_a_queue_at_any_point_of_its_close_is_refused_or_is_done_before(scene, points, use):
    def run(chosen: int) -> bool:
        queue = scene.adapter.create_completion_queue(16)
        armed = queue.arm()
        poller = ndpy.Poller()
        calls = {
            "poll": queue.poll,
            "wait": lambda: queue.wait(WAIT_S),
            "arm": lambda: queue.arm().result(WAIT_S),
            "create_queue_pair": lambda: scene.keep(scene.adapter.create_queue_pair(queue)),
            "close": queue.close,
            "poller": lambda: poller.add(queue),
        }

        def call() -> None:
            with contextlib.suppress(ndpy.ClosedError, ndpy.CanceledError):
                calls[use]()

        closer = Elsewhere(queue.close)
        points.watch(closer.thread, chosen, lambda: points.elsewhere(call))
        result = closer.start().outcome()
        points.stop()
        assert result is None or (use == "create_queue_pair" and isinstance(result, ndpy.DeviceBusyError))
        if result is not None:
            scene.keep._things.pop().close()
            queue.close()
        assert isinstance(end_of(armed), ndpy.CanceledError)
        poller.close()
        return points.reached

    walk(run, points, 8)


def test_a_finalizer_that_wakes_the_adapters_thread_while_it_is_closed_uses_no_closed_port(softnd, points):
    def run(chosen: int) -> bool:
        adapter = softnd.open()
        waking = Elsewhere(adapter._wake)
        points.watch(waking.thread, chosen, lambda: points.elsewhere(adapter.close))
        waking.start().result()
        points.stop()
        adapter.close()
        return points.reached

    walk(run, points, 2)


# ---- connect() and disconnect() ----


class Connecting:
    """Two unconnected ends of one adapter, each with posted receives, and a listener. close() closes them."""

    def __init__(self, adapter) -> None:
        self.adapter = adapter
        self.keep = Keeper()
        self.client, self.server = (create_end(self.keep, adapter) for _ in range(2))
        self.listener = self.keep(adapter.listen((host_of(adapter), 0)))
        self.connector = self.keep(adapter.create_connector())
        for end in (self.client, self.server):
            for context in range(4):
                end.queue_pair.receive([], context=context)
        self.accepted = None
        self.ends: dict = {}

    def count(self, pending):
        self.ends[pending] = 0

        def ended(which) -> None:
            self.ends[which] += 1

        pending.add_done_callback(ended)
        return pending

    def serve(self) -> None:
        """Take the request and accept it. The client may have given up by then."""
        with contextlib.suppress(ndpy.NdpyError):
            self.accepted = self.keep(self.listener.get_request(WAIT_S))
            try:
                self.accepted.accept(self.server.queue_pair, timeout_s=WAIT_S)
            except ndpy.NdpyError:
                self.accepted.close()

    def connect(self) -> None:
        self.count(self.connector.begin_connect(self.client.queue_pair, self.listener.address)).result(WAIT_S)
        self.count(self.connector.begin_complete_connect()).result(WAIT_S)

    def come(self, points, event) -> None:
        calls = {
            "close connector": self.connector.close,
            "close queue pair": self.client.queue_pair.close,
            "close both": lambda: (self.client.queue_pair.close(), self.connector.close()),
            "flush": self.client.queue_pair.flush,
            "disconnect": lambda: self.connector.disconnect(WAIT_S),
            "close listener": self.listener.close,
            "peer closes": self.server.queue_pair.close,
            "peer leaves": lambda: self.accepted and self.accepted.close(),
        }
        points.elsewhere(calls[event])

    def close(self) -> None:
        for end in (self.client, self.server):
            for connector in (self.connector, self.accepted):
                if connector is not None:
                    connector.close()
            end.queue_pair.close()
            # Each posted receive completes once.
            assert sorted(completion.context for completion in end.cq.poll()) == list(range(4))
        assert all(count == 1 for count in self.ends.values()), self.ends
        self.keep.close()


MEANWHILE = sample(
    [
        "close connector",
        "close queue pair",
        "peer closes",
        "disconnect",
        "close both",
        "flush",
        "close listener",
        "peer leaves",
    ],
    4,
)


@pytest.mark.parametrize("role", ["caller", "adapter's thread"])
@pytest.mark.parametrize("event", MEANWHILE)
def test_connect_ends_whatever_comes_at_any_point_of_it(softnd, points, event, role):
    with softnd.open() as adapter:

        def run(chosen: int) -> bool:
            scene = Connecting(adapter)
            serving = Elsewhere(scene.serve).start()
            caller = Elsewhere(scene.connect)
            thread = caller.thread if role == "caller" else adapter._events._thread
            points.watch(thread, chosen, lambda: scene.come(points, event))
            result = caller.start().outcome()
            # A TimeoutError from softnd has softnd's status. One without a status would be ndpy's own deadline.
            assert not isinstance(result, ndpy.TimeoutError) or result.native, result
            state = scene.connector.state
            reached = points.reached
            points.stop()
            if not reached:
                assert (result, state) == (None, "established")
            scene.connector.close()
            scene.listener.close()
            serving.result()
            scene.close()
            return reached

        walk(run, points, 10)


@pytest.mark.parametrize("role", ["caller", "adapter's thread"])
@pytest.mark.parametrize("event", MEANWHILE)
def test_disconnect_ends_whatever_comes_at_any_point_of_it(softnd, points, event, role):
    with softnd.open() as adapter:

        def run(chosen: int) -> bool:
            scene = Connecting(adapter)
            serving = Elsewhere(scene.serve).start()
            scene.connect()
            serving.result()
            watching = scene.count(scene.connector.begin_wait_disconnected())
            caller = Elsewhere(lambda: scene.count(scene.connector.begin_disconnect()).result(WAIT_S))
            thread = caller.thread if role == "caller" else adapter._events._thread
            points.watch(thread, chosen, lambda: scene.come(points, event))
            result = caller.start().outcome()
            reached = points.reached
            points.stop()
            allowed = [ndpy.CanceledError, ndpy.ClosedError]
            # Another thread may have been first.
            allowed += [ndpy.NotConnectedError] if event == "disconnect" else []
            assert result is None or (reached and isinstance(result, tuple(allowed))), result
            if result is None and not scene.connector.closed:
                assert scene.connector.state == "disconnected"
                assert end_of(watching) is None
            scene.close()
            return reached

        walk(run, points, 4)
