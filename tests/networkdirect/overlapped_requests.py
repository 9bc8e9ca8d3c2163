"""Helpers for tests whose requests are in flight while something else happens."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

from kit.helpers import DEADLINE_S, Pair, wait_until

import ndpy
from ndpy import Flags


class EndingCounts:
    """Counts how often each Pending ends."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._pendings: list[ndpy.Pending[Any]] = []

    def watch(self, pending: ndpy.Pending[Any]) -> ndpy.Pending[Any]:
        self._pendings.append(pending)
        self._counts[id(pending)] = 0

        def ended(which: ndpy.Pending[Any]) -> None:
            self._counts[id(which)] += 1

        pending.add_done_callback(ended)
        return pending

    def check(self) -> None:
        """Wait until every watched Pending has ended. None may end more than once."""
        wait_until(lambda: all(pending.done() for pending in self._pendings), "every request ends")
        counts = sorted(set(self._counts.values()))
        assert set(counts) <= {1}, f"a request ended more often than once: {counts}"


def outcome(pending: ndpy.Pending[Any]) -> Any:
    """The value or the exception that a Pending ended with."""
    try:
        return pending.result(DEADLINE_S)
    except ndpy.NdpyError as error:
        return error


def pause(rng: random.Random, longest_s: float) -> None:
    """Let other threads run for a random time."""
    until = time.perf_counter() + rng.random() * longest_s
    while time.perf_counter() < until:
        time.sleep(0)


def send_empty(pair: Pair, context: int = 0) -> None:
    """Send an empty message from the client to the server. The server's receive has this context."""
    pair.server.queue_pair.receive([], context=context)

    def sent() -> bool:
        # Polling frees the slots of silent requests.
        pair.client.cq.poll()
        with contextlib.suppress(ndpy.QueueFullError):
            pair.client.queue_pair.send([], flags=Flags.SILENT_SUCCESS)
            return True
        return False

    wait_until(sent, "there is room for a send")
