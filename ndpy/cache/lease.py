"""Leases of local memory and exposures to a peer, which a registration cache hands out."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ndpy import _core, errors
from ndpy.cache.ownership import KnownBuffer, MemoryRange, Owner
from ndpy.flags import Access
from ndpy.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.queue_pair import QueuePair

if TYPE_CHECKING:
    from ndpy.cache.registration_cache import RegistrationCache


@dataclass
class CacheStats:
    """Counts of what a cache has done since it was made, and of what is registered now.

    Attributes:
        hits: requests that found a region.
        misses: requests that found none.
        registrations: regions that were registered.
        binds: windows that were bound.
        evictions: idle entries that were deregistered to make room.
        invalidations: entries that were dropped because their memory was freed or changed, or because of invalidate().
        entries: regions that are registered now, including those in use.
        bytes_pinned: the sum of their lengths.
    """

    hits: int = 0
    misses: int = 0
    registrations: int = 0
    binds: int = 0
    evictions: int = 0
    invalidations: int = 0
    entries: int = 0
    bytes_pinned: int = 0


#: The rights that a lease can have.
LOCAL_RIGHTS = int(Access.LOCAL_WRITE | Access.READ_SINK)


class Entry(_core.Entry):
    """A region of the cache.

    Attributes:
        uses: how many leases and exposures it has.
        cached: whether requests can find it.
        rights: the rights that a lease of it can have.
        used: the number of its last use. The smallest number is the least recent use.
        watch: the monitor's watch, or None.
    """

    __slots__ = (
        "end",
        "grants",
        "invalid",
        "owner",
        "queue_pairs",
        "region",
        "rights",
        "start",
        "watch",
    )

    def __init__(
        self,
        owner: Owner,
        region: MemoryRegion,
        queue_pairs: set[int] | None,
        used: int,
        watch: Any,
    ) -> None:
        self.owner = owner
        self.region = region
        self.start = region.address
        self.end = region.address + region.length
        self.rights = int(region.access) & LOCAL_RIGHTS
        self.used = used
        self.take()
        self.watch = watch
        self.cached = True
        self.invalid = False
        #: The serial numbers of the queue pairs that it was made for. None for all.
        self.queue_pairs = queue_pairs
        self.grants: set[Grant] = set()


class Grant:
    """A right of a peer: a bound window, or a region with remote rights.

    Attributes:
        live: whether nobody has begun to revoke it.
        ended: whether it was revoked completely.
    """

    __slots__ = ("ended", "entry", "live", "queue_pair", "region", "window")

    def __init__(
        self, entry: Entry, queue_pair: QueuePair, window: MemoryWindow | None, region: MemoryRegion | None
    ) -> None:
        self.entry = entry
        self.queue_pair = queue_pair
        self.window = window
        self.region = region
        self.live = True
        self.ended = False


class Lease(_core.LeaseBase):
    """Registered memory for the time of its use, made by RegistrationCache.local(). It is a context manager.

    lease[a:b] is an Sge of those bytes, and lease[:] of all bytes. The buffer can be neither freed nor resized until
    release() is called and the requests that were posted with lease[a:b] have completed. Call release() after they have
    completed, because it may deregister the region. Then requests that are still under way fail.

    Attributes:
        region: a region that covers the requested bytes, and perhaps more.
        address, length: of the requested bytes.
    """

    __slots__ = ()

    # Set by the cache.
    _cache: RegistrationCache
    _range: MemoryRange | KnownBuffer
    #: The export of the buffer. None after release().
    _view: Any

    @property
    def address(self) -> int:
        return self._range.start

    @property
    def length(self) -> int:
        return self._range.length

    @property
    def region(self) -> MemoryRegion:
        return self._entry_in_use().region

    def _entry_in_use(self) -> Entry:
        if self._view is None:
            raise errors.ClosedError(f"{self!r} was released")
        entry: Entry = self._range.entry
        return entry

    def __len__(self) -> int:
        return self._range.length

    def __getitem__(self, key: slice) -> Sge:
        """The element of bytes start to stop. Raises ElementRangeError unless all of them are inside."""
        region = self._entry_in_use().region
        offset, length = _core.slice_bounds(key, self.length, "the lease")
        element = Sge(region, self.address + offset, length, region.local_token)
        element._export = self._view
        return element

    def _abandon(self, entry: Entry) -> tuple[Entry, Grant | None, Any]:
        return entry, None, self._view

    def _on_dropped(self) -> None:
        """The finalizer calls this for a lease that was not released."""
        if sys.is_finalizing():
            return
        message = f"unreleased {self!r}"
        # This comes first: if warnings are errors, the last line raises.
        self._cache._abandoned.append(self._abandon(self._range.entry))
        self._cache._reaper.wake()
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} bytes at {self.address:#x}>"


class Exposure(Lease):
    """Memory that a peer can reach, made by RegistrationCache.remote(). It is a context manager.

    release() takes the peer's right away before it returns. The memory stays registered, in the cache. release() does not
    wait for requests of the program. If some are under way on the connection, it closes the window after 20 ms at most,
    instead of invalidating it. If the bind itself is queued behind them and has not been executed by then, the adapter finds
    no window and ends the connection. So call release() when the peer has said that it is done.
    """

    __slots__ = ("_grant", "_remote")

    _grant: Grant
    _remote: RemoteMemory

    @property
    def revoked(self) -> bool:
        """Whether the peer's right has ended. release(), invalidate() and the end of the connection end it."""
        return not self._grant.live

    def remote(self) -> RemoteMemory:
        """Return the memory as the peer needs it. Raises ClosedError if the right has ended."""
        if self.revoked:
            raise errors.ClosedError(f"{self!r} was revoked; ask the cache again")
        return self._remote

    def release(self) -> None:
        """Take the peer's right away and end the use. Harmless when repeated."""
        view = self._view
        if view is not None:
            self._view = None
            self._cache._revoke(self._grant)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def _abandon(self, entry: Entry) -> tuple[Entry, Grant | None, Any]:
        return entry, self._grant, self._view
