"""Arrays of any library are registered, sent, received into, read and written: their bytes, in their order, or an
error.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import importlib.util
import mmap
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from kit.aio_ends import LONG, both, pattern
from kit.dlpack import CUDA, ROCM, Interface, Producer
from kit.helpers import DEADLINE_S, wait_until

import ndpy
from ndpy import Access

# A short message, of whole elements of 8 bytes.
EIGHTS = 96


def numpy():
    return pytest.importorskip("numpy")


def anonymous(length):
    return mmap.mmap(-1, length)


#: Each makes writable memory of this many bytes, which is a multiple of 8.
WRITABLE = {
    "array": lambda length: array.array("H", bytes(length)),
    "mmap": anonymous,
    "memoryview": lambda length: memoryview(bytearray(length + 2))[1:-1],
    "ctypes": lambda length: (ctypes.c_uint32 * (length // 4))(),
    "NumPy": lambda length: numpy().zeros((2, length // 4), dtype=">u2"),
    "NumPy's dates": lambda length: numpy().zeros(length // 8, dtype="M8[s]"),
    "NumPy's structures": lambda length: numpy().zeros(length // 8, dtype=[("a", ">u4"), ("b", "u1", 4)]),
    "a view of a view of NumPy's": lambda length: numpy().zeros((4, length), dtype="u1")[1:3][1],
    "DLPack": lambda length: Producer(bytearray(length), (length // 8, 4), dtype=(1, 16, 1)),
    "DLPack without a version": lambda length: Producer(bytearray(length), (length,), version=None),
    "DLPack with an offset": lambda length: Producer(bytearray(length + 3), (length,), offset=3),
    "vectors": lambda length: Producer(bytearray(length), (length // 8,), dtype=(2, 16, 4)),
    "4 bits each": lambda length: Producer(bytearray(length), (length, 2), dtype=(0, 4, 1)),
    "4 bits each in bytes": lambda length: Producer(bytearray(length), (length,), dtype=(0, 4, 1), flags=4),
    "one column": lambda length: Producer(bytearray(length), (length, 1), (1, 77)),
    "an array interface": lambda length: Interface(bytearray(length)),
    "an array interface with strides": lambda length: Interface(
        bytearray(length), shape=(length // 8, 2), typestr=">f4", strides=(8, 4)
    ),
}


def bytes_of(thing):
    """Its bytes, by its library where it has its own way."""
    if isinstance(thing, Producer):
        return bytes(thing.memory)[thing.offset :]
    if isinstance(thing, Interface):
        return bytes(thing.memory)
    return thing.tobytes() if hasattr(thing, "tobytes") else bytes(thing)


def fill(thing, data):
    """Put bytes into it, in the order of its elements."""
    if isinstance(thing, Producer):
        thing.memory[thing.offset :] = data
    elif isinstance(thing, Interface):
        thing.memory[:] = data
    elif type(thing).__name__ == "ndarray":
        thing.reshape(-1)[...] = numpy().frombuffer(data, dtype=thing.dtype)
    else:
        memoryview(thing).cast("B")[:] = data


@pytest.mark.parametrize("length", [EIGHTS, LONG])
async def test_an_array_is_sent_received_into_read_and_written_whole_and_in_order(connected, length):
    data = pattern(length)
    async with connected() as (client, server):
        for kind, make in WRITABLE.items():
            source, sink = make(length), make(length)
            fill(source, data)
            _, count = await both(client.send(source), server.receive(into=sink))
            assert (count, bytes_of(sink)) == (length, data), kind
            other, third = make(length), make(length)
            async with server.expose(other) as remote:
                assert remote.length == length
                await client.write(remote, source)
                await client.read(remote, third)
            assert [bytes_of(thing) for thing in (other, third, source)] == [data] * 3, kind


def test_an_array_is_registered_whole_and_lives_as_long_as_its_region(adapter):
    for kind, make in WRITABLE.items():
        thing = make(EIGHTS)
        fill(thing, pattern(EIGHTS))
        with adapter.register(thing) as region:
            assert region.buffer is thing, kind
            assert region.length == EIGHTS, kind
            del thing
            gc.collect()
            assert ctypes.string_at(region.address, EIGHTS) == pattern(EIGHTS), kind


@pytest.mark.parametrize("kind", ["bytes", "NumPy", "DLPack", "array interface"])
async def test_a_read_only_array_is_sent_and_never_written_to(connected, adapter, kind):
    zeros = bytearray(32)
    make = {
        "bytes": lambda: bytes(range(32)),
        "NumPy": lambda: numpy().frombuffer(bytes(range(32)), "u1"),
        "DLPack": lambda: Producer(zeros, (32,), flags=1),
        "array interface": lambda: Interface(
            zeros, data=(ctypes.addressof((ctypes.c_char * 32).from_buffer(zeros)), True)
        ),
    }[kind]
    thing = make()
    async with connected() as (client, server):
        await client.send(thing)
        expected = bytes(32) if kind in ("DLPack", "array interface") else bytes(range(32))
        assert await server.receive() == expected
        await server.send(b"for nobody")
        with pytest.raises(ndpy.AccessViolationError, match="is read-only"):
            await client.receive(into=thing)
        assert await client.receive() == b"for nobody"
    with pytest.raises(ndpy.AccessViolationError, match="is read-only"):
        adapter.register(thing)
    adapter.register(thing, Access.NONE).close()


def test_an_array_without_dimensions_has_one_element(adapter, keep):
    assert keep(adapter.register(Producer(bytearray(8), (), dtype=(2, 64, 1)))).length == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: Producer(None, (0,), address=0),
        lambda: Producer(None, (3, 0, 2), (9, 9, 9), address=0),
    ],
)
async def test_an_array_of_no_bytes_is_an_empty_message_and_no_region(connected, adapter, make):
    async with connected() as (client, server):
        await client.send(make())
        assert await server.receive() == b""
    with pytest.raises(ndpy.InvalidBufferError, match="is empty"):
        adapter.register(make())


class Raises:
    def __dlpack__(self, **_):
        raise RuntimeError("the deeper reason")


class Gives:
    def __init__(self, thing):
        self.thing = thing

    def __dlpack__(self, **_):
        return self.thing


class InterfaceOf:
    def __init__(self, thing):
        self.__array_interface__ = thing


class RaisingInterface:
    @property
    def __array_interface__(self):
        raise RuntimeError("the deeper reason")


def consumed():
    producer = Producer(bytearray(8), (8,))
    capsule = producer.capsule()
    _keep.append(ndpy._core.Tensor(capsule))
    return Gives(capsule)


_keep: list[object] = []
GAPS = "is not C-contiguous: its bytes have gaps, or another order"
IMPOSSIBLE = "which is not possible"
REFUSED = {
    "strided": (lambda: Producer(bytearray(64), (8,), (2,)), GAPS),
    "transposed": (lambda: Producer(bytearray(64), (4, 8), (1, 4)), GAPS),
    "backwards": (lambda: Producer(bytearray(64), (8,), (-1,)), GAPS),
    "one element again and again": (lambda: Producer(bytearray(64), (8,), (0,)), GAPS),
    "strided interface": (lambda: Interface(bytearray(64), shape=(8,), strides=(2,)), GAPS),
    "strides of other dimensions": (lambda: Interface(bytearray(64), shape=(8,), strides=(1, 1)), GAPS),
    "pointers": (lambda: Producer(bytearray(64), (8,), dtype=(3, 64, 1)), "Python objects"),
    "objects by interface": (lambda: Interface(bytearray(64), shape=(8,), typestr="|O8"), "Python objects"),
    "objects in structures": (
        lambda: Interface(bytearray(64), shape=(4,), typestr="|V16", descr=[("a", "<i8"), ("b", [("c", "|O8")])]),
        "Python objects",
    ),
    "NumPy's strings": (lambda: numpy().array(["ab"], numpy().dtypes.StringDType()), "gives no view of its bytes"),
    "masked": (lambda: Interface(bytearray(64), mask=Interface(bytearray(64))), "has a mask"),
    "a part of a byte": (lambda: Producer(bytearray(64), (3,), dtype=(0, 4, 1)), "do not fill whole bytes"),
    "no bits": (lambda: Producer(bytearray(64), (3,), dtype=(0, 0, 1)), "elements of 0 bits"),
    "no lanes": (lambda: Producer(bytearray(64), (3,), dtype=(0, 8, 0)), "elements of 0 bits"),
    "negative shape": (lambda: Producer(bytearray(64), (-8,)), "has the shape"),
    "two negatives": (lambda: Producer(bytearray(64), (-8, -8)), "has the shape"),
    "overflow": (lambda: Producer(bytearray(64), (1 << 40, 1 << 40)), IMPOSSIBLE),
    "overflow of the address": (lambda: Producer(None, (1 << 20,), address=(1 << 64) - 4096), IMPOSSIBLE),
    "overflow of the offset": (lambda: Producer(bytearray(64), (8,), offset=(1 << 64) - 1), IMPOSSIBLE),
    "null": (lambda: Producer(None, (8,), address=0), IMPOSSIBLE),
    "null by interface": (lambda: Interface(bytearray(8), data=(0, False)), IMPOSSIBLE),
    "negative dimensions": (lambda: Producer(bytearray(64), (8,), dimensions=-1), "-1 dimensions"),
    "many dimensions": (lambda: Producer(bytearray(64), (8,), dimensions=1 << 30), "1073741824 dimensions"),
    "a copy": (lambda: Producer(bytearray(64), (8,), flags=2), "only a copy"),
    "a later version": (lambda: Producer(bytearray(64), (8,), version=(2, 0)), "DLPack 2.0"),
    "on a device": (
        lambda: Producer(bytearray(64), (8,), device=(ROCM, 3)),
        r"in memory of ROCm device 3; .*register_dmabuf\(\)",
    ),
    "on an unknown device": (lambda: Producer(bytearray(64), (8,), device=(99, 0)), "type 99 device 0"),
    "raises": (Raises, "RuntimeError: the deeper reason"),
    "no capsule": (lambda: Gives(5), "not a capsule"),
    "nothing": (lambda: Gives(None), "not a capsule"),
    "consumed": (consumed, "used_dltensor_versioned"),
    "interface that raises": (RaisingInterface, "RuntimeError: the deeper reason"),
    "interface of text": (lambda: InterfaceOf("text"), "is a str, not a dict"),
    "interface without an address": (lambda: InterfaceOf({"shape": (8,), "data": b"12345678"}), "give a copy"),
    "interface with a negative address": (lambda: Interface(bytearray(8), data=(-8, False)), "has no address"),
    "shape of text": (lambda: Interface(bytearray(8), shape="8"), "not a tuple of integers"),
    "type that is none": (lambda: Interface(bytearray(8), typestr="u1"), "typestr"),
    "type of an unknown kind": (lambda: Interface(bytearray(8), typestr="|T8"), "typestr"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_memory_is_not_registered(adapter, keep, kind):
    make, match = REFUSED[kind]
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4))
    for call in (adapter.register, adapter.begin_register, cache.local):
        with pytest.raises(ndpy.InvalidBufferError, match=match):
            call(make())


async def test_what_is_no_plain_memory_is_refused_by_every_call_of_a_connection(connected):
    async with connected() as (client, server):
        await server.send(b"a message")
        async with server.expose(bytearray(64)) as remote:
            for kind, (make, match) in REFUSED.items():
                thing = make()
                for name, call in {
                    "send": client.send(thing),
                    "receive": client.receive(into=thing),
                    "read": client.read(remote, thing),
                    "write": client.write(remote, thing),
                    "expose": client.expose(thing).__aenter__(),
                }.items():
                    with pytest.raises(ndpy.InvalidBufferError, match=match):
                        pytest.fail(f"{name} of {kind}: {await call}")
        assert await client.receive() == b"a message"


# With a driver: test_cuda_memory.py, test_cuda_cache.py, and test_aio_cuda.py.
def on_cuda():
    return Producer(bytearray(64), (8,), device=(CUDA, 3))


def test_memory_of_a_cuda_device_needs_its_driver(adapter, keep, monkeypatch):
    monkeypatch.setenv("NDPY_LIBCUDA", "nowhere/libcuda.so")
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4))
    for call in (
        adapter.register,
        lambda array: adapter.begin_register(array).result(timeout_s=DEADLINE_S),
        cache.local,
    ):
        with pytest.raises(ndpy.UnsupportedError, match="copy the array to the host's memory"):
            call(on_cuda())


async def test_transfers_of_memory_of_a_cuda_device_need_its_driver_and_messages_refuse_it(connected, monkeypatch):
    monkeypatch.setenv("NDPY_LIBCUDA", "nowhere/libcuda.so")
    async with connected() as (client, server):
        await server.send(b"a message")
        async with server.expose(bytearray(64)) as remote:
            for call in (
                client.read(remote, on_cuda()),
                client.write(remote, on_cuda()),
                client.expose(on_cuda()).__aenter__(),
            ):
                with pytest.raises(ndpy.UnsupportedError, match="copy the array to the host's memory"):
                    await call
            for call in (client.send(on_cuda()), client.receive(into=on_cuda())):
                with pytest.raises(
                    ndpy.InvalidBufferError, match="in memory of CUDA device 3; messages do not take it"
                ):
                    await call
        assert await client.receive() == b"a message"


def test_what_is_neither_a_buffer_nor_an_array_is_a_mistake_of_types(adapter):
    for thing in (5, "text", Producer, None, object()):
        with pytest.raises(TypeError, match="is not a buffer or an array; give"):
            adapter.register(thing)


@pytest.mark.parametrize("version", [(1, 1), (1, 7), None])
def test_the_deleter_is_called_once_when_nobody_uses_the_memory(adapter, version):
    producer = Producer(bytearray(64), (64,), version=version)
    region = adapter.register(producer)
    element = region[0:8]
    assert producer.deleted == 0
    region.close()
    del element, region
    gc.collect()
    assert producer.deleted == 1


def test_the_deleter_is_called_once_for_what_is_refused(adapter):
    for producer in (
        Producer(bytearray(64), (8,), (2,)),
        Producer(bytearray(64), (8,), version=(2, 0)),
        Producer(bytearray(64), (8,), dimensions=-1),
        Producer(bytearray(64), (0,)),
    ):
        with pytest.raises(ndpy.InvalidBufferError):
            adapter.register(producer)
        gc.collect()
        assert producer.deleted == 1


def test_a_capsule_that_nobody_took_is_not_touched():
    producer = Producer(bytearray(64), (64,))
    capsule = producer.capsule()
    del capsule
    assert producer.deleted == 0


def test_the_newest_version_is_asked_for_and_no_copy(adapter):
    producer = Producer(bytearray(64), (64,))
    adapter.register(producer).close()
    assert producer.asked == [{"max_version": (1, 1), "copy": False}]
    old = Producer(bytearray(64), (64,), version=None)
    adapter.register(old).close()
    assert old.asked == [{"max_version": (1, 1), "copy": False}, {}]


# ---- the cache ----


@pytest.fixture
def cache(adapter, keep):
    return keep(ndpy.RegistrationCache(adapter, max_bytes=1 << 24, max_entries=8))


@pytest.mark.parametrize("kind", ["DLPack", "an array interface", "NumPy's dates"])
def test_an_array_stays_registered_as_long_as_it_lives(cache, kind):
    thing = WRITABLE[kind](4096)
    with cache.local(thing) as lease:
        address = lease.address
    with cache.local(thing) as lease:
        assert (lease.address, lease.length) == (address, 4096)
    assert (cache.stats.hits, cache.stats.registrations, cache.stats.entries) == (1, 1, 1)
    watched = weakref.ref(thing)
    del thing, lease
    gc.collect()
    assert watched() is None
    # The next miss sees it, if the adapter's thread is not about to give it back.
    cache.local(bytearray(8)).release()
    assert cache.stats.invalidations == 1
    wait_until(lambda: cache.stats.entries == 1, lambda: f"the array's entry has gone: {cache.stats}")


def test_a_lease_keeps_the_memory_of_an_array_that_has_gone(cache):
    producer = Producer(bytearray(64), (64,))
    lease = cache.local(producer)
    deleted = weakref.ref(producer)
    del producer
    gc.collect()
    assert deleted() is not None
    lease.release()
    del lease
    gc.collect()
    assert deleted() is None


def test_an_array_that_got_other_memory_is_registered_again(cache):
    producer = Producer(bytearray(64), (64,))
    cache.local(producer).release()
    producer.memory = bytearray(128)
    producer.shape = (128,)
    with cache.local(producer) as lease:
        assert lease.length == 128
        assert lease.address == ctypes.addressof((ctypes.c_char * 128).from_buffer(producer.memory))
    assert (cache.stats.registrations, cache.stats.invalidations, cache.stats.entries) == (2, 1, 1)


def test_a_region_of_an_array_keeps_its_memory_when_the_array_gets_other_memory(adapter, keep, run):
    producer = Producer(bytearray(pattern(64)), (64,))
    region = keep(adapter.register(producer))
    producer.memory = bytearray(64)

    async def scene(client, server):
        _, message = await both(client.send(region), server.receive())
        assert message == pattern(64)

    run(scene)


def test_what_takes_no_weak_references_is_leased(cache):
    class Bare:
        __slots__ = ("inner",)

        def __init__(self):
            self.inner = Producer(bytearray(64), (64,))

        def __dlpack__(self, **keywords):
            return self.inner.__dlpack__(**keywords)

    bare = Bare()
    for _ in range(2):
        with cache.local(bare) as lease:
            assert lease.length == 64


async def test_many_tasks_send_one_tensor(connected):
    producer, data = Producer(bytearray(pattern(LONG)), (LONG,)), pattern(LONG)
    async with connected() as (client, server):
        sending = [asyncio.ensure_future(client.send(producer)) for _ in range(8)]
        for _ in sending:
            assert await server.receive() == data
        await asyncio.gather(*sending)


# ---- libraries ----


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_arrays_of_a_library_go_every_way(adapter_name, library):
    """In a process of its own: importing such a library slows down everything else."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, "-m", "kit.tensors", library, adapter_name]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=DEADLINE_S * 6, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
