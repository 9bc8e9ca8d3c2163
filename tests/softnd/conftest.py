"""Fixtures of softnd's tests. Fixtures that load the DLL run under Windows or Wine, the others anywhere."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

# An embedded Python does not search a test's folder. The folder above has kit.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

pytest.register_assert_rewrite("attacks", "early_disconnect")

WINDOWS = sys.platform == "win32"
SEED = int(os.environ.get("NDPY_TEST_SEED", "20240229"))
STRESS = bool(os.environ.get("NDPY_STRESS"))

_ON_WINDOWS = ["test_[a-m]_*.py", "test_random.py", "test_load.py", "test_leaks.py", "test_switches.py"]
if WINDOWS:
    _all = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    _wanted = {path.name for pattern in _ON_WINDOWS for path in Path(__file__).parent.glob(pattern)}
    collect_ignore = sorted(_all - _wanted)
else:
    collect_ignore_glob = _ON_WINDOWS


def share(full: int, part: int) -> int:
    """A count: `full` with NDPY_STRESS=1, otherwise `part`."""
    return full if STRESS else part


class Faults:
    """faults(...): adapters that are opened from then on have these faults (kit.scenarios). As a context manager: only
    those that are opened within.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self._folder = folder

    def __call__(self, *faults: str) -> contextlib.AbstractContextManager[object]:
        from kit.scenarios import write_scenario

        self._monkeypatch.setenv("NDPY_FAULTS", str(write_scenario(self._folder, *faults)))
        ending = contextlib.ExitStack()
        ending.callback(self._monkeypatch.delenv, "NDPY_FAULTS")
        return ending


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Gives adapters faults; see Faults."""
    return Faults(monkeypatch, tmp_path)


if WINDOWS:
    import version2
    from consumer import Kit, make_pair

    @pytest.fixture
    def kit():
        """Owns what the test creates and releases it at the end."""
        kit = Kit()
        yield kit
        kit.close()

    @pytest.fixture
    def node(kit):
        """An adapter object on the IPv4 loopback address, with an overlapped file."""
        return kit.node()

    @pytest.fixture
    def pair(kit):
        """(active, passive): two connected sides in this process, on two adapter objects."""
        return make_pair(kit)

    @pytest.fixture
    def rng():
        """A random generator. A failure shows its seed; NDPY_TEST_SEED sets another one."""
        print(f"seed {SEED} (NDPY_TEST_SEED)")
        return random.Random(SEED)

    @pytest.fixture
    def own_library(tmp_path):
        """The DLL under its own name, so that other users of the DLL do not keep it loaded."""
        path = tmp_path / "another.dll"
        shutil.copy(version2.DLL, path)
        library = version2.Library(path)
        yield library
        library.free()
