"""Blocks of generators that are closed. The garbage collector does that too, in any thread, which may hold any lock."""

from __future__ import annotations

import pytest
from kit.helpers import host_of, require, wait_until
from kit.locks import elsewhere

import ndpy
from ndpy import Access
from ndpy.ndk import NdkMr

LENGTH = 4096


def close_block(adapter, resource):
    """Close a generator in the middle of the block of a resource."""

    def use():
        with resource:
            yield

    using = use()
    next(using)
    elsewhere(adapter, using.close)


@pytest.mark.parametrize(
    "make",
    [
        lambda adapter: adapter.register(bytearray(LENGTH)),
        lambda adapter: adapter.create_completion_queue(4),
        lambda adapter: adapter.create_connector(),
        lambda adapter: adapter.listen((host_of(adapter), 0)),
        lambda adapter: ndpy.RegistrationCache(adapter, max_bytes=LENGTH, max_entries=8),
    ],
    ids=["region", "queue", "connector", "listener", "cache"],
)
def test_a_resource_is_closed_by_the_thread_of_its_adapter(adapter, make):
    resource = make(adapter)
    close_block(adapter, resource)
    wait_until(lambda: resource.closed, "it is closed")


def test_an_adapter_closes_itself(adapter, adapter_name):
    other = ndpy.open_adapter(adapter_name)
    close_block(adapter, other)
    wait_until(lambda: other.closed, "it is closed")


@pytest.mark.parametrize("max_entries", [1, 8])
def test_a_lease_is_released_by_its_cache(adapter, max_entries):
    """With room for one entry, the release has to deregister the other one."""
    with (
        ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=max_entries) as cache,
        cache.local(bytearray(LENGTH)),
    ):
        lease = cache.local(bytearray(LENGTH))
        entry = lease._entry_in_use()
        close_block(adapter, lease)
        with pytest.raises(ndpy.ClosedError):
            lease[0:8]
        wait_until(lambda: not entry.uses, "the lease is released")
        wait_until(lambda: cache.stats.entries == min(max_entries, 2), "the other one is deregistered")


def test_the_right_of_an_exposure_ends(pair, cache):
    require(pair.adapter, ndpy.Capability.MEMORY_WINDOWS)
    exposure = cache.remote(bytearray(LENGTH), pair.server.queue_pair, Access.REMOTE_READ)
    close_block(pair.adapter, exposure)
    wait_until(lambda: exposure.revoked, "the right has ended")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_memory_region_of_ndk_is_closed(adapter):
    region = NdkMr(adapter)
    close_block(adapter, region)
    wait_until(lambda: "closed" in repr(region), "it is closed")


def test_a_poller_stops_when_it_is_dropped(adapter):
    with adapter.create_completion_queue(4) as queue:
        poller = ndpy.Poller()
        poller.add(queue)
        close_block(adapter, poller)
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0)
        del poller
        wait_until(lambda: not queue._pollers, "the queue has forgotten the poller")
