"""What is kept alive by objects that a program keeps: nothing that they do not need any more."""

from __future__ import annotations

import weakref

import pytest
from kit.helpers import DEADLINE_S, assert_let_go, connect_pair, create_end, host_of, memory, require, succeed

import ndpy


@pytest.mark.parametrize("how", ["cancelled", "closed", "succeeded"])
def test_a_notification_that_has_ended_keeps_no_queue(adapter, keep, how):
    """A program may keep the Pending, for example in a list of what it has done."""
    queue = adapter.create_completion_queue(8)
    pending = queue.arm()
    if how == "cancelled":
        assert pending.cancel()
    elif how == "succeeded":
        end = create_end(keep, adapter, cq=queue)
        end.queue_pair.receive([])
        end.queue_pair.flush()
        pending.result(DEADLINE_S)
        del end
        keep.close()
    queue.close()
    kept = weakref.ref(queue)
    del queue
    assert_let_go(kept)
    assert pending.done()


def test_a_call_that_waited_for_a_request_keeps_no_listener(adapter):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    listener = adapter.listen((host_of(adapter), 0))
    pending = listener.begin_get_request()
    listener.close()
    kept = weakref.ref(listener)
    del listener
    assert_let_go(kept)
    assert pending.cancelled()


def test_calls_of_a_connection_keep_neither_connectors_nor_queue_pairs(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter)
    kept = [weakref.ref(thing) for end in pair for thing in (end.connector, end.queue_pair)]
    watching = [end.connector.begin_wait_disconnected() for end in pair]
    leaving = pair.client.connector.begin_disconnect()
    for pending in (*watching, leaving):
        pending.result(DEADLINE_S)
    del pair
    keep.close()
    for reference in kept:
        assert_let_go(reference)


def test_an_array_that_was_filled_again_lets_go_of_the_former_queue_pair(adapter, keep):
    """It knows the queue pair of each completion that it shows, and of no other one."""
    array = ndpy.CompletionArray(8)
    cq = keep(adapter.create_completion_queue(16))
    former = create_end(keep, adapter, cq=cq)
    with adapter.create_queue_pair(cq) as passing:
        for context in range(3):
            passing.receive([], context=context)
        passing.flush()
        taken = 0
        while taken < 3:
            taken += cq.poll_into(array)
        assert array[0].queue_pair is passing
        kept = weakref.ref(passing)
    del passing
    former.queue_pair.receive([], context=9)
    former.queue_pair.flush()
    while not cq.poll_into(array):
        pass
    assert array[0].queue_pair is former.queue_pair
    assert_let_go(kept)


def test_completions_that_were_taken_keep_no_memory(pair, keep):
    """Also the completion queue keeps the completions that it has given out last, to fill them again."""
    adapter = pair.adapter
    for _ in range(2):
        buffer = ndpy.alloc(64)
        with adapter.register(buffer) as sink:
            pair.server.queue_pair.receive(sink, context=1)
            pair.client.queue_pair.send(memory(keep, adapter, b"x"))
            completions = [*succeed(pair.client.cq), *succeed(pair.server.cq)]
            kept = weakref.ref(sink)
        del sink
        assert_let_go(kept)
        assert [completion.context for completion in completions] == [0, 1]
