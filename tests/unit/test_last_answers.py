"""How a connection ends while answers of the peer's adapter are still under way, or never come. No device is needed.

The provider without a device stands in for the moments that a real adapter reaches once in hundreds of runs.
"""

from __future__ import annotations

import time

import pytest
from racing import DEADLINE_S, wait_until

import ndpy
from ndpy import Status
from ndpy.platforms.verbs import adapter_info, connection
from ndpy.platforms.verbs.native_calls import lib

DISCONNECTED = lib.RDMA_CM_EVENT_DISCONNECTED
SERVER = ("127.0.0.1", 4791)
# Between two native calls of the tests. It is less than _LATE_ANSWERS_S.
MEANWHILE_S = 0.1


@pytest.fixture
def driver():
    return "rdma_rxe"


@pytest.fixture
def adapter(fake, monkeypatch, driver):
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: driver)
    fake.have_address()
    with fake.open() as adapter:
        yield adapter


@pytest.fixture
def connector(fake, adapter, queue_pair):
    """The connector of a connected queue pair. Its peer tells nothing by itself."""
    fake.connecting.silent = 1 << DISCONNECTED
    with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as connector:
        yield connector


@pytest.fixture
def calls(fake, connector):
    """The calls of the connection manager and of ibv_modify_qp(), in order."""
    return fake.calls_of("rdma_disconnect", "ibv_modify_qp")


def ends(connector) -> float:
    """Wait for the end of the connection. Returns after how many seconds it came."""
    begin = time.monotonic()
    connector.wait_disconnected(DEADLINE_S)
    return time.monotonic() - begin


def taken(queue) -> list[tuple[int, Status]]:
    return [(completion.context, completion.status) for completion in queue.poll()]


# ---- the peer disconnects, and an answer of its adapter comes after that ----


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        # Contract F.3.4: the peer's receive was too short, so the peer has refused the message and left.
        (lib.IBV_WC_REM_INV_REQ_ERR, Status.DATA_OVERRUN),
        (lib.IBV_WC_SUCCESS, Status.SUCCESS),
    ],
)
def test_an_answer_that_comes_after_the_peers_disconnect_counts(fake, queue, queue_pair, connector, answer, status):
    queue_pair.receive([], context=1)
    queue_pair.send([], context=2)
    queue_pair.send([], context=3)
    assert fake.connection_event(connector, DISCONNECTED)
    time.sleep(MEANWHILE_S)
    assert fake.complete(queue_pair, receive=False, status=answer)
    ends(connector)
    assert taken(queue) == [(2, status), (3, Status.CANCELED), (1, Status.CANCELED)]


def test_a_failure_that_the_program_takes_ends_the_wait(fake, monkeypatch, queue, queue_pair, connector):
    monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    queue_pair.send([], context=1)
    queue_pair.send([], context=2)
    assert fake.connection_event(connector, DISCONNECTED)
    wait_until(lambda: connector._peer_left, "the connector knows")
    assert fake.complete(queue_pair, receive=False, status=lib.IBV_WC_REM_INV_REQ_ERR)
    assert queue.wait(DEADLINE_S)[0].status is Status.DATA_OVERRUN
    assert ends(connector) < connection._FAREWELL_S / 2
    assert taken(queue) == [(2, Status.CANCELED)]


def test_an_answer_that_never_comes_is_not_waited_for_long(fake, queue, queue_pair, connector):
    queue_pair.send([], context=1)
    assert fake.connection_event(connector, DISCONNECTED)
    time.sleep(MEANWHILE_S)
    assert taken(queue) == []
    ends(connector)
    assert taken(queue) == [(1, Status.CANCELED)]


def test_the_peer_is_answered_before_the_wait(fake, monkeypatch, queue_pair, connector, calls):
    monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    queue_pair.send([], context=1)
    assert fake.connection_event(connector, DISCONNECTED)
    wait_until(lambda: calls, "the peer is answered")
    assert calls == ["rdma_disconnect"]
    assert connector.state == "established"


@pytest.mark.parametrize(
    ("driver", "posted"), [("rdma_rxe", "receive"), ("mlx5_core", "receive"), ("mlx5_core", "send")]
)
def test_receives_alone_wait_for_no_answer_and_other_drivers_have_no_late_ones(
    fake, monkeypatch, driver, posted, queue, queue_pair, connector
):
    monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    getattr(queue_pair, posted)([], context=1)
    assert fake.connection_event(connector, DISCONNECTED)
    ends(connector)
    assert taken(queue) == [(1, Status.CANCELED)]


@pytest.mark.parametrize("what", ["disconnect", "close the connector", "close the queue pair"])
def test_the_program_does_not_have_to_wait_for_late_answers(fake, monkeypatch, queue, queue_pair, connector, what):
    if what != "disconnect":
        monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    queue_pair.send([], context=1)
    assert fake.connection_event(connector, DISCONNECTED)
    wait_until(lambda: connector._peer_left, "the connector knows")
    if what == "disconnect":
        connector.disconnect(DEADLINE_S)
    elif what == "close the connector":
        connector.close()
    else:
        queue_pair.close()
    assert taken(queue) == [(1, Status.CANCELED)]


# ---- this side disconnects, and its adapter has an acknowledgement to send ----


def test_the_peer_is_told_before_the_queue_pair_is_flushed(fake, monkeypatch, queue, queue_pair, connector, calls):
    """Contract F.5.4: an adapter in the error state would not acknowledge the message any more."""
    monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    queue_pair.receive([], context=1)
    queue_pair.receive([], context=2)
    assert fake.complete(queue_pair)
    disconnecting = connector.begin_disconnect()
    assert calls == ["rdma_disconnect"]
    time.sleep(MEANWHILE_S)
    assert not disconnecting.done()
    assert fake.connection_event(connector, DISCONNECTED)
    disconnecting.result(DEADLINE_S)
    assert calls[-1] == "ibv_modify_qp"
    assert taken(queue) == [(1, Status.SUCCESS), (2, Status.CANCELED)]


def test_the_queue_pair_is_flushed_soon_although_the_peer_says_nothing(fake, queue, queue_pair, connector):
    queue_pair.receive([], context=1)
    queue_pair.send([], context=2)
    disconnecting = connector.begin_disconnect()
    begin = time.monotonic()
    wait_until(lambda: queue_pair.connection_ended, "the queue pair is flushed")
    assert time.monotonic() - begin < connection._LATE_ANSWERS_S + 1
    assert sorted(taken(queue)) == [(1, Status.CANCELED), (2, Status.CANCELED)]
    queue_pair.send([], context=3)
    assert queue.wait(DEADLINE_S)[0].status is Status.CANCELED
    assert not disconnecting.done(), "the peer does not know yet"
    assert fake.connection_event(connector, DISCONNECTED)
    disconnecting.result(DEADLINE_S)


def test_the_refusal_of_a_message_is_sent_before_the_queue_pair_is_flushed(
    fake, monkeypatch, queue, queue_pair, connector, calls
):
    """Contract F.3.4: the message was too long. The receive fails before the adapter has told the sender."""
    monkeypatch.setattr(connection, "_LATE_ANSWERS_S", 10 * DEADLINE_S)
    queue_pair.receive([], context=1)
    queue_pair.receive([], context=2)
    assert fake.complete(queue_pair, status=lib.IBV_WC_LOC_LEN_ERR)
    assert taken(queue) == [(1, Status.BUFFER_OVERFLOW)]
    time.sleep(MEANWHILE_S)
    assert calls == ["rdma_disconnect"]
    assert fake.connection_event(connector, DISCONNECTED)
    ends(connector)
    assert calls[-1] == "ibv_modify_qp"
    assert taken(queue) == [(2, Status.CANCELED)]


def test_after_a_failure_the_rest_is_cancelled_soon_although_the_peer_says_nothing(fake, queue, queue_pair, connector):
    queue_pair.receive([], context=1)
    queue_pair.receive([], context=2)
    assert fake.complete(queue_pair, status=lib.IBV_WC_LOC_LEN_ERR)
    assert len(queue.poll()) == 1
    begin = time.monotonic()
    assert queue.wait(DEADLINE_S)[0].status is Status.CANCELED
    assert time.monotonic() - begin < connection._LATE_ANSWERS_S + 1
    assert connector.state == "established", "the peer may still answer"


@pytest.mark.parametrize("driver", ["mlx5_core"])
def test_other_drivers_flush_at_once(queue, queue_pair, connector, calls, driver):
    queue_pair.receive([], context=1)
    connector.begin_disconnect()
    assert calls == ["ibv_modify_qp", "rdma_disconnect"]
    assert taken(queue) == [(1, Status.CANCELED)]


# ---- the peer's host has died ----


@pytest.mark.parametrize("driver", ["rdma_rxe", "mlx5_core"])
@pytest.mark.parametrize("program", ["waits", "disconnects"])
def test_a_dead_peer_is_not_asked_for_long_after_a_request_has_failed(
    fake, monkeypatch, queue, queue_pair, connector, driver, program
):
    monkeypatch.setattr(connection, "_FAREWELL_S", MEANWHILE_S)
    queue_pair.receive([], context=1)
    queue_pair.send([], context=2)
    assert fake.complete(queue_pair, receive=False, status=lib.IBV_WC_RETRY_EXC_ERR)
    assert taken(queue)[0] == (2, Status.IO_TIMEOUT)
    assert connector.state == "established"
    if program == "disconnects":
        connector.disconnect(DEADLINE_S)
    assert ends(connector) < MEANWHILE_S + 1
    assert connector.state == "disconnected"
    # The manager's own news comes when its retries have run out.
    assert fake.connection_event(connector, DISCONNECTED)
    assert taken(queue) == [(1, Status.CANCELED)]


def test_a_peer_that_lives_has_two_seconds_to_answer(fake, queue, queue_pair, connector):
    assert connection._FAREWELL_S == 2.0
    queue_pair.send([], context=1)
    assert fake.complete(queue_pair, receive=False, status=lib.IBV_WC_RETRY_EXC_ERR)
    assert len(queue.poll()) == 1
    with pytest.raises(ndpy.TimeoutError):
        connector.wait_disconnected(1.0)
    assert fake.connection_event(connector, DISCONNECTED)
    assert ends(connector) < 0.8


def test_nobody_looks_at_the_clock_after_the_end(fake, adapter, queue_pair, connector):
    queue_pair.send([], context=1)
    assert fake.connection_event(connector, DISCONNECTED)
    ends(connector)
    wait_until(lambda: not adapter._events._regular, "the thread sleeps without a limit again")
