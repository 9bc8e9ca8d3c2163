"""What follows when the provider gives a completion queue up, or the adapter goes: everybody learns of it, also who
only polls.
"""

from __future__ import annotations

import asyncio
import errno
import time

import pytest
from kit.helpers import contexts
from racing import DEADLINE_S, LOSSES, Elsewhere, Queue, wait_until

import ndpy

HOWS = pytest.mark.parametrize("how", LOSSES)
Overrun = ndpy.CompletionQueueOverrunError


@pytest.fixture
def lost(fake):
    """A queue with three completions that was overrun."""
    with fake.open() as adapter:
        scene = Queue(fake, adapter, receives=3)
        for _ in range(3):
            scene.arrive()
        fake.overrun(scene.queue)
        wait_until(lambda: scene.queue._failure, "the queue knows")
        yield scene
        scene.close()


@pytest.fixture
def idle(fake):
    """A queue to which nothing comes."""
    with fake.open() as adapter:
        scene = Queue(fake, adapter, receives=0)
        yield scene
        scene.close()


def lose(scene: Queue, how: str) -> None:
    adapter = scene.queue._adapter
    scene.fake.remove(adapter) if how == "removal" else scene.fake.overrun(scene.queue)


def poll_into(queue, room=16, **options):
    array = ndpy.CompletionArray(room)
    queue.poll_into(array, **options)
    return list(array.contexts)


def with_poller(queue):
    with ndpy.Poller() as poller:
        poller.add(queue)
        ((_, completions),) = poller.wait(DEADLINE_S)
        return contexts(completions)


CALLS = {
    "poll": lambda queue: contexts(queue.poll()),
    "poll one": lambda queue: contexts(queue.poll(1)),
    "poll and spin": lambda queue: contexts(queue.poll(spin_s=10 * DEADLINE_S)),
    "poll into": poll_into,
    "poll one into": lambda queue: poll_into(queue, 1),
    "poll into and spin": lambda queue: poll_into(queue, at_least=16, spin_s=10 * DEADLINE_S),
    "wait": lambda queue: contexts(queue.wait(DEADLINE_S)),
    "wait_async": lambda queue: contexts(asyncio.run(queue.wait_async(DEADLINE_S))),
    "poller": with_poller,
}


@pytest.mark.parametrize("call", CALLS)
def test_who_takes_completions_gets_what_is_left_and_then_learns_of_the_overrun(lost, call):
    left = [0, 1, 2]
    begin = time.monotonic()
    while left:
        taken = CALLS[call](lost.queue)
        assert taken == left[: len(taken)]
        assert taken
        del left[: len(taken)]
    for _ in range(2):
        with pytest.raises(Overrun, match="depth 64"):
            CALLS[call](lost.queue)
    assert time.monotonic() - begin < DEADLINE_S, "nobody looked for longer than needed"


def test_an_array_that_was_polled_into_again_and_again_learns_of_the_overrun(lost):
    """The usual case of poll_into() has a way of its own."""
    array = ndpy.CompletionArray(1)
    for context in range(3):
        assert lost.queue.poll_into(array) == 1
        assert list(array.contexts) == [context]
    with pytest.raises(Overrun):
        lost.queue.poll_into(array)
    assert len(array) == 0


def test_who_asks_for_no_completion_learns_nothing(lost):
    assert lost.queue.poll(0) == []
    assert contexts(lost.queue.poll(3)) == [0, 1, 2]
    assert lost.queue.poll(0) == []


def test_completions_that_were_kept_come_before_the_overrun(lost):
    with lost.queue._lock:
        lost.queue._drain()
    assert contexts(lost.queue.poll(2)) == [0, 1]
    assert contexts(lost.queue.poll(2)) == [2]
    with pytest.raises(Overrun):
        lost.queue.poll(2)


@HOWS
@pytest.mark.parametrize("spin_s", [0.0, 10 * DEADLINE_S])
@pytest.mark.parametrize("into", [False, True])
def test_a_loss_ends_a_loop_that_only_polls(idle, how, into, spin_s):
    array = ndpy.CompletionArray(4)

    def poll_until_told() -> None:
        while True:
            taken = idle.queue.poll_into(array, spin_s=spin_s) if into else idle.queue.poll(spin_s=spin_s)
            assert not taken

    polling = Elsewhere(poll_until_told).start()
    lose(idle, how)
    with pytest.raises(LOSSES[how]):
        polling.result()


def test_arm_says_that_the_queue_was_overrun(lost):
    with pytest.raises(Overrun):
        lost.queue.arm()


def test_nothing_can_be_posted_after_an_overrun(lost):
    queue_pair, adapter = lost.queue_pair, lost.queue.adapter
    before = queue_pair._in_flight()
    batch = ndpy.Batch(1)
    batch.receive([])
    with adapter.register(bytearray(8)) as region:
        remote = ndpy.RemoteMemory(0, 8, 0)
        for post in (
            lambda: queue_pair.send(region[:8]),
            lambda: queue_pair.send([]),
            lambda: queue_pair.receive([]),
            lambda: queue_pair.receive(region[:8]),
            lambda: queue_pair.write(region[:8], remote),
            lambda: queue_pair.read(region[:8], remote),
            lambda: queue_pair.post(batch),
            lambda: queue_pair.receive_many([[]]),
            queue_pair.flush,
        ):
            with pytest.raises(Overrun):
                post()
    assert queue_pair._in_flight() == before


def test_nothing_can_be_posted_as_soon_as_a_poll_tells_of_the_overrun(idle, fake, monkeypatch):
    """The thread that tells all others of the failure stands still in the middle."""
    queue_pair, tell = idle.queue_pair, type(idle.queue_pair)._on_queue_failed
    answers = []

    def tell_late(told) -> None:
        with pytest.raises(Overrun):
            idle.queue.poll()
        answers.append("told")
        with pytest.raises(Overrun):
            queue_pair.receive([])
        answers.append("refused")
        tell(told)

    monkeypatch.setattr(type(queue_pair), "_on_queue_failed", tell_late)
    fake.overrun(idle.queue)
    wait_until(lambda: len(answers) == 2, "all are told")


def test_a_queue_that_was_overrun_takes_no_new_queue_pair(lost):
    adapter = lost.queue.adapter
    with adapter.create_completion_queue(8) as other:
        for queues in ((lost.queue, None), (other, lost.queue), (lost.queue, other)):
            with pytest.raises(Overrun):
                adapter.create_queue_pair(*queues)


def test_a_queue_pair_that_is_made_during_the_overrun_is_unusable_too(fake, monkeypatch):
    """It has joined its queues, and the adapter does not know it yet."""
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        opened = type(scene.queue_pair)._opened

        def overrun_first(queue_pair) -> None:
            fake.overrun(scene.queue)
            wait_until(lambda: scene.queue._failure, "the queue knows")
            opened(queue_pair)

        monkeypatch.setattr(type(scene.queue_pair), "_opened", overrun_first)
        late = adapter.create_queue_pair(scene.queue)
        with pytest.raises(Overrun):
            late.receive([])
        late.close()
        scene.close()


def test_a_queue_pair_stays_unusable_after_a_close_that_failed(lost):
    lost.fake.failures.destroy_qp = errno.EIO
    with pytest.raises(ndpy.ProviderError, match="close queue pair"):
        lost.queue_pair.close()
    lost.fake.failures.destroy_qp = 0
    with pytest.raises(Overrun):
        lost.queue_pair.receive([])
