"""connect(), accept() and disconnect(), each against other events.

Each event comes at each point between two native calls, in the calling thread and in the adapter's thread. Whatever
comes, the call ends, with or without an exception of ndpy's. Every Pending ends once, each posted receive completes
once, and everything can be closed once.
"""

from __future__ import annotations

import pytest
from racing import DEADLINE_S, Elsewhere, Queue, at_each_point, wait_until, walk

import ndpy
from ndpy.platforms.verbs.native_calls import lib

WAIT_S = DEADLINE_S / 2
SERVER = ("127.0.0.1", 4000)
ROLES = ("caller", "adapter's thread")
# Each of these ends an attempt, or ends a connection, or has no meaning at that time.
EVENTS = [
    "ADDR_ERROR",
    "ROUTE_ERROR",
    "CONNECT_ERROR",
    "UNREACHABLE",
    "REJECTED",
    "ESTABLISHED",
    "DISCONNECTED",
    "TIMEWAIT_EXIT",
]
MEANWHILE = ["close connector", "close queue pair", "close both", "flush", "disconnect", "removal", "port", "failure"]


class Scene:
    """An adapter with a queue pair that has posted four receives, and a connector."""

    def __init__(self, fake, points) -> None:
        self.fake, self.points = fake, points
        self.adapter = ndpy.open_adapter("fake0")
        self.queue = Queue(fake, self.adapter, receives=4)
        self.queue_pair = self.queue.queue_pair
        self.connector = self.adapter.create_connector()
        self.taken: list = []
        self.ends: dict = {}

    def watch(self, role, chosen, event, call):
        """Make the call in a thread. The event comes at the chosen point of that thread or of the adapter's thread."""
        caller = Elsewhere(call)
        thread = caller.thread if role == "caller" else self.adapter._events._thread
        self.points.watch(thread, chosen, lambda: self.come(event))
        result = caller.start().outcome()
        self.points.stop()
        return result

    def come(self, event) -> None:
        if event in EVENTS:
            self.fake.connection_event(self.connector, getattr(lib, f"RDMA_CM_EVENT_{event}"), 0)
            return
        if event == "removal":
            self.queue.lose(self.points, "removal")
        elif event == "port":
            self.fake.device_event(self.adapter, lib.IBV_EVENT_PORT_ERR)
        elif event == "failure":
            # Taking a failed completion ends the connection.
            self.fake.complete(self.queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
            self.points.elsewhere(lambda: self.taken.append(self.queue.queue.poll()))
        else:
            calls = {
                "close connector": self.connector.close,
                "close queue pair": self.queue_pair.close,
                "close both": self.close_both,
                "flush": self.queue_pair.flush,
                "disconnect": lambda: self.connector.disconnect(WAIT_S),
            }
            self.points.elsewhere(calls[event])

    def close_both(self) -> None:
        self.queue_pair.close()
        self.connector.close()

    def count(self, pending):
        """Count how often this Pending ends. Returns it."""
        self.ends[pending] = 0

        def ended(which) -> None:
            self.ends[which] += 1

        pending.add_done_callback(ended)
        return pending

    def close(self) -> None:
        """Close all. Nothing may be lost or come twice."""
        self.connector.close()
        assert all(count == 1 for count in self.ends.values()), self.ends
        self.queue_pair.close()
        if self.adapter._defunct is None:
            self.queue.arrived = 4
            self.queue.check(*self.taken)
        self.queue.queue.close()
        self.adapter.close()


@pytest.fixture(params=["RoCE", "iWARP"])
def transport(request, fake):
    fake.have_address()
    if request.param == "iWARP":
        fake.speak_iwarp()
    # Opening an adapter probes the device once. Done now, the probe adds no points to each turn.
    fake.open().close()
    return request.param


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("event", EVENTS + MEANWHILE)
def test_what_comes_at_any_point_of_connect_ends_it_or_does_not_matter(fake, points, transport, event, role):
    def run(chosen: int) -> bool:
        scene = Scene(fake, points)

        def connect() -> None:
            scene.count(scene.connector.begin_connect(scene.queue_pair, SERVER)).result(WAIT_S)
            scene.count(scene.connector.begin_complete_connect()).result(WAIT_S)

        result = scene.watch(role, chosen, event, connect)
        state = scene.connector.state
        assert not isinstance(result, ndpy.TimeoutError) or event in ("UNREACHABLE",), result
        if not points.reached or event in ("TIMEWAIT_EXIT", "port"):
            assert (result, state) == (None, "established")
        elif result is None:
            assert state in ("established", "disconnected")
        scene.close()
        return points.reached

    walk(run, points, 4 if role == "caller" else 15)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("event", ["cancel", "close connector", "close queue pair"])
@at_each_point(least=3)
def test_an_attempt_that_is_given_up_at_any_point_ends_once(fake, points, transport, event, role, chosen):
    """The server does not answer, so only the adapter's thread has anything to do."""
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_CONNECT_RESPONSE | 1 << lib.RDMA_CM_EVENT_ESTABLISHED
    scene = Scene(fake, points)
    begun = []

    def cancel() -> None:
        wait_until(lambda: begun, "it has begun")
        begun[0].cancel()

    def give_up() -> None:
        if event == "cancel":
            points.elsewhere(cancel)
        else:
            scene.come(event)

    def connect():
        begun.append(scene.count(scene.connector.begin_connect(scene.queue_pair, SERVER)))
        if role != "caller":
            wait_until(lambda: points.reached or points.sleeps, "the adapter's thread rests")
        if not points.reached:
            cancel()
        return begun[0].result(WAIT_S)

    caller = Elsewhere(connect)
    points.watch(caller.thread if role == "caller" else scene.adapter._events._thread, chosen, give_up)
    result = caller.start().outcome()
    points.stop()
    assert isinstance(result, (ndpy.CanceledError, ndpy.ClosedError)), result
    scene.close()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("event", EVENTS + MEANWHILE)
@at_each_point(least=2)
def test_what_comes_at_any_point_of_accept_ends_it_or_does_not_matter(fake, points, transport, event, role, chosen):
    scene = Scene(fake, points)
    listener = scene.adapter.listen(("127.0.0.1", 0))
    fake.request(listener)
    scene.connector.close()
    scene.connector = listener.get_request(WAIT_S)

    def accept() -> None:
        scene.count(scene.connector.begin_accept(scene.queue_pair)).result(WAIT_S)

    result = scene.watch(role, chosen, event, accept)
    state = scene.connector.state
    assert not isinstance(result, ndpy.TimeoutError) or event in ("UNREACHABLE",), result
    if not points.reached or event in ("TIMEWAIT_EXIT", "port", "ADDR_ERROR", "ROUTE_ERROR"):
        assert (result, state) == (None, "established")
    elif result is None:
        assert state in ("established", "disconnected")
    listener.close()
    scene.close()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("event", EVENTS + MEANWHILE)
@at_each_point(least=2)
def test_what_comes_at_any_point_of_disconnect_does_not_keep_it_from_ending(
    fake, points, transport, event, role, chosen
):
    scene = Scene(fake, points)
    scene.connector.connect(scene.queue_pair, SERVER, timeout_s=WAIT_S)
    scene.connector.complete_connect(WAIT_S)
    watching = scene.count(scene.connector.begin_wait_disconnected())

    def disconnect() -> None:
        scene.count(scene.connector.begin_disconnect()).result(WAIT_S)

    result = scene.watch(role, chosen, event, disconnect)
    if event in EVENTS or event in ("flush", "port", "failure") or not points.reached:
        assert (result, scene.connector.state) == (None, "disconnected")
        assert watching.result(WAIT_S) is None
    else:
        allowed = (ndpy.CanceledError, ndpy.ClosedError, ndpy.DeviceRemovedError)
        # Another thread may have been first.
        allowed += (ndpy.NotConnectedError,) if event == "disconnect" else ()
        assert result is None or isinstance(result, allowed), result
    scene.close()


@pytest.mark.parametrize("event", MEANWHILE[:4])
@at_each_point(least=8)
def test_the_peers_leaving_is_handled_whatever_else_comes(fake, points, transport, event, chosen):
    scene = Scene(fake, points)
    scene.connector.connect(scene.queue_pair, SERVER, timeout_s=WAIT_S)
    scene.connector.complete_connect(WAIT_S)
    watching = scene.count(scene.connector.begin_wait_disconnected())

    def leave():
        fake.connection_event(scene.connector, lib.RDMA_CM_EVENT_DISCONNECTED)
        return watching.result(WAIT_S)

    result = scene.watch("adapter's thread", chosen, event, leave)
    assert result is None or isinstance(result, (ndpy.CanceledError, ndpy.ClosedError)), result
    scene.close()
