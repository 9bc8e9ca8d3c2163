"""soft0 copies memory of a CUDA device through the driver's library when it cannot map it."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.dmabuf import use_from_both_ends
from kit.fake_cuda import SIZE, CudaArray
from kit.helpers import (
    DEADLINE_S,
    assert_refused,
    bind,
    contents,
    expose,
    memory,
    succeed,
    take,
    wait_until,
)

import ndpy
from ndpy import Access, Operation, Status, aio
from ndpy.platforms.verbs.native_calls import ffi, lib

PAGE = mmap.PAGESIZE
EVERY_RIGHT = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK
PATTERN = bytes((7 * place + place // 251) % 256 for place in range(SIZE))
PARTS = [(0, SIZE), (PAGE, 100), (PAGE + 100, 200), (2 * PAGE - 7, 9)]


pytestmark = pytest.mark.usefixtures("takes_cuda_memory")


@pytest.fixture(params=["a dma-buf", "an address"])
def device(request, cuda, unmappable):
    """The driver. The adapter gets its memory as a dma-buf that cannot be mapped, or by its address alone."""
    if request.param == "a dma-buf":
        cuda.settings.unmappable = unmappable
    else:
        cuda.settings.export_error = 801
    return cuda


def array(cuda, offset=0, length=SIZE):
    return CudaArray(cuda.address + offset, length)


@pytest.mark.parametrize("has_context", [0, 1])
@pytest.mark.parametrize(("offset", "length"), PARTS)
def test_memory_of_a_device_goes_every_way_and_nothing_beside_it_changes(
    pair, keep, device, offset, length, has_context
):
    device.settings.has_context = has_context
    region = keep(pair.adapter.register(array(device, offset, length), EVERY_RIGHT))
    assert (device.seen.streams, device.seen.retained) == (1, 1 - has_context)

    def assert_all(part):
        assert bytes(device.view) == bytes(offset) + part + bytes(SIZE - offset - length)

    use_from_both_ends(pair, keep, region, PATTERN[:length], assert_all)
    assert device.seen.reads >= 2
    assert device.seen.writes >= 2
    region.close()
    assert (device.seen.streams, device.seen.retained) == (0, 0)


def test_one_device_writes_to_another_and_pieces_are_gathered_and_scattered(pair_with, keep, device):
    pair = pair_with(max_initiator_sge=3, max_receive_sge=3)
    client, server = pair
    middle = SIZE // 2
    device.view[:middle] = PATTERN[:middle]
    region = keep(pair.adapter.register(array(device, 0, middle), EVERY_RIGHT))
    other = keep(pair.adapter.register(array(device, middle, middle), EVERY_RIGHT))
    client.queue_pair.write(region[0:middle], expose(keep, server, other))
    succeed(client.cq)
    assert bytes(device.view) == PATTERN[:middle] * 2
    host = memory(keep, pair.adapter, b"host")
    server.queue_pair.receive([other[0:3], host[1:3], other[8:13]])
    client.queue_pair.send([region[1:5], host[0:4], region[100:102]])
    succeed(client.cq)
    succeed(server.cq)
    message = PATTERN[1:5] + b"host" + PATTERN[100:102]
    there = bytearray(PATTERN[:16])
    there[0:3], there[8:13] = message[0:3], message[5:10]
    assert bytes(device.view[middle : middle + 16]) == there
    assert contents(host) == b"h" + message[3:5] + b"t"
    client.queue_pair.read(region[0:middle], expose(keep, server, other))
    succeed(client.cq)
    assert bytes(device.view[:middle]) == bytes(device.view[middle:])


def test_memory_of_a_device_that_is_a_dma_buf_has_no_windows(window_pair, keep, cuda, unmappable):
    cuda.settings.unmappable = unmappable
    region = keep(window_pair.adapter.register(array(cuda)))
    window = keep(window_pair.adapter.create_memory_window())
    with pytest.raises(ndpy.AccessViolationError, match="a region of a dma-buf has no windows"):
        window_pair.server.queue_pair.bind(window, region[0:64])


def test_a_window_reaches_memory_of_a_device(window_pair, keep, cuda):
    client, server = window_pair
    # A region of a dma-buf has no windows.
    cuda.settings.export_error = 801
    region = keep(client.adapter.register(array(cuda, PAGE, PAGE), Access.LOCAL_WRITE))
    window = keep(client.adapter.create_memory_window())
    remote = bind(server, window, region[64:128], Access.REMOTE_READ | Access.REMOTE_WRITE)
    client.queue_pair.write(memory(keep, client.adapter, PATTERN[:64]), remote)
    succeed(client.cq)
    assert bytes(cuda.view) == bytes(PAGE + 64) + PATTERN[:64] + bytes(SIZE - PAGE - 128)
    sink = memory(keep, client.adapter, 64, Access.LOCAL_WRITE | Access.READ_SINK)
    client.queue_pair.read(sink, remote)
    succeed(client.cq)
    assert contents(sink) == PATTERN[:64]


PEER = """
import sys
sys.path.insert(0, sys.argv[1])
import asyncio, ndpy
from pathlib import Path
from kit.fake_cuda import SIZE, CudaArray, FakeCuda
from ndpy import Access, aio

async def main():
    cuda = FakeCuda(Path(sys.argv[2]))
    cuda.settings.export_error = 801
    async with aio.connect((sys.argv[3], int(sys.argv[4])), adapter=sys.argv[5]) as connection:
        memory = CudaArray(cuda.address, SIZE)
        with connection.adapter.register(memory, Access.LOCAL_WRITE | Access.READ_SINK) as region:
            remote = ndpy.RemoteMemory.from_bytes(await connection.receive())
            await connection.read(remote, region)
            cuda.view[:] = bytes(cuda.view)[::-1]
            await connection.write(remote, region)
        await connection.send(b"done")
        assert cuda.seen.reads and cuda.seen.writes and not cuda.seen.mistakes and not cuda.seen.streams

asyncio.run(main())
"""


async def test_a_device_of_another_process_reads_and_writes_memory_of_a_device(adapter, keep, device):
    device.view[:] = PATTERN
    region = keep(adapter.register(array(device), EVERY_RIGHT))
    done = asyncio.Event()

    async def serve(connection):
        await connection.send(region.remote().to_bytes())
        assert await connection.receive() == b"done"
        done.set()

    async with aio.serve((adapter.info.addresses[0], 0), serve, adapter=adapter) as server:
        folder = Path(__file__).parents[1]
        command = [sys.executable, "-c", PEER, folder, device.path, *server.address[:2], adapter.info.name]
        peer = await asyncio.to_thread(
            subprocess.run, [str(part) for part in command], capture_output=True, timeout=DEADLINE_S * 6, check=False
        )
        assert peer.returncode == 0, peer.stderr.decode()
        await asyncio.wait_for(done.wait(), DEADLINE_S)
    assert bytes(device.view) == PATTERN[::-1]


# ---- bad ranges ----


def test_a_peer_reaches_no_byte_beside_the_region(pair, keep, device):
    region = keep(pair.adapter.register(array(device, PAGE, PAGE), EVERY_RIGHT))
    remote = expose(keep, pair.server, region)
    beyond = ndpy.RemoteMemory(remote.address + PAGE - 8, 16, remote.token)
    pair.client.queue_pair.write(memory(keep, pair.adapter, bytes(range(1, 17))), beyond, context=5)
    assert_refused(pair.client, Operation.WRITE, 5)
    assert bytes(device.view) == bytes(SIZE)
    assert device.seen.writes == 0


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE + 1), (SIZE - 8, 9), (SIZE, 8), (0, 1 << 40)])
def test_what_is_not_all_in_one_allocation_is_refused(adapter, cuda, offset, length):
    cuda.settings.export_error = 801
    adapter.register((cuda.address, 8)).close()
    with pytest.raises(ndpy.NdpyError):
        adapter.register((cuda.address + offset, length))
    assert cuda.seen.streams == 0


def test_an_allocation_that_is_shorter_than_its_descriptor_says_is_refused(adapter, cuda, unmappable):
    cuda.settings.range_size = PAGE
    adapter.register_dmabuf(unmappable, 0, PAGE, cuda.address, Access.REMOTE_READ).close()
    with pytest.raises(ndpy.UnsupportedError) as raised:
        adapter.register_dmabuf(unmappable, 0, PAGE + 1, cuda.address, Access.REMOTE_READ)
    assert raised.value.native == errno.EOPNOTSUPP


def test_a_descriptor_that_is_no_dma_buf_or_too_short_is_refused_whatever_the_address(adapter, cuda, unmappable):
    ends = os.pipe()
    size = os.fstat(unmappable).st_size // PAGE * PAGE
    try:
        for fd, offset in ((ends[0], 0), (unmappable, size + PAGE)):
            with pytest.raises(ndpy.ProviderError) as raised:
                adapter.register_dmabuf(fd, offset, PAGE, cuda.address, Access.REMOTE_READ)
            assert raised.value.native == errno.EINVAL
    finally:
        for end in ends:
            os.close(end)
    with pytest.raises(ndpy.ProviderError) as raised:
        adapter.register_dmabuf(ends[0], 0, PAGE, cuda.address, Access.REMOTE_READ)
    assert raised.value.native == errno.EBADF
    assert cuda.seen.streams == 0


def test_a_descriptor_needs_the_address_of_memory_of_a_device(adapter, cuda, unmappable):
    for iova in (0, cuda.address - PAGE, cuda.address + SIZE):
        with pytest.raises(ndpy.UnsupportedError, match="cannot reach") as raised:
            adapter.register_dmabuf(unmappable, 0, PAGE, iova, Access.REMOTE_READ)
        assert raised.value.native == errno.EOPNOTSUPP


def test_a_library_that_the_program_has_not_loaded_is_not_loaded(adapter, cuda, unmappable, monkeypatch, tmp_path):
    other = tmp_path / "other.so"
    other.write_bytes(cuda.path.read_bytes())
    monkeypatch.setenv("NDPY_LIBCUDA", str(other))
    with pytest.raises(ndpy.UnsupportedError):
        adapter.register_dmabuf(unmappable, 0, PAGE, cuda.address, Access.REMOTE_READ)
    with pytest.raises(ndpy.NdpyError):
        adapter.register((cuda.address, PAGE))
    assert str(other) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("name", "value"), [("create_error", 2), ("memory_type", 0), ("memory_type", 1), ("freed", 1), ("lost", 1)]
)
@pytest.mark.parametrize("has_context", [0, 1])
def test_a_registration_that_the_driver_refuses_fails_and_leaves_nothing(
    adapter, cuda, unmappable, name, value, has_context
):
    cuda.settings.has_context = has_context
    setattr(cuda.settings, name, value)
    with pytest.raises(ndpy.UnsupportedError):
        adapter.register_dmabuf(unmappable, 0, PAGE, cuda.address, Access.REMOTE_READ)
    with pytest.raises(ndpy.NdpyError):
        adapter.register((cuda.address, PAGE))
    assert (cuda.seen.streams, cuda.seen.retained, cuda.seen.contexts) == (0, 0, 0)


# ---- copies that fail ----

FAILURES = {
    "freed": {"freed": 1},
    "freed and allocated again": {"number": 2},
    "its context destroyed": {"lost": 1},
    "a copy refused": {"copy_error": 700},
    "a copy failed": {"wait_error": 719},
}


@pytest.mark.parametrize("has_context", [0, 1])
@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("operation", ["write to it", "read it", "write from it", "send it", "receive there"])
def test_a_copy_that_fails_ends_the_request_with_an_error(pair, keep, device, kind, operation, has_context):
    client, server = pair
    device.settings.has_context = has_context
    region = keep(pair.adapter.register(array(device), EVERY_RIGHT))
    host = memory(keep, pair.adapter, b"x" * 64, EVERY_RIGHT)
    remote = expose(keep, server, region)
    for name, value in FAILURES[kind].items():
        setattr(device.settings, name, value)
    before = bytes(device.view)
    match operation:
        case "write to it":
            client.queue_pair.write(host, remote[0:64], context=9)
            assert_refused(client, Operation.WRITE, 9)
        case "read it":
            client.queue_pair.read(host, remote[0:64], context=9)
            assert_refused(client, Operation.READ, 9)
        case "write from it":
            client.queue_pair.write(region[0:64], expose(keep, server, host), context=9)
            assert take(client.cq)[0].status is Status.ACCESS_VIOLATION
        case "send it":
            client.queue_pair.send(region[0:64], context=9)
            assert take(client.cq)[0].status is Status.ACCESS_VIOLATION
        case "receive there":
            server.queue_pair.receive(region[0:64], context=9)
            client.queue_pair.send(host)
            assert take(server.cq)[0].status is Status.ACCESS_VIOLATION
            assert not take(client.cq)[0].ok
    assert bytes(device.view) == before
    assert contents(host) == b"x" * 64
    region.close()
    # A destroyed context has its streams no more.
    assert device.seen.streams == device.settings.lost


def test_a_region_is_not_moved_to_memory_of_a_device_or_away_from_it(pair, keep, device):
    region = keep(pair.adapter.register(array(device), EVERY_RIGHT))
    host = keep(pair.adapter.register(bytearray(64)))
    change = lib.IBV_REREG_MR_CHANGE_TRANSLATION
    there = ffi.cast("void *", device.address)
    assert lib.ibv_rereg_mr(region._native, change, ffi.NULL, there, 64, 0) == lib.IBV_REREG_MR_ERR_INPUT
    assert ffi.errno == errno.EINVAL
    assert lib.ibv_rereg_mr(host._native, change, ffi.NULL, there, 64, 0) == lib.IBV_REREG_MR_ERR_CMD
    assert ffi.errno == errno.EFAULT
    pair.client.queue_pair.write(memory(keep, pair.adapter, PATTERN), expose(keep, pair.server, region))
    succeed(pair.client.cq)
    assert bytes(device.view) == PATTERN


WRITER = """
import asyncio, sys, ndpy
from ndpy import aio

async def main():
    async with aio.connect((sys.argv[1], int(sys.argv[2])), adapter=sys.argv[3]) as connection:
        remote = ndpy.RemoteMemory.from_bytes(await connection.receive())
        try:
            while True:
                await connection.write(remote, bytes(remote.length))
        except (ndpy.NdpyError, ConnectionError):
            pass

asyncio.run(main())
"""


async def test_deregistering_waits_for_a_copy_that_is_under_way(adapter, device):
    region = adapter.register(array(device), EVERY_RIGHT)
    done = asyncio.get_running_loop().create_future()

    async def serve(connection):
        await connection.send(region.remote().to_bytes())
        device.settings.wait_ms = 300
        # The loop stands still meanwhile, so a thread of the library copies.
        wait_until(lambda: device.seen.waits, "a copy that is under way")
        region.close()
        done.set_result((device.seen.waits, device.seen.streams, device.seen.writes))
        device.settings.wait_ms = 0

    async with aio.serve((adapter.info.addresses[0], 0), serve, adapter=adapter) as server:
        command = [sys.executable, "-c", WRITER, *server.address[:2], adapter.info.name]
        peer = await asyncio.create_subprocess_exec(*(str(part) for part in command))
        try:
            waits, streams, writes = await asyncio.wait_for(done, 3 * DEADLINE_S)
            assert await asyncio.wait_for(peer.wait(), 3 * DEADLINE_S) == 0
        finally:
            if peer.returncode is None:
                peer.kill()
                await peer.wait()
    assert (waits, streams) == (0, 0)
    assert device.seen.writes == writes


def test_regions_come_and_go_and_leave_nothing(adapter, cuda, unmappable):
    cuda.settings.has_context = 0
    for number in range(50):
        with (
            adapter.register((cuda.address + number, PAGE)),
            adapter.register_dmabuf(unmappable, 0, SIZE, cuda.address),
        ):
            assert (cuda.seen.streams, cuda.seen.retained) == (2, 2)
    assert (cuda.seen.streams, cuda.seen.retained) == (0, 0)
