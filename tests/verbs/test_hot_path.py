"""What a post and a poll cost: calls into the extension, but none for each field or completion."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from helpers import memory, take
from ndpy._verbs import lib

from ndpy import Access

NATIVE = {
    getattr(lib, name): name for name in dir(lib) if name.startswith(("ndpy_", "ibv_")) and callable(getattr(lib, name))
}


def native_calls(call: Callable[[], object]) -> list[str]:
    """The names of the extension's functions that run during the call."""
    seen: list[str] = []

    def note(_frame: object, event: str, function: object) -> None:
        if event == "c_call" and function in NATIVE:
            seen.append(NATIVE[function])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_each_post_is_one_native_call(adapter, keep, pair):
    client, server = pair.client, pair.server
    local = memory(keep, adapter, 64, Access.LOCAL_WRITE | Access.READ_SINK)
    owner = memory(keep, adapter, 64, Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote, element = owner.remote(), local[8:16]
    posts = {
        "receive": lambda: server.queue_pair.receive(local),
        "send": lambda: client.queue_pair.send(element),
        "write": lambda: client.queue_pair.write(local, remote),
        "read": lambda: client.queue_pair.read(element, remote[:8]),
    }
    for name, post in posts.items():
        (call,) = native_calls(post)
        assert call.startswith("ndpy_post"), name
    take(client.cq, 3)


def test_several_elements_are_one_native_call(adapter, keep, pair_with):
    if adapter.info.max_initiator_sge < 2:
        pytest.skip(f"{adapter.info.name} takes one element a request")
    client = pair_with(max_initiator_sge=2).client
    local = memory(keep, adapter, 64)
    owner = memory(keep, adapter, 64, Access.REMOTE_WRITE)
    calls = native_calls(lambda: client.queue_pair.write([local[0:8], local[32:40]], owner.remote()))
    assert len(calls) == 1
    take(client.cq, 1)


def test_completions_are_taken_in_one_go(adapter, keep, pair):
    local = memory(keep, adapter, 8)
    owner = memory(keep, adapter, 8, Access.REMOTE_WRITE)
    for context in range(12):
        pair.client.queue_pair.write(local, owner.remote(), context=context)
    taken: list[int] = []
    pair.client.cq.arm().result(10)
    while len(taken) < 12:
        completions = []
        calls = native_calls(lambda: completions.extend(pair.client.cq.poll(64)))  # noqa: B023
        assert calls == ["ndpy_poll"]
        # Reading a completion's fields makes no native call.
        assert native_calls(lambda: [(c.status, c.context, c.nbytes, c.operation) for c in completions]) == []  # noqa: B023
        taken += [completion.context for completion in completions]
    assert taken == list(range(12))
