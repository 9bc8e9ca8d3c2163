"""The picture of `ndpy perf --plot`, drawn by matplotlib."""

import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from ndpy.tools.cli.perf import plot
from ndpy.tools.cli.perf.figures import Bandwidth, Distribution, Latency, Transfer
from ndpy.tools.cli.perf.plan import ALL_SIZES
from ndpy.tools.cli.perf.report import Run

SEED = 20240229
DETAILS = {"provider": "verbs", "transport": "RoCE", "events": False, "inline": 0}
QUEUES = {"depth": 16, "batch": 8, "cq_mod": 8, "queue_pairs": 3, "bidirectional": True, "events": True}


def latency(size, us, count=20000, spread=0.3):
    rng = random.Random(SEED)
    times = Distribution(2)
    times.add([int(rng.lognormvariate(0, spread) * us * 2000) for _ in range(count)])
    return Latency(size, times)


LATENCIES = [latency(size, 2 + size / 12000, 2000) for size in ALL_SIZES]
BANDWIDTHS = [Bandwidth(size, Transfer(1000, 1000 * (5000 + size // 3))) for size in ALL_SIZES]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn(test, results) draws a run, and returns matplotlib's axes. drawn.path: the file."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures = []

    class Figure(plot.plotting()):
        def savefig(self, *arguments, **options):
            figures.append(self)
            super().savefig(*arguments, **options)

    monkeypatch.setattr(plot, "plotting", lambda: Figure)

    def draw(test, results, *, details=DETAILS, name="x.png", **fields):
        draw.path = tmp_path / name
        plot.write_plot(draw.path, Run(test, "rxe0", details, list(results), **fields))
        (axes,) = figures.pop().axes
        return axes

    return draw


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels() + axis.get_ticklabels(minor=True)]


@pytest.mark.parametrize("results", [LATENCIES, LATENCIES[:1], BANDWIDTHS, BANDWIDTHS[:1], []])
def test_a_picture_is_a_png_or_an_svg_as_the_name_says(drawn, results):
    drawn("write_lat", results)
    head = drawn.path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(head[16:20], "big") >= 1000
    drawn("write_lat", results, name="x.svg")
    assert ElementTree.parse(drawn.path).getroot().tag.endswith("svg")
    drawn("write_lat", results, name="x.pdf")
    assert drawn.path.read_bytes().startswith(b"%PDF")


def test_a_sweep_has_the_sizes_and_times_that_people_write(drawn):
    axes = drawn("write_lat", LATENCIES)
    assert labels(axes.xaxis) == [
        "1", "4", "16", "64", "256", "1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB",
    ]  # fmt: skip
    assert labels(axes.yaxis) == ["2", "5", "10", "20", "50", "100", "200", "500", "1000"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("message size (bytes)", "latency (us)")


def test_the_labels_are_where_they_belong(drawn):
    axes = drawn("write_lat", LATENCIES)
    assert list(axes.get_xticks()) == [4**power for power in range(12)]
    assert list(axes.get_yticks()) == [2, 5, 10, 20, 50, 100, 200, 500, 1000]


def test_a_few_sizes_have_a_label_each(drawn):
    axes = drawn("send_bw", [BANDWIDTHS[1], BANDWIDTHS[10], Bandwidth(100_000, Transfer(10, 10**6))])
    assert labels(axes.xaxis) == ["2", "1 KiB", "100000"]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1, 1e3, 1e6])
def test_no_number_has_an_exponent_or_an_offset(drawn, scale):
    bandwidths = [Bandwidth(size, Transfer(1000, int(10**9 / scale))) for size in (1, 2, 4)]
    latencies = [latency(size, 1000 * scale * size, 200) for size in (1, 64, 4096)]
    for axes in (
        drawn("write_bw", bandwidths),
        drawn("write_lat", latencies),
        drawn("write_lat", latencies[:1]),
    ):
        # The text of a formatter that computes an offset is beside the axis.
        assert axes.xaxis.get_offset_text().get_text() == axes.yaxis.get_offset_text().get_text() == ""
        for text in labels(axes.yaxis):
            assert re.fullmatch(r"[\d,]+(\.\d+)?", text), text
        for text in labels(axes.xaxis):
            assert re.fullmatch(r"[\d,]+(\.\d+)?( [KMG]iB)?", text), text


def test_there_is_a_curve_for_each_percentile_that_is_known(drawn):
    axes = drawn("write_lat", [latency(2, 5), latency(4096, 9, count=100)])
    curves = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    # Only the first size has enough iterations for the last percentiles.
    assert curves == {"99.99 %": [2], "99.9 %": [2], "99 %": [2, 4096], "90 %": [2, 4096], "median": [2, 4096]}
    values = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert values["median"][1] == latency(4096, 9, count=100).times.percentile_us(50)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(curves)


def test_bandwidth_is_one_curve_from_zero(drawn):
    axes = drawn("send_bw", BANDWIDTHS)
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == list(ALL_SIZES)
    assert list(line.get_ydata()) == [result.gbps for result in BANDWIDTHS]
    assert axes.get_ylabel() == "bandwidth (Gb/s)"
    assert axes.get_ylim()[0] == 0


def test_a_single_bandwidth_says_its_value(drawn):
    axes = drawn("send_bw", [Bandwidth(125_000, Transfer(1000, 10**9))])
    assert "1 Gb/s" in [text.get_text() for text in axes.texts]


def test_a_single_latency_is_a_histogram_with_its_percentiles(drawn):
    result = latency(4096, 150, count=5000)
    axes = drawn("write_lat", [result])
    buckets = result.times.histogram()
    assert [bar.get_height() for bar in axes.patches] == [bucket.count for bucket in buckets]
    assert [bar.get_x() for bar in axes.patches] == [bucket.from_us for bucket in buckets]
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [
        result.times.percentile_us(percent) for percent in (50, 90, 99, 99.9)
    ]
    first = axes.get_legend().get_texts()[0].get_text()
    assert first == f"median: {result.times.percentile_us(50):.2f} us"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("latency of 4 KiB (us)", "iterations")
    assert {"100", "150", "200"} <= set(labels(axes.xaxis))


def test_similar_latencies_are_drawn_from_zero(drawn):
    axes = drawn("send_lat", [latency(size, us, 100, spread=0.05) for size, us in ((2, 40), (64, 41), (1024, 44))])
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0
    assert len(labels(axes.yaxis)) >= 4


def test_times_that_the_clock_cannot_tell_from_zero_are_drawn(drawn):
    times = Distribution()
    times.add([0] * 60 + [100_000] * 40)
    axes = drawn("read_lat", [Latency(2, times), Latency(4, times)])
    assert list(axes.get_lines()[-1].get_ydata()) == [0, 0]
    drawn("read_lat", [Latency(2, times)])


def test_the_title_says_the_test_the_adapter_and_the_settings(drawn):
    axes = drawn("send_bw", BANDWIDTHS, details=DETAILS | QUEUES)
    assert axes.get_title() == "send_bw on rxe0"
    assert axes.texts[0].get_text() == (
        "RoCE, verbs, depth 16, batches of 8, 3 queue pairs, both directions, events, 1000 iterations"
    )


@pytest.mark.parametrize("fields", [{}, {"error": "no route"}])
def test_the_settings_have_room_between_the_axes_and_the_title(drawn, fields):
    axes = drawn("send_bw", BANDWIDTHS, details=DETAILS | QUEUES | {"queue_pairs": 128, "inline": 64}, **fields)
    figure = axes.get_figure()
    box = axes.texts[0].get_window_extent()
    assert axes.get_window_extent().y1 <= box.y0 < box.y1 <= axes.title.get_window_extent().y0
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("details", "fields", "expected"),
    [
        ({}, {}, "RoCE, verbs, polling, 20,000 iterations"),
        ({"inline": 64}, {}, "RoCE, verbs, polling, inline up to 64 bytes, 20,000 iterations"),
        ({"events": True}, {"interrupted": True}, "RoCE, verbs, events, 20,000 iterations, interrupted"),
        ({}, {"error": "no route"}, "RoCE, verbs, polling, 20,000 iterations, failed before the end"),
        (
            {"depth": 4, "batch": 1, "cq_mod": 2, "queue_pairs": 1, "bidirectional": False},
            {},
            "RoCE, verbs, depth 4, completion every 2, 1 queue pair, one direction, polling, 20,000 iterations",
        ),
    ],
)
def test_settings(details, fields, expected):
    assert ", ".join(plot.settings(Run("t", "a", DETAILS | details, [latency(2, 5)], **fields))) == expected


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1"), (64, "64"), (1000, "1000"), (1024, "1 KiB"), (1536, "1.5 KiB"), (65536, "64 KiB"), (65537, "65537"),
     (1 << 20, "1 MiB"), (3 << 18, "768 KiB"), (1 << 30, "1 GiB")],
)  # fmt: skip
def test_sizes_for_people(size, text):
    assert plot.size_text(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (1.5, "1.5"), (100, "100"), (5000, "5000"), (25_000, "25,000"), (1e6, "1,000,000")],
)
def test_numbers_for_people(value, text):
    assert plot.number_text(value) == text
