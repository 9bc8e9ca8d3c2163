"""Where commands write: reports to files or standard output, tables to terminals of every width, text in every
encoding.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: A spinner of ASCII characters.
SPINNER = "line"
#: The name of standard output, as the path of a report.
STDOUT = Path("-")

# A file or a pipe has no width. Folded columns would break the program that reads them.
_WIDTH_OF_FILES = 200
_UNLIMITED = 100_000
# Below it, sentences in a column of a table are hard to read.
_LEAST_WIDTH = 80


# ---- reports ----


def output_option(name: str, help: str) -> Callable[[Any], Any]:
    """The option --NAME, for the path of a file that a command writes at its end, or STDOUT.

    Its parameter is called NAME_file. A path that cannot be written is refused at once.
    """
    return click.option(
        f"--{name}",
        f"{name.replace('-', '_')}_file",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        callback=_writable,
        metavar="FILE",
        help=f"{help} - is standard output.",
    )


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path != STDOUT and not context.resilient_parsing:
        problem = _problem(path)
        if problem:
            raise click.BadParameter(f"cannot write {path}: {problem}")
    return path


def _problem(path: Path) -> str:
    """Why a file cannot be written, or "". The file is as it was afterwards."""
    try:
        # What a symbolic link names is written, and the link stays.
        path = Path(os.path.realpath(path))
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if path.is_file():
            path.open("ab").close()
        elif path.exists():
            # Opening a pipe may wait, and is an event for its reader.
            return "" if os.access(path, os.W_OK) else "permission denied"
        else:
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def beside_reports(*paths: Path | None) -> Iterator[None]:
    """In the block, other output goes to standard error if one of these reports goes to standard output.

    Raises UsageError if more than one goes there.
    """
    if paths.count(STDOUT) > 1:
        raise click.UsageError("only one report can go to standard output (-)")
    if STDOUT not in paths:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def write_report(path: Path, report: bytes) -> None:
    """Write a report. Raises OSError."""
    if path == STDOUT:
        click.echo(report, nl=False)
    else:
        path.write_bytes(report)


def write_json(path: Path, values: Any) -> None:
    """Write a report as JSON. Raises OSError."""
    write_report(path, (json.dumps(values, indent=2) + "\n").encode())


def write_all(command: str, *reports: tuple[Path | None, Callable[[Path], None]]) -> int:
    """Write the reports that a command was asked for, each by its function.

    Returns the exit status. It is 1 if one cannot be written, which the command says. Those after it are not written.
    """
    try:
        for path, write in reports:
            if path is not None:
                write(path)
    except OSError as error:
        click.echo(f"{command}: {why_unwritten(error)}", err=True)
        return 1
    return 0


def why_unwritten(error: OSError) -> str:
    """Why write_report() failed."""
    return f"{error.filename or 'standard output'}: {error.strerror or error}"


class JsonCommand(click.Command):
    """A command whose --json prints to standard output. `--json -` says that too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        kept = [word for place, word in enumerate(args) if word != "-" or args[max(place - 1, 0)] != "--json"]
        return super().parse_args(ctx, kept)


# ---- text ----


def console() -> Console:
    """Standard output, now."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_WIDTH_OF_FILES)


def new_table(*columns: str, **options: Any) -> Table:
    """A table without lines. options: those of each column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, **options)
    return table


def print_table(table: Table, *, wraps: bool = False) -> None:
    """Print a table of texts without cutting one. If the terminal is too narrow, each row is a block with a line for
    each cell.

    wraps: the last column has sentences, which may be broken between words.
    """
    out = console()
    unlimited = out.options.update(width=_UNLIMITED, max_width=_UNLIMITED)
    needed = _LEAST_WIDTH if wraps else out.measure(table, options=unlimited).maximum
    if not out.is_terminal and needed > out.width:
        out = Console(highlight=False, width=needed)
    if needed <= out.width:
        out.print(table)
    else:
        _print_blocks(out, table, soft_wrap=not wraps)


def _print_blocks(out: Console, table: Table, *, soft_wrap: bool) -> None:
    names = [str(column.header) for column in table.columns]
    room = max(map(len, names)) + 2
    for number, row in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        if number:
            out.print()
        for name, cell in zip(names, row, strict=True):
            text = cell if isinstance(cell, Text) else Text(str(cell))
            for place, line in enumerate(text.split("\n")):
                out.print(Text(("" if place else name).ljust(room)) + line, soft_wrap=soft_wrap)
