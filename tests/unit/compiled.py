"""The package with extension modules that are compiled in another way."""

from __future__ import annotations

import importlib.machinery
import shutil
import sysconfig
from pathlib import Path

import pytest
from kit.compiling import compiled

import ndpy

ROOT = Path(__file__).resolve().parents[2]
CDEFS = ROOT / "cdefs"
# A function of an interface need not use all that it gets.
SHARED = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC")
CORE = sorted((CDEFS / "core").glob("*.c"))


def package_with(folder: Path, modules: dict[str, list[Path]], *flags: str) -> Path:
    """Copy the package into a folder, and compile these modules there from their sources. Returns the folder."""
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        pytest.skip("building the module needs Python's headers")
    shutil.copytree(Path(ndpy.__file__).parent, folder / "ndpy", ignore=shutil.ignore_patterns("__pycache__", "*.pyd"))
    for name, sources in modules.items():
        # There may be modules for several Pythons.
        paths = [folder / "ndpy" / (name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
        module = next(path for path in paths if path.exists())
        compiled(module, *SHARED, *flags, f"-I{headers}", f"-I{CDEFS}", *sources, timeout_s=300)
    return folder
