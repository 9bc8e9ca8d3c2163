"""Two ends that measure with each other.

Both run the same steps, one after the other: a message each way whose bytes are compared, a ping-pong for the latency,
then writes in one direction and in the other for the bandwidth. The one that connects begins each step, because iWARP
wants that (RFC 5044, section 7.1).
"""

from __future__ import annotations

import contextlib
import hmac
import statistics
import time

import ndpy
from ndpy.tools.cli.serving import Answer

_PING = 8
_HELLO = 4096
_SLAB = 65536
#: So many writes are on the way, each to a place of its own. So the bytes of the last ones can be looked at.
_OUTSTANDING = 16
_DEPTH = 64


class Fault(Exception):
    """A measurement failed in a way that is not an exception of ndpy: a wrong byte, a peer that is another one."""


def pattern(seed: int, length: int) -> bytes:
    """Bytes that show their place: no two of 251 neighbours are alike."""
    return bytes((seed + place * 7) % 251 for place in range(251)) * (length // 251 + 1)


class Pair:
    """A connection to a partner, and the memory for the steps. To be used in a `with` statement."""

    def __init__(self, adapter: ndpy.Adapter, token: bytes, deadline: float) -> None:
        self._adapter, self._token, self.deadline = adapter, token, deadline
        self._stack = contextlib.ExitStack()
        #: A message of hello: where the other side may write, then a pattern.
        self._out, self._in = bytearray(_HELLO), bytearray(_HELLO)
        self._slab, self._filled = bytearray(pattern(1, _SLAB)[:_SLAB]), bytearray(_OUTSTANDING * _SLAB)

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
        left = self.deadline - time.monotonic()
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

    # ---- a flow of a pattern: one side writes, when the other side says so ----

    def flow(self, write_s: float) -> float:
        """Write when the partner lets this side begin. Returns the bandwidth in Gb/s."""
        remote = self._hello(True)
        # The partner may begin only now: the receive for that is posted. iWARP ends a connection without one.
        self._say(_PING)
        self._hear()
        self._expect()
        return self._write(remote, write_s)

    def welcome(self) -> None:
        """Take the partner's first message and answer it, and wait until it is ready."""
        self._hello(False)
        self._hear()
        self._expect()

    def begin(self) -> None:
        """Let the partner begin to write."""
        self._say(_PING)

    def take_flow(self) -> None:
        """Wait for the end of the partner's writes, and look at their bytes."""
        self._wait_for_the_writes()

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
        if remote.length != len(self._filled):
            raise Fault(f"the partner offers {remote.length} bytes instead of {len(self._filled)}")
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
        places = [remote[at : at + _SLAB] for at in range(0, len(self._filled), _SLAB)]
        posted, done, began = 0, 0, time.perf_counter()
        while True:
            is_over = time.perf_counter() - began >= seconds and done > 0
            while posted - done < _OUTSTANDING and not is_over:
                self._queue_pair.write(self._slab_region, places[posted % _OUTSTANDING])
                posted += 1
            if is_over and posted == done:
                break
            for completion in self._sent.wait(timeout_s=self._left()):
                completion.raise_for_status()
                done += 1
        took = time.perf_counter() - began
        self._say(_PING)
        return done * _SLAB * 8 / took / 1e9

    def _wait_for_the_writes(self) -> None:
        self._hear()
        wanted = self._slab * _OUTSTANDING
        if self._filled != wanted:
            wrong = next(at for at, (a, b) in enumerate(zip(self._filled, wanted, strict=True)) if a != b)
            raise Fault(f"the partner's writes of {_SLAB} bytes arrived with a wrong byte at {wrong % _SLAB}")
        self._expect()
