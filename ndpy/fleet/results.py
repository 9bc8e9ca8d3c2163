"""What a fleet's run measures and finds. `Report` is the whole; its JSON form has the version SCHEMA."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

#: The version of the JSON form. It grows when a field changes its meaning or goes.
SCHEMA = 1


class Kind(str, enum.Enum):
    """What a suspect is."""

    NODE = "node"
    RANK = "rank"
    ADAPTER = "adapter"
    GROUP = "group"
    PATH = "path"


class Pattern(str, enum.Enum):
    """Who is measured at the same time. PAIRS: each end has one partner. INCAST: many write to one. ALL: all to all."""

    PAIRS = "pairs"
    INCAST = "incast"
    ALL = "all"


class Quantity(str, enum.Enum):
    """What is measured. The value is the unit; more is better, except for LATENCY."""

    LATENCY = "us"
    BANDWIDTH = "Gb/s"


@dataclasses.dataclass(frozen=True)
class End:
    """One adapter of one rank. Measurements are between two of them, by their place in `Report.ends`.

    Attributes:
        rank: the rank of the process that measures it.
        node: the name of the machine.
        adapter: the adapter's name, "" if the rank has none.
        groups: what it shares with others, such as "leaf l3" and "rail 0", from the topology; the node is not among
            them.
    """

    rank: int
    node: str
    adapter: str
    groups: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One result of one pair in one round.

    Attributes:
        round: the number of the round, from 0.
        pattern: who was measured at the same time.
        quantity: what was measured.
        source: the place of the end that sends (for LATENCY: that begins).
        target: the place of the end that receives.
        value: in the quantity's unit, or None if it failed.
        error: why it failed, as a sentence, or "".
        problem: the word of `ndpy explain` for the error, or "".
    """

    round: int
    pattern: Pattern
    quantity: Quantity
    source: int
    target: int
    value: float | None
    error: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Something that is unlike the others.

    Attributes:
        kind: what it is.
        name: "n17", "n17/mlx5_0", "leaf l3", "leaf l3 - leaf l7".
        nodes: the machines to drain if it is to be taken out of use.
        quantity: what is unlike, or None if nothing was measured (a rank that died, another MTU than the others have).
        factor: measured divided by expected: 0.9 is 10 % less bandwidth. None without a quantity.
        confidence: how sure it is, from 0 to 1.
        measurements: how many of them say so.
        reason: a sentence for people, with the figures.
        remedy: what to do.
        problem: the word of `ndpy explain`, or "".
    """

    kind: Kind
    name: str
    nodes: tuple[str, ...]
    quantity: Quantity | None
    factor: float | None
    confidence: float
    measurements: int
    reason: str
    remedy: str
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a node says of itself.

    Attributes:
        node: its name.
        ranks: the ranks that run on it.
        facts: what is compared with the majority, by name, such as "mlx5_0 firmware": "22.38.1002", "mlx5_0 MTU":
            "4096".
        findings: of `ndpy doctor`: check, verdict, text and remedy.
        counters: what the counters of errors, retransmissions, pauses, ECN and discards grew by during the run, by
            name.
        counter_rounds: the same for each round in which one grew: by name, then by the round's number as a string.
    """

    node: str
    ranks: tuple[int, ...]
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    findings: tuple[dict[str, str], ...] = ()
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    counter_rounds: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        began: when it began, in ISO 8601 with the zone UTC.
        took_s: how long it took, in seconds.
        engine: how the ranks found each other: "mpi", "rendezvous" or "ssh"; "prolog" for one machine alone.
        version: of ndpy at rank 0.
        ranks: how many there are.
        rounds: how many were measured.
        machines: what each node says of itself.
        ends: the adapters, in the order of their places.
        measurements: all of them.
        suspects: the most certain first. A run without suspects is good.
        notes: sentences about the run itself: a budget that ended it, a part that was left out and why.
    """

    began: str
    took_s: float
    engine: str
    version: str
    ranks: int
    rounds: int
    machines: tuple[Machine, ...]
    ends: tuple[End, ...]
    measurements: tuple[Measurement, ...]
    suspects: tuple[Suspect, ...]
    notes: tuple[str, ...] = ()

    def drain(self) -> tuple[str, ...]:
        """The nodes of all suspects, sorted and each once."""
        return tuple(sorted({node for suspect in self.suspects for node in suspect.nodes}))


def to_json(report: Report) -> dict[str, Any]:
    """The JSON form. Each measurement is a list in the order of its fields, which `measurement_fields` names."""
    fields = [field.name for field in dataclasses.fields(Measurement)]
    document = {field.name: getattr(report, field.name) for field in dataclasses.fields(Report)}
    document["machines"] = [dataclasses.asdict(each) for each in report.machines]
    document["ends"] = [dataclasses.asdict(each) for each in report.ends]
    document["suspects"] = [dataclasses.asdict(each) for each in report.suspects]
    document["measurements"] = [[getattr(each, name) for name in fields] for each in report.measurements]
    return {"schema": SCHEMA, "measurement_fields": fields, **document, "drain": report.drain()}
