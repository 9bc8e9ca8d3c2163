"""Objects in a garbage cycle. The provider lets go of memory before that is freed, in whatever order the collector
goes.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from kit.helpers import wait_until
from native_answers import Native
from own_softnd import keep_with_adapter

import ndpy
from ndpy.platforms.networkdirect.native_calls import lib

BOTH = pytest.mark.parametrize("version", [2, 1])
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


def calls_of(native: Native, *names: str) -> list[str]:
    """The names of native functions, in the order in which they are called from now on."""
    order: list[str] = []

    def noting(name: str) -> Any:
        def called(*arguments: Any) -> Any:
            order.append(name)
            return getattr(lib, name)(*arguments)

        return called

    for name in names:
        setattr(native, name, noting(name))
    return order


def put_into_a_cycle(*things: Any) -> None:
    cycle = [*things]
    cycle.append(cycle)


@BOTH
def test_memory_of_a_node_goes_after_its_region(keep, version, native):
    deregister = {2: "IND2MemoryRegion_Deregister", 1: "INDAdapter_DeregisterMemory"}[version]
    order = calls_of(native, "VirtualFree", deregister)
    put_into_a_cycle(keep.adapter.register(ndpy.alloc(1000, numa_node=0)))
    wait_until(lambda: gc.collect() is not None and "VirtualFree" in order, "the memory is freed")
    assert order == [deregister, "VirtualFree"]


@pytest.mark.parametrize("version", [1])
def test_the_slot_of_a_window_goes_after_the_window(keep, version, native):
    order = calls_of(native, "IUnknown_Release", "version1_window_free")
    put_into_a_cycle(keep.adapter.create_memory_window())
    wait_until(lambda: gc.collect() is not None and "version1_window_free" in order, "the slot is freed")
    assert order == ["IUnknown_Release", "version1_window_free"]


@BOTH
def test_a_request_goes_after_its_last_use(keep, version, native):
    result = {2: "ndpy_request_result", 1: "version1_request_result"}[version]
    order = calls_of(native, result, "ndpy_request_stop", "ndpy_request_drop")
    queue = keep.adapter.create_completion_queue(8)
    with pytest.raises(ndpy.TimeoutError):
        queue.wait(0.01)
    order.clear()
    put_into_a_cycle(queue)
    del queue
    wait_until(lambda: gc.collect() is not None and "ndpy_request_drop" in order, "the request is freed")
    assert order.count("ndpy_request_drop") == 1
    assert order[-1] == "ndpy_request_drop"
