"""The tests of ndpy._core and of the data path once more, with modules that AddressSanitizer and
UndefinedBehaviorSanitizer watch.
"""

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

import ndpy

ROOT = Path(__file__).resolve().parent.parent.parent
CDEFS = ROOT / "cdefs"
SOURCES = sorted((CDEFS / "core").glob("*.c"))
FLAGS = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TESTS = [
    "test_core.py",
    "test_core_locks.py",
    "test_core_regions.py",
    "test_lists_of_requests.py",
    "test_datagram_completions.py",
    "test_data_path_posting.py",
    "test_data_path_completions.py",
    "test_lease.py",
    "test_remote_memory.py",
    "test_completion_object.py",
    "test_inline_memory.py",
    "test_races_of_polling.py",
    "test_races_of_closing.py",
    "test_registration_details.py",
    "test_dropped_objects.py",
    "test_plain_registration.py",
]


def gcc_library(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, whose _core and _verbs are instrumented ones."""
    headers = sysconfig.get_path("include")
    if not shutil.which("gcc") or not Path(headers, "Python.h").exists():
        pytest.skip("building the module needs gcc and Python's headers")
    if not Path(gcc_library("libasan.so")).is_absolute():
        pytest.skip("gcc has no AddressSanitizer on this machine")
    folder = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(Path(ndpy.__file__).parent, folder / "ndpy", ignore=shutil.ignore_patterns("__pycache__", "*.pyd"))
    verbs = folder / "verbs.c"
    done = subprocess.run([sys.executable, CDEFS / "build_verbs.py", verbs], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, sources in (("_core", SOURCES), ("_verbs", [verbs])):
        # There may be modules for several Pythons.
        paths = [folder / "ndpy" / (name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
        module = next(path for path in paths if path.exists())
        compiler = ["gcc", *FLAGS, *SANITIZERS, f"-I{headers}", f"-I{CDEFS}", "-Wno-unused-parameter"]
        done = subprocess.run([*compiler, *sources, "-o", module], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return folder


def run(package: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONMALLOC": "malloc",
        # The interpreter itself does not free everything at its end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "LD_PRELOAD": f"{gcc_library('libasan.so')} {gcc_library('libubsan.so')}",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=package, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.timeout(400)
def test_the_core_touches_only_its_own_memory(package, tmp_path):
    where = run(package, "-c", "from ndpy import _core, _verbs; print(_core.__file__, _verbs.__file__)", timeout_s=60)
    assert where.stdout.count(str(package)) == 2, where.stderr
    files = [str(ROOT / "tests/unit" / name) for name in TESTS]
    done = run(
        package,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "t"),
        *files,
        timeout_s=380,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def test_the_sanitizers_see_a_wrong_access(package):
    """Otherwise the other test says nothing."""
    done = run(package, "-c", "import ctypes; ctypes.memset(ctypes.create_string_buffer(8), 0, 4096)", timeout_s=60)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
