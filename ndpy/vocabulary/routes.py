"""The way to a destination: from which address of the adapter, and by which interface.
The system's routes decide it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ndpy import errors
from ndpy.vocabulary import netlink
from ndpy.vocabulary.addresses import Reach, numeric_host, plain_address, reach
from ndpy.vocabulary.info import AdapterInfo

#: A route is asked for with any port.
_PORT_DISCARD = 9
_MOST_NEIGHBOURS = 4
# Numbers of rtnetlink(7).
_NEW_ROUTE, _GET_ROUTE = 24, 26
_DESTINATION, _SOURCE, _OUT_INTERFACE = 1, 2, 4
_ROUTE = struct.Struct("=BBBBBBBBI")


# What the errno of a socket says of routes of Linux.
_NO_WAY = {
    errno.ENETUNREACH: "none contains it",
    errno.EHOSTUNREACH: 'the one to it is "unreachable"',
    errno.EACCES: 'the one to it is "prohibit"',
    errno.EINVAL: 'the one to it is a "blackhole"',
}


class Route(NamedTuple):
    """source: the address of this side, as the adapter's description writes it. destination: a socket address with its
    scope.
    """

    source: str
    destination: tuple[Any, ...]


class _Own(NamedTuple):
    """An address of this machine. host: how it is written. scope: the interface of an IPv6 address that needs one, else
    0.
    """

    host: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    scope: int


#: What psutil.net_if_addrs() returns.
Interfaces = Mapping[str, Sequence[Any]]


def find_route(
    info: AdapterInfo,
    family: int,
    destination: tuple[Any, ...],
    ask_interfaces: Callable[[], Interfaces],
    operation: str = "connect",
    ask_addresses: Callable[[], Sequence[str]] | None = None,
) -> Route:
    """Choose the address of this side for a connection or for datagrams.

    It is the one that the system's routes choose, as they do for TCP. If that is not the adapter's, it is the
    destination if that is the adapter's; an address of the adapter from which routes lead to the destination by the
    address's own interface; or one whose subnet contains the destination. To another address of this machine one of its
    subnet leads, or else any of them, and to a group any of them.

    A link-local destination without an interface is taken to be on the only one where the adapter has such an address.

    Parameters:
        info: the adapter's.
        destination: a socket address of this family.
        ask_interfaces: returns the addresses of the machine's interfaces.
        operation: the public call, for the error.
        ask_addresses: returns the addresses that the adapter has by now. It may have got some since it was described.
    Raises:
        AddressUnreachableError: the adapter has none of these. The message says what the routes choose.
        InsufficientResourcesError: this process has no file descriptor left to ask with.
    """
    wanted = plain_address(destination[0])
    needs_scope = family == socket.AF_INET6 and reach(wanted) is Reach.LINK_LOCAL and not destination[3]
    chosen, number = (None, 0) if needs_scope else _ask(operation, family, destination)
    if chosen is not None and chosen.host in info.addresses:
        return Route(chosen.host, destination)
    own = _of_version(info.addresses, wanted.version)
    if ask_addresses is not None and not _have(own, chosen):
        info = dataclasses.replace(info, addresses=tuple(dict.fromkeys([*ask_addresses(), *info.addresses])))
        own = _of_version(info.addresses, wanted.version)
    if not own:
        raise errors.AddressUnreachableError(
            f"{info.name} has no IPv{wanted.version} address to reach {destination[0]} from; its addresses are "
            f"{', '.join(info.addresses) or 'none'}",
            operation=operation,
        )
    if needs_scope:
        destination = (*destination[:3], _only_scope(info.name, own, destination[0], operation))
        chosen, number = _ask(operation, family, destination)
    if found := _have(own, chosen):
        return Route(found.host, destination)
    scope = destination[3] if family == socket.AF_INET6 else 0
    try:
        interfaces = ask_interfaces()
    except OSError as error:
        what = "the addresses of this machine cannot be listed"
        raise errors.from_errno(operation, error.errno or 0, what) from None
    for entry in _others(operation, own, family, destination, wanted, scope, chosen, interfaces):
        return Route(entry.host, destination)
    raise errors.AddressUnreachableError(
        _explain(info, numeric_host(destination), chosen, number, interfaces),
        operation=operation,
        native=number if sys.platform == "linux" else 0,
    )


def interface_from(address: str, interfaces: Interfaces) -> str:
    """The interface by which the routes lead from an address of several interfaces to the subnets that it has there.

    Returns: "" if the routes lead to none of them by such an interface, or the address is a link-local one.
    """
    own = _parse(address)
    if own is None or reach(own.address) is Reach.LINK_LOCAL:
        return ""
    family = socket.AF_INET if own.address.version == 4 else socket.AF_INET6
    holders = {name: [entry for entry in entries if _has([entry], own)] for name, entries in interfaces.items()}
    for entry in (entry for entries in holders.values() for entry in entries if entry.netmask):
        bits = bin(int(plain_address(entry.netmask))).count("1")
        subnet = ipaddress.ip_network(f"{own.address}/{bits}", strict=False)
        # The first ones may be addresses of this machine, to which its routes lead by lo.
        hosts: Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address] = iter(subnet.hosts())
        for neighbour in itertools.islice(hosts, _MOST_NEIGHBOURS):
            out = _out_interface(family, own.address, neighbour)
            if holders.get(out):
                return out
    return ""


def _of_version(addresses: Sequence[str], version: int) -> list[_Own]:
    return [entry for entry in map(_parse, addresses) if entry is not None and entry.address.version == version]


def _have(own: Sequence[_Own], chosen: _Own | None) -> _Own | None:
    """The one that has the address that the system chose, if there is one."""
    return next((entry for entry in own if chosen is not None and entry[1:] == chosen[1:]), None)


def _parse(host: str) -> _Own | None:
    try:
        found = socket.getaddrinfo(host, 0, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]
    except (OSError, UnicodeError):
        # Its interface has gone.
        return None
    return _Own(host, plain_address(str(found[0])), int(found[3]) if len(found) == 4 else 0)


def _only_scope(name: str, own: Sequence[_Own], host: str, operation: str) -> int:
    """The interface of a link-local destination that names none."""
    near = [entry for entry in own if reach(entry.address) is Reach.LINK_LOCAL]
    scopes = {entry.scope for entry in near}
    if len(scopes) != 1:
        which = f"{name} has such addresses on several: {', '.join(entry.host for entry in near)}"
        raise errors.AddressUnreachableError(
            f"{host} is the address of a host on one link only; name this machine's interface to it, as in "
            f"{host}%eth0; {which if near else f'{name} has no such address'}",
            operation=operation,
        )
    return scopes.pop()


def _ask(
    operation: str, family: int, destination: tuple[Any, ...], source: _Own | None = None
) -> tuple[_Own | None, int]:
    """The address that the system sends from, as (address, 0). (None, errno) if there is no way, from `source` if
    given.

    A socket for datagrams sends nothing when it connects.

    Raises InsufficientResourcesError, of `operation`, if there is no descriptor to ask with.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            if source is not None:
                asking.bind((str(source.address), 0, 0, source.scope)[: 2 if family == socket.AF_INET else 4])
            asking.connect((destination[0], _PORT_DISCARD, *destination[2:]))
            return _parse(numeric_host(asking.getsockname())), 0
    except OSError as error:
        if error.errno in errors.NO_DESCRIPTOR:
            raise errors.from_errno(operation, error.errno, f"no way to {destination[0]} can be looked for") from None
        return None, error.errno or 0


def _others(
    operation: str,
    own: Sequence[_Own],
    family: int,
    destination: tuple[Any, ...],
    wanted: ipaddress.IPv4Address | ipaddress.IPv6Address,
    scope: int,
    chosen: _Own | None,
    interfaces: Interfaces,
) -> Iterator[_Own]:
    """The adapter's addresses that lead there although the system sends from another one, the best first."""
    near = reach(wanted) in (Reach.LINK_LOCAL, Reach.MULTICAST) and bool(scope)
    usable = [entry for entry in own if (entry.scope == scope if near else not entry.scope)]
    yield from (entry for entry in usable if entry.address == wanted)
    everything = [one for entries in interfaces.values() for one in entries]
    in_subnet = [entry for entry in usable if any(_has([one], entry) and _contains(one, wanted) for one in everything)]
    if chosen is not None and chosen.address == wanted:
        # The destination is another address of this machine, perhaps that of the other end of a cable.
        yield from in_subnet
        yield from usable
    if sys.platform == "win32":
        # There, a socket uses only ways by the interface of its own address.
        yield from (entry for entry in usable if _ask(operation, family, destination, entry)[0] is not None)
        return
    for entry in usable:
        out = _out_interface(family, entry.address, wanted)
        if _has(interfaces.get(out, ()), entry):
            yield entry
    if reach(wanted) is Reach.MULTICAST:
        # A group needs no route.
        yield from usable
    if chosen is not None:
        yield from in_subnet


def _contains(entry: Any, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether the subnet of an interface's address contains this one."""
    if not entry.netmask:
        return False
    own, mask = (int(ipaddress.ip_address(text.partition("%")[0])) for text in (entry.address, entry.netmask))
    return (own ^ int(wanted)) & mask == 0


def _out_interface(
    family: int,
    source: ipaddress.IPv4Address | ipaddress.IPv6Address,
    destination: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> str:
    """The interface by which the routes lead from an address of this machine to a destination. "" if the kernel does
    not say.
    """
    bits = 8 * len(source.packed)
    body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
    body += netlink.attribute(_DESTINATION, destination.packed) + netlink.attribute(_SOURCE, source.packed)
    found = dict(netlink.answered(netlink.ask(_GET_ROUTE, body), _NEW_ROUTE, _ROUTE.size))
    # The interface may go meanwhile.
    with contextlib.suppress(OSError):
        return socket.if_indextoname(int.from_bytes(found.get(_OUT_INTERFACE, b""), sys.byteorder))
    return ""


def _explain(info: AdapterInfo, host: str, chosen: _Own | None, number: int, interfaces: Interfaces) -> str:
    command = f"Find-NetRoute -RemoteIPAddress {host}" if sys.platform == "win32" else f"ip route get {host}"
    if chosen is None:
        why = _NO_WAY.get(number) or os.strerror(number)
        return f"this machine has no route to {host} ({why}); `{command}` shows what its routes say"
    interface = next((name for name, entries in interfaces.items() if _has(entries, chosen)), "")
    return (
        f"this machine's route to {host} leaves from {chosen.host}{f' of {interface}' if interface else ''}, which is "
        f"not an address of {info.name}; `{command}` shows the route. Open the adapter with that address, or bind the "
        f"connector to one of {info.name}'s: {', '.join(info.addresses)}"
    )


def _has(entries: Sequence[Any], own: _Own) -> bool:
    """Whether these addresses of an interface contain this one."""
    found = (_parse(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
    return any(entry is not None and entry[1:] == own[1:] for entry in found)
