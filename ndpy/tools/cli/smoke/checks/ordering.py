"""Group ordering: the order of completions, fences, and silent requests."""

from __future__ import annotations

import time

from ndpy import Access, Capability, Flags, Operation, Status
from ndpy.tools.cli.smoke.catalog import Failure, check
from ndpy.tools.cli.smoke.resources import pattern
from ndpy.tools.cli.smoke.testbed import BOTH, SINK, Testbed, contexts, expect, expect_ok, expect_same
from ndpy.vocabulary.quirks import Quirk


@check("ordering", "mixed")
def mixed(testbed: Testbed) -> str:
    """Reads, writes and sends complete in the order in which they are posted, also a write after a slow read."""
    connection = testbed.connect(receives=8, size=64)
    far = testbed.peer_memory(1 << 18, BOTH, connection)
    sink, small = testbed.memory(1 << 18, SINK), testbed.memory(64)
    queue_pair = connection.queue_pair
    for index in range(0, 18, 3):
        queue_pair.read(sink.region, far.remote, context=index)
        queue_pair.write(small.region[0:64], far.remote[0:64], context=index + 1)
        queue_pair.send(small.region, context=index + 2)
    ended = connection.take_ok(18, "mixed requests")
    expect(contexts(ended) == list(range(18)), f"they completed in the order {contexts(ended)}")
    return "18 requests"


@check("ordering", "write-then-send")
def write_then_send(testbed: Testbed) -> str:
    """When a message arrives, the write that was posted before it is visible."""
    connection = testbed.connect(receives=8, size=64)
    far = testbed.peer_memory(65536, Access.REMOTE_WRITE, connection)
    for index in range(4):
        memory = testbed.memory(65536, Access.NONE)
        connection.queue_pair.write(memory.region, far.remote, flags=Flags.SILENT_SUCCESS)
        connection.queue_pair.send(testbed.ping.region, context=index)
        expect_ok(connection.take_at_peer(1, "the message"), "the message")
        expect_same(far.contents(), memory.contents(), f"the peer's memory at message {index}")
        connection.take(1, "the send")
    return "4 times 64 KiB"


@check("ordering", "read-fence")
def read_fence(testbed: Testbed) -> str:
    """A fenced send waits until the read before it has filled the memory that it sends."""
    connection = testbed.connect(receives=1, size=65536)
    far = testbed.peer_memory(65536, Access.REMOTE_READ, connection)
    memory = testbed.memory(65536, SINK)
    connection.queue_pair.read(memory.region, far.remote, context=1)
    connection.queue_pair.send(memory.region, context=2, flags=Flags.READ_FENCE)
    connection.take_ok(2, "read and fenced send")
    expect_ok(connection.take_at_peer(1, "the fenced message"), "the fenced message")
    expect_same(connection.far.slot(0), pattern(far.seed, 65536), "what the fenced send carried")
    return "64 KiB read, then sent back"


@check("ordering", "silent-success")
def silent_success(testbed: Testbed) -> str:
    """Silent requests complete only if they fail. A later completion frees their slots."""
    connection, memory, far = testbed.set_up(4096, Access.NONE, Access.REMOTE_WRITE)
    depth = connection.queue_pair.limits.initiator_queue_depth
    for _ in range(3):
        for _ in range(depth - 1):
            connection.queue_pair.write(memory.region, far.remote, flags=Flags.SILENT_SUCCESS, context=1)
        connection.queue_pair.write(memory.region, far.remote, context=2)
        ended = connection.take_ok(1, "the request that is not silent")
        expect(contexts(ended) == [2], "a silent request completed")
    testbed.expect_no_completion(connection.near, "after silent requests")
    connection.let_writes_arrive()
    expect_same(far.contents(), memory.contents(), "what was written")
    if testbed.has(Quirk.IWARP_NO_ACKNOWLEDGEMENT):
        return (
            f"3 times {depth} requests with one completion each (not checked on iWARP: a refused write does not "
            "complete as refused)"
        )
    target = far.remote
    target.token ^= 0x5A00A5
    connection.queue_pair.write(memory.region, target, flags=Flags.SILENT_SUCCESS, context=3)
    (failed,) = connection.take(1, "the silent request that fails")
    expect(failed.context == 3 and failed.status is not Status.SUCCESS, f"the failure was reported as {failed}")
    return f"3 times {depth} requests with one completion each; a silent failure completed {failed.status.name}"


@check("ordering", "read-limit")
def read_limit(testbed: Testbed) -> str:
    """16 reads all succeed with a limit of one read at a time."""
    connection = testbed.connect(inbound=1, outbound=1, peer_inbound=1, peer_outbound=1)
    far = testbed.peer_memory(16 * 512, Access.REMOTE_READ, connection)
    sink = testbed.memory(16 * 512, SINK)
    for index in range(16):
        part = slice(index * 512, (index + 1) * 512)
        connection.queue_pair.read(sink.region[part], far.remote[part], context=index)
    ended = connection.take_ok(16, "16 reads")
    expect(contexts(ended) == list(range(16)), f"they completed in the order {contexts(ended)}")
    expect_same(sink.contents(), pattern(far.seed, 16 * 512), "what was read")
    return "16 reads with a limit of 1"


@check("ordering", "last-byte-last", needs=(Capability.IN_ORDER_DMA,))
def last_byte_last(testbed: Testbed) -> str:
    """The last byte of the peer's write appears last. A program that sees it sees all the other bytes."""
    connection = testbed.connect(send_first=True)
    memory = testbed.memory(65536, Access.REMOTE_WRITE)
    far = testbed.peer_memory(65536)
    wanted = pattern(far.seed, 65536)
    memory.buffer[-1] = wanted[-1] ^ 0xFF
    connection.far.post(Operation.WRITE, far, remote=memory.region.remote(), waits=False)
    try:
        deadline = time.monotonic() + testbed.step()
        while memory.buffer[-1] != wanted[-1]:
            if time.monotonic() > deadline:
                raise Failure("the last byte of the peer's write did not appear")
        found = memory.contents()
    finally:
        testbed.peer.finish()
    expect_same(found, wanted, "the bytes before the last one")
    return "64 KiB were complete when the last byte appeared"
