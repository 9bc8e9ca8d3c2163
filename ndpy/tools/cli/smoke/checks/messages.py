"""Group send-receive: messages."""

from __future__ import annotations

import gc
import time

import ndpy
from ndpy import Access, Capability, Flags, Operation, Status
from ndpy.tools.cli.smoke.catalog import Skip, check
from ndpy.tools.cli.smoke.resources import pattern
from ndpy.tools.cli.smoke.testbed import Testbed, contexts, expect, expect_ok, expect_same, expect_status
from ndpy.vocabulary.quirks import Quirk


@check("send-receive", "sizes")
def sizes(testbed: Testbed) -> str:
    """Messages of 0, 1, 1000 and 65536 bytes arrive complete, sent from memory without write rights."""
    connection = testbed.connect(size=65536)
    memory = testbed.memory(65536, Access.NONE)
    for length in (0, 1, 1000, 65536):
        connection.send_through(memory, 0, length)
    return "0, 1, 1000 and 65536 bytes"


@check("send-receive", "from-peer")
def from_peer(testbed: Testbed) -> str:
    """A message from the peer fills the receive from its start and does not change the rest of it."""
    connection = testbed.connect(send_first=True)
    memory = testbed.memory(8192)
    far = testbed.peer_memory(5000)
    connection.queue_pair.receive(memory.region, context=2**64 - 1)
    connection.far.post(Operation.SEND, far)
    (received,) = connection.take(1, "the peer's message")
    expect_ok([received], "the receive")
    expect(received.nbytes == 5000, f"the receive reports {received.nbytes} of 5000 bytes")
    expect(received.context == 2**64 - 1, f"the receive has context {received.context:#x}")
    expect(received.queue_pair is connection.queue_pair, "the completion names another queue pair")
    expect_same(memory.contents(0, 5000), pattern(far.seed, 5000), "what was received")
    expect_same(memory.contents(5000), pattern(memory.seed, 8192)[5000:], "the memory after the message")
    return "5000 bytes into a receive of 8192"


@check("send-receive", "one-mebibyte")
def one_mebibyte(testbed: Testbed) -> str:
    """A message of 1 MiB, in many packets, arrives complete."""
    connection = testbed.connect(receives=1, size=1 << 20)
    connection.send_through(testbed.memory(1 << 20, Access.NONE))
    return "1048576 bytes"


@check("send-receive", "gather-scatter")
def gather_scatter(testbed: Testbed) -> str:
    """A message is gathered from several pieces of memory and scattered to several, in order."""
    count = min(4, testbed.info.max_initiator_sge, testbed.info.max_receive_sge)
    if count < 2:
        raise Skip(f"{testbed.info.name} allows only one element in a request (max_initiator_sge, max_receive_sge)")
    connection = testbed.connect(testbed.new_end(max_sge=count), send_first=True)
    memory = testbed.memory(4096)
    pieces = [(index * 1000 + index, 100 + index) for index in range(count)][::-1]
    connection.queue_pair.send([memory.region[start : start + length] for start, length in pieces])
    connection.take(1, "the gathered send")
    (received,) = connection.take_at_peer(1, "the gathered message")
    expected = b"".join(memory.contents(start, length) for start, length in pieces)
    expect(received.nbytes == len(expected), f"{received.nbytes} instead of {len(expected)} bytes arrived")
    expect_same(connection.far.slot(1, len(expected)), expected, "the gathered message")
    total = sum(length for _, length in pieces)
    far = testbed.peer_memory(total)
    connection.queue_pair.receive([memory.region[start : start + length] for start, length in pieces])
    connection.far.post(Operation.SEND, far)
    expect_ok(connection.take(1, "the scattered message"), "the scattered receive")
    found = b"".join(memory.contents(start, length) for start, length in pieces)
    expect_same(found, pattern(far.seed, total), "the scattered message")
    return f"{count} pieces each way"


@check("send-receive", "inline")
def inline(testbed: Testbed) -> str:
    """An inline send copies its bytes during the call, from memory that is not registered."""
    size = min(64, testbed.info.max_inline_data_size)
    if not size:
        raise Skip(f"{testbed.info.name} claims no inline data (max_inline_data_size is 0)")
    connection = testbed.connect(testbed.new_end(inline_data_size=size))
    data = bytearray(pattern(8, size))
    connection.queue_pair.send(data, flags=Flags.INLINE)
    data[:] = bytes(size)
    connection.take_ok(1, "the inline send")
    connection.take_at_peer(1, "the inline message")
    expect_same(connection.far.slot(0, size), pattern(8, size), "the inline message")
    return f"{size} of {testbed.info.max_inline_data_size} bytes, overwritten right after the call"


@check("send-receive", "in-order")
def in_order(testbed: Testbed) -> str:
    """32 messages that are posted at once arrive in order, each in the next receive."""
    count = 32
    connection = testbed.connect(receives=count, size=64)
    memory = testbed.memory(count * 64, Access.NONE)
    for index in range(count):
        connection.queue_pair.send(memory.region[index * 64 : index * 64 + index + 1], context=index)
    sent = connection.take_ok(count, "the sends")
    expect(contexts(sent) == list(range(count)), f"the sends completed in the order {contexts(sent)}")
    received = connection.take_at_peer(count, "the messages")
    expect(contexts(received) == list(range(count)), f"the receives completed in the order {contexts(received)}")
    expect(
        [r.nbytes for r in received] == list(range(1, count + 1)), "the messages did not arrive in the order of sending"
    )
    found = connection.far.receives.contents()
    for index in range(count):
        expect_same(
            found[index * 64 : index * 64 + index + 1], memory.contents(index * 64, index + 1), f"message {index}"
        )
    return f"{count} messages"


@check("send-receive", "late-receive")
def late_receive(testbed: Testbed) -> str:
    """A send that finds no receive succeeds if the peer posts one soon after."""
    if testbed.has(Quirk.IWARP_NO_RECEIVER_NOT_READY):
        raise Skip(f"{testbed.info.name} is iWARP, which has no way to say that a receiver is not ready (RFC 5041)")
    connection = testbed.connect(receives=0)
    memory = testbed.memory(256)
    far = testbed.peer_memory(256)
    connection.queue_pair.send(memory.region)
    time.sleep(0.05)
    connection.far.post(Operation.RECEIVE, far)
    connection.take_ok(1, "the send that waits")
    expect_ok(connection.take_at_peer(1, "the late receive"), "the late receive")
    expect_same(far.contents(), memory.contents(), "the late message")
    return "the receive came 0.05 s after the send"


@check("send-receive", "too-long")
def too_long(testbed: Testbed) -> str:
    """A message that is longer than its receive fails at both ends. Nothing is written after the receive."""
    connection = testbed.connect(send_first=True)
    memory = testbed.memory(4096)
    far = testbed.peer_memory(1024)
    connection.queue_pair.receive(memory.region[0:512], context=1)
    connection.far.post(Operation.SEND, far)
    (received,) = connection.take(1, "the receive that is too short")
    expect(received.status is not Status.SUCCESS, "a message of 1024 bytes was not refused by a receive of 512")
    expect_same(memory.contents(512), pattern(memory.seed, 4096)[512:], "the memory after the receive")
    expect_status(received, Status.BUFFER_OVERFLOW, "the receive that is too short")
    (sent,) = connection.take_at_peer(1, "the send that is too long")
    if not testbed.has(Quirk.IWARP_NO_ACKNOWLEDGEMENT):
        expect(sent.status is not Status.SUCCESS, "the sender was told SUCCESS")
    connection.far.wait_disconnected(testbed.step())
    return f"receiver BUFFER_OVERFLOW, sender {sent.status.name} and disconnected, nothing written after the receive"


@check("send-receive", "shared-receives", needs=(Capability.SHARED_RECEIVE_QUEUES,))
def shared_receives(testbed: Testbed) -> str:
    """Two connections take their receives from one shared receive queue. Each completion names its queue pair."""
    cq = testbed.adapter.create_completion_queue(64)
    srq = testbed.adapter.create_shared_receive_queue(8)
    testbed.close_afterwards(cq, srq)
    connections = [testbed.connect(testbed.new_end(cq=cq, srq=srq)) for _ in range(2)]
    for connection in connections:
        connection.send_through(testbed.ping)
    memory = testbed.memory(8 * 256)
    for slot in range(8):
        srq.receive(memory.region[slot * 256 : (slot + 1) * 256], context=slot)
    far = testbed.peer_memory(200)
    for connection in (connections[0], connections[1], connections[0]):
        connection.far.post(Operation.SEND, far, context=5)
        (received,) = testbed.take(connection.near, 1, "the peer's message")
        expect_ok([received], "a shared receive")
        expect(received.queue_pair is connection.queue_pair, "the completion names the other queue pair")
        start = received.context * 256
        expect_same(memory.contents(start, 200), pattern(far.seed, 200), "what the shared receive holds")
        expect_same(
            memory.contents(start + 200, 56),
            pattern(memory.seed, 2048)[start + 200 : start + 256],
            "the memory after the message",
        )
    return "3 messages over 2 connections"


@check("send-receive", "dropped-references")
def dropped_references(testbed: Testbed) -> str:
    """A posted receive keeps its memory alive when the program drops its references. The message still arrives."""
    connection = testbed.connect(send_first=True)
    region = testbed.adapter.register(ndpy.alloc(4096))
    testbed.close_afterwards(region)
    connection.queue_pair.receive(region[0:4096], context=9)
    region.buffer[:] = bytes(4096)
    gc.collect()
    far = testbed.peer_memory(4096)
    connection.far.post(Operation.SEND, far)
    (received,) = connection.take(1, "the peer's message")
    expect_ok([received], "the receive")
    expect_same(bytes(region.buffer), pattern(far.seed, 4096), "what was received")
    return "4096 bytes into a buffer that only its region refers to"
