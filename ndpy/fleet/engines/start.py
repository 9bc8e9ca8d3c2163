"""How a rank was started."""

from __future__ import annotations

import dataclasses
import secrets
import socket

import psutil

from ndpy.vocabulary.addresses import Reach, reach
from ndpy.vocabulary.info import is_address

#: Of a token that nobody gave.
TOKEN_BYTES = 32


class EngineError(Exception):
    """The ranks cannot find each other. The text says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Start:
    """How this rank was started.

    Attributes:
        engine: "mpi", "rendezvous" or "ssh", for the report.
        rank, size: the number of this rank, and how many there are.
        hosts: where rank 0 may be reached, the best one first.
        port: the port of the rendezvous.
        token: what all ranks know and nobody else. Without one, b"", rank 0 listens on the loopback interface only.
    """

    engine: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    port: int
    token: bytes

    @property
    def who(self) -> tuple[str, str]:
        """This process and the one that reports, for messages."""
        return ("this host", "`ndpy fleet --hosts`") if self.engine == "ssh" else (f"rank {self.rank}", "rank 0")

    def __post_init__(self) -> None:
        """Raises EngineError if strangers on the network could join."""
        if not self.token and not all(map(_is_loopback, self.hosts)):
            raise EngineError(
                f"rank 0 is at {', '.join(self.hosts)}, which others may reach too; give all ranks one secret, such as "
                "with `export NDPY_FLEET_TOKEN=$(openssl rand -hex 16)` before they start, or with --token-file"
            )


def random_token() -> bytes:
    """A token for a job that was given none."""
    return secrets.token_bytes(TOKEN_BYTES)


def own_addresses() -> tuple[str, ...]:
    """This machine's IPv4 addresses, without loopback."""
    return tuple(
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and reach(host) is Reach.LOOPBACK)
