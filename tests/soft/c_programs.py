"""Runs the C programs of programs/ on soft0 as any verbs program does: through LD_LIBRARY_PATH."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from kit.programs import built

from ndpy.platforms.verbs import softverbs
from ndpy.platforms.verbs.softverbs import environment

PROGRAMS = Path(__file__).with_name("programs")
SKIPPED = 77


def run(
    name: str,
    *words: str | int,
    timeout_s: float = 110,
    under: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    **settings: str,
) -> str:
    """Run a program of programs/ on soft0, compiled with these options. Return its output.

    The test fails unless the exit status is 0.
    """
    if not softverbs.is_there():
        pytest.skip("softverbs is not built")
    # A program's own malloc() takes the place of the library's only if it is exported.
    program = built(PROGRAMS / f"{name}.c", "-rdynamic", "-lrdmacm", *options)
    command = [*under, str(program), *map(str, words)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment(softverbs.folder(), os.environ), **settings},
        text=True,
        timeout=timeout_s,
        check=False,
    )
    print(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}"
    return done.stdout


def number(name: str, text: str) -> float:
    """The number behind a name in a program's output."""
    found = re.search(rf"\b{name} (-?[\d.]+)", text)
    assert found is not None, f"no {name!r} in\n{text}"
    return float(found[1])
