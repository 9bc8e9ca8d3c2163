"""The other host dies: its power is cut once, in the middle of everything. Each test looks at one thing that was going
on.

Nothing hangs, every request ends in the time that its connection was made with, errors name the peer, and everything
closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts import traffic
from hosts.conftest import settles
from kit.helpers import SEED, Keeper, create_end, kernel_resources, memory, take, wait_until

import ndpy
from ndpy import Access, Capability, Operation, RetryPolicy, Status, aio

pytestmark = pytest.mark.timeout(300)

# Each answer within 4.096 us * 2^16 = 0.27 s, 5 times.
_RETRY = RetryPolicy(ack_timeout=16, retry_count=4)
# For a connection that is being made when the host dies.
_CONNECT_S = 6.0
# TCP, below iWARP, gives up after so many tries: 3.2 s at least. Linux' own number is 15, which takes a quarter of an
# hour.
_TCP_TRIES = 4
_TCP_LIMIT_S = 30.0
# What an emulated machine may take to run a thread.
_SLACK_S = 4.0


@dataclass
class Work:
    """Something that a thread was doing. `seconds` is how long it went on after the death."""

    name: str
    error: BaseException | None = None
    seconds: float = 0.0
    turns: int = 0
    thread: threading.Thread = field(default_factory=threading.Thread)


class Scene:
    """What was going on when the other host died."""

    def __init__(self, adapter: ndpy.Adapter, retries: bool) -> None:
        self.adapter = adapter
        self.retry = _RETRY if retries else None
        self.keep = Keeper()
        self.works: dict[str, Work] = {}
        self.died = 0.0
        self.clients: dict[str, traffic.Client] = {}
        self.things: dict[str, Any] = {}

    def start(self, name: str, do: Any) -> None:
        work = self.works[name] = Work(name)

        def run() -> None:
            try:
                while True:
                    do()
                    work.turns += 1
            except BaseException as error:
                work.error = error
                work.seconds = time.monotonic() - self.died

        work.thread = threading.Thread(target=run, daemon=True)
        work.thread.start()

    def ended(self, name: str, limit_s: float) -> Work:
        work = self.works[name]
        work.thread.join(max(self.died + limit_s - time.monotonic(), 0) + _SLACK_S)
        if work.thread.is_alive() and self.retry is None and name in self.clients:
            # The dead host's TCP had acknowledged the request, so this one's has nothing to send again. The next
            # request notices.
            end, remote = self.clients[name].end, self.clients[name].remote
            end.queue_pair.read(end.outbox[0:1], remote[0:1], context=4)
            limit_s = time.monotonic() - self.died + _TCP_LIMIT_S
            work.thread.join(_TCP_LIMIT_S + _SLACK_S)
        assert not work.thread.is_alive(), f"{name} goes on {time.monotonic() - self.died:.1f} s after the death"
        assert work.seconds < limit_s + _SLACK_S, work
        return work

    @property
    def limit_s(self) -> float:
        """Within this time each request of a connection with _RETRY fails."""
        retry = self.clients["writes"].end.queue_pair.retry
        return _TCP_LIMIT_S if retry.gives_up_s is None else 4 * retry.gives_up_s


@pytest.fixture(scope="module")
def scene(peer_host, adapter_name):
    """Begins everything, cuts the power of the other host, and closes everything at the end."""
    address, peer_address = os.environ["NDPY_ADDRESS"], os.environ["NDPY_PEER_ADDRESS"]
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text(f"{_TCP_TRIES}\n")
    adapter = ndpy.open_adapter(adapter_name)
    resources = kernel_resources()
    scene = Scene(adapter, Capability.RETRY_POLICY in adapter.info.capabilities)
    server = peer_host.call("hosts.traffic:Server", adapter_name, peer_address)
    for name in ("writes", "reads", "messages", "patient", "idle", "leases"):
        retry = None if name == "patient" else scene.retry
        probe_s = 1.0 if name == "messages" else None
        scene.clients[name] = traffic.Client(
            adapter, server.address, random.Random(f"{SEED} {name}"), retry=retry, probe_s=probe_s
        )
    _lend(scene)
    _connect(scene, peer_host, adapter_name, address, peer_address)
    for name, step in (("writes", "write"), ("reads", "read"), ("messages", "echo"), ("patient", "write")):
        scene.start(name, getattr(scene.clients[name], step))
    sink = peer_host.call("hosts.aio_sink:Sink", adapter_name, peer_address, takes=False)
    scene.start("offer", lambda: asyncio.run(_offer(scene, sink.address)))
    scene.start("silence", lambda: asyncio.run(_receive(scene, sink.address)))
    scene.start("ending", lambda: scene.clients["writes"].connector.wait_disconnected(120) or _stop())
    for name in ("writes", "reads", "messages"):
        wait_until(lambda name=name: scene.works[name].turns > 2, name)
    wait_until(lambda: {"offered", "listening"} <= scene.things.keys(), "an offer, and one who waits for a message")
    # It is acknowledged meanwhile.
    time.sleep(1)
    scene.died = time.monotonic()
    Path(os.environ["NDPY_KILL"]).write_text("\n")
    yield scene
    start = time.monotonic()
    for client in scene.clients.values():
        with contextlib.suppress(ndpy.NdpyError):
            client.close(disconnect=False)
    scene.keep.close()
    assert time.monotonic() - start < 20
    assert settles(kernel_resources, resources) == resources
    adapter.close()


async def _receive(scene: Scene, address: tuple[str, int]) -> None:
    async with aio.connect(address, adapter=scene.adapter, timeout_s=30) as connection:
        scene.things["listening"] = True
        await connection.receive()


async def _offer(scene: Scene, address: tuple[str, int]) -> None:
    """A long message, which its receiver reads from this end's memory when it takes it."""
    async with aio.connect(address, adapter=scene.adapter, timeout_s=30) as connection:
        sending = asyncio.ensure_future(connection.send(bytes(100_000)))
        while not connection._messages.answers:
            await asyncio.sleep(0.01)
        scene.things["offered"] = True
        await sending


class _Stop(Exception):
    pass


def _stop() -> None:
    raise _Stop


def _lend(scene: Scene) -> None:
    """A cache with a lease that a write of the connection uses, and an exposure that the other host may use."""
    client = scene.clients["leases"]
    cache = scene.keep(ndpy.RegistrationCache(scene.adapter, max_bytes=64 << 20, max_entries=64))
    lent, exposed = bytearray(b"L" * 4096), bytearray(b"E" * 4096)
    scene.things.update(cache=cache, lent=lent, exposed=exposed)
    scene.things["lease"] = cache.local(lent, Access.NONE, queue_pair=client.end.queue_pair)
    scene.things["exposure"] = cache.remote(exposed, client.end.queue_pair, Access.REMOTE_READ | Access.REMOTE_WRITE)
    if Capability.MEMORY_WINDOWS in scene.adapter.info.capabilities:
        region = scene.keep(scene.adapter.register(bytearray(4096), Access.LOCAL_WRITE))
        window = scene.keep(scene.adapter.create_memory_window())
        client.end.queue_pair.bind(window, region, Access.REMOTE_READ, flags=ndpy.Flags.SILENT_SUCCESS)
        scene.things["window"] = window, region
    client.write(64)  # the windows are bound before this write is done


def _connect(scene: Scene, peer_host: Any, name: str, address: str, peer_address: str) -> None:
    """Connections that are being made: connects that nobody answers, and requests and offers of the other host."""
    keep, adapter = scene.keep, scene.adapter
    peer = scene.things["peer"] = peer_host.call("ndpy:open_adapter", name)
    deaf = peer.listen((peer_address, 0))
    scene.things["there"] = [deaf]
    end = create_end(keep, adapter)
    connector = keep(adapter.create_connector())
    connecting = connector.begin_connect(end.queue_pair, deaf.address[:2])
    scene.things["there"].append(deaf.get_request(20))
    scene.things["connecting"] = connecting, connector
    scene.things["address"] = deaf.address[:2]
    listener = keep(adapter.listen((address, 0)))
    for number in range(2):
        their_cq = peer.create_completion_queue(16)
        theirs = peer.create_queue_pair(their_cq)
        their_connector = peer.create_connector()
        begun = their_connector.begin_connect(theirs, listener.address[:2])
        request = keep(listener.get_request(20))
        own = create_end(keep, adapter)
        scene.things["there"] += [their_cq, theirs, their_connector, begun]
        if number == 0:
            scene.things["request"] = request, own
        else:
            accepting = request.begin_accept(own.queue_pair)
            begun.result(20)
            scene.things["accepting"] = accepting, request


@pytest.mark.parametrize("name", ["writes", "reads", "messages"])
def test_requests_fail_within_the_retry_time_and_name_the_peer(scene, name, peer_address):
    error = scene.ended(name, scene.limit_s).error
    assert isinstance(error, ndpy.NdpyError), error
    assert peer_address in str(error), error
    client = scene.clients[name]
    with pytest.raises(ndpy.NdpyError):
        client.end.queue_pair.send(client.end.outbox[:1])
        for completion in take(client.end.cq, 1):
            completion.raise_for_status()


def test_the_end_of_the_connection_is_told_soon_after_the_failed_request(scene):
    failed = scene.ended("writes", scene.limit_s)
    told = scene.ended("ending", scene.limit_s + 2)
    assert isinstance(told.error, _Stop)
    assert told.seconds - failed.seconds < 2 + _SLACK_S
    assert scene.clients["writes"].connector.state == "disconnected"


def test_every_outstanding_receive_is_cancelled(scene):
    scene.ended("writes", scene.limit_s)
    client = scene.clients["writes"]
    client.connector.wait_disconnected(20)
    failed, *cancelled = client.failed + client.end.cq.poll()
    assert failed.operation is Operation.WRITE
    assert [(other.operation, other.status) for other in cancelled] == [(Operation.RECEIVE, Status.CANCELED)] * 4


def _completion_of(client: traffic.Client, context: int, limit_s: float) -> ndpy.Completion:
    """The completion of the request with this context. Those of others may come before."""
    while (completion := take(client.end.cq, 1, limit_s + _SLACK_S)[0]).context != context:
        pass
    return completion


def test_an_exposure_ends_and_a_lease_is_released(scene):
    """The window's grant ends on the survivor with the connection: nobody can use the memory through it any more."""
    client = scene.clients["leases"]
    cache, lease, exposure = (scene.things[name] for name in ("cache", "lease", "exposure"))
    # On iWARP only a read notices.
    client.end.queue_pair.write(lease[0:64], client.remote[0:64], context=5)
    client.end.queue_pair.read(client.end.outbox[0:64], client.remote[0:64], context=6)
    assert not _completion_of(client, 6, scene.limit_s).ok
    client.connector.wait_disconnected(2 + _SLACK_S)
    exposure.release()
    lease.release()
    cache.invalidate(scene.things["exposed"])
    scene.things["exposed"].extend(b"its memory is free to move")
    with pytest.raises(ndpy.NotConnectedError):
        cache.remote(scene.things["lent"], client.end.queue_pair)
    cache.close()
    if "window" in scene.things:
        window, region = scene.things["window"]
        with pytest.raises(ndpy.DeviceBusyError):  # the binding lasts as long as the window and the queue pair (E.6.7)
            region.deregister()
        window.close()
        region.deregister()


def test_a_connect_that_waits_for_the_dead_host_ends_when_its_time_is_up(scene, peer_address):
    connecting, connector = scene.things["connecting"]
    with pytest.raises(ndpy.NdpyError):
        connecting.result(_CONNECT_S)
    start = time.monotonic()
    connector.close()
    assert time.monotonic() - start < _SLACK_S


def test_a_connect_to_the_dead_host_names_it(scene, peer_address):
    end = create_end(scene.keep, scene.adapter)
    start = time.monotonic()
    with pytest.raises(ndpy.NdpyError, match=re.escape(peer_address)):
        scene.adapter.connect(end.queue_pair, scene.things["address"], timeout_s=_CONNECT_S)
    assert time.monotonic() - start < _CONNECT_S + _SLACK_S


def test_an_accept_of_a_request_of_the_dead_host_ends_when_its_time_is_up(scene):
    request, end = scene.things["request"]
    start = time.monotonic()
    # On iWARP a server's connection is up when it accepts.
    with contextlib.suppress(ndpy.NdpyError):
        request.accept(end.queue_pair, timeout_s=_CONNECT_S)
    assert time.monotonic() - start < _CONNECT_S + _SLACK_S
    request.close()
    assert time.monotonic() - start < _CONNECT_S + 2 * _SLACK_S


def test_an_accept_that_waits_for_the_dead_host_ends_when_its_time_is_up(scene):
    accepting, connector = scene.things["accepting"]
    start = time.monotonic()
    with contextlib.suppress(ndpy.NdpyError):
        accepting.result(_CONNECT_S)
    connector.close()
    assert time.monotonic() - start < _CONNECT_S + 2 * _SLACK_S


def test_the_default_policy_notices_too(scene, peer_address):
    policy = scene.clients["patient"].end.queue_pair.retry
    limit_s = _TCP_LIMIT_S if policy.gives_up_s is None else 4 * policy.gives_up_s
    assert limit_s < 100
    work = scene.ended("patient", limit_s)
    assert peer_address in str(work.error)


@pytest.mark.parametrize(("name", "probed_after_s"), [("offer", 4), ("silence", 12)])
def test_who_waits_for_the_dead_host_gets_a_reset(scene, peer_address, name, probed_after_s):
    """Everything that was sent had been acknowledged. ndpy.aio posts an empty write now and then, which is not."""
    policy = scene.clients["patient"].end.queue_pair.retry
    gives_up_s = _TCP_LIMIT_S if policy.gives_up_s is None else 4 * policy.gives_up_s
    work = scene.ended(name, gives_up_s + probed_after_s)
    assert isinstance(work.error, aio.ConnectionResetError), work.error
    assert peer_address in str(work.error)


def test_an_end_that_only_receives_notices_nothing_until_it_sends(scene):
    """As the README says. Its first request fails within the retry time."""
    client = scene.clients["idle"]
    time.sleep(max(scene.died + min(scene.limit_s, 10) - time.monotonic(), 0))
    assert client.connector.state == "established"
    start = time.monotonic()
    client.end.queue_pair.read(client.end.outbox[:0], client.remote[0:0], context=6)
    assert not _completion_of(client, 6, scene.limit_s).ok
    assert time.monotonic() - start < scene.limit_s + _SLACK_S
    client.connector.wait_disconnected(2 + _SLACK_S)


def test_the_adapter_still_works(scene):
    """Two ends on this host, after all that.
    iWARP reaches an address of this host over lo, where the adapter is not.
    """
    if scene.adapter.info.transport == "iWARP":
        region = memory(scene.keep, scene.adapter, 4096)
        assert region.length == 4096
        return
    server = traffic.Server(scene.adapter.info.name, os.environ["NDPY_ADDRESS"])
    try:
        assert traffic.run(scene.adapter, server.address, SEED, 3) > 0
    finally:
        server.close()
