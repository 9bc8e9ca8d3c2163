"""The control channel between the two sides of a command. Each message is one line with one JSON object.

The other side may be anybody who can reach the port. So the length of a line is limited, each step has a deadline, and
a message is never treated as anything but data. Arguments checks its values.
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

from ndpy.vocabulary.addresses import numeric_host

REPLY_LIMIT = 256 * 1024
REQUEST_LIMIT = 8 * 1024
#: On Windows, Ctrl-C does not end a call that waits for a socket. So no such call waits longer than this.
WAKE_S = 0.5


class ChannelError(Exception):
    """The other side does not answer in time, or sends something that is not a message."""


class ChannelClosed(ChannelError):
    """The other side closed the connection."""


class BadRequest(Exception):
    """A request is malformed."""


def printable(text: Any, longest: int = 500) -> str:
    """What the other side said, for a report: without characters that steer a terminal, and not longer than this."""
    shown = "".join(
        character if character.isprintable() else " " if character.isspace() else "?"
        for character in str(text)[:longest]
    )
    return shown + ("..." if len(str(text)) > longest else "")


class Channel:
    """One end of the control channel. It owns the socket."""

    def __init__(self, connection: socket.socket, *, line_limit: int) -> None:
        self._socket = connection
        self.line_limit = line_limit
        self._received = b""
        with contextlib.suppress(OSError):
            # Only TCP sockets have this option.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send one message. Raises ChannelClosed, or ChannelError after timeout_s seconds."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(data)
        except TimeoutError:
            raise ChannelError(f"the other side read no message for {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelClosed(f"the control connection ended ({error.strerror or error})") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Receive the next message.

        Raises ChannelClosed at the end of the connection, and ChannelError after timeout_s seconds or for anything that
        is not a message.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._read(min(left, WAKE_S))
            except TimeoutError:
                if left <= WAKE_S:
                    raise ChannelError(f"nothing came over the control connection for {timeout_s:g} s") from None
        return self._next()

    def look(self) -> dict[str, Any] | None:
        """Return the next message if it is there already, else None. Raises as receive() does, except for the time."""
        if b"\n" not in self._received:
            try:
                self._read(0.0)
            except BlockingIOError:
                return None
        return self._next() if b"\n" in self._received else None

    def _read(self, timeout_s: float) -> None:
        """Read the bytes that have come. Raises TimeoutError, or BlockingIOError if timeout_s is 0."""
        if len(self._received) > self.line_limit:
            raise ChannelError(f"a line of more than {self.line_limit} bytes came over the control connection")
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(65536)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as error:
            raise ChannelClosed(f"the control connection ended ({error.strerror or error})") from None
        if not data:
            raise ChannelClosed("the other side closed the control connection")
        self._received += data

    def _next(self) -> dict[str, Any]:
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError("a message on the control connection is not JSON") from None
        if not isinstance(message, dict):
            raise ChannelError("a message on the control connection is not a JSON object")
        return message

    def addresses(self) -> tuple[str | None, str | None]:
        """The IP addresses of this end and of the other end, with scopes.
        None if the connection has none, or is over.
        """
        try:
            names = self._socket.getsockname(), self._socket.getpeername()
        except OSError:
            return None, None
        own, other = (numeric_host(name) if isinstance(name, tuple) else None for name in names)
        return own, other

    def close(self) -> None:
        """Close the connection. A thread that waits in receive() gets ChannelClosed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_SECRET_SIZE = 32
#: Those that have connected and have not sent the secret yet.
_MOST_STRANGERS = 64


#: A process of this machine has called back by then. An emulated machine whose host is busy takes more than 60 s to
#: import ndpy. A process that has ended is noticed at once.
START_LIMIT_S = 120.0


class SecretListener:
    """A listener on the loopback interface that accepts one connection, from a process that knows a secret."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.secret = secrets.token_bytes(_SECRET_SIZE)

    def accept(self, alive: Callable[[], bool], timeout_s: float) -> socket.socket | None:
        """Wait for the process that knows the secret. It may be slow to send it, and others that connect hold up
        nobody.

        Returns its connection, or None if timeout_s seconds passed or alive() returned False.
        """
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(0.05)
        #: What each has sent, the oldest first.
        strangers: dict[socket.socket, bytes] = {}
        try:
            while time.monotonic() < deadline and alive():
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    strangers[connection] = b""
                for connection, said in list(strangers.items()):
                    try:
                        more = connection.recv(_SECRET_SIZE - len(said))
                    except BlockingIOError:
                        continue
                    except OSError:
                        more = b""
                    strangers[connection] = said = said + more
                    if hmac.compare_digest(said, self.secret):
                        del strangers[connection]
                        return connection
                    if not more or len(said) == _SECRET_SIZE:
                        _part(strangers, connection)
                if len(strangers) > _MOST_STRANGERS:
                    _part(strangers, next(iter(strangers)))
            return None
        finally:
            self._listener.close()
            for connection in list(strangers):
                _part(strangers, connection)


def _part(strangers: dict[socket.socket, bytes], connection: socket.socket) -> None:
    del strangers[connection]
    connection.close()


def connect_with_secret(port: int, source: IO[bytes]) -> socket.socket:
    """Connect to the SecretListener at this port. Its secret is read from `source`."""
    secret = source.read(_SECRET_SIZE)
    connection = socket.create_connection(("127.0.0.1", port), 10.0)
    connection.sendall(secret)
    return connection


class Arguments:
    """The arguments of a request.
    Each method takes one argument and raises BadRequest if its type or value is wrong.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = dict(values)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise BadRequest(f"{name} must be an integer from {low} to {high}")
        return value

    def optional(self, name: str, low: int, high: int) -> int | None:
        if self._values.get(name) is None:
            self._values.pop(name, None)
            return None
        return self.integer(name, low, high)

    def has(self, name: str) -> bool:
        """Whether the request has this argument."""
        return name in self._values

    def seconds(self, name: str, high: float) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not 0 <= value <= high:
            raise BadRequest(f"{name} must be a number of seconds from 0 to {high:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise BadRequest(f"{name} must be true or false")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self._take(name)
        if not isinstance(value, str) or len(value) > longest:
            raise BadRequest(f"{name} must be a string of at most {longest} characters")
        return value

    def data(self, name: str, longest: int) -> bytes:
        text = self.text(name, (longest + 2) // 3 * 4)
        try:
            value = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"{name} is not base64") from None
        if len(value) > longest:
            raise BadRequest(f"{name} may have at most {longest} bytes")
        return value

    def finish(self) -> None:
        """Raise BadRequest if the request has further arguments."""
        if self._values:
            raise BadRequest(f"unknown argument {sorted(self._values)[0][:40]!r}")

    def _take(self, name: str) -> Any:
        try:
            return self._values.pop(name)
        except KeyError:
            raise BadRequest(f"{name} is missing") from None


def encode(data: bytes | bytearray | memoryview) -> str:
    """Bytes in the form that a message carries and Arguments.data() reads."""
    return base64.b64encode(data).decode("ascii")
