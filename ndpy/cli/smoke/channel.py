"""The control channel between the two sides of a smoke test: one JSON object a line over a stream socket.

The far end may be anybody who reached the port, so a line has a greatest length, every step has a deadline, and what
arrives is only ever data: see Arguments.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import IO, Any

REPLY_LIMIT = 256 * 1024
REQUEST_LIMIT = 8 * 1024


class ChannelError(Exception):
    """The other side does not answer in time, or does not speak this language."""


class ChannelClosed(ChannelError):
    """The other side has gone."""


class BadRequest(Exception):
    """A request that does not fit its schema."""


class Channel:
    """One end of the control channel; owns the socket."""

    def __init__(self, connection: socket.socket, *, line_limit: int) -> None:
        self._socket = connection
        self._line_limit = line_limit
        self._received = b""
        with contextlib.suppress(OSError):
            # Of a socket that is TCP's.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send one message; ChannelClosed or ChannelError if that cannot be done in time."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(data)
        except TimeoutError:
            raise ChannelError(f"the other side took no message for {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelClosed(f"the control connection ended ({error.strerror or error})") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message; ChannelClosed at its end, ChannelError after timeout_s seconds or for nonsense."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > self._line_limit:
                raise ChannelError(f"a line of more than {self._line_limit} bytes came over the control connection")
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(65536)
            except TimeoutError:
                raise ChannelError(f"nothing came over the control connection for {timeout_s:g} s") from None
            except OSError as error:
                raise ChannelClosed(f"the control connection ended ({error.strerror or error})") from None
            if not data:
                raise ChannelClosed("the other side closed the control connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError("what came over the control connection is not JSON") from None
        if not isinstance(message, dict):
            raise ChannelError("what came over the control connection is not a JSON object")
        return message

    def close(self) -> None:
        """End the connection; a thread that waits in receive() gets ChannelClosed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_SECRET_SIZE = 32


class Meeting:
    """A place on this machine where one process that was told the secret can connect, and nobody else."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.secret = secrets.token_bytes(_SECRET_SIZE)

    def accept(self, alive: Callable[[], bool], timeout_s: float) -> socket.socket | None:
        """The connection of the one who knows the secret; None at the deadline, or when it is not alive any more."""
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(0.1)
        with self._listener:
            while time.monotonic() < deadline and alive():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(1.0)
                with contextlib.suppress(OSError):
                    if hmac.compare_digest(connection.recv(_SECRET_SIZE, socket.MSG_WAITALL), self.secret):
                        return connection
                connection.close()
        return None


def meet(port: int, told: IO[bytes]) -> socket.socket:
    """The other end of a Meeting; `told` is where its secret can be read."""
    secret = told.read(_SECRET_SIZE)
    connection = socket.create_connection(("127.0.0.1", port), 10.0)
    connection.sendall(secret)
    return connection


class Arguments:
    """The arguments of a request, each taken once with its type and bounds; BadRequest where they do not fit."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = dict(values)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise BadRequest(f"{name} is an integer from {low} to {high}")
        return value

    def optional(self, name: str, low: int, high: int) -> int | None:
        if self._values.get(name) is None:
            self._values.pop(name, None)
            return None
        return self.integer(name, low, high)

    def has(self, name: str) -> bool:
        """Whether it was given."""
        return name in self._values

    def seconds(self, name: str, high: float) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not 0 <= value <= high:
            raise BadRequest(f"{name} is a number of seconds from 0 to {high:g}")
        return float(value)

    def text(self, name: str, longest: int) -> str:
        value = self._take(name)
        if not isinstance(value, str) or len(value) > longest:
            raise BadRequest(f"{name} is a text of up to {longest} characters")
        return value

    def data(self, name: str, longest: int) -> bytes:
        text = self.text(name, (longest + 2) // 3 * 4)
        try:
            value = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"{name} is not base64") from None
        if len(value) > longest:
            raise BadRequest(f"{name} has up to {longest} bytes")
        return value

    def finish(self) -> None:
        """Refuse what nobody took."""
        if self._values:
            raise BadRequest(f"no argument {sorted(self._values)[0][:40]!r} here")

    def _take(self, name: str) -> Any:
        try:
            return self._values.pop(name)
        except KeyError:
            raise BadRequest(f"{name} is missing") from None


def encode(data: bytes | bytearray | memoryview) -> str:
    """Bytes as they travel in a message; Arguments.data() reads them."""
    return base64.b64encode(data).decode("ascii")
