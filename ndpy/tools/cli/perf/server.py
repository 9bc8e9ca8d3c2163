"""The serving side of a run. It takes a plan from the measuring side, and does its part of each round."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time

import ndpy
from ndpy import Operation
from ndpy.tools.cli.channel import REQUEST_LIMIT, Arguments, BadRequest, Channel, ChannelClosed, ChannelError, encode
from ndpy.tools.cli.peers import common_address
from ndpy.tools.cli.perf import loops
from ndpy.tools.cli.perf.end import EXPOSED_SIZE, TOKEN_SIZE, End, Failure
from ndpy.tools.cli.perf.loops import Tally
from ndpy.tools.cli.perf.plan import PROTOCOL, Plan, Round
from ndpy.tools.cli.perf.rounds import BEAT, Beat, no_tick, quiet, send_all, take_rest, take_until_told
from ndpy.tools.cli.perf.watch import Ended, NothingCame, Stalled, Watch
from ndpy.tools.cli.serving import HELLO_LIMIT_S, SEND_LIMIT_S, Answer, Session

#: How much longer than the client this side waits for the client, so that the client can say what it waited for.
_PATIENCE_S = 15.0
#: How long to wait for the reason when a connection has failed. Usually the other side has gone.
_REASON_S = 0.5


class ClientSession(Session):
    """One client: its plan, and this side of its run."""

    name, protocol = "perf", PROTOCOL
    told = (BadRequest, ChannelError)
    refusals = (*Session.refusals, Failure, Stalled)

    def __init__(self, adapter: ndpy.Adapter, channel: Channel) -> None:
        super().__init__(adapter, channel.addresses())
        self._commands |= {
            "open": self._open,
            "accept": self._accept,
            "share": self._share,
            "round": self._round,
            BEAT["command"]: Arguments.finish,
        }
        self._channel = channel
        self._stack = contextlib.ExitStack()
        self._end: End | None = None
        self._listener: ndpy.Listener | None = None
        self._token = b""

    @property
    def limit_s(self) -> float:
        return HELLO_LIMIT_S if self._end is None else self._end.plan.timeout_s + _PATIENCE_S

    def close(self) -> None:
        with contextlib.suppress(ndpy.NdpyError):
            self._stack.close()

    def why(self, error: Exception) -> str:
        # If the client has gone, that is the reason.
        self._look_for(_REASON_S)
        waits_for = self._end.waits_for if isinstance(error, NothingCame) and self._end else ""
        return f"{error}; {waits_for}" if waits_for else str(error)

    def _look_for(self, seconds: float) -> None:
        """Raise ChannelClosed if the client goes within this time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._channel.receive(left)
            except ChannelClosed:
                raise
            except ChannelError:
                return

    def _opened(self) -> End:
        if self._end is None:
            raise BadRequest("open comes first")
        return self._end

    def _open(self, arguments: Arguments) -> Answer:
        plan = Plan.take(arguments)
        client = [text for text in arguments.text("addresses", 4096).split() if text]
        same_machine = arguments.boolean("same_machine")
        arguments.finish()
        if self._end is not None:
            raise BadRequest("a client has one run")
        info = self._adapter.info
        try:
            own = self._channel.addresses()[0]
            host = common_address(client, info.addresses, same_machine=same_machine, reached=own)
        except ValueError:
            raise BadRequest("addresses are not IP addresses") from None
        if host is None:
            raise Failure(
                f"{info.name} ({', '.join(info.addresses) or 'no address'}) and the other side "
                f"({', '.join(client) or 'no address'}) have no address family in common"
            )
        self._end = End(self._adapter, plan, 1)
        self._stack.callback(self._end.close)
        self._listener = self._stack.enter_context(self._adapter.listen((host, 0)))
        self._token = secrets.token_bytes(TOKEN_SIZE)
        return {"host": host, "port": self._listener.address[1], "token": encode(self._token)}

    def _accept(self, arguments: Arguments) -> Answer:
        arguments.finish()
        end = self._opened()
        assert self._listener is not None
        end.accept(self._listener, self._token)
        return {}

    def _share(self, arguments: Arguments) -> Answer:
        end = self._opened()
        exposed = arguments.data("exposed", EXPOSED_SIZE * end.plan.queue_pairs)
        arguments.finish()
        end.learn(exposed)
        return {"exposed": encode(end.expose())}

    # ---- a round ----

    def _round(self, arguments: Arguments) -> Answer:
        end = self._opened()
        now = Round.take(arguments, end.plan)
        arguments.finish()
        if not end.remotes:
            raise BadRequest("share comes first")
        end.prepare(now.size, now.seed)
        watch = Watch(self._look, end.problem, end.plan.timeout_s)
        self._channel.send({}, SEND_LIMIT_S)
        with quiet():
            return self._latency(end, watch, now) if end.plan.kind.is_latency else self._bandwidth(end, watch, now)

    def _look(self) -> Answer | None:
        """The client's next message, if there is one. Beats only say that it makes progress."""
        while (message := self._channel.look()) is not None:
            if message != BEAT:
                return message
        return None

    def _wait_for_end(self, watch: Watch) -> int:
        """Wait until the client says that its part of the round is over. Returns how many messages it has sent."""
        message = watch.take_message()
        while message is None:
            received = self._channel.receive(self.limit_s)
            message = None if received == BEAT else received
        arguments = Arguments(message)
        if arguments.text("command", 32) != "end":
            raise BadRequest("end comes next")
        sent = arguments.integer("sent", 0, sys.maxsize)
        arguments.finish()
        return sent

    def _latency(self, end: End, watch: Watch, now: Round) -> Answer:
        operation = end.plan.kind.operation
        if operation is Operation.READ:
            self._wait_for_end(watch)
            return {"wrong": ""}
        watch.restart()
        with contextlib.suppress(Ended):
            loops.PONG[operation](end, watch.idle, watch.idle_until_told, now.size)
        answered, sent = watch.progress, self._wait_for_end(watch)
        if answered != sent:
            return {"wrong": f"{answered} of {sent} messages were answered"}
        marked = sent if operation is Operation.WRITE else 0
        return {"wrong": end.check(now.size, now.seed, marked=marked) if sent else ""}

    def _bandwidth(self, end: End, watch: Watch, now: Round) -> Answer:
        plan = end.plan
        operation = plan.kind.operation
        answer: Answer = {}
        if plan.bidirectional:
            tally = Tally()
            beat = Beat(lambda: self._channel.send(BEAT, SEND_LIMIT_S), watch)
            send_all(end, watch, now, tally, beat, no_tick)
            answer = {"groups": tally.groups, "ns": tally.ns}
        if operation is Operation.SEND:
            take_until_told(end, watch, now)
            take_rest(end, watch, now, self._wait_for_end(watch))
            answer["sent"] = end.sent
        else:
            self._wait_for_end(watch)
        if operation is Operation.READ and not plan.bidirectional:
            return {"wrong": ""}
        return {**answer, "wrong": end.check(now.size, now.seed, last=operation is not Operation.READ)}


def serve_client(adapter: ndpy.Adapter, connection: socket.socket) -> str:
    """Serve one client until it leaves. Returns how it ended."""
    channel = Channel(connection, line_limit=REQUEST_LIMIT)
    return ClientSession(adapter, channel).serve(channel)
