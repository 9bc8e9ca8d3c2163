"""What the connections of one adapter share in one event loop: completion queues, memory for messages, and a cache.

A hub takes the completions of all its connections when the loop wakes up, and passes each to its connection. The
context of a request is the number of the connection, the kind of the request, and a number of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ndpy.aio.interrupts import Interrupts
from ndpy.aio.tasks import finish, in_thread, start_soon
from ndpy.cache.lease import Lease
from ndpy.cache.registration_cache import RegistrationCache
from ndpy.errors import ClosedError, DeviceBusyError, NdpyError
from ndpy.objects.adapter import Adapter
from ndpy.objects.arrays import ArrayMemory
from ndpy.objects.completion import Completion
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.event_loop import LoopPoller, poller_of_loop
from ndpy.objects.memory import MemoryRegion
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import Uncopied
from ndpy.platforms import open_adapter
from ndpy.platforms.buffer import alloc
from ndpy.vocabulary.flags import Access

# How many completions one queue is made for. It serves so many connections that it cannot overrun.
_QUEUE_DEPTH = 4096
# How many completions are taken before other tasks run.
_AT_A_STRETCH = 256
# How many of them it takes in one call.
_AT_ONCE = 64
# How often it looks for connections that are stuck.
_PROBE_S = 2.0
# Memory for messages is kept for the next connection, up to so many pieces of one size.
_SPARE_PIECES = 16
# What the cache keeps registered.
_CACHED_BYTES = 256 << 20
_CACHED_ENTRIES = 1024

# The hubs of each loop. A hub refers to its loop, so only its users keep it. Those of a closed loop go when they are
# collected.
_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Any, Hub]] = (
    weakref.WeakKeyDictionary()
)


# A registration of more bytes is made in a thread, because it takes longer than a hand-over.
LONG_REGISTRATION = 1 << 20


class _IsLong(Exception):
    """The memory is not registered yet, and registering it would hold up the loop."""


class _Cache(RegistrationCache):
    """Finds registrations in the loop's thread. Another thread makes long ones, and calls the driver of a device."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter, max_bytes=_CACHED_BYTES, max_entries=_CACHED_ENTRIES)
        self._loop_thread = threading.get_ident()

    def _local(self, buffer: Any, access: int, queue_pair: QueuePair | None, raw: bool) -> Lease:
        is_slow = isinstance(buffer, ArrayMemory) or memoryview(buffer).nbytes > LONG_REGISTRATION
        if is_slow and threading.get_ident() == self._loop_thread:
            raise _IsLong
        return super()._local(buffer, access, queue_pair, raw)


class Member(Protocol):
    """What a hub passes completions to.

    Attributes:
        number: what the contexts of its requests begin with. add() sets it.
        queue: where they complete.
    """

    number: int
    queue: CompletionQueue

    def on_completion(self, completion: Completion) -> None: ...

    def probe(self) -> None:
        """Called at intervals, so that it can look whether its peer is still there."""

    def fail(self, reason: str, cause: Exception) -> None:
        """The queue or the adapter has failed, or this package has."""


class Hub(Uncopied):
    """Use it in the loop's thread only.

    Attributes:
        adapter: makes everything.
        loop: where it is used.
        interrupts: of the loop's program.
    """

    def __init__(self, key: Any, adapter: Adapter, *, owned: bool) -> None:
        self._key = key
        self.adapter = adapter
        self.loop = asyncio.get_running_loop()
        self.interrupts = Interrupts(self.loop)
        self._owned = owned
        self._cache = _Cache(adapter)
        #: How many completions each queue has room for.
        self._room: dict[CompletionQueue, int] = {}
        self._members: dict[int, Member] = {}
        self._last_number = 0
        self._users = 0
        self._spare: dict[int, list[MemoryRegion]] = {}
        self._last_poller: LoopPoller | None = None
        #: The next call of _probe(), while there are members.
        self._next_probe: asyncio.TimerHandle | None = None

    # ---- its life ----

    @classmethod
    def join(cls, which: Adapter | str | None) -> Hub:
        """The hub of an adapter in the running loop. The caller is one more user, and leaves with leave().

        Parameters:
            which: an open adapter, or what open_adapter() takes. Then the hub opens it, and closes it with its last
                user.
        """
        loop = asyncio.get_running_loop()
        hubs = _hubs.setdefault(loop, weakref.WeakValueDictionary())
        found = hubs.get(which)
        if found is not None and found.adapter.closed:
            del hubs[which]
            found = None
        if found is None:
            owned = not isinstance(which, Adapter)
            adapter = which if isinstance(which, Adapter) else open_adapter(which)
            try:
                found = hubs[which] = cls(which, adapter, owned=owned)
            except BaseException:
                if owned:
                    adapter.close()
                raise
        found._users += 1
        return found

    def stay(self) -> None:
        """Count one more user of a hub that has one."""
        self._users += 1

    def on_dropped(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See Finally in life.py."""
        start_soon(self.loop, end)

    async def leave(self) -> None:
        """The last user closes it."""
        self._users -= 1
        if not self._users:
            hubs = _hubs.get(self.loop)
            if hubs is not None and hubs.get(self._key) is self:
                del hubs[self._key]
            for queue in self._room:
                self._poller.unwatch(queue)
            # A program that keeps an exception of a connection keeps the hub.
            self._last_poller = None
            await in_thread(self._close)

    def _close(self) -> None:
        # A KeyboardInterrupt may have come between any two lines, and a program may have made objects of this adapter.
        # Each is closed when it is dropped, and the adapter after them.
        with contextlib.suppress(DeviceBusyError):
            self._close_all()

    def _close_all(self) -> None:
        for spare in self._spare.values():
            for region in spare:
                region.close()
        self._spare.clear()
        self._cache.close()
        while self._room:
            self._room.popitem()[0].close()
        if self._owned:
            self.adapter.close()

    @property
    def _poller(self) -> LoopPoller:
        poller = self._last_poller
        if poller is None or poller.closed:
            poller = self._last_poller = poller_of_loop()
        return poller

    # ---- members ----

    def add(self, member: Member, completions: int) -> None:
        """Give a member its number, and a queue with room for that many completions."""
        limit = self.adapter.info.max_completion_queue_depth
        queue = next((queue for queue, room in self._room.items() if room >= completions), None)
        if queue is None:
            queue = self.adapter.create_completion_queue(min(max(_QUEUE_DEPTH, completions), limit))
            self._room[queue] = queue.depth
            self._poller.watch(queue, functools.partial(self._take, queue))
        self._room[queue] -= completions
        member.queue = queue
        member.number = self._last_number = self._last_number % 0x7FFFFFFF + 1
        self._members[member.number] = member
        if self._next_probe is None:
            self._next_probe = self.loop.call_later(_PROBE_S, self._probe)

    def remove(self, member: Member, completions: int) -> None:
        """The queue pair of a member has gone."""
        self._members.pop(member.number, None)
        if member.queue in self._room:
            self._room[member.queue] += completions
        if not self._members and self._next_probe is not None:
            self._next_probe.cancel()
            self._next_probe = None

    def _probe(self) -> None:
        for member in self._members.values():
            member.probe()
        self._next_probe = self.loop.call_later(_PROBE_S, self._probe)

    def _take(self, queue: CompletionQueue, renew: Callable[[], object]) -> None:
        """Ask for the next notification, and take the completions that are there."""
        members, taken = self._members, 0
        try:
            renew()
            while taken < _AT_A_STRETCH:
                completions = queue.poll(_AT_ONCE)
                taken += len(completions)
                for completion in completions:
                    member = members.get(completion.context >> 32)
                    if member is not None:
                        try:
                            member.on_completion(completion)
                        except Exception as error:
                            self._on_fault(member, error)
                # A poll that was not full has emptied the queue.
                if len(completions) < _AT_ONCE:
                    return
        except ClosedError:
            return
        except NdpyError as error:
            # The queue or the adapter has failed, and with it all members of the queue.
            for member in list(members.values()):
                if member.queue is queue:
                    member.fail(f"the completion queue failed: {error}", error)
            return
        self.loop.call_soon(self._take, queue, renew)

    def _on_fault(self, member: Member, error: Exception) -> None:
        """A mistake of this package ends one connection. The others go on."""
        context = {"message": f"{member!r} has failed", "exception": error}
        self.loop.call_exception_handler(context)
        member.fail(f"{type(error).__name__}: {error}", error)

    # ---- memory ----

    async def lease(self, memory: Any, access: Access) -> Lease:
        """Registered memory of the program. The registration is kept in a cache for as long as the memory exists."""
        try:
            return self._cache.local(memory, access)
        except _IsLong:
            leasing = self.loop.run_in_executor(None, self._cache.local, memory, access)
        try:
            return await finish(leasing)
        except asyncio.CancelledError:
            if leasing.exception() is None:
                leasing.result().release()
            raise

    def take_memory(self, length: int) -> MemoryRegion:
        """Registered memory of this length."""
        spare = self._spare.get(length)
        if spare:
            return spare.pop()
        return self.adapter.register(alloc(length), Access.LOCAL_WRITE)

    def give_memory_back(self, region: MemoryRegion) -> None:
        spare = self._spare.setdefault(region.length, [])
        if len(spare) < _SPARE_PIECES and self._users:
            spare.append(region)
        else:
            region.close()
