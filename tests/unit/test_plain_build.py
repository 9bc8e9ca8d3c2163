"""The core compiled with NDPY_PLAIN, in which no call uses what another one has left behind (cdefs/core/reuse.h), passes the same tests."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kit import linux_only as linux_only

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("make stress runs it", allow_module_level=True)

import ndpy

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=gnu11", "-O2", "-DNDPY_PLAIN", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
TESTS = [
    *(
        f"tests/unit/test_{name}.py"
        for name in ("core", "lists_of_requests", "returned_lists", "receives_polled_together", "lease")
    ),
    *(f"tests/contract/test_{name}.py" for name in ("completion_queue", "batches", "used_again", "random_operations")),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package, whose _core is the plain one."""
    headers = sysconfig.get_path("include")
    if not shutil.which("gcc") or not Path(headers, "Python.h").exists():
        pytest.skip("building the module needs gcc and Python's headers")
    shutil.copytree(
        Path(ndpy.__file__).parent, tmp_path / "ndpy", ignore=shutil.ignore_patterns("__pycache__", "*.pyd")
    )
    paths = [tmp_path / "ndpy" / ("_core" + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    module = next(path for path in paths if path.exists())
    sources = sorted((ROOT / "cdefs/core").glob("*.c"))
    compiler = ["gcc", *FLAGS, f"-I{headers}", "-Wno-unused-parameter"]
    done = subprocess.run([*compiler, *sources, "-o", module], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.timeout(1200)
def test_the_tests_pass_without_anything_that_is_used_again(package):
    environment = {**os.environ, "PYTHONPATH": str(package), "NDPY_STRESS": ""}
    script = "from ndpy import _core; print(_core.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", script], cwd=package, env=environment, capture_output=True, text=True, timeout=60
    )
    assert str(package) in where.stdout, where.stderr
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        ROOT,
    ]
    done = subprocess.run(
        # What this one lets go of is kept by what a poll leaves behind.
        [
            *command,
            "-k",
            "not a_poll_within_a_poll",
            "--adapter",
            "soft0",
            "--basetemp",
            package / "t",
            *(ROOT / name for name in TESTS),
        ],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
