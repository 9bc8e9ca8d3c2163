"""Suspends softnd's own threads, as on a busy machine. Data that arrive meanwhile are not handled."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from ctypes import wintypes

import version2

kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
ntdll = ctypes.WinDLL("ntdll")
kernel32.OpenThread.restype = wintypes.HANDLE
kernel32.CreateToolhelp32Snapshot.restype = wintypes.HANDLE
for function in (kernel32.SuspendThread, kernel32.ResumeThread, kernel32.CloseHandle):
    function.argtypes = [wintypes.HANDLE]

_SNAPSHOT_THREADS = 4
_SUSPEND_AND_QUERY = 0x0042
_START_ADDRESS = 9
_FROM_ADDRESS_AND_UNCHANGED = 6


class _Entry(ctypes.Structure):
    """THREADENTRY32."""

    _fields_ = [
        ("size", wintypes.DWORD),
        ("usage", wintypes.DWORD),
        ("thread", wintypes.DWORD),
        ("process", wintypes.DWORD),
        ("priorities", wintypes.LONG * 2),
        ("flags", wintypes.DWORD),
    ]


def _threads() -> Iterator[int]:
    """Yield the ids of this process's threads."""
    snapshot = wintypes.HANDLE(kernel32.CreateToolhelp32Snapshot(_SNAPSHOT_THREADS, 0))
    entry = _Entry(ctypes.sizeof(_Entry))
    more = kernel32.Thread32First(snapshot, ctypes.byref(entry))
    while more:
        if entry.process == os.getpid():
            yield entry.thread
        more = kernel32.Thread32Next(snapshot, ctypes.byref(entry))
    kernel32.CloseHandle(snapshot)


def _module_of(address: int) -> int | None:
    module = wintypes.HMODULE()
    found = kernel32.GetModuleHandleExW(_FROM_ADDRESS_AND_UNCHANGED, ctypes.c_void_p(address), ctypes.byref(module))
    return module.value if found else None


@contextlib.contextmanager
def suspended(library: version2.Library) -> Iterator[None]:
    """Suspend the threads that this DLL has started."""
    module = int(version2.ffi.cast("uintptr_t", library.module))
    held = []
    for number in list(_threads()):
        handle = kernel32.OpenThread(_SUSPEND_AND_QUERY, False, number)
        start = ctypes.c_void_p()
        status = ntdll.NtQueryInformationThread(
            wintypes.HANDLE(handle), _START_ADDRESS, ctypes.byref(start), ctypes.sizeof(start), None
        )
        if status == 0 and start.value and _module_of(start.value) == module:
            kernel32.SuspendThread(handle)
            held.append(handle)
        else:
            kernel32.CloseHandle(handle)
    assert held, "no thread of the DLL was found"
    try:
        yield
    finally:
        for handle in held:
            kernel32.ResumeThread(handle)
            kernel32.CloseHandle(handle)
