"""The registration cache with arrays in memory of a CUDA device."""

from __future__ import annotations

import gc
import mmap
import signal
import threading
import time
import weakref

import pytest
from kit.dlpack import CUDA, Producer
from kit.fake_cuda import SIZE, CudaArray
from kit.helpers import (
    DEADLINE_S,
    assert_refused,
    contents,
    memory,
    succeed,
    wait_until,
)

import ndpy
from ndpy import Access, Operation

PAGE = mmap.PAGESIZE
PATTERN = bytes((7 * place + place // 251) % 256 for place in range(SIZE))
SINK = Access.LOCAL_WRITE | Access.READ_SINK


pytestmark = pytest.mark.usefixtures("takes_cuda_memory")


@pytest.fixture(params=["a dma-buf", "one that cannot be mapped", "an address"])
def device(request, cuda, unmappable):
    """The driver. The adapter gets its memory in this way."""
    if request.param == "one that cannot be mapped":
        cuda.settings.unmappable = unmappable
    elif request.param == "an address":
        cuda.settings.export_error = 801
    return cuda


@pytest.fixture
def cache(adapter, keep):
    return keep(ndpy.RegistrationCache(adapter, max_bytes=2 * SIZE, max_entries=4))


def interfaced(cuda, offset=0, length=SIZE, **entries):
    return CudaArray(cuda.address + offset, length, **entries)


def capsuled(cuda, offset=0, length=SIZE):
    return Producer(None, (length,), address=cuda.address, offset=offset, device=(CUDA, 0))


@pytest.mark.parametrize("make", [interfaced, capsuled])
def test_a_lease_of_an_array_of_a_device_goes_both_ways_and_its_registration_is_found_again(
    pair, keep, device, cache, make
):
    client, server = pair
    array = make(device, PAGE + 100, 5000)
    place = slice(PAGE + 100, PAGE + 5100)
    for turn in range(3):
        with cache.local(array, SINK) as lease:
            assert (lease.address, lease.length) == (device.address + PAGE + 100, 5000)
            server.queue_pair.receive(lease[:])
            client.queue_pair.send(memory(keep, pair.adapter, PATTERN[turn : turn + 5000]))
            succeed(client.cq)
            succeed(server.cq)
        assert bytes(device.view[place]) == PATTERN[turn : turn + 5000]
        sink = memory(keep, pair.adapter, 5000)
        with cache.local(array, Access.NONE) as lease:
            server.queue_pair.receive(sink)
            client.queue_pair.send(lease[:])
            succeed(client.cq)
            succeed(server.cq)
        assert contents(sink) == PATTERN[turn : turn + 5000]
    assert (cache.stats.misses, cache.stats.hits, cache.stats.registrations) == (1, 5, 1)
    assert device.seen.exports == 1
    assert bytes(device.view[: PAGE + 100]) == bytes(PAGE + 100)
    assert bytes(device.view[PAGE + 5100 :]) == bytes(SIZE - PAGE - 5100)


def test_each_request_waits_for_the_stream_of_its_array(cuda, cache):
    array = interfaced(cuda, stream=7)
    cache.local(array).release()
    exported = cuda.seen.exported
    for stream in (7, 9):
        array.__cuda_array_interface__["stream"] = stream
        before, cuda.settings.busy = cuda.seen.queries, 5
        cache.local(array).release()
        assert (cuda.seen.queries - before, cuda.seen.stream) == (6, stream)
        assert cuda.seen.synchronized > exported
    assert (cache.stats.hits, cuda.seen.exports) == (2, 1)


def test_an_array_that_names_no_stream_is_not_waited_for(cuda, cache):
    array = interfaced(cuda)
    for _ in range(2):
        cache.local(array).release()
    assert cuda.seen.queries == 0


@pytest.mark.parametrize("is_hit", [False, True])
def test_ctrl_c_ends_the_wait_and_nothing_stays_in_use(cuda, cache, is_hit):
    array = interfaced(cuda, stream=7)
    if is_hit:
        cache.local(array).release()
    cuda.settings.busy = 1 << 30
    start = time.monotonic()
    key = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    key.start()
    with pytest.raises(KeyboardInterrupt):
        cache.local(array)
    key.join()
    assert time.monotonic() - start < DEADLINE_S
    cache.close()


def test_a_kernel_that_failed_is_named_and_nothing_stays_in_use(cuda, cache):
    array = interfaced(cuda, stream=7)
    cache.local(array).release()
    cuda.settings.query_error = 700
    with pytest.raises(ndpy.ProviderError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        cache.local(array)
    cache.close()


@pytest.mark.parametrize("make", [interfaced, capsuled])
def test_the_registration_ends_with_the_array_and_does_not_keep_it(cuda, cache, make):
    cuda.settings.export_error = 801
    array = make(cuda)
    end = weakref.ref(array)
    lease = cache.local(array)
    del array
    gc.collect()
    assert end() is not None
    assert (cuda.seen.streams, cache.stats.entries) == (1, 1)
    lease.release()
    del lease
    gc.collect()
    assert end() is None
    # The cache counts an entry until its region is closed, which is when the stream has gone.
    wait_until(lambda: not cache.stats.entries, "the end of the registration")
    assert (cuda.seen.streams, cache.stats.invalidations) == (0, 1)


def test_an_array_whose_memory_has_moved_is_registered_anew(pair, keep, device, cache):
    array = interfaced(device, 0, PAGE)
    cache.local(array).release()
    array.__cuda_array_interface__["data"] = (device.address + 2 * PAGE, False)
    with cache.local(array) as lease:
        assert lease.address == device.address + 2 * PAGE
        pair.server.queue_pair.receive(lease[:])
        pair.client.queue_pair.send(memory(keep, pair.adapter, PATTERN[:PAGE]))
        succeed(pair.client.cq)
        succeed(pair.server.cq)
    assert bytes(device.view[: 3 * PAGE]) == bytes(2 * PAGE) + PATTERN[:PAGE]
    assert (cache.stats.misses, cache.stats.invalidations, cache.stats.entries) == (2, 1, 1)


def test_invalidate_ends_its_registration(cuda, cache):
    cuda.settings.export_error = 801
    array = interfaced(cuda)
    cache.local(array).release()
    cache.invalidate(array)
    assert (cuda.seen.streams, cache.stats.entries) == (0, 0)


def test_a_peer_reaches_an_array_of_a_device_until_the_exposure_is_released(pair, keep, device, cache):
    client, server = pair
    array = interfaced(device, PAGE, PAGE)
    exposure = cache.remote(array, server.queue_pair)
    remote = exposure.remote()
    client.queue_pair.write(memory(keep, pair.adapter, PATTERN[:PAGE]), remote)
    succeed(client.cq)
    assert bytes(device.view) == bytes(PAGE) + PATTERN[:PAGE] + bytes(SIZE - 2 * PAGE)
    sink = memory(keep, pair.adapter, PAGE, SINK)
    client.queue_pair.read(sink, remote)
    succeed(client.cq)
    assert contents(sink) == PATTERN[:PAGE]
    exposure.release()
    client.queue_pair.write(memory(keep, pair.adapter, bytes(PAGE)), remote, context=6)
    assert_refused(client, Operation.WRITE, 6)
    assert bytes(device.view[PAGE : 2 * PAGE]) == PATTERN[:PAGE]


def test_the_rights_of_an_array_are_respected(cuda, cache):
    array = interfaced(cuda, data=(cuda.address, True))
    with pytest.raises(ndpy.AccessViolationError, match="is read-only"):
        cache.local(array)
    cache.local(array, Access.NONE).release()


def test_an_array_whose_end_nobody_learns_of_is_refused(cuda, cache):
    class Slotted:
        __slots__ = ("__cuda_array_interface__",)

    array = Slotted()
    array.__cuda_array_interface__ = interfaced(cuda).__cuda_array_interface__
    with pytest.raises(ndpy.InvalidBufferError, match=r"Slotted is in memory of a CUDA device; .* without the cache"):
        cache.local(array)
    assert cache.stats.registrations == 0


def test_an_adapter_that_takes_no_devices_says_so_before_it_asks_the_driver(adapter, cuda, cache, monkeypatch):
    monkeypatch.setattr(type(adapter), "_takes_devices", False)
    with pytest.raises(ndpy.UnsupportedError, match="takes no memory of a CUDA device; copy the array"):
        cache.local(interfaced(cuda, stream=7))
    assert cuda.seen.inits == 0
