"""ndpy.alloc() on Windows."""

from __future__ import annotations

import ctypes
import mmap
import struct

from ndpy import errors
from ndpy.objects.memory import address_of
from ndpy.objects.resource import Owned
from ndpy.platforms.networkdirect.native_calls import ffi, lib, win32_error

_MEM_COMMIT_RESERVE = 0x3000
_MEM_LARGE_PAGES = 0x20000000
_MEM_RELEASE = 0x8000
_PAGE_READWRITE = 0x04
_NUMA_NO_PREFERRED_NODE = 0xFFFFFFFF
_INVALID_PARAMETER = 87
_PRIVILEGE_NOT_HELD = 1314

_TOKEN_ADJUST_PRIVILEGES = 0x20
_SE_PRIVILEGE_ENABLED = 2


def allocate(length: int, alignment: int, huge_pages: bool, numa_node: int | None) -> memoryview:
    page = _large_page_size() if huge_pages else mmap.PAGESIZE
    # Memory begins at an allocation granule, or at a large page.
    begin = max(page, mmap.ALLOCATIONGRANULARITY)
    size = -(-(length + (alignment if alignment > begin else 0)) // page) * page
    if huge_pages or numa_node is not None:
        view = _allocate_specially(size, huge_pages, numa_node)
    else:
        view = _allocate_plainly(size)
    offset = -address_of(view) % alignment
    return view[offset : offset + length]


def _allocate_plainly(size: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(-1, size))
    except (OSError, OverflowError) as failure:
        number = getattr(failure, "winerror", None) or 0
        raise errors.InsufficientResourcesError(
            f"{size} bytes could not be mapped", operation="alloc", native=number, native_name=""
        ) from None


def _allocate_specially(size: int, huge_pages: bool, numa_node: int | None) -> memoryview:
    kind = _MEM_COMMIT_RESERVE
    if huge_pages:
        kind |= _MEM_LARGE_PAGES
        _enable_large_pages()
    node = _NUMA_NO_PREFERRED_NODE if numa_node is None else _existing(numa_node)
    if size >= 1 << 63:
        raise errors.InsufficientResourcesError(f"{size} bytes could not be allocated", operation="alloc")
    memory = lib.VirtualAllocExNuma(ffi.cast("void *", -1), ffi.NULL, size, kind, _PAGE_READWRITE, node)
    if memory == ffi.NULL:
        raise _not_allocated(size, huge_pages, lib.GetLastError())
    bytes_of_memory = ffi.buffer(ffi.cast("char *", memory), size)
    return memoryview(Owned(lib.VirtualFree, (memory, 0, _MEM_RELEASE), bytes_of_memory))


def _not_allocated(size: int, huge_pages: bool, number: int) -> errors.ProviderError:
    if huge_pages and number == _INVALID_PARAMETER:
        return errors.UnsupportedError(
            "this system does not give large pages (MEM_LARGE_PAGES)", operation="alloc", native=number, native_name=""
        )
    message = f"{size} bytes could not be allocated"
    if number == _PRIVILEGE_NOT_HELD:
        message += (
            "; large pages need the right 'Lock pages in memory' (SeLockMemoryPrivilege): give it to the account in "
            "secpol.msc, under Local Policies, User Rights Assignment, and log on again"
        )
    failure = win32_error("alloc", number, message)
    return errors.InsufficientResourcesError(failure.message, operation="alloc", native=number, native_name="")


def _large_page_size() -> int:
    size = int(lib.GetLargePageMinimum())
    if not size:
        raise errors.UnsupportedError("this system has no large pages", operation="alloc")
    return size


def _existing(node: int) -> int:
    """Return the node. Raises if it does not exist: Windows would take another one without an error."""
    highest = ctypes.c_uint32()
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    kernel.GetNumaHighestNodeNumber(ctypes.byref(highest))
    if not 0 <= node <= highest.value:
        raise errors.UnsupportedError(
            f"there is no NUMA node {node}; the highest is {highest.value}", operation="alloc"
        )
    return node


def _enable_large_pages() -> None:
    """Switch on SeLockMemoryPrivilege, which is off at first. If this fails, VirtualAlloc says what is missing."""
    security = ctypes.WinDLL("advapi32")  # type: ignore[attr-defined, unused-ignore]
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    token, process = ctypes.c_void_p(), ctypes.c_void_p(-1)
    if not security.OpenProcessToken(process, _TOKEN_ADJUST_PRIVILEGES, ctypes.byref(token)):
        return
    identifier = ctypes.create_string_buffer(8)
    if security.LookupPrivilegeValueW(None, "SeLockMemoryPrivilege", identifier):
        # TOKEN_PRIVILEGES with one entry: the count, the identifier, the new state.
        wanted = struct.pack("<I8sI", 1, identifier.raw, _SE_PRIVILEGE_ENABLED)
        security.AdjustTokenPrivileges(token, False, wanted, 0, None, None)
    kernel.CloseHandle(token)
