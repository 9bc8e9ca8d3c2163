"""Memory regions: what only some adapters can do with them. Each needs a member of Capability."""

from __future__ import annotations

import mmap

import pytest
from kit.helpers import (
    assert_refused,
    contents,
    expose,
    memory,
    require,
    succeed,
)

import ndpy
from ndpy import Access, Operation
from ndpy.objects.memory import address_of

PATTERN = bytes(range(256)) * 16
SINK = Access.LOCAL_WRITE | Access.READ_SINK
EVERY_RIGHT = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK


def test_what_the_adapter_does_not_claim_is_refused_and_nothing_is_lost(adapter, keep):
    region = memory(keep, adapter, 64, Access.REMOTE_READ)
    before = region.local_token, region.length, region.access
    refusals = {
        ndpy.Capability.REREGISTRATION: lambda: region.reregister(bytearray(128)),
        ndpy.Capability.ON_DEMAND_PAGING: lambda: adapter.register(
            bytearray(64), Access.LOCAL_WRITE | Access.ON_DEMAND
        ),
        ndpy.Capability.IMPLICIT_ON_DEMAND: adapter.register_implicit,
        ndpy.Capability.DMABUF: lambda: adapter.register_dmabuf(0, 0, 4096, 0),
        ndpy.Capability.NULL_REGIONS: adapter.register_null,
    }
    absent = [capability for capability in refusals if capability not in adapter.info.capabilities]
    for capability in absent:
        with pytest.raises(ndpy.UnsupportedError):
            refusals[capability]()
    assert (region.local_token, region.length, region.access) == before
    if not absent:
        pytest.skip(f"{adapter.info.name} claims all of {sorted(refusals)}")


def test_a_region_that_is_registered_again_reaches_its_new_memory_only(pair, keep):
    require(pair.adapter, ndpy.Capability.REREGISTRATION)
    old, new = bytearray(b"old memory"), bytearray(10)
    region = keep(pair.adapter.register(old, Access.REMOTE_WRITE))
    stale = region.remote()
    region.reregister(new)
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"new memory"), region.remote())
    succeed(pair.client.cq)
    assert (old, new) == (b"old memory", b"new memory")
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"intruder__"), stale, context=3)
    assert_refused(pair.client, Operation.WRITE, 3)
    assert (old, new) == (b"old memory", b"new memory")


def test_memory_on_demand_is_written_and_read_by_the_peer(pair, keep):
    require(pair.adapter, ndpy.Capability.ON_DEMAND_PAGING)
    buffer = ndpy.alloc(1 << 16)
    region = keep(pair.adapter.register(buffer, Access.REMOTE_WRITE | Access.REMOTE_READ | Access.ON_DEMAND))
    pair.client.queue_pair.write(memory(keep, pair.adapter, b"faulted in"), region.remote(40000, 10))
    succeed(pair.client.cq)
    assert buffer[40000:40010] == b"faulted in"
    buffer[8190:8200] = b"over edges"
    sink = memory(keep, pair.adapter, 10, SINK)
    pair.client.queue_pair.read(sink, region.remote(8190, 10))
    succeed(pair.client.cq)
    assert contents(sink) == b"over edges"


def receive_into(pair, keep, element, data):
    pair.server.queue_pair.receive(element)
    pair.client.queue_pair.send(memory(keep, pair.adapter, data))
    succeed(pair.server.cq)


def read_into(pair, keep, element, data):
    there = memory(keep, pair.adapter, data, Access.REMOTE_READ)
    pair.client.queue_pair.read(element, expose(keep, pair.server, there))


def let_the_peer_write_into(pair, keep, element, data):
    start = element.address - element.region.address
    pair.client.queue_pair.write(memory(keep, pair.adapter, data), element.region.remote(start, element.length))


# Part of a page, a whole page, bytes on both sides of a page boundary, and several pages.
@pytest.mark.parametrize(("start", "length"), [(100, 200), (8192, 4096), (3 * 4096 - 7, 20), (4 * 4096 + 1, 3 * 4096)])
@pytest.mark.parametrize("fill_it", [receive_into, read_into, let_the_peer_write_into])
def test_memory_on_demand_that_was_never_touched_is_filled_and_sent_from(pair, keep, fill_it, start, length):
    require(pair.adapter, ndpy.Capability.ON_DEMAND_PAGING)
    data = (PATTERN * 4)[:length]
    buffer = mmap.mmap(-1, 1 << 16)
    region = keep(pair.adapter.register(buffer, EVERY_RIGHT | Access.ON_DEMAND))
    fill_it(pair, keep, region[start : start + length], data)
    succeed(pair.client.cq)
    assert bytes(buffer[:]) == bytes(start) + data + bytes(len(buffer) - start - length)
    sink = memory(keep, pair.adapter, length)
    pair.server.queue_pair.receive(sink)
    pair.client.queue_pair.send(region[start : start + length])
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(sink) == data


def test_all_memory_by_one_implicit_region_is_used_in_both_directions(pair, keep):
    require(pair.adapter, ndpy.Capability.IMPLICIT_ON_DEMAND)
    client, server = pair
    everything = keep(pair.adapter.register_implicit(EVERY_RIGHT))
    later = mmap.mmap(-1, 1 << 16)
    address = address_of(later)
    client.queue_pair.write(memory(keep, pair.adapter, b"faulted in"), everything.remote(address + 8190, 10))
    succeed(client.cq)
    assert later[8190:8200] == b"faulted in"
    server.queue_pair.receive(everything[address : address + 10])
    client.queue_pair.send(everything[address + 8190 : address + 8200])
    succeed(client.cq)
    succeed(server.cq)
    assert later[:10] == b"faulted in"
