"""The core compiled with NDPY_PLAIN, in which no call uses what another one has left behind (cdefs/core/reuse.h),
passes the same tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CORE, ROOT, package_with
from kit import linux_only as linux_only

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("make stress runs it", allow_module_level=True)


UNIT = (
    *("core", "core_locks", "lists_of_requests", "arrays_of_completions"),
    *("returned_lists", "receives_polled_together", "lease"),
)
TESTS = [
    *(f"tests/unit/test_{name}.py" for name in UNIT),
    *(f"tests/contract/test_{name}.py" for name in ("completion_queue", "batches", "used_again", "random_operations")),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package, whose _core is the plain one."""
    return package_with(tmp_path, {"_core": CORE}, "-O2", "-DNDPY_PLAIN", "-fvisibility=hidden")


@pytest.mark.timeout(1200)
def test_the_tests_pass_without_anything_that_is_used_again(package):
    environment = {**os.environ, "PYTHONPATH": str(package), "NDPY_STRESS": ""}
    script = "from ndpy import _core; print(_core.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", script], cwd=package, env=environment, capture_output=True, text=True, timeout=60
    )
    assert str(package) in where.stdout, where.stderr
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"), "-c", ROOT / "pyproject.toml"]
    command += ["--rootdir", ROOT, "--adapter", "soft0", "--basetemp", package / "t"]
    done = subprocess.run(
        # What this one lets go of is kept by what a poll leaves behind.
        [*command, "-k", "not a_poll_within_a_poll", *(ROOT / name for name in TESTS)],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
