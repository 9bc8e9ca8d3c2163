"""The report on a terminal."""

from __future__ import annotations

import click
from rich.text import Text

from ndpy.fleet.report.node_sets import fold
from ndpy.fleet.report.statistics import NAMES, figure, grew_in, headline, percent, summaries, title, verdict
from ndpy.fleet.results import Report, Suspect
from ndpy.tools.cli.channel import printable
from ndpy.tools.output import new_table, print_table

# Nobody reads more of them. The other forms have all.
_MOST_COUNTERS = 20
_LONGEST = 2000


def print_report(report: Report) -> None:
    """Print it: what was measured, which counters grew, the suspects, and the nodes to drain. Standard output."""
    _line(headline(report))
    _print_summaries(report)
    _print_counters(report)
    for note in report.notes:
        _line(f"note: {note}")
    if report.suspects:
        click.echo()
        _print_suspects(report.suspects)
        click.echo()
    if report.drain():
        _line(f"drain: {fold(report.drain())}")
    _line(verdict(report.suspects))


def _line(text: str) -> None:
    click.echo(printable(text, 1_000_000))


def _text(text: str) -> Text:
    return Text(printable(text, _LONGEST))


def _print_summaries(report: Report) -> None:
    table = new_table("pattern", "quantity", no_wrap=True)
    for name in ("measured", "failed", "least", "1 %", "median", "99 %", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in summaries(report.measurements):
        shares = (figure(each.at(share), each.quantity) for share in (0, 0.01, 0.5, 0.99, 1))
        count = len(each.values) + each.failed
        table.add_row(each.pattern.value, NAMES[each.quantity], str(count), str(each.failed), *shares)
    if table.row_count:
        print_table(table)


def _print_counters(report: Report) -> None:
    """The counters that grew the most."""
    grown = sorted(
        (
            (by, machine.node, name, grew_in(machine.counter_rounds.get(name, {})))
            for machine in report.machines
            for name, by in machine.counters.items()
            if by > 0
        ),
        key=lambda each: (-each[0], *each[1:]),
    )
    for by, node, name, rounds in grown[:_MOST_COUNTERS]:
        _line(f"counter: {node} {name} +{by}{rounds}")
    if len(grown) > _MOST_COUNTERS:
        _line(f"counter: {len(grown) - _MOST_COUNTERS} more grew")


def _print_suspects(suspects: tuple[Suspect, ...]) -> None:
    table = new_table()
    table.add_column("suspect", overflow="fold", max_width=34)
    table.add_column("sure", justify="right", no_wrap=True)
    table.add_column("of", justify="right", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for suspect in suspects:
        found = _text(suspect.reason)
        page = f" (ndpy explain {suspect.problem})" if suspect.problem else ""
        found.append(f"\nremedy: {printable(suspect.remedy + page, _LONGEST)}", style="bold")
        name = _text(title(suspect))
        name.stylize("bold red")
        table.add_row(name, percent(suspect.confidence), str(suspect.measurements), found)
    print_table(table, wraps=True)
