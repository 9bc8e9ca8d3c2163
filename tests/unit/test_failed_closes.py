"""If the system refuses a close, nothing is lost and the close can be repeated. Uses a provider without a device."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
from kit.helpers import Replacing, interrupted, wait_until
from racing import DEADLINE_S, Elsewhere, Queue

import ndpy
from ndpy.platforms.verbs import adapter as adapters
from ndpy.platforms.verbs import completion_queue as completion_queues
from ndpy.platforms.verbs import listening as listeners
from ndpy.platforms.verbs import memory as memories
from ndpy.platforms.verbs import queue_pair as queue_pairs
from ndpy.platforms.verbs import shared_receive_queue as shared_queues
from ndpy.platforms.verbs.native_calls import ffi, lib


def refusing(**numbers: int) -> Replacing:
    """The extension's functions. Some of them only return a number."""
    return Replacing(lib, **{call: lambda *_, number=number: number for call, number in numbers.items()})


def test_an_open_that_ends_at_its_first_step_raises_what_ended_it(fake, monkeypatch):
    monkeypatch.setattr(adapters, "RegistrationWorkers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.open()


@pytest.mark.parametrize("call", ["ibv_dealloc_pd", "ibv_close_device"])
def test_an_adapter_whose_close_failed_can_be_closed(fake, monkeypatch, call):
    adapter = fake.open()
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "lib", refusing(**{call: errno.EBUSY}))
        with pytest.raises(ndpy.ProviderError):
            adapter.close()
    with pytest.raises(ndpy.ClosedError):
        adapter.create_completion_queue(8)
    adapter.close()
    assert adapter.closed


def test_a_listener_whose_close_failed_serves_those_who_ask_it(fake, monkeypatch):
    fake.have_address()
    with fake.open() as adapter:
        listener = adapter.listen(("127.0.0.1", 0))
        asked = listener.begin_get_request()
        with monkeypatch.context() as patch:
            patch.setattr(listeners, "lib", refusing(rdma_destroy_id=errno.EIO))
            with pytest.raises(ndpy.ProviderError):
                listener.close()
        fake.request(listener)
        asked.result(DEADLINE_S).close()
        late = listener.begin_get_request()
        listener.close()
        with pytest.raises(ndpy.CanceledError):
            late.result(DEADLINE_S)


@pytest.mark.parametrize("early", [False, True])
def test_a_close_of_a_queue_that_fails_costs_nobody_who_waits_for_it_a_completion(fake, monkeypatch, early):
    """early: the completion comes before the close acknowledges its event. Then only a look at the queue finds it."""
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=4)
    scene.queue._users -= 1
    poller = ndpy.Poller()
    poller.add(scene.queue)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)
    armed, given_up = scene.queue.arm(), scene.queue.arm()
    given_up.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(completion_queues, "lib", refusing(ibv_destroy_cq=errno.EIO))
        if early:
            forget = adapter._events.forget
            patch.setattr(adapter._events, "forget", lambda fd: (forget(fd), scene.arrive()))
        with pytest.raises(ndpy.ProviderError):
            scene.queue.close()
    if not early:
        assert not armed.done()
        scene.arrive()
    assert armed.result(DEADLINE_S) is None
    ((queue, completions),) = poller.wait(DEADLINE_S)
    assert queue is scene.queue
    scene.check(completions)
    poller.close()
    scene.queue._users += 1
    scene.queue_pair.close()
    assert len(scene.queue.poll()) == 3
    last = scene.queue.arm()
    scene.queue.close()
    with pytest.raises(ndpy.CanceledError):
        last.result(0)
    adapter.close()


@pytest.mark.parametrize(
    ("module", "call"), [(completion_queues, "ibv_destroy_cq"), (queue_pairs, "ibv_destroy_qp")], ids=["queue", "pair"]
)
def test_ctrl_c_when_a_native_object_has_gone_leaves_nothing_to_destroy_twice(fake, monkeypatch, module, call):
    """An armed queue is looked at after a close that failed."""
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=2)
    if module is completion_queues:
        scene.queue_pair.close()
        scene.queue.poll()
    armed = scene.queue.arm()

    def interrupted(native: Any) -> int:
        assert getattr(lib, call)(native) == 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "lib", Replacing(lib, **{call: interrupted}))
        with pytest.raises(KeyboardInterrupt):
            scene.close()
    scene.close()
    adapter.close()
    if armed.exception(DEADLINE_S) is not None:
        assert armed.cancelled()


def test_ctrl_c_when_a_native_shared_receive_queue_has_gone_leaves_nothing_to_destroy_twice(fake, monkeypatch):
    destroyed = []

    def interrupted(native: Any) -> int:
        destroyed.append(native)
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_queues, "lib", Replacing(lib, ibv_destroy_srq=interrupted))
    monkeypatch.setattr(shared_queues.VerbsSharedReceiveQueue, "_native_create", lambda self: ffi.NULL)
    with fake.open() as adapter:
        shared = shared_queues.VerbsSharedReceiveQueue(adapter, 1, 1, 0)
        with pytest.raises(KeyboardInterrupt):
            shared.close()
        shared.close()
    assert destroyed == [ffi.NULL]


def test_a_queue_pair_that_can_be_neither_set_up_nor_destroyed_says_why_it_cannot_be_set_up(fake, monkeypatch):
    adapter = fake.open()
    queue = adapter.create_completion_queue(8)
    calls = refusing(ibv_modify_qp=errno.ENOMEM)
    calls.ibv_destroy_qp = lambda native: lib.ibv_destroy_qp(native) or errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(queue_pairs, "lib", calls)
        with pytest.raises(ndpy.InsufficientResourcesError) as caught:
            adapter.create_queue_pair(queue)
    assert (caught.value.operation, caught.value.native) == ("create queue pair", errno.ENOMEM)
    queue.close()
    adapter.close()


def test_a_registration_that_can_be_neither_finished_nor_undone_is_told_with_the_number(fake, monkeypatch):
    """Nobody has the region, and the adapter may write to its memory as long as the process lives."""
    native, memory = [], bytearray(64)

    def interrupted(region: Any) -> None:
        native.append(region._native)
        raise KeyboardInterrupt

    with fake.open() as adapter:
        with monkeypatch.context() as patch:
            patch.setattr(memories.VerbsMemoryRegion, "_read_tokens", interrupted)
            fake.settings.dereg_errno = errno.EBUSY
            said = pytest.warns(ResourceWarning, match=r"deregister 64 bytes at 0x.*: EBUSY \(16, ")
            with said as warned, pytest.raises(KeyboardInterrupt):
                # Not plain, so that Python registers it.
                adapter.register(memory, ndpy.Access.LOCAL_WRITE | ndpy.Access.RELAXED_ORDERING)
        assert len(warned) == 1
        with pytest.raises(BufferError):
            memory.extend(b"it would move")
        fake.settings.dereg_errno = 0
        assert lib.ibv_dereg_mr(native[0]) == 0


@pytest.mark.parametrize("nth", range(3))
def test_a_poll_that_the_system_refuses_once_stops_no_close(fake, monkeypatch, nth):
    with fake.open() as adapter:
        queue = adapter.create_completion_queue(8)
        queue_pair = adapter.create_queue_pair(queue)
        drain, calls = queue._native_drain, iter(range(1000))
        monkeypatch.setattr(
            type(queue), "_native_drain", lambda _, native: -errno.EIO if next(calls) == nth else drain(native)
        )
        queue_pair.close()
        queue.close()
        assert next(calls) == 4


def test_a_poll_that_the_system_refuses_for_good_lets_a_close_be_repeated(fake, monkeypatch):
    with fake.open() as adapter:
        queue = adapter.create_completion_queue(8)
        queue_pair = adapter.create_queue_pair(queue)
        with monkeypatch.context() as patch:
            patch.setattr(type(queue), "_native_drain", staticmethod(lambda _: -errno.EIO))
            with pytest.raises(ndpy.ProviderError, match="EIO"):
                queue_pair.close()
        queue_pair.close()
        queue.close()


def test_an_overrun_is_told_to_all_after_a_close_of_a_queue_pair_that_failed_half_way(fake, monkeypatch):
    """The native queue pair has gone, and what was left of it could not be stored."""
    adapter = fake.open()
    scene = Queue(fake, adapter, receives=4)

    def refuse() -> None:
        assert scene.queue_pair._qp is None
        raise ndpy.InsufficientResourcesError("out of memory", operation="flush")

    with monkeypatch.context() as patch:
        patch.setattr(scene.queue_pair, "_cancel_rest", refuse)
        with pytest.raises(ndpy.InsufficientResourcesError):
            scene.queue_pair.close()
    assert len(scene.queue.poll()) == 4
    waiting = Elsewhere(lambda: scene.queue.wait(DEADLINE_S)).start()
    wait_until(lambda: scene.queue._waiters, "a thread waits")
    fake.overrun(scene.queue)
    with pytest.raises(ndpy.CompletionQueueOverrunError):
        waiting.result()
    scene.queue_pair.close()
    scene.queue.close()
    adapter.close()


def test_closing_the_adapter_waits_for_all_that_threads_release_at_the_same_time(fake, monkeypatch):
    """The second release comes when the first is noted and does not run yet."""
    adapter, gate, first = fake.open(), threading.Event(), []
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if not first:
            first.append(thread)
            adapter._in_background(lambda: None)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_late)
        adapter._in_background(lambda: gate.wait(DEADLINE_S))
    closing = Elsewhere(adapter.close).start()
    closing.thread.join(0.1)
    assert closing.thread.is_alive()
    gate.set()
    closing.result()


def test_a_listener_whose_close_was_interrupted_is_destroyed_once(fake, monkeypatch):
    """Ctrl-C comes when the native listener has gone and the queued requests are refused."""
    fake.have_address()
    with fake.open() as adapter:
        listener = adapter.listen(("127.0.0.1", 0))
        for _ in range(2):
            fake.request(listener)
        wait_until(lambda: len(listener._queued) == 2, "two requests wait")
        close = ndpy.Connector.close

        def interrupted(connector: ndpy.Connector) -> None:
            monkeypatch.setattr(ndpy.Connector, "close", close)
            raise KeyboardInterrupt

        monkeypatch.setattr(ndpy.Connector, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            listener.close()
        listener.close()
        assert listener.closed
        assert fake.connecting.rejected == 2


def test_a_callback_that_asks_a_closing_listener_again_is_told_that_it_is_closed(fake):
    fake.have_address()
    with fake.open() as adapter:
        listener = adapter.listen(("127.0.0.1", 0))
        outcomes: list[Any] = []

        def ask_again(_: Any) -> None:
            try:
                outcomes.append(listener.begin_get_request())
            except ndpy.NdpyError as error:
                outcomes.append(error)

        listener.begin_get_request().add_done_callback(ask_again)
        listener.close()
    (outcome,) = outcomes
    assert isinstance(outcome, ndpy.ClosedError), outcome


def test_a_queue_pair_whose_connect_was_interrupted_is_free_when_the_connector_is_closed(fake, monkeypatch):
    """Ctrl-C comes as soon as the queue pair's lock is free."""
    fake.have_address()
    with fake.open_pair() as (adapter, _, queue_pair):
        lock = queue_pair._lock

        class Interrupting:
            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: Any) -> None:
                lock.release()
                monkeypatch.undo()
                raise KeyboardInterrupt

        connector = adapter.create_connector()
        # The core takes no other lock than its own, so only what Python looks up is another one.
        monkeypatch.setattr(type(queue_pair), "_lock", property(lambda _: Interrupting()), raising=False)
        with pytest.raises(KeyboardInterrupt):
            connector.begin_connect(queue_pair, ("127.0.0.1", 4000))
        connector.close()
        adapter.connect(queue_pair, ("127.0.0.1", 4000), timeout_s=DEADLINE_S).close()


def test_an_adapter_can_be_closed_after_ctrl_c_between_two_steps(fake, monkeypatch):
    """Ctrl-C comes while an object is made, or while it notes that it is gone."""
    adapter = fake.open()
    queue = adapter.create_completion_queue(8)

    with pytest.raises(KeyboardInterrupt):
        adapter._make(interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(ndpy.CompletionQueue, "_closed_maker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.close()
    assert queue.closed
    adapter.close()


@pytest.mark.parametrize("what", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_an_attempt_is_given_up_although_no_thread_can_be_started_for_that(fake, monkeypatch, what):
    fake.have_address()
    fake.speak_iwarp()
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_ESTABLISHED
    with fake.open_pair() as (adapter, _, queue_pair), adapter.create_connector() as connector:
        pending = connector.begin_connect(queue_pair, ("127.0.0.1", 4000))

        def refuse(thread: threading.Thread) -> None:
            raise what

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            if isinstance(what, KeyboardInterrupt):
                with pytest.raises(KeyboardInterrupt):
                    pending.cancel()
                pending.cancel()
            else:
                assert pending.cancel()
        assert pending.cancelled()
        assert connector.state == "failed"
