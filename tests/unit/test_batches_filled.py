"""Batches that one call fills with reads or writes, over a provider that the test plays itself."""

from __future__ import annotations

import pytest
from data_path_provider import SIGNALED
from posting_ends import Region

import ndpy
from ndpy import Batch
from ndpy.objects.operations import READ, SEND, WRITE

WHOLE = ndpy.RemoteMemory(0x90000, 4096, 9)
LONGEST = 1024


def pairs_of(region: Region, count: int) -> list[tuple[ndpy.RemoteMemory, ndpy.Sge]]:
    return [(WHOLE[place : place + 8], region[place : place + 8]) for place in range(count)]


@pytest.mark.parametrize("operation", [READ, WRITE])
def test_pairs_become_requests_of_which_the_last_has_a_context_of_its_own(provider, queues, operation):
    pairs, batch = pairs_of(Region(), 7), Batch(4)
    assert batch._fill(operation, pairs, 1, LONGEST, 5, 6) == 5
    assert len(batch) == 4
    assert list(batch.contexts) == [5, 5, 5, 6]
    queues.post(batch)
    assert [(sent.address, sent.length, sent.remote_address, sent.remote_key) for sent in provider.call()] == [
        (0x10000 + place, 8, 0x90000 + place, 9) for place in range(1, 5)
    ]
    assert [bool(sent.flags & SIGNALED) for sent in provider.call()] == [False, False, False, True]
    assert Batch(4)._fill(operation, pairs, 7, LONGEST, 5, 6) == 7


@pytest.mark.parametrize(
    "other",
    [
        lambda region: (WHOLE[:8], region[:7]),
        lambda region: (WHOLE[:7], region[:8]),
        lambda region: (WHOLE[:0], region[:0]),
        lambda region: (WHOLE[: LONGEST + 1], region[: LONGEST + 1]),
        lambda region: (WHOLE, region),
        lambda region: (WHOLE[:8], bytearray(8)),
        lambda region: (region[:8], WHOLE[:8]),
        lambda region: [WHOLE[:8], region[:8]],
        lambda region: (WHOLE[:8], region[:8], 8),
        lambda region: (WHOLE[:8],),
        lambda region: None,
    ],
)
def test_filling_stops_at_anything_else(other):
    region, batch = Region(), Batch(8)
    pairs = [*pairs_of(region, 2), other(region), *pairs_of(region, 2)]
    assert batch._fill(WRITE, pairs, 0, LONGEST, 5, 6) == 2
    assert list(batch.contexts)[:2] == [5, 6]
    assert len(batch) == 2
    empty = Batch(8)
    assert empty._fill(WRITE, pairs, 2, LONGEST, 5, 6) == 2
    assert len(empty) == 0


def test_only_a_read_stops_at_memory_that_is_not_writable():
    pairs = pairs_of(Region(writable=False), 2)
    assert Batch(2)._fill(READ, pairs, 0, LONGEST, 0, 1) == 0
    assert Batch(2)._fill(WRITE, pairs, 0, LONGEST, 0, 1) == 2


def test_a_batch_that_has_requests_or_no_room_for_elements_is_not_filled():
    pairs, batch = pairs_of(Region(), 2), Batch(4)
    batch.send(Region()[:8], context=3)
    assert batch._fill(WRITE, pairs, 0, LONGEST, 0, 1) == 0
    assert len(batch) == 1
    none = Batch(4, max_sge=0)
    assert none._fill(WRITE, pairs, 0, LONGEST, 0, 1) == 0
    assert len(none) == 0


def test_other_operations_and_pairs_that_are_not_in_a_list_are_mistakes():
    pairs, batch = pairs_of(Region(), 2), Batch(4)
    with pytest.raises(ValueError, match="reads and writes only"):
        batch._fill(SEND, pairs, 0, LONGEST, 0, 1)
    with pytest.raises(TypeError):
        batch._fill(WRITE, tuple(pairs), 0, LONGEST, 0, 1)
    with pytest.raises(IndexError):
        batch._fill(WRITE, pairs, -1, LONGEST, 0, 1)
    assert len(batch) == 0
