"""Ranges that a registration cache merges, and what happens to their parts."""

from __future__ import annotations

import pytest
from kit.caching import LENGTH, regions, use
from kit.helpers import create_end

import ndpy
from ndpy import Access

QUARTER = LENGTH // 4


def test_invalidating_what_a_merge_adds_while_it_registers_ends_the_registration(monkeypatch, adapter, cache):
    """A request for the end of the buffer registers its beginning too, because both overlap what is cached."""
    buffer = ndpy.alloc(LENGTH)
    view = memoryview(buffer)
    use(cache, view[: 3 * QUARTER])
    plain = type(adapter).register

    def register(self, memory, *arguments, **options):
        assert memory[1] == LENGTH, "the two ranges are registered together"
        region = plain(self, memory, *arguments, **options)
        cache.invalidate(view[:1])
        return region

    monkeypatch.setattr(type(adapter), "register", register)
    region = use(cache, view[2 * QUARTER :])
    assert region.closed
    assert cache.stats.entries == 0
    monkeypatch.undo()
    assert use(cache, view[2 * QUARTER :]) is not region


def test_a_merged_region_stays_as_long_as_any_of_its_parts_would(adapter, keep, cache):
    """The first part is anybody's. The second is for one connection, and goes with it unless it was merged with the
    first.
    """
    end = create_end(keep, adapter)
    view = memoryview(ndpy.alloc(LENGTH))
    use(cache, view[: 2 * QUARTER])
    merged = use(cache, view[QUARTER : 3 * QUARTER], queue_pair=end.queue_pair)
    assert merged.length == 3 * QUARTER
    end.queue_pair.close()
    assert not merged.closed
    assert use(cache, view[: 2 * QUARTER]) is merged


def test_a_merged_region_of_several_connections_stays_until_the_last_is_closed(adapter, keep, cache):
    ends = [create_end(keep, adapter) for _ in range(2)]
    view = memoryview(ndpy.alloc(LENGTH))
    for place, end in enumerate(ends):
        merged = use(cache, view[place * QUARTER : (place + 2) * QUARTER], queue_pair=end.queue_pair)
    ends[1].queue_pair.close()
    assert not merged.closed
    ends[0].queue_pair.close()
    assert merged.closed
    assert regions(adapter) == []


def test_local_memory_is_leased_to_connections_of_the_same_adapter_only(adapter, keep, cache, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    foreign = create_end(keep, other)
    with pytest.raises(ndpy.ForeignObjectError):
        cache.local(bytearray(LENGTH), Access.NONE, queue_pair=foreign.queue_pair)
    assert regions(adapter) == []
