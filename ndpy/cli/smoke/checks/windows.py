"""Group windows: this side owns memory windows, the peer uses them, rightly and wrongly.

A refused access is looked at from all sides: the requester is told ACCESS_VIOLATION, no byte of the owner's or of the
requester's memory changed, that connection is over, and another connection of the same adapter still works.
"""

from __future__ import annotations

from dataclasses import dataclass

import ndpy
from ndpy import Access, Capability, Operation, RemoteMemory, Status
from ndpy.cli.smoke.catalog import check
from ndpy.cli.smoke.lab import (
    Lab,
    Pair,
    expect,
    expect_ok,
    expect_same,
    expect_status,
    expect_unchanged,
    far_refusal,
    refusal,
)
from ndpy.cli.smoke.line import Memory, pattern
from ndpy.cli.smoke.remote import FarMemory

_NEEDS = (Capability.MEMORY_WINDOWS,)
_BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
_LENGTH = 16384
_START, _SIZE = 4096, 4096
_AMOUNT = 64


@dataclass
class _Scene:
    """Memory of 16 KiB, windows over its second 4 KiB, the connection that they are bound to, the peer's own memory."""

    lab: Lab
    pair: Pair
    memory: Memory
    far: FarMemory

    def bind(self, access: Access = _BOTH, offset: int = _START, length: int = _SIZE) -> ndpy.MemoryWindow:
        window = self.lab.window()
        self.rebind(window, access, offset, length)
        return window

    def rebind(self, window: ndpy.MemoryWindow, access: Access, offset: int = _START, length: int = _SIZE) -> None:
        self.pair.queue_pair.bind(window, self.memory.region[offset : offset + length], access, context=11)
        (bound,) = self.pair.take(1, "a bind")
        expect_ok([bound], "a bind")
        expect(bound.operation is Operation.BIND, f"a bind completed as {bound.operation.name}")

    def invalidate(self, window: ndpy.MemoryWindow) -> None:
        self.pair.queue_pair.invalidate(window, context=12)
        expect_ok(self.pair.take(1, "an invalidate"), "an invalidate")

    def transfer(
        self, operation: Operation, remote: RemoteMemory, *, pair: Pair | None = None, offset: int = 0
    ) -> Status:
        """Let the peer read or write; how it ended."""
        pair = pair or self.pair
        pair.far.post(operation, self.far, offset, remote.length, remote=remote, context=13)
        (ended,) = pair.take_far(1, f"the peer's {operation.name}")
        return ended.status

    def written(self, offset: int, length: int, far_offset: int = 0) -> None:
        """The peer's bytes are at `offset`, and all others are as before."""
        expected = bytearray(pattern(self.memory.seed, _LENGTH))
        expected[offset : offset + length] = pattern(self.far.seed, self.far.length)[far_offset : far_offset + length]
        expect_same(self.memory.contents(), bytes(expected), "the memory after the peer's write")

    def refused(self, operation: Operation, remote: RemoteMemory, what: str, *, pair: Pair | None = None) -> str:
        """The peer's access is refused; look at it from all sides."""
        witness = self.lab.connect()
        pair = pair or self.pair
        receive = self.lab.memory(64)
        pair.queue_pair.receive(receive.region, context=21)
        status = self.transfer(operation, remote, pair=pair)
        wrong = self.memory.changed() if operation is Operation.WRITE else self.far.changed()
        owner = "the owner's memory" if operation is Operation.WRITE else "the reader's memory"
        expect(status is not Status.SUCCESS, f"{what} was not refused; {owner}: {wrong or 'unchanged'}")
        expect(not wrong, f"{what} was refused, but {owner} changed: {wrong}")
        expect(status is Status.ACCESS_VIOLATION, f"{what} completed {status.name}, expected ACCESS_VIOLATION")
        expect_unchanged(self.memory, f"the owner's memory after {what}")
        (swept,) = pair.take(1, f"the owner's receive after {what}")
        expect_status(swept, Status.CANCELED, f"the owner's receive after {what}")
        witness.alive()
        return "refused with ACCESS_VIOLATION, no byte changed, another connection works"


def _scene(lab: Lab, access: Access = Access.LOCAL_WRITE) -> _Scene:
    return _Scene(lab, lab.connect(greet=True), lab.memory(_LENGTH, access), lab.far_memory(_SIZE + _AMOUNT))


@check("windows", "write", needs=_NEEDS)
def write(lab: Lab) -> str:
    """A peer writes all of a window over a region that has no remote right itself, and nothing outside of it."""
    scene = _scene(lab)
    window = scene.bind()
    expect(window.is_bound and window.length == _SIZE, f"the window says length {window.length}")
    expect(scene.transfer(Operation.WRITE, window.remote()) is Status.SUCCESS, "the peer's write failed")
    scene.written(_START, _SIZE)
    return f"{_SIZE} bytes arrived, their neighbours are unchanged"


@check("windows", "read", needs=_NEEDS)
def read(lab: Lab) -> str:
    """A peer reads through a window over a region registered without any right."""
    scene = _scene(lab, Access.NONE)
    window = scene.bind(Access.REMOTE_READ)
    expect(scene.transfer(Operation.READ, window.remote()) is Status.SUCCESS, "the peer's read failed")
    expected = pattern(scene.memory.seed, _LENGTH)[_START : _START + _SIZE]
    expect_same(scene.far.contents(0, _SIZE), expected, "what the peer read")
    return f"{_SIZE} bytes read"


@check("windows", "bind-then-send", needs=_NEEDS)
def bind_then_send(lab: Lab) -> str:
    """A token can be sent right after bind() returned, and works when the message has arrived."""
    scene = _scene(lab)
    window = lab.window()
    queue_pair = scene.pair.queue_pair
    message = lab.memory(20)
    queue_pair.bind(window, scene.memory.region[_START : _START + _SIZE], _BOTH, context=1)
    message.buffer[:] = window.remote().to_bytes()
    queue_pair.send(message.region, context=2)
    (received,) = scene.pair.take_far(1, "the token")
    expect_ok([received], "the token")
    remote = RemoteMemory.from_bytes(scene.pair.far.slot(scene.pair.used, 20))
    expect(remote == window.remote(), f"the peer received {remote}, the window is {window.remote()}")
    expect(scene.transfer(Operation.WRITE, remote) is Status.SUCCESS, "the peer's write failed")
    expect_ok(scene.pair.take(2, "bind and send"), "bind and send")
    scene.written(_START, _SIZE)
    return "bind, send, and the peer's write"


@check("windows", "fresh-token", needs=_NEEDS)
def fresh_token(lab: Lab) -> str:
    """Each bind of a window gives a token that was not used before."""
    scene = _scene(lab)
    window = lab.window()
    with refusal(ndpy.NdpyError, "remote() of a window that was never bound"):
        window.remote()
    seen = set()
    for _ in range(8):
        scene.rebind(window, _BOTH)
        seen.add(window.remote_token)
        scene.invalidate(window)
    expect(len(seen) == 8, f"8 binds gave {len(seen)} different tokens")
    return "8 binds, 8 tokens"


@check("windows", "overlapping", needs=_NEEDS)
def overlapping(lab: Lab) -> str:
    """Of two windows over the same bytes, one is invalidated and the other still works."""
    scene = _scene(lab)
    first, second = scene.bind(), scene.bind(Access.REMOTE_WRITE)
    scene.invalidate(first)
    expect(not first.is_bound and second.is_bound, "the windows do not say which of them is bound")
    expect(
        scene.transfer(Operation.WRITE, second.remote()) is Status.SUCCESS, "the write through the other window failed"
    )
    scene.written(_START, _SIZE)
    return "the other window took a write"


@check("windows", "read-only", needs=_NEEDS)
def read_only(lab: Lab) -> str:
    """A write through a window with only the right to read is refused."""
    scene = _scene(lab)
    window = scene.bind(Access.REMOTE_READ)
    return scene.refused(Operation.WRITE, window.remote()[0:_AMOUNT], "the write")


@check("windows", "write-only", needs=_NEEDS)
def write_only(lab: Lab) -> str:
    """A read through a window with only the right to write is refused."""
    scene = _scene(lab)
    window = scene.bind(Access.REMOTE_WRITE)
    return scene.refused(Operation.READ, window.remote()[0:_AMOUNT], "the read")


@check("windows", "write-past-end", needs=_NEEDS)
def write_past_end(lab: Lab) -> str:
    """A write of the one byte behind a window's end, inside of its region, is refused."""
    scene = _scene(lab)
    window = scene.bind()
    beyond = RemoteMemory(window.remote().address + _SIZE, 1, window.remote_token)
    return scene.refused(Operation.WRITE, beyond, "the write past the end")


@check("windows", "write-before-start", needs=_NEEDS)
def write_before_start(lab: Lab) -> str:
    """A write of the one byte before a window's start, inside of its region, is refused."""
    scene = _scene(lab)
    window = scene.bind()
    before = RemoteMemory(window.remote().address - 1, 1, window.remote_token)
    return scene.refused(Operation.WRITE, before, "the write before the start")


@check("windows", "write-across-end", needs=_NEEDS)
def write_across_end(lab: Lab) -> str:
    """A write that starts in a window and ends one byte behind it is refused as a whole."""
    scene = _scene(lab)
    window = scene.bind()
    across = RemoteMemory(window.remote().address + _SIZE - 63, 64, window.remote_token)
    return scene.refused(Operation.WRITE, across, "the write across the end")


@check("windows", "read-past-end", needs=_NEEDS)
def read_past_end(lab: Lab) -> str:
    """A read of the one byte behind a window's end, inside of its region, is refused."""
    scene = _scene(lab)
    window = scene.bind()
    beyond = RemoteMemory(window.remote().address + _SIZE, 1, window.remote_token)
    return scene.refused(Operation.READ, beyond, "the read past the end")


@check("windows", "other-queue-pair", needs=_NEEDS)
def other_queue_pair(lab: Lab) -> str:
    """A window's token is refused on another connection than the one that it is bound to, where it goes on working."""
    scene = _scene(lab)
    window = scene.bind()
    stranger = lab.connect(greet=True)
    seen = scene.refused(
        Operation.WRITE, window.remote()[0:_AMOUNT], "the write through another queue pair", pair=stranger
    )
    expect(
        scene.transfer(Operation.WRITE, window.remote()) is Status.SUCCESS,
        "the window's own connection does not work any more",
    )
    scene.written(_START, _SIZE)
    return seen


@check("windows", "invalidated", needs=_NEEDS)
def invalidated(lab: Lab) -> str:
    """After invalidate() completed, a write with the window's token is refused."""
    scene = _scene(lab)
    window = scene.bind()
    remote = window.remote()
    expect(
        scene.transfer(Operation.READ, remote[0:_AMOUNT]) is Status.SUCCESS, "the read before it was invalidated failed"
    )
    expect_same(
        scene.far.contents(0, _AMOUNT),
        pattern(scene.memory.seed, _LENGTH)[_START : _START + _AMOUNT],
        "the read before",
    )
    scene.invalidate(window)
    with refusal(ndpy.NdpyError, "remote() of an invalidated window"):
        window.remote()
    return scene.refused(Operation.WRITE, remote[0:_AMOUNT], "the write after invalidate")


@check("windows", "stale-token", needs=_NEEDS)
def stale_token(lab: Lab) -> str:
    """The token of an earlier bind is refused although the window is bound again over the same bytes."""
    scene = _scene(lab)
    window = scene.bind()
    stale = window.remote()
    scene.invalidate(window)
    scene.rebind(window, _BOTH)
    return scene.refused(Operation.WRITE, stale[0:_AMOUNT], "the write with the token of an earlier bind")


@check("windows", "busy-region", needs=_NEEDS)
def busy_region(lab: Lab) -> str:
    """A region with a bound window refuses to be deregistered, keeps working, and can go after invalidate()."""
    scene = _scene(lab)
    window = scene.bind()
    with refusal(ndpy.DeviceBusyError, "deregister() under a bound window"):
        scene.memory.region.deregister()
    expect(
        scene.transfer(Operation.WRITE, window.remote()) is Status.SUCCESS, "the window does not work after the refusal"
    )
    scene.written(_START, _SIZE)
    scene.invalidate(window)
    scene.memory.region.deregister()
    expect(scene.memory.region.closed, "the region is not closed after deregister()")
    return "DeviceBusyError, then a write, then deregistered"


@check("windows", "bad-bind", needs=_NEEDS)
def bad_bind(lab: Lab) -> str:
    """Binds beyond the region or its rights are refused at once; window and connection are as before."""
    scene = _scene(lab, Access.NONE)
    window = scene.bind(Access.REMOTE_READ)
    before = window.remote()
    spare = lab.window()
    queue_pair = scene.pair.queue_pair
    with refusal(ndpy.ElementRangeError, "a bind past the region's end"):
        queue_pair.bind(spare, scene.memory.region[_LENGTH - 10 : _LENGTH - 10 + 20], Access.REMOTE_READ)
    with refusal(ndpy.AccessViolationError, "a writable window over a region without local write"):
        queue_pair.bind(spare, scene.memory.region[0:64], Access.REMOTE_WRITE)
    expect(not spare.is_bound and window.remote() == before, "a refused bind changed a window")
    expect(
        scene.transfer(Operation.READ, before[0:_AMOUNT]) is Status.SUCCESS,
        "the connection does not work after the refusals",
    )
    return "both refused, the connection works"


@check("windows", "beyond-remote-length", needs=_NEEDS)
def beyond_remote_length(lab: Lab) -> str:
    """The requester's library refuses a transfer that is longer than the window's descriptor says."""
    scene = _scene(lab)
    window = scene.bind()
    with far_refusal("ElementRangeError", "a write longer than the descriptor"):
        scene.pair.far.post(Operation.WRITE, scene.far, 0, _SIZE + 1, remote=window.remote())
    expect(
        scene.transfer(Operation.WRITE, window.remote()) is Status.SUCCESS,
        "the connection does not work after the refusal",
    )
    scene.written(_START, _SIZE)
    return "refused before it was sent"
