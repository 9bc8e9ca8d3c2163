"""Requests that are posted together, and completions that are taken into an array: contract F.2, F.3, F.4 and G.1."""

from __future__ import annotations

import array
import itertools
import threading
import weakref

import pytest
from kit.documentation import example
from kit.helpers import (
    DEADLINE_S,
    assert_works,
    contents,
    contexts,
    create_end,
    expose,
    fill,
    memory,
    rounds,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.threads import in_threads

import ndpy
from ndpy import Access, Batch, CompletionArray, Flags, Operation, Status

SINK = Access.LOCAL_WRITE | Access.READ_SINK
COUNT = 8


def poll_until(cq, completions, wanted=1):
    """Poll into an array until that many completions came at once, or came one after the other.
    Returns their contexts.
    """
    found = []

    def look():
        cq.poll_into(completions)
        assert completions.all_ok
        found.extend(completions.contexts)
        return len(found) >= wanted

    wait_until(look, f"{wanted} completions")
    return found


def writes(source, remote, count=COUNT, length=4, **options):
    """A batch that writes pieces of a region to the same places of the remote memory."""
    batch = Batch(count, **options)
    for place in range(count):
        piece = slice(place * length, (place + 1) * length)
        batch.write(source[piece], remote[piece], context=100 + place)
    return batch


@pytest.fixture
def ends(pair, keep):
    """The two ends, a region to write from, and memory of the server to write to and to read from."""
    source = memory(keep, pair.adapter, bytes(range(1, 4 * COUNT + 1)), SINK)
    rights = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE
    target = memory(keep, pair.adapter, 4 * COUNT, rights)
    return pair, source, target, expose(keep, pair.server, target)


def test_f_3_all_writes_of_a_batch_arrive_and_only_the_last_one_completes(ends):
    pair, source, target, remote = ends
    pair.client.queue_pair.post(writes(source, remote))
    assert contexts(succeed(pair.client.cq)) == [100 + COUNT - 1]
    wait_until(lambda: contents(target) == contents(source), "the writes arrive")
    assert pair.client.cq.poll() == []


def test_f_3_a_batch_is_posted_again_and_again(ends):
    pair, source, target, remote = ends
    batch, completions = writes(source, remote), CompletionArray(4)
    for number in range(rounds(2000, 50)):
        fill(source, bytes((number + place) % 256 for place in range(4 * COUNT)))
        pair.client.queue_pair.post(batch)
        assert poll_until(pair.client.cq, completions) == [100 + COUNT - 1]
    wait_until(lambda: contents(target) == contents(source), "the writes arrive")


def test_f_3_with_signal_all_each_request_completes_in_order(ends):
    pair, source, _, remote = ends
    pair.client.queue_pair.post(writes(source, remote, signal_all=True))
    assert contexts(succeed(pair.client.cq, COUNT)) == [100 + place for place in range(COUNT)]


def test_f_3_sends_writes_and_reads_may_be_mixed(pair_with, keep):
    pair = pair_with(max_initiator_sge=2)
    source = memory(keep, pair.adapter, bytes(range(1, 13)), SINK)
    target = memory(keep, pair.adapter, b"....peer", Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE)
    inbox, remote = memory(keep, pair.adapter, 8), expose(keep, pair.server, target)
    pair.server.queue_pair.receive(inbox, context=5)
    batch = Batch(3, max_sge=2, signal_all=True)
    batch.write(source[0:4], remote[0:4], context=1)
    batch.send([source[0:4], source[8:12]], context=2)
    batch.read(source[4:8], remote[4:8], context=3)
    pair.client.queue_pair.post(batch)
    operations = [completion.operation for completion in succeed(pair.client.cq, 3)]
    assert operations == [Operation.WRITE, Operation.SEND, Operation.READ]
    assert contexts(succeed(pair.server.cq)) == [5]
    assert contents(inbox) == bytes([1, 2, 3, 4, 9, 10, 11, 12])
    assert contents(source)[4:8] == b"peer"
    assert contents(target) == bytes([1, 2, 3, 4]) + b"peer"


def test_f_3_columns_change_all_requests_at_once(ends):
    pair, source, target, remote = ends
    batch = writes(source, remote)
    # Each piece goes to the place of another one.
    batch.remote_addresses = array.array("Q", reversed(batch.remote_addresses.tolist()))
    batch.contexts = range(COUNT)
    pair.client.queue_pair.post(batch)
    assert contexts(succeed(pair.client.cq)) == [COUNT - 1]
    pieces = [contents(source)[place : place + 4] for place in range(0, 4 * COUNT, 4)]
    wait_until(lambda: contents(target) == b"".join(reversed(pieces)), "the writes arrive")
    batch.lengths[0] = remote.length + 1
    with pytest.raises(ndpy.ElementRangeError, match="request 0 of the batch"):
        pair.client.queue_pair.post(batch)
    assert pair.client.cq.poll() == []


def test_f_2_a_batch_that_does_not_fit_posts_nothing(ends):
    pair, source, target, remote = ends
    depth = pair.client.queue_pair.limits.initiator_queue_depth
    batch = Batch(depth + 1)
    for _ in range(depth):
        batch.send(source[0:4])
    wide = Batch(depth + 1)
    for _ in range(depth + 1):
        wide.write(source[0:4], remote[0:4])
    for _ in range(2):
        with pytest.raises((ndpy.QueueFullError, ndpy.LimitExceededError), match=str(depth)):
            pair.client.queue_pair.post(wide)
    assert pair.client.cq.poll() == []
    pair.client.queue_pair.post(writes(source, remote))
    succeed(pair.client.cq)
    wait_until(lambda: contents(target) == contents(source), "the writes arrive")


def test_a_batch_that_another_thread_clears_while_it_is_refused_says_so(pair, keep, monkeypatch):
    queue_pair = pair.client.queue_pair
    depth = queue_pair.limits.receive_queue_depth
    element = memory(keep, pair.adapter, 8)[0:8]
    for _ in range(depth):
        queue_pair.receive(element)
    batch = Batch(1)
    batch.receive(element)
    refuse = type(queue_pair)._refuse_batch

    def refuse_cleared(self, cleared, *arguments):
        cleared.clear()
        return refuse(self, cleared, *arguments)

    monkeypatch.setattr(type(queue_pair), "_refuse_batch", refuse_cleared)
    with pytest.raises(RuntimeError, match="the batch was changed while it was posted"):
        queue_pair.post(batch)


def test_f_2_a_batch_needs_a_connection(adapter, keep):
    end = create_end(keep, adapter)
    region = memory(keep, adapter, 16)
    batch = Batch(2)
    batch.send(region)
    with pytest.raises(ndpy.NotConnectedError, match="request 0 of the batch"):
        end.queue_pair.post(batch)
    end.queue_pair.receive_many([region[0:8], region[8:16]])


def test_f_2_a_closed_region_refuses_the_batch(pair, keep):
    region = memory(keep, pair.adapter, 16)
    batch = Batch(1)
    batch.send(region)
    region.close()
    with pytest.raises(ndpy.ClosedError):
        pair.client.queue_pair.post(batch)
    assert_works(keep, pair)


def test_f_4_receives_are_posted_in_one_call_and_polled_into_an_array(pair, keep):
    inbox = memory(keep, pair.adapter, 8 * COUNT)
    receives, completions = Batch(COUNT), CompletionArray(COUNT)
    for place in range(COUNT):
        receives.receive(inbox[8 * place : 8 * place + 8], context=place)
    message = memory(keep, pair.adapter, b"messages", Access.NONE)
    sends = Batch(COUNT)
    for place in range(COUNT):
        sends.send(message[0:place])
    for _ in range(rounds(500, 20)):
        pair.server.queue_pair.post(receives)
        pair.client.queue_pair.post(sends)
        succeed(pair.client.cq)
        lengths = []
        found = []
        while len(found) < COUNT:
            pair.server.cq.poll_into(completions)
            assert completions.all_ok
            found += completions.contexts
            lengths += completions.nbytes
            assert set(completions.operations) <= {Operation.RECEIVE}
        assert found == list(range(COUNT))
        assert lengths == list(range(COUNT))


def test_f_4_receives_that_were_posted_one_by_one_are_polled_into_an_array(pair, keep):
    inbox, completions = memory(keep, pair.adapter, 8), CompletionArray(COUNT)
    message = memory(keep, pair.adapter, b"messages", Access.NONE)
    next_context, next_expected = itertools.count(), itertools.count()
    for _ in range(COUNT):
        pair.server.queue_pair.receive(inbox, context=next(next_context))
    for number in range(rounds(500, 20)):
        count = number % COUNT + 1
        for place in range(count):
            pair.client.queue_pair.send(message[0:place])
        succeed(pair.client.cq, count)
        found, lengths = [], []
        while len(found) < count:
            # They are posted again before somebody looks.
            for _ in range(pair.server.cq.poll_into(completions)):
                pair.server.queue_pair.receive(inbox, context=next(next_context))
            assert completions.all_ok
            found += completions.contexts
            lengths += completions.nbytes
        assert found == [next(next_expected) for _ in range(count)]
        assert lengths == list(range(count))


def test_f_4_receive_many_takes_the_contexts(pair, keep):
    inbox = memory(keep, pair.adapter, 8)
    pair.server.queue_pair.receive_many([inbox[0:4], inbox[4:8]], contexts=[8, 9])
    for _ in range(2):
        pair.client.queue_pair.send(memory(keep, pair.adapter, b"data"))
    succeed(pair.client.cq, 2)
    assert contexts(succeed(pair.server.cq, 2)) == [8, 9]
    assert contents(inbox) == b"datadata"


def test_f_6_what_is_left_of_a_batch_is_cancelled_with_its_contexts(pair, keep):
    inbox = memory(keep, pair.adapter, 16)
    receives = Batch(4)
    for place in range(4):
        receives.receive(inbox, context=place)
    pair.server.queue_pair.post(receives)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"data"))
    succeed(pair.client.cq)
    wait_until(lambda: contents(inbox)[:4] == b"data", "the message arrives")
    pair.server.queue_pair.flush()
    completions = take(pair.server.cq, 4)
    assert contexts(completions) == [0, 1, 2, 3]
    assert statuses(completions) == [Status.SUCCESS] + [Status.CANCELED] * 3


def test_f_6_a_batch_after_the_end_of_the_connection_is_cancelled(ends):
    pair, source, _, remote = ends
    pair.client.queue_pair.flush()
    pair.client.queue_pair.post(writes(source, remote, signal_all=True))
    completions = take(pair.client.cq, COUNT)
    assert statuses(completions) == [Status.CANCELED] * COUNT
    assert contexts(completions) == [100 + place for place in range(COUNT)]


def test_f_6_a_queue_pair_may_be_closed_while_its_batches_are_posted(pair, keep):
    inbox = memory(keep, pair.adapter, 16)
    receives, completions = Batch(4), CompletionArray(8)
    for place in range(4):
        receives.receive(inbox, context=place)
    pair.server.queue_pair.post(receives)
    pair.server.queue_pair.post(receives)
    pair.server.connector.close()
    pair.server.queue_pair.close()
    found = []

    def look():
        if pair.server.cq.poll_into(completions):
            found.extend(completions.contexts)
            with pytest.raises(ndpy.CanceledError):
                completions.raise_for_status()
        return len(found) == 8

    wait_until(look, "all completions")
    assert found == [0, 1, 2, 3] * 2


def test_d_a_posted_batch_keeps_its_memory(pair, keep):
    class Memory(bytearray):
        """Can be referred to weakly."""

    buffer = Memory(16)
    gone = weakref.ref(buffer)
    region = pair.adapter.register(buffer)
    batch = Batch(2)
    for place in range(2):
        batch.receive(region, context=place)
    pair.server.queue_pair.post(batch)
    del batch, region, buffer
    assert gone() is not None
    for _ in range(2):
        pair.client.queue_pair.send(memory(keep, pair.adapter, b"data"))
    succeed(pair.client.cq, 2)
    assert contexts(succeed(pair.server.cq, 2)) == [0, 1]
    wait_until(lambda: gone() is None, "the memory goes with the last completion", DEADLINE_S)


def test_an_inline_batch_copies_the_bytes(adapter, keep, pair_with):
    if adapter.info.max_inline_data_size < 4:
        pytest.skip(f"{adapter.info.name} sends nothing inline")
    pair = pair_with(inline_data_size=4)
    source, inbox = memory(keep, adapter, b"abcd"), memory(keep, adapter, 4)
    batch = Batch(1)
    batch.send(source, flags=Flags.INLINE)
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.post(batch)
    fill(source, b"....")
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(inbox) == b"abcd"


def test_threads_may_post_one_batch_and_poll_one_queue(ends):
    pair, source, _, remote = ends
    batch = writes(source, remote, 2)
    count, found, lock = rounds(2000, 60), [0], threading.Lock()

    def post(_):
        for _ in range(count):
            while True:
                try:
                    pair.client.queue_pair.post(batch)
                    break
                except ndpy.QueueFullError:
                    poll()

    def poll():
        completions = CompletionArray(4)
        pair.client.cq.poll_into(completions)
        completions.raise_for_status()
        with lock:
            found[0] += len(completions)

    in_threads(3, post, 10 * DEADLINE_S)

    def all_came():
        poll()
        return found[0] == 3 * count

    wait_until(all_came, "all completions")


def test_the_example_of_the_documentation_works(pair, keep, capsys):
    source = memory(keep, pair.adapter, bytes(range(64)))
    target = memory(keep, pair.adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    names = {"source": source, "remote": expose(keep, pair.server, target), "near": pair.client.queue_pair}
    exec(example("howto/many_requests.md", "Batch("), {**names, "ndpy": ndpy, "queue": pair.client.cq})
    assert contexts(succeed(pair.client.cq)) == [7]
    assert capsys.readouterr().out == "[56]\n"
    wait_until(lambda: contents(target) == contents(source), "the writes arrive")
