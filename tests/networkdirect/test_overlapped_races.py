"""Overlapped requests against everything that may happen meanwhile.

Each test has a softnd of its own, whose delays open the gaps; when it ends, softnd has no object left, and the process no
handle (own_softnd.py). NDPY_STRESS=1 asks for full counts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import time
import weakref

import pytest
from helpers import (
    DEADLINE_S,
    STRESS,
    Keeper,
    ask,
    connect_pair,
    create_end,
    establish,
    host_of,
    memory,
    require,
    sample,
    send_message,
    succeed,
    take,
    wait_until,
)
from own_softnd import SOFTND, child, handles, open_handles

import ndpy
from ndpy import Flags, Notify
from ndpy.networkdirect.library import CONNECTION_ABORTED
from ndpy.networkdirect.overlapped import OverlappedPending

SEED = int(os.environ.get("NDPY_TEST_SEED", "20240229"))


def times(full: int, part: int) -> int:
    return full if STRESS else part


@pytest.fixture
def dice():
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    return random.Random(SEED)


@contextlib.contextmanager
def opened(softnd, **switches):
    """(adapter, keep); everything is closed at the end, users before what they use."""
    keeper = Keeper()
    adapter = keeper(softnd.open(**switches))
    try:
        yield adapter, keeper
    finally:
        keeper.close()


class Ends:
    """Counts how often each Pending ends."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._kept: list[ndpy.Pending] = []

    def watch(self, pending):
        self._kept.append(pending)
        self.counts[id(pending)] = 0

        def ended(which) -> None:
            self.counts[id(which)] += 1

        pending.add_done_callback(ended)
        return pending

    def check(self) -> None:
        """All have ended, each once."""
        wait_until(lambda: all(pending.done() for pending in self._kept), "every request ends")
        assert set(self.counts.values()) <= {1}


def outcome(pending):
    """What a Pending ended with: its value, or its exception."""
    try:
        return pending.result(DEADLINE_S)
    except ndpy.NdpyError as error:
        return error


def pause(dice, longest_s) -> None:
    """A moment of random length, in which other threads run."""
    until = time.perf_counter() + dice.random() * longest_s
    while time.perf_counter() < until:
        time.sleep(0)


def message(pair, context: int = 0) -> None:
    pair.server.queue_pair.receive([], context=context)

    def sent() -> bool:
        # Polling frees the places of silent requests.
        pair.client.cq.poll()
        with contextlib.suppress(ndpy.QueueFullError):
            pair.client.queue_pair.send([], flags=Flags.SILENT_SUCCESS)
            return True
        return False

    wait_until(sent, "there is room for a send")


# ---- cancelling against completion ----


def test_c_5_a_cancelled_registration_ends_once_in_either_way(softnd, dice):
    with opened(softnd, delay_registration_ms=2) as (adapter, _keep):
        ends, canceled, registered = Ends(), 0, 0
        for _ in range(times(1000, 100)):
            pending = ends.watch(adapter.begin_register(bytearray(4096)))
            pause(dice, 0.03)
            said = pending.cancel()
            result = outcome(pending)
            assert said == isinstance(result, ndpy.CanceledError)
            if said:
                canceled += 1
            else:
                registered += 1
                result.close()
        ends.check()
        # Both happened, so that the race was one.
        assert canceled
        assert registered
        wait_until(lambda: not adapter._registering, "what was cancelled is gone")


def test_two_threads_cancel_the_same_registrations(softnd):
    with opened(softnd, delay_registration_ms=1) as (adapter, _keep):
        ends = Ends()
        for _ in range(times(100, 8)):
            pendings = [ends.watch(adapter.begin_register(bytearray(64))) for _ in range(20)]
            threads = [
                threading.Thread(target=lambda todo=todo: [pending.cancel() for pending in todo])
                for todo in (pendings, pendings[::-1])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
            for pending in pendings:
                result = outcome(pending)
                if not isinstance(result, ndpy.CanceledError):
                    result.close()
        ends.check()


def test_a_cancelled_arm_and_the_completion_that_it_waited_for(softnd, dice):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        ends = Ends()
        for context in range(times(2000, 150)):
            pending = ends.watch(pair.server.cq.arm())
            message(pair, context)
            if dice.random() < 0.7:
                pending.cancel()
            (completion,) = succeed(pair.server.cq)
            assert completion.context == context
        ends.check()


def test_h_4_9_a_cancelled_connect_ends_once_in_either_way(softnd, dice):
    with opened(softnd) as (adapter, keep):
        ends, outcomes = Ends(), set()
        listener = keep(adapter.listen((host_of(adapter), 0)))
        cq = keep(adapter.create_completion_queue(64))
        for turn in range(times(400, 40)):
            own = Keeper()
            queue_pairs = [own(adapter.create_queue_pair(cq)) for _ in range(2)]
            client = own(adapter.create_connector())
            connecting = ends.watch(client.begin_connect(queue_pairs[0], listener.address))
            server = own(listener.get_request(DEADLINE_S))
            accepting = ends.watch(server.begin_accept(queue_pairs[1]))
            pause(dice, 0.006 if turn % 4 else 0)
            connecting.cancel()
            outcomes.add(type(outcome(connecting)).__name__)
            if client.state == "offered":
                completing = ends.watch(client.begin_complete_connect())
                completing.cancel()
            own.close()
            assert accepting.done()
        ends.check()
        assert "CanceledError" in outcomes


def test_h_4_9_a_connect_that_was_cancelled_is_over_for_the_server_too(softnd):
    with opened(softnd) as (adapter, keep):
        client, server = create_end(keep, adapter), create_end(keep, adapter)
        offer = ask(keep, adapter, client.queue_pair)
        assert offer.connecting.cancel()
        # Not closed, which would end it as well.
        assert not offer.client.closed
        with pytest.raises((ndpy.ConnectionAbortedError, ndpy.ConnectionRefusedError)):
            offer.server.accept(server.queue_pair, timeout_s=DEADLINE_S)


def test_h_6_2_rejecting_a_client_that_has_gone_says_so(softnd, monkeypatch):
    with opened(softnd) as (adapter, keep):
        offer = ask(keep, adapter, create_end(keep, adapter).queue_pair)
        reject = offer.server._reject_native

        def reject_late(data: bytes) -> int:
            offer.client.close()
            reject(data)
            return CONNECTION_ABORTED

        with monkeypatch.context() as patch:
            patch.setattr(offer.server, "_reject_native", reject_late)
            with pytest.raises(ndpy.ConnectionAbortedError, match="the peer has gone"):
                offer.server.reject()
        assert offer.server.state == "failed"


def test_a_connect_that_was_cancelled_keeps_no_queue_pair(softnd):
    with opened(softnd) as (adapter, keep):
        cq = keep(adapter.create_completion_queue(8))
        queue_pair = adapter.create_queue_pair(cq)
        offer = ask(keep, adapter, queue_pair)
        assert offer.connecting.cancel()
        queue_pair.close()
        gone = weakref.ref(queue_pair)
        del queue_pair
        gc.collect()
        assert gone() is None


def test_a_connection_that_came_for_a_cancelled_get_request_goes_to_the_next(softnd, dice):
    with opened(softnd) as (adapter, keep):
        ends = Ends()
        listener = keep(adapter.listen((host_of(adapter), 0)))
        cq = keep(adapter.create_completion_queue(64))
        for _ in range(times(300, 25)):
            own = Keeper()
            asked = ends.watch(listener.begin_get_request())
            client = own(adapter.create_connector())
            connecting = ends.watch(client.begin_connect(own(adapter.create_queue_pair(cq)), listener.address))
            pause(dice, 0.003)
            server = own(listener.get_request(DEADLINE_S)) if asked.cancel() else own(asked.result(0))
            server.reject()
            assert isinstance(outcome(connecting), ndpy.ConnectionRefusedError)
            own.close()
        ends.check()


# ---- closing with requests pending ----


def test_closing_the_adapter_ends_the_registrations_under_way(softnd):
    adapter = softnd.open(delay_registration_ms=400, delay_cancel_ms=30)
    ends = Ends()
    pendings = [ends.watch(adapter.begin_register(bytearray(64))) for _ in range(20)]
    adapter.close()
    ends.check()
    assert {type(outcome(pending)) for pending in pendings} == {ndpy.CanceledError}


def test_closing_the_adapter_while_registrations_end(softnd, dice):
    ends = Ends()
    for _ in range(times(200, 15)):
        adapter = softnd.open(delay_registration_ms=2)
        pendings = [ends.watch(adapter.begin_register(bytearray(64))) for _ in range(10)]
        until = time.perf_counter() + dice.random() * 0.006
        while time.perf_counter() < until:
            pass
        with contextlib.suppress(ndpy.DeviceBusyError):
            adapter.close()
        for pending in pendings:
            result = outcome(pending)
            if not isinstance(result, ndpy.NdpyError):
                result.close()
        adapter.close()
    ends.check()


def test_closing_a_region_that_is_being_deregistered_waits_for_it(softnd):
    with opened(softnd, delay_completions_ms=50) as (adapter, _):
        ends = Ends()
        regions = [adapter.register(bytearray(64)) for _ in range(5)]
        pendings = [ends.watch(region.begin_deregister()) for region in regions]
        for region in regions:
            region.close()
            assert region.closed
        ends.check()
        assert [outcome(pending) for pending in pendings] == [None] * 5


@pytest.mark.parametrize("cancel_ms", [0, 40])
def test_closing_a_completion_queue_ends_all_that_wait_for_it(softnd, cancel_ms):
    with opened(softnd, delay_cancel_ms=cancel_ms) as (adapter, keep):
        for _ in range(times(40, 4)):
            ends, ended = Ends(), []
            queue = adapter.create_completion_queue(16)
            poller = keep(ndpy.Poller())
            poller.add(queue)
            with pytest.raises(ndpy.TimeoutError):
                poller.wait(0)

            def wait(queue=queue, ended=ended) -> None:
                try:
                    queue.wait(DEADLINE_S)
                except ndpy.NdpyError as error:
                    ended.append(type(error))

            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            armed = [ends.watch(queue.arm(kind)) for kind in (Notify.ANY, Notify.SOLICITED, Notify.ERRORS)]
            wait_until(lambda queue=queue: len(queue._waiting) == 3, "the threads wait")
            queue.close()
            for thread in threads:
                thread.join(DEADLINE_S)
            assert ended == [ndpy.ClosedError] * 3
            ends.check()
            assert {type(outcome(pending)) for pending in armed} == {ndpy.CanceledError}
            poller.close()


@pytest.mark.parametrize("cancel_ms", [0, 40])
def test_closing_a_shared_receive_queue_ends_its_notifications(softnd, cancel_ms):
    with opened(softnd, delay_cancel_ms=cancel_ms) as (adapter, keep):
        require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
        ends = Ends()
        region = memory(keep, adapter, 64)
        queue = adapter.create_shared_receive_queue(8, threshold=2)
        for _ in range(4):
            queue.receive(region)
        armed = [ends.watch(queue.arm()) for _ in range(5)]
        assert not any(pending.done() for pending in armed)
        queue.close()
        ends.check()
        assert {type(outcome(pending)) for pending in armed} == {ndpy.CanceledError}


def test_closing_a_shared_receive_queue_while_others_arm_and_post(softnd):
    with opened(softnd, delay_cancel_ms=1) as (adapter, keep):
        require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
        region = memory(keep, adapter, 64)
        for _ in range(times(100, 10)):
            ends, failures = Ends(), []
            queue = adapter.create_shared_receive_queue(512, threshold=2)
            for _ in range(4):
                queue.receive(region)
            running = threading.Barrier(3)

            def work(call, queue=queue, failures=failures, running=running) -> None:
                running.wait(DEADLINE_S)
                try:
                    for _ in range(200):
                        call(queue)
                except ndpy.ClosedError:
                    return
                except BaseException as error:
                    failures.append(error)

            threads = [
                threading.Thread(target=work, args=(lambda queue, ends=ends: ends.watch(queue.arm()),)),
                threading.Thread(target=work, args=(lambda queue: queue.receive(region),)),
            ]
            for thread in threads:
                thread.start()
            running.wait(DEADLINE_S)
            queue.close()
            for thread in threads:
                thread.join(DEADLINE_S)
            assert failures == []
            ends.check()


def test_closing_a_listener_ends_all_who_asked(softnd):
    with opened(softnd, delay_cancel_ms=30) as (adapter, _keep):
        ends = Ends()
        listener = adapter.listen((host_of(adapter), 0))
        asked = [ends.watch(listener.begin_get_request()) for _ in range(5)]
        listener.close()
        ends.check()
        assert {type(outcome(pending)) for pending in asked} == {ndpy.CanceledError}


def test_closing_a_listener_while_connections_come(softnd, dice):
    with opened(softnd) as (adapter, keep):
        ends = Ends()
        cq = keep(adapter.create_completion_queue(64))
        for _ in range(times(100, 10)):
            own = Keeper()
            listener = adapter.listen((host_of(adapter), 0))
            asked = [ends.watch(listener.begin_get_request()) for _ in range(3)]
            connecting = []
            for _ in range(3):
                client = own(adapter.create_connector())
                connecting.append(
                    ends.watch(client.begin_connect(own(adapter.create_queue_pair(cq)), listener.address))
                )
            pause(dice, 0.004)
            listener.close()
            for pending in asked:
                result = outcome(pending)
                if not isinstance(result, ndpy.CanceledError):
                    result.close()
            for pending in connecting:
                assert isinstance(outcome(pending), ndpy.ProviderError)
            own.close()
        ends.check()


def close_in_turn(*things) -> None:
    for thing in things:
        thing.close()


@pytest.mark.parametrize("state", ["connecting", "accepting", "completing", "disconnecting", "watching"])
@pytest.mark.parametrize("who", ["connector", "queue pair"])
def test_closing_ends_what_a_connector_has_under_way(softnd, state, who):
    with opened(softnd) as (adapter, keep), opened(softnd, delay_completions_ms=150, delay_cancel_ms=20) as (slow, own):
        ends = Ends()
        fast = create_end(keep, adapter)
        end = create_end(own, slow)
        if state == "accepting":
            listener = own(slow.listen((host_of(slow), 0)))
            connector = keep(adapter.create_connector())
            ends.watch(connector.begin_connect(fast.queue_pair, listener.address))
            closing = own(listener.get_request(DEADLINE_S))
            pending = closing.begin_accept(end.queue_pair)
        else:
            listener = keep(adapter.listen((host_of(adapter), 0)))
            closing = own(slow.create_connector())
            pending = closing.begin_connect(end.queue_pair, listener.address)
            if state != "connecting":
                server = keep(listener.get_request(DEADLINE_S))
                accepting = ends.watch(server.begin_accept(fast.queue_pair))
                pending.result(DEADLINE_S)
                pending = closing.begin_complete_connect()
            if state in ("disconnecting", "watching"):
                pending.result(DEADLINE_S)
                accepting.result(DEADLINE_S)
                pending = closing.begin_wait_disconnected() if state == "watching" else closing.begin_disconnect()
        ends.watch(pending)
        assert not pending.done()
        if who == "connector":
            closing.close()
        else:
            end.queue_pair.close()
        result = outcome(pending)
        ended_well = who == "queue pair" and state in ("disconnecting", "watching")
        assert result is None if ended_well else isinstance(result, ndpy.CanceledError)
        keep.close()
        ends.check()


def test_rejecting_an_offer_ends_the_complete_connect_that_was_begun(softnd):
    with opened(softnd) as (adapter, keep), opened(softnd, delay_completions_ms=300) as (slow, own):
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
    """The adapter's thread has taken the end of a connect, and waits for the lock that closing holds."""
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
        # What comes after it through the same thread has been handled.
        succeeded = adapter.begin_register(bytearray(64))
        succeeded.result(DEADLINE_S).close()
    assert not raised


# ---- pollers ----


def test_packets_and_wake_ups_of_a_poller_do_not_lose_each_other(softnd):
    count = times(3000, 300)
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter, cq_depth=256, receive_queue_depth=128, initiator_queue_depth=128)
        poller = keep(ndpy.Poller())
        poller.add(pair.server.cq)
        taken, woken, stop = [], [0], threading.Event()

        def wake() -> None:
            while not stop.wait(0.0005):
                poller.wake()

        def send() -> None:
            for context in range(count):
                message(pair, context)
                wait_until(lambda context=context: len(taken) > context - 100, "the poller follows")

        threads = [threading.Thread(target=wake), threading.Thread(target=send)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * DEADLINE_S
        while len(taken) < count:
            assert time.monotonic() < deadline
            ready = poller.wait(DEADLINE_S)
            woken[0] += not ready
            for _, completions in ready:
                taken += [completion.context for completion in completions]
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert taken == list(range(count))
        assert woken[0]


def test_a_queue_in_two_pollers_that_come_and_go(softnd):
    with opened(softnd, delay_cancel_ms=5) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        stays = keep(ndpy.Poller())
        stays.add(pair.server.cq)
        for context in range(times(500, 40)):
            goes = ndpy.Poller()
            goes.add(pair.server.cq)
            for poller in (stays, goes):
                with pytest.raises(ndpy.TimeoutError):
                    poller.wait(0)
            if context % 2:
                goes.close()
            message(pair, context)
            if context % 3:
                goes.close()
            ((_, completions),) = stays.wait(DEADLINE_S)
            assert [completion.context for completion in completions] == [context]
            goes.close()


def test_pollers_that_are_dropped_free_their_ports():
    before = handles()
    for _ in range(50):
        ndpy.Poller()
    assert handles() <= before + 5


def test_what_the_adapters_thread_cannot_handle_is_reported_and_ends_it_not(softnd, monkeypatch):
    raised: list[str] = []
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)

        def fail(pending) -> None:
            raise ValueError("a callback's trouble")

        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda what: raised.append(str(what.exc_value)))
            pending = pair.server.cq.arm()
            pending.add_done_callback(fail)
            message(pair)
            wait_until(lambda: raised, "it is reported")
        assert raised == ["a callback's trouble"]
        succeed(pair.server.cq)
        armed = pair.server.cq.arm()
        message(pair)
        armed.result(DEADLINE_S)


def test_a_queue_may_have_one_place_and_not_none(softnd):
    with opened(softnd) as (adapter, keep):
        queue = keep(adapter.create_completion_queue(8))
        if ndpy.Capability.RESIZE_COMPLETION_QUEUE in adapter.info.capabilities:
            queue.resize(1)
            assert queue.depth == 1
        with pytest.raises(ndpy.LimitExceededError):
            queue.resize(0)


def test_a_closed_listener_has_no_address(softnd):
    with opened(softnd) as (adapter, _):
        listener = adapter.listen((host_of(adapter), 0))
        listener.close()
        with pytest.raises(ndpy.ClosedError):
            assert listener.address


def test_two_adapters_in_one_poller(softnd):
    with opened(softnd, delay_completions_ms=1) as (first, keep), opened(softnd) as (second, own):
        pairs = [connect_pair(keep, first), connect_pair(own, second)]
        poller = ndpy.Poller()
        for pair in pairs:
            poller.add(pair.server.cq)
        seen = {pair.server.cq: [] for pair in pairs}
        for context in range(times(500, 50)):
            for pair in pairs:
                message(pair, context)
            while not all(len(contexts) == context + 1 for contexts in seen.values()):
                for queue, completions in poller.wait(DEADLINE_S):
                    seen[queue] += [completion.context for completion in completions]
        assert all(contexts == list(range(times(500, 50))) for contexts in seen.values())
        # One adapter may go, and the poller serves the other.
        own.close()
        message(pairs[0], 9)
        ((queue, _),) = poller.wait(DEADLINE_S)
        assert queue is pairs[0].server.cq
        poller.close()


def test_closing_a_poller_that_waits_while_packets_come(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        for context in range(times(300, 30)):
            poller = ndpy.Poller()
            poller.add(pair.server.cq)
            taken = []

            def wait(poller=poller, taken=taken) -> None:
                with contextlib.suppress(ndpy.ClosedError):
                    while True:
                        for _, completions in poller.wait(DEADLINE_S):
                            taken.extend(completions)

            waiter = threading.Thread(target=wait)
            waiter.start()
            message(pair, context)
            poller.close()
            waiter.join(DEADLINE_S)
            assert not waiter.is_alive()
            # Either the poller had it, or it is still there.
            got = taken or take(pair.server.cq)
            assert [completion.context for completion in got] == [context]


def test_a_queue_that_fails_costs_the_others_of_its_poller_nothing(softnd, monkeypatch):
    with opened(softnd) as (adapter, keep):
        pairs = [connect_pair(keep, adapter) for _ in range(3)]
        poller = keep(ndpy.Poller())
        for pair in pairs:
            poller.add(pair.server.cq)

        def fail(*_) -> None:
            raise ndpy.CompletionQueueOverrunError("too many")

        for context in range(times(50, 10)):
            with monkeypatch.context() as patch:
                patch.setattr(pairs[1].server.cq, "poll", fail)
                for pair in pairs:
                    message(pair, context)
                taken, failures = [], 0
                while len(taken) < 2 or not failures:
                    try:
                        for queue, completions in poller.wait(DEADLINE_S):
                            assert queue is not pairs[1].server.cq
                            taken += [completion.context for completion in completions]
                    except ndpy.CompletionQueueOverrunError:
                        failures += 1
                assert taken == [context] * 2
            assert [completion.context for completion in take(pairs[1].server.cq)] == [context]
            # Its failure was told once; adding it again has it looked at again.
            poller.add(pairs[1].server.cq)


# ---- many at once ----


def test_a_wait_that_ended_early_says_how_long_it_was():
    with pytest.raises(ndpy.TimeoutError, match=r"not finished within 0\.05 s"):
        OverlappedPending("connect").result(0.05)


def test_an_operation_that_timed_out_says_so_in_its_own_words():
    pending: OverlappedPending[None] = OverlappedPending("connect")
    pending.fail(ndpy.TimeoutError("the peer is silent", operation="connect"))
    with pytest.raises(ndpy.TimeoutError, match="the peer is silent"):
        pending.result(5)


def test_c_5_5_a_request_is_used_again_when_it_has_ended(softnd):
    """A wait that timed out leaves its Notify armed for the next one: one request, and nothing missed."""
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        for context in range(times(3000, 200)):
            for _ in range(2):
                with pytest.raises(ndpy.TimeoutError):
                    pair.server.cq.wait(0)
            message(pair, context)
            assert [completion.context for completion in take(pair.server.cq)] == [context]
        assert len(pair.server.cq._idle_waiters) == 1
        assert len(pair.server.cq._requests) <= 1


def test_a_thousand_registrations_in_flight(softnd, dice):
    with opened(softnd, delay_registration_ms=300) as (adapter, _):
        ends = Ends()
        buffers = [bytearray(64 + number) for number in range(1000)]
        pendings = [ends.watch(adapter.begin_register(buffer)) for buffer in buffers]
        assert not pendings[-1].done()
        chosen = set(dice.sample(range(1000), 300))
        for number in chosen:
            pendings[number].cancel()
        ends.check()
        regions = {}
        for number, pending in enumerate(pendings):
            result = outcome(pending)
            if isinstance(result, ndpy.CanceledError):
                assert number in chosen
            else:
                assert result.length == 64 + number
                regions[number] = result
        assert len(regions) >= 700
        assert len({region.local_token for region in regions.values()}) == len(regions)
        ends = Ends()
        for region in regions.values():
            ends.watch(region.begin_deregister())
        ends.check()
        assert not adapter._registering
        # The buffers are free again: an exported one cannot change its size.
        for buffer in buffers:
            buffer.append(0)


def test_what_has_ended_keeps_no_event(softnd):
    """Ended requests and their events go without the garbage collector."""
    import gc

    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        srq = keep(adapter.create_shared_receive_queue(4, threshold=2)) if softnd.version == 2 else None

        def use() -> None:
            adapter.begin_register(bytearray(64)).result(DEADLINE_S).close()
            adapter.begin_register(bytearray(64)).result(DEADLINE_S).begin_deregister().result(DEADLINE_S)
            if srq is not None:
                srq.arm().result(DEADLINE_S)
            armed = pair.server.cq.arm()
            message(pair)
            armed.result(DEADLINE_S)
            take(pair.server.cq)

        use()
        before = handles()
        gc.disable()
        try:
            for _ in range(50):
                use()
            wait_until(lambda: open_handles() <= before + 12, f"handles go back to {before}")
        finally:
            gc.enable()


def test_many_threads_wait_arm_poll_and_close_at_once(softnd):
    """Every thread ends as the API says, whatever the others do with the same queue."""
    for turn in range(times(40, 4)):
        print(f"seed {SEED + turn} (NDPY_TEST_SEED)")
        dice = random.Random(SEED + turn)
        with opened(softnd, delay_completions_ms=turn % 3, delay_cancel_ms=turn % 4) as (adapter, keep):
            pair = connect_pair(keep, adapter, cq_depth=1024, receive_queue_depth=512, initiator_queue_depth=512)
            queue = pair.server.cq
            poller = ndpy.Poller()
            poller.add(queue)
            ends, failures, taken = Ends(), [], []
            deadline = time.monotonic() + 20

            def guarded(work, failures=failures, deadline=deadline):
                def run() -> None:
                    try:
                        while time.monotonic() < deadline:
                            with contextlib.suppress(ndpy.TimeoutError):
                                work()
                        failures.append(AssertionError("not ended by closing"))
                    except ndpy.ClosedError:
                        pass
                    except BaseException as error:
                        failures.append(error)

                return threading.Thread(target=run)

            def wait(queue=queue, taken=taken) -> None:
                taken.extend(queue.wait(0.005))

            def wait_long(queue=queue, taken=taken) -> None:
                taken.extend(queue.wait(5))

            def poll(poller=poller, taken=taken) -> None:
                for _, completions in poller.wait(5):
                    taken.extend(completions)

            def arm(queue=queue, ends=ends) -> None:
                pending = ends.watch(queue.arm())
                with contextlib.suppress(ndpy.CanceledError):
                    pending.result(0.002)

            def wake(poller=poller) -> None:
                if poller.closed:
                    raise ndpy.ClosedError("closed")
                poller.wake()
                time.sleep(0.001)

            threads = [guarded(work) for work in (wait, wait, wait_long, wait_long, poll, arm, wake)]
            for thread in threads:
                thread.start()
            for context in range(200):
                message(pair, context)
                if dice.random() < 0.05:
                    time.sleep(0.002)
            wait_until(lambda taken=taken: len(taken) >= 200, "every completion is taken")
            first = [poller, pair.server.queue_pair] if dice.random() < 0.5 else [pair.server.queue_pair, poller]
            close_in_turn(*first)
            queue.close()
            for thread in threads:
                thread.join(DEADLINE_S)
            assert failures == []
            assert not any(thread.is_alive() for thread in threads)
            contexts = [completion.context for completion in taken if completion.ok]
            assert sorted(contexts) == list(range(200))
            ends.check()


# ---- the end of the process ----

EVERYTHING_IN_FLIGHT = """
import os, threading
import ndpy
from helpers import connect_pair, create_end, host_of, wait_until

keep = []
adapter = ndpy.open_adapter("127.0.0.1")
os.environ["SOFTND_DELAY_REGISTRATION_MS"] = "60000"
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
threads = [
    threading.Thread(target=call, daemon=True)
    for call in (pair.server.cq.wait, pair.client.cq.wait, poller.wait, pendings[0].result, *(srq.arm().result for srq in shared))
]
for thread in threads:
    thread.start()
wait_until(lambda: pair.server.cq._waiting and pair.client.cq._waiting and poller._waiters, "the threads wait")
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
            "dropped": "import gc; del keep, pair, pendings, adapter, slow, hold, client, end, poller, shared; gc.collect()",
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


def test_everything_works_after_all_that(softnd):
    with opened(softnd) as (adapter, keep):
        end, server = create_end(keep, adapter), create_end(keep, adapter)
        offer = ask(keep, adapter, end.queue_pair)
        establish(offer, server.queue_pair)
        send_message(keep, end, server, b"still here")
