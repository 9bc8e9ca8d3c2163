"""Reads the kernel log and finds bugs of the kernel in it."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ndpy.vocabulary.descriptors import owned

# Each pattern matches a line that the kernel prints when one of its own invariants is broken. A program cannot cause
# such a line in a correct kernel, however it misuses an adapter.
_BUG = re.compile(
    r"""
      \bBUG\b | \bWARNING:\ (?!.*\bdeprecated\b) | \bOops\b | \bKASAN\b | \bKCSAN\b | \bUBSAN\b
    | \bKernel\ panic\b | \bgeneral\ protection\ fault\b | \bunable\ to\ handle\b
    | \bsoft\ lockup\b | \bhard\ LOCKUP\b | \bself-detected\ stall\b | \bdetected\ stalls?\b
    | \bblocked\ for\ more\ than\ \d+\ seconds\b | \brefcount_t:
    | \bINFO:\ (?:possible|suspicious|inconsistent|trying\ to\ register) | \bdouble\ free\b
    | \bslab\ error\b | \bmemory\ leak\b | \bscheduling\ while\ atomic\b | \blist_(?:add|del)\ corruption\b
    | \bunregister_netdevice:\ waiting\ for\b | \bbad\ page\ (?:state|map)\b
    | \bkernel\ stack\ overflow\b | \bstack-protector:
    """,
    re.VERBOSE,
)

_LINES_AFTER = 24

# Each oops has a line with its error code and its number. Older kernels leave out the word "Oops".
_OOPS = re.compile(r": [0-9a-f]{4,} \[#\d+\]")
_PANIC = re.compile(r"\bKernel panic - not syncing\b")
# 0010 is the kernel's code segment.
_PLACE = re.compile(r"\bRIP: 0010:(\S+)")
_TIME = re.compile(r"^(?:\[[^]]*\]\s*)+")
# The watchdog reports a processor again and again, with the time since the processor last ran another task.
_LOCKUP = re.compile(r"\bsoft lockup - CPU#\d+ stuck for (\d+)s!.*")
# Less may be an emulated processor that gets little time.
_LOCKED_UP_S = 120


@dataclass(frozen=True)
class Record:
    """One record of /dev/kmsg: its number, its time in seconds since boot, and its text without continuation fields."""

    sequence: int
    seconds: float
    text: str

    def __str__(self) -> str:
        return f"[{self.seconds:12.6f}] {self.text}"


def parse(line: str) -> Record | None:
    """Parse one line of /dev/kmsg. Returns None for a line that begins no record."""
    head, separator, text = line.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or line.startswith(" "):
        return None
    try:
        return Record(int(fields[1]), int(fields[2]) / 1e6, text)
    except ValueError:
        return None


@dataclass
class Collector:
    """Collects records from chunks of bytes. A record that arrives twice is kept once."""

    records: list[Record] = field(default_factory=list)
    _rest: bytes = b""
    _last: int = -1

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            record = parse(line.decode("utf-8", "replace"))
            if record is not None and record.sequence > self._last:
                self._last = record.sequence
                self.records.append(record)

    def position(self, text: str) -> int | None:
        """The index of the first record with this text, or None."""
        return next((i for i, record in enumerate(self.records) if record.text == text), None)


def find_bugs(records: Iterable[Record]) -> list[Record]:
    """The records that report a bug of the kernel, each with the lines of its trace."""
    found: list[Record] = []
    left = 0
    for record in records:
        if _BUG.search(record.text):
            left = _LINES_AFTER
        if left:
            found.append(record)
            left -= 1
            if "end trace" in record.text:
                left = 0
    return found


def console_tail(console: str) -> str:
    """The end of a console's text, from the first line that reports a bug, or its last 20 lines."""
    lines = console.splitlines()[-100:]
    first = next((i for i, line in enumerate(lines) if _BUG.search(line)), max(len(lines) - 20, 0))
    return "\n".join(lines[first:])


def fatal_line(console: str) -> str:
    """The line that reports a panic or an oops, with its place if the kernel named one. "" if there is no such line."""
    lines = console.splitlines()
    for i, line in enumerate(lines):
        said = _TIME.sub("", line.strip())
        if _PANIC.search(said):
            return said
        if _OOPS.search(said):
            place = next((found[1] for later in lines[i:] if (found := _PLACE.search(later))), "")
            return f"{said} at {place}" if place else said
    return ""


def lockup_line(console: str) -> str:
    """The line that reports a processor that does one thing for two minutes, which does not end then. "" if there is
    none.
    """
    for found in _LOCKUP.finditer(console):
        if int(found[1]) >= _LOCKED_UP_S:
            return found[0].rstrip()
    return ""


class RunningKernel:
    """The log of the running kernel, from now on. `readable` is False if this process may not read it."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._log: io.FileIO | None = None
        try:
            self._log = owned(os.open, "/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log.fileno(), 0, os.SEEK_END)
        except OSError:
            self.close()

    @property
    def readable(self) -> bool:
        return self._log is not None

    def read(self) -> list[Record]:
        """All the records since this object was created."""
        while self._log is not None:
            try:
                self._collector.feed(os.read(self._log.fileno(), 65536))
            except BlockingIOError:
                break
            except BrokenPipeError:  # unread records were overwritten; continue with the next one
                continue
        return self._collector.records

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
