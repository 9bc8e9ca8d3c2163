"""The command `ndpy report`."""

from __future__ import annotations

from pathlib import Path

import click

from ndpy.fleet.report.diff import compare
from ndpy.fleet.report.document import ReportError, read
from ndpy.fleet.results import Report
from ndpy.tools.cli.channel import printable

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LONGEST = 2000


@click.group("report")
def command() -> None:
    """Work with the reports of ndpy fleet."""


@command.command("diff")
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.pass_context
def diff(context: click.Context, before: Path, after: Path) -> None:
    """Say what got worse and better from one report to another.

    Both are JSON files of ndpy fleet. A change of bandwidth or latency counts if it is at least 5 % and beyond the
    noise of both runs. The exit status is 1 if something got worse, 0 if nothing did, and 2 for a file that is not a
    report.
    """
    comparison = compare(_read(before), _read(after))
    for line in comparison.lines():
        click.echo(printable(line, _LONGEST))
    context.exit(int(bool(comparison.worse)))


def _read(path: Path) -> Report:
    try:
        return read(path)
    except ReportError as error:
        raise click.UsageError(printable(str(error), _LONGEST)) from None
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror or error}") from None
