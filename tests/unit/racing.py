"""Points between the native calls of ndpy.platforms.verbs, over the provider without a device. see kit/walking.py.

There is one before and after each call of libibverbs and librdmacm (fake_verbs.py), of epoll, of a queue's sleep, and
of an event descriptor.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import linux_only as linux_only
from kit.deadlines import wait_until as wait_until
from kit.walking import DEADLINE_S as DEADLINE_S
from kit.walking import GRACE_S as GRACE_S
from kit.walking import Calls as _Calls
from kit.walking import Elsewhere as Elsewhere
from kit.walking import Points as Points
from kit.walking import at_each_point as at_each_point
from kit.walking import walk as walk

import ndpy
from ndpy.platforms.verbs import completion_queue, events, poller
from ndpy.platforms.verbs.completion_queue import VerbsCompletionQueue
from ndpy.platforms.verbs.native_calls import ffi, lib

_OS = {name: name for name in ("eventfd_read", "eventfd_write", "close")}
_EPOLL = {"poll": "sleep", **{name: f"epoll.{name}" for name in ("register", "modify", "unregister", "close")}}


# The error that a wait for a queue raises after each kind of loss.
LOSSES = {"removal": ndpy.DeviceRemovedError, "overrun": ndpy.CompletionQueueOverrunError}


class _Select:
    """Stands in for the module select. The calls of its epoll objects are points."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def __getattr__(self, name: str) -> Any:
        if name == "epoll":
            return lambda: _Calls(select.epoll(), self._points, _EPOLL)
        return getattr(select, name)


def play_sleep(monkeypatch: pytest.MonkeyPatch, sleep: Callable[..., int]) -> None:
    """Let the queues that are made from now on sleep in sleep(real, native, waiter, milliseconds), where real() takes
    the other three.
    """
    table = lib.ndpy_provider_table()[0]
    callback = ffi.callback(
        "int(struct ndpy_completion_queue *, int, int)", lambda *arguments: sleep(table.sleep, *arguments)
    )
    played = ffi.new("struct ndpy_provider *", table)
    played.sleep = callback
    kept = played, callback
    monkeypatch.setattr(VerbsCompletionQueue, "_native_provider", staticmethod(lambda: kept[0]))


@pytest.fixture
def points(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    points = Points()
    fake.call_at_points(points.native)
    monkeypatch.setattr(sys, "unraisablehook", points.unraisable)
    for module in (completion_queue, events, poller):
        monkeypatch.setattr(module, "os", _Calls(os, points, _OS))
    for module in (events, poller):
        monkeypatch.setattr(module, "select", _Select(points))

    def sleep(real: Callable[..., int], *arguments: Any) -> int:
        points.point("sleep", False)
        try:
            return real(*arguments)
        finally:
            points.point("sleep", True)

    play_sleep(monkeypatch, sleep)
    yield points
    fake.call_at_points(None)


@pytest.fixture
def adapter(fake: Any, points: Points) -> Iterator[Any]:
    """An open adapter. The calls of its thread are points too."""
    with fake.open() as adapter:
        yield adapter


class Queue:
    """A completion queue, and a queue pair with posted receives. Contexts count from 0. arrive() completes the next."""

    def __init__(self, fake: Any, adapter: Any, receives: int = 16) -> None:
        self.fake = fake
        self.queue = adapter.create_completion_queue(64)
        self.queue_pair = adapter.create_queue_pair(self.queue, receive_queue_depth=16)
        self.arrived = 0
        self._arriving = threading.Lock()
        for context in range(receives):
            self.queue_pair.receive([], context=context)

    def arrive(self) -> None:
        with self._arriving:
            assert self.fake.complete(self.queue_pair)
            self.arrived += 1

    def lose(self, points: Points, how: str) -> None:
        """Lose the adapter's device or the queue. LOSSES names the kinds. The adapter's thread notices the loss."""
        queue, adapter = self.queue, self.queue._adapter
        if how == "removal":
            self.fake.remove(adapter)
            points.elsewhere(lambda: wait_until(lambda: adapter._defunct, "the adapter knows"))
        else:
            self.fake.overrun(queue)
            points.elsewhere(lambda: wait_until(lambda: queue._failure, "the queue knows"))

    def check(self, *taken: Any) -> None:
        """Each completion that arrived was taken once or is still in the queue."""
        left = self.queue.poll()
        contexts = [completion.context for completions in (*taken, left) for completion in completions]
        assert sorted(contexts) == list(range(self.arrived))

    def close(self) -> None:
        self.queue_pair.close()
        self.queue.close()

    def check_and_close(self, *taken: Any) -> None:
        self.check(*taken)
        self.close()


@pytest.fixture
def scene(fake: Any) -> Iterator[Queue]:
    """A queue with posted receives, whose calls are no points."""
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        yield scene
        scene.close()
