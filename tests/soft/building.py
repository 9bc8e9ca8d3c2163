"""Builds softverbs and the programs in programs/, plain or for a sanitizer, and runs the programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "softrdma/build"

# Arguments for softrdma/verbs/Makefile.
LIBRARY = {"": [], "-asan": ["SANITIZE=address,undefined"], "-tsan": ["SANITIZE=thread"], "-coverage": ["COVERAGE=1"]}

# A finding ends the program, which then fails. AddressSanitizer also reports memory that leaks.
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:intercept_tls_get_addr=0:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "intercept_tls_get_addr=0:halt_on_error=1:second_deadlock_stack=1",
}


def variant(wanted: str) -> str:
    """The wanted variant. NDPY_SOFT_VARIANT=-coverage replaces all of them, to measure the tests."""
    return os.environ.get("NDPY_SOFT_VARIANT", wanted)


def make(folder: str, *arguments: str) -> None:
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT / folder), *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str, wanted: str = "") -> Path:
    """Build a program and its library. Skip without a compiler or headers."""
    if shutil.which("gcc") is None or not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("needs gcc and the headers of libibverbs and librdmacm")
    kind = variant(wanted)
    make("softrdma/verbs", *LIBRARY[kind])
    make("tests/soft/programs", f"VARIANT={kind}")
    return BUILD / f"programs/soft{kind}" / name


def environment(**settings: object) -> dict[str, str]:
    """An environment with the sanitizers' options and these settings of softverbs, named without their prefix."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SOFTVERBS_", "NDPY_FAULTS"))}
    return {**kept, **SANITIZERS, **{f"SOFTVERBS_{name}": str(value) for name, value in settings.items()}}


def check_statistics(file: Path) -> None:
    """Nothing that the library counts was left over."""
    text = file.read_text()
    leaked = dict(re.findall(r"^(.*): \d+ created, (\d+) leaked$", text, re.MULTILINE))
    # The connection manager keeps its context, and with it the adapter.
    assert int(leaked.pop("adapter")) <= 1, text
    assert leaked and not any(map(int, leaked.values())), text


def run(*command: object, timeout_s: float, **settings: object) -> str:
    """Run a program that has to succeed, and return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        env=environment(**settings),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-12000:]}"
    return done.stdout
