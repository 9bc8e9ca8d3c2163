"""Ranks of `ndpy fleet` on this machine, which meet by the rendezvous."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.processes import Process, free_port

#: A pair has this long. A rank that hangs costs as much and 8 s.
PAIR_S = 3


class Ranks:
    """The processes of a run on this machine. Each is a node n0, n1 ... of its own."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, size: int, **variables: str) -> None:
        self._stack, self.file = stack, folder / "report.json"
        self.port = free_port()
        self._variables = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            **variables,
        }

    def start(
        self,
        rank: int,
        *words: object,
        adapter: str = "soft0",
        program: Sequence[str | Path] = ("-m", "ndpy"),
        **variables: str,
    ) -> Process:
        """Start a rank, perhaps by another program than `ndpy`. Its output is that of `ndpy fleet`."""
        words = ("fleet", adapter, *words)
        node = {"RANK": str(rank), "NDPY_FLEET_NODE": f"n{rank}", "NDPY_ADAPTER": adapter}
        own = {**self._variables, **node, **variables}
        return self._stack.enter_context(Process(sys.executable, *program, *map(str, words), variables=own))

    def first(self, *words: object, pair_s: float = PAIR_S, **options: Any) -> Process:
        """Start rank 0, which reports. options: those of start()."""
        return self.start(0, "--timeout", pair_s, "--json", self.file, *words, **options)

    def report(self) -> dict[str, Any]:
        return json.loads(self.file.read_text("utf-8"))
