"""The states of a connector, and the table of events that lead from one to another."""

from __future__ import annotations

import enum
from typing import Literal

#: The states of a connector: those of contract H.1.4, and one more: "completing" while complete_connect() is under way.
State = Literal[
    "idle",
    "bound",
    "connecting",
    "offered",
    "completing",
    "requested",
    "accepting",
    "established",
    "disconnected",
    "failed",
]


class Event(enum.Enum):
    """What can happen to a connector."""

    # Calls of the program. Their values are the methods' names.
    BIND = "bind"
    CONNECT = "connect"
    COMPLETE_CONNECT = "complete_connect"
    ACCEPT = "accept"
    REJECT = "reject"
    DISCONNECT = "disconnect"
    WAIT_DISCONNECTED = "wait_disconnected"
    CLOSE = "close"
    # News.
    REQUESTED = "a client asks for a connection"
    OFFERED = "the server accepted"
    REFUSED = "connect() failed and may be tried again (contract H.4.2)"
    REFUSED_WHEN_BOUND = "the same, of a connector that has a local address of its own"
    ESTABLISHED = "both sides agreed"
    LOST = "the peer refused or vanished before the connection was established, or connect() failed for good"
    WITHDRAWN = "this side takes its last step back: it was cancelled or refused, or the queue pair was closed"
    ENDED = "the connection is over, from whichever side"


#: The events that are calls of the program.
CALLS = (
    Event.BIND,
    Event.CONNECT,
    Event.COMPLETE_CONNECT,
    Event.ACCEPT,
    Event.REJECT,
    Event.DISCONNECT,
    Event.WAIT_DISCONNECTED,
    Event.CLOSE,
)

#: Where each event leads. A call that has no row is refused. News that has no row came too late and changes nothing.
TRANSITIONS: dict[tuple[State, Event], State] = {
    ("idle", Event.BIND): "bound",
    ("idle", Event.CONNECT): "connecting",
    ("idle", Event.REQUESTED): "requested",
    ("idle", Event.CLOSE): "idle",
    ("bound", Event.BIND): "bound",
    ("bound", Event.CONNECT): "connecting",
    ("bound", Event.CLOSE): "bound",
    ("connecting", Event.OFFERED): "offered",
    ("connecting", Event.REFUSED): "idle",
    ("connecting", Event.REFUSED_WHEN_BOUND): "bound",
    ("connecting", Event.LOST): "failed",
    ("connecting", Event.WITHDRAWN): "failed",
    ("connecting", Event.CLOSE): "failed",
    ("offered", Event.COMPLETE_CONNECT): "completing",
    ("offered", Event.REJECT): "failed",
    ("offered", Event.LOST): "failed",
    ("offered", Event.WITHDRAWN): "failed",
    ("offered", Event.CLOSE): "failed",
    ("completing", Event.ESTABLISHED): "established",
    ("completing", Event.REJECT): "failed",
    ("completing", Event.LOST): "failed",
    ("completing", Event.WITHDRAWN): "failed",
    ("completing", Event.CLOSE): "failed",
    ("requested", Event.ACCEPT): "accepting",
    ("requested", Event.REJECT): "failed",
    ("requested", Event.LOST): "failed",
    ("requested", Event.CLOSE): "failed",
    ("accepting", Event.ESTABLISHED): "established",
    ("accepting", Event.LOST): "failed",
    ("accepting", Event.WITHDRAWN): "failed",
    ("accepting", Event.CLOSE): "failed",
    ("established", Event.DISCONNECT): "established",
    ("established", Event.WAIT_DISCONNECTED): "established",
    ("established", Event.ENDED): "disconnected",
    ("established", Event.CLOSE): "disconnected",
    ("disconnected", Event.DISCONNECT): "disconnected",
    ("disconnected", Event.WAIT_DISCONNECTED): "disconnected",
    ("disconnected", Event.ENDED): "disconnected",
    ("disconnected", Event.CLOSE): "disconnected",
    ("failed", Event.CLOSE): "failed",
}
