"""`ndpy perf` between two threads of this process, over an adapter in Python."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import fake_adapter
import pytest
from click.testing import CliRunner
from fake_adapter import DEADLINE_S, Adapter, World

import ndpy
from ndpy.tools.cli import main
from ndpy.tools.cli.perf import plan, server


class Server:
    """Serves clients one after the other, in a thread. ended: how each one ended."""

    def __init__(self, world: World, **changes) -> None:
        self.adapter = Adapter(world, **changes)
        self.ended: list[str] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                self.ended.append(server.serve_client(self.adapter, connection))

    def wait_for(self, count: int) -> list[str]:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.ended) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.ended

    def close(self) -> None:
        # On Linux, close() alone does not end an accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def serving(world):
    server = Server(world)
    yield server
    server.close()


@pytest.fixture
def perf(world, serving, monkeypatch):
    """perf(*words) runs the command against the server. A few messages need grants already."""
    monkeypatch.setattr(plan, "LEAST_CREDIT", 0)
    monkeypatch.setattr(ndpy, "open_adapter", lambda which=None: Adapter(world, name=which or "fake0"))
    monkeypatch.setattr(ndpy, "Batch", fake_adapter.Batch)

    def run(*words, status=0):
        result = CliRunner().invoke(main, ["perf", *map(str, words), "--peer", serving.host])
        assert result.exit_code == status, result.output
        return result.output

    return run


def report_of(perf, tmp_path, *words, status=0):
    perf(*words, "--json", tmp_path / "out.json", status=status)
    return json.loads((tmp_path / "out.json").read_text())
