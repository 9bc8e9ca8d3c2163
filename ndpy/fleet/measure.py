"""What a rank measures with one adapter, in a process of its own: a driver that hangs or crashes ends only that one.

The process is the other side of a `Worker`, which the rank has. Both ends of a pair run the same steps, one after the
other: a message each way whose bytes are compared, a ping-pong for the latency, then writes in one direction and in the
other for the bandwidth. The one that connects begins each step, because iWARP wants that (RFC 5044, section 7.1).
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import statistics
import time
from typing import Any

import ndpy
from ndpy.platforms import implementation
from ndpy.tools.cli.channel import REQUEST_LIMIT, Arguments, BadRequest, Channel
from ndpy.tools.cli.peers import PeerLink, common_address
from ndpy.tools.cli.serving import Answer, Session
from ndpy.tools.doctor import describe_link, diagnose
from ndpy.vocabulary.counters import is_error
from ndpy.vocabulary.info import port_in_use

PROTOCOL = 1
DEFAULT_PORT = 18522
TOKEN_SIZE = 16
#: How long a rank may think before it gives its worker the next command.
_IDLE_S = 86400.0
_PING = 8
_HELLO = 4096
_SLAB = 65536
_OUTSTANDING = 16
_DEPTH = 64
_LIMIT_OF_PINGS = 10_000
#: What a healthy adapter counts too is left out: only these tell of a bad cable, switch or neighbour.
_TELLING = ("discard", "pause", "ecn", "cnp", "retrans", "retry", "timeout", "sequence", "drop")


class Fault(Exception):
    """A measurement failed in a way that is not an exception of ndpy: a wrong byte, a peer that is another one."""


# ---- the process that measures ----


class WorkerSession(Session):
    """The commands of a rank: `facts`, `counters`, `listen`, `pair`."""

    name, protocol = "fleet", PROTOCOL
    refusals = (*Session.refusals, Fault)

    def __init__(self, adapter: ndpy.Adapter, control: tuple[str | None, str | None]) -> None:
        super().__init__(adapter, control)
        self._commands |= {
            "facts": self._facts,
            "counters": self._counters,
            "listen": self._listen,
            "pair": self._pair,
        }
        self._listener: ndpy.Listener | None = None

    @property
    def limit_s(self) -> float:
        return _IDLE_S

    def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(ndpy.NdpyError):
                self._listener.close()

    def _facts(self, arguments: Arguments) -> Answer:
        arguments.finish()
        info = self._adapter.info
        findings = [finding.to_dict() for finding in diagnose(info.name)]
        return {"facts": facts(info), "findings": findings}

    def _counters(self, arguments: Arguments) -> Answer:
        arguments.finish()
        info = self._adapter.info
        return {"counters": telling(implementation().read_counters(info.name).get(info.port, {}))}

    def _listen(self, arguments: Arguments) -> Answer:
        arguments.finish()
        if self._listener is None:
            self._listener = self._adapter.listen(("", 0), backlog=_DEPTH)
        return {"addresses": list(self._adapter.info.addresses), "port": self._listener.address[1]}

    def _pair(self, arguments: Arguments) -> Answer:
        """Measure with a partner. `addresses` and `port` are the partner's; without them the partner connects."""
        token = arguments.data("token", TOKEN_SIZE)
        timeout_s = arguments.seconds("timeout_s", 3600.0)
        pings = arguments.integer("pings", 1, _LIMIT_OF_PINGS)
        write_s = arguments.seconds("write_s", 60.0)
        connects = arguments.has("addresses")
        theirs = arguments.text("addresses", 4096).split() if connects else []
        port = arguments.integer("port", 1, 65535) if connects else 0
        same_machine = arguments.boolean("same_machine") if connects else False
        arguments.finish()
        if not connects and self._listener is None:
            raise BadRequest("listen comes first")
        with Pair(self._adapter, token, time.monotonic() + timeout_s) as pair:
            if connects:
                host = common_address(self._adapter.info.addresses, theirs, same_machine=same_machine)
                if host is None:
                    own = ", ".join(self._adapter.info.addresses) or "no address"
                    raise Fault(f"this adapter ({own}) and the partner's ({', '.join(theirs)}) have no common address")
                pair.connect((host, port))
            else:
                assert self._listener is not None
                pair.accept(self._listener)
            return pair.measure(connects, pings, write_s)


def facts(info: ndpy.AdapterInfo) -> dict[str, str]:
    """What adapters of one kind have in common on healthy machines, by name. Unknown values are left out."""
    port, link = port_in_use(info), describe_link(info)
    found: dict[str, Any] = {
        "driver": info.driver,
        "firmware": info.firmware,
        "transport": info.transport,
        "state": info.state,
        "speed": link.speed,
        "MTU": link.rdma_mtu or None,
        "interface's MTU": link.link_mtu,
        "GID type": link.gid_type,
        "number of GIDs": len(port.gids) if port is not None else None,
        "PFC": None if link.pfc is None else ",".join(map(str, link.pfc)) or "off",
        "traffic class": link.traffic_class,
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def telling(counters: dict[str, int]) -> dict[str, int]:
    """The counters of errors, retransmissions, pauses, ECN and discards."""
    return {name: value for name, value in counters.items() if is_error(name) or any(word in name for word in _TELLING)}


def pattern(seed: int, length: int) -> bytes:
    """Bytes that show their place: no two of 251 neighbours are alike."""
    return bytes((seed + place * 7) % 251 for place in range(251)) * (length // 251 + 1)


class Pair:
    """A connection to a partner, and the memory for the steps. To be used in a `with` statement."""

    def __init__(self, adapter: ndpy.Adapter, token: bytes, deadline: float) -> None:
        self._adapter, self._token, self._deadline = adapter, token, deadline
        self._stack = contextlib.ExitStack()
        #: A message of hello: where the other side may write, then a pattern.
        self._out, self._in = bytearray(_HELLO), bytearray(_HELLO)
        self._slab, self._filled = bytearray(pattern(1, _SLAB)[:_SLAB]), bytearray(_SLAB)

    def __enter__(self) -> Pair:
        keep = self._stack.enter_context
        try:
            read_only, writable = ndpy.Access.NONE, ndpy.Access.LOCAL_WRITE
            self._out_region = keep(self._adapter.register(self._out, read_only))
            self._in_region = keep(self._adapter.register(self._in, writable))
            self._slab_region = keep(self._adapter.register(self._slab, read_only))
            self._filled_region = keep(self._adapter.register(self._filled, writable | ndpy.Access.REMOTE_WRITE))
            self._arrived = keep(self._adapter.create_completion_queue(_DEPTH))
            self._sent = keep(self._adapter.create_completion_queue(_DEPTH))
            self._queue_pair = keep(
                self._adapter.create_queue_pair(
                    self._arrived, self._sent, receive_queue_depth=4, initiator_queue_depth=_OUTSTANDING + 4
                )
            )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ndpy.TimeoutError("the time for this pair is over", operation="pair")
        return left

    def connect(self, address: tuple[str, int]) -> None:
        self._expect()
        self._stack.enter_context(
            self._adapter.connect(self._queue_pair, address, private_data=self._token, timeout_s=self._left())
        )

    def accept(self, listener: ndpy.Listener) -> None:
        """Take the partner's request. Requests of others, and of rounds that are over, are rejected."""
        self._expect()
        while True:
            connector = listener.get_request(self._left())
            if hmac.compare_digest(bytes(connector.private_data[: len(self._token)]), self._token):
                break
            with connector:
                connector.reject()
        self._stack.enter_context(connector)
        connector.accept(self._queue_pair, timeout_s=self._left())

    # ---- steps ----

    def _expect(self) -> None:
        """Post the receive of the next message."""
        self._queue_pair.receive(self._in_region)

    def _say(self, length: int) -> None:
        self._queue_pair.send(self._out_region[0:length])
        self._take(self._sent, "a send")

    def _hear(self) -> int:
        """The length of the message that arrives next. Another one can come afterwards."""
        return self._take(self._arrived, "a message of the partner").nbytes

    def _take(self, queue: ndpy.CompletionQueue, what: str) -> ndpy.Completion:
        try:
            (completion,) = queue.wait(timeout_s=self._left(), max_entries=1)
        except ndpy.TimeoutError as error:
            raise ndpy.TimeoutError(f"{what} did not complete; {error}", operation="pair") from None
        completion.raise_for_status()
        return completion

    def measure(self, connects: bool, pings: int, write_s: float) -> Answer:
        """All steps. Returns the latency, if this side connects, and the bandwidth of this side's writes."""
        latency = None
        remote = self._hello(connects)
        if connects:
            latency = self._ping(pings)
            bandwidth = self._write(remote, write_s)
            self._wait_for_the_writes()
        else:
            self._answer_pings(pings)
            self._wait_for_the_writes()
            bandwidth = self._write(remote, write_s)
        return {"latency_us": latency, "bandwidth_gbps": bandwidth}

    def _hello(self, connects: bool) -> ndpy.RemoteMemory:
        """Exchange a message each way. Returns where the partner lets this side write."""
        own = self._filled_region.remote().to_bytes()
        seeds = (11, 12) if connects else (12, 11)
        self._out[:] = (own + pattern(seeds[0], _HELLO))[:_HELLO]
        if connects:
            self._say(_HELLO)
        length = self._hear()
        wanted = pattern(seeds[1], _HELLO)[: _HELLO - len(own)]
        if length != _HELLO or self._in[len(own) :] != wanted:
            wrong = next((at for at, (a, b) in enumerate(zip(self._in[len(own) :], wanted, strict=True)) if a != b), 0)
            raise Fault(
                f"a message of {_HELLO} bytes arrived with {length} bytes, the first wrong one at {wrong + len(own)}"
            )
        remote = ndpy.RemoteMemory.from_bytes(self._in[: len(own)])
        if remote.length != _SLAB:
            raise Fault(f"the partner offers {remote.length} bytes instead of {_SLAB}")
        self._expect()
        if not connects:
            self._say(_HELLO)
        return remote

    def _ping(self, count: int) -> float:
        """Half of the median round trip, in microseconds. The first tenth is not counted."""
        times = []
        for turn in range(count + count // 10):
            began = time.perf_counter_ns()
            self._say(_PING)
            self._hear()
            if turn >= count // 10:
                times.append(time.perf_counter_ns() - began)
            self._expect()
        return statistics.median(times) / 2000

    def _answer_pings(self, count: int) -> None:
        for _ in range(count + count // 10):
            self._hear()
            self._expect()
            self._say(_PING)

    def _write(self, remote: ndpy.RemoteMemory, seconds: float) -> float:
        """Write for so long, and then tell the partner. Returns the bandwidth in Gb/s."""
        outstanding, done, began = 0, 0, time.perf_counter()
        while True:
            is_over = time.perf_counter() - began >= seconds and done > 0
            while outstanding < _OUTSTANDING and not is_over:
                self._queue_pair.write(self._slab_region, remote)
                outstanding += 1
            if is_over and not outstanding:
                break
            for completion in self._sent.wait(timeout_s=self._left()):
                completion.raise_for_status()
                outstanding -= 1
                done += 1
        took = time.perf_counter() - began
        self._say(_PING)
        return done * _SLAB * 8 / took / 1e9

    def _wait_for_the_writes(self) -> None:
        self._hear()
        if self._filled != self._slab:
            wrong = next(at for at, (a, b) in enumerate(zip(self._filled, self._slab, strict=True)) if a != b)
            raise Fault(f"the partner's writes of {_SLAB} bytes arrived with a wrong byte at {wrong}")
        self._expect()


def serve_rank(adapter: ndpy.Adapter, connection: socket.socket) -> str:
    """Do what the rank at the other end of this connection asks for, until it closes it."""
    channel = Channel(connection, line_limit=REQUEST_LIMIT)
    return WorkerSession(adapter, channel.addresses()).serve(channel)


# ---- the rank's side of it ----


class Worker(PeerLink):
    """A process that measures with one adapter of this machine. Raises PeerLost and PeerRefused as a PeerLink does."""

    name, protocol, default_port = "fleet", PROTOCOL, DEFAULT_PORT

    def __init__(self, adapter: str) -> None:
        super().__init__(adapter, None)
