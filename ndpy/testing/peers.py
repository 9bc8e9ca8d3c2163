"""The other end of a connection: a function of a test's module that runs in another process."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import TracebackType
from typing import Any, BinaryIO, cast

import pytest

import ndpy

#: A process starts within this time.
_START_S = 60.0
#: When its test has ended, a function has so long to return.
_GRACE_S = 10.0
_DEADLINE_S = 30.0


class PeerFailed(AssertionError):
    """The function of a peer has raised, or its process has ended. The text has the traceback of there."""


class Channel:
    """Values for the other end. Anything that pickle takes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: object) -> None:
        """Send a value. It does not wait for the other end to take it, unless megabytes wait."""
        self._connection.send(("value", value))

    def get(self, timeout_s: float = _DEADLINE_S) -> Any:
        """The next value that the other end has sent.

        Raises:
            TimeoutError: none came within timeout_s seconds.
            PeerFailed: the other end has failed, or has ended.
        """
        kind, value = self._next(timeout_s)
        if kind == "value":
            return value
        raise PeerFailed(value if kind == "failed" else f"the peer has returned {value!r} and sends no more")

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        if not self._connection.poll(timeout_s):
            raise ndpy.TimeoutError(f"the peer has sent nothing within {timeout_s:g} s")
        try:
            return cast("tuple[str, Any]", self._connection.recv())
        except (EOFError, ConnectionError):
            return "failed", "the peer's process has ended"


class Peer(Channel):
    """A function that runs in another process.

    Attributes:
        process: it, for its `pid`, `kill()` and so on.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection, output: BinaryIO) -> None:
        super().__init__(connection)
        self.process = process
        self._name = name
        self._output = output
        self._ended: tuple[str, Any] | None = None

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        if self._ended is not None:
            return self._ended
        found = super()._next(timeout_s)
        if found[0] != "value":
            self._ended = found
        return found

    def result(self, timeout_s: float = _DEADLINE_S) -> Any:
        """Wait until the function returns, and return its value. What it has sent and nobody took is dropped.

        Raises:
            TimeoutError: it still runs after timeout_s seconds.
            PeerFailed: it has raised, or its process has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            kind, value = self._next(max(0.0, deadline - time.monotonic()))
            if kind == "returned":
                return value
            if kind == "failed":
                raise PeerFailed(value)

    def kill(self) -> None:
        """End the process at once, as if its machine had lost power. Its end is no failure of the test then."""
        self.process.kill()
        self.process.wait()
        self._ended = ("returned", None)

    def _end(self, item: pytest.Item) -> str:
        """End it. Returns what is wrong, or ""."""
        wrong = ""
        try:
            self.result(_GRACE_S)
        except ndpy.TimeoutError:
            wrong = f"{self._name} still runs {_GRACE_S:g} s after the test, and was killed"
        except PeerFailed as failure:
            wrong = f"{self._name} has failed: {failure}"
        if wrong:
            self.process.kill()
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        self.process.kill()
        self.process.wait()
        self._output.seek(0)
        text = self._output.read().decode("utf-8", "replace")
        self._output.close()
        if text:
            item.add_report_section("teardown", f"output of {self._name}", text)
        return wrong


class Peers:
    """The peers of a test. They end with it."""

    def __init__(self, item: pytest.Item, adapter: str) -> None:
        self._item = item
        self._adapter = adapter
        self._peers: list[Peer] = []

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wrong = [text for peer in self._peers if (text := peer._end(self._item))]
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Peer:
        module = sys.modules[function.__module__]
        key = os.urandom(32)
        # multiprocessing's own way to start processes needs a module that can be imported by its name.
        order = (key, sys.path, module.__name__, module.__file__, function.__qualname__, self._adapter)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            command = [sys.executable, "-m", "ndpy.testing.peer_process", str(server.getsockname()[1])]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            stack.callback(process.kill)
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(pickle.dumps(order))
            peer = Peer(
                f"{function.__name__}() in process {process.pid}", process, _accept(server, process, key), output
            )
            self._peers.append(peer)
            stack.pop_all()
        server.close()
        peer._connection.send(arguments)
        return peer


def _accept(server: socket.socket, process: subprocess.Popen[bytes], key: bytes) -> Connection:
    """The channel of a process that has just been started. Others may connect too, and do not know the key."""
    deadline = time.monotonic() + _START_S
    server.settimeout(0.1)
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(TimeoutError, AuthenticationError, OSError, EOFError):
            accepted, _ = server.accept()
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            return connection
    raise PeerFailed(f"the process of the peer has not come up: its exit status is {process.poll()}")
