"""Ctrl-C at each point of a call. What the call used can still be used or closed. The provider has no device."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_verbs import opened
from kit.deadlines import patient
from kit.helpers import is_free
from racing import DEADLINE_S, GRACE_S, Elsewhere, Queue, play_sleep, wait_until

import ndpy
from ndpy.platforms.verbs.completion_queue import VerbsCompletionQueue
from ndpy.platforms.verbs.native_calls import lib
from ndpy.vocabulary import system_files

FOLDER = os.path.dirname(ndpy.__file__)


class CtrlC:
    """Raises KeyboardInterrupt at one of the points at which the interpreter looks at signals.

    These are the beginning of a Python function and the return from a C function. In between there is no other one,
    apart from the ends of loops.
    """

    def __init__(self, chosen: int) -> None:
        self._left = chosen
        self.where = ""

    def _on_event(self, frame: Any, event: str, call: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(FOLDER):
            return
        # An exception in a finalizer is only reported.
        if frame.f_code.co_name == "__del__":
            return
        if not self._left:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}, {event} {getattr(call, '__name__', '')}"
            raise KeyboardInterrupt
        self._left -= 1

    def during(self, call: Callable[[], Any]) -> Any:
        """The value of the call. None if it was interrupted."""
        sys.setprofile(self._on_event)
        try:
            return call()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)


def walk(run: Callable[[CtrlC], None], least: int) -> None:
    """Call run() with an interruption at the first point, the second one, and so on until there is none left."""
    chosen = 0
    while True:
        interruption = CtrlC(chosen)
        try:
            run(interruption)
        except BaseException:
            print(f"at point {chosen}: {interruption.where}")
            raise
        if not interruption.where:
            break
        chosen += 1
    assert chosen >= least, f"only {chosen} points"


adapter = opened()


@pytest.mark.parametrize("kind", ["queue", "queue pair"])
def test_what_is_interrupted_in_close_can_be_closed(fake, adapter, kind):
    def run(interruption: CtrlC) -> None:
        scene = Queue(fake, adapter, receives=2)
        if kind == "queue":
            scene.queue_pair.close()
        resource = scene.queue if kind == "queue" else scene.queue_pair
        interruption.during(resource.close)
        resource.close()
        scene.close()
        assert (fake.counts.queue_pairs, fake.counts.queues, fake.counts.channels) == (0, 0, 0)
        assert fake.fault() == ""

    walk(run, 20 if kind == "queue" else 50)


def test_an_interrupted_wait_does_not_hold_up_the_close_of_its_queue(fake, adapter):
    def wait(queue: ndpy.CompletionQueue) -> None:
        with pytest.raises(ndpy.TimeoutError):
            queue.wait(0)

    def run(interruption: CtrlC) -> None:
        queue = adapter.create_completion_queue(8)
        interruption.during(lambda: wait(queue))
        assert not queue._waiters
        wait(queue)
        queue.close()

    # A sleep is one call in C.
    walk(run, 15)


def test_an_interrupted_end_of_a_sleep_does_not_hold_up_the_close_of_its_queue(fake, adapter, monkeypatch):
    """A poller has the queue too and has to hear of the event, so the sleep ends with calls of Python."""

    def sleep(real: Callable[..., int], *arguments: Any) -> int:
        scene.arrive()
        return real(*arguments)

    play_sleep(monkeypatch, sleep)

    def run(interruption: CtrlC) -> None:
        nonlocal scene
        scene = Queue(fake, adapter)
        with ndpy.Poller() as poller:
            poller.add(scene.queue)
            interruption.during(lambda: scene.queue.wait(DEADLINE_S))
            assert not scene.queue._waiters
        scene.close()

    scene: Any = None
    walk(run, 20)


def descriptors() -> list[str]:
    """What the descriptors of this process refer to."""
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(opened)


def wait_once(adapter: Any) -> Iterator[None]:
    with adapter.create_completion_queue(8) as queue:
        yield
        with pytest.raises(ndpy.TimeoutError):
            queue.wait(0)
        yield


def make_poller(adapter: Any) -> Iterator[None]:
    yield
    ndpy.Poller().close()


def read_a_file(adapter: Any) -> Iterator[None]:
    yield
    assert system_files.read(Path("/proc/self/stat"))


def ask_for_a_device_file(adapter: Any) -> Iterator[None]:
    yield
    system_files.refusal(Path(os.devnull))


def tell_of_a_timeout(adapter: Any) -> Iterator[None]:
    yield
    ndpy.errors.not_finished("wait", 1.0)


@pytest.mark.parametrize("steps", [wait_once, make_poller, read_a_file, ask_for_a_device_file, tell_of_a_timeout])
def test_an_interrupted_call_loses_no_descriptor(fake, adapter, steps):
    """Ctrl-C comes also between the call that opens a descriptor and what keeps it. What follows the first yield of
    steps() is interrupted.
    """

    def run(interruption: CtrlC) -> None:
        gc.collect()
        before = descriptors()
        with contextlib.ExitStack() as rest:
            making = steps(adapter)
            next(making)
            rest.callback(making.close)
            interruption.during(lambda: next(making, None))
        gc.collect()
        assert descriptors() == before

    walk(run, 2)


@pytest.mark.parametrize("raises", [True, False])
def test_a_signal_ends_a_sleep_if_its_handler_raises(fake, adapter, raises):
    """Otherwise the sleep goes on, and the handler has run meanwhile."""
    scene = Queue(fake, adapter)
    main, handled, in_time = threading.get_ident(), threading.Event(), []

    def handler(number: int, frame: Any) -> None:
        if not handled.is_set():
            handled.set()
            if raises:
                raise KeyboardInterrupt

    def send() -> None:
        wait_until(lambda: scene.queue._waiters, "it sleeps")
        deadline = time.monotonic() + patient(1.0)
        # The system call may begin after a signal, as any call may.
        while not handled.is_set() and time.monotonic() < deadline:
            signal.pthread_kill(main, signal.SIGUSR1)
            handled.wait(GRACE_S)
        in_time.append(handled.is_set())
        if not (in_time[0] and raises):
            scene.arrive()

    former = signal.signal(signal.SIGUSR1, handler)
    sender = Elsewhere(send).start()
    try:
        with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
            assert len(scene.queue.wait()) == 1
    finally:
        sender.thread.join(DEADLINE_S)
        signal.signal(signal.SIGUSR1, former)
    assert in_time == [True]
    assert not scene.queue._waiters
    scene.close()


def test_a_poller_misses_nothing_after_an_interrupted_wait(fake, adapter):
    def run(interruption: CtrlC) -> None:
        scenes = [Queue(fake, adapter), Queue(fake, adapter)]
        poller = ndpy.Poller()
        for scene in scenes:
            poller.add(scene.queue)
            scene.arrive()
        interruption.during(lambda: poller.wait(DEADLINE_S))
        for scene in scenes:
            scene.arrive()
        delivered = {queue for queue, _ in poller.wait(DEADLINE_S)}
        assert delivered == {scene.queue for scene in scenes}
        poller.close()
        assert poller._epoll.closed
        for scene in scenes:
            scene.close()

    walk(run, 12)


@pytest.fixture
def interrupt(fake, monkeypatch):
    """Interrupt a poll that has taken three completions of a scene. The first has failed, so that it calls Python."""

    def fail(*arguments: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def interrupt(scene: Queue, step: str = "_collect_one") -> None:
        assert fake.complete(scene.queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
        scene.arrive()
        scene.arrive()
        monkeypatch.setattr(ndpy.CompletionQueue, step, fail)
        with pytest.raises(KeyboardInterrupt):
            ndpy.CompletionQueue.poll(scene.queue)

    return interrupt


@pytest.mark.parametrize("step", ["_collect_one", "_tell_of_news"])
def test_no_completion_is_lost_when_a_poll_is_interrupted(fake, adapter, interrupt, step):
    scene = Queue(fake, adapter, receives=3)
    interrupt(scene, step)
    (first,) = scene.queue.poll(1)
    assert (first.context, first.ok) == (0, False)
    assert [completion.context for completion in scene.queue.poll()] == [1, 2]
    assert scene.queue.poll() == []
    assert scene.queue._taken == 3
    scene.close()


def test_completions_of_an_interrupted_poll_end_one_notification(fake, adapter, interrupt):
    scene = Queue(fake, adapter, receives=8)
    interrupt(scene)
    scene.queue.arm().result(DEADLINE_S)
    second = scene.queue.arm()
    assert not second.done()
    assert len(scene.queue.poll()) == 3
    assert not second.done()
    scene.arrive()
    second.result(DEADLINE_S)
    scene.close()


def test_a_thread_that_is_about_to_sleep_gets_the_completions_of_an_interrupted_poll(
    fake, adapter, interrupt, monkeypatch
):
    scene = Queue(fake, adapter, receives=8)
    go_to_sleep = VerbsCompletionQueue._native_sleep

    def wait(queue: Any, deadline: float) -> bool:
        interrupt(scene)
        return bool(go_to_sleep(queue, deadline))

    for _ in range(2):
        # The first time, the queue has no waiter yet.
        monkeypatch.setattr(VerbsCompletionQueue, "_native_sleep", wait)
        began = time.monotonic()
        assert len(scene.queue.wait(DEADLINE_S)) == 3
        assert time.monotonic() - began < DEADLINE_S / 2
    scene.close()


def test_failures_are_found_among_the_completions_of_an_interrupted_poll(fake, adapter, interrupt):
    scene = Queue(fake, adapter, receives=8)
    interrupt(scene)
    assert [scene.queue._find_failure(first) for first in range(4)] == [1, 0, 0, 0]
    scene.arrive()
    assert fake.complete(scene.queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
    assert scene.queue._drain() == 5
    assert [scene.queue._find_failure(first) for first in range(6)] == [1, 5, 5, 5, 5, 0]
    assert len(scene.queue.poll()) == 5
    scene.close()


def test_an_interrupted_reregistration_frees_no_memory_that_the_adapter_may_use(fake):
    def run(interruption: CtrlC) -> None:
        old, new = bytearray(64), bytearray(100)
        region = adapter.register(old, ndpy.Access.REMOTE_READ)
        interruption.during(lambda: region.reregister(new))
        with contextlib.suppress(ndpy.ProviderError):
            # It can only be closed if it was interrupted in the middle.
            remote = region.remote()
            assert (remote.address, remote.length) == (fake.seen.address, fake.seen.length)
        assert not is_free(new if fake.seen.length == 100 else old)
        region.close()
        assert is_free(old)
        assert is_free(new)

    with fake.open(rereg_result=0) as adapter:
        walk(run, 20)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("cached", [False, True])
def test_an_interrupted_look_up_in_a_cache_holds_up_no_other(fake, cached):
    """Those who want the same memory wait for its registration. close() refuses while memory is in use."""

    def run(interruption: CtrlC) -> None:
        cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=8)
        buffer = bytearray(4096)
        if cached:
            cache.local(buffer).release()
            cache._known_buffers.clear()
        interruption.during(lambda: cache.local(buffer))
        Elsewhere(lambda: cache.local(buffer).release()).start().result()
        cache.close()

    with fake.open() as adapter:
        walk(run, 20 if cached else 60)


def test_an_interrupted_arm_leaves_a_queue_that_can_be_armed(fake, adapter):
    def run(interruption: CtrlC) -> None:
        scene = Queue(fake, adapter)
        interruption.during(scene.queue.arm)
        armed = scene.queue.arm()
        scene.arrive()
        assert armed.result(DEADLINE_S) is None
        scene.check_and_close()

    walk(run, 15)
