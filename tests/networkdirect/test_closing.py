"""Closing an object while another thread is using it."""

from __future__ import annotations

import threading

import pytest
from kit.helpers import DEADLINE_S, ask, create_end, establish, memory
from kit.threads import Elsewhere
from own_softnd import keep_with_adapter

import ndpy
from ndpy.platforms.networkdirect import native_calls


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


def test_whoever_looks_at_the_requests_of_a_queue_pair_finds_nothing_that_close_has_freed(keep):
    end = create_end(keep, keep.adapter)
    queue_pair = end.queue_pair
    freed, in_or_over, used = threading.Event(), threading.Event(), []
    leave_slots, free_slots = queue_pair._native_free_slots, type(queue_pair)._free_slots

    def posted(native) -> int:
        in_or_over.set()
        used.append(freed.wait(1))
        return 0

    def look() -> None:
        # Revoking an exposure makes this call.
        queue_pair._wait_until_ended(0)
        in_or_over.set()

    looking = Elsewhere(look)

    def leave(what) -> None:
        looking.start()
        in_or_over.wait(DEADLINE_S)
        leave_slots(what)

    def free(native) -> None:
        free_slots(native)
        freed.set()

    queue_pair._count_posted, queue_pair._native_free_slots, queue_pair._free_slots = posted, leave, free
    queue_pair.close()
    looking.result()
    assert not any(used)


@pytest.mark.parametrize("step", ["connect", "accept"])
def test_a_queue_pair_that_was_closed_at_the_last_moment_is_not_given_to_the_provider(keep, step):
    client, server = create_end(keep, keep.adapter), create_end(keep, keep.adapter)
    if step == "connect":
        connector = keep(keep.adapter.create_connector())
        start, victim = lambda: connector.begin_connect(victim, ("192.0.2.2", 4711)), client.queue_pair
        native = "_connect_native"
    else:
        connector = ask(keep, keep.adapter, client.queue_pair).server
        start, victim = lambda: connector.begin_accept(victim), server.queue_pair
        native = "_accept_native"
    given = []
    setattr(connector, native, lambda queue_pair, *rest: given.append(queue_pair._qp) or 0xC0000001)
    take = connector._take_queue_pair

    def close_then(queue_pair) -> None:
        take(queue_pair)
        # Simulates another thread that frees the queue pair and closes it at this point.
        queue_pair.connector = None
        queue_pair.close()

    connector._take_queue_pair = close_then
    with pytest.raises((ndpy.ClosedError, ndpy.CanceledError)):
        start()
    assert given == []
    assert connector.state in ("idle", "bound", "failed")


def test_a_connection_that_is_made_while_its_queue_pair_is_closed_does_not_use_it(keep):
    client, server = create_end(keep, keep.adapter), create_end(keep, keep.adapter)
    offer = ask(keep, keep.adapter, client.queue_pair)
    establish(offer, server.queue_pair)
    client.queue_pair.connector = None
    client.queue_pair.close()
    # The adapter's thread makes this call if it took the end of the last step before the close.
    client.queue_pair._begin_connection()


def test_a_window_is_not_freed_while_it_is_being_bound_or_invalidated(keep):
    client, server = create_end(keep, keep.adapter), create_end(keep, keep.adapter)
    establish(ask(keep, keep.adapter, client.queue_pair), server.queue_pair)
    region = memory(keep, keep.adapter, 64)
    window = keep(keep.adapter.create_memory_window())
    queue_pair = client.queue_pair
    seen = []

    def close_meanwhile(post):
        def posting(*arguments):
            closing.append(Elsewhere(window.close).start())
            closing[-1].thread.join(0.05)
            seen.append(window._native)
            return post(*arguments)

        return posting

    closing: list[Elsewhere] = []
    queue_pair.bind(window, region)
    queue_pair._native_post_invalidate = close_meanwhile(queue_pair._native_post_invalidate)
    queue_pair.invalidate(window)
    closing.pop().result()
    other = window = keep(keep.adapter.create_memory_window())
    queue_pair._native_post_bind = close_meanwhile(queue_pair._native_post_bind)
    queue_pair.bind(other, region)
    closing.pop().result()
    assert len(seen) == 2
    assert None not in seen


def test_closing_a_queue_pair_waits_for_what_the_provider_gives_back_late(keep, monkeypatch):
    end = create_end(keep, keep.adapter)
    queue_pair = end.queue_pair
    region = memory(keep, keep.adapter, 64)
    for context in range(3):
        queue_pair.receive(region, context=context)
    flush = queue_pair._native_begin_flush
    looks: list[int] = []
    drain = queue_pair._drain_queues

    def drain_late() -> None:
        # The provider takes its time to flush.
        looks.append(0)
        if len(looks) == 3:
            flush()
        drain()

    monkeypatch.setattr(queue_pair, "_native_begin_flush", lambda: None)
    monkeypatch.setattr(queue_pair, "_drain_queues", drain_late)
    queue_pair.close()
    assert queue_pair._all_ended
    assert [completion.context for completion in end.cq.poll()] == [0, 1, 2]


def test_a_completion_queue_that_is_being_closed_asks_the_provider_for_nothing_more(keep, monkeypatch):
    """A connection of it ends meanwhile, and the adapter's thread wants to know whether the queue has failed."""
    queue = keep.adapter.create_completion_queue(4)
    end_requests = queue._native_end_requests

    def end_and_look() -> None:
        end_requests()
        queue._look_for_failure()
        assert not queue._requests

    monkeypatch.setattr(queue, "_native_end_requests", end_and_look)
    queue.close()
    assert queue.closed


@pytest.mark.parametrize("step", ["before the call", "after the call"])
def test_ctrl_c_about_a_release_neither_loses_the_object_nor_releases_it_twice(monkeypatch, step):
    released = []

    class Owner:
        """Ctrl-C comes just after its field has changed, once."""

        interrupts = step == "before the call"

        def __init__(self) -> None:
            self.__dict__["native"] = native_calls.ffi.NULL

        def __setattr__(self, name: str, value: object) -> None:
            self.__dict__[name] = value
            if value is None and self.interrupts:
                type(self).interrupts = False
                raise KeyboardInterrupt

    class Lib:
        def IUnknown_Release(self, native: object) -> None:
            released.append(native)
            if step == "after the call" and len(released) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(native_calls, "lib", Lib())
    owner = Owner()
    with pytest.raises(KeyboardInterrupt):
        native_calls.release_once(owner, "native")
    native_calls.release_once(owner, "native")
    assert len(released) == 1
    assert owner.native is None
