"""The registration cache in many threads. No entry is ever stale: the peer sees the bytes that are there now."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import pytest
from kit.caching import LENGTH, WRITE, map_raw, unmap_raw, use, wait_for_contents
from kit.helpers import (
    DEADLINE_S,
    STRESS,
    connect_pair,
    expose,
    memory,
    require,
    succeed,
)
from kit.threads import beside, in_threads

import ndpy
from ndpy import Access
from ndpy.objects.memory import address_of


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
    with beside(lambda: cache.invalidate(region.address, LENGTH)):
        assert begun.wait(DEADLINE_S)
        cache.invalidate(region.address, LENGTH)
        assert region.closed
        buffer.append(1)


def test_invalidation_ends_a_registration_that_another_thread_is_about_to_end(monkeypatch, cache):
    buffer = bytearray(LENGTH)
    region = use(cache, buffer)
    plain = cache._close
    begun, go_on = threading.Event(), threading.Event()

    def close(doomed):
        if threading.current_thread() is other:
            begun.set()
            go_on.wait(DEADLINE_S)
        plain(doomed)

    monkeypatch.setattr(cache, "_close", close)
    other = threading.Thread(target=cache.invalidate, args=(region.address, LENGTH))
    other.start()
    try:
        assert begun.wait(DEADLINE_S)
        cache.invalidate(region.address, LENGTH)
        assert region.closed
        assert cache.stats.entries == 0
    finally:
        go_on.set()
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
    """Memory of which only the address is known."""

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
    """Memory is used through the cache, unmapped, and mapped again. The peer sees the new bytes.

    The threads map and unmap at the same time, so an address goes from one thread to another.
    """
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
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
                # The part leaves out bytes at both ends of the memory.
                part = memoryview(buffer).cast("B")[16 * turn : STALE_BYTES - 16]
                if kind == "raw":
                    part = (address, STALE_BYTES)
            reused[number] += address in seen
            seen.add(address)
            remote = remotes[number]
            for _ in range(2):
                # The first use registers, and the second one is a hit.
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
