"""Traffic over a bad network: every byte arrives as it was sent, or the connection ends and says so, and nothing
hangs.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from contextlib import closing

import pytest
from hosts import traffic
from hosts.conftest import NETDEV
from kit.helpers import DEADLINE_S, SEED, only_under_stress, require, rounds, sample, wait_until
from kit.quirks import expect_quirk

import ndpy
from ndpy.vocabulary.quirks import Quirk

pytestmark = pytest.mark.timeout(300)


def test_traffic_over_a_good_network(adapter, server):
    assert traffic.run(adapter, server.address, SEED, rounds(400, 60)) > 0


@pytest.mark.parametrize(
    ("netem", "steps"),
    sample(
        [
            ("loss 1%", 40),
            ("delay 50ms", 15),
            ("duplicate 5%", 60),
            ("delay 5ms 2ms reorder 75% 50%", 30),
            ("loss 1% delay 10ms 3ms duplicate 1%", 15),
            ("loss 0.1%", 60),
            ("corrupt 0.5%", 30),
        ],
        5,
    ),
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_byte_arrives(adapter, server, network, netem, steps):
    with network.disturbed(*netem.split()):
        # Few long messages: a lost packet of rxe costs its whole timeout.
        assert traffic.run(adapter, server.address, (SEED, netem), rounds(5 * steps, steps), longest=20_000) > 0


def _work(client: traffic.Client, until: threading.Event) -> BaseException | None:
    """Small operations until told to stop. Returns what ended them."""
    try:
        while not until.is_set():
            client.step(4096)
        client.compare()
    except (ndpy.NdpyError, traffic.Mismatch) as error:
        return error
    return None


@contextlib.contextmanager
def in_background(client):
    """Operations in a thread, during the block. Yields a list that gets what ended them."""
    stop = threading.Event()
    ended: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: ended.append(_work(client, stop)), daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join(client.limit_s + DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("seconds", sample([1, 5], 1))
def test_a_link_that_comes_back_soon_ends_no_connection(adapter, server, network, seconds):
    with closing(traffic.Client(adapter, server.address, random.Random(SEED), retry=_patient(adapter))) as client:
        with in_background(client) as ended:
            time.sleep(1)
            with network.disturbed("loss", "100%"):
                time.sleep(seconds)
            time.sleep(2)
        assert ended == [None]


def _patient(adapter):
    """A policy that lasts longer than the 5 s of the test: 7 times 4.096 us * 2^19."""
    if ndpy.Capability.RETRY_POLICY not in adapter.info.capabilities:
        return None
    return ndpy.RetryPolicy(ack_timeout=19, retry_count=6)


@only_under_stress
def test_a_bind_behind_a_request_whose_acknowledgement_is_lost(request, adapter, server, network):
    """The adapter repeats the request, and must not bind once more."""
    require(adapter, ndpy.Capability.MEMORY_WINDOWS)
    expect_quirk(request, adapter, Quirk.RXE_BINDS_AGAIN)
    with closing(traffic.Client(adapter, server.address, random.Random(SEED), retry=_patient(adapter))) as client:
        end = client.end
        with adapter.create_memory_window() as window:
            with network.mute():
                end.queue_pair.write(end.outbox[:8], client.remote[:8], context=1)
                end.queue_pair.bind(window, end.outbox[:64], ndpy.Access.REMOTE_READ, context=2)
                end.queue_pair.write(end.outbox[8:16], client.remote[8:16], context=3)
                with pytest.raises(ndpy.TimeoutError):
                    end.cq.wait(5)
            found: list[ndpy.Completion] = []
            while len(found) < 3:
                found += end.cq.wait(30)
            assert [(completion.context, completion.status) for completion in found] == [
                (context, ndpy.Status.SUCCESS) for context in (1, 2, 3)
            ]
            end.queue_pair.invalidate(window, context=4)
            assert end.cq.wait(30)[0].ok
        client.compare()


def test_a_link_that_stays_away_ends_the_connection_within_the_retry_time(adapter, server, network, peer_address):
    """60 s. TCP, below iWARP, tries for a quarter of an hour: there the connection lives on."""
    with closing(traffic.Client(adapter, server.address, random.Random(SEED), limit_s=120)) as client:
        gives_up_s = client.end.queue_pair.retry.gives_up_s
        seconds = rounds(60, 15 if gives_up_s is None else 25)
        with in_background(client) as ended:
            time.sleep(1)
            with network.disturbed("loss", "100%"):
                start = time.monotonic()
                while not ended and time.monotonic() < start + seconds:
                    time.sleep(0.1)
                lasted = time.monotonic() - start
                if gives_up_s is not None:
                    (error,) = ended
                    # InfiniBand allows four times the timeout. The program has to take the completion, in an emulated
                    # machine.
                    assert lasted < 4 * gives_up_s + 2, (lasted, gives_up_s)
                    assert isinstance(error, ndpy.NdpyError), error
                    assert peer_address in str(error)
                    client.connector.wait_disconnected(2 + DEADLINE_S)
                time.sleep(max(start + seconds - time.monotonic(), 0))
            if gives_up_s is None:
                before = client.bytes
                wait_until(lambda: client.bytes > before, "an operation after the link came back", 100)
        if gives_up_s is None:
            assert ended == [None]
    assert traffic.run(adapter, server.address, SEED, 10) > 0


def test_a_path_that_shrinks_ends_long_transfers_and_a_smaller_link_mtu_helps(adapter, server, network, peer_address):
    """Frames of more than 1500 bytes get lost. RoCE has no way to make packets smaller on a connection."""
    with closing(traffic.Client(adapter, server.address, random.Random(SEED))) as client:
        gives_up_s = client.end.queue_pair.retry.gives_up_s
        if gives_up_s is None:
            pytest.skip(f"{adapter.info.name} does not claim RETRY_POLICY: TCP finds the size of its segments itself")
        client.write()
        with network.narrow(1500):
            client.write(1000)
            start = time.monotonic()
            client.end.queue_pair.write(client.end.outbox, client.remote[: traffic.MESSAGE], context=9)
            # The receives of the connection are cancelled with it.
            completion = client.end.cq.wait(4 * gives_up_s + DEADLINE_S)[0]
            assert completion.context == 9
            assert time.monotonic() - start < 4 * gives_up_s + 2
            with pytest.raises(ndpy.NdpyError, match=peer_address):
                completion.raise_for_status()
            client.connector.wait_disconnected(2 + DEADLINE_S)
            network.run("ip", "link", "set", NETDEV, "mtu", 1500)
            assert traffic.run(adapter, server.address, SEED, 10) > 0


def test_tcp_below_iwarp_adapts_to_a_smaller_link_mtu(adapter, server, network):
    if ndpy.Capability.RETRY_POLICY in adapter.info.capabilities:
        pytest.skip(f"on {adapter.info.name} packets have one size for the whole connection")
    with closing(traffic.Client(adapter, server.address, random.Random(SEED))) as client:
        client.write()
        network.run("ip", "link", "set", NETDEV, "mtu", 1500)
        for _ in range(10):
            client.step()
        client.compare()


@pytest.mark.timeout(7200)
def test_random_connections_over_a_lossy_network(adapter, server, network, nothing_leaks):
    """10,000 connections with NDPY_STRESS=1. Each transfers and ends. 1 % of the frames get lost in each direction."""
    count, threads = rounds(10_000, 40), 12
    numbers = iter(range(count))
    lock = threading.Lock()
    failures: list[str] = []
    done = 0

    def work() -> None:
        nonlocal done
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or len(failures) > 10:
                return
            try:
                traffic.run(adapter, server.address, (SEED, number), number % 4, longest=8192)
            except (ndpy.NdpyError, traffic.Mismatch) as error:
                failures.append(f"connection {number}: {type(error).__name__}: {error}")
            with lock:
                done += 1
                if done % 500 == 0:
                    print(f"{done} of {count} connections", flush=True)

    with network.disturbed("loss", "1%"):
        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert failures == []
    assert done == count
    assert wait_until(lambda: server.served == count, "the end of the last connection there")
