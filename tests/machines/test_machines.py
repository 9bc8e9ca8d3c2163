"""What ndpy finds on the machines of this folder, and which of their adapters and addresses it takes. README.md has the rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("these machines run Linux", allow_module_level=True)

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.machine"))
_CANNOT = 77


@pytest.fixture(scope="module")
def found():
    """What is found on each machine. One process examines them all."""
    done = subprocess.run(
        [sys.executable, FOLDER / "examine.py"], capture_output=True, text=True, timeout=120, cwd=FOLDER.parent.parent
    )
    if done.returncode == _CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_machine_has_its_expectations():
    assert sorted(path.stem for path in FOLDER.glob("*.expected")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_on(found, name):
    """If a difference is right, `python tests/machines/examine.py --write` writes the expectations, and git shows it."""
    assert found[name].splitlines() == (FOLDER / f"{name}.expected").read_text(encoding="utf-8").splitlines()
