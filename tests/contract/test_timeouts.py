"""What a number of seconds means. Every call that waits reads it the same way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from kit.helpers import DEADLINE_S, connect_pair, create_end, host_of
from kit.threads import Elsewhere

import ndpy
from ndpy import Capability, _core, aio

#: These wait for ever.
FOR_EVER = [math.inf, 1e300, 10**400, Decimal("Infinity"), Decimal("1e400")]
#: These look once.
AT_ONCE = [0, 0.0, -0.0, -1, -math.inf, -(10**400), Decimal(-3), Fraction(-1, 3)]
SHORT = [0.01, Decimal("0.01"), Fraction(1, 100)]
WRONG = [
    (True, TypeError),
    (False, TypeError),
    ("5", TypeError),
    (b"5", TypeError),
    ([5], TypeError),
    (5j, TypeError),
    (math.nan, ValueError),
    (Decimal("nan"), ValueError),
    (Decimal("sNaN"), ValueError),
]


def test_numbers_of_seconds():
    for value in [None, *FOR_EVER]:
        assert _core.timeout(value) is None, value
    for value in AT_ONCE:
        assert _core.timeout(value) == 0.0, value
    for value in SHORT:
        assert _core.timeout(value) == 0.01, value
    assert (_core.timeout(7), _core.timeout(10**9), _core.timeout(1.5)) == (7.0, 1e9, 1.5)
    assert _core.seconds(math.inf, "spin_s") == math.inf


@pytest.mark.parametrize(("value", "kind"), WRONG, ids=repr)
def test_what_is_no_number_of_seconds(value, kind):
    with pytest.raises(kind):
        _core.timeout(value)
    with pytest.raises(kind):
        _core.seconds(value, "spin_s")


def test_the_error_names_the_parameter():
    with pytest.raises(TypeError, match=r"^close_timeout_s is a number of seconds, not '5'$"):
        _core.timeout("5", "close_timeout_s")
    with pytest.raises(ValueError, match=r"^timeout_s is a number of seconds, not nan$"):
        _core.timeout(math.nan)
    with pytest.raises(TypeError, match=r"^spin_s is a number of seconds, not None$"):
        _core.seconds(None, "spin_s")


class Waits:
    """Calls that wait for what does not come, each as wait(timeout_s), and end(), which ends them all."""

    def __init__(self, keep, adapter) -> None:
        self.adapter = adapter
        self.queue = keep(adapter.create_completion_queue(8))
        self.listener = keep(adapter.listen((host_of(adapter), 0)))
        self.poller = keep(ndpy.Poller())
        self.poller.add(keep(adapter.create_completion_queue(8)))
        self.pending: ndpy.Pending[None] = ndpy.Pending("nothing")
        pair = connect_pair(keep, adapter)
        self.pair = pair
        # Nobody accepts.
        self.silent = keep(adapter.listen((host_of(adapter), 0)))
        self.connectors = [keep(adapter.create_connector()) for _ in range(2)]
        self.ends = [create_end(keep, adapter) for _ in range(3)]
        self.calls = {
            "CompletionQueue.wait": self.queue.wait,
            "CompletionQueue.wait_async": lambda timeout_s: asyncio.run(self._wait_async(timeout_s)),
            "Poller.wait": self.poller.wait,
            "Pending.result": self.pending.result,
            "Pending.exception": self.pending.exception,
            "Listener.get_request": self.listener.get_request,
            "Listener.get_request_async": lambda timeout_s: asyncio.run(self._get_request(timeout_s)),
            "Connector.wait_disconnected": pair.client.connector.wait_disconnected,
            "Connector.connect": self._connect,
        }
        if Capability.EVENTS in adapter.info.capabilities:
            self.events = keep(adapter.events())
            self.calls["EventStream.get"] = self.events.get

    async def _wait_async(self, timeout_s):
        return await self.queue.wait_async(timeout_s)

    async def _get_request(self, timeout_s):
        return await self.listener.get_request_async(timeout_s)

    def _connect(self, timeout_s) -> None:
        self.connectors[0].connect(self.ends[0].queue_pair, self.silent.address, timeout_s=timeout_s)

    def end(self) -> None:
        self.poller.wake()
        self.pending.fail(ndpy.CanceledError("ended"))
        self.pair.client.connector.disconnect(DEADLINE_S)
        for thing in (self.queue, self.listener, self.ends[0].queue_pair, getattr(self, "events", self.listener)):
            thing.close()


@pytest.fixture
def waits(keep, adapter) -> Waits:
    return Waits(keep, adapter)


@pytest.mark.parametrize("value", [math.inf, 10**400], ids=["inf", "10**400"])
def test_an_infinite_time_waits_until_something_comes(waits, value):
    waiting = {name: Elsewhere(functools.partial(call, value)).start() for name, call in waits.calls.items()}
    time.sleep(0.05)
    assert not [name for name, one in waiting.items() if one.over]
    waits.end()
    results = {name: one.outcome() for name, one in waiting.items()}
    # What ended the others is an exception of the object that ended, or is their result.
    assert (results["Poller.wait"], results["Connector.wait_disconnected"]) == ([], None)
    ends = (ndpy.ClosedError, ndpy.CanceledError, list, type(None))
    assert {name: result for name, result in results.items() if not isinstance(result, ends)} == {}


@pytest.mark.parametrize("value", [0, -1, -math.inf, Decimal("0.01"), Fraction(1, 100)], ids=repr)
def test_a_time_that_passes(waits, value):
    for name, call in waits.calls.items():
        with pytest.raises(ndpy.TimeoutError):
            call(value)
            pytest.fail(f"{name} returned")


def test_what_is_no_time_is_refused_before_anything_begins(keep, adapter, waits):
    client, server = waits.pair
    region = adapter.register(bytearray(64))
    request_of = keep(adapter.listen((host_of(adapter), 0)))
    asked = waits.connectors[1].begin_connect(waits.ends[1].queue_pair, request_of.address)
    request = keep(request_of.get_request(DEADLINE_S))
    arrays = keep(adapter.create_completion_queue(8)), ndpy.CompletionArray(4)

    def assign(thing: object, name: str):
        return lambda seconds: setattr(thing, name, seconds)

    calls = {
        **waits.calls,
        "Adapter.register": lambda timeout_s: adapter.register(bytearray(64), timeout_s=timeout_s),
        "Adapter.connect": lambda timeout_s: adapter.connect(
            waits.ends[2].queue_pair, waits.silent.address, timeout_s=timeout_s
        ),
        "Connector.accept": lambda timeout_s: request.accept(waits.ends[2].queue_pair, timeout_s=timeout_s),
        "Connector.complete_connect": waits.connectors[1].complete_connect,
        "Connector.disconnect": client.connector.disconnect,
        "MemoryRegion.deregister": lambda timeout_s: region.deregister(timeout_s=timeout_s),
        "Pending.result of one that has ended": asked.result,
        "aio.connect": lambda timeout_s: aio.connect(waits.silent.address, timeout_s=timeout_s),
        "aio.serve": lambda timeout_s: aio.serve(waits.silent.address, None, timeout_s=timeout_s),
        "close_timeout_s of aio.connect": lambda seconds: aio.connect(waits.silent.address, close_timeout_s=seconds),
        "close_timeout_s of aio.serve": lambda seconds: aio.serve(waits.silent.address, None, close_timeout_s=seconds),
        "CompletionQueue.poll": lambda spin_s: arrays[0].poll(spin_s=spin_s),
        "CompletionQueue.poll_into": lambda spin_s: arrays[0].poll_into(arrays[1], spin_s=spin_s),
        "CompletionQueue.spin_s": assign(arrays[0], "spin_s"),
        "Poller.spin_s": assign(waits.poller, "spin_s"),
        "Poller": lambda spin_s: ndpy.Poller(spin_s=spin_s),
    }
    for value, kind in WRONG:
        for name, call in calls.items():
            with pytest.raises(kind):
                call(value)
                pytest.fail(f"{name} took {value!r}")
    # All of it can still be done.
    request.begin_accept(waits.ends[2].queue_pair)
    asked.result(DEADLINE_S)
    waits.connectors[1].complete_connect(DEADLINE_S)
    region.deregister(timeout_s=math.inf)
    keep(adapter.register(bytearray(64), timeout_s=math.inf))
    client.connector.disconnect(math.inf)
    with contextlib.suppress(ndpy.NotConnectedError):
        server.connector.disconnect(math.inf)


@pytest.mark.parametrize("spin_s", [math.inf, 1e300], ids=repr)
def test_polling_for_ever(keep, adapter, pair, spin_s):
    client, server = pair
    region = keep(adapter.register(bytearray(64)))
    server.queue_pair.receive(region[0:64])
    timer = threading.Timer(0.02, lambda: client.queue_pair.send(region[0:8]))
    timer.start()
    assert [completion.nbytes for completion in server.cq.poll(spin_s=spin_s)] == [8]
    timer.join()
    assert server.cq.poll(spin_s=-1) == []


def test_an_asynchronous_connection_without_time_limits(adapter):
    async def scene() -> bytes:
        async def handler(connection: aio.Connection) -> None:
            await connection.send(b"hello")

        limits = {"timeout_s": math.inf, "close_timeout_s": None}
        async with (
            aio.serve((host_of(adapter), 0), handler, adapter=adapter, **limits) as server,
            aio.connect(server.address, adapter=adapter, **limits) as connection,
        ):
            return await connection.receive()

    assert asyncio.run(scene()) == b"hello"
