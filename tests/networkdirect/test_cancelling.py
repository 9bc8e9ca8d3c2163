"""Requests that are cancelled while they complete.

softnd's delays make these races likely. Each test has a private softnd and fails if an object or a handle is left
(own_softnd.py). NDPY_STRESS=1 runs the full counts.
"""

from __future__ import annotations

import gc
import weakref

import pytest
from kit.helpers import DEADLINE_S, Keeper, ask, connect_pair, create_end, host_of, rounds, succeed, wait_until
from kit.scenarios import slow_call
from kit.threads import in_threads
from overlapped_requests import EndingCounts, outcome, pause, send_empty
from own_softnd import opened

import ndpy
from ndpy.platforms.networkdirect.native_calls import CONNECTION_ABORTED


def test_c_5_a_cancelled_registration_ends_once_in_either_way(softnd, rng):
    with opened(softnd, slow_call("reg_mr", 2)) as (adapter, _keep):
        endings, canceled, registered = EndingCounts(), 0, 0
        for _ in range(rounds(1000, 100)):
            pending = endings.watch(adapter.begin_register(bytearray(4096)))
            pause(rng, 0.03)
            said = pending.cancel()
            result = outcome(pending)
            assert said == isinstance(result, ndpy.CanceledError)
            if said:
                canceled += 1
            else:
                registered += 1
                result.close()
        endings.check()
        # Both outcomes occurred, so there was a race.
        assert canceled
        assert registered
        wait_until(lambda: not adapter._registering, "what was cancelled is gone")


def test_two_threads_cancel_the_same_registrations(softnd):
    with opened(softnd, slow_call("reg_mr", 1)) as (adapter, _keep):
        endings = EndingCounts()
        for _ in range(rounds(100, 8)):
            pendings = [endings.watch(adapter.begin_register(bytearray(64))) for _ in range(20)]
            orders = (pendings, pendings[::-1])
            in_threads(2, lambda number, orders=orders: [pending.cancel() for pending in orders[number]])
            for pending in pendings:
                result = outcome(pending)
                if not isinstance(result, ndpy.CanceledError):
                    result.close()
        endings.check()


def test_a_cancelled_arm_and_the_completion_that_it_waited_for(softnd, rng):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        endings = EndingCounts()
        for context in range(rounds(2000, 150)):
            pending = endings.watch(pair.server.cq.arm())
            send_empty(pair, context)
            if rng.random() < 0.7:
                pending.cancel()
            (completion,) = succeed(pair.server.cq)
            assert completion.context == context
        endings.check()


def test_h_4_9_a_cancelled_connect_ends_once_in_either_way(softnd, rng):
    with opened(softnd) as (adapter, keep):
        endings, outcomes = EndingCounts(), set()
        listener = keep(adapter.listen((host_of(adapter), 0)))
        cq = keep(adapter.create_completion_queue(64))
        for turn in range(rounds(400, 40)):
            own = Keeper()
            queue_pairs = [own(adapter.create_queue_pair(cq)) for _ in range(2)]
            client = own(adapter.create_connector())
            connecting = endings.watch(client.begin_connect(queue_pairs[0], listener.address))
            server = own(listener.get_request(DEADLINE_S))
            accepting = endings.watch(server.begin_accept(queue_pairs[1]))
            pause(rng, 0.006 if turn % 4 else 0)
            connecting.cancel()
            outcomes.add(type(outcome(connecting)).__name__)
            if client.state == "offered":
                completing = endings.watch(client.begin_complete_connect())
                completing.cancel()
            own.close()
            assert accepting.done()
        endings.check()
        assert "CanceledError" in outcomes


def test_h_4_9_a_connect_that_was_cancelled_is_over_for_the_server_too(softnd):
    with opened(softnd) as (adapter, keep):
        client, server = create_end(keep, adapter), create_end(keep, adapter)
        offer = ask(keep, adapter, client.queue_pair)
        assert offer.connecting.cancel()
        # The client is still open. Closing it would end the connection too.
        assert not offer.client.closed
        with pytest.raises((ndpy.ConnectionAbortedError, ndpy.ConnectionRefusedError)):
            offer.server.accept(server.queue_pair, timeout_s=DEADLINE_S)


def test_h_6_2_rejecting_a_client_that_has_gone_says_so(softnd, monkeypatch):
    with opened(softnd) as (adapter, keep):
        offer = ask(keep, adapter, create_end(keep, adapter).queue_pair)
        call = offer.server._call

        def reject_late(method: str, *arguments: object) -> int:
            assert method == "Reject"
            offer.client.close()
            call(method, *arguments)
            return CONNECTION_ABORTED

        with monkeypatch.context() as patch:
            patch.setattr(offer.server, "_call", reject_late)
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


def test_a_connection_that_came_for_a_cancelled_get_request_goes_to_the_next(softnd, rng):
    with opened(softnd) as (adapter, keep):
        endings = EndingCounts()
        listener = keep(adapter.listen((host_of(adapter), 0)))
        cq = keep(adapter.create_completion_queue(64))
        for _ in range(rounds(300, 25)):
            own = Keeper()
            asked = endings.watch(listener.begin_get_request())
            client = own(adapter.create_connector())
            connecting = endings.watch(client.begin_connect(own(adapter.create_queue_pair(cq)), listener.address))
            pause(rng, 0.003)
            server = own(listener.get_request(DEADLINE_S)) if asked.cancel() else own(asked.result(0))
            server.reject()
            assert isinstance(outcome(connecting), ndpy.ConnectionRefusedError)
            own.close()
        endings.check()
