"""`--source` and `--gid`: which address the connections of a command come from and go to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

import ndpy
from ndpy.platforms import find, implementation
from ndpy.vocabulary.info import as_named, is_address, is_same_address, port_in_use

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F) -> F:
    """Give a command --source and --gid, as the parameters `source` and `gid`."""
    for name, metavar, words in (
        ("gid", "INDEX|ADDRESS", "Connect from this GID of the adapter's port, and through its VLAN."),
        ("source", "ADDRESS", "Connect from this address of the adapter. The default is the one that the routes say."),
    ):
        command = click.option(f"--{name}", metavar=metavar, help=words)(command)
    return command


@dataclasses.dataclass(frozen=True)
class Source:
    """Where connections come from.

    Parameters:
        host: an address of the adapter. None for the one that the routes say.
        gid: the GID that they must use. None for any of that address.
    """

    host: str | None = None
    gid: ndpy.Gid | None = None

    def connect(
        self,
        adapter: ndpy.Adapter,
        queue_pair: ndpy.QueuePair,
        address: tuple[str, int],
        private_data: bytes,
        timeout_s: float,
    ) -> ndpy.Connector:
        """Adapter.connect() from here."""
        if self.host is None:
            return adapter.connect(queue_pair, address, private_data=private_data, timeout_s=timeout_s)
        end = time.monotonic() + timeout_s
        connector = adapter.create_connector()
        try:
            self.bind(connector)
            connector.connect(queue_pair, address, private_data=private_data, timeout_s=timeout_s)
            connector.complete_connect(max(end - time.monotonic(), 0.0))
        except BaseException:
            connector.close()
            raise
        return connector

    def bind(self, connector: ndpy.Connector) -> None:
        """Let a connector connect from here."""
        if self.host is not None:
            connector.bind((self.host, 0))

    def difference(self, queue_pair: ndpy.QueuePair) -> str:
        """A sentence if a connection uses another GID, otherwise ""."""
        path = queue_pair.path if self.gid is not None else None
        used = path.local_gid if path is not None else None
        if self.gid is None or used is None or used.index == self.gid.index:
            return ""
        return (
            f"the connection uses GID {used.index} ({used.address}, {used.type}) instead of {self.gid.index} "
            f"({self.gid.address}, {self.gid.type}). rdma_cm chooses the type: cma_roce_mode -d DEVICE -p PORT shows "
            "and sets it"
        )


ANYWHERE = Source()


def open_from(which: str | None, source: str | None, gid: str | None) -> tuple[ndpy.Adapter, Source]:
    """Open an adapter, with `source` or the GID's address as its only address. Raises as open_adapter() does, and
    UsageError.
    """
    if source is None and gid is None:
        return ndpy.open_adapter(which), ANYWHERE
    if source is not None and gid is not None:
        raise click.UsageError("--source and --gid exclude each other: a GID has an address")
    info = find(which)
    chosen = Source(source) if source is not None else _of_gid(info, gid or "")
    own = next((address for address in info.addresses if is_same_address(address, chosen.host or "")), None)
    if own is None:
        raise click.UsageError(
            f"{chosen.host} is not an address of {_port_of(info)}; its addresses are "
            f"{', '.join(info.addresses) or 'none'}"
        )
    info = dataclasses.replace(as_named(info, own) or info, addresses=(own,), asked_for=own)
    return implementation().open_adapter(info), Source(own, chosen.gid)


def _of_gid(info: ndpy.AdapterInfo, wanted: str) -> Source:
    port = port_in_use(info)
    gids = port.gids if port is not None else ()
    found = [gid for gid in gids if str(gid.index) == wanted or is_same_address(gid.address, wanted)]
    if not found:
        known = ", ".join(f"{gid.index} ({gid.address}, {gid.type})" for gid in gids)
        raise click.UsageError(f"{_port_of(info)} has no GID {wanted}; it has {known or 'none'}")
    gid = found[0]
    if not is_address(gid.address) or not any(is_same_address(gid.address, own) for own in info.addresses):
        raise click.UsageError(
            f"GID {gid.index} ({gid.address}, {gid.type}) is not an address of {_port_of(info)}, so connections cannot "
            f"come from it; --source takes {', '.join(info.addresses) or 'an address, and it has none'}"
        )
    # Of several with the address, rdma_cm chooses.
    return Source(gid.address, gid if len(found) == 1 else None)


def _port_of(info: ndpy.AdapterInfo) -> str:
    return f"port {info.port} of {info.name}" if len(info.ports) > 1 else info.name


def peer_name(info: ndpy.AdapterInfo) -> str:
    """What a second process opens to have the same port."""
    return f"{info.name}:{info.port}" if len(info.ports) > 1 else info.name
