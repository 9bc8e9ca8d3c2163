"""Objects of an adapter can be neither copied nor pickled. What describes it can."""

from __future__ import annotations

import copy
import pickle

import pytest
from kit.helpers import DEADLINE_S, create_end, host_of, memory, require

import ndpy
import ndpy.ndk
from ndpy import Capability

WAYS = [copy.copy, copy.deepcopy, pickle.dumps]


def objects_of(keep, adapter, cache, end):
    """One object of each kind, by its class."""
    region = memory(keep, adapter, 64)
    lease = cache.local(bytearray(64))
    yield from (adapter, end.queue_pair, end.cq, region, region[0:8], cache, lease)
    lease.release()
    yield keep(adapter.create_connector())
    yield keep(adapter.listen((host_of(adapter), 0)))
    yield keep(ndpy.Poller())
    yield keep(ndpy.ndk.NdkMr(adapter))
    yield ndpy.Batch(4)
    if Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        yield keep(adapter.create_memory_window())
    if Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
        yield keep(adapter.create_shared_receive_queue(4))
    if Capability.EVENTS in adapter.info.capabilities:
        yield keep(adapter.events())
    if Capability.PROTECTION_DOMAINS in adapter.info.capabilities:
        yield keep(adapter.create_protection_domain())
    end.queue_pair.receive(region[0:8])
    end.queue_pair.flush()
    yield end.cq.wait(DEADLINE_S)[0]
    yield adapter.begin_register(bytearray(64))


def test_they_refuse_with_a_sentence(keep, adapter, cache):
    for thing in objects_of(keep, adapter, cache, create_end(keep, adapter)):
        for way in WAYS:
            with pytest.raises(
                TypeError, match=r"^\w+ objects can be neither copied nor pickled, because they stand for"
            ):
                way(thing)
                pytest.fail(f"{way.__name__} took {thing!r}")
        if isinstance(thing, ndpy.Pending):
            keep(thing.result(DEADLINE_S))


def test_the_description_of_an_adapter_is_equal_to_its_copy(adapter):
    info = adapter.info
    for again in (copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert (type(again), again) == (type(info), info)


def test_a_token_can_be_pickled(keep, adapter):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    region = memory(keep, adapter, 64, ndpy.Access.LOCAL_WRITE | ndpy.Access.REMOTE_WRITE)
    remote = region.remote()
    assert pickle.loads(pickle.dumps(remote)) == remote
    assert pickle.loads(pickle.dumps(remote[8:16])) == remote[8:16]
