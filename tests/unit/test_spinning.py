"""Looking for completions again and again before sleeping, over a verbs provider without a device."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
from kit.helpers import contexts
from racing import DEADLINE_S, Elsewhere

import ndpy
from ndpy import CompletionArray

SOON_S = 0.1


def later(action):
    timer = threading.Timer(SOON_S, action)
    timer.start()
    return timer


def test_a_poll_that_spins_gets_what_comes_meanwhile(scene):
    timer = later(scene.arrive)
    began = time.monotonic()
    assert contexts(scene.queue.poll(spin_s=DEADLINE_S)) == [0]
    assert SOON_S / 2 < time.monotonic() - began < DEADLINE_S
    timer.join()


def test_a_poll_that_spins_in_vain_ends_in_time(scene):
    for poll in (
        lambda: scene.queue.poll(spin_s=SOON_S),
        lambda: scene.queue.poll_into(CompletionArray(4), spin_s=SOON_S),
    ):
        began = time.monotonic()
        assert not poll()
        assert SOON_S <= time.monotonic() - began < DEADLINE_S / 2


@pytest.mark.parametrize("spin_s", [0, -1.0, 0.0])
def test_a_poll_that_may_not_spin_ends_at_once(scene, spin_s):
    assert scene.queue.poll(spin_s=spin_s) == []
    assert scene.queue.poll(0, spin_s=DEADLINE_S) == []


def test_wrong_arguments_are_refused(scene):
    with pytest.raises(TypeError):
        scene.queue.poll(spin_s="a")
    with pytest.raises(TypeError):
        scene.queue.poll(64, 0.5)
    with pytest.raises(ValueError, match="the array holds 4 completions, and cannot get 5"):
        scene.queue.poll_into(CompletionArray(4), at_least=5)
    with pytest.raises(TypeError):
        scene.queue.poll_into(CompletionArray(4), at_least="a")


def test_an_array_is_filled_with_as_many_as_were_asked_for(scene):
    completions = CompletionArray(8)
    scene.arrive()
    timers = [later(scene.arrive) for _ in range(3)]
    assert scene.queue.poll_into(completions, at_least=4, spin_s=DEADLINE_S) == 4
    assert list(completions.contexts) == [0, 1, 2, 3]
    for timer in timers:
        timer.join()


@pytest.mark.parametrize("spins", ["poll", "poll_into"])
def test_another_thread_that_needs_the_queue_ends_the_spinning(scene, spins):
    completions = CompletionArray(4)
    polls = {
        "poll": lambda: scene.queue.poll(spin_s=4 * DEADLINE_S),
        "poll_into": lambda: scene.queue.poll_into(completions, spin_s=4 * DEADLINE_S),
    }
    spinning = Elsewhere(polls[spins]).start()
    time.sleep(SOON_S)
    assert scene.queue.poll() == []
    spinning.result()


def test_a_thread_that_polls_again_and_again_leaves_the_queue_to_the_others(fake):
    """Each of them gets the lock after at most one more poll. When it asks, one may be under way, and one that has just
    begun.
    """
    polls, stop = [0], threading.Event()

    def poll() -> None:
        while not stop.is_set():
            queue.poll(spin_s=4 * DEADLINE_S)
            polls[0] += 1

    with fake.open() as adapter:
        queue = adapter.create_completion_queue(16)
        spinning = Elsewhere(poll).start()
        for _ in range(100):
            with queue._lock:
                pass
        stop.set()
        with queue._lock:
            pass
        spinning.result()
        assert polls[0] <= 3 * 101
        queue.close()


def test_closing_the_queue_ends_the_spinning(fake):
    with fake.open() as adapter:
        queue = adapter.create_completion_queue(16)
        spinning = Elsewhere(lambda: queue.poll(spin_s=4 * DEADLINE_S)).start()
        time.sleep(SOON_S)
        queue.close()
        spinning.outcome()


@pytest.mark.parametrize("spins", ["poll", "poll_into", "wait"])
def test_ctrl_c_ends_the_spinning_and_loses_nothing(scene, spins):
    scene.queue.spin_s = scene.queue._present_spin_s = 4 * DEADLINE_S
    timer = later(lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if spins == "poll":
            scene.queue.poll(spin_s=4 * DEADLINE_S)
        elif spins == "poll_into":
            scene.queue.poll_into(CompletionArray(4), spin_s=4 * DEADLINE_S)
        else:
            scene.queue.wait(4 * DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S
    timer.join()
    scene.arrive()
    scene.check()


def test_the_completions_that_came_before_ctrl_c_are_kept(scene):
    def interrupt() -> None:
        scene.arrive()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = later(interrupt)
    completions = CompletionArray(8)
    with pytest.raises(KeyboardInterrupt):
        scene.queue.poll_into(completions, at_least=8, spin_s=4 * DEADLINE_S)
    timer.join()
    assert len(completions) == 0
    scene.check()


def test_a_wait_that_finds_something_soon_does_not_sleep(scene):
    scene.queue.spin_s = scene.queue._present_spin_s = DEADLINE_S
    timer = later(scene.arrive)
    assert contexts(scene.queue.wait(DEADLINE_S)) == [0]
    # A thread that sleeps needs a waiter.
    assert scene.queue._idle_waiters == []
    timer.join()


def test_a_wait_spins_no_longer_than_it_may_take(scene):
    scene.queue.spin_s = scene.queue._present_spin_s = 4 * DEADLINE_S
    began = time.monotonic()
    with pytest.raises(ndpy.TimeoutError):
        scene.queue.wait(SOON_S)
    assert time.monotonic() - began < DEADLINE_S


def test_waits_that_must_sleep_spin_less_and_less_and_learn_again(scene):
    queue = scene.queue
    queue.spin_s = queue._present_spin_s = 1e-3
    spins = []
    for _ in range(12):
        spins.append(queue._present_spin_s)
        timer = later(scene.arrive)
        assert queue.wait(DEADLINE_S)
        timer.join()
        if not queue._present_spin_s:
            break
    assert spins[0] == 1e-3
    assert all(after <= before / 2 for before, after in itertools.pairwise(spins))
    assert queue._present_spin_s == 0
    # A short sleep shows that spinning pays again.
    queue._learn_to_spin(1.5e-3)
    assert queue._present_spin_s == 1e-3
    queue.spin_s = 0
    queue._learn_to_spin(1e-9)
    assert queue._present_spin_s <= 5e-4


def test_a_poller_spins_before_it_sleeps(scene, monkeypatch):
    with ndpy.Poller(spin_s=SOON_S) as poller:
        poller.add(scene.queue)
        sleep = poller._native_wait
        left = []

        def count(deadline):
            left.append(None if deadline is None else deadline - time.monotonic())
            return sleep(deadline)

        monkeypatch.setattr(poller, "_native_wait", count)
        timer = threading.Timer(3 * SOON_S, scene.arrive)
        timer.start()
        ((queue, completions),) = poller.wait()
        timer.join()
        assert (queue, contexts(completions)) == (scene.queue, [0])
        spun = [seconds for seconds in left if seconds is not None]
        assert len(spun) > 10
        assert all(seconds <= 0 for seconds in spun)
        assert left[-1] is None
        left.clear()
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(SOON_S / 2)
        assert sum(seconds > 0 for seconds in left) <= 1


def test_a_poller_that_may_not_spin_sleeps_at_once(scene, monkeypatch):
    with ndpy.Poller() as poller:
        poller.add(scene.queue)
        deadlines = []
        sleep = poller._native_wait
        monkeypatch.setattr(poller, "_native_wait", lambda deadline: deadlines.append(deadline) or sleep(deadline))
        timer = later(scene.arrive)
        assert poller.wait()
        timer.join()
        assert set(deadlines) == {None}
