"""Socket addresses in Windows' memory layout."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from ndpy.platforms.networkdirect.native_calls import BUFFER_OVERFLOW, check, ffi
from ndpy.vocabulary.addresses import Address, resolve

_AF_INET = 2
_AF_INET6 = 23


def pack_address(address: Address) -> bytes:
    """Make a SOCKADDR_IN or SOCKADDR_IN6 of (host, port)."""
    family, resolved = resolve(address)
    return pack_resolved(family, resolved)


def pack_resolved(family: int, resolved: tuple[Any, ...]) -> bytes:
    """Make a SOCKADDR_IN or SOCKADDR_IN6 of a socket address that getaddrinfo() gave."""
    host, port = resolved[:2]
    if family == socket.AF_INET6:
        octets = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        head = struct.pack("<H", _AF_INET6) + struct.pack(">HI", port, resolved[2])
        return head + octets + struct.pack("<I", resolved[3])
    return struct.pack("<H", _AF_INET) + struct.pack(">H", port) + socket.inet_pton(socket.AF_INET, host) + bytes(8)


def unpack_address(data: bytes) -> Address | None:
    """Read (host, port) from a socket address. None for another family or a truncated address (contract A.5.5)."""
    if len(data) < 16:
        return None
    family = struct.unpack_from("<H", data)[0]
    port = struct.unpack_from(">H", data, 2)[0]
    if family == _AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[4:8]), port
    if family == _AF_INET6 and len(data) >= 28:
        host = socket.inet_ntop(socket.AF_INET6, data[8:24])
        scope = struct.unpack_from("<I", data, 24)[0]
        return (f"{host}%{scope}" if scope else host), port
    return None


def get_sized_buffer(operation: str, call: Callable[[Any, Any], int], size_type: str = "uint32_t *") -> Any:
    """Call a getter that takes a buffer and its size. The size may change between two calls (contract A.5).

    Parameters:
        call: call(buffer, size) calls the getter and returns its status.
        size_type: the type of the size, "size_t *" in version 1.
    Returns: a buffer of the right size, or NULL if there is nothing.
    """
    size = ffi.new(size_type, 0)
    buffer = ffi.NULL
    for _ in range(16):
        status = call(buffer, size)
        if status & 0xFFFFFFFF != BUFFER_OVERFLOW:
            check(operation, status)
            if buffer == ffi.NULL:
                return buffer
            # A slice would not keep the memory alive. A buffer does.
            return ffi.from_buffer("unsigned char[]", ffi.buffer(buffer, size[0]))
        buffer = ffi.new("unsigned char[]", max(size[0], 8))
        size[0] = len(buffer)
    check(operation, status, "the size changes at every call")
    return None


def address_list(operation: str, call: Callable[[Any, Any], int], size_type: str = "uint32_t *") -> list[bytes]:
    """The socket addresses of a QueryAddressList (contract A.5)."""
    buffer = get_sized_buffer(operation, call, size_type)
    if buffer == ffi.NULL:
        return []
    count = int(ffi.cast("int32_t *", buffer)[0])
    found = []
    for index in range(count):
        entry = ffi.cast("uintptr_t *", buffer + 8 + 16 * index)
        length = int(ffi.cast("int32_t *", entry + 1)[0])
        if entry[0] and length > 0:
            found.append(bytes(ffi.buffer(ffi.cast("char *", entry[0]), length)))
    return found
