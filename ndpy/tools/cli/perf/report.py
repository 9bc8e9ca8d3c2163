"""The output of a run: a table and a histogram for people, JSON, CSV, and the progress bar.
plot.py draws the picture.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ndpy.tools.cli.perf.figures import PERCENTILES, Bandwidth, Bucket, Latency, Result
from ndpy.tools.output import SPINNER, new_table, print_table, write_report

#: The progress bar is drawn by the thread that measures, so not often.
_REDRAW_S = 1.0
_BAR_WIDTH = 50


@dataclass
class Run:
    """A run and its results. broken: how results break the limits."""

    test: str
    adapter: str
    details: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    error: str = ""
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        return not (self.broken or self.error or self.interrupted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "adapter": self.adapter,
            **self.details,
            "interrupted": self.interrupted,
            "error": self.error,
            "broken_limits": self.broken,
            "passed": self.passed,
            "results": [result.to_dict() for result in self.results],
        }


def table(results: Sequence[Result]) -> Table:
    """The results of a run as a table. Times are in microseconds."""
    latency = bool(results) and isinstance(results[0], Latency)
    times = ["min", *(f"{percent:g} %" for percent in PERCENTILES), "max", "mean", "stdev"]
    names = ["bytes", "iterations", *(times if latency else ["Gb/s", "MiB/s", "Mpps"])]
    made = new_table(*names, justify="right", no_wrap=True)
    for result in results:
        made.add_row(str(result.size), str(result.iterations), *_cells(result))
    return made


def _cells(result: Result) -> list[str]:
    if isinstance(result, Bandwidth):
        return [f"{result.gbps:.3f}", f"{result.mib_per_s:.2f}", f"{result.mpps:.6f}"]
    times = result.times
    values = [
        times.least_us,
        *(times.percentile_us(percent) for percent in PERCENTILES),
        times.most_us,
        times.mean_us,
        times.stdev_us,
    ]
    return ["-" if value is None else f"{value:.2f}" for value in values]


def histogram_lines(buckets: Sequence[Bucket]) -> list[str]:
    """A histogram as text: a line for each bucket. The longest bar is the largest bucket."""
    largest = max(bucket.count for bucket in buckets)
    return [
        f"{bucket.from_us:12.2f} to {bucket.to_us:10.2f} us {bucket.count:10} "
        + "#" * (-(-bucket.count * _BAR_WIDTH // largest))
        for bucket in buckets
    ]


def show(run: Run, *, histogram: bool) -> None:
    """Print the results for people."""
    if not run.results:
        return
    if isinstance(run.results[0], Latency):
        click.echo("latency in microseconds")
    print_table(table(run.results))
    for result in run.results:
        if isinstance(result, Bandwidth) and result.one_direction:
            click.echo(
                f"{result.size} bytes: interrupted; the figures are of this side's direction only, not the sum of both"
            )
    for result in run.results:
        if histogram and isinstance(result, Latency):
            click.echo("\n".join([f"\n{result.size} bytes", *histogram_lines(result.times.histogram())]))


def write_csv(path: Path, run: Run) -> None:
    """A line for each size, after a line with the names. Figures that do not exist are empty."""
    rows = [{name: value for name, value in result.to_dict().items() if name != "histogram"} for result in run.results]
    file = io.StringIO(newline="")
    # The last row of a run that was interrupted may have other figures.
    names = dict.fromkeys(name for row in rows for name in row) or ["bytes"]
    writer = csv.DictWriter(file, list(names))
    writer.writeheader()
    writer.writerows(rows)
    write_report(path, file.getvalue().encode())


class Bar:
    """The progress of a run, on standard error if that is a terminal. Each size is one step."""

    def __init__(self, sizes: int, *, terminal: bool | None = None) -> None:
        console = Console(stderr=True)
        self._progress: Progress | None = None
        self._next_drawing = 0.0
        if console.is_terminal if terminal is None else terminal:
            # Without a thread of its own, which would disturb the measurement.
            self._progress = Progress(
                SpinnerColumn(SPINNER),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                auto_refresh=False,
            )
            self._task = self._progress.add_task("", total=sizes)
            self._progress.start()

    def at(self, done: int, size: int) -> None:
        """A size begins, after `done` others."""
        self._done = done
        if self._progress is not None:
            self._progress.update(self._task, description=f"{size} bytes", completed=done, refresh=True)

    def show(self, part: float) -> None:
        """This part of the size is done, from 0 to 1."""
        if self._progress is not None and time.monotonic() >= self._next_drawing:
            self._progress.update(self._task, completed=self._done + part, refresh=True)
            self._next_drawing = time.monotonic() + _REDRAW_S

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
