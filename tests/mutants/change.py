"""One change of one source file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A change of a source file.

    start, end: the line, counted from 1, and the byte in that line.
    statement: a test runs the change if it runs this line.
    in_function: the change takes effect when a function runs, not when the module is imported.
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
        return (
            f"{self.file}:{self.start[0]}:{self.start[1]} {self.kind}: {_short(self.old)} -> "
            f"{_short(self.new) or 'nothing'}"
        )

    def apply(self, source: str) -> str:
        return splice(source.encode().splitlines(keepends=True), self.start, self.end, self.new)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def splice(lines: list[bytes], start: tuple[int, int], end: tuple[int, int], new: str | None) -> str:
    """Return the whole text with `new` from start to end. If `new` is None, return only the text that stands there."""
    before = b"".join(lines[: start[0] - 1]) + lines[start[0] - 1][: start[1]]
    after = lines[end[0] - 1][end[1] :] + b"".join(lines[end[0] :])
    whole = b"".join(lines)
    if new is None:
        return whole[len(before) : len(whole) - len(after)].decode()
    return (before + new.encode() + after).decode()
