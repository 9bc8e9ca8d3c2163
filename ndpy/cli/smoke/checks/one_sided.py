"""Group read-write: this side reads and writes the peer's memory, rightly and wrongly."""

from __future__ import annotations

import contextlib

import ndpy
from ndpy import Access, Operation, RemoteMemory, Status
from ndpy.cli.smoke.catalog import Skip, check
from ndpy.cli.smoke.lab import Lab, expect, expect_ok, expect_same, expect_unchanged
from ndpy.cli.smoke.line import pattern

_BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
_SINK = Access.LOCAL_WRITE | Access.READ_SINK


@check("read-write", "write")
def write(lab: Lab) -> str:
    """A write of 64 KiB arrives at its offset, and the bytes around it are unchanged."""
    pair = lab.connect()
    memory = lab.memory(65536, Access.NONE)
    far = lab.far_memory(65536 + 200, Access.REMOTE_WRITE, pair)
    pair.queue_pair.write(memory.region[0:65536], far.remote[100 : 100 + 65536], context=1)
    (written,) = pair.take(1, "the write")
    expect_ok([written], "the write")
    expect(written.operation is Operation.WRITE, f"a write completed as {written.operation.name}")
    expected = bytearray(pattern(far.seed, far.length))
    expected[100 : 100 + 65536] = memory.contents()
    expect_same(far.contents(), bytes(expected), "the peer's memory")
    return "65536 bytes, 100 on either side unchanged"


@check("read-write", "read")
def read(lab: Lab) -> str:
    """A read of 64 KiB fetches the peer's bytes, and changes neither them nor what lies around the sink."""
    pair = lab.connect()
    memory = lab.memory(65536 + 200, _SINK)
    far = lab.far_memory(65536, Access.REMOTE_READ, pair)
    pair.queue_pair.read(memory.region[100 : 100 + 65536], far.remote, context=1)
    (fetched,) = pair.take(1, "the read")
    expect_ok([fetched], "the read")
    expect(fetched.operation is Operation.READ, f"a read completed as {fetched.operation.name}")
    expected = bytearray(pattern(memory.seed, memory.length))
    expected[100 : 100 + 65536] = pattern(far.seed, 65536)
    expect_same(memory.contents(), bytes(expected), "what was read")
    expect_unchanged(far, "the peer's memory after a read")
    return "65536 bytes, 100 on either side unchanged"


@check("read-write", "large")
def large(lab: Lab) -> str:
    """4 MiB written to the peer and read back are the same."""
    length = 4 << 20
    pair = lab.connect()
    memory, back = lab.memory(length, Access.NONE), lab.memory(length, _SINK)
    far = lab.far_memory(length, _BOTH, pair)
    pair.queue_pair.write(memory.region, far.remote, context=1)
    pair.queue_pair.read(back.region, far.remote, context=2)
    expect_ok(pair.take(2, "4 MiB there and back"), "4 MiB there and back")
    expect_same(back.contents(), memory.contents(), "what came back")
    return f"{length} bytes there and back"


@check("read-write", "zero-length")
def zero_length(lab: Lab) -> str:
    """Reads and writes of no bytes succeed and change nothing."""
    pair = lab.connect()
    memory = lab.memory(64, _SINK)
    far = lab.far_memory(64, _BOTH, pair)
    pair.queue_pair.write(memory.region[0:0], far.remote)
    pair.queue_pair.read(memory.region[0:0], far.remote)
    expect_ok(pair.take(2, "transfers of no bytes"), "transfers of no bytes")
    expect_unchanged(memory, "this side's memory")
    expect_unchanged(far, "the peer's memory")
    return "a write and a read"


@check("read-write", "gathered-write")
def gathered_write(lab: Lab) -> str:
    """A write gathers its pieces, a read scatters to several, in their order."""
    count = min(4, lab.info.max_initiator_sge)
    if count < 2:
        raise Skip(f"{lab.info.name} claims no more than one element a request (max_initiator_sge)")
    pair = lab.connect(lab.line(max_sge=count))
    memory = lab.memory(4096, _SINK)
    far = lab.far_memory(1024, _BOTH, pair)
    pieces = [(index * 1000, 50 + index) for index in range(count)][::-1]
    pair.queue_pair.write([memory.region[start : start + length] for start, length in pieces], far.remote)
    expect_ok(pair.take(1, "the gathered write"), "the gathered write")
    expected = b"".join(memory.contents(start, length) for start, length in pieces)
    expect_same(far.contents(0, len(expected)), expected, "what was gathered")
    back = min(count, lab.info.max_read_sge)
    pieces = [(2000 + index * 100, 60) for index in range(back)][::-1]
    pair.queue_pair.read([memory.region[start : start + length] for start, length in pieces], far.remote)
    expect_ok(pair.take(1, "the scattered read"), "the scattered read")
    found = b"".join(memory.contents(start, length) for start, length in pieces)
    expect_same(found, far.contents(0, 60 * back), "what was scattered")
    return f"{count} pieces out, {back} back"


def _refused(
    lab: Lab, operation: Operation, access: Access, what: str, forge: int | None = None, token: int = 0
) -> str:
    """The peer's adapter refuses what this side asks for; forge: an offset beyond what the descriptor grants."""
    witness = lab.connect()
    pair = lab.connect(receives=1)
    memory = lab.memory(64, _SINK)
    far = lab.far_memory(8192, access, pair)
    remote = far.remote
    target = RemoteMemory(remote.address + (forge or 0), 64, remote.token ^ token)
    post = pair.queue_pair.write if operation is Operation.WRITE else pair.queue_pair.read
    post(memory.region[0:64], target, context=1)
    (ended,) = pair.take(1, what)
    try:
        told = lab.expect_refused(operation, ended.status, pair.connector.wait_disconnected, what)
    finally:
        expect_unchanged(far, f"the peer's memory after {what}")
    expect_unchanged(memory, f"this side's memory after {what}, which was refused")
    with contextlib.suppress(ndpy.AccessViolationError):
        ended.raise_for_status()
    pair.queue_pair.send(memory.region, context=2)
    (after,) = pair.take(1, f"a send after {what}")
    expect(after.status is Status.CANCELED, f"a send after {what} completed {after.status.name}, expected CANCELED")
    witness.alive()
    return f"{told}; no byte changed, later requests CANCELED, another connection works"


@check("read-write", "write-to-readable")
def write_to_readable(lab: Lab) -> str:
    """A write to a region that may only be read is refused."""
    return _refused(lab, Operation.WRITE, Access.REMOTE_READ, "a write to a readable region")


@check("read-write", "read-of-writable")
def read_of_writable(lab: Lab) -> str:
    """A read of a region that may only be written is refused."""
    return _refused(lab, Operation.READ, Access.REMOTE_WRITE, "a read of a writable region")


@check("read-write", "past-the-region")
def past_the_region(lab: Lab) -> str:
    """A write that ends one byte behind the peer's region is refused as a whole."""
    return _refused(lab, Operation.WRITE, _BOTH, "a write past the region", forge=8192 - 63)


@check("read-write", "unknown-token")
def unknown_token(lab: Lab) -> str:
    """A write with a token that nobody gave out is refused."""
    return _refused(lab, Operation.WRITE, _BOTH, "a write with an unknown token", token=0x5A00A5)


@check("read-write", "own-unknown-token")
def own_unknown_token(lab: Lab) -> str:
    """A write from memory that this side's token does not name is an access violation; the next request is cancelled."""
    pair = lab.connect()
    memory = lab.memory(64)
    far = lab.far_memory(64, _BOTH, pair)
    region = memory.region
    pair.queue_pair.write(ndpy.Sge(region, region.address, 64, region.local_token ^ 0x5A00), far.remote)
    pair.queue_pair.write(region, far.remote)
    first, second = pair.take(2, "both writes")
    expect(
        first.status is Status.ACCESS_VIOLATION, f"the write completed {first.status.name}, expected ACCESS_VIOLATION"
    )
    expect(second.status is Status.CANCELED, f"the next one completed {second.status.name}, expected CANCELED")
    expect_unchanged(far, "the peer's memory")
    return "ACCESS_VIOLATION, then CANCELED"
