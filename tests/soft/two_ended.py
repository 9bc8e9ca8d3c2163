"""Runs both ends of a program, one of them with the faults of a sweep.

python two_ended.py NAME END [PORT]     END: the one with the faults, server or client

It ends as the worse of the two: with 128 and its number if a signal ended one, else with the client's status, or the
server's if the client succeeded. A server that nobody talks to any more has a few seconds to end.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_GRACE_S = 3.0
_START_S = 10.0


def _example(name: str, server: str, client: str) -> tuple[list[str], list[str]]:
    common = "--adapter soft0 --port PORT --timeout 3"
    words = [sys.executable, str(EXAMPLES / f"{name}.py")]
    return [*words, *f"{server} {common}".split()], [*words, *f"{client} {common}".split()]


def _program(name: str, server: str, client: str) -> tuple[list[str], list[str]]:
    return [name, *server.split()], [name, *client.split()]


#: The words of the server, and of the client, which both look at the data if they can.
PROGRAMS = {
    "rping": _program("rping", "-s -a 127.0.0.1 -p PORT -C 4 -V", "-c -a 127.0.0.1 -p PORT -C 4 -V"),
    "ibv_rc_pingpong": _program(
        "ibv_rc_pingpong", "-d soft0 -g 0 -p PORT -n 20 -c", "-d soft0 -g 0 -p PORT -n 20 -c 127.0.0.1"
    ),
    "ibv_srq_pingpong": _program(
        "ibv_srq_pingpong", "-d soft0 -g 0 -p PORT -q 2 -n 20 -c", "-d soft0 -g 0 -p PORT -q 2 -n 20 -c 127.0.0.1"
    ),
    "ib_send_lat": _program("ib_send_lat", "-F -R -p PORT -n 20", "-F -R -p PORT -n 20 127.0.0.1"),
    "ib_write_bw": _program("ib_write_bw", "-F -R -p PORT -n 20", "-F -R -p PORT -n 20 127.0.0.1"),
    "rdma_server": (["rdma_server", "-p", "PORT"], ["rdma_client", "-s", "127.0.0.1", "-p", "PORT"]),
    "echo": _example("echo", "server --until 2", "client 127.0.0.1 --connections 2 --count 3 --size 40000"),
    "file_server": _example("file_server", f"serve {__file__} --once", "fetch 127.0.0.1"),
    "key_value_store": _example("key_value_store", "server --until 1", "measure 127.0.0.1 --keys 3 --count 5"),
    "publish_array": _example("publish_array", "publish --versions 2 --interval 0.1", "subscribe 127.0.0.1"),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_listening(port: int) -> bool:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def start(words: list[str], port: int, *, faulty: bool) -> subprocess.Popen[bytes]:
    program = shutil.which(words[0]) or sys.exit(f"{words[0]} is not installed")
    environment = {name: value for name, value in os.environ.items() if faulty or name != "NDPY_FAULTS"}
    return subprocess.Popen([program, *(word.replace("PORT", str(port)) for word in words[1:])], env=environment)


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """How it ended. None: not by itself."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def main(name: str, faulty: str, chosen: str = "") -> int:
    port = int(chosen) if chosen else free_port()
    words = PROGRAMS[name]
    server = start(words[0], port, faulty=faulty == "server")
    deadline = time.monotonic() + _START_S
    while server.poll() is None and not is_listening(port) and time.monotonic() < deadline:
        time.sleep(0.01)
    if server.poll() is not None:
        # It has found its fault before a client could come.
        return status_of(server.returncode)
    client = start(words[1], port, faulty=faulty == "client")
    client.wait()
    ended = wait(server, _GRACE_S)
    statuses = [status_of(client.returncode), status_of(ended) if ended is not None else 0]
    return max((status for status in statuses if status >= 128), default=statuses[0] or statuses[1])


def status_of(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
