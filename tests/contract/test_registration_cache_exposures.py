"""The registration cache: buffers that a peer can reach only while they are exposed (contract K.2)."""

from __future__ import annotations

import gc
import time

import pytest
from kit.caching import LENGTH, READ, WRITE, read_from, regions, use
from kit.helpers import (
    DEADLINE_S,
    assert_refused,
    assert_works,
    expose,
    memory,
    require,
    succeed,
    take,
    wait_until,
)
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Operation, Status
from ndpy.objects.memory import address_of
from ndpy.vocabulary.quirks import Quirk


def test_k_2_1_after_release_the_peer_cannot_reach_the_buffer(pair, keep, cache):
    buffer = ndpy.alloc(LENGTH)
    buffer[:] = b"original" * 512
    local = memory(keep, pair.adapter, b"intruder" * 512)
    with cache.remote(buffer, pair.server.queue_pair, READ | WRITE) as exposure:
        remote = exposure.remote()
        assert (remote.address, remote.length) == (address_of(buffer), LENGTH)
        assert_works(keep, pair)  # A message posted after the bind proves that the bind is done (contract E.2.9).
        pair.client.queue_pair.write(local[:8], remote)
        succeed(pair.client.cq)
        # On iWARP the client's completion does not prove that the bytes have arrived. A read after the write does.
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
    """An invalidation would wait behind them, so the cache closes the window instead."""
    pair = pair_with(initiator_queue_depth=2)
    require(pair.adapter, ndpy.Capability.MEMORY_WINDOWS)
    buffer = ndpy.alloc(LENGTH)
    exposure = cache.remote(buffer, pair.server.queue_pair)
    remote = exposure.remote()
    pair.server.cq.poll()
    # The peer has posted no receive, so this send holds up the queue.
    pair.server.queue_pair.send([], context=1)
    exposure.release()
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder"), remote, context=2)
    # A transport on which a sender does not wait for a receive has already ended the connection.
    (completion,) = take(pair.client.cq)
    assert completion.status in (Status.ACCESS_VIOLATION, Status.CANCELED)
    assert bytes(buffer[:8]) == bytes(8)


def test_k_2_1_a_release_behind_long_requests_takes_the_right_away(pair, keep, cache):
    """The adapter may not have carried out the bind yet. The connection may end then. The peer never gets access."""
    require(pair.adapter, ndpy.Capability.MEMORY_WINDOWS)
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
    # On iWARP a write completes before the peer has checked it.
    if not has_quirk(pair.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT):
        assert completion.status in (Status.ACCESS_VIOLATION, Status.CANCELED)
    pair.client.connector.wait_disconnected(DEADLINE_S)
    assert bytes(buffer[:8]) == bytes(8)


def test_k_2_1_a_program_that_never_polls_keeps_nothing_of_ended_exposures(pair, cache):
    buffer = ndpy.alloc(LENGTH)

    counts: list[int] = []

    def expose() -> bool:
        with cache.remote(buffer, pair.server.queue_pair):
            pass
        counts.append(len(pair.server.queue_pair._posted_requests.initiator))
        return counts[-1] <= 2

    for _ in range(50):
        expose()

    def expose_later() -> bool:
        time.sleep(0.2)
        return expose()

    # An emulated adapter may take longer for a bind than an exposure waits. When it has caught up, the next exposure
    # notices.
    wait_until(expose_later, lambda: f"the records of ended exposures go; there were {counts}")


def test_k_2_1_completions_of_the_program_stay_for_it(pair, keep, cache):
    client, server = pair
    buffer = ndpy.alloc(LENGTH)
    # The client sends first, as iWARP demands.
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
    assert_works(keep, pair)
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
    windows = ndpy.Capability.MEMORY_WINDOWS in pair.adapter.info.capabilities
    with cache.remote(buffer, pair.server.queue_pair):
        assert len(regions(pair.adapter)) == before + (1 if windows else 2)
    # The region that is left grants peers nothing. It keeps the pages locked.
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
    require(pair.adapter, ndpy.Capability.MEMORY_WINDOWS)
    buffer = ndpy.alloc(LENGTH)
    buffer[:8] = b"original"
    tokens = []
    for turn in range(1, 8):
        with cache.remote(buffer, pair.server.queue_pair) as exposure:
            tokens.append(exposure.remote().token)
            assert_works(keep, pair)
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
    if ndpy.Capability.MEMORY_WINDOWS in pair.adapter.info.capabilities:
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
        assert_works(keep, pair)
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
