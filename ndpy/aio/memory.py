"""Memory of the program: what messages and transfers are given."""

from __future__ import annotations

import ctypes
from typing import Any

from ndpy import errors
from ndpy.cache.lease import Lease
from ndpy.objects.arrays import ArrayMemory
from ndpy.objects.memory import MemoryRegion, Sge, device_error, plain_view, range_on_device, view_or_memory

#: Memory that a transfer reads or fills: a buffer or an array, or a region, a slice of one or a lease.
Memory = Any


def measured(memory: Memory, is_message: bool = True) -> tuple[Memory, int]:
    """Return (memory, its length in bytes). An array is asked once, and a view of its bytes takes its place.

    Raises what plain_view() raises for unusable memory, however short it is. A message cannot use memory of a device.
    """
    if isinstance(memory, (bytes, bytearray)):
        return memory, len(memory)
    if isinstance(memory, (MemoryRegion, Sge, Lease)):
        if is_message and _region_of(memory)._is_on_device:
            raise _no_message(_owner_of(memory))
        return memory, memory.length
    view = view_or_memory(memory)
    if isinstance(view, ArrayMemory):
        if is_message:
            raise _no_message(view)
        return view, view.nbytes
    # The cache finds a buffer by its identity.
    return view if isinstance(view.obj, ArrayMemory) else memory, view.nbytes


def _no_message(memory: ArrayMemory) -> errors.InvalidBufferError:
    return device_error(
        memory, "messages do not take it: expose() it, or read() or write(), or copy it to the host's memory"
    )


def memory_on_device(memory: Memory) -> ArrayMemory | None:
    """The range of a device's memory that this is. None if it is memory of the host."""
    if isinstance(memory, ArrayMemory):
        return memory
    if not isinstance(memory, (MemoryRegion, Sge, Lease)) or not _region_of(memory)._is_on_device:
        return None
    owner = _owner_of(memory)
    return range_on_device(owner, memory.address, memory.length, owner)


def _region_of(memory: MemoryRegion | Sge | Lease) -> Any:
    return getattr(memory, "region", memory)


def _owner_of(memory: MemoryRegion | Sge | Lease) -> Any:
    region = _region_of(memory)
    region._check()
    return region._owner


def measured_room(memory: Memory, operation: str = "receive") -> tuple[Memory, int]:
    """The same for memory that will be filled. Also raises AccessViolationError if it cannot be."""
    if isinstance(memory, bytearray):
        return memory, len(memory)
    # Of slices there may be thousands.
    if isinstance(memory, Sge) and memory.region._writable and not memory.region._is_on_device:
        return memory, memory.length
    kind = type(memory).__name__
    memory, length = measured(memory, is_message=operation == "receive")
    element = memory[:length] if isinstance(memory, Lease) else memory
    if isinstance(element, (MemoryRegion, Sge)):
        region = element.region if isinstance(element, Sge) else element
        if not region._writable:
            raise _not_writable("region was registered without Access.LOCAL_WRITE", operation)
    elif isinstance(memory, bytes) or (memory if isinstance(memory, ArrayMemory) else memoryview(memory)).readonly:
        raise _not_writable(f"{kind} is read-only", operation)
    return memory, length


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
    # What it keeps in place. An array may have other memory by now.
    owner = region._owner
    if isinstance(owner, memoryview):
        return owner
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
