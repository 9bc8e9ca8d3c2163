"""The registration cache: contract section K. The peer sees the bytes that are there now, and only while it may."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from helpers import (
    DEADLINE_S,
    STRESS,
    UNACKNOWLEDGED,
    assert_refused,
    assert_works,
    connect_pair,
    create_end,
    expose,
    memory,
    require,
    succeed,
    take,
    wait_until,
)

import ndpy
from ndpy import Access, Operation, Status
from ndpy.memory import address_of

READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE
SINK = Access.LOCAL_WRITE | Access.READ_SINK
LENGTH = 4096


@pytest.fixture
def cache(keep, adapter):
    """A cache with room for all of a test."""
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64))


def regions(adapter: ndpy.Adapter) -> list[ndpy.MemoryRegion]:
    """Every region of the adapter that is registered."""
    return [child for child in adapter._open_children() if isinstance(child, ndpy.MemoryRegion)]


def forbid_registering(monkeypatch, adapter):
    """From now on a call of the provider that registers or deregisters fails the test."""

    def refuse(*_, **__):
        raise AssertionError("a region was registered or deregistered")

    monkeypatch.setattr(type(adapter), "register", refuse)
    monkeypatch.setattr(type(adapter), "begin_register", refuse)
    monkeypatch.setattr(ndpy.MemoryRegion, "close", refuse)


def use(cache, buffer, access=Access.LOCAL_WRITE, **options):
    """One use of a buffer; the region that served it."""
    with cache.local(buffer, access, **options) as lease:
        return lease.region


def write_to(pair, lease, remote, context=31):
    """The client writes a lease of its memory to the server's memory."""
    pair.client.queue_pair.write(lease[: remote.length], remote, context=context)
    (completion,) = succeed(pair.client.cq)
    assert (completion.operation, completion.context) == (Operation.WRITE, context)


def read_from(pair, keep, remote):
    """What the client reads from the server's memory."""
    sink = memory(keep, pair.adapter, remote.length, SINK)
    pair.client.queue_pair.read(sink, remote)
    succeed(pair.client.cq)
    return bytes(sink.buffer)


# ---- K.1: local buffers ----


def test_k_1_1_release_keeps_the_buffer_registered(adapter, cache):
    buffer = bytearray(LENGTH)
    before = len(regions(adapter))
    lease = cache.local(buffer)
    assert len(regions(adapter)) == before + 1
    lease.release()
    assert len(regions(adapter)) == before + 1
    assert (cache.stats.entries, cache.stats.bytes_pinned) == (1, LENGTH)
    lease.release()


@pytest.mark.parametrize("make", [ndpy.alloc, lambda length: mmap.mmap(-1, length)], ids=["alloc", "mmap"])
def test_k_1_2_the_end_of_a_watched_owner_ends_its_registration(adapter, cache, make):
    """Without another use of the cache: the adapter's thread deregisters."""
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
    """Without another use of the cache: the adapter's thread does it."""
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
    """The caller broke its duty. Where pages are pinned the old bytes are sent, elsewhere the request fails."""
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


# ---- K.2: exposed buffers ----


def test_k_2_1_after_release_the_peer_cannot_reach_the_buffer(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    buffer[:] = b"original" * 512
    local = memory(keep, pair.adapter, b"intruder" * 512)
    with cache.remote(buffer, pair.server.queue_pair, READ | WRITE) as exposure:
        remote = exposure.remote()
        assert (remote.address, remote.length) == (address_of(buffer), LENGTH)
        pair.client.queue_pair.write(local[:8], remote)
        succeed(pair.client.cq)
        # On iWARP the client's completion does not say that the bytes are there; a read behind the write does.
        assert read_from(pair, keep, remote[:16]) == b"intruderoriginal"
    assert exposure.revoked
    (region,) = [region for region in regions(pair.adapter) if region.address == address_of(buffer)]
    assert not region.closed
    pair.client.queue_pair.write(local, remote, context=9)
    assert_refused(pair.client, Operation.WRITE, 9)
    assert bytes(buffer[:16]) == b"intruderoriginal"


def test_k_2_1_releasing_is_no_completion_of_the_program(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    for _ in range(40):
        with cache.remote(buffer, pair.server.queue_pair):
            pass
    assert pair.server.cq.poll() == []
    assert_works(keep, pair)


def test_k_2_1_requests_that_hold_up_the_queue_do_not_hold_up_the_release(pair_with, keep, cache):
    """An invalidation would stand behind them: the window goes instead."""
    pair = pair_with(initiator_depth=2)
    require(pair.adapter, "MEMORY_WINDOWS")
    buffer = ndpy.alloc(LENGTH)
    exposure = cache.remote(buffer, pair.server.queue_pair)
    remote = exposure.remote()
    pair.server.cq.poll()
    # No receive is posted for it.
    pair.server.queue_pair.send([], context=1)
    exposure.release()
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), remote, context=2)
    # Where nothing makes a sender wait for a receive, the connection has ended already.
    (completion,) = take(pair.client.cq)
    assert completion.status in (Status.ACCESS_VIOLATION, Status.CANCELED)
    assert bytes(buffer[:8]) == bytes(8)


def test_k_2_1_a_release_behind_long_requests_takes_the_right_away(pair, keep, cache):
    """The bind itself may not have been carried out yet; then the connection may end, and the peer gets in neither way."""
    require(pair.adapter, "MEMORY_WINDOWS")
    length = min(4 << 20, pair.adapter.info.max_transfer_length)
    source, target = memory(keep, pair.adapter, length), memory(keep, pair.adapter, length, WRITE)
    buffer = ndpy.alloc(LENGTH)
    reached = expose(keep, pair.client, target)
    for _ in range(6):
        pair.server.queue_pair.write(source, reached)
    exposure = cache.remote(buffer, pair.server.queue_pair)
    remote = exposure.remote()
    exposure.release()
    assert exposure.revoked
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), remote, context=2)
    (completion,) = take(pair.client.cq)
    # A write on iWARP is complete before the peer has judged it.
    if pair.adapter.info.transport not in UNACKNOWLEDGED:
        assert completion.status in (Status.ACCESS_VIOLATION, Status.CANCELED)
    pair.client.connector.wait_disconnected(DEADLINE_S)
    assert bytes(buffer[:8]) == bytes(8)


def test_k_2_1_a_program_that_never_polls_keeps_nothing_of_ended_exposures(pair, cache):
    buffer = ndpy.alloc(LENGTH)
    for _ in range(50):
        with cache.remote(buffer, pair.server.queue_pair):
            pass
    assert len(pair.server.queue_pair._initiator_records) <= 2


def test_k_2_1_completions_of_the_program_stay_for_it(pair, keep, cache):
    client, server = pair
    buffer = ndpy.alloc(LENGTH)
    # The client sends first, as iWARP wants it.
    assert_works(keep, pair)
    for turn in range(5):
        client.queue_pair.receive(memory(keep, pair.adapter, 8))
        server.queue_pair.send([], context=turn)
        with cache.remote(buffer, server.queue_pair):
            pass
    assert [completion.context for completion in succeed(server.cq, 5)] == list(range(5))


def test_k_2_1_one_exposure_ends_and_another_stays(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    buffer[:] = b"original" * 512
    first = cache.remote(buffer, pair.server.queue_pair)
    second = cache.remote(buffer[8:16], pair.server.queue_pair, READ)
    assert first.remote().token != second.remote().token
    first.release()
    assert read_from(pair, keep, second.remote()) == b"original"
    second.release()


def test_k_2_1_the_end_of_the_connection_does_not_hinder_the_release(pair, cache):
    buffer = ndpy.alloc(LENGTH)
    exposure = cache.remote(buffer, pair.server.queue_pair)
    pair.client.connector.disconnect(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)
    exposure.release()
    cache.invalidate(buffer)
    assert cache.stats.entries == 0
    with pytest.raises(ndpy.NotConnectedError):
        cache.remote(buffer, pair.server.queue_pair)


def test_k_2_2_only_a_region_with_remote_rights_is_deregistered(pair, cache):
    buffer = ndpy.alloc(LENGTH)
    before = len(regions(pair.adapter))
    windows = "MEMORY_WINDOWS" in pair.adapter.info.flags
    with cache.remote(buffer, pair.server.queue_pair):
        assert len(regions(pair.adapter)) == before + (1 if windows else 2)
    # What is left has no right for peers, and keeps the pages locked.
    (left,) = [region for region in regions(pair.adapter) if region.address == address_of(buffer)]
    assert not left.access & ~Access.LOCAL_WRITE


def test_k_2_3_an_exposed_buffer_is_found_by_its_address_and_watched(pair, cache):
    buffer = ndpy.alloc(LENGTH)
    with cache.remote(buffer, pair.server.queue_pair):
        region = use(cache, buffer[8:16])
        assert region.address == address_of(buffer)
    assert not region.closed
    del buffer
    gc.collect()
    wait_until(lambda: region.closed, "the registration has gone with its memory")


def test_k_2_4_exposing_again_is_one_bind_with_a_fresh_token(pair, keep, cache):
    require(pair.adapter, "MEMORY_WINDOWS")
    buffer = ndpy.alloc(LENGTH)
    buffer[:8] = b"original"
    tokens = []
    for turn in range(1, 8):
        with cache.remote(buffer, pair.server.queue_pair) as exposure:
            tokens.append(exposure.remote().token)
            assert read_from(pair, keep, exposure.remote()[:8]) == b"original"
        assert (cache.stats.registrations, cache.stats.binds) == (1, turn)
    assert len(set(tokens)) == len(tokens)
    windows = [child for child in pair.adapter._open_children() if isinstance(child, ndpy.MemoryWindow)]
    assert len(windows) == 1, "the window is invalidated and bound again"


def test_k_2_4_an_earlier_token_is_refused_after_exposing_again(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    with cache.remote(buffer, pair.server.queue_pair) as exposure:
        earlier = exposure.remote()
    with cache.remote(buffer, pair.server.queue_pair) as exposure:
        assert exposure.remote().token != earlier.token
        pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), earlier, context=4)
        assert_refused(pair.client, Operation.WRITE, 4)
        assert bytes(buffer[:8]) == bytes(8)


def test_k_2_5_without_windows_exposing_again_registers_again(pair, keep, cache):
    if "MEMORY_WINDOWS" in pair.adapter.info.flags:
        pytest.skip(f"{pair.adapter.info.name} has memory windows")
    buffer = ndpy.alloc(LENGTH)
    buffer[:8] = b"original"
    use(cache, buffer)
    for turn in range(1, 6):
        with cache.remote(buffer, pair.server.queue_pair) as exposure:
            assert read_from(pair, keep, exposure.remote()[:8]) == b"original"
        assert (cache.stats.registrations, cache.stats.binds) == (1 + turn, 0)
    assert (cache.stats.entries, cache.stats.hits) == (1, 5)


def test_k_2_6_invalidation_cuts_the_peer_first(pair, keep, cache):
    buffer = bytearray(b"original" * 512)
    exposure = cache.remote(buffer, pair.server.queue_pair)
    remote = exposure.remote()
    cache.invalidate(buffer)
    assert exposure.revoked
    with pytest.raises(ndpy.ClosedError):
        exposure.remote()
    assert cache.stats.entries == 0
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), remote, context=5)
    assert_refused(pair.client, Operation.WRITE, 5)
    assert bytes(buffer[:8]) == b"original"
    exposure.release()


def test_k_2_7_rights_widen_by_registering_again(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    weak = use(cache, buffer, Access.NONE)
    with cache.remote(buffer, pair.server.queue_pair, WRITE) as exposure:
        assert weak.closed
        pair.client.queue_pair.write(memory(keep, pair.adapter, b"written!"), exposure.remote())
        succeed(pair.client.cq)
        wait_until(lambda: bytes(buffer[:8]) == b"written!", "the peer's bytes are there")
    strong = use(cache, buffer)
    assert strong is not weak
    assert strong.access == Access.LOCAL_WRITE
    assert use(cache, buffer, Access.NONE) is strong


def test_k_2_7_a_weaker_region_in_use_stays_as_it_is(cache):
    buffer = ndpy.alloc(LENGTH)
    with cache.local(buffer, Access.NONE) as weak, cache.local(buffer) as strong:
        assert weak.region is not strong.region
        assert weak.region.access is Access.NONE
        region = weak.region
    assert region.closed


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
    if "MEMORY_WINDOWS" in adapter.info.flags:
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


def test_the_example_of_the_readme_works(pair, keep, capsys):
    blocks = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1:]
    (example,) = [code for block in blocks if "RegistrationCache" in (code := block.partition("```")[0])]
    buffer, target = ndpy.alloc(LENGTH), memory(keep, pair.adapter, 8, WRITE)
    buffer[:8] = b"original"
    names = {"ndpy": ndpy, "adapter": pair.adapter, "buffer": buffer, "remote": expose(keep, pair.server, target)}
    exec(example, {**names, "near": pair.client.queue_pair, "far": pair.server.queue_pair, "queue": pair.client.cq})
    wait_for_contents(target, b"original")
    assert "hits=1, misses=1" in capsys.readouterr().out


# ---- memory that no Python object owns, with a monitor ----


@pytest.fixture
def monitored(keep, adapter):
    """A cache with a monitor, which Linux has."""
    if sys.platform != "linux":
        pytest.skip("this system does not tell of unmapping")
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64, monitor=True))


def map_raw(length, address=None):
    """The address of new memory that Python knows nothing of, there if an address is given."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x100000 if address else 0)
    found = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    assert address in (None, found)
    return found


def unmap_raw(address, length):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.munmap(address, length) == 0


@pytest.mark.skipif(sys.platform == "linux", reason="Linux has a monitor")
def test_a_monitor_is_refused_where_the_system_has_none(adapter):
    with pytest.raises(ndpy.UnsupportedError, match=r"DO_NOT_SECURE_VM.*raw=True"):
        ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4, monitor=True)


def test_k_1_2_monitored_memory_is_found_until_it_is_unmapped(adapter, monitored):
    """Without another use of the cache: the adapter's thread deregisters."""
    address = map_raw(4 * LENGTH)
    region = use(monitored, (address, LENGTH))
    beside = use(monitored, (address + 2 * LENGTH, LENGTH))
    assert use(monitored, (address, LENGTH)) is region
    assert use(monitored, (address + 8, 8)) is region
    unmap_raw(address, LENGTH)
    wait_until(lambda: region.closed, "the registration has gone with its memory")
    assert not beside.closed
    wait_until(lambda: monitored.stats.entries == 1, "the entry has gone")
    assert monitored.stats.invalidations == 1
    map_raw(LENGTH, address)
    assert use(monitored, (address, LENGTH)) is not region
    unmap_raw(address, 4 * LENGTH)


def test_k_1_8_monitored_memory_in_use_is_detached_and_deregistered_on_release(monitored):
    address = map_raw(LENGTH)
    lease = monitored.local((address, LENGTH))
    region = lease.region
    unmap_raw(address, LENGTH)
    map_raw(LENGTH, address)
    assert not region.closed
    with monitored.local((address, LENGTH)) as other:
        assert other.region is not region
    lease.release()
    assert region.closed
    unmap_raw(address, LENGTH)


def test_k_2_6_unmapping_monitored_memory_takes_the_peers_right_away(pair, monitored):
    address = map_raw(LENGTH)
    exposure = monitored.remote((address, LENGTH), pair.server.queue_pair, READ)
    unmap_raw(address, LENGTH)
    wait_until(lambda: exposure.revoked, "the peer's right has gone with the memory")
    exposure.release()
    wait_until(lambda: not monitored.stats.entries, "the registration too")


def test_overlapping_monitored_ranges_become_one_and_changed_ones_do_not_count(monitored):
    address = map_raw(4 * LENGTH)
    use(monitored, (address, 2 * LENGTH))
    merged = use(monitored, (address + LENGTH, 2 * LENGTH))
    assert (merged.address, merged.length) == (address, 3 * LENGTH)
    unmap_raw(address, LENGTH)
    region = use(monitored, (address + LENGTH, 2 * LENGTH))
    assert (region.address, region.length) == (address + LENGTH, 2 * LENGTH)
    unmap_raw(address, 4 * LENGTH)


def test_a_file_is_not_monitored_unless_the_caller_watches_it(monitored, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(LENGTH))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), LENGTH) as mapped:
        view = memoryview(mapped)
        raw = (address_of(view), LENGTH)
        view.release()
        with pytest.raises(ndpy.UnsupportedError, match="data is mapped there"):
            monitored.local(raw)
        assert monitored.stats.entries == 0
        region = use(monitored, raw, raw=True)
        monitored.invalidate(*raw)
        assert region.closed


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


# ---- many threads; never stale ----


def in_threads(count, work):
    """Run work(number) in so many threads, started together; raise what one of them raised."""
    failures = []
    start = threading.Barrier(count)

    def run(number):
        try:
            start.wait(DEADLINE_S)
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_of_threads_that_miss_the_same_range_one_registers(monkeypatch, adapter, cache):
    buffer = ndpy.alloc(LENGTH)
    slow = type(adapter).register
    calls = []

    def register(self, *arguments, **options):
        calls.append(arguments)
        time.sleep(0.1)
        return slow(self, *arguments, **options)

    monkeypatch.setattr(type(adapter), "register", register)
    found = []
    in_threads(4, lambda _: found.append(use(cache, buffer)))
    assert len(set(found)) == 1
    assert len(calls) == 1


def test_a_registration_that_fails_is_the_failure_of_one(monkeypatch, adapter, cache):
    buffer = ndpy.alloc(LENGTH)
    slow = type(adapter).register
    calls = []

    def register(self, *arguments, **options):
        calls.append(arguments)
        time.sleep(0.1)
        if len(calls) == 1:
            raise ndpy.ProviderError("out of luck", operation="register")
        return slow(self, *arguments, **options)

    monkeypatch.setattr(type(adapter), "register", register)
    failed = []

    def work(_):
        try:
            use(cache, buffer)
        except ndpy.ProviderError:
            failed.append(1)

    in_threads(3, work)
    assert len(failed) == 1
    assert len(calls) == 2


def test_invalidation_during_a_registration_keeps_the_region_out_of_the_cache(monkeypatch, adapter, cache):
    buffer = ndpy.alloc(LENGTH)
    plain = type(adapter).register

    def register(self, *arguments, **options):
        region = plain(self, *arguments, **options)
        cache.invalidate(buffer)
        return region

    monkeypatch.setattr(type(adapter), "register", register)
    region = use(cache, buffer)
    assert region.closed
    assert cache.stats.entries == 0


def test_invalidation_waits_for_a_deregistration_that_another_thread_is_at(monkeypatch, cache):
    buffer = bytearray(LENGTH)
    region = use(cache, buffer)
    plain = type(region).close
    begun = threading.Event()

    def close(self):
        begun.set()
        time.sleep(0.2)
        plain(self)

    monkeypatch.setattr(type(region), "close", close)
    other = threading.Thread(target=cache.invalidate, args=(region.address, LENGTH))
    other.start()
    assert begun.wait(DEADLINE_S)
    cache.invalidate(region.address, LENGTH)
    assert region.closed
    buffer.append(1)
    other.join(DEADLINE_S)
    assert not other.is_alive()


def test_short_of_memory_idle_registrations_give_way(monkeypatch, adapter, cache):
    buffers = [ndpy.alloc(LENGTH) for _ in range(2)]
    idle = use(cache, buffers[0])
    plain = type(adapter).register

    def register(self, *arguments, **options):
        if not idle.closed:
            raise ndpy.InsufficientResourcesError("no more memory can be locked", operation="register")
        return plain(self, *arguments, **options)

    monkeypatch.setattr(type(adapter), "register", register)
    use(cache, buffers[1])
    assert cache.stats.evictions == 1


def wait_for_contents(region, data):
    """On iWARP the bytes may come later than the completion of the write."""
    wait_until(lambda: bytes(region.buffer) == data, f"{data!r} in the peer's memory")


def alloc_filled(data):
    buffer = ndpy.alloc(len(data))
    buffer[:] = data
    return buffer


def mmap_filled(data):
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return buffer


def numpy_filled(data):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    return numpy.frombuffer(data, dtype="u1").copy()


class RawMemory:
    """Memory that only its address is known of."""

    def __init__(self, data):
        self.length = len(data)
        self.address = map_raw(self.length)
        ctypes.memmove(self.address, data, self.length)

    def close(self):
        unmap_raw(self.address, self.length)


STALE_BYTES = 256 << 10
ROUNDS = 1000 if STRESS else 60
THREADS = 3


MAKERS = {"alloc": alloc_filled, "mmap": mmap_filled, "numpy": numpy_filled, "raw": mmap_filled, "monitored": RawMemory}


@pytest.mark.timeout(900 if STRESS else 120)
@pytest.mark.parametrize("kind", MAKERS)
def test_memory_mapped_anew_at_an_address_is_never_stale(request, keep, adapter, kind):
    """Used through the cache, unmapped, mapped again: the peer sees the new bytes, whatever was at the address before.

    The threads unmap and map at the same time, so that addresses go from one to another.
    """
    require(adapter, "LOOPBACK_CONNECTIONS")
    cache = request.getfixturevalue("monitored" if kind == "monitored" else "cache")
    make = MAKERS[kind]
    pairs = [connect_pair(keep, adapter) for _ in range(THREADS)]
    targets = [memory(keep, adapter, 16, WRITE) for _ in range(THREADS)]
    remotes = [expose(keep, pair.server, target) for pair, target in zip(pairs, targets, strict=True)]
    reused = [0] * THREADS
    seen = set()

    def work(number):
        pair, target = pairs[number], targets[number]
        for turn in range(number, ROUNDS, THREADS):
            data = f"{kind} {turn:11}".encode()[:16].ljust(16)
            buffer = make(data * (STALE_BYTES // 16))
            if kind == "monitored":
                address = buffer.address
                part = (address, STALE_BYTES)
            else:
                address = address_of(memoryview(buffer))
                # The end and the middle of the memory; the request is the whole, or a part.
                part = memoryview(buffer).cast("B")[16 * turn : STALE_BYTES - 16]
                if kind == "raw":
                    part = (address, STALE_BYTES)
            reused[number] += address in seen
            seen.add(address)
            remote = remotes[number]
            for _ in range(2):
                # Registered, and found.
                with cache.local(part, Access.NONE, raw=kind == "raw") as lease:
                    length = len(lease)
                    pair.client.queue_pair.write(lease[length - 16 : length], remote)
                    succeed(pair.client.cq)
                    wait_for_contents(target, data)
            if kind == "raw":
                cache.invalidate(address, STALE_BYTES)
            del part
            if hasattr(buffer, "close"):
                buffer.close()
            del buffer

    in_threads(THREADS, work)
    print(f"{sum(reused)} of {ROUNDS} times the address had been used before")
    assert cache.stats.misses == ROUNDS
    assert cache.stats.hits == ROUNDS
    if kind != "numpy":
        assert sum(reused)
