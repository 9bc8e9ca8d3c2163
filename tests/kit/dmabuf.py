"""Memory that an adapter takes by a descriptor, as it takes a device's: a dma-buf of the kernel's own, or a memfd."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import ndpy
from kit.helpers import contents, expose, has_kernel_driver, memory, succeed
from ndpy import Access

# Elsewhere this skips the tests of whoever imports it.
fcntl = pytest.importorskip("fcntl")

# linux/udmabuf.h: UDMABUF_CREATE, and struct udmabuf_create (memfd, flags, offset, size).
_CREATE, _REQUEST = 0x40187542, struct.Struct("=IIQQ")


class Buffer(NamedTuple):
    """fd: the descriptor that is registered. memory: its bytes, as the device has them."""

    fd: int
    memory: mmap.mmap


@contextlib.contextmanager
def buffer(adapter: ndpy.Adapter, length: int, *, of_kernel: bool = False) -> Iterator[Buffer]:
    """Make memory of whole pages. Skips where it needs /dev/udmabuf and there is none.

    Parameters:
        of_kernel: a dma-buf. Otherwise a memfd, if the adapter takes one.
    """
    with contextlib.ExitStack() as files:
        memfd = os.memfd_create("a device's memory", os.MFD_ALLOW_SEALING)
        files.callback(os.close, memfd)
        os.ftruncate(memfd, length)
        memory = files.enter_context(mmap.mmap(memfd, length))
        if not of_kernel and not has_kernel_driver(adapter):
            yield Buffer(memfd, memory)
            return
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        try:
            device = os.open("/dev/udmabuf", os.O_RDWR)
        except OSError as error:
            pytest.skip(f"dma-bufs of the kernel's own are not to be had: {error}")
        files.callback(os.close, device)
        fd = fcntl.ioctl(device, _CREATE, _REQUEST.pack(memfd, 1, 0, length))
        files.callback(os.close, fd)
        yield Buffer(fd, memory)


def seal(memfd: int) -> None:
    """Let nobody write to the memory any longer."""
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def use_from_both_ends(
    pair: Any, keep: Any, region: ndpy.MemoryRegion, data: bytes, assert_all: Callable[[bytes], None]
) -> bytes:
    """Let the peer write `data` to the server's region and read it, then receive other bytes there and send them.

    assert_all: called with what the region has to hold.
    Returns: the other bytes.
    """
    client, server = pair
    client.queue_pair.write(memory(keep, pair.adapter, data), expose(keep, server, region))
    succeed(client.cq)
    assert_all(data)
    sink = memory(keep, pair.adapter, len(data), Access.LOCAL_WRITE | Access.READ_SINK)
    client.queue_pair.read(sink, expose(keep, server, region))
    succeed(client.cq)
    assert contents(sink) == data
    other = data[::-1]
    server.queue_pair.receive(region[0 : len(data)])
    client.queue_pair.send(memory(keep, pair.adapter, other))
    succeed(client.cq)
    succeed(server.cq)
    assert_all(other)
    sink = memory(keep, pair.adapter, len(data))
    server.queue_pair.receive(sink)
    client.queue_pair.send(region[0 : len(data)])
    succeed(client.cq)
    succeed(server.cq)
    assert contents(sink) == other
    return other
