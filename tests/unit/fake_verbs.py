"""A verbs provider without a device (fake_verbs.c), built and loaded in place of libibverbs for one test."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

import ndpy
from ndpy.verbs import devices, library

SOURCE = Path(__file__).with_name("fake_verbs.c")


class Settings(ctypes.Structure):
    """struct fake_settings."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "odp_general",
            "odp_connected",
            "fork_status",
            "rereg_result",
            "rereg_errno",
            "reg_errno",
            "reg_errno_windows",
            "dmabuf_errno",
            "delay_us",
            "windows",
        )
    )


class Seen(ctypes.Structure):
    """struct fake_seen."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("access", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("fd", ctypes.c_int32),
        ("registered", ctypes.c_int32),
        ("calls", ctypes.c_int32),
        ("at_once", ctypes.c_int32),
        ("most_at_once", ctypes.c_int32),
    )


class FakeVerbs:
    """settings: what it does; seen: what it was asked. hold(), release(): whether registrations wait in ibv_reg_mr()."""

    def __init__(self, path: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.settings = Settings.in_dll(self._library, "fake_settings")
        self.seen = Seen.in_dll(self._library, "fake_seen")
        self._sysfs = sysfs
        monkeypatch.setattr(devices, "_SYSFS", sysfs)

    def hold(self) -> None:
        self._library.fake_hold(1)

    def release(self) -> None:
        self._library.fake_hold(0)

    def speak_iwarp(self) -> None:
        (self._sysfs / "fake0").mkdir()
        (self._sysfs / "fake0/node_type").write_text("4: RNIC\n")

    def open(self, **settings: int) -> ndpy.Adapter:
        """Open the adapter with these settings."""
        for name, value in settings.items():
            setattr(self.settings, name, value)
        devices._probed.clear()
        adapter = ndpy.open_adapter("fake0")
        # What it was asked to find out what it can do.
        self.seen.calls = self.seen.most_at_once = 0
        return adapter


@pytest.fixture(scope="session")
def fake_verbs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc") or not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("building the provider needs gcc, libibverbs-dev and librdmacm-dev")
    path = tmp_path_factory.mktemp("fake_verbs") / "fake_verbs.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    done = subprocess.run(
        ["gcc", *flags, "-o", path, SOURCE, "-Wl,--no-as-needed", "-libverbs", "-lrdmacm"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def fake(fake_verbs_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVerbs]:
    """At the end nothing may be registered."""
    copy = Path(shutil.copy(fake_verbs_path, tmp_path / "fake.so"))
    sysfs = tmp_path / "infiniband"
    sysfs.mkdir()
    monkeypatch.setenv("NDPY_LIBIBVERBS", str(copy))
    monkeypatch.setenv("NDPY_LIBRDMACM", str(copy))
    monkeypatch.setattr(library, "_loaded", False)
    fake = FakeVerbs(copy, sysfs, monkeypatch)
    yield fake
    fake.release()
    devices._probed.clear()
    # The next adapter finds the system's libraries again.
    monkeypatch.undo()
    library._loaded = False
    assert fake.seen.registered == 0
