"""What a test leaves behind: objects of ndpy that are open, descriptors, threads and tasks, exceptions that nobody
could catch, and bugs that the kernel's log reports.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import ndpy
from ndpy.objects.adapter import _open_adapters
from ndpy.objects.registrar import Registrar
from ndpy.objects.resource import Resource
from ndpy.tools.machines.kernel_log import RunningKernel, find_bugs

R = TypeVar("R", bound=Resource)

#: In the environment of a session in a VM.
IN_VM = "NDPY_TESTING_IN_VM"
#: Threads and connections that end by themselves have so long.
_GRACE_S = 5.0
# Modules that say nothing to the author of a test. What pytest calls without a test between is a fixture of the plugin.
_INSIDE = re.compile(r"(?:ndpy|pytest_ndpy|contextlib|threading|concurrent|asyncio|pytest_asyncio|anyio)(?:\.|$)")
_PYTEST = re.compile(r"(?:_pytest|pluggy)\.")
#: File and line where each object was made, by its serial number.
_places: dict[int, tuple[str, int]] = {}
#: The serial numbers of what closing() could not close.
_kept_open: set[int] = set()


@contextlib.contextmanager
def closing(thing: R) -> Iterator[R]:
    """Close an object at the end of a test. If the test has left something open in it, Watch reports that, not this,
    and closes both.
    """
    try:
        yield thing
    finally:
        try:
            thing.close()
        except ndpy.DeviceBusyError:
            _kept_open.add(thing._serial)


@contextlib.contextmanager
def _noting_places() -> Iterator[None]:
    """Meanwhile, note where each object is made."""
    begin, register = Resource.__init__, Registrar.register

    # Not when it is open: that may be in a thread of ndpy.
    @functools.wraps(begin)
    def noted(self: Resource, adapter: ndpy.Adapter) -> None:
        begin(self, adapter)
        _note(self)

    # In C, it makes a region without __init__().
    @functools.wraps(register)
    def registered(*arguments: Any, **named: Any) -> ndpy.MemoryRegion:
        region = register(*arguments, **named)
        _note(region)
        return region

    Resource.__init__ = noted  # type: ignore[method-assign]
    Registrar.register = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        Resource.__init__ = begin  # type: ignore[method-assign]
        Registrar.register = register  # type: ignore[method-assign]


def _note(thing: Resource) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _INSIDE.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is not None and not _PYTEST.match(frame.f_globals.get("__name__", "")):
        _places[thing._serial] = frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _kernel_log() -> RunningKernel | None:
    """The log of the VM's kernel. That of another machine has lines that are not about the tests."""
    return RunningKernel() if os.environ.get(IN_VM) else None


class _Unraisable:
    """Keeps what sys.unraisablehook is told, a text for each exception."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._former = sys.unraisablehook
        sys.unraisablehook = self._keep

    def _keep(self, told: sys.UnraisableHookArgs) -> None:
        lines = traceback.format_exception(told.exc_type, told.exc_value, told.exc_traceback)
        thing = told.object
        for frame, _ in traceback.walk_tb(told.exc_traceback):
            # Of a finalizer in Python the hook gets the function.
            if callable(thing):
                thing = frame.f_locals.get("self", thing)
        shown = _object(thing) if isinstance(thing, Resource) else f"{told.object!r}"
        self.texts.append(
            f"{told.err_msg or 'exception that nobody could catch, in'} {shown}:\n{''.join(lines).rstrip()}"
        )

    def end(self) -> None:
        # A test may have set one of its own.
        if sys.unraisablehook == self._keep:
            sys.unraisablehook = self._former


class Watch:
    """What is open when a test begins. end() tells what is still open when it has ended."""

    def __init__(self) -> None:
        if "uvloop" in sys.modules:
            _open_for_ever()
        # What is open already is nobody's leak.
        _places.clear()
        _kept_open.clear()
        self._noting = _noting_places()
        self._noting.__enter__()
        self._unraisable = _Unraisable()
        self._log = _kernel_log()
        self._records = len(self._log.read()) if self._log is not None else 0
        self._before = _Open()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """What the block opens may stay open."""
        before = _Open()
        try:
            yield
        finally:
            now = _Open()
            for kind, things in self._before.kinds.items():
                things.update({key: now.kinds[kind][key] for key in now.kinds[kind].keys() - before.kinds[kind].keys()})

    def end(self) -> str:
        """What is left, a line each. Objects are closed, so that the next test is not blamed for them."""
        deadline = time.monotonic() + _GRACE_S
        # Finalizers of this test's objects run now, not in another test.
        gc.collect()
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
        self._unraisable.end()
        self._noting.__exit__(None, None, None)
        objects = {thing._serial for thing in _objects()} - self._before.kinds["objects"].keys()
        texts = [_object(thing) for thing in _objects() if thing._serial in objects - _kept_open]
        # What keeps it open may be in no list.
        texts = texts or self._left("objects")
        _close(objects)
        texts += self._left()
        bugs = find_bugs(self._log.read()[self._records :]) if self._log is not None else []
        return "\n".join(
            [f"left open: {text}" for text in texts]
            + self._unraisable.texts
            + [f"the kernel's log: {record}" for record in bugs]
        )

    def _left(self, *kinds: str) -> list[str]:
        now = _Open()
        return [
            text
            for kind in kinds or now.kinds
            for key, text in now.kinds[kind].items()
            if self._before.kinds[kind].get(key) != text
        ]


class _Open:
    """What is open now: texts by a key, for each kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[Any, str]] = {
            "objects": {thing._serial: _object(thing) for thing in _objects()},
            "threads": {thread.ident: f"thread {thread.name}" for thread in _threads()},
            "descriptors": _descriptors(),
            "tasks": _tasks(),
        }


def _objects() -> list[Resource]:
    adapters = [adapter for adapter in _open_adapters.members() if not adapter.closed]
    return [thing for adapter in adapters for thing in (adapter, *adapter._open_children())]


def _object(thing: Resource) -> str:
    if thing._serial not in _places:
        return f"{thing!r}"
    file, line = _places[thing._serial]
    return f"{thing!r}, made at {file}:{line}: {linecache.getline(file, line).strip()}"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.name.startswith("ndpy")]


@functools.cache
def _open_for_ever() -> None:
    """Let libuv open the descriptors that it keeps from its first loop on."""
    sys.modules["uvloop"].new_event_loop().close()


def _descriptors() -> dict[Any, str]:
    found: dict[Any, str] = {}
    if sys.platform != "linux":
        return found
    # pytest redirects the first three.
    for name in set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}:
        # The one of the listing has gone.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            # The monitor of memory keeps its own for all caches to come.
            if target != "anon_inode:[userfaultfd]":
                found[name] = f"descriptor {name}, {target}"
    return found


def _tasks() -> dict[Any, str]:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return {}
    return {
        id(thing): f"{thing!r}" for thing in gc.get_objects() if isinstance(thing, asyncio.Task) and not thing.done()
    }


def _close(serials: set[int]) -> None:
    left = [thing for thing in _objects() if thing._serial in serials]
    for lease in [thing for thing in gc.get_objects() if isinstance(thing, ndpy.Lease)]:
        if lease._cache in left:
            lease.release()
    for thing in sorted(left, key=lambda thing: thing._release_order):
        with contextlib.suppress(ndpy.NdpyError):
            thing.close()
