"""The command `ndpy`. The module of a sub-command is imported when that sub-command is used."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import click

from ndpy.tools.standard_output import checked_output

_INTERRUPTED = 130

_SUBCOMMANDS = {
    "completion": "ndpy.tools.cli.completion",
    "devices": "ndpy.tools.cli.devices",
    "doctor": "ndpy.tools.cli.doctor",
    "explain": "ndpy.tools.cli.explain",
    "faults": "ndpy.tools.cli.faults",
    "fleet": "ndpy.fleet.command",
    "perf": "ndpy.tools.cli.perf",
    "report": "ndpy.fleet.report.command",
    "smoke": "ndpy.tools.cli.smoke",
    "soft": "ndpy.tools.cli.soft",
    "softnd": "ndpy.tools.cli.softnd",
    "softroce": "ndpy.tools.cli.softroce",
    "vm": "ndpy.tools.cli.vm",
}


class _LazyGroup(click.Group):
    """A group whose sub-commands are the objects called `command` in the modules of _SUBCOMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _SUBCOMMANDS.get(cmd_name)
        if module is None:
            return None
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def main(self, *words: Any, **options: Any) -> Any:
        with checked_output("ndpy"):
            return super().main(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(f"{ctx.command_path}: interrupted", err=True)
            ctx.exit(_INTERRUPTED)


def _let_every_text_pass() -> None:
    r"""Let characters that standard output cannot encode appear as escapes such as \u2026, not as an exception."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ndpy")
def main() -> None:
    """List RDMA adapters, test and measure them, find out what is wrong with them, or create one in software.

    Ctrl-C ends every command with status 130, except where it is the way to end it (--serve, --watch).
    """
    _let_every_text_pass()
