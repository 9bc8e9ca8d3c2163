"""Transfers that are not messages: reads, writes, and the memory that this end exposes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.aio.channel import BIND, INDEX, SILENT, TRANSFER, Channel, error_of
from ndpy.aio.hub import LONG_REGISTRATION, Hub
from ndpy.aio.life import ALIVE, Finally
from ndpy.aio.memory import Memory, measured, measured_room, memory_on_device, part_of
from ndpy.aio.tasks import Room, finish, in_thread, start
from ndpy.cache.lease import Lease
from ndpy.objects import cuda
from ndpy.objects.arrays import ArrayMemory
from ndpy.objects.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.objects.operations import READ
from ndpy.objects.resource import Uncopied
from ndpy.objects.work_queues import Batch
from ndpy.vocabulary.flags import Access, Capability, Status
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.completion import Completion

# How many transfers of this end are outstanding at once. Others wait.
_TRANSFERS = 96
# How many of them one completion is for, so that the next ones are posted while these are under way.
_AT_ONCE = 48
# How many binds may be posted without a completion. They have ended when a later bind or invalidate has.
_SILENT_BINDS = 4
# How many requests all of that is at most, with a probe.
MOST_REQUESTS = _TRANSFERS + _SILENT_BINDS + 1
# How long the peer may take to let go of the memory of a cancelled message or transfer before the connection is ended.
_LET_GO_S = 5.0
_SINK = Access.LOCAL_WRITE | Access.READ_SINK
# As a number, because operators of flags are slow.
_LOCAL_WRITE = int(Access.LOCAL_WRITE)


#: What is transferred: memory of the peer, memory of this end, and how many bytes.
Piece = tuple[RemoteMemory, Memory, int]
#: Requests, and the number of the last one. The others have none.
_Numbered = tuple[int, Batch]


def has_usable_windows(adapter: Adapter) -> bool:
    """Whether what is exposed is behind memory windows. Otherwise it is a region of its own."""
    return Capability.MEMORY_WINDOWS in adapter.info.capabilities and Quirk.RXE_BINDS_AGAIN not in adapter._quirks


class Transfers(Uncopied):
    """The transfers of a connection.

    Attributes:
        under_way: by their number. Each ends with None or the failure.
        windows: those that nothing is bound to.
    """

    def __init__(self, hub: Hub, channel: Channel) -> None:
        self.hub = hub
        self._channel = channel
        channel.on_transfer = self._on_transfer
        self.life = channel.life
        self.adapter = hub.adapter
        self.has_windows = has_usable_windows(hub.adapter)
        self.under_way: dict[int, asyncio.Future[BaseException | None]] = {}
        self._last = 0
        #: How many requests end with this one, if it is not the only one.
        self._counts: dict[int, int] = {}
        self._silent_failure: BaseException | None = None
        self._room = Room(self.life.loop, _TRANSFERS)
        self.windows: list[MemoryWindow] = []
        #: How many binds were posted without a completion, and how many of these have ended.
        self._binds = self._ended_binds = 0

    async def bind(self, window: MemoryWindow, element: Sge, access: Access, *, wait: bool) -> RemoteMemory:
        """Give the peer its right. wait: return when it has it. Otherwise what is sent next may tell the peer."""
        remote: RemoteMemory | None = None

        def post(context: int, flags: int = 0) -> None:
            nonlocal remote
            self._channel.queue_pair.bind(window, element, access, context=context, flags=flags)
            # The end of the connection takes the right away, and may come at once, or while this waits.
            with contextlib.suppress(errors.NdpyError):
                remote = window.remote()

        if wait or self._binds - self._ended_binds >= _SILENT_BINDS:
            ended = await self.begin(post)
            self._note_binds(ended)
            if wait:
                await self._end_of(ended)
        else:
            self._post(BIND, lambda context: post(context, SILENT))
            self._binds += 1
        self.life.require(ALIVE)
        if remote is None:
            self.life.end("the peer ended it, or its process has ended")
            raise self.life.error()
        return remote

    async def unbind(self, window: MemoryWindow) -> None:
        """Take back what a bind gave. A cancellation takes effect afterwards."""
        async with Finally(self.life, lambda: self._put_away(window)):
            # Otherwise the connection was lost.
            with contextlib.suppress(errors.NdpyError):
                if self.life.alive and window.is_bound:
                    # Without this task nothing waits before the request is posted.
                    if self._room.full:
                        await finish(start(self.life.loop, lambda: self._invalidate(window)))
                    else:
                        await self._invalidate(window)

    async def _put_away(self, window: MemoryWindow) -> None:
        if self.life.alive and not window.is_bound:
            self.windows.append(window)
        else:
            # This takes the right away, also where the connection does not do so itself.
            await in_thread(window.close)

    async def _invalidate(self, window: MemoryWindow) -> None:
        ended = await self.begin(lambda context: self._channel.queue_pair.invalidate(window, context=context))
        self._note_binds(ended)
        await self._end_of(ended)

    def _note_binds(self, later: asyncio.Future[Any]) -> None:
        """The binds that were posted so far have ended when this later request has."""
        binds = self._binds

        def on_end(_: asyncio.Future[Any]) -> None:
            self._ended_binds = max(self._ended_binds, binds)

        later.add_done_callback(on_end)

    async def register(self, memory: Memory, length: int, access: Access) -> MemoryRegion:
        """Register memory that was measured, with remote rights."""
        on_device = memory_on_device(memory)
        if on_device is not None:
            memory = await self._with_contents(on_device)
        elif isinstance(memory, (MemoryRegion, Sge, Lease)):
            memory = (memory.address, length)
        if length <= LONG_REGISTRATION and on_device is None:
            return self.adapter.register(memory, access)
        pending = self.adapter.begin_register(memory, access)
        try:
            return await pending
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled() and pending.exception(0) is None:
                pending.result(0).close()
            raise

    async def _with_contents(self, memory: ArrayMemory) -> ArrayMemory:
        """Wait until a device's memory has its contents. Returns the same memory, which nobody has to wait for."""
        self.adapter._require_devices(memory)
        stream, pause_s = memory.device.stream, 0.0
        if stream is None:
            return memory

        def has_ended() -> bool:
            return cuda.find(memory.address, memory.nbytes).has_ended(stream)

        # A cancellation is not kept waiting for the stream.
        while not await in_thread(has_ended):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s + 20e-6, 1e-3)
        device = memory.device._replace(stream=None)
        return ArrayMemory(memory.producer, memory, memory.address, memory.nbytes, memory.readonly, device)

    async def lease(self, memory: Memory, length: int, access: Access) -> tuple[Sge, Lease | None]:
        """An element of the first bytes of memory, registered if they are not, and what to give back afterwards."""
        if isinstance(memory, Sge):
            offset = memory.address - memory.region.address
            return memory.region[offset : offset + length], None
        if isinstance(memory, (MemoryRegion, Lease)):
            return memory[:length], None
        if isinstance(memory, ArrayMemory):
            memory = await self._with_contents(memory)
        lease = await self.hub.lease(memory, access)
        self.hub.stay()
        try:
            return lease[:length], lease
        except BaseException:
            await self.give_back(lease)
            raise

    async def give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
            # What a connection has lent may be in use for longer than the connection, and so is the hub.
            await self.hub.leave()

    async def move(self, operation: int, pairs: Iterable[tuple[RemoteMemory, Memory]]) -> None:
        """Read or write all bytes of this end's memories. operation: READ or WRITE.

        All pairs are checked before the first is posted. All requests that were posted have ended when this ends, and
        nothing holds the memory.
        """
        try:
            await self._move_pairs(operation, list(pairs))
        except BaseException as error:
            _forget_locals(error)
            raise

    async def read_into(self, pieces: list[Piece]) -> None:
        """Read into the first bytes of memories that were measured. It ends as move()."""
        try:
            await self._move(READ, [], pieces)
        except BaseException as error:
            _forget_locals(error)
            raise

    async def _move_pairs(self, operation: int, pairs: list[tuple[RemoteMemory, Memory]]) -> None:
        # A single request needs no batch.
        batches, place = self._batches(operation, pairs) if len(pairs) > 1 else ([], 0)
        pieces = [self._measured(operation, remote, memory) for remote, memory in pairs[place:]]
        await self._move(operation, batches, pieces)

    def _batches(self, operation: int, pairs: list[tuple[RemoteMemory, Memory]]) -> tuple[list[_Numbered], int]:
        """Make batches of the first pairs, up to one that needs a closer look. Returns its place too."""
        longest, silent = self.adapter.info.max_transfer_length, self._channel.base | TRANSFER
        batches: list[_Numbered] = []
        place, end = 0, len(pairs)
        while place < end:
            number, batch = self._next_number(), Batch(min(end - place, _AT_ONCE))
            place = batch._fill(operation, pairs, place, longest, silent, silent | number)
            if batch:
                batches.append((number, batch))
            if len(batch) < batch.capacity:
                break
        return batches, place

    @staticmethod
    def _measured(operation: int, remote: RemoteMemory, memory: Memory) -> Piece:
        if not isinstance(remote, RemoteMemory):
            raise TypeError(f"remote is the peer's memory as a RemoteMemory, not {type(remote).__name__}")
        memory, length = measured_room(memory, "read") if operation == READ else measured(memory, is_message=False)
        if length > remote.length:
            raise errors.ElementRangeError(f"{length} bytes do not fit the {remote.length} bytes of the peer's memory")
        return remote, memory, length

    async def _move(self, operation: int, batches: list[_Numbered], pieces: list[Piece]) -> None:
        """batches: what to post first."""
        access = _SINK if operation == READ else Access.NONE
        longest = self.adapter.info.max_transfer_length
        posted: list[asyncio.Future[BaseException | None]] = []
        leases: list[Lease] = []
        pairs: list[tuple[RemoteMemory, Memory]] = []
        queue_pair = self._channel.queue_pair
        async with Finally(self.life, lambda: self._end_move(posted, leases)):
            for remote, memory, length in pieces:
                if not length:
                    continue
                element, lease = await self.lease(memory, length, access)
                if lease is not None:
                    leases.append(lease)
                for start in range(0, length, longest):
                    end = min(start + longest, length)
                    part = element if end - start == length else part_of(element, start, end)
                    pairs.append((remote if end - start == remote.length else remote[start:end], part))
            if len(pairs) == 1 and not batches:
                number, (remote, part) = self._next_number(), pairs[0]
                post = queue_pair.read if operation == READ else queue_pair.write
                context = self._channel.base | TRANSFER | number
                await self._begin_some(number, 1, functools.partial(post, part, remote, context=context), posted)
            else:
                others, place = self._batches(operation, pairs)
                assert place == len(pairs)
                batches += others
            for number, batch in batches:
                await self._begin_some(number, len(batch), functools.partial(queue_pair.post, batch), posted)
            for future in posted:
                if not future.done():
                    await asyncio.shield(future)
        for future in posted:
            failure = future.result()
            if failure is not None:
                raise failure

    async def _begin_some(
        self,
        number: int,
        count: int,
        post: Callable[[], None],
        posted: list[asyncio.Future[BaseException | None]],
    ) -> None:
        """Post `count` requests when there is room for them. Only the last one completes, with this number.

        posted: gets the future of their end, even if this raises in the middle.
        """
        await self._room.take(count)
        begun = 0

        def post_all(_: int) -> None:
            nonlocal begun
            # If one of several is refused, nobody says how many were posted.
            begun = int(count > 1)
            post()
            begun = count

        future = self.under_way[number] = self.life.loop.create_future()
        self._counts[number] = count
        try:
            self._post(TRANSFER | number, post_all)
        except BaseException:
            self._after_refusal(number, begun)
            raise
        finally:
            if begun:
                posted.append(future)

    def _after_refusal(self, number: int, begun: int) -> None:
        """A request was refused. What was posted before it would end without a completion."""
        if begun == self._counts[number]:
            return
        if begun and self.life.alive:
            try:
                self._channel.write_nothing(self._channel.base | TRANSFER | number)
            except errors.NdpyError as error:
                self.life.end(str(error), error)
            else:
                return
        self._room.give(self._counts.pop(number))
        future = self.under_way.pop(number)
        future.set_result(self.life.error() if begun else None)

    async def _end_move(self, posted: list[asyncio.Future[BaseException | None]], leases: list[Lease]) -> None:
        async with Finally(self.life, lambda: self._give_back_after(posted, leases)):
            await self.let_go(*posted)

    async def _give_back_after(self, posted: list[asyncio.Future[BaseException | None]], leases: list[Lease]) -> None:
        # If the end of the move was dropped, they have not ended.
        await self.let_go(*posted)
        for lease in leases:
            await self.give_back(lease)

    def _post(self, context: int, post: Callable[[int], None]) -> None:
        self.life.require(ALIVE)
        try:
            post(self._channel.base | context)
        except errors.ProviderError as error:
            # Its end may be noticed before it is told. Mistakes of the program have classes of their own.
            if type(error) not in (errors.ProviderError, errors.NotConnectedError):
                raise
            self.life.end(str(error), error)
            raise self.life.error() from error

    async def begin(self, post: Callable[[int], None]) -> asyncio.Future[BaseException | None]:
        """Post a request when there is room for it. Returns a future of its end."""
        await self._room.take(1)
        try:
            number = self._next_number()
            self._post(TRANSFER | number, post)
        except BaseException:
            self._room.give(1)
            raise
        future = self.under_way[number] = self.life.loop.create_future()
        return future

    def _next_number(self) -> int:
        # 0 is the number of those without a completion.
        self._last = (self._last + 1) & INDEX or 1
        return self._last

    async def delivered(self) -> asyncio.Future[Any] | None:
        """Returns a future that ends when the peer's adapter has everything that was posted.
        None if there is no room.
        """
        if self._room.full:
            return None
        return await self.begin(self._channel.write_nothing)

    async def _end_of(self, future: asyncio.Future[BaseException | None]) -> None:
        failure = await finish(future)
        if failure is not None:
            raise failure

    async def let_go(self, *futures: asyncio.Future[Any]) -> None:
        """Wait until these have ended, whatever cancels the task. If that takes too long, end the connection."""
        left = [future for future in futures if not future.done()]
        if not left:
            return
        late = await finish(start(self.life.loop, lambda: self._end_late(left)), self.life.hurry)
        if late:
            self.life.end(
                f"{self.life.peer} did not let go of the memory of a cancelled transfer within {_LET_GO_S:g} s"
            )
            await finish(start(self.life.loop, lambda: asyncio.wait(late)))

    async def _end_late(self, late: list[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
        """Wait for these. Returns those that do not end in time."""
        end = self.life.loop.time() + _LET_GO_S
        while late and (left_s := self.life.limited(max(0.0, end - self.life.loop.time()))):
            wakers = late if self.life.hurried.done() else [*late, self.life.hurried]
            await asyncio.wait(wakers, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            late = [future for future in late if not future.done()]
        return late

    def _on_transfer(self, number: int, completion: Completion) -> None:
        """The request with this number has completed."""
        if not number:
            self._silent_failure = self._silent_failure or self._why(completion)
            return
        count = self._counts.pop(number, 1)
        self._room.give(count)
        future = self.under_way.pop(number, None)
        if future is not None and not future.done():
            failure = None if completion.ok else self._why(completion)
            if failure is not None and count > 1:
                failure = self._silent_failure or failure
            future.set_result(failure)

    def _why(self, completion: Completion) -> BaseException:
        """What a task raises for a failed transfer."""
        return error_of(completion) if completion.status is Status.ACCESS_VIOLATION else self.life.error()

    async def end(self) -> None:
        """The connection has ended. Wait until the adapter has ended its transfers too, whose tasks go on then."""
        if self.under_way:
            await finish(start(self.life.loop, lambda: self._end_late(list(self.under_way.values()))))

    def fail(self) -> None:
        """Those that the adapter has not ended."""
        for future in self.under_way.values():
            if not future.done():
                future.set_result(self.life.error())

    def close_windows(self) -> None:
        # Two threads may do it, if the loop was closed.
        with contextlib.suppress(IndexError):
            while True:
                self.windows.pop().close()


def _forget_locals(error: BaseException) -> None:
    """Clear the frames that an error has come through. An element in one keeps an export of the program's memory, for
    as long as the program keeps the error.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


class Exposure(Uncopied):
    """Memory that the peer may use from begin() to end(). Call end() whether or not begin() succeeds."""

    __slots__ = ("_lease", "_region", "_transfers", "_window")

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._lease: Lease | None = None
        self._window: MemoryWindow | None = None
        self._region: MemoryRegion | None = None

    async def begin(self, memory: Memory, access: Access, *, wait: bool) -> RemoteMemory:
        try:
            return await self._begin(memory, access, wait)
        except BaseException as error:
            _forget_locals(error)
            raise

    async def _begin(self, memory: Memory, access: Access, wait: bool) -> RemoteMemory:
        transfers = self._transfers
        memory, length = measured(memory, is_message=False)
        # A region of a dma-buf has no windows.
        if not transfers.has_windows or memory_on_device(memory) is not None:
            self._region = await transfers.register(memory, length, access)
            transfers.hub.stay()
            return self._region.remote()
        local = Access.LOCAL_WRITE if int(access) & _LOCAL_WRITE else Access.NONE
        element, self._lease = await transfers.lease(memory, length, local)
        windows = transfers.windows
        self._window = windows.pop() if windows else transfers.adapter.create_memory_window()
        return await transfers.bind(self._window, element, access, wait=wait)

    async def end(self) -> None:
        transfers, region = self._transfers, self._region
        if region is not None:
            region.close()
            await transfers.hub.leave()
        async with Finally(transfers.life, lambda: transfers.give_back(self._lease)):
            if self._window is not None:
                await transfers.unbind(self._window)
