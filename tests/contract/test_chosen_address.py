"""Regions at an address of the program's choice, and relaxed ordering."""

from __future__ import annotations

import mmap

import pytest
from kit.helpers import bind, connect_pair, contents, fill, memory, require, send_message, succeed

import ndpy
from ndpy import Access, Capability

PAGE = mmap.PAGESIZE
RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE
ADDRESSES = [0, PAGE, 0x7000_0000_0000]


@pytest.fixture
def pair(adapter, keep):
    require(adapter, Capability.CHOSEN_ADDRESS)
    return connect_pair(keep, adapter)


def region_at(keep, adapter, address, data=b"", access=RIGHTS):
    region = keep(adapter.register_at(ndpy.alloc(4 * PAGE), address, access | Access.LOCAL_WRITE | Access.READ_SINK))
    fill(region, data)
    return region


@pytest.mark.parametrize("address", ADDRESSES, ids=hex)
def test_peers_use_the_address(pair, keep, address):
    data = bytes(place % 251 for place in range(2 * PAGE))
    target = region_at(keep, pair.server.adapter, address)
    remote = target.remote()
    assert (target.address, remote.address, remote.length) == (address, address, 4 * PAGE)
    queue_pair = pair.client.queue_pair
    queue_pair.write(memory(keep, pair.adapter, data), remote[PAGE + 3 : PAGE + 3 + len(data)])
    # A read proves that the write has arrived.
    back = memory(keep, pair.adapter, len(data), Access.LOCAL_WRITE | Access.READ_SINK)
    queue_pair.read(back, remote[PAGE + 3 : PAGE + 3 + len(data)])
    succeed(pair.client.cq, 2)
    assert contents(back) == data
    assert contents(target) == bytes(PAGE + 3) + data + bytes(4 * PAGE - PAGE - 3 - len(data))


@pytest.mark.parametrize("address", ADDRESSES, ids=hex)
def test_elements_use_the_address(pair, keep, address):
    region = region_at(keep, pair.adapter, address, b"out of the region")
    sink = region_at(keep, pair.server.adapter, address)
    pair.server.queue_pair.receive(sink[PAGE - 5 : PAGE + 20])
    pair.client.queue_pair.send(region[0:17])
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(sink)[PAGE - 5 : PAGE + 12] == b"out of the region"


def test_a_window_on_it(pair, keep):
    require(pair.adapter, Capability.MEMORY_WINDOWS)
    region = region_at(keep, pair.server.adapter, 0)
    send_message(keep, pair.client, pair.server, b"the client is first")
    window = keep(pair.server.adapter.create_memory_window())
    remote = bind(pair.server, window, region[PAGE : 2 * PAGE], RIGHTS)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"through it"), remote[8:18])
    succeed(pair.client.cq)
    send_message(keep, pair.client, pair.server, b"it has arrived")
    assert contents(region)[PAGE + 8 : PAGE + 18] == b"through it"


def test_impossible_addresses_are_refused(adapter, keep):
    require(adapter, Capability.CHOSEN_ADDRESS)
    buffer = ndpy.alloc(2 * PAGE)
    for address in (-1, (1 << 64) - PAGE):
        with pytest.raises(ndpy.InvalidBufferError, match="are not a range of addresses"):
            adapter.register_at(buffer, address)
    with pytest.raises(ndpy.InvalidBufferError, match=r"begins 0 bytes into a page, and the address 0x7 7 bytes"):
        adapter.register_at(buffer, 7)
    with adapter.register_at(memoryview(buffer)[7:], 7) as region:
        assert (region.address, region.length) == (7, 2 * PAGE - 7)
    with pytest.raises(ndpy.ClosedError):
        region.remote()


def test_it_cannot_be_registered_again(adapter, keep):
    require(adapter, Capability.CHOSEN_ADDRESS, Capability.REREGISTRATION)
    region = region_at(keep, adapter, 0)
    with pytest.raises(ndpy.UnsupportedError, match="a region with an address of its own"):
        region.reregister(access=Access.REMOTE_READ)
    assert region.remote().address == 0


def test_relaxed_ordering_moves_the_same_bytes(adapter, keep):
    require(adapter, Capability.RELAXED_ORDERING)
    pair = connect_pair(keep, adapter)
    target = memory(keep, pair.server.adapter, 4 * PAGE, RIGHTS | Access.RELAXED_ORDERING)
    source = memory(keep, adapter, bytes(range(256)) * 64, Access.LOCAL_WRITE | Access.RELAXED_ORDERING)
    pair.client.queue_pair.write(source, target.remote())
    succeed(pair.client.cq)
    send_message(keep, pair.client, pair.server, b"it has arrived")
    assert contents(target) == contents(source)


def test_an_adapter_without_them_says_so(adapter):
    missing = [
        capability
        for capability in (Capability.CHOSEN_ADDRESS, Capability.RELAXED_ORDERING)
        if capability not in adapter.info.capabilities
    ]
    if not missing:
        pytest.skip(f"{adapter.info.name} has both")
    for capability in missing:
        with pytest.raises(ndpy.UnsupportedError):
            if capability is Capability.CHOSEN_ADDRESS:
                adapter.register_at(bytearray(64), 0)
            else:
                adapter.register(bytearray(64), Access.RELAXED_ORDERING)
