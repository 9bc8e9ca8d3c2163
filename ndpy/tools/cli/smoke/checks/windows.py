"""Group windows: this side owns memory windows, and the peer uses them, correctly and incorrectly.

A check of a refused access verifies all its consequences: the requester's completion says ACCESS_VIOLATION, no byte of
the owner's or the requester's memory changed, the connection ended, and another connection of the adapter still works.
"""

from __future__ import annotations

from dataclasses import dataclass

import ndpy
from ndpy import Access, Capability, Operation, RemoteMemory, Status
from ndpy.tools.cli.smoke.catalog import check
from ndpy.tools.cli.smoke.peer import PeerMemory
from ndpy.tools.cli.smoke.resources import Memory, pattern
from ndpy.tools.cli.smoke.testbed import (
    BOTH,
    Connection,
    Testbed,
    expect,
    expect_ok,
    expect_same,
    expect_status,
    expect_unchanged,
    peer_refusal,
    refusal,
)

_NEEDS = (Capability.MEMORY_WINDOWS,)
_LENGTH = 16384
_START, _SIZE = 4096, 4096
_AMOUNT = 64


@dataclass
class _WindowSetup:
    """16 KiB of memory for windows over its second 4 KiB, the connection that they are bound to, and memory of the
    peer.
    """

    testbed: Testbed
    connection: Connection
    memory: Memory
    far: PeerMemory

    def bind(self, access: Access = BOTH, offset: int = _START, length: int = _SIZE) -> ndpy.MemoryWindow:
        window = self.testbed.window()
        self.rebind(window, access, offset, length)
        return window

    def rebind(self, window: ndpy.MemoryWindow, access: Access, offset: int = _START, length: int = _SIZE) -> None:
        self.connection.queue_pair.bind(window, self.memory.region[offset : offset + length], access, context=11)
        (bound,) = self.connection.take_ok(1, "a bind")
        expect(bound.operation is Operation.BIND, f"a bind completed as {bound.operation.name}")

    def invalidate(self, window: ndpy.MemoryWindow) -> None:
        self.connection.queue_pair.invalidate(window, context=12)
        self.connection.take_ok(1, "an invalidate")

    def transfer(
        self, operation: Operation, remote: RemoteMemory, *, connection: Connection | None = None, offset: int = 0
    ) -> Status:
        """Let the peer read or write. Returns the status of its completion."""
        connection = connection or self.connection
        connection.far.post(operation, self.far, offset, remote.length, remote=remote, context=13)
        (ended,) = connection.take_at_peer(1, f"the peer's {operation.name}")
        return ended.status

    def moves(self, operation: Operation, remote: RemoteMemory, otherwise: str) -> None:
        """Let the peer read or write. Fail with the sentence `otherwise` unless it succeeds."""
        expect(self.transfer(operation, remote) is Status.SUCCESS, otherwise)

    def written(self, offset: int, length: int, far_offset: int = 0) -> None:
        """Fail unless the peer's bytes are at `offset` and all other bytes are unchanged."""
        expected = bytearray(pattern(self.memory.seed, _LENGTH))
        expected[offset : offset + length] = pattern(self.far.seed, self.far.length)[far_offset : far_offset + length]
        expect_same(self.memory.contents(), bytes(expected), "the memory after the peer's write")

    def refused(
        self, operation: Operation, remote: RemoteMemory, what: str, *, connection: Connection | None = None
    ) -> str:
        """Let the peer read or write. Fail unless that is refused with all its consequences."""
        witness = self.testbed.connect()
        connection = connection or self.connection
        receive = self.testbed.memory(64)
        connection.queue_pair.receive(receive.region, context=21)
        status = self.transfer(operation, remote, connection=connection)
        wrong = self.memory.changed() if operation is Operation.WRITE else self.far.changed()
        owner = "the owner's memory" if operation is Operation.WRITE else "the reader's memory"
        expect(status is not Status.SUCCESS, f"{what} was not refused; {owner}: {wrong or 'unchanged'}")
        expect(not wrong, f"{what} was refused, but {owner} changed: {wrong}")
        expect(status is Status.ACCESS_VIOLATION, f"{what} completed {status.name}, expected ACCESS_VIOLATION")
        expect_unchanged(self.memory, f"the owner's memory after {what}")
        (canceled,) = connection.take(1, f"the owner's receive after {what}")
        expect_status(canceled, Status.CANCELED, f"the owner's receive after {what}")
        witness.expect_alive()
        return "refused with ACCESS_VIOLATION, no byte changed, another connection works"


def _set_up(testbed: Testbed, access: Access = Access.LOCAL_WRITE) -> _WindowSetup:
    return _WindowSetup(
        testbed, testbed.connect(send_first=True), testbed.memory(_LENGTH, access), testbed.peer_memory(_SIZE + _AMOUNT)
    )


@check("windows", "write", needs=_NEEDS)
def write(testbed: Testbed) -> str:
    """A peer can write to a window, over a region that has no remote rights itself. Bytes outside the window do not
    change.
    """
    setup = _set_up(testbed)
    window = setup.bind()
    expect(window.is_bound and window.length == _SIZE, f"the window says length {window.length}")
    setup.moves(Operation.WRITE, window.remote(), "the peer's write failed")
    setup.written(_START, _SIZE)
    return f"{_SIZE} bytes arrived, their neighbours are unchanged"


@check("windows", "read", needs=_NEEDS)
def read(testbed: Testbed) -> str:
    """A peer can read through a window over a region that was registered without any right."""
    setup = _set_up(testbed, Access.NONE)
    window = setup.bind(Access.REMOTE_READ)
    setup.moves(Operation.READ, window.remote(), "the peer's read failed")
    expected = pattern(setup.memory.seed, _LENGTH)[_START : _START + _SIZE]
    expect_same(setup.far.contents(0, _SIZE), expected, "what the peer read")
    return f"{_SIZE} bytes read"


@check("windows", "bind-then-send", needs=_NEEDS)
def bind_then_send(testbed: Testbed) -> str:
    """A token can be sent to the peer as soon as bind() returns. It is valid when the message arrives."""
    setup = _set_up(testbed)
    window = testbed.window()
    queue_pair = setup.connection.queue_pair
    message = testbed.memory(20)
    queue_pair.bind(window, setup.memory.region[_START : _START + _SIZE], BOTH, context=1)
    message.buffer[:] = window.remote().to_bytes()
    queue_pair.send(message.region, context=2)
    (received,) = setup.connection.take_at_peer(1, "the token")
    expect_ok([received], "the token")
    remote = RemoteMemory.from_bytes(setup.connection.far.slot(setup.connection.used, 20))
    expect(remote == window.remote(), f"the peer received {remote}, the window is {window.remote()}")
    setup.moves(Operation.WRITE, remote, "the peer's write failed")
    setup.connection.take_ok(2, "bind and send")
    setup.written(_START, _SIZE)
    return "bind, send, and the peer's write"


@check("windows", "fresh-token", needs=_NEEDS)
def fresh_token(testbed: Testbed) -> str:
    """Each bind of a window gives it a new token."""
    setup = _set_up(testbed)
    window = testbed.window()
    with refusal(ndpy.NdpyError, "remote() of a window that was never bound"):
        window.remote()
    seen = set()
    for _ in range(8):
        setup.rebind(window, BOTH)
        seen.add(window.remote_token)
        setup.invalidate(window)
    expect(len(seen) == 8, f"8 binds gave {len(seen)} different tokens")
    return "8 binds, 8 tokens"


@check("windows", "overlapping", needs=_NEEDS)
def overlapping(testbed: Testbed) -> str:
    """Invalidating one of two windows over the same bytes does not affect the other."""
    setup = _set_up(testbed)
    first, second = setup.bind(), setup.bind(Access.REMOTE_WRITE)
    setup.invalidate(first)
    expect(not first.is_bound and second.is_bound, "the windows do not say which of them is bound")
    setup.moves(Operation.WRITE, second.remote(), "the write through the other window failed")
    setup.written(_START, _SIZE)
    return "the other window took a write"


def _refused(testbed: Testbed, what: str, operation: Operation, offset: int, length: int, access: Access = BOTH) -> str:
    """Fail unless an access to `length` bytes of a window, from `offset` on, is refused."""
    setup = _set_up(testbed)
    window = setup.bind(access)
    remote = RemoteMemory(window.remote().address + offset, length, window.remote_token)
    return setup.refused(operation, remote, what)


@check("windows", "read-only", needs=_NEEDS)
def read_only(testbed: Testbed) -> str:
    """A write through a window that only allows reads is refused."""
    return _refused(testbed, "the write", Operation.WRITE, 0, _AMOUNT, Access.REMOTE_READ)


@check("windows", "write-only", needs=_NEEDS)
def write_only(testbed: Testbed) -> str:
    """A read through a window that only allows writes is refused."""
    return _refused(testbed, "the read", Operation.READ, 0, _AMOUNT, Access.REMOTE_WRITE)


@check("windows", "write-past-end", needs=_NEEDS)
def write_past_end(testbed: Testbed) -> str:
    """A write to the byte after a window, inside its region, is refused."""
    return _refused(testbed, "the write past the end", Operation.WRITE, _SIZE, 1)


@check("windows", "write-before-start", needs=_NEEDS)
def write_before_start(testbed: Testbed) -> str:
    """A write to the byte before a window, inside its region, is refused."""
    return _refused(testbed, "the write before the start", Operation.WRITE, -1, 1)


@check("windows", "write-across-end", needs=_NEEDS)
def write_across_end(testbed: Testbed) -> str:
    """A write that begins in a window and ends one byte after it is refused, and writes nothing."""
    return _refused(testbed, "the write across the end", Operation.WRITE, _SIZE - 63, 64)


@check("windows", "read-past-end", needs=_NEEDS)
def read_past_end(testbed: Testbed) -> str:
    """A read of the byte after a window, inside its region, is refused."""
    return _refused(testbed, "the read past the end", Operation.READ, _SIZE, 1)


@check("windows", "other-queue-pair", needs=_NEEDS)
def other_queue_pair(testbed: Testbed) -> str:
    """A window's token is refused on another connection than its own, and still works on its own."""
    setup = _set_up(testbed)
    window = setup.bind()
    stranger = testbed.connect(send_first=True)
    seen = setup.refused(
        Operation.WRITE, window.remote()[0:_AMOUNT], "the write through another queue pair", connection=stranger
    )
    setup.moves(Operation.WRITE, window.remote(), "the window's own connection no longer works")
    setup.written(_START, _SIZE)
    return seen


@check("windows", "invalidated", needs=_NEEDS)
def invalidated(testbed: Testbed) -> str:
    """After invalidate() has completed, a write with the window's token is refused."""
    setup = _set_up(testbed)
    window = setup.bind()
    remote = window.remote()
    setup.moves(Operation.READ, remote[0:_AMOUNT], "the read before it was invalidated failed")
    expect_same(
        setup.far.contents(0, _AMOUNT),
        pattern(setup.memory.seed, _LENGTH)[_START : _START + _AMOUNT],
        "the read before",
    )
    setup.invalidate(window)
    with refusal(ndpy.NdpyError, "remote() of an invalidated window"):
        window.remote()
    return setup.refused(Operation.WRITE, remote[0:_AMOUNT], "the write after invalidate")


@check("windows", "stale-token", needs=_NEEDS)
def stale_token(testbed: Testbed) -> str:
    """The token of an earlier bind is refused, although the window is bound again over the same bytes."""
    setup = _set_up(testbed)
    window = setup.bind()
    stale = window.remote()
    setup.invalidate(window)
    setup.rebind(window, BOTH)
    return setup.refused(Operation.WRITE, stale[0:_AMOUNT], "the write with the token of an earlier bind")


@check("windows", "busy-region", needs=_NEEDS)
def busy_region(testbed: Testbed) -> str:
    """A region with a bound window cannot be deregistered and keeps working.
    After invalidate() it can be deregistered.
    """
    setup = _set_up(testbed)
    window = setup.bind()
    with refusal(ndpy.DeviceBusyError, "deregister() under a bound window"):
        setup.memory.region.deregister()
    setup.moves(Operation.WRITE, window.remote(), "the window does not work after the refusal")
    setup.written(_START, _SIZE)
    setup.invalidate(window)
    setup.memory.region.deregister()
    expect(setup.memory.region.closed, "the region is not closed after deregister()")
    return "DeviceBusyError, then a write, then deregistered"


@check("windows", "bad-bind", needs=_NEEDS)
def bad_bind(testbed: Testbed) -> str:
    """A bind beyond the region or its rights is refused at once. Windows and connection are not affected."""
    setup = _set_up(testbed, Access.NONE)
    window = setup.bind(Access.REMOTE_READ)
    before = window.remote()
    spare = testbed.window()
    queue_pair = setup.connection.queue_pair
    with refusal(ndpy.ElementRangeError, "a bind past the region's end"):
        queue_pair.bind(spare, setup.memory.region[_LENGTH - 10 : _LENGTH - 10 + 20], Access.REMOTE_READ)
    with refusal(ndpy.AccessViolationError, "a writable window over a region without local write"):
        queue_pair.bind(spare, setup.memory.region[0:64], Access.REMOTE_WRITE)
    expect(not spare.is_bound and window.remote() == before, "a refused bind changed a window")
    setup.moves(Operation.READ, before[0:_AMOUNT], "the connection does not work after the refusals")
    return "both refused, the connection works"


@check("windows", "beyond-remote-length", needs=_NEEDS)
def beyond_remote_length(testbed: Testbed) -> str:
    """The requester's library refuses a transfer that is longer than the window."""
    setup = _set_up(testbed)
    window = setup.bind()
    with peer_refusal("ElementRangeError", "a write longer than the descriptor"):
        setup.connection.far.post(Operation.WRITE, setup.far, 0, _SIZE + 1, remote=window.remote())
    setup.moves(Operation.WRITE, window.remote(), "the connection does not work after the refusal")
    setup.written(_START, _SIZE)
    return "refused before it was sent"
