"""A private softnd for one test: a copy of the DLL, with the faults that the test wants. A leak fails the test."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, Keeper, wait_until
from kit.scenarios import slow_call, write_scenario
from kit.starting import create_process

import ndpy
from ndpy.platforms.networkdirect.provider_dll import Provider

ROOT = Path(__file__).resolve().parent.parent.parent
SOFTND = ROOT / "softrdma/build/softnd.dll"
PROVIDERS = ROOT / "softrdma/build/providers"

# Windows and Wine start and end threads of their own.
HANDLE_SLACK = 12

_warm = False


def handles() -> int:
    """How many handles this process has, after a garbage collection."""
    gc.collect()
    return open_handles()


def open_handles() -> int:
    """How many handles this process has.

    Wine's own count is always 0, so this tries each number. Windows gives out the lowest first.
    """
    test = ctypes.windll.kernel32.GetHandleInformation
    flags = ctypes.byref(ctypes.c_uint32())
    return sum(test(ctypes.c_void_p(number), flags) != 0 for number in range(4, 4 * 600, 4))


class OwnSoftnd:
    """A copy of softnd's DLL, used with one version of NetworkDirect.

    open() opens its adapter, with faults (kit.scenarios). Its keywords are softnd's settings, such as
    read_sink="strict".
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        self.path = path
        self.version = version
        self._monkeypatch = monkeypatch

    def open(self, *faults: str, version: int | None = None, **settings: object) -> ndpy.Adapter:
        with self._monkeypatch.context() as environment:
            if faults:
                environment.setenv("NDPY_FAULTS", str(write_scenario(self.path.parent, *faults)))
            for name, value in settings.items():
                environment.setenv(f"SOFTND_{name.upper()}", str(value))
            return ndpy.open_adapter("127.0.0.1", provider=self.path, version=version or self.version)

    def close_while_registering(self, buffers: list[bytearray], *faults: str) -> list[ndpy.Pending]:
        """Close an adapter while it registers all of these buffers. Returns the requests."""
        delay_ms = 150
        while True:
            adapter = self.open(slow_call("reg_mr", delay_ms), *faults)
            pendings = [adapter.begin_register(buffer) for buffer in buffers]
            try:
                adapter.close()
                return pendings
            except ndpy.DeviceBusyError:  # the machine was too busy to close it in that time
                for pending in pendings:
                    pending.result(DEADLINE_S).close()
                adapter.close()
                delay_ms *= 2

    def unload(self) -> None:
        """Wait until ndpy has unloaded the DLL."""

        def gone() -> bool:
            gc.collect()
            if str(self.path) not in Provider._loaded:
                return True
            assert Provider._loaded[str(self.path)]._users == 0, "an adapter is still open"
            ndpy.list_adapters(provider=self.path)
            return False

        wait_until(gone, f"{self.path} is unloaded", DEADLINE_S)


def leaks(text: str) -> list[str]:
    """The lines of softnd's statistics that report a leak."""
    assert "created" in text
    return [line for line in text.splitlines() if not line.endswith(" 0 leaked")]


def warm_up(own: OwnSoftnd) -> None:
    """Use softnd once before handles are counted: Winsock and Windows' thread pool keep some handles."""
    global _warm
    if not _warm:
        own.open().close()
        own.unload()
        _warm = True


@pytest.fixture
def version() -> int:
    """The version of NetworkDirect that the test and its child processes use."""
    return 2


@pytest.fixture
def softnd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> Iterator[OwnSoftnd]:
    """A private softnd. The test fails if any of its handles or objects are left at the end."""
    statistics = tmp_path / "statistics.txt"
    monkeypatch.setenv("SOFTND_STATISTICS", str(statistics))
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", str(version))
    own = OwnSoftnd(Path(shutil.copy(SOFTND, tmp_path / f"{tmp_path.name}.dll")), monkeypatch, version)
    warm_up(own)
    before = handles()
    yield own
    own.unload()
    assert leaks(statistics.read_text()) == []
    wait_until(lambda: handles() <= before + HANDLE_SLACK, f"the handles go back to {before}")


@contextlib.contextmanager
def opened(softnd: OwnSoftnd, *faults: str, **settings: object) -> Iterator[tuple[ndpy.Adapter, Keeper]]:
    """Open an adapter with these faults; yield (adapter, keep). The kept objects and the adapter close at the end."""
    keeper = Keeper()
    adapter = keeper(softnd.open(*faults, **settings))
    try:
        yield adapter, keeper
    finally:
        keeper.close()


def keep_with_adapter(softnd: OwnSoftnd) -> Iterator[Keeper]:
    """The body of a fixture `keep` with an open adapter of this softnd in its attribute `adapter`."""
    with softnd.open() as adapter:
        keeper = Keeper()
        keeper.adapter = adapter  # type: ignore[attr-defined]
        yield keeper
        keeper.close()


def child(code: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this code in a new Python process that has this one's sys.path."""
    # An embedded Python searches neither the working folder nor PYTHONPATH.
    return create_process(
        lambda: subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout_s,
        )
    )


def created(text: str, kind: str) -> int:
    """How many objects of this kind were created, according to softnd's statistics."""
    return sum(int(number) for number in re.findall(rf"^{kind}: (\d+) created", text, re.MULTILINE))
