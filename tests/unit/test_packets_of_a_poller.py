"""The packets that a poller of NetworkDirect takes from its completion port. The extension module is a stand-in."""

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

    def poll(self) -> list[str]:
        return ["a completion"] if self.ended else []


@pytest.fixture
def module(monkeypatch):
    """(the module of the poller, its port)"""
    ffi = FFI()
    ffi.cdef("".join(f"struct {name};" for name in INTERFACES) + PACKET)
    port = Port(ffi)
    former = {name for name in sys.modules if name.startswith("ndpy.networkdirect")}
    extension = types.ModuleType("ndpy._networkdirect")
    extension.ffi, extension.lib = ffi, port  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ndpy._networkdirect", extension)
    yield importlib.import_module("ndpy.networkdirect.poller"), port
    made = [name for name in sys.modules if name.startswith("ndpy.networkdirect") and name not in former]
    for name in sorted(made, reverse=True):
        package, _, last = name.rpartition(".")
        vars(sys.modules[package]).pop(last, None)
        del sys.modules[name]


def test_packets_that_came_with_ctrl_c_are_handled_by_the_next_wait(module, monkeypatch):
    """On Windows Ctrl-C does not end the wait. It raises after the wait, which may have taken packets."""
    poller_module, port = module
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
