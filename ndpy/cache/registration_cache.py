"""A cache of registrations. Memory stays registered between its uses, but only as long as it is the same memory.

The cache hooks no function of the system. An entry ends with the object that owns its memory (ndpy/cache/ownership.py).
When a watched owner dies, its entries are marked. If an owner can be resized, an export prevents that. A monitor may
watch memory that has no owner, and marks entries too.

One file, because one lock guards all of its state.

A callback that marks may run in any thread, with any lock held. The reaper deregisters. It runs at the next use of the
cache, in the adapter's thread, or in close(). No provider is called under the cache's lock. A hit (cdefs/core/cache.c)
does not take that lock.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ndpy import _core, errors
from ndpy.cache.lease import LOCAL_RIGHTS, CacheStats, Entry, Exposure, Grant, Lease, Loading
from ndpy.cache.marks import Marks, taken
from ndpy.cache.order import UseOrder
from ndpy.cache.ownership import MONITORED, MemoryRange, Owner, remember_buffer
from ndpy.cache.windows import WindowPool
from ndpy.objects import cuda
from ndpy.objects.adapter import Adapter
from ndpy.objects.memory import MemoryRegion, RemoteMemory
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import AdapterObject, busy
from ndpy.vocabulary.flags import Access, Capability
from ndpy.vocabulary.integers import integer
from ndpy.vocabulary.loggers import logger

_log = logger("ndpy.cache")

_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE

# How many owners one miss examines, so that its cost does not grow with the cache. A miss adds one owner at most.
_LOOKS = 16


class RegistrationCache(_core.LeaseFinder, AdapterObject):
    """Keeps memory registered between its uses. For programs that transfer from the same memory again and again.

    A request finds a cached range if the range has the same owner, contains the request, and has sufficient rights. If
    the request only overlaps cached ranges, or needs more rights, it and these ranges are registered together, as one
    region with all their rights. The new region replaces the old ones. Those in use stay until they are released. If
    the new region would be longer than max_bytes or the adapter's limit, only the request is registered instead. Ranges
    that only touch stay apart. The rights of an existing region never change. So a region has only rights that a
    request for its memory had.

    Who owns the memory decides how long it stays:

    - A NumPy array, an mmap and the result of alloc() are watched. When the last reference to them goes, their
      registrations end.
    - The cache has an export of any other object (bytearray, array, ctypes, bytes). The object cannot be resized while
      it is cached (BufferError). When nothing else refers to it, a later miss drops it.
    - Another array (DLPack, __array_interface__), such as a tensor, is watched and asked for its memory at each use. If
      the memory has moved, it is registered anew. Call invalidate() before its storage is replaced more than once
      between two uses (PyTorch's resize_() and set_()): it may come back to an address that it had.
    - An array in memory of a CUDA device is watched in the same way. Each request waits until its stream has ended.
    - Memory that no Python object owns needs monitor=True or raw=True. It comes as (address, length), or as a buffer
      that does not own it.

    invalidate(buffer) ends the registrations at once. Call it before mmap.resize().

    Many threads may use the cache. If several want the same range, one registers it and the others wait. Close the
    cache before its adapter. close() raises DeviceBusyError while leases or exposures are in use, or while another
    thread registers.

    Parameters:
        adapter: makes the regions.
        max_bytes, max_entries: the most that stays registered, at least 1 each. Beyond that, the idle entry that was
            used least recently is deregistered. Entries in use count too, but they are never refused or taken away. If
            they exceed the bounds, the bounds hold again when they are released.
        monitor: whether the system tells the cache when any code unmaps, moves or empties memory without an owner
            (munmap, mremap, madvise). From then on no request finds its registrations. Only on Linux, and only for
            anonymous memory, private or shared, the heap included. A mapped file is refused, because truncating it
            causes no event. A call that unmaps watched memory takes some microseconds longer.
    Raises:
        LimitExceededError: max_bytes or max_entries is less than 1.
        UnsupportedError: the system has no monitor, or does not permit it. The message names the reason and the remedy.
    Source: contract section K; Windows Sockets Direct, "caching registered memory".
    """

    _release_order = 45

    def __init__(self, adapter: Adapter, *, max_bytes: int, max_entries: int, monitor: bool = False) -> None:
        if not isinstance(adapter, Adapter):
            raise TypeError(f"adapter is an open Adapter, not {adapter!r:.80}")
        adapter._check()
        if integer(max_bytes, "max_bytes") < 1 or integer(max_entries, "max_entries") < 1:
            raise errors.LimitExceededError(
                f"a cache holds at least 1 byte and 1 entry, not max_bytes={max_bytes} and max_entries={max_entries}"
            )
        super().__init__(adapter)
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._windows_exist = Capability.MEMORY_WINDOWS in adapter.info.capabilities
        self._changed = threading.Condition(threading.Lock())
        self._owners: dict[int, Owner] = {}
        #: Buffers that were found before. The key is their identity. A record is valid only while its entry is cached.
        self._known_buffers = {}
        #: All entries that are registered, cached or only in use.
        self._entries: set[Entry] = set()
        #: The entries that are not cached any more.
        self._detached: set[Entry] = set()
        #: The entries that are being deregistered.
        self._closing: set[Entry] = set()
        #: The calls of _reap() that are under way, and their threads.
        self._reaps: dict[object, int] = {}
        #: Owners of which the cache holds an export. Each miss looks at some of them in turn.
        self._exported: deque[Owner] = deque()
        self._order = UseOrder()
        self._loading: list[Loading] = []
        self._windows = WindowPool(adapter)
        self._counts = CacheStats()
        self._marks = Marks(self)
        self._monitor: Any = None
        if monitor:
            self._monitor = adapter._monitor(self._marks.memory_changed)
        self._opened()

    @property
    def stats(self) -> CacheStats:
        """The counters as they are now."""
        with self._changed:
            return replace(self._counts, hits=self._counts.hits + self._hits)

    # ---- what the program calls ----

    def _local(self, buffer: Any, access: int, queue_pair: QueuePair | None, raw: bool) -> Lease:
        """local() for a miss."""
        if not isinstance(access, int) or access & ~LOCAL_RIGHTS:
            raise errors.InvalidFlagsError(
                f"local() takes NONE, LOCAL_WRITE and READ_SINK, not {access!r}; see remote()"
            )
        if queue_pair is not None:
            self._depend_on(queue_pair)
        request = self._range(buffer, bool(access), raw)
        lease = Lease()
        # No calls in the following statements: Ctrl-C cannot come between statements without calls.
        request.entry = self._use(buffer, request, int(access), queue_pair)
        lease._cache, lease._range, lease._view = self, request, request.view
        request.view = None
        return lease

    def remote(
        self,
        buffer: Any,
        queue_pair: QueuePair,
        access: Access = _REMOTE,
        *,
        raw: bool = False,
    ) -> Exposure:
        """Let the peer of a connection reach memory until the exposure is released or the queue pair is closed.

        If the adapter has memory windows, one is bound to the cached region. This is a silent request, which takes a
        slot of the initiator queue. A message with remote() can be posted right after it. A peer that gets the message
        can use the memory. A token that is sent another way may arrive before the adapter has bound the window.

        If the adapter has no windows, or a device has the memory, the range is registered once more with these rights.
        They hold on every connection until release().

        Parameters:
            buffer: as for local().
            queue_pair: the connection.
            access: REMOTE_READ, REMOTE_WRITE or both.
            raw: as for local().
        Returns: an Exposure.
        Raises:
            NotConnectedError: there is no connection.
            QueueFullError: no slot of the initiator queue is free.
            Otherwise what local() raises.
        Source: contract K.2.
        """
        access = Access(access)
        if not access & ~Access.LOCAL_WRITE or access & ~_REMOTE:
            raise errors.InvalidFlagsError(f"remote() grants REMOTE_READ and REMOTE_WRITE, not {access!r}")
        self._depend_on(queue_pair)
        if queue_pair.connection_ended:
            raise errors.NotConnectedError("the connection has ended", operation="expose")
        right = int(access) & 1
        request = self._range(buffer, bool(right), raw)
        entry = self._use(buffer, request, right, queue_pair)
        try:
            grant, remote = self._expose(entry, request, queue_pair, access)
        except BaseException:
            self._release_use(entry)
            raise
        with self._changed:
            entry.grants.add(grant)
        if entry.invalid or queue_pair.closed:
            self._revoke(grant)
            raise errors.ClosedError("the memory was invalidated, or the queue pair closed, while it was being exposed")
        request.entry = entry
        exposure = Exposure()
        exposure._cache, exposure._range, exposure._view = self, request, request.view
        exposure._grant, exposure._remote = grant, remote
        request.view = None
        return exposure

    def invalidate(self, memory: Any, length: int | None = None) -> None:
        """Drop all registrations that overlap a range. Call this before the memory is freed, moved or resized.

        Peers lose their access first. When this returns, idle registrations have ended, and so have the cache's exports
        of them. Registrations in use end when they are released. No later request finds them.

        Parameters:
            memory: a buffer, an (address, length), or an address.
            length: in bytes, with an address only.
        Source: contract K.1.6 to K.1.8, K.2.6.
        """
        request = MemoryRange(memory if length is None else (memory, length), False, True)
        start, end = request.start, request.end
        with self._changed:
            self._check()
            for loading in self._loading:
                if loading.start < end and start < loading.end:
                    loading.invalid = True
            hit = [entry for entry in self._entries if entry.start < end and start < entry.end]
        _log.debug("%s: invalidate() of %s ends %d registrations", self._name(), _words(start, end), len(hit))
        self._drop(hit)
        self._wait_for_others()

    # ---- using, registering ----

    def _range(self, buffer: Any, writable: bool, raw: bool) -> MemoryRange:
        """The range of a request. A device's memory has its contents then."""
        request = MemoryRange(buffer, writable, raw, self._monitor is not None)
        if request.is_on_device:
            self._adapter._require_devices(request.view)
            stream = request.view.device.stream
            if stream is not None:
                cuda.find(request.start, request.length).synchronize(stream)
        return request

    def _depend_on(self, queue_pair: QueuePair) -> None:
        self._check()
        self._require_same_adapter(queue_pair, "the queue pair")
        queue_pair._add_dependant(self)

    def _use(self, buffer: Any, request: MemoryRange, access: int, queue_pair: QueuePair | None) -> Entry:
        """Return the entry for a range, with one more use. Finds it, waits for another thread to register it, or
        registers it.
        """
        serial = None if queue_pair is None else queue_pair._serial
        missed = False
        while True:
            if self._marks:
                self._reap()
            loading: Loading | None = None
            region: MemoryRegion | None = None
            watch = taken = None
            # Ctrl-C may come between any two lines. What waits for the registration has to hear of its end.
            try:
                with self._changed:
                    self._check()
                    entry = self._find_entry(request, access)
                    if entry is not None:
                        taken = entry
                        entry.take()
                        entry.used = self._next_use()
                        self._counts.hits += not missed
                        if serial is None:
                            entry.queue_pairs = None
                        elif entry.queue_pairs is not None:
                            entry.queue_pairs.add(serial)
                        self._remember(buffer, request, entry)
                        return entry
                    if any(
                        load.root is request.root and load.start < request.end and request.start < load.end
                        for load in self._loading
                    ):
                        self._changed.wait()
                        continue
                    if not missed:
                        missed = True
                        self._counts.misses += 1
                    loading = Loading(request.root, request.start, request.end)
                    wanted, doomed = self._prepare(loading, request, access)
                    self._loading.append(loading)
                self._close(doomed)
                if request.root is MONITORED:
                    # This comes before the registration, so that no later change is missed.
                    watch = self._monitor.watch(wanted[0], wanted[1])
                region = self._register(wanted, (request.start, request.end, access), request)
                entry, doomed = self._insert(loading, request, region, serial, watch)
                if _log.isEnabledFor(logging.DEBUG):
                    asked = _words(request.start, request.end)
                    _log.debug("%s: registered %s for %s", self._name(), _words(entry.start, entry.end), asked)
                self._close(doomed)
                with self._changed:
                    if entry.cached:
                        self._remember(buffer, request, entry)
                return entry
            except BaseException:
                self._give_up(loading, region, watch, taken)
                raise

    def _remember(self, buffer: Any, request: MemoryRange, entry: Entry) -> None:
        changed = None if self._monitor is None else self._monitor.changed
        remember_buffer(buffer, request, entry, self._known_buffers, changed)

    def _give_up(self, loading: Loading | None, region: MemoryRegion | None, watch: Any, taken: Entry | None) -> None:
        """A registration has failed, or Ctrl-C has ended a use. The region may be in the cache already."""
        with self._changed:
            if loading in self._loading:
                self._loading.remove(loading)
                self._changed.notify_all()
            if taken is None and region is not None:
                taken = next((entry for entry in self._entries if entry.region is region), None)
        if taken is not None:
            self._release_use(taken)
        elif watch is not None:
            self._monitor.unwatch(watch)

    def _find_entry(self, request: MemoryRange, access: int) -> Entry | None:
        owner = self._owners.get(id(request.root))
        if owner is None or not owner.is_of(request):
            return None
        entry: Entry | None = owner.last_before(request.start)
        if entry is None or entry.end < request.end or access & ~entry.rights:
            return None
        return None if entry.watch is not None and self._monitor.changed(entry.watch) else entry

    def _prepare(self, loading: Loading, request: MemoryRange, access: int) -> tuple[tuple[int, int, int], list[Entry]]:
        """Return what to register, as (start, end, access), and the entries to close before. Called under the lock."""
        doomed = self._take_abandoned_owners()
        start, end = request.start, request.end
        owner = self._owners.get(id(request.root))
        if owner is not None and not owner.is_of(request):
            # The owner died and a new object has its address, or the owner is an mmap that was resized.
            doomed += self._detach(list(owner.entries), invalid=True)
        elif owner is not None:
            overlapping = owner.overlapping(start, end)
            if request.root is MONITORED:
                changed = [entry for entry in overlapping if self._monitor.changed(entry.watch)]
                doomed += self._detach(changed, invalid=True)
                overlapping = [entry for entry in overlapping if entry.cached]
            low = min([start, *(entry.start for entry in overlapping)])
            high = max([end, *(entry.end for entry in overlapping)])
            if high - low <= min(self.max_bytes, self._adapter.info.max_registration_size):
                start, end = low, high
                for entry in overlapping:
                    access |= entry.region.access
        loading.start, loading.end = start, end
        freed = sum(entry.region.length for entry in doomed)
        return (start, end, access), doomed + self._make_room(end - start - freed, 1 - len(doomed))

    def _register(
        self, wanted: tuple[int, int, int], least: tuple[int, int, int], request: MemoryRange
    ) -> MemoryRegion:
        start, end, access = wanted
        try:
            return self._register_now(request.part(start, end - start), access, request.root)
        except errors.ProviderError as error:
            # Sometimes ranges can be registered one by one, but not together with all rights.
            if wanted == least:
                raise
            _log.debug("%s: %s cannot be registered together: %s", self._name(), _words(start, end), error)
            return self._register_now(request.part(least[0], least[1] - least[0]), least[2], request.root)

    def _register_now(self, memory: Any, access: int, root: Any) -> MemoryRegion:
        rights = Access(access)
        try:
            region = self._adapter.register(memory, rights)
        except errors.InsufficientResourcesError as error:
            with self._changed:
                idle = [entry for entry in self._entries if entry.cached and not entry.uses]
                self._counts.evictions += len(idle)
                doomed = self._detach(idle)
            if not doomed:
                raise
            _log.debug("%s: tries again without %d idle registrations: %s", self._name(), len(doomed), error)
            self._close(doomed)
            region = self._adapter.register(memory, rights)
        # The leases keep memory that an object owns.
        region._is_kept = root is not None and root is not MONITORED
        with self._changed:
            self._counts.registrations += 1
            self._count_region(region, 1)
        return region

    def _insert(
        self, loading: Loading, request: MemoryRange, region: MemoryRegion, serial: int | None, watch: Any
    ) -> tuple[Entry, list[Entry]]:
        with self._changed:
            self._loading.remove(loading)
            self._changed.notify_all()
            owner = self._owners.get(id(request.root))
            doomed: list[Entry] = []
            if owner is None or not owner.is_of(request):
                if owner is not None:
                    doomed += self._detach(list(owner.entries), invalid=True)
                owner = self._owners[id(request.root)] = Owner(request, self._marks.died)
                if owner.view is not None:
                    self._exported.append(owner)
            queue_pairs: set[int] | None = None if serial is None else {serial}
            former = owner.overlapping(region.address, region.address + region.length)
            for other in former:
                queue_pairs = (
                    None if queue_pairs is None or other.queue_pairs is None else queue_pairs | other.queue_pairs
                )
            entry = Entry(owner, region, queue_pairs, self._next_use(), watch)
            # No calls in the following statements: Ctrl-C cannot come between statements without calls.
            if loading.invalid:
                entry.cached, entry.invalid = False, True
                self._entries |= {entry}
                self._detached.add(entry)
                self._forget_if_empty(owner)
            else:
                place = bisect_left(owner.starts, entry.start)
                owner.starts[place:place] = [entry.start]
                owner.entries[place:place] = [entry]
                self._entries |= {entry}
                self._order.add(entry)
            doomed += self._detach(former)
        return entry, doomed

    # ---- exposing ----

    def _expose(
        self, entry: Entry, request: MemoryRange, queue_pair: QueuePair, access: Access
    ) -> tuple[Grant, RemoteMemory]:
        length = request.length
        # A region of a dma-buf has no windows.
        if not self._windows_exist or request.is_on_device:
            region = self._register_now(request.part(request.start, length), access, request.root)
            return Grant(entry, queue_pair, None, region), region.remote()
        start = request.start - entry.start
        window = self._windows.bind(queue_pair, entry.region[start : start + length], access)
        remote = window.remote()
        with self._changed:
            self._counts.binds += 1
        return Grant(entry, queue_pair, window, None), remote

    def _revoke(self, grant: Grant) -> None:
        """Take a peer's right away, and end its use of the entry. If another thread is doing that, wait for it."""
        if self.closed:
            # This is a forked child, and the right is the parent's.
            return
        with self._changed:
            if not grant.live:
                while not grant.ended:
                    self._changed.wait()
                return
            grant.live = False
        try:
            if grant.region is not None:
                grant.region.close()
                with self._changed:
                    self._count_region(grant.region, -1)
            elif grant.window is not None:
                self._windows.revoke(grant.queue_pair, grant.window)
        finally:
            # Even if the adapter refuses. A window that is still bound keeps its region from being closed.
            try:
                with self._changed:
                    grant.entry.grants.discard(grant)
                self._release_use(grant.entry)
            finally:
                with self._changed:
                    grant.ended = True
                    self._changed.notify_all()

    # ---- letting go ----

    def _release_use(self, entry: Entry) -> None:
        entry.give_back()
        if not entry.cached or self._over_bounds:
            self._on_released(entry)

    def _on_released(self, entry: Entry) -> None:
        """A use has ended. The entry is no longer cached, or more is registered than the bounds allow."""
        if self.closed:
            return
        with self._changed:
            doomed = [] if entry.cached or entry.uses else [entry]
            doomed += self._make_room(0, 0)
        self._close(doomed)

    def _make_room(self, length: int, count: int) -> list[Entry]:
        """Detach idle entries, the least recently used first, until there is room. Called under the lock."""
        doomed: list[Entry] = []
        held, number = self._counts.bytes_pinned + length, self._counts.entries + count
        with contextlib.closing(self._order.take_idle(len(self._entries))) as idle:
            while held > self.max_bytes or number > self.max_entries:
                entry = next(idle, None)
                if entry is None:
                    break
                doomed.append(entry)
                held -= entry.region.length
                number -= 1
        self._counts.evictions += len(doomed)
        return self._detach(doomed)

    # By the interpreter's end the names of a module may have gone.
    def _on_lease_dropped(
        self,
        lease: Lease,
        interpreter_ends: Callable[[], bool] = sys.is_finalizing,
        keep_for_ever: Callable[[object], None] = _core.keep_for_ever,
    ) -> None:
        """The finalizer of a lease that was not released calls this. Afterwards it takes the view out of the lease."""
        if interpreter_ends():
            keep_for_ever(lease._view)
            return
        message = f"unreleased {lease!r}"
        # This comes first: if warnings are errors, the last line raises.
        self._marks.abandon(lease, lease._view)
        warnings.warn(message, ResourceWarning, stacklevel=2, source=lease)

    def _release_later(self, lease: Lease) -> None:
        """Release a lease in the reaper's thread. Safe in a finalizer."""
        view, lease._view = lease._view, None
        if view is not None:
            self._marks.abandon(lease, view)

    def _take_abandoned_owners(self) -> list[Entry]:
        """Detach the memory that only the cache's export keeps alive. Called under the lock."""
        doomed: list[Entry] = []
        for _ in range(min(len(self._exported), _LOOKS)):
            owner = self._exported.popleft()
            if self._owners.get(owner.key) is not owner:
                continue
            if owner.abandoned and not any(entry.uses for entry in owner.entries):
                doomed += self._detach(list(owner.entries), invalid=True)
            else:
                self._exported.append(owner)
        return doomed

    def _detach(self, entries: list[Entry], invalid: bool = False) -> list[Entry]:
        """Take entries out of the cache. Returns the idle ones, which the caller closes. Called under the lock."""
        doomed = []
        for entry in entries:
            entry.invalid = entry.invalid or invalid
            if not entry.cached:
                continue
            entry.cached = False
            self._detached.add(entry)
            owner = entry.owner
            self._known_buffers.pop(owner.key, None)
            if owner.view is None and owner.watch is None:
                memory = (entry.start, entry.region.length)
                self._known_buffers.pop(memory, None)
                self._known_buffers.pop((memory, True), None)
            owner.remove(entry)
            self._forget_if_empty(owner)
            if not entry.uses:
                doomed.append(entry)
            if invalid:
                self._counts.invalidations += 1
        return doomed

    def _forget_if_empty(self, owner: Owner) -> None:
        if not owner.entries and self._owners.get(owner.key) is owner:
            del self._owners[owner.key]
            # NumPy does not resize an array that has weak references.
            owner.watch = None

    def _drop(self, entries: list[Entry]) -> None:
        """Invalidate entries. Their peers lose access first (contract K.2.6)."""
        with self._changed:
            self._detach(entries, invalid=True)
            # Another thread may have detached some of them, and not have begun to close them.
            doomed = [entry for entry in entries if not entry.uses]
            grants = [grant for entry in entries for grant in entry.grants]
        for grant in grants:
            self._revoke(grant)
        self._close(doomed)

    def _close(self, doomed: list[Entry]) -> None:
        """Deregister, without the lock. A region to which the program has bound a window stays until the next try."""
        for entry in doomed:
            with self._changed:
                if entry not in self._entries or entry.uses:
                    continue
                self._entries.discard(entry)
                self._detached.discard(entry)
                self._closing.add(entry)
            stays = False
            try:
                entry.region.close()
            except errors.DeviceBusyError:
                stays = True
                with self._changed:
                    self._entries.add(entry)
                    self._detached.add(entry)
                    self._marks.dead.append(entry.owner)
            finally:
                # If the adapter has refused, the cache forgets the region, and the adapter's thread tries again.
                if not stays:
                    self._unwatch(entry)
                with self._changed:
                    if not stays:
                        self._count_region(entry.region, -1)
                        if self._owners.get(entry.owner.key) is not entry.owner:
                            # _order may refer to the entry for some time, but its export ends now.
                            entry.owner.view = None
                    self._closing.discard(entry)
                    self._changed.notify_all()
            if not stays and _log.isEnabledFor(logging.DEBUG):
                why = "it is not valid any more" if entry.invalid else "it was replaced, or there was no room"
                _log.debug("%s: deregistered %s: %s", self._name(), _words(entry.start, entry.end), why)

    def _unwatch(self, entry: Entry) -> None:
        """End its watch, once: the monitor may have given it to another cache after that."""
        watch, entry.watch = entry.watch, None
        if watch is not None:
            self._monitor.unwatch(watch)

    def _wait_for_others(self) -> None:
        """Wait until other threads have finished the deregistrations that are under way now."""
        with self._changed:
            closing = set(self._closing)
            while closing & self._closing:
                self._changed.wait()

    def _reap(self) -> None:
        """Handle what callbacks and finalizers have marked.
        Other threads may not have finished what they took of it.
        """
        reap = object()
        try:
            with self._changed:
                self._reaps[reap] = threading.get_ident()
            self._handle_marks()
        finally:
            with self._changed:
                self._reaps.pop(reap, None)
                self._changed.notify_all()

    def _handle_marks(self) -> None:
        for entry, grant, view in taken(self._marks.abandoned):
            if grant is not None:
                self._revoke(grant)
            else:
                self._release_use(entry)
            del view
        for queue_pair in taken(self._marks.ended):
            self._on_queue_pair_closing(queue_pair)
        with self._changed:
            dead = list(taken(self._marks.dead))
            for owner in dead:
                if owner.dead:
                    self._detach(list(owner.entries), invalid=True)
            doomed = [entry for entry in self._detached if not entry.uses]
        self._close(doomed)

    def _on_memory_changed(self) -> None:
        """Drop the entries whose memory has changed.
        The adapter's thread calls this after the monitor has marked some.
        """
        with self._changed:
            watched = [entry for entry in self._entries if entry.cached and entry.watch is not None]
            changed = [entry for entry in watched if self._monitor.changed(entry.watch)]
        self._drop(changed)

    def _on_connection_ended(self, queue_pair: QueuePair) -> None:
        """Called with locks held, in any thread. So it takes no lock."""
        self._marks.connection_ended(queue_pair)

    def _on_queue_pair_closing(self, queue_pair: QueuePair) -> None:
        """Drop the entries and windows of a connection, before it is closed and when it has ended (contract K.1.9)."""
        if self.closed:
            return
        with self._changed:
            grants = [grant for entry in self._entries for grant in entry.grants if grant.queue_pair is queue_pair]
        for grant in grants:
            self._revoke(grant)
        self._windows.close_those_of(queue_pair)
        with self._changed:
            mine = []
            for entry in self._entries:
                if entry.queue_pairs is not None:
                    entry.queue_pairs.discard(queue_pair._serial)
                    if not entry.queue_pairs and entry.cached:
                        mine.append(entry)
            doomed = self._detach(mine)
        self._close(doomed)
        self._wait_for_others()

    # ---- the end ----

    def _on_exit(self) -> None:
        with self._changed:
            used = {entry.owner for entry in self._entries if entry.uses}
        for owner in used:
            _core.keep_for_ever(owner.view if owner.watch is None else owner.watch())

    def _on_forked(self) -> None:
        super()._on_forked()
        self._changed = threading.Condition(threading.Lock())
        self._loading.clear()
        self._marks.on_forked()
        self._windows.on_forked()

    def _count_region(self, region: MemoryRegion, change: int) -> None:
        """Add this region to the counts, or subtract it. Called under the lock."""
        self._counts.entries += change
        self._counts.bytes_pinned += change * region.length
        self._over_bounds = self._counts.bytes_pinned > self.max_bytes or self._counts.entries > self.max_entries

    def _refuse_if_used(self) -> None:
        self._reap()
        with self._changed:
            others = {reap for reap, thread in self._reaps.items() if thread != threading.get_ident()}
            while others & self._reaps.keys():
                self._changed.wait()
            used = self._uses()
        if used:
            raise busy(self, used)

    def _uses(self) -> list[str]:
        """Descriptions of the memory that is in use or being registered. Called under the lock."""
        used = [f"{entry.uses} uses of {entry.region._describe()}" for entry in self._entries if entry.uses]
        return used + [f"a registration of {loading.end - loading.start} bytes" for loading in self._loading]

    def _release(self) -> None:
        with self._changed:
            # From now on nothing is found. Another thread may have found something just before.
            self._defunct = self._closed_error
            used = self._uses()
            if used:
                self._mark_still_open()
                raise busy(self, used)
            self._detach([entry for entry in self._entries if entry.cached])
            left = list(self._entries)
            self._changed.notify_all()
        self._windows.close()
        for entry in left:
            entry.region.close()
            self._unwatch(entry)
        self._wait_for_others()
        if self._monitor is not None:
            self._monitor.close()
        with self._changed:
            for all_of_them in (self._entries, self._detached, self._known_buffers, self._exported, self._order):
                all_of_them.clear()
            self._counts.entries = self._counts.bytes_pinned = 0

    def _describe(self) -> str:
        return f"RegistrationCache of {len(self._entries)} regions"

    def _name(self) -> str:
        return f"{self._adapter.info.name}: cache {self._serial}"


def _words(start: int, end: int) -> str:
    return f"{end - start} bytes at {start:#x}"
