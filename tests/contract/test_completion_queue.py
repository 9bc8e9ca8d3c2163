"""Completion queues: contract G.1 to G.4."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest
from kit.helpers import (
    CLOCK_TICK_S,
    DEADLINE_S,
    QUIET_S,
    assert_works,
    connect_ends,
    connect_pair,
    contexts,
    create_end,
    memory,
    require,
    succeed,
    take,
    wait_until,
)
from kit.quirks import expect_quirk
from kit.threads import Elsewhere, beside

import ndpy
from ndpy import Flags, Notify, Status
from ndpy.objects import completion_queue
from ndpy.objects.pending import wait_or_cancel
from ndpy.vocabulary.quirks import Quirk


def message(pair, *, solicited: bool = False, context: int = 0) -> None:
    """Send one empty message from client to server, and take the client's completion."""
    pair.server.queue_pair.receive([], context=context)
    pair.client.queue_pair.send([], flags=Flags.SOLICITED if solicited else 0)
    succeed(pair.client.cq)


def still_running(pending) -> bool:
    """Whether an operation still runs after a while."""
    with pytest.raises(ndpy.TimeoutError):
        pending.result(QUIET_S)
    return not pending.done()


# ---- G.1: creation and results ----


@pytest.mark.parametrize("depth", [0, -1])
def test_g_1_1_a_depth_below_one_is_refused(adapter, depth):
    with pytest.raises(ndpy.LimitExceededError):
        adapter.create_completion_queue(depth)


def test_g_1_2_the_greatest_depth_can_be_had_and_one_more_not(adapter, keep):
    limit = adapter.info.max_completion_queue_depth
    assert keep(adapter.create_completion_queue(limit)).depth == limit
    with pytest.raises(ndpy.LimitExceededError, match=str(limit)):
        adapter.create_completion_queue(limit + 1)


def test_g_1_5_poll_takes_the_oldest_first_and_never_blocks(pair, keep):
    assert pair.server.cq.poll() == []
    for context in range(5):
        message(pair, context=context)
    time.sleep(QUIET_S)
    assert pair.server.cq.poll(0) == []
    assert [c.context for c in pair.server.cq.poll(2)] == [0, 1]
    assert [c.context for c in pair.server.cq.poll(2)] == [2, 3]
    assert [c.context for c in pair.server.cq.poll(2)] == [4]
    assert pair.server.cq.poll() == []


def test_g_1_5_more_completions_than_one_poll_takes(adapter, keep):
    end = create_end(keep, adapter, cq_depth=256, receive_queue_depth=200)
    for context in range(200):
        end.queue_pair.receive([], context=context)
    end.queue_pair.flush()
    completions = take(end.cq, 200)
    assert [completion.context for completion in completions] == list(range(200))
    end.queue_pair.receive([])


def test_g_1_7_completions_of_a_closed_queue_pair_can_be_taken(adapter, keep):
    end = create_end(keep, adapter)
    end.queue_pair.receive([], context=9)
    end.queue_pair.close()
    (completion,) = take(end.cq)
    assert (completion.context, completion.status) == (9, Status.CANCELED)


def test_g_1_9_threads_never_take_one_completion_twice(adapter, keep):
    end = create_end(keep, adapter, cq_depth=512, receive_queue_depth=400)
    for context in range(400):
        end.queue_pair.receive([], context=context)
    seen: list[int] = []
    start = threading.Barrier(4)

    def poll() -> None:
        start.wait()
        deadline = time.monotonic() + DEADLINE_S
        while len(seen) < 400 and time.monotonic() < deadline:
            seen.extend(completion.context for completion in end.cq.poll(3))

    with beside(*4 * [poll]):
        end.queue_pair.flush()
    assert sorted(seen) == list(range(400))


def test_completions_can_be_kept(pair):
    """A completion stays readable after later polls."""
    message(pair, context=1)
    (first,) = succeed(pair.server.cq)
    message(pair, context=2)
    (second,) = succeed(pair.server.cq)
    assert (first.context, second.context) == (1, 2)
    assert first.ok
    assert "RECEIVE" in repr(first)


# ---- waiting ----


def test_wait_returns_what_is_there_and_times_out(pair):
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.server.cq.wait(0.1)
    assert 0.1 - CLOCK_TICK_S <= time.monotonic() - begin < DEADLINE_S
    with pytest.raises(ndpy.TimeoutError):
        pair.server.cq.wait(0)
    message(pair, context=3)
    assert [c.context for c in pair.server.cq.wait(DEADLINE_S)] == [3]


def test_wait_takes_up_to_max_entries(adapter, keep):
    end = create_end(keep, adapter)
    for context in range(5):
        end.queue_pair.receive([], context=context)
    end.queue_pair.flush()
    assert [c.context for c in end.cq.wait(DEADLINE_S, 2)] == [0, 1]
    assert [c.context for c in end.cq.wait(DEADLINE_S, max_entries=64)] == [2, 3, 4]


def test_wait_wakes_for_a_completion_that_comes_later(pair):
    waiter = Elsewhere(lambda: pair.server.cq.wait(DEADLINE_S)).start()
    time.sleep(0.1)
    assert not waiter.over
    message(pair, context=4)
    assert contexts(waiter.result()) == [4]


def test_no_wake_up_is_lost(adapter, keep):
    """Many rounds, each with a race between the last poll, arming, and the next message."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter, cq_depth=256, receive_queue_depth=200)
    taken: list[int] = []

    def wait() -> None:
        while len(taken) < 200:
            taken.extend(completion.context for completion in pair.server.cq.wait(DEADLINE_S))

    with beside(wait):
        for context in range(200):
            message(pair, context=context)
    assert taken == list(range(200))


def test_many_threads_wait_and_each_completion_comes_once(pair):
    taken: list[int] = []

    def wait() -> None:
        with pytest.raises(ndpy.TimeoutError):
            while True:
                taken.extend(completion.context for completion in pair.server.cq.wait(2.0, 1))

    with beside(*3 * [wait]):
        for context in range(30):
            # There are fewer receive slots than messages. A slot becomes free when its completion is taken.
            wait_until(lambda sent=context: len(taken) > sent - 8, "the waiting threads keep up")
            message(pair, context=context)
    assert sorted(taken) == list(range(30))


def test_closing_ends_the_waits(adapter, keep):
    cq = adapter.create_completion_queue(8)
    waiters = [Elsewhere(lambda: cq.wait(DEADLINE_S)).start() for _ in range(2)]
    time.sleep(0.1)
    cq.close()
    for waiter in waiters:
        with pytest.raises(ndpy.ClosedError):
            waiter.result()


def test_close_goes_on_when_the_last_waiting_thread_has_left(adapter, monkeypatch):
    monkeypatch.setattr(completion_queue, "_LEAVE_S", 4 * DEADLINE_S)
    queue = adapter.create_completion_queue(4)
    waiting = Elsewhere(queue.wait).start()
    wait_until(lambda: queue._waiters, "the thread sleeps")
    Elsewhere(queue.close).start().result()
    with pytest.raises(ndpy.ClosedError):
        waiting.result()


def test_a_closed_queue_cannot_be_used(adapter):
    cq = adapter.create_completion_queue(8)
    cq.close()
    cq.close()
    for use in (cq.poll, lambda: cq.wait(0), cq.arm, lambda: cq.resize(16)):
        with pytest.raises(ndpy.ClosedError):
            use()


# ---- G.2: notification ----


def test_g_2_1_arming_notifies_once(pair):
    notified = pair.server.cq.arm()
    message(pair)
    assert notified.result(DEADLINE_S) is None
    again = pair.server.cq.arm()
    assert still_running(again)
    message(pair)
    again.result(DEADLINE_S)


def test_g_2_2_solicited_waits_for_a_solicited_send(request, pair):
    never = expect_quirk(request, pair.adapter, Quirk.SIW_NEVER_SOLICITED)
    notified = pair.server.cq.arm(Notify.SOLICITED)
    message(pair)
    assert still_running(notified)
    message(pair, solicited=True)
    notified.result(1.0 if never else DEADLINE_S)


def test_g_2_9_the_event_of_an_earlier_arming_ends_no_later_notification(request, pair):
    never = expect_quirk(request, pair.adapter, Quirk.SIW_NEVER_SOLICITED)
    pair.server.cq.arm().cancel()
    message(pair)
    succeed(pair.server.cq)
    time.sleep(QUIET_S)  # the event comes after the completion
    notified = pair.server.cq.arm(Notify.SOLICITED)
    message(pair)
    assert still_running(notified)
    message(pair, solicited=True)
    notified.result(1.0 if never else DEADLINE_S)


def test_g_2_2_errors_is_about_the_queue_itself(pair):
    notified = pair.server.cq.arm(Notify.ERRORS)
    message(pair, solicited=True)
    assert still_running(notified)
    notified.cancel()


def test_g_2_2_other_kinds_are_refused(adapter, keep):
    cq = keep(adapter.create_completion_queue(8))
    with pytest.raises(ValueError):
        cq.arm(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Notify.ANY, Notify.SOLICITED])
def test_g_2_3_a_failed_completion_satisfies_any_and_solicited(pair, kind):
    pair.server.queue_pair.receive([], context=1)
    notified = pair.server.cq.arm(kind)
    pair.client.connector.disconnect(DEADLINE_S)
    notified.result(DEADLINE_S)
    (completion,) = take(pair.server.cq)
    assert not completion.ok


def test_g_2_4_one_completion_ends_all_outstanding_requests(pair):
    notified = [pair.server.cq.arm() for _ in range(3)]
    message(pair)
    for pending in notified:
        pending.result(DEADLINE_S)


def test_g_2_5_a_completion_that_notified_does_not_notify_again(pair):
    notified = pair.server.cq.arm()
    message(pair, context=1)
    notified.result(DEADLINE_S)
    again = pair.server.cq.arm()
    assert still_running(again)
    assert [c.context for c in pair.server.cq.poll()] == [1]
    message(pair, context=2)
    again.result(DEADLINE_S)


def test_g_2_6_any_outranks_solicited(pair):
    solicited, anything = pair.server.cq.arm(Notify.SOLICITED), pair.server.cq.arm(Notify.ANY)
    message(pair)
    anything.result(DEADLINE_S)
    solicited.result(DEADLINE_S)


def test_g_2_6_solicited_does_not_lower_any(pair):
    anything, solicited = pair.server.cq.arm(Notify.ANY), pair.server.cq.arm(Notify.SOLICITED)
    message(pair)
    anything.result(DEADLINE_S)
    solicited.result(DEADLINE_S)


def test_g_2_7_a_completion_from_before_arming_satisfies_it(pair):
    assert pair.server.cq.poll() == []
    message(pair, context=1)
    time.sleep(QUIET_S)
    pair.server.cq.arm().result(DEADLINE_S)
    assert [c.context for c in pair.server.cq.poll()] == [1]


def test_g_2_8_the_sequence_of_notification_and_results(pair):
    notified = pair.server.cq.arm()
    message(pair, context=1)
    notified.result(DEADLINE_S)
    assert len(pair.server.cq.poll()) == 1
    assert pair.server.cq.poll() == []
    again = pair.server.cq.arm()
    assert still_running(again)
    message(pair, context=2)
    again.result(DEADLINE_S)
    assert len(pair.server.cq.poll()) == 1


def test_g_2_9_what_was_taken_does_not_notify(pair):
    message(pair)
    succeed(pair.server.cq)
    notified = pair.server.cq.arm()
    assert still_running(notified)
    notified.cancel()


def test_g_2_10_closing_cancels_the_notification(adapter):
    cq = adapter.create_completion_queue(8)
    notified = cq.arm()
    cq.close()
    with pytest.raises((ndpy.CanceledError, ndpy.ClosedError)):
        notified.result(DEADLINE_S)


def test_a_cancelled_notification_does_not_disturb_the_next(pair):
    notified = pair.server.cq.arm()
    assert notified.cancel()
    with pytest.raises(ndpy.CanceledError):
        notified.result(0)
    again = pair.server.cq.arm()
    message(pair)
    again.result(DEADLINE_S)


def test_notifications_that_were_given_up_leave_nothing_with_the_queue(pair):
    cq = pair.server.cq
    assert not cq.poll()
    for _ in range(50):
        with pytest.raises(ndpy.TimeoutError):
            wait_or_cancel(cq.arm(), 0)
    assert not cq._armed
    assert len(getattr(cq, "_requests", ())) <= 1
    notified = cq.arm()
    message(pair)
    notified.result(DEADLINE_S)
    succeed(cq)


@pytest.mark.parametrize("first", ["given up", "awaited"])
def test_a_notification_that_was_given_up_beside_another_makes_no_second_one(pair, first):
    cq = pair.server.cq
    assert not cq.poll()
    if first == "given up":
        given_up, awaited = cq.arm(), cq.arm()
    else:
        awaited, given_up = cq.arm(), cq.arm()
    assert given_up.cancel()
    message(pair)
    awaited.result(DEADLINE_S)
    time.sleep(QUIET_S)
    again = cq.arm()
    assert still_running(again)
    message(pair)
    again.result(DEADLINE_S)
    succeed(cq, 2)


def test_a_completion_that_comes_after_a_notification_was_given_up_is_told_by_the_next(pair):
    cq = pair.server.cq
    assert not cq.poll()
    assert cq.arm().cancel()
    message(pair)
    # Meanwhile the provider answers the request that was given up.
    time.sleep(QUIET_S)
    cq.arm().result(DEADLINE_S)
    succeed(cq)


# ---- G.3: overrun ----


def test_g_3_1_an_overrun_kills_the_queue(adapter, keep):
    """The provider may give more room than was asked for, so the test fills the queue until it reports the overrun."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    server_cq = keep(adapter.create_completion_queue(1))
    # The client's own queue has room for all.
    client = create_end(keep, adapter, cq_depth=512, initiator_queue_depth=256)
    server = create_end(keep, adapter, cq=server_cq, receive_queue_depth=1024)
    pair = connect_ends(keep, adapter, client, server)
    for context in range(1024):
        server.queue_pair.receive([], context=context)
    failed = server_cq.arm(Notify.ERRORS)

    def overrun() -> bool:
        client.cq.poll()
        with contextlib.suppress(ndpy.QueueFullError):
            client.queue_pair.send([])
        return failed.done()

    wait_until(overrun, "the overrun is reported")
    for later in (failed, server_cq.arm):
        with pytest.raises(ndpy.CompletionQueueOverrunError):
            (later() if callable(later) else later).result(DEADLINE_S)
    assert [completion.context for completion in server_cq.poll(2)] == [0, 1]
    pair.client.connector.wait_disconnected(DEADLINE_S)


def test_g_3_1_who_only_polls_learns_of_an_overrun(adapter, keep):
    """Nobody waits or arms. What the queue kept comes first, and later requests are refused."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    server_cq = keep(adapter.create_completion_queue(1))
    # The client's own queue has room for all.
    client = create_end(keep, adapter, cq_depth=512, initiator_queue_depth=256)
    server = create_end(keep, adapter, cq=server_cq, receive_queue_depth=1024)
    pair = connect_ends(keep, adapter, client, server)
    for context in range(1024):
        server.queue_pair.receive([], context=context)
    disconnected = pair.client.connector.begin_wait_disconnected()

    def ended() -> bool:
        client.cq.poll()
        with contextlib.suppress(ndpy.QueueFullError):
            for _ in range(64):
                client.queue_pair.send([])
        return disconnected.done()

    wait_until(ended, "the overrun has ended the connection")
    array, taken = ndpy.CompletionArray(4), []

    def told() -> bool:
        try:
            server_cq.poll_into(array)
            taken.extend(array.contexts)
            taken.extend(contexts(server_cq.poll(4)))
        except ndpy.CompletionQueueOverrunError:
            return True
        return False

    wait_until(told, "a poll raises")
    # A driver may take in later ones when there is room again.
    assert taken[:2] == [0, 1]
    assert taken == sorted(set(taken))
    for post in (server.queue_pair.send, server.queue_pair.receive):
        with pytest.raises(ndpy.CompletionQueueOverrunError):
            post([])


# ---- G.4: resize ----


def test_g_4_1_resizing_loses_nothing(pair, keep):
    require(pair.adapter, ndpy.Capability.RESIZE_COMPLETION_QUEUE)
    for context in range(6):
        message(pair, context=context)
        if context == 2:
            pair.server.cq.resize(128)
            assert pair.server.cq.depth == 128
        if context == 4:
            pair.server.cq.resize(32)
    assert [c.context for c in succeed(pair.server.cq, 6)] == list(range(6))


def test_g_4_1_resizing_keeps_an_armed_notification(pair):
    require(pair.adapter, ndpy.Capability.RESIZE_COMPLETION_QUEUE)
    notified = pair.server.cq.arm()
    pair.server.cq.resize(128)
    assert pair.server.cq.depth == 128
    assert not notified.done()
    message(pair)
    notified.result(DEADLINE_S)


def test_g_4_2_resizing_below_what_waits_is_refused(adapter, keep):
    require(adapter, ndpy.Capability.RESIZE_COMPLETION_QUEUE)
    end = create_end(keep, adapter)
    for context in range(8):
        end.queue_pair.receive([], context=context)
    end.queue_pair.flush()
    time.sleep(QUIET_S)
    with pytest.raises(ndpy.LimitExceededError):
        end.cq.resize(4)
    assert end.cq.depth == 64
    assert [c.context for c in take(end.cq, 8)] == list(range(8))


@pytest.mark.parametrize("depth", ["too much", 0, -1])
def test_g_4_3_depths_that_cannot_be_are_refused(adapter, keep, depth):
    require(adapter, ndpy.Capability.RESIZE_COMPLETION_QUEUE)
    cq = keep(adapter.create_completion_queue(8))
    with pytest.raises(ndpy.LimitExceededError):
        cq.resize(adapter.info.max_completion_queue_depth + 1 if depth == "too much" else depth)
    assert cq.depth == 8


def test_g_4_4_without_the_capability_resizing_is_unsupported(adapter, keep):
    if ndpy.Capability.RESIZE_COMPLETION_QUEUE in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} claims RESIZE_COMPLETION_QUEUE")
    with pytest.raises(ndpy.UnsupportedError):
        keep(adapter.create_completion_queue(8)).resize(16)


def test_what_only_the_other_system_has_is_unsupported(adapter, keep):
    cq, poller = keep(adapter.create_completion_queue(8)), keep(ndpy.Poller())
    if sys.platform == "linux":
        assert cq.fileno() != poller.fileno()
        others = (cq.notify, lambda: poller.completion_port)
    else:
        assert poller.completion_port
        others = (cq.fileno, poller.fileno)
    for use in others:
        with pytest.raises(ndpy.UnsupportedError):
            use()
    cq.close()
    poller.close()
    for use in others:
        with pytest.raises(ndpy.ClosedError):
            use()


@pytest.mark.parametrize("call", ["poll", "wait", "post"])
def test_a_call_within_another_call_of_the_same_object_is_refused(pair, keep, call):
    """As a signal handler or a finalizer may make it. It would wait for ever."""
    cq, queue_pair = pair.client.cq, pair.client.queue_pair
    region = memory(keep, pair.adapter, 8)
    calls = {"poll": cq.poll, "wait": lambda: cq.wait(DEADLINE_S), "post": lambda: queue_pair.receive(region[0:8])}
    refused: list[BaseException] = []

    def interrupt(frame, event, argument):
        if frame.f_code.co_name == "_collect_one" and not refused:
            sys.setprofile(None)
            with queue_pair._lock, pytest.raises(RuntimeError, match="within another call") as error:
                calls[call]()
            refused.append(error.value)

    queue_pair.receive(region[0:8])
    pair.client.connector.disconnect(DEADLINE_S)
    sys.setprofile(interrupt)
    try:
        completions = take(cq)
    finally:
        sys.setprofile(None)
    assert len(refused) == 1
    assert [completion.status for completion in completions] == [Status.CANCELED]
    assert cq.poll() == []


def test_two_pairs_report_to_their_own_queues(adapter, keep, pair):
    second = connect_pair(keep, adapter)
    memory(keep, adapter, 8)
    message(second, context=5)
    assert pair.server.cq.poll() == []
    assert [c.context for c in succeed(second.server.cq)] == [5]
    assert_works(keep, pair)


def test_the_methods_of_loops_are_of_a_platforms_class(adapter, keep):
    """CPython calls those of a base, which are in C, in a slower way."""
    queue = keep(adapter.create_completion_queue(4))
    queue_pair = keep(adapter.create_queue_pair(queue))
    for method in (queue.poll, queue.poll_into, queue_pair.send, queue_pair.receive, queue_pair.write, queue_pair.read):
        owner = getattr(type(method.__self__), method.__name__).__objclass__
        assert owner.__module__.startswith("ndpy.platforms."), f"{method.__name__}() is of {owner}"
