"""`ndpy perf` from the command line to the last byte, between two threads and over an adapter in Python."""

import contextlib
import csv
import itertools
import re
import socket
import threading
import time

import fake_adapter
import pytest
from click.testing import CliRunner
from fake_adapter import Adapter
from perf_ends import report_of

import ndpy
from ndpy import Capability
from ndpy.tools.cli import main
from ndpy.tools.cli.channel import Channel
from ndpy.tools.cli.perf import loops
from ndpy.tools.cli.perf.plan import TESTS
from ndpy.vocabulary.quirks import Quirk

LATENCY = [name for name, test in TESTS.items() if test.is_latency]
BANDWIDTH = [name for name, test in TESTS.items() if not test.is_latency]
QUICK = ["--warm-up", "3", "--iterations", "50", "--timeout", "5"]


@pytest.mark.parametrize("test", LATENCY)
@pytest.mark.parametrize("events", [[], ["--events"]])
def test_latency_of_several_sizes(perf, serving, tmp_path, test, events):
    if test == "write_lat" and events:
        pytest.skip("polls memory")
    began = time.perf_counter()
    report = report_of(perf, tmp_path, test, *QUICK, "--size", 1, "--size", "4K", *events)
    took_us = (time.perf_counter() - began) * 1e6
    assert [(result["bytes"], result["iterations"]) for result in report["results"]] == [(1, 50), (4096, 50)]
    # test_perf_by_another_clock.py has the figures themselves.
    round_trips = 1 if test == "read_lat" else 2
    assert sum(result["mean_us"] * result["iterations"] * round_trips for result in report["results"]) < took_us
    for result in report["results"]:
        assert 0 < result["min_us"] <= result["p50_us"] <= result["p90_us"] <= result["max_us"]
        assert sum(bucket["count"] for bucket in result["histogram"]) == 50
    assert report["passed"]
    assert serving.wait_for(1) == ["left"]


@pytest.mark.parametrize("test", BANDWIDTH)
@pytest.mark.parametrize("direction", [[], ["--bidirectional"]])
@pytest.mark.parametrize(
    "shape",
    [
        [],
        ["--depth", "1"],
        ["--depth", "16", "--batch", "8", "--queue-pairs", "3"],
        ["--depth", "7", "--cq-mod", "7", "--events"],
        ["--depth", "5", "--cq-mod", "2", "--queue-pairs", "2", "--events"],
    ],
)
def test_bandwidth_in_all_shapes(perf, serving, tmp_path, test, direction, shape):
    report = report_of(perf, tmp_path, test, *QUICK, "--size", 3, "--size", 1000, *direction, *shape)
    for size, result in zip((3, 1000), report["results"], strict=True):
        of_queue_pairs = result["iterations"] / report["queue_pairs"]
        assert 50 <= of_queue_pairs < 50 + report["cq_mod"]
        assert ("peer_iterations" in result) == bool(direction)
        rate = result["iterations"] / result["seconds"]
        if direction:
            assert result["peer_iterations"] == result["iterations"]
            rate += result["peer_iterations"] / result["peer_seconds"]
        assert result["mpps"] * 1e6 == pytest.approx(rate)
        assert result["gbps"] * 1e9 == pytest.approx(rate * size * 8)
        assert result["mib_per_s"] * 2**20 == pytest.approx(rate * size)
    assert serving.wait_for(1) == ["left"]


@pytest.mark.parametrize("test", TESTS)
def test_a_duration_ends_the_measuring(perf, tmp_path, test):
    started = time.monotonic()
    report = report_of(perf, tmp_path, test, "--duration", 0.3, "--size", 64)
    assert 0.3 <= time.monotonic() - started < 10
    assert report["results"][0]["iterations"] > 1


@pytest.mark.parametrize("test", ["write_bw", "send_bw"])
def test_a_duration_ends_both_directions(perf, tmp_path, test):
    report = report_of(perf, tmp_path, test, "--duration", 0.3, "--bidirectional", "--size", 64)
    (result,) = report["results"]
    assert 0.3 <= result["seconds"] < 5
    assert 0.3 <= result["peer_seconds"] < 5


def test_all_sizes(perf, tmp_path):
    report = report_of(perf, tmp_path, "read_bw", "--all", "--iterations", 4, "--warm-up", 0, "--depth", 2)
    assert [result["bytes"] for result in report["results"]] == [2**power for power in range(24)]


def test_sizes_beyond_the_adapter_are_left_out_of_all_and_refused_by_name(world, perf, tmp_path, monkeypatch):
    monkeypatch.setattr(ndpy, "open_adapter", lambda which=None: Adapter(world, max_transfer_length=1000))
    report = report_of(perf, tmp_path, "write_lat", *QUICK, "--all")
    assert [result["bytes"] for result in report["results"]] == [2**power for power in range(10)]
    assert "fake0 transfers at most 1000 bytes" in perf("write_lat", *QUICK, "--size", 1001, status=1)


@pytest.mark.parametrize("test", ["write_lat", "write_bw", "read_bw", "send_bw"])
def test_an_adapter_whose_regions_have_no_rights_uses_windows(world, perf, serving, tmp_path, monkeypatch, test):
    changes = {"capabilities": Capability.LOOPBACK_CONNECTIONS}
    monkeypatch.setattr(ndpy, "open_adapter", lambda which=None: Adapter(world, **changes))
    serving.adapter = Adapter(world, **changes)
    output = perf(test, *QUICK)
    assert ("does not promise to write the last byte" in output) == (test == "write_lat")


def test_clients_are_served_one_after_the_other(perf, serving):
    for number in range(1, 4):
        perf("send_lat", *QUICK)
        assert serving.wait_for(number) == ["left"] * number


def test_the_table_is_for_people(perf):
    output = perf("write_lat", "rxe7", *QUICK, "--size", "1M", "--histogram")
    assert re.search(r"^perf: write_lat on rxe7 \(fake\), peer: fake0 of \S+ \(127.0.0.1:\d+\)$", output, re.MULTILINE)
    assert re.search(r"bytes +iterations +min +50 % +90 % +99 % +99.9 % +99.99 % +max +mean +stdev", output)
    # 50 iterations say nothing about the slowest hundredth.
    assert re.search(r"^1048576 +50 +[\d.]+ +[\d.]+ +[\d.]+ +- +- +- +[\d.]+ +[\d.]+ +[\d.]+$", output, re.MULTILINE)
    assert re.search(r"to +[\d.]+ us +\d+ #+$", output, re.MULTILINE)
    assert re.search(r"bytes +iterations +Gb/s +MiB/s +Mpps", perf("write_bw", *QUICK))


def test_csv_has_a_line_for_each_size(perf, tmp_path):
    perf("write_lat", *QUICK, "--size", 8, "--size", 16, "--csv", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["bytes"] for row in rows] == ["8", "16"]
    assert float(rows[0]["p50_us"]) > 0
    assert rows[0]["p99.99_us"] == ""


@pytest.mark.parametrize(
    ("name", "head", "words"),
    [
        ("out.png", b"\x89PNG", ["write_lat", "--all"]),
        ("out.svg", b"<?xml", ["write_lat", "--size", "4K"]),
        ("out.svg", b"<?xml", ["send_bw", "--size", 64, "--size", "64K", "--queue-pairs", 3, "--bidirectional"]),
    ],
)
def test_the_figures_are_drawn(perf, tmp_path, name, head, words):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    perf(*words, "--iterations", 4, "--warm-up", 0, "--plot", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("words", "broken"),
    [
        (["write_lat", "--max-us", "1000000"], None),
        (["write_lat", "--max-us", "0.001"], "8 bytes: 50 % is "),
        (["write_lat", "--max-us", "90:0.001"], "8 bytes: 90 % is "),
        (["write_lat", "--max-us", "99.9:1000000"], "8 bytes: 50 iterations are too few for 99.9 %"),
        (["write_bw", "--min-gbps", "0.0000001"], None),
        (["write_bw", "--min-gbps", "1000000"], "8 bytes: "),
        (["send_bw", "--min-mpps", "1000000"], "8 bytes: "),
    ],
)
def test_limits_decide_the_exit_status(perf, tmp_path, words, broken):
    report = report_of(perf, tmp_path, *words, *QUICK, "--size", 8, status=1 if broken else 0)
    assert report["passed"] == (broken is None)
    assert [text.startswith(broken) for text in report["broken_limits"]] == ([True] if broken else [])


def damaged(monkeypatch, operation, number):
    """From now on, message `number` and those after it do not move the last byte."""
    kind = fake_adapter.QueuePair
    original, counter = getattr(kind, operation), itertools.count()

    def post(self, element, *arguments, **options):
        original(self, element, *arguments, **options)
        if next(counter) >= number:
            for region in self.adapter.world.regions.values():
                # The last byte of the first inbox, behind the 128 bytes that are sent.
                region.view[128 + 99 : 128 + 100] = b"\0"

    monkeypatch.setattr(kind, operation, post)


@pytest.mark.parametrize("test", ["write_bw", "send_bw", "read_bw"])
def test_a_last_message_that_did_not_arrive_whole_is_an_error(perf, monkeypatch, test):
    monkeypatch.setattr("ndpy.tools.cli.perf.end._PAUSE_S", 0.001)
    damaged(monkeypatch, test.partition("_")[0], 2)
    output = perf(test, *QUICK[:4], "--timeout", 1, "--size", 100, status=1)
    assert "100 bytes: the last message over queue pair 0 is not there: 1 of its 100 bytes differ" in output


@pytest.mark.parametrize("test", TESTS)
def test_a_server_that_dies_is_named(perf, serving, monkeypatch, test):
    def die():
        time.sleep(0.5)
        for queue_pair in serving.adapter.world.queue_pairs:
            queue_pair.end()
        serving.connections[0].shutdown(socket.SHUT_RDWR)

    killer = threading.Thread(target=die)
    killer.start()
    started = time.monotonic()
    output = perf(test, "--duration", 30, "--size", 8, status=1)
    killer.join()
    assert time.monotonic() - started < 10
    assert "is gone: " in output, output
    # And the server goes on.
    assert serving.wait_for(1) == ["left"]


@pytest.mark.parametrize("test", TESTS)
def test_a_client_that_dies_frees_the_server(world, perf, serving, monkeypatch, test):
    """The connection stays up, as that of a process whose adapter does not notice its end."""

    class Died(BaseException):
        pass

    def die(*_):
        raise Died

    monkeypatch.setattr("ndpy.tools.cli.perf.report.Bar.show", die)
    monkeypatch.setattr("fake_adapter.QueuePair.close", lambda self: None)
    with pytest.raises(Died):
        CliRunner().invoke(
            main, ["perf", test, "--duration", "30", "--size", "8", "--peer", serving.host], catch_exceptions=False
        )
    assert serving.wait_for(1) == ["left"]


@pytest.mark.parametrize("test", TESTS)
def test_a_silent_other_side_ends_the_wait(world, perf, serving, monkeypatch, test):
    """Both processes live, but no message arrives any more."""
    kind = fake_adapter.QueuePair
    moved = itertools.count()
    for name in ("send", "write", "read"):
        original = getattr(kind, name)

        def post(self, *arguments, original=original, **options):
            if next(moved) < 40:
                original(self, *arguments, **options)

        monkeypatch.setattr(kind, name, post)
    output = perf(test, "--iterations", 1000, "--timeout", 1, "--size", 8, status=1)
    assert "nothing has come for 1 s" in output


@pytest.mark.parametrize("test", TESTS)
def test_ctrl_c_prints_what_there_is(perf, serving, tmp_path, monkeypatch, test):
    """The first size is complete, and the second one is not."""
    seen = []

    def interrupt(self, part):
        seen.append(part)
        if self._done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("ndpy.tools.cli.perf.report.Bar.show", interrupt)
    report = report_of(perf, tmp_path, test, "--duration", 0.6, "--size", 8, "--size", 16, status=130)
    assert report["interrupted"] and not report["passed"]
    assert [result["bytes"] for result in report["results"]] == [8, 16]
    assert all(result["iterations"] > 0 for result in report["results"])
    assert serving.wait_for(1) == ["left"]


def test_a_server_of_another_version_says_so(perf, monkeypatch):
    monkeypatch.setattr("ndpy.tools.cli.perf.server.ClientSession.protocol", 77)
    output = perf("write_lat", status=1)
    assert "this side speaks version 77 of the protocol of `ndpy perf`" in output
    assert "Install the same ndpy on both machines" in output


def test_a_host_without_a_server_is_told(world, monkeypatch):
    monkeypatch.setattr(ndpy, "open_adapter", lambda which=None: Adapter(world))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    result = CliRunner().invoke(main, ["perf", "write_lat", "--peer", f"127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert "start `ndpy perf --serve` there" in result.output


@pytest.mark.parametrize(
    "requests",
    [
        [{"command": "exec"}],
        [{"command": "round", "size": 1, "seed": 0, "groups": 1, "warm_up": 0, "duration_s": 0}],
        [{"command": "hello", "protocol": 1, "more": 1}],
        [{"command": "open", "test": "write_lat", "largest": 1 << 40}],
        ["plan", "plan"],
        ["plan", {"command": "share", "exposed": "AAAA"}],
        [{"depth": 0}],
        [{"queue_pairs": 1000}],
        [{"group": 99}],
        [{"test": "atomic_bw"}],
        [{"largest": 1 << 29, "queue_pairs": 100}],
        [{"addresses": "nonsense"}],
        ["plan", {"command": "beat"}, {"command": "round", "size": 9}],
    ],
)
def test_a_client_that_asks_for_nonsense_is_dropped(serving, requests):
    plan = {
        "command": "open",
        "test": "write_bw",
        "largest": 8,
        "depth": 4,
        "group": 2,
        "batch": False,
        "queue_pairs": 1,
        "inline": 0,
        "bidirectional": False,
        "events": False,
        "timeout_s": 5.0,
        "addresses": "192.0.2.9",
        "same_machine": False,
    }
    with socket.create_connection(serving.host.split(":")) as connection:
        channel = Channel(connection, line_limit=10000)
        for request in requests:
            if request == "plan":
                request = plan
            channel.send(request if "command" in request else {**plan, **request}, 5.0)
        answers = []
        with contextlib.suppress(Exception):
            while True:
                answers.append(channel.receive(5.0))
    assert answers[-1]["error"] == "BadRequest", answers
    (ended,) = serving.wait_for(1)
    assert ended.startswith("dropped: ")


def test_a_batch_is_posted_with_one_call(perf, monkeypatch):
    posted = []
    original = fake_adapter.QueuePair.post
    monkeypatch.setattr(
        fake_adapter.QueuePair, "post", lambda self, batch: (posted.append(batch), original(self, batch))
    )
    perf("write_bw", "--iterations", 40, "--warm-up", 0, "--batch", 10, "--depth", 20)
    assert [len(batch.requests) for batch in posted] == [10] * 4


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("direction", [[], ["--bidirectional"]])
def test_only_a_wait_without_progress_is_limited(perf, monkeypatch, test, direction):
    """Each loop begins with a wait in vain, as in front of a slow peer, and does not ask the watch again."""
    if direction and TESTS[test].is_latency:
        pytest.skip("takes turns")
    original = loops.taker

    def taker(end, idle):
        if idle.__name__ != "idle":
            return original(end, idle)
        first, take = [idle], original(end, lambda progress: time.sleep(0))

        def take_and_ask_once(progress):
            while first:
                first.pop()(progress)
            return take(progress)

        return take_and_ask_once

    monkeypatch.setattr(loops, "taker", taker)
    perf(test, "--duration", 1.5, "--timeout", 1, "--size", 8, *direction)


@pytest.mark.parametrize("direction", [[], ["--bidirectional"]])
def test_the_last_message_goes_over_every_queue_pair_even_if_a_grant_comes_late(perf, serving, monkeypatch, direction):
    """The first queue pair gets its grants when the last messages of the others have gone already."""
    held, original_send, original_exchange = [], fake_adapter.QueuePair.send, loops.exchange

    def send(self, element, **options):
        if element == [] and held is not None and self is serving.adapter.world.queue_pairs[3]:
            held.append((self, element, options))
        else:
            original_send(self, element, **options)

    def release():
        nonlocal held
        grants, held = held, None
        for queue_pair, element, options in grants:
            original_send(queue_pair, element, **options)

    def exchange(end, idle, size, group, groups, *arguments, **options):
        if end.adapter is not serving.adapter and groups == 3:
            assert end.credit[0] == 0
            threading.Timer(0.3, release).start()
        original_exchange(end, idle, size, group, groups, *arguments, **options)

    monkeypatch.setattr(fake_adapter.QueuePair, "send", send)
    monkeypatch.setattr(loops, "exchange", exchange)
    # Each queue pair sends eight messages, for which it needs no grant.
    words = ["--queue-pairs", 3, "--depth", 4, "--size", 8, "--timeout", 2, *direction]
    perf("send_bw", "--iterations", 8, "--warm-up", 0, *words)
    assert held is None


@pytest.mark.parametrize(("size", "all_of_them"), [(4095, False), (4096, True)])
def test_long_messages_are_not_silent_where_that_splits_them(perf, monkeypatch, size, all_of_them):
    monkeypatch.setattr(loops, "quirks_of", lambda info: {Quirk.SIW_SPLITS_SILENT_MESSAGES})
    original, silent = fake_adapter.QueuePair.send, []

    def send(self, element, *, context=0, flags=0):
        silent.append(bool(flags & ndpy.Flags.SILENT_SUCCESS))
        original(self, element, context=context, flags=flags)

    monkeypatch.setattr(fake_adapter.QueuePair, "send", send)
    perf("send_lat", *QUICK, "--size", size)
    assert len(silent) > 100
    assert not any(silent) if all_of_them else any(silent)


def test_a_missing_message_is_named_in_both_directions(perf, monkeypatch):
    """The side that misses it says so before the other side gives up."""
    monkeypatch.setattr("ndpy.tools.cli.perf.end.End.fill", lambda *_, **__: None)
    output = perf("send_bw", *QUICK[:4], "--timeout", 1, "--size", 100, "--bidirectional", status=1)
    assert "the last message over queue pair 0 is not there: " in output


def test_a_stall_says_what_each_side_waits_for(world, perf, monkeypatch):
    """Grants get lost, as on a connection that fails in one direction."""
    original = fake_adapter.QueuePair.send

    def send(self, element, *, context=0, flags=0):
        if element != []:
            original(self, element, context=context, flags=flags)

    monkeypatch.setattr(fake_adapter.QueuePair, "send", send)
    words = ["--queue-pairs", 2, "--depth", 4, "--cq-mod", 2, "--bidirectional", "--timeout", 1, "--size", 8]
    output = perf("send_bw", "--iterations", 100, "--warm-up", 0, *words, status=1)
    # Each side may send eight messages over each queue pair without a grant.
    state = (
        "8 of 100 groups have gone, 8 are complete; 16 messages have come; "
        "queue pair 0: 0 groups outstanding, 2 held back, credit 0, 0 messages ungranted; "
        "queue pair 1: 0 groups outstanding, 2 held back, credit 0, 0 messages ungranted"
    )
    assert re.search(f"this side: {state}; the other side: nothing has come for 1 s; {state}$", output, re.M), output


def test_a_stall_says_which_completions_are_missing(perf, monkeypatch):
    original = fake_adapter.QueuePair.write
    monkeypatch.setattr(
        fake_adapter.QueuePair,
        "write",
        lambda self, *words, context=0, flags=0: context == 1 or original(self, *words, context=context, flags=flags),
    )
    words = ["--queue-pairs", 2, "--depth", 2, "--cq-mod", 1, "--timeout", 1, "--size", 8]
    output = perf("write_bw", "--iterations", 10, "--warm-up", 0, *words, status=1)
    assert "nothing has come for 1 s; this side: 20 of 20 groups have gone, 18 are complete; " in output
    assert "queue pair 0: 0 groups outstanding; queue pair 1: 2 groups outstanding" in output
