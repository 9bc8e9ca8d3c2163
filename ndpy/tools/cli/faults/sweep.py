"""`ndpy faults sweep`: a program with each single fault at each place that it passes."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ndpy
from ndpy.faults import Fault, Report, Scenario, sweeping
from ndpy.faults.injection import Injection
from ndpy.faults.places import Passages
from ndpy.tools.cli.faults.processes import Ended, adopting, run_until
from ndpy.tools.output import new_table, print_table

#: How a run can end, the best first. The last four are what a sweep looks for.
SUCCEEDED, FAILED, LEAKED, LOST_DATA, HUNG, CRASHED = ("succeeded", "failed", "leaked", "lost data", "hung", "crashed")
OUTCOMES = (SUCCEEDED, FAILED, LEAKED, LOST_DATA, HUNG, CRASHED)
BAD = OUTCOMES[2:]
#: The fault never fired.
NOT_REACHED = "not reached"

# Of signal(7): SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, which Windows does not have. A crash in a process
# that a shell has started shows as 128 and its number.
_CRASHES = {4, 5, 6, 7, 8, 11}
_SHOWN_LINES = 3
# A program that waits for a silent host does not hang: soft0 gives it up after 10 s, and an attempt to connect after 21
# to 54 s. Linux takes about a minute for that (drivers/infiniband/core/cma.c, CMA_MAX_CM_RETRIES).
_GIVES_UP_S = 60


@dataclass(frozen=True)
class Limits:
    """The bounds of a sweep.

    Attributes:
        runs: the most runs with a fault.
        seconds: no run begins later.
        deadline_s: each run may take so long. None: ten times the first one, and a minute.
        seed: for the choice of the runs.
    """

    runs: int
    seconds: float
    deadline_s: float | None
    seed: int


@dataclass(frozen=True)
class Check:
    """How a program says that it has lost data.

    Attributes:
        pattern: in its output.
        status: its exit status.
    """

    pattern: re.Pattern[str] | None
    status: int | None

    def has_lost(self, ended: Ended) -> bool:
        by_text = self.pattern is not None and self.pattern.search(ended.output) is not None
        return by_text or (self.status is not None and ended.status == self.status)


@dataclass(frozen=True)
class Run:
    """A run with one fault, and what came of it."""

    fault: Fault
    outcome: str
    ended: Ended
    report: Report
    leaked: tuple[str, ...]

    def as_values(self) -> dict[str, Any]:
        return {
            "fault": dict(self.fault.words()),
            "outcome": self.outcome,
            "status": self.ended.status,
            "seconds": round(self.ended.seconds, 3),
            "fired": [str(each) for each in self.report.fired],
            "leaked": self.leaked,
            "output": self.ended.output[-2000:],
        }


class BadStart(ndpy.NdpyError):
    """The program cannot be swept."""


@dataclass
class Sweep:
    """A program, and what is done with it."""

    words: Sequence[str]
    executor: str
    only: Sequence[str]
    limits: Limits
    check: Check
    runs: list[Run] = field(default_factory=list)
    places: list[Passages] = field(default_factory=list)
    #: The faults that the bounds left out.
    left_out: int = 0
    # What the program leaves without a fault, by kind of object.
    _usual: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Run the program without a fault, and then with each that is chosen. After Ctrl-C the results until then
        remain.

        Raises:
            BadStart: it does not succeed without a fault, or passes no place.
            OSError, ValueError: it cannot be started.
        """
        began = time.monotonic()
        with adopting():
            first = self._count()
            deadline_s = self.limits.deadline_s or 10 * first.seconds + _GIVES_UP_S
            found = sweeping.groups(self.places, self.executor, self.only)
            every = sum(map(len, found))
            chosen = list(sweeping.choose(found, self.limits.runs, self.limits.seed))
            click.echo(
                f"{len(self.places)} places, {every} single faults; running {len(chosen)}, each for at most "
                f"{deadline_s:.1f} s",
                err=True,
            )
            with _progress(len(chosen)) as progress:
                task = progress.add_task("", total=len(chosen))
                for fault in chosen:
                    if time.monotonic() - began >= self.limits.seconds:
                        break
                    self.runs.append(self._with(fault, deadline_s))
                    bad = sum(run.outcome in BAD for run in self.runs)
                    progress.update(task, advance=1, description=f"{bad} bad")
            self.left_out = every - len(self.runs)

    def _count(self) -> Ended:
        with Injection(Scenario(), self.executor, counting=True) as injection:
            ended, self._usual = self._run(injection, self.limits.deadline_s or self.limits.seconds)
            self.places = injection.counts()
        if ended.status is None:
            raise BadStart(f"without a fault, {self.words[0]} does not end within {ended.seconds:.0f} s")
        if ended.status != 0 or self.check.has_lost(ended):
            raise BadStart(f"without a fault, {self.words[0]} ends with status {ended.status}:\n{ended.output[-2000:]}")
        if not self.places:
            raise BadStart(f"{self.words[0]} has made no call that {self.executor} has seen")
        return ended

    def _with(self, fault: Fault, deadline_s: float) -> Run:
        with Injection(Scenario([fault]), self.executor) as injection:
            ended, objects = self._run(injection, deadline_s)
            report = injection.report()
        leaked = (*ended.left, *(f"{count} of {kind}" for kind, count in (objects - self._usual).items()))
        return Run(fault, self._outcome(ended, report, leaked), ended, report, leaked)

    def _run(self, injection: Injection, deadline_s: float) -> tuple[Ended, Counter[str]]:
        """Run the program. Returns how it ended, and how many objects of each kind its processes did not release."""
        with tempfile.TemporaryDirectory() as folder:
            statistics = Path(folder, "statistics")
            environment = {**injection.environment(), "SOFTVERBS_STATISTICS": str(statistics)}
            ended = run_until(self.words, environment, deadline_s)
            return ended, _leaked_objects(statistics)

    def _outcome(self, ended: Ended, report: Report, leaked: Sequence[str]) -> str:
        if ended.status is None:
            return HUNG
        if -ended.status in _CRASHES or ended.status - 128 in _CRASHES or ended.status < 0:
            return CRASHED
        if self.check.has_lost(ended):
            return LOST_DATA
        if ended.left or (leaked and ended.status == 0):
            return LEAKED
        if not report.fired:
            return NOT_REACHED
        return SUCCEEDED if ended.status == 0 else FAILED

    # ---- what is told ----

    def show(self) -> None:
        """Print a table of the kinds, and each run that ended badly."""
        counts: dict[tuple[str, str], Counter[str]] = {}
        for run in self.runs:
            counts.setdefault((run.fault.at, run.fault.do), Counter())[run.outcome] += 1
        table = new_table("AT", "DO", "RUNS", *(outcome.upper() for outcome in (*OUTCOMES, NOT_REACHED)))
        for (at, do), of in counts.items():
            table.add_row(at, do, str(of.total()), *(str(of[outcome] or "-") for outcome in (*OUTCOMES, NOT_REACHED)))
        print_table(table)
        for run in self.runs:
            if run.outcome in BAD:
                click.echo(f"\n{run.outcome}: {run.fault}")
                for line in (*run.report.fired, *run.leaked, *run.ended.output.splitlines()[-_SHOWN_LINES:]):
                    click.echo(f"  {line}")
        if self.left_out:
            click.echo(f"\n{self.left_out} single faults were left out (--max-runs, --limit)")

    def as_values(self) -> dict[str, Any]:
        return {
            "program": list(self.words),
            "executor": self.executor,
            "seed": self.limits.seed,
            "places": [
                {"at": each.at, "name": each.name, "queue_pair": each.queue_pair, "count": each.count}
                for each in self.places
            ],
            "left_out": self.left_out,
            "runs": [run.as_values() for run in self.runs],
        }


def _leaked_objects(statistics: Path) -> Counter[str]:
    """What soft0 says of objects that the processes have not released."""
    found: Counter[str] = Counter()
    if statistics.exists():
        text = statistics.read_text("utf-8", "replace")
        for kind, count in re.findall(r"^(.+): \d+ created, (\d+) leaked$", text, re.MULTILINE):
            found[kind] += int(count)
    return found


def _progress(total: int) -> Progress:
    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def end_by_sigterm() -> None:
    """SIGTERM ends this process as an exception does. The processes that it has started end too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
