"""Making an object of an adapter while another thread closes the adapter. Either the object is made or it is refused.

If it is made, the adapter stays open. If it is refused, ClosedError says so.
"""

from __future__ import annotations

from typing import Any

import pytest
from racing import DEADLINE_S, GRACE_S, Elsewhere, Points, at_each_point

import ndpy

MAKE: dict[str, Any] = {
    "completion queue": lambda adapter: adapter.create_completion_queue(4),
    "region": lambda adapter: adapter.register(bytearray(64)),
    "region at once": lambda adapter: adapter.begin_register(bytearray(64)).result(DEADLINE_S),
    "region in a thread": lambda adapter: adapter.begin_register(bytearray(1 << 20)).result(DEADLINE_S),
    "window": lambda adapter: adapter.create_memory_window(),
    "connector": lambda adapter: adapter.create_connector(),
    "listener": lambda adapter: adapter.listen(("127.0.0.1", 0)),
}


@pytest.fixture(autouse=True)
def _address(fake: Any) -> None:
    fake.have_address()


def both(first: Elsewhere, second: Elsewhere, points: Points, chosen: int) -> None:
    """Run `second` at the chosen point of `first`, or after `first` has ended if it has no such point."""

    def come() -> None:
        second.start()
        second.thread.join(GRACE_S)

    points.watch(first.thread, chosen, come)
    first.start().outcome()
    points.stop()
    if not points.reached:
        second.start()
    second.outcome()


def check(fake: Any, adapter: Any, made: Any) -> None:
    assert fake.fault() == ""
    if isinstance(made, ndpy.NdpyError):
        assert isinstance(made, (ndpy.ClosedError, ndpy.CanceledError))
    elif not adapter.closed:
        made.close()
    else:
        # It was closed with the adapter, or the adapter never had it.
        assert made.closed
    adapter.close()
    assert not fake.counts.left()


@pytest.mark.parametrize("what", MAKE)
@at_each_point(least=8)
def test_what_is_made_at_any_point_of_the_adapters_close_is_refused_or_keeps_it_open(fake, points, what, chosen):
    adapter = fake.open(windows=1)
    making, closing = Elsewhere(lambda: MAKE[what](adapter)), Elsewhere(adapter.close)
    both(closing, making, points, chosen)
    check(fake, adapter, making.outcome())


@pytest.mark.parametrize("what", ["completion queue", "region", "region at once", "listener"])
@at_each_point(least=2)
def test_an_adapter_that_is_closed_at_any_point_of_making_something_stays_open(fake, points, what, chosen):
    adapter = fake.open(windows=1)
    making, closing = Elsewhere(lambda: MAKE[what](adapter)), Elsewhere(adapter.close)
    both(making, closing, points, chosen)
    assert isinstance(closing.outcome(), ndpy.DeviceBusyError)
    check(fake, adapter, making.outcome())


def test_what_cannot_be_made_does_not_keep_its_adapter_open(fake):
    adapter = fake.open(reg_errno=12)
    with pytest.raises(ndpy.InsufficientResourcesError) as refused:
        adapter.register(bytearray(64))
    adapter.close()
    assert refused
