"""Both executors can make what the table of kinds says, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kit.deadlines import patient

from ndpy.faults import Fault, kinds
from ndpy.faults.injection import SHIM
from ndpy.faults.kinds import Data, Number
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


def every_fault() -> Iterator[Fault]:
    """A fault of each kind, at each call, and with each status."""
    for kind in kinds.KINDS:
        given: dict[str, object] = {"at": kind.at, "nth": 1000}
        for name in kind.values:
            value = kinds.value_named(name)
            given[name] = 1 if isinstance(value, Number) else b"x" if isinstance(value, Data) else value.words[0]
        if kind.do == "limit":
            del given["nth"]
        if kind.do == "late_receive":
            given["operation"] = "receive"
        if kind.do == "status":
            yield from (Fault("status", **(given | {"status": status.name})) for status in kinds.STATUSES)
        elif kind.at == "call":
            calls = [call for call in kinds.CALLS if kind.do != "limit" or call.limited]
            yield from (Fault(kind.do, **(given | {"call": call.name})) for call in calls)
        else:
            yield Fault(kind.do, **given)


@pytest.mark.parametrize("executor", kinds.EXECUTORS)
def test_an_executor_can_make_what_the_table_says(tmp_path, executor):
    # This call is NetworkDirect's.
    faults = [fault for fault in every_fault() if fault.call != "cancel"]
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
    table = {str(fault): kinds.can(executor, fault.kind, fault.call, fault.status) for fault in faults}
    assert found == table, done.stderr
