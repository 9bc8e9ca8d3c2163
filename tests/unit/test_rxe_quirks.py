"""ndpy's behaviour with the quirks of rxe, or of one version of rxe. No device is needed.

tests/verbs/programs shows the behaviour of rxe itself.
"""

from __future__ import annotations

import time

import pytest
from kit.helpers import Replacing
from ndpy._verbs import lib
from racing import DEADLINE_S, wait_until

import ndpy
from ndpy import Access, Notify, RetryPolicy, Status
from ndpy.platforms.verbs import adapter_info, connection
from ndpy.platforms.verbs.endpoint import with_defaults

QUIET_S = 0.2


@pytest.fixture
def adapter(fake, monkeypatch):
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: "rdma_rxe")
    with fake.open() as adapter:
        yield adapter


@pytest.fixture
def queue(adapter):
    with adapter.create_completion_queue(32) as queue:
        yield queue


@pytest.fixture
def queue_pair(adapter, queue):
    with adapter.create_queue_pair(queue) as queue_pair:
        queue_pair._begin_connection()
        yield queue_pair


def forged(region: ndpy.MemoryRegion) -> ndpy.Sge:
    return ndpy.Sge(region, region.address, 8, region.local_token ^ 0x5A00)


# ---- requests that fail because of their own memory ----


def flushed(fake, queue_pair, requests):
    """The statuses of that many requests of the initiator queue when the provider flushes them."""
    for _ in range(requests):
        assert fake.complete(queue_pair, receive=False, status=lib.IBV_WC_WR_FLUSH_ERR)
    return [completion.status for completion in queue_pair.initiator_cq.poll()]


def test_the_first_flushed_request_failed_if_its_memory_is_at_fault(fake, adapter, queue, queue_pair):
    with adapter.register(bytearray(8)) as region:
        queue_pair.receive(region)
        for element in (forged(region), forged(region), region):
            queue_pair.send(element)
        assert fake.complete(queue_pair, status=lib.IBV_WC_WR_FLUSH_ERR)
        assert [completion.status for completion in queue.poll()] == [Status.CANCELED]
        assert flushed(fake, queue_pair, 3) == [Status.ACCESS_VIOLATION, Status.CANCELED, Status.CANCELED]


def test_flushed_requests_are_cancelled_if_their_memory_is_in_order(fake, adapter, queue_pair):
    with adapter.register(bytearray(8)) as region:
        queue_pair.send(region)
        queue_pair.send(forged(region))
        assert flushed(fake, queue_pair, 2) == [Status.CANCELED, Status.CANCELED]


def test_what_is_flushed_after_the_end_of_the_connection_is_cancelled(fake, adapter, queue, queue_pair):
    with adapter.register(bytearray(8)) as region:
        queue_pair.send(forged(region))
        queue_pair._end_connection()
        assert [completion.status for completion in queue.poll()] == [Status.CANCELED]


def test_another_driver_flushes_nothing_that_failed(fake, monkeypatch):
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: "mlx5_core")
    with (
        fake.open() as adapter,
        adapter.create_completion_queue(32) as queue,
        adapter.register(bytearray(8)) as region,
        adapter.create_queue_pair(queue) as queue_pair,
    ):
        queue_pair._begin_connection()
        queue_pair.send(forged(region))
        assert flushed(fake, queue_pair, 1) == [Status.CANCELED]


# ---- notifications ----


def test_a_failure_that_raises_no_event_notifies_for_solicited(fake, queue, queue_pair):
    queue_pair.receive([])
    queue_pair.receive([])
    armed = queue.arm(Notify.SOLICITED)
    fake.disarm(queue)
    assert fake.complete(queue_pair)
    with pytest.raises(ndpy.TimeoutError):
        armed.result(QUIET_S)
    assert fake.complete(queue_pair, status=lib.IBV_WC_WR_FLUSH_ERR)
    armed.result(DEADLINE_S)
    # G.2.5: a completion that has notified does not notify again.
    again = queue.arm(Notify.SOLICITED)
    with pytest.raises(ndpy.TimeoutError):
        again.result(QUIET_S)
    assert len(queue.poll()) == 2


def test_nobody_looks_for_failures_when_none_waits_for_them(fake, queue, queue_pair):
    queue_pair.receive([])
    armed = queue.arm(Notify.SOLICITED)
    armed.cancel()
    wait_until(lambda: not queue._adapter._events._regular, "the thread sleeps without a limit again")


@pytest.mark.parametrize("kind", [Notify.ANY, Notify.SOLICITED])
def test_a_late_event_of_an_earlier_arming_does_not_notify(fake, queue, queue_pair, kind):
    """This happens if a wait() armed the queue and found its completion before the event came."""
    for _ in range(2):
        queue_pair.receive([])
    fake.complete(queue_pair)
    assert len(queue.poll()) == 1
    armed = queue.arm(kind)
    fake.spurious_event(queue)
    with pytest.raises(ndpy.TimeoutError):
        armed.result(QUIET_S)
    fake.complete(queue_pair, status=lib.IBV_WC_WR_FLUSH_ERR)
    armed.result(DEADLINE_S)


# ---- a peer's wrong access ----


def test_an_access_event_leaves_the_queue_pair_to_the_driver_which_has_yet_to_answer(fake, adapter, queue, queue_pair):
    queue_pair.receive([])
    fake.device_event(adapter, lib.IBV_EVENT_QP_ACCESS_ERR, queue_pair)
    wait_until(lambda: queue_pair.connection_ended, "the connection has ended")
    time.sleep(QUIET_S)
    assert queue.poll() == [], "ibv_modify_qp() would have flushed the receive"
    assert "access" in queue_pair.failure


@pytest.mark.parametrize(("kind", "iwarp"), [("IBV_EVENT_QP_FATAL", False), ("IBV_EVENT_QP_ACCESS_ERR", True)])
def test_other_events_end_the_queue_pair(fake, kind, iwarp):
    if iwarp:
        fake.speak_iwarp()
    with fake.open_pair() as (adapter, queue, queue_pair):
        queue_pair._begin_connection()
        queue_pair.receive([])
        fake.device_event(adapter, getattr(lib, kind), queue_pair)
        (completion,) = queue.wait(DEADLINE_S)
        assert completion.status == Status.CANCELED


# ---- memory on demand ----


def test_memory_on_demand_is_pinned(fake, monkeypatch):
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: "rdma_rxe")
    with (
        fake.open(odp_general=1, odp_connected=0xF) as adapter,
        adapter.register(bytearray(64), Access.REMOTE_WRITE | Access.ON_DEMAND) as region,
    ):
        assert ndpy.Capability.ON_DEMAND_PAGING in adapter.info.capabilities
        assert region.access == Access.REMOTE_WRITE | Access.ON_DEMAND
        assert not fake.seen.access & lib.IBV_ACCESS_ON_DEMAND


# ---- retries ----


@pytest.mark.parametrize(("driver", "count"), [("rdma_rxe", 6), ("mlx5_core", 7)])
@pytest.mark.parametrize("way", ["without a policy", "with 7", "with 3"])
def test_no_count_of_retries_makes_rxe_try_for_ever(fake, monkeypatch, driver, count, way):
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: driver)
    asked = {"without a policy": RetryPolicy(), "with 7": RetryPolicy(retry_count=7), "with 3": RetryPolicy(3)}[way]
    with fake.open() as adapter:
        assert with_defaults(adapter, asked).retry_count == min(count, asked.retry_count or 7)


@pytest.mark.parametrize(("driver", "count"), [("rdma_rxe", 6), ("mlx5_core", 7)])
def test_the_peer_is_asked_for_a_finite_count_too(fake, monkeypatch, driver, count):
    """The connection manager tells both ends the client's count."""
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: driver)
    fake.have_address()
    asked = []

    def connect(identifier, parameters):
        asked.append(parameters.retry_count)
        return lib.rdma_connect(identifier, parameters)

    monkeypatch.setattr(connection, "lib", Replacing(lib, rdma_connect=connect))
    with fake.open_pair() as (adapter, _, queue_pair):
        adapter.connect(queue_pair, ("127.0.0.1", 4791), timeout_s=DEADLINE_S).close()
    assert asked == [count]
