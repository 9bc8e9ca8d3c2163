"""Making an object of an adapter, or adding a queue to a poller, while another thread closes either."""

from __future__ import annotations

import pytest
from kit.walking import DEADLINE_S, GRACE_S, Elsewhere, walk
from native_points import points  # noqa: F401

import ndpy
from ndpy.platforms.networkdirect import poller as pollers

# ruff: noqa: F811

MAKE = {
    "completion queue": lambda adapter: adapter.create_completion_queue(4),
    "shared receive queue": lambda adapter: adapter.create_shared_receive_queue(4),
    "region": lambda adapter: adapter.register(bytearray(64)),
    "pending region": lambda adapter: adapter.begin_register(bytearray(64)).result(DEADLINE_S),
    "window": lambda adapter: adapter.create_memory_window(),
    "connector": lambda adapter: adapter.create_connector(),
    "listener": lambda adapter: adapter.listen(("", 0)),
}


def both(first, second, points, chosen):
    """Run `second` at the chosen point of `first`, or after `first` has ended. Returns the outcome of `second`."""

    def come() -> None:
        second.start()
        second.thread.join(GRACE_S)

    points.watch(first.thread, chosen, come)
    first.start().outcome()
    points.stop()
    if not points.reached:
        second.start()
    return second.outcome()


def check(adapter, made):
    if isinstance(made, ndpy.NdpyError):
        assert isinstance(made, (ndpy.ClosedError, ndpy.CanceledError)), made
    elif adapter.closed:
        assert made.closed
    else:
        made.close()
    adapter.close()


@pytest.mark.parametrize("what", MAKE)
def test_what_is_made_at_any_point_of_the_adapters_close_is_refused_or_keeps_it_open(softnd, points, what):
    def run(chosen: int) -> bool:
        adapter = softnd.open()
        making, closing = Elsewhere(lambda: MAKE[what](adapter)), Elsewhere(adapter.close)
        check(adapter, both(closing, making, points, chosen))
        return points.reached

    walk(run, points, 4)


@pytest.mark.parametrize("what", [what for what in MAKE if what != "pending region"])
def test_an_adapter_that_is_closed_at_any_point_of_making_something_stays_open(softnd, points, what):
    def run(chosen: int) -> bool:
        adapter = softnd.open()
        making, closing = Elsewhere(lambda: MAKE[what](adapter)), Elsewhere(adapter.close)
        assert isinstance(both(making, closing, points, chosen), ndpy.DeviceBusyError)
        check(adapter, making.outcome())
        return points.reached

    walk(run, points, 2)


def test_a_poller_forgets_a_queue_that_is_closed_while_it_is_added(softnd, monkeypatch):
    with softnd.open() as adapter, ndpy.Poller() as poller:
        queue = adapter.create_completion_queue(4)
        closing = Elsewhere(queue.close)
        request = pollers.Request

        def late(*arguments, **more):
            closing.start().thread.join(0.2)
            return request(*arguments, **more)

        monkeypatch.setattr(pollers, "Request", late)
        poller.add(queue)
        closing.result()
        assert queue.closed
        assert not poller._queues
