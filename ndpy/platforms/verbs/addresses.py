"""Socket addresses in Linux's layout, and rdma_cm identifiers that are bound to them."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.platforms.verbs.native_calls import check_errno, ffi, lib, text
from ndpy.vocabulary.addresses import Address, Reach, reach, resolve

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter


def pack_address(family: int, address: tuple[Any, ...]) -> Any:
    """Make a struct sockaddr, as a pointer that owns its memory."""
    if family == socket.AF_INET:
        data = struct.pack("=H", family) + struct.pack(">H", address[1]) + socket.inet_aton(address[0]) + bytes(8)
    else:
        data = struct.pack("=H", family) + struct.pack(">HI", address[1], address[2])
        data += socket.inet_pton(family, address[0].partition("%")[0]) + struct.pack("=I", address[3])
    return ffi.new("char[]", data)


def unpack_address(identifier: Any, peer: bool) -> Address | None:
    """The local (host, port) of a connection, or the peer's. None before there is one."""
    data = ffi.new("unsigned char[28]")
    length = lib.ndpy_cm_address(identifier, int(peer), data, 28)
    return unpack_socket_address(bytes(ffi.buffer(data, length)))


def unpack_socket_address(raw: bytes) -> Address | None:
    """The (host, port) of a struct sockaddr of either family, which other bytes may follow. None for other families."""
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET and len(raw) >= 16:
        return socket.inet_ntoa(raw[4:8]), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET6 and len(raw) >= 28:
        host = socket.inet_ntop(socket.AF_INET6, raw[8:24])
        scope = int.from_bytes(raw[24:28], sys.byteorder)
        if scope and reach(host) is Reach.LINK_LOCAL:
            try:
                host += f"%{socket.if_indextoname(scope)}"
            except OSError:
                # The interface has gone.
                host += f"%{scope}"
        return host, int.from_bytes(raw[2:4], "big")
    return None


def new_identifier(adapter: VerbsAdapter, key: int, datagrams: bool = False) -> Any:
    pointer = ffi.new("struct rdma_cm_id **")
    space = lib.RDMA_PS_UDP if datagrams else lib.RDMA_PS_TCP
    check_errno(
        "create identifier" if datagrams else "create connector",
        lib.rdma_create_id(adapter._channel, pointer, ffi.cast("void *", key), space),
    )
    return pointer[0]


def bind_identifier(adapter: VerbsAdapter, identifier: Any, address: Address) -> None:
    """Call rdma_bind_addr(). Raises unless the address is this adapter's."""
    family, resolved = resolve(address)
    packed = pack_address(family, resolved)
    where = f"{address[0]} port {address[1]}"
    if lib.rdma_bind_addr(identifier, ffi.cast("struct sockaddr *", packed)):
        number = ffi.errno
        if number == errno.EADDRINUSE:
            raise errors.AddressInUseError(f"{where} is in use", operation="bind", native=number)
        if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise not_ours(adapter, address[0], number)
        if number in (errno.EACCES, errno.EPERM):
            raise errors.PermissionError(
                f"{where} needs a privilege that uid {os.geteuid()} does not have here: CAP_NET_BIND_SERVICE for ports "
                "below net.ipv4.ip_unprivileged_port_start; choose a higher port, or give the program that capability",
                operation="bind",
                native=number,
            )
        raise errors.from_errno("bind", number, f"{where} cannot be bound")
    device = text(lib.ndpy_cm_device(identifier))
    if device and device != adapter.info.name:
        raise not_ours(adapter, address[0], 0, f"; it is {device}'s")


def not_ours(adapter: VerbsAdapter, host: str, number: int, more: str = "") -> errors.AddressUnreachableError:
    return errors.AddressUnreachableError(
        f"{host} is not an address of {adapter.info.name}{more}; its addresses are "
        f"{', '.join(adapter.info.addresses) or 'none'}",
        operation="bind",
        native=number,
        problem="wrong-interface",
    )
