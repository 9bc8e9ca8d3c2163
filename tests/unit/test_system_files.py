"""Reading the system's files, whatever stands in their place."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import ndpy
from ndpy.vocabulary import system_files

PACKAGE = Path(ndpy.__file__).parent
# They open devices of this machine's kernel, or look at this process, and do not describe the machine.
DESCRIBE_NOTHING = {"tools/machines/kernel_log.py", "tools/machines/kvm.py", "testing/leaks.py"}


def test_only_one_module_knows_where_the_system_has_its_files():
    opens = re.compile(r"""(?:\bPath|\bopen|\bexists|\baccess|\blistdir)\(f?["']/(?:sys|dev|proc|etc)\b""")
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {match[0]}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).as_posix() not in DESCRIBE_NOTHING
        for match in opens.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_another_tree_is_read_meanwhile(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_text(" other \n")
    with system_files.below(tmp_path):
        place = system_files.path("/etc", "name")
        assert (system_files.read(place), system_files.shown(place)) == ("other", "/etc/name")
    assert system_files.path("/etc") == Path("/etc")


def put(kind: str, path: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "refuses":
        # Reading it fails although it can be opened, as some files of /sys do.
        path.symlink_to("/proc/self/mem")


@pytest.mark.skipif(sys.platform == "win32", reason="such things are Linux's")
@pytest.mark.parametrize("kind", ["absent", "folder", "pipe", "loop", "endless", "refuses"])
def test_what_is_no_file_has_no_number(tmp_path, kind):
    put(kind, tmp_path / "it")
    assert system_files.read_number(tmp_path / "it") is None
    assert kind == "endless" or system_files.read(tmp_path / "it") == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [("0\n", 0), (f"{(1 << 64) - 1}", (1 << 64) - 1), ("max", None), ("-1", None), ("٢", None), ("9" * 5000, None)],
)
def test_a_number_is_one_of_64_bits(tmp_path, text, number):
    (tmp_path / "it").write_text(text, encoding="utf-8")
    assert system_files.read_number(tmp_path / "it") == number


def test_names_are_sorted_and_none_where_there_is_no_folder(tmp_path):
    for name in ("uverbs1", "uverbs0", "rdma_cm"):
        (tmp_path / name).touch()
    assert system_files.names(tmp_path, "uverbs*") == ["uverbs0", "uverbs1"]
    assert system_files.names(tmp_path / "absent") == []


@pytest.mark.skipif(sys.platform == "win32", reason="device files are Linux's")
def test_a_device_file_that_cannot_be_opened_says_why(tmp_path):
    error = system_files.refusal(tmp_path / "absent")
    assert isinstance(error, FileNotFoundError)
    assert system_files.refusal(Path("/dev/null")) is None
