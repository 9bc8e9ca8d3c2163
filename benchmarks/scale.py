"""What `make bench-scale` measures: how the cost of an operation grows with the number of things that exist. On soft0.

python scale.py [--most N] [--json FILE] [--plot FILE]... [ROW...]

A cost is processor time of this process, with soft0's own threads, so that other programs disturb it little. The
exponent is the slope of a line through the logarithms: 0 is flat, 1 is proportional. A row is flat if no cost is more
than 1.2 times one with a smaller number. What touches other memory each time gets slower as the processor's caches
overflow. So a cost of the cache is divided by that of a lookup in a plain dictionary, of as many objects. Each point is
measured in a process of its own. A connection has both its ends, so two queue pairs, in that process, and each end is a
file descriptor. The exit status is 1 if a row is not flat, and 2 if a program fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ndpy
from ndpy import Access, aio

FLAT = 1.2
SAMPLES = 9
DEADLINE_S = 60
LIMIT_S = 600
SIZE = 4096


def cost_us(turn: Callable[[], object], rounds: int) -> float:
    """The median of some samples, each of `rounds` turns."""
    samples = []
    for _ in range(SAMPLES):
        begin = time.process_time_ns()
        for _ in range(rounds):
            turn()
        samples.append((time.process_time_ns() - begin) / rounds / 1000)
    return statistics.median(samples)


@contextlib.contextmanager
def connections(adapter: ndpy.Adapter, queues: list[ndpy.CompletionQueue]) -> Iterator[list[ndpy.QueuePair]]:
    """The near end of a connection for each queue, whose far end is in this process too."""
    depths = {"initiator_queue_depth": 4, "receive_queue_depth": 4}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(adapter.listen(("127.0.0.1", 0)))
        # The far ends have their completions elsewhere.
        silent = stack.enter_context(adapter.create_completion_queue(64))
        ends = []
        for queue in queues:
            near = stack.enter_context(adapter.create_queue_pair(queue, **depths))
            far = stack.enter_context(adapter.create_queue_pair(silent, **depths))
            connector = stack.enter_context(adapter.create_connector())
            connecting = connector.begin_connect(near, listener.address)
            request = stack.enter_context(listener.get_request(timeout_s=DEADLINE_S))
            accepting = request.begin_accept(far)
            connecting.result(timeout_s=DEADLINE_S)
            connector.complete_connect(timeout_s=DEADLINE_S)
            accepting.result(timeout_s=DEADLINE_S)
            ends.append(near)
        yield ends


# ---- the rows: a cost for each number ----


def regions(adapter: ndpy.Adapter, count: int) -> float:
    buffers = [ndpy.alloc(SIZE) for _ in range(min(count, 1000))]
    spare = ndpy.alloc(SIZE)
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(adapter.register(buffers[number % len(buffers)]))
        return cost_us(lambda: adapter.register(spare).close(), 300)


def lookups(_adapter: ndpy.Adapter, count: int) -> float:
    """A lookup in a plain dictionary, by the object's identity."""
    buffers = [bytearray(64) for _ in range(count)]
    entries = {id(buffer): [buffer] for buffer in buffers}
    turns = iter(range(1 << 62))

    def turn() -> int:
        buffer = buffers[next(turns) * 7919 % count]
        return len(entries[id(buffer)][0])

    return cost_us(turn, 1000)


def hits(adapter: ndpy.Adapter, count: int) -> float:
    buffers = [bytearray(64) for _ in range(count)]
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 30, max_entries=count) as cache:
        for buffer in buffers:
            cache.local(buffer).release()
        turns = iter(range(1 << 62))
        return cost_us(lambda: cache.local(buffers[next(turns) * 7919 % count]).release(), 1000)


def misses(adapter: ndpy.Adapter, count: int) -> float:
    """Each one makes the cache drop its oldest entry."""
    buffers = [bytearray(64) for _ in range(2 * count)]
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 30, max_entries=count) as cache:
        turns = iter(range(1 << 62))

        def turn() -> None:
            cache.local(buffers[next(turns) % len(buffers)]).release()

        for _ in range(count):
            turn()
        return cost_us(turn, 200)


def writes(adapter: ndpy.Adapter, count: int) -> float:
    """A write and its completion, over one of many queue pairs of a completion queue."""
    with (
        adapter.create_completion_queue(4 * count) as queue,
        connections(adapter, [queue] * count) as ends,
        adapter.register(bytearray(64), Access.REMOTE_WRITE) as region,
    ):
        turns, remote = iter(range(1 << 62)), region.remote()

        def turn() -> None:
            ends[next(turns) * 7919 % count].write(region, remote)
            (completion,) = queue.wait(timeout_s=DEADLINE_S)
            completion.raise_for_status()

        return cost_us(turn, 300)


def pollers(adapter: ndpy.Adapter, count: int) -> float:
    """A write whose completion a poller of many queues takes."""
    with contextlib.ExitStack() as stack:
        queues = [stack.enter_context(adapter.create_completion_queue(8)) for _ in range(count)]
        ends = stack.enter_context(connections(adapter, queues[:10]))
        region = stack.enter_context(adapter.register(bytearray(64), Access.REMOTE_WRITE))
        poller = stack.enter_context(ndpy.Poller())
        for queue in queues:
            poller.add(queue)
        turns, remote = iter(range(1 << 62)), region.remote()

        def turn() -> None:
            ends[next(turns) % len(ends)].write(region, remote)
            for _queue, completions in poller.wait(timeout_s=DEADLINE_S):
                for completion in completions:
                    completion.raise_for_status()

        return cost_us(turn, 300)


def memory(adapter: ndpy.Adapter, count: int) -> float:
    """KiB of a connection with both its ends, soft0's part included."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with adapter.create_completion_queue(8 * count + 8) as queue:
        with connections(adapter, [queue] * 4):
            pass
        before = resident()
        with connections(adapter, [queue] * count):
            return (resident() - before) / count / 1024


def server(adapter: ndpy.Adapter, count: int) -> float:
    """An echo of 64 bytes by a server of ndpy.aio that has many connections."""

    async def answer(connection: aio.Connection) -> None:
        async for data in connection:
            await connection.send(data)

    async def measure() -> float:
        async with contextlib.AsyncExitStack() as stack:
            serving = await stack.enter_async_context(aio.serve(("127.0.0.1", 0), answer, adapter=adapter))
            ends = []
            for _ in range(count):
                ends.append(await stack.enter_async_context(aio.connect(serving.address, adapter=adapter)))
            samples = []
            for sample in range(SAMPLES):
                begin = time.process_time_ns()
                for number in range(100):
                    end = ends[(sample * 100 + number) * 7919 % count]
                    await end.send(bytes(64))
                    await end.receive()
                samples.append((time.process_time_ns() - begin) / 100 / 1000)
            return statistics.median(samples)

    return asyncio.run(measure())


@dataclass(frozen=True)
class Row:
    """beside: what the cost is divided by before it is judged."""

    what: str
    measure: Callable[[ndpy.Adapter, int], float]
    numbers: tuple[int, ...]
    beside: str = ""


ROWS = {
    "regions": Row("register and close among regions; us", regions, (100, 1000, 10_000, 100_000, 1_000_000)),
    "lookups": Row("lookup in a dictionary of objects; us", lookups, (100, 1000, 10_000, 100_000), "lookups"),
    "hits": Row("hit of the cache among entries; us", hits, (100, 1000, 10_000, 100_000), "lookups"),
    "misses": Row("miss of a full cache of entries; us", misses, (100, 1000, 10_000), "lookups"),
    "writes": Row("write and poll, queue pairs on the queue; us", writes, (10, 100, 1000, 5000)),
    "pollers": Row("write and wait, queues of a poller; us", pollers, (10, 100, 1000, 10_000)),
    "memory": Row("connections, both ends of each; KiB", memory, (100, 1000, 5000)),
    "server": Row("echo of a server, connections; us", server, (10, 100, 1000, 5000)),
}


def point(name: str, number: int) -> float:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--point", name, str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise OSError(f"{shlex.join(command)} ended with {done.returncode}")
    return float(done.stdout)


def measure_here(name: str, number: int) -> float:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ndpy.open_adapter("soft0") as adapter:
        return ROWS[name].measure(adapter, number)


def exponent(points: dict[int, float]) -> float:
    """The slope of the line through the logarithms, by least squares."""
    along = [math.log(number) for number in points]
    up = [math.log(cost) for cost in points.values()]
    middle, height = statistics.fmean(along), statistics.fmean(up)
    spread = sum((one - middle) ** 2 for one in along)
    return sum((one - middle) * (other - height) for one, other in zip(along, up, strict=True)) / spread


def growth(points: dict[int, float]) -> float:
    """The largest cost, as a multiple of the smallest one with a smaller number."""
    costs = list(points.values())
    return max(cost / min(costs[: place + 1]) for place, cost in enumerate(costs))


def plot(report: dict[str, dict[int, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, points in report.items():
        axes.loglog(list(points), list(points.values()), marker="o", label=ROWS[name].what)
    axes.set_xlabel("how many")
    axes.set_ylabel("cost: us, or KiB")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--most", type=int, default=1_000_000, help="no larger number; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", action="append", default=[])
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(measure_here(args.point[0], int(args.point[1])))
        return 0
    unknown = sorted(set(args.rows) - ROWS.keys())
    if unknown:
        parser.error(f"there is no row {unknown[0]}")
    report: dict[str, dict[int, float]] = {}
    steep = 0
    for name in args.rows or ROWS:
        row = ROWS[name]
        numbers = [number for number in row.numbers if number <= args.most]
        points = report[name] = {number: point(name, number) for number in numbers}
        judged = points
        if row.beside:
            judged = {number: cost / point(row.beside, number) for number, cost in points.items()}
        costs = "  ".join(f"{number:,}: {cost:.3g}" for number, cost in points.items())
        slope = f"  exponent {exponent(points):.2f}" if len(points) > 1 else ""
        grows = growth(judged)
        verdict = "" if grows <= FLAT else f"  not flat: {grows:.2f} times"
        print(f"{row.what:46} {costs}{slope}{verdict}", flush=True)
        steep += bool(verdict)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for file in args.plot:
        plot(report, file)
    return 1 if steep else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, subprocess.TimeoutExpired, ndpy.NdpyError) as error:
        print(f"scale: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
