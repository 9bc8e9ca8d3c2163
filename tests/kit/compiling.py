"""C that tests compile, for the machine of this Python, which may be an emulated one."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.deadlines import patient


@functools.cache
def _compiler_for(machine: str) -> str | None:
    """gcc, if it compiles for this machine, or else the cross compiler by Debian's name."""
    for name in filter(shutil.which, ("gcc", f"{machine}-linux-gnu-gcc")):
        told = subprocess.run([name, "-dumpmachine"], capture_output=True, text=True, timeout=patient(60)).stdout
        if told.startswith(f"{machine}-"):
            return name
    return None


def has_compiler() -> bool:
    """Whether there is a compiler whose libraries this Python can load."""
    return _compiler_for(platform.machine()) is not None


def compiler() -> str:
    """The compiler whose libraries this Python can load, and whose programs it can start.
    The test skips without one.
    """
    return _compiler_for(platform.machine()) or pytest.skip(f"this needs gcc for {platform.machine()}")


def compiled(made: Path, *words: str | Path, timeout_s: float = 60) -> Path:
    """Compile and link with these options and sources, and return the path of what was made.

    The test skips without a compiler, and fails if it does not compile.
    """
    command = [compiler(), "-o", made, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(timeout_s), check=False)
    assert done.returncode == 0, done.stderr
    return made
