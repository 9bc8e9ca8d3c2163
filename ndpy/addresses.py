"""Addresses of connections: (host, port), host names, the wildcard, and the choice of an adapter's address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from ndpy import errors

#: (host, port). The host is a numeric IPv4 or IPv6 address, or a name, or "" for any address of the adapter.
Address = tuple[str, int]


def resolve(address: Address) -> tuple[int, tuple[Any, ...]]:
    """Find the address family and the socket address of a (host, port), the first one if there are several.

    Raises:
        ValueError: the address is malformed.
        AddressUnreachableError: the host name cannot be resolved.
    """
    return resolve_all(*check_address(address))[0]


def check_address(address: Address) -> Address:
    """Return the host and the port. Raises ValueError if the address is malformed."""
    try:
        host, port = address[0], int(address[1])
    except (TypeError, ValueError, IndexError, OverflowError):
        raise _malformed(address) from None
    # The first characters of "192.0.2.1:4791" could be taken for a host and a port.
    if isinstance(address, (str, bytes)) or not isinstance(host, str):
        raise _malformed(address)
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not in 0 to 65535")
    return host, port


def resolve_all(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """All addresses of a host in the system's order, each as (address family, socket address)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise unresolved(host, error) from None
    return unique(found)


def unique(found: Sequence[tuple[Any, ...]]) -> list[tuple[int, tuple[Any, ...]]]:
    """What getaddrinfo() has found, without repetitions."""
    return list(dict.fromkeys((int(entry[0]), entry[4]) for entry in found))


def numeric_host(resolved: tuple[Any, ...]) -> str:
    """The host of a socket address, with the zone of a link-local one."""
    return socket.getnameinfo(resolved, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def unresolved(host: str, error: Exception) -> errors.AddressUnreachableError:
    """The exception for a host that getaddrinfo() does not know."""
    return errors.AddressUnreachableError(
        f"{host!r} is neither a numeric address nor a name that can be resolved ({getattr(error, 'strerror', None) or error})",
        operation="resolve",
    )


def is_numeric(host: str) -> bool:
    """Whether it needs no lookup."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        return False
    return True


def _malformed(address: object) -> ValueError:
    return ValueError(f"an address is (host, port), not {address!r}")


def resolve_destination(address: Address) -> tuple[int, tuple[Any, ...]]:
    """resolve() for a destination. Raises AddressUnreachableError for port 0 and the wildcard, too."""
    return resolve_destinations(*check_address(address))[0]


def resolve_destinations(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """resolve_all() for a destination, as resolve_destination()."""
    if port == 0:
        raise errors.AddressUnreachableError("nobody can listen at port 0", operation="connect")
    found = resolve_all(host, port)
    for _, resolved in found:
        if is_wildcard(resolved[0]):
            raise errors.AddressUnreachableError(f"{resolved[0]} is not the address of one host", operation="connect")
    return found


def source_host(name: str, addresses: Sequence[str], destination: str) -> str:
    """Choose the address of this side for a connection: the destination itself, or the address most similar to it.

    Parameters:
        name: the adapter, for the error message.
        addresses: the adapter's.
    Raises:
        AddressUnreachableError: the adapter has no address of the destination's family.
    """
    wanted = ipaddress.ip_address(destination.partition("%")[0])
    candidates = []
    for host in addresses:
        own = ipaddress.ip_address(host.partition("%")[0])
        if own.version != wanted.version:
            continue
        shared = (int(own) ^ int(wanted)).bit_length()
        candidates.append((own != wanted, own.is_link_local != wanted.is_link_local, shared, host))
    if not candidates:
        raise errors.AddressUnreachableError(
            f"{name} has no {'IPv4' if wanted.version == 4 else 'IPv6'} address to reach {destination} from; its addresses "
            f"are {', '.join(addresses) or 'none'}",
            operation="connect",
        )
    return min(candidates)[3]


def listening_address(addresses: Sequence[str], address: Address) -> Address:
    """Where to listen for (host, port).

    The host "" or "*" is the wildcard. If the adapter has only one address of the family, that address replaces the wildcard,
    which would take requests for other adapters, too.
    """
    try:
        host, port = address[0], address[1]
    except (TypeError, IndexError):
        raise _malformed(address) from None
    if isinstance(address, (str, bytes)):
        raise _malformed(address)
    if host in ("", "*"):
        has_ipv6 = any(":" in entry for entry in addresses)
        host = "::" if has_ipv6 and not any("." in entry for entry in addresses) else "0.0.0.0"
    family, resolved = resolve((host, port))
    if not is_wildcard(resolved[0]):
        return host, port
    same = [
        entry for entry in addresses if (":" in entry) == (family == socket.AF_INET6) and not entry.startswith("fe80")
    ]
    return (same[0] if len(same) == 1 else host), port


def is_multicast(host: str) -> bool:
    """Whether a numeric host is the address of a multicast group."""
    return ipaddress.ip_address(host.partition("%")[0]).is_multicast


def is_wildcard(host: str) -> bool:
    """Whether a numeric host stands for all addresses."""
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
