"""A driver whose rdma_connect() waits for the peer's host (Quirk.SIW_CONNECT_BLOCKS). No device is needed.

The provider notes a fault if an identifier is destroyed while the call uses it, and objects that are left at the end.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
from kit.helpers import wait_until
from racing import DEADLINE_S

import ndpy
from ndpy.platforms.verbs import adapter_info
from ndpy.platforms.verbs.native_calls import lib

SERVER = ("127.0.0.1", 4791)
# A connect with this deadline times out. Nothing else may take so long.
SHORT_S = 0.2
LONG_S = 5.0


@pytest.fixture
def adapter(fake, monkeypatch):
    """An iWARP adapter in whose rdma_connect() the peer's host is silent."""
    monkeypatch.setattr(adapter_info, "_driver", lambda name, vendor: "siw")
    fake.have_address()
    fake.speak_iwarp()
    fake.connecting.blocks = 1
    with fake.open() as adapter:
        yield adapter
        start = time.monotonic()
    assert time.monotonic() - start < LONG_S
    assert not fake.connecting.blocked


@pytest.fixture
def connector(adapter):
    with adapter.create_connector() as connector:
        yield connector


@pytest.fixture
def connecting(fake, connector, queue_pair):
    """An attempt that waits in rdma_connect()."""
    pending = connector.begin_connect(queue_pair, SERVER)
    wait_until(lambda: fake.connecting.blocked, "rdma_connect() was called")
    return pending


def assert_given_up(fake) -> None:
    wait_until(lambda: not fake.connecting.blocked, "the call has ended")


def test_a_connect_ends_when_its_time_is_up_and_names_the_peer(fake, adapter, queue_pair):
    start = time.monotonic()
    with pytest.raises(ndpy.TimeoutError, match=r"127\.0\.0\.1 port 4791 has not answered within 0\.2 s"):
        adapter.connect(queue_pair, SERVER, timeout_s=SHORT_S)
    assert time.monotonic() - start < LONG_S
    assert_given_up(fake)


def test_the_attempt_goes_on_when_the_host_answers(fake, connector, connecting):
    fake.connecting.blocks = 0
    connecting.result(DEADLINE_S)
    connector.complete_connect(DEADLINE_S)
    connector.disconnect(DEADLINE_S)


def test_events_of_others_are_handled_meanwhile(fake, adapter, connecting):
    with adapter.listen(("127.0.0.1", 0)) as listener:
        fake.request(listener)
        listener.get_request(LONG_S).close()
    assert not connecting.done()


@pytest.mark.parametrize("what", ["cancel", "connector", "queue pair"])
def test_whatever_ends_the_attempt_ends_the_call(fake, connector, queue_pair, connecting, what):
    {"cancel": connecting.cancel, "connector": connector.close, "queue pair": queue_pair.close}[what]()
    with pytest.raises(ndpy.CanceledError):
        connecting.result(0)
    assert_given_up(fake)


def test_the_queue_pair_serves_a_second_attempt(fake, adapter, queue_pair, connecting):
    connecting.cancel()
    assert_given_up(fake)
    fake.connecting.blocks = 0
    with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as connector:
        assert connector.state == "established"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ETIMEDOUT, ndpy.TimeoutError),
        (errno.ECONNREFUSED, ndpy.ConnectionRefusedError),
        (errno.EHOSTUNREACH, ndpy.AddressUnreachableError),
        (errno.ENOMEM, ndpy.InsufficientResourcesError),
    ],
)
def test_a_failure_of_the_call_ends_the_attempt(fake, connector, queue_pair, connecting, number, kind):
    fake.connecting.failure, fake.connecting.blocks = number, 0
    with pytest.raises(kind) as caught:
        connecting.result(DEADLINE_S)
    assert caught.value.native == number
    assert connector.state == "idle"
    # The same connector and queue pair can try again.
    fake.connecting.failure = 0
    connector.connect(queue_pair, SERVER, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("closes", [False, True])
def test_the_answer_may_come_before_the_call_returns(fake, connector, connecting, closes):
    fake.connection_event(connector, lib.RDMA_CM_EVENT_ESTABLISHED)
    connecting.result(DEADLINE_S)
    connector.complete_connect(DEADLINE_S)
    assert connector.state == "established"
    if not closes:
        fake.connecting.failure, fake.connecting.blocks = errno.ECONNRESET, 0
        wait_until(lambda: not fake.connecting.blocked, "the call has returned")
        assert connector.state == "established"


def test_a_refusal_may_come_before_the_call_returns(fake, connector, connecting):
    fake.connection_event(connector, lib.RDMA_CM_EVENT_REJECTED, -errno.ECONNREFUSED)
    with pytest.raises(ndpy.ConnectionRefusedError):
        connecting.result(DEADLINE_S)
    assert_given_up(fake)


def test_the_end_of_a_former_call_does_not_end_the_next_attempt(fake, connector, queue_pair, connecting):
    """The connector is free again before the thread of its former call has heard of it."""
    begun = []
    connecting.add_done_callback(lambda _: begun.append(connector.begin_connect(queue_pair, SERVER)))
    fake.connection_event(connector, lib.RDMA_CM_EVENT_UNREACHABLE, -errno.ETIMEDOUT)
    with pytest.raises(ndpy.TimeoutError):
        connecting.result(DEADLINE_S)
    wait_until(lambda: fake.connecting.calls == 2 and fake.connecting.blocked == 1, "only the second call is left")
    fake.connecting.blocks = 0
    begun[0].result(DEADLINE_S)


def test_a_signal_of_the_program_does_not_end_the_call(fake, connecting):
    assert fake.connecting.blocked
    for thread in os.listdir("/proc/self/task"):
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        if blocked >> 9 & 1 and blocked >> 1 & 1:  # SIGUSR1 and SIGINT
            return
    pytest.fail("no thread blocks the signals")


def test_a_dropped_connector_gives_up(fake, adapter, queue_pair):
    connector = adapter.create_connector()
    connector.begin_connect(queue_pair, SERVER)
    wait_until(lambda: fake.connecting.blocked, "rdma_connect() was called")
    queue_pair.connector = None
    with pytest.warns(ResourceWarning):
        del connector
        gc.collect()
    assert_given_up(fake)


def test_a_forked_child_leaves_the_call_to_its_parent(fake, connector, connecting):
    child = os.fork()
    if not child:
        connector.close()
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert fake.connecting.blocked
    assert not connecting.done()


def test_without_more_threads_the_attempt_goes_on_in_the_adapters_thread(fake, adapter, queue_pair, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    fake.connecting.blocks = 0
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as connector:
        assert connector.state == "established"
