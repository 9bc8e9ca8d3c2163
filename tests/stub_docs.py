"""Copies the docstrings of ndpy._core, which C has, into ndpy/_core.pyi, where editors read them.

.venv/bin/python tests/stub_docs.py           writes the stub
.venv/bin/python tests/stub_docs.py --check   ends with 1 if the stub says something else
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ndpy import _core

STUB = Path(str(_core.__file__)).with_name("_core.pyi")


def documented(source: str, module: ModuleType) -> str:
    """The source of a stub, with the docstrings of the module's public parts."""
    lines = source.splitlines(keepends=True)
    # From the end, so that the numbers of earlier lines stay.
    for node, thing in sorted(public(ast.parse(source), module), key=lambda found: -found[0].lineno):
        text = inspect.getdoc(thing)
        if text and not _inherited(thing, text):
            _put(lines, node, text)
    return "".join(lines)


def public(tree: ast.Module, module: ModuleType) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, Any]]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        thing = getattr(module, node.name)
        yield node, thing
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                    yield part, getattr(thing, part.name)


def _inherited(thing: Any, text: str) -> bool:
    return isinstance(thing, type) and text == inspect.getdoc(object)


def _put(lines: list[str], node: ast.ClassDef | ast.FunctionDef, text: str) -> None:
    """Make this the docstring of a class or function."""
    first = node.body[0]
    indent = " " * (node.col_offset + 4)
    docstring = "".join(f"{indent}{line}".rstrip() + "\n" for line in f'"""{text}'.splitlines())
    docstring = docstring.rstrip("\n") + ('"""\n' if "\n" not in text else f'\n{indent}"""\n')
    if "\\" in text:
        docstring = docstring.replace('"""', 'r"""', 1)
    begin, end = first.lineno - 1, first.end_lineno or first.lineno
    is_former = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_former and first.value.value is ... and begin == _last_line_of_head(node):
        # "def f() -> int: ..."
        head = re.sub(r"\.\.\.\s*$", "", lines[begin]).rstrip() + "\n"
        lines[begin:end] = [head, docstring]
    elif is_former:
        lines[begin:end] = [docstring]
    else:
        begin = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
        lines[begin:begin] = [docstring, "\n"]


def _last_line_of_head(node: ast.ClassDef | ast.FunctionDef) -> int:
    """The number, from 0, of the line with the colon before the body."""
    if isinstance(node, ast.ClassDef):
        return node.lineno - 1
    return (node.returns.end_lineno or node.lineno) - 1 if node.returns else node.lineno - 1


def differences(source: str, module: ModuleType) -> list[str]:
    """What a stub says otherwise than the module, as a list of lines. Empty if nothing."""
    found = []
    for node, thing in public(ast.parse(source), module):
        said, wanted = ast.get_docstring(node) or "", inspect.getdoc(thing) or ""
        if said != wanted and not _inherited(thing, wanted):
            found += [f"{node.name}:", *difflib.ndiff(said.splitlines(), wanted.splitlines())]
    return found


def main(words: list[str]) -> int:
    source = STUB.read_text(encoding="utf-8")
    if words == ["--check"]:
        found = differences(source, _core)
        print("\n".join(found))
        return bool(found)
    STUB.write_text(documented(source, _core), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(STUB)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
