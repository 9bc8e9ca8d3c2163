"""What tests compile is for the machine of the Python that runs them, which may be emulated."""

from __future__ import annotations

import os
import platform
import shutil

import pytest
from kit import linux_only as linux_only
from kit.compiling import compiled

#: e_machine of ELF files (elf.h).
MACHINES = {"x86_64": 62, "aarch64": 183}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_library_is_for_the_machine_of_this_python(tmp_path, monkeypatch, machine):
    if machine != platform.machine() and shutil.which(f"{machine}-linux-gnu-gcc") is None:
        pytest.skip(f"no cross compiler: install gcc for {machine}")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    made = compiled(tmp_path / "libempty.so", "-shared", source)
    assert int.from_bytes(made.read_bytes()[18:20], "little") == MACHINES[machine]


def test_without_a_compiler_for_it_the_test_skips_and_names_the_machine(tmp_path, monkeypatch):
    """That of another machine is there."""
    (tmp_path / "gcc").write_text("#!/bin/sh\necho x86_64-linux-gnu\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(pytest.skip.Exception, match="gcc for riscv64"):
        compiled(tmp_path / "made", "-shared")
