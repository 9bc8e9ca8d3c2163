"""Races of close(). Another thread is using the object meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from fake_verbs import opened
from racing import DEADLINE_S, Elsewhere, Queue, _Calls, at_each_point
from shared_queues import PlayedSharedQueue

import ndpy
from ndpy.platforms.verbs import memory, queue_pair, shared_receive_queue
from ndpy.platforms.verbs.native_calls import ffi, lib


@pytest.fixture
def inner_calls(points, monkeypatch) -> None:
    """The calls of ndpy's own C functions that free or use its memory are points too."""
    names = ("ndpy_queue_pair_free", "ndpy_free_window", "ndpy_alloc_window", "ndpy_post_bind")
    calls = _Calls(lib, points, {name: name for name in names})
    for module in (queue_pair, memory):
        monkeypatch.setattr(module, "lib", calls)
    monkeypatch.setattr(queue_pair.VerbsQueuePair, "_lib", calls)


adapter = opened(windows=1)


class Gate:
    """Stops each thread that comes to it, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def passing(self, call: Any) -> Any:
        """A function that waits for the gate and then makes the call."""

        def delayed(*arguments: Any) -> Any:
            self.reached.set()
            assert self._opened.wait(DEADLINE_S)
            return call(*arguments)

        return delayed

    def open(self) -> None:
        self._opened.set()


def ended(scene: Queue) -> Any:
    """The queue pair of a scene after its connection has ended."""
    scene.queue_pair._never_connected = False
    scene.queue_pair._end_connection()
    return scene.queue_pair


@at_each_point(least=3)
def test_a_receive_on_an_ended_queue_pair_touches_nothing_that_close_has_freed(fake, adapter, points, chosen):
    """The receive has posted. It goes on at any point of another thread's close()."""
    scene = Queue(fake, adapter, receives=0)
    queue_pair, gate = ended(scene), Gate()
    queue_pair._cancel_late_request = gate.passing(queue_pair._cancel_late_request)
    receiving = Elsewhere(lambda: queue_pair.receive([])).start()
    assert gate.reached.wait(DEADLINE_S)
    closing = Elsewhere(queue_pair.close)

    def go_on() -> None:
        gate.open()
        receiving.thread.join(0.02)

    points.watch(closing.thread, chosen, go_on)
    closing.start().result()
    points.stop()
    gate.open()
    receiving.result()
    assert fake.fault() == ""
    del queue_pair._cancel_late_request
    scene.queue.close()


@at_each_point(least=8)
def test_whoever_looks_at_the_requests_of_a_queue_pair_finds_nothing_that_close_has_freed(
    fake, adapter, points, inner_calls, chosen
):
    """Revoking an exposure does this. It does so at any point of another thread's close()."""
    scene = Queue(fake, adapter)
    freed_then_used = []

    def posted(native: Any) -> int:
        freed_then_used.append("after ndpy_queue_pair_free" in points.names)
        return int(lib.ndpy_queue_pair_posted(native)) if not freed_then_used[-1] else 0

    scene.queue_pair._count_posted = posted
    closing = Elsewhere(scene.queue_pair.close)
    points.watch(closing.thread, chosen, lambda: points.elsewhere(lambda: scene.queue_pair._wait_until_ended(0)))
    closing.start().result()
    points.stop()
    assert not any(freed_then_used)
    scene.queue.close()


def connected(fake: Any, adapter: Any) -> Queue:
    scene = Queue(fake, adapter, receives=0)
    scene.queue_pair._begin_connection()
    return scene


@at_each_point(least=8)
def test_a_window_is_freed_once_wherever_it_is_closed_while_its_queue_pair_is(
    fake, adapter, points, inner_calls, chosen
):
    scene = connected(fake, adapter)
    region, window = adapter.register(bytearray(64)), adapter.create_memory_window()
    scene.queue_pair.bind(window, region)
    closing = Elsewhere(scene.queue_pair.close)
    others = []
    points.watch(closing.thread, chosen, lambda: others.append(points.elsewhere(window.close)))
    closing.start().result()
    points.stop()
    for other in others:
        other.result()
    window.close()
    region.close()
    scene.queue.close()
    assert fake.fault() == ""
    assert not fake.counts.windows


@at_each_point(least=4)
def test_a_window_is_not_freed_while_it_is_being_bound(fake, adapter, points, inner_calls, chosen):
    scene = connected(fake, adapter)
    region, window = adapter.register(bytearray(64)), adapter.create_memory_window()
    posted = []
    post = lib.ndpy_post_bind
    queue_pair.lib.ndpy_post_bind = lambda *rest: posted.append(fake.counts.windows) or post(*rest)
    binding = Elsewhere(lambda: scene.queue_pair.bind(window, region))
    points.watch(binding.thread, chosen, lambda: points.elsewhere(window.close))
    error = binding.start().outcome()
    points.stop()
    del queue_pair.lib.ndpy_post_bind
    # The window existed while it was bound, or it was closed before.
    assert posted == [1] or isinstance(error, ndpy.ClosedError)
    window.close()
    scene.queue_pair.close()
    region.close()
    scene.queue.close()


def test_a_connector_that_has_taken_a_queue_pair_just_before_its_close_does_not_use_it(fake):
    fake.have_address()
    with fake.open() as adapter:
        scene = Queue(fake, adapter, receives=0)
        connector = adapter.create_connector()
        connector.connect(scene.queue_pair, ("127.0.0.1", 4711), timeout_s=DEADLINE_S)
        # Simulates another thread that frees the queue pair just before close() looks.
        scene.queue_pair.connector = None
        scene.queue_pair.close()
        with pytest.raises(ndpy.ClosedError):
            connector.complete_connect(DEADLINE_S)
        assert fake.fault() == ""
        connector.close()
        scene.queue.close()


def test_a_close_that_fails_after_the_native_queue_pair_has_gone_can_be_repeated(fake, adapter):
    scene = Queue(fake, adapter)

    def fail_polls(name: bytes, after: int) -> None:
        if name == b"ibv_destroy_qp" and after:
            fake.failures.poll = 2

    fake.call_at_points(fail_polls)
    with pytest.raises(ndpy.ProviderError):
        scene.queue_pair.close()
    fake.call_at_points(None)
    scene.close()
    assert fake.fault() == ""


@at_each_point(least=4)
def test_a_queue_that_is_closed_while_a_queue_pair_is_made_for_it_is_there_or_refused(fake, adapter, points, chosen):
    queue, other = adapter.create_completion_queue(8), adapter.create_completion_queue(8)
    making = Elsewhere(lambda: adapter.create_queue_pair(queue, other))
    others = []
    points.watch(making.thread, chosen, lambda: others.append(points.elsewhere(queue.close)))
    made = making.start().outcome()
    points.stop()
    assert fake.fault() == ""
    for closing in others:
        assert isinstance(closing.outcome(), ndpy.DeviceBusyError) or isinstance(made, ndpy.ClosedError)
    if isinstance(made, ndpy.QueuePair):
        assert not queue.closed
        made.close()
    queue.close()
    other.close()


class SharedQueues:
    """Stands in for the extension's functions. It has native shared receive queues, which fake_verbs.c lacks."""

    def __init__(self) -> None:
        self.destroyed = threading.Event()
        self._made = ffi.new("struct ibv_srq *")

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def ibv_create_srq(self, domain: Any, request: Any) -> Any:
        return self._made

    def ibv_destroy_srq(self, native: Any) -> int:
        self.destroyed.set()
        return 0

    def ibv_modify_srq(self, native: Any, attributes: Any, mask: int) -> int:
        assert not self.destroyed.is_set()
        return 0


@pytest.mark.parametrize("use", ["receive", "arm", "modify"])
def test_a_shared_receive_queue_is_not_freed_while_it_is_used(adapter, monkeypatch, use):
    shared_queues = SharedQueues()
    monkeypatch.setattr(shared_receive_queue, "lib", shared_queues)
    srq = PlayedSharedQueue(adapter, 8, 1, 2)
    freed_meanwhile = []

    def inside(*_: Any) -> int:
        closing.start()
        freed_meanwhile.append(shared_queues.destroyed.wait(0.05))
        return 0

    closing = Elsewhere(srq.close)
    uses = {"receive": lambda: srq.receive([]), "arm": srq.arm, "modify": lambda: srq.modify(threshold=1)}
    if use == "arm":
        srq._records = {0: [], 1: [], 2: []}
    srq.posted = shared_queues.ibv_modify_srq = srq._native_modify = inside  # type: ignore[method-assign]
    uses[use]()
    closing.result()
    assert freed_meanwhile == [False]
    assert srq.closed


@pytest.mark.parametrize("use", ["arm", "modify"])
def test_a_call_that_waited_for_the_close_of_a_shared_receive_queue_finds_it_closed(adapter, monkeypatch, use):
    monkeypatch.setattr(shared_receive_queue, "lib", SharedQueues())
    srq = shared_receive_queue.VerbsSharedReceiveQueue(adapter, 8, 1, 2)
    srq._records = {0: [], 1: [], 2: []}
    with srq._lock:
        call = Elsewhere(srq.arm if use == "arm" else lambda: srq.modify(threshold=1)).start()
        # The call has looked at the queue and waits for the lock.
        call.thread.join(0.05)
        srq._defunct = srq._closed_error
    assert isinstance(call.outcome(), ndpy.ClosedError)
    srq._defunct = None
    srq.close()


@pytest.mark.parametrize("depth", [4, 8])
def test_receives_that_end_while_the_depth_is_changed_leave_each_slot_to_one_receive(adapter, monkeypatch, depth):
    """A thread that takes their completions may give the slots back at any time."""
    monkeypatch.setattr(shared_receive_queue, "lib", SharedQueues())
    monkeypatch.setattr(adapter, "info", dataclasses.replace(adapter.info, max_shared_receive_queue_depth=8))
    srq = PlayedSharedQueue(adapter, 8, 1, 0)
    for _ in range(4):
        srq.receive([])

    class Records(dict):  # type: ignore[type-arg]
        """A dict of the outstanding receives. While it is iterated, a receive ends."""

        def __iter__(self) -> Any:
            found = list(self.keys())
            srq._free_slot(found[0])
            return iter(found)

    srq._records = Records(srq._records)
    srq._native_modify = lambda *_: srq._free_slot(next(iter(srq._records.keys())))  # type: ignore[method-assign]
    srq.modify(depth)
    srq._records = dict(srq._records.items())
    free = depth - len(srq._records)
    for _ in range(free):
        srq.receive([])
    assert len(srq._records) == depth
    with pytest.raises(ndpy.QueueFullError):
        srq.receive([])
    srq.close()


def test_a_queue_pair_that_gets_the_number_of_one_that_is_being_closed_keeps_its_receives(fake, adapter, monkeypatch):
    """The provider may give the number away as soon as the native queue pair has gone."""
    monkeypatch.setattr(shared_receive_queue, "lib", SharedQueues())
    srq = shared_receive_queue.VerbsSharedReceiveQueue(adapter, 8, 1, 0)
    queue = adapter.create_completion_queue(8)
    former = adapter.create_queue_pair(queue, srq=srq)
    number = former.number

    class Successor(queue_pair.VerbsQueuePair):
        def _native_set_up(self) -> None:
            super()._native_set_up()
            self._number = number

    monkeypatch.setattr(adapter, "_classes", dataclasses.replace(adapter._classes, queue_pair=Successor))
    made = []
    destroy = former._native_destroy

    def destroy_and_reuse() -> None:
        destroy()
        made.append(adapter.create_queue_pair(queue, srq=srq))

    monkeypatch.setattr(former, "_native_destroy", destroy_and_reuse)
    former.close()
    posted, _ = queue._shared_receivers[number]
    assert posted.queue_pair() is made[0]
    made[0].close()
    assert not queue._shared_receivers
    srq.close()
    queue.close()
