"""`ndpy perf`: its figures, limits, reports and options, without an adapter."""

import bisect
import csv
import io
import itertools
import json
import math
import random
import re
import statistics
import sys
from array import array

import pytest
from click.testing import CliRunner
from rich.console import Console

from ndpy.tools.cli import main
from ndpy.tools.cli.perf import plot, report
from ndpy.tools.cli.perf.end import pattern
from ndpy.tools.cli.perf.figures import PERCENTILES, Bandwidth, Distribution, Latency, Transfer
from ndpy.tools.cli.perf.limits import MaxLatency, MinRate, parse_max_us
from ndpy.tools.cli.perf.plan import ALL_SIZES, TESTS, Plan
from ndpy.tools.cli.perf.watch import Ended, Stalled, Watch
from ndpy.tools.output import write_json

SEED = 20240229


def distribution(times_ns, divisor=1):
    made = Distribution(divisor)
    made.add(times_ns)
    return made


def skewed(count, seed=SEED):
    rng = random.Random(seed)
    return [int(rng.lognormvariate(8, 1)) for _ in range(count)]


# ---- figures ----


@pytest.mark.parametrize("count", [1, 2, 9, 10, 99, 100, 101, 999, 1000, 1001, 9999, 10000, 12345])
@pytest.mark.parametrize("percent", PERCENTILES)
def test_a_percentile_is_the_smallest_time_that_so_many_do_not_exceed(count, percent):
    times = skewed(count)
    value = distribution(times).percentile_us(percent)
    # In ten-thousandths, because the percentages are no exact floating point numbers.
    parts = round(percent * 100)
    if count * (10000 - parts) < 10000:
        assert value is None
        return
    ordered = sorted(times)
    expected = next(time for time in ordered if bisect.bisect_right(ordered, time) * 10000 >= count * parts)
    assert value == expected / 1000


def test_percentiles_agree_with_the_standard_library():
    times = skewed(20000)
    cuts = statistics.quantiles(times, n=1000, method="inclusive")
    made = distribution(times)
    for percent in (50.0, 90.0, 99.0, 99.9):
        # The library interpolates between neighbours.
        assert made.percentile_us(percent) == pytest.approx(cuts[round(percent * 10) - 1] / 1000, rel=0.01)


def test_mean_and_deviation_are_those_of_the_standard_library():
    times = skewed(5000)
    made = distribution(times)
    assert made.mean_us * 1000 == pytest.approx(statistics.fmean(times))
    assert made.stdev_us * 1000 == pytest.approx(statistics.pstdev(times))
    assert (made.least_us, made.most_us, made.count) == (min(times) / 1000, max(times) / 1000, 5000)


def test_half_of_a_round_trip_is_half_of_everything():
    times = skewed(1000)
    whole, half = Latency(1, distribution(times)).to_dict(), Latency(1, distribution(times, 2)).to_dict()
    for name in ("min_us", "p50_us", "p99_us", "max_us", "mean_us", "stdev_us"):
        assert half[name] == pytest.approx(whole[name] / 2)
    assert half["iterations"] == whole["iterations"] == 1000


def test_times_are_differences_of_clock_readings_up_to_the_first_that_is_missing():
    made = Distribution()
    made.add_stamps(array("q", [1000, 1007, 1010, 0, 0]))
    made.add_stamps(array("q", [5000, 0]))
    made.add_stamps(array("q", [0, 0]))
    made.add_stamps(array("q", [9000, 9003]))
    assert (made.count, made.least_us, made.most_us) == (3, 0.003, 0.007)
    assert made.percentile_us(50) == 0.003


def test_a_distribution_does_not_grow_with_the_number_of_times():
    made = Distribution()
    for _ in range(50):
        made.add([5, 6, 7] * 1000)
    assert made.count == 150_000
    assert len(made._counts) == 3


def test_the_histogram_counts_every_time_once_in_the_right_bucket():
    times = skewed(3000)
    buckets = distribution(times).histogram()
    assert sum(bucket.count for bucket in buckets) == 3000
    for bucket in buckets:
        assert bucket.count == sum(bucket.from_us <= time / 1000 < bucket.to_us for time in times) > 0
        assert bucket.to_us / bucket.from_us == pytest.approx(2**0.25)
    assert [bucket.from_us for bucket in buckets] == sorted(bucket.from_us for bucket in buckets)


def test_a_time_that_the_clock_cannot_tell_from_zero_is_counted():
    (bucket,) = distribution([0, 0]).histogram()
    assert bucket.count == 2


def test_units_of_bandwidth():
    # 1,000 messages of 125,000 bytes in a second are a gigabit a second.
    result = Bandwidth(125_000, Transfer(1000, 10**9))
    assert result.gbps == pytest.approx(1.0)
    assert result.mib_per_s == pytest.approx(125e6 / 2**20)
    assert result.mpps == pytest.approx(0.001)


def test_both_directions_add_up():
    result = Bandwidth(125_000, Transfer(1000, 10**9), Transfer(1000, 2 * 10**9))
    assert result.gbps == pytest.approx(1.5)
    assert result.to_dict()["peer_seconds"] == 2.0


# ---- limits ----


@pytest.mark.parametrize(
    ("text", "limit"),
    [("12", MaxLatency(50.0, 12.0)), ("99.9:80.5", MaxLatency(99.9, 80.5))],
)
def test_latency_limits(text, limit):
    assert parse_max_us(text) == limit


@pytest.mark.parametrize("text", ["", "x", "99:", ":5", "0:5", "100:5", "50:0", "-3", "nan:5", "99:nan"])
def test_malformed_latency_limits(text):
    with pytest.raises(ValueError):
        parse_max_us(text)


def test_a_limit_that_is_just_reached_is_kept():
    result = Latency(8, distribution([4000, 5000, 6000]))
    assert MaxLatency(50, 5.0).broken_by(result) == ""
    assert MaxLatency(50, 4.999).broken_by(result) == "8 bytes: 50 % is 5.00 us, more than 4.999"
    rate = Bandwidth(125_000, Transfer(1000, 10**9))
    assert MinRate("gbps", rate.gbps).broken_by(rate) == ""
    assert MinRate("gbps", 1.5).broken_by(rate) == "125000 bytes: 1.000 Gb/s, less than 1.5"
    assert MinRate("mpps", 2).broken_by(rate) == "125000 bytes: 0.001 Mpps, less than 2"


# ---- reports ----


def run_of(*results, **fields):
    return report.Run("write_lat", "rxe0", {"depth": 1}, list(results), **fields)


LATENCIES = (Latency(2, distribution(skewed(20000), 2)), Latency(4096, distribution(skewed(100), 2)))
BANDWIDTHS = (Bandwidth(2, Transfer(10, 1000)), Bandwidth(65536, Transfer(10, 9000)))


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue().splitlines()


def test_the_table_has_the_figures_of_perftest_and_more():
    header, first, second = printed(report.table(LATENCIES))
    assert re.split(r"  +", header.strip()) == [
        "bytes", "iterations", "min", "50 %", "90 %", "99 %", "99.9 %", "99.99 %", "max", "mean", "stdev",
    ]  # fmt: skip
    assert len(first.split()) == len(second.split()) == 11
    assert second.split()[6:8] == ["-", "-"]
    assert printed(report.table(BANDWIDTHS))[0].split() == ["bytes", "iterations", "Gb/s", "MiB/s", "Mpps"]


def test_histogram_lines_have_bars_in_proportion():
    lines = report.histogram_lines(distribution([1000] * 100 + [8000] * 50 + [70000]).histogram())
    assert [line.count("#") for line in lines] == [50, 25, 1]
    assert lines[0].split()[-3:] == ["us", "100", "#" * 50]


def test_json_has_everything(tmp_path):
    write_json(tmp_path / "x.json", run_of(*LATENCIES, broken=["too slow"]).to_dict())
    written = json.loads((tmp_path / "x.json").read_text())
    assert (written["test"], written["adapter"], written["depth"]) == ("write_lat", "rxe0", 1)
    assert (written["passed"], written["broken_limits"]) == (False, ["too slow"])
    assert written["results"][1]["p99.99_us"] is None
    assert written["results"][0]["histogram"][0].keys() == {"from_us", "to_us", "count"}


def test_csv_without_results_has_a_header_only(tmp_path):
    report.write_csv(tmp_path / "x.csv", run_of())
    assert (tmp_path / "x.csv").read_text().splitlines() == ["bytes"]
    report.write_csv(tmp_path / "y.csv", run_of(*BANDWIDTHS))
    with (tmp_path / "y.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["gbps"]) for row in rows] == [result.gbps for result in BANDWIDTHS]


def test_without_matplotlib_a_plot_is_refused_before_the_measuring(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(main, ["perf", "write_lat", "--plot", str(tmp_path / "x.png")])
    assert result.exit_code == 2
    assert 'pip install "ndpy[plot]"' in result.output


def test_a_picture_of_an_unknown_kind_is_refused_before_the_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "plotting", lambda: None)
    result = CliRunner().invoke(main, ["perf", "write_lat", "--plot", str(tmp_path / "x.doc")])
    assert result.exit_code == 2
    assert ".png, .svg, .pdf" in result.output


def test_a_progress_bar_is_drawn_on_a_terminal_only(capsys):
    for terminal in (True, False):
        bar = report.Bar(2, terminal=terminal)
        bar.at(0, 4096)
        bar.show(0.5)
        bar.close()
        assert bool(capsys.readouterr().err) == terminal


# ---- plans ----


def test_the_tests_and_their_values_are_those_of_perftest():
    """ib_write_lat --help and so on, of perftest 6.06: iterations and bytes."""
    assert {name: (test.iterations, test.size) for name, test in TESTS.items()} == {
        "write_lat": (1000, 2),
        "read_lat": (1000, 2),
        "send_lat": (1000, 2),
        "write_bw": (5000, 65536),
        "read_bw": (1000, 65536),
        "send_bw": (1000, 65536),
    }
    assert (ALL_SIZES[0], ALL_SIZES[-1]) == (1, 1 << 23)


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 16, 128, 1000])
def test_credit_never_runs_out_for_good(depth):
    """At worst the sender lacks one message for a group, and the receiver one for a grant. Then something is still to
    come.
    """
    for group in {1, depth // 2 or 1, depth}:
        plan = Plan("send_bw", 8, depth=depth, group=group)
        assert (group - 1) + (plan.grant - 1) < plan.credit
        # The receives take all messages that may come, and all grants for what this side has sent.
        assert plan.receives >= plan.credit + math.ceil(plan.credit / plan.grant) + 1


def test_buffers_do_not_overlap():
    plan = Plan("write_bw", 100, queue_pairs=3)
    starts = [0, *(plan.inbox(q) for q in range(3)), plan.memory]
    assert all(after - before >= 100 for before, after in itertools.pairwise(starts))


def test_patterns_depend_on_the_seed_and_have_the_size():
    for size in (1, 100, 65521, 65522, 200_000):
        assert len(pattern(1, size)) == size
    assert pattern(1, 1000) != pattern(2, 1000)
    assert pattern(1, 200_000)[65536:131072] != pattern(1, 200_000)[:65536]


# ---- the watch ----


def test_the_watch_ends_a_wait_without_progress():
    watch = Watch(lambda: None, lambda: "", 0.05)
    with pytest.raises(Stalled, match=r"nothing has come for 0\.05 s"):
        while True:
            watch.idle(7)
    assert watch.progress == 7


def test_progress_extends_the_wait():
    clock = iter(range(10**6))
    watch = Watch(lambda: None, lambda: "", 0.02)
    for _ in range(3000):
        watch.idle(next(clock))


def test_the_watch_keeps_a_message_until_it_is_taken():
    messages = iter([{"n": 1}])
    watch = Watch(lambda: next(messages), lambda: "", 5.0)
    for _ in range(3):
        watch._next_look = 0.0
        watch.idle(0)
    with pytest.raises(Ended):
        watch.idle_until_told(0)
    assert watch.take_message() == {"n": 1}
    assert watch.take_message() is None


def test_the_watch_says_that_a_connection_has_ended():
    watch = Watch(lambda: None, lambda: "the connection has ended", 5.0)
    with pytest.raises(Stalled, match="the connection has ended"):
        watch.idle(0)


# ---- the command line ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a test (write_lat, "),
        (["atomic_lat"], "expected a test"),
        (["write_lat", "rxe0", "rxe1"], "expected a test"),
        (["--serve", "write_lat"], "--serve takes an adapter only"),
        (["--serve", "--peer", "192.0.2.1"], "exclude each other"),
        (["write_lat", "--listen", "192.0.2.1"], "--listen needs --serve"),
        (["write_lat", "--depth", "4", "--bidirectional"], "--bidirectional, --depth: not for write_lat"),
        (["read_lat", "--min-gbps", "1"], "--min-gbps: not for read_lat"),
        (["write_bw", "--max-us", "5"], "--max-us: not for write_bw"),
        (["write_bw", "--histogram"], "--histogram: not for write_bw"),
        (["write_lat", "--events"], "write_lat polls memory"),
        (["write_lat", "--all", "--size", "8"], "--all and --size exclude each other"),
        (["write_lat", "--duration", "1", "--iterations", "8"], "--duration and --iterations exclude each other"),
        (["write_bw", "--batch", "8", "--cq-mod", "8"], "--batch and --cq-mod exclude each other"),
        (["write_bw", "--batch", "8", "--depth", "4"], "8 requests at a time do not fit a depth of 4"),
        (["write_bw", "--size", "512M", "--queue-pairs", "2"], "need 1536 MiB on each side"),
        (["write_lat", "--size", "8X"], "is not a number of bytes"),
        (["write_lat", "--size", "0"], "'--size': 0 is not a possible size: 1 byte to 1G"),
        (["write_bw", "--size", "10G"], "'--size': 10G is not a possible size: 1 byte to 1G"),
        (["write_bw", "--size", "9" * 5000], "is not a possible size: 1 byte to 1G"),
        (["write_lat", "--max-us", "fast"], "is not a number of microseconds"),
        (["write_lat", "--timeout", "0"], "timeout"),
    ],
)
def test_wrong_usage_is_explained(words, said):
    result = CliRunner().invoke(main, ["perf", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_without_an_adapter_it_fails_with_a_report_all_the_same(no_adapter, tmp_path):
    result = CliRunner().invoke(main, ["perf", "write_lat", "--json", str(tmp_path / "x.json")])
    assert result.exit_code == 1
    assert "AdapterNotFoundError" in result.output
    assert "AdapterNotFoundError" in json.loads((tmp_path / "x.json").read_text())["error"]


def test_serving_without_an_adapter_fails(no_adapter):
    result = CliRunner().invoke(main, ["perf", "--serve"])
    assert result.exit_code == 1
    assert "no RDMA adapter" in result.output


def test_the_help_says_the_definitions():
    output = " ".join(CliRunner().invoke(main, ["perf", "--help"]).output.split())
    for text in ("Half of a round trip", "10**9 bits a second", "2**20 bytes a second", *TESTS):
        assert text in output
