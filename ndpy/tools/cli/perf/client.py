"""The measuring side of a run."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ndpy
from ndpy import Operation
from ndpy.tools.cli.channel import Arguments, encode, printable
from ndpy.tools.cli.peers import PeerLink, PeerLost, PeerRefused, as_seen_here
from ndpy.tools.cli.perf import loops
from ndpy.tools.cli.perf.end import EXPOSED_SIZE, TOKEN_SIZE, End, Failure
from ndpy.tools.cli.perf.figures import Bandwidth, Distribution, Latency, Result, Transfer
from ndpy.tools.cli.perf.loops import Tally
from ndpy.tools.cli.perf.plan import DEFAULT_PORT, PROTOCOL, Plan, Round
from ndpy.tools.cli.perf.rounds import BEAT, Beat, quiet, send_all, take_rest, take_until_told
from ndpy.tools.cli.perf.watch import NothingCame, Stalled, Watch
from ndpy.tools.cli.sources import ANYWHERE, Source

#: How long to wait for the reason when a connection has failed. Usually the other side has gone.
_REASON_S = 2.0
#: How long, if this side has waited in vain. Usually the other side does so too.
_STALLED_S = 5.0
#: How long a part of a latency test takes about. Between parts the progress is shown.
_PART_S = 0.25
_FIRST_PART = 16
_LARGEST_PART = 1 << 20

#: Shows how much of a round is done, from 0 to 1.
Show = Callable[[float], None]


@dataclass(frozen=True)
class Amount:
    """How much is measured of each size: a number of iterations of each queue pair, or a time.

    warm_up: iterations before that, which do not count.
    """

    iterations: int
    duration_s: float
    warm_up: int


class Peer(PeerLink):
    """The serving side."""

    name, protocol, default_port = "perf", PROTOCOL, DEFAULT_PORT

    def beat(self) -> None:
        """Say that this side makes progress. There is no answer."""
        self._send(BEAT)

    def finish(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Receive the answer to the command of begin(). The peer may work on it for as long as it says that it makes
        progress.
        """
        while (answer := super().finish(wait_s)) == BEAT:
            pass
        return answer

    def look(self) -> dict[str, Any] | None:
        while (answer := super().look()) == BEAT:
            pass
        return answer


class Client:
    """The measuring side, connected to the serving side."""

    def __init__(self, adapter: ndpy.Adapter, plan: Plan, peer: Peer, source: Source = ANYWHERE) -> None:
        self._plan = plan
        self._peer = peer
        self._source = source
        self._end = End(adapter, plan, 0)
        try:
            self._watch = Watch(peer.look, self._end.problem, plan.timeout_s)
            self._beat = Beat(peer.beat, self._watch)
            self._connect(adapter)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._end.close()

    def _connect(self, adapter: ndpy.Adapter) -> None:
        end, peer, limit_s = self._end, self._peer, self._plan.timeout_s
        opened = Arguments(
            peer.call(
                "open",
                limit_s,
                **self._plan.to_dict(),
                addresses=" ".join(adapter.info.addresses),
                same_machine=peer.host is None,
            )
        )
        host = as_seen_here(opened.text("host", 64), peer.control_addresses[1] if peer.host is not None else None)
        address, token = (host, opened.integer("port", 1, 65535)), opened.data("token", TOKEN_SIZE)
        peer.begin("accept")
        try:
            end.connect(address, token, self._source)
        except (ndpy.NdpyError, OSError) as error:
            raise self._explained(error) from error
        peer.finish(limit_s)
        shared = Arguments(peer.call("share", limit_s, exposed=encode(end.expose())))
        end.learn(shared.data("exposed", EXPOSED_SIZE * self._plan.queue_pairs))

    def _explained(self, error: Exception) -> Exception:
        """The reason for a failed request: the other side's if it says one, or has gone."""
        waited = error if isinstance(error, NothingCame) else None
        deadline = time.monotonic() + (_STALLED_S if waited and not self._plan.peer_is_passive else _REASON_S)
        while time.monotonic() < deadline:
            try:
                if self._peer.look() is not None:
                    break
            except PeerRefused as reason:
                return self._with_both_sides(waited, reason)
            except PeerLost as reason:
                return reason
            time.sleep(0.01)
        return Stalled(f"{waited}; this side: {self._end.waits_for}") if waited and self._end.waits_for else error

    def _with_both_sides(self, ours: NothingCame | None, theirs: PeerRefused) -> Exception:
        """The other side's reason. If it has waited in vain, it is said what both sides wait for."""
        if theirs.name != NothingCame.__name__:
            return theirs
        texts = [str(ours)] if ours else []
        if self._end.waits_for:
            texts.append(f"this side: {self._end.waits_for}")
        return Stalled("; ".join([*texts, f"the other side: {theirs.text}"]))

    # ---- rounds ----

    def measure(self, size: int, seed: int, amount: Amount, results: list[Result], show: Show) -> None:
        """Measure one size, and add the result to `results`. After Ctrl-C the result has the runs until then.

        Raises Failure, Stalled, PeerLost, PeerRefused, and what the library raises.
        """
        try:
            if self._plan.kind.is_latency:
                self._measure_latency(size, seed, amount, results, show)
            else:
                self._measure_bandwidth(size, seed, amount, results, show)
        except (ndpy.NdpyError, Stalled) as error:
            raise self._explained(error) from error
        except PeerRefused as error:
            raise self._with_both_sides(None, error) from error

    def _begin(self, now: Round) -> None:
        self._end.prepare(now.size, now.seed)
        self._peer.call("round", self._plan.timeout_s, **now.to_dict())

    def _measure_latency(self, size: int, seed: int, amount: Amount, results: list[Result], show: Show) -> None:
        end, kind = self._end, self._plan.kind
        self._begin(Round(size, seed, 0, 0, 0.0))
        times = Distribution(2 if kind.is_round_trip else 1)
        try:
            with quiet():
                sent = self._measure_parts(size, None, Amount(amount.warm_up, 0.0, 0), _show_nothing)
                sent += self._measure_parts(size, times, amount, show)
        except KeyboardInterrupt:
            if times.count:
                results.append(Latency(size, times))
            raise
        answer = self._peer.call("end", self._plan.timeout_s, sent=sent)
        wrong = _wrong(answer) or end.check(size, seed, marked=sent if kind.operation is Operation.WRITE else 0)
        if wrong:
            raise Failure(f"{size} bytes: {wrong}")
        results.append(Latency(size, times))

    def _measure_parts(self, size: int, times: Distribution | None, amount: Amount, show: Show) -> int:
        """Measure a part at a time. Returns the number of iterations. times: gets the figures. None for a warm-up."""
        ping, idle = loops.PING[self._plan.kind.operation], self._watch.idle
        started = time.monotonic()
        done, part = 0, _FIRST_PART
        while True:
            passed = time.monotonic() - started
            if passed >= amount.duration_s if amount.duration_s else done >= amount.iterations:
                return done
            count = part if amount.duration_s else min(part, amount.iterations - done)
            stamps = _room(count)
            part_started = time.monotonic()
            self._watch.restart()
            try:
                ping(self._end, idle, size, stamps, count)
            finally:
                if times is not None:
                    times.add_stamps(stamps)
            done += count
            seconds = max(time.monotonic() - part_started, 1e-6)
            part = min(max(int(count * _PART_S / seconds), _FIRST_PART), _LARGEST_PART)
            # Where both sides take turns, messages show the progress.
            if not self._plan.kind.is_round_trip:
                self._beat()
            show(min(passed / amount.duration_s, 1.0) if amount.duration_s else done / amount.iterations)

    def _measure_bandwidth(self, size: int, seed: int, amount: Amount, results: list[Result], show: Show) -> None:
        end, plan = self._end, self._plan
        warm_up = -(-amount.warm_up // plan.group) * plan.queue_pairs
        groups = 0 if amount.duration_s else -(-amount.iterations // plan.group) * plan.queue_pairs
        now = Round(size, seed, groups, warm_up, amount.duration_s)
        self._begin(now)
        tally = Tally()
        started = time.monotonic()

        def tick(done: int) -> None:
            show(min((time.monotonic() - started) / amount.duration_s, 1.0) if amount.duration_s else done / groups)

        def ours() -> Transfer:
            return Transfer(tally.groups * plan.group, tally.ns)

        try:
            with quiet():
                send_all(end, self._watch, now, tally, self._beat, tick)
        except KeyboardInterrupt:
            if tally.groups:
                results.append(Bandwidth(size, ours(), one_direction=plan.bidirectional))
            raise
        answer = self._end_bandwidth(now)
        wrong = _wrong(answer)
        theirs = None
        if plan.bidirectional:
            counts = Arguments(answer)
            theirs = Transfer(counts.integer("groups", 1, 1 << 62) * plan.group, counts.integer("ns", 1, 1 << 62))
        if plan.bidirectional or plan.kind.operation is Operation.READ:
            wrong = wrong or end.check(size, seed, last=plan.kind.operation is not Operation.READ)
        if wrong:
            raise Failure(f"{size} bytes: {wrong}")
        results.append(Bandwidth(size, ours(), theirs))

    def _end_bandwidth(self, now: Round) -> dict[str, Any]:
        """Tell the other side that this one is done, and wait until that one is."""
        plan, peer = self._plan, self._peer
        # In both directions, the other side may have to send for as long as this side did.
        limit_s = plan.timeout_s + now.duration_s
        if plan.kind.operation is not Operation.SEND:
            return peer.call("end", limit_s, sent=0)
        peer.begin("end", sent=self._end.sent)
        if not plan.bidirectional:
            return peer.finish(limit_s)
        take_until_told(self._end, self._watch, now)
        answer = self._watch.take_message()
        assert answer is not None
        take_rest(self._end, self._watch, now, Arguments(answer).integer("sent", 0, 1 << 62))
        return answer


def _room(count: int) -> array[int]:
    return array("q", [0]) * (count + 1)


def _show_nothing(part: float) -> None:
    """For parts whose progress is not shown."""


def _wrong(answer: dict[str, Any]) -> str:
    """What the other side found wrong. It may be anybody's text."""
    return printable(answer.get("wrong", ""))
