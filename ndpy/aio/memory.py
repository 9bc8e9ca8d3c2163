"""Memory of the program: what messages and transfers are given."""

from __future__ import annotations

from typing import Any

from ndpy import errors
from ndpy.cache.lease import Lease
from ndpy.memory import MemoryRegion, Sge

#: Memory that a transfer reads or fills: a buffer, or a region, a slice of one or a lease.
Memory = Any


def length_of(memory: Memory) -> int:
    """The length of memory in bytes."""
    if isinstance(memory, (bytes, bytearray)):
        return len(memory)
    if isinstance(memory, (MemoryRegion, Sge, Lease)):
        return memory.length
    return memoryview(memory).nbytes


def view_of(memory: Memory) -> Any:
    """The bytes of memory, as something that slices and slice assignment take."""
    if isinstance(memory, (bytes, bytearray)):
        return memory
    if isinstance(memory, Sge):
        offset = memory.address - memory.region.address
        return view_of(memory.region)[offset : offset + memory.length]
    if isinstance(memory, MemoryRegion):
        return memoryview(memory.buffer).cast("B")
    if isinstance(memory, Lease):
        return view_of(memory[: memory.length])
    view = memoryview(memory)
    if not view.c_contiguous:
        raise errors.InvalidBufferError("the buffer has gaps: it is not contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def part_of(element: Sge, start: int, end: int) -> Sge:
    """A slice of an element."""
    offset = element.address - element.region.address
    return element.region[offset + start : offset + end]
