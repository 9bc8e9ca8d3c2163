"""What a cache of registrations hands out: leases of local memory, and exposures to a peer."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ndpy import _lease, errors
from ndpy.cache.ownership import KnownBuffer, Owner, Span
from ndpy.flags import Access
from ndpy.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge, _bounds
from ndpy.queue_pair import QueuePair

if TYPE_CHECKING:
    from ndpy.cache.registration_cache import RegistrationCache


@dataclass
class CacheStats:
    """What a cache has done since it was made, and what it holds.

    hits: requests that found a region. registrations: regions made, binds: windows bound. evictions: idle entries that
    gave way to others. invalidations: entries dropped because their memory went or was about to.
    entries, bytes_pinned: regions that are registered now, those in use included, and the sum of their lengths.
    """

    hits: int = 0
    misses: int = 0
    registrations: int = 0
    binds: int = 0
    evictions: int = 0
    invalidations: int = 0
    entries: int = 0
    bytes_pinned: int = 0


#: All rights that a lease can have.
LOCAL_RIGHTS = int(Access.LOCAL_WRITE | Access.READ_SINK)


class Entry(_lease.Entry):
    """A region of the cache.

    uses: how many leases and exposures there are of it. cached: whether others may still find it. rights: all that may be
    asked of it. used: the number of its last use, by which the least recent one is known. watch: the monitor's.
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
        #: Serial numbers of the queue pairs that it was made for; None if it is for any.
        self.queue_pairs = queue_pairs
        self.grants: set[Grant] = set()


class Grant:
    """What a peer was given: a bound window, or a region with remote rights. ended: its revocation is over."""

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


class Lease(_lease.LeaseBase):
    """Registered memory for the time of its use, made by RegistrationCache.local(); a context manager.

    region: a region that covers what was asked for, and maybe more. address, length in bytes: of what was asked for.
    lease[a:b] is an Sge of it, lease[:] of all. The buffer can be neither freed nor resized until release(), nor before a
    request that was posted with lease[a:b] has completed. release() comes after that: the region may go with it, and what is
    still under way then fails.
    """

    __slots__ = ()

    # Set by the cache.
    _cache: RegistrationCache
    _span: Span | KnownBuffer
    #: The export of the buffer; None once it was released.
    _view: Any

    @property
    def address(self) -> int:
        return self._span.start

    @property
    def length(self) -> int:
        return self._span.length

    @property
    def region(self) -> MemoryRegion:
        return self._used().region

    def _used(self) -> Entry:
        if self._view is None:
            raise errors.ClosedError(f"{self!r} was released")
        entry: Entry = self._span.entry
        return entry

    def __len__(self) -> int:
        return self._span.length

    def __getitem__(self, key: slice) -> Sge:
        """The element of bytes start to stop; ElementRangeError if they are not all inside."""
        region = self._used().region
        offset, length = _bounds(key, self.length, "the lease")
        element = Sge(region, self.address + offset, length, region.local_token)
        element._keeps = self._view
        return element

    def _abandon(self, entry: Entry) -> tuple[Entry, Grant | None, Any]:
        return entry, None, self._view

    def _dropped(self) -> None:
        """The finalizer of what was not released."""
        if sys.is_finalizing():
            return
        message = f"unreleased {self!r}"
        # First: where warnings are errors, the last line raises.
        self._cache._abandoned.append(self._abandon(self._span.entry))
        self._cache._reaper.wake()
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} bytes at {self.address:#x}>"


class Exposure(Lease):
    """Memory that a peer can reach, made by RegistrationCache.remote(); a context manager.

    release() takes the peer's right away before it returns; the memory stays registered, in the cache. It waits for no
    request of the program: where some are under way on the connection, it closes the window, after 20 ms at most, instead
    of invalidating it. Should the bind itself stand behind them and not have been carried out by then, the adapter finds no
    window and ends the connection; so release when the peer has said that it is done.
    """

    __slots__ = ("_grant", "_remote")

    _grant: Grant
    _remote: RemoteMemory

    @property
    def revoked(self) -> bool:
        """Whether the peer's right has ended: by release(), invalidate(), or with its queue pair."""
        return not self._grant.live

    def remote(self) -> RemoteMemory:
        """What the peer needs; ClosedError once the right has ended."""
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
