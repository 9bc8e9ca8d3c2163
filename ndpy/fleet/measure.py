"""What a rank measures with one adapter, in a process of its own: a driver that hangs or crashes ends only that one.

The process is the other side of a `Worker`, which the rank has.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import ndpy
from ndpy.fleet import flows
from ndpy.fleet.pair import Fault, Pair
from ndpy.platforms import implementation
from ndpy.tools.cli.channel import REQUEST_LIMIT, Arguments, BadRequest, Channel
from ndpy.tools.cli.peers import PeerLink, common_address
from ndpy.tools.cli.serving import Answer, Session
from ndpy.tools.doctor import describe_link, diagnose
from ndpy.vocabulary.counters import is_error, is_loss
from ndpy.vocabulary.info import port_in_use

PROTOCOL = 1
DEFAULT_PORT = 18522
TOKEN_SIZE = 16
#: How long a rank may think before it gives its worker the next command.
_IDLE_S = 86400.0
_DEPTH = 64
_LIMIT_OF_PINGS = 10_000
_MOST_SENDERS = 64
#: What a healthy adapter counts too is left out: only these tell of a bad cable, switch or neighbour.
_TELLING = ("discard", "pause", "ecn", "cnp", "retrans", "retry", "timeout", "sequence", "drop")


# ---- the process that measures ----


class WorkerSession(Session):
    """The commands of a rank: `facts`, `counters`, `listen`, `pair`, `flow`."""

    name, protocol = "fleet", PROTOCOL
    refusals = (*Session.refusals, Fault)

    def __init__(self, adapter: ndpy.Adapter, control: tuple[str | None, str | None]) -> None:
        super().__init__(adapter, control)
        self._commands |= {
            "facts": self._facts,
            "counters": self._counters,
            "listen": self._listen,
            "pair": self._pair,
            "flow": self._flow,
        }
        self._listener: ndpy.Listener | None = None

    @property
    def limit_s(self) -> float:
        return _IDLE_S

    def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(ndpy.NdpyError):
                self._listener.close()

    def _facts(self, arguments: Arguments) -> Answer:
        arguments.finish()
        info = self._adapter.info
        findings = [finding.to_dict() for finding in diagnose(info.name)]
        return {"facts": facts(info), "findings": findings, "interface": describe_link(info).physical or ""}

    def _counters(self, arguments: Arguments) -> Answer:
        arguments.finish()
        info = self._adapter.info
        return {"counters": telling(implementation().read_counters(info.name).get(info.port, {}))}

    def _listen(self, arguments: Arguments) -> Answer:
        arguments.finish()
        if self._listener is None:
            self._listener = self._adapter.listen(("", 0), backlog=_DEPTH)
        return {"addresses": list(self._adapter.info.addresses), "port": self._listener.address[1]}

    def _pair(self, arguments: Arguments) -> Answer:
        """Measure with a partner. `addresses` and `port` are the partner's; without them the partner connects."""
        token = arguments.data("token", TOKEN_SIZE)
        timeout_s = arguments.seconds("timeout_s", 3600.0)
        pings = arguments.integer("pings", 1, _LIMIT_OF_PINGS)
        write_s = arguments.seconds("write_s", 60.0)
        partner = self._partner(arguments)
        arguments.finish()
        if partner is None and self._listener is None:
            raise BadRequest("listen comes first")
        with Pair(self._adapter, token, time.monotonic() + timeout_s) as pair:
            if partner is not None:
                pair.connect(partner)
            else:
                assert self._listener is not None
                pair.accept(self._listener)
            return pair.measure(partner is not None, pings, write_s)

    def _flow(self, arguments: Arguments) -> Answer:
        """Write to a partner, or receive from others, or both."""
        token = arguments.data("token", TOKEN_SIZE)
        timeout_s = arguments.seconds("timeout_s", 3600.0)
        senders = arguments.integer("senders", 0, _MOST_SENDERS)
        write_s = arguments.seconds("write_s", 60.0)
        partner = self._partner(arguments)
        arguments.finish()
        if senders and self._listener is None:
            raise BadRequest("listen comes first")
        return flows.run(self._adapter, self._listener, token, timeout_s, senders, partner, write_s)

    def _partner(self, arguments: Arguments) -> tuple[str, int] | None:
        """Where the partner listens: `addresses` and `port`. None if the request has none."""
        if not arguments.has("addresses"):
            return None
        theirs = arguments.text("addresses", 4096).split()
        port = arguments.integer("port", 1, 65535)
        same_machine = arguments.boolean("same_machine")
        host = common_address(self._adapter.info.addresses, theirs, same_machine=same_machine)
        if host is None:
            own = ", ".join(self._adapter.info.addresses) or "no address"
            raise Fault(f"this adapter ({own}) and the partner's ({', '.join(theirs)}) have no common address")
        return host, port


def facts(info: ndpy.AdapterInfo) -> dict[str, str]:
    """What adapters of one kind have in common on healthy machines, by name. Unknown values are left out."""
    port, link = port_in_use(info), describe_link(info)
    found: dict[str, Any] = {
        "driver": info.driver,
        "firmware": info.firmware,
        "transport": info.transport,
        "state": info.state,
        "speed": link.speed,
        "MTU": link.rdma_mtu or None,
        "interface's MTU": link.link_mtu,
        "GID type": link.gid_type,
        "number of GIDs": len(port.gids) if port is not None else None,
        "PFC": None if link.pfc is None else ",".join(map(str, link.pfc)) or "off",
        "traffic class": link.traffic_class,
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def telling(counters: dict[str, int]) -> dict[str, int]:
    """The counters of errors, retransmissions, pauses, ECN and discards."""
    return {
        name: value
        for name, value in counters.items()
        if is_error(name) or is_loss(name) or any(word in name for word in _TELLING)
    }


def serve_rank(adapter: ndpy.Adapter, connection: socket.socket) -> str:
    """Do what the rank at the other end of this connection asks for, until it closes it."""
    channel = Channel(connection, line_limit=REQUEST_LIMIT)
    return WorkerSession(adapter, channel.addresses()).serve(channel)


# ---- the rank's side of it ----


class Worker(PeerLink):
    """A process that measures with one adapter of this machine. Raises PeerLost and PeerRefused as a PeerLink does."""

    name, protocol, default_port = "fleet", PROTOCOL, DEFAULT_PORT

    def __init__(self, adapter: str) -> None:
        super().__init__(adapter, None)
