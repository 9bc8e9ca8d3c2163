"""Built from cdefs/core."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from typing_extensions import Self

from ndpy.cache.lease import Lease
from ndpy.memory import MemoryRegion as PublicRegion
from ndpy.queue_pair import QueuePair

def slice_bounds(key: slice, length: int, what: str, /) -> tuple[int, int]: ...

@final
class Sge:
    region: PublicRegion
    address: int
    length: int
    token: int
    _export: Any
    def __init__(self, region: PublicRegion, address: int, length: int, token: int) -> None: ...

class RemoteMemory:
    address: int
    length: int
    token: int
    def __init__(self, address: int, length: int, token: int) -> None: ...
    def __getitem__(self, key: slice, /) -> Self: ...
    @property
    def _sliced_from(self) -> Self | None: ...

class MemoryRegion:
    address: int
    length: int
    local_token: int
    def __getitem__(self, key: slice, /) -> Sge: ...

class Entry:
    used: int
    cached: bool
    @property
    def uses(self) -> int: ...
    def take(self) -> None: ...
    def give_back(self) -> None: ...

class KnownBuffer:
    def __init__(
        self,
        entry: Entry,
        rights: int,
        export: Callable[[Any], Any] | None,
        subject: Any,
        pointer: Any,
        size: int,
        /,
    ) -> None: ...
    @property
    def entry(self) -> Any: ...

class LeaseFinder:
    _known_buffers: dict[Any, Any]
    _lease_type: type[LeaseBase]
    _over_bounds: bool
    @property
    def _hits(self) -> int: ...
    def local(
        self, buffer: Any, access: int = ..., *, queue_pair: QueuePair | None = None, raw: bool = False
    ) -> Lease: ...
    def _next_use(self) -> int: ...

class LeaseBase:
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
