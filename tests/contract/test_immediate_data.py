"""Immediate data: a number of 32 bits beside a message or a write."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.helpers import (
    assert_quiet,
    assert_works,
    connect_ends,
    contents,
    create_end,
    memory,
    require,
    send_message,
    succeed,
    take,
)

import ndpy
from ndpy import Access, Batch, Capability, CompletionArray, Flags, Notify, Operation, Status

# All four bytes differ, so a wrong byte order shows. The highest bit is set.
VALUE = 0x81020304


@pytest.fixture
def ends(pair):
    require(pair.adapter, Capability.IMMEDIATE_DATA)
    return pair


@pytest.fixture
def target(ends, keep):
    return memory(keep, ends.server.adapter, 64, Access.REMOTE_WRITE)


@pytest.mark.parametrize("value", [0, 1, VALUE, 0xFFFFFFFF])
def test_a_message_brings_its_number(ends, keep, value):
    inbox = memory(keep, ends.server.adapter, 16)
    ends.server.queue_pair.receive(inbox, context=1)
    ends.client.queue_pair.send(memory(keep, ends.adapter, b"message"), context=2, immediate=value)
    (sent,) = succeed(ends.client.cq)
    (received,) = succeed(ends.server.cq)
    assert (sent.operation, sent.context, sent.immediate) == (Operation.SEND, 2, None)
    assert (received.operation, received.context, received.nbytes) == (Operation.RECEIVE, 1, 7)
    assert received.immediate == value
    assert contents(inbox)[:8] == b"message\0"


def test_none_is_no_number(ends, keep):
    ends.server.queue_pair.receive(memory(keep, ends.server.adapter, 16))
    ends.client.queue_pair.send(memory(keep, ends.adapter, b"message"), immediate=None)
    assert [completion.immediate for completion in succeed(ends.server.cq)] == [None]


def test_a_write_with_a_number_ends_a_receive_and_leaves_its_memory(ends, keep, target):
    inbox = memory(keep, ends.server.adapter, b"untouched")
    ends.server.queue_pair.receive(inbox, context=1)
    source = memory(keep, ends.adapter, b"written by the peer")
    ends.client.queue_pair.write(source, target.remote()[8:], context=2, immediate=VALUE)
    (written,) = succeed(ends.client.cq)
    (received,) = succeed(ends.server.cq)
    assert (written.operation, written.context, written.nbytes) == (Operation.WRITE, 2, 19)
    assert received.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert (received.context, received.nbytes, received.immediate) == (1, 19, VALUE)
    assert contents(target)[:28] == bytes(8) + b"written by the peer" + bytes(1)
    assert contents(inbox) == b"untouched"


def test_a_write_of_several_pieces_or_of_none(keep, adapter, pair_with):
    require(adapter, Capability.IMMEDIATE_DATA)
    pair = pair_with(max_initiator_sge=2)
    target = memory(keep, pair.server.adapter, 64, Access.REMOTE_WRITE)
    for context in (1, 2):
        pair.server.queue_pair.receive([], context=context)
    source = memory(keep, adapter, b"abcdefgh")
    pair.client.queue_pair.write([source[4:8], source[0:4]], target.remote(), immediate=1)
    pair.client.queue_pair.write([], target.remote(), immediate=2)
    succeed(pair.client.cq, 2)
    assert [(found.nbytes, found.immediate) for found in succeed(pair.server.cq, 2)] == [(8, 1), (0, 2)]
    assert contents(target)[:8] == b"efghabcd"


def test_inline_and_registered_bytes_are_alike(keep, adapter, pair_with):
    require(adapter, Capability.IMMEDIATE_DATA, Capability.INLINE)
    pair = pair_with(inline_data_size=16)
    inbox = memory(keep, pair.server.adapter, 16)
    target = memory(keep, pair.server.adapter, 16, Access.REMOTE_WRITE)
    for context in (1, 2):
        pair.server.queue_pair.receive(inbox, context=context)
    pair.client.queue_pair.send(b"inline", flags=Flags.INLINE, immediate=3)
    pair.client.queue_pair.write(b"as well", target.remote(), flags=Flags.INLINE, immediate=4)
    succeed(pair.client.cq, 2)
    assert [found.immediate for found in succeed(pair.server.cq, 2)] == [3, 4]
    assert contents(inbox)[:7] == b"inline\0"
    assert contents(target)[:8] == b"as well\0"


@pytest.mark.parametrize("operation", ["send", "write"])
@pytest.mark.parametrize("solicited", [False, True])
def test_a_solicited_number_notifies(ends, keep, target, operation, solicited):
    ends.server.queue_pair.receive(memory(keep, ends.server.adapter, 16))
    armed = ends.server.cq.arm(Notify.SOLICITED)
    flags = Flags.SOLICITED if solicited else 0
    source = memory(keep, ends.adapter, b"8 bytes!")
    if operation == "send":
        ends.client.queue_pair.send(source, flags=flags, immediate=5)
    else:
        ends.client.queue_pair.write(source, target.remote(), flags=flags, immediate=5)
    succeed(ends.client.cq)
    if solicited:
        armed.result(10)
    else:
        with pytest.raises(ndpy.TimeoutError):
            armed.result(0.2)
        armed.cancel()
    assert [found.immediate for found in succeed(ends.server.cq)] == [5]


def test_a_plain_write_cannot_be_solicited(ends, keep, target):
    source = memory(keep, ends.adapter, b"8 bytes!")
    with pytest.raises(ndpy.InvalidFlagsError, match="SILENT_SUCCESS, READ_FENCE and INLINE"):
        ends.client.queue_pair.write(source, target.remote(), flags=Flags.SOLICITED)
    assert_works(keep, ends)


def test_silent_requests_with_numbers_leave_no_completion(ends, keep, target):
    source = memory(keep, ends.adapter, b"8 bytes!")
    for context in range(3):
        ends.server.queue_pair.receive(memory(keep, ends.server.adapter, 16), context=context)
    ends.client.queue_pair.send(source, flags=Flags.SILENT_SUCCESS, immediate=1)
    ends.client.queue_pair.write(source, target.remote(), flags=Flags.SILENT_SUCCESS, immediate=2)
    assert [found.immediate for found in succeed(ends.server.cq, 2)] == [1, 2]
    assert_quiet(ends.client.cq)


def test_a_batch_has_numbers(ends, keep, target):
    source = memory(keep, ends.adapter, bytes(range(64)))
    remote = target.remote()
    batch = Batch(4)
    batch.send(source[0:4], immediate=10)
    batch.write(source[4:8], remote[4:8], immediate=11)
    batch.write(source[8:12], remote[8:12])
    batch.send(source[12:16])
    received = CompletionArray(8)
    for round_ in range(2):
        for context in range(3):
            ends.server.queue_pair.receive(memory(keep, ends.server.adapter, 16), context=context)
        ends.client.queue_pair.post(batch)
        succeed(ends.client.cq)
        numbers = []
        while len(numbers) < 3:
            ends.server.cq.poll_into(received)
            received.raise_for_status()
            operations = list(received.operations)
            numbers += [found.immediate for found in received]
            for operation, immediate, found in zip(operations, received.immediates, received, strict=True):
                assert found.operation == operation
                assert found.immediate in (None, immediate)
        assert numbers == [10, 11, None], round_
    assert contents(target)[4:12] == bytes(range(4, 12))


def test_a_shared_receive_queue_gets_numbers(ends, keep, adapter, target):
    require(adapter, Capability.SHARED_RECEIVE_QUEUES)
    server_adapter = ends.server.adapter
    shared = keep(server_adapter.create_shared_receive_queue(2))
    server = create_end(keep, server_adapter, srq=shared)
    client = create_end(keep, adapter)
    connect_ends(keep, adapter, client, server)
    for context in (1, 2):
        shared.receive(memory(keep, server_adapter, 16), context=context)
    source = memory(keep, adapter, b"8 bytes!")
    client.queue_pair.send(source, immediate=VALUE)
    client.queue_pair.write(source, target.remote(), immediate=VALUE + 1)
    succeed(client.cq, 2)
    found = [(found.operation, found.context, found.immediate) for found in succeed(server.cq, 2)]
    assert found == [
        (Operation.RECEIVE, 1, VALUE),
        (Operation.RECEIVE_RDMA_WITH_IMMEDIATE, 2, VALUE + 1),
    ]


def test_a_write_beyond_its_rights_brings_no_number(ends, keep):
    private = memory(keep, ends.server.adapter, 16, Access.REMOTE_READ)
    ends.server.queue_pair.receive([], context=1)
    ends.client.queue_pair.write(memory(keep, ends.adapter, b"8 bytes!"), private.remote(), context=2, immediate=1)
    (failed,) = take(ends.client.cq)
    assert (failed.operation, failed.context, failed.status) == (Operation.WRITE, 2, Status.ACCESS_VIOLATION)
    (ended,) = take(ends.server.cq)
    assert (ended.operation, ended.context, ended.immediate) == (Operation.RECEIVE, 1, None)
    assert not ended.ok
    assert contents(private) == bytes(16)


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (1 << 32, ValueError), (1 << 70, ValueError), ("7", TypeError), (7.0, TypeError)],
)
def test_a_wrong_number_is_refused(ends, keep, target, value, error):
    source = memory(keep, ends.adapter, b"8 bytes!")
    batch = Batch(1)
    for call in (
        lambda: ends.client.queue_pair.send(source, immediate=value),
        lambda: ends.client.queue_pair.write(source, target.remote(), immediate=value),
        lambda: batch.send(source, immediate=value),
        lambda: batch.write(source, target.remote(), immediate=value),
    ):
        with pytest.raises(error, match="immediate"):
            call()
    assert len(batch) == 0
    assert_works(keep, ends)


def test_an_adapter_without_immediate_data_says_so(pair, keep):
    if Capability.IMMEDIATE_DATA in pair.adapter.info.capabilities:
        pytest.skip(f"{pair.adapter.info.name} has immediate data")
    send_message(keep, pair.client, pair.server, b"hello")
    source = memory(keep, pair.adapter, b"8 bytes!")
    target = memory(keep, pair.adapter, 64, Access.REMOTE_WRITE)
    remote = ndpy.RemoteMemory(target.address, 64, 1)
    batch = Batch(1)
    batch.send(source, immediate=1)
    for call in (
        lambda: pair.client.queue_pair.send(source, immediate=1),
        lambda: pair.client.queue_pair.send([source], immediate=1),
        lambda: pair.client.queue_pair.write(source, remote, immediate=1),
        lambda: pair.client.queue_pair.post(batch),
    ):
        with pytest.raises(ndpy.UnsupportedError, match=f"{pair.adapter.info.name} has no immediate data"):
            call()
    assert_works(keep, pair)


def test_the_documents_example_runs(keep, adapter, capsys):
    require(adapter, Capability.IMMEDIATE_DATA, Capability.LOOPBACK_CONNECTIONS)
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    (program,) = (block.partition("```")[0] for block in blocks if "immediate" in block.partition("```")[0])
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    connect_ends(keep, adapter, client, server)
    target = memory(keep, adapter, 16, Access.REMOTE_WRITE)
    names = {
        "near": client.queue_pair,
        "far": server.queue_pair,
        "queue": server.cq,
        "source": memory(keep, adapter, b"bytes"),
        "remote": target.remote(),
    }
    exec(compile(program, "docs/verbs.md", "exec"), names)
    assert capsys.readouterr().out == "RECEIVE_RDMA_WITH_IMMEDIATE 7\n"
    assert contents(target)[:5] == b"bytes"
