"""What a post, a poll and a registration cost in Python: one call, and nothing for each field or completion."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from kit.helpers import memory, take

import ndpy
from ndpy import Access


def calls_of(function: Callable[[], object]) -> list[str]:
    """The names of the functions that run during the call, in Python and in C, in their order."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            seen.append(called.__name__)
        elif event == "call" and frame.f_code is not function.__code__:
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    # The end of the measurement is a call too.
    return seen[:-1]


def test_posting_a_slice_of_a_region_is_one_call(adapter, keep, pair):
    client, server = pair.client, pair.server
    local = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.READ_SINK)
    owner = memory(keep, adapter, 64, Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote = owner.remote()
    assert calls_of(lambda: server.queue_pair.receive(local[0:8])) == ["receive"]
    assert calls_of(lambda: client.queue_pair.send(local[8:16])) == ["send"]
    assert calls_of(lambda: client.queue_pair.write(local[8:16], remote, context=7)) == ["write"]
    assert calls_of(lambda: client.queue_pair.read(local[8:16], remote[:8], flags=0)) == ["read"]
    take(client.cq, 3)


def test_several_elements_are_posted_once(adapter, keep, pair_with):
    if adapter.info.max_initiator_sge < 2:
        pytest.skip(f"{adapter.info.name} takes one element a request")
    client = pair_with(max_initiator_sge=2).client
    local = memory(keep, adapter, 64)
    remote = memory(keep, adapter, 64, Access.REMOTE_WRITE).remote()
    calls = calls_of(lambda: client.queue_pair.write([local[0:8], local[32:40]], remote))
    assert calls.count("_post_elements") == 1
    take(client.cq, 1)


def test_completions_are_taken_in_one_go(adapter, keep, pair):
    local = memory(keep, adapter, 8)
    owner = memory(keep, adapter, 8, Access.REMOTE_WRITE)
    for context in range(12):
        pair.client.queue_pair.write(local, owner.remote(), context=context)
    taken: list[int] = []
    pair.client.cq.arm().result(10)
    while len(taken) < 12:
        completions: list[ndpy.Completion] = []

        def poll() -> None:
            completions.extend(pair.client.cq.poll(64))  # noqa: B023

        def read_fields() -> None:
            for completion in completions:  # noqa: B023
                _ = completion.status, completion.context, completion.nbytes, completion.operation

        assert calls_of(poll) == ["poll", "extend"]
        assert calls_of(read_fields) == []
        taken += [completion.context for completion in completions]
    assert taken == list(range(12))


# A look for leaks notes where regions are made.
@pytest.mark.rdma(leaks=False)
def test_registering_and_closing_are_one_call_each(adapter):
    buffer = bytearray(4096)
    region = adapter.register(buffer)
    assert calls_of(lambda: adapter.register(buffer, Access.REMOTE_WRITE).close()) == ["register", "close"]
    assert calls_of(region.close) == ["close"]
    assert calls_of(region.close) == ["close"]
