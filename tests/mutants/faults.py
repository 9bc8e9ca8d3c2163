"""Faults of logic that a person wrote down: each is a file in logic/, and replaces some lines of one source.

    kind: once
    area: connections
    file: ndpy/objects/connection.py
    tests: tests/contract/test_connector.py::test_one tests/unit/test_two.py::test_two
    what: a sentence that is wrong with this fault

    -the lines as they are, each behind a minus
    +what takes their place, each behind a plus

The lines have to stand in the file exactly once. README.md has the kinds and the areas.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from change import Change

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "logic"

#: The short name of each kind, and what it stands for.
KINDS = {
    "alike": "both ends are alike in every test",
    "once": "an object is used once",
    "cancelled": "a cancellation or a failure comes just as something arrives",
    "merged": "ranges that are merged or split",
    "figures": "verdicts and figures are checked for their form",
    "strangers": "security without an attacker",
    "limits": "limits of the peer",
    "let-go": "what is let go",
}
AREAS = ("aio", "cache", "waiting", "connections", "commands", "doctor", "core", "engine")
LEAST_OF_EACH = 5
LEAST = 60
_FIELDS = ("kind", "area", "file", "tests", "what")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: of its file, without the ending.
        tests: which ones should notice it. One of them has to.
        old, new: whole lines.
    """

    name: str
    kind: str
    area: str
    file: str
    tests: tuple[str, ...]
    what: str
    old: str
    new: str

    def change(self, source: str) -> Change:
        """The change of the text of its file. Raises ValueError if its lines do not stand there exactly once."""
        found = ("\n" + source).count("\n" + self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its lines stand in {self.file} {found} times, not once")
        line = source[: ("\n" + source).index("\n" + self.old)].count("\n") + 1
        end = line + self.old.count("\n")
        return Change(self.file, (line, 0), (end, 0), self.old, self.new, self.kind, line, "", True)

    def mutated(self, root: Path = ROOT) -> str:
        """The whole text of its file in a checkout, with the fault. Raises ValueError as change() does."""
        source = (root / self.file).read_text(encoding="utf-8")
        # With one more line, because the fault may end with the last one.
        return self.change(source).apply(source + "\n").removesuffix("\n")


def read_fault(path: Path) -> Fault:
    """Read a file of a fault. Raises ValueError with the reason if it is none."""
    head, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if sorted(fields) != sorted(_FIELDS):
        raise ValueError(f"{path.name}: the fields are {', '.join(_FIELDS)}, not {', '.join(fields)}")
    if fields["kind"] not in KINDS or fields["area"] not in AREAS:
        raise ValueError(f"{path.name}: there is no kind {fields['kind']} or no area {fields['area']}")
    parts: dict[str, list[str]] = {"-": [], "+": []}
    for line in body.splitlines():
        if line[:1] not in parts:
            raise ValueError(f"{path.name}: a line of the change begins with - or +, not as {line!r}")
        parts[line[0]].append(line[1:] + "\n")
    old, new = "".join(parts["-"]), "".join(parts["+"])
    if not old or old == new:
        raise ValueError(f"{path.name}: it changes nothing")
    tests = tuple(fields["tests"].split())
    return Fault(path.stem, fields["kind"], fields["area"], fields["file"], tests, fields["what"], old, new)


def read_faults() -> list[Fault]:
    """All faults, by name."""
    return [read_fault(path) for path in sorted(FOLDER.glob("*.fault"))]


@functools.cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def is_a_test(name: str) -> bool:
    """Whether there is a test function of this name, FILE::FUNCTION or FILE::FUNCTION[PARAMETERS]."""
    file, _, function = name.partition("::")
    return (ROOT / file).is_file() and function.partition("[")[0] in _functions(file)
