"""Group send-receive: messages."""

from __future__ import annotations

import gc
import time

import ndpy
from ndpy import Access, Capability, Flags, Operation, Status
from ndpy.cli.smoke.catalog import Skip, check
from ndpy.cli.smoke.lab import Lab, contexts, expect, expect_ok, expect_same, expect_status
from ndpy.cli.smoke.line import Line, pattern


@check("send-receive", "sizes")
def sizes(lab: Lab) -> str:
    """Messages of 0, 1, 1000 and 65536 bytes arrive whole, from memory that is not writable."""
    pair = lab.connect(size=65536)
    memory = lab.memory(65536, Access.NONE)
    for length in (0, 1, 1000, 65536):
        pair.send_through(memory, 0, length)
    return "0, 1, 1000 and 65536 bytes"


@check("send-receive", "from-peer")
def from_peer(lab: Lab) -> str:
    """A message of the peer fills the receive from its start and leaves the rest as it was."""
    pair = lab.connect(greet=True)
    memory = lab.memory(8192)
    far = lab.far_memory(5000)
    pair.queue_pair.receive(memory.region, context=2**64 - 1)
    pair.far.post(Operation.SEND, far)
    (received,) = pair.take(1, "the peer's message")
    expect_ok([received], "the receive")
    expect(received.nbytes == 5000, f"the receive reports {received.nbytes} of 5000 bytes")
    expect(received.context == 2**64 - 1, f"the receive has context {received.context:#x}")
    expect(received.queue_pair is pair.queue_pair, "the completion names another queue pair")
    expect_same(memory.contents(0, 5000), pattern(far.seed, 5000), "what was received")
    expect_same(memory.contents(5000), pattern(memory.seed, 8192)[5000:], "the memory behind the message")
    return "5000 bytes into a receive of 8192"


@check("send-receive", "one-mebibyte")
def one_mebibyte(lab: Lab) -> str:
    """A message of 1 MiB, of very many packets, arrives whole."""
    pair = lab.connect(receives=1, size=1 << 20)
    pair.send_through(lab.memory(1 << 20, Access.NONE))
    return "1048576 bytes"


@check("send-receive", "gather-scatter")
def gather_scatter(lab: Lab) -> str:
    """A message is gathered from several pieces, and scattered to several, in their order."""
    count = min(4, lab.info.max_initiator_sge, lab.info.max_receive_sge)
    if count < 2:
        raise Skip(f"{lab.info.name} claims no more than one element a request (max_initiator_sge, max_receive_sge)")
    pair = lab.connect(lab.line(max_sge=count), greet=True)
    memory = lab.memory(4096)
    pieces = [(index * 1000 + index, 100 + index) for index in range(count)][::-1]
    pair.queue_pair.send([memory.region[start : start + length] for start, length in pieces])
    pair.take(1, "the gathered send")
    (received,) = pair.take_far(1, "the gathered message")
    expected = b"".join(memory.contents(start, length) for start, length in pieces)
    expect(received.nbytes == len(expected), f"{received.nbytes} instead of {len(expected)} bytes arrived")
    expect_same(pair.far.slot(1, len(expected)), expected, "the gathered message")
    total = sum(length for _, length in pieces)
    far = lab.far_memory(total)
    pair.queue_pair.receive([memory.region[start : start + length] for start, length in pieces])
    pair.far.post(Operation.SEND, far)
    expect_ok(pair.take(1, "the scattered message"), "the scattered receive")
    found = b"".join(memory.contents(start, length) for start, length in pieces)
    expect_same(found, pattern(far.seed, total), "the scattered message")
    return f"{count} pieces each way"


@check("send-receive", "inline")
def inline(lab: Lab) -> str:
    """An inline send takes its bytes during the call, from memory that was never registered."""
    size = min(64, lab.info.max_inline_data_size)
    if not size:
        raise Skip(f"{lab.info.name} claims no inline data (max_inline_data_size is 0)")
    pair = lab.connect(lab.line(inline_data_size=size))
    data = bytearray(pattern(8, size))
    pair.queue_pair.send(data, flags=Flags.INLINE)
    data[:] = bytes(size)
    expect_ok(pair.take(1, "the inline send"), "the inline send")
    pair.take_far(1, "the inline message")
    expect_same(pair.far.slot(0, size), pattern(8, size), "the inline message")
    return f"{size} of {lab.info.max_inline_data_size} bytes, overwritten right after the call"


@check("send-receive", "in-order")
def in_order(lab: Lab) -> str:
    """32 messages posted at once arrive in their order, each in the next receive."""
    count = 32
    pair = lab.connect(receives=count, size=64)
    memory = lab.memory(count * 64, Access.NONE)
    for index in range(count):
        pair.queue_pair.send(memory.region[index * 64 : index * 64 + index + 1], context=index)
    sent = pair.take(count, "the sends")
    expect_ok(sent, "the sends")
    expect(contexts(sent) == list(range(count)), f"the sends completed in the order {contexts(sent)}")
    received = pair.take_far(count, "the messages")
    expect(contexts(received) == list(range(count)), f"the receives completed in the order {contexts(received)}")
    expect(
        [r.nbytes for r in received] == list(range(1, count + 1)), "the messages did not arrive in the order of sending"
    )
    found = pair.far.receives.contents()
    for index in range(count):
        expect_same(
            found[index * 64 : index * 64 + index + 1], memory.contents(index * 64, index + 1), f"message {index}"
        )
    return f"{count} messages"


@check("send-receive", "late-receive")
def late_receive(lab: Lab) -> str:
    """A send that finds no receive waits for one that is posted soon after."""
    if lab.iwarp:
        raise Skip(f"{lab.info.name} is iWARP, which has no way to say that a receiver is not ready (RFC 5041)")
    pair = lab.connect(receives=0)
    memory = lab.memory(256)
    far = lab.far_memory(256)
    pair.queue_pair.send(memory.region)
    time.sleep(0.05)
    pair.far.post(Operation.RECEIVE, far)
    expect_ok(pair.take(1, "the send that waits"), "the send that waits")
    expect_ok(pair.take_far(1, "the late receive"), "the late receive")
    expect_same(far.contents(), memory.contents(), "the late message")
    return "the receive came 0.05 s after the send"


@check("send-receive", "too-long")
def too_long(lab: Lab) -> str:
    """A message longer than its receive fails at both ends, and nothing is written behind the receive."""
    pair = lab.connect(greet=True)
    memory = lab.memory(4096)
    far = lab.far_memory(1024)
    pair.queue_pair.receive(memory.region[0:512], context=1)
    pair.far.post(Operation.SEND, far)
    (received,) = pair.take(1, "the receive that is too short")
    expect(received.status is not Status.SUCCESS, "a message of 1024 bytes was not refused by a receive of 512")
    expect_same(memory.contents(512), pattern(memory.seed, 4096)[512:], "the memory behind the receive")
    expect_status(received, Status.BUFFER_OVERFLOW, "the receive that is too short")
    (sent,) = pair.take_far(1, "the send that is too long")
    if not lab.iwarp:
        expect(sent.status is not Status.SUCCESS, "the sender was told SUCCESS")
    pair.far.wait_disconnected(lab.step())
    return f"receiver BUFFER_OVERFLOW, sender {sent.status.name} and disconnected, nothing written behind the receive"


@check("send-receive", "shared-receives", needs=(Capability.SHARED_RECEIVE_QUEUES,))
def shared_receives(lab: Lab) -> str:
    """Two connections draw their receives from one shared queue, and each completion names its queue pair."""
    adapter = lab.adapter
    cq = adapter.create_completion_queue(64)
    srq = adapter.create_shared_receive_queue(8)
    lab.keep(cq, srq)
    pairs = [lab.connect(Line(adapter, cq=cq, srq=srq)) for _ in range(2)]
    for pair in pairs:
        lab.keep(*(item for item in pair.near.resources() if not isinstance(item, ndpy.Connector)))
        pair.send_through(lab.ping)
    memory = lab.memory(8 * 256)
    for slot in range(8):
        srq.receive(memory.region[slot * 256 : (slot + 1) * 256], context=slot)
    far = lab.far_memory(200)
    for pair in (pairs[0], pairs[1], pairs[0]):
        pair.far.post(Operation.SEND, far, context=5)
        (received,) = lab.take(pair.near, 1, "the peer's message")
        expect_ok([received], "a shared receive")
        expect(received.queue_pair is pair.queue_pair, "the completion names the other queue pair")
        start = received.context * 256
        expect_same(memory.contents(start, 200), pattern(far.seed, 200), "what the shared receive holds")
        expect_same(
            memory.contents(start + 200, 56),
            pattern(memory.seed, 2048)[start + 200 : start + 256],
            "behind the message",
        )
    return "3 messages over 2 connections"


@check("send-receive", "dropped-references")
def dropped_references(lab: Lab) -> str:
    """A posted receive keeps its memory: all references are dropped, and the peer's message still arrives safely."""
    pair = lab.connect(greet=True)
    region = lab.adapter.register(ndpy.alloc(4096))
    lab.keep(region)
    pair.queue_pair.receive(region[0:4096], context=9)
    region.buffer[:] = bytes(4096)
    gc.collect()
    far = lab.far_memory(4096)
    pair.far.post(Operation.SEND, far)
    (received,) = pair.take(1, "the peer's message")
    expect_ok([received], "the receive")
    expect_same(bytes(region.buffer), pattern(far.seed, 4096), "what was received")
    return "4096 bytes, the buffer known to the region only"
