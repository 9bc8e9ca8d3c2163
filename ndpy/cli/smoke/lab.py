"""What a check works with: the adapter, the peer, connections between the two, and ways to say what is expected."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import ndpy
from ndpy import Access, Capability, Operation, Status
from ndpy.cli.smoke.catalog import Failure, Skip
from ndpy.cli.smoke.channel import encode
from ndpy.cli.smoke.line import DEPTH, Closable, Line, Memory, close_all, difference
from ndpy.cli.smoke.remote import Ended, FarLine, FarMemory, Peer, PeerLost, PeerRefused

#: How long one step of a check may take; the check's own limit comes first.
PATIENCE_S = 10.0
#: How long something is watched that should not happen.
QUIET_S = 0.3
_NO_PEER = "there is no peer any more"
_MAX_PEER_STARTS = 3

AnyCompletion = ndpy.Completion | Ended


def expect(holds: object, otherwise: str) -> None:
    """Fail with a sentence unless something holds."""
    if not holds:
        raise Failure(otherwise)


def expect_same(found: bytes, expected: bytes, what: str) -> None:
    """Fail unless two pieces of memory are equal."""
    wrong = difference(found, expected)
    expect(not wrong, f"{what}: {wrong}")


def expect_unchanged(memory: Memory | FarMemory, what: str) -> None:
    """Fail if memory differs from the pattern that it was filled with."""
    wrong = memory.changed()
    expect(not wrong, f"{what}: {wrong}")


def expect_status(completion: AnyCompletion, status: Status, what: str) -> None:
    """Fail unless a request ended in this way."""
    expect(
        completion.status is status,
        f"{what}: completed {completion.status.name}, expected {status.name}{_detail(completion)}",
    )


def expect_ok(completions: Iterable[AnyCompletion], what: str) -> None:
    """Fail unless all of them succeeded."""
    for completion in completions:
        expect_status(completion, Status.SUCCESS, f"{what} (a {completion.operation.name})")


def _detail(completion: AnyCompletion) -> str:
    if isinstance(completion, Ended):
        return ""
    try:
        completion.raise_for_status()
    except ndpy.NdpyError as error:
        return f" ({error})"
    return ""


@contextlib.contextmanager
def refusal(expected: type[Exception], what: str) -> Iterator[list[str]]:
    """The body must raise this exception, with a text; the list that it yields holds the text afterwards."""
    said: list[str] = []
    try:
        yield said
    except expected as error:
        said.append(str(error))
        expect(said[0].strip(), f"{what}: {expected.__name__} without a word of explanation")
        return
    except (ndpy.NdpyError, OSError, ValueError, TypeError, LookupError) as error:
        raise Failure(f"{what}: expected {expected.__name__}, got {type(error).__name__}: {error}") from error
    raise Failure(f"{what}: was not refused; expected {expected.__name__}")


@contextlib.contextmanager
def far_refusal(expected: str, what: str) -> Iterator[None]:
    """The body asks the peer for something, and its library must refuse it with this exception."""
    try:
        yield
    except PeerRefused as error:
        expect(error.name == expected, f"{what}: expected {expected} at the peer, got {error.name}: {error.text}")
        return
    raise Failure(f"{what}: was not refused at the peer; expected {expected}")


@dataclass
class Pair:
    """A connection: this side's end and the peer's, which has `receives` slots posted."""

    lab: Lab
    near: Line
    far: FarLine
    used: int = 0

    @property
    def queue_pair(self) -> ndpy.QueuePair:
        return self.near.queue_pair

    @property
    def connector(self) -> ndpy.Connector:
        assert self.near.connector is not None
        return self.near.connector

    def take(self, count: int, what: str) -> list[ndpy.Completion]:
        """Exactly `count` completions of this side."""
        return self.lab.take(self.near, count, what)

    def take_far(self, count: int, what: str) -> list[Ended]:
        """Exactly `count` completions of the peer's side."""
        timeout_s = self.lab.step()
        taken = self.far.take(count, timeout_s)
        expect(len(taken) == count, f"{what}: {len(taken)} of {count} completions at the peer within {timeout_s:.0f} s")
        return taken

    def send_through(self, memory: Memory, offset: int = 0, length: int | None = None) -> None:
        """Send one message and see that it arrived in the peer's next receive, byte for byte."""
        end = memory.length if length is None else offset + length
        self.queue_pair.send(memory.region[offset:end], context=77)
        (sent,) = self.take(1, "a send")
        expect_ok([sent], "a send")
        (received,) = self.take_far(1, "a send")
        expect_ok([received], "the peer's receive")
        expect(
            received.operation is Operation.RECEIVE,
            f"the peer completed a {received.operation.name} instead of its receive",
        )
        expect(
            received.nbytes == end - offset,
            f"the peer's receive reports {received.nbytes} bytes instead of {end - offset}",
        )
        expect(received.context == self.used, f"receive {received.context} was taken instead of {self.used}")
        if end > offset:
            expect_same(
                self.far.slot(self.used, end - offset), memory.contents(offset, end - offset), "what the peer received"
            )
        self.used += 1

    def alive(self) -> None:
        """See that the connection still carries messages."""
        try:
            self.send_through(self.lab.ping)
        except (Failure, ndpy.NdpyError) as error:
            raise Failure(f"another connection of the same adapter does not work any more: {error}") from error


class Lab:
    """One run's adapter and peer. What a check makes through it is closed after the check."""

    def __init__(self, adapter: ndpy.Adapter, which: str | None, peer_host: str | None) -> None:
        self.adapter = adapter
        self.info = adapter.info
        #: What the user called the adapter; None if it was chosen for him.
        self.which = which
        self.peer_host = peer_host
        self.figures: dict[str, float] = {}
        self._peer: Peer | None = None
        self._peer_starts = 0
        self._peer_reason = ""
        self._kept: list[Closable] = []
        self._deadline = time.monotonic() + PATIENCE_S
        self._seeds = itertools.count(1)
        self._ping: Memory | None = None

    # The time of a check.

    def begin(self, limit_s: float) -> None:
        """A check starts."""
        self._deadline = time.monotonic() + limit_s
        self.figures = {}

    def step(self, longest: float = PATIENCE_S) -> float:
        """Seconds that the next step may take. Raises Failure when the check has no time left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Failure("the check did not finish in time")
        return min(left, longest)

    def end(self) -> list[str]:
        """A check is over: both sides close what it made; returns what could not be closed."""
        kept, self._kept, self._ping = self._kept, [], None
        failures = close_all(kept)
        if self._peer is not None:
            failures += [f"at the peer: {failure}" for failure in self._peer.reset()]
        return failures

    # The peer.

    @property
    def peer(self) -> Peer:
        """The peer, started at its first use, and again if it was lost."""
        if self._peer is None:
            if self._peer_starts >= _MAX_PEER_STARTS:
                raise PeerLost(f"{_NO_PEER}; the last time: {self._peer_reason}")
            if self.peer_host is None:
                self.need(Capability.LOOPBACK_CONNECTIONS)
            self._peer_starts += 1
            try:
                self._peer = Peer(self.info.name, self.peer_host)
            except PeerLost as error:
                # One that never came is not tried again; one that was lost later is.
                self._peer_starts = _MAX_PEER_STARTS
                self._peer_reason = str(error)
                raise
        return self._peer

    def lose_peer(self, reason: str) -> None:
        """The peer is lost; the next use starts or calls it again."""
        if not reason.startswith(_NO_PEER):
            self._peer_reason = reason
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def kill_peer(self) -> None:
        """End a local peer at once, so that a check that waits for it ends."""
        if self._peer is not None:
            self._peer.kill()

    def close(self) -> None:
        """The run is over."""
        if self._peer is not None:
            self._peer.close()

    # Capabilities and addresses.

    def need(self, *capabilities: Capability) -> None:
        """Skip the check unless the adapter claims these capabilities."""
        for capability in capabilities:
            if capability not in self.info.capabilities:
                raise Skip(f"{self.info.name} does not claim {capability.name}")

    @property
    def iwarp(self) -> bool:
        """Whether this is iWARP, where a write or send completes when it has left, before the peer has judged it."""
        return self.info.transport == "iWARP"

    def expect_refused(
        self, operation: Operation, status: Status, wait_disconnected: Callable[[float], None], what: str
    ) -> str:
        """See that the requester was told; returns how. iWARP tells of a refused write by ending the connection."""
        if self.iwarp and operation is Operation.WRITE and status in (Status.SUCCESS, Status.IO_TIMEOUT):
            try:
                wait_disconnected(self.step())
            except (ndpy.TimeoutError, PeerRefused):
                raise Failure(f"{what} was not refused: it succeeded and the connection lives on") from None
            return "refused by ending the connection (iWARP acknowledges no write)"
        expect(status is not Status.SUCCESS, f"{what} was not refused")
        expect(status is Status.ACCESS_VIOLATION, f"{what} completed {status.name}, expected ACCESS_VIOLATION")
        return "refused with ACCESS_VIOLATION"

    def address(self, version: int | None = None) -> str | None:
        """An address of the peer that this adapter has one of the same kind for; None if there is none."""

        def kind(address: str) -> tuple[int, bool]:
            parsed = ipaddress.ip_address(address.partition("%")[0])
            return parsed.version, parsed.is_link_local

        own = {kind(address) for address in self.info.addresses}
        for address in self.peer.greeting.addresses:
            # A scope such as %eth0 means nothing on another machine.
            if "%" in address and self.peer_host is not None:
                continue
            if kind(address) in own and version in (None, kind(address)[0]):
                return address
        return None

    # What checks are made of.

    @property
    def ping(self) -> Memory:
        """A small message."""
        if self._ping is None:
            self._ping = self.memory(64, Access.NONE)
        return self._ping

    def keep(self, *resources: Closable) -> None:
        """Close these after the check."""
        self._kept += resources

    def memory(self, length: int, access: Access = Access.LOCAL_WRITE) -> Memory:
        """New registered memory with a pattern of its own."""
        memory = Memory(self.adapter, length, access, next(self._seeds))
        self._kept.append(memory)
        return memory

    def far_memory(self, length: int, access: Access = Access.LOCAL_WRITE, pair: Pair | None = None) -> FarMemory:
        """The same at the peer. pair: over which its remote rights are used; where regions have none, a window gives them."""
        return self.peer.memory(length, access, next(self._seeds), None if pair is None else pair.far.number)

    def line(
        self,
        *,
        depth: int = DEPTH,
        max_sge: int = 1,
        inline_data_size: int = 0,
        cq: ndpy.CompletionQueue | None = None,
        srq: ndpy.SharedReceiveQueue | None = None,
    ) -> Line:
        """A queue pair that is not connected yet, with a completion queue of its own unless one is given."""
        line = Line(self.adapter, depth=depth, max_sge=max_sge, inline_data_size=inline_data_size, cq=cq, srq=srq)
        self._kept += line.resources()
        return line

    def window(self) -> ndpy.MemoryWindow:
        window = self.adapter.create_memory_window()
        self._kept.append(window)
        return window

    def connector(self) -> ndpy.Connector:
        connector = self.adapter.create_connector()
        self._kept.append(connector)
        return connector

    def far_listener(self, version: int | None = None) -> tuple[int, tuple[str, int]]:
        """(number, address) of a new listener at the peer."""
        host = self.address(version)
        if host is None:
            family = f"IPv{version}" if version else "IP"
            raise Failure(
                f"{self.info.name} ({', '.join(self.info.addresses) or 'no address'}) and the peer's "
                f"{self.peer.greeting.adapter} ({', '.join(self.peer.greeting.addresses) or 'no address'}) have no "
                f"{family} address to connect by; give the network interface one (ip address add)"
            )
        number, port = self.peer.listen(host)
        return number, (host, port)

    def connect(
        self,
        line: Line | None = None,
        *,
        receives: int = 4,
        size: int = 4096,
        version: int | None = None,
        private_data: bytes = b"",
        answer_data: bytes = b"",
        inbound: int | None = None,
        outbound: int | None = None,
        far_inbound: int | None = None,
        far_outbound: int | None = None,
        offered: Callable[[ndpy.Connector], None] | None = None,
        greet: bool = False,
    ) -> Pair:
        """Connect a queue pair (a new one unless given) to the peer, which posts `receives` receives of `size` bytes.

        offered: called between connect() and complete_connect(). greet: send a message first, which iWARP demands of
        the active side before the peer may send.
        """
        line = line or self.line()
        listener, address = self.far_listener(version)
        seed = next(self._seeds)
        connector = self.connector()
        self.peer.begin(
            "accept",
            listener=listener,
            receives=receives,
            size=size,
            seed=seed,
            private_data=encode(answer_data),
            inbound=far_inbound,
            outbound=far_outbound,
            timeout_s=self.step(),
        )
        try:
            connector.connect(
                line.queue_pair,
                address,
                private_data=private_data,
                inbound_read_limit=inbound,
                outbound_read_limit=outbound,
                timeout_s=self.step(),
            )
            if offered is not None:
                offered(connector)
            connector.complete_connect(self.step())
        except BaseException as error:
            # The peer's answer has to be read in any case; what it says helps to see why.
            with contextlib.suppress(ndpy.NdpyError):
                connector.close()
            try:
                self.peer.finish(PATIENCE_S)
            except PeerRefused as refused:
                if isinstance(error, ndpy.NdpyError):
                    raise Failure(f"connecting to {address[0]}: {type(error).__name__}: {error}; {refused}") from error
            raise
        answer = self.peer.finish(PATIENCE_S)
        line.connector = connector
        pair = Pair(self, line, FarLine(self.peer, answer, receives, size, seed))
        if greet:
            pair.send_through(self.ping)
        return pair

    def take(self, line: Line, count: int, what: str) -> list[ndpy.Completion]:
        """Exactly `count` completions of a line."""
        timeout_s = self.step()
        taken = line.take(count, timeout_s)
        seen = ", ".join(f"{c.operation.name} {c.status.name}" for c in taken)
        expect(
            len(taken) == count,
            f"{what}: {len(taken)} of {count} completions within {timeout_s:.0f} s{f' ({seen})' if seen else ''}",
        )
        return taken

    def nothing_more(self, line: Line, what: str) -> None:
        """See that no completion comes."""
        extra = line.take(1, QUIET_S)
        expect(not extra, f"{what}: an unexpected completion came: {extra}")


def contexts(completions: Sequence[AnyCompletion]) -> list[int]:
    return [completion.context for completion in completions]
