"""Arrays in memory of a CUDA device are registered, with a driver without a device in place of the system's."""

from __future__ import annotations

import gc
import mmap
import signal
import threading
import time

import pytest
from kit.dlpack import CUDA, Producer
from kit.dmabuf import use_from_both_ends
from kit.fake_cuda import SIZE, CudaArray
from kit.helpers import (
    DEADLINE_S,
    assert_refused,
    expose,
    host_of,
    memory,
    open_files,
    require,
    succeed,
    wait_until,
)

import ndpy
from ndpy import Access, Capability, Operation, aio

PAGE = mmap.PAGESIZE
EVERY_RIGHT = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK
PATTERN = bytes((7 * place + place // 251) % 256 for place in range(SIZE))


pytestmark = pytest.mark.usefixtures("takes_cuda_memory")


def interfaced(fake, offset, length, **entries):
    return CudaArray(fake.address + offset, length, **entries)


def capsuled(fake, offset, length, **entries):
    return Producer(None, (length,), address=fake.address, offset=offset, device=(CUDA, 0), **entries)


def capsuled_before_versions(fake, offset, length):
    return capsuled(fake, offset, length, version=None)


PARTS = [(0, SIZE), (PAGE, 100), (PAGE + 100, 200), (2 * PAGE - 7, 9)]


@pytest.mark.parametrize("make", [interfaced, capsuled, capsuled_before_versions])
@pytest.mark.parametrize(("offset", "length"), PARTS)
def test_an_array_of_a_device_goes_every_way_and_nothing_beside_it_changes(pair, keep, cuda, make, offset, length):
    array = make(cuda, offset, length)
    files = open_files()
    region = keep(pair.adapter.register(array, EVERY_RIGHT))
    assert open_files() == files
    assert (region.address, region.length, region.buffer) == (cuda.address + offset, length, array)
    assert cuda.seen.start == cuda.address + offset // PAGE * PAGE
    assert cuda.seen.size == -(-(offset % PAGE + length) // PAGE) * PAGE
    data = PATTERN[:length]

    def assert_all(part):
        assert bytes(cuda.view) == bytes(offset) + part + bytes(SIZE - offset - length)

    use_from_both_ends(pair, keep, region, data, assert_all)


def test_a_region_keeps_the_array_until_it_is_closed(pair, keep, cuda):
    array = capsuled(cuda, 0, PAGE)
    region = pair.adapter.register(array, EVERY_RIGHT)
    remote = expose(keep, pair.server, region)
    gc.collect()
    # The capsule without a stream has been given back.
    assert array.deleted == 1
    region.close()
    del region
    gc.collect()
    assert array.deleted == 2
    pair.client.queue_pair.write(memory(keep, pair.adapter, PATTERN[:PAGE]), remote, context=3)
    assert_refused(pair.client, Operation.WRITE, 3)
    assert bytes(cuda.view[:PAGE]) == bytes(PAGE)


def test_begin_register_takes_an_array_of_a_device_too(pair, keep, cuda):
    pending = [pair.adapter.begin_register(interfaced(cuda, at, PAGE), EVERY_RIGHT) for at in range(0, 4 * PAGE, PAGE)]
    regions = [keep(each.result(timeout_s=DEADLINE_S)) for each in pending]
    for place, region in enumerate(regions):
        pair.client.queue_pair.write(memory(keep, pair.adapter, bytes([place + 1]) * PAGE), region.remote())
        succeed(pair.client.cq)
    assert bytes(cuda.view[: 4 * PAGE]) == b"".join(bytes([place + 1]) * PAGE for place in range(4))


def test_a_protection_domain_takes_it_too(adapter, keep, cuda):
    require(adapter, Capability.PROTECTION_DOMAINS)
    domain = keep(adapter.create_protection_domain())
    assert keep(domain.register(interfaced(cuda, 0, 64))).address == cuda.address


# ---- streams ----


@pytest.mark.parametrize("has_context", [0, 1])
@pytest.mark.parametrize("stream", [1, 2, 0x7F00_1234_5678])
def test_the_stream_of_an_array_has_ended_before_its_memory_is_exported(adapter, keep, cuda, stream, has_context):
    cuda.settings.busy = 5
    cuda.settings.has_context = has_context
    keep(adapter.register(interfaced(cuda, 64, 64, stream=stream)))
    seen = cuda.seen
    assert (seen.stream, seen.queries, seen.exports) == (stream, 6, 1)
    assert seen.synchronized < seen.exported
    assert seen.set_sync == cuda.address + 64


def test_an_array_without_a_stream_is_not_waited_for(adapter, keep, cuda):
    cuda.settings.busy = 5
    entries = interfaced(cuda, 0, 64)
    del entries.__cuda_array_interface__["stream"]
    keep(adapter.register(entries))
    assert (cuda.seen.queries, cuda.seen.exports) == (0, 1)


def test_a_capsule_is_asked_for_on_the_default_stream_and_that_has_ended_first(adapter, keep, cuda):
    cuda.settings.busy = 2
    array = capsuled(cuda, 0, 64)
    keep(adapter.register(array))
    assert array.asked == [{"max_version": (1, 1), "copy": False}, {"max_version": (1, 1), "copy": False, "stream": 1}]
    assert (cuda.seen.stream, cuda.seen.queries) == (1, 3)
    assert cuda.seen.synchronized < cuda.seen.exported
    old = capsuled_before_versions(cuda, 0, 64)
    keep(adapter.register(old))
    assert old.asked[-1] == {"stream": 1}


def test_ctrl_c_ends_the_wait_for_a_stream_and_leaves_nothing(adapter, cuda):
    cuda.settings.busy = 1 << 30
    files = open_files()
    start = time.monotonic()
    key = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    key.start()
    with pytest.raises(KeyboardInterrupt):
        adapter.register(interfaced(cuda, 0, 64, stream=1))
    key.join()
    assert time.monotonic() - start < DEADLINE_S
    assert (open_files(), cuda.seen.exports) == (files, 0)


@pytest.mark.parametrize("length", [64, SIZE])
def test_a_deadline_ends_the_wait_for_a_stream_and_begin_register_does_not_wait(adapter, cuda, length):
    cuda.settings.busy = 1 << 30
    with pytest.raises(ndpy.TimeoutError):
        adapter.register(interfaced(cuda, 0, length, stream=1), timeout_s=0.1)
    pending = adapter.begin_register(interfaced(cuda, 0, length, stream=1))
    assert not pending.done()
    cuda.settings.busy = 0
    pending.result(timeout_s=DEADLINE_S).close()
    # A worker has the one that was cancelled.
    wait_until(lambda: cuda.seen.exports == 2 and not cuda.seen.contexts, "the end of both registrations")


# ---- refused ----


FAILURES = {
    "short": (
        {"export_error": 1, "range_size": 64},
        ndpy.ProviderError,
        "4096 bytes at .* are not all in the 64 bytes",
    ),
    "no dma-bufs": ({"export_error": 801, "range_size": 64}, ndpy.ProviderError, "CUDA_ERROR_NOT_SUPPORTED"),
    "freed": ({"attributes_error": 1}, ndpy.ProviderError, r"freed \[native status 1 \(CUDA_ERROR_INVALID_VALUE\)"),
    "no memory of its": ({"memory_type": 0}, ndpy.InvalidBufferError, "no CUDA device has memory at"),
    "a kernel failed": ({"query_error": 700}, ndpy.ProviderError, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "an unknown error": ({"query_error": 9999}, ndpy.ProviderError, r"cuStreamQuery\(\) of .* \[native status 9999\]"),
    "no device": ({"init_error": 100}, ndpy.ProviderError, "CUDA_VISIBLE_DEVICES.*CUDA_ERROR_NO_DEVICE"),
    "forked": ({"init_error": 3}, ndpy.ProviderError, "spawn.*CUDA_ERROR_NOT_INITIALIZED"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_the_driver_refuses_is_named_with_a_remedy_and_nothing_is_left(adapter, cuda, kind):
    settings, error, match = FAILURES[kind]
    for name, value in settings.items():
        setattr(cuda.settings, name, value)
    array = capsuled(cuda, 0, 4096)
    files = open_files()
    for call in (adapter.register, lambda array: adapter.begin_register(array).result(timeout_s=DEADLINE_S)):
        with pytest.raises(error, match=match):
            call(array)
    gc.collect()
    assert open_files() == files
    assert array.deleted == len(array.asked)


@pytest.mark.parametrize(
    ("number", "name"), [(801, "CUDA_ERROR_NOT_SUPPORTED"), (1, "CUDA_ERROR_INVALID_VALUE"), (2, "")]
)
def test_an_error_of_the_driver_has_its_number_and_name_and_a_page(adapter, cuda, number, name):
    cuda.settings.query_error = number
    with pytest.raises(ndpy.ProviderError) as raised:
        adapter.register(interfaced(cuda, 0, 64, stream=1))
    error = raised.value
    assert (error.operation, error.native, error.native_name) == ("register", number, name)
    assert str(error).endswith("(ndpy explain device-memory)")


def test_memory_that_cannot_be_made_synchronous_is_registered_all_the_same(adapter, keep, cuda):
    cuda.settings.setting_error = 801
    assert keep(adapter.register(interfaced(cuda, 0, 64))).length == 64


def test_pinned_memory_of_the_host_is_registered_as_what_it_is(adapter, keep, cuda):
    cuda.settings.memory_type = 1
    buffer = mmap.mmap(-1, PAGE)
    with memoryview(buffer) as view:
        address = ndpy.objects.memory.address_of(view)
    assert keep(adapter.register(CudaArray(address, PAGE))).address == address
    assert cuda.seen.exports == 0


@pytest.mark.parametrize("path", ["/nowhere/libcuda.so.1", "libc.so.6"])
def test_without_a_driver_the_error_names_the_file_and_what_to_do(adapter, cuda, monkeypatch, path):
    monkeypatch.setenv("NDPY_LIBCUDA", path)
    with pytest.raises(ndpy.UnsupportedError, match=f"{path} cannot be used: .*NDPY_LIBCUDA"):
        adapter.register(interfaced(cuda, 0, 64))


WRONG = {
    "gaps": ({"shape": (8,), "strides": (2,)}, "is not C-contiguous"),
    "a mask": ({"mask": object()}, "has a mask"),
    "stream 0": ({"stream": 0}, "the stream in its array interface is 0"),
    "a stream of text": ({"stream": "1"}, "the stream in its array interface is '1'"),
    "no address": ({"data": None}, "has no address"),
    "objects": ({"typestr": "|O8"}, "Python objects"),
    "too long": ({"shape": (1 << 62, 4)}, "which is not possible"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_interface_is_not_believed_unchecked(adapter, cuda, kind):
    entries, match = WRONG[kind]
    with pytest.raises(ndpy.InvalidBufferError, match=match):
        adapter.register(interfaced(cuda, 0, 64, **entries))
    assert cuda.seen.inits == 0


def test_a_read_only_array_of_a_device_is_sent_and_never_written_to(adapter, keep, cuda):
    array = interfaced(cuda, 0, 64, data=(cuda.address, True))
    with pytest.raises(ndpy.AccessViolationError, match="is read-only"):
        adapter.register(array)
    keep(adapter.register(array, Access.REMOTE_READ))


def test_an_array_of_no_bytes_is_no_region(adapter, cuda):
    with pytest.raises(ndpy.InvalidBufferError, match="is empty"):
        adapter.register(CudaArray(0, 0))


def test_a_region_of_a_device_is_not_registered_again(adapter, keep, cuda):
    require(adapter, Capability.REREGISTRATION)
    region = keep(adapter.register(interfaced(cuda, 0, 64)))
    for change in ({"buffer": bytearray(64)}, {"access": Access.NONE}):
        with pytest.raises(ndpy.UnsupportedError, match="a device's memory cannot be registered again"):
            region.reregister(**change)
    host = keep(adapter.register(bytearray(64)))
    with pytest.raises(ndpy.InvalidBufferError, match=r"in memory of (a )?CUDA device"):
        host.reregister(interfaced(cuda, 0, 64))
    with pytest.raises(ndpy.InvalidBufferError, match=r"in memory of (a )?CUDA device"):
        adapter.register_at(interfaced(cuda, 0, 64), cuda.address)


# ---- ndpy.aio ----


async def test_pieces_of_a_registered_array_of_a_device_are_read_and_written(adapter, keep, cuda):
    region = keep(adapter.register(capsuled(cuda, 0, SIZE)))
    kept = bytearray(PATTERN)

    async def serve(connection):
        async with connection.expose(kept) as remote:
            await connection.send(remote.to_bytes())
            await connection.receive()

    async with (
        aio.serve((host_of(adapter), 0), serve, adapter=adapter) as server,
        aio.connect(server.address, adapter=adapter) as connection,
    ):
        remote = ndpy.RemoteMemory.from_bytes(await connection.receive())
        await connection.read_many(
            [(remote[PAGE : 2 * PAGE], region[0:PAGE]), (remote[0:64], region[PAGE : PAGE + 64])]
        )
        assert bytes(cuda.view[: PAGE + 64]) == PATTERN[PAGE : 2 * PAGE] + PATTERN[:64]
        cuda.view[:64] = bytes(64)
        await connection.write(remote[0:64], region[0:64])
        assert kept[:65] == bytes(64) + PATTERN[64:65]
        await connection.send(b"done")
