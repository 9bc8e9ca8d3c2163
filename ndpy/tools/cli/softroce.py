"""`ndpy softroce`: software adapters of this machine's kernel."""

from __future__ import annotations

import click

from ndpy.tools.cli import vm
from ndpy.tools.machines import SetupError, links


@click.group(short_help="Create adapters of Linux's kernel in software.")
def command() -> None:
    """Create software RDMA adapters on Linux machines without RDMA hardware."""


command.add_command(vm.run)


@command.command()
@click.option("--netdev", metavar="NAME", help="The network interface to use. Default: the first with an address.")
def up(netdev: str | None) -> None:
    """Create an rxe adapter on this machine.

    Needs root and a kernel with the module rdma_rxe.
    """
    try:
        links.require_linux()
        name, made = links.up(netdev)
    except SetupError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{name} {'created' if made else 'already exists'}")


@command.command()
@click.argument("names", nargs=-1)
def down(names: tuple[str, ...]) -> None:
    """Remove rxe adapters.

    Removes the adapters NAMES. Without NAMES, it removes those that `ndpy softroce up` created. Needs root.
    """
    try:
        links.require_linux()
        removed = links.down(names)
    except SetupError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"removed: {', '.join(removed) or 'nothing'}")
