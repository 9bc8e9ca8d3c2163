"""Identifiers of librdmacm from an address to a route, and the events of its connection manager.

Connections and datagrams find their peers in the same two steps: the address is resolved, then the route.
"""

from __future__ import annotations

import abc
import errno
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ndpy import errors
from ndpy.platforms.verbs.adapter_info import addresses_now
from ndpy.platforms.verbs.addresses import pack_address
from ndpy.platforms.verbs.native_calls import ffi, lib, text
from ndpy.vocabulary.addresses import resolve
from ndpy.vocabulary.routes import Route, find_route

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

_RESOLVE_MS = 4000
#: What is there if a TCP connection came about, but none of iWARP.
NO_IWARP = (
    "something takes TCP connections there, but does not answer as an iWARP listener; look whether another program has "
    "the port (ss -ltnp), or whether the listener has ended or takes no more connections"
)
# Why the connection manager resolves no way, and what to do. In a container, the adapter's interface may be in another
# namespace.
_UNRESOLVED = {
    0: "the connection manager gives no reason",
    errno.ENODEV: (
        "it leads through an interface that does not belong to an RDMA adapter of this network namespace; `ip route "
        "get` shows the interface, and `rdma link` the adapters' interfaces"
    ),
    errno.ENETUNREACH: "there is no route; `ip route get` shows the way to its address",
    errno.EHOSTUNREACH: "the host or its router is not there; check the address, the link and `ip neigh`",
    errno.ETIMEDOUT: "no answer to address resolution; check the address, the link and `ip neigh`",
    errno.EINVAL: (
        "the addresses of both ends do not fit together, or the route there is a blackhole; both are IPv4 or both "
        "IPv6, and a link-local one needs its interface, as in fe80::1%eth0"
    ),
    errno.EACCES: "a route prohibits it; `ip route get` shows it",
    errno.EADDRNOTAVAIL: "the local address has gone; `ip address` shows the addresses of this machine",
}


class CmEvent(NamedTuple):
    """A copy of an event. See struct ndpy_cm_event.

    path, qp_number, qkey: where datagrams go. path is a struct ibv_ah_attr.
    """

    type: int
    status: int
    key: int
    id: Any
    private_data: bytes
    responder_resources: int
    initiator_depth: int
    srq: bool
    path: Any
    qp_number: int
    qkey: int


def parameters_with(data: bytes) -> tuple[Any, Any]:
    """A struct rdma_conn_param with this private data, and the memory that it points to."""
    kept = ffi.new("char[]", data) if data else ffi.NULL
    parameters = ffi.new("struct rdma_conn_param *")
    parameters.private_data = kept
    parameters.private_data_len = len(data)
    return parameters, kept


class ManagerClient(abc.ABC):
    """Something that has an identifier."""

    @abc.abstractmethod
    def _on_event(self, event: CmEvent) -> None:
        """An event of the identifier, or a request to it. In the adapter's thread."""


def route_of(adapter: VerbsAdapter, family: int, destination: tuple[Any, ...], operation: str) -> Route:
    """find_route() from an adapter."""
    info = adapter.info
    return find_route(info, family, destination, psutil.net_if_addrs, operation, lambda: addresses_now(info))


class Way(NamedTuple):
    """The way from an adapter to an address, with the errors that tell where it ends.

    Parameters:
        target: the address, for errors.
        operation: the public call, for errors.
    """

    adapter: VerbsAdapter
    target: str
    operation: str

    def resolve_address(self, identifier: Any, family: int, destination: tuple[Any, ...], *, is_bound: bool) -> None:
        """Start to resolve the address. ADDR_RESOLVED or an error follows.

        is_bound: whether the identifier has an address of this side. Otherwise the routes choose one.
        """
        source = None
        if not is_bound:
            route = route_of(self.adapter, family, destination, self.operation)
            destination = route.destination
            source = pack_address(*resolve((route.source, 0)))
        packed = pack_address(family, destination)
        self._check(
            lib.rdma_resolve_addr(
                identifier,
                ffi.NULL if source is None else ffi.cast("struct sockaddr *", source),
                ffi.cast("struct sockaddr *", packed),
                _RESOLVE_MS,
            )
        )

    def resolve_route(self, identifier: Any) -> None:
        """The address is resolved: start to resolve the route. ROUTE_RESOLVED or an error follows."""
        name, device = self.adapter.info.name, text(lib.ndpy_cm_device(identifier))
        if device != name:
            raise errors.AddressUnreachableError(
                f"{self.target} is reached through {device or 'no RDMA adapter'}, not {name}", operation=self.operation
            )
        self._check(lib.rdma_resolve_route(identifier, _RESOLVE_MS))

    def _check(self, result: int) -> None:
        if result:
            raise self._unresolved(ffi.errno)

    def resolution_error(self, event: CmEvent) -> errors.NdpyError | None:
        """The error of an event that ends the resolution. None for other events."""
        if event.type not in (lib.RDMA_CM_EVENT_ADDR_ERROR, lib.RDMA_CM_EVENT_ROUTE_ERROR):
            return None
        return self._unresolved(abs(event.status))

    def _unresolved(self, number: int) -> errors.NdpyError:
        """The error for an address or a route that could not be resolved."""
        if number in errors.SHORTAGES:
            return self.unreachable(number)
        text = f"the way from {self.adapter.info.name} to {self.target} cannot be resolved"
        why = _UNRESOLVED.get(number)
        if why is None:
            return errors.from_errno(self.operation, number, text)
        return errors.AddressUnreachableError(f"{text}: {why}", operation=self.operation, native=number)

    def nobody_listens(self, number: int) -> errors.NdpyError:
        return errors.ConnectionRefusedError(
            f"{self.target}: nobody listens there", operation=self.operation, native=number
        )

    def unreachable(self, number: int) -> errors.NdpyError:
        """The error for an attempt that no listener answered. number: its errno."""
        if number in (errno.ECONNREFUSED, errno.ECONNRESET):
            return self.nobody_listens(number)
        if number == errno.ENETUNREACH:
            text = f"there is no route to {self.target}; `ip route get` shows the way to its address"
            return errors.AddressUnreachableError(text, operation=self.operation, native=number)
        if number == errno.EHOSTUNREACH:
            text = (
                f"{self.target} is not reached: the host is not there, or a router or a firewall on the way lets "
                "nothing pass; check the address, `ip neigh` and `ip route get`"
            )
            return errors.AddressUnreachableError(text, operation=self.operation, native=number)
        if number in (*errors.SHORTAGES, errno.EPERM, errno.EACCES):
            # The attempt failed on this machine. Nobody was asked.
            return errors.from_errno(self.operation, number, f"{self.target} cannot be reached")
        blocked = {"iWARP": ", or a firewall drops its TCP port", "RoCE": ", or UDP port 4791 is blocked"}
        return errors.TimeoutError(
            f"{self.target} does not answer; it is down, or has no RDMA adapter at that address"
            f"{blocked.get(self.adapter.info.transport, '')}",
            operation=self.operation,
            native=number,
            problem="connect-timeout",
        )
