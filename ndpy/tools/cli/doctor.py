"""`ndpy doctor`: examines RDMA on this machine, and says how to repair what is wrong."""

from __future__ import annotations

import json
import os
import platform
import struct
import sys
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

import ndpy
from ndpy import platforms
from ndpy.tools import doctor
from ndpy.tools.doctor.findings import Finding, Verdict, failed, passed
from ndpy.tools.output import (
    STDOUT,
    JsonCommand,
    beside_reports,
    new_table,
    output_option,
    print_table,
    why_unwritten,
    write_all,
    write_report,
)
from ndpy.tools.page import results
from ndpy.vocabulary.info import is_address

_STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def examine(adapter: str | None = None) -> list[Finding]:
    """All findings, in the best order for a reader. adapter: only what concerns this adapter."""
    return [_versions(), *doctor.diagnose(adapter), *_choice(adapter)]


def _versions() -> Finding:
    bits = 8 * struct.calcsize("P")
    return passed(
        "ndpy",
        f"ndpy {ndpy.__version__} in {platform.python_implementation()} {platform.python_version()}, {bits} bits, on "
        f"{platform.system()} {platform.release()}",
    )


def _choice(adapter: str | None) -> list[Finding]:
    """Whether there is the adapter that was named: here, or else in the environment."""
    wanted = adapter or os.environ.get("NDPY_ADAPTER")
    if not wanted:
        return []
    check = adapter or "NDPY_ADAPTER"
    try:
        info = platforms.find(wanted)
    except (ndpy.NdpyError, OSError) as error:
        remedy = "set NDPY_ADAPTER to the name, an address or an interface of an adapter, or unset it"
        return [failed(check, str(error), "`ndpy devices` lists the adapters" if adapter else remedy)]
    if adapter:
        return [] if info.name == adapter else [passed(check, _meaning(info, adapter))]
    return [passed(check, f"it asks for {wanted}, which is {info.name}")]


def _meaning(info: ndpy.AdapterInfo, which: str) -> str:
    """What names the adapter, other than its name."""
    if is_address(which):
        return f"this is an address of {info.name}" + (f", port {info.port}" if len(info.ports) > 1 else "")
    return f"this leads to {info.name}, port {info.port}"


def _table(findings: list[Finding]) -> Table:
    table = new_table("verdict")
    table.add_column("check", overflow="fold", max_width=34)
    table.add_column("what was found", overflow="fold")
    for finding in findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\nremedy: {finding.remedy}{finding.page}", style="bold")
        table.add_row(Text(finding.verdict.value, style=_STYLES[finding.verdict]), Text(finding.check), text)
    return table


def _record(path: Path) -> None:
    try:
        write_report(path, doctor.record().encode())
    except ndpy.NdpyError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(why_unwritten(error)) from None


@click.command(cls=JsonCommand, short_help="Find out what is wrong with RDMA on this machine.")
@click.argument("adapter", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list of objects.")
@output_option("html", "Write the findings to FILE as one HTML file.")
@output_option(
    "record",
    "Describe this machine in FILE, for ndpy's tests. Names, addresses, GUIDs and serial numbers are replaced.",
)
def command(adapter: str | None, as_json: bool, html_file: Path | None, record_file: Path | None) -> None:
    """Examine this machine: libraries or providers, drivers, permissions, adapters, and limits of this process.

    With ADAPTER (a name, NAME:PORT, an interface or an IP address), other adapters and ports are left out. soft0, the
    software adapter of this package on Linux, needs nothing of the system but file descriptors. So for soft0 only their
    limit is examined.

    Every finding is PASS, WARN or FAIL. A WARN or FAIL has a remedy. The exit status is 1 if there is a FAIL, else 0.
    The command works even if nothing else works, and is most useful then.

    --record describes what this machine's kernel and libraries show of its adapters, so that a report of a problem can
    become a test of ndpy. Read the file before you pass it on.
    """
    if adapter:
        # The processes that examine see it too, and the process ends with this command.
        os.environ["NDPY_ADAPTER"] = adapter
    to_standard_output = [STDOUT] if as_json and STDOUT in (record_file, html_file) else []
    with beside_reports(record_file, html_file, *to_standard_output):
        findings = examine(adapter)
        if as_json:
            click.echo(json.dumps([finding.to_dict() for finding in findings], indent=2))
        else:
            print_table(_table(findings), wraps=True)
            counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
            click.echo("doctor: " + ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    if record_file is not None:
        _record(record_file)
    html = results.doctor([finding.to_dict() for finding in findings]).encode()
    unwritten = write_all("doctor", (html_file, lambda path: write_report(path, html)))
    sys.exit(unwritten or int(any(finding.verdict is Verdict.FAIL for finding in findings)))
