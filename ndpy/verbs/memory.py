"""Regions, windows and allocation on Linux."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.flags import Access
from ndpy.memory import MemoryRegion, MemoryWindow
from ndpy.pending import Pending
from ndpy.resource import _serials
from ndpy.verbs.library import check, check_pointer, ffi, lib

if TYPE_CHECKING:
    from ndpy.verbs.adapter import VerbsAdapter

_REMOTE_WRITE_ALONE = Access.REMOTE_WRITE & ~Access.LOCAL_WRITE
_ATOMIC_ALONE = Access.REMOTE_ATOMIC & ~Access.LOCAL_WRITE
_KNOWN = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK | Access.REMOTE_ATOMIC

MEMLOCK_REMEDY = (
    "raise it with `ulimit -l unlimited`, 'memlock' in /etc/security/limits.conf, LimitMEMLOCK= of a systemd unit, or "
    "`docker run --ulimit memlock=-1`"
)


def native_access(access: int, iwarp: bool) -> int:
    """Access as ibv_access_flags."""
    native = 0
    if access & Access.LOCAL_WRITE:
        native |= lib.IBV_ACCESS_LOCAL_WRITE
    if access & Access.REMOTE_READ:
        native |= lib.IBV_ACCESS_REMOTE_READ
    if access & _REMOTE_WRITE_ALONE:
        native |= lib.IBV_ACCESS_REMOTE_WRITE
    if access & _ATOMIC_ALONE:
        native |= lib.IBV_ACCESS_REMOTE_ATOMIC
    if access & Access.READ_SINK:
        # An iWARP read is answered by a write to the sink's remote token.
        native |= lib.IBV_ACCESS_LOCAL_WRITE | (lib.IBV_ACCESS_REMOTE_WRITE if iwarp else 0)
    return int(native)


def validate_access(access: int) -> Access:
    """The rights, or InvalidFlagsError for bits that are none."""
    if access & ~(_KNOWN | Access.DO_NOT_SECURE_VM):
        raise errors.InvalidFlagsError(f"register: {access:#x} has bits that are no Access flags")
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


class VerbsMemoryRegion(MemoryRegion):
    _adapter: VerbsAdapter

    def __init__(
        self, adapter: VerbsAdapter, owner: Any, buffer: Any, address: int, length: int, access: Access
    ) -> None:
        super().__init__(adapter, buffer, address, length, access)
        self._owner = owner
        iwarp = adapter.info.transport == "iWARP"
        native = native_access(access, iwarp)
        if "MEMORY_WINDOWS" in adapter.info.flags:
            native |= lib.IBV_ACCESS_MW_BIND
        region = lib.ibv_reg_mr(adapter._domain, ffi.cast("void *", address), length, native)
        if region == ffi.NULL and ffi.errno == errno.EFAULT and not access & Access.LOCAL_WRITE:
            # For the kernel the right to bind windows is a right to write, which pages mapped read-only cannot give.
            native &= ~lib.IBV_ACCESS_MW_BIND
            region = lib.ibv_reg_mr(adapter._domain, ffi.cast("void *", address), length, native)
        self._native = check_pointer(
            "register", region, lambda number: registration_error(number, address, length, access)
        )
        self.local_token = self._native.lkey
        self.remote_token = self._native.rkey
        self._opened()

    def begin_deregister(self) -> Pending[None]:
        pending: Pending[None] = Pending("deregister")
        self.close()
        pending.succeed(None)
        return pending

    def _release(self) -> None:
        check("deregister", lib.ibv_dereg_mr(self._native))
        self._native = None
        # Only now may the buffer go: an exported memoryview keeps a bytearray from moving, a mmap from closing.
        self._owner = None


class VerbsMemoryWindow(MemoryWindow):
    """The native window is allocated at bind time, so that it is younger than its queue pair: when a process dies, the
    kernel frees the youngest first, and rxe hangs for 51 s destroying a queue pair with a window still bound to it."""

    _adapter: VerbsAdapter

    def __init__(self, adapter: VerbsAdapter) -> None:
        super().__init__(adapter)
        self._native: Any = None
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

    def _free(self) -> None:
        if self._native is not None:
            check("close window", lib.ndpy_free_window(self._native))
            self._native = None

    def _release(self) -> None:
        self._free()
        if self._binding is not None:
            self._binding.end()


_ADDRESS, _POINTER = ffi.typeof("uintptr_t"), ffi.typeof("char *")
_MAP_HUGETLB = 0x40000
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259, "s390x": 268, "riscv64": 235}


def address_of(view: memoryview) -> int:
    """The address of a contiguous view's first byte."""
    return int(ffi.cast(_ADDRESS, ffi.from_buffer(view)))


def pointer_of(view: memoryview) -> Any:
    """The same as a pointer, which keeps nothing."""
    return ffi.cast(_POINTER, ffi.from_buffer(view))


#: What it returns has a length in bytes, compares with pointers, and keeps the memory.
export = ffi.from_buffer


def allocate(length: int, alignment: int, huge_pages: bool, numa_node: int | None) -> memoryview:
    """ndpy.alloc() on Linux."""
    page = mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = -(-length // page) * page + (alignment if alignment > page else 0)
    if huge_pages:
        flags |= _MAP_HUGETLB
        huge = _huge_page_size()
        size = -(-size // huge) * huge
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        message = f"{size} bytes could not be mapped"
        if huge_pages:
            message += (
                f": no free huge pages of {_huge_page_size() // 1024} KiB; reserve some with `sysctl vm.nr_hugepages=N`"
            )
        raise errors.InsufficientResourcesError(message, operation="alloc", native=error.errno or 0) from None
    if numa_node is not None:
        _place(memory, size, numa_node)
    view = memoryview(memory)
    offset = -address_of(view) % alignment
    return view[offset : offset + length]


def _huge_page_size() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("Hugepagesize:"):
                return int(line.split()[1]) * 1024
    return 2 << 20


def _place(memory: mmap.mmap, size: int, node: int) -> None:
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise errors.UnsupportedError(
            f"memory cannot be placed on a NUMA node on {os.uname().machine}", operation="alloc"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    address = address_of(memoryview(memory))
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    if not 0 <= node < 1024:
        raise errors.UnsupportedError(f"there is no NUMA node {node}", operation="alloc")
    words = (ctypes.c_ulong * (1024 // bits))()
    words[node // bits] = 1 << (node % bits)
    result = libc.syscall(
        number,
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        _MPOL_BIND,
        words,
        ctypes.c_ulong(1025),
        ctypes.c_uint(0),
    )
    if result:
        code = ctypes.get_errno()
        raise errors.UnsupportedError(
            f"memory cannot be placed on NUMA node {node}: {os.strerror(code)}", operation="alloc", native=code
        )
