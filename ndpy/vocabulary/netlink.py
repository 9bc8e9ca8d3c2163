"""Questions to the kernel by netlink(7): requests of rtnetlink(7), and the attributes of their answers."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_REQUEST = 1
_ANSWER_BYTES = 1 << 16
_ANSWER_S = 1.0
# The other bits of a type are flags.
_TYPE_BITS = 0x3FFF


def attribute(kind: int, data: bytes) -> bytes:
    """An attribute for a request."""
    size = _ATTRIBUTE.size + len(data)
    return (_ATTRIBUTE.pack(size, kind) + data).ljust(_aligned(size), b"\0")


def ask(kind: int, body: bytes) -> bytes:
    """The kernel's answer to a request. b"" if there is none, as in a sandbox without such sockets."""
    request = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST, 1, 0) + body
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel,
    ):
        kernel.settimeout(_ANSWER_S)
        kernel.sendto(request, (0, 0))
        return kernel.recv(_ANSWER_BYTES)
    return b""


def answered(answer: bytes, kind: int, head: int) -> Iterator[tuple[int, bytes]]:
    """The attributes of an answer of this kind, behind `head` bytes. None of any other answer, such as an error."""
    if len(answer) >= _HEADER.size:
        length, found, *_ = _HEADER.unpack_from(answer)
        if found == kind and length <= len(answer):
            yield from attributes(answer[_HEADER.size + head : length])


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes (type, contents) in these bytes, which may be the contents of another one."""
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        if size < _ATTRIBUTE.size or offset + size > len(data):
            return
        yield kind & _TYPE_BITS, data[offset + _ATTRIBUTE.size : offset + size]
        offset += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
