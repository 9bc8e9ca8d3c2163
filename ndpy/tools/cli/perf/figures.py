"""Figures: what measured times say, as functions without side effects. Definitions are in the help of the command."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ndpy.tools.cli.perf.plan import MIB

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
#: Bounds of the histogram's buckets, for each doubling of the time.
_BUCKETS_OF_DOUBLING = 4


class Distribution:
    """How often each time was measured, in nanoseconds. Exact, and its size does not grow with the number of times.

    divisor: what the times are divided by: 2 if half of a round trip counts.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._divisor = divisor
        self._counts: Counter[int] = Counter()
        self._sorted: list[tuple[int, int]] | None = None

    def add_stamps(self, stamps: Sequence[int]) -> None:
        """Add the differences of successive clock readings. A zero ends them."""
        read = list(itertools.takewhile(bool, stamps))
        self.add(list(map(operator.sub, read[1:], read)))

    def add(self, times_ns: Sequence[int]) -> None:
        """Add times."""
        self._counts.update(times_ns)
        self._sorted = None

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self._counts.values())

    def _ascending(self) -> list[tuple[int, int]]:
        if self._sorted is None:
            self._sorted = sorted(self._counts.items())
        return self._sorted

    def _us(self, time_ns: float) -> float:
        return time_ns / self._divisor / 1000

    @property
    def least_us(self) -> float:
        return self._us(self._ascending()[0][0])

    @property
    def most_us(self) -> float:
        return self._us(self._ascending()[-1][0])

    def percentile_us(self, percent: float) -> float | None:
        """The smallest time that at least this part of the times does not exceed.

        None if there are too few times to tell it from the largest one: 1,000 for 99.9 %.
        """
        count = self.count
        # A part such as 99.9 % has no exact floating point number.
        beyond = round(count * (100 - percent) / 100, 9)
        if beyond < 1:
            return None
        rank = count - math.floor(beyond)
        for time, times in self._ascending():
            rank -= times
            if rank <= 0:
                return self._us(time)
        raise AssertionError("the rank is beyond the count")

    @property
    def mean_us(self) -> float:
        return self._us(sum(time * times for time, times in self._counts.items()) / self.count)

    @property
    def stdev_us(self) -> float:
        """The standard deviation of all times, as of a whole population."""
        mean = sum(time * times for time, times in self._counts.items()) / self.count
        square = sum((time - mean) ** 2 * times for time, times in self._counts.items()) / self.count
        return self._us(math.sqrt(square))

    def histogram(self) -> list[Bucket]:
        """The times by size. Each bucket is a fixed part of a doubling, so that histograms can be compared. None is
        empty.
        """
        buckets: Counter[int] = Counter()
        for time, times in self._counts.items():
            buckets[math.floor(math.log2(max(time, 1) / self._divisor) * _BUCKETS_OF_DOUBLING)] += times
        return [Bucket(_bound_us(number), _bound_us(number + 1), times) for number, times in sorted(buckets.items())]


@dataclass(frozen=True)
class Bucket:
    """A part of a histogram: how many times are at least from_us and less than to_us."""

    from_us: float
    to_us: float
    count: int


def _bound_us(number: int) -> float:
    return float(2 ** (number / _BUCKETS_OF_DOUBLING) / 1000)


@dataclass(frozen=True)
class Latency:
    """The latency of one size."""

    size: int
    times: Distribution

    @property
    def iterations(self) -> int:
        return self.times.count

    def to_dict(self) -> dict[str, Any]:
        times = self.times
        return {
            "bytes": self.size,
            "iterations": times.count,
            "min_us": times.least_us,
            **{percentile_name(percent): times.percentile_us(percent) for percent in PERCENTILES},
            "max_us": times.most_us,
            "mean_us": times.mean_us,
            "stdev_us": times.stdev_us,
            "histogram": [vars(bucket) for bucket in times.histogram()],
        }


def percentile_name(percent: float) -> str:
    """The name of a percentile in JSON and CSV: p99.9_us."""
    return f"p{percent:g}_us"


@dataclass(frozen=True)
class Transfer:
    """What one side has moved: messages, and the time from its first post to its last completion."""

    messages: int
    ns: int

    def rate(self) -> float:
        """Messages a second."""
        return self.messages / (self.ns / 1e9) if self.ns else 0.0


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth of one size.

    theirs: what the other side has moved in the other direction.
    one_direction: whether both sides moved data, and the figures are of this side's alone.
    """

    size: int
    ours: Transfer
    theirs: Transfer | None = None
    one_direction: bool = False

    @property
    def iterations(self) -> int:
        return self.ours.messages

    @property
    def mpps(self) -> float:
        """Millions of messages a second, of both directions together unless one_direction says otherwise."""
        return (self.ours.rate() + (self.theirs.rate() if self.theirs else 0.0)) / 1e6

    @property
    def gbps(self) -> float:
        """10**9 bits a second."""
        return self.mpps * 1e6 * self.size * 8 / 1e9

    @property
    def mib_per_s(self) -> float:
        """2**20 bytes a second."""
        return self.mpps * 1e6 * self.size / MIB

    def to_dict(self) -> dict[str, Any]:
        figures = {
            "bytes": self.size,
            "iterations": self.ours.messages,
            "seconds": self.ours.ns / 1e9,
            "gbps": self.gbps,
            "mib_per_s": self.mib_per_s,
            "mpps": self.mpps,
        }
        if self.one_direction:
            figures["one_direction"] = True
        if self.theirs is not None:
            figures |= {"peer_iterations": self.theirs.messages, "peer_seconds": self.theirs.ns / 1e9}
        return figures


Result = Latency | Bandwidth
