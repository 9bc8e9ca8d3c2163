"""`ndpy faults`: programs on an adapter with faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click

import ndpy
from ndpy import faults
from ndpy.faults import kinds
from ndpy.faults.injection import Injection
from ndpy.tools.cli import soft
from ndpy.tools.cli.faults import sweep as sweeps
from ndpy.tools.cli.faults.processes import run_to_its_end, status_of
from ndpy.tools.cli.numbers import Number
from ndpy.tools.output import (
    STDOUT,
    JsonCommand,
    beside_reports,
    new_table,
    output_option,
    print_table,
    write_all,
    write_json,
)

#: The exit status if the program succeeded and a fault never fired.
_NEVER_FIRED = 124
#: As `ndpy soft run`.
_NO_ADAPTER = 125

executor_option = click.option(
    "--executor",
    type=click.Choice(kinds.HERE),
    default=kinds.HERE[0],
    show_default=True,
    help="engine: PROGRAM runs on soft0, whose engine makes the faults. shim: a library that is loaded before "
    "libibverbs makes them, on the adapter that PROGRAM chooses. softnd, on Windows: softnd makes them.",
)


@click.group(short_help="Run programs on an adapter with faults, on Linux.")
def command() -> None:
    """See what a program does when its adapter fails.

    A scenario says what goes wrong, and when. It is a TOML file:

    \b
      [[fault]]
      do = "status"
      operation = "send"
      nth = 3
      status = "RETRY_EXC_ERR"

    The third send of each queue pair fails. `ndpy faults list` prints the kinds of faults. In Python, ndpy.faults has
    the same, and the plugin of pytest has the fixture rdma_faults.
    """


@command.command("list", cls=JsonCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def list_kinds(as_json: bool) -> None:
    """Print the kinds of faults, with the values of each and who can make it."""
    if as_json:
        rows = [
            {
                "do": kind.do,
                "at": kind.at,
                "values": kind.values,
                "optional": kind.optional,
                "executors": kind.executors,
            }
            | {"meaning": kind.meaning, "afterwards": kind.afterwards, "reference": kind.reference}
            for kind in kinds.KINDS
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    table = new_table("AT", "DO", "VALUES", *(name.upper() for name in kinds.EXECUTORS), "WHAT HAPPENS")
    for kind in kinds.KINDS:
        can = ["yes" if name in kind.executors else "-" for name in kinds.EXECUTORS]
        table.add_row(kind.at, kind.do, kinds.values_text(kind), *can, kind.meaning)
    print_table(table, wraps=True)


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-f",
    "--file",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The scenario.",
)
@executor_option
@click.option("--allow-unfired", is_flag=True, help="A fault that never fired is not an error.")
@output_option("json", "Write the report to FILE as JSON.")
@click.argument("words", nargs=-1, required=True, metavar="[--] PROGRAM...")
def run(path: Path, executor: str, allow_unfired: bool, json_file: Path | None, words: tuple[str, ...]) -> None:
    """Run PROGRAM with a scenario, and report which faults fired, and where.

    PROGRAM can be any program that uses libibverbs and librdmacm. The processes that it starts have the scenario too.
    The report goes to standard error. The exit status is that of PROGRAM, with 128 and its number for a signal, or one
    of these:

    \b
      124  PROGRAM succeeded, and a fault never fired.
      125  The scenario is wrong, or there is no such executor.
      126  PROGRAM cannot be executed.
      127  There is no such PROGRAM.
    """
    try:
        scenario = faults.Scenario.load(path)
        injection = Injection(scenario, executor)
    except (ndpy.NdpyError, OSError) as error:
        click.echo(f"ndpy faults: {error}", err=True)
        sys.exit(_NO_ADAPTER)
    with injection:
        output = sys.stderr if json_file == STDOUT else None
        try:
            process = subprocess.Popen(words, env=injection.environment(), stdout=output, restore_signals=True)
        except (OSError, ValueError) as error:
            sys.exit(soft.why_not_run("ndpy faults", words[0], error))
        status = status_of(run_to_its_end(process))
        report = injection.report()
    click.echo(report, err=True)
    if report.never and not allow_unfired:
        status = status or _NEVER_FIRED
    values = {"program": words, "executor": executor, "status": status, **report.as_values()}
    failed = write_all("ndpy faults", (json_file, lambda path: write_json(path, values)))
    sys.exit(status or failed)


def _lost_data(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(value) if value is not None else None
    except re.error as error:
        raise click.BadParameter(f"{value!r} is not a regular expression: {error}") from None


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@executor_option
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(sorted({kind.do for kind in kinds.KINDS})),
    help="Only faults of this kind. Can be given several times.",
)
@click.option("--max-runs", type=click.IntRange(1), default=200, show_default=True, help="The most runs with a fault.")
@click.option(
    "--limit",
    type=Number(0),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Begin no run after this time.",
)
@click.option(
    "--deadline",
    type=Number(0, min_open=True),
    metavar="SECONDS",
    help="A run that takes longer hangs. Default: ten times the run without a fault, and a minute.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="For the choice if there are too many faults.")
@click.option(
    "--lost-data",
    callback=_lost_data,
    metavar="REGEX",
    help="What PROGRAM prints when it finds that data is lost or wrong.",
)
@click.option("--lost-data-status", type=int, metavar="N", help="The exit status with which it says so.")
@output_option("json", "Write all runs to FILE as JSON.")
@click.argument("words", nargs=-1, required=True, metavar="[--] PROGRAM...")
def sweep(
    executor: str,
    only: tuple[str, ...],
    max_runs: int,
    limit: float,
    deadline: float | None,
    seed: int,
    lost_data: re.Pattern[str] | None,
    lost_data_status: int | None,
    json_file: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run PROGRAM with each single fault at each place that it passes, and see how it ends.

    The first run, without a fault, has to succeed. It counts the calls, requests and messages of PROGRAM and of the
    processes that it starts. Then there is a run for each fault, or for a choice of them.

    \b
      succeeded    PROGRAM ended with status 0.
      failed       It ended with another status, as a program may that says what is wrong.
      leaked       It left a process behind, or ended with status 0 and left more objects of soft0 than without a fault.
      lost data    It has told so (--lost-data, --lost-data-status).
      hung         It did not end within the deadline.
      crashed      A signal ended it.
      not reached  The fault never fired, because the run took another way.

    The exit status is 0 if all runs succeeded, failed or did not reach their fault, 1 if one did not, 130 after Ctrl-C,
    or one of these:

    \b
      125  PROGRAM does not succeed without a fault, or there is no such executor.
      126  PROGRAM cannot be executed.
      127  There is no such PROGRAM.
    """
    limits = sweeps.Limits(max_runs, limit, deadline, seed)
    made = sweeps.Sweep(words, executor, only, limits, sweeps.Check(lost_data, lost_data_status))
    sweeps.end_by_sigterm()
    with beside_reports(json_file):
        try:
            made.run()
        except (ndpy.NdpyError, OSError, ValueError) as error:
            if isinstance(error, ndpy.NdpyError):
                click.echo(f"ndpy faults: {error}", err=True)
                sys.exit(_NO_ADAPTER)
            sys.exit(soft.why_not_run("ndpy faults", words[0], error))
        finally:
            if made.runs:
                made.show()
    failed = write_all("ndpy faults", (json_file, lambda path: write_json(path, made.as_values())))
    sys.exit(failed or int(any(run.outcome in sweeps.BAD for run in made.runs)))
