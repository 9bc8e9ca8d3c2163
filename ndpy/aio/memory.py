"""Memory of the program: what messages and transfers are given."""

from __future__ import annotations

import ctypes
from typing import Any

from ndpy import errors
from ndpy.cache.lease import Lease
from ndpy.objects.memory import MemoryRegion, Sge, plain_view

#: Memory that a transfer reads or fills: a buffer, or a region, a slice of one or a lease.
Memory = Any


def length_of(memory: Memory) -> int:
    """The length of memory in bytes. Raises what plain_view() raises for an unusable buffer, however short it is."""
    if isinstance(memory, (bytes, bytearray)):
        return len(memory)
    if isinstance(memory, (MemoryRegion, Sge, Lease)):
        return memory.length
    return plain_view(memory).nbytes


def room_of(memory: Memory, operation: str = "receive") -> int:
    """The length of memory that will be filled. Also raises AccessViolationError if it cannot be."""
    if isinstance(memory, bytearray):
        return len(memory)
    length = length_of(memory)
    if isinstance(memory, Lease):
        memory = memory[:length]
    if isinstance(memory, (MemoryRegion, Sge)):
        region = memory.region if isinstance(memory, Sge) else memory
        if not region._writable:
            raise _not_writable("region was registered without Access.LOCAL_WRITE", operation)
    elif isinstance(memory, bytes) or memoryview(memory).readonly:
        raise _not_writable(f"{type(memory).__name__} is read-only", operation)
    return length


def _not_writable(why: str, operation: str) -> errors.AccessViolationError:
    return errors.AccessViolationError(f"the {why}, so nothing can be received or read into it", operation=operation)


def view_of(memory: Memory) -> Any:
    """The bytes of memory, as something that slices and slice assignment take."""
    if isinstance(memory, (bytes, bytearray)):
        return memory
    if isinstance(memory, Lease):
        memory = memory[: memory.length]
    if isinstance(memory, Sge):
        offset = memory.address - memory.region.address
        return view_of(memory.region)[offset : offset + memory.length]
    if isinstance(memory, MemoryRegion):
        memory = _buffer_of(memory)
    view = plain_view(memory)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _buffer_of(region: MemoryRegion) -> Any:
    buffer = region.buffer
    if isinstance(buffer, tuple):
        address, length = buffer
        return (ctypes.c_ubyte * length).from_address(address)
    if buffer is None:
        raise errors.InvalidBufferError(f"{region!r} has no buffer, so no message can be copied to or from it")
    return buffer


def part_of(element: Sge, start: int, end: int) -> Sge:
    """A slice of an element."""
    offset = element.address - element.region.address
    return element.region[offset + start : offset + end]
