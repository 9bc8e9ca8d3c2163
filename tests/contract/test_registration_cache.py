"""The registration cache, local buffers: contract K.1."""

from __future__ import annotations

import array
import gc
import mmap
import sys
import weakref

import pytest
from kit.caching import LENGTH, READ, SINK, WRITE, forbid_registering, regions, use, wait_for_contents
from kit.documentation import example
from kit.helpers import (
    DEADLINE_S,
    connect_pair,
    create_end,
    expose,
    memory,
    take,
    wait_until,
)

import ndpy
from ndpy import Access, Status
from ndpy.objects.memory import address_of


def test_k_1_1_release_keeps_the_buffer_registered(adapter, cache):
    buffer = bytearray(LENGTH)
    before = len(regions(adapter))
    lease = cache.local(buffer)
    assert len(regions(adapter)) == before + 1
    lease.release()
    assert len(regions(adapter)) == before + 1
    assert (cache.stats.entries, cache.stats.bytes_pinned) == (1, LENGTH)
    lease.release()
    # Nobody uses it.
    cache.invalidate(buffer)
    assert len(regions(adapter)) == before


@pytest.mark.parametrize("make", [ndpy.alloc, lambda length: mmap.mmap(-1, length)], ids=["alloc", "mmap"])
def test_k_1_2_the_end_of_a_watched_owner_ends_its_registration(adapter, cache, make):
    """The adapter's thread deregisters. The program need not use the cache again."""
    buffer = make(LENGTH)
    region = use(cache, buffer)
    del buffer
    gc.collect()
    wait_until(lambda: region.closed, "the registration has gone with its memory")
    wait_until(lambda: not cache.stats.entries, "the entry has gone")
    assert cache.stats.invalidations == 1


@pytest.mark.parametrize(
    "make", [bytearray, lambda length: array.array("B", bytes(length))], ids=["bytearray", "array"]
)
def test_k_1_2_what_cannot_be_watched_cannot_be_resized_while_it_is_cached(cache, make):
    buffer = make(LENGTH)
    use(cache, buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    cache.invalidate(buffer)
    buffer.append(1)


def test_k_1_2_what_only_the_cache_refers_to_goes_at_the_next_miss(cache):
    buffer = bytearray(LENGTH)
    region = use(cache, buffer)
    del buffer
    other = bytearray(LENGTH)
    use(cache, other)
    assert region.closed
    assert (cache.stats.invalidations, cache.stats.entries) == (1, 1)


def test_k_1_2_memory_without_an_owner_is_refused_unless_the_caller_watches_it(cache):
    buffer = ndpy.alloc(LENGTH)
    raw = (address_of(buffer), LENGTH)
    with pytest.raises(ndpy.UnsupportedError, match="raw=True"):
        cache.local(raw)
    region = use(cache, raw, raw=True)
    assert use(cache, raw, raw=True) is region
    with pytest.raises(ndpy.UnsupportedError, match="raw=True"):
        cache.local(raw)
    cache.invalidate(*raw)
    assert region.closed


def test_k_1_2_a_lease_keeps_the_memory(cache):
    buffer = mmap.mmap(-1, LENGTH)
    with cache.local(buffer):
        with pytest.raises(BufferError):
            buffer.close()
        with pytest.raises((BufferError, SystemError, ValueError, OSError)):
            buffer.resize(2 * LENGTH)
    buffer.close()


def test_a_posted_request_keeps_the_memory_of_a_lease_that_ended_early(pair, keep, cache):
    buffer = mmap.mmap(-1, LENGTH)
    watch = weakref.ref(buffer)
    lease = cache.local(buffer)
    pair.server.queue_pair.receive(lease[:8], context=5)
    lease.release()
    del buffer, lease
    gc.collect()
    assert watch() is not None
    message = memory(keep, pair.adapter, 8)
    pair.client.queue_pair.send(message)
    (completion,) = take(pair.server.cq)
    assert completion.context == 5
    del completion
    gc.collect()
    assert watch() is None


def test_k_1_3_the_same_bytes_elsewhere_are_a_miss(cache):
    one, two = bytearray(LENGTH), bytearray(LENGTH)
    assert use(cache, one) is not use(cache, two)
    assert (cache.stats.hits, cache.stats.misses) == (0, 2)


def test_k_1_4_a_hit_calls_no_provider(monkeypatch, adapter, cache):
    buffer = bytearray(LENGTH)
    first = use(cache, buffer)
    token = first.local_token
    with monkeypatch.context() as patched:
        forbid_registering(patched, adapter)
        for _ in range(5):
            second = use(cache, buffer)
            assert second is first
    assert second.local_token == token
    assert (cache.stats.hits, cache.stats.misses, cache.stats.registrations) == (5, 1, 1)


@pytest.mark.parametrize(
    "make", [ndpy.alloc, lambda length: mmap.mmap(-1, length), bytearray], ids=["alloc", "mmap", "bytearray"]
)
def test_k_1_4_a_hit_and_its_release_run_no_python_code(cache, make):
    buffer = make(LENGTH)
    use(cache, buffer)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        cache.local(buffer).release()
        with cache.local(buffer, Access.NONE):
            pass
        cache.local(buffer, access=Access.LOCAL_WRITE, raw=False).release()
    finally:
        sys.setprofile(None)
    assert calls == []
    assert cache.stats.hits == 3


@pytest.mark.parametrize(
    ("start", "stop", "had", "wanted", "hit"),
    [
        (0, 4096, Access.LOCAL_WRITE, Access.LOCAL_WRITE, True),
        (0, 4096, Access.LOCAL_WRITE, Access.NONE, True),
        (100, 200, Access.LOCAL_WRITE, Access.LOCAL_WRITE, True),
        (4095, 4096, Access.NONE, Access.NONE, True),
        (0, 4096, Access.NONE, Access.LOCAL_WRITE, False),
        (0, 4096, Access.LOCAL_WRITE, SINK, False),
        (0, 4097, Access.LOCAL_WRITE, Access.LOCAL_WRITE, False),
        (4096, 4097, Access.LOCAL_WRITE, Access.LOCAL_WRITE, False),
    ],
)
def test_k_1_5_a_hit_covers_the_range_and_has_the_rights(cache, start, stop, had, wanted, hit):
    buffer = ndpy.alloc(2 * LENGTH)
    first = use(cache, buffer[:LENGTH], had)
    second = use(cache, buffer[start:stop], wanted)
    assert (first is second) == hit
    assert cache.stats.hits == hit
    assert not wanted & ~second.access


def test_k_1_5_overlapping_ranges_become_one_region_with_the_rights_of_all(cache):
    buffer = ndpy.alloc(4 * LENGTH)
    base = address_of(buffer)
    low = use(cache, buffer[:LENGTH], Access.NONE)
    high = use(cache, buffer[2 * LENGTH : 3 * LENGTH], SINK)
    merged = use(cache, buffer[LENGTH - 1 : 2 * LENGTH + 1], Access.NONE)
    assert (merged.address, merged.length, merged.access) == (base, 3 * LENGTH, SINK)
    assert low.closed
    assert high.closed
    assert (cache.stats.entries, cache.stats.evictions, cache.stats.invalidations) == (1, 0, 0)
    touching = use(cache, buffer[3 * LENGTH :])
    assert (touching.length, cache.stats.entries) == (LENGTH, 2)


def test_k_1_5_a_range_too_large_together_takes_the_place_alone(keep, adapter):
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=3 * LENGTH, max_entries=9))
    buffer = ndpy.alloc(4 * LENGTH)
    use(cache, buffer[: 2 * LENGTH])
    region = use(cache, buffer[LENGTH:])
    assert (region.address, region.length) == (address_of(buffer) + LENGTH, 3 * LENGTH)
    assert cache.stats.entries == 1


def test_k_1_6_after_invalidation_the_region_and_the_export_are_gone(adapter, cache):
    buffer = bytearray(LENGTH)
    before = len(regions(adapter))
    region = use(cache, buffer)
    cache.invalidate(buffer)
    assert region.closed
    assert len(regions(adapter)) == before
    buffer.extend(b"not exported any more")
    assert use(cache, buffer) is not region
    assert (cache.stats.invalidations, cache.stats.misses) == (1, 2)


def test_k_1_6_a_length_that_an_mmap_has_no_more_is_not_found(cache):
    buffer = mmap.mmap(-1, 2 * LENGTH)
    region = use(cache, buffer)
    try:
        buffer.resize(LENGTH)
    except (SystemError, OSError, ValueError):
        pytest.skip("this system does not resize anonymous maps")
    assert use(cache, buffer) is not region
    assert region.closed


@pytest.mark.parametrize(
    ("offset", "length", "gone"),
    [(0, 1, [0]), (LENGTH - 1, 2, [0, 1]), (LENGTH, LENGTH, [1]), (0, 3 * LENGTH, [0, 1, 2]), (3 * LENGTH, 1, [])],
)
def test_k_1_7_invalidation_concerns_what_overlaps_and_nothing_else(cache, offset, length, gone):
    buffer = ndpy.alloc(4 * LENGTH)
    found = [use(cache, buffer[place * LENGTH : (place + 1) * LENGTH]) for place in range(3)]
    cache.invalidate(address_of(buffer) + offset, length)
    assert [place for place in range(3) if found[place].closed] == gone


def test_k_1_8_an_entry_in_use_is_detached_and_deregistered_on_release(cache):
    buffer = bytearray(LENGTH)
    lease = cache.local(buffer)
    region = lease.region
    cache.invalidate(buffer)
    assert not region.closed
    with cache.local(buffer) as other:
        assert other.region is not region
        lease.release()
        assert region.closed
        assert not other.region.closed
    assert cache.stats.entries == 1


def test_k_1_9_closing_a_connection_releases_what_was_cached_for_it(keep, pair, cache):
    buffers = [ndpy.alloc(LENGTH) for _ in range(4)]
    other = connect_pair(keep, pair.adapter)
    mine = use(cache, buffers[0], queue_pair=pair.server.queue_pair)
    shared = use(cache, buffers[1], queue_pair=pair.server.queue_pair)
    assert use(cache, buffers[1], queue_pair=other.server.queue_pair) is shared
    anybodys = use(cache, buffers[2])
    exposure = cache.remote(buffers[3], pair.server.queue_pair, READ | WRITE)
    pair.server.queue_pair.close()
    assert exposure.revoked
    with pytest.raises(ndpy.ClosedError):
        exposure.remote()
    assert mine.closed
    assert not shared.closed
    assert not anybodys.closed
    exposure.release()
    assert {region.address for region in regions(pair.adapter)} == {shared.address, anybodys.address}
    other.server.queue_pair.close()
    assert shared.closed
    assert not anybodys.closed


@pytest.mark.parametrize("who", ["this side", "the peer"])
def test_k_1_9_the_end_of_a_connection_releases_what_was_cached_for_it(keep, pair, cache, who):
    """The adapter's thread releases it. The program need not use the cache again."""
    buffers = [ndpy.alloc(LENGTH) for _ in range(3)]
    mine = use(cache, buffers[0], queue_pair=pair.server.queue_pair)
    anybodys = use(cache, buffers[1])
    exposure = cache.remote(buffers[2], pair.server.queue_pair, READ | WRITE)
    first, second = (pair.server, pair.client) if who == "this side" else (pair.client, pair.server)
    first.connector.disconnect(DEADLINE_S)
    second.connector.wait_disconnected(DEADLINE_S)
    wait_until(lambda: mine.closed and exposure.revoked, "what was cached for the connection has gone")
    assert not anybodys.closed
    exposure.release()
    wait_until(lambda: cache.stats.entries == 1, "one registration is left")
    assert regions(pair.adapter) == [anybodys]


def test_k_1_9_what_a_closed_connection_still_uses_goes_on_release(pair, cache):
    lease = cache.local(ndpy.alloc(LENGTH), queue_pair=pair.server.queue_pair)
    region = lease.region
    pair.server.queue_pair.close()
    assert not region.closed
    lease.release()
    assert region.closed


def test_k_1_10_memory_that_went_without_notice_does_not_crash(pair, keep, cache):
    """The caller broke its duty. Where pages are pinned, the old bytes are sent. Elsewhere the request fails."""
    target = memory(keep, pair.adapter, LENGTH, WRITE)
    buffer = mmap.mmap(-1, LENGTH)
    view = memoryview(buffer)
    lease = cache.local((address_of(view), LENGTH), raw=True)
    view.release()
    buffer.close()
    pair.client.queue_pair.write(lease[:], expose(keep, pair.server, target))
    (completion,) = take(pair.client.cq)
    assert completion.status in (Status.SUCCESS, Status.ACCESS_VIOLATION)
    lease.release()


def test_k_1_11_uses_are_counted(cache):
    buffer = bytearray(LENGTH)
    leases = [cache.local(buffer) for _ in range(3)]
    region = leases[0].region
    cache.invalidate(buffer)
    for lease in leases:
        assert not region.closed
        lease.release()
    assert region.closed


def test_k_1_12_the_idle_entry_used_least_recently_gives_way(keep, adapter):
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=3))
    buffers = [ndpy.alloc(LENGTH) for _ in range(4)]
    found = [use(cache, buffer) for buffer in buffers[:3]]
    use(cache, buffers[0])
    found.append(use(cache, buffers[3]))
    assert [region.closed for region in found] == [False, True, False, False]
    assert (cache.stats.evictions, cache.stats.entries, cache.stats.bytes_pinned) == (1, 3, 3 * LENGTH)


def test_k_1_12_bytes_are_bounded_too(keep, adapter):
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=4 * LENGTH, max_entries=64))
    buffers = [ndpy.alloc(2 * LENGTH) for _ in range(3)]
    found = [use(cache, buffer) for buffer in buffers]
    assert [region.closed for region in found] == [True, False, False]
    large = ndpy.alloc(5 * LENGTH)
    with cache.local(large) as lease:
        region = lease.region
        assert (cache.stats.entries, cache.stats.bytes_pinned) == (1, 5 * LENGTH)
    assert region.closed
    assert cache.stats.entries == 0


def test_k_1_12_what_is_in_use_is_not_evicted(keep, adapter):
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=1))
    buffers = [ndpy.alloc(LENGTH) for _ in range(3)]
    leases = [cache.local(buffer) for buffer in buffers]
    assert cache.stats.entries == 3
    assert len({lease.region for lease in leases}) == 3
    for lease in leases:
        assert not lease.region.closed
        lease.release()
    assert cache.stats.entries == 1


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_k_1_12_a_cache_without_room_is_refused(adapter, bounds):
    with pytest.raises(ndpy.LimitExceededError):
        ndpy.RegistrationCache(adapter, max_bytes=bounds[0], max_entries=bounds[1])


# ---- what the calls take and refuse ----


def test_a_lease_is_for_what_was_asked_for(cache):
    buffer = ndpy.alloc(4 * LENGTH)
    use(cache, buffer)
    with cache.local(buffer[LENGTH : 2 * LENGTH]) as lease:
        assert (lease.address, len(lease)) == (address_of(buffer) + LENGTH, LENGTH)
        element = lease[8:16]
        assert (element.address, element.length) == (lease.address + 8, 8)
        assert element.token == lease.region.local_token
        for wrong in (slice(0, LENGTH + 1), slice(-1, 4), slice(0, 8, 2)):
            with pytest.raises(ndpy.ElementRangeError):
                lease[wrong]
    with pytest.raises(ndpy.ClosedError):
        lease[:]


def test_wrong_rights_are_refused(pair, cache):
    buffer = bytearray(LENGTH)
    for access in (READ, WRITE, Access.DO_NOT_SECURE_VM):
        with pytest.raises(ndpy.InvalidFlagsError):
            cache.local(buffer, access)
    for access in (Access.NONE, Access.LOCAL_WRITE, READ | Access.READ_SINK):
        with pytest.raises(ndpy.InvalidFlagsError):
            cache.remote(buffer, pair.server.queue_pair, access)
    with pytest.raises(ndpy.AccessViolationError):
        cache.local(b"constant")
    use(cache, b"constant", Access.NONE)


def test_exposing_needs_a_connection_of_this_adapter(adapter, keep, cache, adapter_name):
    end = create_end(keep, adapter)
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        with pytest.raises(ndpy.NotConnectedError):
            cache.remote(bytearray(LENGTH), end.queue_pair)
    other = keep(ndpy.open_adapter(adapter_name))
    foreign = create_end(keep, other)
    with pytest.raises(ndpy.ForeignObjectError):
        cache.remote(bytearray(LENGTH), foreign.queue_pair)


def test_a_cache_in_use_refuses_to_close(adapter):
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4)
    with cache.local(bytearray(LENGTH)) as lease:
        with pytest.raises(ndpy.DeviceBusyError):
            cache.close()
        assert not lease.region.closed
        with pytest.raises(ndpy.DeviceBusyError, match="RegistrationCache"):
            adapter.close()
    cache.close()
    cache.close()
    assert regions(adapter) == []
    with pytest.raises(ndpy.ClosedError):
        cache.local(bytearray(LENGTH))


def test_dropped_leases_and_caches_are_released(pair):
    cache = ndpy.RegistrationCache(pair.adapter, max_bytes=1 << 20, max_entries=4)
    buffer = ndpy.alloc(LENGTH)
    with pytest.warns(ResourceWarning, match="unreleased"):
        cache.local(buffer)
        cache.remote(buffer, pair.server.queue_pair)
        gc.collect()
    entries = cache._entries
    wait_until(lambda: not any(entry.uses for entry in entries), "the uses have ended")
    cache.invalidate(buffer)
    assert cache.stats.entries == 0
    use(cache, buffer)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del cache
        gc.collect()
    wait_until(lambda: not regions(pair.adapter), "the regions have gone")


def test_the_example_of_the_documentation_works(pair, keep, capsys):
    program = example("howto/registration_cache.md", "RegistrationCache")
    buffer, target = ndpy.alloc(LENGTH), memory(keep, pair.adapter, 8, WRITE)
    buffer[:8] = b"original"
    names = {"ndpy": ndpy, "adapter": pair.adapter, "buffer": buffer, "remote": expose(keep, pair.server, target)}
    exec(program, {**names, "near": pair.client.queue_pair, "far": pair.server.queue_pair, "queue": pair.client.cq})
    wait_for_contents(target, b"original")
    assert "hits=1, misses=1" in capsys.readouterr().out


# ---- NumPy ----


def test_numpy_arrays_are_watched_through_their_views(cache):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    matrix = numpy.zeros((64, 64))
    region = use(cache, matrix)
    assert use(cache, matrix[3:7].reshape(-1)) is region
    with pytest.raises(ValueError, match="resize"):
        matrix.resize((128, 64), refcheck=False)
    cache.invalidate(matrix)
    assert region.closed
    matrix.resize((128, 64), refcheck=False)
    region = use(cache, matrix)
    row = matrix[5]
    del matrix
    gc.collect()
    use(cache, row)
    assert (region.closed, cache.stats.hits) == (False, 2)
    del row
    gc.collect()
    wait_until(lambda: region.closed, "the registration has gone with the array")


def test_numpy_arrays_over_other_memory_belong_to_that(cache):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    buffer = ndpy.alloc(LENGTH)
    region = use(cache, numpy.frombuffer(buffer, dtype="u1"))
    gc.collect()
    assert use(cache, buffer) is region
    words = bytearray(LENGTH)
    use(cache, numpy.frombuffer(words, dtype="u4"))
    with pytest.raises(BufferError):
        words.append(1)
