"""The parts of a round that both sides have in common."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

from ndpy import Operation
from ndpy.cli.perf import loops
from ndpy.cli.perf.end import End
from ndpy.cli.perf.loops import Tally
from ndpy.cli.perf.plan import Round
from ndpy.cli.perf.watch import Ended, Watch

Tick = Callable[[int], None]


def no_tick(done: int) -> None:
    """For loops whose progress nobody follows."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector from running in the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def send_all(end: End, watch: Watch, now: Round, tally: Tally, tick: Tick) -> None:
    """This side's part of a bandwidth test: the warm-up, what counts, and a last message that can be told from the others."""
    operation, group = end.plan.kind.operation, end.plan.group
    loop = loops.exchange if operation is Operation.SEND else loops.stream
    if now.warm_up:
        watch.restart()
        loop(end, watch.idle, now.size, group, now.warm_up, 0, Tally(), no_tick)
    watch.restart()
    loop(end, watch.idle, now.size, group, now.groups, round(now.duration_s * 1e9), tally, tick)
    if operation is not Operation.READ:
        # Messages do not overtake each other. When this one has come, so have the others.
        end.fill(now.size, now.seed, last=True)
        watch.restart()
        loop(end, watch.idle, now.size, 1, len(end.queue_pairs), 0, Tally(), no_tick)


def take_until_told(end: End, watch: Watch, now: Round) -> None:
    """Take messages until the other side says that it has sent its last one. Watch.take_message() returns what it said."""
    watch.restart()
    with contextlib.suppress(Ended):
        loops.exchange(end, watch.idle_until_told, now.size, 1, 0, 0, Tally(), no_tick, expected=sys.maxsize)


def take_rest(end: End, watch: Watch, now: Round, sent: int) -> None:
    """Take messages until there are as many as the other side has sent."""
    watch.restart()
    loops.exchange(end, watch.idle, now.size, 1, 0, 0, Tally(), no_tick, expected=sent)
