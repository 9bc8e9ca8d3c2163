"""The page of a siw context that no queue may begin at (Quirk.SIW_REFUSES_A_PAGE).

Queues live in pages that driver and program share. The driver counts the pages of a context from 0 and takes the first
free ones that suffice. Its library takes the offset of one page for a sign of failure, so the queue that would begin
there cannot be created, and neither can any later one.
"""

from __future__ import annotations

import mmap
from typing import Any

from ndpy.platforms.verbs.native_calls import check, ffi, lib, new_pointer

# SIW_INVAL_UOBJ_KEY of <rdma/siw-abi.h>.
_OFFSET = 0x90000
# sizeof(struct siw_cqe) and sizeof(struct siw_cq_ctrl)
_COMPLETION_BYTES, _CONTROL_BYTES = 32, 8
# The most entries of a queue that is tried.
_LARGEST = 1 << 15


def pages_of(entries: int, page: int = mmap.PAGESIZE) -> int:
    """How many pages a completion queue takes. entries: a power of two."""
    return -(-(entries * _COMPLETION_BYTES + _CONTROL_BYTES) // page)


def plan(page: int = mmap.PAGESIZE) -> list[int]:
    """The entries of completion queues to create in a new context, the first one first. The last one has the page
    inside it.
    """
    sizes = [1 << power for power in range(_LARGEST.bit_length() - 1, -1, -1)]
    left = _OFFSET // page
    entries = []
    # The driver of some kernels may begin at page 1. So the last queue begins at least two pages before.
    while left > 3:
        entries.append(next(size for size in sizes if pages_of(size, page) <= left - 2))
        left -= pages_of(entries[-1], page)
    entries.append(next(size for size in reversed(sizes) if pages_of(size, page) > left + 1))
    return entries


def occupy(context: Any) -> Any:
    """Create a completion queue that has the page inside it, and return it. The context must be new."""
    queues: list[Any] = []
    try:
        for entries in plan():
            queues.append(new_pointer("open adapter", lib.ibv_create_cq, context, entries, ffi.NULL, ffi.NULL, 0))
    except BaseException:
        release(queues)
        raise
    release(queues[:-1])
    return queues[-1]


def release(queues: list[Any]) -> None:
    """Destroy completion queues."""
    for queue in queues:
        check("close adapter", lib.ibv_destroy_cq(queue))
