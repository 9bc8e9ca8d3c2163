"""ndpy.aio with arrays in memory of a CUDA device."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading

import pytest
from kit.dlpack import CUDA, Producer
from kit.fake_cuda import SIZE, CudaArray
from kit.helpers import DEADLINE_S, host_of

import ndpy
from ndpy import Access, aio

PAGE = mmap.PAGESIZE
PATTERN = bytes((7 * place + place // 251) % 256 for place in range(SIZE))
REFUSED = r"is in memory of (a )?CUDA device( 0)?; messages do not take it: expose\(\) it, or read\(\) or write\(\)"


pytestmark = pytest.mark.usefixtures("takes_cuda_memory")


@pytest.fixture(params=["a dma-buf", "one that cannot be mapped", "an address"])
def device(request, cuda, unmappable):
    """The driver. The adapter gets its memory in this way."""
    if request.param == "one that cannot be mapped":
        cuda.settings.unmappable = unmappable
    elif request.param == "an address":
        cuda.settings.export_error = 801
    return cuda


def interfaced(cuda, offset=0, length=SIZE, **entries):
    return CudaArray(cuda.address + offset, length, **entries)


def capsuled(cuda, offset=0, length=SIZE):
    return Producer(None, (length,), address=cuda.address, offset=offset, device=(CUDA, 0))


@contextlib.asynccontextmanager
async def connected(adapter, serve):
    """A connection to a server that calls this."""
    async with (
        aio.serve((host_of(adapter), 0), serve, adapter=adapter) as server,
        aio.connect(server.address, adapter=adapter) as connection,
    ):
        yield connection


async def lend(connection, kept):
    """Expose memory until the peer says that it is done."""
    async with connection.expose(kept) as remote:
        await connection.send(remote.to_bytes())
        await connection.receive()


async def asked_often(cuda):
    while cuda.seen.queries < 20:
        await asyncio.sleep(0)


async def borrowed(connection):
    return ndpy.RemoteMemory.from_bytes(await connection.receive())


@pytest.mark.parametrize("make", [interfaced, capsuled])
async def test_arrays_of_a_device_are_read_and_written(adapter, device, make):
    kept = bytearray(PATTERN)
    array, other = make(device, 100, 5000), make(device, 2 * PAGE + 1, 64)
    async with connected(adapter, lambda peer: lend(peer, kept)) as connection:
        remote = await borrowed(connection)
        await connection.read(remote[7:5007], array)
        assert bytes(device.view) == bytes(100) + PATTERN[7:5007] + bytes(SIZE - 5100)
        host = bytearray(10)
        await connection.read_many([(remote[0:5000], array), (remote[5:15], host), (remote[64:128], other)])
        assert bytes(device.view[100:5100]) == PATTERN[:5000]
        assert (host, bytes(device.view[2 * PAGE + 1 : 2 * PAGE + 65])) == (PATTERN[5:15], PATTERN[64:128])
        device.view[100:5100] = bytes(5000)
        await connection.write(remote[0:5000], array)
        assert kept == bytes(5000) + PATTERN[5000:]
        await connection.write_many([(remote[0:64], other), (remote[SIZE - 10 : SIZE], host)])
        assert kept == PATTERN[64:128] + bytes(5000 - 64) + PATTERN[5000 : SIZE - 10] + PATTERN[5:15]
        # They stay registered between the calls.
        assert device.seen.exports == 2
        await connection.send(b"done")


@pytest.mark.parametrize("is_region", [False, True])
async def test_a_peer_reads_and_writes_what_is_exposed_until_the_block_ends(adapter, device, keep, is_region):
    array = interfaced(device, PAGE, PAGE)
    thing = keep(adapter.register(array))[0:PAGE] if is_region else array
    device.view[PAGE : 2 * PAGE] = PATTERN[:PAGE]
    ended = asyncio.Event()

    async def serve(connection):
        await lend(connection, thing)
        await connection.send(b"taken back")
        ended.set()

    async with connected(adapter, serve) as connection:
        remote = await borrowed(connection)
        sink = bytearray(PAGE)
        await connection.read(remote, sink)
        assert sink == PATTERN[:PAGE]
        await connection.write(remote, sink[::-1])
        assert bytes(device.view) == bytes(PAGE) + PATTERN[:PAGE][::-1] + bytes(SIZE - 2 * PAGE)
        await connection.send(b"done")
        assert await connection.receive() == b"taken back"
        with pytest.raises((ndpy.NdpyError, ConnectionError)):
            await connection.read(remote, sink)
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


@pytest.mark.parametrize("is_hit", [False, True])
@pytest.mark.parametrize("operation", ["write", "expose"])
async def test_the_loop_goes_on_while_a_stream_is_waited_for(adapter, cuda, is_hit, operation):
    kept = bytearray(PATTERN)
    array = interfaced(cuda, 0, PAGE, stream=7)

    async def use(connection, remote):
        if operation == "write":
            await connection.write(remote[0:PAGE], array)
        else:
            async with connection.expose(array):
                pass

    async with connected(adapter, lambda peer: lend(peer, kept)) as connection:
        remote = await borrowed(connection)
        if is_hit:
            await use(connection, remote)
            assert cuda.seen.queries == 1
        cuda.settings.busy, exports = 1 << 30, cuda.seen.exports
        using = asyncio.create_task(use(connection, remote))
        await asyncio.wait_for(asked_often(cuda), DEADLINE_S)
        assert (cuda.seen.exports, using.done()) == (exports, False)
        assert cuda.seen.thread != threading.get_native_id()
        cuda.settings.busy = 0
        await asyncio.wait_for(using, DEADLINE_S)
        assert cuda.seen.exporter not in (0, threading.get_native_id())
        # A cancellation does not wait for the stream.
        cuda.settings.busy = 1 << 30
        using = asyncio.create_task(use(connection, remote))
        await asyncio.sleep(0.05)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(using, DEADLINE_S)
        cuda.settings.busy = 0
        await connection.send(b"done")


async def test_a_kernel_that_failed_is_named_and_the_connection_stays(adapter, cuda):
    kept = bytearray(PATTERN)
    async with connected(adapter, lambda peer: lend(peer, kept)) as connection:
        remote = await borrowed(connection)
        cuda.settings.query_error = 700
        with pytest.raises(ndpy.ProviderError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            await connection.write(remote[0:PAGE], interfaced(cuda, 0, PAGE, stream=7))
        await connection.send(b"done")


@pytest.mark.parametrize("length", [64, 200_000])
async def test_messages_refuse_memory_of_a_device_and_the_connection_stays(adapter, device, keep, length):
    array = interfaced(device, 0, length)
    region = keep(adapter.register(array))
    things = [array, region, region[0:length]]

    async def serve(connection):
        await connection.send(PATTERN[:length])
        assert await connection.receive() == b"done"
        await connection.send(b"end")

    async with connected(adapter, serve) as connection:
        for thing in things:
            for data in (thing, [b"before", thing]):
                with pytest.raises(ndpy.InvalidBufferError, match=REFUSED):
                    await connection.send(data)
            for into in (thing, [bytearray(length), thing]):
                with pytest.raises(ndpy.InvalidBufferError, match=REFUSED):
                    await connection.receive(into=into)
        region.close()
        for call in (connection.send(region), connection.receive(into=region), connection.expose(region).__aenter__()):
            with pytest.raises(ndpy.ClosedError):
                await call
        assert await connection.receive() == PATTERN[:length]
        await connection.send(b"done")
        assert await connection.receive() == b"end"
    assert bytes(device.view) == bytes(SIZE)


async def test_a_read_only_array_is_written_from_and_not_read_into(adapter, device):
    kept = bytearray(PATTERN)
    array = interfaced(device, 0, 64, data=(device.address, True))
    async with connected(adapter, lambda peer: lend(peer, kept)) as connection:
        remote = await borrowed(connection)
        with pytest.raises(ndpy.AccessViolationError, match="CudaArray is read-only"):
            await connection.read(remote[0:64], array)
        await connection.write(remote[0:64], array)
        assert kept == bytes(64) + PATTERN[64:]
        async with connection.expose(array, Access.REMOTE_READ):
            pass
        await connection.send(b"done")
