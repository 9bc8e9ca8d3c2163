"""Group register: memory regions."""

from __future__ import annotations

import hashlib
import mmap

import ndpy
from ndpy import Access, Capability, Operation
from ndpy.tools.cli.smoke.catalog import check
from ndpy.tools.cli.smoke.resources import pattern
from ndpy.tools.cli.smoke.testbed import BOTH, SINK, Testbed, expect, expect_same, expect_unchanged, refusal


@check("register", "sizes")
def sizes(testbed: Testbed) -> str:
    """1 byte at an odd address, 8 KiB and 16 MiB can be registered. Their contents do not change."""
    buffer = bytearray(pattern(1, 8192))
    with testbed.adapter.register(memoryview(buffer)[4097:4098]) as region:
        expect(
            region.length == 1 and region.address % 2 == 1,
            f"1 byte was registered as {region.length} at {region.address:#x}",
        )
    with testbed.adapter.register(buffer) as region:
        expect(region.length == 8192, f"8192 bytes were registered as {region.length}")
    expect_same(bytes(buffer), pattern(1, 8192), "registering changed the buffer")
    large = mmap.mmap(-1, 16 << 20)
    large.write(pattern(2, 1 << 20))
    digest = hashlib.sha256(large).digest()
    with testbed.adapter.register(large, Access.REMOTE_WRITE):
        expect(hashlib.sha256(large).digest() == digest, "registering 16 MiB changed them")
    return "1 B, 8 KiB and 16 MiB"


@check("register", "tokens")
def tokens(testbed: Testbed) -> str:
    """64 regions over one buffer have different tokens."""
    buffer = ndpy.alloc(4096)
    regions = [testbed.adapter.register(buffer, Access.REMOTE_WRITE) for _ in range(64)]
    testbed.close_afterwards(*regions)
    expect(len({region.local_token for region in regions}) == 64, "two live regions have the same local token")
    if Capability.REGION_ACCESS not in testbed.info.capabilities:
        return "64 local tokens"
    expect(len({region.remote_token for region in regions}) == 64, "two live regions have the same remote token")
    return "64 remote and 64 local tokens"


@check("register", "on-demand", needs=(Capability.ON_DEMAND_PAGING,))
def on_demand(testbed: Testbed) -> str:
    """With on-demand paging, requests read and write the right bytes, also in untouched pages and across a page
    boundary.
    """
    connection = testbed.connect()
    far = testbed.peer_memory(256, BOTH, connection)
    buffer = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    region = testbed.adapter.register(buffer, SINK | Access.ON_DEMAND)
    testbed.close_afterwards(region)
    expected = bytearray(len(buffer))
    for start in (3 * mmap.PAGESIZE + 100, 9 * mmap.PAGESIZE - 100):
        connection.queue_pair.read(region[start : start + 256], far.remote)
        connection.take_ok(1, "a read into memory on demand")
        expected[start : start + 256] = far.contents(0, 256)
    expect_same(bytes(buffer[:]), bytes(expected), "memory on demand, read into")
    start = 12 * mmap.PAGESIZE - 50
    buffer[start : start + 256] = pattern(3, 256)
    connection.queue_pair.write(region[start : start + 256], far.remote)
    connection.take_ok(1, "a write from memory on demand")
    connection.let_writes_arrive()
    expect_same(far.contents(0, 256), pattern(3, 256), "what was written from memory on demand")
    return "256 bytes into two places, 256 bytes out"


@check("register", "many-at-once")
def many_at_once(testbed: Testbed) -> str:
    """Eight registrations at the same time all succeed."""
    pending = [testbed.adapter.begin_register(ndpy.alloc(65536), Access.REMOTE_READ) for _ in range(8)]
    regions = [one.result(testbed.step()) for one in pending]
    testbed.close_afterwards(*regions)
    expect(len({region.local_token for region in regions}) == 8, "two of them have the same token")
    ended = [region.begin_deregister() for region in regions]
    for one in ended:
        one.result(testbed.step())
    return "8 registered and deregistered"


@check("register", "read-only-buffer")
def read_only_buffer(testbed: Testbed) -> str:
    """A read-only buffer cannot be registered for writing, but can be registered for sending."""
    data = pattern(3, 4096)
    with refusal(ndpy.AccessViolationError, "registering bytes for local write"):
        testbed.adapter.register(data, Access.LOCAL_WRITE).close()
    connection = testbed.connect()
    region = testbed.adapter.register(data, Access.NONE)
    testbed.close_afterwards(region)
    connection.queue_pair.send(region[0:4096])
    connection.take(1, "the send")
    connection.take_at_peer(1, "the send")
    expect_same(connection.far.slot(0), data, "what the peer received")
    return "4096 bytes sent from a read-only buffer"


@check("register", "no-remote-right")
def no_remote_right(testbed: Testbed) -> str:
    """A peer that guesses the token of a region without remote rights is refused."""
    memory = testbed.memory(4096, Access.LOCAL_WRITE)
    guess = ndpy.RemoteMemory(memory.region.address, 4096, memory.region.local_token & 0xFFFFFFFF)
    with refusal(ndpy.NdpyError, "remote() of a region without remote rights"):
        memory.region.remote()
    seen = _refused_to_peer(testbed, guess)
    expect_unchanged(memory, "the peer wrote")
    return seen


@check("register", "deregistered", needs=(Capability.REGION_ACCESS,))
def deregistered(testbed: Testbed) -> str:
    """A peer that uses the token of a deregistered region is refused."""
    buffer = ndpy.alloc(4096)
    buffer[:] = pattern(4, 4096)
    with testbed.adapter.register(buffer, Access.REMOTE_WRITE | Access.REMOTE_READ) as region:
        stale = region.remote()
    seen = _refused_to_peer(testbed, stale)
    expect_same(bytes(buffer), pattern(4, 4096), "a peer wrote into memory that was deregistered")
    return seen


def _refused_to_peer(testbed: Testbed, remote: ndpy.RemoteMemory) -> str:
    connection = testbed.connect(send_first=True)
    far = testbed.peer_memory(64)
    connection.far.post(Operation.WRITE, far, remote=remote[0:64])
    (ended,) = connection.take_at_peer(1, "the peer's write")
    return testbed.expect_refused(Operation.WRITE, ended.status, connection.far.wait_disconnected, "the peer's write")
