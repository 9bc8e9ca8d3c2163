"""Objects that are used a second time: after a refusal, after they were cleared, removed or filled."""

from __future__ import annotations

import weakref

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_let_go,
    assert_refused,
    create_end,
    has_kernel_driver,
    host_of,
    memory,
    require,
    require_reusable_queue_pairs,
    succeed,
)

import ndpy
from ndpy import Access


def test_a_second_connect_shows_nothing_of_the_first(adapter, keep):
    """Of a refusal, private_data says why. It says nothing of the attempt after it."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    require_reusable_queue_pairs(adapter)
    end = create_end(keep, adapter)
    offer = ask(keep, adapter, end.queue_pair)
    offer.server.reject(b"no room")
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)
    again = offer.client.begin_connect(end.queue_pair, offer.listener.address)
    server = keep(offer.listener.get_request(DEADLINE_S))
    for what in ("private_data", "read_limits"):
        with pytest.raises(ndpy.NotConnectedError, match="yet"):
            getattr(offer.client, what)
    server.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        again.result(DEADLINE_S)


def test_a_bound_connector_is_bound_after_a_refusal(adapter, keep):
    """The second attempt comes from the same address."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    require_reusable_queue_pairs(adapter)
    end = create_end(keep, adapter)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    client = keep(adapter.create_connector())
    client.bind((host_of(adapter), 0))
    bound = client.local_address
    for _ in range(2):
        offer = ask(keep, adapter, end.queue_pair, client=client, listener=listener)
        assert offer.server.peer_address == bound
        offer.server.reject()
        with pytest.raises(ndpy.ConnectionRefusedError):
            offer.connecting.result(DEADLINE_S)
        assert (client.state, client.local_address) == ("bound", bound)


def test_a_queue_that_was_added_to_a_poller_twice_is_in_it_once(adapter, keep):
    queue = keep(adapter.create_completion_queue(16))
    end = create_end(keep, adapter, cq=queue)
    with ndpy.Poller() as poller:
        for _ in range(2):
            poller.add(queue)
        end.queue_pair.receive([], context=3)
        end.queue_pair.flush()
        ((found, completions),) = poller.wait(DEADLINE_S)
        assert found is queue
        assert [completion.context for completion in completions] == [3]
        poller.remove(queue)
        end.queue_pair.receive([], context=4)
        end.queue_pair.flush()
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0.05)
        poller.add(queue)
        ((found, completions),) = poller.wait(DEADLINE_S)
        assert [completion.context for completion in completions] == [4]


def test_a_queue_that_leaves_one_poller_stays_with_the_other_until_it_is_closed(adapter, keep):
    queue = adapter.create_completion_queue(16)
    with ndpy.Poller() as one, ndpy.Poller() as other:
        one.add(queue)
        other.add(queue)
        one.remove(queue)
        end = create_end(keep, adapter, cq=queue)
        end.queue_pair.receive([], context=3)
        end.queue_pair.close()
        ((found, completions),) = other.wait(DEADLINE_S)
        assert [completion.context for completion in completions] == [3]
        del found, completions, end
        keep.close()
        queue.close()
        gone = weakref.ref(queue)
        del queue
        assert_let_go(gone)


def test_a_batch_that_was_cleared_and_filled_again_has_only_its_new_requests(pair, keep):
    """Many times, and each time with the same room for elements."""
    source = memory(keep, pair.adapter, b"abcdefgh", Access.NONE)
    sink = memory(keep, pair.adapter, bytes(8))
    batch = ndpy.Batch(2)
    for turn in range(5):
        batch.clear()
        for part in (source[turn : turn + 1], source[turn + 1 : turn + 3]):
            batch.send(part, context=turn)
        assert list(batch.lengths) == [1, 2]
        assert list(batch.addresses) == [source.address + turn, source.address + turn + 1]
        for place in (0, 1):
            pair.server.queue_pair.receive(sink[4 * place : 4 * place + 4], context=place)
        pair.client.queue_pair.post(batch)
        succeed(pair.client.cq)
        received = succeed(pair.server.cq, 2)
        assert [completion.nbytes for completion in received] == [1, 2]
        assert bytes(sink.buffer[:1]) + bytes(sink.buffer[4:6]) == b"abcdefgh"[turn : turn + 3]


def test_a_batch_that_was_refused_is_posted_when_what_it_lacks_is_there(pair, keep):
    """A refusal changes nothing in the batch."""
    source = memory(keep, pair.adapter, b"abcdefgh", Access.NONE)
    sink = memory(keep, pair.adapter, bytes(16))
    limit = pair.client.queue_pair.limits.initiator_queue_depth
    batch = ndpy.Batch(limit)
    for _ in range(limit):
        batch.send(source[:1])
    for place in range(2):
        pair.server.queue_pair.receive(sink[place : place + 1])
    pair.client.queue_pair.send(source[7:8])
    with pytest.raises(ndpy.QueueFullError):
        pair.client.queue_pair.post(batch)
    succeed(pair.client.cq)
    batch.clear()
    batch.send(source[3:4], context=9)
    pair.client.queue_pair.post(batch)
    (sent,) = succeed(pair.client.cq)
    assert sent.context == 9
    succeed(pair.server.cq, 2)
    assert bytes(sink.buffer[:2]) == b"hd"


def test_an_array_shows_only_what_the_last_poll_took(pair, keep):
    source = memory(keep, pair.adapter, b"abcd", Access.NONE)
    sink = memory(keep, pair.adapter, bytes(16))
    array = ndpy.CompletionArray(8)
    for count in (4, 1, 3):
        for place in range(count):
            pair.server.queue_pair.receive(sink[place : place + 1], context=10 * count + place)
        for _ in range(count):
            pair.client.queue_pair.send(source[:1])
        succeed(pair.client.cq, count)
        taken: list[int] = []
        while len(taken) < count:
            pair.server.cq.poll_into(array)
            assert len(array) == len(array.contexts) == len(array.statuses)
            taken += array.contexts
        assert taken == [10 * count + place for place in range(count)]
        assert pair.server.cq.poll_into(array) == 0
        assert len(array) == 0 and list(array.contexts) == []


def test_a_token_of_a_region_that_was_closed_does_not_serve_the_next_one(pair, keep):
    """Also when the adapter gives the same place in its table to another region."""
    require(pair.adapter, ndpy.Capability.REGION_ACCESS)
    stale = pair.adapter.register(ndpy.alloc(64), Access.REMOTE_WRITE)
    token = stale.remote().token
    stale.close()
    target = memory(keep, pair.adapter, b"unharmed", Access.REMOTE_WRITE)
    tokens = {token}
    # soft0 has a table of its own, which gives a place again after some thousands.
    for _ in range(300 if has_kernel_driver(pair.adapter) else 9000):
        with pair.adapter.register(target.buffer, Access.REMOTE_WRITE) as region:
            assert region.remote().token not in tokens
            tokens.add(region.remote().token)
    last = keep(pair.adapter.register(target.buffer, Access.REMOTE_WRITE)).remote()
    source = memory(keep, pair.adapter, b"overwrit", Access.NONE)
    pair.client.queue_pair.write(source, ndpy.RemoteMemory(last.address, 8, token), context=5)
    assert_refused(pair.client, ndpy.Operation.WRITE, 5)
    assert bytes(target.buffer) == b"unharmed"
