"""The places of a program where faults can happen, and how often it passes them: the file in which the executors
count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ndpy.faults import kinds

# softrdma/faults/scenario.h: struct count_header; struct count_slot, whose key is COUNT_KEY(). A slot of key 0 is free.
_HEADER = struct.Struct("=8sII")
_MAGIC = b"ndpcount"
_VERSION = 1
_SLOT = struct.Struct("=QQ")


@dataclass(frozen=True, order=True)
class Passages:
    """How often a program passes a place.

    Attributes:
        at: "call", "request", "message", "connection" or "adapter".
        name: the call or the operation, or "".
        queue_pair: its number in the order of creation, or 0.
        count: how often it was reached. With several processes, the greatest count.
    """

    at: str
    name: str
    queue_pair: int
    count: int


def read(path: Path) -> list[Passages]:
    """The places of a file, sorted. None if no program has counted."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _HEADER.size:
        return []
    magic, version, slots = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"{path} has counts of another version: {magic!r} {version}")
    return sorted(_passages(data[_HEADER.size : _HEADER.size + slots * _SLOT.size]))


def _passages(slots: bytes) -> Iterator[Passages]:
    for key, count in _SLOT.iter_unpack(slots):
        if key:
            at, what = kinds.PLACES[key >> 48 & 0x7FFF], key >> 32 & 0xFFFF
            names = {
                "call": [call.name for call in kinds.CALLS],
                "request": kinds.OPERATIONS,
                "message": kinds.OPERATIONS,
            }
            name = names[at][what - 1] if at in names and what else ""
            yield Passages(at, name, key & 0xFFFFFFFF, count)
