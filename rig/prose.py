"""Search what people read for signs of unnatural English.

`python rig/prose.py [FILE…]` reads the pages, docstrings and messages of the repository, and ends with 1 if it finds
a sign. A message is any string of a program with at least three words. rig/prose.txt has the signs. `--text` prints
what would be searched instead.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SIGNS = Path(__file__).with_name("prose.txt")
_A_MESSAGE_HAS_WORDS = 3
# Sentences go over lines, and paragraphs end with an empty one.
_SPACE = r"(?:[ \t]+|[ \t]*\n[ \t]*)"
_CODE_OF_PAGES = re.compile(
    r"<!--.*?-->|^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence)[`~]*[ \t]*$|(?<=\n\n)(?:"
    r" {4}[^\n]*\n+)+",
    re.DOTALL | re.MULTILINE,
)
_CODE_IN_A_SENTENCE = re.compile(r"(?P<quote>`+)[^`]+(?P=quote)")
_STRING_OF_C = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT_OR_STRINGS = re.compile(
    rf"/\*.*?\*/|//[^\n]*|'(?:[^'\\]|\\.)+'|(?P<strings>{_STRING_OF_C}(?:\s*{_STRING_OF_C})*)", re.DOTALL
)


class Sign(NamedTuple):
    pattern: re.Pattern[str]
    instead: str


class Text(NamedTuple):
    line: int
    text: str


def signs(path: Path = SIGNS) -> list[Sign]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            expression, _, instead = line.partition("  =>  ")
            if not instead:
                raise ValueError(f"{path.name}: {line!r} is not an expression, then =>, then what to write instead")
            found.append(Sign(re.compile(expression.replace(" ", _SPACE), re.IGNORECASE), instead))
    return found


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _crossed_out(match: re.Match[str]) -> str:
    return re.sub(r"[^`\n]", "x", match[0])


def page(source: str) -> Iterator[Text]:
    yield Text(1, _CODE_IN_A_SENTENCE.sub(_crossed_out, _CODE_OF_PAGES.sub(_blank, source)))


def python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    pieces = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            words = node.value
        else:
            continue
        if len(words.split()) >= _A_MESSAGE_HAS_WORDS:
            yield Text(node.lineno, _CODE_IN_A_SENTENCE.sub(_crossed_out, words))


def c(source: str) -> Iterator[Text]:
    for match in _COMMENT_OR_STRINGS.finditer(source):
        words = "".join(string[1:-1] for string in re.findall(_STRING_OF_C, match["strings"] or ""))
        if len(words.split()) >= _A_MESSAGE_HAS_WORDS:
            yield Text(1 + source.count("\n", 0, match.start()), words)


READERS = {".md": page, ".py": python, ".pyi": python, ".c": c, ".h": c}


def files() -> list[str]:
    """Those that Git knows or would add. Of tests only pages, because nobody else reads their strings."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listed.stdout.split("\0")))
    return [
        name
        for name in names
        if (suffix := Path(name).suffix) in READERS
        and (suffix == ".md" or not name.startswith("tests/"))
        and (ROOT / name).is_file()
    ]


def found(path: Path, every: list[Sign]) -> Iterator[tuple[int, str, str]]:
    """For each sign: its line, its words, and what to write instead."""
    for text in READERS[path.suffix](path.read_text(encoding="utf-8")):
        for sign in every:
            for match in sign.pattern.finditer(text.text):
                yield text.line + text.text.count("\n", 0, match.start()), " ".join(match[0].split()), sign.instead


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Search pages, docstrings and messages for signs of unnatural English."
    )
    parser.add_argument("files", nargs="*", help="search these, not all of the repository")
    parser.add_argument("--text", action="store_true", help="print what would be searched")
    options = parser.parse_args(arguments)
    every = signs()
    bad = 0
    for name in options.files or files():
        if options.text:
            for text in READERS[Path(name).suffix]((ROOT / name).read_text(encoding="utf-8")):
                print(f"{name}:{text.line}: {text.text}")
            continue
        for line, words, instead in sorted(found(ROOT / name, every)):
            print(f"{name}:{line}: {words!r}: {instead}")
            bad += 1
    if bad:
        print(f"{bad} signs of unnatural English (rig/prose.txt); write these sentences in other words")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
