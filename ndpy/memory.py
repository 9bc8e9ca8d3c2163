"""Memory that an adapter can reach: regions, windows, their elements, and what a peer needs to use them."""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

from _cffi_backend import FFI

from ndpy.errors import AccessViolationError, ElementRangeError, InvalidBufferError, NdpyError, UnsupportedError
from ndpy.flags import Access, Capability
from ndpy.pending import Pending
from ndpy.resource import Resource, busy

if TYPE_CHECKING:
    from ndpy.adapter import Adapter
    from ndpy.queue_pair import QueuePair

# Buffers need no declarations, so this is no platform's.
_ffi: Any = FFI()

_DESCRIPTOR = struct.Struct(">QQI")


class Sge:
    """A scatter/gather element: a piece of a region, made by slicing it.

    address, length in bytes; token is the region's local token (verbs: lkey).
    """

    # _keeps: of an element of a lease, and of no other, the export of its buffer, which a posted request keeps with it.
    __slots__ = ("_keeps", "address", "length", "region", "token")

    _keeps: Any

    def __init__(self, region: MemoryRegion, address: int, length: int, token: int) -> None:
        self.region = region
        self.address = address
        self.length = length
        self.token = token

    def __repr__(self) -> str:
        return f"<Sge {self.length} bytes at {self.address:#x}>"


#: What the posting calls take as local memory; an empty sequence stands for no bytes.
Elements = Union[Sge, "MemoryRegion", Sequence[Union[Sge, "MemoryRegion"]]]

_Bytes = bytes | bytearray | memoryview
#: What send and write take: with Flags.INLINE also memory that is not registered.
InlineElements = Elements | _Bytes | Sequence[Union[Sge, "MemoryRegion", _Bytes]]


def _bounds(key: slice, length: int, what: str) -> tuple[int, int]:
    """The offset and length that a slice names; nothing is clamped, since bytes that are not there cannot be sent."""
    start = 0 if key.start is None else key.start
    stop = length if key.stop is None else key.stop
    if key.step not in (None, 1):
        raise ElementRangeError(f"{what} is contiguous; a step of {key.step} is not possible")
    if not 0 <= start <= stop <= length:
        raise ElementRangeError(f"[{start}:{stop}] is outside of {what} of {length} bytes")
    return start, stop - start


class RemoteMemory:
    """Memory of a peer: address (the peer's own), length in bytes, and the token that grants access (verbs: rkey)."""

    # _whole: of a slice, and of no other, what it was sliced from.
    __slots__ = ("_whole", "address", "length", "token")

    _whole: RemoteMemory

    def __init__(self, address: int, length: int, token: int) -> None:
        self.address = address
        self.length = length
        self.token = token

    def __getitem__(self, key: slice) -> RemoteMemory:
        offset, length = _bounds(key, self.length, "the remote memory")
        piece = RemoteMemory(self.address + offset, length, self.token)
        piece._whole = self
        return piece

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteMemory):
            return NotImplemented
        return (self.address, self.length, self.token) == (other.address, other.length, other.token)

    def __hash__(self) -> int:
        return hash((self.address, self.length, self.token))

    def __repr__(self) -> str:
        return f"RemoteMemory(address={self.address:#x}, length={self.length}, token={self.token:#x})"

    def to_bytes(self) -> bytes:
        """The 20 bytes to send to a peer: base, length and token in network order (ND_MW_DESCRIPTOR)."""
        return _DESCRIPTOR.pack(self.address, self.length, self.token)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RemoteMemory:
        """Read what to_bytes() wrote. Raises ValueError unless there are exactly 20 bytes, none past 2**64."""
        if len(data) != _DESCRIPTOR.size:
            raise ValueError(f"a memory descriptor has {_DESCRIPTOR.size} bytes, not {len(data)}")
        address, length, token = _DESCRIPTOR.unpack(data)
        if address + length > 1 << 64:
            raise ValueError(
                f"a memory descriptor of {length} bytes at {address:#x} passes the end of the address space"
            )
        return cls(address, length, token)


# A plain integer: an operation on members of an IntFlag takes a microsecond.
_WRITTEN = Access.LOCAL_WRITE.value | Access.READ_SINK.value
# The rights that a region itself gives to peers.
_FOR_PEERS = (Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC).value & ~Access.LOCAL_WRITE.value


def is_written(access: int) -> bool:
    """Whether memory with these rights is written to, so that it cannot be read-only."""
    return bool(int(access) & _WRITTEN)


class MemoryRegion(Resource):
    """Registered memory, made by Adapter.register(). The region keeps the buffer's memory in place until it is closed.

    address, length: of the buffer, in bytes. access: the rights given. buffer: what was registered, None for memory that
    is no buffer (Adapter.register_implicit(), register_dmabuf()).
    local_token (verbs: lkey) and remote_token (verbs: rkey): see Sge and remote().
    Source: IND2MemoryRegion; ibv_reg_mr(3).
    """

    _release_order = 50

    local_token: int
    remote_token: int
    #: What keeps the memory in place, until the region is closed: an export of the buffer, or nothing that ndpy could keep.
    _owner: Any

    def __init__(self, adapter: Adapter, buffer: Any, address: int, length: int, access: Access) -> None:
        super().__init__(adapter)
        self.buffer = buffer
        self.address = address
        self.length = length
        self.access = access
        self._writable = is_written(access)
        self._bindings: set[Binding] = set()

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> Sge:
        """The element of bytes start to stop; ElementRangeError if they are not all inside."""
        offset, length = _bounds(key, self.length, "the region")
        return Sge(self, self.address + offset, length, self.local_token)

    def remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory:
        """What a peer needs to reach these bytes through the region's own rights, on any connection.

        Raises AccessViolationError when the region has no remote right: use a window, or register with one;
        UnsupportedError where info.capabilities lacks REGION_ACCESS: use a window.
        """
        self._check()
        if not self.access & _FOR_PEERS:
            raise AccessViolationError(
                "the region grants nothing to peers: register it with Access.REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC, "
                "or bind a memory window to it",
                operation="remote",
            )
        stop = self.length if length is None else offset + length
        offset, length = _bounds(slice(offset, stop), self.length, "the region")
        return RemoteMemory(self.address + offset, length, self.remote_token)

    def deregister(self, *, timeout_s: float | None = None) -> None:
        """The same as close(): DeviceBusyError while a window is bound, with nothing lost (contract D.6.2)."""
        self.begin_deregister().result(timeout_s)

    @abc.abstractmethod
    def begin_deregister(self) -> Pending[None]:
        """Start to deregister; DeviceBusyError at once while a window is bound."""

    def reregister(self, buffer: Any = None, access: Access | None = None) -> None:
        """Give the region other memory, other rights, or both; quicker than a new region where the adapter can do it.

        None keeps what it has. The tokens may change: elements and remote() from before are not valid any more, and what was
        posted with them has to have completed. Blocks as register() does.

        Raises UnsupportedError where info.capabilities lacks REREGISTRATION, and otherwise what register() raises. The region is then
        as it was before, but for a failure in the adapter itself, after which it can only be closed, as its uses then say.
        Source: ibv_rereg_mr(3); NetworkDirect has nothing of the kind.
        """
        self._adapter._require(Capability.REREGISTRATION, "reregister")
        with self._lifetime:
            self._check()
            self._refuse_if_used()
            if self.buffer is None:
                raise UnsupportedError("only a region of a buffer can be registered again", operation="reregister")
            self._reregister(buffer, access)

    def _reregister(self, buffer: Any, access: Access | None) -> None:
        """Called only where info.capabilities has REREGISTRATION."""
        raise NotImplementedError

    def _refuse_if_used(self) -> None:
        if self._bindings:
            raise busy(self, [f"{binding.window._describe()} bound to it" for binding in list(self._bindings)])

    def _describe(self) -> str:
        return f"MemoryRegion of {self.length} bytes at {self.address:#x}"


class Binding:
    """What one bind() gave: from its posting until it failed, was invalidated, or its queue pair or window was closed."""

    __slots__ = ("access", "address", "invalidating", "length", "queue_pair", "region", "token", "window")

    def __init__(
        self,
        window: MemoryWindow,
        queue_pair: QueuePair,
        region: MemoryRegion,
        element: Sge,
        access: Access,
        token: int,
    ) -> None:
        self.window = window
        self.queue_pair = queue_pair
        self.region = region
        self.address = element.address
        self.length = element.length
        self.access = access
        self.token = token
        self.invalidating = False

    def begin(self) -> None:
        self.window._binding = self
        self.region._bindings.add(self)
        self.queue_pair._bindings.add(self)

    def end(self) -> None:
        """Forget it; harmless when repeated, and a later binding of the same window stays."""
        if self.window._binding is self:
            self.window._binding = None
        self.region._bindings.discard(self)
        self.queue_pair._bindings.discard(self)


class MemoryWindow(Resource):
    """A revocable right for one peer to a part of a region (type 2), made by Adapter.create_memory_window().

    Created invalid; QueuePair.bind() gives it a range, rights and a token that is new each time, and
    QueuePair.invalidate() takes them away. A bound window that the program drops stays bound until its queue pair is
    closed. Closing a bound window ends its binding.
    Source: IND2MemoryWindow (contract section E); ibv_alloc_mw(3), ibv_bind_mw(3).
    """

    _release_order = 40

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._binding: Binding | None = None

    @property
    def adapter(self) -> Adapter:
        return self._adapter

    @property
    def is_bound(self) -> bool:
        """Whether a bind() was posted that neither failed nor was invalidated."""
        return self._binding is not None

    @property
    def region(self) -> MemoryRegion | None:
        """The region it is bound to."""
        binding = self._binding
        return binding.region if binding else None

    @property
    def queue_pair(self) -> QueuePair | None:
        """The queue pair whose peer may use it."""
        binding = self._binding
        return binding.queue_pair if binding else None

    @property
    def access(self) -> Access:
        """The rights of the peer; NONE while it is not bound."""
        binding = self._binding
        return binding.access if binding else Access.NONE

    @property
    def length(self) -> int:
        """Bytes that it covers; 0 while it is not bound."""
        binding = self._binding
        return binding.length if binding else 0

    @property
    def remote_token(self) -> int:
        """The token of the present binding, valid as soon as bind() returned; NdpyError while there is none."""
        return self.remote().token

    def remote(self) -> RemoteMemory:
        """What the peer needs to reach the window; NdpyError while it is not bound."""
        self._check()
        binding = self._binding
        if binding is None:
            raise NdpyError("the window is not bound; QueuePair.bind() gives it memory and a token")
        return RemoteMemory(binding.address, binding.length, binding.token)

    def _describe(self) -> str:
        binding = self._binding
        if binding is None:
            return "MemoryWindow (invalid)"
        return f"MemoryWindow of {binding.length} bytes at {binding.address:#x}"


def span(buffer: Any, writable: bool) -> tuple[Any, int, int]:
    """(object that keeps the memory, address, length) of a buffer, or of an (address, length) that the caller owns.

    Raises InvalidBufferError for an empty or scattered one, AccessViolationError for a read-only one to be written.
    """
    if isinstance(buffer, tuple):
        if len(buffer) != 2 or not all(isinstance(part, int) for part in buffer):
            raise InvalidBufferError("memory that Python does not own is given as (address, length)")
        address, length = buffer
        if not address:
            raise InvalidBufferError("address 0 cannot be registered")
        if length <= 0 or address < 0 or address + length > 1 << 64:
            raise InvalidBufferError(f"{length} bytes at {address:#x} are no range of memory")
        return buffer, address, length
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(
            f"a {type(buffer).__name__} is no buffer; give a bytearray, mmap, array, NumPy array, ndpy.alloc() "
            "or (address, length)"
        ) from None
    if not view.contiguous:
        raise InvalidBufferError(
            "the buffer's bytes do not lie one after the other; register the array it is a view of"
        )
    if view.nbytes == 0:
        raise InvalidBufferError("the buffer is empty; there is nothing to register")
    if view.readonly and writable:
        raise AccessViolationError(
            f"the {type(buffer).__name__} is read-only, so it cannot be registered for local or remote write; "
            "use a bytearray, or access=Access.NONE to send from it",
            operation="register",
        )
    return view, address_of(view), view.nbytes


def address_of(view: memoryview) -> int:
    """The address of a contiguous view's first byte."""
    return int(_ffi.cast("uintptr_t", _ffi.from_buffer(view)))


def pointer_of(view: memoryview) -> Any:
    """The same as a pointer, which keeps nothing; what exporter() gives can be compared with it."""
    return _ffi.cast("char *", _ffi.from_buffer(view))


def exporter() -> Callable[[Any], Any]:
    """A function that exports a contiguous buffer: what it returns has a length in bytes, and keeps the memory."""
    export: Callable[[Any], Any] = _ffi.from_buffer
    return export
