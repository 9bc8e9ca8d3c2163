"""The files of a release, which are made once, and environments with them."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest
from environments import FREE_THREADED, OTHERS, PLACE, ROOT, Release, linux_environment, output_of, windows_environment
from kit.helpers import STRESS


@pytest.fixture(scope="session")
def release() -> Release:
    shutil.rmtree(PLACE, ignore_errors=True)
    if STRESS:
        output_of(ROOT / "rig/zig.sh")
    output_of(ROOT / "rig/wheels.sh", PLACE / "dist")
    paths = sorted((PLACE / "dist").iterdir())
    own = rf"-manylinux_2_\d+_{platform.machine()}\.whl$"
    sdist, linux, freethreaded, windows = (
        [path for path in paths if re.search(part, path.name)]
        for part in (r"\.tar\.gz$", rf"-abi3{own}", rf"-cp3\d+t{own}", r"win_amd64\.whl$")
    )
    assert len(sdist) == len(linux) == len(windows) == 1, paths
    assert len(freethreaded) == FREE_THREADED.exists()
    others = tuple(path for path in paths if path not in [*sdist, *linux, *freethreaded, *windows])
    assert len(others) == sum(shutil.which(compiler) is not None for compiler in OTHERS)
    return Release(*sdist, *linux, freethreaded[0] if freethreaded else None, *windows, others)


@pytest.fixture(scope="session")
def on_linux(release) -> Path:
    """The folder of a virtual environment with the Linux wheel."""
    return linux_environment(PLACE / "linux", release.linux)


@pytest.fixture(scope="session")
def on_windows(release) -> Path:
    """The python.exe of a Windows Python that has only the Windows wheel and its requirements."""
    return windows_environment(PLACE / "windows", release.windows)
