"""Objects that are closed, and processes that end, while requests are in flight.

softnd's delays make these races likely. Each test has a private softnd and fails if an object or a handle is left
(own_softnd.py). NDPY_STRESS=1 runs the full counts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time

import pytest
from kit.helpers import DEADLINE_S, Keeper, create_end, host_of, memory, require, rounds, sample, wait_until
from kit.scenarios import slow_call, slow_completions
from kit.threads import Elsewhere, beside
from overlapped_requests import EndingCounts, outcome, pause
from own_softnd import SOFTND, child, opened

import ndpy
from ndpy import Notify


def test_closing_the_adapter_ends_the_registrations_under_way(softnd):
    adapter = softnd.open(slow_call("reg_mr", 400), slow_call("cancel", 30))
    endings = EndingCounts()
    pendings = [endings.watch(adapter.begin_register(bytearray(64))) for _ in range(20)]
    adapter.close()
    endings.check()
    assert {type(outcome(pending)) for pending in pendings} == {ndpy.CanceledError}


def test_closing_the_adapter_while_registrations_end(softnd, rng):
    endings = EndingCounts()
    for _ in range(rounds(200, 15)):
        adapter = softnd.open(slow_call("reg_mr", 2))
        pendings = [endings.watch(adapter.begin_register(bytearray(64))) for _ in range(10)]
        until = time.perf_counter() + rng.random() * 0.006
        while time.perf_counter() < until:
            pass
        with contextlib.suppress(ndpy.DeviceBusyError):
            adapter.close()
        for pending in pendings:
            result = outcome(pending)
            if not isinstance(result, ndpy.NdpyError):
                result.close()
        adapter.close()
    endings.check()


def test_closing_a_region_that_is_being_deregistered_waits_for_it(softnd):
    with opened(softnd, *slow_completions(50)) as (adapter, _):
        endings = EndingCounts()
        regions = [adapter.register(bytearray(64)) for _ in range(5)]
        pendings = [endings.watch(region.begin_deregister()) for region in regions]
        for region in regions:
            region.close()
            assert region.closed
        endings.check()
        assert [outcome(pending) for pending in pendings] == [None] * 5


@pytest.mark.parametrize("cancel_ms", [0, 40])
def test_closing_a_completion_queue_ends_all_that_wait_for_it(softnd, cancel_ms):
    with opened(softnd, slow_call("cancel", cancel_ms)) as (adapter, keep):
        for _ in range(rounds(40, 4)):
            endings = EndingCounts()
            queue = adapter.create_completion_queue(16)
            poller = keep(ndpy.Poller())
            poller.add(queue)
            with pytest.raises(ndpy.TimeoutError):
                poller.wait(0)

            waiting = [Elsewhere(lambda queue=queue: queue.wait(DEADLINE_S)).start() for _ in range(3)]
            armed = [endings.watch(queue.arm(kind)) for kind in (Notify.ANY, Notify.SOLICITED, Notify.ERRORS)]
            wait_until(lambda queue=queue: len(queue._waiters) == 3, "the threads wait")
            queue.close()
            assert [type(one.outcome()) for one in waiting] == [ndpy.ClosedError] * 3
            endings.check()
            assert {type(outcome(pending)) for pending in armed} == {ndpy.CanceledError}
            poller.close()


@pytest.mark.parametrize("cancel_ms", [0, 40])
def test_closing_a_shared_receive_queue_ends_its_notifications(softnd, cancel_ms):
    with opened(softnd, slow_call("cancel", cancel_ms)) as (adapter, keep):
        require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
        endings = EndingCounts()
        region = memory(keep, adapter, 64)
        queue = adapter.create_shared_receive_queue(8, threshold=2)
        for _ in range(4):
            queue.receive(region)
        armed = [endings.watch(queue.arm()) for _ in range(5)]
        assert not any(pending.done() for pending in armed)
        queue.close()
        endings.check()
        assert {type(outcome(pending)) for pending in armed} == {ndpy.CanceledError}


def test_closing_a_shared_receive_queue_while_others_arm_and_post(softnd):
    with opened(softnd, slow_call("cancel", 1)) as (adapter, keep):
        require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
        region = memory(keep, adapter, 64)
        for _ in range(rounds(100, 10)):
            endings = EndingCounts()
            queue = adapter.create_shared_receive_queue(512, threshold=2)
            for _ in range(4):
                queue.receive(region)
            running = threading.Barrier(3)

            def work(call, running=running) -> None:
                running.wait(DEADLINE_S)
                with contextlib.suppress(ndpy.ClosedError):
                    for _ in range(200):
                        call()

            arm = functools.partial(work, lambda queue=queue, endings=endings: endings.watch(queue.arm()))
            with beside(arm, functools.partial(work, lambda queue=queue: queue.receive(region))):
                running.wait(DEADLINE_S)
                queue.close()
            endings.check()


def test_closing_a_listener_ends_all_who_asked(softnd):
    with opened(softnd, slow_call("cancel", 30)) as (adapter, _keep):
        endings = EndingCounts()
        listener = adapter.listen((host_of(adapter), 0))
        asked = [endings.watch(listener.begin_get_request()) for _ in range(5)]
        listener.close()
        endings.check()
        assert {type(outcome(pending)) for pending in asked} == {ndpy.CanceledError}


def test_closing_a_listener_while_connections_come(softnd, rng):
    with opened(softnd) as (adapter, keep):
        endings = EndingCounts()
        cq = keep(adapter.create_completion_queue(64))
        for _ in range(rounds(100, 10)):
            own = Keeper()
            listener = adapter.listen((host_of(adapter), 0))
            asked = [endings.watch(listener.begin_get_request()) for _ in range(3)]
            connecting = []
            for _ in range(3):
                client = own(adapter.create_connector())
                connecting.append(
                    endings.watch(client.begin_connect(own(adapter.create_queue_pair(cq)), listener.address))
                )
            pause(rng, 0.004)
            listener.close()
            for pending in asked:
                result = outcome(pending)
                if not isinstance(result, ndpy.CanceledError):
                    result.close()
            for pending in connecting:
                assert isinstance(outcome(pending), ndpy.ProviderError)
            own.close()
        endings.check()


def test_a_closed_listener_has_no_address(softnd):
    with opened(softnd) as (adapter, _):
        listener = adapter.listen((host_of(adapter), 0))
        listener.close()
        with pytest.raises(ndpy.ClosedError):
            assert listener.address


@pytest.mark.parametrize("state", ["connecting", "accepting", "completing", "disconnecting", "watching"])
@pytest.mark.parametrize("who", ["connector", "queue pair"])
def test_closing_ends_what_a_connector_has_under_way(softnd, state, who):
    with (
        opened(softnd) as (adapter, keep),
        opened(softnd, *slow_completions(150), slow_call("cancel", 20)) as (slow, own),
    ):
        endings = EndingCounts()
        fast = create_end(keep, adapter)
        end = create_end(own, slow)
        if state == "accepting":
            listener = own(slow.listen((host_of(slow), 0)))
            connector = keep(adapter.create_connector())
            endings.watch(connector.begin_connect(fast.queue_pair, listener.address))
            closing = own(listener.get_request(DEADLINE_S))
            pending = closing.begin_accept(end.queue_pair)
        else:
            listener = keep(adapter.listen((host_of(adapter), 0)))
            closing = own(slow.create_connector())
            pending = closing.begin_connect(end.queue_pair, listener.address)
            if state != "connecting":
                server = keep(listener.get_request(DEADLINE_S))
                accepting = endings.watch(server.begin_accept(fast.queue_pair))
                pending.result(DEADLINE_S)
                pending = closing.begin_complete_connect()
            if state in ("disconnecting", "watching"):
                pending.result(DEADLINE_S)
                accepting.result(DEADLINE_S)
                pending = closing.begin_wait_disconnected() if state == "watching" else closing.begin_disconnect()
        endings.watch(pending)
        assert not pending.done()
        if who == "connector":
            closing.close()
        else:
            end.queue_pair.close()
        result = outcome(pending)
        ended_well = who == "queue pair" and state in ("disconnecting", "watching")
        assert result is None if ended_well else isinstance(result, ndpy.CanceledError)
        keep.close()
        endings.check()


def test_rejecting_an_offer_ends_the_complete_connect_that_was_begun(softnd):
    with opened(softnd) as (adapter, keep), opened(softnd, *slow_completions(300)) as (slow, own):
        server_end, end = create_end(keep, adapter), create_end(own, slow)
        listener = keep(adapter.listen((host_of(adapter), 0)))
        client = own(slow.create_connector())
        connecting = client.begin_connect(end.queue_pair, listener.address)
        server = keep(listener.get_request(DEADLINE_S))
        server.begin_accept(server_end.queue_pair)
        connecting.result(DEADLINE_S)
        completing = client.begin_complete_connect()
        with contextlib.suppress(ndpy.ProviderError):
            client.reject()
        assert isinstance(outcome(completing), ndpy.CanceledError)


def test_an_end_that_is_handled_after_close_finds_nobody(softnd, monkeypatch):
    """The adapter's thread has taken the end of a connect. It waits for a lock that close() holds."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with opened(softnd) as (adapter, keep):
        listener = keep(adapter.listen((host_of(adapter), 0)))
        end = create_end(keep, adapter)
        client = adapter.create_connector()
        connecting = client.begin_connect(end.queue_pair, listener.address)
        server = keep(listener.get_request(DEADLINE_S))
        (request,) = client._requests
        with client._state_lock:
            server.reject()
            wait_until(lambda: not request.running, "the thread takes the end")
            client.close()
        assert isinstance(outcome(connecting), ndpy.CanceledError)
        # The thread handles one end after the other. Once this one is handled, the connect's end has been handled too.
        succeeded = adapter.begin_register(bytearray(64))
        succeeded.result(DEADLINE_S).close()
    assert not raised


EVERYTHING_IN_FLIGHT = """
import os, threading
import ndpy
from kit.helpers import connect_pair, create_end, host_of, wait_until
from kit.scenarios import slow_call, write_scenario

keep = []
adapter = ndpy.open_adapter("127.0.0.1")
os.environ["NDPY_FAULTS"] = str(write_scenario(os.environ["TEMP"], slow_call("reg_mr", 60000)))
slow = ndpy.open_adapter("127.0.0.1")
hold = lambda thing: keep.append(thing) or thing
pair = connect_pair(hold, adapter)
listener = hold(adapter.listen((host_of(adapter), 0)))
other = hold(adapter.listen((host_of(adapter), 0)))
region = hold(adapter.register(bytearray(64)))
shared = []
if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
    shared.append(hold(adapter.create_shared_receive_queue(8, threshold=2)))
    for _ in range(4):
        shared[0].receive(region)
poller = hold(ndpy.Poller())
poller.add(pair.server.cq)
end = create_end(hold, adapter)
client = hold(adapter.create_connector())
pendings = [
    *(slow.begin_register(bytearray(4096)) for _ in range(50)),
    pair.server.cq.arm(),
    pair.client.cq.arm(),
    *(srq.arm() for srq in shared),
    listener.begin_get_request(),
    pair.client.connector.begin_wait_disconnected(),
    client.begin_connect(end.queue_pair, other.address),
]
pair.server.queue_pair.receive(region)
calls = [pair.server.cq.wait, pair.client.cq.wait, poller.wait, pendings[0].result]
calls += [srq.arm().result for srq in shared]
threads = [threading.Thread(target=call, daemon=True) for call in calls]
for thread in threads:
    thread.start()
wait_until(lambda: pair.server.cq._waiters and pair.client.cq._waiters and poller._waiters, "the threads wait")
print("in flight", sum(not pending.done() for pending in pendings), flush=True)
"""


@pytest.mark.parametrize("ending", sample(["dropped", "return", "sys.exit", "exception"], 2))
def test_the_interpreter_ends_with_everything_in_flight(ending, version):
    code = (
        EVERYTHING_IN_FLIGHT
        + {
            "return": "",
            "sys.exit": "import sys; sys.exit(0)",
            "exception": "raise SystemExit('done')",
            "dropped": (
                "import gc; del keep, pair, pendings, adapter, slow, hold, client, end, poller, shared; gc.collect()"
            ),
        }[ending]
    )
    done = child(
        code,
        NDPY_PROVIDER=str(SOFTND),
        NDPY_PROVIDER_VERSION=str(version),
        PYTHONWARNINGS="ignore::ResourceWarning",
    )
    assert done.stdout == f"in flight {54 + version}\n", done.stderr
    assert done.returncode == (1 if ending == "exception" else 0), done.stderr
    assert done.stderr == ("done\n" if ending == "exception" else "")
