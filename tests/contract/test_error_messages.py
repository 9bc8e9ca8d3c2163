"""What errors say: which side, which memory, which number, and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from kit.helpers import DEADLINE_S, create_end, has_quirk, memory, require, require_acknowledged_sends, take

import ndpy
import ndpy.aio
from ndpy import Access, Batch, Capability, CompletionArray, Operation, Status
from ndpy.vocabulary.quirks import Quirk

SINK = Access.LOCAL_WRITE | Access.READ_SINK
WRONG = 0x5A5A00
# On iWARP a peer that refuses a read ends the connection, and that is all that is heard of it.
ENDED = (ndpy.aio.ConnectionResetError, ndpy.aio.ConnectionEndedError)


def message_of(completion) -> str:
    with pytest.raises(ndpy.ProviderError) as caught:
        completion.raise_for_status()
    return str(caught.value)


def post_read(queue_pair, local, remote, road: str) -> None:
    if road == "read()":
        queue_pair.read(local, remote, context=7)
    elif road == "elements":
        queue_pair.read([local[0:8], local[8:16]], remote, context=7)
    else:
        batch = Batch(1, signal_all=True)
        batch.read(local, remote, context=7)
        queue_pair.post(batch)


@pytest.mark.parametrize("road", ["read()", "elements", "batch"])
@pytest.mark.parametrize("wrong", ["token", "range", "right"])
def test_a_wrong_token_range_or_right_is_told_with_the_memory_that_was_named(pair_with, keep, road, wrong):
    pair = pair_with(max_initiator_sge=2)
    require(pair.adapter, Capability.REGION_ACCESS)
    if road == "elements" and pair.adapter.info.max_read_sge < 2:
        pytest.skip(f"{pair.adapter.info.name} reads into one element")
    owner = memory(keep, pair.server.adapter, 16, Access.REMOTE_WRITE if wrong == "right" else Access.REMOTE_READ)
    remote = owner.remote()
    if wrong == "token":
        remote = ndpy.RemoteMemory(remote.address, 16, remote.token ^ WRONG)
    elif wrong == "range":
        remote = ndpy.RemoteMemory(remote.address + 8, 16, remote.token)
    post_read(pair.client.queue_pair, memory(keep, pair.adapter, 16, SINK), remote, road)
    (refused,) = take(pair.client.cq)
    assert (refused.operation, refused.context) == (Operation.READ, 7)
    if refused.ok:
        pytest.skip(f"{pair.adapter.info.driver} does it all the same")
    text = message_of(refused)
    assert repr(remote) in text
    assert "needs REMOTE_READ" in text and "[native status " in text
    if refused.status is Status.CANCELED:
        assert has_quirk(pair.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT)
        return
    assert "the peer's adapter refused access" in text or pair.adapter.info.provider != "verbs"


def test_the_first_of_many_failed_requests_is_the_one_that_is_told(pair, keep):
    require(pair.adapter, Capability.REGION_ACCESS)
    local, owner = memory(keep, pair.adapter, 16, SINK), memory(keep, pair.server.adapter, 16, Access.REMOTE_READ)
    good = owner.remote()
    for context, remote in enumerate([good, ndpy.RemoteMemory(good.address, 4, good.token ^ WRONG), good[:2], good]):
        pair.client.queue_pair.read(local[0 : remote.length], remote, context=context)
    ended = take(pair.client.cq, 4)
    failed = [each for each in ended if not each.ok]
    if failed[0].status is not Status.ACCESS_VIOLATION:
        pytest.skip(f"{pair.adapter.info.driver} reports {failed[0].status.name}, which names no memory")
    assert "length=4" in message_of(failed[0])
    assert all("RemoteMemory" not in message_of(each) for each in failed[1:])


def test_an_array_of_completions_says_it_too(pair, keep):
    require(pair.adapter, Capability.REGION_ACCESS)
    remote = memory(keep, pair.server.adapter, 16, Access.REMOTE_READ).remote()
    wrong = ndpy.RemoteMemory(remote.address, 16, remote.token ^ WRONG)
    pair.client.queue_pair.read(memory(keep, pair.adapter, 16, SINK), wrong)
    array = CompletionArray(4)
    pair.client.cq.arm().result(DEADLINE_S)
    while not pair.client.cq.poll_into(array):
        pass
    with pytest.raises(ndpy.ProviderError) as caught:
        array.raise_for_status()
    if array[0].status is Status.ACCESS_VIOLATION:
        assert repr(wrong) in str(caught.value)


def test_a_closed_queue_pair_has_an_error_all_the_same(pair, keep):
    require(pair.adapter, Capability.REGION_ACCESS)
    remote = memory(keep, pair.server.adapter, 16, Access.REMOTE_READ).remote()
    wrong = ndpy.RemoteMemory(remote.address, 16, remote.token ^ WRONG)
    pair.client.queue_pair.read(memory(keep, pair.adapter, 16, SINK), wrong)
    (refused,) = take(pair.client.cq)
    pair.client.connector.close()
    pair.client.queue_pair.close()
    assert message_of(refused).startswith("read: ")


def test_a_message_without_a_receive_is_not_told_as_a_dead_network(pair, keep):
    require_acknowledged_sends(pair.adapter)
    pair.client.queue_pair.send(memory(keep, pair.adapter, 8, Access.NONE))
    (failed,) = take(pair.client.cq)
    text = message_of(failed)
    assert "receive" in text
    if pair.adapter.info.provider == "verbs":
        assert "the peer answers, but had no receive posted for the message in time" in text
        assert "likely causes" not in text and "did not answer" not in text
        assert "post receives there before this side sends" in text
    host, port = pair.client.connector.peer_address
    assert f"{host} port {port}" in text


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b""])
def test_a_tcp_server_that_speaks_no_iwarp_is_not_told_as_nobody(adapter, keep, answer):
    if adapter.info.driver not in ("softverbs", "softnd.dll"):
        pytest.skip(f"{adapter.info.name} tells no difference")
    host = next(host for host in adapter.info.addresses if ":" not in host)
    with socket.create_server((host, 0)) as server:

        def serve() -> None:
            # The second attempt is one with an older revision of MPA.
            for _ in range(2):
                with contextlib.suppress(OSError):
                    stream, _ = server.accept()
                    with stream:
                        stream.recv(64)
                        stream.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connector, end = keep(adapter.create_connector()), create_end(keep, adapter)
        with pytest.raises(ndpy.ConnectionRefusedError) as caught:
            connector.connect(end.queue_pair, server.getsockname(), timeout_s=DEADLINE_S)
        port = server.getsockname()[1]
        # It ends accept().
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
    thread.join(DEADLINE_S)
    text = str(caught.value)
    assert f"{host} port {port}" in text
    if adapter.info.provider == "verbs":
        assert "something takes TCP connections there, but does not answer as an iWARP listener" in text
        assert "nobody listens" not in text and "ss -ltnp" in text
    else:
        assert "or what listens there speaks no RDMA" in text


def test_a_port_without_a_listener_is_told_as_nobody(adapter, keep):
    host = next((host for host in adapter.info.addresses if ":" not in host), "")
    if not host:
        pytest.skip(f"{adapter.info.name} has no IPv4 address")
    with socket.create_server((host, 0)) as server:
        address = server.getsockname()
    connector, end = keep(adapter.create_connector()), create_end(keep, adapter)
    with pytest.raises(ndpy.ConnectionRefusedError, match=f"{host} port {address[1]}: nobody listens there"):
        connector.connect(end.queue_pair, address, timeout_s=DEADLINE_S)


# ---- ndpy.aio ----


def with_a_connection(adapter, body):
    """Run body(connection) with a connection of ndpy.aio whose other end does nothing."""

    async def stay(connection):
        await connection.wait_closed()

    async def main():
        host = adapter.info.addresses[0]
        async with ndpy.aio.serve((host, 0), stay, adapter=adapter) as server:
            connection = await ndpy.aio.connect(server.address, adapter=adapter)
            try:
                return await body(connection)
            finally:
                connection.abort()
                await connection.wait_closed()

    return asyncio.run(asyncio.wait_for(main(), 3 * DEADLINE_S))


def test_a_transfer_that_the_peer_refuses_names_the_memory_and_ends_the_connection_with_it(adapter):
    require(adapter, Capability.LOOPBACK_CONNECTIONS)
    remote = ndpy.RemoteMemory(4096, 3, WRONG)

    async def body(connection):
        with pytest.raises((ndpy.AccessViolationError, *ENDED)) as refused:
            await connection.read(remote, bytearray(3))
        with pytest.raises(ENDED) as ended:
            await connection.send(b"more")
        return refused.value, ended.value

    refused, ended = with_a_connection(adapter, body)
    if isinstance(refused, ndpy.AccessViolationError):
        assert repr(remote) in str(refused) and "read: " in str(refused)
        assert "a read ended with ACCESS_VIOLATION" in str(ended) and ended.__cause__ is not None


def test_wrong_arguments_of_a_transfer_are_named(adapter):
    require(adapter, Capability.LOOPBACK_CONNECTIONS)

    async def body(connection):
        with pytest.raises(TypeError, match="remote is the peer's memory as a RemoteMemory, not str"):
            await connection.write("x", b"abc")
        with pytest.raises(ndpy.AccessViolationError, match=r"^read: the bytes is read-only"):
            await connection.read(ndpy.RemoteMemory(4096, 3, WRONG), b"abc")

    with_a_connection(adapter, body)


def test_a_client_that_gave_up_is_named_by_its_address(adapter, keep):
    require(adapter, Capability.LOOPBACK_CONNECTIONS)
    listener = keep(adapter.listen((adapter.info.addresses[0], 0)))
    client, connector = create_end(keep, adapter), keep(adapter.create_connector())
    pending = connector.begin_connect(client.queue_pair, listener.address)
    offer = keep(listener.get_request(DEADLINE_S))
    host, port = offer.peer_address
    pending.cancel()
    connector.close()
    server = create_end(keep, adapter)
    with pytest.raises((ndpy.ConnectionAbortedError, ndpy.TimeoutError, ndpy.ConnectionRefusedError)) as caught:
        offer.accept(server.queue_pair, timeout_s=DEADLINE_S)
        offer.wait_disconnected(DEADLINE_S)
        pytest.skip("the server's side was established before it heard that the client has gone")
    text = str(caught.value)
    assert text.startswith("accept: ")
    if adapter.info.driver == "softverbs":
        assert "the client has given up" in text or "the client has gone" in text
    if "the client " in text and adapter.info.provider == "verbs":
        assert f"; it was {host} port {port}" in text
