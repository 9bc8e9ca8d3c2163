"""Memory made for registering."""

from __future__ import annotations

from ndpy.errors import InvalidBufferError

#: What alloc() returns: a writable view that keeps its memory mapped for as long as anything refers to it.
Buffer = memoryview


def alloc(length: int, *, alignment: int = 4096, huge_pages: bool = False, numa_node: int | None = None) -> Buffer:
    """Allocate zeroed memory that begins at a page, outside of Python's heap; a buffer for NumPy too (numpy.frombuffer()).

    length: bytes, at least 1. alignment: of the first byte, a power of two. huge_pages: take them from the system's pool
    of huge pages, now. numa_node: put the memory there. The memory is unmapped when the last reference and view have gone.
    Where a fork() would endanger registered memory (Linux before 5.12, unless RDMAV_FORK_SAFE is set; see `ndpy doctor`),
    forked children do not have it: what touches it there ends with SIGSEGV.

    Raises InvalidBufferError; InsufficientResourcesError where there are not enough (huge) pages, or, on Windows, the account
    lacks the right to lock pages; UnsupportedError where there are no huge pages or there is no such node.
    Source: mmap(2), mbind(2), madvise(2); VirtualAllocExNuma, for which a node is a preference.
    """
    from ndpy.platforms import implementation

    if length < 1:
        raise InvalidBufferError(f"{length} bytes cannot be allocated")
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidBufferError(f"an alignment of {alignment} is not a power of two")
    buffer: Buffer = implementation().allocate(length, alignment, huge_pages, numa_node)
    return buffer
