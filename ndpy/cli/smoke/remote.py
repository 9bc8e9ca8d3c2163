"""The near side's view of the far one: where the peer runs, and what it can be asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any

import ndpy
from ndpy import Access, Flags, Operation, RemoteMemory, Status
from ndpy.cli.smoke.channel import REPLY_LIMIT, Arguments, Channel, ChannelClosed, ChannelError, Meeting, encode
from ndpy.cli.smoke.line import difference, pattern
from ndpy.cli.smoke.peer import MAX_CONTENTS, MAX_WAIT_S, PROTOCOL

DEFAULT_PORT = 18520
_START_LIMIT_S = 60.0
_CONNECT_LIMIT_S = 10.0
_END_LIMIT_S = 5.0
#: What the control channel itself may take on top of what was asked for.
_GRACE_S = 15.0


class PeerLost(Exception):
    """The peer ended, cannot be reached, or does not answer any more."""


class PeerRefused(Exception):
    """The peer's library refused what it was asked for: the name of its exception, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"at the peer: {name}: {text}")
        self.name = name
        self.text = text


def parse_address(text: str, default_host: str = "") -> tuple[str, int]:
    """(host, port) of HOST, HOST:PORT, :PORT, [HOST]:PORT or a bare IPv6 address; ValueError otherwise."""
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
        raise ValueError(f"{port!r} is no port")
    return host or default_host, int(port) if port else DEFAULT_PORT


class _LocalProcess:
    """The peer as a second process of this machine. Raises PeerLost if it does not come."""

    def __init__(self, adapter: str) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        meeting = Meeting()
        command = [sys.executable, "-m", "ndpy", "smoke", "--serve", "--client", str(meeting.port), adapter]
        # A session or group of its own: Ctrl-C reaches the near side only, which then ends the peer in order.
        self._process = subprocess.Popen(
            command,
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
                told.write(meeting.secret)
            connection = meeting.accept(lambda: self._process.poll() is None, _START_LIMIT_S)
            if connection is None:
                raise PeerLost(self.explain())
        except BaseException:
            self._process.kill()
            raise
        self.channel = Channel(connection, line_limit=REPLY_LIMIT)

    def explain(self) -> str:
        """How the process is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        if status is None:
            return f"the peer process {self.pid} runs but does not answer"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        return f"the peer process {self.pid} {how}" + (f" and said: {said}" if said else "")

    def end(self) -> None:
        """Let it leave in order, else end it."""
        self.channel.close()
        for limit_s, harder in ((_END_LIMIT_S, self._process.terminate), (_END_LIMIT_S, self._process.kill)):
            try:
                self._process.wait(limit_s)
                break
            except subprocess.TimeoutExpired:
                harder()
        self._errors.close()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()


@dataclass(frozen=True)
class Ended:
    """A completion of the far side."""

    context: int
    operation: Operation
    status: Status
    nbytes: int


@dataclass(frozen=True)
class Greeting:
    """Who the peer is."""

    version: str
    host: str
    system: str
    adapter: str
    provider: str
    driver: str
    transport: str
    addresses: tuple[str, ...]


class Peer:
    """The far side. One command at a time; begin() and finish() let the near side act in between."""

    def __init__(self, adapter: str, host: str | None) -> None:
        """host: None starts the peer here, on the same adapter. Raises PeerLost if there is no peer to be had."""
        self._host = host
        self._process: _LocalProcess | None = None
        if host is None:
            self._process = _LocalProcess(adapter)
            self._channel = self._process.channel
        else:
            self._channel = Channel(_dial(host), line_limit=REPLY_LIMIT)
        try:
            self._send({"command": "hello", "protocol": PROTOCOL})
            answer = self.finish(_START_LIMIT_S)
            self.greeting = Greeting(**{**answer, "addresses": tuple(answer["addresses"])})
        except PeerRefused as error:
            self.close()
            raise PeerLost(error.text) from None
        except (KeyError, TypeError):
            self.close()
            raise PeerLost(f"what answers at {host} is no smoke test of this version") from None
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        """The peer in a report."""
        if self._process is not None:
            return f"process {self._process.pid} on this machine"
        return f"{self.greeting.adapter} of {self.greeting.host} ({self._host})"

    @property
    def pid(self) -> int | None:
        """The peer's process, if it runs here."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """Leave the peer; a local one ends."""
        if self._process is not None:
            self._process.end()
        else:
            self._channel.close()

    def kill(self) -> None:
        """End a local peer at once; for when the near side cannot go on."""
        if self._process is not None:
            self._process.kill()

    def call(self, command: str, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; wait_s: how long the command itself may take."""
        self.begin(command, **arguments)
        return self.finish(wait_s)

    def begin(self, command: str, **arguments: Any) -> None:
        """Ask for something; finish() gets the answer."""
        self._send({"command": command, **arguments})

    def finish(self, wait_s: float = 0.0) -> dict[str, Any]:
        """The answer to begin(). Raises PeerRefused, PeerLost."""
        try:
            answer = self._channel.receive(wait_s + _GRACE_S)
        except ChannelError as error:
            raise self._lost(error) from None
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
            return PeerLost(f"the peer at {self._host} has gone: {error}")
        return PeerLost(f"the peer at {self._host} does not answer, or serves another client: {error}")

    # What a peer can be asked for, with types.

    def reset(self) -> list[str]:
        """Let the peer close everything; returns what it could not close."""
        return list(self.call("reset", wait_s=60.0)["failures"])

    def listen(self, host: str) -> tuple[int, int]:
        """(number, port) of a new listener at an address of the peer."""
        answer = self.call("listen", host=host)
        return int(answer["listener"]), int(answer["port"])

    def memory(self, length: int, access: Access, seed: int, line: int | None = None) -> FarMemory:
        """New memory at the peer, filled with pattern(seed, length). line: over which its remote rights are used."""
        over = {} if line is None else {"line": line}
        answer = self.call("memory", wait_s=MAX_WAIT_S, length=length, access=int(access), seed=seed, **over)
        remote = RemoteMemory.from_bytes(Arguments(answer).data("remote", 20)) if "remote" in answer else None
        return FarMemory(self, int(answer["memory"]), length, seed, remote)


def _dial(host: str) -> socket.socket:
    try:
        address = parse_address(host)
        return socket.create_connection(address, _CONNECT_LIMIT_S)
    except (OSError, ValueError) as error:
        raise PeerLost(
            f"no peer at {host}: {getattr(error, 'strerror', None) or error}; "
            "start `ndpy smoke --serve` there, and let its port through the firewall"
        ) from None


class FarMemory:
    """Memory of the peer. remote: what reaches it, None without a remote right."""

    def __init__(self, peer: Peer, number: int, length: int, seed: int, remote: RemoteMemory | None) -> None:
        self.peer = peer
        self.number = number
        self.length = length
        self.seed = seed
        self._remote = remote

    @property
    def remote(self) -> RemoteMemory:
        assert self._remote is not None, "this memory has no remote right"
        return self._remote

    def contents(self, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes as they are now."""
        end = self.length if length is None else offset + length
        found = b""
        while offset < end:
            piece = min(MAX_CONTENTS, end - offset)
            answer = self.peer.call("contents", memory=self.number, offset=offset, length=piece)
            found += Arguments(answer).data("bytes", piece)
            offset += piece
        return found

    def changed(self) -> str:
        """Where the bytes differ from the pattern, or "" if they do not."""
        return difference(self.contents(), pattern(self.seed, self.length))

    def close(self) -> list[str]:
        """Deregister it; returns what went wrong."""
        return list(self.peer.call("close", wait_s=10.0, object=self.number)["failures"])


class FarLine:
    """The far end of a connection. receives: the memory that its posted receives use."""

    def __init__(self, peer: Peer, answer: dict[str, Any], receives: int, size: int, seed: int) -> None:
        self.peer = peer
        self.number = int(answer["line"])
        self.private_data = Arguments(answer).data("private_data", 512)
        self.peer_address = (str(answer["peer_address"][0]), int(answer["peer_address"][1]))
        self.read_limits = ndpy.ReadLimits(*answer["read_limits"])
        self.slot_size = size
        self._receives = (
            FarMemory(peer, int(answer["memory"]), receives * size, seed, None) if "memory" in answer else None
        )

    @property
    def receives(self) -> FarMemory:
        assert self._receives is not None, "this line has no receives"
        return self._receives

    def slot(self, number: int, length: int | None = None) -> bytes:
        """What receive `number` holds."""
        return self.receives.contents(number * self.slot_size, self.slot_size if length is None else length)

    def post(
        self,
        operation: Operation,
        memory: FarMemory,
        offset: int = 0,
        length: int | None = None,
        *,
        remote: RemoteMemory | None = None,
        context: int = 0,
        flags: Flags = Flags.NONE,
    ) -> None:
        """Let the peer post a request. Raises PeerRefused."""
        self.begin_post(operation, memory, offset, length, remote=remote, context=context, flags=flags)
        self.peer.finish()

    def begin_post(
        self,
        operation: Operation,
        memory: FarMemory,
        offset: int = 0,
        length: int | None = None,
        *,
        remote: RemoteMemory | None = None,
        context: int = 0,
        flags: Flags = Flags.NONE,
    ) -> None:
        """The same without waiting for the answer: Peer.finish() gets it."""
        self.peer.begin(
            "post",
            line=self.number,
            operation=operation.name,
            memory=memory.number,
            offset=offset,
            length=memory.length - offset if length is None else length,
            context=context,
            flags=int(flags),
            remote=encode(remote.to_bytes()) if remote is not None else "",
        )

    def take(self, count: int, timeout_s: float) -> list[Ended]:
        """The next `count` completions at the peer; fewer if no more came in time."""
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        left = max(deadline - time.monotonic(), 0.0)
        answer = self.peer.call("completions", wait_s=left, line=self.number, count=count, timeout_s=left)
        return [
            Ended(context, Operation[operation], Status[status], nbytes)
            for context, operation, status, nbytes in answer["completions"]
        ]

    def disconnect(self, timeout_s: float) -> None:
        self.peer.call("disconnect", wait_s=timeout_s, line=self.number, timeout_s=timeout_s)

    def wait_disconnected(self, timeout_s: float) -> None:
        self.peer.call("wait_disconnected", wait_s=timeout_s, line=self.number, timeout_s=timeout_s)

    def flush(self) -> None:
        self.peer.call("flush", line=self.number)

    def close(self) -> list[str]:
        """Close its connector and queue pair without a disconnect; returns what went wrong."""
        return list(self.peer.call("close", wait_s=30.0, object=self.number)["failures"])
