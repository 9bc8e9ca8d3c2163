"""An adapter that is removed: every call says so, all threads that wait are told, and everything can be closed."""

from __future__ import annotations

import contextlib

import pytest
from kit.helpers import DEADLINE_S, Keeper, connect_ends, connect_pair, create_end, host_of, memory, wait_until
from kit.scenarios import removal, slow_call
from kit.threads import Elsewhere

import ndpy
from ndpy import Access


@pytest.fixture
def removed(softnd):
    """remove(prepare) removes the adapter and returns what prepare(adapter, keep) made. It closes all at the end."""
    keeper = Keeper()

    def remove(prepare, *faults):
        adapter = keeper(softnd.open(removal(after=50), *faults))
        # In version 1 the provider gets receives only when there is a connection.
        spare = connect_pair(keeper, adapter, receive_queue_depth=64)
        made = prepare(adapter, keeper)
        with pytest.raises(ndpy.DeviceRemovedError):
            for _ in range(64):
                spare.server.queue_pair.receive([])
        return made

    yield remove
    keeper.close()


def peers(softnd, adapter, keep):
    """An end on the adapter. Its peer is on another adapter, which is not removed."""
    other = keep(softnd.open())
    end, far = create_end(keep, adapter), create_end(keep, other)
    connect_ends(keep, adapter, end, far)
    return end, far


def test_b_7_7_every_class_says_that_the_adapter_has_gone(softnd, removed):
    made = {}

    def prepare(adapter, keep):
        made["adapter"] = adapter
        made["region"] = memory(keep, adapter, 64, Access.REMOTE_WRITE)
        made["window"] = keep(adapter.create_memory_window())
        made["end"], made["far"] = peers(softnd, adapter, keep)
        made["cq"] = keep(adapter.create_completion_queue(8))
        if softnd.version == 2:
            made["srq"] = keep(adapter.create_shared_receive_queue(8, threshold=2))
        made["listener"] = keep(adapter.listen((host_of(adapter), 0)))
        made["idle"] = keep(adapter.create_connector())
        made["other"] = keep(adapter.create_queue_pair(made["cq"]))

    removed(prepare)
    adapter, region, end, cq = made["adapter"], made["region"], made["end"], made["cq"]
    address = ("127.0.0.1", 9)
    calls = [
        lambda: adapter.register(bytearray(8)),
        lambda: adapter.begin_register(bytearray(8)).result(DEADLINE_S),
        adapter.create_memory_window,
        lambda: adapter.create_completion_queue(8),
        adapter.create_connector,
        lambda: adapter.listen((host_of(adapter), 0)),
        lambda: end.queue_pair.receive(region),
        lambda: end.queue_pair.send(region),
        lambda: end.queue_pair.bind(made["window"], region, Access.REMOTE_WRITE),
        lambda: cq.arm().result(DEADLINE_S),
        lambda: cq.wait(DEADLINE_S),
        lambda: made["listener"].get_request(DEADLINE_S),
        lambda: made["idle"].connect(made["other"], address, timeout_s=DEADLINE_S),
    ]
    if softnd.version == 2:
        calls += [
            # In version 1 the provider hears of a queue pair only when it connects.
            lambda: adapter.create_queue_pair(cq),
            lambda: adapter.create_shared_receive_queue(8),
            lambda: made["srq"].receive(region),
            lambda: made["srq"].arm().result(DEADLINE_S),
        ]
    for number, call in enumerate(calls):
        with pytest.raises(ndpy.DeviceRemovedError):
            call()
            pytest.fail(f"call {number}")
    with contextlib.suppress(ndpy.DeviceRemovedError):
        end.connector.disconnect(DEADLINE_S)
    # To the peer this is an ordinary end of the connection.
    made["far"].connector.wait_disconnected(DEADLINE_S)


def test_all_who_wait_are_told(softnd, removed):
    waiting: list[Elsewhere] = []

    def start(call) -> None:
        waiting.append(Elsewhere(call).start())

    def prepare(adapter, keep):
        end, _ = peers(softnd, adapter, keep)
        queues = [keep(adapter.create_completion_queue(8)) for _ in range(3)]
        poller = keep(ndpy.Poller())
        poller.add(queues[0])
        region = memory(keep, adapter, 64)
        shared = []
        if softnd.version == 2:
            srq = keep(adapter.create_shared_receive_queue(8, threshold=2))
            for _ in range(4):
                srq.receive(region)
            shared.append(srq.arm())
        listener = keep(adapter.listen((host_of(adapter), 0)))
        start(lambda: poller.wait(DEADLINE_S))
        for _ in range(2):
            start(lambda: queues[1].wait(DEADLINE_S))
        for pending in (
            queues[2].arm(),
            queues[2].arm(ndpy.Notify.ERRORS),
            *shared,
            listener.begin_get_request(),
            listener.begin_get_request(),
        ):
            start(lambda pending=pending: pending.result(DEADLINE_S))
        watching = end.connector.begin_wait_disconnected()
        start(lambda: watching.result(DEADLINE_S))
        wait_until(lambda: len(queues[1]._waiters) == 2 and poller._waiters, "they wait")
        return watching

    removed(prepare)
    ended = [one.outcome() for one in waiting]
    # A thread that waits for the end of a connection may see an ordinary end.
    assert len(ended) == (9 if softnd.version == 2 else 8)
    assert [what for what in ended if type(what) is not ndpy.DeviceRemovedError] in ([], [None])


def test_connections_in_the_making_end(softnd, removed):
    def prepare(adapter, keep):
        other = keep(softnd.open())
        listener = keep(other.listen((host_of(other), 0)))
        connecting = keep(adapter.create_connector()).begin_connect(
            create_end(keep, adapter).queue_pair, listener.address
        )
        own = keep(adapter.listen((host_of(adapter), 0)))
        keep(other.create_connector()).begin_connect(create_end(keep, other).queue_pair, own.address)
        accepting = keep(own.get_request(DEADLINE_S)).begin_accept(create_end(keep, adapter).queue_pair)
        return connecting, accepting

    for pending in removed(prepare):
        with pytest.raises(ndpy.DeviceRemovedError):
            pending.result(DEADLINE_S)


def test_registrations_in_flight_end(softnd, removed):
    def prepare(adapter, keep):
        return keep, [adapter.begin_register(bytearray(64)) for _ in range(20)]

    keep, pendings = removed(prepare, slow_call("reg_mr", 200))
    for pending in pendings:
        # softnd chose their results before the removal. The fault only delays them.
        with contextlib.suppress(ndpy.DeviceRemovedError):
            keep(pending.result(DEADLINE_S))


def test_the_requests_of_its_queue_pairs_come_back(softnd, removed):
    def prepare(adapter, keep):
        end, _ = peers(softnd, adapter, keep)
        region = memory(keep, adapter, 64)
        for context in range(4):
            end.queue_pair.receive(region, context=context)
        return end

    end = removed(prepare)
    end.queue_pair.close()
    end.cq.close()
    assert end.queue_pair.closed
    assert end.cq.closed


def test_an_adapter_is_opened_again_after_another_one_has_gone(softnd, removed):
    def prepare(adapter, keep):
        return connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter))

    removed(prepare)
    with softnd.open() as adapter:
        adapter.register(bytearray(64)).close()
