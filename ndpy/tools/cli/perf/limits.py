"""Limits that make a run fail."""

from __future__ import annotations

from dataclasses import dataclass

from ndpy.tools.cli.perf.figures import Bandwidth, Latency, Result


@dataclass(frozen=True)
class MaxLatency:
    """A percentile of the latency that must not be exceeded."""

    percent: float
    us: float

    def broken_by(self, result: Result) -> str:
        """Say how a result breaks this limit, or ""."""
        assert isinstance(result, Latency)
        value = result.times.percentile_us(self.percent)
        if value is None:
            return f"{result.size} bytes: {result.iterations} iterations are too few for {self.percent:g} %"
        if value <= self.us:
            return ""
        return f"{result.size} bytes: {self.percent:g} % is {value:.2f} us, more than {self.us:g}"


@dataclass(frozen=True)
class MinRate:
    """A bandwidth ("gbps") or message rate ("mpps") that must be reached."""

    figure: str
    value: float

    def broken_by(self, result: Result) -> str:
        """Say how a result breaks this limit, or ""."""
        assert isinstance(result, Bandwidth)
        value = float(getattr(result, self.figure))
        if value >= self.value:
            return ""
        unit = "Gb/s" if self.figure == "gbps" else "Mpps"
        return f"{result.size} bytes: {value:.3f} {unit}, less than {self.value:g}"


Limit = MaxLatency | MinRate


def parse_max_us(text: str) -> MaxLatency:
    """Parse US or PERCENTILE:US. Raises ValueError."""
    percent, colon, us = text.rpartition(":")
    limit = MaxLatency(float(percent) if colon else 50.0, float(us))
    if not (0 < limit.percent < 100 and limit.us > 0):
        raise ValueError(f"{text!r} is not [PERCENTILE:]US")
    return limit
