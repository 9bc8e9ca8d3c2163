"""Group ordering: the order of completions, fences, silent requests."""

from __future__ import annotations

import time

from ndpy import Access, Capability, Flags, Operation, Status
from ndpy.cli.smoke.catalog import Failure, check
from ndpy.cli.smoke.lab import Lab, contexts, expect, expect_ok, expect_same
from ndpy.cli.smoke.line import pattern

_BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
_SINK = Access.LOCAL_WRITE | Access.READ_SINK


@check("ordering", "mixed")
def mixed(lab: Lab) -> str:
    """Reads, writes and sends complete in the order of posting, a write behind a slow read too."""
    pair = lab.connect(receives=8, size=64)
    far = lab.far_memory(1 << 18, _BOTH, pair)
    sink, small = lab.memory(1 << 18, _SINK), lab.memory(64)
    queue_pair = pair.queue_pair
    for index in range(0, 18, 3):
        queue_pair.read(sink.region, far.remote, context=index)
        queue_pair.write(small.region[0:64], far.remote[0:64], context=index + 1)
        queue_pair.send(small.region, context=index + 2)
    ended = pair.take(18, "mixed requests")
    expect_ok(ended, "mixed requests")
    expect(contexts(ended) == list(range(18)), f"they completed in the order {contexts(ended)}")
    return "18 requests"


@check("ordering", "write-then-send")
def write_then_send(lab: Lab) -> str:
    """When a message has arrived, the write posted before it is visible."""
    pair = lab.connect(receives=8, size=64)
    far = lab.far_memory(65536, Access.REMOTE_WRITE, pair)
    for index in range(4):
        memory = lab.memory(65536, Access.NONE)
        pair.queue_pair.write(memory.region, far.remote, flags=Flags.SILENT_SUCCESS)
        pair.queue_pair.send(lab.ping.region, context=index)
        expect_ok(pair.take_far(1, "the message"), "the message")
        expect_same(far.contents(), memory.contents(), f"the peer's memory at message {index}")
        pair.take(1, "the send")
    return "4 times 64 KiB"


@check("ordering", "read-fence")
def read_fence(lab: Lab) -> str:
    """A fenced send starts when the read before it has filled the memory that it sends."""
    pair = lab.connect(receives=1, size=65536)
    far = lab.far_memory(65536, Access.REMOTE_READ, pair)
    memory = lab.memory(65536, _SINK)
    pair.queue_pair.read(memory.region, far.remote, context=1)
    pair.queue_pair.send(memory.region, context=2, flags=Flags.READ_FENCE)
    expect_ok(pair.take(2, "read and fenced send"), "read and fenced send")
    expect_ok(pair.take_far(1, "the fenced message"), "the fenced message")
    expect_same(pair.far.slot(0), pattern(far.seed, 65536), "what the fenced send carried")
    return "64 KiB read, then sent back"


@check("ordering", "silent-success")
def silent_success(lab: Lab) -> str:
    """Silent requests complete only if they fail; their slots are free again after a later completion."""
    pair = lab.connect()
    far = lab.far_memory(4096, Access.REMOTE_WRITE, pair)
    memory = lab.memory(4096, Access.NONE)
    depth = pair.queue_pair.limits.initiator_queue_depth
    for _ in range(3):
        for _ in range(depth - 1):
            pair.queue_pair.write(memory.region, far.remote, flags=Flags.SILENT_SUCCESS, context=1)
        pair.queue_pair.write(memory.region, far.remote, context=2)
        ended = pair.take(1, "the request that is not silent")
        expect_ok(ended, "the request that is not silent")
        expect(contexts(ended) == [2], "a silent request completed")
    lab.nothing_more(pair.near, "after silent requests")
    expect_same(far.contents(), memory.contents(), "what was written")
    if lab.iwarp:
        return f"3 times {depth} requests with one completion each (iWARP: no write completes as refused)"
    target = far.remote
    target.token ^= 0x5A00A5
    pair.queue_pair.write(memory.region, target, flags=Flags.SILENT_SUCCESS, context=3)
    (failed,) = pair.take(1, "the silent request that fails")
    expect(failed.context == 3 and failed.status is not Status.SUCCESS, f"the failure was reported as {failed}")
    return f"3 times {depth} requests with one completion each; a silent failure completed {failed.status.name}"


@check("ordering", "read-limit")
def read_limit(lab: Lab) -> str:
    """More reads than may run at once wait for their turn and all succeed."""
    pair = lab.connect(inbound=1, outbound=1, far_inbound=1, far_outbound=1)
    far = lab.far_memory(16 * 512, Access.REMOTE_READ, pair)
    sink = lab.memory(16 * 512, _SINK)
    for index in range(16):
        part = slice(index * 512, (index + 1) * 512)
        pair.queue_pair.read(sink.region[part], far.remote[part], context=index)
    ended = pair.take(16, "16 reads")
    expect_ok(ended, "16 reads")
    expect(contexts(ended) == list(range(16)), f"they completed in the order {contexts(ended)}")
    expect_same(sink.contents(), pattern(far.seed, 16 * 512), "what was read")
    return "16 reads with a limit of 1"


@check("ordering", "last-byte-last", needs=(Capability.IN_ORDER_DMA,))
def last_byte_last(lab: Lab) -> str:
    """The last byte of the peer's write appears last: whoever sees it sees all the others."""
    pair = lab.connect(greet=True)
    memory = lab.memory(65536, Access.REMOTE_WRITE)
    far = lab.far_memory(65536)
    memory.buffer[-1] = pattern(far.seed, 65536)[-1] ^ 0xFF
    wanted = pattern(far.seed, 65536)
    pair.far.begin_post(Operation.WRITE, far, remote=memory.region.remote())
    try:
        deadline = time.monotonic() + lab.step()
        while memory.buffer[-1] != wanted[-1]:
            if time.monotonic() > deadline:
                raise Failure("the last byte of the peer's write did not appear")
        found = memory.contents()
    finally:
        lab.peer.finish()
    expect_same(found, wanted, "the bytes before the last one")
    return "64 KiB seen whole when the last byte appeared"
