"""The kernel log: reading records of /dev/kmsg and finding signs of trouble among them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Each pattern is a line that kernel code prints when an invariant of its own is broken; none of
# them appears in a healthy run, however hard a program misuses an adapter.
_TROUBLE = re.compile(
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

# Every oops has a line with its error code and its number; older kernels leave out the word.
_OOPS = re.compile(r": [0-9a-f]{4,} \[#\d+\]")
_PANIC = re.compile(r"\bKernel panic - not syncing\b")
# 0010 is the kernel's code segment.
_PLACE = re.compile(r"\bRIP: 0010:(\S+)")
_TIME = re.compile(r"^(?:\[[^]]*\]\s*)+")


@dataclass(frozen=True)
class Record:
    """One record of /dev/kmsg: its number, seconds since boot, and text without continuation fields."""

    sequence: int
    seconds: float
    text: str

    def __str__(self) -> str:
        return f"[{self.seconds:12.6f}] {self.text}"


def parse(line: str) -> Record | None:
    """The record in one line of /dev/kmsg, or None for a line that belongs to no record."""
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
    """Collects records from chunks of bytes; a record seen twice counts once."""

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
        """The index of the first record that is `text`, or None."""
        return next((i for i, record in enumerate(self.records) if record.text == text), None)


def trouble(records: Iterable[Record]) -> list[Record]:
    """The records that report trouble, each with the lines of its trace; empty if all is well."""
    found: list[Record] = []
    left = 0
    for record in records:
        if _TROUBLE.search(record.text):
            left = _LINES_AFTER
        if left:
            found.append(record)
            left -= 1
            if "end trace" in record.text:
                left = 0
    return found


def last_words(console: str) -> str:
    """The end of a console's text, from the first sign of trouble near it."""
    lines = console.splitlines()[-100:]
    first = next((i for i, line in enumerate(lines) if _TROUBLE.search(line)), max(len(lines) - 20, 0))
    return "\n".join(lines[first:])


def death(console: str) -> str:
    """The line in which a kernel said that it died, with the place if it named one; empty if it said no such thing."""
    lines = console.splitlines()
    for i, line in enumerate(lines):
        said = _TIME.sub("", line.strip())
        if _PANIC.search(said):
            return said
        if _OOPS.search(said):
            place = next((found[1] for later in lines[i:] if (found := _PLACE.search(later))), "")
            return f"{said} at {place}" if place else said
    return ""


class RunningKernel:
    """The log of the kernel that runs us, from now on. `readable` is False without the right to read it."""

    def __init__(self) -> None:
        self._collector = Collector()
        self._fd: int | None = None
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    @property
    def readable(self) -> bool:
        return self._fd is not None

    def read(self) -> list[Record]:
        """All records since this object was made."""
        while self._fd is not None:
            try:
                self._collector.feed(os.read(self._fd, 65536))
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before we read them; go on with the next
                continue
        return self._collector.records

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
