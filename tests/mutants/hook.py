"""Imports modules from a changed text instead of their file, in the process that tests them and in programs it starts.

MUTANT_OF_NDPY names a file that lists these modules. worker.py writes the file, and in a new program
started/sitecustomize.py reads it. A test that removes the NDPY_* variables before it starts a program leaves this
variable in place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class _SourceTextLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from a given text instead of its file, perhaps with counters."""

    def __init__(self, name: str, path: str, text: str, counters: Any = None) -> None:
        super().__init__(name, path)
        self._text = text
        self._counters = counters

    def get_code(self, fullname: str) -> types.CodeType:
        if self._counters is None:
            return compile(self._text, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return]
        from python_changes import with_counters

        text = with_counters(self._text, self.path)
        return compile(text, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        if self._counters is not None:
            module.__dict__["__ran__"] = self._counters
        super().exec_module(module)


class ModuleFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed or counted.

    sources: the changed texts, by file.
    counted: the files whose statements are counted.
    counters: the folder of the counters.
    extension: the name of the extension module, and the path from which it is loaded.
    """

    def __init__(
        self,
        sources: dict[str, str] | None = None,
        counted: list[str] | None = None,
        counters: str = "",
        extension: list[str] | None = None,
    ) -> None:
        self._sources = sources or {}
        self._extension = extension
        self.counters = {file: _shared(Path(counters), file) for file in counted or ()}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if self._extension and name == self._extension[0]:
            return importlib.util.spec_from_file_location(name, self._extension[1])
        if not name.startswith("ndpy"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return None
        file = Path(spec.origin).resolve().relative_to(ROOT).as_posix()
        counters = self.counters.get(file)
        if file not in self._sources and counters is None:
            return None
        text = self._sources.get(file) or Path(spec.origin).read_text(encoding="utf-8")
        spec.loader = _SourceTextLoader(name, spec.origin, text, counters)
        return spec


def _shared(folder: Path, file: str) -> mmap.mmap:
    """Counters that several processes share."""
    path = folder / file.replace("/", "_")
    size = (ROOT / file).read_text(encoding="utf-8").count("\n") + 2
    if not path.exists():
        path.write_bytes(bytes(size))
    with path.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), size)


def activate(path: str) -> ModuleFinder:
    """From now on, import the changed modules that the file at `path` lists."""
    finder = ModuleFinder(**json.loads(Path(path).read_text(encoding="utf-8")))
    sys.meta_path.insert(0, finder)
    return finder
