"""Functions that the tests share: memory, connected queue pairs, and completions with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import operator
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import pytest

import ndpy
from kit import remote
from kit.deadlines import DEADLINE_S as DEADLINE_S
from kit.deadlines import wait_until as wait_until
from kit.quirks import has_quirk, skip_where
from ndpy import Access, Operation, Status, ndk, testing
from ndpy.platforms.verbs import softverbs
from ndpy.testing import session
from ndpy.vocabulary.quirks import Quirk

# A test that expects nothing waits this long for a wrong completion.
QUIET_S = 0.2
# The difference of two readings of the clock may be wrong by this much. Windows' clock ticks 64 times a second.
CLOCK_TICK_S = time.get_clock_info("monotonic").resolution

T = TypeVar("T")

# The seed of every random test, so that a failure can be repeated.
SEED = int(os.environ.get("NDPY_TEST_SEED", "20240229"))

STRESS = os.environ.get("NDPY_STRESS") == "1"
# Whether threads of Python run one at a time.
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
only_under_stress = pytest.mark.skipif(
    not STRESS, reason="with NDPY_STRESS=1 only: it starts many processes, or a machine"
)


def interrupted(*_: Any, **__: Any) -> Any:
    """In the place of a call in which Ctrl-C comes."""
    raise KeyboardInterrupt


class Replacing:
    """An object or a module, with others in place of some of its attributes."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self._inner = inner
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Keeper:
    """Closes the objects that it was given. An object closes before the objects that it uses."""

    def __init__(self) -> None:
        self._things: list[Any] = []

    def __call__(self, thing: Any) -> Any:
        self._things.append(thing)
        return thing

    @staticmethod
    def _order(thing: Any) -> int:
        # NdkMr is no Resource, and holds a region. Of an object on another host, the class is known here.
        kind = ndpy.MemoryRegion if isinstance(thing, ndk.NdkMr) else thing.__class__
        return getattr(kind, "_release_order", 0)

    def close(self) -> None:
        failures = []
        self._things.reverse()
        self._things.sort(key=self._order)
        for thing in self._things:
            try:
                thing.close()
            except (ndpy.NdpyError, remote.HostDied, remote.DeadlinePassed) as error:
                failures.append(f"{thing!r}: {error!r}")
        self._things.clear()
        assert not failures, failures


@dataclass
class End:
    """One end of a connection. Its completion queue serves both directions."""

    queue_pair: ndpy.QueuePair
    cq: ndpy.CompletionQueue
    connector: ndpy.Connector

    @property
    def adapter(self) -> ndpy.Adapter:
        return self.queue_pair.adapter


@dataclass
class Pair:
    """Two connected ends. `adapter` is the client's. With --peer the server is on the other host."""

    adapter: ndpy.Adapter
    client: End
    server: End

    def __iter__(self):
        return iter((self.client, self.server))


def sample(values: list[T], count: int) -> list[T]:
    """All values with NDPY_STRESS=1, else the first `count`. An emulated machine starts processes slowly."""
    return values if STRESS else values[:count]


def rounds(full: int, quick: int) -> int:
    """How often a test repeats its work: `full` with NDPY_STRESS=1, else `quick`."""
    return full if STRESS else quick


def require(adapter: ndpy.Adapter, *capabilities: ndpy.Capability) -> None:
    """Skip unless the adapter claims all these capabilities. The reason names those that are missing."""
    session.require_capabilities(adapter.info, functools.reduce(operator.or_, capabilities))


def has_kernel_driver(adapter: ndpy.Adapter) -> bool:
    """Whether the kernel knows the adapter's objects. soft0 lives in the process that uses it."""
    return adapter.info.driver != softverbs.DRIVER


def require_kernel_driver(adapter: ndpy.Adapter, thing: str) -> None:
    """Skip where the adapter is not one of the kernel's. `thing` says what the test needs of it."""
    if not has_kernel_driver(adapter):
        pytest.skip(f"{adapter.info.name} lives in its process and has no {thing}")


def require_acknowledged_sends(adapter: ndpy.Adapter) -> None:
    """Skip where the transport completes a send before the peer's queue pair has taken it."""
    skip_where(adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT)


def require_reusable_queue_pairs(adapter: ndpy.Adapter) -> None:
    """Skip where a refused connection makes the kernel move the queue pair to its final state."""
    skip_where(adapter, Quirk.IWARP_ATTEMPT_USES_QUEUE_PAIR_UP)


# ---- the other host (--peer) ----

# How to get the other host's adapter, for the adapter of the test that runs.
_peers: dict[int, Callable[[], ndpy.Adapter]] = {}


@contextlib.contextmanager
def peering(adapter: ndpy.Adapter, host: remote.Host | None, name: str) -> Iterator[None]:
    """Let peer_of(adapter) open the adapter of that name on a host. It is closed at the end."""
    opened: list[ndpy.Adapter] = []

    def open_once() -> ndpy.Adapter:
        if not opened:
            opened.append(host.call("ndpy:open_adapter", name))  # type: ignore[union-attr]
        return opened[0]

    if host is not None:
        _peers[id(adapter)] = open_once
    try:
        yield
    finally:
        _peers.pop(id(adapter), None)
        for peer in opened:
            peer.close()


def peer_of(adapter: ndpy.Adapter) -> ndpy.Adapter:
    """The adapter for the other end of a connection: with --peer that of the other host, else the same one."""
    return _peers.get(id(adapter), lambda: adapter)()


def open_another(keep: Keeper, adapter: ndpy.Adapter) -> ndpy.Adapter:
    """Open the same device once more, on the same host."""
    host, name = remote.host_of(adapter), adapter.info.name
    return keep(ndpy.open_adapter(name) if host is None else host.call("ndpy:open_adapter", name))


def host_of(adapter: ndpy.Adapter, version: int = 4) -> str:
    """An address of the adapter to connect to."""
    addresses = [text for text in adapter.info.addresses if not text.lower().startswith("fe80")]
    wanted = [text for text in addresses if (":" in text) == (version == 6)]
    if not wanted and version == 6:
        pytest.skip(f"{adapter.info.name} has no IPv6 address: {adapter.info.addresses}")
    return (wanted or addresses)[0]


def memory(
    keep: Keeper, adapter: ndpy.Adapter, contents: int | bytes, access: Access = Access.LOCAL_WRITE
) -> ndpy.MemoryRegion:
    """A registered bytearray. It holds that many zero bytes, or the given bytes."""
    return keep(adapter.register(bytearray(contents), access))


def contents(region: ndpy.MemoryRegion) -> bytes:
    """A copy of the bytes that a region's buffer holds now."""
    return bytes(region.buffer)


def is_free(buffer: bytearray) -> bool:
    """Whether nobody holds the buffer's memory."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


def fill(region: ndpy.MemoryRegion, data: bytes, offset: int = 0) -> None:
    """Write bytes into a region's buffer, as a program would."""
    host = remote.host_of(region)
    if host is not None:
        # `region.buffer` is a copy here.
        host.call("kit.helpers:fill", region, data, offset)
        return
    memoryview(region.buffer)[offset : offset + len(data)] = data


def take(cq: ndpy.CompletionQueue, count: int = 1, timeout_s: float = DEADLINE_S) -> list[ndpy.Completion]:
    return testing.take(cq, count, timeout_s)


def succeed(cq: ndpy.CompletionQueue, count: int = 1) -> list[ndpy.Completion]:
    return testing.take_ok(cq, count, DEADLINE_S)


def address_of(buffer: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def contexts(completions: Iterable[ndpy.Completion]) -> list[int]:
    return [completion.context for completion in completions]


def statuses(completions: Iterable[ndpy.Completion]) -> list[Status]:
    return [completion.status for completion in completions]


def assert_quiet(cq: ndpy.CompletionQueue, seconds: float = QUIET_S) -> None:
    """The test fails if a completion comes within this time."""
    with pytest.raises(ndpy.TimeoutError):
        pytest.fail(f"unexpected: {cq.wait(seconds)}")


def assert_let_go(reference: weakref.ref[Any]) -> None:
    """Nothing refers to it any more. The adapter's thread may do so for a moment, while it handles an event."""

    def gone() -> bool:
        gc.collect()
        return reference() is None

    wait_until(gone, f"{reference()!r} is let go of")


def create_end(keep: Keeper, adapter: ndpy.Adapter, *, cq: Any = None, cq_depth: int = 64, **options: Any) -> End:
    """An unconnected queue pair with its completion queue. It gets a connector later."""
    defaults = {"receive_queue_depth": 16, "initiator_queue_depth": 16}
    cq = cq or keep(adapter.create_completion_queue(cq_depth))
    queue_pair = keep(adapter.create_queue_pair(cq, **{**defaults, **options}))
    return End(queue_pair, cq, None)  # type: ignore[arg-type]


@dataclass
class Offer:
    """A connection that is being made. The server has the request, or has accepted it."""

    listener: ndpy.Listener
    connecting: ndpy.Pending[None]
    client: ndpy.Connector
    server: ndpy.Connector

    def complete(self, accepting: ndpy.Pending[None]) -> None:
        """Make the connection, once the server has begun to accept it."""
        self.connecting.result(DEADLINE_S)
        self.client.complete_connect(DEADLINE_S)
        accepting.result(DEADLINE_S)


def ask(
    keep: Keeper,
    adapter: ndpy.Adapter,
    queue_pair: ndpy.QueuePair,
    version: int = 4,
    to: ndpy.Adapter | None = None,
    client: ndpy.Connector | None = None,
    listener: ndpy.Listener | None = None,
    **options: Any,
) -> Offer:
    """Start to connect a queue pair, and wait until the request is there.

    The connector and the listener are new ones by default. The listener is one of the adapter `to`, by default of
    peer_of(adapter).
    """
    to = to or peer_of(adapter)
    listener = listener or keep(to.listen((host_of(to, version), 0)))
    client = client or keep(adapter.create_connector())
    connecting = client.begin_connect(queue_pair, listener.address, **options)
    server = keep(listener.get_request(DEADLINE_S))
    return Offer(listener, connecting, client, server)


def establish(offer: Offer, queue_pair: ndpy.QueuePair, **options: Any) -> None:
    """Make the connection of an offer: both steps on both sides."""
    offer.complete(offer.server.begin_accept(queue_pair, **options))


def connect_ends(keep: Keeper, adapter: ndpy.Adapter, client: End, server: End, **options: Any) -> Pair:
    """Connect two ends to each other."""
    connectors = testing.connect(client.queue_pair, server.queue_pair, DEADLINE_S, **options)
    client.connector, server.connector = map(keep, connectors)
    return Pair(adapter, client, server)


def connect_pair(keep: Keeper, adapter: ndpy.Adapter, **options: Any) -> Pair:
    """Two connected ends. Both are created with these options of create_end()."""
    client, server = create_end(keep, adapter, **options), create_end(keep, peer_of(adapter), **options)
    return connect_ends(keep, adapter, client, server)


def send_message(keep: Keeper, source: End, sink: End, data: bytes) -> None:
    """Send one message. The test fails unless it arrives whole."""
    target = memory(keep, sink.adapter, len(data))
    sink.queue_pair.receive(target, context=901)
    source.queue_pair.send(memory(keep, source.adapter, data, Access.NONE), context=902)
    (sent,) = succeed(source.cq)
    (received,) = succeed(sink.cq)
    assert (sent.operation, sent.context) == (Operation.SEND, 902)
    assert (received.operation, received.context, received.nbytes) == (Operation.RECEIVE, 901, len(data))
    assert contents(target) == data


def assert_works(keep: Keeper, pair: Pair) -> None:
    """Send a message in each direction. The client sends first (Quirk.IWARP_CLIENT_SENDS_FIRST)."""
    send_message(keep, pair.client, pair.server, b"from the client")
    send_message(keep, pair.server, pair.client, b"from the server")


def assert_refused(end: End, operation: Operation, context: int) -> None:
    """The next completion of the requester is an access violation of this request (contract E.5.1).

    On iWARP nothing answers a write, and the message that ends the connection does not name the request (RFC 5040).
    There a write may end in any way, a read must fail, and the connection must end.
    """
    (completion,) = take(end.cq)
    assert (completion.operation, completion.context) == (operation, context)
    if has_quirk(end.queue_pair.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT):
        assert operation is Operation.WRITE or not completion.ok
        end.connector.wait_disconnected(DEADLINE_S)
        return
    assert completion.status is Status.ACCESS_VIOLATION, completion
    with pytest.raises(ndpy.AccessViolationError):
        completion.raise_for_status()


def bind(
    end: End, window: ndpy.MemoryWindow, memory: ndpy.MemoryRegion | ndpy.Sge, *access: Access
) -> ndpy.RemoteMemory:
    """Bind a window and wait for it. Returns the descriptor for the peer."""
    end.queue_pair.bind(window, memory, *access, context=77)
    (completion,) = succeed(end.cq)
    assert (completion.operation, completion.context) == (Operation.BIND, 77)
    return window.remote()


def expose(keep: Keeper, owner: End, region: ndpy.MemoryRegion) -> ndpy.RemoteMemory:
    """Return the descriptor with which the peer of `owner` can use the whole region with the region's rights.

    It names the region itself. If the adapter's regions have no rights of their own, it names a window.
    """
    if ndpy.Capability.REGION_ACCESS in region.adapter.info.capabilities:
        return region.remote()
    window = keep(region.adapter.create_memory_window())
    return bind(owner, window, region, region.access & (Access.REMOTE_READ | Access.REMOTE_WRITE))


# ---- what a process holds ----


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_memory() -> int:
    """How many bytes of this process are in memory, after a garbage collection."""
    gc.collect()
    size: int = psutil.Process().memory_info().rss
    return size


def kernel_resources(pid: int | None = None) -> dict[str, int]:
    """How many objects of each kind the kernel holds for a process on all devices. The default is this process."""
    pid = pid or os.getpid()
    counts = {}
    for kind in ("qp", "cq", "mr", "pd", "cm_id"):
        done = subprocess.run(["rdma", "-j", "resource", "show", kind], capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            counts[kind] = sum(entry.get("pid") == pid for entry in json.loads(done.stdout or "[]"))
    return counts
