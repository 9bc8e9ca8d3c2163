"""`ndpy perf` beside perftest's programs on one adapter, with the same sizes, depths and counts.

python beside_perftest.py sleep|poll ADAPTER NDPY...: prints a table. NDPY is the command that runs ndpy.

    ndpy vm run --vm --icount --adapter siw -- python benchmarks/beside_perftest.py sleep siw0 python -m ndpy
    ndpy vm run --vm --adapter siw -- python benchmarks/beside_perftest.py poll siw0 python -m ndpy

The clock of the first VM counts instructions. It has one processor, so both sides have to sleep: two that poll would
measure how the kernel shares the processor out. perftest cannot sleep for writes. The second VM has two processors and
the machine's clock.

perftest connects with rdma_cm, which iWARP needs, and sends nothing inline, as `ndpy perf` does by default. With a
depth of 16 it takes a completion for every 16 messages, so `ndpy perf` is told to do so too.

`ndpy perf --serve` is started once: while a machine with an instruction clock waits for files, its clock runs ahead.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ndpy

PORT = 18515
LIMIT_S = 3000
SERVER = "127.0.0.1"
RUNS = 3
# The test, its size, the iterations, and its options for perftest and for ndpy.
SLEEPING = (
    ("send_lat", 8, 1000, ("-e",), ("--events",)),
    ("send_lat", 4096, 1000, ("-e",), ("--events",)),
    ("send_bw", 64, 1000, ("-e", "-t", 16), ("--events", "--depth", 16, "--cq-mod", 16)),
    ("send_bw", 4096, 1000, ("-e", "-t", 16), ("--events", "--depth", 16, "--cq-mod", 16)),
    ("send_bw", 65536, 500, ("-e", "-t", 16), ("--events", "--depth", 16, "--cq-mod", 16)),
)
POLLING = (
    ("write_lat", 8, 1000, (), ()),
    ("send_lat", 8, 1000, (), ()),
    ("write_bw", 4096, 2000, ("-t", 16), ("--depth", 16, "--cq-mod", 16)),
    ("write_bw", 65536, 500, ("-t", 16), ("--depth", 16, "--cq-mod", 16)),
)


def wait_for_server(server):
    """Wait until perftest's server listens."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        listing = subprocess.run(
            ["rdma", "-j", "resource", "show", "cm_id"], capture_output=True, text=True, check=True
        ).stdout
        if any(entry.get("pid") == server.pid and entry.get("state") == "LISTEN" for entry in json.loads(listing)):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("perftest's server does not listen")
        time.sleep(0.05)


def of_perftest(device, address, test, size, count, options):
    """The numbers of perftest's line of results."""
    command = [f"ib_{test}", "-d", device, "-R", "-F", "-p", PORT, "-s", size, "-n", count, *options]
    if test.endswith("bw"):
        command.append("--report_gbits")
    else:
        command += ["-I", 0]
    command = list(map(str, command))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_server(server)
        client = subprocess.run([*command, address], capture_output=True, text=True, timeout=LIMIT_S)
        if client.returncode:
            server.kill()
            raise RuntimeError(
                f"{client.returncode}: {client.stdout}{client.stderr}; server: {server.communicate()[0]}"
            )
        server.communicate(timeout=LIMIT_S)
    finally:
        server.kill()
        server.wait()
    lines = client.stdout.splitlines()
    (head,) = [place for place, line in enumerate(lines) if line.lstrip().startswith("#bytes")]
    return [float(word) for word in lines[head + 1].split()]


@contextlib.contextmanager
def serving(device, ndpy_command):
    """`ndpy perf --serve`, once it listens."""
    command = [*ndpy_command, "perf", "--serve", device, "--listen", SERVER, "--timeout", str(LIMIT_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            if "serving" not in server.stdout.readline():
                raise RuntimeError(f"the server of ndpy perf does not listen: {server.communicate()[0]}")
            yield
        finally:
            server.send_signal(signal.SIGINT)


def of_ndpy(device, ndpy_command, test, size, count, options):
    """The row of results of `ndpy perf`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*ndpy_command, "perf", test, device, "--peer", SERVER, "--timeout", LIMIT_S, "--size", size]
        command += ["--iterations", count, *options, "--json", report]
        subprocess.run([*map(str, command)], stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=True)
        (row,) = json.loads(report.read_text())["results"]
    return row


def middle(values):
    return sorted(values)[len(values) // 2]


def line(test, size, unit, theirs, ours):
    ratio = middle(ours) / middle(theirs)
    print(f"{test:10} {size:6} {unit:14} {middle(theirs):12.3f} {middle(ours):12.3f} {ratio:8.3f}", flush=True)


def main():
    how, device, *ndpy_command = sys.argv[1:]
    with ndpy.open_adapter(device) as adapter:
        address = next((text for text in adapter.info.addresses if ":" not in text), None)
    if address is None:
        raise SystemExit(f"{device} has no IPv4 address")
    print(f"{'test':10} {'bytes':>6} {'figure':14} {'perftest':>12} {'ndpy perf':>12} {'ratio':>8}", flush=True)
    failed = False
    with serving(device, ndpy_command):
        for test, size, count, theirs, ours in {"sleep": SLEEPING, "poll": POLLING}[how]:
            try:
                rows = [
                    (
                        of_perftest(device, address, test, size, count, theirs),
                        of_ndpy(device, ndpy_command, test, size, count, ours),
                    )
                    for _ in range(RUNS)
                ]
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{test:10} {size:6} failed: {error}", flush=True)
                failed = True
                continue
            # perftest's columns: bytes, iterations, then min, max, typical, average, or peak, average, message rate.
            if test.endswith("lat"):
                figures = [("median us", 4, "p50_us"), ("mean us", 5, "mean_us")]
            else:
                figures = [("Gb/s", 3, "gbps"), ("Mpps", 4, "mpps")]
            for unit, column, name in figures:
                line(test, size, unit, [row[column] for row, _ in rows], [row[name] for _, row in rows])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
