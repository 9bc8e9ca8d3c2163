"""What the loggers of ndpy say, and that the data path says nothing."""

from __future__ import annotations

import logging
import mmap

import pytest
from kit.helpers import DEADLINE_S, connect_pair, create_end, host_of, memory, require, statuses, succeed, take

import ndpy
from ndpy import Capability, Status, aio


@pytest.fixture
def said(caplog):
    """said(logger) returns the messages of a logger so far."""
    caplog.set_level(logging.DEBUG, "ndpy")
    return lambda name: [record.getMessage() for record in caplog.records if record.name == f"ndpy.{name}"]


def states(messages: list[str], name: str) -> list[str]:
    """The states through which the connector of this name went."""
    changes = [message.partition(": from ")[2] for message in messages if message.startswith(f"{name}: from ")]
    return [change.partition(":")[0] for change in changes]


def test_each_change_of_a_connectors_state_is_logged_with_its_reason(said, adapter, keep):
    require(adapter, Capability.LOOPBACK_CONNECTIONS)
    pair = connect_pair(keep, adapter)
    client, server = pair.client.queue_pair.connector, pair.server.queue_pair.connector
    client.disconnect(DEADLINE_S)
    server.wait_disconnected(DEADLINE_S)
    messages = said("connections")
    assert states(messages, client._name()) == [
        "idle to connecting",
        "connecting to offered",
        "offered to completing",
        "completing to established",
        "established to disconnected",
    ]
    ways = states(messages, server._name())
    assert ways[:2] == ["idle to requested", "requested to accepting"]
    assert ways[-1] == "established to disconnected"
    assert f"{client._name()}: from connecting to offered: the server accepted" in messages
    assert any(message.startswith(f"{server._name()}: the client has an address; it was ") for message in messages)
    assert any(message.endswith(": listens") for message in messages)


def test_a_connect_that_fails_is_logged_with_its_error(said, adapter, keep):
    end = create_end(keep, adapter)
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.NdpyError) as caught:
        connector.connect(end.queue_pair, (host_of(adapter), 1), timeout_s=DEADLINE_S)
    if isinstance(caught.value, ndpy.TimeoutError):
        pytest.skip("the adapter does not tell that nobody listens")
    (told,) = [message for message in said("connections") if "connecting to" in message and " failed: " in message]
    assert told.startswith(connector._name())
    assert str(caught.value) in told


def test_each_failed_request_is_logged_but_those_that_it_cancels_are_not(said, adapter, pair, keep):
    for _ in range(4):
        pair.server.queue_pair.receive(memory(keep, pair.server.adapter, 8))
    for _ in range(4):
        pair.client.queue_pair.send(memory(keep, pair.client.adapter, b"longer than its receive"))
    found = statuses(take(pair.server.cq, 4))
    failed = [status for status in found if status not in (Status.SUCCESS, Status.CANCELED)]
    assert failed
    name = f"{adapter.info.name}: queue pair {pair.server.queue_pair._serial}"
    assert said("connections").count(f"{name}: a request has failed, see its completion") == len(failed)


def test_requests_and_completions_log_nothing(said, caplog, pair, keep):
    source, sink = memory(keep, pair.client.adapter, b"x" * 64), memory(keep, pair.server.adapter, 64)
    caplog.clear()
    for _ in range(50):
        pair.server.queue_pair.receive(sink)
        pair.client.queue_pair.send(source)
        succeed(pair.client.cq)
        succeed(pair.server.cq)
    assert [record.getMessage() for record in caplog.records] == []


def test_a_cache_logs_what_it_registers_replaces_evicts_and_invalidates(said, adapter, keep):
    cache = keep(ndpy.RegistrationCache(adapter, max_bytes=3 << 16, max_entries=8))
    whole = mmap.mmap(-1, 1 << 16)
    view = memoryview(whole)
    for part in (view[0:4096], view[0:4096], view[2048:8192], view):
        cache.local(part).release()
    first, second = bytearray(1 << 17), bytearray(1 << 17)
    cache.local(first).release()
    cache.local(second).release()
    cache.invalidate(second)
    told = [message.partition(f"{cache._name()}: ")[2] for message in said("cache")]
    assert [message.partition(" bytes")[0] for message in told if message.startswith("registered")] == [
        "registered 4096",
        "registered 8192",
        "registered 65536",
        "registered 131072",
        "registered 131072",
    ]
    assert sum("it was replaced, or there was no room" in message for message in told) == 4
    assert sum(message.startswith("invalidate() of 131072 bytes at ") for message in told) == 1
    view.release()


def test_the_life_of_an_adapter_is_logged(said, adapter_name):
    with ndpy.open_adapter(adapter_name) as adapter:
        name = adapter.info.name
    told = said("adapters")
    assert told[-2].startswith(f"{name}: opened; its driver is ")
    assert told[-1] == f"{name}: closed"


async def test_the_states_of_a_connection_of_asyncio_are_logged(said, adapter):
    require(adapter, Capability.LOOPBACK_CONNECTIONS)

    async def echo(connection: aio.Connection) -> None:
        await connection.send(await connection.receive())

    async with (
        aio.serve((host_of(adapter), 0), echo, adapter=adapter) as server,
        aio.connect(server.address, adapter=adapter) as connection,
    ):
        await connection.send(b"hello")
        assert await connection.receive() == b"hello"
    told = said("aio")
    assert sum("from connecting to " in message for message in told) == 2
    assert any(" to ended: it is over" in message for message in told)
