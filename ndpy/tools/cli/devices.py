"""`ndpy devices`: the adapters of this machine, for a person or as JSON."""

from __future__ import annotations

import json
import sys

import click
from rich.table import Table
from rich.text import Text

import ndpy
from ndpy.platforms import find, unlisted
from ndpy.tools.cli.counters import show, watch
from ndpy.tools.cli.numbers import Number
from ndpy.tools.output import JsonCommand, new_table, print_table
from ndpy.vocabulary.gpus import by_distance
from ndpy.vocabulary.placement import placement_warning

_STATE_STYLES = {"active": "green", "down": "red"}


def _table(infos: list[ndpy.AdapterInfo]) -> Table:
    names = ("adapter", "provider", "transport", "state", "addresses", "netdev", "NUMA", "MTU", "firmware", "driver")
    table = new_table(*names)
    for info in infos:
        table.add_row(
            Text(info.name, style="bold"),
            info.provider,
            f"{info.transport} {version}" if (version := getattr(info, "version", None)) else info.transport,
            Text(info.state, style=_STATE_STYLES.get(info.state, "yellow")),
            "\n".join(info.addresses) or "none",
            info.netdev or "-",
            "-" if info.numa_node is None else str(info.numa_node),
            str(info.mtu),
            info.firmware or "-",
            info.driver,
        )
    return table


def _interface(interface: ndpy.NetworkInterface) -> str:
    kind = interface.kind if interface.vlan is None else f"{interface.kind} {interface.vlan}"
    on = f" on {interface.parent}" if interface.parent else ""
    return f"{interface.name}: {kind}{on}: {', '.join(interface.addresses) or 'no address'}"


def _of_interface(gid: ndpy.Gid) -> str:
    vlan = "" if gid.vlan is None else f", VLAN {gid.vlan}"
    return f", {gid.netdev}{vlan}" if gid.netdev else ""


def _details(info: ndpy.AdapterInfo) -> list[str]:
    lines = [
        f"{info.name}: vendor {info.vendor_id:#06x}, device {info.device_id}",
        f"  capabilities: {', '.join(info.capabilities.names()) or 'none'}",
    ]
    for port in info.ports:
        lines.append(
            f"  port {port.number}: {port.state}, {port.link_layer}, MTU {port.mtu} of {port.max_mtu}, "
            f"LID {port.lid}, {port.netdev or 'no netdev'}"
        )
        lines += [f"    {_interface(interface)}" for interface in port.interfaces]
        if port.pkeys:
            lines.append(f"    P_Keys: {', '.join(f'{pkey:#06x}' for pkey in port.pkeys)}")
        lines += [f"    GID {gid.index}: {gid.address} ({gid.type}){_of_interface(gid)}" for gid in port.gids]
    for distance, gpus in by_distance(info.name).items():
        lines.append(f"  GPUs {distance}: {', '.join(gpu.function for gpu in gpus)}")
    lines.append("  limits:")
    lines += [f"    {name:32} {value}" for name, value in info.to_dict().items() if name.startswith("max_")]
    return lines


@click.command(cls=JsonCommand, short_help="List the RDMA adapters of this machine.")
@click.argument("adapter", required=False)
@click.option("-v", "--verbose", is_flag=True, help="Show capabilities, ports, GIDs, GPUs and limits as well.")
@click.option("--counters", is_flag=True, help="Show the counters of the ports instead.")
@click.option(
    "--watch",
    "watch_s",
    type=Number(0.05, 86400),
    metavar="SECONDS",
    help="Show which counters change, and how fast, every SECONDS until Ctrl-C.",
)
@click.option("--count", type=click.IntRange(min=1), help="With --watch: end after this many times.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; with --watch one line for each time.")
def command(
    adapter: str | None, verbose: bool, counters: bool, watch_s: float | None, count: int | None, as_json: bool
) -> None:
    """List the RDMA adapters of this machine, or only ADAPTER (a name, NAME:PORT, an interface or an IP address).

    If there is none, the command prints the reason and the remedy, and its exit status is 1.

    --counters and --watch show what the driver counts on each port, for all programs. Counters of errors come first.
    Their names are the driver's.
    """
    if count is not None and watch_s is None:
        raise click.UsageError("--count needs --watch")
    try:
        # If there is no adapter at all, find() raises and says what is missing.
        infos = [find(adapter)] if adapter else ndpy.list_adapters() or [find()]
    except (ndpy.NdpyError, OSError) as error:
        if as_json:
            click.echo("[]")
        click.echo(f"ndpy devices: {error}", err=True)
        sys.exit(1)
    chosen = {info.name: info.port if adapter not in (None, info.name) else None for info in infos}
    if watch_s is not None:
        watch(chosen, watch_s, count, as_json)
        return
    if counters:
        show(chosen, as_json)
        return
    if as_json:
        click.echo(json.dumps([info.to_dict() for info in infos], indent=2))
    else:
        print_table(_table(infos))
        if verbose:
            for info in infos:
                click.echo("\n" + "\n".join(_details(info)))
        if not adapter:
            for sentence in unlisted(infos):
                click.echo(f"\n{sentence}")
    for info in infos:
        warning = placement_warning(info)
        if warning:
            click.echo(f"warning: {warning}", err=True)
