"""`ndpy perf`: measures latency, bandwidth and message rate between two processes or machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import click

from ndpy.tools.cli.numbers import Number
from ndpy.tools.cli.perf.measurement import Measurement
from ndpy.tools.cli.perf.plan import (
    COMPLETE_EVERY,
    DEFAULT_DEPTH,
    DEFAULT_PORT,
    MAX_DEPTH,
    MAX_QUEUE_PAIRS,
    MAX_SIZE,
    TESTS,
)
from ndpy.tools.cli.perf.server import serve_client
from ndpy.tools.cli.serving import begin, serve, two_sided_options
from ndpy.tools.cli.sources import source_options
from ndpy.tools.output import output_option

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _size(text: str) -> int:
    """Parse a number of bytes: 4096, 64K, 1M."""
    match = re.fullmatch(r"0*([0-9]+)([kKmMgG]?)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a number of bytes such as 8, 4096, 64K or 1M")
    # Eleven digits are too many already, and int() refuses very long numbers.
    size = int(match[1][:11]) * _UNITS[match[2].lower()]
    if not 1 <= size <= MAX_SIZE:
        raise click.BadParameter(f"{text:.40} is not a possible size: 1 byte to {MAX_SIZE >> 30}G")
    return size


def _count(name: str, help: str, most: int | None = None, *, least: int = 1, **more: Any) -> Callable[[Any], Any]:
    """An option that takes a number from `least` to `most`."""
    return click.option(name, help=help, type=click.IntRange(least, most), **{"metavar": "N", **more})


@click.command(short_help="Measure latency, bandwidth and message rate between two processes or machines.")
@click.argument("words", nargs=-1, metavar="[TEST] [ADAPTER]")
@click.option("--peer", "peer_host", metavar="HOST[:PORT]", help="Measure against `ndpy perf --serve` on HOST.")
@click.option(
    "--size",
    "sizes",
    type=_size,
    multiple=True,
    metavar="BYTES",
    help="Size of a message, such as 64K. May be given several times. Default: 2 for latency, 64K for bandwidth.",
)
@click.option("--all", "all_sizes", is_flag=True, help="All powers of two from 1 byte to 8 MiB.")
@_count("--iterations", "Messages of each size over each queue pair. Default: 1000, and 5000 for write_bw.")
@click.option(
    "--duration",
    type=Number(0.01, 86400),
    metavar="SECONDS",
    help="Measure each size for so long, instead of a number of messages.",
)
@_count("--warm-up", "Messages of each size before the clock starts.", least=0, default=100, show_default=True)
@_count(
    "--depth",
    f"Bandwidth: how many messages of a queue pair are outstanding. Default: {DEFAULT_DEPTH}.",
    MAX_DEPTH,
)
@_count(
    "--batch",
    "Bandwidth: post lists of N messages. Each list has one completion. Default: 1, without lists.",
    MAX_DEPTH,
)
@_count(
    "--cq-mod",
    f"Bandwidth: one completion for N messages. Default: a quarter of the depth, at most {COMPLETE_EVERY}.",
    MAX_DEPTH,
)
@_count("--queue-pairs", "Bandwidth: number of queue pairs. Default: 1.", MAX_QUEUE_PAIRS)
@click.option(
    "--bidirectional", is_flag=True, help="Bandwidth: both sides send at the same time. The figures are the sum."
)
@click.option("--events", is_flag=True, help="Sleep until completions come, instead of polling.")
@_count(
    "--inline",
    "Send messages up to this size inline.",
    MAX_DEPTH,
    least=0,
    default=0,
    show_default=True,
    metavar="BYTES",
)
@click.option("--histogram", is_flag=True, help="Latency: print a histogram of each size.")
@source_options
@output_option("json", "Write the results to FILE as JSON.")
@output_option("csv", "Write the results to FILE as CSV, a line for each size.")
@output_option("html", "Write the results to FILE as one HTML file.")
@output_option("plot", 'Draw the results to FILE (PNG, SVG or PDF). Needs matplotlib: pip install "ndpy[plot]".')
@click.option(
    "--max-us",
    multiple=True,
    metavar="[PERCENT:]US",
    help=(
        "Latency: fail if a size takes longer. 12 limits the median, 99.9:80 the 99.9th percentile. May be given "
        "several times."
    ),
)
@click.option("--min-gbps", type=Number(0), metavar="GBPS", help="Bandwidth: fail if a size has less.")
@click.option("--min-mpps", type=Number(0), metavar="MPPS", help="Bandwidth: fail if a size has a lower message rate.")
@two_sided_options(
    DEFAULT_PORT,
    "How long each side waits for anything.",
    "Be the other side for measurements of other processes and machines, until Ctrl-C.",
)
def command(words: tuple[str, ...], serving: bool, listen_at: str | None, client: int | None, **options: Any) -> None:
    """Measure latency, bandwidth and message rate.

    \b
    ndpy perf TEST [ADAPTER]               between two processes of this machine
    ndpy perf TEST [ADAPTER] --peer HOST   against the machine HOST,
    ndpy perf --serve [ADAPTER]            which runs this

    ADAPTER is a name such as rxe0, a name and a port such as mlx5_0:2, a network interface such as eth0.10, or a local
    IP address. Without it, the command takes the adapter that NDPY_ADAPTER names, or else the first adapter with an
    active port.

    The tests have the names and definitions of perftest's programs, so that figures can be laid beside those of
    ib_write_lat, ib_write_bw and so on:

    \b
      write_lat  Half of a round trip. Each side writes, polls the last byte of its own memory, answers with a write.
      send_lat   Half of a round trip. Each side sends, takes the completion of its receive, answers with a send.
      read_lat   The time from the post of an RDMA read until its completion was taken.
      write_bw, read_bw, send_bw
                 The bytes of all iterations, divided by the time from the first post to the last completion.

    A latency is the time from one post to the next. Times are in microseconds. Gb/s is 10**9 bits a second, MiB/s 2**20
    bytes a second, Mpps 10**6 messages a second. The 99th percentile, for example, is the smallest time that 99 per
    cent of the iterations do not exceed; "-" means that there were too few iterations to know it. perftest leaves the
    two longest times out of its mean and sends small messages inline by default, which this command does not (see
    --inline).

    When the clock has stopped, the test checks that the last message has arrived whole.

    The exit status is 0 if all went well, 1 if a limit was broken or the test failed, 2 for wrong usage, and 130 after
    an interrupt. Ctrl-C prints what has been measured so far.

    --serve takes every client that can reach its port, one after the other. It needs no arguments about the test.
    Clients can only move test patterns, to and from memory that the serving side allocates for them.
    """
    begin()
    if serving:
        if len(words) > 1 or (words and words[0] in TESTS):
            raise click.UsageError("--serve takes an adapter only. The test is up to the other side")
        if options["peer_host"]:
            raise click.UsageError("--serve and --peer exclude each other")
        which, source, gid = words[0] if words else None, options["source"], options["gid"]
        sys.exit(serve("perf", DEFAULT_PORT, serve_client, which, listen_at, client, source, gid))
    if listen_at or client:
        raise click.UsageError("--listen needs --serve")
    if not words or words[0] not in TESTS or len(words) > 2:
        raise click.UsageError(f"expected a test ({', '.join(TESTS)}) and perhaps an adapter, or --serve")
    sys.exit(Measurement(TESTS[words[0]], words[1] if len(words) == 2 else None, options).run())
