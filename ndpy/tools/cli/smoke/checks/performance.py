"""Group performance: a few measurements, limited in count and time. They are for information: only wrong data fails."""

from __future__ import annotations

import statistics
import time

from ndpy import Access, Status
from ndpy.tools.cli.smoke.catalog import Failure, check
from ndpy.tools.cli.smoke.testbed import Testbed, expect_ok, expect_same

_LONGEST_S = 1.5


@check("performance", "register")
def register(testbed: Testbed) -> str:
    """Measures how long it takes to register and deregister 4 KiB."""
    buffer = bytearray(4096)
    taken: list[float] = []
    until = time.perf_counter() + _LONGEST_S / 3
    while len(taken) < 200 and time.perf_counter() < until:
        started = time.perf_counter()
        testbed.adapter.register(buffer).close()
        taken.append(time.perf_counter() - started)
    return _times(testbed, "register", taken)


@check("performance", "write-latency")
def write_latency(testbed: Testbed) -> str:
    """Measures how long a write of 8 bytes takes, from posting to completion."""
    connection, memory, far = testbed.set_up(8, Access.NONE, Access.REMOTE_WRITE)
    write, poll = connection.queue_pair.write, connection.near.cq.poll
    element, remote = memory.region[0:8], far.remote
    taken: list[float] = []
    until = time.perf_counter() + _LONGEST_S
    while len(taken) < 1000 and time.perf_counter() < until:
        started = time.perf_counter()
        write(element, remote)
        while not (ended := poll(1)):
            if time.perf_counter() - started > 5:
                raise Failure("a write of 8 bytes took more than 5 s")
        taken.append(time.perf_counter() - started)
        expect_ok(ended, "a write of 8 bytes")
    connection.let_writes_arrive()
    expect_same(far.contents(), memory.contents(), "what was written")
    return _times(testbed, "write", taken)


@check("performance", "write-bandwidth")
def write_bandwidth(testbed: Testbed) -> str:
    """Measures the bandwidth of writes of 64 KiB, 16 at a time."""
    size, at_once = 65536, 16
    connection, memory, far = testbed.set_up(size, Access.NONE, Access.REMOTE_WRITE)
    element, remote = memory.region[0:size], far.remote
    started = time.perf_counter()
    until = started + _LONGEST_S
    posted = completed = 0
    while True:
        while posted - completed < at_once and posted < 20000 and time.perf_counter() < until:
            connection.queue_pair.write(element, remote)
            posted += 1
        if posted == completed:
            break
        for ended in connection.near.cq.wait(testbed.step()):
            if ended.status is not Status.SUCCESS:
                expect_ok([ended], "a write of 64 KiB")
            completed += 1
    seconds = time.perf_counter() - started
    connection.let_writes_arrive()
    expect_same(far.contents(), memory.contents(), "what was written")
    rate = completed * size / seconds
    testbed.figures["write_64k_bytes_per_s"] = rate
    return f"{rate / 1e6:.1f} MB/s ({rate * 8 / 1e9:.3f} Gbit/s), {completed} writes in {seconds:.2f} s"


def _times(testbed: Testbed, name: str, taken: list[float]) -> str:
    ordered = sorted(taken)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    testbed.figures |= {f"{name}_p50_us": p50 * 1e6, f"{name}_p99_us": p99 * 1e6, f"{name}_count": len(taken)}
    return f"p50 {p50 * 1e6:.1f} us, p99 {p99 * 1e6:.1f} us ({len(taken)} times)"
