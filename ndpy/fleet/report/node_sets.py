"""Names of nodes as one word, such as n[1-3,7]. `ndpy.fleet.topology.node_set()` reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def fold(names: Iterable[str]) -> str:
    """The set of these names. The last number of each name is what ranges are made of.

    Names that differ elsewhere, or in their leading zeros, are parts of their own, with a comma between them.
    """
    parts: dict[tuple[str, str, int], set[int]] = {}
    for name in set(names):
        match = re.fullmatch(r"(.*?)([0-9]{1,9})([^0-9]*)", name)
        # 7 is written with one digit, so only 007 has a width. A plain number gets the width that it needs.
        width = len(match[2]) if match and match[2].startswith("0") and len(match[2]) > 1 else 0
        key = (match[1], match[3], width) if match else (name, "", -1)
        parts.setdefault(key, set()).add(int(match[2]) if match else 0)
    return ",".join(sorted(text for key, numbers in _padded(parts).items() for text in [_part(*key, sorted(numbers))]))


def _padded(parts: dict[tuple[str, str, int], set[int]]) -> dict[tuple[str, str, int], set[int]]:
    """The same parts, but 010 follows 009 in one range, though 010 could stand without a width."""
    for prefix, suffix, width in [key for key in parts if key[2] > 0]:
        plain = parts.get((prefix, suffix, 0), set())
        fit = {number for number in plain if len(str(number)) == width}
        parts[prefix, suffix, width] |= fit
        plain -= fit
    return {key: numbers for key, numbers in parts.items() if numbers}


def _part(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    if width < 0:
        return prefix
    ranges = [
        f"{first:0{max(width, 1)}}" + (f"-{last:0{max(width, 1)}}" if last > first else "")
        for first, last in _runs(numbers)
    ]
    inside = ",".join(ranges)
    return f"{prefix}[{inside}]{suffix}" if len(numbers) > 1 else f"{prefix}{inside}{suffix}"


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of numbers without a gap."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
