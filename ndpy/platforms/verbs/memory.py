"""Regions and windows on Linux."""

from __future__ import annotations

import errno
import os
import resource
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.objects import cuda
from ndpy.objects.memory import MemoryRegion, MemoryWindow
from ndpy.objects.pending import Pending
from ndpy.objects.resource import next_serial
from ndpy.platforms.verbs import softverbs
from ndpy.platforms.verbs.native_calls import check, check_pointer, ffi, free_once, free_region, lib
from ndpy.vocabulary import system_files
from ndpy.vocabulary.flags import Access, Capability
from ndpy.vocabulary.gpus import has_peer_module
from ndpy.vocabulary.quirks import Quirk

if TYPE_CHECKING:
    from ndpy.objects.adapter import Adapter
    from ndpy.objects.arrays import ArrayMemory
    from ndpy.platforms.verbs.adapter import VerbsAdapter

# Plain integers: an operation on members of an IntFlag takes a microsecond.
_LOCAL_WRITE = int(Access.LOCAL_WRITE)
_REMOTE_READ = int(Access.REMOTE_READ)
_REMOTE_WRITE_ALONE = Access.REMOTE_WRITE.value & ~_LOCAL_WRITE
_ATOMIC_ALONE = Access.REMOTE_ATOMIC.value & ~_LOCAL_WRITE
_READ_SINK = int(Access.READ_SINK)
_ON_DEMAND = int(Access.ON_DEMAND)
_RELAXED_ORDERING = int(Access.RELAXED_ORDERING)
# Each Access with its ibv_access_flags, which the headers may lack.
_FLUSHES = ((int(Access.FLUSH_GLOBAL), 1 << 8), (int(Access.FLUSH_PERSISTENT), 1 << 9))
# SIZE_MAX, the length of an implicit region.
EVERYTHING = (1 << 64) - 1

MEMLOCK_REMEDY = (
    "raise it with `ulimit -l unlimited`, 'memlock' in /etc/security/limits.conf, LimitMEMLOCK= of a systemd unit, or "
    "`docker run --ulimit memlock=-1`"
)


def native_access(access: int, iwarp: bool) -> int:
    """Access as ibv_access_flags."""
    access = int(access)
    native = 0
    if access & _LOCAL_WRITE:
        native |= lib.IBV_ACCESS_LOCAL_WRITE
    if access & _REMOTE_READ:
        native |= lib.IBV_ACCESS_REMOTE_READ
    if access & _REMOTE_WRITE_ALONE:
        native |= lib.IBV_ACCESS_REMOTE_WRITE
    if access & _ATOMIC_ALONE:
        native |= lib.IBV_ACCESS_REMOTE_ATOMIC
    if access & _READ_SINK:
        native |= lib.IBV_ACCESS_LOCAL_WRITE | (lib.IBV_ACCESS_REMOTE_WRITE if iwarp else 0)
    if access & _ON_DEMAND:
        native |= lib.IBV_ACCESS_ON_DEMAND
    if access & _RELAXED_ORDERING:
        native |= lib.IBV_ACCESS_RELAXED_ORDERING
    for right, flag in _FLUSHES:
        if access & right:
            native |= flag
    return int(native)


def registration_error(number: int, address: int, length: int, access: int) -> errors.ProviderError | None:
    """The exception for an ibv_reg_mr() that failed, or None if only the number is known."""
    if number in (errno.ENOMEM, errno.EAGAIN):
        return memlock_error(number, length)
    if number == errno.EFAULT:
        writable = " and writable" if access & Access.LOCAL_WRITE else ""
        return errors.AccessViolationError(
            f"the {length} bytes at {address:#x} are not all mapped{writable}",
            operation="register",
            native=number,
            problem="bad-address",
        )
    return None


def memlock_error(number: int, length: int) -> errors.ProviderError:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = _status_kib("VmPin") + _status_kib("VmLck")
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    message = f"{length} bytes could not be pinned: RLIMIT_MEMLOCK is {limit}, {pinned} KiB are pinned already"
    if soft != resource.RLIM_INFINITY and pinned * 1024 + length > soft:
        more = "" if hard == soft else f" (this process may go to {'unlimited' if hard < 0 else f'{hard // 1024} KiB'})"
        message += f"; {MEMLOCK_REMEDY}{more}"
    else:
        message += "; the system or the adapter is short of memory or of registrations (dmesg may say which)"
    return errors.InsufficientResourcesError(message, operation="register", native=number, problem="memlock")


def _status_kib(name: str) -> int:
    lines = system_files.read(system_files.path("/proc/self/status")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def plain_rights(adapter: VerbsAdapter) -> tuple[int, ...]:
    """The ibv_access_flags for each Access that every adapter supports. The Access is the index."""
    return tuple(_rights(adapter, access) for access in range(_READ_SINK << 1))


def _rights(adapter: VerbsAdapter, access: int, windows: bool = True) -> int:
    if Quirk.RXE_ON_DEMAND_OFFSET in adapter._quirks:
        # Such memory is pinned like any other.
        access &= ~Access.ON_DEMAND
    rights = native_access(access, Quirk.IWARP_READ_SINK_NEEDS_REMOTE_WRITE in adapter._quirks)
    if windows and Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        rights |= lib.IBV_ACCESS_MW_BIND
    return rights


def register_pages(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
    """Make an ibv_mr of mapped memory."""
    start = ffi.cast("void *", address)
    _register_with_or_without_windows(
        adapter, address, length, access, lambda rights: lib.ndpy_register(adapter._domain, start, length, rights, out)
    )


def register_at(start: int) -> NativeCall:
    """Return a function that makes an ibv_mr of the memory from `start` on, at the address that the function is
    given.
    """

    def register(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
        memory = ffi.cast("void *", start)
        _register_with_or_without_windows(
            adapter,
            start,
            length,
            access,
            lambda rights: lib.ndpy_register_at(adapter._domain, memory, length, address, rights, out),
        )

    return register


def _register_with_or_without_windows(
    adapter: VerbsAdapter, address: int, length: int, access: Access, call: Callable[[int], int]
) -> None:
    number = call(_rights(adapter, access))
    if number and _may_be_the_windows(number, access):
        number = call(_rights(adapter, access, windows=False))
    if number:
        raise registration_error(number, address, length, access) or errors.from_errno("register", number)


def _may_be_the_windows(number: int, access: Access) -> bool:
    """Whether registering may succeed without the right to bind windows.

    For the kernel this right includes the right to write, and pages that are mapped read-only cannot give that. A
    driver may have windows for pinned memory only.
    """
    if access & Access.ON_DEMAND:
        return number in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP)
    return number == errno.EFAULT and not access & Access.LOCAL_WRITE


def register_everything(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
    """Make an ibv_mr of the whole address space."""
    check(
        "register implicit",
        lib.ndpy_register(adapter._domain, ffi.NULL, length, _rights(adapter, access, windows=False), out),
    )


def register_null(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
    """Make an ibv_mr without memory."""
    check("register null", lib.ndpy_register_null(adapter._domain, out))


def register_dmabuf(fd: int, offset: int) -> NativeCall:
    """Return a function that makes an ibv_mr of this part of a dma-buf, at the address that the function is given."""

    def register(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> object:
        rights = native_access(access, Quirk.IWARP_READ_SINK_NEEDS_REMOTE_WRITE in adapter._quirks)
        number = lib.ndpy_register_dmabuf(adapter._domain, offset, length, address, fd, rights, out)
        if number:
            raise errors.from_errno("register dma-buf", number, _of_dmabuf(number, fd, offset, length))
        # The kernel takes no dma-buf with the right to bind them.
        return WITHOUT_WINDOWS

    return register


def _of_dmabuf(number: int, fd: int, offset: int, length: int) -> str:
    """What was not registered, as the beginning of a message."""
    part = f"{length} bytes at offset {offset} of descriptor {fd}"
    if number == errno.EINVAL:
        size = os.fstat(fd).st_size
        if offset + length > size > 0:
            return f"{part}, which has {size} bytes"
        return f"{part}, which is not a dma-buf or does not give these rights"
    if number == errno.EOPNOTSUPP:
        return f"{part}, which the adapter cannot reach"
    return part


def register_on_device(memory: ArrayMemory) -> NativeCall:
    """Return a function that makes an ibv_mr of an array in memory of a CUDA device, when its contents are there."""

    def register(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> object:
        found = cuda.find(address, length)
        found.synchronize(memory.device.stream)
        if not found.is_of_host and Capability.DMABUF in adapter.info.capabilities:
            return _register_exported(found, adapter, address, length, access, out)
        if not found.is_of_host and not _finds_by_address(adapter):
            raise errors.UnsupportedError(
                f"{adapter.info.name} ({adapter.info.driver}) takes no dma-buf, and the module nvidia_peermem is not "
                "loaded, so it cannot reach memory of a device: `modprobe nvidia_peermem`, or copy the array to the "
                "host's memory",
                operation="register",
                problem=cuda.PROBLEM,
            )
        register_pages(adapter, address, length, access, out)
        return None

    return register


def _finds_by_address(adapter: VerbsAdapter) -> bool:
    """Whether the adapter finds a device's memory by its address. soft0 asks the driver's library itself."""
    return adapter.info.driver == softverbs.DRIVER or has_peer_module()


def _register_exported(
    found: cuda.Range, adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any
) -> object:
    try:
        fd, offset = found.export()
    except errors.ProviderError as failure:
        if not _finds_by_address(adapter):
            raise
        try:
            register_pages(adapter, address, length, access, out)
        except errors.NdpyError as error:
            # It knows more of the memory.
            raise failure from error
        return None
    try:
        return register_dmabuf(fd, offset)(adapter, address, length, access, out)
    finally:
        os.close(fd)


def _as_region(handle: int) -> Any:
    return ffi.cast("struct ibv_mr *", handle)


#: What makes an ibv_mr: call(adapter, address, length, access, out). It may return WITHOUT_WINDOWS.
NativeCall = Callable[["VerbsAdapter", int, int, Access, Any], object]
#: No window can be bound to it.
WITHOUT_WINDOWS = object()


class VerbsMemoryRegion(MemoryRegion):
    _adapter: VerbsAdapter
    _native_call: NativeCall = staticmethod(register_pages)

    def _registered_by(self, call: NativeCall, elsewhere: bool = False) -> VerbsMemoryRegion:
        """Register it by another call than that for pages. Returns the region.

        elsewhere: whether the addresses of its elements are not those of its memory in this process.
        """
        self._native_call = call
        self._is_elsewhere = elsewhere
        self._register_now()
        return self

    def _native_is_on_device(self, memory: ArrayMemory) -> None:
        self._native_call = register_on_device(memory)
        self._is_elsewhere = True

    def _native_register(self) -> None:
        # Ctrl-C may raise between any two lines here.
        out = ffi.new("struct ndpy_registration *")
        try:
            made = self._native_call(self._adapter, self.address, self.length, self.access, out)
        finally:
            if out.region:
                self._handle = out.region
        self._has_windows = made is not WITHOUT_WINDOWS
        self._read_tokens()

    @property
    def _native(self) -> Any:
        return _as_region(self._handle) if self._handle else None

    def _read_tokens(self) -> None:
        native = self._native
        self.local_token = native.lkey
        self.remote_token = native.rkey

    def _native_begin_register(self) -> Pending[Any]:
        return self._adapter._registering.begin(self)

    def _native_deregister(self) -> None:
        free_once(self, "_handle", "deregister", lambda handle: lib.ibv_dereg_mr(_as_region(handle)), 0)

    def _native_free(self) -> None:
        native = self._native
        if native is None:
            return
        self._handle = 0
        number = free_region(native)
        if number:
            # The adapter may still write there.
            self._keep_memory()
            message = (
                f"the provider refuses twice to deregister {self.length} bytes at {self.address:#x}, whose "
                "registration did not succeed: "
                f"{errno.errorcode.get(number, 'errno')} ({number}, {os.strerror(number)}); "
                "they stay registered until this process ends, and their memory stays with them"
            )
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def _native_reregister(
        self, owner: Any, memory: tuple[int, int] | None, access: Access | None, domain: Adapter | None
    ) -> None:
        flags = native = 0
        native_domain = ffi.NULL
        if domain is not None:
            flags |= lib.IBV_REREG_MR_CHANGE_PD
            native_domain = domain._domain  # type: ignore[attr-defined]
        if memory is not None:
            flags |= lib.IBV_REREG_MR_CHANGE_TRANSLATION
        if access is not None:
            flags |= lib.IBV_REREG_MR_CHANGE_ACCESS
            native = _rights(self._adapter, access)
        # libibverbs refuses an address without CHANGE_TRANSLATION, and rights without CHANGE_ACCESS.
        address, length = memory or (0, 0)
        former = self._owner
        # Before the call: Ctrl-C may come when the adapter uses the new memory already. reregister() makes it usable
        # again.
        self._mark_unusable(owner)
        result = lib.ibv_rereg_mr(self._native, flags, native_domain, ffi.cast("void *", address), length, native)
        # DO_FORK_OLD: the new region is valid, and the old memory stays hidden from forked children.
        if result not in (0, lib.IBV_REREG_MR_ERR_DO_FORK_OLD):
            number = ffi.errno
            if result in (lib.IBV_REREG_MR_ERR_INPUT, lib.IBV_REREG_MR_ERR_DONT_FORK_NEW):
                self._owner = former
                self._mark_still_open()
            address, length = memory or (self.address, self.length)
            rights = self.access if access is None else access
            raise registration_error(number, address, length, rights) or errors.from_errno("reregister", number)
        self._read_tokens()

    def _native_prefetch(self, address: int, length: int, write: bool) -> None:
        if Quirk.RXE_ON_DEMAND_OFFSET in self._adapter._quirks:
            # The memory is pinned.
            return
        number = lib.ndpy_prefetch(self._native, address, length, int(write))
        if number == errno.EFAULT:
            raise registration_error(number, address, length, self.access) or errors.from_errno("prefetch", number)
        check("prefetch", number, f"{self._adapter.info.name} did not prefetch {length} bytes at {address:#x}")

    def _mark_unusable(self, owner: Any) -> None:
        """The adapter may use the old memory, the new memory, or neither. Keep both. The region can only be closed."""
        self._owner = (self._owner, owner)
        message = f"{self._describe()} was not registered again and has no memory; close it and make a new one"
        self._defunct = lambda: errors.ProviderError(message, operation="reregister")


class VerbsMemoryWindow(MemoryWindow):
    """bind() allocates the native window, so that the window is younger than its queue pair.

    When a process dies, the kernel frees the youngest object first. Some drivers must not destroy a queue pair while a
    window is bound to it (Quirk.RXE_WINDOW_OUTLIVES_QUEUE_PAIR).
    """

    _adapter: VerbsAdapter

    def _native_create(self) -> Any:
        self._is_of_type_1 = Capability.TYPE_1_WINDOWS in self._adapter.info.capabilities
        #: The innermost lock. Three may use the native window at once: this object, its queue pair, which frees it too,
        #: and a thread that takes the completion of a failed bind.
        self._using = threading.Lock()
        self._born = 0
        self._key = 0
        self._last_key = 0
        #: Of type 1: the provider's key before the last bind.
        self._former_key = 0
        return None

    def _prepare(self, queue_pair_serial: int) -> None:
        """Make a new native window, unless this one is younger than the queue pair and has an unused key left."""
        if self._native is not None:
            if self._born > queue_pair_serial and (self._key + 1) & 0xFF != self._last_key & 0xFF:
                return
            self._native_free()
        kind = lib.IBV_MW_TYPE_1 if self._is_of_type_1 else lib.IBV_MW_TYPE_2
        self._native = check_pointer("bind", lib.ndpy_alloc_window(self._adapter._domain, kind))
        self._born = next_serial()
        self._key = self._last_key = self._native.rkey

    def _next_key(self) -> int:
        """The token for the next binding. The program chooses the low byte of an rkey, and the provider the rest."""
        self._key = (self._key & ~0xFF) | ((self._key + 1) & 0xFF)
        return self._key

    def _return_key(self, key: int) -> None:
        """Take back the last key that _next_key() gave: the bind with it was not posted."""
        self._key = (key & ~0xFF) | ((key - 1) & 0xFF)

    def _replace_key(self, present: int, key: int) -> None:
        """Correct the key by which the provider finds the window. The result of a posted bind decides which it is."""
        with self._using:
            if self._native is not None and self._native.rkey == present:
                self._native.rkey = key

    def _native_free(self) -> None:
        with self._using:
            free_once(self, "_native", "close window", lib.ndpy_free_window)

    def _on_forked(self) -> None:
        super()._on_forked()
        self._using = threading.Lock()
