"""Leases of local memory and exposures to a peer, which a registration cache hands out."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ndpy import _core, errors
from ndpy.cache.ownership import Owner
from ndpy.objects.memory import MemoryRegion, MemoryWindow, RemoteMemory
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.resource import Uncopied
from ndpy.vocabulary.flags import Access


@dataclass
class CacheStats:
    """Counts of a cache's actions since it was made, and of the memory that is registered now.

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


@dataclass(eq=False, slots=True)
class Loading:
    """A registration that is under way. Other threads that want a part of its range wait for it."""

    root: Any
    start: int
    end: int
    invalid: bool = False


@dataclass(eq=False, slots=True)
class Grant(Uncopied):
    """A right of a peer: a bound window, or a region with remote rights.

    Attributes:
        live: whether nobody has begun to revoke it.
        ended: whether it was revoked completely.
    """

    entry: Entry
    queue_pair: QueuePair
    window: MemoryWindow | None
    region: MemoryRegion | None
    live: bool = True
    ended: bool = False


#: Registered memory for the time of its use.
Lease = _core.Lease


class Exposure(Lease):
    """Memory that a peer can reach, made by RegistrationCache.remote(). It is a context manager.

    release() takes the peer's right away before it returns. The memory stays registered, in the cache. release() does
    not wait for requests of the program. If some are under way on the connection, it closes the window after 20 ms at
    most, instead of invalidating it. If the bind itself is queued behind them and has not been executed by then, the
    adapter finds no window and ends the connection. So call release() when the peer has said that it is done.
    """

    __slots__ = ("_grant", "_remote")

    _grant: Grant
    _remote: RemoteMemory

    @property
    def revoked(self) -> bool:
        """Whether the peer's right has ended. release(), invalidate() and the end of the connection end it."""
        return not self._grant.live

    def remote(self) -> RemoteMemory:
        """Return the memory as the peer needs it.

        Raises:
            ClosedError: the right has ended.
        """
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
        if kind is GeneratorExit:
            # The garbage collector may be closing the generator or coroutine of the block.
            self._cache._release_later(self)
        else:
            self.release()
