"""The picture of a run: figures over the sizes, or the histogram of one size."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ndpy.tools.cli.perf.figures import PERCENTILES, Bandwidth, Latency
from ndpy.tools.cli.perf.report import Run
from ndpy.tools.output import write_report

#: An axis has about this many labels at most.
_SIZE_LABELS = 12
_TIME_LABELS = 10
#: The characters of a line of settings.
_LINE = 95
#: From this ratio of the largest to the smallest time, the axis is logarithmic.
_LOGARITHMIC = 10.0
_SIZE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
#: Above this number there are thousands separators.
_PLAIN = 10_000


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def plotting() -> Any:
    """The class of matplotlib's figures. Raises PlotUnavailable."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise PlotUnavailable('--plot needs matplotlib: pip install "ndpy[plot]"') from None


def write_plot(path: Path, run: Run) -> None:
    """Draw the figures over the sizes, or the histogram of a latency test of one size.

    The name of the file decides the format. It is PNG on standard output.
    """
    figure = plotting()(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    lines = textwrap.wrap(", ".join(settings(run)), _LINE)
    axes.set_title(f"{run.test} on {run.adapter}", fontsize="x-large", pad=10 + 14 * len(lines))
    axes.text(0.5, 1.02, "\n".join(lines), transform=axes.transAxes, ha="center", fontsize="small")
    axes.grid(True, alpha=0.3)
    axes.set_axisbelow(True)
    results = run.results
    bandwidths = [result for result in results if isinstance(result, Bandwidth)]
    latencies = [result for result in results if isinstance(result, Latency)]
    if not results:
        axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
    elif len(latencies) == 1:
        _draw_histogram(axes, latencies[0])
    else:
        sizes = [result.size for result in results]
        if latencies:
            _draw_latencies(axes, latencies)
        else:
            _draw_bandwidths(axes, bandwidths)
        axes.set_xlabel("message size (bytes)")
        axes.set_xscale("log", base=2)
        _label(axes.xaxis, size_ticks(sizes), size_text)
        if len(set(sizes)) == 1:
            axes.set_xlim(sizes[0] / 2, sizes[0] * 2)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix.removeprefix(".") or "png")
    write_report(path, picture.getvalue())


def settings(run: Run) -> list[str]:
    """What a reader has to know to compare the picture with another one."""
    details = run.details
    texts = [str(details[name]) for name in ("transport", "provider") if details.get(name)]
    if "depth" in details:
        texts.append(f"depth {details['depth']}")
        texts.append(
            f"batches of {details['batch']}" if details["batch"] > 1 else f"completion every {details['cq_mod']}"
        )
        texts.append(f"{details['queue_pairs']} queue pair{'s' if details['queue_pairs'] > 1 else ''}")
        texts.append("both directions" if details["bidirectional"] else "one direction")
    if details:
        texts.append("events" if details["events"] else "polling")
    if details.get("inline"):
        texts.append(f"inline up to {details['inline']} bytes")
    counts = {result.iterations for result in run.results}
    if len(counts) == 1:
        texts.append(f"{number_text(counts.pop())} iterations")
    if run.interrupted:
        texts.append("interrupted")
    elif run.error:
        texts.append("failed before the end")
    return texts


# ---- the kinds of pictures ----


def _draw_latencies(axes: Any, latencies: Sequence[Latency]) -> None:
    """A curve for each percentile, over the sizes. The slowest is on top, as in the legend."""
    drawn: list[float] = []
    for percent in reversed(PERCENTILES):
        values = [(result.size, result.times.percentile_us(percent)) for result in latencies]
        points = [(size, value) for size, value in values if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label="median" if percent == 50 else f"{percent:g} %")
            drawn += [value for _, value in points]
    axes.set_ylabel("latency (us)")
    if drawn:
        axes.legend()
        _time_axis(axes, drawn)


def _draw_bandwidths(axes: Any, bandwidths: Sequence[Bandwidth]) -> None:
    """A curve over the sizes. A single point says its value."""
    axes.plot([result.size for result in bandwidths], [result.gbps for result in bandwidths], marker="o")
    if len(bandwidths) == 1:
        (result,) = bandwidths
        text = f"{result.gbps:.3g} Gb/s"
        axes.annotate(text, (result.size, result.gbps), xytext=(10, 0), textcoords="offset points", va="center")
    axes.set_ylabel("bandwidth (Gb/s)")
    _from_zero(axes)


def _draw_histogram(axes: Any, result: Latency) -> None:
    """The times of one size, and where the percentiles are."""
    times = result.times
    buckets = times.histogram()
    # With some room at the sides, so that a single bucket does not fill the picture.
    edges = [buckets[0].from_us / 1.3, buckets[-1].to_us * 1.3]
    axes.bar(
        [bucket.from_us for bucket in buckets],
        [bucket.count for bucket in buckets],
        [bucket.to_us - bucket.from_us for bucket in buckets],
        align="edge",
        color="tab:blue",
        alpha=0.6,
        edgecolor="white",
    )
    for number, percent in enumerate(PERCENTILES):
        value = times.percentile_us(percent)
        if value is not None:
            name = "median" if percent == 50 else f"{percent:g} %"
            axes.axvline(value, color=f"C{number + 1}", linestyle="--", label=f"{name}: {value:.2f} us")
    if times.percentile_us(PERCENTILES[0]) is not None:
        axes.legend()
    axes.set_xlabel(f"latency of {_size_in_words(result.size)} (us)")
    axes.set_ylabel("iterations")
    # The buckets are parts of a doubling, so they are equally wide on this axis.
    axes.set_xscale("log", base=2)
    _label(axes.xaxis, time_ticks(edges), number_text)
    axes.set_xlim(*edges)
    _from_zero(axes, whole=True)


# ---- axes for people ----


def size_text(size: float) -> str:
    """A number of bytes as people write it: 64, 1 KiB, 1.5 MiB, 1000."""
    for unit, name in _SIZE_UNITS:
        if size >= unit and size % (unit // 4) == 0:
            return f"{size / unit:g} {name}"
    return f"{size:.0f}"


def _size_in_words(size: int) -> str:
    text = size_text(size)
    return text if not text.isdigit() else f"{text} byte{'s' if size > 1 else ''}"


def number_text(value: float) -> str:
    """A number without an exponent: 0.05, 2.5, 1000, 25,000."""
    text = f"{value:,.9f}" if abs(value) >= _PLAIN else f"{value:.9f}"
    return text.rstrip("0").rstrip(".")


def size_ticks(sizes: Iterable[int]) -> list[int]:
    """The measured sizes, if all of their labels have room. Otherwise every power of two, of 4, of 8 and so on."""
    ordered = sorted(set(sizes))
    span = math.log2(ordered[-1] / ordered[0])
    gaps = [math.log2(after / before) for before, after in itertools.pairwise(ordered)]
    if not gaps or min(gaps) >= span / _SIZE_LABELS:
        return ordered
    first, last = math.floor(math.log2(ordered[0])), math.ceil(math.log2(ordered[-1]))
    step = -(-(last - first + 1) // _SIZE_LABELS)
    # Multiples of the step, so that pictures of different sweeps have the same labels.
    return [1 << power for power in range(-(-first // step) * step, last + 1, step)]


def time_ticks(values: Iterable[float]) -> list[float]:
    """Round times between the smallest and the largest value, for a logarithmic axis."""
    values = list(values)
    least, most = min(values), max(values)
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    ticks: list[float] = []
    for parts in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [float(f"{part}e{power}") for power in range(first, last + 1) for part in parts]
        ticks = [tick for tick in ticks if least <= tick <= most]
        if len(ticks) <= _TIME_LABELS:
            break
    return ticks


def _time_axis(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic if the times differ much, else from zero."""
    # A coarse clock measures times of zero.
    if min(values) <= 0 or max(values) < _LOGARITHMIC * min(values):
        _from_zero(axes)
        return
    axes.set_yscale("log")
    _label(axes.yaxis, time_ticks(values), number_text)


def _label(axis: Any, ticks: Sequence[float], text: Any) -> None:
    """These labels, and no others."""
    axis.set_ticks(ticks, labels=[text(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _from_zero(axes: Any, *, whole: bool = False) -> None:
    """A linear vertical axis that begins at zero, with numbers without exponents."""
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=whole))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number_text(value)))
