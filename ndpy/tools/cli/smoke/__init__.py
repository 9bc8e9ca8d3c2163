"""`ndpy smoke`: tests whether an adapter does what it claims, with real data between two processes."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import click

import ndpy
from ndpy.platforms import asking_for, implementation
from ndpy.tools.cli.serving import begin, serve, two_sided_options
from ndpy.tools.cli.smoke import catalog, report
from ndpy.tools.cli.smoke.catalog import Check, Result, Verdict
from ndpy.tools.cli.smoke.peer import DEFAULT_PORT
from ndpy.tools.cli.smoke.runner import Runner, describe
from ndpy.tools.cli.smoke.server import serve_client
from ndpy.tools.cli.smoke.testbed import Testbed
from ndpy.tools.cli.sources import open_from, source_options
from ndpy.tools.output import beside_reports, output_option, write_all, write_json, write_report
from ndpy.tools.page import results
from ndpy.vocabulary.counters import changes
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.quirks import is_software

_INTERRUPTED = 130
_NO_ADAPTER = Check("load", "open", "the adapter can be opened", (), lambda testbed: "")
_LEFT_OPEN = Check("load", "close", "the adapter can be closed after all checks", (), lambda testbed: "")


@click.command()
@click.argument("adapter", required=False)
@output_option("json", "Write the results to FILE as JSON.")
@output_option("junit", "Write the results to FILE as JUnit XML.")
@output_option("html", "Write the results to FILE as one HTML file.")
@click.option("--list", "list_only", is_flag=True, help="List the checks and what they claim. Run none.")
@click.option(
    "--only", "groups", multiple=True, type=click.Choice(list(catalog.GROUPS)), metavar="GROUP",
    help="Run only this group of checks. May be given several times. --list shows the groups.",
)  # fmt: skip
@source_options
@click.option("--peer", "peer_host", metavar="HOST[:PORT]", help="Test against `ndpy smoke --serve` on HOST.")
@two_sided_options(
    DEFAULT_PORT, "Time limit of each check.", "Be the peer of smoke tests on other machines, until Ctrl-C."
)
def command(
    adapter: str | None,
    json_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
    list_only: bool,
    groups: tuple[str, ...],
    peer_host: str | None,
    timeout_s: float,
    serving: bool,
    listen_at: str | None,
    client: int | None,
    source: str | None,
    gid: str | None,
) -> None:
    """Test an RDMA adapter with real data between two processes.

    ADAPTER is a name such as rxe0, a name and a port such as mlx5_0:2, a network interface such as eth0.10, or a local
    IP address. Without it, the test takes the adapter that NDPY_ADAPTER names, or else the first adapter with an active
    port.

    The second process, the peer, runs on this machine. For a test between two machines, start `ndpy smoke --serve` on
    the other one and give its address to --peer.

    Each check ends with a verdict and a reason:

    \b
      PASS   The adapter does what the check claims.
      FAIL   It does not.
      KNOWN  It does not, and this is a listed quirk of its driver.
      SKIP   The adapter does not claim the capability that the check needs.

    The exit status is 0 if no check failed, 1 if one failed, 2 for wrong usage, and 130 after an interrupt.

    --serve takes every client that can reach its port. Clients can only move test patterns, to and from memory that the
    peer allocates for them.
    """
    if list_only:
        for check in catalog.load(groups):
            needs = f" (needs {', '.join(str(capability.name) for capability in check.needs)})" if check.needs else ""
            click.echo(f"{check.full_name:38} {check.claim}{needs}")
        return
    if (listen_at or client) and not serving:
        raise click.UsageError("--listen needs --serve")
    if serving and (peer_host or json_file or junit_file or html_file or groups):
        raise click.UsageError(
            "--serve runs no checks. Give --peer, --json, --junit, --html and --only to the other side"
        )
    begin()
    if serving:
        sys.exit(serve("smoke", DEFAULT_PORT, serve_client, adapter, listen_at, client, source, gid))
    run = report.Run(adapter or "no adapter", "no provider")
    run.details = {"started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    with beside_reports(json_file, junit_file, html_file):
        with asking_for(adapter):
            status, stuck = _run_checks(run, adapter, groups, peer_host, timeout_s, source, gid)
        if run.errors_counted():
            click.echo(run.errors_counted())
        click.echo(run.summary())
    unwritten = write_all(
        "smoke",
        (json_file, lambda path: write_json(path, run.to_dict())),
        (junit_file, lambda path: report.write_junit(path, run)),
        (html_file, lambda path: write_report(path, results.smoke(run.to_dict()).encode())),
    )
    status = status or unwritten
    if stuck:
        # A thread that is stuck in the kernel would keep the interpreter from exiting.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _run_checks(
    run: report.Run,
    which: str | None,
    groups: tuple[str, ...],
    peer_host: str | None,
    limit_s: float,
    source: str | None,
    gid: str | None,
) -> tuple[int, bool]:
    """Run the checks. Returns the exit status, and whether a thread is stuck."""
    checks = catalog.load(groups)
    reporter = report.Reporter(len(checks))
    stuck = False
    started = time.monotonic()
    try:
        try:
            adapter, chosen = open_from(which, source, gid)
        except (ndpy.NdpyError, OSError) as error:
            _add_failure(run, reporter, _NO_ADAPTER, error, started)
            return 1, False
        info = adapter.info
        run.adapter, run.provider, run.software = info.name, info.provider, is_software(info)
        run.details |= describe(info)
        reporter.say(
            f"smoke: {info.name} ({info.transport}, {info.driver}, port {info.state}, "
            f"{', '.join(info.addresses) or 'no address'}), {len(checks)} checks"
        )
        runner = Runner(Testbed(adapter, which, peer_host, chosen), run, reporter, limit_s=limit_s)
        before = implementation().read_counters(info.name)
        try:
            runner.run(checks)
        finally:
            if Capability.COUNTERS in info.capabilities:
                run.counters = changes(before, implementation().read_counters(info.name))
            stuck = runner.stuck
            if not stuck:
                began = time.monotonic()
                try:
                    adapter.close()
                except ndpy.NdpyError as error:
                    _add_failure(run, reporter, _LEFT_OPEN, error, began)
    except KeyboardInterrupt:
        reporter.close()
        click.echo(f"smoke: interrupted after {len(run.results)} of {len(checks)} checks", err=True)
        return _INTERRUPTED, stuck
    finally:
        reporter.close()
    return (1 if run.counts[Verdict.FAIL] else 0), stuck


def _add_failure(run: report.Run, reporter: report.Reporter, check: Check, error: Exception, began: float) -> None:
    """Add a FAIL that does not come from one of the checks."""
    result = Result(check, Verdict.FAIL, f"{type(error).__name__}: {error}", time.monotonic() - began)
    run.results.append(result)
    reporter.ended(result)
