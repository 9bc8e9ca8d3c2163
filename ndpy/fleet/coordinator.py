"""What rank 0 does: it gives out the work, collects results, and goes on without a rank that does not answer."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ndpy
from ndpy.fleet import compare, losses, patterns, schedule
from ndpy.fleet.counting import Counting
from ndpy.fleet.engines.rendezvous import Hub, Message
from ndpy.fleet.measure import TOKEN_SIZE
from ndpy.fleet.results import End, Kind, Machine, Measurement, Pattern, Quantity, Report, Suspect
from ndpy.fleet.schedule import Round
from ndpy.fleet.search import Search
from ndpy.fleet.topology import Topology, from_lldp, unknown
from ndpy.tools.cli.channel import encode, printable
from ndpy.vocabulary.info import is_address

#: An answer may take this much longer than the work.
_GRACE_S = 5.0
_EXAMINE_S = 180.0
_COUNTERS_S = 20.0
_WAKE_S = 0.2
#: A rank says within this time that it is there. It may need longer to end a process that hangs.
_THERE_S = 3.0
_WORKER_S = 30.0
_MOST_ENDS = 64
_PLAUSIBLE = 1e7


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run measures.

    Attributes:
        rounds: the most rounds of a search.
        full_mesh: whether each end meets each other one, instead of a search.
        patterns: whether many write to one, and all at once, after the pairs.
        topology: which ends share what. None: ask lldpd on each machine.
        budget_s: no round begins later.
        join_s: how long the ranks have to come.
        pair_s: how long a pair has.
        pings, write_s: as in WorkerSession.
    """

    rounds: int = 12
    full_mesh: bool = False
    patterns: bool = False
    topology: Topology | None = dataclasses.field(default_factory=unknown)
    budget_s: float = 600.0
    join_s: float = 60.0
    pair_s: float = 30.0
    pings: int = 100
    write_s: float = 0.2


class Coordinator:
    """One run. `say` is told what happens, for people. `hosts` names the ranks' machines, if that is known before."""

    def __init__(
        self,
        hub: Hub,
        size: int,
        engine: str,
        options: Options,
        say: Callable[[str], None],
        hosts: Sequence[str] = (),
    ) -> None:
        self._hub, self._size, self._engine, self._options, self._say = hub, size, engine, options, say
        self._hosts = dict(enumerate(hosts))
        self._nodes: dict[int, str] = {}
        self._lost: dict[int, Suspect] = {}
        self._ends: list[End] = []
        #: For each end: its place at its rank, its addresses and its port.
        self._reached: list[tuple[int, list[str], int]] = []
        self._facts: dict[int, Message] = {}
        self._counting = Counting()
        self._measurements: list[Measurement] = []
        self._suspects: list[Suspect] = []
        self._notes: list[str] = []
        self._search: Search | None = None
        #: Ends whose process at their rank is gone.
        self._out: set[int] = set()
        self._rounds = 0
        self._numbers = itertools.count()

    def run(self) -> Report:
        """The whole run, until it is over or interrupted. Then report() has what was found."""
        self._join()
        self._examine()
        self._count()
        deadline = time.monotonic() + self._options.budget_s
        self._measure(deadline)
        if self._options.patterns:
            self._measure_patterns(deadline)
        return self.report()

    def end(self) -> None:
        """Tell all ranks that it is over."""
        for rank in range(self._size):
            self._hub.send(rank, {"do": "end"})

    # ---- who is there ----

    def _join(self) -> None:
        deadline = time.monotonic() + self._options.join_s
        while len(self._nodes.keys() | self._lost.keys()) < self._size and time.monotonic() < deadline:
            self._take(_WAKE_S)
        for rank in range(self._size):
            if rank not in self._nodes and rank not in self._lost:
                self._lose(
                    rank, f"it did not come within {self._options.join_s:g} s", "look whether it was started there"
                )
        self._say(f"{len(self._alive())} of {self._size} ranks on {len(set(self._nodes.values()))} machines")

    def _alive(self) -> list[int]:
        return [rank for rank in sorted(self._nodes) if rank not in self._lost]

    def _take(self, timeout_s: float) -> tuple[int, Message] | None:
        """The next answer of a rank. What says that a rank comes or goes is dealt with here."""
        got = self._hub.receive(timeout_s)
        if got is None:
            return None
        rank, message = got
        if "joined" in message:
            self._nodes[rank] = self._hosts.get(rank) or message["joined"] or f"rank{rank}"
            if message["version"] != ndpy.__version__:
                self._lose(
                    rank,
                    f"it has ndpy {message['version'] or 'of no version'}, and the reporting one has "
                    f"{ndpy.__version__}",
                    "install the same ndpy on all machines",
                )
            return None
        if "failed" in message:
            self._lose(rank, message["failed"], message["remedy"])
            return None
        if "gone" in message:
            self._lose(
                rank,
                f"it ended during the run ({printable(message['gone'])})",
                "look at its output and at the kernel's log there",
            )
            return None
        return rank, message

    def _lose(self, rank: int, why: str, remedy: str) -> None:
        if rank in self._lost:
            return
        node = self._nodes.get(rank) or self._hosts.get(rank, "")
        where = f"rank {rank} on {node}" if node else f"rank {rank}"
        self._lost[rank] = Suspect(
            Kind.RANK, where, (node,) if node else (), None, None, 1.0, 1, f"{where}: {why}", remedy
        )
        self._say(self._lost[rank].reason)

    def _ask(self, messages: Mapping[int, Iterable[Message]], limit_s: float) -> Iterator[tuple[int, Message, Message]]:
        """Send messages to ranks, and yield each with its answer, as they come: rank, message, answer.

        A rank that goes, or says nothing until the deadline, is lost. Its messages have no answer.
        """
        waiting = self._send(messages)
        yield from self._collect(waiting, waiting, limit_s)
        # A rank whose adapter hangs answers this, and one that hangs itself does not.
        probes = self._send({rank: [{"do": "there"}] for rank in _ranks(waiting)})
        waiting.update(probes)
        for rank, message, answer in self._collect(waiting, probes, _THERE_S):
            if message["do"] != "there":
                yield rank, message, answer
        for rank in _ranks(probes.keys() & waiting.keys()):
            waited = f"it said nothing for {limit_s + _THERE_S:g} s"
            self._lose(rank, waited, "look whether it hangs: a full disk, a stopped process")
        yield from self._collect(waiting, waiting, _WORKER_S)
        for rank in _ranks(waiting):
            self._lose(rank, "its adapter's process neither answers nor ends", "look at the kernel's log there")

    def _send(self, messages: Mapping[int, Iterable[Message]]) -> dict[tuple[int, int], Message]:
        """Send messages to ranks. Returns what waits for an answer now."""
        waiting = {}
        for rank, several in messages.items():
            for message in several:
                number = next(self._numbers)
                if self._hub.send(rank, {"id": number, **message}):
                    waiting[rank, number] = message
        return waiting

    def _collect(
        self, waiting: dict[tuple[int, int], Message], wanted: Mapping[tuple[int, int], Message], limit_s: float
    ) -> Iterator[tuple[int, Message, Message]]:
        """Take answers out of `waiting`, and yield them, until each that is wanted has come or the time is over."""
        deadline = time.monotonic() + limit_s
        while wanted.keys() & waiting.keys() and time.monotonic() < deadline:
            got = self._take(_WAKE_S)
            if got is not None:
                rank, answer = got
                told = answer.get("id")
                asked = waiting.pop((rank, told), None) if isinstance(told, int) else None
                if asked is None:
                    self._lose(
                        rank, "it sent an answer to nothing that was asked", "look what runs there under this name"
                    )
                else:
                    yield rank, asked, answer
            for key in [key for key in waiting if key[0] in self._lost]:
                del waiting[key]

    # ---- each by itself ----

    def _examine(self) -> None:
        asked: Message = {"do": "examine", "lldp": self._options.topology is None}
        for rank, _, answer in self._ask({rank: [asked] for rank in self._alive()}, _EXAMINE_S):
            ends = answer.get("ends")
            if not isinstance(ends, list) or not ends:
                self._lose(
                    rank,
                    f"it has no adapter: {printable(answer.get('error', 'it names none'))}",
                    "name one after `ndpy fleet`; `ndpy doctor` says what is wrong there",
                )
                continue
            self._facts[rank] = answer
            for place, end in enumerate(ends[:_MOST_ENDS]):
                self._add_end(rank, place, end)
        order = sorted(range(len(self._ends)), key=lambda at: (self._ends[at].rank, self._reached[at][0]))
        self._ends = [self._ends[at] for at in order]
        self._reached = [self._reached[at] for at in order]

    def _add_end(self, rank: int, place: int, told: Any) -> None:
        told = told if isinstance(told, dict) else {}
        name, node = printable(told.get("adapter", "?"), 64), self._nodes[rank]
        addresses, port = told.get("addresses"), told.get("port")
        if isinstance(addresses, list) and type(port) is int and 0 < port < 1 << 16:
            usable = [each for each in addresses[:64] if isinstance(each, str) and is_address(each)]
            self._ends.append(End(rank, node, name))
            self._reached.append((place, usable, port))
        else:
            why = printable(told.get("error", "it does not say how to reach it"))
            self._suspect_adapter(rank, name, f"does not work: {why}")

    def _suspect_adapter(self, rank: int, adapter: str, why: str) -> None:
        node = self._nodes[rank]
        reason = f"{adapter} of rank {rank} on {node} {why}"
        self._suspects.append(
            Suspect(Kind.ADAPTER, f"{node}/{adapter}", (node,), None, None, 1.0, 1, reason, "run `ndpy doctor` there")
        )

    def _count(self) -> None:
        """Read the counters of all, after a round or before the first."""
        found = {}
        asked = {rank: [{"do": "counters"}] for rank in self._alive()}
        for rank, _, answer in self._ask(asked, _COUNTERS_S):
            counters = answer.get("counters")
            if isinstance(counters, dict):
                found[rank] = {name: value for name, value in counters.items() if isinstance(value, dict)}
        self._counting.add(self._rounds, found, self._nodes)

    # ---- in pairs ----

    def _measure(self, deadline: float) -> None:
        places = self._announced() if self._options.topology is None else self._options.topology
        self._ends = list(places.place(self._ends))
        missing = places.missing(self._ends) if places != unknown() else ()
        if missing:
            self._notes.append(f"the topology does not have {_some(missing)}")
        self._search = Search(self._ends, rounds=self._options.rounds)
        for pairs in self._full_mesh() if self._options.full_mesh else iter(self._search.next_round, None):
            if self._is_late(deadline):
                return
            known = len(self._measurements)
            self._round(pairs)
            self._search.add(self._measurements[known:])
            counted = {node: self._counting.of(node) for node in set(self._nodes.values())}
            self._search.doubt(losses.doubtful(counted, self._ends, self._measurements))
            self._search.without(*(at for at, end in enumerate(self._ends) if end.rank in self._lost), *self._out)
        self._notes.append(f"a full mesh of {self._rounds} rounds" if self._options.full_mesh else self._search.why)

    def _announced(self) -> Topology:
        """The topology that the switches announce."""
        switches: dict[str, dict[str, str]] = {}
        interfaces: dict[tuple[str, str], str] = {}
        silent: dict[str, dict[str, None]] = {}
        for rank, answer in self._facts.items():
            node, told = self._nodes[rank], answer.get("switches")
            if isinstance(told, dict):
                switches[node] = {printable(name, 64): printable(switch, 64) for name, switch in told.items()}
            else:
                said = printable(answer.get("no_switches", "it does not say"), 200)
                silent.setdefault(said, {})[node] = None
            for end in answer["ends"]:
                if isinstance(end, dict) and isinstance(end.get("interface"), str):
                    interfaces[node, printable(end.get("adapter", "?"), 64)] = printable(end["interface"], 64)
        self._notes += [f"the switches of {_some(tuple(nodes))} are unknown: {why}" for why, nodes in silent.items()]
        return from_lldp(switches, interfaces)

    def _is_late(self, deadline: float) -> bool:
        if time.monotonic() <= deadline:
            return False
        self._notes.append(f"the budget of {self._options.budget_s:g} s ended the run after {self._rounds} rounds")
        return True

    def _full_mesh(self) -> Iterator[Round]:
        return schedule.full_mesh(self._ends, same_node=len({end.node for end in self._ends}) == 1)

    def _round(self, pairs: Round) -> None:
        options = self._options
        asked: dict[int, list[Message]] = {}
        alive = set(self._alive())
        pairs = tuple(
            pair for pair in pairs if {self._ends[at].rank for at in pair} <= alive and not self._out & set(pair)
        )
        for source, target in pairs:
            token = encode(secrets.token_bytes(TOKEN_SIZE))
            common = {
                "do": "pair",
                "token": token,
                "timeout_s": options.pair_s,
                "pings": options.pings,
                "write_s": options.write_s,
            }
            asked.setdefault(self._ends[target].rank, []).append({**common, "place": self._reached[target][0]})
            to_target = {**common, "place": self._reached[source][0], **self._way(source, target)}
            asked.setdefault(self._ends[source].rank, []).append(to_target)
        answers = self._answers(asked, itertools.chain(*pairs))
        for source, target in pairs:
            self._add_pair(source, target, answers.get(source), answers.get(target))
        self._count()
        self._rounds += 1
        self._say(f"round {self._rounds}: {len(pairs)} pairs")

    def _add_pair(self, source: int, target: int, near: Message | None, far: Message | None) -> None:
        """The results of a pair, from what its two ends answered. None: there was no answer."""
        for quantity, one, other, answer, name in (
            (Quantity.LATENCY, source, target, near, "latency_us"),
            (Quantity.BANDWIDTH, source, target, near, "bandwidth_gbps"),
            (Quantity.BANDWIDTH, target, source, far, "bandwidth_gbps"),
        ):
            told = None if answer is None else answer.get(name)
            value = float(told) if isinstance(told, (int, float)) and 0 < told < _PLAUSIBLE else None
            error = "" if value is not None else _why(answer, near, far)
            self._measurements.append(Measurement(self._rounds, Pattern.PAIRS, quantity, one, other, value, error))

    def _way(self, source: int, target: int) -> Message:
        """How an end reaches another one."""
        _, addresses, port = self._reached[target]
        same_machine = self._ends[source].node == self._ends[target].node
        return {"addresses": " ".join(addresses), "port": port, "same_machine": same_machine}

    def _answers(self, asked: dict[int, list[Message]], places: Iterable[int]) -> dict[int, Message]:
        """Send each end of these places its message. An end whose process is gone is left out from then on."""
        at_place = {(self._ends[at].rank, self._reached[at][0]): at for at in places}
        answers: dict[int, Message] = {}
        for rank, message, answer in self._ask(asked, self._options.pair_s + _GRACE_S):
            at = at_place[rank, message["place"]]
            answers[at] = answer
            if answer.get("lost"):
                self._out.add(at)
                self._suspect_adapter(rank, self._ends[at].adapter, f"is lost: {_why(answer, None, None)}")
        return answers

    # ---- in patterns ----

    def _measure_patterns(self, deadline: float) -> None:
        for pairs in patterns.incast(self._ends, self._there()):
            if self._is_late(deadline):
                return
            self._flows(Pattern.INCAST, pairs)
        for target in patterns.doubtful(self._measurements):
            for seed in (1, 2):
                if self._is_late(deadline):
                    return
                self._flows(Pattern.INCAST, patterns.again(self._ends, self._there(), target, seed))
        for pairs in patterns.all_at_once(self._ends, self._there()):
            if self._is_late(deadline):
                return
            self._flows(Pattern.ALL, pairs)

    def _there(self) -> list[int]:
        """The ends that can take part."""
        return [at for at, end in enumerate(self._ends) if end.rank not in self._lost and at not in self._out]

    def _flows(self, pattern: Pattern, pairs: Round) -> None:
        """A round in which each source writes to its target, all at the same time."""
        there = set(self._there())
        pairs = tuple(pair for pair in pairs if there.issuperset(pair))
        token, senders = encode(secrets.token_bytes(TOKEN_SIZE)), collections.Counter(target for _, target in pairs)
        partners, asked = dict(pairs), dict[int, list[Message]]()
        for at in dict.fromkeys(itertools.chain(*pairs)):
            message = {
                "do": "flow",
                "token": token,
                "timeout_s": self._options.pair_s,
                "write_s": self._options.write_s,
                "place": self._reached[at][0],
                "senders": senders[at],
                **(self._way(at, partners[at]) if at in partners else {}),
            }
            asked.setdefault(self._ends[at].rank, []).append(message)
        answers = self._answers(asked, itertools.chain(*pairs))
        for source, target in pairs:
            near, far = answers.get(source, {}), answers.get(target, {})
            told, wrong = near.get("bandwidth_gbps"), near.get("sending") or far.get("receiving")
            value = float(told) if isinstance(told, (int, float)) and 0 < told < _PLAUSIBLE and not wrong else None
            why = wrong or near.get("error") or far.get("error") or "it did not answer"
            error = "" if value is not None else printable(why)
            self._measurements.append(
                Measurement(self._rounds, pattern, Quantity.BANDWIDTH, source, target, value, error)
            )
        self._count()
        self._rounds += 1
        self._say(f"round {self._rounds}: {pattern.value}, {len(pairs)} writers")

    # ---- the report ----

    def report(self, began: datetime.datetime | None = None, took_s: float = 0.0) -> Report:
        """What has been found so far."""
        machines = []
        for node in sorted(set(self._nodes.values())):
            ranks = tuple(rank for rank, name in sorted(self._nodes.items()) if name == node)
            found, findings = compare.of_machine(self._facts[rank] for rank in ranks if rank in self._facts)
            rounds = self._counting.of(node)
            counters = {name: sum(grown.values()) for name, grown in rounds.items()}
            machines.append(Machine(node, ranks, found, findings, counters, rounds))
        known = {machine.node: self._counting.known(machine.node) for machine in machines}
        losing = losses.suspects(machines, self._ends, self._measurements, known)
        slow = self._search.suspects() if self._search else ()
        suspects = [
            *self._lost.values(),
            *self._suspects,
            *compare.unlike(machines),
            *(losses.together(each, losing) or compare.with_counters(each, machines) for each in slow),
        ]
        # Who is slow with one partner may lose packets, and is slow with many too.
        for more in (losing, patterns.slow_receivers(self._ends, self._measurements)):
            named = {node for suspect in suspects for node in suspect.nodes}
            suspects += [suspect for suspect in more if named.isdisjoint(suspect.nodes)]
        return Report(
            began=(began or datetime.datetime.now(datetime.timezone.utc)).isoformat(timespec="seconds"),
            took_s=round(took_s, 3),
            engine=self._engine,
            version=ndpy.__version__,
            ranks=self._size,
            rounds=self._rounds,
            machines=tuple(machines),
            ends=tuple(self._ends),
            measurements=tuple(self._measurements),
            suspects=tuple(sorted(suspects, key=lambda suspect: -suspect.confidence)),
            notes=(*self._notes, *self._hub.notes()),
        )


def _some(nodes: Sequence[str]) -> str:
    return f"{', '.join(nodes[:5])}{' ...' if len(nodes) > 5 else ''}"


def _ranks(keys: Iterable[tuple[int, int]]) -> set[int]:
    return {rank for rank, _ in keys}


def _why(answer: Message | None, near: Message | None, far: Message | None) -> str:
    if answer is not None and answer.get("error"):
        return printable(answer["error"])
    other = far if answer is near else near
    if other is not None and other.get("error"):
        return f"at the partner: {printable(other['error'])}"
    return "it did not answer"
