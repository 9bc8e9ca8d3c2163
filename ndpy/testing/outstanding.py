"""What was outstanding in this process when a test failed, above all when a deadline had passed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ndpy

_LOOK_S = 1.0
#: How many completions are shown from each end.
_SHOWN = 5


def outstanding() -> str:
    """What the adapters, queues and queue pairs of this process are waiting for, for the report of a test that failed.

    It takes the completions that are there. If a queue has some although a thread sleeps on it, a wake-up was lost. If
    a queue pair has requests outstanding although the queue is empty, it is the completions that were lost, or they are
    late.
    """
    load = f"load {os.getloadavg()[0]:.1f} on " if hasattr(os, "getloadavg") else ""
    lines = [f"{load}{os.cpu_count()} processors"]
    for adapter in [thing for thing in gc.get_objects() if isinstance(thing, ndpy.Adapter)]:
        if adapter.closed:
            continue
        lines.append(f"{adapter.info.name} ({adapter.info.driver}) at {time.monotonic():.3f} s")
        things = [adapter, *adapter._open_children()]
        for kind, describe in _LOOKS:
            lines += [f"  {_look(thing, describe)}" for thing in things if isinstance(thing, kind)]
    return "\n".join(lines)


def _look(thing: Any, describe: Callable[[Any], str]) -> str:
    found: list[str] = []

    def run() -> None:
        try:
            found.append(describe(thing))
        except Exception as error:
            found.append(f"{type(thing).__name__}: {error!r}")

    # A thread, because the test may hold a lock of the object, or wait for it.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LOOK_S)
    return found[0] if found else f"{thing!r}: no answer within {_LOOK_S:g} s"


def _of_queue(queue: Any) -> str:
    with queue._lock:
        handed_over = queue._undelivered()
        sleeping, armed = len(queue._waiters), len(queue._armed)
    found = queue.poll(queue.depth)
    shown = found if len(found) <= 2 * _SHOWN else [*found[:_SHOWN], "...", *found[-_SHOWN:]]
    return (
        f"{queue._describe()}: {handed_over} completions handed over and not taken, {len(found)} in all: {shown}; "
        f"{sleeping} threads sleep on it, {armed} notifications are armed"
        + (f"; {queue._failure()}" if queue._failure is not None else "")
    )


def _of_queue_pair(queue_pair: Any) -> str:
    with queue_pair._lock:
        sent, received = (
            queue_pair._lib.ndpy_queue_pair_in_flight(queue_pair._rings, side) if queue_pair._rings else 0
            for side in (0, 1)
        )
    state = queue_pair.query().state.name if ndpy.Capability.MODIFY in queue_pair.adapter.info.capabilities else "?"
    return f"{queue_pair._describe()} in {state}: {sent} initiator requests and {received} receives outstanding" + (
        "; its connection has ended" if queue_pair.connection_ended else ""
    )


def _of_adapter(adapter: ndpy.Adapter) -> str:
    if ndpy.Capability.COUNTERS not in adapter.info.capabilities:
        return "no counters"
    ports = adapter.counters().items()
    return "; ".join(
        f"counters of port {port}: " + ", ".join(f"{name} {value}" for name, value in counters.items() if value)
        for port, counters in ports
    )


_LOOKS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (ndpy.CompletionQueue, _of_queue),
    (ndpy.QueuePair, _of_queue_pair),
    (ndpy.Adapter, _of_adapter),
)
