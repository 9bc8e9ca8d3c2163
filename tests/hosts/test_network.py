"""Traffic over a bad network: every byte arrives as it was sent, or the connection ends and says so, and nothing hangs."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from helpers import DEADLINE_S, SEED, rounds, wait_until
from hosts import traffic
from hosts.conftest import MTU, NETDEV

import ndpy

pytestmark = pytest.mark.timeout(300)


def test_traffic_over_a_good_network(adapter, server):
    assert traffic.run(adapter, server.address, SEED, rounds(400, 60)) > 0


@pytest.mark.parametrize(
    ("netem", "steps"),
    [
        ("loss 0.1%", 60),
        ("loss 1%", 40),
        ("delay 50ms", 15),
        ("duplicate 5%", 60),
        ("delay 5ms 2ms reorder 75% 50%", 30),
        ("corrupt 0.5%", 30),
        ("loss 1% delay 10ms 3ms duplicate 1%", 15),
    ],
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


@pytest.mark.parametrize("seconds", [1, 5])
def test_a_link_that_comes_back_soon_ends_no_connection(adapter, server, network, seconds):
    client = traffic.Client(adapter, server.address, random.Random(SEED), retry=_patient(adapter))
    with in_background(client) as ended:
        time.sleep(1)
        with network.disturbed("loss", "100%"):
            time.sleep(seconds)
        time.sleep(2)
    assert ended == [None]
    client.close()


def _patient(adapter):
    """A policy that lasts longer than the 5 s of the test: 7 times 4.096 us * 2^19."""
    if ndpy.Capability.RETRY_POLICY not in adapter.info.capabilities:
        return None
    return ndpy.RetryPolicy(ack_timeout=19, retry_count=6)


def test_a_link_that_stays_away_ends_the_connection_within_the_retry_time(adapter, server, network, peer_address):
    """60 s. TCP, below iWARP, tries for a quarter of an hour: there the connection lives on."""
    client = traffic.Client(adapter, server.address, random.Random(SEED), limit_s=120)
    gives_up_s = client.end.queue_pair.retry.gives_up_s
    seconds = rounds(60, 60 if gives_up_s is None else 15)
    with in_background(client) as ended:
        time.sleep(1)
        with network.disturbed("loss", "100%"):
            start = time.monotonic()
            while not ended and time.monotonic() < start + seconds:
                time.sleep(0.1)
            lasted = time.monotonic() - start
            if gives_up_s is not None:
                (error,) = ended
                # InfiniBand allows four times the timeout. The program has to take the completion, in an emulated machine.
                assert lasted < 4 * gives_up_s + 2, (lasted, gives_up_s)
                assert isinstance(error, ndpy.NdpyError), error
                assert peer_address in str(error)
                client.connector.wait_disconnected(2 + DEADLINE_S)
                time.sleep(max(start + seconds - time.monotonic(), 0))
        if gives_up_s is None:
            wait_until(lambda: client.bytes, "operations")
            before = client.bytes
            wait_until(lambda: client.bytes > before, "an operation after the link came back", 100)
    if gives_up_s is None:
        assert ended == [None]
    client.close()
    assert traffic.run(adapter, server.address, SEED, 10) > 0


def test_a_path_that_shrinks_ends_long_transfers_and_a_new_connection_adapts(adapter, server, network, peer_address):
    """RoCE has no way to make packets smaller on a connection. TCP has."""
    client = traffic.Client(adapter, server.address, random.Random(SEED), limit_s=60)
    client.write()
    network.run("ip", "link", "set", NETDEV, "mtu", 1500)
    try:
        start = time.monotonic()
        gives_up_s = client.end.queue_pair.retry.gives_up_s
        offset = 100
        memoryview(client.end.outbox.buffer)[:] = bytes(traffic.MESSAGE)
        client.end.queue_pair.write(client.end.outbox, client.remote[offset : offset + traffic.MESSAGE], context=9)
        (completion,) = client.end.cq.wait(60)
        if gives_up_s is None:
            assert completion.ok, completion
            client.shadow[offset : offset + traffic.MESSAGE] = bytes(traffic.MESSAGE)
            client.compare()
        else:
            assert time.monotonic() - start < 4 * gives_up_s + 2
            with pytest.raises(ndpy.NdpyError, match=peer_address):
                completion.raise_for_status()
            client.connector.wait_disconnected(2 + DEADLINE_S)
        client.close()
        assert traffic.run(adapter, server.address, SEED, 10) > 0
    finally:
        network.run("ip", "link", "set", NETDEV, "mtu", MTU)


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
