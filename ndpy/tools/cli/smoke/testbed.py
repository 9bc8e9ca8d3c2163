"""What a check works with: the adapter, the peer, connections between them, and functions that state expectations."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ndpy
from ndpy import Access, Capability, Operation, Status
from ndpy.tools.cli.channel import encode
from ndpy.tools.cli.peers import PeerLost, PeerRefused, as_seen_here, common_address
from ndpy.tools.cli.smoke.catalog import Failure, Skip
from ndpy.tools.cli.smoke.peer import Peer, PeerCompletion, PeerConnectionEnd, PeerMemory
from ndpy.tools.cli.smoke.resources import Closable, ConnectionEnd, Memory, close_all, difference
from ndpy.tools.cli.sources import ANYWHERE, Source, peer_name
from ndpy.vocabulary import quirks
from ndpy.vocabulary.quirks import Quirk

#: The longest time that one step of a check may take. The limit of the whole check may end it sooner.
STEP_LIMIT_S = 10.0
#: How long a check waits for something that must not happen.
QUIET_S = 0.3
#: Rights of memory that a peer reads and writes, and of memory that reads fill.
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
SINK = Access.LOCAL_WRITE | Access.READ_SINK
_NO_PEER = "there is no peer any more"
_MAX_PEER_STARTS = 3

AnyCompletion = ndpy.Completion | PeerCompletion


def expect(holds: object, otherwise: str) -> None:
    """Fail with the sentence `otherwise` unless `holds` is true."""
    if not holds:
        raise Failure(otherwise)


def expect_same(found: bytes, expected: bytes, what: str) -> None:
    """Fail unless the two byte strings are equal."""
    wrong = difference(found, expected)
    expect(not wrong, f"{what}: {wrong}")


def expect_unchanged(memory: Memory | PeerMemory, what: str) -> None:
    """Fail if the memory no longer holds its pattern."""
    wrong = memory.changed()
    expect(not wrong, f"{what}: {wrong}")


def expect_status(completion: AnyCompletion, status: Status, what: str) -> None:
    """Fail unless the request completed with this status."""
    expect(
        completion.status is status,
        f"{what}: completed {completion.status.name}, expected {status.name}{_detail(completion)}",
    )


def expect_ok(completions: Iterable[AnyCompletion], what: str) -> None:
    """Fail unless all the requests succeeded."""
    for completion in completions:
        expect_status(completion, Status.SUCCESS, f"{what} (a {completion.operation.name})")


def _detail(completion: AnyCompletion) -> str:
    if isinstance(completion, PeerCompletion):
        return ""
    try:
        completion.raise_for_status()
    except ndpy.NdpyError as error:
        return f" ({error})"
    return ""


@contextlib.contextmanager
def refusal(expected: type[Exception], what: str) -> Iterator[list[str]]:
    """Fail unless the body raises this exception with a message. The yielded list then holds the message."""
    said: list[str] = []
    try:
        yield said
    except expected as error:
        said.append(str(error))
        expect(said[0].strip(), f"{what}: {expected.__name__} without a message")
        return
    except (ndpy.NdpyError, OSError, ValueError, TypeError, LookupError) as error:
        raise Failure(f"{what}: expected {expected.__name__}, got {type(error).__name__}: {error}") from error
    raise Failure(f"{what}: was not refused; expected {expected.__name__}")


@contextlib.contextmanager
def peer_refusal(expected: str, what: str) -> Iterator[None]:
    """Fail unless the peer's library refuses the body's request with the exception of this name."""
    try:
        yield
    except PeerRefused as error:
        expect(error.name == expected, f"{what}: expected {expected} at the peer, got {error.name}: {error.text}")
        return
    raise Failure(f"{what}: was not refused at the peer; expected {expected}")


@dataclass
class Connection:
    """A connection. `near` is this side's end. `far` is the peer's, which has posted receives. `used`: how many are
    taken.
    """

    testbed: Testbed
    near: ConnectionEnd
    far: PeerConnectionEnd
    used: int = 0

    @property
    def queue_pair(self) -> ndpy.QueuePair:
        return self.near.queue_pair

    @property
    def connector(self) -> ndpy.Connector:
        assert self.near.connector is not None
        return self.near.connector

    def take(self, count: int, what: str) -> list[ndpy.Completion]:
        """Take `count` completions of this side. Fails if fewer come in time."""
        return self.testbed.take(self.near, count, what)

    def take_ok(self, count: int, what: str) -> list[ndpy.Completion]:
        """As take(). Also fails for a failed request."""
        taken = self.take(count, what)
        expect_ok(taken, what)
        return taken

    def take_at_peer(self, count: int, what: str) -> list[PeerCompletion]:
        """Take `count` completions at the peer. Fails if fewer come in time."""
        timeout_s = self.testbed.step()
        taken = self.far.take(count, timeout_s)
        expect(len(taken) == count, f"{what}: {len(taken)} of {count} completions at the peer within {timeout_s:.0f} s")
        return taken

    def send_through(self, memory: Memory, offset: int = 0, length: int | None = None) -> None:
        """Send a message and check that the peer's next receive holds it, byte for byte."""
        end = memory.length if length is None else offset + length
        self.queue_pair.send(memory.region[offset:end], context=77)
        self.take_ok(1, "a send")
        (received,) = self.take_at_peer(1, "a send")
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

    def let_writes_arrive(self) -> None:
        """Wait until the writes that have completed here are in the peer's memory.

        On iWARP a write completes before it has arrived, and on Windows the transport may be iWARP. A message is
        received after everything that was sent before it. The peer of RoCE and InfiniBand acknowledges a write, so
        there the bytes must be there.
        """
        if not self.testbed.writes_are_acknowledged:
            self.send_through(self.testbed.ping)

    def expect_alive(self) -> None:
        """Fail unless the connection still carries messages."""
        try:
            self.send_through(self.testbed.ping)
        except (Failure, ndpy.NdpyError) as error:
            raise Failure(f"another connection of the same adapter no longer works: {error}") from error


class Testbed:
    """The adapter and the peer of a run. Everything that a check creates through it is closed after the check."""

    def __init__(
        self, adapter: ndpy.Adapter, which: str | None, peer_host: str | None, source: Source = ANYWHERE
    ) -> None:
        self.adapter = adapter
        self.info = adapter.info
        self._quirks = quirks.quirks_of(adapter.info)
        #: Whether a write completes when the peer's adapter has acknowledged it. False if that is not known.
        self.writes_are_acknowledged = (
            adapter.info.provider == "verbs" and Quirk.IWARP_NO_ACKNOWLEDGEMENT not in self._quirks
        )
        #: The name or address that the user gave; None if open_adapter() chose the adapter.
        self.which = which
        self.peer_host = peer_host
        self.source = source
        self.figures: dict[str, float] = {}
        self._peer: Peer | None = None
        self._peer_starts = 0
        self._peer_reason = ""
        self._to_close: list[Closable] = []
        self._deadline = time.monotonic() + STEP_LIMIT_S
        self._seeds = itertools.count(1)
        self._ping: Memory | None = None

    # The time of a check.

    def begin_check(self, limit_s: float) -> None:
        """Start the clock of a check."""
        self._deadline = time.monotonic() + limit_s
        self.figures = {}

    def step(self, longest: float = STEP_LIMIT_S) -> float:
        """How many seconds the next step may take. Raises Failure if the check has no time left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Failure("the check did not finish in time")
        return min(left, longest)

    def end_check(self) -> list[str]:
        """Close, on both sides, everything that the check created. Returns a sentence for each failure."""
        to_close, self._to_close, self._ping = self._to_close, [], None
        failures = close_all(to_close)
        if self._peer is not None:
            failures += [f"at the peer: {failure}" for failure in self._peer.reset()]
        return failures

    # The peer.

    @property
    def peer(self) -> Peer:
        """The peer. The first use starts it, and so does the first use after it was lost."""
        if self._peer is None:
            if self._peer_starts >= _MAX_PEER_STARTS:
                raise PeerLost(f"{_NO_PEER}; the last one: {self._peer_reason}")
            if self.peer_host is None:
                self.need(Capability.LOOPBACK_CONNECTIONS)
            self._peer_starts += 1
            try:
                self._peer = Peer(peer_name(self.info), self.peer_host, self.source.host)
            except PeerLost as error:
                # A peer that never started is not tried again. A peer that was lost later is.
                self._peer_starts = _MAX_PEER_STARTS
                self._peer_reason = str(error)
                raise
        return self._peer

    @property
    def has_no_peer(self) -> bool:
        """Whether there is no peer, and no more is started or called."""
        return self._peer is None and self._peer_starts >= _MAX_PEER_STARTS

    def lose_peer(self, reason: str) -> None:
        """Drop the peer. The next use starts or calls it again."""
        if not reason.startswith(_NO_PEER):
            self._peer_reason = reason
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def kill_peer(self) -> None:
        """Kill a local peer, so that a check that waits for it ends."""
        if self._peer is not None:
            self._peer.kill()

    def close(self) -> None:
        """Leave the peer, at the end of the run."""
        if self._peer is not None:
            self._peer.close()

    # Capabilities and addresses.

    def need(self, *capabilities: Capability) -> None:
        """Skip the check unless the adapter has all these capabilities."""
        for capability in capabilities:
            if capability not in self.info.capabilities:
                raise Skip(f"{self.info.name} does not claim {capability.name}")

    def has(self, quirk: Quirk) -> bool:
        """Whether the table of quirks lists this for the adapter."""
        return quirk in self._quirks

    def expect_refused(
        self, operation: Operation, status: Status, wait_disconnected: Callable[[float], None], what: str
    ) -> str:
        """Fail unless the requester learns that it was refused. Returns how it learned.

        On iWARP a refused write ends the connection and may still complete as a success.
        """
        if (
            self.has(Quirk.IWARP_NO_ACKNOWLEDGEMENT)
            and operation is Operation.WRITE
            and status in (Status.SUCCESS, Status.IO_TIMEOUT)
        ):
            try:
                wait_disconnected(self.step())
            except (ndpy.TimeoutError, PeerRefused):
                raise Failure(f"{what} was not refused: it succeeded and the connection lives on") from None
            return "refused by ending the connection (iWARP acknowledges no write)"
        expect(status is not Status.SUCCESS, f"{what} was not refused")
        expect(status is Status.ACCESS_VIOLATION, f"{what} completed {status.name}, expected ACCESS_VIOLATION")
        return "refused with ACCESS_VIOLATION"

    def address(self, version: int | None = None) -> str | None:
        """An address of the peer that this adapter can reach, of this IP version if one is given. None if there is
        none.

        Both must be link-local, or neither.
        """

        return common_address(
            self.info.addresses,
            self.peer.description.addresses,
            same_machine=self.peer_host is None,
            version=version,
            reached=self._reached,
        )

    @property
    def _reached(self) -> str | None:
        """The peer's address on the control connection to another machine."""
        return self.peer.control_addresses[1] if self.peer_host is not None else None

    # What checks are made of.

    @property
    def ping(self) -> Memory:
        """Memory with a small message."""
        if self._ping is None:
            self._ping = self.memory(64, Access.NONE)
        return self._ping

    def close_afterwards(self, *resources: Closable) -> None:
        """Close these objects after the check."""
        self._to_close += resources

    def memory(self, length: int, access: Access = Access.LOCAL_WRITE) -> Memory:
        """Register new memory that holds a pattern of its own."""
        memory = Memory(self.adapter, length, access, next(self._seeds))
        self._to_close.append(memory)
        return memory

    def peer_memory(
        self, length: int, access: Access = Access.LOCAL_WRITE, connection: Connection | None = None
    ) -> PeerMemory:
        """Register new memory at the peer.

        connection: the connection over which this side reads or writes it. The peer needs it to bind a window, on
        adapters whose regions have no remote rights.
        """
        return self.peer.memory(
            length, access, next(self._seeds), None if connection is None else connection.far.number
        )

    def set_up(
        self, length: int, access: Access, far_access: Access, far_length: int = 0
    ) -> tuple[Connection, Memory, PeerMemory]:
        """A connection, memory of this side, and as much or far_length bytes of the peer, for requests over it."""
        connection = self.connect()
        return connection, self.memory(length, access), self.peer_memory(far_length or length, far_access, connection)

    def new_end(self, **options: Any) -> ConnectionEnd:
        """Create a queue pair that is not connected yet, with the options of ConnectionEnd."""
        end = ConnectionEnd(self.adapter, **options)
        self._to_close += end.resources()
        return end

    def window(self) -> ndpy.MemoryWindow:
        window = self.adapter.create_memory_window()
        self._to_close.append(window)
        return window

    def connector(self) -> ndpy.Connector:
        connector = self.adapter.create_connector()
        self._to_close.append(connector)
        self.source.bind(connector)
        return connector

    def peer_listener(self, version: int | None = None) -> tuple[int, tuple[str, int]]:
        """Start a listener at the peer. Returns its number and its address."""
        host = self.address(version)
        if host is None:
            family = f"IPv{version}" if version else "IP"
            raise Failure(
                f"{self.info.name} ({', '.join(self.info.addresses) or 'no address'}) and the peer's "
                f"{self.peer.description.adapter} ({', '.join(self.peer.description.addresses) or 'no address'}) have "
                f"no {family} address in common. Give the network interface one (ip address add)"
            )
        number, port = self.peer.listen(host)
        return number, (as_seen_here(host, self._reached), port)

    @contextlib.contextmanager
    def peer_at_work(self, command: str, **arguments: Any) -> Iterator[None]:
        """Let the peer execute a command during the body. Its answer is read in any case, and raises PeerRefused."""
        self.peer.begin(command, timeout_s=self.step(), **arguments)
        try:
            yield
        finally:
            self.peer.finish(STEP_LIMIT_S)

    def connect(
        self,
        end: ConnectionEnd | None = None,
        *,
        receives: int = 4,
        size: int = 4096,
        version: int | None = None,
        private_data: bytes = b"",
        answer_data: bytes = b"",
        inbound: int | None = None,
        outbound: int | None = None,
        peer_inbound: int | None = None,
        peer_outbound: int | None = None,
        offered: Callable[[ndpy.Connector], None] | None = None,
        send_first: bool = False,
        retry: ndpy.RetryPolicy | None = None,
    ) -> Connection:
        """Connect this end, or a new one, to the peer. The peer posts `receives` receives of `size` bytes.

        offered: called between connect() and complete_connect().
        retry: how often this side's requests are tried again.
        send_first: send a message, because the peer may not send earlier (Quirk.IWARP_CLIENT_SENDS_FIRST).
        """
        end = end or self.new_end()
        listener, address = self.peer_listener(version)
        seed = next(self._seeds)
        connector = self.connector()
        self.peer.begin(
            "accept",
            listener=listener,
            receives=receives,
            size=size,
            seed=seed,
            private_data=encode(answer_data),
            inbound=peer_inbound,
            outbound=peer_outbound,
            timeout_s=self.step(),
        )
        try:
            connector.connect(
                end.queue_pair,
                address,
                private_data=private_data,
                inbound_read_limit=inbound,
                outbound_read_limit=outbound,
                retry=retry,
                timeout_s=self.step(),
            )
            if offered is not None:
                offered(connector)
            connector.complete_connect(self.step())
        except BaseException as error:
            # The peer's answer must be read in any case. It may say why the attempt failed.
            with contextlib.suppress(ndpy.NdpyError):
                connector.close()
            try:
                self.peer.finish(STEP_LIMIT_S)
            except PeerRefused as refused:
                if isinstance(error, ndpy.NdpyError):
                    raise Failure(f"connecting to {address[0]}: {type(error).__name__}: {error}; {refused}") from error
            raise
        answer = self.peer.finish(STEP_LIMIT_S)
        if difference := self.source.difference(end.queue_pair):
            raise Failure(difference)
        end.connector = connector
        connection = Connection(self, end, PeerConnectionEnd(self.peer, answer, receives, size, seed))
        if send_first:
            connection.send_through(self.ping)
        return connection

    def take(self, end: ConnectionEnd, count: int, what: str) -> list[ndpy.Completion]:
        """Take `count` completions of this end. Fails if fewer come in time."""
        timeout_s = self.step()
        taken = end.take(count, timeout_s)
        seen = ", ".join(f"{c.operation.name} {c.status.name}" for c in taken)
        expect(
            len(taken) == count,
            f"{what}: {len(taken)} of {count} completions within {timeout_s:.0f} s{f' ({seen})' if seen else ''}",
        )
        return taken

    def expect_no_completion(self, end: ConnectionEnd, what: str) -> None:
        """Fail if a completion comes."""
        extra = end.take(1, QUIET_S)
        expect(not extra, f"{what}: an unexpected completion came: {extra}")


def contexts(completions: Sequence[AnyCompletion]) -> list[int]:
    return [completion.context for completion in completions]
