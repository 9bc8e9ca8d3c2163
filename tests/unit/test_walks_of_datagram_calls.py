"""resolve() and join_multicast(), each against other events.

Each event comes at each point between two native calls, in the calling thread and in the adapter's thread. Whatever
comes, the call ends once, and every native object is freed once.
"""

from __future__ import annotations

import threading

import pytest
from racing import DEADLINE_S, Elsewhere, at_each_point, wait_until

import ndpy
from ndpy.platforms.verbs.native_calls import lib

WAIT_S = DEADLINE_S / 2
SERVER = ("127.0.0.1", 4000)
GROUP = "239.1.2.3"
BEGIN = {
    "resolve": lambda queue_pair: queue_pair.begin_resolve(SERVER),
    "join": lambda queue_pair: queue_pair.begin_join_multicast(GROUP),
}
LAST = {"resolve": lib.RDMA_CM_EVENT_ESTABLISHED, "join": lib.RDMA_CM_EVENT_MULTICAST_JOIN}
# Each of these ends a call, or has no meaning.
EVENTS = ["ADDR_ERROR", "ROUTE_ERROR", "UNREACHABLE", "REJECTED", "MULTICAST_ERROR", "TIMEWAIT_EXIT", "ADDR_CHANGE"]
ROLES = ("caller", "adapter's thread")


class Scene:
    def __init__(self, fake, points) -> None:
        self.fake, self.points = fake, points
        self.adapter = ndpy.open_adapter("fake0")
        self.queue = self.adapter.create_completion_queue(8)
        self.queue_pair = self.adapter.create_datagram_queue_pair(self.queue)
        self.begun: list = []
        self.ended: list = []

    def begin(self, kind):
        pending = BEGIN[kind](self.queue_pair)
        pending.add_done_callback(self.ended.append)
        self.begun.append(pending)
        return pending

    def come(self, what) -> None:
        if what in EVENTS:
            for call in list(self.queue_pair._calls):
                self.fake.connection_event(call, getattr(lib, f"RDMA_CM_EVENT_{what}"), -110)
        elif what == "removal":
            self.fake.remove(self.adapter)
            self.points.elsewhere(lambda: wait_until(lambda: self.adapter._defunct, "the adapter knows"))
        elif what == "cancel":
            self.points.elsewhere(lambda: wait_until(lambda: self.begun, "it has begun")[0].cancel())
        else:
            self.points.elsewhere(self.queue_pair.close)

    def close(self) -> None:
        """Close all. A result that came in spite of all is the program's."""
        # The thread that ends a Pending wakes who waits for it before it calls what was added.
        wait_until(lambda: self.ended == self.begun, "what was begun has ended")
        for pending in self.begun:
            if pending.exception(0) is None:
                pending.result(0).close()
        assert not self.queue_pair._calls
        self.queue_pair.close()
        self.queue.close()
        self.adapter.close()
        assert not self.fake.counts.left()


@pytest.fixture(autouse=True)
def _address(fake):
    fake.have_address()
    # Opening an adapter probes the device once. Done now, the probe adds no points to each turn.
    fake.open().close()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("event", [*EVENTS, "removal", "cancel", "close"])
@pytest.mark.parametrize("kind", BEGIN)
@at_each_point(least=3)
def test_what_comes_at_any_point_ends_it_or_does_not_matter(fake, points, kind, event, role, chosen):
    scene = Scene(fake, points)
    caller = Elsewhere(lambda: scene.begin(kind).result(WAIT_S))
    thread = caller.thread if role == "caller" else scene.adapter._events._thread
    points.watch(thread, chosen, lambda: scene.come(event))
    result = caller.start().outcome()
    points.stop()
    assert not isinstance(result, ndpy.TimeoutError) or result.native == 110, result
    if not points.reached or event in ("TIMEWAIT_EXIT", "ADDR_CHANGE"):
        assert isinstance(result, (ndpy.Destination, ndpy.MulticastGroup)), result
    scene.close()


@pytest.mark.parametrize("event", ["removal", "cancel", "close"])
@pytest.mark.parametrize("kind", BEGIN)
def test_a_call_without_an_answer_is_ended(fake, points, kind, event):
    fake.connecting.silent = 1 << LAST[kind]
    scene = Scene(fake, points)
    pending = scene.begin(kind)
    wait_until(lambda: fake.counts.identifiers > 1, "it has begun")
    scene.come(event)
    points.stop()
    wanted = ndpy.DeviceRemovedError if event == "removal" else ndpy.CanceledError
    with pytest.raises(wanted):
        pending.result(WAIT_S)
    scene.close()


def test_a_result_that_is_on_its_way_is_not_cancelled(fake, points, monkeypatch):
    """It would be closed only after cancel() has returned, and its queue pair would be in use until then."""
    scene = Scene(fake, points)
    there, go_on = threading.Event(), threading.Event()
    succeed = ndpy.Pending.succeed

    def succeed_later(self, value, *arguments):
        there.set()
        go_on.wait(WAIT_S)
        return succeed(self, value, *arguments)

    monkeypatch.setattr(ndpy.Pending, "succeed", succeed_later)
    pending = scene.begin("join")
    assert there.wait(WAIT_S)
    canceller = Elsewhere(pending.cancel).start()
    assert not pending.done()
    go_on.set()
    assert canceller.outcome() is False
    points.stop()
    scene.close()


@pytest.mark.parametrize("role", ["closer", "adapter's thread"])
@at_each_point(least=2)
def test_a_request_at_any_point_of_the_close_of_its_listener_is_freed(fake, points, role, chosen):
    scene = Scene(fake, points)
    listener = scene.adapter.listen_for_datagrams(scene.queue_pair, ("127.0.0.1", 0))
    if role == "closer":
        closer = Elsewhere(listener.close)
        points.watch(closer.thread, chosen, lambda: fake._library.fake_connection_request(listener._serial, 0))
        closer.start().outcome()
    else:
        points.watch(scene.adapter._events._thread, chosen, lambda: points.elsewhere(listener.close) and None)
        fake.request(listener)
        wait_until(lambda: listener.answered or points.reached, "the answer")
    points.stop()
    listener.close()
    scene.close()


def test_requests_of_another_device_are_not_answered(fake, points):
    scene = Scene(fake, points)
    listener = scene.adapter.listen_for_datagrams(scene.queue_pair, ("127.0.0.1", 0))
    fake.request(listener, elsewhere=True)
    fake.request(listener)
    wait_until(lambda: listener.answered, "the answer")
    assert listener.answered == 1
    listener.close()
    scene.close()


def test_a_membership_that_the_subnet_ends_tells_why(fake, points):
    scene = Scene(fake, points)
    group = scene.begin("join").result(WAIT_S)
    assert (group.failure, group.lid, group.gid[0]) == ("", 0, 0xFF)
    fake.connection_event(group, lib.RDMA_CM_EVENT_MULTICAST_ERROR, -110)
    wait_until(lambda: group.failure, "the failure")
    assert "timed out" in group.failure.lower()
    scene.close()
