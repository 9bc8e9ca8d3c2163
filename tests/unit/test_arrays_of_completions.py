"""Arrays of completions over a provider that the test plays itself."""

from __future__ import annotations

import gc
import sys

import pytest
from data_path_provider import (
    CONTEXT,
    PROTECTION,
    SIGNALED,
    WC_GRH,
    WC_RECV,
    WC_SEND,
    WC_WITH_INV,
    Provider,
)
from kit.helpers import interrupted
from posting_ends import Queue, Queues, Region, in_flight, receives

from ndpy import Batch, CompletionArray, Flags, Status
from ndpy.platforms.verbs.native_calls import lib


def test_an_array_shows_what_was_polled(provider, queues, cq):
    completions = CompletionArray(4)
    queues.send(Region()[:4], context=CONTEXT)
    provider.complete(WC_SEND)
    queues.send(Region()[:5], context=2)
    provider.complete(WC_SEND, PROTECTION)
    assert cq.poll_into(completions) == len(completions) == 2
    assert list(completions.contexts) == [CONTEXT, 2]
    assert list(completions.nbytes) == [4, 0]
    assert list(completions.statuses) == [Status.SUCCESS, Status.ACCESS_VIOLATION]
    assert list(completions.operations) == [lib.NDPY_SEND] * 2
    assert list(completions.native_statuses) == [0, PROTECTION]
    assert not completions.all_ok
    assert [completion.context for completion in completions] == [CONTEXT, 2]
    assert completions[0].queue_pair is queues
    with pytest.raises(IndexError):
        completions[2]
    assert cq.poll_into(completions) == len(completions) == 0
    assert completions.all_ok
    completions.raise_for_status()
    with pytest.raises(IndexError):
        completions[0]


def receive_into(provider: Provider, queues: Queues, cq: Queue, completions: CompletionArray, batch: Batch) -> int:
    queues.post(batch)
    for place, sent in enumerate(provider.call()):
        # As rxe does.
        provider.complete_request(sent, WC_RECV, nbytes=place, flags=WC_GRH)
    return cq.poll_into(completions)


@pytest.mark.parametrize("look_before", [False, True])
def test_the_receives_of_a_batch_are_the_arrays_own(provider, queues, cq, look_before):
    completions, batch = CompletionArray(8), receives(Region(), 5)
    if look_before:
        _ = completions.contexts
    for _ in range(10):
        assert receive_into(provider, queues, cq, completions, batch) == 5
        assert completions.all_ok
        assert in_flight(queues, 1) == 0
        # What comes later does not change them.
        batch.clear()
        for place in range(5):
            batch.receive(Region()[:4], context=50 + place)
        queues.post(batch)
        posted = provider.call()
        gc.collect()
        assert list(completions.contexts) in ([100, 101, 102, 103, 104], [50, 51, 52, 53, 54])
        assert list(completions.nbytes) == [0, 1, 2, 3, 4]
        assert [completion.queue_pair for completion in completions] == [queues] * 5
        for sent in posted:
            provider.complete_request(sent, WC_RECV)
        assert cq.poll_into(completions) == 5
        assert [completion.context for completion in completions] == [50, 51, 52, 53, 54]
    assert cq._taken == 100


def test_the_receives_of_a_batch_are_retired_together(provider, queues, cq):
    completions = CompletionArray(8)
    for expected in (3, 2):
        receive_into(provider, queues, cq, completions, receives(Region(), expected))
        retired = []
        cq._collect_one = retired.append
        assert len(queues._posted_requests.receive) == 0
        assert completions.all_ok
        assert not retired


def test_completions_outlive_their_list(provider, queues, cq):
    completions = CompletionArray(8)
    receive_into(provider, queues, cq, completions, receives(Region(), 3))
    gc.collect()
    # New lists would take the place of the former one.
    for _ in range(3):
        receive_into(provider, queues, cq, CompletionArray(8), receives(Region(), 2))
    assert [completion.context for completion in completions] == [100, 101, 102]


def test_a_held_column_is_brought_up_to_date(provider, queues, cq):
    completions, batch = CompletionArray(3), receives(Region(), 3)
    receive_into(provider, queues, cq, completions, batch)
    column = completions.nbytes
    queues.post(batch)
    for sent in provider.call():
        provider.complete_request(sent, WC_RECV, nbytes=77)
    cq.poll_into(completions)
    assert list(column) == [77, 77, 77]


def test_part_of_a_batch_may_come_at_a_time(provider, queues, cq):
    completions, batch = CompletionArray(2), receives(Region(), 5)
    assert receive_into(provider, queues, cq, completions, batch) == 2
    assert [completion.context for completion in completions] == [100, 101]
    assert in_flight(queues, 1) == 3
    assert cq.poll_into(completions) == 2
    assert list(completions.contexts) == [102, 103]
    assert cq.poll_into(completions) == 1
    assert list(completions.contexts) == [104]
    assert in_flight(queues, 1) == 0
    assert len(queues._posted_requests.receive) == 0


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("what", ["failed", "invalidated"])
def test_an_array_with_one_special_receive_is_looked_at(provider, queues, cq, place, what):
    completions = CompletionArray(8)
    queues.post(receives(Region(), 5))
    for number, sent in enumerate(provider.call()):
        special = number == place
        provider.complete_request(
            sent,
            WC_RECV,
            status=PROTECTION if special and what == "failed" else 0,
            flags=WC_WITH_INV if special and what == "invalidated" else 0,
            key=9,
        )
    assert cq.poll_into(completions) == 5
    assert list(completions.contexts) == [100, 101, 102, 103, 104]
    # It went through _collect_one().
    assert len(cq.failed) == 1
    assert completions.all_ok == (what == "invalidated")
    assert in_flight(queues, 1) == 0


def test_receives_of_two_postings_of_one_batch_are_told_apart(provider, queues, cq):
    completions, batch = CompletionArray(3), receives(Region(), 4)
    queues.post(batch)
    first = provider.call()
    queues.post(batch)
    for sent in first + provider.call():
        provider.complete_request(sent, WC_RECV)
    contexts = []
    for left in (5, 2, 0):
        cq.poll_into(completions)
        contexts += list(completions.contexts)
        assert in_flight(queues, 1) == left
    assert contexts == [100, 101, 102, 103] * 2


def test_sends_between_the_receives_are_not_lost(provider, queues, cq):
    completions = CompletionArray(8)
    queues.post(receives(Region(), 3))
    listed = provider.call()
    queues.send(Region()[:4], context=1)
    for sent in (listed[0], provider.call()[0], *listed[1:]):
        provider.complete_request(sent, WC_SEND if sent.id == provider.sent.id else WC_RECV)
    assert cq.poll_into(completions) == 4
    assert list(completions.contexts) == [100, 1, 101, 102]


def test_internal_completions_are_left_out(provider, queues, cq):
    completions = CompletionArray(8)
    for _ in range(4):
        queues.send(Region()[:4], flags=Flags.SILENT_SUCCESS)
        if provider.call()[0].flags & SIGNALED:
            provider.complete(WC_SEND)
    queues.send(Region()[:4], context=3)
    provider.complete(WC_SEND)
    assert cq.poll_into(completions) == 1
    assert completions[0].context == 3


def test_completions_after_an_exception_come_with_the_next_poll(provider, queues, cq):
    completions = CompletionArray(8)
    for context in range(3):
        queues.send(Region()[:4], context=context)
        provider.complete(WC_SEND, PROTECTION if context == 1 else 0)

    cq._collect_one = interrupted
    with pytest.raises(KeyboardInterrupt):
        cq.poll_into(completions)
    assert len(completions) == 0
    assert not cq._lock.locked()
    assert cq.poll_into(completions) == 3
    assert list(completions.contexts) == [0, 1, 2]


def test_an_array_is_used_by_one_poll_at_a_time(provider, queues, cq):
    completions = CompletionArray(8)
    queues.send(Region()[:4])
    provider.complete(WC_SEND, PROTECTION)
    seen = []

    def poll_again(entry, failed):
        other = Queue(provider, queues)
        with pytest.raises(RuntimeError, match="another thread polls into this array"):
            other.poll_into(completions)
        seen.append(other)

    cq._collect_one = poll_again
    cq.poll_into(completions)
    assert seen


def test_wrong_arrays_are_refused(cq):
    for capacity in (0, -1, 1 << 21):
        with pytest.raises(ValueError, match="an array holds"):
            CompletionArray(capacity)
    with pytest.raises(TypeError, match="takes a CompletionArray"):
        cq.poll_into([])


def test_an_array_does_not_grow_while_it_is_used(provider, queues, cq):
    completions, batch = CompletionArray(8), receives(Region(), 5)
    receive_into(provider, queues, cq, completions, batch)
    counts = sys.getrefcount(queues._posted_requests)
    for _ in range(50):
        receive_into(provider, queues, cq, completions, batch)
        assert completions[4].context == 104
    assert sys.getrefcount(queues._posted_requests) <= counts + 5
