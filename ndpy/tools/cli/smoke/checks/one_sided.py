"""Group read-write: this side reads and writes the peer's memory, correctly and incorrectly."""

from __future__ import annotations

import contextlib

import ndpy
from ndpy import Access, Operation, RemoteMemory, Status
from ndpy.tools.cli.smoke.catalog import Skip, check
from ndpy.tools.cli.smoke.resources import pattern
from ndpy.tools.cli.smoke.testbed import BOTH, SINK, Testbed, expect, expect_same, expect_unchanged


@check("read-write", "write")
def write(testbed: Testbed) -> str:
    """A write of 64 KiB arrives at its offset. The bytes around it do not change."""
    connection, memory, far = testbed.set_up(65536, Access.NONE, Access.REMOTE_WRITE, 65536 + 200)
    connection.queue_pair.write(memory.region[0:65536], far.remote[100 : 100 + 65536], context=1)
    (written,) = connection.take_ok(1, "the write")
    expect(written.operation is Operation.WRITE, f"a write completed as {written.operation.name}")
    expected = bytearray(pattern(far.seed, far.length))
    expected[100 : 100 + 65536] = memory.contents()
    connection.let_writes_arrive()
    expect_same(far.contents(), bytes(expected), "the peer's memory")
    return "65536 bytes, 100 on either side unchanged"


@check("read-write", "read")
def read(testbed: Testbed) -> str:
    """A read of 64 KiB fetches the peer's bytes. They do not change, and neither do the bytes around the local copy."""
    connection, memory, far = testbed.set_up(65536 + 200, SINK, Access.REMOTE_READ, 65536)
    connection.queue_pair.read(memory.region[100 : 100 + 65536], far.remote, context=1)
    (fetched,) = connection.take_ok(1, "the read")
    expect(fetched.operation is Operation.READ, f"a read completed as {fetched.operation.name}")
    expected = bytearray(pattern(memory.seed, memory.length))
    expected[100 : 100 + 65536] = pattern(far.seed, 65536)
    expect_same(memory.contents(), bytes(expected), "what was read")
    expect_unchanged(far, "the peer's memory after a read")
    return "65536 bytes, 100 on either side unchanged"


@check("read-write", "large")
def large(testbed: Testbed) -> str:
    """4 MiB that are written to the peer and read back are the same."""
    length = 4 << 20
    connection, memory, far = testbed.set_up(length, Access.NONE, BOTH)
    back = testbed.memory(length, SINK)
    connection.queue_pair.write(memory.region, far.remote, context=1)
    connection.queue_pair.read(back.region, far.remote, context=2)
    connection.take_ok(2, "4 MiB there and back")
    expect_same(back.contents(), memory.contents(), "what came back")
    return f"{length} bytes there and back"


@check("read-write", "zero-length")
def zero_length(testbed: Testbed) -> str:
    """Reads and writes of zero bytes succeed and change nothing."""
    connection, memory, far = testbed.set_up(64, SINK, BOTH)
    connection.queue_pair.write(memory.region[0:0], far.remote)
    connection.queue_pair.read(memory.region[0:0], far.remote)
    connection.take_ok(2, "transfers of zero bytes")
    expect_unchanged(memory, "this side's memory")
    expect_unchanged(far, "the peer's memory")
    return "a write and a read"


@check("read-write", "gathered-write")
def gathered_write(testbed: Testbed) -> str:
    """A write gathers its bytes from several pieces of memory, and a read scatters them to several, in order."""
    count = min(4, testbed.info.max_initiator_sge)
    if count < 2:
        raise Skip(f"{testbed.info.name} allows only one element in a request (max_initiator_sge)")
    connection = testbed.connect(testbed.new_end(max_sge=count))
    memory = testbed.memory(4096, SINK)
    far = testbed.peer_memory(1024, BOTH, connection)
    pieces = [(index * 1000, 50 + index) for index in range(count)][::-1]
    connection.queue_pair.write([memory.region[start : start + length] for start, length in pieces], far.remote)
    connection.take_ok(1, "the gathered write")
    expected = b"".join(memory.contents(start, length) for start, length in pieces)
    connection.let_writes_arrive()
    expect_same(far.contents(0, len(expected)), expected, "what was gathered")
    back = min(count, testbed.info.max_read_sge)
    pieces = [(2000 + index * 100, 60) for index in range(back)][::-1]
    connection.queue_pair.read([memory.region[start : start + length] for start, length in pieces], far.remote)
    connection.take_ok(1, "the scattered read")
    found = b"".join(memory.contents(start, length) for start, length in pieces)
    expect_same(found, far.contents(0, 60 * back), "what was scattered")
    return f"{count} pieces out, {back} back"


def _refused(
    testbed: Testbed, operation: Operation, access: Access, what: str, forge: int | None = None, token: int = 0
) -> str:
    """Fail unless the peer's adapter refuses this request.

    forge: moves the target by this many bytes, beyond the memory of the descriptor. token: flips these bits of the
        token.
    """
    witness = testbed.connect()
    connection = testbed.connect(receives=1)
    memory = testbed.memory(64, SINK)
    far = testbed.peer_memory(8192, access, connection)
    remote = far.remote
    target = RemoteMemory(remote.address + (forge or 0), 64, remote.token ^ token)
    post = connection.queue_pair.write if operation is Operation.WRITE else connection.queue_pair.read
    post(memory.region[0:64], target, context=1)
    (ended,) = connection.take(1, what)
    try:
        told = testbed.expect_refused(operation, ended.status, connection.connector.wait_disconnected, what)
    finally:
        expect_unchanged(far, f"the peer's memory after {what}")
    expect_unchanged(memory, f"this side's memory after {what}, which was refused")
    with contextlib.suppress(ndpy.AccessViolationError):
        ended.raise_for_status()
    connection.queue_pair.send(memory.region, context=2)
    (after,) = connection.take(1, f"a send after {what}")
    expect(after.status is Status.CANCELED, f"a send after {what} completed {after.status.name}, expected CANCELED")
    witness.expect_alive()
    return f"{told}; no byte changed, later requests CANCELED, another connection works"


@check("read-write", "write-to-readable")
def write_to_readable(testbed: Testbed) -> str:
    """A write to a region that only allows reads is refused."""
    return _refused(testbed, Operation.WRITE, Access.REMOTE_READ, "a write to a readable region")


@check("read-write", "read-of-writable")
def read_of_writable(testbed: Testbed) -> str:
    """A read of a region that only allows writes is refused."""
    return _refused(testbed, Operation.READ, Access.REMOTE_WRITE, "a read of a writable region")


@check("read-write", "past-the-region")
def past_the_region(testbed: Testbed) -> str:
    """A write that ends one byte after the peer's region is refused, and writes nothing."""
    return _refused(testbed, Operation.WRITE, BOTH, "a write past the region", forge=8192 - 63)


@check("read-write", "unknown-token")
def unknown_token(testbed: Testbed) -> str:
    """A write with an unknown token is refused."""
    return _refused(testbed, Operation.WRITE, BOTH, "a write with an unknown token", token=0x5A00A5)


@check("read-write", "own-unknown-token")
def own_unknown_token(testbed: Testbed) -> str:
    """A write with a wrong local token completes ACCESS_VIOLATION. The next request is cancelled."""
    connection, memory, far = testbed.set_up(64, Access.LOCAL_WRITE, BOTH)
    region = memory.region
    connection.queue_pair.write(ndpy.Sge(region, region.address, 64, region.local_token ^ 0x5A00), far.remote)
    connection.queue_pair.write(region, far.remote)
    first, second = connection.take(2, "both writes")
    expect(
        first.status is Status.ACCESS_VIOLATION, f"the write completed {first.status.name}, expected ACCESS_VIOLATION"
    )
    expect(second.status is Status.CANCELED, f"the next one completed {second.status.name}, expected CANCELED")
    expect_unchanged(far, "the peer's memory")
    return "ACCESS_VIOLATION, then CANCELED"
