"""What both sides of a smoke test create: memory with a known pattern, and their end of a connection."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterable
from typing import Protocol

import ndpy
from ndpy import Access

#: The queue depths of a connection end. A check that needs deeper queues asks for them.
DEPTH = 32


@functools.lru_cache(maxsize=64)
def pattern(seed: int, length: int) -> bytes:
    """`length` pseudo-random bytes, without a period, that depend on the seed."""
    return random.Random(seed).randbytes(length)


class Memory:
    """A registered buffer that is filled with pattern(seed, length)."""

    def __init__(self, adapter: ndpy.Adapter, length: int, access: Access, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.buffer = ndpy.alloc(length)
        self.buffer[:] = pattern(seed, length)
        self.region = adapter.register(self.buffer, access)

    def contents(self, offset: int = 0, length: int | None = None) -> bytes:
        """A copy of the current bytes."""
        return bytes(self.buffer[offset : self.length if length is None else offset + length])

    def changed(self) -> str:
        """Describe where the bytes differ from the pattern. Returns "" if they do not."""
        return difference(self.contents(), pattern(self.seed, self.length))

    def close(self) -> None:
        self.region.close()


def difference(found: bytes, expected: bytes) -> str:
    """Describe where two byte strings differ. Returns "" if they are equal."""
    if found == expected:
        return ""
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    wrong = [index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(expected)} bytes differ, the first at offset {first} "
        f"({found[first]:#04x} instead of {expected[first]:#04x}), the last at {wrong[-1]}"
    )


class ConnectionEnd:
    """One end of a connection: a queue pair, its completion queue, and the connector once there is one."""

    def __init__(
        self,
        adapter: ndpy.Adapter,
        *,
        depth: int = DEPTH,
        max_sge: int = 1,
        inline_data_size: int = 0,
        cq: ndpy.CompletionQueue | None = None,
        srq: ndpy.SharedReceiveQueue | None = None,
    ) -> None:
        self.cq = cq or adapter.create_completion_queue(min(2 * depth, adapter.info.max_completion_queue_depth))
        self._owns_cq = cq is None
        self.connector: ndpy.Connector | None = None
        try:
            self.queue_pair = adapter.create_queue_pair(
                self.cq,
                receive_queue_depth=depth,
                initiator_queue_depth=depth,
                max_receive_sge=max_sge,
                max_initiator_sge=max_sge,
                inline_data_size=inline_data_size,
                srq=srq,
            )
        except BaseException:
            if self._owns_cq:
                self.cq.close()
            raise

    def post_receives(self, memory: Memory, count: int) -> None:
        """Divide the memory into `count` equal slots and post a receive for each. The context is the slot's number."""
        size = memory.length // count
        for slot in range(count):
            self.queue_pair.receive(memory.region[slot * size : (slot + 1) * size], context=slot)

    def take(self, count: int, timeout_s: float) -> list[ndpy.Completion]:
        """Take up to `count` completions. Returns fewer if timeout_s seconds pass first."""
        deadline = time.monotonic() + timeout_s
        taken: list[ndpy.Completion] = []
        while len(taken) < count:
            left = deadline - time.monotonic()
            try:
                taken += self.cq.wait(max(left, 0), count - len(taken))
            except ndpy.TimeoutError:
                break
        return taken

    def resources(self) -> list[Closable]:
        """The objects that must be closed with this end."""
        ends = (self.connector, self.queue_pair, self.cq if self._owns_cq else None)
        return [end for end in ends if end is not None]


class Closable(Protocol):
    """An object of one of the types of _CLOSING_ORDER."""

    def close(self) -> None: ...


_CLOSING_ORDER: tuple[type, ...] = (
    ndpy.Listener,
    ndpy.Connector,
    ndpy.MemoryWindow,
    ndpy.QueuePair,
    ndpy.SharedReceiveQueue,
    ndpy.CompletionQueue,
    ndpy.MemoryRegion,
    Memory,
    ndpy.Adapter,
)


def close_all(resources: Iterable[Closable]) -> list[str]:
    """Close everything, each object before those that it uses. Returns a sentence for each failure."""

    def rank(resource: Closable) -> int:
        return next(index for index, kind in enumerate(_CLOSING_ORDER) if isinstance(resource, kind))

    failures = []
    for resource in sorted(resources, key=rank):
        try:
            resource.close()
        except Exception as error:
            failures.append(f"closing {type(resource).__name__}: {type(error).__name__}: {error}")
    return failures
