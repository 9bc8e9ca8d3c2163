"""`ndpy softnd`: where softnd.dll is, and its entry in the Winsock catalogue."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

import ndpy
from ndpy.platforms.networkdirect import softnd_installation

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON object.")


@click.group(short_help="Use a NetworkDirect provider in software, on Windows.")
def command() -> None:
    """Use softnd, a software NetworkDirect provider for Windows machines without RDMA hardware.

    To use it in one program, set NDPY_PROVIDER to the path that `ndpy softnd path` prints. To use it in every
    NetworkDirect program of this machine, run `ndpy softnd register`.
    """


def _say(text: str) -> None:
    click.echo(f"softnd: {text}", err=True)


def _finish(as_json: bool, work: Callable[[], dict[str, object]], show: Callable[[dict[str, object]], str]) -> None:
    try:
        result = work()
    except (ndpy.NdpyError, OSError) as error:
        if as_json:
            native = getattr(error, "native", 0)
            click.echo(json.dumps({"error": str(error), "native": native}, indent=2))
        click.echo(f"ndpy softnd: {error}", err=True)
        sys.exit(1)
    click.echo(json.dumps(result, indent=2) if as_json else show(result))


@command.command()
@_AS_JSON
def path(as_json: bool) -> None:
    """Print where softnd.dll is."""
    _finish(as_json, lambda: {"path": str(softnd_installation.find())}, lambda result: str(result["path"]))


@command.command()
@click.option(
    "--dll",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The DLL to add. Default: the one that `path` prints.",
)
@_AS_JSON
def register(dll: Path | None, as_json: bool) -> None:
    """Add softnd to the Winsock catalogue.

    Needs administrator rights. Afterwards the DLL must stay where it is. An entry with another path is replaced. If
    there already is an entry with this path, nothing changes.
    """

    def work() -> dict[str, object]:
        target = (dll or softnd_installation.find()).resolve()
        return {
            "changed": softnd_installation.register(target, _say),
            "path": str(target),
            "provider_id": str(softnd_installation.PROVIDER_ID),
        }

    _finish(
        as_json,
        work,
        lambda result: f"{'registered' if result['changed'] else 'was registered already'}: {result['path']}",
    )


@command.command()
@_AS_JSON
def unregister(as_json: bool) -> None:
    """Remove softnd from the Winsock catalogue.

    Needs administrator rights. If there is no entry, nothing changes.
    """

    def work() -> dict[str, object]:
        return {"changed": softnd_installation.unregister(_say), "provider_id": str(softnd_installation.PROVIDER_ID)}

    _finish(as_json, work, lambda result: "removed" if result["changed"] else "was not registered")
