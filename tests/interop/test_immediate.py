"""Messages and writes with immediate data. A foreign peer on plain verbs sends them (programs/immediate.c)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.helpers import contents, create_end, memory, require, succeed
from kit.processes import Process
from kit.programs import built
from kit.quirks import skip_where

import ndpy
from ndpy import Access, Endpoint, Operation
from ndpy.vocabulary.quirks import Quirk

SOURCE = Path(__file__).parent / "programs/immediate.c"
# All four bytes differ, so a wrong byte order shows. The highest bit is set.
VALUE = 0x81020304


class Sender:
    """The foreign peer, connected to our queue pair. It may write to `target`."""

    def __init__(self, process: Process, queue_pair: ndpy.QueuePair, target: ndpy.MemoryRegion) -> None:
        local, remote = queue_pair.local_endpoint(), target.remote()
        found = process.wait_for(r"endpoint (\d+) (\d+)\n")
        self._process = process
        self._ended = 0
        process.say(local.qp_number, local.psn, local.lid, local.gid.hex(), remote.address, remote.token)
        queue_pair.connect_endpoint(Endpoint(local.lid, int(found[1]), int(found[2]), local.gid))
        process.wait_for("connected\n")

    def __call__(self, *words: object) -> None:
        """Let the peer post one request, which must succeed."""
        self._process.say(*words)
        self._ended += 1
        self._process.wait_for(rf"(ended 0\n[^$]*){{{self._ended}}}")


@pytest.fixture
def sender_to(adapter, keep):
    """Start the foreign peer, and connect it to a queue pair."""
    skip_where(adapter, Quirk.IWARP_NO_IMMEDIATE_DATA)
    program = built(SOURCE)
    started = []

    def start(queue_pair: ndpy.QueuePair, target: ndpy.MemoryRegion) -> Sender:
        local = queue_pair.local_endpoint()
        code = local.mtu.bit_length() - 8
        process = Process(program, adapter.info.name, str(local.port), str(local.gid_index), str(code))
        started.append(process)
        return Sender(process, queue_pair, target)

    yield start
    for process in started:
        process.__exit__(None, None, None)


def test_a_write_with_immediate_data_is_told_from_a_message(adapter, keep, sender_to):
    target = memory(keep, adapter, 64, Access.REMOTE_WRITE)
    inbox = memory(keep, adapter, b"untouched" + bytes(55))
    end = create_end(keep, adapter)
    for context in (1, 2, 3, 4):
        end.queue_pair.receive(inbox, context=context)
    sender = sender_to(end.queue_pair, target)

    sender("write_immediate", 26, VALUE)
    (written,) = succeed(end.cq)
    assert written.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert (written.context, written.nbytes, written.immediate) == (1, 26, VALUE)
    assert written.vendor_status == 0
    assert contents(target)[:26] == b"abcdefghijklmnopqrstuvwxyz"
    assert contents(inbox).startswith(b"untouched")

    sender("send_immediate", 3, 0)
    (message,) = succeed(end.cq)
    assert message.operation is Operation.RECEIVE
    assert (message.context, message.nbytes, message.immediate) == (2, 3, 0)

    sender("send", 5)
    (plain,) = succeed(end.cq)
    assert plain.operation is Operation.RECEIVE
    assert (plain.context, plain.nbytes, plain.immediate) == (3, 5, None)
    assert contents(inbox).startswith(b"abcdeched")

    sender("write_immediate", 0, 0xFFFFFFFF)
    (empty,) = succeed(end.cq)
    assert empty.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert (empty.context, empty.nbytes, empty.immediate) == (4, 0, 0xFFFFFFFF)


def test_immediate_data_arrives_through_a_shared_receive_queue(adapter, keep, sender_to):
    require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
    target = memory(keep, adapter, 64, Access.REMOTE_WRITE)
    inbox = memory(keep, adapter, 64)
    shared = keep(adapter.create_shared_receive_queue(2))
    end = create_end(keep, adapter, srq=shared)
    for context in (1, 2):
        shared.receive(inbox, context=context)
    sender = sender_to(end.queue_pair, target)
    sender("write_immediate", 26, VALUE)
    (written,) = succeed(end.cq)
    assert written.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert (written.context, written.nbytes, written.immediate) == (1, 26, VALUE)
    assert written.queue_pair is end.queue_pair
    # Its place in the queue is free again.
    shared.receive(inbox, context=3)
    for context, value in ((2, 7), (3, 8)):
        sender("send_immediate", 4, value)
        (message,) = succeed(end.cq)
        assert (message.operation, message.context, message.immediate) == (Operation.RECEIVE, context, value)
        assert message.nbytes == 4


def test_immediate_data_survives_a_completion_that_was_taken_early(adapter, keep, sender_to):
    """When the queue pair closes, it takes the adapter's completions and keeps them for the next poll."""
    target = memory(keep, adapter, 64, Access.REMOTE_WRITE)
    end = create_end(keep, adapter)
    end.queue_pair.receive([], context=9)
    sender_to(end.queue_pair, target)("write_immediate", 8, VALUE)
    end.queue_pair.close()
    (written,) = succeed(end.cq)
    assert written.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert (written.context, written.nbytes, written.immediate) == (9, 8, VALUE)
