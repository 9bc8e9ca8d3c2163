"""Where the other side of a command runs, and how it is reached: a second process here, or `--serve` on another
machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from ndpy.tools.cli.channel import (
    REPLY_LIMIT,
    START_LIMIT_S,
    Channel,
    ChannelClosed,
    ChannelError,
    SecretListener,
    printable,
)
from ndpy.vocabulary.addresses import Reach, plain_address, reach
from ndpy.vocabulary.info import is_address

_CONNECT_LIMIT_S = 10.0
_END_LIMIT_S = 5.0
#: The time that an answer may take beyond the time that the requested work takes.
_GRACE_S = 15.0
_MOST_ADDRESSES = 64


class PeerLost(Exception):
    """The peer ended, cannot be reached, or no longer answers."""


class PeerRefused(Exception):
    """The peer's library refused a request. `name` and `text` are those of its exception."""

    def __init__(self, name: str, text: str) -> None:
        name, text = printable(name, 64), printable(text)
        super().__init__(f"at the peer: {name}: {text}")
        self.name = name
        self.text = text


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Split HOST, HOST:PORT, :PORT, [HOST]:PORT or a bare IPv6 address into host, perhaps "", and port. Raises
    ValueError.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [HOST]:PORT")
        port = rest[1:]
    elif text.count(":") == 1:
        host, port = text.split(":")
    else:
        host, port = text, ""
    if port and not (port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{port!r} is not a port number")
    return host, int(port) if port else default_port


def nearest_first(own: Iterable[str], control: str | None) -> list[str]:
    """This side's addresses. The one at which the other side's control connection arrived comes first."""
    return sorted(own, key=lambda address: address != control)


def common_address(
    own: Iterable[str],
    theirs: Iterable[str],
    *,
    same_machine: bool,
    version: int | None = None,
    reached: str | None = None,
) -> str | None:
    """The address of the other side that this side can reach, of this IP version if one is given. None if there is
    none.

    Both must be link-local, or neither. Loopback leads to no other machine.

    Parameters:
        theirs: the best ones first.
        reached: the address of the other side on the control connection. It is the best one, if the other side's
            adapter has it.
    """

    def kind(address: str) -> tuple[int, bool]:
        return plain_address(address).version, reach(address) is Reach.LINK_LOCAL

    def is_reached(address: str) -> bool:
        return reached is not None and plain_address(address) == plain_address(reached)

    kinds = {kind(address) for address in own}
    for address in sorted(theirs, key=lambda address: (address != reached, not is_reached(address))):
        if not same_machine and reach(address) is Reach.LOOPBACK and not is_reached(address):
            continue
        # A scope such as %eth0 is only valid on its own machine. The control connection tells this machine's.
        if "%" in address and not same_machine and not is_reached(address):
            continue
        if kind(address) in kinds and version in (None, kind(address)[0]):
            return address
    return None


def as_seen_here(address: str, reached: str | None) -> str:
    """The other side's address as this side writes it. reached: see common_address()."""
    same = reached is not None and plain_address(address) == plain_address(reached)
    return reached if reached is not None and same else address


def dial(host: str, default_port: int, command: str) -> socket.socket:
    """Connect to the control channel of `ndpy COMMAND --serve` at HOST or HOST:PORT. Raises PeerLost."""
    try:
        address = parse_address(host, default_port)
        return socket.create_connection(address, _CONNECT_LIMIT_S)
    except (OSError, ValueError) as error:
        raise PeerLost(
            f"no peer at {host}: {getattr(error, 'strerror', None) or error}; "
            f"start `ndpy {command} --serve` there, and let its port through the firewall"
        ) from None


class PeerProcess:
    """The peer as a second process on this machine. Creating it raises PeerLost if the process does not call back.

    It runs `ndpy COMMAND --serve --client PORT ADAPTER`, with --source if one is given. See serving.py.
    """

    def __init__(self, command: str, adapter: str, source: str | None = None) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        listener = SecretListener()
        words = [sys.executable, "-m", "ndpy", command, "--serve", "--client", str(listener.port), adapter]
        if source is not None:
            words += ["--source", source]
        # In its own session or process group, so that Ctrl-C reaches this process only. This process then ends the
        # peer.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            env={**os.environ, "NDPY_ADAPTER": adapter},
        )
        self.pid = self._process.pid
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError), self._process.stdin as told:
                told.write(listener.secret)
            connection = listener.accept(lambda: self._process.poll() is None, START_LIMIT_S)
            if connection is None:
                raise PeerLost(self.explain())
        except BaseException:
            self._process.kill()
            raise
        self.channel = Channel(connection, line_limit=REPLY_LIMIT)

    def explain(self) -> str:
        """Describe the state of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        if status is None:
            return f"the peer process {self.pid} is running but does not answer"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        return f"the peer process {self.pid} {how}" + (f" and said: {said}" if said else "")

    def end(self) -> None:
        """Let the process leave by itself. If it does not, end it."""
        self.channel.close()
        for limit_s, harder in ((_END_LIMIT_S, self._process.terminate), (_END_LIMIT_S, self._process.kill)):
            try:
                self._process.wait(limit_s)
                break
            except subprocess.TimeoutExpired:
                harder()
        self._errors.close()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


@dataclass(frozen=True)
class PeerDescription:
    """What the peer says about itself."""

    version: str
    host: str
    system: str
    adapter: str
    provider: str
    driver: str
    transport: str
    addresses: tuple[str, ...]

    @classmethod
    def from_answer(cls, answer: dict[str, Any]) -> PeerDescription:
        """Read the answer to hello. Raises KeyError or TypeError if it is not one."""
        addresses = answer["addresses"]
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise TypeError("addresses")
        names = ("version", "host", "system", "adapter", "provider", "driver", "transport")
        return cls(
            **{name: printable(answer[name], 100) for name in names},
            addresses=tuple(filter(_is_address, addresses[:_MOST_ADDRESSES])),
        )


def _is_address(text: str) -> bool:
    # A scope is a name, which may be of any characters.
    return len(text) <= 64 and text.isprintable() and is_address(text)


class PeerLink:
    """The control connection to the peer. The peer takes one command at a time. Base of the peers of the commands."""

    #: The command, the version of its protocol, which must be the same on both sides, and the port of its --serve.
    name: str
    protocol: int
    default_port: int

    def __init__(self, adapter: str, host: str | None, source: str | None = None) -> None:
        """Connect to `ndpy COMMAND --serve` at `host`, or start it on this machine on this adapter. Raises PeerLost.

        source: the only address of the adapter that a peer on this machine uses.
        """
        self.host = host
        self._process: PeerProcess | None = None
        if host is None:
            self._process = PeerProcess(self.name, adapter, source)
            self._channel = self._process.channel
        else:
            self._channel = Channel(dial(host, self.default_port, self.name), line_limit=REPLY_LIMIT)
        try:
            self._send({"command": "hello", "protocol": self.protocol})
            answer = self.finish(START_LIMIT_S)
            self.description = PeerDescription.from_answer(answer)
        except PeerRefused as error:
            self.close()
            raise PeerLost(error.text) from None
        except (KeyError, TypeError):
            self.close()
            raise PeerLost(f"{host} answers, but not as `ndpy {self.name} --serve` of this version") from None
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        """Where the peer runs, for a report."""
        if self.pid is not None:
            return f"process {self.pid} on this machine"
        return f"{self.description.adapter} of {self.description.host} ({self.host})"

    @property
    def control_addresses(self) -> tuple[str | None, str | None]:
        """The addresses of this end and of the other end of the control connection."""
        return self._channel.addresses()

    @property
    def pid(self) -> int | None:
        """The process ID of a peer on this machine, else None."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """Disconnect from the peer. A local peer then ends."""
        if self._process is not None:
            self._process.end()
        else:
            self._channel.close()

    def kill(self) -> None:
        """Kill a local peer, when this side cannot go on."""
        if self._process is not None:
            self._process.kill()

    def call(self, command: str, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. wait_s: how long the peer may work on it."""
        self.begin(command, **arguments)
        return self.finish(wait_s)

    def begin(self, command: str, **arguments: Any) -> None:
        """Send a command. finish() receives its answer."""
        self._send({"command": command, **arguments})

    def finish(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Receive the answer to the command of begin(). Raises PeerRefused and PeerLost."""
        try:
            answer = self._channel.receive(wait_s + _GRACE_S)
        except ChannelError as error:
            raise self._lost(error) from None
        return self._accepted(answer)

    def look(self) -> dict[str, Any] | None:
        """Return the answer if it is there already, else None. Raises as finish() does, except for the time."""
        try:
            answer = self._channel.look()
        except ChannelError as error:
            raise self._lost(error) from None
        return None if answer is None else self._accepted(answer)

    @staticmethod
    def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise PeerRefused(str(answer["error"]), str(answer.get("text", "")))
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message, _GRACE_S)
        except ChannelError as error:
            raise self._lost(error) from None

    def _lost(self, error: ChannelError) -> PeerLost:
        if self._process is not None:
            return PeerLost(self._process.explain())
        if isinstance(error, ChannelClosed):
            return PeerLost(f"the peer at {self.host} is gone: {error}")
        return PeerLost(f"the peer at {self.host} does not answer, or serves another client: {error}")
