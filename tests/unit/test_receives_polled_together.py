"""Receives that are polled together. The data path says which of them are alike, and the core ends these at once."""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from data_path_provider import NUMBER, PROTECTION, WC_GRH, WC_RECV, WC_SEND, WC_WITH_INV, Provider
from posting_ends import Queue, Queues, Region, in_flight, receives

from ndpy import CompletionArray
from ndpy.platforms.verbs.native_calls import ffi, lib

OTHER_NUMBER = NUMBER + 1
DEPTH = 100


class Ends:
    """Two queue pairs whose receives report to one queue, and what the queue still has to report."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        makers = [
            SimpleNamespace(
                queue_pair=lambda depth, connection, number=number: provider.queue_pair(depth, connection, number)
            )
            for number in (NUMBER, OTHER_NUMBER)
        ]
        self.queues: list[Any] = [Queues(maker, depth=DEPTH) for maker in makers]  # type: ignore[arg-type]
        self.queue = Queue(provider, self.queues[0])
        self.queue._posted_requests[OTHER_NUMBER] = self.queues[1]._posted_requests
        self.posted: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.completed: deque[tuple[int, int, Any]] = deque()
        self.next_context = 1000
        self.array = CompletionArray(128)

    def receive(self, count: int, which: int = 0) -> None:
        for _ in range(count):
            self.queues[which].receive(Region()[:4], context=self.next_context)
            self.posted[which].append((self.provider.sent.id, self.next_context))
            self.next_context += 1

    def post_refused(self) -> int:
        """Post a receive that the provider refuses. Returns its ID."""
        self.provider.set(post_result=errno.ENOMEM)
        with pytest.raises(OSError):
            self.queues[0].receive(Region()[:4], context=5)
        self.provider.set(post_result=0)
        return int(self.provider.sent.id)

    def complete(self, count: int, which: int = 0, *, status: int = 0, flags: int = WC_GRH) -> None:
        for _ in range(count):
            id, context = self.posted[which].popleft()
            nbytes = context % 251
            self.provider.library.complete(id, WC_RECV, status, nbytes, flags, 9)
            self.completed.append((context, nbytes, self.queues[which]))

    def expect(self, count: int) -> list[tuple[int, int, Any]]:
        return [self.completed.popleft() for _ in range(min(count, len(self.completed)))]

    def check(self, completions: Any, count: int) -> None:
        assert [(each.context, each.nbytes, each.queue_pair) for each in completions] == self.expect(count)

    def take(self, count: int) -> None:
        """Poll into the array. So many have come, and no others."""
        assert self.queue.poll_into(self.array) == count
        self.check(self.array, count)

    def poll_alike(self) -> list[int]:
        """Poll natively. Returns the contexts of the receives that come as alike."""
        out, alike = ffi.new("struct ndpy_completion[]", 64), ffi.new("uint32_t *")
        assert lib.ndpy_poll(self.provider.cq, out, 64, alike) >= alike[0]
        return [out[place].context for place in range(alike[0])]

    def close(self) -> None:
        self.queue._detach()
        for queues in self.queues:
            queues._detach()


@pytest.fixture
def ends(provider: Provider) -> Iterator[Ends]:
    ends = Ends(provider)
    yield ends
    ends.close()


@pytest.mark.parametrize("looks", ["at once", "later", "through a column"])
def test_an_array_has_what_the_receives_were_posted_with(ends, looks):
    array = CompletionArray(64)
    ends.receive(40)
    column = None
    for _ in range(10):
        ends.complete(30)
        assert ends.queue.poll_into(array) == 30
        assert in_flight(ends.queues[0], 1) == 10
        assert len(ends.queues[0]._posted_requests.receive) == 10
        if looks == "later":
            # Their slots are used again.
            ends.receive(60)
            ends.complete(60)
        assert array.all_ok
        expected = ends.expect(30)
        if looks == "through a column":
            # The one that was held while they came, from the second time on.
            column = column or array.contexts
            assert list(column) == [context for context, _, _ in expected]
        assert [(each.context, each.nbytes, each.queue_pair) for each in array] == expected
        if looks == "later":
            ends.take(60)
        ends.receive(30)


@pytest.mark.parametrize("before", [0, 1, 5, 7, 8])
@pytest.mark.parametrize("left", [1, 3, 8])
def test_receives_that_are_in_flight_when_the_ring_grows_keep_their_contexts(ends, before, left):
    for _ in range(before):
        ends.receive(1)
        ends.complete(1)
        ends.take(1)
    ends.receive(left)
    for more in (1, 7, 20, DEPTH + 1 - 28 - left):
        ends.receive(more)
    ends.complete(DEPTH + 1)
    ends.take(DEPTH + 1)


@pytest.mark.parametrize("before", [0, 1, 5, 7, 8])
@pytest.mark.parametrize("left", [1, 3, 8])
def test_they_are_alike_when_the_ring_has_grown(ends, before, left):
    for _ in range(before):
        ends.receive(1)
        ends.complete(1)
        assert ends.poll_alike() == []
    ends.completed.clear()
    ends.receive(left)
    ends.receive(40 - left)
    ends.complete(40)
    assert ends.poll_alike() == [context for context, _, _ in ends.completed]
    assert in_flight(ends.queues[0], 1) == 0
    ends.receive(DEPTH + 1)
    ends.completed.clear()
    ends.complete(2)
    assert ends.poll_alike() == [context for context, _, _ in ends.completed]


def test_receives_of_two_queue_pairs_are_not_alike(ends):
    ends.receive(4)
    ends.receive(4, 1)
    ends.complete(3)
    ends.complete(2, 1)
    assert ends.poll_alike() == [1000, 1001, 1002]


def test_receives_of_two_queue_pairs_are_told_apart(ends):
    ends.receive(20)
    ends.receive(20, 1)
    for which in (0, 1, 0, 0, 1, 0, 1, 1):
        ends.complete(1, which)
    ends.take(8)
    # The first and the last are of one queue pair.
    for which in (0, 1, 1, 0):
        ends.complete(1, which)
    ends.take(4)
    assert [in_flight(queues, 1) for queues in ends.queues] == [14, 14]


def test_the_next_number_may_be_that_of_another_queue_pair(ends):
    ends.receive(3)
    ends.receive(3, 1)
    ends.complete(1, 1)
    ends.take(1)
    ends.complete(1, 0)
    ends.complete(1, 1)
    ends.take(2)
    assert [in_flight(queues, 1) for queues in ends.queues] == [2, 1]


def test_receives_that_come_out_of_order_end_those_before_them_once(ends):
    ends.receive(4)
    first = ends.posted[0].popleft()
    ends.complete(2)
    ends.take(2)
    assert (in_flight(ends.queues[0], 1), len(ends.queues[0]._posted_requests.receive)) == (1, 1)
    ends.posted[0].appendleft(first)
    ends.complete(2)
    ends.take(2)
    assert (in_flight(ends.queues[0], 1), len(ends.queues[0]._posted_requests.receive)) == (0, 0)


@pytest.mark.parametrize("singly", [1, 5, 20])
def test_receives_of_a_batch_come_between_them(ends, singly):
    """The places of a batch's receives still have what was posted there before."""
    array, batch = CompletionArray(128), receives(Region(), 5)
    for _ in range(30):
        ends.receive(singly)
        ends.complete(singly)
        ends.queues[0].post(batch)
        for place, sent in enumerate(ends.provider.call()):
            ends.provider.complete_request(sent, WC_RECV, nbytes=place, flags=WC_GRH)
            ends.completed.append((100 + place, place, ends.queues[0]))
        ends.receive(3)
        ends.complete(3)
        while ends.completed:
            ends.check(array, ends.queue.poll_into(array))
        assert in_flight(ends.queues[0], 1) == 0


def test_sends_that_are_polled_together(ends):
    array = CompletionArray(8)
    for context in range(3):
        ends.queues[0].send(Region()[:4], context=context)
        ends.provider.complete(WC_SEND)
    assert ends.queue.poll_into(array) == 3
    assert list(array.contexts) == [0, 1, 2]
    assert in_flight(ends.queues[0]) == 0


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("what", ["failed", "invalidated"])
def test_one_special_receive_among_them_is_looked_at(ends, place, what):
    array = CompletionArray(8)
    ends.receive(5)
    for number in range(5):
        status = PROTECTION if number == place and what == "failed" else 0
        ends.complete(1, status=status, flags=WC_WITH_INV if number == place and what == "invalidated" else 0)
    assert ends.queue.poll_into(array) == 5
    assert list(array.contexts) == [context for context, _, _ in ends.expect(5)]
    assert len(ends.queue.failed) == 1
    assert array.all_ok == (what == "invalidated")
    assert in_flight(ends.queues[0], 1) == 0


def test_a_send_among_them_is_told_apart(ends):
    array = CompletionArray(8)
    ends.receive(3)
    ends.complete(1)
    ends.queues[0].send(Region()[:4], context=1)
    ends.provider.complete(WC_SEND)
    ends.complete(2)
    assert ends.queue.poll_into(array) == 4
    assert [each.context for each in array] == [1000, 1, 1001, 1002]
    assert (in_flight(ends.queues[0], 1), in_flight(ends.queues[0], 0)) == (0, 0)


def test_a_receive_that_the_provider_refused_leaves_no_trace(ends):
    ends.receive(2)
    ends.post_refused()
    ends.receive(2)
    ends.complete(4)
    ends.take(4)


def test_a_receive_that_the_provider_refused_and_completes_all_the_same_is_none(ends):
    """libsiw keeps what the kernel refused, and flushes it in the end."""
    ends.receive(1)
    refused = ends.post_refused()
    ends.complete(1)
    ends.provider.library.complete(refused, WC_RECV, 0, 0, 0, 0)
    ends.take(1)
    assert in_flight(ends.queues[0], 1) == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_posting_and_polling_reports_all_of_them(ends, seed):
    rng = random.Random(seed)
    array, held = CompletionArray(rng.randint(2, 70)), CompletionArray(5)
    ends.receive(5)
    ends.complete(5)
    ends.queue.poll_into(held)
    column = held.nbytes
    assert list(column) == [nbytes for _, nbytes, _ in ends.expect(5)]
    for _ in range(300):
        which = rng.randrange(2)
        match rng.randrange(5):
            case 0:
                free = DEPTH + 1 - in_flight(ends.queues[which], 1)
                ends.receive(min(free, rng.randint(1, 40)), which)
            case 1:
                ends.complete(min(len(ends.posted[which]), rng.randint(1, 40)), which)
            case 2:
                ends.queue.poll_into(array)
                ends.check(array, array.capacity)
            case 3:
                wanted = rng.randint(1, 70)
                ends.check(ends.queue.poll(wanted), wanted)
            case _:
                count = ends.queue.poll_into(held)
                assert list(column[:count]) == [nbytes for _, nbytes, _ in ends.expect(5)]
    for queues, posted in zip(ends.queues, ends.posted, strict=True):
        assert lib.ndpy_queue_pair_in_flight(queues._rings, 1) >= len(posted)
