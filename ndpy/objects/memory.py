"""Memory that an adapter can reach: regions, windows, their elements, and the tokens that peers need."""

from __future__ import annotations

import re
import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from ndpy import _core
from ndpy._core import Sge as Sge
from ndpy.errors import AccessViolationError, ClosedError, InvalidBufferError, NdpyError, UnsupportedError
from ndpy.objects.arrays import CONTIGUOUS, OBJECTS, ArrayMemory, array_memory
from ndpy.objects.native_steps import RegionSteps, WindowSteps
from ndpy.objects.pending import Pending
from ndpy.objects.resource import AdapterObject, Uncopied, busy
from ndpy.objects.timeouts import timeout
from ndpy.vocabulary.flags import Access, Capability

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.queue_pair import QueuePair

_DESCRIPTOR = struct.Struct(">QQI")


#: The local memory that posting calls take. An empty sequence stands for no bytes.
Elements = Union[Sge, "MemoryRegion", Sequence[Union[Sge, "MemoryRegion"]]]

_Bytes = bytes | bytearray | memoryview
#: The local memory that send() and write() take. With Flags.INLINE the memory need not be registered.
InlineElements = Elements | _Bytes | Sequence[Union[Sge, "MemoryRegion", _Bytes]]


class RemoteMemory(_core.RemoteMemory):
    """Memory of a peer.

    A slice of it is the memory of those bytes. The limits are bytes from the beginning: negative ones, and those beyond
    the end, raise ElementRangeError.

    Parameters:
        address: where the memory begins in the peer's address space.
        length: in bytes.
        token: grants access (verbs: rkey).
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteMemory):
            return NotImplemented
        return (self.address, self.length, self.token) == (other.address, other.length, other.token)

    def __hash__(self) -> int:
        return hash((self.address, self.length, self.token))

    def __repr__(self) -> str:
        return f"RemoteMemory(address={self.address:#x}, length={self.length}, token={self.token:#x})"

    def __reduce__(self) -> tuple[type[RemoteMemory], tuple[int, int, int]]:
        return type(self), (self.address, self.length, self.token)

    def to_bytes(self) -> bytes:
        """Return the 20 bytes to send to a peer: address, length and token in network order (ND_MW_DESCRIPTOR)."""
        return _DESCRIPTOR.pack(self.address, self.length, self.token)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RemoteMemory:
        """Make the object again from the bytes of to_bytes().

        Parameters:
            data: the 20 bytes.
        Raises:
            ValueError: there are not exactly 20 bytes, or the memory passes the end of the address space.
        """
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
_FOR_PEERS = (
    Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC | Access.FLUSH_GLOBAL | Access.FLUSH_PERSISTENT
).value & ~Access.LOCAL_WRITE.value


def is_written(access: int) -> bool:
    """Whether these rights let somebody write to the memory. Read-only memory cannot have them."""
    return bool(int(access) & _WRITTEN)


def _region_of(length: int, address: int) -> str:
    return f"MemoryRegion of {length} bytes at {address:#x}"


def _closed(address: int, length: int) -> ClosedError:
    """What a region raises that was closed. cdefs/core/resource.c calls it."""
    return ClosedError(f"{_region_of(length, address)} is closed")


class MemoryRegion(_core.MemoryRegion, AdapterObject, RegionSteps):
    """Registered memory, made by Adapter.register(). It keeps the buffer in place until it is closed.

    If it is still open when the interpreter ends, the buffer is never freed. A region of (address, length) is closed
    then.

    A slice of it is an Sge. The limits are bytes from the beginning of the region: negative ones, and those beyond its
    end, raise ElementRangeError.

    Attributes:
        buffer: the registered buffer. None for register_implicit() and register_dmabuf().
        address, length: where the memory is, or the address that register_at() was given; and its length in bytes.
        access: the rights that were given.
        local_token: the token of its elements (verbs: lkey).
        remote_token: the token that grants a peer access (verbs: rkey). See remote().
    Source: IND2MemoryRegion (contract section D); ibv_reg_mr(3).
    """

    _release_order = 50
    #: Whether a device has its memory.
    _is_on_device = False
    #: Whether windows can be bound to it.
    _has_windows = True
    #: Whether something keeps memory in place that was given as (address, length).
    _is_kept = False

    def __init__(self, adapter: Adapter, owner: Any, buffer: Any, address: int, length: int, access: Access) -> None:
        super().__init__(adapter)
        self._owner = owner
        self.buffer = buffer
        self.address = address
        self.length = length
        self.access = access
        self._writable = is_written(access)

    def __len__(self) -> int:
        return self.length

    def remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory:
        """Return what a peer needs to reach these bytes, on any connection.

        The region's own rights say what the peer may do.

        Parameters:
            offset, length: the part of the region, in bytes. A length of None stands for all bytes from the offset on.
        Raises:
            AccessViolationError: the region grants nothing to peers. Register it with a remote right, or use a window.
            UnsupportedError: info.capabilities lacks REGION_ACCESS. Use a window.
            ElementRangeError: the bytes are not all inside the region.
        """
        self._check()
        if not self.access & _FOR_PEERS:
            raise AccessViolationError(
                "the region grants nothing to peers: register it with Access.REMOTE_READ, REMOTE_WRITE or "
                "REMOTE_ATOMIC, or bind a memory window to it",
                operation="remote",
            )
        stop = self.length if length is None else offset + length
        offset, length = _core.slice_bounds(slice(offset, stop), self.length, "the region")
        return RemoteMemory(self.address + offset, length, self.remote_token)

    def prefetch(self, offset: int = 0, length: int | None = None, *, write: bool = False) -> None:
        """Have the adapter fault in pages of memory on demand before it uses them, and wait for that.

        Pinned memory is there already, so a region without Access.ON_DEMAND has nothing to do.

        Parameters:
            offset, length: the part of the region, in bytes. A length of None stands for all bytes from the offset on.
            write: whether the adapter will write to the pages. Then pages that were copied on write are copied now.
        Raises:
            ElementRangeError: the bytes are not all inside the region.
            AccessViolationError: the memory is not mapped.
            UnsupportedError: the driver cannot do it.
        Source: ibv_advise_mr(3), IBV_ADVISE_MR_ADVICE_PREFETCH and _PREFETCH_WRITE with IBV_ADVISE_MR_FLAG_FLUSH.
        """
        self._check()
        stop = self.length if length is None else offset + length
        offset, length = _core.slice_bounds(slice(offset, stop), self.length, "the region")
        if length and self.access & Access.ON_DEMAND:
            self._native_prefetch(self.address + offset, length, write)

    # ---- registering ----

    def _register_now(self) -> None:
        """Register and wait. If this raises, even because of Ctrl-C, there is no registration."""
        try:
            self._native_register()
            self._opened()
        except BaseException:
            if self.closed:
                self._release_memory()
            raise

    def _on_registered(self, pending: Pending[Any], failure: BaseException | None) -> None:
        """A registration that was begun has ended."""
        if failure is not None:
            self._release_memory()
            pending.fail(failure)
        elif not pending.succeed(self, prepare=self._opened):
            # It was cancelled meanwhile, so nobody gets the region.
            try:
                self._native_deregister()
            except NdpyError:
                # Nobody refers to it, so the adapter closes it later.
                self._opened()
            else:
                self._release_memory()

    # ---- deregistering ----

    def deregister(self, *, timeout_s: float | None = None) -> None:
        """Do what close() does, and wait until it is done.

        Parameters:
            timeout_s: how long to wait. None waits for ever.
        Raises:
            DeviceBusyError: a window is bound to the region. Nothing has changed (contract D.6.2).
            TimeoutError: the deadline passed. Deregistering goes on.
        """
        timeout_s = timeout(timeout_s)
        self.begin_deregister().result(timeout_s)

    def begin_deregister(self) -> Pending[None]:
        """Start to deregister. The region cannot be used from now on.

        Returns: a Pending that ends when the adapter has let go of the memory. On Linux it has ended when this returns.
        Raises:
            DeviceBusyError: a window is bound to the region. Nothing has changed.
            ProviderError: the provider refused. The region can still be used. If the provider refuses later, the
                Pending raises.
        Source: IND2MemoryRegion::Deregister (contract D.4); ibv_dereg_mr(3).
        """
        pending: Pending[None] = self._adapter._pending_type("deregister")

        def stay_open() -> None:
            self._mark_still_open()
            if former is not None:
                self._defunct = former

        def on_end(failure: NdpyError | None) -> None:
            with self._lifetime:
                if failure is not None:
                    stay_open()
                else:
                    self._release_memory()
                    self._mark_closed()
            if failure is not None:
                pending.fail(failure)
            else:
                pending.succeed(None)

        with self._lifetime:
            if self.closed:
                pending.succeed(None)
                return pending
            self._refuse_if_used()
            # The region may be unusable already. If this fails, it stays so.
            former, self._defunct = self._defunct, self._closed_error
            try:
                under_way = self._native_begin_deregister(on_end)
            except NdpyError:
                stay_open()
                raise
            if not under_way:
                # Do this before the lock is released: close() must not deregister a second time.
                on_end(None)
        return pending

    def _release(self) -> None:
        if self._native_finish_deregister():
            return
        self._native_deregister()
        # Set this before the buffer goes, because a thread that posts looks at the buffer first.
        self._defunct = self._closed_error
        self._release_memory()

    def _release_memory(self) -> None:
        """Free the native object, if it is still there, and then the buffer.

        An exported memoryview keeps a bytearray from moving and an mmap from closing.
        """
        self._native_free()
        self._owner = None

    def _keep_memory(self) -> None:
        """Keep the buffer until the process ends."""
        _core.keep_for_ever(self._owner)

    # ---- registering again ----

    def reregister(self, buffer: Any = None, access: Access | None = None, *, domain: Adapter | None = None) -> None:
        """Give the region other memory, other rights, or another protection domain. This is quicker than a new region.

        The tokens may change. Earlier elements and results of remote() are no longer valid. Requests that were
        posted with them must have completed before this call. It blocks like register().

        If this raises, the region is unchanged. The exception is a failure in the adapter: then only close() works, and
        every other call says so.

        Parameters:
            buffer: the new memory, as for register(). None keeps the old memory.
            access: the new rights. None keeps the old rights.
            domain: a ProtectionDomain of the same adapter, or the adapter itself, to which the region belongs from now
                on. None keeps the old one.
        Raises:
            ForeignObjectError: the protection domain is another adapter's.
            UnsupportedError: info.capabilities lacks REREGISTRATION, as on every NetworkDirect adapter. Or the region
                was not made from a buffer.
            DeviceBusyError: a window is bound to the region.
            Otherwise what register() raises.
        Source: ibv_rereg_mr(3).
        """
        self._adapter._require(Capability.REREGISTRATION, "reregister")
        if domain is None or domain is self._adapter:
            self._reregister(buffer, access, None)
        else:
            self._require_same_device(domain, "the protection domain")
            # It stays open meanwhile.
            domain._make(lambda other: self._reregister(buffer, access, other))

    def _reregister(self, buffer: Any, access: Access | None, domain: Adapter | None) -> None:
        with self._lifetime:
            self._check()
            self._refuse_if_used()
            if self.buffer is None:
                raise UnsupportedError("only a region of a buffer can be registered again", operation="reregister")
            if self._is_on_device:
                raise UnsupportedError(
                    "a region of a device's memory cannot be registered again; close it and make a new one",
                    operation="reregister",
                )
            if self._is_elsewhere:
                raise UnsupportedError(
                    "a region with an address of its own cannot be registered again", operation="reregister"
                )
            if buffer is None and access is None and domain is None:
                return
            # An array may have other memory by now.
            owner, kept, address, length, rights = self._adapter._memory(
                self._owner if buffer is None else buffer, self.access if access is None else access
            )
            kept = self.buffer if buffer is None else kept
            self._native_reregister(
                owner, None if buffer is None else (address, length), None if access is None else rights, domain
            )
            self.buffer, self.address, self.length, self.access = kept, address, length, rights
            self._writable = is_written(rights)
            self._owner = owner
            if domain is not None:
                # The new one refuses to close before the region from now on, and the old one does not.
                self._adapter = domain
                self._opened()
            self._mark_still_open()

    def _on_exit(self) -> None:
        if isinstance(self.buffer, tuple) and not self._is_kept:
            for binding in self._live_bindings():
                binding.window.close()
            self.close()
        else:
            super()._on_exit()

    def _live_bindings(self) -> list[Binding]:
        return [binding for reference in list(self._bindings) if (binding := reference()) is not None]

    def _refuse_if_used(self) -> None:
        # The garbage collector clears the reference to a binding before the window and the queue pair have had their
        # turn to be closed, which ends the binding.
        if self._bindings:
            windows = [binding.window._describe() for binding in self._live_bindings()] or ["a window that was dropped"]
            raise busy(self, [f"{window} bound to it" for window in windows])

    def _describe(self) -> str:
        return _region_of(self.length, self.address)


class Binding(Uncopied):
    """The effect of one bind(). It begins when bind() is posted.

    It ends when the bind fails, when the window is invalidated, or when the queue pair or the window is closed.

    The window and the queue pair keep it. The region does not, because a region that was dropped and waits for its turn
    to be closed would then keep the other two for ever.
    """

    __slots__ = (
        "__weakref__",
        "_of_region",
        "access",
        "address",
        "invalidating",
        "length",
        "queue_pair",
        "region",
        "token",
        "window",
    )

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
        #: What the region has of it, once it has begun.
        self._of_region: weakref.ref[Binding] | None = None

    def begin(self) -> None:
        self.window._binding = self
        # Without a callback: the collector would call it before the binding ends.
        self._of_region = weakref.ref(self)
        self.region._bindings.add(self._of_region)
        assert self.queue_pair._bindings is not None
        self.queue_pair._bindings.add(self)

    def end(self) -> None:
        """Forget the binding. Harmless when repeated. A later binding of the same window stays."""
        if self.window._binding is self:
            self.window._binding = None
        self.region._bindings.discard(self._of_region)
        assert self.queue_pair._bindings is not None
        self.queue_pair._bindings.discard(self)


class MemoryWindow(AdapterObject, WindowSteps):
    """A revocable right of one peer to a part of a region, made by Adapter.create_memory_window().

    A new window grants nothing. Each QueuePair.bind() gives it a range, rights, and a new token. QueuePair.invalidate()
    takes them away, and so does close(). If the program drops a bound window, it stays bound until its queue pair is
    closed.

    On verbs it is a window of type 2. With Capability.TYPE_1_WINDOWS it is one of type 1, whose token works for every
    peer of its protection domain.

    Source: IND2MemoryWindow (contract section E); ibv_alloc_mw(3), ibv_bind_mw(3).
    """

    _release_order = 40

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._binding: Binding | None = None
        self._native: Any = self._native_create()
        self._opened()

    @property
    def is_bound(self) -> bool:
        """Whether a bind() was posted that neither failed nor was invalidated."""
        return self._binding is not None

    @property
    def region(self) -> MemoryRegion | None:
        """The region that it is bound to, or None."""
        binding = self._binding
        return binding.region if binding else None

    @property
    def queue_pair(self) -> QueuePair | None:
        """The queue pair whose peer may use it, or None."""
        binding = self._binding
        return binding.queue_pair if binding else None

    @property
    def access(self) -> Access:
        """The rights of the peer. NONE while the window is not bound."""
        binding = self._binding
        return binding.access if binding else Access.NONE

    @property
    def length(self) -> int:
        """How many bytes it covers. 0 while it is not bound."""
        binding = self._binding
        return binding.length if binding else 0

    @property
    def remote_token(self) -> int:
        """The token of the present binding, valid as soon as bind() has returned.

        Raises:
            NdpyError: the window is not bound.
        """
        return self.remote().token

    def remote(self) -> RemoteMemory:
        """Return what the peer needs to reach the window.

        Raises:
            NdpyError: the window is not bound.
        """
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

    def _release(self) -> None:
        self._native_free()
        if self._binding is not None:
            self._binding.end()


def buffer_range(buffer: Any, writable: bool, on_device: bool = False) -> tuple[Any, int, int]:
    """Return (object that keeps the memory in place, address, length) of a buffer or of an (address, length).

    Parameters:
        writable: whether somebody will write to it.
        on_device: whether it may be memory of a CUDA device. The object that keeps it is an ArrayMemory then.
    Raises:
        InvalidBufferError: the buffer is empty, or plain_view() refuses it.
        AccessViolationError: the buffer is read-only, but somebody will write to it.
    """
    if isinstance(buffer, tuple):
        if len(buffer) != 2 or not all(isinstance(part, int) for part in buffer):
            raise InvalidBufferError("memory that Python does not own is given as (address, length)")
        address, length = buffer
        if not address:
            raise InvalidBufferError("address 0 cannot be registered")
        if length <= 0 or address < 0 or address + length > 1 << 64:
            raise InvalidBufferError(f"{length} bytes at {address:#x} are not a range of memory")
        return buffer, address, length
    try:
        view: memoryview | ArrayMemory = view_or_memory(buffer) if on_device else plain_view(buffer)
    except TypeError as error:
        raise TypeError(f"{error}, or (address, length)") from None
    if view.nbytes == 0:
        raise InvalidBufferError("the buffer is empty; there is nothing to register")
    if view.readonly and writable:
        raise AccessViolationError(
            f"the {type(buffer).__name__} is read-only, so it cannot be registered for local or remote write; "
            "use a bytearray, or access=Access.NONE to send from it",
            operation="register",
            problem="invalid-buffer",
        )
    return view, view.address if isinstance(view, ArrayMemory) else address_of(view), view.nbytes


# The names of fields in a buffer's format.
_FIELD_NAMES = re.compile(":[^:]*:")


def plain_view(buffer: Any) -> memoryview:
    """Return a view of a buffer or an array whose bytes lie one after the other, in the order of its elements.

    This alone decides what can be registered, sent, received into, read, written and exposed, however long it is. Only
    memory that C registers by itself does not come here, and this would allow all of it.

    Raises:
        TypeError: it is neither a buffer nor an array.
        InvalidBufferError: its bytes have gaps or another order, or are addresses of Python objects. Or it does not
            give its memory.
    """
    view = view_or_memory(buffer)
    if isinstance(view, ArrayMemory):
        raise device_error(view, "the processor cannot use it, so register it, or copy it to the host's memory")
    return view


def view_or_memory(buffer: Any) -> memoryview | ArrayMemory:
    """Do what plain_view() does, or return the memory of an array in memory of a CUDA device."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        return _view_of_array(buffer, error)
    if not view.c_contiguous:
        raise InvalidBufferError(f"the {type(buffer).__name__} {CONTIGUOUS}")
    if "O" in view.format and "O" in _FIELD_NAMES.sub("", view.format):
        raise InvalidBufferError(f"the {type(buffer).__name__} {OBJECTS}")
    return view


def _view_of_array(buffer: Any, error: Exception) -> memoryview | ArrayMemory:
    """error: why there is no memoryview of it."""
    memory = array_memory(buffer)
    if memory is None:
        name = type(buffer).__name__
        if isinstance(error, TypeError):
            raise TypeError(
                f"{name} is not a buffer or an array; give bytes, a bytearray, mmap, array, NumPy array, tensor or "
                f"ndpy.alloc()"
            ) from None
        raise InvalidBufferError(
            f"the {name} gives no view of its bytes ({error}); give a view as bytes or numbers, such as "
            "array.view('u1')"
        ) from None
    if memory.device is None:
        return memoryview(memory)
    if not memory.device.is_cuda:
        raise device_error(memory, "copy it to the host's memory, or give its dma-buf to Adapter.register_dmabuf()")
    return memory


def device_error(memory: ArrayMemory, remedy: str) -> InvalidBufferError:
    """An error for memory of a device."""
    name = "region" if memory.producer is None else type(memory.producer).__name__
    return InvalidBufferError(f"the {name} is in memory of {memory.device}; {remedy}")


def range_on_device(memory: ArrayMemory, address: int, length: int, owner: object = None) -> ArrayMemory:
    """Return a range of a device's memory that is there already, to be registered. It keeps `owner`, and no array."""
    return ArrayMemory(None, owner, address, length, False, memory.device._replace(stream=None))


def address_of(view: memoryview) -> int:
    """The address of a contiguous view's first byte."""
    return _core.Export(view).address
