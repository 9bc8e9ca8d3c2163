"""A bit of everything on soft0, until it fails. What it tells are the texts of the errors.

.venv/bin/python tests/docs/walking.py LIMIT_S
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator

import ndpy
from ndpy.testing import DEADLINE_S, End, connected_pair, own_address


def walk(limit_s: float) -> Iterator[str]:
    """limit_s: how long to wait for completions."""
    try:
        with ndpy.open_adapter("soft0") as adapter:
            connect(adapter)
            with connected_pair(adapter) as (client, server):
                try:
                    yield from transfers(adapter, client, server, limit_s)
                except ndpy.ProviderError as error:
                    yield str(error)
                    if error.native != errno.EIO:
                        return
                    # The event that the adapter has gone comes in its thread.
                    server.take(3, limit_s)
    except ndpy.NdpyError as error:
        yield str(error)


def connect(adapter: ndpy.Adapter) -> None:
    """Ask a server of this process for a connection, and withdraw. Raises what a client is told."""
    with (
        adapter.create_completion_queue(4) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.listen((own_address(adapter), 0)) as listener,
        adapter.create_connector() as connector,
    ):
        answered = threading.Event()
        connecting = connector.begin_connect(queue_pair, listener.address)
        request = listener.begin_get_request()
        for each in (connecting, request):
            each.add_done_callback(lambda _: answered.set())
        answered.wait(DEADLINE_S)
        if connecting.done():
            connecting.result(0)
        request.result(DEADLINE_S).close()


def transfers(adapter: ndpy.Adapter, client: End, server: End, limit_s: float) -> Iterator[str]:
    def failures(end: End, count: int) -> Iterator[str]:
        for completion in end.take(count, limit_s):
            try:
                completion.raise_for_status()
            except ndpy.NdpyError as error:
                yield str(error)

    for _ in range(2):
        server.queue_pair.receive(server.memory[:64])
    with contextlib.ExitStack() as stack:
        window = stack.enter_context(adapter.create_memory_window())
        for _ in range(2):
            client.queue_pair.send(client.memory[:8])
        yield from failures(client, 2)
        yield from failures(server, 2)
        client.queue_pair.write(client.memory[:8], server.memory.remote())
        yield from failures(client, 1)
        client.queue_pair.read(client.memory[:8], server.memory.remote())
        yield from failures(client, 1)
        client.queue_pair.bind(window, client.memory[:64], ndpy.Access.REMOTE_READ)
        yield from failures(client, 1)


if __name__ == "__main__":
    for text in walk(float(sys.argv[1])):
        print(text)
