"""The exchange between rank 0 and the others: one TCP connection of each to one port of rank 0.

Anybody may reach the port. So both sides prove that they know the job's token before anything else is believed: each
sends a nonce, and a HMAC (RFC 2104) with SHA-256 over both. Lines are limited, a guest has a few seconds, and only a
few may wait at the same time. Then the one that has waited longest goes, and comes again if it is a rank.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import re
import secrets
import selectors
import socket
import time
from typing import Any, TypeGuard

from ndpy.fleet.engines.start import EngineError, Start
from ndpy.tools.cli.channel import Channel, ChannelError, printable

PROTOCOL = 1
#: Messages between ranks that know each other may be so long.
MESSAGE_LIMIT = 1 << 20
_NONCE = re.compile("[0-9a-f]{32}")
_PROOF = re.compile("[0-9a-f]{64}")
#: A rank sends one answer for each thing that it is asked, and rank 0 asks for less than this at a time.
_MOST_MESSAGES = 256
_GUEST_LIMIT = 4096
_GUESTS = 64
_BACKLOG = 1024
_GUEST_S = 5.0
_SEND_S = 10.0
_TRY_S = 2.0
_PAUSE_S = 0.2

Message = dict[str, Any]


def _proof(token: bytes, side: str, hub: str, member: str, rank: int) -> str:
    return hmac.new(token, f"ndpy fleet {PROTOCOL} {side} {rank} {hub} {member}".encode(), "sha256").hexdigest()


def _is(told: object, form: re.Pattern[str]) -> TypeGuard[str]:
    """Whether the other side sent such a string. JSON has strings that cannot be encoded."""
    return isinstance(told, str) and form.fullmatch(told) is not None


def _listen(start: Start) -> socket.socket:
    """At all addresses of this machine, or without a token only at rank 0's, which is a loopback address then."""
    if not start.token:
        family, _, _, _, address = socket.getaddrinfo(start.hosts[0], start.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", start.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", start.port), backlog=_BACKLOG)


class _Guest:
    """A connection that has not proved anything yet."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.channel = Channel(connection, line_limit=_GUEST_LIMIT)
        self.socket, self.host = connection, host
        self.nonce = secrets.token_hex(16)
        self.since = time.monotonic()


class Hub:
    """Rank 0's side. It owns the port and the connections of all ranks.
    Only tell() and expect() are safe for other threads.
    """

    def __init__(self, start: Start) -> None:
        """Listen. Raises EngineError if the port is taken."""
        self._start = start
        self._guests: dict[int, _Guest] = {}
        self._members: dict[int, Channel] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._inbox: collections.deque[tuple[int, Message]] = collections.deque()
        self._claims: dict[int, int] = {}
        #: Why guests were refused, and how many.
        self.refused: collections.Counter[str] = collections.Counter()
        try:
            self._listener = _listen(start)
        except OSError as error:
            raise EngineError(
                f"rank 0 cannot listen at port {start.port}: {error.strerror or error}; choose another with MASTER_PORT"
            ) from None
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def send(self, rank: int, message: Message) -> bool:
        """Send to a rank. Returns whether it could be; if not, receive() tells that the rank is gone."""
        channel = self._members.get(rank)
        if channel is None:
            return False
        try:
            channel.send(message, _SEND_S)
        except ChannelError as error:
            self._lose(rank, str(error))
            return False
        return True

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        """The next message and its rank, or None after `timeout_s` seconds.

        A rank that joins sends {"joined": its node, "version": its ndpy}; one that goes, {"gone": why}. What tell()
        was told is {"failed": why, "remedy": what to do}.
        """
        deadline = time.monotonic() + timeout_s
        while not self._inbox:
            left = deadline - time.monotonic()
            self._turn(min(max(left, 0.0), _PAUSE_S))
            if left <= 0 and not self._inbox:
                return None
        return self._inbox.popleft()

    def expect(self, claim: int, rank: int) -> None:
        """Say that the guest who claims to be rank `claim` is this one. Any thread may call this."""
        self._claims[claim] = rank

    def tell(self, rank: int, why: str, remedy: str) -> None:
        """Say that a rank's program has ended. Any thread may call this."""
        self._inbox.append((rank, {"failed": why, "remedy": remedy}))

    def notes(self) -> list[str]:
        """Sentences about those who were refused."""
        return [
            f"{count} connections to the rendezvous were refused: {why}" for why, count in self.refused.most_common(10)
        ]

    def close(self) -> None:
        """Close the port and all connections."""
        self._selector.close()
        self._listener.close()
        for guest in self._guests.values():
            guest.channel.close()
        for channel in self._members.values():
            channel.close()
        self._guests, self._members = {}, {}

    # ---- a turn ----

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept_all()
            elif isinstance(key.data, int):
                self._read_member(key.data)
            elif (guest := self._guests.get(key.fd)) is key.data and guest is not None:
                self._read_guest(guest)
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if now - guest.since > _GUEST_S]:
            self._refuse(guest, f"it said nothing for {_GUEST_S:g} s", again=True)

    def _accept_all(self) -> None:
        # Not more at a time, so that ranks that are known are heard in between.
        for _ in range(_GUESTS):
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            connection.setblocking(True)
            guest = _Guest(connection, str(address[0]).removeprefix("::ffff:"))
            if len(self._guests) >= _GUESTS:
                self._refuse(next(iter(self._guests.values())), "too many were waiting", again=True)
            self._guests[connection.fileno()] = guest
            self._selector.register(connection, selectors.EVENT_READ, guest)
            try:
                guest.channel.send({"fleet": PROTOCOL, "nonce": guest.nonce}, 1.0)
            except ChannelError:
                self._refuse(guest, "it went away")

    def _read_guest(self, guest: _Guest) -> None:
        try:
            message = guest.channel.look()
        except ChannelError as error:
            self._refuse(guest, str(error))
            return
        if message is not None:
            self._greet(guest, message)

    def _greet(self, guest: _Guest, message: Message) -> None:
        claim, nonce, proof = message.get("rank"), message.get("nonce"), message.get("proof")
        if type(claim) is not int or not _is(nonce, _NONCE) or not _is(proof, _PROOF):
            self._refuse(guest, "it is not a rank of `ndpy fleet`")
            return
        if not hmac.compare_digest(proof, _proof(self._start.token, "member", guest.nonce, nonce, claim)):
            self._refuse(guest, "it does not know the token")
            return
        if self._start.engine == "ssh" and claim not in self._claims:
            # The number may still be on its way over ssh.
            self._dismiss(guest, "its number is not known", again=True)
            return
        rank = self._claims.get(claim, claim)
        if not 0 <= rank < self._start.size or rank in self._members:
            self._refuse(
                guest, f"there is no rank {rank}" if rank not in self._members else f"rank {rank} is there already"
            )
            return
        try:
            guest.channel.send({"proof": _proof(self._start.token, "hub", guest.nonce, nonce, claim)}, 1.0)
        except ChannelError:
            self._refuse(guest, "it went away")
            return
        self._forget(guest)
        self._members[rank], self._sockets[rank] = guest.channel, guest.socket
        guest.channel.line_limit = MESSAGE_LIMIT
        self._selector.register(guest.socket, selectors.EVENT_READ, rank)
        told = {"joined": printable(message.get("node", ""), 256), "version": printable(message.get("version", ""), 64)}
        self._inbox.append((rank, told))

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.socket)
        del self._guests[guest.socket.fileno()]

    def _refuse(self, guest: _Guest, why: str, *, again: bool = False) -> None:
        """Close a guest's connection. again: it may come again."""
        self.refused[f"{guest.host}: {why}"] += 1
        self._dismiss(guest, why, again)

    def _dismiss(self, guest: _Guest, why: str, again: bool) -> None:
        self._forget(guest)
        with contextlib.suppress(ChannelError):
            guest.channel.send({"refused": why, "again": again}, 0.0)
        guest.channel.close()

    def _read_member(self, rank: int) -> None:
        channel = self._members.get(rank)
        if channel is None:
            return
        try:
            for _ in range(_MOST_MESSAGES):
                message = channel.look()
                if message is None:
                    return
                if message.keys() & {"joined", "gone", "failed"}:
                    self._lose(rank, "it sent what only rank 0 may say")
                    return
                self._inbox.append((rank, message))
        except ChannelError as error:
            self._lose(rank, str(error))
            return
        self._lose(rank, f"it sent {_MOST_MESSAGES} messages at a time")

    def _lose(self, rank: int, why: str) -> None:
        self._selector.unregister(self._sockets.pop(rank))
        self._members.pop(rank).close()
        self._inbox.append((rank, {"gone": why}))


def join(start: Start, node: str, version: str, timeout_s: float) -> Channel:
    """A rank's connection to rank 0, which knows the token. Raises EngineError after `timeout_s` seconds."""
    deadline, problem = time.monotonic() + timeout_s, "nobody answers"
    while time.monotonic() < deadline:
        for host in start.hosts:
            try:
                return _join(start, host, node, version)
            except EngineError:
                raise
            except (OSError, ChannelError) as error:
                problem = f"{host}: {getattr(error, 'strerror', None) or error}"
        time.sleep(_PAUSE_S)
    this, first = start.who
    raise EngineError(
        f"{this} did not reach {first} at {', '.join(start.hosts)} port {start.port} within {timeout_s:g} s "
        f"({problem}); set MASTER_ADDR to an address of it that this machine reaches, and let the port through the "
        "firewall"
    )


def _join(start: Start, host: str, node: str, version: str) -> Channel:
    channel = Channel(socket.create_connection((host, start.port), _TRY_S), line_limit=MESSAGE_LIMIT)
    try:
        theirs = channel.receive(_GUEST_S).get("nonce")
        own = secrets.token_hex(16)
        if not _is(theirs, _NONCE):
            raise EngineError(
                f"port {start.port} of {host} belongs to another program; choose another with MASTER_PORT"
            )
        proof = _proof(start.token, "member", theirs, own, start.rank)
        channel.send({"rank": start.rank, "nonce": own, "proof": proof, "node": node, "version": version}, _SEND_S)
        answer = channel.receive(_GUEST_S)
        if answer.get("again"):
            raise ChannelError(printable(answer.get("refused")))
        if "refused" in answer:
            raise EngineError(f"{start.who[1]} at {host} refuses {start.who[0]}: {printable(answer['refused'])}")
        told = answer.get("proof")
        if not _is(told, _PROOF) or not hmac.compare_digest(told, _proof(start.token, "hub", theirs, own, start.rank)):
            raise EngineError(
                f"what answers at {host} port {start.port} does not know the token; is NDPY_FLEET_TOKEN the same there?"
            )
    except BaseException:
        channel.close()
        raise
    return channel
