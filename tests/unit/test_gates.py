"""When soft0's threads are woken for sockets, and when the program's threads do their work
(softrdma/system/linux/driving.h).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit.compiling import compiled
from kit.deadlines import patient

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="soft0 is for Linux")
def test_the_gates_are_open_whenever_no_thread_is_inside(tmp_path):
    """Counted with workers that do nothing: each look of a thread that polls, sleeps, jumps out, or is no longer
    believed, and each turn of an event loop.
    """
    folders = [f"-I{ROOT / 'softrdma' / folder}" for folder in ("engine", "system/linux")]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    source = Path(__file__).with_name("fake_workers.c")
    program = compiled(tmp_path / "fake_workers", *flags, *folders, source, "-lpthread", "-lrt")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=patient(60), check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
