"""Each event in each state of a connector, even where it is impossible. The platform's native steps do nothing.

The grid says what is expected, from contract H.1.4, H.4.2, H.6 and H.8. It has a row for each event and a column for
each state. A word is the state that follows. An impossible operation raises NotConnectedError (N),
ConnectionActiveError (A), or ConnectionAbortedError if the client has gone (G). News that comes too late changes
nothing (-).
"""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import pytest
from kit import linux_only as linux_only
from kit.helpers import interrupted

import ndpy
from ndpy.objects.connection import Connector
from ndpy.objects.connection_parameters import ReadLimits
from ndpy.objects.connection_states import CALLS, TRANSITIONS, Event, State

GRID = """
                   idle       bound  connecting  offered     completing   requested  accepting    established   disconnected  failed
BIND               bound      bound  A           A           A            N          A            A             N             N
CONNECT            connecting connecting A       A           A            N          A            A             N             N
COMPLETE_CONNECT   N          N      N           completing  N            N          N            N             N             N
ACCEPT             N          N      A           A           A            accepting  A            A             N             G
REJECT             N          N      N           failed      failed       failed     N            N             N             N
DISCONNECT         N          N      N           N           N            N          N            established   disconnected  N
WAIT_DISCONNECTED  N          N      N           N           N            N          N            established   disconnected  N
CLOSE              idle       bound  failed      failed      failed       failed     failed       disconnected  disconnected  failed
REQUESTED          requested  -      -           -           -            -          -            -             -             -
OFFERED            -          -      offered     -           -            -          -            -             -             -
REFUSED            -          -      idle        -           -            -          -            -             -             -
REFUSED_WHEN_BOUND -          -      bound       -           -            -          -            -             -             -
ESTABLISHED        -          -      -           -           established  -          established  -             -             -
LOST               -          -      failed      failed      failed       failed     failed       -             -             -
WITHDRAWN          -          -      failed      failed      failed       -          failed       -             -             -
ENDED              -          -      -           -           -            -          -            disconnected  disconnected  -
"""  # noqa: E501
ERRORS = {"N": ndpy.NotConnectedError, "A": ndpy.ConnectionActiveError, "G": ndpy.ConnectionAbortedError}
SERVER = ("127.0.0.1", 4791)
LIMITS = ReadLimits(1, 1)


def grid() -> dict[tuple[str, Event], str]:
    states, *rows = [line.split() for line in GRID.strip().splitlines()]
    return {(state, Event[row[0]]): entry for row in rows for state, entry in zip(states, row[1:], strict=True)}


class StillConnector(Connector):
    """A connector whose native steps are noted and do nothing."""

    def __init__(self, adapter: ndpy.Adapter) -> None:
        super().__init__(adapter)
        self.steps: list[Any] = []
        self._opened()

    def _native_address(self, peer: bool) -> None:
        return None

    def _native_bind(self, address: Any) -> Any:
        self.steps.append("bind")
        return address

    def _native_connect(self, queue_pair: Any, family: int, destination: Any) -> None:
        self.steps.append("connect")

    def _native_complete(self, queue_pair: Any) -> None:
        self.steps.append("complete")

    def _native_accept(self, queue_pair: Any) -> None:
        self.steps.append("accept")

    def _native_established(self) -> None:
        self.steps.append("established")

    def _native_reject(self, private_data: bytes) -> None:
        self.steps.append(("reject", self._state))

    def _native_forget_attempt(self) -> None:
        self.steps.append("forget attempt")

    def _native_abandon_attempt(self, error: Any) -> None:
        self.steps.append("abandon attempt")

    def _native_withdraw(self, former: State) -> None:
        self.steps.append(("withdraw", former))

    def _native_disconnect(self) -> None:
        self.steps.append("disconnect")

    def _native_tell_peer(self) -> None:
        self.steps.append("tell peer")

    def _native_on_failed_completion(self) -> None:
        self.steps.append("failed completion")

    def _native_free(self) -> None:
        self.steps.append("free")


class Scene:
    """A connector with a queue pair, in the requested state."""

    def __init__(self, adapter: ndpy.Adapter, queue: ndpy.CompletionQueue, state: str) -> None:
        self.queue_pair = adapter.create_queue_pair(queue)
        self.connector = StillConnector(adapter)
        self.pending: Any = None
        for event in {
            "idle": [],
            "bound": [Event.BIND],
            "connecting": [Event.CONNECT],
            "offered": [Event.CONNECT, Event.OFFERED],
            "completing": [Event.CONNECT, Event.OFFERED, Event.COMPLETE_CONNECT],
            "requested": [Event.REQUESTED],
            "accepting": [Event.REQUESTED, Event.ACCEPT],
            "established": [Event.REQUESTED, Event.ACCEPT, Event.ESTABLISHED],
            "disconnected": [Event.REQUESTED, Event.ACCEPT, Event.ESTABLISHED, Event.ENDED],
            "failed": [Event.REQUESTED, Event.REJECT],
        }[state]:
            self.pass_event(event)
        assert self.connector.state == state
        self.connector.steps.clear()

    def pass_event(self, event: Event) -> None:
        connector, error = self.connector, ndpy.ConnectionRefusedError("refused")
        call = {
            Event.BIND: lambda: connector.bind(SERVER),
            Event.CONNECT: lambda: connector.begin_connect(self.queue_pair, SERVER),
            Event.COMPLETE_CONNECT: connector.begin_complete_connect,
            Event.ACCEPT: lambda: connector.begin_accept(self.queue_pair),
            Event.REJECT: connector.reject,
            Event.DISCONNECT: connector.begin_disconnect,
            Event.WAIT_DISCONNECTED: connector.begin_wait_disconnected,
            Event.CLOSE: connector.close,
            Event.REQUESTED: lambda: connector._on_requested(b"request", LIMITS),
            Event.OFFERED: lambda: connector._on_offered(b"offer", LIMITS),
            Event.REFUSED: lambda: connector._on_connect_failed(error),
            Event.REFUSED_WHEN_BOUND: lambda: self.refuse_when_bound(error),
            Event.ESTABLISHED: connector._on_established,
            Event.LOST: lambda: connector._on_lost(error),
            Event.WITHDRAWN: lambda: connector._end_attempt(Event.WITHDRAWN),
            Event.ENDED: connector._on_disconnected,
        }[event]
        begun = call()
        if isinstance(begun, ndpy.Pending):
            self.pending = begun

    def refuse_when_bound(self, error: ndpy.NdpyError) -> None:
        self.connector._bound_to = SERVER
        self.connector._on_connect_failed(error)

    def look(self) -> tuple[Any, ...]:
        """Everything that late news could change."""
        connector, queue_pair = self.connector, self.queue_pair
        return (
            connector.state,
            connector._private_data,
            connector._read_limits,
            connector.queue_pair,
            queue_pair.connector,
            queue_pair._never_connected,
            queue_pair.connection_ended,
            connector._pending,
            self.pending.done() if self.pending is not None else None,
            list(connector.steps),
        )


@pytest.fixture
def scene(fake):
    fake.have_address()
    with fake.open() as adapter, adapter.create_completion_queue(64) as queue:
        scenes = []

        def make(state: str) -> Scene:
            scenes.append(Scene(adapter, queue, state))
            return scenes[-1]

        yield make
        for one in scenes:
            one.connector.close()
            one.queue_pair.close()


def test_the_table_has_the_rows_of_the_grid_and_no_others():
    expected = {pair: entry for pair, entry in grid().items() if entry not in ("-", *ERRORS)}
    assert expected == TRANSITIONS
    assert {state for state, _ in grid()} == set(get_args(State))
    assert {event for _, event in grid()} == set(Event)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("state", get_args(State))
def test_each_event_in_each_state(scene, state, event):
    one = scene(state)
    expected, before = grid()[state, event], one.look()
    if expected in ERRORS:
        with pytest.raises(ERRORS[expected]) as caught:
            one.pass_event(event)
        assert type(caught.value) is ERRORS[expected]
        assert caught.value.operation == event.value
        assert one.look() == before
    elif expected == "-":
        one.pass_event(event)
        assert one.look() == before
    else:
        one.pass_event(event)
        assert one.connector.state == expected


@pytest.mark.parametrize("state", get_args(State))
def test_what_is_impossible_says_what_is_possible(scene, state):
    possible = {event.value for event in CALLS if grid()[state, event] not in ERRORS}
    for event in CALLS:
        if grid()[state, event] in ("N", "A"):
            with pytest.raises(ndpy.NdpyError) as caught:
                scene(state).pass_event(event)
            assert f"the connector is {state}" in str(caught.value)
            assert set(re.findall(r"(\w+)\(\)", str(caught.value))) == possible


def test_an_offer_that_was_taken_back_is_no_mistake_of_the_program(scene):
    """Whoever completes the connection cannot have known."""
    offered = scene("offered")
    offered.pass_event(Event.LOST)
    with pytest.raises(ndpy.ConnectionAbortedError, match="the server has taken its offer back"):
        offered.pass_event(Event.COMPLETE_CONNECT)


def test_the_documentation_of_the_states_agrees_with_the_table():
    lines = re.findall(r"^    (\w+): (.*)$", inspect.getdoc(Connector) or "", re.MULTILINE)
    states = get_args(State)
    documented = {state: set(re.findall(r"(\w+)\(\)", rest)) for state, rest in lines if state in states}
    possible = {state: set() for state in states}
    for state, event in TRANSITIONS:
        if event in CALLS and event is not Event.CLOSE:
            possible[state].add(event.value)
    assert documented == possible


# ---- events on the way ----

ENDINGS = [Event.REJECT, Event.CLOSE, Event.REFUSED, Event.LOST, Event.WITHDRAWN]


@pytest.mark.parametrize(
    ("state", "event"),
    [(state, event) for (state, event), after in TRANSITIONS.items() if event in ENDINGS and after != state],
    ids=str,
)
def test_an_attempt_that_ends_lets_the_queue_pair_go_and_ends_what_waits(scene, state, event):
    one = scene(state)
    begun = one.connector._pending
    one.pass_event(event)
    assert (one.connector.queue_pair, one.queue_pair.connector, one.connector._pending) == (None, None, None)
    # A cancelled request ends itself. Any other event ends it with an error.
    assert begun is None or event is Event.WITHDRAWN or begun.exception(0) is not None
    # Messages may have come, so the queue pair can serve no other connection.
    assert one.queue_pair.connection_ended == (state in ("completing", "accepting", "established"))


@pytest.mark.parametrize("state", ["connecting", "offered", "completing", "requested", "accepting"])
def test_what_this_side_gives_up_is_taken_back(scene, state):
    one = scene(state)
    one.connector.close()
    assert one.connector.steps == [("withdraw", state), "free"]


@pytest.mark.parametrize("state", ["connecting", "offered", "completing", "accepting"])
def test_a_queue_pair_that_is_closed_withdraws(scene, state):
    one = scene(state)
    one.queue_pair.close()
    assert (one.connector.state, one.connector.steps) == ("failed", [("withdraw", state)])
    if state != "offered":
        assert isinstance(one.pending.exception(0), ndpy.CanceledError)


@pytest.mark.parametrize("state", ["offered", "completing", "requested"])
def test_rejecting_is_done_in_the_state_that_it_was_called_in(scene, state):
    one = scene(state)
    one.connector.reject()
    assert one.connector.steps == [("reject", state), "forget attempt"]


def test_closing_a_connection_tells_the_peer_first(scene):
    one = scene("established")
    one.connector.close()
    assert one.connector.steps == ["tell peer", "free"]


def test_a_complete_connect_that_is_cancelled_goes_on(scene):
    one = scene("completing")
    assert one.pending.cancel()
    assert one.connector.state == "completing"
    one.connector._on_established()
    assert one.connector.state == "established"


def test_a_close_that_is_interrupted_ends_what_waits_and_can_be_repeated(scene, monkeypatch):
    """On Windows, Ctrl-C interrupts the wait for the provider."""
    one = scene("established")
    waiting = one.connector.begin_wait_disconnected()

    with monkeypatch.context() as patch:
        patch.setattr(one.connector, "_native_end_requests", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.connector.close()
    assert isinstance(waiting.exception(1), ndpy.CanceledError)
    assert (one.connector.closed, one.connector.state) == (False, "established")
    one.connector.close()
    assert (one.connector.closed, one.connector.steps) == (True, ["tell peer", "free"])


@pytest.mark.parametrize(
    ("error", "state", "step"),
    [
        (ndpy.AddressUnreachableError("no way"), "idle", "forget attempt"),
        # The provider may have begun to connect.
        (KeyboardInterrupt(), "failed", ("withdraw", "connecting")),
    ],
    ids=["refused", "interrupted"],
)
def test_a_connect_that_did_not_return_is_taken_back(scene, monkeypatch, error, state, step):
    one = scene("idle")

    def connect(*_: Any) -> None:
        raise error

    monkeypatch.setattr(one.connector, "_native_connect", connect)
    with pytest.raises(type(error)):
        one.connector.begin_connect(one.queue_pair, SERVER)
    assert (one.connector.state, one.connector.steps) == (state, [step])
    assert (one.connector.queue_pair, one.queue_pair.connector) == (None, None)


def test_ctrl_c_in_a_callback_while_close_ends_the_calls_keeps_none_waiting(scene):
    one = scene("established")
    waiting = [one.connector.begin_wait_disconnected() for _ in range(3)]

    waiting[0].add_done_callback(interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.connector.close()
    one.connector.close()
    assert one.connector.closed
    assert all(isinstance(pending.exception(1), ndpy.CanceledError) for pending in waiting)
    assert one.connector.steps.count("tell peer") == 1
