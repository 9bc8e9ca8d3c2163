"""The changes of a C source that a mutation run makes, one at a time.

They are found by tokens. That works because all sources are formatted alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from change import Change

_TOKEN = re.compile(
    r"""
    (?P<blank>\s+|/\*.*?\*/|//[^\n]*|\#(?:[^\n\\]|\\\n|\\.)*)
  | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<number>\b(?:0[xX][0-9A-Fa-f]+|\d+)[uUlL]*\b)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<sign>->|\+\+|--|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = {
    "==": ("!=",),
    "!=": ("==",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "+=": ("-=",),
    "-=": ("+=",),
    "|=": ("&=",),
    "++": ("--",),
    "--": ("++",),
}
_TYPE_WORDS = {
    "struct",
    "const",
    "void",
    "int",
    "char",
    "unsigned",
    "sizeof",
    "return",
    "case",
    "else",
    "enum",
    "static",
}
_CALL = re.compile(r"^[ \t]+(\w+\([^;{}]*\));\n", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^[ \t]+(\w+(?:(?:->|\.)\w+|\[[^\]=]*\])+ [|&+-]?= [^;{}]*);\n", re.MULTILINE)
_STEP = re.compile(r"^[ \t]+(\w+(?:->|\.)\w+(?:\+\+|--));\n", re.MULTILINE)
_RETURN = re.compile(r"\breturn ([^;]+);")


def c_changes(file: str, source: str) -> list[Change]:
    found = []

    def add(start: int, end: int, new: str, kind: str) -> None:
        old = source[start:end]
        function, block = places.at(start)
        if block:
            new += "\n" * (old.count("\n") - new.count("\n"))
            found.append(
                Change(file, _position(source, start), _position(source, end), old, new, kind, block, function, True)
            )

    places = _Places(source)
    tokens = [(kind, text, start) for kind, text, start in _tokens(source) if kind != "blank"]
    for place, (kind, text, start) in enumerate(tokens):
        before_kind, before, _ = tokens[place - 1] if place else ("sign", "", 0)
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        end = start + len(text)
        if kind == "number" and before not in ("case", "["):
            value = int(text.rstrip("uUlL"), 0)
            add(start, end, str(value + 1) + text[len(text.rstrip("uUlL")) :], "constant")
        elif kind == "word" and text in ("break", "continue") and after == ";":
            if places.in_loop(start):
                add(start, end, "continue" if text == "break" else "break", text)
        elif kind == "sign" and text == "!":
            add(start, end, "", "not dropped")
        elif kind == "sign" and text in _OPERATORS:
            value_before = (
                before_kind == "number" or before in (")", "]") or (before_kind == "word" and before not in _TYPE_WORDS)
            )
            # The formatting shows that `a *b` and `(type *)b` are not products.
            spaced = source[start - 1] in " \n" and source[end : end + 1] in " \n"
            if text in ("++", "--") or (value_before and spaced and after != ")"):
                for new in _OPERATORS[text]:
                    add(start, end, new, "operator")
    for pattern, kind in ((_CALL, "call dropped"), (_ASSIGNMENT, "assignment dropped"), (_STEP, "assignment dropped")):
        for match in pattern.finditer(source):
            if not match.group(1).startswith(("return", "_Static_assert", "(void)", "sizeof")):
                add(match.start(1), match.end(1), "", kind)
    for match in _RETURN.finditer(source):
        value = match.group(1)
        if value not in ("0", "NULL", "1"):
            add(match.start(1), match.end(1), "0", "returns 0")
    return found


def _tokens(source: str) -> Iterator[tuple[str, str, int]]:
    for match in _TOKEN.finditer(source):
        yield str(match.lastgroup), match.group(), match.start()


def _position(source: str, offset: int) -> tuple[int, int]:
    before = source[:offset]
    return before.count("\n") + 1, len(before.rsplit("\n", 1)[-1].encode())


class _Places:
    """Finds the function and the block that an offset is in. A label of a switch begins a block too."""

    def __init__(self, source: str) -> None:
        #: (offset, line of the block, name of the function, in a loop), wherever one of these changes.
        self._marks: list[tuple[int, int, str, bool]] = []
        #: (offset at which code can be inserted, line of the block)
        self.beginnings: list[tuple[int, int]] = []
        open_blocks: list[tuple[int, str, bool]] = []
        # For each open parenthesis, whether a value begins there: then it may be the type of a structure's value.
        parentheses: list[bool] = []
        previous = ""
        function, line, label, header = "", 1, False, ""
        depth = 0
        for kind, text, start in _tokens(source):
            here = line
            line += text.count("\n")
            if kind == "blank":
                continue
            if text in "([":
                depth += 1
                parentheses.append(previous == "return" or not re.match(r"[\w)]", previous))
            elif text in ")]":
                depth -= 1
                if parentheses.pop():
                    text = "value"
            if text == "{":
                inside = bool(open_blocks) and bool(open_blocks[-1][0])
                code = previous == ")" or (inside and previous in ("else", "do"))
                if code:
                    if not open_blocks:
                        function = _function_before(source, start)
                    loop = (inside and open_blocks[-1][2]) or header in ("for", "while") or previous == "do"
                    open_blocks.append((here, function, loop))
                    self.beginnings.append((start + 1, here))
                else:
                    open_blocks.append((*open_blocks[-1],) if inside else (0, "", False))
                self._mark(start, open_blocks)
                header = ""
            elif text == "}":
                open_blocks.pop()
                self._mark(start, open_blocks)
            elif kind == "word" and text in ("for", "while", "if", "switch"):
                header = text
            elif kind == "word" and text in ("case", "default"):
                label = True
            elif text == ":" and label and open_blocks and open_blocks[-1][0]:
                label = False
                open_blocks[-1] = (here, open_blocks[-1][1], open_blocks[-1][2])
                self.beginnings.append((start + 1, here))
                self._mark(start, open_blocks)
            if text == ";" and depth == 0:
                header = ""
            previous = text

    def _mark(self, offset: int, open_blocks: list[tuple[int, str, bool]]) -> None:
        self._marks.append((offset, *open_blocks[-1]) if open_blocks else (offset, 0, "", False))

    def _mark_at(self, offset: int) -> tuple[int, int, str, bool]:
        last = (0, 0, "", False)
        for mark in self._marks:
            if mark[0] >= offset:
                break
            last = mark
        return last

    def at(self, offset: int) -> tuple[str, int]:
        _, line, function, _ = self._mark_at(offset)
        return function, line

    def in_loop(self, offset: int) -> bool:
        return self._mark_at(offset)[3]


def _function_before(source: str, offset: int) -> str:
    found = re.findall(r"^\w[^;{}#]*?(\w+)\(", source[:offset], re.MULTILINE)
    return found[-1] if found else ""


def counter_name(file: str) -> str:
    return "ndpy_ran_" + re.sub(r"\W", "_", file)


def c_with_counters(file: str, source: str) -> str:
    """Return the source with counters. Each block first records in an exported array that it ran."""
    name = counter_name(file)
    parts, last = [], 0
    for offset, line in sorted(_Places(source).beginnings):
        parts += [source[last:offset], f" {name}[{line}] = 1;"]
        last = offset
    size = source.count("\n") + 2
    head = (
        f"#ifndef HAS_{name}\n#define HAS_{name}\n#ifdef _WIN32\n__declspec(dllexport)\n#endif\n"
        f"unsigned char {name}[{size}];\n#endif\n"
    )
    return head + "".join(parts) + source[last:]
