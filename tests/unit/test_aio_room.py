"""Room in ndpy/aio/tasks.py: places that tasks take and give back."""

from __future__ import annotations

import asyncio

import pytest

from ndpy.aio.tasks import Room


async def turn():
    """Let every task that can run do so."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_places_are_given_in_the_order_of_the_calls():
    room, order = Room(asyncio.get_running_loop(), 4), []

    async def take(count):
        await room.take(count)
        order.append(count)

    await room.take(3)
    tasks = [asyncio.ensure_future(take(count)) for count in (4, 1, 2)]
    await turn()
    # The one that wants 1 could have it, but the one that wants 4 would wait for ever among many of its kind.
    assert order == []
    assert room.full
    room.give(3)
    await turn()
    assert order == [4]
    room.give(4)
    await asyncio.gather(*tasks)
    assert order == [4, 1, 2]
    assert not room.full


@pytest.mark.parametrize("given", [False, True])
async def test_a_cancelled_task_leaves_its_places_to_those_behind_it(given):
    room = Room(asyncio.get_running_loop(), 2)
    await room.take(2)
    first, second = asyncio.ensure_future(room.take(2)), asyncio.ensure_future(room.take(1))
    await turn()
    if given:
        room.give(2)
    else:
        room.give(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 5)
    assert room.full != given
    if not given:
        room.give(2)
    # All places are there again.
    await asyncio.wait_for(room.take(1), 5)
