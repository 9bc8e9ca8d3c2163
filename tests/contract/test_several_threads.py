"""One object that several threads use at once. Nothing is lost, nothing comes twice, and nothing is left over.

On free-threaded Python (make test-freethreaded) the threads do run at once, so that is where the counts are high.
"""

from __future__ import annotations

import threading

import pytest
from kit.helpers import DEADLINE_S, HAS_GIL, Pair, connect_pair, expose, memory, require, rounds, succeed
from kit.threads import Elsewhere, in_threads

import ndpy
from ndpy import Access

THREADS = 4
ROUNDS = rounds(20_000, 1000) if HAS_GIL else rounds(1_000_000, 60_000)
BATCH = 8

pytestmark = pytest.mark.timeout(rounds(1200, 240))


def post(act) -> None:
    """Post a request. Try again while the queue is full."""
    while True:
        try:
            return act()
        except ndpy.QueueFullError:
            threading.Event().wait(0.0001)


def take_all(cq: ndpy.CompletionQueue, expected: int, into: list[int], lock: threading.Lock, by_array: bool) -> None:
    """Take completions until all threads together have taken `expected`."""
    array = ndpy.CompletionArray(16)
    while len(into) < expected:
        if by_array:
            cq.poll_into(array)
            array.raise_for_status()
            got = list(array.contexts)
        else:
            completions = cq.poll(5)
            for completion in completions:
                completion.raise_for_status()
            got = [completion.context for completion in completions]
        if got:
            with lock:
                into += got
        else:
            threading.Event().wait(0.0001)


def expect_each_once(taken: list[int], count: int) -> None:
    assert len(taken) == count
    assert sorted(taken) == list(range(count))


@pytest.fixture
def deep(keep, adapter) -> Pair:
    return connect_pair(keep, adapter, initiator_queue_depth=128, receive_queue_depth=128, cq_depth=1024)


def test_threads_post_to_one_queue_pair_while_others_poll_its_queue(adapter, keep, deep):
    source = memory(keep, adapter, bytes(range(64)))
    sink = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    remote = expose(keep, deep.server, sink)
    shared, queue_pair, cq = source[0:8], deep.client.queue_pair, deep.client.cq
    taken: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        if number >= THREADS:
            take_all(cq, THREADS * ROUNDS, taken, lock, number % 2 == 1)
            return
        for place in range(ROUNDS):
            # Each thread's own element, or the one of all threads.
            element = source[number * 8 : number * 8 + 8] if place % 3 else shared
            context = number * ROUNDS + place
            post(lambda e=element, c=context: queue_pair.write(e, remote[0:8], context=c))

    in_threads(THREADS + 2, work, rounds(1000, 200))
    expect_each_once(taken, THREADS * ROUNDS)
    assert len(queue_pair._posted_requests.initiator) == 0


def test_threads_post_one_batch_to_one_queue_pair_and_change_its_columns(adapter, keep, deep):
    source = memory(keep, adapter, bytes(range(64)))
    sink = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    remote = expose(keep, deep.server, sink)
    batch = ndpy.Batch(BATCH, signal_all=True)
    for place in range(BATCH):
        batch.write(source[place * 8 : place * 8 + 8], remote[place * 8 : place * 8 + 8], context=place)
    queue_pair, cq = deep.client.queue_pair, deep.client.cq
    count = ROUNDS // BATCH
    taken: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        if number == THREADS:
            take_all(cq, THREADS * count * BATCH, taken, lock, True)
            return
        for turn in range(count):
            if number == 0 and turn % 4 == 0:
                batch.contexts = list(range(BATCH))
            post(lambda: queue_pair.post(batch))

    in_threads(THREADS + 1, work, rounds(1000, 200))
    assert sorted(taken) == sorted(list(range(BATCH)) * THREADS * count)
    assert len(queue_pair._posted_requests.initiator) == 0


def test_two_batches_posted_one_by_one_do_not_share_the_last_room(adapter, keep, monkeypatch):
    """The second one comes when the first one has found that there is room.
    Some providers take each request by itself.
    """
    pair = connect_pair(keep, adapter, initiator_queue_depth=8, cq_depth=64)
    queue_pair = pair.client.queue_pair
    sink = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    source, remote = memory(keep, adapter, bytes(64)), expose(keep, pair.server, sink)
    batches = [ndpy.Batch(6, signal_all=True) for _ in range(2)]
    for number, batch in enumerate(batches):
        for place in range(6):
            batch.write(source[0:8], remote[0:8], context=6 * number + place)
    require_room = queue_pair._require_room
    second = Elsewhere(lambda: queue_pair._post_singly(batches[1], 0))

    def with_another(*arguments):
        require_room(*arguments)
        if not second.thread.ident:
            second.start()
            second.thread.join(0.5)

    monkeypatch.setattr(queue_pair, "_require_room", with_another)
    queue_pair._post_singly(batches[0], 0)
    with pytest.raises(ndpy.QueueFullError, match=r"."):
        second.result()
    assert sorted(completion.context for completion in succeed(pair.client.cq, 6)) == list(range(6))
    assert pair.client.cq.poll() == []


def test_threads_fill_and_clear_a_batch_that_others_post(adapter, keep, deep):
    """A post takes the batch as it is at one moment, or says that it is empty or was changed."""
    source = memory(keep, adapter, bytes(64))
    sink = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    remote = expose(keep, deep.server, sink)
    batch = ndpy.Batch(BATCH)
    queue_pair, cq = deep.client.queue_pair, deep.client.cq
    posted = [0, 0]
    taken = 0
    stop = threading.Event()

    def work(number: int) -> None:
        nonlocal taken
        if number == 0:
            for _ in range(ROUNDS):
                batch.clear()
                for place in range(BATCH // 2):
                    batch.write(source[place : place + 8], remote[0:8])
            stop.set()
        elif number == 1:
            while not stop.is_set():
                for completion in cq.poll():
                    completion.raise_for_status()
                    taken += 1
        else:
            while not stop.is_set():
                try:
                    queue_pair.post(batch)
                    posted[number - 2] += 1
                except ndpy.QueueFullError:
                    continue
                except (ValueError, RuntimeError) as error:
                    assert "batch" in str(error)

    in_threads(4, work, rounds(1000, 200))
    deadline = threading.Event()
    while len(queue_pair._posted_requests.initiator):
        for completion in cq.wait(DEADLINE_S):
            completion.raise_for_status()
            taken += 1
        deadline.wait(0.001)
    assert (taken > 0) == any(posted)


def test_threads_slice_register_and_close_regions_of_one_adapter(adapter, keep):
    shared = memory(keep, adapter, 4096)
    count = max(ROUNDS // 3, 50)

    def work(number: int) -> None:
        for turn in range(count):
            with adapter.register(bytearray(64)) as region:
                assert len(adapter._own_children()) >= 1
                element = region[turn % 8 : turn % 8 + 8]
                assert (element.address - region.address, element.length) == (turn % 8, 8)
            element = shared[number * 8 : number * 8 + turn % 64]
            assert (element.address - shared.address, element.length) == (number * 8, turn % 64)
            assert region._serial != shared._serial

    in_threads(THREADS, work, rounds(1000, 200))
    assert adapter._own_children() == [shared]


def test_threads_close_one_region_while_others_send_its_bytes_inline(adapter, keep):
    """A post comes before the close, or is refused by it. What it sends are the bytes of the region."""
    require(adapter, ndpy.Capability.INLINE)
    deep = connect_pair(keep, adapter, initiator_queue_depth=64, inline_data_size=8, cq_depth=256)
    sink = memory(keep, adapter, 8, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    remote = expose(keep, deep.server, sink)
    cq, queue_pair = deep.client.cq, deep.client.queue_pair
    for _ in range(rounds(3000, 40)):
        region = adapter.register(bytearray(b"x" * 4096))

        def work(number: int, region=region) -> None:
            if number < 2:
                region.close()
                assert region.closed
                return
            try:
                for _ in range(8):
                    queue_pair.write(region[0:8], remote, flags=ndpy.Flags.INLINE)
            except ndpy.ClosedError:
                # The close has begun. When it has ended, `closed` says so.
                assert region._defunct is not None

        in_threads(4, work)
        while len(queue_pair._posted_requests.initiator):
            for completion in cq.wait(DEADLINE_S):
                completion.raise_for_status()
        assert bytes(sink.buffer) in (bytes(8), b"x" * 8)


def test_threads_lease_from_one_cache(adapter, cache):
    buffers = [ndpy.alloc(4096) for _ in range(2)]
    for buffer in buffers:
        cache.local(buffer).release()
    before = cache.stats
    released = threading.Barrier(THREADS)

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            with cache.local(buffers[(number + turn) % 2]) as lease:
                assert lease[0:8].length == 8
        released.wait(DEADLINE_S)

    in_threads(THREADS, work, rounds(1000, 200))
    after = cache.stats
    assert after.hits - before.hits == THREADS * ROUNDS
    assert after.misses == before.misses
    assert {entry.uses for entry in cache._entries} == {0}


def test_a_lease_that_threads_release_together_is_released_once(adapter, cache):
    buffer = ndpy.alloc(4096)
    for _ in range(rounds(5000, 100)):
        lease = cache.local(buffer)
        in_threads(3, lambda _, lease=lease: lease.release())
        assert {entry.uses for entry in cache._entries} == {0}


def test_threads_find_in_a_cache_what_others_invalidate(adapter, cache):
    buffer = ndpy.alloc(4096)
    stop = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            for _ in range(ROUNDS // 4):
                cache.invalidate(buffer)
            stop.set()
            return
        while not stop.is_set():
            with cache.local(buffer) as lease:
                assert not lease.region.closed
                assert lease[0:8].length == 8

    in_threads(THREADS, work, rounds(1000, 200))
    cache.invalidate(buffer)
    assert cache.stats.entries == 0
    assert not cache._entries
