"""The report as one HTML file: suspects, the matrix of pairs, histograms, outliers, and each machine."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterator

from ndpy.fleet.report.node_sets import fold
from ndpy.fleet.report.statistics import (
    NAMES,
    Summary,
    figure,
    grew_in,
    headline,
    medians,
    nodes,
    percent,
    summaries,
    title,
    verdict,
)
from ndpy.fleet.results import Machine, Measurement, Pattern, Quantity, Report
from ndpy.tools.page import Markup, element, page, table

#: Up to here each node has a row of the matrix. Beyond it, a row is a block of nodes in their order.
MOST_NODES = 256
_BLOCKS = 64
_SIDE = 512
_BINS = 40
_OUTLIERS = 50
# The colors of the matrix: below this share of the median.
_SHARES = (0.5, 0.8, 0.9, 1.05)
_KEY = ("failed", "below 50 %", "below 80 %", "below 90 %", "as the median", "better by 5 %")


def to_text(report: Report) -> str:
    """The file's text."""
    found = summaries(report.measurements)
    middles = {(each.pattern, each.quantity): each.at(0.5) for each in found}
    return page(
        "ndpy fleet",
        ("", list(_summary(report))),
        ("Suspects", [_suspects(report)] if report.suspects else []),
        ("Pairs", _in_a_row(_matrices(report, middles))),
        ("Distribution", _in_a_row(_histogram(each) for each in found if each.values)),
        ("Outliers", _outliers(report, middles)),
        ("Machines", [_machines(report)] if nodes(report) else []),
    )


def _summary(report: Report) -> Iterator[Markup]:
    yield element("p", verdict(report.suspects), class_="bad" if report.suspects else "good")
    if report.drain():
        yield element("p", "drain: ", element("code", fold(report.drain())))
    yield element("p", f"{report.began}: {headline(report)}", class_="soft")
    for note in report.notes:
        yield element("p", note)


def _in_a_row(figures: Iterator[Markup]) -> list[Markup]:
    made = list(figures)
    return [element("div", *made, class_="plots")] if made else []


def _suspects(report: Report) -> Markup:
    columns = ("suspect", "sure", "measurements", "what was found", "what to do")
    rows = (
        (
            *(title(each), percent(each.confidence), each.measurements, each.reason),
            each.remedy + (f" (ndpy explain {each.problem})" if each.problem else ""),
        )
        for each in report.suspects
    )
    return table(columns, rows, "suspects")


# ---- plots ----


def _share(quantity: Quantity, value: float, middle: float) -> float:
    """How good a value is: 1 is as the median, and less is worse."""
    good, bad = (middle, value) if quantity is Quantity.LATENCY else (value, middle)
    return good / bad if bad else 1.0


def _matrices(report: Report, middles: dict[tuple[Pattern, Quantity], float | None]) -> Iterator[Markup]:
    names = nodes(report)
    places = {name: place for place, name in enumerate(names)}
    together = 1 if len(names) <= MOST_NODES else -(-len(names) // _BLOCKS)
    side = -(-len(names) // together)
    for quantity in Quantity:
        cells: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
        for each in report.measurements:
            if each.pattern is Pattern.PAIRS and each.quantity is quantity:
                row, column = (places[report.ends[end].node] // together for end in (each.source, each.target))
                middle = middles[Pattern.PAIRS, quantity]
                failed = each.value is None or middle is None
                cells[row, column].append(-1.0 if failed else _share(quantity, each.value or 0.0, middle or 0.0))
        if cells:
            yield _matrix(NAMES[quantity], cells, side, together)


def _matrix(name: str, cells: dict[tuple[int, int], list[float]], side: int, together: int) -> Markup:
    """Sources are rows, targets columns. A cell shows the worst of its measurements."""
    paths: list[list[str]] = [[] for _ in _KEY]
    for (row, column), shares in sorted(cells.items()):
        worst = min(shares)
        color = 0 if worst < 0 else 1 + sum(worst >= share for share in _SHARES)
        paths[color].append(f"M{column} {row}h1v1h-1z")
    drawn = [element("path", class_=f"m{color}", d="".join(parts)) for color, parts in enumerate(paths) if parts]
    box = {"viewBox": f"0 0 {side} {side}", "shape_rendering": "crispEdges", "width": _SIDE, "height": _SIDE}
    key = [
        Markup(f' <span class="name"><span class="key m{color}"></span>{text}</span>')
        for color, text in enumerate(_KEY)
    ]
    blocks = f", {together} nodes in each row and column" if together > 1 else ""
    about = f"{name}: rows send, columns receive{blocks}; the worst of each cell, compared with the median."
    return element(
        "figure", element("svg", *drawn, role="img", aria_label=about, **box), element("figcaption", about, *key)
    )


def _histogram(of: Summary) -> Markup:
    low, high = of.values[0], of.values[-1]
    width = (high - low) / _BINS or 1.0
    counts = collections.Counter(min(int((value - low) / width), _BINS - 1) for value in of.values)
    most = max(counts.values())
    bars = [
        element("rect", class_="bar", x=bin_ * 12, y=f"{150 - height:.1f}", width=11, height=f"{height:.1f}")
        for bin_, count in sorted(counts.items())
        for height in [max(140 * count / most, 1)]
    ]
    ends = (
        element("text", figure(low, of.quantity), x=2, y=166),
        element("text", figure(high, of.quantity), x=12 * _BINS - 2, y=166, text_anchor="end"),
    )
    about = (
        f"{NAMES[of.quantity]}, {of.pattern.value}: {len(of.values)} measurements, {of.failed} failed, median "
        + figure(statistics.median(of.values), of.quantity)
    )
    box = {"viewBox": f"0 0 {12 * _BINS} 172", "width": 12 * _BINS, "height": 172}
    return element(
        "figure", element("svg", *bars, *ends, role="img", aria_label=about, **box), element("figcaption", about)
    )


# ---- tables ----


def _outliers(report: Report, middles: dict[tuple[Pattern, Quantity], float | None]) -> list[object]:
    """The measurements that failed or are worst."""

    def how_good(each: Measurement) -> float:
        middle = middles[each.pattern, each.quantity]
        return -1.0 if each.value is None or middle is None else _share(each.quantity, each.value, middle)

    worst = sorted(report.measurements, key=how_good)[:_OUTLIERS]
    rows = [
        (
            *(
                each.round,
                each.pattern.value,
                NAMES[each.quantity],
                _end(report, each.source),
                _end(report, each.target),
            ),
            each.error or "failed" if each.value is None else figure(each.value, each.quantity),
            "" if each.value is None else round(100 * how_good(each), 1),
        )
        for each in worst
    ]
    columns = ("round", "pattern", "quantity", "from", "to", "result", "% of the median")
    return [table(columns, rows, "outliers")] if rows else []


def _end(report: Report, place: int) -> str:
    end = report.ends[place]
    return f"{end.node}/{end.adapter}"


def _machines(report: Report) -> Markup:
    """A row for each node: the medians of its ends, and what is not as on most nodes."""
    middles: dict[tuple[str, Quantity, str], list[float]] = collections.defaultdict(list)
    for (place, quantity, way), value in medians(report).items():
        middles[report.ends[place].node, quantity, way].append(value)
    usual: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for machine in report.machines:
        for name, fact in machine.facts.items():
            usual[name][fact] += 1
    most = {name: values.most_common(1)[0][0] for name, values in usual.items()}
    said = {machine.node: machine for machine in report.machines}
    drained = set(report.drain())
    rows = []
    for node in nodes(report):
        machine = said.get(node, Machine(node, ()))
        unlike = [f"{name} {value}" for name, value in machine.facts.items() if value != most[name]]
        rounds = machine.counter_rounds
        grown = [f"{name} +{by}{grew_in(rounds.get(name, {}))}" for name, by in machine.counters.items() if by > 0]
        found = [
            f"{each.get('verdict')} {each.get('check', '')}"
            for each in machine.findings
            if each.get("verdict") != "PASS"
        ]
        figures = [
            statistics.median(values) if values else ""
            for quantity, way in (
                (Quantity.BANDWIDTH, "sends"),
                (Quantity.BANDWIDTH, "receives"),
                (Quantity.LATENCY, "sends"),
            )
            for values in [middles[node, quantity, way]]
        ]
        rows.append((node, "suspect" if node in drained else "", *figures, *map("; ".join, (unlike, grown, found))))
    columns = (
        "node",
        "verdict",
        "sends Gb/s",
        "receives Gb/s",
        "latency us",
        "unlike most",
        "counters that grew",
        "doctor",
    )
    return table(columns, rows, "machines")
