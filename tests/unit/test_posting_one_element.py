"""The same element posted again and again, over a verbs provider without a device: it is kept until the last request
has ended.
"""

from __future__ import annotations

import sys

import pytest
from fake_verbs import opened
from kit.helpers import contexts
from racing import Queue

import ndpy

DEPTH = 16


adapter = opened()


@pytest.fixture
def scene(fake, adapter):
    scene = Queue(fake, adapter, receives=0)
    yield scene
    scene.close()


@pytest.fixture
def element(adapter):
    with adapter.register(bytearray(64)) as region:
        yield region[:]


def references(element):
    # The argument of getrefcount(), and this function's own, are none of the requests'.
    return sys.getrefcount(element)


def post_all(scene, element):
    """Fill the queue with it."""
    for context in range(DEPTH):
        scene.queue_pair.receive(element, context=context)


@pytest.mark.parametrize("together", [[1] * DEPTH, [5, 1, DEPTH - 6]])
def test_it_is_kept_until_the_last_request_has_ended(scene, element, together):
    before = references(element)
    post_all(scene, element)
    ended = 0
    for count in together:
        assert references(element) > before
        for _ in range(count):
            scene.arrive()
        assert contexts(scene.queue.poll()) == [*range(ended, ended + count)]
        ended += count
    assert references(element) == before


def test_other_elements_come_between(scene, element, adapter):
    with adapter.register(bytearray(64)) as region:
        elements = [element, region[:]]
        before = [references(each) for each in elements]
        order = [0, 0, 1, 0, 1, 1, 1, 0]
        for context, which in enumerate(order):
            scene.queue_pair.receive(elements[which], context=context)
        for done in range(len(order)):
            now = [references(each) for each in elements]
            assert [now[which] > before[which] for which in range(2)] == [which in order[done:] for which in range(2)]
            scene.arrive()
            assert contexts(scene.queue.poll()) == [done]
        assert [references(each) for each in elements] == before


def test_a_refused_request_is_none_of_them(scene, element):
    before = references(element)
    post_all(scene, element)
    for context in range(DEPTH, 3 * DEPTH):
        for _ in range(2):
            with pytest.raises(ndpy.QueueFullError):
                scene.queue_pair.receive(element, context=context)
        scene.arrive()
        assert contexts(scene.queue.poll()) == [context - DEPTH]
        scene.queue_pair.receive(element, context=context)
    for _ in range(DEPTH):
        assert references(element) > before
        scene.arrive()
        scene.queue.poll()
    assert references(element) == before


def test_a_refused_first_request_is_forgotten(scene, element):
    before = references(element)
    with pytest.raises(ndpy.NotConnectedError):
        scene.queue_pair.send(element)
    assert references(element) == before


def test_closing_the_queue_pair_ends_all_of_them(scene, element):
    before = references(element)
    post_all(scene, element)
    scene.queue_pair.close()
    assert [completion.status for completion in scene.queue.poll()] == DEPTH * [ndpy.Status.CANCELED]
    assert references(element) == before


def test_numbers_that_come_again_mean_the_same(scene, element):
    given = [7, 7, (1 << 64) - 1, True, 7, (1 << 64) - 1, 0]
    for context in given:
        scene.queue_pair.receive(element, context=context)
        scene.arrive()
    assert contexts(scene.queue.poll()) == given


def test_arguments_by_name_come_in_any_order_and_are_checked_each_time(scene, element):
    receive, send = scene.queue_pair.receive, scene.queue_pair.send
    for _ in range(3):
        receive(element, context=1)
        receive(context=2, sges=element)
        for wrong in ({"context": 1, "flags": 2}, {"flags": 2}, {"remote": None}):
            with pytest.raises(TypeError, match="that it does not take"):
                receive(element, **wrong)
        for names in ({"flags": 0, "context": 1}, {"context": 1, "flags": 0}, {"flags": 0}, {}):
            with pytest.raises(ndpy.NotConnectedError):
                send(element, **names)
        with pytest.raises(ValueError, match="context"):
            receive(element, context=-1)
    for _ in range(6):
        scene.arrive()
    assert contexts(scene.queue.poll()) == [1, 2, 1, 2, 1, 2]
