"""Pollers whose queues, wake-ups and threads come and go.

Each test has a private softnd and fails if an object or a handle is left (own_softnd.py). NDPY_STRESS=1 runs the full
counts.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from kit.helpers import DEADLINE_S, connect_pair, rounds, take, wait_until
from kit.scenarios import slow_call, slow_completions
from kit.threads import beside
from overlapped_requests import send_empty
from own_softnd import handles, opened

import ndpy


def test_packets_and_wake_ups_of_a_poller_do_not_lose_each_other(softnd):
    count = rounds(3000, 300)
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter, cq_depth=256, receive_queue_depth=128, initiator_queue_depth=128)
        poller = keep(ndpy.Poller())
        poller.add(pair.server.cq)
        taken, woken, stop = [], [0], threading.Event()

        def wake() -> None:
            while not stop.wait(0.0005):
                poller.wake()

        def send() -> None:
            for context in range(count):
                send_empty(pair, context)
                wait_until(lambda context=context: len(taken) > context - 100, "the poller follows")

        deadline = time.monotonic() + 2 * DEADLINE_S
        with beside(wake, send):
            while len(taken) < count or not woken[0]:
                assert time.monotonic() < deadline
                ready = poller.wait(DEADLINE_S)
                woken[0] += not ready
                for _, completions in ready:
                    taken += [completion.context for completion in completions]
            stop.set()
        assert taken == list(range(count))


def test_a_queue_in_two_pollers_that_come_and_go(softnd):
    with opened(softnd, slow_call("cancel", 5)) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        stays = keep(ndpy.Poller())
        stays.add(pair.server.cq)
        for context in range(rounds(500, 40)):
            goes = ndpy.Poller()
            goes.add(pair.server.cq)
            for poller in (stays, goes):
                with pytest.raises(ndpy.TimeoutError):
                    poller.wait(0)
            if context % 2:
                goes.close()
            send_empty(pair, context)
            if context % 3:
                goes.close()
            ((_, completions),) = stays.wait(DEADLINE_S)
            assert [completion.context for completion in completions] == [context]
            goes.close()


@pytest.mark.parametrize("how", ["remove", "close", "drop"])
def test_pollers_that_come_and_go_leave_one_request(softnd, how):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        before, count = handles(), rounds(1000, 40)
        for _ in range(count):
            poller = ndpy.Poller()
            poller.add(pair.server.cq)
            with pytest.raises(ndpy.TimeoutError):
                poller.wait(0)
            if how == "remove":
                poller.remove(pair.server.cq)
            if how != "drop":
                poller.close()
            del poller
        assert len(pair.server.cq._requests) == 1
        assert handles() <= before + 5
        # The next poller takes the request over, and gets its packet.
        poller = keep(ndpy.Poller())
        poller.add(pair.server.cq)
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0)
        assert len(pair.server.cq._requests) == 1
        send_empty(pair, 7)
        ((_, completions),) = poller.wait(DEADLINE_S)
        assert [completion.context for completion in completions] == [7]


def test_a_request_that_a_poller_left_is_forgotten_when_it_ends(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        with ndpy.Poller() as poller:
            poller.add(pair.server.cq)
            with pytest.raises(ndpy.TimeoutError):
                poller.wait(0)
        send_empty(pair, 7)
        wait_until(lambda: not pair.server.cq._requests, "the request has ended")
        assert not pair.server.cq._left_behind
        # It reported the completion to nobody, so the next arm() does.
        pair.server.cq.arm().result(DEADLINE_S)
        assert [completion.context for completion in take(pair.server.cq)] == [7]


def test_a_poller_that_comes_as_the_request_ends_misses_nothing(softnd):
    """The packet of the request that was left is on its way to the adapter's thread, or was handled there."""
    with opened(softnd, *slow_completions(1)) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        for context in range(rounds(500, 40)):
            with ndpy.Poller() as poller:
                poller.add(pair.server.cq)
                with pytest.raises(ndpy.TimeoutError):
                    poller.wait(0)
            send_empty(pair, context)
            with ndpy.Poller() as poller:
                poller.add(pair.server.cq)
                ((_, completions),) = poller.wait(DEADLINE_S)
            assert [completion.context for completion in completions] == [context]
        assert len(pair.server.cq._requests) <= 2


def test_pollers_that_are_dropped_free_their_ports():
    before = handles()
    for _ in range(50):
        ndpy.Poller()
    assert handles() <= before + 5


def test_two_adapters_in_one_poller(softnd):
    with opened(softnd, *slow_completions(1)) as (first, keep), opened(softnd) as (second, own):
        pairs = [connect_pair(keep, first), connect_pair(own, second)]
        poller = ndpy.Poller()
        for pair in pairs:
            poller.add(pair.server.cq)
        seen = {pair.server.cq: [] for pair in pairs}
        for context in range(rounds(500, 50)):
            for pair in pairs:
                send_empty(pair, context)
            while not all(len(contexts) == context + 1 for contexts in seen.values()):
                for queue, completions in poller.wait(DEADLINE_S):
                    seen[queue] += [completion.context for completion in completions]
        assert all(contexts == list(range(rounds(500, 50))) for contexts in seen.values())
        # One adapter closes. The poller still serves the other one.
        own.close()
        send_empty(pairs[0], 9)
        ((queue, _),) = poller.wait(DEADLINE_S)
        assert queue is pairs[0].server.cq
        poller.close()


def test_closing_a_poller_that_waits_while_packets_come(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        for context in range(rounds(300, 30)):
            poller = ndpy.Poller()
            poller.add(pair.server.cq)
            taken = []

            def wait(poller=poller, taken=taken) -> None:
                with contextlib.suppress(ndpy.ClosedError):
                    while True:
                        for _, completions in poller.wait(DEADLINE_S):
                            taken.extend(completions)

            with beside(wait):
                send_empty(pair, context)
                poller.close()
            # The poller took it, or it is still in the queue.
            got = taken or take(pair.server.cq)
            assert [completion.context for completion in got] == [context]


def test_a_queue_that_fails_costs_the_others_of_its_poller_nothing(softnd, monkeypatch):
    with opened(softnd) as (adapter, keep):
        pairs = [connect_pair(keep, adapter) for _ in range(3)]
        poller = keep(ndpy.Poller())
        for pair in pairs:
            poller.add(pair.server.cq)

        def fail(*_) -> None:
            raise ndpy.CompletionQueueOverrunError("too many")

        for context in range(rounds(50, 10)):
            with monkeypatch.context() as patch:
                patch.setattr(pairs[1].server.cq, "poll", fail)
                for pair in pairs:
                    send_empty(pair, context)
                taken, failures = [], 0
                while len(taken) < 2 or not failures:
                    try:
                        for queue, completions in poller.wait(DEADLINE_S):
                            assert queue is not pairs[1].server.cq
                            taken += [completion.context for completion in completions]
                    except ndpy.CompletionQueueOverrunError:
                        failures += 1
                assert taken == [context] * 2
            assert [completion.context for completion in take(pairs[1].server.cq)] == [context]
            # The queue's failure was reported once. After add() the poller looks at the queue again.
            poller.add(pairs[1].server.cq)
