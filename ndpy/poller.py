"""Waiting for many completion queues at once."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TypeVar

from ndpy.completion import Completion, CompletionQueue
from ndpy.errors import ClosedError
from ndpy.forking import tell

P = TypeVar("P", bound="Poller")


class Poller:
    """Waits for any of its completion queues, which may be of several adapters.

    One thread waits at a time; add(), remove(), wake() and close() may be called from any other. Connection and device
    events are handled by each adapter's own thread and need no poller.
    """

    def __new__(cls: type[P]) -> P:
        if cls is Poller:
            from ndpy.provider import implementation

            cls = implementation().Poller
        return super().__new__(cls)

    def __init__(self) -> None:
        # Reentrant, so that a signal handler may call wake() in a thread that holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._forked = False
        tell(self)

    def _on_forked(self) -> None:
        """This is a forked child: nothing may reach the parent's descriptors."""
        self._lock = threading.RLock()
        self._closed = self._forked = True

    def add(self, completion_queue: CompletionQueue) -> None:
        """Wait for this queue too; harmless when repeated. What it holds already is delivered by the next wait()."""
        raise NotImplementedError

    def remove(self, completion_queue: CompletionQueue) -> None:
        """Wait for it no more; harmless if it was not added. Closing a queue removes it."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> list[tuple[CompletionQueue, list[Completion]]]:
        """Wait until queues have completions, and take up to 64 of each.

        Returns an empty list after wake(). Raises TimeoutError after timeout_s seconds, ClosedError when closed.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Make the present or next wait() return; safe from any thread and from a signal handler."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop; a waiting thread gets ClosedError. The completion queues are not closed."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self._closed

    def _check(self) -> None:
        if self._forked:
            raise ClosedError(
                "the poller is the parent process's and does not work in a forked child; make another one"
            )
        if self._closed:
            raise ClosedError("the poller is closed")

    def __enter__(self: P) -> P:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
