"""ndpy.alloc() on Linux.

A forked child and its parent share pages until one of them writes. Then the writer gets a copy. If the parent writes,
its adapter still uses the old page. Linux 5.12 and later copies pinned pages for the child at once. On older kernels,
alloc() hides its memory from the child (MADV_DONTFORK). It does not if libibverbs hides registered memory itself
(RDMAV_FORK_SAFE).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

from ndpy import errors
from ndpy.objects.memory import address_of
from ndpy.platforms.verbs.native_calls import has_symbol, lib, load, softverbs_only
from ndpy.vocabulary import system_files

_MAP_HUGETLB = 0x40000
_MADV_POPULATE_WRITE = 23
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259, "s390x": 268, "riscv64": 235}
_MOST_NODES = 1024
_NODES = "/sys/devices/system/node"


def allocate(length: int, alignment: int, huge_pages: bool, numa_node: int | None) -> memoryview:
    page = _huge_page_size() if huge_pages else mmap.PAGESIZE
    # A mapping begins at a page boundary, of huge pages if it has them.
    size = -(-(length + (alignment if alignment > page else 0)) // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_HUGETLB if huge_pages else 0)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as failure:
        raise _not_mapped(size, page, huge_pages, getattr(failure, "errno", None) or errno.ENOMEM) from None
    if numa_node is not None:
        _place(memory, size, numa_node)
    if huge_pages:
        _populate(memory, size, page, numa_node)
    if _is_shared_with_children():
        memory.madvise(mmap.MADV_DONTFORK)
    view = memoryview(memory)
    offset = -address_of(view) % alignment
    return view[offset : offset + length]


def _not_mapped(size: int, page: int, huge_pages: bool, number: int) -> errors.ProviderError:
    message = f"{size} bytes could not be mapped"
    if huge_pages:
        message += (
            f": that is {size // page} huge pages of {page >> 10} KiB, and {_memory_info('HugePages_Free:')} are free, "
            f"{_memory_info('HugePages_Rsvd:')} of them promised to others; write more into /proc/sys/vm/nr_hugepages "
            "(`sysctl vm.nr_hugepages=N`)"
        )
    return errors.InsufficientResourcesError(message, operation="alloc", native=number)


def _memory_info(name: str) -> int:
    """A number of /proc/meminfo, or 0 if it is not there."""
    lines = system_files.read(system_files.path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _huge_page_size() -> int:
    kib = _memory_info("Hugepagesize:")
    if not kib:
        raise errors.UnsupportedError("this kernel has no huge pages", operation="alloc")
    return kib << 10


def _populate(memory: mmap.mmap, size: int, page: int, node: int | None) -> None:
    """Take the huge pages now. If the node or the control group has none left, the first use would end the process."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as failure:
        if failure.errno == errno.EINVAL:
            # Linux before 5.14.
            return
        folder = "/sys/kernel/mm" if node is None else f"{_NODES}/node{node}"
        where = "" if node is None else f" on NUMA node {node}"
        raise errors.InsufficientResourcesError(
            f"{size // page} huge pages of {page >> 10} KiB are not available{where}: "
            f"{folder}/hugepages/hugepages-{page >> 10}kB/free_hugepages says how many are; write more into "
            "nr_hugepages beside it, unless hugetlb.*.max of the control group is the limit",
            operation="alloc",
            native=failure.errno or 0,
        ) from None


def _is_shared_with_children() -> bool:
    """Whether a fork() endangers registered memory."""
    if softverbs_only():
        # It pins nothing.
        return False
    try:
        load()
    except errors.ProviderNotFoundError:
        # No adapter will use the memory.
        return False
    # A library without the symbol is old, so its kernel is probably old too.
    return not has_symbol(b"ibv_is_fork_initialized") or lib.ibv_is_fork_initialized() == lib.IBV_FORK_DISABLED


def _place(memory: mmap.mmap, size: int, node: int) -> None:
    machine = os.uname().machine
    number = _SYS_MBIND.get(machine)
    if number is None:
        raise errors.UnsupportedError(f"memory cannot be placed on a NUMA node on {machine}", operation="alloc")
    if not 0 <= node < _MOST_NODES or not system_files.path(_NODES, f"node{node}").exists():
        raise errors.UnsupportedError(f"there is no NUMA node {node}; there is {_nodes()}", operation="alloc")
    code = _bind(number, memory, size, node)
    if code:
        raise errors.UnsupportedError(
            f"memory cannot be placed on NUMA node {node}: {os.strerror(code)}", operation="alloc", native=code
        )


def _nodes() -> str:
    return system_files.read(system_files.path(_NODES, "online")) or "none, the kernel knows no nodes"


def _bind(number: int, memory: mmap.mmap, size: int, node: int) -> int:
    """Call mbind(2), which the C library lacks. Returns 0 or an errno."""
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    nodes: Any = (ctypes.c_ulong * (_MOST_NODES // bits))()
    nodes[node // bits] = 1 << (node % bits)
    # The kernel uses one bit less than this number.
    limit = _MOST_NODES + 1
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(address_of(memoryview(memory)))
    length = ctypes.c_ulong(size)
    if libc.syscall(number, address, length, _MPOL_BIND, nodes, ctypes.c_ulong(limit), ctypes.c_uint(0)):
        return ctypes.get_errno()
    return 0
