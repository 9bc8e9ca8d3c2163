"""A weak set that threads share."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from ndpy.vocabulary.weak_set import SharedWeakSet


class Thing:
    pass


@pytest.fixture
def switching():
    """Make threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("look", [SharedWeakSet.members, SharedWeakSet.take])
def test_it_can_grow_while_another_thread_looks(switching, look):
    shared: SharedWeakSet[Thing] = SharedWeakSet()
    things = [Thing() for _ in range(4_000)]
    found: set[Thing] = set()

    def add() -> None:
        for thing in things:
            shared.add(thing)

    adding = threading.Thread(target=add)
    adding.start()
    while adding.is_alive():
        found.update(look(shared))
    found.update(look(shared))
    assert found == set(things)


def test_what_is_dropped_is_not_in_it():
    shared: SharedWeakSet[Thing] = SharedWeakSet()
    kept, dropped = Thing(), Thing()
    shared.add(kept)
    shared.add(dropped)
    del dropped
    gc.collect()
    assert shared.members() == shared.take() == [kept]
    assert shared.members() == []
