"""Regions, windows and allocation on Linux."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.flags import Access, Capability
from ndpy.info import AdapterInfo
from ndpy.memory import MemoryRegion, MemoryWindow, is_written
from ndpy.pending import Pending
from ndpy.resource import _serials
from ndpy.verbs.native_calls import check, check_pointer, ffi, lib

if TYPE_CHECKING:
    from ndpy.verbs.adapter import VerbsAdapter

# Plain integers: an operation on members of an IntFlag takes a microsecond.
_LOCAL_WRITE = int(Access.LOCAL_WRITE)
_REMOTE_READ = int(Access.REMOTE_READ)
_REMOTE_WRITE_ALONE = Access.REMOTE_WRITE.value & ~_LOCAL_WRITE
_ATOMIC_ALONE = Access.REMOTE_ATOMIC.value & ~_LOCAL_WRITE
_READ_SINK = int(Access.READ_SINK)
_ON_DEMAND = int(Access.ON_DEMAND)
_UNKNOWN = ~(
    _LOCAL_WRITE
    | _REMOTE_READ
    | _REMOTE_WRITE_ALONE
    | _ATOMIC_ALONE
    | _READ_SINK
    | _ON_DEMAND
    | int(Access.DO_NOT_SECURE_VM)
)
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
        # An iWARP read is answered by a write to the sink's remote token.
        native |= lib.IBV_ACCESS_LOCAL_WRITE | (lib.IBV_ACCESS_REMOTE_WRITE if iwarp else 0)
    if access & _ON_DEMAND:
        native |= lib.IBV_ACCESS_ON_DEMAND
    return int(native)


def validate_access(access: int, info: AdapterInfo) -> Access:
    """The rights; InvalidFlagsError for bits that are none, UnsupportedError for what the adapter has not."""
    bits = int(access)
    if bits & _UNKNOWN:
        raise errors.InvalidFlagsError(f"register: {bits:#x} has bits that are no Access flags")
    if bits & _ON_DEMAND and Capability.ON_DEMAND_PAGING not in info.capabilities:
        raise errors.UnsupportedError(
            f"{info.name} ({info.driver}) has no on-demand paging; register without Access.ON_DEMAND",
            operation="register",
        )
    return Access(access)


def registration_error(number: int, address: int, length: int, access: int) -> errors.ProviderError | None:
    """What a failed ibv_reg_mr() means."""
    if number in (errno.ENOMEM, errno.EAGAIN):
        return memlock_error(number, length)
    if number == errno.EFAULT:
        writable = " and writable" if access & Access.LOCAL_WRITE else ""
        return errors.AccessViolationError(
            f"the {length} bytes at {address:#x} are not all mapped{writable}", operation="register", native=number
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
    return errors.InsufficientResourcesError(message, operation="register", native=number)


def _status_kib(name: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def _rights(adapter: VerbsAdapter, access: Access, windows: bool = True) -> int:
    if adapter.info.driver == "rdma_rxe":
        # Its on-demand paging moves data to and from the start of the page, whatever the address (rxe_odp.c,
        # __rxe_odp_mr_copy(), seen on Linux 7.2.13): such memory is pinned like any other.
        access &= ~Access.ON_DEMAND
    rights = native_access(access, adapter.info.transport == "iWARP")
    if windows and Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        rights |= lib.IBV_ACCESS_MW_BIND
    return rights


def register_pages(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
    """Make an ibv_mr of mapped memory."""
    start = ffi.cast("void *", address)
    number = lib.ndpy_register(adapter._domain, start, length, _rights(adapter, access), out)
    if number and _may_be_the_windows(number, access):
        number = lib.ndpy_register(adapter._domain, start, length, _rights(adapter, access, windows=False), out)
    if number:
        raise registration_error(number, address, length, access) or errors.from_errno("register", number)
    adapter._registering.took(length, out.nanoseconds)


def _may_be_the_windows(number: int, access: Access) -> bool:
    """Whether it may go without windows. For the kernel the right to bind them is a right to write, which pages mapped
    read-only cannot give; a driver may have them for pinned memory only."""
    if access & Access.ON_DEMAND:
        return number in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP)
    return number == errno.EFAULT and not access & Access.LOCAL_WRITE


def register_everything(adapter: VerbsAdapter, address: int, length: int, access: Access, out: Any) -> None:
    """Make an ibv_mr of the whole address space."""
    check(
        "register implicit",
        lib.ndpy_register(adapter._domain, ffi.NULL, length, _rights(adapter, access, windows=False), out),
    )


class VerbsMemoryRegion(MemoryRegion):
    _adapter: VerbsAdapter

    def __init__(
        self,
        adapter: VerbsAdapter,
        owner: Any,
        buffer: Any,
        address: int,
        length: int,
        access: Access,
        register: Callable[[VerbsAdapter, int, int, Access, Any], None] = register_pages,
    ) -> None:
        super().__init__(adapter, buffer, address, length, access)
        self._owner = owner
        # Ctrl-C may raise between any two lines here.
        out = ffi.new("struct ndpy_registration *")
        try:
            register(adapter, address, length, access, out)
            self._native = out.region
            self._take_tokens()
            self._opened()
        except BaseException:
            if out.region != ffi.NULL and self._released:
                lib.ibv_dereg_mr(out.region)
            raise

    def _take_tokens(self) -> None:
        self.local_token = self._native.lkey
        self.remote_token = self._native.rkey

    def _reregister(self, buffer: Any, access: Access | None) -> None:
        adapter = self._adapter
        owner, new, address, length, rights = adapter._memory(
            self.buffer if buffer is None else buffer, self.access if access is None else access
        )
        flags = native = 0
        if buffer is not None:
            flags |= lib.IBV_REREG_MR_CHANGE_TRANSLATION
        if access is not None:
            flags |= lib.IBV_REREG_MR_CHANGE_ACCESS
            native = _rights(adapter, rights)
        if not flags:
            return
        # libibverbs takes no address without CHANGE_TRANSLATION, and no rights without CHANGE_ACCESS.
        start = ffi.cast("void *", 0 if buffer is None else address)
        result = lib.ibv_rereg_mr(self._native, flags, ffi.NULL, start, 0 if buffer is None else length, native)
        # The last one: the new region is valid, and the old memory stays hidden from forked children.
        if result not in (0, lib.IBV_REREG_MR_ERR_DO_FORK_OLD):
            number = ffi.errno
            if result not in (lib.IBV_REREG_MR_ERR_INPUT, lib.IBV_REREG_MR_ERR_DONT_FORK_NEW):
                self._spoil(owner)
            raise registration_error(number, address, length, rights) or errors.from_errno("reregister", number)
        self.buffer, self.address, self.length, self.access = new, address, length, rights
        self._writable = is_written(rights)
        self._owner = owner
        self._take_tokens()

    def _spoil(self, owner: Any) -> None:
        """The adapter may use the old memory, the new, or none: both stay, and the region can only be closed."""
        self._owner = (self._owner, owner)
        message = f"{self._describe()} failed to be registered again and has no memory; close it and make a new one"
        self._defunct = lambda: errors.ProviderError(message, operation="reregister")

    def begin_deregister(self) -> Pending[None]:
        pending: Pending[None] = Pending("deregister")
        self.close()
        pending.succeed(None)
        return pending

    def _release(self) -> None:
        check("deregister", lib.ibv_dereg_mr(self._native))
        self._native = None
        # Before the buffer goes: who posts looks at the buffer first.
        self._defunct = self._closed_error
        # Only now may it go: an exported memoryview keeps a bytearray from moving, a mmap from closing.
        self._owner = None


class VerbsMemoryWindow(MemoryWindow):
    """The native window is allocated at bind time, so that it is younger than its queue pair: when a process dies, the
    kernel frees the youngest first, and rxe hangs for 51 s destroying a queue pair with a window still bound to it."""

    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter) -> None:
        super().__init__(adapter)
        self._native: Any = None
        #: Its queue pair frees it too, and a failed bind is undone by whoever takes its completion. Innermost.
        self._using = threading.Lock()
        self._born = 0
        self._key = 0
        self._last_key = 0
        self._opened()

    def _prepare(self, queue_pair_serial: int) -> None:
        """Have a native window that is younger than the queue pair, and has a key left that it never had."""
        if self._native is not None:
            if self._born > queue_pair_serial and (self._key + 1) & 0xFF != self._last_key & 0xFF:
                return
            self._free()
        self._native = check_pointer("bind", lib.ndpy_alloc_window(self._adapter._domain))
        self._born = next(_serials)
        self._key = self._last_key = self._native.rkey

    def _next_key(self) -> int:
        """The token for the next binding: the low byte of an rkey is the consumer's to choose, the rest the provider's."""
        self._key = (self._key & ~0xFF) | ((self._key + 1) & 0xFF)
        return self._key

    def _return_key(self, key: int) -> None:
        """The bind with this key, the last that _next_key() gave, was not posted."""
        self._key = (key & ~0xFF) | ((key - 1) & 0xFF)

    def _replace_key(self, present: int, key: int) -> None:
        """The provider finds the window by another key than was thought when the bind was posted."""
        with self._using:
            if self._native is not None and self._native.rkey == present:
                self._native.rkey = key

    def _free(self) -> None:
        with self._using:
            if self._native is not None:
                check("close window", lib.ndpy_free_window(self._native))
                self._native = None

    def _on_forked(self) -> None:
        super()._on_forked()
        self._using = threading.Lock()

    def _release(self) -> None:
        self._free()
        if self._binding is not None:
            self._binding.end()
