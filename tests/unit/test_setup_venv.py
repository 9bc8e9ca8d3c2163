"""rig/venv.sh: which Python the environment .venv is of. The Pythons are stand-ins, and pip only says that it was
asked.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from kit import linux_only as linux_only
from kit.deadlines import patient
from kit.rig import RIG

LIMIT_S = patient(60)

# A Python that makes environments of itself: a link to it, as the module venv makes one.
PYTHON = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
case "$*" in
*version_info*) exit 0 ;;
*_base_executable*) echo "$here/python" ;;
*sys.version*) cat "$here/version" ;;
*"-m venv .venv") mkdir -p .venv/bin && ln -s "$here/python" .venv/bin/python && echo "$here" >>made ;;
*"-m pip"*) echo "$here" >>installed ;;
*build_softverbs*) ;;
*) echo "nobody expected $*" >&2; exit 99 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("3.11", "3.12"):
        folder = tmp_path / f"python{name}"
        folder.mkdir()
        (folder / "version").write_text(f"{name}.1\n")
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
    shutil.copytree(RIG, tmp_path / "rig", ignore=shutil.ignore_patterns("windows"))
    (tmp_path / "cdefs").mkdir()
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).write_text("")
    return tmp_path


def set_up(checkout: Path, python: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", "set -eu; say() { :; }; die() { echo $* >&2; exit 1; }; . rig/venv.sh; make_venv"],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / python)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def made(checkout: Path) -> list[str]:
    """Of which Pythons environments were made, the oldest first."""
    return [Path(line).name for line in (checkout / "made").read_text().splitlines()]


def test_another_python_makes_another_environment(checkout):
    set_up(checkout, "python3.11/python")
    set_up(checkout, "python3.12/python")
    assert made(checkout) == ["python3.11", "python3.12"]
    assert (checkout / "installed").read_text().splitlines()[-1] == str(checkout / "python3.12")


def test_the_same_python_keeps_the_environment(checkout):
    set_up(checkout, "python3.11/python")
    installed = (checkout / "installed").read_text()
    set_up(checkout, "python3.11/python")
    assert made(checkout) == ["python3.11"]
    assert (checkout / "installed").read_text() == installed


def test_a_python_that_was_upgraded_makes_another_environment(checkout):
    set_up(checkout, "python3.11/python")
    (checkout / "python3.11/version").write_text("3.13.0\n")
    set_up(checkout, "python3.11/python")
    assert made(checkout) == ["python3.11", "python3.11"]


def test_an_environment_whose_python_is_gone_is_made_again(checkout):
    set_up(checkout, "python3.11/python")
    shutil.rmtree(checkout / "python3.11")
    set_up(checkout, "python3.12/python")
    assert made(checkout) == ["python3.11", "python3.12"]


def test_the_environments_own_python_can_be_asked_for(checkout):
    set_up(checkout, "python3.11/python")
    (checkout / "pyproject.toml").write_text("changed")
    set_up(checkout, ".venv/bin/python")
    assert made(checkout) == ["python3.11"]
