"""Reads the clock of a device."""

from __future__ import annotations

from typing import Any

from ndpy.platforms.verbs.native_calls import check, ffi, lib
from ndpy.vocabulary.clock import DeviceClock


def read_clock(context: Any) -> DeviceClock:
    out = ffi.new("struct ndpy_clock *")
    check("clock", lib.ndpy_query_clock(context, out))
    return DeviceClock(
        ticks=int(out.ticks & out.mask),
        frequency_hz=int(out.frequency_khz) * 1000,
        bits=int(out.mask).bit_length(),
        time_ns=int(out.before_ns + out.after_ns) // 2,
        uncertainty_ns=int(out.after_ns - out.before_ns + 1) // 2,
    )
