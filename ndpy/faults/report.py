"""What has become of a scenario: which faults fired, where, and which never did."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndpy.errors import NdpyError
from ndpy.faults.scenario import Fault, Scenario


class NeverFiredError(NdpyError, AssertionError):
    """A fault of a scenario has never fired, so nothing was shown by the run."""

    problem = "never-fired"


@dataclass(frozen=True)
class Fired:
    """A fault that fired.

    Attributes:
        fault: its number in the scenario, from 0.
        pid: the process.
        place: the name of the call or the operation, or "connection" or "adapter".
        queue_pair: its number, in the order of creation, or 0.
        count: how many such there were, with this one.
        does: what happened.
        caller: the place in the program: library, offset and function. "" if it is not known.
        time: milliseconds since the scenario was read.
    """

    fault: int
    pid: int
    place: str
    queue_pair: int
    count: int
    does: str
    caller: str
    time: int

    def __str__(self) -> str:
        pair = f" of queue pair {self.queue_pair}" if self.queue_pair else ""
        caller = f", called by {self.caller}" if self.caller else ""
        return f"{self.does} at {self.place} {self.count}{pair}{caller} (process {self.pid})"


@dataclass(frozen=True)
class Report:
    """What has become of a scenario.

    Attributes:
        scenario: it.
        fired: in the order in which they fired.
    """

    scenario: Scenario
    fired: tuple[Fired, ...]

    @classmethod
    def read(cls, scenario: Scenario, path: Path) -> Report:
        """Read what the executors have written. A last line that the end of its process has cut off is left out.

        Parameters:
            scenario: what they were given.
            path: the file that Scenario.plain() has named to them. It need not exist.
        """
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return cls(scenario, tuple(_fired(lines)))

    @property
    def never(self) -> tuple[Fault, ...]:
        """The faults that never fired."""
        return tuple(self.scenario.faults[number] for number in self._never())

    def _never(self) -> list[int]:
        return sorted(set(range(len(self.scenario.faults))) - {each.fault for each in self.fired})

    def check(self) -> None:
        """Refuse a run in which a fault never fired.

        Raises:
            NeverFiredError: there is such a fault. The text names all of them.
        """
        if self.never:
            raise NeverFiredError("\n".join(f"this fault never fired: {fault}" for fault in self.never))

    def __str__(self) -> str:
        lines = [f"fired: {each}" for each in self.fired] + [f"never fired: {fault}" for fault in self.never]
        return "\n".join(lines) or "no faults"

    def as_values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.scenario.seed,
            "faults": [dict(fault.words()) for fault in self.scenario.faults],
            "fired": [asdict(each) for each in self.fired],
            "never_fired": self._never(),
        }


def _fired(lines: Iterable[bytes]) -> Iterable[Fired]:
    for line in lines:
        values = json.loads(line)
        yield Fired(
            fault=int(values["fault"]),
            pid=int(values["pid"]),
            place=str(values["place"]),
            queue_pair=int(values.get("queue_pair", 0)),
            count=int(values.get("count", 0)),
            does=str(values["does"]),
            caller=str(values.get("caller", "")),
            time=int(values.get("time", 0)),
        )
