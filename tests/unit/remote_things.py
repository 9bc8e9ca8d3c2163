"""What test_remote.py uses in the other process."""

from __future__ import annotations

import enum
import os
import threading
import time
import weakref
from typing import Any

import ndpy


class Colour(enum.Enum):
    RED = 1


class OwnError(Exception):
    """It cannot be made from its arguments."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{where}: {code}")
        self.code = code
        self.where = where


class Thing:
    """An object with a bit of everything."""

    def __init__(self, *parts: int) -> None:
        self.parts = list(parts)
        self.entered: Any = None
        self.friend: Thing | None = None
        MADE.add(self)

    def __enter__(self) -> Thing:
        self.entered = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.entered = error
        return isinstance(error, KeyError)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, key: Any) -> Any:
        return Thing(*self.parts[key]) if isinstance(key, slice) else self.parts[key]

    def __setitem__(self, key: int, value: int) -> None:
        self.parts[key] = value

    def __iter__(self) -> Any:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Thing{tuple(self.parts)}"

    def __lt__(self, other: Thing) -> bool:
        return self.parts < other.parts

    def total(self, *, factor: int = 1) -> int:
        return factor * sum(self.parts)

    def itself(self) -> Thing:
        return self

    def is_it(self, other: object) -> bool:
        return other is self

    def among(self, others: list[Any]) -> bool:
        return any(other is self for other in others)


class Buffer:
    """As much of a region as contents() and fill() need."""

    def __init__(self, contents: bytes) -> None:
        self.buffer = bytearray(contents)


class Region(ndpy.MemoryRegion):
    """Only its class matters. It is never registered."""

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


WAITING, EVENT = threading.Event(), threading.Event()
# The Things that exist now.
MADE: weakref.WeakSet[Thing] = weakref.WeakSet()


def echo(*values: Any) -> Any:
    return values


def alive() -> int:
    return len(MADE)


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def wait_for_event(seconds: float) -> bool:
    WAITING.set()
    return EVENT.wait(seconds)


def set_event() -> None:
    EVENT.set()


def fail(kind: str) -> None:
    if kind == "own":
        raise OwnError(7, where="there")
    if kind == "local":

        class LocalError(Exception):
            pass

        raise LocalError("only here")
    if kind == "ndpy":
        raise ndpy.TimeoutError("it took too long", operation="wait", native=110, native_name="ETIMEDOUT")
    raise ndpy.ClosedError("closed there")


def too_much() -> bytes:
    return bytes(80 << 20)


def die() -> None:
    os._exit(3)


def call(function: Any) -> Any:
    return function()


def remote_memory() -> ndpy.RemoteMemory:
    return ndpy.RemoteMemory(4096, 64, 7)
