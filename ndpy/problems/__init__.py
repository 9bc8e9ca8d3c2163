"""What can go wrong, in words: a section of Markdown for each problem. `ndpy explain` prints them, and the site of the
documentation includes the same files.

Each file has a section for each of its problems. A section begins with `## WORD` and a sentence, and has these parts in
this order, each after its name in bold: Names, Meaning, Causes, Tell them apart, Remedy, Reproduce. Names are what the
problem is called elsewhere, with their numbers. Reproduce has a scenario for `ndpy faults`, or says why there is none.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

#: The files, in the order in which their problems are listed.
FILES = ("requests", "connections", "calls", "objects", "silence")
PARTS = ("Names", "Meaning", "Causes", "Tell them apart", "Remedy", "Reproduce")

_NAME = re.compile(r"`([^`]+)`(?:\s+\((0x[0-9A-Fa-f]+|\d+)\))?")
_PREFIX = re.compile(r"^(ibv_wc|ibv_event|rdma_cm_event|nd|status|ndpy|errors|aio|faults|ndpy\.aio|ndpy\.faults)[_.]")


@dataclass(frozen=True)
class Problem:
    """One section.

    Attributes:
        word: its short name, which never changes.
        summary: one sentence.
        names: what the problem is called elsewhere, each with its number or None.
        parts: the Markdown of each of PARTS.
        text: the whole section in Markdown, without its heading.
    """

    word: str
    summary: str
    names: tuple[tuple[str, int | None], ...]
    parts: dict[str, str]
    text: str

    @property
    def scenario(self) -> str | None:
        """The scenario for `ndpy faults` in TOML, or None."""
        found = re.search(r"^```toml\n(.*?)^```", self.parts.get("Reproduce", ""), re.M | re.S)
        return found[1] if found else None

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {
            "word": self.word,
            "summary": self.summary,
            "names": [{"name": name, "number": number} for name, number in self.names],
            **{part.lower().replace(" ", "_"): text for part, text in self.parts.items() if part != "Names"},
            "scenario": self.scenario,
        }


@functools.cache
def all_problems() -> tuple[Problem, ...]:
    """Every problem, in the order of the documentation."""
    folder = resources.files(__name__)
    return tuple(found for name in FILES for found in _read((folder / f"{name}.md").read_text("utf-8")))


def _read(page: str) -> Iterator[Problem]:
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        word, _, text = section.partition("\n")
        text = text.strip()
        # The name of a part, then the part.
        pieces = re.split(rf"^\*\*({'|'.join(PARTS)}):\*\*\s+", text, flags=re.M)
        parts = {name: part.strip() for name, part in zip(pieces[1::2], pieces[2::2], strict=True)}
        names = [(name, int(number, 0) if number else None) for name, number in _NAME.findall(parts.get("Names", ""))]
        yield Problem(word.strip(), " ".join(pieces[0].split()), tuple(names), parts, text)


def named(word: str) -> list[Problem]:
    """The problems with this word, name or number, the most likely one first."""
    wanted = _plain(word)
    number = _number(word)
    found = [each for each in all_problems() if each.word == wanted.replace("_", "-").replace(" ", "-")]
    found += [each for each in all_problems() if wanted in {_plain(name) for name, _ in each.names}]
    if number is not None:
        found += [each for each in all_problems() if number in {one for _, one in each.names}]
    return list({each.word: each for each in found}.values())


def near(word: str) -> list[str]:
    """Words of problems that are like this one, or have a name that is."""
    names: dict[str, str] = {}
    for each in all_problems():
        for name in (each.word, *(name for name, _ in each.names)):
            names.setdefault(_plain(name), each.word)
    found = difflib.get_close_matches(_plain(word), names, n=5, cutoff=0.6)
    found += [name for name in names if len(word) > 2 and _plain(word) in name]
    return list(dict.fromkeys(names[name] for name in found))[:5]


def _plain(name: str) -> str:
    """A name as people write it: in any case, and without what all names of its kind begin with."""
    plain = name.strip().lower()
    while shorter := _PREFIX.sub("", plain):
        if shorter == plain:
            break
        plain = shorter
    return plain


def _number(word: str) -> int | None:
    """A number, also negative as the kernel's errnos and the statuses of NetworkDirect can be."""
    try:
        number = int(word, 0)
    except ValueError:
        return None
    if number < 0:
        return -number if number > -4096 else number & 0xFFFFFFFF
    return number
