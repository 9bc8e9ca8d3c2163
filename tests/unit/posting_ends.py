"""The halves of a queue pair and of a completion queue that post and take, over a provider that the test plays
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from data_path_provider import DEPTH, INLINE_SIZE, MAX_LENGTH, NUMBER, Provider

import ndpy
from ndpy import Batch, QueuePairType, _core
from ndpy.objects.work_queues import QueuePairLimits, WorkQueues
from ndpy.platforms.verbs.native_calls import ffi, lib

ADAPTER: Any = SimpleNamespace(info=SimpleNamespace(max_transfer_length=MAX_LENGTH))


class Region(_core.MemoryRegion):
    """A region of an adapter that does not exist."""

    def __init__(self, length: int = 4096, token: int = 3, writable: bool = True) -> None:
        self._adapter = ADAPTER
        self._defunct = None
        self._writable = writable
        self.address = 0x10000
        self.length = length
        self.local_token = token


class Queues(WorkQueues):
    """The posting half of a queue pair, without the adapter and the connection."""

    _lib = lib
    _ffi = ffi

    def __init__(self, native: Provider, connection: int = lib.NDPY_CONNECTED, depth: int = DEPTH) -> None:
        self._lock = _core.Lock()
        self._singly = None
        self.type = QueuePairType.RC
        self._defunct = None
        self._adapter = ADAPTER
        self.srq = None
        self.limits = QueuePairLimits(depth + 1, depth, 2, 3, INLINE_SIZE)
        self._begin_posting(native.queue_pair(depth, connection))

    def _native_refusal(self, operation: str, number: int) -> ndpy.NdpyError:
        return ndpy.errors.from_errno(operation, number)

    def _require_same_adapter(self, other: Any, what: str) -> None:
        if other._adapter is not self._adapter:
            raise ndpy.ForeignObjectError(what)

    def _release(self) -> None:
        pass


class Queue(_core.CompletionQueue):
    """The taking half of a completion queue."""

    def __init__(self, native: Provider, queues: Queues) -> None:
        self._lock = _core.Lock()
        self.depth = 256
        self.failed: list[Any] = []
        self._posted_requests[NUMBER] = queues._posted_requests
        self._attach(int(ffi.cast("uintptr_t", lib.ndpy_provider_table())), int(ffi.cast("uintptr_t", native.cq)))

    def _collect_one(self, entry: tuple[int, ...], failed: list[Any]) -> Any:
        posted = self._posted_requests[entry[6]]
        _, record = posted.retire(entry)
        self.failed.append(record)
        return None if entry[9] & 1 else _core.Completion(entry, posted)

    def _tell_of_news(self, failed: list[Any]) -> None:
        pass


@pytest.fixture
def queues(provider: Provider) -> Iterator[Queues]:
    queues = Queues(provider)
    yield queues
    queues._detach()


@pytest.fixture
def cq(provider: Provider, queues: Queues) -> Iterator[Queue]:
    cq = Queue(provider, queues)
    yield cq
    cq._detach()


REMOTE = ndpy.RemoteMemory(0x90000, 100, 9)


def writes(region: Region, count: int, **options: Any) -> Batch:
    batch = Batch(count, **options)
    for place in range(count):
        batch.write(region[place : place + 8], REMOTE[place : place + 8], context=100 + place)
    return batch


def receives(region: Region, count: int) -> Batch:
    batch = Batch(count)
    for place in range(count):
        batch.receive(region[place : place + 8], context=100 + place)
    return batch


def in_flight(queues: Queues, receive: int = 0) -> int:
    return int(lib.ndpy_queue_pair_in_flight(queues._rings, receive))
