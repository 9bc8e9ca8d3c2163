"""Batches over a provider that the test plays itself."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref

import pytest
from data_path_provider import (
    FLUSHED,
    MAX_LENGTH,
    OFFERED,
    PROTECTION,
    SIGNALED,
    WC_RECV,
    WR_READ,
    WR_SEND,
    WR_WRITE,
    Sent,
)
from posting_ends import REMOTE, Queues, Region, in_flight, receives, writes

import ndpy
from ndpy import Batch, Flags, Status
from ndpy.platforms.verbs.native_calls import lib

# ---- posting ----


def test_one_call_posts_all_requests_and_only_the_last_one_is_signaled(provider, queues):
    queues.post(writes(Region(), 3))
    call = provider.call()
    assert [(sent.opcode, sent.address, sent.length, sent.key) for sent in call] == [
        (WR_WRITE, 0x10000 + place, 8, 3) for place in range(3)
    ]
    assert [(sent.remote_address, sent.remote_key) for sent in call] == [(0x90000 + place, 9) for place in range(3)]
    assert [bool(sent.flags & SIGNALED) for sent in call] == [False, False, True]
    assert in_flight(queues) == 3


def test_the_operations_may_be_mixed_and_have_several_elements(provider, queues):
    region, batch = Region(), Batch(3, max_sge=2)
    batch.send([region[:4], region[8:12]])
    batch.read(region[:4], REMOTE)
    batch.send([])
    queues.post(batch)
    assert [(sent.opcode, sent.elements) for sent in provider.call()] == [(WR_SEND, 2), (WR_READ, 1), (WR_SEND, 0)]


def test_with_signal_all_each_request_has_its_own_flags(provider, queues):
    batch = Batch(3, signal_all=True)
    region = Region()
    batch.send(region[:4])
    batch.send(region[:4], flags=Flags.SILENT_SUCCESS)
    batch.send(region[:4])
    queues.post(batch)
    assert [bool(sent.flags & SIGNALED) for sent in provider.call()] == [True, False, True]


def test_silent_requests_alone_retire_in_the_end(provider, queues, cq):
    batch = Batch(2, signal_all=True)
    for _ in range(2):
        batch.send(Region()[:4], flags=Flags.SILENT_SUCCESS)
    for _ in range(20):
        queues.post(batch)
        for sent in provider.call():
            if sent.flags & SIGNALED:
                provider.complete_request(sent)
        assert cq.poll() == []
    assert in_flight(queues) == 0
    assert len(queues._posted_requests.initiator) == 0


@pytest.mark.parametrize("wanted", [1, 2, 64])
def test_a_poll_with_fewer_completions_than_it_may_take_has_emptied_the_queue(provider, queues, cq, wanted):
    region = Region()
    while True:
        queues.send(region[:4], flags=Flags.SILENT_SUCCESS)
        sent = Sent.from_buffer_copy(provider.sent)
        # Some silent ones are signaled, so that their slots are retired. The program gets nothing of these.
        if sent.flags & SIGNALED:
            break
    provider.complete_request(sent)
    queues.send(region[:4], context=5)
    provider.complete_request(Sent.from_buffer_copy(provider.sent))
    assert [completion.context for completion in cq.poll(wanted)] == [5]
    assert in_flight(queues) == 0


def test_a_completion_retires_the_whole_batch(provider, queues, cq):
    region = Region()
    gone = weakref.ref(region)
    queues.post(writes(region, 3))
    del region
    gc.collect()
    assert gone() is not None
    provider.complete_request(provider.call()[-1])
    (completion,) = cq.poll()
    assert (completion.context, completion.nbytes, completion.status) == (102, 8, Status.SUCCESS)
    assert in_flight(queues) == 0
    gc.collect()
    assert gone() is None


def test_a_batch_that_is_posted_again_and_again_is_prepared_once(provider, queues, cq):
    batch = writes(Region(), 2)
    identities = set()
    for _ in range(40):
        queues.post(batch)
        identities.update(sent.id for sent in provider.call())
        provider.complete_request(provider.call()[-1])
        assert len(cq.poll()) == 1
    assert len(identities) == 2


def test_postings_of_one_batch_that_overlap_end_one_after_the_other(provider, queues, cq):
    batch = writes(Region(), 2)
    for round in range(30):
        for _ in range(3):
            queues.post(batch)
        assert in_flight(queues) == 6, round
        for left in (4, 2, 0):
            provider.complete_request(provider.call()[-1])
            assert [completion.context for completion in cq.poll()] == [101]
            assert in_flight(queues) == left
    assert len(queues._posted_requests.initiator) == 0


def test_plain_requests_between_batches_keep_their_places(provider, queues, cq):
    region = Region()
    batch = writes(region, 2)
    for _ in range(30):
        queues.send(region[:4], context=1)
        plain = Sent.from_buffer_copy(provider.sent)
        queues.post(batch)
        listed = provider.call()
        queues.send(region[:4], context=2)
        for sent in (plain, listed[-1], provider.call()[0]):
            provider.complete_request(sent)
        assert [completion.context for completion in cq.poll()] == [1, 101, 2]
        assert in_flight(queues) == 0


def test_a_failed_request_in_the_middle_is_reported_with_its_own_context(provider, queues, cq):
    region = Region()
    queues.post(writes(region, 3))
    _, second, third = provider.call()
    provider.complete_request(second, status=PROTECTION)
    provider.complete_request(third, status=FLUSHED)
    completions = cq.poll()
    assert [(completion.context, completion.status) for completion in completions] == [
        (101, Status.ACCESS_VIOLATION),
        (102, Status.CANCELED),
    ]
    # The records that _collect_one() saw are those of the failed requests.
    assert [record.address - 0x10000 for record in cq.failed] == [1, 2]
    assert in_flight(queues) == 0


def test_a_batch_that_does_not_fit_posts_nothing(provider, queues, cq):
    batch = writes(Region(), 5)
    queues.post(batch)
    with pytest.raises(ndpy.QueueFullError, match="all 8 slots of the initiator queue"):
        queues.post(batch)
    assert in_flight(queues) == 5
    assert len(queues._posted_requests.initiator) == 5
    provider.complete_request(provider.call()[-1])
    cq.poll()
    queues.post(batch)
    with pytest.raises(ndpy.LimitExceededError, match="9 requests of the batch are more than the 8 slots"):
        queues.post(writes(Region(), 9))


def test_a_refusal_in_the_middle_says_how_many_were_posted(provider, queues, cq):
    provider.set(refused_place=2)
    with pytest.raises(ndpy.ProviderError, match="request 2 of the batch; the 2 before it were posted"):
        queues.post(writes(Region(), 4))
    assert in_flight(queues) == 2
    assert len(queues._posted_requests.initiator) == 2
    provider.set(refused_place=-1)
    # The provider may complete what it refused. Nobody hears of it.
    refused = provider.call()
    queues.send(Region()[:4], context=5)
    provider.complete_request(provider.call()[0])
    provider.complete_request(refused[1])
    assert [completion.context for completion in cq.poll()] == [5]
    assert in_flight(queues) == 0


def test_a_refused_list_is_never_used_for_another(provider, queues, cq):
    """The provider may complete what it has refused, also when all that it took has ended and the batch is gone."""
    provider.set(refused_place=1)
    with pytest.raises(ndpy.ProviderError):
        queues.post(writes(Region(), 2))
    provider.set(refused_place=-1)
    (refused,) = provider.call()
    queues.send(Region()[:4], context=5)
    provider.complete()
    assert [completion.context for completion in cq.poll()] == [5]
    assert in_flight(queues) == 0
    for _ in range(3):
        gc.collect()
        queues.post(writes(Region(), 2))
        used = provider.call()
        assert refused.id not in {sent.id for sent in used}
        provider.complete_request(used[-1])
        assert len(cq.poll()) == 1


def test_the_rest_of_a_batch_is_posted_singly_when_siw_ends_a_connection(provider, queues, cq):
    lib.ndpy_queue_pair_work_around_siw(queues._rings)
    provider.set(refused_place=0)
    queues.post(writes(Region(), 3, signal_all=True))
    assert in_flight(queues) == 3
    provider.set(refused_place=-1)
    assert lib.ndpy_cancel_rest(queues._rings, 0, provider.cq) == 3
    assert [completion.context for completion in cq.poll()] == [100, 101, 102]


def test_what_is_left_of_a_batch_is_cancelled(provider, queues, cq):
    region = Region()
    queues.send(region[:4], context=1)
    queues.post(writes(region, 3))
    queues.send(region[:4], context=2)
    assert lib.ndpy_cancel_rest(queues._rings, 0, provider.cq) == 5
    assert [completion.context for completion in cq.poll()] == [1, 102, 2]
    assert in_flight(queues) == 0
    assert len(queues._posted_requests.initiator) == 0


@pytest.mark.parametrize(
    ("fill", "error", "message"),
    [
        (lambda batch, region: batch.send(region[:4], flags=0x40), ndpy.InvalidFlagsError, "takes the flags"),
        (lambda batch, region: batch.send([region[:1]] * 4), ndpy.LimitExceededError, "4 elements are more than the 3"),
        (lambda batch, region: batch.send(region[: MAX_LENGTH + 1]), ndpy.LimitExceededError, "1001 bytes are more"),
        (
            lambda batch, region: batch.send(region[:65], flags=Flags.INLINE),
            ndpy.LimitExceededError,
            "65 bytes.*inline",
        ),
        (lambda batch, region: batch.send(Region(token=1 << 32)[:4]), ValueError, "a token of this adapter"),
    ],
)
def test_a_request_beyond_the_limits_of_the_queue_pair_is_named(provider, queues, fill, error, message):
    region, batch = Region(), Batch(4, max_sge=4)
    batch.send(region[:4])
    fill(batch, region)
    with pytest.raises(error, match=message) as caught:
        queues.post(batch)
    assert "request 1 of the batch" in str(caught.value)
    assert in_flight(queues) == 0


# ---- what a batch takes ----


@pytest.mark.parametrize(
    ("fill", "error", "message"),
    [
        (lambda batch: batch.send(b"abc"), TypeError, "an element of a batch is a region"),
        (lambda batch: batch.send(Region()[:4], context=-1), ValueError, "context is 0 to"),
        (lambda batch: batch.send(Region()[:4], context=1 << 64), ValueError, "context is 0 to"),
        (lambda batch: batch.send(Region()[:4], context="a"), TypeError, "context is an integer"),
        (lambda batch: batch.send(Region()[:4], flags=0x100), ValueError, "flags is 0 to"),
        (lambda batch: batch.write(Region()[:4]), TypeError, "needs the argument 'remote'"),
        (lambda batch: batch.write(Region()[:4], 7), TypeError, "a RemoteMemory"),
        (lambda batch: batch.write(Region()[:101], REMOTE), ndpy.ElementRangeError, "101 bytes do not fit the 100"),
        (lambda batch: batch.send([Region()[:4]] * 2), ValueError, "at most 1 elements"),
        (lambda batch: batch.receive(Region()[:4]), ValueError, "two batches"),
        (lambda batch: batch.send(Region(1 << 33)), ValueError, "4294967295 bytes"),
        (
            lambda batch: [batch.send(Region()[:4]) for _ in range(3)],
            ValueError,
            "the batch is full: it was made for 3",
        ),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_the_batch_as_it_was(fill, error, message):
    batch = Batch(3)
    batch.send(Region()[:4], context=8)
    with pytest.raises(error, match=message):
        fill(batch)
    assert list(batch.contexts)[:1] == [8]
    assert list(batch.lengths)[:1] == [4]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((0,), {}), ((-1,), {}), ((1 << 21,), {}), ((1,), {"max_sge": -1}), ((1 << 19,), {"max_sge": 4})],
)
def test_a_batch_has_a_capacity(arguments, options):
    with pytest.raises(ValueError, match="a batch holds"):
        Batch(*arguments, **options)


def test_an_empty_batch_cannot_be_posted(queues):
    with pytest.raises(ValueError, match="the batch is empty"):
        queues.post(Batch(1))
    with pytest.raises(TypeError, match="takes a Batch"):
        queues.post([])


def test_a_batch_that_was_cleared_can_be_filled_again(provider, queues):
    region = Region()
    batch = writes(region, 2)
    gone = weakref.ref(region)
    del region
    batch.clear()
    assert len(batch) == 0
    assert gone() is None
    batch.receive(Region()[:4])
    queues.post(batch)
    assert in_flight(queues, 1) == 1


@pytest.mark.parametrize("first", ["the batch", "the queue pair"])
def test_a_batch_and_what_was_posted_of_it_may_end_in_any_order(provider, queues, cq, first):
    """Each keeps the memory that it may still need, and no longer."""
    region = Region()
    kept = weakref.ref(region)
    batch = writes(region, 2)
    queues.post(batch)
    del region
    if first == "the batch":
        del batch
        gc.collect()
        assert kept() is not None
        provider.complete_request(provider.call()[-1])
        assert [completion.context for completion in cq.poll()] == [101]
        gc.collect()
        assert kept() is None
        return
    queues._detach()
    gc.collect()
    assert kept() is not None
    assert list(batch.contexts) == [100, 101]
    batch.clear()
    assert list(batch.contexts) == []


def posted_lists() -> int:
    gc.collect()
    return sum(type(each).__name__ == "BatchList" for each in gc.get_objects())


def end_all(queues: Queues) -> None:
    """Let go of what is in flight, which keeps its list."""
    for records in (queues._posted_requests.initiator, queues._posted_requests.receive):
        while len(records):
            records.popleft()


def test_a_batch_forgets_queue_pairs_that_were_closed(provider):
    region = Region()
    before, batches = posted_lists(), [receives(region, 2), receives(region, 2), writes(region, 2)]
    ends = [Queues(provider) for _ in range(3)]
    for batch in batches:
        for queues in ends:
            queues.post(batch)
            end_all(queues)
    assert posted_lists() == before + 9
    for left, queues in ((6, ends[0]), (3, ends[2])):
        queues._detach()
        assert posted_lists() == before + left
    # The other one is as before. It was the last one of no batch.
    for batch in batches:
        ends[1].post(batch)
    assert posted_lists() == before + 3
    batches.pop().clear()
    del batches[1], batch
    ends[1]._detach()
    # Those that are in flight.
    assert posted_lists() == before + 3
    end_all(ends[1])
    assert posted_lists() == before


def test_a_queue_pair_forgets_batches_that_were_dropped(provider, queues, cq):
    def references() -> int:
        gc.collect()
        return sum(type(each) is weakref.ref for each in gc.get_objects())

    before = 0
    for turn in range(50):
        queues.receive_many([Region()[:8]])
        provider.complete_request(provider.call()[0], WC_RECV)
        assert len(cq.poll()) == 1
        if turn == 5:
            before = references()
    assert references() <= before


# ---- columns ----


def test_columns_show_and_change_the_requests(provider, queues):
    batch = writes(Region(), 3)
    assert list(batch.contexts) == [100, 101, 102]
    assert list(batch.addresses) == [0x10000, 0x10001, 0x10002]
    assert list(batch.lengths) == [8, 8, 8]
    assert list(batch.remote_addresses) == [0x90000, 0x90001, 0x90002]
    batch.contexts = array.array("Q", [7, 8, 9])
    batch.lengths = [1, 2, 3]
    batch.addresses[1] = 0x10100
    batch.remote_addresses[2] = 0x90003
    queues.post(batch)
    assert [(sent.address, sent.length, sent.remote_address) for sent in provider.call()] == [
        (0x10000, 1, 0x90000),
        (0x10100, 2, 0x90001),
        (0x10002, 3, 0x90003),
    ]


def test_a_change_between_two_posts_is_seen_and_leaves_the_posted_requests_alone(
    provider,
    queues,
    cq,
):
    batch = writes(Region(), 1)
    column = batch.contexts
    for context in (5, 6, 6, 7):
        column[0] = context
        queues.post(batch)
        provider.complete_request(provider.call()[0])
    assert [completion.context for completion in cq.poll()] == [5, 6, 6, 7]


@pytest.mark.parametrize(
    ("column", "number", "message"),
    [
        (
            "addresses",
            0xFFFF,
            "request 1 of the batch: 8 bytes at 0xffff are outside the region of 4096 bytes at 0x10000",
        ),
        ("addresses", 0x10000 + 4089, "outside the region"),
        ("addresses", (1 << 64) - 1, "outside the region"),
        ("lengths", 4097, "outside the region"),
        ("lengths", 101, "outside the remote memory"),
        ("lengths", (1 << 64) - 1, "outside the region"),
        ("remote_addresses", 0x8FFFF, "outside the remote memory"),
        ("remote_addresses", 0x90000 + 93, "request 1 of the batch: 8 bytes at .* outside the remote memory of 100"),
        ("remote_addresses", (1 << 64) - 1, "outside the remote memory"),
    ],
)
def test_a_number_outside_of_the_memory_is_refused(provider, queues, column, number, message):
    batch = Batch(2)
    region = Region()
    for _ in range(2):
        batch.write(region[0:8], REMOTE)
    former = getattr(batch, column)[1]
    getattr(batch, column)[1] = number
    with pytest.raises(ndpy.ElementRangeError, match=message):
        queues.post(batch)
    assert not queues._lock.locked()
    getattr(batch, column)[1] = former
    queues.post(batch)
    assert in_flight(queues) == 2


def test_a_column_takes_as_many_numbers_as_there_are_requests():
    batch = writes(Region(), 2)
    for wrong in ([1], array.array("Q", [1, 2, 3])):
        with pytest.raises(ValueError, match="contexts takes 2 numbers"):
            batch.contexts = wrong
    for wrong in (["a", "b"], [1, -1], [1, 1 << 64], 5):
        with pytest.raises((TypeError, ValueError)):
            batch.contexts = wrong
    with pytest.raises(AttributeError):
        del batch.contexts
    assert list(batch.contexts) in ([100, 101], [1, 101])


def test_a_column_cannot_change_the_size_of_its_memory():
    batch = writes(Region(), 2)
    owner = batch.contexts.obj
    with pytest.raises(BufferError):
        owner.extend(b"1234")


@pytest.mark.parametrize("column", ["contexts", "remote_addresses", "addresses", "lengths"])
@pytest.mark.parametrize("order", ["__ctype_le__", "__ctype_be__"])
@pytest.mark.parametrize("kind", [ctypes.c_uint64, ctypes.c_int64], ids=["unsigned", "signed"])
def test_a_column_takes_numbers_in_either_byte_order(column, order, kind):
    batch, numbers = writes(Region(), 3), [1, 0x0102030405060708, 0x7F00000000000001]
    given = (getattr(kind, order) * 3)(*numbers)
    assert memoryview(given).format[0] == ("<" if order == "__ctype_le__" else ">")
    setattr(batch, column, given)
    assert list(getattr(batch, column)) == numbers
    with pytest.raises(ValueError, match=f"{column} takes 3 numbers"):
        setattr(batch, column, (getattr(kind, order) * 2)(1, 2))
    assert list(getattr(batch, column)) == numbers


@pytest.mark.parametrize("items", [ctypes.c_double, ctypes.c_uint32.__ctype_be__, ctypes.c_void_p, ctypes.c_char * 8])
def test_a_column_takes_no_bytes_of_other_items(items):
    batch = writes(Region(), 2)
    given = (items * 2)()
    if items is ctypes.c_uint32.__ctype_be__:
        # They are converted one by one, as the items of any sequence of integers.
        given[:] = [5, 6]
        batch.contexts = given
        assert list(batch.contexts) == [5, 6]
    else:
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            batch.contexts = given
        assert list(batch.contexts) == [100, 101]


@pytest.mark.parametrize("kind", ["uint64", "int64", ">u8", "<u8", ">i8"])
def test_numpy_arrays_are_columns(provider, queues, kind):
    numpy = pytest.importorskip("numpy")
    batch = writes(Region(), 3)
    batch.contexts = numpy.arange(3, dtype=kind)
    numpy.asarray(batch.contexts)[1] += 41
    batch.remote_addresses = numpy.asarray(batch.remote_addresses) + numpy.arange(3, dtype="uint64")
    assert list(batch.contexts) == [0, 42, 2]
    with pytest.raises((TypeError, ValueError)):
        batch.contexts = numpy.zeros(3, dtype="float64") + 0.5
    queues.post(batch)
    assert [sent.remote_address for sent in provider.call()] == [0x90000, 0x90002, 0x90004]


# ---- receives ----


def test_receives_are_posted_in_one_call(provider, queues, cq):
    queues.receive_many([Region()[:8], [Region()[:4], Region()[4:8]]], contexts=[5, 6])
    assert [sent.elements for sent in provider.call()] == [1, 2]
    for sent in provider.call():
        provider.complete_request(sent, WC_RECV, nbytes=3)
    assert [(completion.context, completion.nbytes) for completion in cq.poll()] == [(5, 3), (6, 3)]
    queues.receive_many([])
    assert in_flight(queues, 1) == 0


def test_a_queue_pair_with_a_shared_queue_takes_no_batch_of_receives(queues):
    queues.srq = object()  # type: ignore[assignment]
    lib.ndpy_queue_pair_offer(queues._rings, OFFERED & ~(1 << lib.NDPY_RECEIVE))
    with pytest.raises(ndpy.UnsupportedError, match="shared receive queue"):
        queues.post(receives(Region(), 1))
    queues.srq = None
