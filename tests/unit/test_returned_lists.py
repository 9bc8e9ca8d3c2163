"""A poll may return the list of an earlier poll again, and fills an array again. A program can never tell. Over a verbs
provider without
a device."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
from kit.helpers import HAS_GIL, contexts
from racing import Queue

import ndpy


def poll_one(scene):
    scene.arrive()
    return scene.queue.poll()


def poll_several(scene, count=3):
    for _ in range(count):
        scene.arrive()
    return scene.queue.poll()


def test_lists_that_are_kept_stay_as_they_were(scene):
    kept = [scene.queue.poll() for _ in range(3)]
    kept += [poll_one(scene) for _ in range(3)]
    kept += [poll_several(scene, count) for count in (3, 3, 2)]
    assert [contexts(completions) for completions in kept] == [[], [], [], [0], [1], [2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert len({id(completions) for completions in kept}) == len(kept)


def test_lists_stay_as_they_were_for_as_long_as_the_program_has_them(scene):
    """It lets each one go after a number of other polls, of lists of other lengths."""
    choose = random.Random(41)
    held = []
    for _ in range(200):
        count = choose.choice((1, 1, 1, 2))
        before = scene.arrived
        held.append((poll_several(scene, count), list(range(before, before + count))))
        for context in range(before, before + count):
            scene.queue_pair.receive([], context=16 + context)
        for completions, expected in held:
            assert contexts(completions) == expected
        held = [each for each in held[-4:] if choose.random() < 0.6]


def test_completions_of_a_list_that_are_kept_stay_as_they_were(scene):
    kept = poll_several(scene)[1]
    later = poll_several(scene)
    assert (kept.context, contexts(later)) == (1, [3, 4, 5])
    del later
    assert (kept.context, contexts(poll_several(scene))) == (1, [6, 7, 8])


def test_completions_of_two_queue_pairs_come_with_their_own(fake):
    """The lists of two queue pairs take turns in the same objects."""
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        with adapter.create_queue_pair(scene.queue, receive_queue_depth=8) as other:
            for context in range(100, 104):
                other.receive([], context=context)
            for expected in (0, 2):
                assert [(found.context, found.queue_pair) for found in poll_several(scene, 2)] == [
                    (context, scene.queue_pair) for context in (expected, expected + 1)
                ]
                assert fake.complete(other) and fake.complete(other)
                assert [(found.context, found.queue_pair) for found in scene.queue.poll()] == [
                    (context, other) for context in (100 + expected, 101 + expected)
                ]
        scene.close()


def test_a_failure_among_others_is_in_its_place(scene):
    assert contexts(poll_several(scene)) == [0, 1, 2]
    scene.arrive()
    assert scene.fake.complete(scene.queue_pair, status=5)
    found = scene.queue.poll()
    assert [(completion.context, completion.ok) for completion in found] == [(3, True), (4, False)]


def test_completions_that_are_kept_stay_as_they_were(scene):
    kept = [poll_one(scene)[0] for _ in range(4)]
    assert contexts(kept) == [0, 1, 2, 3]
    assert len({id(completion) for completion in kept}) == len(kept)


def test_a_loop_variable_keeps_its_completion(scene):
    found = None
    for expected in range(4):
        scene.arrive()
        former = found
        for found in scene.queue.poll():
            assert found.context == expected
        if former is not None:
            assert former.context == expected - 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.append(1),
        lambda found: found.clear(),
        lambda found: found.insert(0, 2),
        list.pop,
        lambda found: found.__setitem__(-1, 3),
        lambda found: found.__setitem__(-1, found[0]),
    ],
    ids=["append", "clear", "insert", "pop", "replace", "repeat"],
)
def test_what_a_program_does_to_its_list_does_not_come_back(scene, change, size):
    for turn in range(3):
        change(poll_several(scene, size))
        first = (2 * turn + 1) * size
        assert contexts(poll_several(scene, size)) == list(range(first, first + size))
        none = scene.queue.poll()
        if change is not list.pop:
            none.append(change)
        del none
        assert scene.queue.poll() == []


def test_a_foreign_object_in_the_list_is_let_go(scene):
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    found = poll_one(scene)
    found[0] = thing
    del thing, found
    assert contexts(poll_one(scene)) == [1]
    assert gone() is None


@pytest.mark.skipif(not HAS_GIL, reason="without the GIL no completion is used again")
def test_a_poll_within_a_poll_has_a_list_of_its_own(fake):
    """A poll that uses a completion again lets go what that one had. A finalizer may poll the same queue then."""
    polled = []

    class PollsAtItsEnd:
        def __del__(self):
            polled.append(queue.poll(1))

    with fake.open() as adapter:
        scene = Queue(fake, adapter, receives=1)
        queue = scene.queue
        assert contexts(poll_one(scene)) == [0]
        posted = scene.queue_pair._posted_requests
        scene.queue_pair.close()
        # Now the completion that will be used again has the last reference.
        del scene
        with adapter.create_queue_pair(queue, receive_queue_depth=2) as other:
            for context in (7, 8):
                other.receive([], context=context)
                assert fake.complete(other)
            posted.stored["last"] = PollsAtItsEnd()
            del posted
            assert contexts(queue.poll(1)) == [7]
            assert [contexts(completions) for completions in polled] == [[8]]
            polled.clear()
        queue.close()


def test_a_cycle_through_the_list_is_collected(fake):
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        queue = scene.queue
        found = queue.poll()
        found.append(found)
        gone = weakref.ref(queue)
        scene.close()
        del found, queue, scene
        gc.collect()
        assert gone() is None


def test_one_array_takes_completions_of_several_queue_pairs_and_queues(fake):
    found = ndpy.CompletionArray(4)

    def take(scene):
        assert scene.queue.poll_into(found) == len(found) == 1
        assert found.all_ok
        return found[0].queue_pair, found[0].context

    with fake.open() as adapter:
        one, two = Queue(fake, adapter), Queue(fake, adapter)
        with adapter.create_queue_pair(one.queue, receive_queue_depth=8) as third:
            for context in range(100, 103):
                third.receive([], context=context)
            for turn in range(3):
                for scene in (one, one, two, one):
                    before = scene.arrived
                    scene.arrive()
                    assert take(scene) == (scene.queue_pair, before)
                assert fake.complete(third)
                assert take(one) == (third, 100 + turn)
            assert one.queue.poll_into(found) == len(found) == 0
        one.close()
        assert fake.complete(two.queue_pair)
        assert take(two)[0] is two.queue_pair
        two.close()


def test_an_array_that_had_several_completions_has_one_afterwards(scene):
    """A poll that spins takes them one after the other."""
    found = ndpy.CompletionArray(4)
    arrival = threading.Timer(0.05, scene.arrive)
    for turn in range(2):
        scene.arrive()
        assert scene.queue.poll_into(found) == 1
        scene.arrive()
        if turn:
            arrival.start()
            assert scene.queue.poll_into(found, at_least=2, spin_s=30) == 2
        else:
            scene.arrive()
            assert scene.queue.poll_into(found) == 2
        scene.arrive()
        before = scene.arrived
        assert scene.queue.poll_into(found) == len(found) == 1
        assert contexts(found) == list(found.contexts) == [before - 1]
    arrival.join()


def test_an_array_lets_go_of_a_closed_queue_pair(fake):
    found = ndpy.CompletionArray(4)
    with fake.open() as adapter:
        scene = Queue(fake, adapter, receives=2)
        for _ in range(2):
            scene.arrive()
            assert scene.queue.poll_into(found) == 1
        gone = weakref.ref(scene.queue_pair)
        scene.queue_pair.close()
        assert scene.queue.poll_into(found) == 0
        del scene.queue_pair
        gc.collect()
        assert gone() is None
        scene.queue.close()
