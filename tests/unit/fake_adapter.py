"""An adapter in Python, for programs that only use the public calls. Two ends of it move real bytes in one process.

It is strict: a message without a receive fails, and so do a post beyond the depth and a use of memory beyond its
bounds.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from kit.deadlines import DEADLINE_S as DEADLINE_S

import ndpy
from ndpy import Capability, Flags


def make_info(**changes: Any) -> ndpy.AdapterInfo:
    values: dict[str, Any] = dict.fromkeys(ndpy.AdapterInfo.__dataclass_fields__, 1 << 20)
    values |= {
        "name": "fake0",
        "provider": "fake",
        "transport": "none",
        "driver": "fake",
        "addresses": ("192.0.2.1",),
        "numa_node": None,
        "capabilities": Capability.LOOPBACK_CONNECTIONS | Capability.REGION_ACCESS | Capability.IN_ORDER_DMA,
        "max_transfer_length": 1 << 24,
        "ports": (),
    }
    return ndpy.AdapterInfo(**(values | changes))


@dataclass
class Element:
    view: memoryview

    @property
    def length(self) -> int:
        return self.view.nbytes


class Closable:
    closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True


class Region(Closable):
    def __init__(self, adapter: Adapter, buffer: Any) -> None:
        self.view = memoryview(buffer).cast("B")
        self.token = next(adapter.world.tokens)
        adapter.world.regions[self.token] = self

    def __getitem__(self, key: slice) -> Element:
        assert 0 <= key.start <= key.stop <= self.view.nbytes
        return Element(self.view[key])

    def remote(self) -> ndpy.RemoteMemory:
        return ndpy.RemoteMemory(0x10000, self.view.nbytes, self.token)


class Window(Closable):
    bound: Region | None = None

    def remote(self) -> ndpy.RemoteMemory:
        assert self.bound is not None
        return self.bound.remote()


class Batch:
    """In place of ndpy.Batch, which takes elements of real regions only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[tuple[str, Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def add(*arguments: Any, **options: Any) -> None:
            assert len(self.requests) < self.capacity
            self.requests.append((name, arguments, options))

        return add


@dataclass
class Completion:
    context: int
    nbytes: int = 0
    failure: str = ""
    retire: Any = None

    @property
    def ok(self) -> bool:
        return not self.failure

    def raise_for_status(self) -> None:
        if self.failure:
            raise ndpy.ProviderError(self.failure)


class CompletionQueue(Closable):
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.entries: deque[Completion] = deque()
        self.changed = threading.Condition()

    def add(self, completion: Completion) -> None:
        with self.changed:
            assert len(self.entries) < self.depth, "the completion queue is overrun"
            self.entries.append(completion)
            self.changed.notify_all()

    def poll(self, max_entries: int = 64, *, spin_s: float = 0.0) -> list[Completion]:
        with self.changed:
            if spin_s:
                self.changed.wait_for(lambda: self.entries, spin_s)
            taken = [self.entries.popleft() for _ in range(min(max_entries, len(self.entries)))]
        for completion in taken:
            if completion.retire is not None:
                completion.retire()
        return taken

    def wait(self, timeout_s: float, max_entries: int = 64) -> list[Completion]:
        with self.changed:
            self.changed.wait_for(lambda: self.entries, timeout_s)
        taken = self.poll(max_entries)
        if not taken:
            raise ndpy.TimeoutError("no completion")
        return taken


class QueuePair(Closable):
    def __init__(self, adapter: Adapter, cq: CompletionQueue, limits: dict[str, int]) -> None:
        self.adapter, self.cq, self.limits = adapter, cq, limits
        self.peer: QueuePair | None = None
        self.receives: deque[tuple[Any, int]] = deque()
        self.posted = self.retired = 0
        self.connection_ended = False

    def _post(self, move: Any, context: int, flags: int) -> None:
        self.posted += 1
        number = self.posted
        assert number - self.retired <= self.limits["initiator_queue_depth"], "the initiator queue is full"
        failure = "the connection has ended" if self.connection_ended else move()

        def retire() -> None:
            self.retired = number

        # A silent request keeps its slot until a later completion is taken.
        if failure or not flags & Flags.SILENT_SUCCESS:
            self.cq.add(Completion(context, failure=failure, retire=retire))

    def receive(self, element: Any, *, context: int = 0) -> None:
        assert len(self.receives) < self.limits["receive_queue_depth"], "the receive queue is full"
        self.receives.append((element, context))

    def send(self, element: Any, *, context: int = 0, flags: int = 0) -> None:
        data = b"" if element == [] else bytes(element.view)

        def move() -> str:
            assert self.peer is not None
            if not self.peer.receives:
                return "the receiver is not ready"
            sink, receive_context = self.peer.receives.popleft()
            sink.view[: len(data)] = data
            self.peer.cq.add(Completion(receive_context, len(data)))
            return ""

        self._post(move, context, flags)

    def write(self, element: Element, remote: ndpy.RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        self._post(lambda: self._copy(self._there(remote), element.view), context, flags)

    def read(self, element: Element, remote: ndpy.RemoteMemory, *, context: int = 0, flags: int = 0) -> None:
        self._post(lambda: self._copy(element.view, self._there(remote)), context, flags)

    def post(self, batch: Batch) -> None:
        for number, (name, arguments, options) in enumerate(batch.requests, 1):
            if name != "receive" and number < len(batch.requests):
                options = {**options, "flags": options.get("flags", 0) | Flags.SILENT_SUCCESS}
            getattr(self, name)(*arguments, **options)

    def bind(self, window: Window, region: Region, access: Any, *, context: int = 0) -> None:
        window.bound = region
        self.cq.add(Completion(context))

    def _there(self, remote: ndpy.RemoteMemory) -> memoryview:
        start = remote.address - 0x10000
        return self.adapter.world.regions[remote.token].view[start : start + remote.length]

    @staticmethod
    def _copy(target: memoryview, source: memoryview) -> str:
        assert target.nbytes == source.nbytes
        target[:] = source
        return ""

    def end(self) -> None:
        self.connection_ended = True
        if self.peer is not None:
            self.peer.connection_ended = True

    def close(self) -> None:
        self.end()
        super().close()


class Connector(Closable):
    def __init__(self, client: QueuePair, private_data: bytes) -> None:
        self.client, self.private_data = client, private_data
        self.answered = threading.Event()
        self.rejected = False

    def accept(self, queue_pair: QueuePair, *, timeout_s: float) -> None:
        queue_pair.peer, self.client.peer = self.client, queue_pair
        self.answered.set()

    def reject(self) -> None:
        self.rejected = True
        self.answered.set()


class Listener(Closable):
    def __init__(self, port: int) -> None:
        self.address = ("192.0.2.1", port)
        self.requests: deque[Connector] = deque()
        self.changed = threading.Condition()

    def get_request(self, timeout_s: float) -> Connector:
        with self.changed:
            if not self.changed.wait_for(lambda: self.requests, timeout_s):
                raise ndpy.TimeoutError("no request")
            return self.requests.popleft()


@dataclass
class World:
    """What the adapters of one test have in common."""

    tokens: Any = field(default_factory=lambda: itertools.count(1))
    ports: Any = field(default_factory=lambda: itertools.count(1000))
    regions: dict[int, Region] = field(default_factory=dict)
    listeners: dict[int, Listener] = field(default_factory=dict)
    queue_pairs: list[QueuePair] = field(default_factory=list)


class Adapter(Closable):
    def __init__(self, world: World, **changes: Any) -> None:
        self.world = world
        self.info = replace(make_info(), **changes)

    def register(self, buffer: Any, access: Any) -> Region:
        return Region(self, buffer)

    def create_memory_window(self) -> Window:
        return Window()

    def create_completion_queue(self, depth: int) -> CompletionQueue:
        return CompletionQueue(depth)

    def create_queue_pair(self, cq: CompletionQueue, **limits: int) -> QueuePair:
        queue_pair = QueuePair(self, cq, limits)
        self.world.queue_pairs.append(queue_pair)
        return queue_pair

    def listen(self, address: Any) -> Listener:
        listener = Listener(next(self.world.ports))
        self.world.listeners[listener.address[1]] = listener
        return listener

    def connect(self, queue_pair: QueuePair, address: Any, *, private_data: bytes, timeout_s: float) -> Connector:
        listener = self.world.listeners[address[1]]
        # As iWARP does, which appends to what the program gives.
        connector = Connector(queue_pair, private_data + b"\0\0\0")
        with listener.changed:
            listener.requests.append(connector)
            listener.changed.notify_all()
        assert connector.answered.wait(timeout_s)
        if connector.rejected:
            raise ndpy.ConnectionRefusedError("rejected")
        return Connector(queue_pair, b"")
