"""One run of the measuring side: what its options mean, the run itself, and the exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from typing import Any

import click

import ndpy
from ndpy import Capability
from ndpy.tools.cli.channel import BadRequest
from ndpy.tools.cli.peers import PeerLost, PeerRefused
from ndpy.tools.cli.perf import plot, report
from ndpy.tools.cli.perf.client import Amount, Client, Peer
from ndpy.tools.cli.perf.end import Failure
from ndpy.tools.cli.perf.limits import Limit, MinRate, parse_max_us
from ndpy.tools.cli.perf.plan import ALL_SIZES, COMPLETE_EVERY, DEFAULT_DEPTH, Plan, Test
from ndpy.tools.cli.perf.watch import Stalled
from ndpy.tools.cli.sources import open_from, peer_name
from ndpy.tools.output import STDOUT, beside_reports, write_all, write_json, write_report
from ndpy.tools.page import results
from ndpy.vocabulary.placement import placement_warning

_INTERRUPTED = 130
_PICTURES = (".png", ".svg", ".pdf")


class Measurement:
    """One run of the measuring side, as the options ask for it."""

    def __init__(self, test: Test, which: str | None, options: dict[str, Any]) -> None:
        self._test = test
        self._which = which
        self._options = options
        self._refuse_wrong_options()
        self._limits = self._parse_limits()
        self._plan = self._make_plan()
        self._run = report.Run(test.name, which or "no adapter")

    def _refuse_wrong_options(self) -> None:
        options, test = self._options, self._test
        given = {name for name, value in options.items() if value not in (None, False, ())}
        bandwidth_only = {"depth", "batch", "cq_mod", "queue_pairs", "bidirectional", "min_gbps", "min_mpps"}
        wrong = given & (bandwidth_only if test.is_latency else {"max_us", "histogram"})
        if wrong:
            names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in wrong))
            raise click.UsageError(f"{names}: not for {test.name}")
        if options["events"] and test.name == "write_lat":
            raise click.UsageError("write_lat polls memory, so there are no --events to wait for")
        for one, other in (("all_sizes", "sizes"), ("duration", "iterations"), ("batch", "cq_mod")):
            if {one, other} <= given:
                first, second = (f"--{name.removesuffix('_sizes').replace('_', '-')}" for name in (one, other))
                raise click.UsageError(
                    f"{first} and {second.removesuffix('s') if other == 'sizes' else second} exclude each other"
                )
        if options["plot_file"] is not None:
            try:
                plot.plotting()
            except plot.PlotUnavailable as error:
                raise click.UsageError(str(error)) from None
            if options["plot_file"] != STDOUT and options["plot_file"].suffix not in _PICTURES:
                raise click.UsageError(f"--plot: the name ends with one of {', '.join(_PICTURES)}")

    def _parse_limits(self) -> list[Limit]:
        limits: list[Limit] = []
        for text in self._options["max_us"]:
            try:
                limits.append(parse_max_us(text))
            except ValueError:
                raise click.UsageError(f"--max-us: {text!r} is not a number of microseconds, or PERCENT:US") from None
        for figure in ("gbps", "mpps"):
            if self._options[f"min_{figure}"] is not None:
                limits.append(MinRate(figure, self._options[f"min_{figure}"]))
        return limits

    def _make_plan(self) -> Plan:
        options, test = self._options, self._test
        depth = options["depth"] or (1 if test.is_latency else DEFAULT_DEPTH)
        batch = options["batch"] or 1
        group = batch if batch > 1 else options["cq_mod"] or max(1, min(depth // 4, COMPLETE_EVERY))
        plan = Plan(
            test=test.name,
            largest=max(self._sizes),
            depth=depth,
            group=group,
            batch=batch > 1,
            queue_pairs=options["queue_pairs"] or 1,
            inline=options["inline"],
            bidirectional=options["bidirectional"],
            events=options["events"],
            timeout_s=options["timeout_s"],
        )
        problem = plan.problem()
        if problem:
            raise click.UsageError(problem)
        return plan

    @property
    def _sizes(self) -> tuple[int, ...]:
        if self._options["all_sizes"]:
            return ALL_SIZES
        return tuple(self._options["sizes"]) or (self._test.size,)

    @property
    def _amount(self) -> Amount:
        options = self._options
        duration = options["duration"] or 0.0
        return Amount(0 if duration else options["iterations"] or self._test.iterations, duration, options["warm_up"])

    def run(self) -> int:
        """Measure, report, and return the exit status."""
        run, options = self._run, self._options
        with beside_reports(options["json_file"], options["csv_file"], options["html_file"], options["plot_file"]):
            try:
                self._measure()
            except KeyboardInterrupt:
                run.interrupted = True
            except (ndpy.NdpyError, OSError, Failure, Stalled, PeerLost, PeerRefused, BadRequest) as error:
                ours = isinstance(error, (Failure, Stalled, PeerLost, PeerRefused))
                run.error = str(error) if ours else f"{type(error).__name__}: {error}"
            if not run.interrupted:
                run.broken = [
                    text for result in run.results for limit in self._limits if (text := limit.broken_by(result))
                ]
            report.show(run, histogram=options["histogram"])
        status = write_all(
            "perf",
            (options["json_file"], lambda path: write_json(path, run.to_dict())),
            (options["csv_file"], lambda path: report.write_csv(path, run)),
            (options["html_file"], lambda path: write_report(path, results.perf(run.to_dict()).encode())),
            (options["plot_file"], lambda path: plot.write_plot(path, run)),
        )
        for text in run.broken:
            click.echo(f"perf: limit broken: {text}", err=True)
        if run.error:
            click.echo(f"perf: {run.error}", err=True)
        if run.interrupted:
            click.echo("perf: interrupted", err=True)
            return _INTERRUPTED
        return status if run.passed else 1

    def _measure(self) -> None:
        run, plan, peer_host = self._run, self._plan, self._options["peer_host"]
        with contextlib.ExitStack() as stack:
            adapter, source = open_from(self._which, self._options["source"], self._options["gid"])
            stack.enter_context(adapter)
            info = adapter.info
            run.adapter = info.name
            if peer_host is None and Capability.LOOPBACK_CONNECTIONS not in info.capabilities:
                raise Failure(f"{info.name} cannot connect to itself. Measure against another machine with --peer")
            sizes = [
                size for size in self._sizes if not (self._options["all_sizes"] and size > info.max_transfer_length)
            ]
            plan = dataclasses.replace(plan, largest=max(sizes))
            peer = Peer(peer_name(info), peer_host, source.host)
            stack.callback(peer.close)
            run.details = self._details(info, peer)
            for warning in self._warnings(info):
                click.echo(f"perf: warning: {warning}", err=True)
            how = "" if self._test.is_latency else f"depth {plan.depth}, queue pairs {plan.queue_pairs}, "
            click.echo(f"perf: {self._test.name} on {info.name} ({info.provider}), {how}peer: {peer.where}")
            client = stack.enter_context(contextlib.closing(Client(adapter, plan, peer, source)))
            bar = report.Bar(len(sizes))
            stack.callback(bar.close)
            for done, size in enumerate(sizes):
                bar.at(done, size)
                client.measure(size, done, self._amount, run.results, bar.show)

    def _warnings(self, info: ndpy.AdapterInfo) -> list[str]:
        warnings = [placement_warning(info)]
        if self._test.name == "write_lat" and Capability.IN_ORDER_DMA not in info.capabilities:
            warnings.append(
                f"{info.name} does not promise to write the last byte of a message last, which write_lat waits for; "
                "a latency may be too short"
            )
        return [warning for warning in warnings if warning]

    def _details(self, info: ndpy.AdapterInfo, peer: Peer) -> dict[str, Any]:
        plan = self._plan
        theirs = peer.description
        details = {
            "provider": info.provider,
            "driver": info.driver,
            "transport": info.transport,
            "port": info.port,
            "addresses": list(info.addresses),
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "ndpy": ndpy.__version__,
            "python": platform.python_version(),
            "peer": {**vars(theirs), "addresses": list(theirs.addresses)},
            "events": plan.events,
            "inline": plan.inline,
            "warm_up": self._options["warm_up"],
        }
        if not self._test.is_latency:
            details |= {
                "depth": plan.depth,
                "batch": plan.group if plan.batch else 1,
                "cq_mod": plan.group,
                "queue_pairs": plan.queue_pairs,
                "bidirectional": plan.bidirectional,
            }
        return details
