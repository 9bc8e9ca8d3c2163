"""Ctrl-C while NetworkDirect works on something. The extension module is a stand-in, so this runs without Windows."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("the extension module is there", allow_module_level=True)

from cffi import FFI

INTERFACES = ("INDAdapter", "INDCompletionQueue", "INDConnector", "INDListen")
PACKET = "struct ndpy_packet { uint64_t key; void *request; };"


class Port:
    """Stands in for the extension's functions. take() is called when packets were taken."""

    def __init__(self, ffi: FFI) -> None:
        self._ffi = ffi
        self.packets: list[tuple[int, Any]] = []
        self.take: Any = lambda: None
        self.stopped: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._ffi.cast("void *", 1)

    def ndpy_take_packets(self, port: Any, out: Any, count: int, timeout_ms: int) -> int:
        taken, self.packets = self.packets, []
        for index, (key, request) in enumerate(taken):
            out[index].key, out[index].request = key, request
        if taken:
            self.take()
        return len(taken)

    def ndpy_request_stop(self, request: Any) -> None:
        self.stopped.append(request)


class Request:
    """A Notify that has ended."""

    key = 1
    running = False

    def __init__(self) -> None:
        self._status: int | None = 0

    def take(self) -> int | None:
        status, self._status = self._status, None
        return status

    def detach(self) -> None:
        pass


class Queue:
    """A completion queue that has completions once its Notify has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pollers: set[Any] = set()
        self.ended = False

    def _check_end(self, request: Request, status: int) -> None:
        self.ended = True

    def _leave_behind(self, request: Request) -> None:
        assert self.ended

    def poll(self) -> list[str]:
        return ["a completion"] if self.ended else []


@pytest.fixture
def extension(monkeypatch):
    """(a function that imports a module of ndpy.platforms.networkdirect, the extension's functions)"""
    ffi = FFI()
    ffi.cdef("".join(f"struct {name};" for name in INTERFACES) + PACKET)
    port = Port(ffi)
    former = {name for name in sys.modules if name.startswith("ndpy.platforms.networkdirect")}
    module = types.ModuleType("ndpy._networkdirect")
    module.ffi, module.lib = ffi, port  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ndpy._networkdirect", module)
    yield lambda name: importlib.import_module(f"ndpy.platforms.networkdirect.{name}"), port
    made = [name for name in sys.modules if name.startswith("ndpy.platforms.networkdirect") and name not in former]
    for name in sorted(made, reverse=True):
        package, _, last = name.rpartition(".")
        vars(sys.modules[package]).pop(last, None)
        del sys.modules[name]


def test_packets_that_came_with_ctrl_c_are_handled_by_the_next_wait(extension, monkeypatch):
    """On Windows Ctrl-C does not end the wait. It raises after the wait, which may have taken packets."""
    load, port = extension
    poller_module = load("poller")
    poller = poller_module.NetworkDirectPoller()
    monkeypatch.setattr(poller, "_arm", lambda queue: False)
    queue, request = Queue(), Request()
    poller._queues[queue], poller._by_key[request.key] = request, queue
    poller._on_their_way.add(request.key)

    def interrupt() -> None:
        port.take = lambda: None
        raise KeyboardInterrupt

    native = poller_module.ffi.cast("void *", 7)
    port.packets, port.take = [(request.key, native)], interrupt
    with pytest.raises(KeyboardInterrupt):
        poller.wait(0)
    assert poller.wait(0) == [(queue, ["a completion"])]
    assert not poller._on_their_way
    assert port.stopped == [native]
    poller.close()
    assert port.stopped == [native]


class Deregistration:
    """An overlapped Deregister. It succeeds, and Ctrl-C comes while ndpy waits for the first one."""

    issued = 0

    def __init__(self, native: Any) -> None:
        self._ended = False

    def issue(self, call: Any) -> int:
        type(self).issued += 1
        return 0x103

    def wait(self, deadline: float | None = None) -> int:
        if deadline is None and self.issued == 1:
            raise KeyboardInterrupt
        self._ended = True
        return 0

    def cancel(self) -> bool:
        return not self._ended


def test_d_6_5_a_region_is_deregistered_once_although_ctrl_c_came(extension, monkeypatch):
    load, _ = extension
    memory = load("memory")
    monkeypatch.setattr(memory, "Request", Deregistration)
    region = memory.NetworkDirectMemoryRegion.__new__(memory.NetworkDirectMemoryRegion)
    region._registered = True
    with pytest.raises(KeyboardInterrupt):
        region._native_deregister()
    region._native_deregister()
    assert Deregistration.issued == 1
