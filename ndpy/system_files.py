"""Where the system's files are, and how they are read: /sys, /dev, /proc, /etc, /lib, /run and /usr.

Whatever looks at this machine asks here, so that tests can put the files of another machine in their place.
Paths are written as users know them: path("/sys/class/infiniband", name).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_root = Path("/")
# More than any of these files has. The lists of kernel modules have about a million.
_MOST_OCTETS = 1 << 24
_MOST_DIGITS = 20


@contextlib.contextmanager
def below(root: Path) -> Iterator[None]:
    """Take this folder for the machine's "/" meanwhile, in all threads."""
    global _root
    before, _root = _root, root
    try:
        yield
    finally:
        _root = before


def path(first: str, *more: str) -> Path:
    """The place of a file or folder of this machine. first: an absolute path."""
    return _root.joinpath(first.lstrip("/"), *more)


def shown(place: Path) -> str:
    """The path as users know it, of a place that path() returned."""
    return f"/{place.relative_to(_root).as_posix()}"


def read(place: Path) -> str:
    """The text of a file, without the space around it. "" if it is absent, unreadable or has just gone.

    Some files of /sys fail with EINVAL when they are read, instead of being absent.
    """
    try:
        # A pipe or a device in place of a file must neither make this wait nor fill the memory.
        with open(place, "rb", opener=_open_at_once) as file:
            return (file.read(_MOST_OCTETS) or b"").decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def _open_at_once(place: str, flags: int) -> int:
    return os.open(place, flags | getattr(os, "O_NONBLOCK", 0))


def read_number(place: Path) -> int | None:
    """The number in a file, of at most 64 bits. None if the file has none; "max" is not a number."""
    text = read(place)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def names(folder: Path, pattern: str = "*") -> list[str]:
    """The names in a folder that match a pattern, sorted. Empty if the folder is absent or unreadable."""
    try:
        return sorted(entry.name for entry in folder.glob(pattern))
    except OSError:
        return []


def refusal(place: Path) -> OSError | None:
    """Why a device file cannot be opened for reading and writing. None if it can."""
    try:
        os.close(os.open(place, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error
    return None
