"""Memory that is made to be registered."""

from __future__ import annotations

from ndpy.errors import InvalidBufferError
from ndpy.vocabulary.integers import integer

#: The result of alloc(): a writable view, which keeps its memory mapped as long as anything refers to it.
Buffer = memoryview


def alloc(length: int, *, alignment: int = 4096, huge_pages: bool = False, numa_node: int | None = None) -> Buffer:
    """Allocate zeroed memory outside Python's heap. It begins at a page. NumPy takes it too (numpy.frombuffer()).

    The memory is unmapped when the last reference and the last view have gone. Forked children do not have the memory
    where a fork() would endanger it (Linux before 5.12 without RDMAV_FORK_SAFE; see `ndpy doctor`). A child that
    touches it there ends with SIGSEGV.

    Parameters:
        length: in bytes, at least 1.
        alignment: of the first byte, a power of two.
        huge_pages: whether to take pages from the system's pool of huge pages, at once.
        numa_node: where to put the memory; None for anywhere. On Windows this is a preference only.
    Raises:
        InvalidBufferError: the length or the alignment is not possible.
        InsufficientResourcesError: there are not enough pages, or not enough huge pages; or, on Windows, the account
            lacks the right to lock pages.
        UnsupportedError: the system has no huge pages, or no such node.
    Source: mmap(2), mbind(2), madvise(2); VirtualAllocExNuma.
    """
    from ndpy.platforms import implementation

    if integer(length, "length") < 1:
        raise InvalidBufferError(f"{length} bytes cannot be allocated")
    if integer(alignment, "alignment") < 1 or alignment & (alignment - 1):
        raise InvalidBufferError(f"an alignment of {alignment} is not a power of two")
    buffer: Buffer = implementation().allocate(length, alignment, huge_pages, numa_node)
    return buffer
