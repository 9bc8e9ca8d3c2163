"""The command `ndpy`. The module of a sub-command is imported when that sub-command is used."""

from __future__ import annotations

import importlib

import click

_SUBCOMMANDS = {
    "devices": "ndpy.cli.devices",
    "doctor": "ndpy.cli.doctor",
    "perf": "ndpy.cli.perf",
    "smoke": "ndpy.cli.smoke",
    "soft": "ndpy.cli.soft",
    "softnd": "ndpy.cli.softnd",
    "softroce": "ndpy.cli.softroce",
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


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ndpy")
def main() -> None:
    """List RDMA adapters, test and measure them, find out what is wrong with them, or create one in software."""
