"""Memory that is registered by the descriptor of a dma-buf."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
from kit import dmabuf
from kit.helpers import (
    assert_refused,
    contents,
    expose,
    has_kernel_driver,
    host_of,
    memory,
    require,
    succeed,
)

import ndpy
from ndpy import Access, Capability, Operation, aio

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
EVERY_RIGHT = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK
SINK = Access.LOCAL_WRITE | Access.READ_SINK
IOVA = 0x7000_0000_0000
PATTERN = bytes((7 * place + place // 251) % 256 for place in range(SIZE))


@pytest.fixture(params=["memfd", "of the kernel"])
def device(pair, request):
    require(pair.adapter, Capability.DMABUF)
    with dmabuf.buffer(pair.adapter, SIZE, of_kernel=request.param != "memfd") as made:
        yield made


# From a page's beginning, from its middle, and over an edge to the end.
PARTS = [(0, SIZE), (PAGE, 100), (PAGE + 100, 200), (2 * PAGE - 7, 2 * PAGE + 7)]


@pytest.mark.parametrize(("offset", "length"), PARTS)
def test_a_part_of_a_dma_buf_goes_every_way_and_nothing_beside_it_changes(pair, keep, device, offset, length):
    client, server = pair
    iova = IOVA + offset % PAGE
    region = keep(pair.adapter.register_dmabuf(device.fd, offset, length, iova, EVERY_RIGHT))
    assert (region.address, region.length, region.buffer) == (iova, length, None)
    data, rest = PATTERN[:length], (bytes(offset), bytes(SIZE - offset - length))

    def assert_all(part):
        assert bytes(device.memory) == rest[0] + part + rest[1]

    other = dmabuf.use_from_both_ends(pair, keep, region, data, assert_all)
    there = memory(keep, pair.adapter, data, Access.REMOTE_READ | Access.REMOTE_WRITE)
    client.queue_pair.read(region[0:length], expose(keep, server, there))
    succeed(client.cq)
    assert_all(data)
    device.memory[offset : offset + length] = other
    client.queue_pair.write(region[0:length], expose(keep, server, there))
    succeed(client.cq)
    assert contents(there) == other


def test_the_descriptor_may_be_closed_and_the_memory_stays_as_long_as_its_region(pair, keep, device):
    copy = os.dup(device.fd)
    region = pair.adapter.register_dmabuf(copy, 0, SIZE, 0, EVERY_RIGHT)
    os.close(copy)
    remote = expose(keep, pair.server, region)
    pair.client.queue_pair.write(memory(keep, pair.adapter, PATTERN), remote)
    succeed(pair.client.cq)
    assert bytes(device.memory) == PATTERN
    region.close()
    pair.client.queue_pair.write(memory(keep, pair.adapter, bytes(SIZE)), remote, context=3)
    assert_refused(pair.client, Operation.WRITE, 3)
    assert bytes(device.memory) == PATTERN


def test_a_peer_reaches_no_byte_beside_the_part(pair, keep, device):
    region = keep(pair.adapter.register_dmabuf(device.fd, PAGE, PAGE, IOVA, EVERY_RIGHT))
    remote = expose(keep, pair.server, region)
    beyond = ndpy.RemoteMemory(remote.address + PAGE - 8, 16, remote.token)
    pair.client.queue_pair.write(memory(keep, pair.adapter, bytes(range(1, 17))), beyond, context=5)
    assert_refused(pair.client, Operation.WRITE, 5)
    assert bytes(device.memory) == bytes(SIZE)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, SIZE + 1), (SIZE, PAGE), (SIZE - 8, 9), (1 << 62, PAGE)],
    ids=["too long", "behind its end", "over its end", "far away"],
)
def test_what_is_beyond_its_end_is_refused(pair, device, offset, length):
    with pytest.raises(
        ndpy.ProviderError, match=f"{length} bytes at offset {offset} of .* which has {SIZE} bytes"
    ) as raised:
        pair.adapter.register_dmabuf(device.fd, offset, length, offset % PAGE)
    assert raised.value.native == errno.EINVAL


@pytest.mark.parametrize(("offset", "iova"), [(PAGE, 8), (8, PAGE)])
def test_another_place_in_the_page_is_refused(pair, device, offset, iova):
    with pytest.raises(ndpy.InvalidBufferError, match="the same place in their pages"):
        pair.adapter.register_dmabuf(device.fd, offset, 64, iova)


def test_what_is_no_dma_buf_is_refused(pair):
    require(pair.adapter, Capability.DMABUF)
    ends = os.pipe()
    with pytest.raises(ndpy.ProviderError, match=f"descriptor {ends[0]}, which is not a dma-buf") as raised:
        pair.adapter.register_dmabuf(ends[0], 0, PAGE, 0)
    assert raised.value.native == errno.EINVAL
    for end in ends:
        os.close(end)
    with pytest.raises(ndpy.ProviderError, match=f"of descriptor {ends[0]}: ") as raised:
        pair.adapter.register_dmabuf(ends[0], 0, PAGE, 0)
    assert raised.value.native == errno.EBADF


def test_memory_that_nobody_may_write_to_is_only_read(pair, keep):
    require(pair.adapter, Capability.DMABUF)
    if has_kernel_driver(pair.adapter):
        pytest.skip("udmabuf makes no dma-buf of sealed memory")
    memfd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.write(memfd, PATTERN)
        dmabuf.seal(memfd)
        with pytest.raises(ndpy.PermissionError):
            pair.adapter.register_dmabuf(memfd, 0, SIZE, 0, Access.LOCAL_WRITE)
        region = keep(pair.adapter.register_dmabuf(memfd, 0, SIZE, 0, Access.REMOTE_READ))
    finally:
        os.close(memfd)
    sink = memory(keep, pair.adapter, SIZE, SINK)
    pair.client.queue_pair.read(sink, expose(keep, pair.server, region))
    succeed(pair.client.cq)
    assert contents(sink) == PATTERN


def test_a_region_of_a_dma_buf_is_not_registered_again(pair, keep, device):
    require(pair.adapter, Capability.REREGISTRATION)
    region = keep(pair.adapter.register_dmabuf(device.fd, 0, SIZE, 0))
    with pytest.raises(ndpy.UnsupportedError, match="buffer"):
        region.reregister(bytearray(64))
    assert region[0:8].length == 8


def test_a_region_of_a_dma_buf_has_no_windows(pair, keep, device):
    require(pair.adapter, Capability.MEMORY_WINDOWS)
    region = keep(pair.adapter.register_dmabuf(device.fd, 0, SIZE, IOVA, EVERY_RIGHT))
    window = keep(pair.adapter.create_memory_window())
    with pytest.raises(ndpy.AccessViolationError, match=r"no windows; .* region\.remote\(\)"):
        pair.server.queue_pair.bind(window, region)
    # The connection stays.
    pair.client.queue_pair.write(memory(keep, pair.adapter, PATTERN), region.remote())
    succeed(pair.client.cq)
    assert bytes(device.memory) == PATTERN


async def test_a_connection_says_so_too_and_stays(adapter, keep):
    require(adapter, Capability.DMABUF, Capability.MEMORY_WINDOWS)

    async def serve(connection):
        await connection.send(await connection.receive())

    with dmabuf.buffer(adapter, SIZE) as device:
        region = keep(adapter.register_dmabuf(device.fd, 0, SIZE, IOVA, EVERY_RIGHT))
        async with (
            aio.serve((host_of(adapter), 0), serve, adapter=adapter, slot_size=4096) as server,
            aio.connect(server.address, adapter=adapter, slot_size=4096) as connection,
        ):
            for call in (connection.send(region), connection.expose(region).__aenter__()):
                with pytest.raises(ndpy.AccessViolationError, match="a region of a dma-buf has no windows"):
                    await call
            await connection.send(b"still there")
            assert await connection.receive() == b"still there"


def test_registering_and_closing_again_and_again_leaves_no_mapping(pair, device):
    def mappings():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum(1 for _ in maps)

    for _ in range(3):
        pair.adapter.register_dmabuf(device.fd, 0, SIZE, 0).close()
    before = mappings()
    for _ in range(200):
        pair.adapter.register_dmabuf(device.fd, 0, SIZE, 0).close()
        with pytest.raises(ndpy.ProviderError):
            pair.adapter.register_dmabuf(device.fd, 0, SIZE + 1, 0)
    assert mappings() < before + 50
