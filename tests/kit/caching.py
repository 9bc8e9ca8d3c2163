"""Functions that the tests of the registration cache share."""

from __future__ import annotations

import ctypes
import mmap

import ndpy
from kit.helpers import memory, succeed, wait_until
from ndpy import Access, Operation

READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE
SINK = Access.LOCAL_WRITE | Access.READ_SINK
LENGTH = 4096


def regions(adapter: ndpy.Adapter) -> list[ndpy.MemoryRegion]:
    """All registered regions of the adapter."""
    return [child for child in adapter._open_children() if isinstance(child, ndpy.MemoryRegion)]


def forbid_registering(monkeypatch, adapter):
    """From now on the test fails if something registers or deregisters a region."""

    def refuse(*_, **__):
        raise AssertionError("a region was registered or deregistered")

    monkeypatch.setattr(type(adapter), "register", refuse)
    monkeypatch.setattr(type(adapter), "begin_register", refuse)
    monkeypatch.setattr(ndpy.MemoryRegion, "close", refuse)


def use(cache, buffer, access=Access.LOCAL_WRITE, **options):
    """Use a buffer once. Returns the region that served it."""
    with cache.local(buffer, access, **options) as lease:
        return lease.region


def write_to(pair, lease, remote, context=31):
    """The client writes a lease of its memory to the server's memory."""
    pair.client.queue_pair.write(lease[: remote.length], remote, context=context)
    (completion,) = succeed(pair.client.cq)
    assert (completion.operation, completion.context) == (Operation.WRITE, context)


def read_from(pair, keep, remote):
    """Let the client read the server's memory. Returns the bytes."""
    sink = memory(keep, pair.adapter, remote.length, SINK)
    pair.client.queue_pair.read(sink, remote)
    succeed(pair.client.cq)
    return bytes(sink.buffer)


def wait_for_contents(region, data):
    """Wait until a region holds the data. On iWARP the bytes may arrive after the completion of the write."""
    wait_until(lambda: bytes(region.buffer) == data, f"{data!r} in the peer's memory")


def map_raw(length, address=None):
    """Map memory that Python does not know, at the address if one is given. Returns its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x100000 if address else 0)
    found = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    assert address in (None, found)
    return found


def unmap_raw(address, length):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.munmap(address, length) == 0
