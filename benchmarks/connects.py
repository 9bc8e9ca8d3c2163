"""How long connect() and get_request() take between two processes over soft0, by percentiles.

python benchmarks/connects.py [COUNT] [--polled]

--polled: both processes have polled a completion queue just before, as programs do that are already at work.
"""

from __future__ import annotations

import subprocess
import sys
import time

import ndpy

WARM_UP = 20


def serve(adapter: ndpy.Adapter, count: int, polled: bool) -> None:
    with adapter.listen(("127.0.0.1", 0)) as listener, adapter.create_completion_queue(64) as queue:
        print(listener.address[0], listener.address[1], flush=True)
        for _ in range(count):
            if polled:
                queue.poll()
            with listener.get_request(30) as connector, adapter.create_queue_pair(queue, queue) as queue_pair:
                connector.accept(queue_pair)
                print(time.monotonic(), flush=True)
                sys.stdin.readline()


def show(what: str, times: list[float]) -> None:
    times = sorted(times[WARM_UP:])
    parts = [(part, times[min(len(times) - 1, int(len(times) * part / 100))] * 1e6) for part in (50, 90, 99, 99.9)]
    print(f"{what:24}" + "".join(f"  {part:g} %: {value:8.1f}" for part, value in parts), "us")


def main() -> None:
    count = next((word for word in sys.argv[1:] if word.isdigit()), "500")
    polled, total = "--polled" in sys.argv, int(count) + WARM_UP
    with ndpy.open_adapter("soft0") as adapter:
        if "--serve" in sys.argv:
            serve(adapter, total, polled)
            return
        command = [sys.executable, __file__, count, "--serve", *(["--polled"] if polled else [])]
        accepts, connects = [], []
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
            adapter.create_completion_queue(64) as queue,
        ):
            assert server.stdin is not None and server.stdout is not None
            host, port = server.stdout.readline().split()
            for _ in range(total):
                time.sleep(0.002)
                with adapter.create_queue_pair(queue, queue) as queue_pair:
                    if polled:
                        queue.poll()
                    begin = time.monotonic()
                    with adapter.connect(queue_pair, (host, int(port)), timeout_s=30):
                        connects.append(time.monotonic() - begin)
                        accepts.append(float(server.stdout.readline()) - begin)
                        server.stdin.write("\n")
                        server.stdin.flush()
    show("until connect() returns", connects)
    show("until accept() returns", accepts)


if __name__ == "__main__":
    main()
