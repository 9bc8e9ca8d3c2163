"""The report as OpenMetrics text, for the folder from which a node exporter reads (its textfile collector).

All metrics are gauges. For these the text is the same in OpenMetrics and in the older form that the exporter reads.
Each describes the last run.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ndpy.fleet.report.statistics import medians, nodes, summaries
from ndpy.fleet.results import Quantity, Report
from ndpy.tools.cli.channel import printable

#: Each metric and its help.
METRICS = {
    "ndpy_fleet_began_timestamp_seconds": "When the last run began, in seconds since 1970.",
    "ndpy_fleet_duration_seconds": "How long it took.",
    "ndpy_fleet_ranks": "How many ranks took part.",
    "ndpy_fleet_nodes": "How many nodes took part.",
    "ndpy_fleet_rounds": "How many rounds were measured.",
    "ndpy_fleet_suspects": "How many suspects were found. 0 is good.",
    "ndpy_fleet_suspect_confidence_ratio": "How sure each suspect is, from 0 to 1.",
    "ndpy_fleet_suspect_factor_ratio": "What was measured of a suspect, divided by the expected value.",
    "ndpy_fleet_drain": "1 for each node of a suspect.",
    "ndpy_fleet_measurements": "How many measurements succeeded (ok) and failed.",
    "ndpy_fleet_bandwidth_bits_per_second": "The median of an adapter's bandwidth with its partners.",
    "ndpy_fleet_latency_seconds": "The median of an adapter's latency with its partners.",
    "ndpy_fleet_counter_growth": "How much a counter of a node grew during the run.",
}
#: The labels of those that have some.
LABELS = {
    "ndpy_fleet_suspect_confidence_ratio": ("kind", "name"),
    "ndpy_fleet_suspect_factor_ratio": ("kind", "name", "quantity"),
    "ndpy_fleet_drain": ("node",),
    "ndpy_fleet_measurements": ("pattern", "quantity", "result"),
    "ndpy_fleet_bandwidth_bits_per_second": ("node", "adapter", "rank", "direction"),
    "ndpy_fleet_latency_seconds": ("node", "adapter", "rank", "direction"),
    "ndpy_fleet_counter_growth": ("node", "counter"),
}
_BY_QUANTITY = {
    Quantity.BANDWIDTH: ("ndpy_fleet_bandwidth_bits_per_second", 1e9),
    Quantity.LATENCY: ("ndpy_fleet_latency_seconds", 1e-6),
}


def to_text(report: Report) -> str:
    """The text, with its end mark."""
    lines: dict[str, dict[str, str]] = {name: {} for name in METRICS}
    for name, labels, value in _samples(report):
        # A sample that is there twice makes the whole file unreadable. The first is the most certain suspect.
        lines[name].setdefault(_labels(labels), f"{value:.10g}")
    out: list[str] = []
    for name, samples in lines.items():
        if samples:
            out += [f"# TYPE {name} gauge", f"# HELP {name} {METRICS[name]}"]
            out += [f"{name}{labels} {value}" for labels, value in samples.items()]
    return "\n".join([*out, "# EOF", ""])


def _samples(report: Report) -> Iterator[tuple[str, dict[str, str], float]]:
    began = datetime.datetime.fromisoformat(report.began.replace("Z", "+00:00"))
    yield "ndpy_fleet_began_timestamp_seconds", {}, began.timestamp()
    yield "ndpy_fleet_duration_seconds", {}, report.took_s
    yield "ndpy_fleet_ranks", {}, report.ranks
    yield "ndpy_fleet_nodes", {}, len(nodes(report))
    yield "ndpy_fleet_rounds", {}, report.rounds
    yield "ndpy_fleet_suspects", {}, len(report.suspects)
    for suspect in report.suspects:
        labels = {"kind": suspect.kind.value, "name": suspect.name}
        yield "ndpy_fleet_suspect_confidence_ratio", dict(labels), suspect.confidence
        if suspect.quantity is not None and suspect.factor is not None:
            labels["quantity"] = suspect.quantity.name.lower()
            yield "ndpy_fleet_suspect_factor_ratio", labels, suspect.factor
    for node in report.drain():
        yield "ndpy_fleet_drain", {"node": node}, 1
    for each in summaries(report.measurements):
        labels = {"pattern": each.pattern.value, "quantity": each.quantity.name.lower()}
        yield "ndpy_fleet_measurements", {**labels, "result": "ok"}, len(each.values)
        yield "ndpy_fleet_measurements", {**labels, "result": "failed"}, each.failed
    for (place, quantity, direction), median in medians(report).items():
        name, unit = _BY_QUANTITY[quantity]
        end = report.ends[place]
        labels = {"node": end.node, "adapter": end.adapter, "rank": str(end.rank), "direction": direction}
        yield name, labels, median * unit
    for machine in report.machines:
        for counter, grown in machine.counters.items():
            yield "ndpy_fleet_counter_growth", {"node": machine.node, "counter": counter}, grown


def _labels(labels: dict[str, str]) -> str:
    escaped = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(escaped) + "}" if labels else ""


def _escaped(value: str) -> str:
    return printable(value, 200).replace("\\", r"\\").replace('"', r"\"")


def replace(path: Path, text: str) -> None:
    """Write the file at once: its readers see all of the former text or all of this.

    Raises:
        OSError: it cannot be written. Then the file is as it was.
    """
    # The exporter reads *.prom only, so it does not see this one.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp() lets nobody else read it, and the exporter is another user.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
