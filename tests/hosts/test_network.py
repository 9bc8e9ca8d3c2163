"""Traffic over a bad network: every byte arrives as it was sent, or the connection ends and says so, and nothing hangs."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from helpers import DEADLINE_S, SEED, rounds
from hosts import traffic

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
