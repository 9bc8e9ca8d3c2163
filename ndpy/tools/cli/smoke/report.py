"""The output of a smoke test: lines and a progress bar while it runs, a JSON file, and a JUnit file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ndpy.tools.cli.smoke.catalog import Check, Result, Verdict
from ndpy.tools.output import SPINNER, write_report
from ndpy.vocabulary.counters import Counters, is_error

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.KNOWN: "yellow", Verdict.SKIP: "cyan"}


@dataclass
class Run:
    """The results of a run. The summary names `adapter` and `provider`, and says whether the adapter is software."""

    adapter: str
    provider: str
    software: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    #: The full names of the checks that were left out, because there was no peer any more.
    not_run: list[str] = field(default_factory=list)
    #: What the run did to the counters of each port, without those that have not changed. None if there are none.
    counters: Counters | None = None
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(result.verdict for result in self.results)

    def summary(self) -> str:
        """The last line of the output."""
        n = self.counts
        return (
            f"smoke: {n[Verdict.PASS]} passed, {n[Verdict.FAIL]} failed, {n[Verdict.KNOWN]} known, "
            f"{n[Verdict.SKIP]} skipped on {self.adapter} ({self.provider}{', software' if self.software else ''})"
        )

    def errors_counted(self) -> str:
        """What the run did to the counters of errors, in one line. "" if the adapter has no counters."""
        if self.counters is None:
            return ""
        found = [
            f"{name} +{by}" + (f" on port {port}" if len(self.counters) > 1 else "")
            for port, counters in self.counters.items()
            for name, by in counters.items()
            if is_error(name)
        ]
        return (
            f"smoke: the adapter counted errors: {', '.join(found)}"
            if found
            else "smoke: the adapter counted no errors"
        )

    def to_dict(self) -> dict[str, Any]:
        n = self.counts
        return {
            "adapter": self.adapter,
            "provider": self.provider,
            "software": self.software,
            **self.details,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "counters": self.counters,
            "summary": {verdict.name.lower(): n[verdict] for verdict in Verdict},
            "checks": [
                {
                    "group": result.check.group,
                    "name": result.check.name,
                    "claim": result.check.claim,
                    "verdict": result.verdict.value,
                    "reason": result.reason,
                    "reference": result.reference,
                    "seconds": round(result.seconds, 3),
                    "figures": result.figures,
                }
                for result in self.results
            ],
            "not_run": self.not_run,
        }


class Reporter:
    """Prints results for a person: with colours and a progress bar on a terminal, else one plain line for each
    check.
    """

    def __init__(self, total: int, *, terminal: bool | None = None) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._progress: Progress | None = None
        self._references: set[str] = set()
        if self._console.is_terminal if terminal is None else terminal:
            self._progress = Progress(
                SpinnerColumn(SPINNER),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=total)
            self._progress.start()

    def say(self, text: str) -> None:
        """Print a line that belongs to no check."""
        if self._progress is not None:
            self._progress.console.print(Text(text))
        else:
            click.echo(text)

    def starts(self, check: Check) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=check.full_name)

    def ended(self, result: Result) -> None:
        verdict, line = _line(result, with_reference=result.reference not in self._references)
        self._references.add(result.reference)
        if self._progress is not None:
            self._progress.console.print(Text(verdict, style=_STYLES[result.verdict]) + Text(line))
            self._progress.advance(self._task)
        else:
            click.echo(verdict + line)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()


def _line(result: Result, with_reference: bool) -> tuple[str, str]:
    reason = result.reason
    if result.verdict is Verdict.FAIL:
        reason = f"claim: {result.check.claim}\n{reason}"
    if result.reference and with_reference:
        reason += f"\nsee {result.reference}"
    reason = reason.replace("\n", "\n" + " " * 6)
    return f"{result.verdict.value:5}", f" {result.check.full_name:38} {result.seconds:6.2f} s  {reason}"


def write_junit(path: Path, run: Run) -> None:
    """Write JUnit XML, which CI systems read. KNOWN becomes a skipped test, with its reason."""
    n = run.counts
    suite = ElementTree.Element(
        "testsuite",
        name=f"ndpy smoke {run.adapter}",
        tests=str(len(run.results)),
        failures=str(n[Verdict.FAIL]),
        errors="0",
        skipped=str(n[Verdict.SKIP] + n[Verdict.KNOWN]),
        time=f"{run.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"adapter": run.adapter, "provider": run.provider, **run.details}.items():
        ElementTree.SubElement(properties, "property", name=name, value=_xml(str(value)))
    for result in run.results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"smoke.{result.check.group}",
            name=result.check.name,
            time=f"{result.seconds:.3f}",
        )
        reason = _xml(result.reason)
        if result.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(case, "failure", message=reason.partition("\n")[0])
            failure.text = f"{_xml(result.check.claim)}\n{reason}"
        elif result.verdict is Verdict.PASS:
            ElementTree.SubElement(case, "system-out").text = reason
        else:
            ElementTree.SubElement(case, "skipped", message=f"{result.verdict.value}: {reason}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    write_report(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _xml(text: str) -> str:
    """Replace the control characters that XML cannot contain."""
    return "".join(c if c in "\n\t" or ord(c) >= 32 else "?" for c in text)
