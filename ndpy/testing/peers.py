"""The other end of a connection: a function of a test's module that runs in another process."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, BinaryIO, cast

import pytest

import ndpy
from ndpy.tools.cli.channel import START_LIMIT_S, SecretListener

#: When its test has ended, a function has so long to return.
_GRACE_S = 10.0
#: A step takes at most so long.
DEADLINE_S = 30.0


class PeerFailed(AssertionError):
    """The function of a peer has raised, or its process has ended. The text has the traceback of there."""


class Channel:
    """Values for the other end. Anything that pickle takes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: object) -> None:
        """Send a value. It does not wait for the other end to take it, unless megabytes wait."""
        self._connection.send(("value", value))

    def get(self, timeout_s: float = DEADLINE_S) -> Any:
        """The next value that the other end has sent.

        Raises:
            TimeoutError: none came within timeout_s seconds. The time of a Peer begins with its function.
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
            return "failed", self._lost()

    def _lost(self) -> str:
        return "the test's process has ended"


class Peer(Channel):
    """A function that runs in another process, and the test's end of its Channel: it has send() and get() too.

    Attributes:
        process: it, for its `pid`, `kill()` and so on.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection, output: BinaryIO) -> None:
        super().__init__(connection)
        self.process = process
        self._name = name
        self._output = output
        self._ended: tuple[str, Any] | None = None
        self._has_begun = False

    def _wait_until_begun(self) -> None:
        """A time limit is the function's. On a busy machine its process may still be starting."""
        if not self._has_begun:
            found = super()._next(START_LIMIT_S)
            self._has_begun = True
            if found[0] != "begun":
                self._ended = found

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        self._wait_until_begun()
        if self._ended is not None:
            return self._ended
        found = super()._next(timeout_s)
        if found[0] != "value":
            self._ended = found
        return found

    def _lost(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        return f"the process has ended with status {self.process.returncode}, and the function has not returned"

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """Wait until the function returns, and return its value. What it has sent and nobody took is dropped.

        Raises:
            TimeoutError: it still runs timeout_s seconds after its begin.
            PeerFailed: it has raised, or its process has ended.
        """
        self._wait_until_begun()
        deadline = time.monotonic() + timeout_s
        while True:
            kind, value = self._next(max(0.0, deadline - time.monotonic()))
            if kind == "returned":
                return value
            if kind == "failed":
                raise PeerFailed(value)

    def kill(self) -> None:
        """End the process at once, as if its machine had lost power. The test does not fail because of that."""
        self.process.kill()
        self.process.wait()
        self._has_begun, self._ended = True, ("returned", None)

    def _end(self, item: pytest.Item) -> str:
        """End it. Returns what is wrong, or ""."""
        wrong = ""
        try:
            self.result(_GRACE_S)
        except ndpy.TimeoutError:
            wrong = f"{self._name} still runs {_GRACE_S:g} s after the test, and was killed"
        except PeerFailed as failure:
            wrong = f"{self._name} has failed: {failure}"
        if wrong and sys.platform != "win32" and self.process.poll() is None:
            # It tells where it is, and ends by it.
            self.process.send_signal(signal.SIGABRT)
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
        # multiprocessing's own way to start processes needs a module that can be imported by its name.
        order = (sys.path, module.__name__, module.__file__, function.__qualname__, self._adapter)
        listener = SecretListener()
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, "-m", "ndpy.testing.peer_process", str(listener.port)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdin is not None
            with contextlib.suppress(OSError), process.stdin as stdin:
                stdin.write(listener.secret + pickle.dumps(order))
            accepted = listener.accept(lambda: process.poll() is None, START_LIMIT_S)
            if accepted is None:
                output.seek(0)
                text = output.read().decode("utf-8", "replace")
                raise PeerFailed(
                    f"the process of {function.__name__}() has not come up within {START_LIMIT_S:g} s:\n{text}"
                )
            accepted.settimeout(None)
            connection = Connection(accepted.detach())
            stack.pop_all()
        peer = Peer(f"{function.__name__}() in process {process.pid}", process, connection, output)
        self._peers.append(peer)
        connection.send(arguments)
        return peer
