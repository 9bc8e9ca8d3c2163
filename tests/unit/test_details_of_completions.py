"""Completion queues whose completions bring timestamps and tags. The provider has no device; it stamps completion n
with 1000 n.
"""

from __future__ import annotations

import errno

import pytest
from fake_verbs import connected
from kit import linux_only as linux_only
from kit.deadlines import DEADLINE_S
from kit.helpers import interrupted

import ndpy
from ndpy import Capability, CompletionDetails
from ndpy.platforms.verbs.native_calls import lib
from ndpy.vocabulary.quirks import Quirk

SERVER = ("127.0.0.1", 4791)
# enum ibv_create_cq_wc_flags, enum ibv_create_cq_attr_flags.
WITH_TIMESTAMP, WITH_FLOW_TAG, WITH_WALL_CLOCK = 1 << 7, 1 << 9, 1 << 11
SINGLE_THREADED = 1
EPOCH_NS, TAG = 1_700_000_000_000_000_000, 0x10000
EVERYTHING = CompletionDetails.TIMESTAMP | CompletionDetails.WALL_CLOCK | CompletionDetails.FLOW_TAG
OF_DETAILS = Capability.TIMESTAMPS | Capability.WALL_CLOCK_TIMESTAMPS | Capability.FLOW_TAGS


@pytest.fixture
def adapter(fake):
    fake.have_address()
    fake.extended.queues = 1
    fake.extended.wc_flags = WITH_TIMESTAMP | WITH_FLOW_TAG | WITH_WALL_CLOCK
    with fake.open() as adapter:
        yield adapter


def make_queue(adapter, details=EVERYTHING, **options):
    return adapter.create_completion_queue(64, details=details, **options)


@pytest.fixture
def queue(adapter):
    with make_queue(adapter) as queue:
        yield queue


queue_pair = connected


def receive(fake, queue_pair, count, first=0, **options):
    """Complete so many receives, with contexts that begin at `first`."""
    for context in range(first, first + count):
        queue_pair.receive([], context=context)
        assert fake.complete(queue_pair, **options)


# ---- what is asked for ----


@pytest.mark.parametrize(
    ("details", "flags"),
    [
        (CompletionDetails.TIMESTAMP, WITH_TIMESTAMP),
        (CompletionDetails.WALL_CLOCK, WITH_WALL_CLOCK),
        (CompletionDetails.FLOW_TAG, WITH_FLOW_TAG),
        (EVERYTHING, WITH_TIMESTAMP | WITH_WALL_CLOCK | WITH_FLOW_TAG),
    ],
    ids=str,
)
def test_a_queue_is_made_with_the_details_that_the_program_wants(fake, adapter, details, flags):
    make_queue(adapter, details).close()
    assert (fake.extended.created_with, fake.extended.created_flags) == (flags, 0)


def test_a_single_threaded_queue_brings_nothing_more(fake, adapter):
    with (
        adapter.create_completion_queue(8, single_threaded=True) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
    ):
        assert (fake.extended.created_with, fake.extended.created_flags) == (0, SINGLE_THREADED)
        receive(fake, queue_pair, 1, nbytes=5)
        (completion,) = queue.poll()
        assert (completion.timestamp, completion.wall_clock_ns, completion.flow_tag) == (None, None, None)
        assert completion.nbytes == 5


def test_a_plain_queue_is_made_by_the_plain_call(fake, adapter):
    fake.extended.created_with = -1
    with adapter.create_completion_queue(8) as queue, adapter.create_queue_pair(queue) as queue_pair:
        receive(fake, queue_pair, 1)
        (completion,) = queue.poll()
        assert (completion.timestamp, fake.extended.created_with) == (None, -1)


@pytest.mark.parametrize(
    ("flags", "claimed"),
    [
        (0, Capability.NONE),
        (WITH_TIMESTAMP, Capability.TIMESTAMPS),
        (WITH_WALL_CLOCK, Capability.WALL_CLOCK_TIMESTAMPS),
        (WITH_FLOW_TAG, Capability.FLOW_TAGS),
    ],
    ids=str,
)
def test_the_capabilities_say_what_queues_can_bring(fake, flags, claimed):
    fake.extended.queues = 1
    fake.extended.wc_flags = flags
    with fake.open() as adapter:
        assert adapter.info.capabilities & OF_DETAILS == claimed
        assert Capability.SINGLE_THREADED_QUEUES in adapter.info.capabilities
        for detail, capability in zip(
            EVERYTHING, (Capability.TIMESTAMPS, Capability.WALL_CLOCK_TIMESTAMPS, Capability.FLOW_TAGS), strict=True
        ):
            if capability != claimed:
                with pytest.raises(ndpy.UnsupportedError, match=str(capability.name)):
                    make_queue(adapter, detail)


def test_without_extended_queues_there_are_plain_ones_only(fake):
    with fake.open() as adapter:
        unwanted = OF_DETAILS | Capability.SINGLE_THREADED_QUEUES | Capability.CLOCK
        assert not adapter.info.capabilities & unwanted
        with pytest.raises(ndpy.UnsupportedError, match="SINGLE_THREADED_QUEUES"):
            adapter.create_completion_queue(8, single_threaded=True)
        with pytest.raises(ndpy.UnsupportedError, match="CLOCK"):
            adapter.clock()
        adapter.create_completion_queue(8).close()


# ---- what comes ----


def details_of(completions):
    return [(found.timestamp, found.wall_clock_ns, found.flow_tag) for found in completions]


def expected(first, count):
    return [(1000 * number, EPOCH_NS + number, TAG + number) for number in range(first, first + count)]


def test_completions_bring_their_details(fake, queue, queue_pair):
    receive(fake, queue_pair, 3, nbytes=7)
    completions = queue.poll()
    assert details_of(completions) == expected(1, 3)
    assert [(found.context, found.nbytes, found.operation) for found in completions] == [
        (context, 7, ndpy.Operation.RECEIVE) for context in range(3)
    ]
    queue_pair.send([], context=9)
    assert fake.complete(queue_pair, receive=False)
    (sent,) = queue.poll()
    assert (sent.context, sent.operation, sent.timestamp) == (9, ndpy.Operation.SEND, 4000)
    assert sent.source is None


def test_a_queue_that_brings_one_detail_brings_no_other(fake, adapter):
    with make_queue(adapter, CompletionDetails.TIMESTAMP) as queue, adapter.create_queue_pair(queue) as queue_pair:
        receive(fake, queue_pair, 1)
        assert details_of(queue.poll()) == [(1000, None, None)]


def test_a_failed_request_brings_none(fake, queue, queue_pair):
    receive(fake, queue_pair, 1, status=lib.IBV_WC_LOC_LEN_ERR)
    (completion,) = queue.poll()
    assert (completion.status, completion.timestamp) == (ndpy.Status.BUFFER_OVERFLOW, None)


def test_silent_requests_end_without_a_completion(fake, queue, queue_pair):
    for context in range(3):
        queue_pair.send([], context=context, flags=ndpy.Flags.SILENT_SUCCESS if context < 2 else 0)
    for _ in range(3):
        assert fake.complete(queue_pair, receive=False)
    (completion,) = queue.poll()
    assert (completion.context, completion.timestamp) == (2, 1000)
    for context in range(64):
        queue_pair.send([], context=context)
        assert fake.complete(queue_pair, receive=False)
        assert len(queue.poll()) == 1


def test_a_poll_takes_no_more_than_it_is_asked_for(fake, queue, queue_pair):
    receive(fake, queue_pair, 5)
    found = [queue.poll(0), queue.poll(2), queue.poll(1), queue.poll()]
    assert [[completion.context for completion in part] for part in found] == [[], [0, 1], [2], [3, 4]]


def test_an_array_has_columns_of_them(fake, queue, queue_pair):
    array = ndpy.CompletionArray(8)
    for turn in range(3):
        receive(fake, queue_pair, 4, first=10)
        assert queue.poll_into(array) == 4
        rows = list(zip(array.timestamps, array.wall_clocks_ns, array.flow_tags, strict=True))
        assert rows == expected(4 * turn + 1, 4) == details_of(array)
        assert list(array.contexts) == [10, 11, 12, 13]
    # A failed one has zeros.
    receive(fake, queue_pair, 1)
    receive(fake, queue_pair, 1, status=lib.IBV_WC_LOC_LEN_ERR)
    assert queue.poll_into(array) == 2
    assert (list(array.timestamps), list(array.flow_tags)) == ([13000, 0], [TAG + 13, 0])
    assert (array[1].timestamp, array[1].ok) == (None, False)


def test_an_array_of_a_plain_queue_has_zeros(fake, adapter):
    array = ndpy.CompletionArray(4)
    assert (list(array.timestamps), array.timestamps.format, array.flow_tags.format) == ([], "Q", "I")
    with adapter.create_completion_queue(8) as queue, adapter.create_queue_pair(queue) as queue_pair:
        receive(fake, queue_pair, 2)
        assert queue.poll_into(array) == 2
        assert list(array.timestamps) == list(array.wall_clocks_ns) == list(array.flow_tags) == [0, 0]


def test_stored_completions_keep_their_details(fake, queue, queue_pair):
    """arm() takes them from the provider before the program polls."""
    receive(fake, queue_pair, 64)
    assert queue.arm().done()
    assert details_of(queue.poll()) == expected(1, 64)


def test_what_nobody_takes_goes_with_the_queue(fake, adapter):
    """Under sanitizers this test shows that the memory is freed once."""
    with make_queue(adapter) as queue, adapter.create_queue_pair(queue) as queue_pair:
        receive(fake, queue_pair, 3)
        queue.arm()


def test_waiting_looking_again_and_arming_work(fake, queue, queue_pair):
    queue_pair.receive([], context=1)
    with pytest.raises(ndpy.TimeoutError):
        queue.wait(0)
    armed = queue.arm()
    assert fake.complete(queue_pair)
    armed.result(DEADLINE_S)
    assert details_of(queue.wait(DEADLINE_S)) == expected(1, 1)
    receive(fake, queue_pair, 1)
    assert details_of(queue.poll(spin_s=DEADLINE_S)) == expected(2, 1)
    array = ndpy.CompletionArray(4)
    receive(fake, queue_pair, 2)
    assert queue.poll_into(array, at_least=2, spin_s=DEADLINE_S) == 2
    assert list(array.timestamps) == [3000, 4000]


def test_batches_complete_there(fake, queue, queue_pair):
    batch = ndpy.Batch(3)
    for context in range(3):
        batch.receive([], context=context)
    for first in (1, 4):
        queue_pair.post(batch)
        for _ in range(3):
            assert fake.complete(queue_pair)
        found = queue.poll()
        assert [completion.context for completion in found] == [0, 1, 2]
        assert details_of(found) == expected(first, 3)


def test_a_failing_poll_says_so_and_the_next_one_works(fake, queue, queue_pair):
    receive(fake, queue_pair, 1)
    fake.failures.poll = 1
    with pytest.raises(ndpy.ProviderError) as caught:
        queue.poll()
    assert caught.value.native == errno.EIO
    fake.failures.poll = 2
    with pytest.raises(ndpy.ProviderError):
        queue.arm()
    assert len(queue.poll()) == 1


def test_ctrl_c_in_the_middle_loses_no_details(fake, queue, queue_pair, monkeypatch):
    receive(fake, queue_pair, 1)
    receive(fake, queue_pair, 1, status=lib.IBV_WC_LOC_LEN_ERR)

    array = ndpy.CompletionArray(4)
    monkeypatch.setattr(ndpy.CompletionQueue, "_collect_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.poll_into(array)
    monkeypatch.undo()
    assert queue.poll_into(array) == 2
    assert list(array.timestamps) == [1000, 0]


def test_a_driver_that_cannot_go_to_the_next_one_is_polled_one_by_one(fake, adapter, monkeypatch):
    monkeypatch.setattr(adapter, "_quirks", {Quirk.RXE_NEXT_POLL_GOES_TOO_FAR})
    with make_queue(adapter) as queue, adapter.create_queue_pair(queue) as queue_pair:
        receive(fake, queue_pair, 5)
        before = fake.extended.next_polls
        found = [queue.poll(2), queue.poll(), queue.poll()]
        assert [details_of(part) for part in found] == [expected(1, 2), expected(3, 3), []]
        assert fake.extended.next_polls == before


# ---- the clock ----


@pytest.mark.parametrize("bits", [32, 48])
def test_the_clock_converts_timestamps(fake, bits):
    fake.extended.clock_khz = 156_250
    fake.extended.clock_bits = bits
    fake.extended.ticks = 1_000_000
    with fake.open() as adapter:
        clock = adapter.clock()
    assert (clock.ticks, clock.frequency_hz, clock.bits) == (1_000_000, 156_250_000, bits)
    assert 0 <= clock.uncertainty_ns < 10**9
    assert clock.seconds_between(1000, 1000 + 156_250) == 0.001
    assert clock.seconds_between(1000 + 156_250, 1000) == -0.001
    # The counter begins again at 0.
    assert clock.seconds_between((1 << bits) - 156_250, 0) == 0.001
    assert clock.to_time_ns(1_000_000 + 156_250) == clock.time_ns + 1_000_000
    assert clock.to_time_ns(1_000_000 - 156_250) == clock.time_ns - 1_000_000
