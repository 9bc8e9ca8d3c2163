"""Memory windows of verbs' type 1 on an adapter that has both types. There ndpy takes type 2, unless a test asks for
the other.
"""

from __future__ import annotations

import dataclasses

import pytest
from kit.helpers import connect_pair, contents, memory, require, succeed, take

from ndpy import Access, Capability, Operation, Status


@pytest.fixture
def ends(adapter, keep):
    require(adapter, Capability.MEMORY_WINDOWS, Capability.LOOPBACK_CONNECTIONS)
    if adapter.info.transport == "iWARP":
        pytest.skip("only InfiniBand's transport has windows of both types")
    capabilities = adapter.info.capabilities | Capability.TYPE_1_WINDOWS
    adapter.info = dataclasses.replace(adapter.info, capabilities=capabilities)
    return connect_pair(keep, adapter)


def bind(server, window, region, access=Access.REMOTE_READ | Access.REMOTE_WRITE):
    server.queue_pair.bind(window, region, access, context=7)
    (bound,) = succeed(server.cq)
    assert (bound.operation, bound.context) == (Operation.BIND, 7)
    return window.remote()


def test_a_window_is_bound_written_to_and_invalidated_again_and_again(ends, keep, adapter):
    client, server = ends
    region = memory(keep, adapter, 64)
    window = keep(adapter.create_memory_window())
    tokens = set()
    for turn in range(5):
        remote = bind(server, window, region[8:40])
        tokens.add(remote.token)
        client.queue_pair.write(memory(keep, adapter, b"turn %d" % turn), remote)
        succeed(client.cq)
        assert contents(region)[8:14] == b"turn %d" % turn
        server.queue_pair.invalidate(window, context=8)
        (ended,) = succeed(server.cq)
        assert (ended.operation, ended.context, window.is_bound) == (Operation.INVALIDATE, 8, False)
    assert len(tokens) == 5


def test_an_invalidated_window_is_refused(ends, keep, adapter):
    client, server = ends
    region = memory(keep, adapter, 64)
    window = keep(adapter.create_memory_window())
    remote = bind(server, window, region)
    server.queue_pair.invalidate(window)
    succeed(server.cq)
    client.queue_pair.write(memory(keep, adapter, b"intruder"), remote)
    (refused,) = take(client.cq)
    assert refused.status == Status.ACCESS_VIOLATION
    assert contents(region) == bytes(64)


def test_closing_a_bound_window_revokes_it(ends, keep, adapter):
    client, server = ends
    region = memory(keep, adapter, 64)
    window = adapter.create_memory_window()
    remote = bind(server, window, region)
    window.close()
    client.queue_pair.write(memory(keep, adapter, b"intruder"), remote)
    (refused,) = take(client.cq)
    assert refused.status == Status.ACCESS_VIOLATION
    region.deregister()


def test_the_right_to_write_is_the_window_s(ends, keep, adapter):
    client, server = ends
    region = memory(keep, adapter, b"original")
    window = keep(adapter.create_memory_window())
    remote = bind(server, window, region, Access.REMOTE_READ)
    sink = memory(keep, adapter, 8)
    client.queue_pair.read(sink, remote)
    succeed(client.cq)
    assert contents(sink) == b"original"
    client.queue_pair.write(memory(keep, adapter, b"intruder"), remote)
    (refused,) = take(client.cq)
    assert (refused.status, contents(region)) == (Status.ACCESS_VIOLATION, b"original")
