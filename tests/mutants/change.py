"""One change of one source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """start, end: line (from 1) and byte in it. statement: the line by which it is known whether a test runs it.

    in_function: it takes effect when a function runs, not when the module is imported.
    """

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    kind: str
    statement: int
    function: str
    in_function: bool

    @property
    def name(self) -> str:
        return f"{self.file}:{self.start[0]}:{self.start[1]} {self.kind}: {_short(self.old)} -> {_short(self.new) or 'nothing'}"

    def apply(self, source: str) -> str:
        return splice(source.encode().splitlines(keepends=True), self.start, self.end, self.new)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def splice(lines: list[bytes], start: tuple[int, int], end: tuple[int, int], new: str | None) -> str:
    """The whole text with `new` from start to end; without `new` what stands there now."""
    before = b"".join(lines[: start[0] - 1]) + lines[start[0] - 1][: start[1]]
    after = lines[end[0] - 1][end[1] :] + b"".join(lines[end[0] :])
    whole = b"".join(lines)
    if new is None:
        return whole[len(before) : len(whole) - len(after)].decode()
    return (before + new.encode() + after).decode()
