"""The executors of soft0 can make what the table of kinds says, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kit.deadlines import patient
from kit.every_fault import every_fault

from ndpy.faults import kinds
from ndpy.faults.injection import SHIM
from ndpy.platforms.verbs import softverbs

# Opens the first device in a process for each scenario, and prints whether that worked.
OPENS = """
import ctypes, os, sys
for path in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["NDPY_FAULTS"] = path
        library = ctypes.CDLL("libibverbs.so.1")
        library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
        library.ibv_open_device.restype = ctypes.c_void_p
        library.ibv_open_device.argtypes = [ctypes.c_void_p]
        os._exit(0 if library.ibv_open_device(library.ibv_get_device_list(None)[0]) else 1)
    print(os.waitstatus_to_exitcode(os.wait()[1]) == 0)
"""


@pytest.mark.parametrize("executor", kinds.HERE)
def test_an_executor_can_make_what_the_table_says(tmp_path, executor):
    faults = list(every_fault())
    for number, fault in enumerate(faults):
        (tmp_path / f"{number:03}").write_text(f"scenario 1\nseed 0\nfault {fault}\n")
    folder = softverbs.folder()
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    environment = {**softverbs.environment(folder, os.environ), "NDPY_FAULTS": paths[0]}
    if executor == "shim":
        environment["LD_PRELOAD"] = str(folder / SHIM)
    done = subprocess.run(
        [sys.executable, "-c", OPENS, *paths], env=environment, capture_output=True, text=True, timeout=patient(60)
    )
    opened = done.stdout.split()
    assert len(opened) == len(faults), done.stderr
    found = {str(fault): word == "True" for fault, word in zip(faults, opened, strict=True)}
    table = {str(fault): not fault.why_not(executor) for fault in faults}
    assert found == table, done.stderr
