"""A model of memory registration in NDK, the kernel interface of NetworkDirect, for people who port or test its
consumers.

The module is frozen: it is tested, and it changes only to correct faults. See docs/explained/frozen.md.

The model runs in user mode, over any adapter, and calls no kernel interface. The adapter of ndpy registers the memory.
This module keeps the contract that NdkRegisterMr has with its consumers (contract section J), with its names, statuses
and flags.

The model does not show what only a kernel has:

- the IRQL of a call (J.18),
- whether the consumer pinned the memory (J.3): the adapter pins it when it registers,
- physical pages: an Mdl has addresses of this process.

Example:

    mr = ndk.NdkMr(adapter)
    status = mr.register(ndk.Mdl(buffer), len(buffer), NdkFlags.ALLOW_REMOTE_READ, on_registered, context)
    if status == NtStatus.PENDING: ...       # on_registered(context, status) is called once
    queue_pair.send(mr.region)               # while it is registered
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ndpy import errors
from ndpy.objects.adapter import Adapter
from ndpy.objects.memory import MemoryRegion, buffer_range
from ndpy.objects.pending import Pending
from ndpy.objects.resource import Uncopied
from ndpy.vocabulary.flags import Access, Capability, NamedFlags, NamedInt
from ndpy.vocabulary.forking import in_child, renew_in_child
from ndpy.vocabulary.unraisable import report


class NtStatus(NamedInt):
    """The statuses that NDK's calls return and its callbacks get. The values are those of ntstatus.h.

    Names:
        SUCCESS: it is done.
        PENDING: the callback will get the status.
        DEVICE_BUSY: a window is bound to the region.
        UNSUCCESSFUL: the adapter failed in a way that has no other status.
        ACCESS_VIOLATION: the memory is not mapped, or read-only.
        INVALID_PARAMETER: an argument is not possible.
        INSUFFICIENT_RESOURCES: the memory cannot be pinned, or the adapter has no room.
        NOT_SUPPORTED: the adapter cannot do it.
        CANCELLED: the request was cancelled.
        INVALID_DEVICE_STATE: the region's state does not allow it.
        DEVICE_REMOVED: the adapter has gone.
    Source: ntstatus.h; contract J.
    """

    SUCCESS = 0
    PENDING = 0x00000103
    DEVICE_BUSY = 0x80000011
    UNSUCCESSFUL = 0xC0000001
    ACCESS_VIOLATION = 0xC0000005
    INVALID_PARAMETER = 0xC000000D
    INSUFFICIENT_RESOURCES = 0xC000009A
    NOT_SUPPORTED = 0xC00000BB
    CANCELLED = 0xC0000120
    INVALID_DEVICE_STATE = 0xC0000184
    DEVICE_REMOVED = 0xC00002B6


class NdkFlags(NamedFlags):
    """The rights of a region. It can always be read locally.

    Names:
        ALLOW_LOCAL_READ: 0, because that needs no right.
        ALLOW_LOCAL_WRITE: the adapter may write to it.
        ALLOW_REMOTE_READ: peers may read it.
        ALLOW_REMOTE_WRITE: peers may write to it. Includes ALLOW_LOCAL_WRITE.
        RDMA_READ_SINK: RDMA reads may fill it.
    Source: NDK_MR_FLAG_* (contract J.10).
    """

    ALLOW_LOCAL_READ = 0x0
    ALLOW_LOCAL_WRITE = 0x1
    ALLOW_REMOTE_READ = 0x2
    ALLOW_REMOTE_WRITE = 0x5
    RDMA_READ_SINK = 0x8


class NdkAdapterFlags(NamedFlags):
    """What an adapter needs of registrations.

    Names:
        NONE: a read may fail unless its sink has RDMA_READ_SINK.
        RDMA_READ_SINK_NOT_REQUIRED: a read works with any sink that can be written to.
    Source: NDK_ADAPTER_FLAG_* (contract J.11).
    """

    NONE = 0x0
    RDMA_READ_SINK_NOT_REQUIRED = 0x2


#: request_completion(request_context, status), as NDK_FN_REQUEST_COMPLETION.
RequestCompletion = Callable[[Any, NtStatus], object]

_ALL_FLAGS = (
    NdkFlags.ALLOW_LOCAL_WRITE | NdkFlags.ALLOW_REMOTE_READ | NdkFlags.ALLOW_REMOTE_WRITE | NdkFlags.RDMA_READ_SINK
)
_WRITING = NdkFlags.ALLOW_LOCAL_WRITE | NdkFlags.RDMA_READ_SINK

_STATUSES: tuple[tuple[type[BaseException], NtStatus], ...] = (
    (errors.InsufficientResourcesError, NtStatus.INSUFFICIENT_RESOURCES),
    (errors.AccessViolationError, NtStatus.ACCESS_VIOLATION),
    (errors.LimitExceededError, NtStatus.INVALID_PARAMETER),
    (errors.InvalidBufferError, NtStatus.INVALID_PARAMETER),
    (errors.UnsupportedError, NtStatus.NOT_SUPPORTED),
    (errors.DeviceRemovedError, NtStatus.DEVICE_REMOVED),
    (errors.DeviceBusyError, NtStatus.DEVICE_BUSY),
    (errors.CanceledError, NtStatus.CANCELLED),
    (errors.ClosedError, NtStatus.INVALID_DEVICE_STATE),
)


def _status_of(error: BaseException) -> NtStatus:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), NtStatus.UNSUCCESSFUL)


def adapter_flags(adapter: Adapter) -> NdkAdapterFlags:
    """Return the flags of NDK_ADAPTER_INFO that concern registration (contract J.11, J.12).

    Parameters:
        adapter: an adapter that ndpy opened.
    """
    if Capability.READ_SINK_REQUIRED in adapter.info.capabilities:
        return NdkAdapterFlags.NONE
    return NdkAdapterFlags.RDMA_READ_SINK_NOT_REQUIRED


_chains = threading.Lock()


def _renew_lock() -> None:
    global _chains
    _chains = threading.Lock()


in_child(_renew_lock)


class Mdl(Uncopied):
    """A memory descriptor list, or one link of a chain of them. It says where memory is, in addresses of this process.

    The attributes `virtual_address` and `byte_count` are what MmGetMdlVirtualAddress() and MmGetMdlByteCount() return.
    Parameters:
        memory: a buffer, which the MDL keeps alive, or (address, length) of memory that the caller keeps. The address
            may be 0.
        next: the MDL that follows. It cannot be changed while a registration of the chain is pending (contract J.17).
    Attributes:
        owner: the buffer. None for memory that the caller keeps.
        writable: whether the adapter may write there: whether the memory was locked for write access.
    Raises:
        InvalidBufferError: this is not a range of memory.
    """

    def __init__(self, memory: Any, next: Mdl | None = None) -> None:
        if isinstance(memory, tuple):
            self.owner: Any = None
            self.virtual_address, self.byte_count = memory
            self.writable = True
            if self.byte_count < 1 or self.virtual_address < 0 or self.virtual_address + self.byte_count > 1 << 64:
                raise errors.InvalidBufferError(
                    f"{self.byte_count} bytes at {self.virtual_address:#x} are not a range of memory"
                )
        else:
            self.owner, self.virtual_address, self.byte_count = buffer_range(memory, False)
            self.writable = not self.owner.readonly
        self._next = next
        self._pending = 0

    @property
    def next(self) -> Mdl | None:
        """The MDL that follows. None for the last one.

        Raises:
            DeviceBusyError: it is set while a registration of the chain is pending (contract J.17).
        """
        return self._next

    @next.setter
    def next(self, mdl: Mdl | None) -> None:
        with _chains:
            if self._pending:
                raise errors.DeviceBusyError(
                    "the chain belongs to a registration that is pending; change it after the callback",
                    operation="change an MDL",
                )
            self._next = mdl

    def __iter__(self) -> Iterator[Mdl]:
        """Iterate over this MDL and those that follow."""
        mdl: Mdl | None = self
        while mdl is not None:
            yield mdl
            mdl = mdl._next

    def __repr__(self) -> str:
        return f"<Mdl of {self.byte_count} bytes at {self.virtual_address:#x}{', ...' if self._next else ''}>"


def _covering(mdl: Mdl, length: int) -> list[Mdl] | None:
    """Return the MDLs with the first `length` bytes of a chain.
    None if the chain is shorter, or has a gap before that.
    """
    links = []
    start = mdl.virtual_address
    left = length
    for link in mdl:
        if link.virtual_address != start:
            return None
        links.append(link)
        left -= link.byte_count
        if left <= 0:
            return links
        start += link.byte_count
    return None


class _Request:
    """One asynchronous request.
    Either the call that made it returns its status, or the callback gets it, never both.
    """

    def __init__(self, completion: RequestCompletion, context: Any) -> None:
        self._completion = completion
        self._context = context
        self._lock = threading.Lock()
        self._returned = False
        self._status: NtStatus | None = None

    def end(self, status: NtStatus) -> None:
        with self._lock:
            self._status = status
            if not self._returned:
                return
        try:
            self._completion(self._context, status)
        except Exception as error:
            # The thread that ended the request has no caller for it, and other work to do.
            report(error, f"the completion callback of an NDK request, {self._completion!r}")

    def status(self) -> NtStatus:
        """Return the status for the call to return."""
        with self._lock:
            self._returned = True
            return NtStatus.PENDING if self._status is None else self._status


class _State(enum.Enum):
    UNREGISTERED = enum.auto()
    REGISTERING = enum.auto()
    REGISTERED = enum.auto()
    DEREGISTERING = enum.auto()
    CLOSED = enum.auto()


class NdkMr(Uncopied):
    """NDK_MR: a memory region object. One piece of memory at a time can be registered with it, again and again.

    It is a model in user mode; see the module. All methods are safe from any thread.

    Parameters:
        adapter: an adapter that ndpy opened.
        fast_register: NdkCreateMr's argument. Only False works, since user mode has no fast-register work request
            (contract J.2).
    Raises:
        UnsupportedError: fast_register is True.
    Source: NDK_FN_CREATE_MR, NDK_FN_REGISTER_MR, NDK_FN_DEREGISTER_MR, NDK_FN_CLOSE_OBJECT.
    """

    def __init__(self, adapter: Adapter, *, fast_register: bool = False) -> None:
        if fast_register:
            raise errors.UnsupportedError(
                "fast registration is a work request of the kernel interface; user mode has register() only",
                operation="NdkCreateMr",
            )
        self.adapter = adapter
        self._lock = threading.Lock()
        self._state = _State.UNREGISTERED
        self._region: MemoryRegion | None = None
        self._registering: Pending[Any] | None = None
        renew_in_child(self)

    def _on_forked(self) -> None:
        self._lock = threading.Lock()

    @property
    def region(self) -> MemoryRegion | None:
        """The region, to use with queue pairs. None unless memory is registered."""
        return self._region

    @property
    def local_token(self) -> int:
        """What NdkGetLocalTokenFromMr returns. Raises ClosedError unless memory is registered."""
        return self._registered().local_token

    @property
    def remote_token(self) -> int:
        """What NdkGetRemoteTokenFromMr returns. Raises ClosedError unless memory is registered."""
        return self._registered().remote_token

    def _registered(self) -> MemoryRegion:
        region = self._region
        if region is None:
            raise errors.ClosedError(f"{self!r} has no token")
        return region

    def register(
        self,
        mdl: Mdl,
        length: int,
        flags: int,
        request_completion: RequestCompletion,
        request_context: Any = None,
    ) -> NtStatus:
        """Register the first `length` bytes that a chain of MDLs describes. They have to be virtually contiguous.

        The region starts at the address of the first MDL. The chain behind `length` bytes is ignored. Buffers stay
        alive, and in their place, until they are deregistered.

        The callback is called only after PENDING: once, by another thread, perhaps before this call has returned. It
        must not wait. What it raises goes to sys.unraisablehook. The chain must not be touched before that.

        Parameters:
            mdl: the first MDL of the chain.
            length: the number of bytes.
            flags: NdkFlags.
            request_completion: the callback, request_completion(request_context, status).
            request_context: the callback's first argument.
        Returns:
            SUCCESS: the memory is registered. The callback is not called.
            PENDING: the callback will get the status.
            INVALID_PARAMETER: a gap, fewer bytes than `length`, the address 0, or unknown flags.
            ACCESS_VIOLATION: the memory is not mapped, or it is read-only and the flags need writing.
            INVALID_DEVICE_STATE: memory is registered already.
            INSUFFICIENT_RESOURCES and others: the adapter failed. The callback may get these instead.
        Source: contract J.1 to J.17.
        """
        if length < 1 or int(flags) & ~int(_ALL_FLAGS) or not mdl.virtual_address:
            return NtStatus.INVALID_PARAMETER
        links = _covering(mdl, length)
        if links is None:
            return NtStatus.INVALID_PARAMETER
        if int(flags) & _WRITING and not all(link.writable for link in links):
            return NtStatus.ACCESS_VIOLATION
        with self._lock:
            if self._state is not _State.UNREGISTERED:
                return NtStatus.INVALID_DEVICE_STATE
            self._state = _State.REGISTERING
        request = _Request(request_completion, request_context)
        chain = _claim(mdl)

        def on_end(pending: Pending[MemoryRegion]) -> None:
            _disclaim(chain)
            request.end(self._take_region(pending))

        try:
            pending = self.adapter.begin_register(_memory(links, length), Access(int(flags)))
        except BaseException as error:
            _disclaim(chain)
            self._set(_State.UNREGISTERED)
            if not isinstance(error, errors.NdpyError):
                raise
            return _status_of(error)
        self._registering = pending
        pending.add_done_callback(on_end)
        return request.status()

    def _take_region(self, pending: Pending[MemoryRegion]) -> NtStatus:
        with self._lock:
            self._registering = None
            closed = self._state is _State.CLOSED
            try:
                region = pending.result(0)
            except Exception as error:
                self._state = _State.CLOSED if closed else _State.UNREGISTERED
                return _status_of(error)
            if not closed:
                self._region = region
                self._state = _State.REGISTERED
                return NtStatus.SUCCESS
        region.close()
        return NtStatus.CANCELLED

    def deregister(self, request_completion: RequestCompletion, request_context: Any = None) -> NtStatus:
        """Undo register(). Its tokens become invalid, and other memory can be registered.

        Parameters:
            request_completion: the callback; see register().
            request_context: the callback's first argument.
        Returns:
            SUCCESS and PENDING: as in register().
            DEVICE_BUSY: a window is bound to the region. Nothing has changed.
            INVALID_DEVICE_STATE: no memory is registered.
        Source: NDK_FN_DEREGISTER_MR (contract J.19).
        """
        with self._lock:
            region = self._region
            if self._state is not _State.REGISTERED or region is None:
                return NtStatus.INVALID_DEVICE_STATE
            self._state = _State.DEREGISTERING
        request = _Request(request_completion, request_context)

        def on_end(pending: Pending[None]) -> None:
            try:
                pending.result(0)
            except Exception as error:
                self._set(_State.REGISTERED)
                request.end(_status_of(error))
                return
            self._region = None
            self._set(_State.UNREGISTERED)
            request.end(NtStatus.SUCCESS)

        try:
            pending = region.begin_deregister()
        except BaseException as error:
            self._set(_State.REGISTERED)
            if not isinstance(error, errors.NdpyError):
                raise
            return _status_of(error)
        pending.add_done_callback(on_end)
        return request.status()

    def close(self) -> None:
        """Close it, as NdkCloseMr: cancel a pending registration with CANCELLED, and deregister.

        Closing again does nothing.

        Raises:
            DeviceBusyError: a window is bound to the region. Nothing has changed.
        """
        with self._lock:
            region, registering = self._region, self._registering
            former, self._state = self._state, _State.CLOSED
        if registering is not None:
            registering.cancel()
        if region is not None:
            try:
                region.close()
            except errors.DeviceBusyError:
                self._state = former
                raise
            self._region = None

    def _set(self, state: _State) -> None:
        with self._lock:
            if self._state is not _State.CLOSED:
                self._state = state

    def __enter__(self) -> NdkMr:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            # The garbage collector may be closing the generator or coroutine of the block.
            self.adapter._events.call_soon(self.close)
        else:
            self.close()

    def __repr__(self) -> str:
        return f"<NdkMr {self._state.name.lower()}>"


def _claim(mdl: Mdl) -> list[Mdl]:
    """Mark all MDLs of a chain as part of a pending registration. The chain may be circular."""
    chain: dict[int, Mdl] = {}
    with _chains:
        for link in mdl:
            if id(link) in chain:
                break
            chain[id(link)] = link
            link._pending += 1
    return list(chain.values())


def _disclaim(chain: list[Mdl]) -> None:
    with _chains:
        for link in chain:
            link._pending -= 1


def _memory(links: list[Mdl], length: int) -> Any:
    """Return the first `length` bytes in the form that Adapter.begin_register() takes."""
    address = links[0].virtual_address
    owners = [link.owner for link in links if link.owner is not None]
    if not owners:
        return address, length
    memory = (ctypes.c_ubyte * length).from_address(address)
    # The adapter keeps the array as long as it uses the memory, even if the registration is cancelled meanwhile.
    memory.owners = owners  # type: ignore[attr-defined]
    return memory
