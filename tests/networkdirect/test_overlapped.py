"""Overlapped requests: many at once, from many threads, used again, and freed when they have ended.

Each test has a private softnd and fails if an object or a handle is left (own_softnd.py). NDPY_STRESS=1 runs the full
counts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import time

import pytest
from kit.helpers import (
    DEADLINE_S,
    SEED,
    ask,
    connect_pair,
    create_end,
    establish,
    rounds,
    send_message,
    succeed,
    take,
    wait_until,
)
from kit.scenarios import slow_call, slow_completions
from kit.threads import beside
from overlapped_requests import EndingCounts, outcome, send_empty
from own_softnd import handles, open_handles, opened

import ndpy
from ndpy.platforms.networkdirect.overlapped import OverlappedPending


def test_a_wait_that_ended_early_says_how_long_it_was():
    with pytest.raises(ndpy.TimeoutError, match=r"not finished within 0\.05 s"):
        OverlappedPending("connect").result(0.05)


def test_an_operation_that_timed_out_says_so_in_its_own_words():
    pending: OverlappedPending[None] = OverlappedPending("connect")
    pending.fail(ndpy.TimeoutError("the peer is silent", operation="connect"))
    with pytest.raises(ndpy.TimeoutError, match="the peer is silent"):
        pending.result(5)


def test_c_5_5_a_request_is_used_again_when_it_has_ended(softnd):
    """A wait that times out leaves its Notify armed for the next wait. One request is enough, and nothing is missed."""
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        for context in range(rounds(3000, 200)):
            for _ in range(2):
                with pytest.raises(ndpy.TimeoutError):
                    pair.server.cq.wait(0)
            send_empty(pair, context)
            assert [completion.context for completion in take(pair.server.cq)] == [context]
        assert len(pair.server.cq._idle_waiters) == 1
        assert len(pair.server.cq._requests) <= 1


def test_a_thousand_registrations_in_flight(softnd, rng):
    with opened(softnd, slow_call("reg_mr", 300)) as (adapter, _):
        endings = EndingCounts()
        buffers = [bytearray(64 + number) for number in range(1000)]
        pendings = [endings.watch(adapter.begin_register(buffer)) for buffer in buffers]
        assert not pendings[-1].done()
        chosen = set(rng.sample(range(1000), 300))
        for number in chosen:
            pendings[number].cancel()
        endings.check()
        regions = {}
        for number, pending in enumerate(pendings):
            result = outcome(pending)
            if isinstance(result, ndpy.CanceledError):
                assert number in chosen
            else:
                assert result.length == 64 + number
                regions[number] = result
        assert len(regions) >= 700
        assert len({region.local_token for region in regions.values()}) == len(regions)
        endings = EndingCounts()
        for region in regions.values():
            endings.watch(region.begin_deregister())
        endings.check()
        assert not adapter._registering
        # The buffers are free again. While a bytearray is exported, its size cannot change.
        for buffer in buffers:
            buffer.append(0)


def test_what_has_ended_keeps_no_event(softnd):
    """Reference counts free ended requests and their events. The garbage collector is not needed."""
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        srq = keep(adapter.create_shared_receive_queue(4, threshold=2)) if softnd.version == 2 else None

        def use() -> None:
            adapter.begin_register(bytearray(64)).result(DEADLINE_S).close()
            adapter.begin_register(bytearray(64)).result(DEADLINE_S).begin_deregister().result(DEADLINE_S)
            if srq is not None:
                srq.arm().result(DEADLINE_S)
            armed = pair.server.cq.arm()
            send_empty(pair)
            armed.result(DEADLINE_S)
            take(pair.server.cq)

        use()
        before = handles()
        gc.disable()
        try:
            for _ in range(50):
                use()
            wait_until(lambda: open_handles() <= before + 12, f"handles go back to {before}")
        finally:
            gc.enable()


def test_many_threads_wait_arm_poll_and_close_at_once(softnd):
    """Every thread ends as the API documents, whatever the others do with the same queue."""
    for turn in range(rounds(40, 4)):
        print(f"seed {SEED + turn} (NDPY_TEST_SEED)")
        rng = random.Random(SEED + turn)
        with opened(softnd, *slow_completions(turn % 3), slow_call("cancel", turn % 4)) as (adapter, keep):
            pair = connect_pair(keep, adapter, cq_depth=1024, receive_queue_depth=512, initiator_queue_depth=512)
            queue = pair.server.cq
            poller = ndpy.Poller()
            poller.add(queue)
            endings, taken = EndingCounts(), []
            deadline = time.monotonic() + 20

            def until_closed(work, deadline=deadline) -> None:
                with contextlib.suppress(ndpy.ClosedError):
                    while time.monotonic() < deadline:
                        with contextlib.suppress(ndpy.TimeoutError):
                            work()
                    pytest.fail("not ended by closing")

            def wait(queue=queue, taken=taken) -> None:
                taken.extend(queue.wait(0.005))

            def wait_long(queue=queue, taken=taken) -> None:
                taken.extend(queue.wait(5))

            def poll(poller=poller, taken=taken) -> None:
                for _, completions in poller.wait(5):
                    taken.extend(completions)

            def arm(queue=queue, endings=endings) -> None:
                pending = endings.watch(queue.arm())
                with contextlib.suppress(ndpy.CanceledError):
                    pending.result(0.002)

            def wake(poller=poller) -> None:
                if poller.closed:
                    raise ndpy.ClosedError("closed")
                poller.wake()
                time.sleep(0.001)

            works = (wait, wait, wait_long, wait_long, poll, arm, wake)
            with beside(*(functools.partial(until_closed, work) for work in works)):
                for context in range(200):
                    send_empty(pair, context)
                    if rng.random() < 0.05:
                        time.sleep(0.002)
                wait_until(lambda taken=taken: len(taken) >= 200, "every completion is taken")
                first = [poller, pair.server.queue_pair] if rng.random() < 0.5 else [pair.server.queue_pair, poller]
                for thing in (*first, queue):
                    thing.close()
            contexts = [completion.context for completion in taken if completion.ok]
            assert sorted(contexts) == list(range(200))
            endings.check()


def test_what_the_adapters_thread_cannot_handle_is_reported_and_ends_it_not(softnd, monkeypatch):
    raised: list[str] = []
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)

        def fail(pending) -> None:
            raise ValueError("a callback's trouble")

        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda what: raised.append(str(what.exc_value)))
            pending = pair.server.cq.arm()
            pending.add_done_callback(fail)
            send_empty(pair)
            wait_until(lambda: raised, "it is reported")
        assert raised == ["a callback's trouble"]
        succeed(pair.server.cq)
        armed = pair.server.cq.arm()
        send_empty(pair)
        armed.result(DEADLINE_S)


def test_a_queue_may_have_one_place_and_not_none(softnd):
    with opened(softnd) as (adapter, keep):
        queue = keep(adapter.create_completion_queue(8))
        if ndpy.Capability.RESIZE_COMPLETION_QUEUE in adapter.info.capabilities:
            queue.resize(1)
            assert queue.depth == 1
        with pytest.raises(ndpy.LimitExceededError):
            queue.resize(0)


def test_everything_works_after_all_that(softnd):
    with opened(softnd) as (adapter, keep):
        end, server = create_end(keep, adapter), create_end(keep, adapter)
        offer = ask(keep, adapter, end.queue_pair)
        establish(offer, server.queue_pair)
        send_message(keep, end, server, b"still here")
