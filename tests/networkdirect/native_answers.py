"""Answers that softnd never gives. A test replaces a native function, or a method of a native object."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Import every module that uses `lib` now. A module imported later would keep the stand-in.
from ndpy.platforms.networkdirect import adapter, allocation, native_calls, poller, softnd_installation
from ndpy.platforms.networkdirect.version1 import adapter as version1

_USERS = (adapter, allocation, poller, softnd_installation, version1)
_lib, ffi = native_calls.lib, native_calls.ffi

# Places in the tables of methods (contract B.4, B.5).
SLOTS = {
    "IND2CompletionQueue": {"GetResults": 8},
    "INDCompletionQueue": {"GetResults": 7},
    "IND2QueuePair": {"Send": 4, "Receive": 5, "Bind": 6, "Invalidate": 7, "Read": 8, "Write": 9},
    "INDEndpoint": {
        "Send": 6, "SendAndInvalidate": 7, "Receive": 8, "Bind": 9, "Invalidate": 10, "Read": 11, "Write": 12
    },
    "IND2SharedReceiveQueue": {"Receive": 8},
}  # fmt: skip


class Native:
    """Stands in for ndpy's `lib`. A function assigned to a name replaces the native one until the name is deleted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_lib, name)

    def answer(self, name: str, status: int) -> list[tuple[Any, ...]]:
        """Make a native function do nothing and return this status. Returns a list of the arguments of each call."""
        calls: list[tuple[Any, ...]] = []

        def answering(*arguments: Any) -> int:
            calls.append(arguments)
            return signed(status)

        setattr(self, name, answering)
        return calls


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    stand_in = Native()
    for name, module in list(sys.modules.items()):
        if name.startswith("ndpy.platforms.networkdirect") and getattr(module, "lib", None) is _lib:
            monkeypatch.setattr(module, "lib", stand_in)
            for value in vars(module).values():
                if isinstance(value, type) and vars(value).get("_lib") is _lib:
                    monkeypatch.setattr(value, "_lib", stand_in)
    return stand_in


def signed(status: int) -> int:
    """A status as a native method returns it: as a signed number."""
    return status - (1 << 32) if status >> 31 else status


def interface_of(thing: Any) -> str:
    return str(ffi.typeof(thing).item.cname).removeprefix("struct ")


def original(thing: Any, method: str, *types: Any) -> Callable[..., int]:
    """A provider's method as a Python function. `types` are the types of its arguments after the object."""
    slot = SLOTS[interface_of(thing)][method]
    table = ffi.cast("void ***", thing)[0]
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *types)
    return kind(int(ffi.cast("uintptr_t", table[slot])))


@contextlib.contextmanager
def method(thing: Any, name: str, function: Callable[..., int], *types: Any) -> Iterator[None]:
    """While this is open, the data path calls `function` instead of this method of one native object.

    `types` are the types of its arguments after the object.
    """
    at = ffi.cast("void ***", thing)
    before = at[0]
    table = ffi.new("void *[16]")
    for slot in range(max(SLOTS[interface_of(thing)].values()) + 1):
        table[slot] = before[slot]
    callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *types)(function)
    table[SLOTS[interface_of(thing)][name]] = ffi.cast("void *", ctypes.cast(callback, ctypes.c_void_p).value)
    at[0] = table
    try:
        yield
    finally:
        at[0] = before


@contextlib.contextmanager
def answering(thing: Any, name: str, status: int) -> Iterator[list[int]]:
    """Make a method of one native object do nothing and return this status. Yields a list that grows with each call."""
    calls: list[int] = []

    def answer(_: Any) -> int:
        calls.append(status)
        return signed(status)

    with method(thing, name, answer):
        yield calls
