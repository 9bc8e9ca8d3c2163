"""Tests with an RDMA adapter: a plugin of pytest that is there wherever ndpy and pytest are installed.

A test that takes the fixture `rdma_adapter` runs on any machine:

    def test_a_write_arrives(rdma_pair):
        client, server = rdma_pair
        client.memory.buffer[:5] = b"hello"
        client.queue_pair.write(client.memory[:5], server.memory.remote())
        client.take_ok()
        assert server.memory.buffer[:5] == b"hello"

`pytest --rdma soft|here|vm|none` says where the adapter comes from. `soft` is the default: soft0 on Linux, softnd under
Windows. `pytest --fixtures -v` describes the fixtures, and `pytest --markers` the marker `rdma`. After a test that uses
an adapter, nothing that it has opened may be open: no object of ndpy, descriptor, thread or task. The report says where
a leaked object was made. Without a fixture, a marker or the option, the plugin imports nothing and checks nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ndpy
from ndpy.testing.peers import DEADLINE_S as DEADLINE_S
from ndpy.testing.peers import Channel as Channel
from ndpy.testing.peers import Peer as Peer
from ndpy.testing.peers import PeerFailed as PeerFailed

_DEPTH = 16
_MEMORY = 64 << 10


def take(queue: ndpy.CompletionQueue, count: int = 1, timeout_s: float = DEADLINE_S) -> list[ndpy.Completion]:
    """The next completions of a queue, the oldest first.

    Raises:
        TimeoutError: fewer than `count` came within timeout_s seconds. It says which.
    """
    deadline = time.monotonic() + timeout_s
    taken: list[ndpy.Completion] = []
    while len(taken) < count:
        try:
            taken += queue.wait(max(0.0, deadline - time.monotonic()), count - len(taken))
        except ndpy.TimeoutError:
            text = f"{len(taken)} of {count} completions came within {timeout_s:g} s: {taken}"
            raise ndpy.TimeoutError(text, problem="no-completion") from None
    return taken


def take_ok(queue: ndpy.CompletionQueue, count: int = 1, timeout_s: float = DEADLINE_S) -> list[ndpy.Completion]:
    """As take(). Raises the error of the first request that has failed."""
    taken = take(queue, count, timeout_s)
    for completion in taken:
        completion.raise_for_status()
    return taken


@dataclass
class End:
    """One end of a connection.

    Attributes:
        queue_pair: connected; 16 requests and 16 receives may be outstanding.
        queue: the completions of both.
        memory: a registered bytearray of 64 KiB, which the peer may read and write.
        connector: what made the connection.
    """

    queue_pair: ndpy.QueuePair
    queue: ndpy.CompletionQueue
    memory: ndpy.MemoryRegion
    connector: ndpy.Connector

    def take(self, count: int = 1, timeout_s: float = DEADLINE_S) -> list[ndpy.Completion]:
        """The next completions of this end. See take()."""
        return take(self.queue, count, timeout_s)

    def take_ok(self, count: int = 1, timeout_s: float = DEADLINE_S) -> list[ndpy.Completion]:
        """The same. See take_ok()."""
        return take_ok(self.queue, count, timeout_s)


@dataclass
class Pair:
    """Two connected ends in one process. `client, server = pair` names them."""

    client: End
    server: End

    def __iter__(self) -> Iterator[End]:
        return iter((self.client, self.server))


@contextlib.contextmanager
def connected_pair(adapter: ndpy.Adapter) -> Iterator[Pair]:
    """Connect two queue pairs of an adapter to each other over one of its own addresses. The end of the block closes
    all.
    """
    rights = ndpy.Access.LOCAL_WRITE | ndpy.Access.REMOTE_READ | ndpy.Access.REMOTE_WRITE
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            memory = stack.enter_context(adapter.register(bytearray(_MEMORY), rights))
            queue = stack.enter_context(adapter.create_completion_queue(4 * _DEPTH))
            queue_pair = stack.enter_context(
                adapter.create_queue_pair(queue, receive_queue_depth=_DEPTH, initiator_queue_depth=_DEPTH)
            )
            made.append((queue_pair, queue, memory))
        connectors = connect(made[0][0], made[1][0])
        for connector in connectors:
            stack.enter_context(connector)
        yield Pair(*(End(*one, connector) for one, connector in zip(made, connectors, strict=True)))


def connect(
    client: ndpy.QueuePair, server: ndpy.QueuePair, timeout_s: float = DEADLINE_S, **options: Any
) -> tuple[ndpy.Connector, ndpy.Connector]:
    """Connect two queue pairs to each other, over an address of the server's adapter.

    Parameters:
        timeout_s: how long each step may take.
        options: those of Connector.begin_connect().
    Returns: the connectors of both. The caller closes them.
    """
    adapter = server.adapter
    with adapter.listen((own_address(adapter), 0)) as listener, contextlib.ExitStack() as stack:
        connector = stack.enter_context(client.adapter.create_connector())
        connecting = connector.begin_connect(client, listener.address, **options)
        request = stack.enter_context(listener.get_request(timeout_s))
        accepting = request.begin_accept(server)
        connecting.result(timeout_s)
        connector.complete_connect(timeout_s)
        accepting.result(timeout_s)
        stack.pop_all()
        return connector, request


def own_address(adapter: ndpy.Adapter) -> str:
    """An address of the adapter to listen on and to connect to. Link-local ones need a scope, so they come last.

    Raises UnsupportedError if it has none.
    """
    if not adapter.info.addresses:
        raise ndpy.UnsupportedError(
            f"{adapter.info.name} has no IP address, so nothing can listen there; give one to its interface"
        )
    return min(adapter.info.addresses, key=lambda address: address.lower().startswith("fe80"))
