"""`ndpy doctor`: examines RDMA on this machine, and says how to repair what is wrong."""

from __future__ import annotations

import json
import os
import platform
import struct
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ndpy
from ndpy import doctor, platforms
from ndpy.doctor.findings import Finding, Verdict, failed, passed

_STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def examine() -> list[Finding]:
    """All findings, in the best order for a reader."""
    return [_versions(), *doctor.diagnose(), *_choice()]


def _versions() -> Finding:
    bits = 8 * struct.calcsize("P")
    return passed(
        "ndpy",
        f"ndpy {ndpy.__version__} in {platform.python_implementation()} {platform.python_version()}, {bits} bits, on "
        f"{platform.system()} {platform.release()}",
    )


def _choice() -> list[Finding]:
    wanted = os.environ.get("NDPY_ADAPTER")
    if not wanted:
        return []
    try:
        name = platforms.find(wanted).name
    except (ndpy.NdpyError, OSError) as error:
        return [
            failed("NDPY_ADAPTER", str(error), "set NDPY_ADAPTER to the name or address of an adapter, or unset it")
        ]
    return [passed("NDPY_ADAPTER", f"it asks for {wanted}, which is {name}")]


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("verdict")
    table.add_column("check", overflow="fold", max_width=34)
    table.add_column("what was found", overflow="fold")
    for finding in findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\nremedy: {finding.remedy}", style="bold")
        table.add_row(Text(finding.verdict.value, style=_STYLES[finding.verdict]), Text(finding.check), text)
    return table


@click.command(short_help="Find out what is wrong with RDMA on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list of objects.")
def command(as_json: bool) -> None:
    """Examine this machine: libraries or providers, drivers, permissions, adapters, and limits of this process.

    Every finding is PASS, WARN or FAIL. A WARN or FAIL has a remedy. The exit status is 1 if there is a FAIL, else 0.
    The command works even if nothing else works, and is most useful then.
    """
    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            # A file or a pipe has no width.
            console = Console(highlight=False, width=200)
        console.print(_table(findings))
        counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
        click.echo("doctor: " + ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    sys.exit(1 if any(finding.verdict is Verdict.FAIL for finding in findings) else 0)
