"""How a rank was started."""

from __future__ import annotations

import dataclasses


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
