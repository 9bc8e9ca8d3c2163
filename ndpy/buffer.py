"""Memory made for registering."""

from __future__ import annotations

from ndpy.errors import InvalidBufferError

#: What alloc() returns: a writable view that keeps its memory mapped for as long as anything refers to it.
Buffer = memoryview


def alloc(length: int, *, alignment: int = 4096, huge_pages: bool = False, numa_node: int | None = None) -> Buffer:
    """Allocate zeroed memory, outside of Python's heap.

    length: bytes, at least 1. alignment: of the first byte, a power of two. huge_pages: take them from the system's pool
    of huge pages. numa_node: put the memory there. The memory is unmapped when the last reference and view have gone.

    Raises InvalidBufferError, InsufficientResourcesError where there are not enough (huge) pages, UnsupportedError where the
    system cannot place memory on a node. Source: mmap(2), mbind(2).
    """
    from ndpy.provider import implementation

    if length < 1:
        raise InvalidBufferError(f"{length} bytes cannot be allocated")
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidBufferError(f"an alignment of {alignment} is not a power of two")
    buffer: Buffer = implementation().allocate(length, alignment, huge_pages, numa_node)
    return buffer
