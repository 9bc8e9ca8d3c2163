"""The tests of ndpy._core and of the data path once more, with modules that AddressSanitizer and
UndefinedBehaviorSanitizer watch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CDEFS, CORE, ROOT, package_with
from kit import linux_only as linux_only
from kit.compiling import compiler

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TESTS = [
    "test_core.py",
    "test_core_locks.py",
    "test_core_regions.py",
    "test_batches_filled.py",
    "test_lists_of_requests.py",
    "test_arrays_of_completions.py",
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
    done = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, whose _core and _verbs are instrumented ones."""
    if not Path(gcc_library("libasan.so")).is_absolute():
        pytest.skip("gcc has no AddressSanitizer on this machine")
    folder = tmp_path_factory.mktemp("sanitized")
    verbs = folder / "verbs.c"
    done = subprocess.run([sys.executable, CDEFS / "build_verbs.py", verbs], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return package_with(folder, {"_core": CORE, "_verbs": [verbs]}, "-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS)


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
