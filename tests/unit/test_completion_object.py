"""Completion by itself: a record with named fields and nothing else."""

from __future__ import annotations

import pytest
from racing import Queue


def test_two_completions_that_say_the_same_are_two(fake):
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        scene.arrive()
        scene.arrive()
        first, second = scene.queue.poll()
        assert first != second
        assert len({first, second}) == 2
        scene.close()


def test_a_completion_has_no_order_length_or_items(fake):
    with fake.open() as adapter:
        scene = Queue(fake, adapter)
        scene.arrive()
        (completion,) = scene.queue.poll()
        for use in (lambda: completion < completion, lambda: len(completion), lambda: completion[0]):
            with pytest.raises(TypeError):
                use()
        assert bool(completion)
        scene.close()
