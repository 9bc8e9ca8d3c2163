"""What moves memory on a connection besides messages: reads, writes, and the memory that this end exposes."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.aio.hub import LONG_REGISTRATION, Hub, finish, in_thread, start
from ndpy.aio.memory import Memory, length_of, part_of, room_of
from ndpy.cache.lease import Lease
from ndpy.objects.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.objects.resource import Uncopied
from ndpy.vocabulary.flags import Access, Capability, Flags
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.queue_pair import QueuePair

# Kinds of requests, in the context of a request.
RECEIVE, SEND, CONTROL, TRANSFER, BIND, PROBE = 0 << 24, 1 << 24, 2 << 24, 3 << 24, 4 << 24, 5 << 24
KIND, INDEX = 0xFF << 24, 0xFFFFFF
SILENT = int(Flags.SILENT_SUCCESS)
# How many transfers of this end are outstanding at once. Others wait.
_TRANSFERS = 16
# How many binds may be posted without a completion. They have ended when a later bind or invalidate has.
_SILENT_BINDS = 4
# How many requests all of that is at most, with a probe.
MOST_REQUESTS = _TRANSFERS + _SILENT_BINDS + 1
# How long the peer may take to let go of the memory of a cancelled message or transfer before the connection is ended.
_LET_GO_S = 5.0
# How long that, the delivery of what was sent, and the disconnect may take together after hurry().
_HURRY_S = 0.4
_SINK = Access.LOCAL_WRITE | Access.READ_SINK
# As a number, because operators of flags are slow.
_LOCAL_WRITE = int(Access.LOCAL_WRITE)


def has_usable_windows(adapter: Adapter) -> bool:
    """Whether what is exposed is behind memory windows. Otherwise it is a region of its own."""
    return Capability.MEMORY_WINDOWS in adapter.info.capabilities and Quirk.RXE_BINDS_AGAIN not in adapter._quirks


class Transfers(Uncopied, abc.ABC):
    """The transfers of a connection. Base of Connection."""

    adapter: Adapter
    queue_pair: QueuePair
    _hub: Hub
    _loop: asyncio.AbstractEventLoop
    #: What the contexts of the connection's requests have in common.
    _base: int
    _peer: str
    _failure: BaseException | None

    def __init__(self) -> None:
        #: Each ends with None or the failure.
        self._transfers: dict[int, asyncio.Future[BaseException | None]] = {}
        self._last_transfer = 0
        self._transfer_room = asyncio.Semaphore(_TRANSFERS)
        self._windows: list[MemoryWindow] = []
        #: How many binds were posted without a completion, and how many of these have ended.
        self._binds = self._ended_binds = 0
        self._has_windows = has_usable_windows(self.adapter)
        #: Ends when hurry() is called, and until when the connection may wait for its peer then.
        self._hurried: asyncio.Future[None] = self._loop.create_future()
        self._latest = math.inf

    async def read(self, remote: RemoteMemory, into: Memory) -> None:
        """Read memory of the peer, which its program does not notice. Return when the bytes are there.

        If it is cancelled, it ends when the adapter does not write to the memory any more.

        Parameters:
            remote: what the peer has exposed: the `remote` of its expose(), or a part of it. The peer sends it as
                remote.to_bytes().
            into: writable memory of at most remote.length bytes. All of it is filled.
        Raises:
            ElementRangeError: `into` is longer than `remote`.
            AccessViolationError: `into` is read-only, or a region without LOCAL_WRITE. Or the peer has not exposed this
                memory for reading: then the connection has ended.
            ConnectionEndedError, ConnectionResetError, ProtocolError, ClosedError: the connection has ended.
        """
        self._require_open()
        await self._move(self.queue_pair.read, remote, into, room_of(into, "read"))

    async def write(self, remote: RemoteMemory, data: Memory) -> None:
        """Write to memory of the peer, which its program does not notice. Return when the adapter needs `data` no more.

        On InfiniBand and RoCE the bytes are in the peer's memory then. On iWARP they may still be on the way. A message that is sent
        afterwards arrives after them everywhere.

        If it is cancelled, it ends when the adapter does not read the memory any more.

        Parameters:
            remote: as for read().
            data: at most remote.length bytes.
        Raises: as for read().
        """
        self._require_open()
        await self._move(self.queue_pair.write, remote, data, length_of(data))

    @contextlib.asynccontextmanager
    async def expose(
        self, memory: Memory, access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE
    ) -> AsyncIterator[RemoteMemory]:
        """Let the peer use memory while the block lasts: `async with connection.expose(buffer) as remote`.

        A message that is sent in the block can carry remote.to_bytes(). When the block ends, the peer's right has ended. On adapters
        with memory windows, only this connection's peer has the right. On others and on rxe (see Quirk.RXE_BINDS_AGAIN), whoever
        knows the token has it.

        Parameters:
            memory: a buffer, a region, a slice of one, or a lease. At least one byte.
            access: REMOTE_READ, REMOTE_WRITE or both.
        Raises:
            ConnectionEndedError, ConnectionResetError, ProtocolError, ClosedError: the connection has ended.
            Otherwise what Adapter.register() raises.
        """
        self._require_open()
        exposure = Exposure(self)
        async with AtEnd(self, exposure.end):
            # The program may tell the peer by another way than this connection.
            yield await exposure.begin(memory, access, wait=True)

    async def _bind(self, window: MemoryWindow, element: Sge, access: Access, *, wait: bool) -> RemoteMemory:
        """Give the peer its right. wait: return when it has it. Otherwise what is sent next on this connection may tell it."""
        remote: RemoteMemory | None = None

        def post(context: int, flags: int = 0) -> None:
            nonlocal remote
            self.queue_pair.bind(window, element, access, context=context, flags=flags)
            # The end of the connection takes the right away, and may come at once, or while this waits.
            with contextlib.suppress(errors.NdpyError):
                remote = window.remote()

        if wait or self._binds - self._ended_binds >= _SILENT_BINDS:
            ended = await self._begin(post)
            self._note_binds(ended)
            if wait:
                await self._end_of(ended)
        else:
            self._post(BIND, lambda context: post(context, SILENT))
            self._binds += 1
        self._require_open(closing=True)
        if remote is None:
            self._lose("the peer ended it, or its process has ended")
            raise self._end_error()
        return remote

    async def _unbind(self, window: MemoryWindow) -> None:
        """Take back what a bind gave. A cancellation takes effect afterwards."""
        try:
            if self._failure is None and window.is_bound:
                # Without this task nothing waits before the request is posted.
                if self._transfer_room.locked():
                    await finish(start(self._loop, lambda: self._invalidate(window)))
                else:
                    await self._invalidate(window)
        except errors.NdpyError:
            # The connection was lost.
            pass
        finally:
            if self._failure is None and not window.is_bound:
                self._windows.append(window)
            else:
                # This takes the right away, also where the connection does not do so itself.
                await in_thread(window.close)

    async def _invalidate(self, window: MemoryWindow) -> None:
        ended = await self._begin(lambda context: self.queue_pair.invalidate(window, context=context))
        self._note_binds(ended)
        await self._end_of(ended)

    def _note_binds(self, later: asyncio.Future[Any]) -> None:
        """The binds that were posted so far have ended when this later request has."""
        binds = self._binds

        def on_end(_: asyncio.Future[Any]) -> None:
            self._ended_binds = max(self._ended_binds, binds)

        later.add_done_callback(on_end)

    async def _register(self, memory: Memory, access: Access) -> MemoryRegion:
        """Register memory with remote rights."""
        length = length_of(memory)
        if isinstance(memory, (MemoryRegion, Sge, Lease)):
            memory = (memory.address, length)
        if length <= LONG_REGISTRATION:
            return self.adapter.register(memory, access)
        pending = self.adapter.begin_register(memory, access)
        try:
            return await pending
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled() and pending.exception(0) is None:
                pending.result(0).close()
            raise

    async def _lease(self, memory: Memory, length: int, access: Access) -> tuple[Sge, Lease | None]:
        """An element of the first bytes of memory, which is registered if it is not, and what to give back afterwards."""
        if isinstance(memory, Sge):
            offset = memory.address - memory.region.address
            return memory.region[offset : offset + length], None
        if isinstance(memory, (MemoryRegion, Lease)):
            return memory[:length], None
        lease = await self._hub.lease(memory, access)
        self._hub.stay()
        try:
            return lease[:length], lease
        except BaseException:
            await self._give_back(lease)
            raise

    async def _give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
            # What a connection has lent may be in use for longer than the connection, and so is the hub.
            await self._hub.leave()

    async def _move(self, post: Callable[..., None], remote: RemoteMemory, memory: Memory, length: int) -> None:
        """Read or write. All requests that were posted have ended when this ends."""
        if not isinstance(remote, RemoteMemory):
            raise TypeError(f"remote is the peer's memory as a RemoteMemory, not {type(remote).__name__}")
        if length > remote.length:
            raise errors.ElementRangeError(f"{length} bytes do not fit the {remote.length} bytes of the peer's memory")
        if not length:
            return
        access = _SINK if post == self.queue_pair.read else Access.NONE
        longest = self.adapter.info.max_transfer_length
        posted: list[asyncio.Future[BaseException | None]] = []
        element, lease = await self._lease(memory, length, access)
        async with AtEnd(self, lambda: self._end_move(posted, lease)):
            for start in range(0, length, longest):
                end = min(start + longest, length)
                part = element if end - start == length else part_of(element, start, end)
                target = remote if end - start == remote.length else remote[start:end]
                posted.append(
                    await self._begin(lambda context, part=part, target=target: post(part, target, context=context))  # type: ignore[misc]
                )
            for future in posted:
                await asyncio.shield(future)
        for future in posted:
            failure = future.result()
            if failure is not None:
                raise failure

    async def _end_move(self, posted: list[asyncio.Future[BaseException | None]], lease: Lease | None) -> None:
        try:
            await self._let_go(*posted)
        finally:
            await self._give_back(lease)

    def _post(self, context: int, post: Callable[[int], None]) -> None:
        self._require_open(closing=True)
        try:
            post(self._base | context)
        except errors.ProviderError as error:
            # Its end may be noticed before it is told. Mistakes of the program have classes of their own.
            if type(error) not in (errors.ProviderError, errors.NotConnectedError):
                raise
            self._lose(str(error), error)
            raise self._end_error() from error

    async def _begin(self, post: Callable[[int], None]) -> asyncio.Future[BaseException | None]:
        """Post a request when there is room for it. Returns a future of its end."""
        await self._transfer_room.acquire()
        try:
            self._last_transfer = (self._last_transfer + 1) & INDEX
            number = self._last_transfer
            self._post(TRANSFER | number, post)
        except BaseException:
            self._transfer_room.release()
            raise
        future = self._transfers[number] = self._loop.create_future()
        return future

    async def _end_of(self, future: asyncio.Future[BaseException | None]) -> None:
        failure = await finish(future)
        if failure is not None:
            raise failure

    async def _let_go(self, *futures: asyncio.Future[Any]) -> None:
        """Wait until these have ended, whatever cancels the task. If that takes too long, end the connection."""
        left = [future for future in futures if not future.done()]
        if not left:
            return
        late = await finish(start(self._loop, lambda: self._end_late(left)), self.hurry)
        if late:
            self._lose(f"{self._peer} did not let go of the memory of a cancelled transfer within {_LET_GO_S:g} s")
            await finish(start(self._loop, lambda: asyncio.wait(late)))

    async def _end_late(self, late: list[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
        """Wait for these. Returns those that do not end in time."""
        end = self._loop.time() + _LET_GO_S
        while late and (left_s := self._limited(max(0.0, end - self._loop.time()))):
            wakers = late if self._hurried.done() else [*late, self._hurried]
            await asyncio.wait(wakers, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            late = [future for future in late if not future.done()]
        return late

    def hurry(self) -> None:
        """The program is being ended. Wait until all is delivered, but not until the peer's program does something, nor long."""
        if not (self._hurried.done() or self._loop.is_closed()):
            self._latest = self._loop.time() + _HURRY_S
            self._hurried.set_result(None)

    def _limited(self, timeout_s: float | None) -> float | None:
        """How much of this time is left after hurry(), which Ctrl-C calls too. None: any time."""
        if self._hub.interrupts.is_ending:
            self.hurry()
        if self._latest == math.inf:
            return timeout_s
        return max(0.0, min(math.inf if timeout_s is None else timeout_s, self._latest - self._loop.time()))

    def _on_transfer(self, number: int, failure: BaseException | None) -> None:
        """The request with this number has completed."""
        self._transfer_room.release()
        future = self._transfers.pop(number, None)
        if future is not None and not future.done():
            future.set_result(failure)

    async def _end_transfers(self) -> None:
        """The connection has ended. Wait until the adapter has ended its transfers too, whose tasks go on then."""
        if self._transfers:
            left = list(self._transfers.values())
            await finish(start(self._loop, lambda: asyncio.wait(left, timeout=self._limited(_LET_GO_S))))

    def _fail_transfers(self) -> None:
        """Those that the adapter has not ended."""
        for future in self._transfers.values():
            if not future.done():
                future.set_result(self._end_error())

    def _close_windows(self) -> None:
        # Two threads may do it, if the loop was closed.
        with contextlib.suppress(IndexError):
            while True:
                self._windows.pop().close()

    def on_dropped(self, end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """A coroutine that used the connection was dropped, see AtEnd. The connection ends."""
        try:
            self._loop.call_soon_threadsafe(self._end_for_dropped, end)
        except RuntimeError:
            self._lose("its event loop was closed")

    def _end_for_dropped(self, end: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._lose("a task that used it was dropped")
        if end is not None:
            start(self._loop, end)

    # ---- what the connection does ----

    @abc.abstractmethod
    def _require_open(self, *, closing: bool = False) -> Any:
        """Raise unless the connection can be used. closing: a transfer may still be posted during close()."""

    @abc.abstractmethod
    def _end_error(self) -> BaseException:
        """A new exception that says why the connection has ended."""

    @abc.abstractmethod
    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        """The connection has ended. Everybody who waits learns why."""


class AtEnd:
    """`async with AtEnd(connection, end)`: what `finally: await end()` does, also if the coroutine is dropped.

    When a loop is closed before its tasks have ended, or a program forgets a task, the garbage collector closes the coroutine with
    GeneratorExit. It does so in any thread, which may hold any lock. So nothing may wait then, and no provider is called: the loop
    makes the call. After the loop's end, what the coroutine had is dropped, and the adapter's thread closes it.
    """

    __slots__ = ("_connection", "_end")

    def __init__(self, connection: Transfers, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._connection = connection
        self._end = end

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            self._connection.on_dropped(self._end)
        else:
            await self._end()


class Exposure(Uncopied):
    """Memory that the peer may use from begin() to end(). Call end() whether or not begin() succeeds."""

    __slots__ = ("_connection", "_lease", "_region", "_window")

    def __init__(self, connection: Transfers) -> None:
        self._connection = connection
        self._lease: Lease | None = None
        self._window: MemoryWindow | None = None
        self._region: MemoryRegion | None = None

    async def begin(self, memory: Memory, access: Access, *, wait: bool) -> RemoteMemory:
        connection = self._connection
        if not connection._has_windows:
            self._region = await connection._register(memory, access)
            connection._hub.stay()
            return self._region.remote()
        local = Access.LOCAL_WRITE if int(access) & _LOCAL_WRITE else Access.NONE
        element, self._lease = await connection._lease(memory, length_of(memory), local)
        windows = connection._windows
        self._window = windows.pop() if windows else connection.adapter.create_memory_window()
        return await connection._bind(self._window, element, access, wait=wait)

    async def end(self) -> None:
        connection, region = self._connection, self._region
        if region is not None:
            region.close()
            await connection._hub.leave()
        try:
            if self._window is not None:
                await connection._unbind(self._window)
        finally:
            await connection._give_back(self._lease)
