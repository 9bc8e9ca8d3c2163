"""Each event in each state of a connection of ndpy.aio, and ends that cross.

The grid says what is expected: a row for each event and a column for each state. A word is the state that follows. What
comes too early or too late changes nothing (-).
"""

from __future__ import annotations

import asyncio
import threading
from typing import get_args

import pytest

import ndpy
from ndpy import aio
from ndpy.aio.interrupts import Interrupts
from ndpy.aio.life import ALIVE, SENDING, TRANSITIONS, USABLE, Event, Life, State

GRID = """
            connecting severed  opening  open        closing  peer_closed  leaving  ended    freeing  free
AGREED      opening    opening  -        -           -        -            -        -        -        -
SEVERED     severed    severed  -        -           -        -            -        -        -        -
STARTED     open       -        open     -           -        -            -        -        -        -
CLOSE       leaving    leaving  leaving  closing     -        leaving      -        -        -        -
PEER_CLOSED -          -        -        peer_closed leaving  -            leaving  -        -        -
LEAVE       -          -        -        -           leaving  -            leaving  -        -        -
END         ended      ended    ended    ended       ended    ended        ended    -        -        -
FREE        -          -        -        -           -        -            -        freeing  -        -
FREED       -          -        -        -           -        -            -        free     free     free
"""
#: How each state is reached.
WAYS = {
    "connecting": [],
    "severed": [Event.SEVERED],
    "opening": [Event.AGREED],
    "open": [Event.AGREED, Event.STARTED],
    "closing": [Event.AGREED, Event.STARTED, Event.CLOSE],
    "peer_closed": [Event.AGREED, Event.STARTED, Event.PEER_CLOSED],
    "leaving": [Event.AGREED, Event.STARTED, Event.PEER_CLOSED, Event.CLOSE],
    "ended": [Event.END],
    "freeing": [Event.END, Event.FREE],
    "free": [Event.END, Event.FREE, Event.FREED],
}


def grid() -> dict[tuple[str, Event], str]:
    states, *rows = [line.split() for line in GRID.strip().splitlines()]
    return {(state, Event[row[0]]): entry for row in rows for state, entry in zip(states, row[1:], strict=True)}


class Ends(list):
    """The states in which a life told its connection of its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.life = Life(loop, Interrupts(loop), lambda: self.append(self.life.state))

    def pass_events(self, *events: Event) -> Life:
        for event in events:
            if event is Event.END:
                self.life.end("planted")
            else:
                self.life.on(event)
        return self.life


@pytest.fixture
def play():
    """play(scene) runs the coroutine function scene(ends)."""

    def run(scene):
        async def main():
            await scene(Ends(asyncio.get_running_loop()))

        asyncio.run(asyncio.wait_for(main(), 30))

    return run


def test_the_table_has_the_rows_of_the_grid_and_no_others():
    assert {pair: entry for pair, entry in grid().items() if entry != "-"} == TRANSITIONS
    assert {state for state, _ in grid()} == set(get_args(State)) == set(WAYS)
    assert {event for _, event in grid()} == set(Event)


def test_a_connection_is_alive_until_its_end():
    assert set(ALIVE) == {state for state, event in TRANSITIONS if event is Event.END}
    assert set(SENDING) < set(USABLE) < set(ALIVE)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("state", get_args(State))
def test_each_event_in_each_state(play, state, event):
    async def scene(ends):
        life = ends.pass_events(*WAYS[state])
        assert life.state == state
        before, why = len(ends), life.error()
        waiting = asyncio.ensure_future(life.past(state))
        await asyncio.sleep(0)
        ends.pass_events(event)
        after = grid()[state, event]
        assert life.state == (state if after == "-" else after)
        assert len(ends) - before == (after == "ended")
        if after in ("-", state):
            assert str(life.error()) == str(why)
            assert (await asyncio.wait((waiting,), timeout=0.01))[1]
        elif event is not Event.FREED:
            await waiting
        waiting.cancel()

    play(scene)


# ---- ends that cross ----


@pytest.mark.parametrize("first", [Event.CLOSE, Event.PEER_CLOSED])
def test_whoever_closes_first_both_have_closed(play, first):
    async def scene(ends):
        second = {Event.CLOSE, Event.PEER_CLOSED} - {first}
        life = ends.pass_events(*WAYS["open"], first, *second)
        assert life.state == "leaving"
        with pytest.raises(ndpy.ClosedError, match="was closed"):
            life.require(USABLE)
        life.require(ALIVE)

    play(scene)


def test_the_first_reason_of_an_end_stays(play):
    async def scene(ends):
        life = ends.pass_events(*WAYS["closing"])
        life.end("the cable", OSError("planted"))
        life.end("this end was closed", kind=ndpy.ClosedError)
        ends.pass_events(Event.PEER_CLOSED, Event.LEAVE, Event.FREE, Event.FREED)
        error = life.error()
        assert (type(error), str(error.__cause__)) == (aio.ConnectionResetError, "planted")
        assert str(error) == "the connection to the peer has ended: the cable (ndpy explain connection-lost)"
        assert life.error() is not error
        assert ends == ["ended"]

    play(scene)


@pytest.mark.parametrize("state", ["connecting", "severed", "opening"])
def test_what_ends_while_it_is_opening_does_not_begin_any_more(play, state):
    async def scene(ends):
        life = ends.pass_events(*WAYS[state], Event.END, Event.AGREED, Event.STARTED, Event.CLOSE, Event.FREE)
        assert life.state == "freeing"
        with pytest.raises(aio.ConnectionResetError, match="planted"):
            life.require(ALIVE)

    play(scene)


def test_all_who_wait_learn_of_the_end(play):
    async def scene(ends):
        life = ends.pass_events(*WAYS["open"])
        until = asyncio.get_running_loop().create_future()
        waiting = [asyncio.ensure_future(life.past(*ALIVE, until=some)) for some in ((), (until,))]
        await asyncio.sleep(0)
        # The state changes, and neither waits for that.
        ends.pass_events(Event.CLOSE, Event.PEER_CLOSED)
        assert (await asyncio.wait(waiting, timeout=0.01))[0] == set()
        life.end("planted")
        await asyncio.gather(*waiting)
        assert not until.done()

    play(scene)


def test_a_state_is_waited_for_no_longer_than_the_time():
    async def main():
        life = Ends(asyncio.get_running_loop()).life
        begin = life.loop.time()
        for timeout_s in (0.0, 0.05):
            await life.past("connecting", timeout_s=timeout_s)
        assert 0.05 <= life.loop.time() - begin < 10

    asyncio.run(main())


@pytest.mark.parametrize("state", ["opening", "open", "closing", "leaving", "ended"])
def test_after_the_end_of_the_loop_another_thread_ends_and_frees_it(state):
    """The garbage collector may run in any thread."""
    loop = asyncio.new_event_loop()
    ends = Ends(loop)
    life = ends.pass_events(*WAYS[state])
    waiting = life._changed
    loop.close()
    ends.clear()
    thread = threading.Thread(target=lambda: (life.on_dropped(), life.on(Event.FREED)))
    thread.start()
    thread.join(30)
    assert ends == ["ended"]
    assert life.state == "free"
    assert not waiting.done()
    with pytest.raises(aio.ConnectionResetError, match="planted" if state == "ended" else "its event loop was closed"):
        life.require(ALIVE)
