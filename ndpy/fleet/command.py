"""The command `ndpy fleet`."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

import ndpy
from ndpy.errors import NdpyError
from ndpy.fleet import model, prolog, topology
from ndpy.fleet.coordinator import Coordinator, Options
from ndpy.fleet.engines import HOW_TO, detect, port_of, ssh
from ndpy.fleet.engines.rendezvous import Hub, join
from ndpy.fleet.engines.start import EngineError, Start
from ndpy.fleet.measure import DEFAULT_PORT, serve_rank
from ndpy.fleet.member import Member
from ndpy.fleet.model import ModelError
from ndpy.fleet.report import diff, document
from ndpy.fleet.report.document import ReportError
from ndpy.fleet.report.options import report_options, write_files
from ndpy.fleet.report.statistics import verdict
from ndpy.fleet.report.terminal import print_report
from ndpy.fleet.topology import TopologyError
from ndpy.tools.cli.channel import printable
from ndpy.tools.cli.numbers import Number
from ndpy.tools.cli.serving import begin, serve

_UNITS = {"s": 1, "m": 60, "h": 3600}
_LONGEST_S = 86400.0
LLDP = "lldp"


def duration(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Seconds, from a time such as 90, 90s, 10m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise click.BadParameter(f"{text!r} is not a time such as 90s, 10m or 1h")
    return seconds


def topology_source(context: click.Context, parameter: click.Parameter, text: str | None) -> Path | str | None:
    """The path of a file that exists, or the word lldp."""
    if text is None or text == LLDP:
        return text
    path = click.Path(exists=True, dir_okay=False, path_type=Path).convert(text, parameter, context)
    assert isinstance(path, Path)
    return path


@click.command("fleet")
@click.argument("adapters", nargs=-1, metavar="[ADAPTER]...")
@click.option(
    "--hosts",
    metavar="NODESET",
    help=(
        'Start the ranks over ssh on these hosts, such as "n[1-8]". ClusterShell does it. This process measures '
        "nothing."
    ),
)
@click.option(
    "--program", default="ndpy", show_default=True, metavar="COMMAND", help="With --hosts: how ndpy is started there."
)
@click.option(
    "--ssh-options", default="", metavar="OPTIONS", help='With --hosts: for ssh, such as "-p 2222 -i ~/.ssh/fleet".'
)
@click.option("--rounds", type=click.IntRange(3, 10_000), default=12, show_default=True, help="The most rounds.")
@click.option(
    "--full-mesh", is_flag=True, help="Let each adapter meet each other one, instead of a search in few rounds."
)
@click.option(
    "--patterns",
    is_flag=True,
    help="After the pairs, let many write to one, and all at once. It loads the whole network.",
)
@click.option(
    "--topology",
    "topology_file",
    callback=topology_source,
    metavar="FILE|lldp",
    help="Which nodes share a switch: a TOML file, Slurm's topology.conf, or lldp to ask lldpd on each machine.",
)
@click.option("--budget", callback=duration, default="10m", show_default=True, help="Begin no round after this time.")
@click.option(
    "--join", "join_s", callback=duration, default="60s", show_default=True, help="How long the ranks have to come."
)
@click.option(
    "--timeout",
    "pair_s",
    type=Number(1, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a pair has for its measurements.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What all ranks know and nobody else, instead of the variable NDPY_FLEET_TOKEN.",
)
@click.option(
    "--baseline",
    "baseline_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Say what got worse since the run whose JSON this is.",
)
@click.option(
    "--prolog",
    "alone",
    is_flag=True,
    help="Look at this machine alone, within a minute: is it like those of --baseline? For a scheduler's prolog.",
)
@report_options
@click.option(
    "--member", is_flag=True, hidden=True, help="Be a rank of --hosts, which tells the rest by standard input."
)
@click.option("--serve", "serving", is_flag=True, hidden=True, help="Measure for the rank that started this process.")
@click.option(
    "--client", type=click.IntRange(1, 65535), hidden=True, help="With --serve: the port at which that rank listens."
)
def command(
    adapters: tuple[str, ...],
    hosts: str | None,
    member: bool,
    alone: bool,
    serving: bool,
    client: int | None,
    token_file: Path | None,
    **options: Any,
) -> None:
    """Name the bad machines and adapters of a cluster.

    Something else starts it on each machine: mpirun, srun, or anything that sets RANK, WORLD_SIZE and MASTER_ADDR. With
    --hosts it starts itself there over ssh. It measures with each ADAPTER of a machine, such as mlx5_0. Without one, it
    takes each that has an active port.

    Rank 0 reports, or whoever gave --hosts. Its exit status is 0 if nobody is a suspect, 1 if somebody is or if
    something got worse than in the baseline, 2 for wrong usage, and 130 after an interrupt.
    """
    begin()
    if serving:
        sys.exit(serve("fleet", DEFAULT_PORT, serve_rank, adapters[0] if adapters else None, None, client))
    try:
        if member:
            sys.exit(_member(list(adapters), options["join_s"]))
        if alone:
            sys.exit(_prolog(list(adapters), options))
        token = token_file.read_bytes().strip() if token_file else b""
        if hosts is not None:
            names = ssh.hosts_of(hosts)
            sys.exit(
                _first(ssh.start_of(names, os.environ, port_of(os.environ), token), list(adapters), names, **options)
            )
        start = detect(os.environ, token)
        if start is None:
            raise click.UsageError(HOW_TO)
        chosen = list(adapters) or _active()
        if start.rank == 0:
            sys.exit(_first(start, chosen, (), **options))
        sys.exit(_other(start, chosen, _node(), options["join_s"]))
    except (EngineError, ModelError, TopologyError, ReportError) as error:
        click.echo(f"fleet: {error}", err=True)
        sys.exit(1)


def _active() -> list[str]:
    with contextlib.suppress(NdpyError):
        return [info.name for info in ndpy.list_adapters() if info.state == "active"]
    return []


def _node() -> str:
    """This machine's name, by which Slurm knows it too."""
    names = (os.environ.get("NDPY_FLEET_NODE"), os.environ.get("SLURMD_NODENAME"), platform.node().partition(".")[0])
    return next(filter(None, names), "")


def _prolog(adapters: list[str], options: dict[str, Any]) -> int:
    """Look at this machine alone. A line for each thing that is wrong."""
    if options["baseline_file"] is None:
        raise click.UsageError("--prolog needs --baseline: the JSON of a run on machines that are good")
    reference = document.read(options["baseline_file"])
    report = prolog.examine(_node(), adapters or _active(), reference, others_too=not adapters)
    for suspect in report.suspects:
        page = f" (ndpy explain {suspect.problem})" if suspect.problem else ""
        click.echo(printable(f"fleet: {suspect.reason}; {suspect.remedy}{page}", 2000))
    click.echo(verdict(report.suspects))
    return write_files("fleet", report, options) or int(bool(report.suspects))


def _member(adapters: list[str], join_s: float) -> int:
    """A rank that --hosts started."""
    try:
        start = ssh.told_by_standard_input(os.environ)
        ssh.end_with_standard_input()
        return _other(start, adapters or _active(), "", join_s)
    except KeyboardInterrupt:
        return 130


def _other(start: Start, adapters: list[str], node: str, join_s: float) -> int:
    channel = join(start, node, ndpy.__version__, join_s)
    member = Member(channel, adapters)
    try:
        member.serve()
    finally:
        member.close()
        channel.close()
    return 0


def _first(
    start: Start,
    adapters: list[str],
    hosts: tuple[str, ...],
    topology_file: Path | str | None,
    baseline_file: Path | None,
    program: str,
    ssh_options: str,
    **options: Any,
) -> int:
    """Run and report. hosts: where the ranks are to be started; without any, they are there."""
    began, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()

    def say(text: str) -> None:
        click.echo(f"fleet: {time.monotonic() - clock:6.1f} s  {text}", err=True)

    model.mathematics()
    places = topology.read(topology_file) if isinstance(topology_file, Path) else topology.unknown()
    baseline = document.read(baseline_file) if baseline_file else None
    hub = Hub(start)
    remote = ssh.Remote(hub, start, hosts, program, ssh_options, adapters) if hosts else None
    own = threading.Thread(target=_own_member, args=(start, hub.port, adapters), daemon=True)
    if remote is None:
        own.start()
    coordinator = Coordinator(
        hub,
        start.size,
        start.engine,
        Options(
            rounds=options["rounds"],
            full_mesh=options["full_mesh"],
            patterns=options["patterns"],
            topology=None if topology_file == LLDP else places,
            budget_s=options["budget"],
            join_s=options["join_s"],
            pair_s=options["pair_s"],
        ),
        say,
        hosts,
    )
    status = 0
    try:
        coordinator.run()
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    finally:
        # First the files: mpirun kills all ranks soon after one has died.
        report = coordinator.report(began, time.monotonic() - clock)
        unwritten = write_files("fleet", report, options)
        print_report(report)
        coordinator.end()
        hub.close()
        if remote is not None:
            remote.close()
        else:
            own.join(5.0)
    comparison = diff.compare(baseline, report) if baseline is not None and not status else None
    for line in comparison.lines() if comparison is not None else ():
        click.echo(printable(line))
    is_worse = comparison is not None and bool(comparison.worse)
    return status or unwritten or int(bool(report.suspects) or is_worse)


def _own_member(start: Start, port: int, adapters: list[str]) -> None:
    """Rank 0 measures too, as the others do."""
    host = start.hosts[0] if not start.token else "127.0.0.1"
    with contextlib.suppress(EngineError):
        channel = join(Start(start.engine, 0, start.size, (host,), port, start.token), _node(), ndpy.__version__, 30.0)
        Member(channel, adapters).serve()
