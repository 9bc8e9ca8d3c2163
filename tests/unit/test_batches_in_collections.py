"""Batches and arrays of completions whose surroundings change at the worst moment: a queue pair goes, or the garbage
collector runs
code in the middle of a post."""

from __future__ import annotations

import pytest
from collecting import in_next_collection
from data_path_provider import WC_GRH, WC_RECV
from kit.helpers import HAS_GIL
from posting_ends import Region, in_flight, receives, writes

from ndpy import Batch, CompletionArray
from ndpy.platforms.verbs.native_calls import ffi


@pytest.mark.parametrize("looks", ["an item", "a column", "all items"])
def test_an_array_shows_the_contexts_of_a_list_whose_memory_has_gone(provider, queues, cq, looks):
    count, completions = 5, CompletionArray(8)
    batch = receives(Region(), count)
    queues.post(batch)
    sent = provider.call()
    for place, request in enumerate(sent):
        provider.complete_request(request, WC_RECV, nbytes=place, flags=WC_GRH)
    assert cq.poll_into(completions) == count
    del batch
    queues._detach()
    # The memory of the list's slots, which closing the queue pair frees.
    size = (sent[1].id - sent[0].id) * count
    ffi.memmove(ffi.cast("char *", sent[0].id), b"\xee" * size, size)
    if looks == "an item":
        assert completions[3].context == 103
    elif looks == "a column":
        assert list(completions.contexts) == [100, 101, 102, 103, 104]
    assert [(each.context, each.nbytes) for each in completions] == [(100 + place, place) for place in range(count)]


def test_a_column_that_changes_in_the_middle_of_a_post_is_seen_by_the_next_one(provider, queues, cq):
    batch = writes(Region(), 2)
    column = batch.contexts
    column[1] = 7

    def change() -> None:
        column[1] = 8

    with in_next_collection(change):
        queues.post(batch)
    provider.complete_request(provider.call()[-1])
    (first,) = cq.poll()
    assert first.context in (7, 8)
    column[1] = 8
    queues.post(batch)
    provider.complete_request(provider.call()[-1])
    assert [completion.context for completion in cq.poll()] == [8]


@pytest.mark.parametrize("refill", [False, True], ids=["cleared", "filled again"])
def test_a_batch_that_changes_in_the_middle_of_a_post_is_refused(queues, refill):
    region = Region()
    batch = Batch(4)

    def change() -> None:
        batch.clear()
        if refill:
            for _ in range(3):
                batch.send(region[:4])

    for _ in range(3):
        batch.send(region[:8])
    with in_next_collection(change) as ran:
        try:
            queues.post(batch)
        except (RuntimeError, ValueError) as error:
            assert any(words in str(error) for words in ("was changed while it was posted", "the batch is empty"))
        else:
            # The collection came before or after the post.
            assert in_flight(queues) == 3
    assert ran or not HAS_GIL
