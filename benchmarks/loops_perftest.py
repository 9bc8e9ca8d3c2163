"""What `make bench` measures between two processes: perftest's programs, and `ndpy perf`.

python loops_perftest.py ADAPTER NDPY...: prints a line of JSON for each figure. NDPY is the command that runs ndpy. An
operation is half a round trip, or one message.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import summary

RUNS = 3
PORT = 18515
# The clock jumps when the machine is idle, so that a deadline that is near may pass at any time.
LIMIT_S = 100_000
LATENCY = ("send_lat_events", 8, 2000)
BANDWIDTH = ("write_bw_64k", 65536, 1000, 16)


def wait_for_server(server):
    """Wait until perftest's server listens. It says so only at its end, because its output is a pipe."""
    listening = f":{PORT:04X} 00000000:0000 0A"
    deadline = time.monotonic() + LIMIT_S
    while listening not in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text().replace("0" * 24, ""):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("perftest's server does not listen")
        time.sleep(0.05)


def native(device, program, *options):
    """The numbers of perftest's line of results."""
    command = [f"ib_{program}", "-d", device, "-F", "-x", "1", "-p", str(PORT), *map(str, options)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_server(server)
        client = subprocess.run(
            [*command, "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT_S, check=True
        ).stdout
        server.wait(LIMIT_S)
    finally:
        server.kill()
        server.wait()
    lines = client.splitlines()
    (head,) = [place for place, line in enumerate(lines) if line.lstrip().startswith("#bytes")]
    return [float(word) for word in lines[head + 1].split()]


def ours(device, ndpy, program, *options):
    """The row of results of `ndpy perf`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*ndpy, "perf", program, device, *map(str, options), "--timeout", "3600", "--json", report]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=True)
        (row,) = json.loads(report.read_text())["results"]
    return row


def main():
    device, *ndpy = sys.argv[1:]
    figures = {}
    loop, size, count = LATENCY
    for _ in range(RUNS):
        figures.setdefault(("C", loop), []).append(native(device, "send_lat", "-e", "-s", size, "-n", count)[5])
        row = ours(device, ndpy, "send_lat", "--events", "--size", size, "--iterations", count)
        figures.setdefault(("ndpy", loop), []).append(row["mean_us"])
    loop, size, count, depth = BANDWIDTH
    for _ in range(RUNS):
        figures.setdefault(("C", loop), []).append(
            1 / native(device, "write_bw", "-s", size, "-n", count, "-t", depth)[4]
        )
        row = ours(device, ndpy, "write_bw", "--size", size, "--iterations", count, "--depth", depth)
        figures.setdefault(("ndpy", loop), []).append(row["seconds"] * 1e6 / row["iterations"])
    for (who, loop), samples in figures.items():
        print(json.dumps({"who": who, "loop": loop, **summary(samples), "rounds": 1}), flush=True)


if __name__ == "__main__":
    main()
