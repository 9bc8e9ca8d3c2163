"""Where the system's files are, and how they are read: /sys, /dev, /proc, /etc, /lib, /run and /usr.

Whatever looks at this machine asks here, so that tests can put the files of another machine in their place.
Paths are written as users know them: path("/sys/class/infiniband", name).
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path

from ndpy.vocabulary.descriptors import owned

_root = Path("/")
# More than any of these files has. The lists of kernel modules have about a million.
_MOST_OCTETS = 1 << 24
# A file of /sys gives all that it has at once.
_PART_OCTETS = 1 << 14
# A pipe or a device in place of a file must not make this wait. Windows would translate ends of lines.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
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
    opened: list[int] = []
    text = bytearray()
    try:
        # One call opens the file and notes it. owned() takes no folder, and `place` may be one.
        opened.extend(map(os.open, (place,), (_READING,)))
        while len(text) < _MOST_OCTETS and (part := os.read(opened[0], _PART_OCTETS)):
            text += part
    except (OSError, ValueError):
        return ""
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return text.decode(errors="replace").strip()


def read_number(place: Path) -> int | None:
    """The number in a file, of at most 64 bits. None if the file has none; "max" is not a number."""
    return number_in(read(place))


def number_in(text: str) -> int | None:
    """The number that a file's text is. See read_number()."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def names(folder: Path, pattern: str = "*") -> list[str]:
    """The names in a folder that match a pattern, sorted. Empty if the folder is absent or unreadable."""
    try:
        return sorted(fnmatch.filter(os.listdir(folder), pattern))
    except OSError:
        return []


def refusal(place: Path) -> OSError | None:
    """Why a device file cannot be opened for reading and writing. None if it can."""
    try:
        owned(os.open, place, os.O_RDWR | os.O_CLOEXEC).close()
    except OSError as error:
        return error
    return None


class Snapshot:
    """Files and folders as they were when they were first looked at. Each is read once.

    Files change. Make a new one for each description, and do not keep it.
    """

    def __init__(self) -> None:
        self._texts: dict[Path, str] = {}
        self._names: dict[Path, list[str]] = {}

    def read(self, place: Path) -> str:
        """As read()."""
        text = self._texts.get(place)
        if text is None:
            text = self._texts[place] = read(place)
        return text

    def read_number(self, place: Path) -> int | None:
        """As read_number()."""
        return number_in(self.read(place))

    def names(self, folder: Path, pattern: str = "*") -> list[str]:
        """As names()."""
        found = self._names.get(folder)
        if found is None:
            found = self._names[folder] = names(folder)
        return fnmatch.filter(found, pattern)
