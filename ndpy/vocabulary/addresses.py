"""Addresses of connections: (host, port), host names, the wildcard, and from where addresses are reached."""

from __future__ import annotations

import enum
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
        InsufficientResourcesError: this process has no file descriptor left to look it up with.
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
    except (OSError, UnicodeError) as error:
        raise unresolved(host, error) from None
    return unique(found)


def unique(found: Sequence[tuple[Any, ...]]) -> list[tuple[int, tuple[Any, ...]]]:
    """What getaddrinfo() has found, without repetitions."""
    return list(dict.fromkeys((int(entry[0]), entry[4]) for entry in found))


def numeric_host(resolved: tuple[Any, ...]) -> str:
    """The host of a socket address, with the zone of a link-local one."""
    return socket.getnameinfo(resolved, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def unresolved(host: str, error: Exception) -> errors.ProviderError:
    """The exception for a host that getaddrinfo() does not know."""
    if number := errors.lacks_descriptor():
        return errors.from_errno("resolve", number, f"{host!r} cannot be looked up")
    return errors.AddressUnreachableError(
        f"{host!r} is neither a numeric address nor a name that can be resolved "
        f"({getattr(error, 'strerror', None) or error})",
        operation="resolve",
    )


def is_numeric(host: str) -> bool:
    """Whether it needs no lookup."""
    return _numeric(host, 0) is not None


def _numeric(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]] | None:
    """resolve_all() for a host that needs no lookup, else None."""
    try:
        return unique(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return None


def _malformed(address: object) -> ValueError:
    return ValueError(f"an address is (host, port), not {address!r}")


def resolve_destination(address: Address) -> tuple[int, tuple[Any, ...]]:
    """resolve() for a destination. Raises AddressUnreachableError for port 0 and the wildcard, too."""
    return resolve_destinations(*check_address(address))[0]


def resolve_destinations(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """resolve_all() for a destination, as resolve_destination()."""
    _refuse_port_0(port)
    return _of_hosts(resolve_all(host, port))


def numeric_destination(host: str, port: int) -> tuple[int, tuple[Any, ...]] | None:
    """resolve_destination() for a host that needs no lookup. None for a name."""
    _refuse_port_0(port)
    found = _numeric(host, port)
    return None if found is None else _of_hosts(found)[0]


def _refuse_port_0(port: int) -> None:
    if port == 0:
        raise errors.AddressUnreachableError("nobody can listen at port 0", operation="connect")


def _of_hosts(found: list[tuple[int, tuple[Any, ...]]]) -> list[tuple[int, tuple[Any, ...]]]:
    """These addresses. Raises AddressUnreachableError if one of them is the wildcard."""
    for _, resolved in found:
        if is_wildcard(resolved[0]):
            raise errors.AddressUnreachableError(f"{resolved[0]} is not the address of one host", operation="connect")
    return found


#: With more addresses, an adapter has the wildcard instead.
_MOST_LISTENED_AT = 8


def listening_addresses(addresses: Sequence[str], address: Address) -> list[Address]:
    """All places where to listen for (host, port), so that peers of all addresses come.

    The host "" or "*" stands for each of the adapter's addresses. An adapter that has loopback has all of the
    machine's, also those that come later. The wildcard of IPv6 is one for IPv4 too.
    """
    host, port = check_address(address)
    if host in ("", "*") and len(addresses) == 1:
        return [(addresses[0], port)]
    if host not in ("", "*"):
        return [listening_address(addresses, (host, port))]
    if any(reach(entry) is Reach.LOOPBACK for entry in addresses):
        return [("::" if any(":" in entry for entry in addresses) else "0.0.0.0", port)]
    if not 0 < len(addresses) <= _MOST_LISTENED_AT:
        return [listening_address(addresses, (host, port))]
    return [(entry, port) for entry in addresses]


def listening_address(addresses: Sequence[str], address: Address) -> Address:
    """Where to listen for (host, port).

    The host "" or "*" is the wildcard. If the adapter has only one address of the family, that address replaces the
    wildcard, which would take requests for other adapters, too.
    """
    host, port = check_address(address)
    if host in ("", "*"):
        has_ipv6 = any(":" in entry for entry in addresses)
        host = "::" if has_ipv6 and not any("." in entry for entry in addresses) else "0.0.0.0"
    family, resolved = resolve((host, port))
    if not is_wildcard(resolved[0]):
        return host, port
    same = [
        entry
        for entry in addresses
        if (":" in entry) == (family == socket.AF_INET6) and reach(entry) is not Reach.LINK_LOCAL
    ]
    return (same[0] if len(same) == 1 else host), port


def plain_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """A numeric host without its scope. Raises ValueError for any other text."""
    return ipaddress.ip_address(host.partition("%")[0])


class Reach(enum.IntEnum):
    """From where an address is reached. The more, the less."""

    ROUTABLE = 0
    LINK_LOCAL = 1
    LOOPBACK = 2
    MULTICAST = 3
    UNSPECIFIED = 4


def reach(address: str | bytes | ipaddress.IPv4Address | ipaddress.IPv6Address) -> Reach:
    """From where an address is reached. An IPv4 address within an IPv6 one counts as what it is.

    Parameters:
        address: a numeric host, perhaps with a scope, or the 16 bytes of a GID.
    """
    parsed = plain_address(address) if isinstance(address, str) else ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_unspecified:
        return Reach.UNSPECIFIED
    if parsed.is_multicast:
        return Reach.MULTICAST
    if parsed.is_loopback:
        return Reach.LOOPBACK
    return Reach.LINK_LOCAL if parsed.is_link_local else Reach.ROUTABLE


def is_multicast(host: str) -> bool:
    """Whether a numeric host is the address of a multicast group."""
    return reach(host) is Reach.MULTICAST


def is_wildcard(host: str) -> bool:
    """Whether a numeric host stands for all addresses."""
    return plain_address(host).is_unspecified
