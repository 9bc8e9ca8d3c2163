"""Adapter.events(): what an adapter tells of its queue pairs and queues."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_works,
    connect_ends,
    connect_pair,
    create_end,
    has_kernel_driver,
    memory,
    require,
    take,
)
from kit.quirks import has_quirk
from kit.threads import Elsewhere

import ndpy
from ndpy import Access, AdapterEvent, Capability, EventKind, Operation
from ndpy.objects.events import make_event
from ndpy.vocabulary.quirks import Quirk


@pytest.fixture
def events(adapter, keep):
    require(adapter, Capability.EVENTS)
    return keep(adapter.events())


def provoke(keep, adapter):
    """A write beyond the rights of its peer's memory. Returns the queue pair that was written to."""
    pair = connect_pair(keep, adapter)
    assert_works(keep, pair)
    private = memory(keep, adapter, b"original", Access.REMOTE_READ)
    pair.client.queue_pair.write(memory(keep, adapter, b"intruder"), private.remote())
    (failed,) = take(pair.client.cq)
    assert failed.operation is Operation.WRITE
    return pair.server.queue_pair


def wait_for(events, timeout_s, *kinds):
    deadline = time.monotonic() + timeout_s
    while True:
        event = events.get(deadline - time.monotonic())
        if event.kind in kinds:
            return event


def test_a_refused_access_is_told_with_its_queue_pair(events, adapter, keep):
    if not has_kernel_driver(adapter):
        pytest.skip(f"{adapter.info.name} tells the peer only")
    victim = provoke(keep, adapter)
    try:
        event = wait_for(events, 2, EventKind.QUEUE_PAIR_ACCESS_ERROR, EventKind.QUEUE_PAIR_REQUEST_ERROR)
    except ndpy.TimeoutError:
        assert has_quirk(adapter, Quirk.RXE_TELLS_NO_FAILURES)
        return
    assert event.subject is victim
    assert event.port is None
    assert event.name


def test_a_limit_of_a_shared_receive_queue_is_told(events, adapter, keep):
    require(adapter, Capability.SHARED_RECEIVE_QUEUES)
    shared = keep(adapter.create_shared_receive_queue(4))
    for _ in range(3):
        shared.receive(memory(keep, adapter, 16))
    shared.modify(threshold=2)
    armed = shared.arm()
    server, client = create_end(keep, adapter, srq=shared), create_end(keep, adapter)
    connect_ends(keep, adapter, client, server)
    for _ in range(2):
        client.queue_pair.send(memory(keep, adapter, b"message"))
    event = wait_for(events, DEADLINE_S, EventKind.SHARED_RECEIVE_QUEUE_LIMIT)
    assert event.subject is shared
    # What ndpy does because of the event goes on.
    armed.result(DEADLINE_S)


def give(adapter, kind=EventKind.GID_CHANGED, port=1):
    """An event, as the adapter's thread gives it."""
    adapter._tell(AdapterEvent(kind, port))


def test_events_wait_until_they_are_taken(events, adapter):
    for port in (1, 2, 3):
        give(adapter, port=port)
    assert [events.get(0).port for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ndpy.TimeoutError):
        events.get(0.05)
    assert events.lost == 0


def test_every_stream_gets_every_event(events, adapter, keep):
    other = keep(adapter.events())
    give(adapter)
    late = keep(adapter.events())
    assert events.get(0) == other.get(0)
    with pytest.raises(ndpy.TimeoutError):
        late.get(0.05)


def test_the_oldest_ones_are_lost_when_nobody_takes_them(events, adapter):
    for port in range(1003):
        give(adapter, port=port)
    assert events.lost == 3
    assert events.get(0).port == 3


def test_the_oldest_call_gets_the_next_event(events, adapter):
    calls = [events.begin_get() for _ in range(3)]
    calls[1].cancel()
    for port in (1, 2):
        give(adapter, port=port)
    assert [call.result(0).port for call in (calls[0], calls[2])] == [1, 2]


@pytest.mark.parametrize("how", ["close", "iterate"])
def test_closing_ends_what_waits(events, adapter, how):
    waiting = Elsewhere(lambda: list(events) if how == "iterate" else events.get()).start()
    if how == "iterate":
        give(adapter, port=7)
    time.sleep(0.05)
    events.close()
    if how == "iterate":
        assert [event.port for event in waiting.result()] == [7]
    else:
        assert isinstance(waiting.outcome(), ndpy.CanceledError)
    with pytest.raises(ndpy.ClosedError):
        events.get(0)
    assert list(events) == []


def test_an_open_stream_keeps_the_adapter_open(adapter, keep):
    require(adapter, Capability.EVENTS)
    with ndpy.open_adapter(adapter.info.name) as another:
        stream = another.events()
        with pytest.raises(ndpy.DeviceBusyError, match="EventStream"):
            another.close()
        stream.close()


async def test_async_for_takes_events_and_can_be_cancelled(events, adapter):
    async def collect():
        found = []
        async for event in events:
            found.append(event.port)
            if len(found) == 2:
                break
        return found

    collecting = asyncio.create_task(collect())
    await asyncio.sleep(0.05)
    give(adapter, port=4)
    give(adapter, port=5)
    assert await asyncio.wait_for(collecting, DEADLINE_S) == [4, 5]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(events.begin_get(), 0.05)
    # The cancelled call takes no event.
    give(adapter, port=6)
    assert (await asyncio.wait_for(events.begin_get(), DEADLINE_S)).port == 6


def test_unknown_kinds_are_left_out():
    assert make_event(999, 1, None, "") is None
    assert make_event(EventKind.PORT_DOWN, 3, None, "port down") == AdapterEvent(
        EventKind.PORT_DOWN, 3, None, "port down"
    )
    assert make_event(EventKind.QUEUE_PAIR_FATAL, 3, "subject", "").port is None


def test_the_documents_example_runs(events, adapter, keep, capsys):
    require(adapter, Capability.SHARED_RECEIVE_QUEUES)
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    (program,) = (block.partition("```")[0] for block in blocks if "events()" in block.partition("```")[0])
    shared = keep(adapter.create_shared_receive_queue(4))
    for _ in range(2):
        shared.receive(memory(keep, adapter, 16))
    shared.modify(threshold=2)
    far, near = create_end(keep, adapter, srq=shared), create_end(keep, adapter)
    connect_ends(keep, adapter, near, far)
    names = {
        "adapter": adapter,
        "near": near.queue_pair,
        "shared": shared,
        "source": memory(keep, adapter, b"message"),
    }
    exec(compile(program, "docs/verbs.md", "exec"), names)
    assert capsys.readouterr().out == "SHARED_RECEIVE_QUEUE_LIMIT True\n"


def test_an_adapter_without_events_says_so(adapter):
    if Capability.EVENTS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} tells events")
    with pytest.raises(ndpy.UnsupportedError, match=f"{adapter.info.name} tells no events"):
        adapter.events()
