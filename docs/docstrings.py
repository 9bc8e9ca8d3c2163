"""Reads the docstrings of ndpy, and writes them for Sphinx.
CONTRIBUTING.md and shared rules say how they are written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field

#: The paragraphs that begin with one of these words and a colon are lists of names.
WORDS = ("Parameters", "Attributes", "Fields", "Names", "Returns", "Yields", "Raises", "Source")
_SECTION = re.compile(rf"({'|'.join(WORDS)}):(?: (.*))?$")
_ENTRY = re.compile(r"([A-Za-z_][\w.…]*(?:(?:,| and| or) [A-Za-z_][\w.…]*)*(?: and so on)?): (.*)$")


@dataclass
class Entry:
    """A line of a list: what is said of some names."""

    names: tuple[str, ...]
    text: str


@dataclass
class Section:
    word: str
    #: What stands behind the word itself.
    text: str = ""
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Docstring:
    #: Paragraphs, and the blocks that are moved in.
    body: list[str]
    sections: list[Section]

    @property
    def summary(self) -> str:
        return self.body[0] if self.body else ""

    def entries(self, *words: str) -> dict[str, str]:
        """What the lists say of each name."""
        chosen = [section for section in self.sections if section.word in words]
        return {name: entry.text for section in chosen for entry in section.entries for name in entry.names}

    def section(self, word: str) -> Section | None:
        return next((section for section in self.sections if section.word == word), None)


def read(text: str | None) -> Docstring:
    body: list[str] = []
    sections: list[Section] = []
    for block in _blocks(inspect.cleandoc(text or "").splitlines()):
        head = _SECTION.match(block[0])
        if head is None:
            body.append("\n".join(block))
            continue
        section = Section(head[1], head[2] or "")
        sections.append(section)
        inside = inspect.cleandoc("\n" + "\n".join(block[1:])).splitlines()
        if section.text:
            section.text = " ".join([section.text, *(line.strip() for line in inside)])
            continue
        for lines in _blocks(inside):
            entry = _ENTRY.match(lines[0])
            rest = [line.strip() for line in lines[1:]]
            if entry:
                names = tuple(re.split(r",? and so on|, | and | or ", entry[1]))
                section.entries.append(Entry(tuple(filter(None, names)), " ".join([entry[2], *rest])))
            else:
                section.entries.append(Entry((), " ".join([lines[0], *rest])))
    return Docstring(body, sections)


def _blocks(lines: list[str]) -> list[list[str]]:
    """Each heading of a list with the lines that are moved in below it, each line of a list with those below it, and
    paragraphs.
    """
    found: list[list[str]] = []
    ended = True
    for number, line in enumerate(lines):
        if not line.strip():
            following = next((later for later in lines[number:] if later.strip()), "")
            ended = not following.startswith(" ")
            if not ended and found:
                found[-1].append("")
        elif line.startswith(" "):
            found[-1].append(line)
        elif ended or found[-1][-1].startswith(" ") or _SECTION.match(line) or _is_entry(line, found[-1][0]):
            found.append([line])
            ended = False
        else:
            found[-1].append(line)
    return found


def _is_entry(line: str, first: str) -> bool:
    """Whether both are lines of a list, and not the middle of a paragraph."""
    return bool(
        (_ENTRY.match(first) or first.startswith("Otherwise")) and (_ENTRY.match(line) or line[:9] == "Otherwise")
    )


def lines_for_sphinx(docstring: Docstring, inline: Callable[[str], str], leave_out: tuple[str, ...] = ()) -> list[str]:
    """reStructuredText.

    inline: makes text of a paragraph into marked text.
    leave_out: lists that appear elsewhere.
    """
    found: list[str] = []
    for block in docstring.body:
        found += [*_paragraphs(block, inline), ""]
    for section in docstring.sections:
        if section.word in leave_out:
            continue
        found += ["", f":{section.word}:"]
        if section.text:
            found.append(f"    {inline(section.text)}")
        for entry in section.entries:
            names = ", ".join(f"\0{name}\0" for name in entry.names)
            found.append(f"    - {inline(names + ': ' if names else '')}{inline(entry.text)}")
        found.append("")
    return found


def _paragraphs(block: str, inline: Callable[[str], str]) -> list[str]:
    lines = block.splitlines()
    if lines[0].startswith("- "):
        # A list: the lines below an item belong to it.
        items: list[list[str]] = []
        for line in filter(None, lines):
            items.append([line[2:]]) if line.startswith("- ") else items[-1].append(line.strip())
        return [*(f"- {inline(' '.join(item))}" for item in items), ""]
    first = next((number for number, line in enumerate(lines) if line.startswith(" ")), len(lines))
    before = " ".join(line for line in lines[:first] if line)
    inside = inspect.cleandoc("\n" + "\n".join(lines[first:])).splitlines()
    found = [inline(before), ""]
    if not inside:
        return found
    rows = _blocks(inside)
    if all(_ENTRY.match(row[0]) for row in rows):
        for row in rows:
            entry = _ENTRY.match(row[0])
            assert entry
            text = " ".join([entry[2], *(line.strip() for line in row[1:])])
            found.append(f"- {inline(chr(0) + entry[1] + chr(0) + ': ')}{inline(text)}")
        return [*found, ""]
    return [*found, ".. code-block:: python", "", *(f"    {line}" for line in inside), ""]
