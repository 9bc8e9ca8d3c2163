"""The life of a connection: its states, the table of events that lead from one to another, and who learns of them."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

from ndpy import errors
from ndpy.aio.errors import ConnectionEndedError, ConnectionResetError, ProtocolError
from ndpy.aio.interrupts import Interrupts
from ndpy.aio.tasks import start
from ndpy.vocabulary.loggers import logger

if TYPE_CHECKING:
    from ndpy.aio.hub import Hub

_log = logger("ndpy.aio")

# How long close(), and what waits for the peer, may take together after hurry().
_HURRY_S = 0.4

# connecting: the connector says why if it fails. severed: requests were cancelled meanwhile, as siw does before a
# refusal. opening: START is awaited. closing, peer_closed: CLOSE went or came. leaving: this end waits for no CLOSE,
# and disconnects.
State = Literal[
    "connecting", "severed", "opening", "open", "closing", "peer_closed", "leaving", "ended", "freeing", "free"
]


class Event(enum.Enum):
    """What can happen to a connection."""

    AGREED = "the connectors of both ends have agreed"
    SEVERED = "the adapter has cancelled a request"
    STARTED = "the peer's START came"
    CLOSE = "this end was closed, and sends CLOSE"
    PEER_CLOSED = "the peer's CLOSE came"
    LEAVE = "this end waits for the peer's CLOSE no longer"
    END = "it is over. Life.error() says why"
    FREE = "its objects are being closed"
    FREED = "its objects are closed"


#: Where each event leads. An event that has no row comes too early or too late, and changes nothing.
TRANSITIONS: dict[tuple[State, Event], State] = {
    ("connecting", Event.AGREED): "opening",
    ("connecting", Event.SEVERED): "severed",
    # It may come before this end has learnt that both have agreed.
    ("connecting", Event.STARTED): "open",
    ("connecting", Event.CLOSE): "leaving",
    ("connecting", Event.END): "ended",
    ("severed", Event.AGREED): "opening",
    ("severed", Event.SEVERED): "severed",
    ("severed", Event.CLOSE): "leaving",
    ("severed", Event.END): "ended",
    ("opening", Event.STARTED): "open",
    ("opening", Event.CLOSE): "leaving",
    ("opening", Event.END): "ended",
    ("open", Event.CLOSE): "closing",
    ("open", Event.PEER_CLOSED): "peer_closed",
    ("open", Event.END): "ended",
    ("closing", Event.PEER_CLOSED): "leaving",
    ("closing", Event.LEAVE): "leaving",
    ("closing", Event.END): "ended",
    ("peer_closed", Event.CLOSE): "leaving",
    ("peer_closed", Event.END): "ended",
    ("leaving", Event.PEER_CLOSED): "leaving",
    ("leaving", Event.LEAVE): "leaving",
    ("leaving", Event.END): "ended",
    ("ended", Event.FREE): "freeing",
    # After the end of its loop the adapter's thread frees it.
    ("ended", Event.FREED): "free",
    ("freeing", Event.FREED): "free",
    ("free", Event.FREED): "free",
}

#: Until the connection has ended, whoever ends it.
ALIVE: tuple[State, ...] = ("open", "peer_closed", "closing", "leaving", "opening", "connecting", "severed")
#: While its program may use it, and while it may send messages.
USABLE: tuple[State, ...] = ("open", "peer_closed")
SENDING: tuple[State, ...] = ("open",)


class Life:
    """The state of a connection, the reason of its end, and the time that it has left when the program is being ended.

    Attributes:
        state: changed by on() and end() only.
        alive: whether the state is one of ALIVE.
        peer: names the other end in messages.
        hurried: ends when hurry() is called.
    """

    __slots__ = (
        "_cause",
        "_changed",
        "_interrupts",
        "_latest",
        "_on_end",
        "_why",
        "alive",
        "hurried",
        "loop",
        "peer",
        "state",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, interrupts: Interrupts, on_end: Callable[[], object]) -> None:
        """on_end: called when it ends. After the end of the loop it may be called several times, and in any thread."""
        self.loop = loop
        self.state: State = "connecting"
        self.alive = True
        self.peer = "the peer"
        self.hurried: asyncio.Future[None] = loop.create_future()
        self._interrupts = interrupts
        self._on_end = on_end
        self._why: errors.NdpyError | None = None
        self._cause: BaseException | None = None
        self._changed: asyncio.Future[None] = loop.create_future()
        self._latest = math.inf

    def __repr__(self) -> str:
        state = "open" if self.alive else f"ended: {self._why}"
        return f"<Connection to {self.peer} {state}>"

    def on(self, event: Event) -> bool:
        """Take an event. Returns whether it has a row in this state."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        former, self.state = self.state, after
        self.alive = after in ALIVE
        # Another thread frees it, and nobody waits for that here.
        if event is not Event.FREED and not self.loop.is_closed():
            _log.debug("connection to %s: from %s to %s: %s", self.peer, former, after, event.value)
            changed, self._changed = self._changed, self.loop.create_future()
            changed.set_result(None)
        return True

    @property
    def peer_has_left(self) -> bool:
        """Whether an end of the peer's was seen, or this connection's."""
        return self.state not in ("connecting", "severed", "opening", "open", "closing")

    def end(
        self, reason: str, cause: BaseException | None = None, *, kind: type[errors.NdpyError] = ConnectionResetError
    ) -> None:
        """The connection has ended. Everybody who waits learns why."""
        if self.alive:
            is_whole = kind is ProtocolError
            self._cause = None if is_whole else cause
            self._why = kind(reason if is_whole else f"the connection to {self.peer} has ended: {reason}")
            self.on(Event.END)
        elif not self.loop.is_closed():
            return
        self._on_end()

    def error(self) -> BaseException:
        """A new exception that says why the connection cannot be used."""
        if self._why is not None:
            error = type(self._why)(*self._why.args)
            error.__cause__ = self._cause
            return error
        if self.state == "peer_closed":
            return ConnectionEndedError(f"{self.peer} has closed the connection")
        return errors.ClosedError(f"the connection to {self.peer} was closed")

    def require(self, states: tuple[State, ...]) -> None:
        """Raise unless it is in one of these states."""
        if self.state not in states:
            raise self.error()

    async def past(
        self, *states: State, until: tuple[asyncio.Future[Any], ...] = (), timeout_s: float | None = None
    ) -> None:
        """Wait while it is in one of these states, at most for this time and until one of the futures has ended."""
        end = math.inf if timeout_s is None else self.loop.time() + timeout_s
        while self.state in states and not any(future.done() for future in until):
            left_s = end - self.loop.time()
            if left_s <= 0:
                return
            await asyncio.wait(
                (self._changed, *until),
                timeout=None if left_s == math.inf else left_s,
                return_when=asyncio.FIRST_COMPLETED,
            )

    # ---- the end of the program ----

    def hurry(self) -> None:
        """The program is being ended. Wait until all is delivered, but not for the peer's program, nor long."""
        if not (self.hurried.done() or self.loop.is_closed()):
            self._latest = self.loop.time() + _HURRY_S
            self.hurried.set_result(None)

    def limited(self, timeout_s: float | None) -> float | None:
        """How much of this time is left after hurry(), which Ctrl-C calls too. None: any time."""
        if self._interrupts.is_ending:
            self.hurry()
        if self._latest == math.inf:
            return timeout_s
        return max(0.0, min(math.inf if timeout_s is None else timeout_s, self._latest - self.loop.time()))

    def on_dropped(self, end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """A coroutine that used the connection was dropped, see Finally. The connection ends."""
        try:
            self.loop.call_soon_threadsafe(self._end_for_dropped, end)
        except RuntimeError:
            self.end("its event loop was closed")

    def _end_for_dropped(self, end: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self.end("a task that used it was dropped")
        if end is not None:
            start(self.loop, end)


class Finally:
    """`async with Finally(user, end)`: what `finally: await end()` does, even if the coroutine is dropped.

    When a loop is closed before its tasks have ended, or a program forgets a task, the garbage collector closes the
    coroutine with GeneratorExit. It does so in any thread, which may hold any lock. So nothing may wait then, and no
    provider is called: the loop makes the call. After the loop's end, what the coroutine had is dropped, and the
    adapter's thread closes it.

    user: the connection's life, or the hub. Its on_dropped(end) is called then.
    """

    __slots__ = ("_end", "_user")

    def __init__(self, user: Life | Hub, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._user = user
        self._end = end

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            self._user.on_dropped(self._end)
        else:
            await self._end()
