"""One side of a run: its memory, its queue pairs, and the connections to the other side."""

from __future__ import annotations

import contextlib
import itertools
import random
import time

import ndpy
from ndpy import Access, Capability, RemoteMemory
from ndpy.tools.cli.channel import BadRequest
from ndpy.tools.cli.perf.plan import Plan
from ndpy.tools.cli.sources import ANYWHERE, Source

#: Long, so that the pattern is no burden to make. Prime, so that it does not repeat at pages.
_PERIOD = 65521
_PAUSE_S = 0.001
_MARKS = range(1, 256)
TOKEN_SIZE = 16
#: What a side has to know of the other side's memory for each queue pair, in bytes.
EXPOSED_SIZE = 20


class Failure(Exception):
    """What was sent did not arrive as it should, or an adapter cannot do what the plan needs."""


def pattern(seed: int, size: int) -> bytes:
    """`size` bytes that depend on the seed."""
    block = random.Random(seed).randbytes(min(size, _PERIOD))
    return (block * (size // len(block) + 1))[:size]


class End:
    """One side of a run.

    Contexts of requests, for N queue pairs: the index of the queue pair for its groups, N more than that for its
    receives, and OTHER for everything else.

    number: 0 for the measuring side, 1 for the serving side. The two sides send different bytes.
    """

    def __init__(self, adapter: ndpy.Adapter, plan: Plan, number: int) -> None:
        self.adapter = adapter
        self.plan = plan
        self._number = number
        self._stack = contextlib.ExitStack()
        self.remotes: list[RemoteMemory] = []
        self.connectors: list[ndpy.Connector] = []
        info = adapter.info
        count = plan.queue_pairs
        #: The context of requests whose completions mean nothing to a loop.
        self.other = 2 * count
        if plan.largest > info.max_transfer_length:
            raise Failure(f"{info.name} transfers at most {info.max_transfer_length} bytes at once")
        if plan.inline and Capability.INLINE not in info.capabilities:
            raise Failure(f"{info.name} sends nothing inline")
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        #: How many messages each queue pair may send until the other side grants more.
        self.credit = [plan.credit] * count
        #: How many messages have come over each queue pair since the last grant for it.
        self.ungranted = [0] * count
        #: All messages that were sent and that have come, apart from grants.
        self.sent = self.received = 0
        #: What a loop waited for that was given up, in words. "" if it cannot say so.
        self.waits_for = ""

    def _open(self) -> None:
        """Create memory, queue pairs and the queue that they share, and post the receives."""
        plan, adapter, opened = self.plan, self.adapter, self._stack.enter_context
        self.buffer = ndpy.alloc(plan.memory)
        access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.READ_SINK
        self.region = opened(adapter.register(self.buffer, access))
        depth = plan.queue_pairs * (plan.initiator_depth + plan.receives)
        self.cq = opened(adapter.create_completion_queue(depth))
        if plan.events:
            # wait() sleeps at once.
            self.cq.spin_s = 0.0
        self.queue_pairs = []
        self.slots = []
        for q in range(plan.queue_pairs):
            queue_pair = opened(
                adapter.create_queue_pair(
                    self.cq,
                    receive_queue_depth=plan.receives,
                    initiator_queue_depth=plan.initiator_depth,
                    inline_data_size=plan.inline,
                )
            )
            self.queue_pairs.append(queue_pair)
            self.slots.append(self.region[plan.inbox(q) : plan.inbox(q) + plan.largest])
            for _ in range(plan.receives):
                queue_pair.receive(self.slots[q], context=plan.queue_pairs + q)

    def close(self) -> None:
        """Close everything, even if some of it fails."""
        with contextlib.suppress(ndpy.NdpyError):
            self._stack.close()

    # ---- connecting ----

    def connect(self, address: tuple[str, int], token: bytes, source: Source = ANYWHERE) -> None:
        """Connect all queue pairs, one after the other, and greet over each.

        The greeting is the first message of a connection, which has to be the connecting side's on iWARP.
        """
        timeout_s = self.plan.timeout_s
        for q, queue_pair in enumerate(self.queue_pairs):
            private_data = token + bytes([q])
            connector = source.connect(self.adapter, queue_pair, address, private_data, timeout_s)
            self.connectors.append(self._stack.enter_context(connector))
            if difference := source.difference(queue_pair):
                raise Failure(difference)
            queue_pair.send(self.region[0:1], context=self.other)
        self.take(len(self.queue_pairs))

    def accept(self, listener: ndpy.Listener, token: bytes) -> None:
        """Accept the connections of all queue pairs, and wait for a greeting over each."""
        timeout_s = self.plan.timeout_s
        deadline = time.monotonic() + timeout_s
        for q, queue_pair in enumerate(self.queue_pairs):
            while True:
                connector = listener.get_request(max(deadline - time.monotonic(), 0))
                # A transport may append zero bytes.
                if connector.private_data[: len(token) + 1] == token + bytes([q]):
                    break
                connector.reject()
                connector.close()
            self.connectors.append(self._stack.enter_context(connector))
            connector.accept(queue_pair, timeout_s=timeout_s)
        for completion in self.take(len(self.queue_pairs)):
            q = completion.context - len(self.queue_pairs)
            self.queue_pairs[q].receive(self.slots[q], context=completion.context)

    def expose(self) -> bytes:
        """Give the other side access to the memory. Returns what it has to know for each queue pair."""
        return b"".join(self._exposed(queue_pair).to_bytes() for queue_pair in self.queue_pairs)

    def _exposed(self, queue_pair: ndpy.QueuePair) -> RemoteMemory:
        if Capability.REGION_ACCESS in self.adapter.info.capabilities:
            return self.region.remote()
        window = self._stack.enter_context(self.adapter.create_memory_window())
        queue_pair.bind(window, self.region, Access.REMOTE_READ | Access.REMOTE_WRITE, context=self.other)
        self.take(1)
        return window.remote()

    def learn(self, exposed: bytes) -> None:
        """Take what the other side's expose() has returned. Raises BadRequest if it cannot have returned that."""
        if len(exposed) != EXPOSED_SIZE * len(self.queue_pairs):
            raise BadRequest("exposed is not one description for each queue pair")
        pieces = [exposed[at : at + EXPOSED_SIZE] for at in range(0, len(exposed), EXPOSED_SIZE)]
        self.remotes = [RemoteMemory.from_bytes(piece) for piece in pieces]

    def take(self, count: int) -> list[ndpy.Completion]:
        """The next `count` completions. Raises if one has failed, or at the deadline."""
        deadline = time.monotonic() + self.plan.timeout_s
        taken: list[ndpy.Completion] = []
        while len(taken) < count:
            taken += self.cq.wait(max(deadline - time.monotonic(), 0), count - len(taken))
        for completion in taken:
            completion.raise_for_status()
        return taken

    def problem(self) -> str:
        """What is wrong with the connections, or ""."""
        ended = [q for q, queue_pair in enumerate(self.queue_pairs) if queue_pair.connection_ended]
        return f"the connection of queue pair {ended[0]} has ended" if ended else ""

    # ---- the contents of messages ----

    def prepare(self, size: int, seed: int) -> None:
        """Before a round: fill what is sent, and clear what comes."""
        self.waits_for = ""
        #: The last bytes of the messages of write_lat. Neighbours differ, and none is 0.
        self.marks = itertools.cycle(_MARKS)
        self.fill(size, seed)
        for q in range(len(self.queue_pairs)):
            start = self.plan.inbox(q)
            self.buffer[start : start + size] = bytes(size)

    def fill(self, size: int, seed: int, *, last: bool = False) -> None:
        """Fill what is sent. last: with the contents of the last message of a round."""
        self.buffer[:size] = pattern(_seed(seed, self._number, last), size)

    def check(self, size: int, seed: int, *, last: bool = False, marked: int = 0) -> str:
        """Wait until the other side's message has come over every queue pair. Returns what is wrong, or "".

        marked: how many messages had marks.
        """
        expected = bytearray(pattern(_seed(seed, 1 - self._number, last), size))
        if marked:
            expected[-1] = _MARKS[(marked - 1) % len(_MARKS)]
        # The completion of a write does not always mean that the bytes are there (Quirk.IWARP_NO_ACKNOWLEDGEMENT).
        # The other side waits for the answer meanwhile, and should not give up before it has come.
        deadline = time.monotonic() + self.plan.timeout_s / 2
        for q in range(len(self.queue_pairs)):
            start = self.plan.inbox(q)
            while (found := self.buffer[start : start + size]) != expected:
                if time.monotonic() > deadline:
                    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
                    return f"the last message over queue pair {q} is not there: {wrong} of its {size} bytes differ"
                time.sleep(_PAUSE_S)
        return ""


def _seed(seed: int, number: int, last: bool) -> int:
    return 4 * seed + 2 * number + last
