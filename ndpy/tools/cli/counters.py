"""`ndpy devices --counters` and `--watch`: what adapters count, and how fast."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Iterator, Mapping

import click

from ndpy.platforms import implementation
from ndpy.vocabulary.counters import UNITS_OF_4_BYTES, Counters, changes, is_error

#: The ports to show of each adapter, by its name. None for all.
Chosen = Mapping[str, int | None]


def _read(names: Chosen) -> dict[str, Counters]:
    found: dict[str, Counters] = {name: implementation().read_counters(name) for name in names}
    return {
        name: {port: values for port, values in counters.items() if names[name] in (None, port)}
        for name, counters in found.items()
    }


def _rows(readings: dict[str, Counters]) -> Iterator[tuple[str, int, str, int]]:
    """(adapter, port, counter, value), with the counters of errors first."""
    for adapter, ports in readings.items():
        for port, counters in ports.items():
            for name in sorted(counters, key=lambda name: (not is_error(name), name)):
                yield adapter, port, name, counters[name]


def show(names: Chosen, as_json: bool) -> None:
    """Print all counters."""
    readings = _read(names)
    if as_json:
        click.echo(json.dumps(readings, indent=2))
        return
    for adapter, port, name, value in _rows(readings):
        click.echo(f"{adapter}/{port}  {name:36} {value:20}{'  error' if is_error(name) and value else ''}")
    for adapter in names:
        if not any(readings[adapter].values()):
            click.echo(f"{adapter}: its driver has no counters")


def watch(names: Chosen, seconds: float, count: int | None, as_json: bool) -> None:
    """Print every `seconds` seconds how far the counters have moved, until Ctrl-C or `count` times."""
    with contextlib.suppress(KeyboardInterrupt):
        _watch(names, seconds, count, as_json)


def _watch(names: Chosen, seconds: float, count: int | None, as_json: bool) -> None:
    former, began = _read(names), time.monotonic()
    turn = 0
    while count is None or turn < count:
        turn += 1
        # From the beginning, so that the times do not drift.
        time.sleep(max(began + turn * seconds - time.monotonic(), 0))
        now = _read(names)
        moved = {name: changes(former[name], now[name]) for name in names}
        former = now
        clock = datetime.datetime.now().astimezone()
        if as_json:
            line = {"time": clock.isoformat(timespec="milliseconds"), "seconds": seconds, "changes": moved}
            click.echo(json.dumps(line))
            continue
        rows = list(_rows(moved))
        click.echo(f"{clock:%H:%M:%S}" + ("" if rows else "  no change"))
        for adapter, port, name, by in rows:
            rate = f"{by / seconds:14.1f} a second"
            if name in UNITS_OF_4_BYTES:
                rate += f"  {by * 32 / seconds / 1e9:.3f} Gbit/s"
            click.echo(f"  {adapter}/{port}  {name:36} {by:+16}  {rate}" + ("  error" if is_error(name) else ""))
