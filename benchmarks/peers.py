"""What `make bench-peers` measures: soft0 and ndpy.aio beside what a user would pick instead, on this machine.

python peers.py [--runs N] [--json FILE] [ROW...]

Each row compares programs that do the same, between two processes. They run in turns, so that all of them meet the same
machine. A figure is the median of its runs. The exit status is 1 if a bar is missed, and 2 if a program fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ndpy
from ndpy.platforms.verbs import softverbs

HERE = Path(__file__).parent
LIMIT_S = 120
#: So many round trips have ten that are slower than 99.9 %.
TAIL_COUNT = 10_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def output(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def serving(command: list[str], port: int, environment: dict[str, str] | None = None) -> Iterator[None]:
    """A server, once it listens."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet) as server:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not any(int(line.split()[1].split(":")[1], 16) == port for line in listening()):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{shlex.join(command)} does not listen at port {port}")
                time.sleep(0.02)
            yield
        finally:
            server.kill()


def listening() -> list[str]:
    """The lines of the kernel's table for TCP sockets that listen. Its state is the fourth word."""
    lines = []
    for name in ("tcp", "tcp6"):
        lines += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[3] == "0A"]


# ---- the programs ----


def echo(transport: str, rounds: int, size: int, connections: int = 1, answer: int = 0) -> float:
    """Microseconds of a round trip."""
    words = map(str, (rounds, size, connections, "--answer", answer))
    return float(output([sys.executable, str(HERE / "echo_loops.py"), transport, *words]))


def perftest(test: str, size: int, count: int, *options: str) -> list[float]:
    """The numbers of perftest's line of results, in C on soft0."""
    port, environment = free_port(), softverbs.environment(softverbs.folder(), dict(os.environ))
    # Nothing inline and nothing else that ndpy perf does not do.
    command = [f"ib_{test}", "-R", "-F", "-p", str(port), "-s", str(size), "-n", str(count), *options]
    with serving(command, port, environment):
        lines = output([*command, "127.0.0.1"], environment).splitlines()
    return [float(word) for line in lines if line.split()[:1] == [str(size)] for word in line.split()]


def perf(test: str, size: int, count: int, *options: str) -> dict[str, float]:
    words = [test, "soft0", "--size", str(size), "--iterations", str(count), "--json", "-", *options]
    report = json.loads(output([sys.executable, "-m", "ndpy", "perf", *words]))
    (result,) = report["results"]
    return dict(result)


def ucx(test: str, size: int, count: int) -> list[float]:
    port = free_port()
    environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    command = ["ucx_perftest", "-p", str(port)]
    with serving(command, port, environment):
        words = ["-t", test, "-s", str(size), "-n", str(count), "-w", str(count // 10), "-f"]
        lines = output([*command, "127.0.0.1", *words], environment).splitlines()
    return [float(word) for word in lines[-1].split() if re.fullmatch(r"[\d.]+", word)]


def iperf3(size: int) -> float:
    """MiB/s."""
    port = free_port()
    with serving(["iperf3", "-s", "-1", "-p", str(port)], port):
        report = json.loads(output(["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", "2", "-l", str(size), "-J"]))
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8 / (1 << 20)


def sockperf(*options: str) -> dict[float, float]:
    """Microseconds of half a round trip of 64 bytes over plain TCP, by the percentage that takes no longer."""
    port = free_port()
    words = ["--tcp", "-i", "127.0.0.1", "-p", str(port), *options]
    with serving(["sockperf", "server", *words], port):
        text = output(["sockperf", "ping-pong", *words, "-m", "64", "-t", "2"])
    return {float(percent): float(us) for percent, us in re.findall(r"percentile ([\d.]+) = +([\d.]+)", text)}


def tcp_connections(count: int) -> float:
    """Microseconds of a TCP connection: connect(), accept() and both close()."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(count):
                listener.accept()[0].close()

        thread = threading.Thread(target=accept)
        thread.start()
        begin = time.perf_counter()
        for _ in range(count):
            socket.create_connection(listener.getsockname()).close()
        thread.join()
        return (time.perf_counter() - begin) * 1e6 / count


def ndpy_connections(count: int) -> float:
    """Microseconds until both ends have a connection, one after the other in one process, without their closing."""
    total = 0.0
    with (
        ndpy.open_adapter("soft0") as adapter,
        adapter.create_completion_queue(16) as queue,
        adapter.listen(("127.0.0.1", 0)) as listener,
    ):
        for _ in range(count):
            with (
                adapter.create_queue_pair(queue) as near,
                adapter.create_queue_pair(queue) as far,
                adapter.create_connector() as connector,
            ):
                begin = time.perf_counter()
                connecting = connector.begin_connect(near, listener.address)
                with listener.get_request(timeout_s=30) as request:
                    accepting = request.begin_accept(far)
                    connecting.result(timeout_s=30)
                    connector.complete_connect(timeout_s=30)
                    accepting.result(timeout_s=30)
                    total += time.perf_counter() - begin
                    connector.disconnect(timeout_s=30)
    return total * 1e6 / count


def first_byte() -> float:
    """Milliseconds from the start of Python to the end of a program that writes once."""
    begin = time.perf_counter()
    output([sys.executable, str(HERE.parent / "examples/hello.py")], {**os.environ, "NDPY_ADAPTER": "soft0"})
    return (time.perf_counter() - begin) * 1e3


def importing() -> float:
    """Milliseconds of `import ndpy`, without the start of Python."""
    text = "import time; begin = time.perf_counter(); import ndpy; print((time.perf_counter() - begin) * 1e3)"
    return float(output([sys.executable, "-c", text]))


# ---- the rows ----


@dataclass(frozen=True)
class Row:
    """programs: by column. more: whether a larger figure is better.

    bars: by column, the part of that column's figure that the first one has to reach, or may need.
    limit: a bar of the first column's figure itself.
    """

    what: str
    unit: str
    programs: dict[str, Callable[[], float]]
    bars: dict[str, float]
    more: bool = False
    limit: float = 0

    def missed(self, figures: dict[str, float]) -> list[str]:
        first = next(iter(self.programs))
        found = []
        for name, part in self.bars.items():
            ratio = figures[first] / figures[name]
            if ratio < part if self.more else ratio > part:
                found.append(f"{ratio:.2f} times {name}, and the bar is {part}")
        if self.limit and figures[first] > self.limit:
            found.append(f"{figures[first]:.4g} {self.unit}, and the bar is {self.limit:g}")
        return found


def echoes(rounds: int, size: int, connections: int = 1, answer: int = 0) -> dict[str, Callable[[], float]]:
    def of(transport: str) -> Callable[[], float]:
        return lambda: echo(transport, rounds, size, connections, answer)

    return {"ndpy.aio": of("ndpy"), "streams": of("streams"), "uvloop": of("uvloop")}


def tails(test: str, by_events: bool) -> dict[str, Row]:
    """The rows of the slowest of a hundred and of a thousand, as times the median."""

    def of(percent: float) -> dict[str, Callable[[], float]]:
        def ours() -> float:
            row = perf(test, 64, TAIL_COUNT, *(["--events"] if by_events else []))
            return row[f"p{percent:g}_us"] / row["p50_us"]

        def in_c() -> float:
            row = perftest(test, 64, TAIL_COUNT, *(["-e"] if by_events else []))
            return row[{99: 7, 99.9: 8}[percent]] / row[4]

        def by_tcp() -> float:
            figures = sockperf(*([] if by_events else ["--nonblocked"]))
            return figures[percent] / figures[50]

        return {"ndpy perf": ours, "C on soft0": in_c, "TCP": by_tcp}

    how = "both ends sleep" if by_events else "polled"
    return {
        f"tail-{percent:g}-{test}{'-events' if by_events else ''}": Row(
            f"64 B by {test}, {how}, the time of {percent:g} %", "times the median", of(percent), {}, limit=bar
        )
        for percent, bar in ((99, 5), (99.9, 20))
    }


ROWS = {
    "echo": Row("echo of 64 B, 1 connection", "us", echoes(4000, 64), {"streams": 1.0, "uvloop": 1.5}),
    "echo-100": Row(
        "echo of 64 B, 100 connections, each message", "us", echoes(100, 64, 100), {"streams": 1.0, "uvloop": 2.5}
    ),
    "echo-1m": Row("1 MiB there and 64 B back", "us", echoes(200, 1 << 20, 1, 64), {"streams": 1.0, "uvloop": 1.11}),
    "latency": Row(
        "64 B, polled, half a round trip",
        "us",
        {
            "C on soft0": lambda: perftest("send_lat", 64, 5000)[4],
            "UCX tcp": lambda: ucx("tag_lat", 64, 20000)[3],
            "TCP": lambda: sockperf("--nonblocked")[50],
        },
        {},
        limit=3.5,
    ),
    "latency-events": Row(
        "64 B, both ends sleep, half a round trip",
        "us",
        {"C on soft0": lambda: perftest("send_lat", 64, 5000, "-e")[4], "TCP": lambda: sockperf()[50]},
        {},
        limit=15,
    ),
    **tails("write_lat", False),
    **tails("send_lat", False),
    **tails("send_lat", True),
    "perf-latency": Row(
        "ndpy perf: 64 B, polled, half a round trip",
        "us",
        {
            "ndpy perf": lambda: perf("send_lat", 64, 5000)["p50_us"],
            "C on soft0": lambda: perftest("send_lat", 64, 5000)[4],
        },
        {"C on soft0": 1.1},
    ),
    "perf-latency-events": Row(
        "ndpy perf: 64 B, both ends sleep, half a round trip",
        "us",
        {
            "ndpy perf": lambda: perf("send_lat", 64, 5000, "--events")["p50_us"],
            "C on soft0": lambda: perftest("send_lat", 64, 5000, "-e")[4],
        },
        {"C on soft0": 1.3},
    ),
    **{
        f"perf-{test}": Row(
            f"ndpy perf: {test} of 64 B in lists of 64",
            "million/s",
            {
                "ndpy perf": lambda test=test: perf(test, 64, 1 << 20, "--batch", "64")["mpps"],
                "C on soft0": lambda test=test: perftest(test, 64, 1 << 20, "-l", "64")[4],
            },
            {"C on soft0": 0.75},
            more=True,
        )
        for test in ("write_bw", "send_bw")
    },
    "rate": Row(
        "writes of 64 B, a call each",
        "million/s",
        {
            "C on soft0": lambda: perftest("write_bw", 64, 1 << 19)[4],
            "UCX tcp": lambda: ucx("ucp_am_bw", 64, 1 << 19)[-1] / 1e6,
        },
        {"UCX tcp": 1.0},
        more=True,
    ),
    **{
        f"write-{size >> 10}k": Row(
            f"writes of {size >> 10} KiB",
            "MiB/s",
            {
                "C on soft0": lambda size=size: perftest("write_bw", size, (1 << 30) // size)[3],
                "UCX tcp": lambda size=size: ucx("tag_bw", size, (1 << 30) // size)[5],
                "iperf3": lambda size=size: iperf3(size),
                "ndpy perf": lambda size=size: perf("write_bw", size, (1 << 30) // size)["mib_per_s"],
            },
            {"UCX tcp": 1.0, "iperf3": 1.0},
            more=True,
        )
        for size in (1 << 16, 1 << 20)
    },
    "connect": Row(
        "a connection, in one process",
        "us",
        {"ndpy": lambda: ndpy_connections(300), "TCP": lambda: tcp_connections(1000)},
        {},
        limit=300,
    ),
    "first-byte": Row("start, connect, one write, end", "ms", {"hello.py": first_byte}, {}, limit=120),
    "import": Row("import ndpy", "ms", {"import": importing}, {}, limit=60),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--runs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    unknown = sorted(set(args.rows) - ROWS.keys())
    if unknown:
        parser.error(f"there is no row {unknown[0]}")
    report, missed = {}, 0
    for name in args.rows or ROWS:
        row = ROWS[name]
        samples: dict[str, list[float]] = {program: [] for program in row.programs}
        for turn in range(args.runs):
            if sys.stderr.isatty():
                print(f"\r{name}: run {turn + 1} of {args.runs} ", end="", file=sys.stderr, flush=True)
            for program, measure in row.programs.items():
                samples[program].append(measure())
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        figures = {program: statistics.median(of) for program, of in samples.items()}
        first = next(iter(figures.values()))
        print(f"{row.what}; {row.unit}")
        for program, figure in figures.items():
            spread = f"{min(samples[program]):.4g} to {max(samples[program]):.4g}"
            print(f"    {program:12} {figure:10.4g}  {first / figure:6.2f}  {spread}")
        for text in row.missed(figures):
            print(f"    missed: {text}")
            missed += 1
        report[name] = {"what": row.what, "unit": row.unit, "figures": figures, "samples": samples}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{missed} bars are missed" if missed else "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError, subprocess.TimeoutExpired, ndpy.NdpyError) as error:
        print(f"peers: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
