"""The parts of a round that both sides have in common."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator

from ndpy import Operation
from ndpy.tools.cli.perf import loops
from ndpy.tools.cli.perf.end import End
from ndpy.tools.cli.perf.loops import Tally
from ndpy.tools.cli.perf.plan import Round
from ndpy.tools.cli.perf.watch import Ended, Watch

Tick = Callable[[int], None]


#: The message with which a side says that it makes progress, while the other one waits. There is no answer.
BEAT = {"command": "beat"}
_BEAT_S = 1.0


def no_tick(done: int) -> None:
    """For loops whose progress nobody follows."""


class Beat:
    """Tells the other side now and then that this one makes progress, and takes what that one says meanwhile.

    send: sends BEAT.
    """

    def __init__(self, send: Callable[[], None], watch: Watch) -> None:
        self._send = send
        self._watch = watch
        self._next = 0.0

    def __call__(self) -> None:
        """Call this when there was progress."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BEAT_S
            self._watch.look()
            self._send()


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


def send_all(end: End, watch: Watch, now: Round, tally: Tally, beat: Beat, tick: Tick) -> None:
    """This side's part of a bandwidth test: the warm-up, what counts, and a last message that can be told from the
    others.

    tick: called now and then with the number of groups that have ended, of those that count.
    """

    def warmed_up(done: int) -> None:
        beat()

    def counted(done: int) -> None:
        beat()
        tick(done)

    operation, group = end.plan.kind.operation, end.plan.group
    loop = loops.exchange if operation is Operation.SEND else loops.stream
    if now.warm_up:
        watch.restart()
        loop(end, watch.idle, now.size, group, now.warm_up, 0, Tally(), warmed_up)
    watch.restart()
    loop(end, watch.idle, now.size, group, now.groups, round(now.duration_s * 1e9), tally, counted)
    if operation is not Operation.READ:
        # Messages do not overtake each other. When this one has come, so have the others.
        end.fill(now.size, now.seed, last=True)
        watch.restart()
        loop(end, watch.idle, now.size, 1, len(end.queue_pairs), 0, Tally(), no_tick)


def take_until_told(end: End, watch: Watch, now: Round) -> None:
    """Take messages until the other side says that it has sent its last one.
    Watch.take_message() returns what it said.
    """
    watch.restart()
    with contextlib.suppress(Ended):
        loops.exchange(end, watch.idle_until_told, now.size, 1, 0, 0, Tally(), no_tick, expected=sys.maxsize)


def take_rest(end: End, watch: Watch, now: Round, sent: int) -> None:
    """Take messages until there are as many as the other side has sent."""
    watch.restart()
    loops.exchange(end, watch.idle, now.size, 1, 0, 0, Tally(), no_tick, expected=sent)
