"""The figures of `ndpy perf` beside those that a second clock gives.

Two sides of an adapter in Python run a test. Their clock stands still, except that each request and each look at a
queue takes a time that the adapter decides. The adapter notes what was posted and taken when, and the figures are
computed from that here.
"""

from __future__ import annotations

import math
import statistics
import threading
from types import SimpleNamespace

import fake_adapter
import pytest
from fake_adapter import DEADLINE_S, Adapter
from perf_ends import report_of

import ndpy
from ndpy.tools.cli.perf import loops

POST_NS, TAKE_NS = 700, 1100
ITERATIONS, WARM_UP = 200, 3
# What the command's help says: half of a round trip, where the two sides take turns.
DIVISOR = {"write_lat": 2, "send_lat": 2, "read_lat": 1}


class Clock:
    """A side's clock, and when its requests with data were posted and taken. slow: a factor for all its times."""

    def __init__(self, slow: int = 1) -> None:
        self.now = 1_000_000
        self.slow = slow
        self.posted: list[int] = []
        self.took: list[int] = []
        self.taken: dict[int, int] = {}

    def post(self) -> int:
        """A request is posted. Returns its number."""
        number = len(self.posted)
        self.posted.append(self.now)
        # No two take the same time, and those in the middle take long.
        self.took.append(self.slow * (POST_NS + 37 * (number * 61 % 97)))
        self.now += self.took[-1]
        return number

    def take(self) -> None:
        self.now += self.slow * TAKE_NS


class TimedQueue(fake_adapter.CompletionQueue):
    clock: Clock

    def poll(self, max_entries=64, *, spin_s=0.0):
        taken = super().poll(max_entries, spin_s=spin_s)
        if taken:
            self.clock.take()
        for completion in taken:
            number = getattr(completion, "number", None)
            if number is not None:
                self.clock.taken[number] = self.clock.now
        return taken


class TimedQueuePair(fake_adapter.QueuePair):
    def _post(self, move, context, flags):
        number = self.cq.clock.post() if self.counts else None
        before = len(self.cq.entries)
        super()._post(move, context, flags)
        if len(self.cq.entries) > before:
            self.cq.entries[-1].number = number

    counts = True

    def send(self, element, **options):
        # An empty message grants credit, and is no message of the test.
        self.counts = element != []
        super().send(element, **options)
        self.counts = True


class TimedAdapter(Adapter):
    def __init__(self, shared, clock, **changes):
        super().__init__(shared, **changes)
        self.clock = clock
        # The loops ask for the time in the thread of their side.
        shared.clocks[threading.get_ident()] = clock

    def create_completion_queue(self, depth):
        queue = TimedQueue(depth)
        queue.clock = self.clock
        return queue

    def create_queue_pair(self, cq, **limits):
        queue_pair = TimedQueuePair(self, cq, limits)
        self.world.queue_pairs.append(queue_pair)
        return queue_pair


@pytest.fixture
def clocks(world, serving, perf, monkeypatch):
    """The clocks of the measuring and of the serving side, which is three times as slow."""
    ours, theirs = Clock(), Clock(slow=3)
    world.clocks = {}
    serving.adapter = TimedAdapter(world, theirs)
    world.clocks.clear()
    monkeypatch.setattr(ndpy, "open_adapter", lambda which=None: TimedAdapter(world, ours, name=which or "fake0"))

    def now() -> int:
        return world.clocks.get(threading.get_ident(), theirs).now

    monkeypatch.setattr(loops, "time", SimpleNamespace(perf_counter_ns=now))
    return ours, theirs


def counted(clock: Clock, before: int, count: int) -> int:
    """From the post of the first of `count` requests, before which there were some, to when the last one was taken."""
    return clock.taken[before + count - 1] - clock.posted[before]


@pytest.mark.parametrize("test", DIVISOR)
def test_latency_is_what_another_clock_says(perf, clocks, tmp_path, test):
    ours, _ = clocks
    size = 64
    report = report_of(
        perf, tmp_path, test, "--warm-up", WARM_UP, "--iterations", ITERATIONS, "--timeout", DEADLINE_S, "--size", size
    )
    (result,) = report["results"]
    # Greetings and the warm-up came before.
    starts = ours.posted[-ITERATIONS:]
    ends = [*starts[1:], ours.now]
    times = sorted((end - start) / DIVISOR[test] / 1000 for start, end in zip(starts, ends, strict=True))
    assert result["iterations"] == ITERATIONS
    assert result["min_us"] == pytest.approx(times[0])
    assert result["max_us"] == pytest.approx(times[-1])
    assert result["mean_us"] == pytest.approx(statistics.fmean(times))
    assert result["stdev_us"] == pytest.approx(statistics.pstdev(times))
    for percent, rank in ((50, 100), (90, 180), (99, 198)):
        assert result[f"p{percent}_us"] == pytest.approx(times[rank - 1]), percent
    assert result["p99.9_us"] is None, "200 times cannot tell it from the largest one"
    for bucket in result["histogram"]:
        within = [time for time in times if bucket["from_us"] <= time < bucket["to_us"]]
        assert len(within) == bucket["count"]
        assert math.log2(bucket["to_us"] / bucket["from_us"]) == pytest.approx(1 / 4)
    assert sum(bucket["count"] for bucket in result["histogram"]) == ITERATIONS


@pytest.mark.parametrize("test", ["write_bw", "read_bw", "send_bw"])
def test_bandwidth_is_what_another_clock_says(perf, clocks, tmp_path, test):
    """200 iterations in groups of 4, after 3 of warm-up, which are a group too."""
    ours, _ = clocks
    size, group = 1000, 4
    options = ["--warm-up", WARM_UP, "--iterations", ITERATIONS, "--timeout", DEADLINE_S, "--size", size]
    report = report_of(perf, tmp_path, test, *options, "--depth", 8, "--cq-mod", group)
    (result,) = report["results"]
    last = 0 if test == "read_bw" else 1
    assert len(ours.posted) == 1 + group + ITERATIONS + last, "a greeting, the warm-up, what counts, and a last message"
    ns = counted(ours, 1 + group, ITERATIONS)
    assert result["iterations"] == ITERATIONS
    assert result["seconds"] == pytest.approx(ns / 1e9)
    assert result["mpps"] == pytest.approx(ITERATIONS / ns * 1e9 / 1e6)
    assert result["gbps"] == pytest.approx(8 * size * ITERATIONS / ns)
    assert result["mib_per_s"] == pytest.approx(size * ITERATIONS / ns * 1e9 / (1 << 20))


def test_a_slower_other_side_counts_with_its_own_figures(perf, clocks, tmp_path):
    """Both sides send at once. The rate is the sum of two rates, each from its own messages and its own time."""
    ours, theirs = clocks
    size, group = 1000, 4
    options = [
        "--warm-up",
        WARM_UP,
        "--iterations",
        ITERATIONS,
        "--timeout",
        DEADLINE_S,
        "--size",
        size,
        "--bidirectional",
    ]
    report = report_of(perf, tmp_path, "write_bw", *options, "--depth", 8, "--cq-mod", group)
    (result,) = report["results"]
    of_ours, of_theirs = counted(ours, 1 + group, ITERATIONS), counted(theirs, group, ITERATIONS)
    assert of_theirs > 2 * of_ours
    assert result["seconds"] == pytest.approx(of_ours / 1e9)
    assert result["peer_seconds"] == pytest.approx(of_theirs / 1e9)
    assert (result["iterations"], result["peer_iterations"]) == (ITERATIONS, ITERATIONS)
    assert result["gbps"] == pytest.approx(8 * size * ITERATIONS * (1 / of_ours + 1 / of_theirs))


def test_a_stranger_who_connects_to_the_serving_side_is_refused(perf, world, monkeypatch):
    """It is there before the measuring side, and knows everything but the token."""
    connect = Adapter.connect
    strangers = []

    def second(self, queue_pair, address, *, private_data, timeout_s):
        listener = world.listeners[address[1]]
        for wrong in (
            bytes(len(private_data) - 1) + private_data[-1:],
            private_data[:-2] + bytes([private_data[-2] ^ 1]) + private_data[-1:],
            b"",
        ):
            stranger = fake_adapter.Connector(fake_adapter.QueuePair(self, queue_pair.cq, queue_pair.limits), wrong)
            strangers.append(stranger)
            listener.requests.append(stranger)
        return connect(self, queue_pair, address, private_data=private_data, timeout_s=timeout_s)

    monkeypatch.setattr(Adapter, "connect", second)
    perf("write_lat", "--warm-up", 3, "--iterations", 20, "--timeout", DEADLINE_S)
    assert [stranger.rejected for stranger in strangers] == [True] * 3
