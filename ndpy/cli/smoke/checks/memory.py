"""Group register: memory regions."""

from __future__ import annotations

import hashlib
import mmap

import ndpy
from ndpy import Access, Capability, Operation
from ndpy.cli.smoke.catalog import check
from ndpy.cli.smoke.lab import Lab, expect, expect_ok, expect_same, expect_unchanged, refusal
from ndpy.cli.smoke.line import pattern


@check("register", "sizes")
def sizes(lab: Lab) -> str:
    """1 byte at an odd address, a page and 16 MiB can be registered, and keep their bytes."""
    buffer = bytearray(pattern(1, 8192))
    with lab.adapter.register(memoryview(buffer)[4097:4098]) as region:
        expect(
            region.length == 1 and region.address % 2 == 1,
            f"1 byte was registered as {region.length} at {region.address:#x}",
        )
    with lab.adapter.register(buffer) as region:
        expect(region.length == 8192, f"8192 bytes were registered as {region.length}")
    expect_same(bytes(buffer), pattern(1, 8192), "registering changed the buffer")
    large = mmap.mmap(-1, 16 << 20)
    large.write(pattern(2, 1 << 20))
    digest = hashlib.sha256(large).digest()
    with lab.adapter.register(large, Access.REMOTE_WRITE):
        expect(hashlib.sha256(large).digest() == digest, "registering 16 MiB changed them")
    return "1 B, 8 KiB and 16 MiB"


@check("register", "tokens")
def tokens(lab: Lab) -> str:
    """64 regions over one buffer have different tokens."""
    buffer = ndpy.alloc(4096)
    regions = [lab.adapter.register(buffer, Access.REMOTE_WRITE) for _ in range(64)]
    lab.keep(*regions)
    expect(len({region.local_token for region in regions}) == 64, "two live regions have the same local token")
    if Capability.REGION_ACCESS not in lab.info.capabilities:
        return "64 local tokens"
    expect(len({region.remote_token for region in regions}) == 64, "two live regions have the same remote token")
    return "64 remote and 64 local tokens"


@check("register", "on-demand", needs=(Capability.ON_DEMAND_PAGING,))
def on_demand(lab: Lab) -> str:
    """Memory on demand that the program never touched is written and read where the requests say, over a page's edge too."""
    pair = lab.connect()
    far = lab.far_memory(256, Access.REMOTE_WRITE | Access.REMOTE_READ, pair)
    buffer = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    region = lab.adapter.register(buffer, Access.LOCAL_WRITE | Access.READ_SINK | Access.ON_DEMAND)
    lab.keep(region)
    expected = bytearray(len(buffer))
    for start in (3 * mmap.PAGESIZE + 100, 9 * mmap.PAGESIZE - 100):
        pair.queue_pair.read(region[start : start + 256], far.remote)
        expect_ok(pair.take(1, "a read into memory on demand"), "a read into memory on demand")
        expected[start : start + 256] = far.contents(0, 256)
    expect_same(bytes(buffer[:]), bytes(expected), "memory on demand, read into")
    start = 12 * mmap.PAGESIZE - 50
    buffer[start : start + 256] = pattern(3, 256)
    pair.queue_pair.write(region[start : start + 256], far.remote)
    expect_ok(pair.take(1, "a write from memory on demand"), "a write from memory on demand")
    expect_same(far.contents(0, 256), pattern(3, 256), "what was written from memory on demand")
    return "256 bytes into two places, 256 bytes out"


@check("register", "many-at-once")
def many_at_once(lab: Lab) -> str:
    """Registrations that run at the same time all succeed."""
    pending = [lab.adapter.begin_register(ndpy.alloc(65536), Access.REMOTE_READ) for _ in range(8)]
    regions = [one.result(lab.step()) for one in pending]
    lab.keep(*regions)
    expect(len({region.local_token for region in regions}) == 8, "two of them have the same token")
    ended = [region.begin_deregister() for region in regions]
    for one in ended:
        one.result(lab.step())
    return "8 registered and deregistered"


@check("register", "read-only-buffer")
def read_only_buffer(lab: Lab) -> str:
    """A read-only buffer is refused for writing, and accepted to send from."""
    data = pattern(3, 4096)
    with refusal(ndpy.AccessViolationError, "registering bytes for local write"):
        lab.adapter.register(data, Access.LOCAL_WRITE).close()
    pair = lab.connect()
    region = lab.adapter.register(data, Access.NONE)
    lab.keep(region)
    pair.queue_pair.send(region[0:4096])
    pair.take(1, "the send")
    pair.take_far(1, "the send")
    expect_same(pair.far.slot(0), data, "what the peer received")
    return "4096 bytes sent from a read-only buffer"


@check("register", "no-remote-right")
def no_remote_right(lab: Lab) -> str:
    """A region without a remote right cannot be reached by a peer that guesses its token."""
    memory = lab.memory(4096, Access.LOCAL_WRITE)
    guess = ndpy.RemoteMemory(memory.region.address, 4096, memory.region.local_token & 0xFFFFFFFF)
    with refusal(ndpy.NdpyError, "remote() of a region without remote rights"):
        memory.region.remote()
    seen = _refused_to_peer(lab, guess)
    expect_unchanged(memory, "the peer wrote")
    return seen


@check("register", "deregistered", needs=(Capability.REGION_ACCESS,))
def deregistered(lab: Lab) -> str:
    """The token of a deregistered region grants nothing."""
    buffer = ndpy.alloc(4096)
    buffer[:] = pattern(4, 4096)
    with lab.adapter.register(buffer, Access.REMOTE_WRITE | Access.REMOTE_READ) as region:
        stale = region.remote()
    seen = _refused_to_peer(lab, stale)
    expect_same(bytes(buffer), pattern(4, 4096), "a peer wrote into memory that was deregistered")
    return seen


def _refused_to_peer(lab: Lab, remote: ndpy.RemoteMemory) -> str:
    pair = lab.connect(greet=True)
    far = lab.far_memory(64)
    pair.far.post(Operation.WRITE, far, remote=remote[0:64])
    (ended,) = pair.take_far(1, "the peer's write")
    return lab.expect_refused(Operation.WRITE, ended.status, pair.far.wait_disconnected, "the peer's write")
