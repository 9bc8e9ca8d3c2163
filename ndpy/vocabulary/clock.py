"""The clock of an adapter."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeviceClock:
    """One reading of an adapter's clock, and what converts its ticks. Adapter.clock() makes it.

    Timestamps begin again at 0 after their last bit, so both methods take the shorter way round: two timestamps, or a
    timestamp and the reading, must be less than half a round apart. A reading that is some time old is inexact, because
    the adapter's clock and the system's do not run quite alike.

    ndpy's tests of it ran against a stand-in for a driver only, because no adapter in software has a clock.

    Parameters:
        ticks: what the clock showed.
        frequency_hz: how many ticks it makes in a second.
        bits: how many bits a timestamp has.
        time_ns: the system's time at the reading, in nanoseconds since 1970, as time.time_ns() tells it.
        uncertainty_ns: by how much time_ns may be wrong at most: half of the time that the reading took.
    Source: ibv_query_rt_values_ex(3); hca_core_clock and completion_timestamp_mask, ibv_query_device_ex(3).
    """

    ticks: int
    frequency_hz: int
    bits: int
    time_ns: int
    uncertainty_ns: int

    def _ticks_between(self, earlier: int, later: int) -> int:
        round_ = 1 << self.bits
        difference = (later - earlier) % round_
        return difference - round_ if difference >= round_ // 2 else difference

    def seconds_between(self, earlier: int, later: int) -> float:
        """The time from one timestamp to another, in seconds. Negative if `later` was earlier.

        Parameters:
            earlier, later: values of Completion.timestamp, less than half a round apart.
        """
        return self._ticks_between(earlier, later) / self.frequency_hz

    def to_time_ns(self, timestamp: int) -> int:
        """The system's time at a timestamp, in nanoseconds since 1970.

        Parameters:
            timestamp: a value of Completion.timestamp, less than half a round from `ticks`.
        """
        return self.time_ns + self._ticks_between(self.ticks, timestamp) * 1_000_000_000 // self.frequency_hz
