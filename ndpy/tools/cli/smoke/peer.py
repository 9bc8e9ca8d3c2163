"""The peer, as the checking side sees it: where it runs, and what it can be asked to do. Its own side is server.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ndpy
from ndpy import Access, Flags, Operation, RemoteMemory, Status
from ndpy.tools.cli.channel import Arguments, encode, printable
from ndpy.tools.cli.peers import PeerLink, PeerRefused
from ndpy.tools.cli.smoke.resources import difference, pattern
from ndpy.tools.cli.smoke.server import MAX_CONTENTS, MAX_WAIT_S, PROTOCOL
from ndpy.tools.cli.smoke.views import View
from ndpy.tools.doctor.link import LinkDescription

DEFAULT_PORT = 18520


@dataclass(frozen=True)
class PeerCompletion:
    """A completion at the peer."""

    context: int
    operation: Operation
    status: Status
    nbytes: int


class Peer(PeerLink):
    """The peer. It takes one command at a time. Between begin() and finish() this side can do its own work."""

    name, protocol, default_port = "smoke", PROTOCOL, DEFAULT_PORT

    # Commands with typed arguments.

    def reset(self) -> list[str]:
        """Close everything at the peer. Returns a sentence for each failure."""
        return _sentences(self.call("reset", wait_s=60.0))

    def link(self, end: int | None = None) -> LinkDescription:
        """The peer's description of its link. end: the number of its connection end, if there is one."""
        return read_link(self.call("link", wait_s=MAX_WAIT_S, **({} if end is None else {"end": end})))

    def listen(self, host: str) -> tuple[int, int]:
        """Start a listener at this address of the peer. Returns its number and its port."""
        answer = self.call("listen", host=host)
        return int(answer["listener"]), int(answer["port"])

    def memory(self, length: int, access: Access, seed: int, end: int | None = None) -> PeerMemory:
        """Register new memory at the peer, filled with pattern(seed, length).

        end: the number of the connection end whose peer reads or writes it.
        """
        over = {} if end is None else {"end": end}
        answer = self.call("memory", wait_s=MAX_WAIT_S, length=length, access=int(access), seed=seed, **over)
        remote = RemoteMemory.from_bytes(Arguments(answer).data("remote", 20)) if "remote" in answer else None
        return PeerMemory(self, int(answer["memory"]), length, seed, remote)


def read_link(answer: dict[str, Any]) -> LinkDescription:
    """Read the answer to the command link. Raises PeerRefused if it makes no sense."""
    try:
        return LinkDescription.from_dict(answer.get("link", {}))
    except ValueError as error:
        raise PeerRefused("ValueError", f"its description of its link makes no sense: {error}") from None


def read_completions(answer: dict[str, Any]) -> list[PeerCompletion]:
    """Read the answer to the command completions. Raises PeerRefused if it makes no sense."""
    try:
        return [
            PeerCompletion(_number(context), Operation[operation], Status[status], _number(nbytes))
            for context, operation, status, nbytes in answer["completions"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise PeerRefused(type(error).__name__, f"its completions make no sense: {error}") from None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is not a number of 64 bits")
    return value


def _sentences(answer: dict[str, Any]) -> list[str]:
    return [printable(failure) for failure in list(answer["failures"])[:64]]


class PeerMemory:
    """Memory at the peer. `remote` describes it for requests of this side; None if it has no remote rights."""

    def __init__(self, peer: Peer, number: int, length: int, seed: int, remote: RemoteMemory | None) -> None:
        self.peer = peer
        self.number = number
        self.length = length
        self.seed = seed
        self._remote = remote

    @property
    def remote(self) -> RemoteMemory:
        assert self._remote is not None, "this memory has no remote rights"
        return self._remote

    def contents(self, offset: int = 0, length: int | None = None) -> bytes:
        """A copy of the current bytes."""
        end = self.length if length is None else offset + length
        found = b""
        while offset < end:
            piece = min(MAX_CONTENTS, end - offset)
            answer = self.peer.call("contents", memory=self.number, offset=offset, length=piece)
            found += Arguments(answer).data("bytes", piece)
            offset += piece
        return found

    def changed(self) -> str:
        """Describe where the bytes differ from the pattern. Returns "" if they do not."""
        return difference(self.contents(), pattern(self.seed, self.length))

    def close(self) -> list[str]:
        """Deregister the memory. Returns a sentence for each failure."""
        return _sentences(self.peer.call("close", wait_s=10.0, object=self.number))


class PeerConnectionEnd:
    """The peer's end of a connection. `receives` is the memory of its posted receives."""

    def __init__(self, peer: Peer, answer: dict[str, Any], receives: int, size: int, seed: int) -> None:
        self.peer = peer
        self.number = int(answer["end"])
        self.private_data = Arguments(answer).data("private_data", 512)
        self.peer_address = (printable(answer["peer_address"][0], 64), int(answer["peer_address"][1]))
        self.read_limits = ndpy.ReadLimits(*answer["read_limits"])
        self.slot_size = size
        self._receives = (
            PeerMemory(peer, int(answer["memory"]), receives * size, seed, None) if "memory" in answer else None
        )

    @property
    def receives(self) -> PeerMemory:
        assert self._receives is not None, "this end has no receives"
        return self._receives

    def slot(self, number: int, length: int | None = None) -> bytes:
        """A copy of the bytes in receive `number`."""
        return self.receives.contents(number * self.slot_size, self.slot_size if length is None else length)

    def post(
        self,
        operation: Operation,
        memory: PeerMemory,
        offset: int = 0,
        length: int | None = None,
        *,
        remote: RemoteMemory | None = None,
        context: int = 0,
        flags: Flags = Flags.NONE,
        waits: bool = True,
    ) -> None:
        """Let the peer post a request. Raises PeerRefused.

        waits: whether to wait for its answer. Otherwise Peer.finish() receives it.
        """
        self.peer.begin(
            "post",
            end=self.number,
            operation=operation.name,
            memory=memory.number,
            offset=offset,
            length=memory.length - offset if length is None else length,
            context=context,
            flags=int(flags),
            remote=encode(remote.to_bytes()) if remote is not None else "",
        )
        if waits:
            self.peer.finish()

    def take(self, count: int, timeout_s: float) -> list[PeerCompletion]:
        """Take up to `count` completions at the peer. Returns fewer if timeout_s seconds pass first."""
        timeout_s = min(timeout_s, MAX_WAIT_S)
        return read_completions(
            self.peer.call("completions", wait_s=timeout_s, end=self.number, count=count, timeout_s=timeout_s)
        )

    def view(self) -> View:
        """What the peer sees of the connection."""
        answer = self.peer.call("view", end=self.number)
        return View.from_dict(answer, self.peer.description.addresses)

    def disconnect(self, timeout_s: float) -> None:
        self.peer.call("disconnect", wait_s=timeout_s, end=self.number, timeout_s=timeout_s)

    def wait_disconnected(self, timeout_s: float) -> None:
        self.peer.call("wait_disconnected", wait_s=timeout_s, end=self.number, timeout_s=timeout_s)

    def flush(self) -> None:
        self.peer.call("flush", end=self.number)

    def close(self) -> list[str]:
        """Close the connector and the queue pair without a disconnect. Returns a sentence for each failure."""
        return _sentences(self.peer.call("close", wait_s=30.0, object=self.number))
