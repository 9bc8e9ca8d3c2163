"""Points before and after each call of ndpy's native module on Windows; see kit/walking.py. Each test has its own
softnd.

A test fails if a completion port is used after it was closed. Its handle may belong to another file by then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.helpers import Keeper, connect_pair
from kit.walking import DEADLINE_S, Elsewhere, Points

from ndpy.platforms.networkdirect import (
    adapter,
    completion_queue,
    connection,
    events,
    listener,
    memory,
    native_calls,
    overlapped,
    poller,
    queue_pair,
    shared_receive_queue,
)

_MODULES = (
    adapter,
    completion_queue,
    connection,
    events,
    native_calls,
    listener,
    memory,
    overlapped,
    poller,
    queue_pair,
    shared_receive_queue,
)
_CLASSES = (
    completion_queue.NetworkDirectCompletionQueue,
    connection.NetworkDirectConnector,
    queue_pair.NetworkDirectQueuePair,
    shared_receive_queue.NetworkDirectSharedReceiveQueue,
)
_SLEEPS = ("WaitForSingleObject", "ndpy_take_packets")
_OF_A_PORT = ("ndpy_post_packet", "ndpy_take_packets")


_lib = native_calls.lib


class Native:
    """Stands in for ndpy's `lib`. Its calls are points."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._closed: set[int] = set()
        self.faults: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(_lib, name)
        if not callable(value):
            return value
        call = self.wrap(name, value)
        setattr(self, name, call)
        return call

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        shown = "sleep" if name in _SLEEPS else name

        def call(*arguments: Any) -> Any:
            self._points.point(shown, False)
            if name in _OF_A_PORT and self._number(arguments[0]) in self._closed:
                self.faults.append(f"{name} on a closed port")
            if name == "CloseHandle":
                self._closed.add(self._number(arguments[0]))
            result = function(*arguments)
            if name == "CreateIoCompletionPort":
                self._closed.discard(self._number(result))
            self._points.point(shown, True)
            return result

        return call

    @staticmethod
    def _number(handle: Any) -> int:
        return int(native_calls.ffi.cast("uintptr_t", handle))


@pytest.fixture
def points(softnd: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    """The points of all adapters that the test opens."""
    points = Points()
    native = Native(points)
    for module in _MODULES:
        if hasattr(module, "lib"):
            monkeypatch.setattr(module, "lib", native)
    for owner in _CLASSES:
        if "_lib" in vars(owner):
            monkeypatch.setattr(owner, "_lib", native)
        for name, value in list(vars(owner).items()):
            if isinstance(value, staticmethod) and hasattr(_lib, getattr(value.__func__, "__name__", "")):
                function = value.__func__
                monkeypatch.setattr(owner, name, staticmethod(native.wrap(function.__name__, function)))
    monkeypatch.setattr(sys, "unraisablehook", points.unraisable)
    yield points
    # Objects of the last turn would keep handles open.
    vars(points).clear()
    assert native.faults == []


class Scene:
    """An adapter with a connected pair. Messages arrive at the server, whose receives have contexts from 0."""

    def __init__(self, softnd: Any, *faults: str) -> None:
        self.keep = Keeper()
        self.adapter = self.keep(softnd.open(*faults))
        self.pair = connect_pair(self.keep, self.adapter, receive_queue_depth=32)
        self.queue = self.pair.server.cq
        self._sending = threading.Lock()
        self.first = self.arrived = self._posted = 0
        self.renew()

    def renew(self) -> None:
        """Begin a new turn. All messages of the last turn must have been taken."""
        self.first = self.arrived
        while self._posted < self.arrived + 16:
            self.pair.server.queue_pair.receive([], context=self._posted)
            self._posted += 1

    def arrive(self) -> None:
        """Send a message. When its send has completed, the message has arrived (contract F.5.4)."""
        with self._sending:
            self.pair.client.queue_pair.send([])
            (sent,) = self.pair.client.cq.wait(DEADLINE_S)
            sent.raise_for_status()
            self.arrived += 1

    def check(self, *taken: Any) -> None:
        """Each message of this turn was taken once or is still in the queue."""
        contexts = [completion.context for completions in taken for completion in completions]
        # The send may complete a moment before the receive.
        deadline = time.monotonic() + DEADLINE_S
        while len(contexts) < self.arrived - self.first and time.monotonic() < deadline:
            contexts += [completion.context for completion in self.queue.poll()]
        contexts += [completion.context for completion in self.queue.poll()]
        assert sorted(contexts) == list(range(self.first, self.arrived)), (
            f"{contexts}: {self.first} to {self.arrived - 1}"
        )

    def wait(
        self, points: Points, chosen: int, call: Callable[[], Any], action: Any, *, ends: bool = False
    ) -> Elsewhere:
        """Make the call, a wait, in a watched thread.

        If it sleeps before the chosen point, first a wake-up without a message wakes it, then a message. If it sleeps
        after the point, a message wakes it, unless the action itself ends the wait (`ends`).
        """

        def asleep() -> None:
            if points.sleeps == 1 and not points.reached:
                self.queue._wake_all()
            elif not (points.reached and ends):
                self.arrive()

        waiter = Elsewhere(call)
        points.watch(waiter.thread, chosen, action, asleep)
        return waiter.start()
