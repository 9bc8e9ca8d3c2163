"""Programs that a command runs until they end, or until a deadline. Then it ends them and everything they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil

#: So much of what a program prints is kept: its end.
_KEPT = 256 << 10
# What a program has started has so long to end after it.
_GRACE_S = 0.5
_LOOK_S = 0.05
# prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


def run_to_its_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program. Ctrl-C reaches it by the terminal, and SIGTERM is passed on, so it decides how it ends.

    Returns its status, below 0 for a signal.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    former = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, pass_on)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, former[0])
        signal.signal(signal.SIGTERM, former[1])


def status_of(code: int) -> int:
    """The exit status of a process, as a shell has it."""
    return code if code >= 0 else 128 - code


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: the exit status, below 0 for a signal. None if the deadline passed.
        seconds: how long it ran.
        output: the end of the output of it and its children.
        left: names of the processes that it left behind. They are ended.
    """

    status: int | None
    seconds: float
    output: str
    left: tuple[str, ...]


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """In the block, orphans among the descendants of this process become its children. So it misses no process."""
    _adopt(True)
    try:
        yield
    finally:
        end_descendants(psutil.Process())
        _adopt(False)


def _adopt(on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def run_until(words: Sequence[str], environment: Mapping[str, str], deadline_s: float) -> Ended:
    """Run a program, in a session of its own, and end whatever it leaves. Use it in adopting().

    Raises OSError or ValueError if the program cannot be started.
    """
    began = time.monotonic()
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as output:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        kept, status = _follow(process, reading, began + deadline_s)
        seconds = time.monotonic() - began
        left = _leftovers() if status is not None else ()
    finally:
        end_descendants(psutil.Process())
        os.close(reading)
    return Ended(status, seconds, kept.decode("utf-8", "replace"), left)


def _follow(process: subprocess.Popen[bytes], reading: int, deadline: float) -> tuple[bytes, int | None]:
    """Read what a program prints until it has ended, or the deadline has passed."""
    kept = b""
    is_open = True
    while True:
        status = process.poll()
        ready = select.select([reading], [], [], 0 if status is not None else _LOOK_S)[0] if is_open else []
        if ready:
            chunk = os.read(reading, 65536)
            kept, is_open = (kept + chunk)[-_KEPT:], bool(chunk)
        elif status is not None:
            return kept, status
        elif not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
        if time.monotonic() >= deadline:
            return kept, status


def _leftovers() -> tuple[str, ...]:
    """The descendants that still run, after a moment in which they may end."""
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, _GRACE_S)
    names = []
    for child in alive:
        with contextlib.suppress(psutil.Error):
            names.append(f"{child.name()} ({child.pid})")
    return tuple(names)


def end_descendants(process: psutil.Process) -> None:
    """Kill all descendants, and wait for them. None starts another meanwhile."""
    while children := process.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, _GRACE_S)
