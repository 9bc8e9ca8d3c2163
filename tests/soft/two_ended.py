"""Runs both ends of a program on $NDPY_ADAPTER (soft0 without it), one of them with the faults of a sweep.

python two_ended.py NAME END [PORT]     END: the one with the faults, server or client

It ends as the worse of the two: with 128 and its number if a signal ended one, else with the client's status, or the
server's if the client succeeded. A server that nobody talks to any more has a few seconds to end.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("NDPY_ADAPTER") or "soft0"
_GRACE_S = 3.0
_START_S = 10.0 if DEVICE == "soft0" else 60.0


def _example(name: str, server: str, client: str) -> tuple[list[str], list[str]]:
    common = "--adapter DEVICE --port PORT --timeout 3"
    words = [sys.executable, str(ROOT / f"examples/{name}.py")]
    return [*words, *f"{server} {common}".split()], [*words, *f"{client} {common}".split()]


def _program(name: str, both: str, server: str = "", client: str = "HOST") -> tuple[list[str], list[str]]:
    return [name, *both.split(), *server.split()], [name, *both.split(), *client.split()]


def _binding(name: str) -> tuple[list[str], list[str]]:
    """A small program on another binding for Python, which runs in the environment of `make bench`."""
    words = [str(ROOT / ".rig/bench/venv/bin/python"), str(ROOT / f"tests/interop/programs/pingpong_{name}.py")]
    both = ["--device=DEVICE", "--port=PORT", "--gid=GID", "--size=1000", "--count=8", "--limit=5"]
    return [*words, *both], [*words, *both, "127.0.0.1"]


#: The words of the server, and of the client, which both look at the data if they can.
PROGRAMS = {
    "rping": _program("rping", "-a HOST -p PORT -C 4 -V", "-s", "-c"),
    "rdma_server": (["rdma_server", "-p", "PORT"], ["rdma_client", "-s", "HOST", "-p", "PORT"]),
    "ucmatose": _program("ucmatose", "-p PORT -c 2 -C 5", "", "-s HOST"),
    "ibv_rc_pingpong": _program("ibv_rc_pingpong", "-d DEVICE -g GID -p PORT -n 20 -c"),
    "ibv_srq_pingpong": _program("ibv_srq_pingpong", "-d DEVICE -g GID -p PORT -q 2 -n 20 -c"),
    "ib_send_lat": _program("ib_send_lat", "-F -R -d DEVICE -p PORT -n 20"),
    "ib_send_bw": _program("ib_send_bw", "-F -R -d DEVICE -p PORT -n 20"),
    "ib_write_lat": _program("ib_write_lat", "-F -R -d DEVICE -p PORT -n 20"),
    "ib_write_bw": _program("ib_write_bw", "-F -R -d DEVICE -p PORT -n 20"),
    "fi_pingpong": _program("fi_pingpong", "-p verbs -d DEVICE -e msg -I 5 -S 256 -c", "-B PORT", "-P PORT HOST"),
    "pyverbs": _binding("pyverbs"),
    "ibverbs": _binding("ibverbs"),
    "echo": _example("echo", "server --until 2", "client HOST --connections 2 --count 3 --size 40000"),
    "file_server": _example("file_server", f"serve {__file__} --once", "fetch HOST"),
    "key_value_store": _example("key_value_store", "server --until 1", "measure HOST --keys 3 --count 5"),
    "publish_array": _example("publish_array", "publish --versions 2 --interval 0.1", "subscribe HOST"),
    "sharded_tensor": _example("sharded_tensor", "hold --until 1", "fetch HOST"),
    "block_transfer": _example("block_transfer", "server --until 1", "client HOST --count 2"),
}


def place() -> dict[str, str]:
    """What the words stand for: a GID of the adapter that is an IPv4 address, and this address."""
    if DEVICE == "soft0":
        return {"DEVICE": DEVICE, "GID": "0", "HOST": "127.0.0.1"}
    port = Path("/sys/class/infiniband", DEVICE, "ports/1")
    for file in sorted((port / "gids").iterdir(), key=lambda each: int(each.name)):
        gid = ipaddress.IPv6Address(file.read_text().strip())
        try:
            version = (port / "gid_attrs/types" / file.name).read_text().strip()
        except OSError:
            # An index without a GID.
            continue
        if gid.ipv4_mapped is not None and version != "IB/RoCE v1":
            return {"DEVICE": DEVICE, "GID": file.name, "HOST": str(gid.ipv4_mapped)}
    sys.exit(f"{DEVICE} has no GID of an IPv4 address")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_listening(server: subprocess.Popen[bytes], port: int) -> bool:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return DEVICE != "soft0" and _listens_by_the_kernel(server)


def _listens_by_the_kernel(server: subprocess.Popen[bytes]) -> bool:
    listing = subprocess.run(["rdma", "-j", "resource", "show", "cm_id"], capture_output=True, check=True).stdout
    found = json.loads(listing or "[]")
    return any(each.get("pid") == server.pid and each.get("state") == "LISTEN" for each in found)


def start(words: list[str], meanings: dict[str, str], *, faulty: bool) -> subprocess.Popen[bytes]:
    program = shutil.which(words[0]) or sys.exit(f"{words[0]} is not installed")
    environment = {name: value for name, value in os.environ.items() if faulty or name != "NDPY_FAULTS"}
    for name, meaning in meanings.items():
        words = [word.replace(name, meaning) for word in words]
    return subprocess.Popen([program, *words[1:]], env=environment)


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
    meanings = {**place(), "PORT": str(port)}
    words = PROGRAMS[name]
    server = start(words[0], meanings, faulty=faulty == "server")
    deadline = time.monotonic() + _START_S
    while server.poll() is None and not is_listening(server, port) and time.monotonic() < deadline:
        time.sleep(0.01)
    if server.poll() is not None:
        # It has found its fault before a client could come.
        return status_of(server.returncode)
    client = start(words[1], meanings, faulty=faulty == "client")
    client.wait()
    ended = wait(server, _GRACE_S)
    statuses = [status_of(client.returncode), status_of(ended) if ended is not None else 0]
    return max((status for status in statuses if status >= 128), default=statuses[0] or statuses[1])


def status_of(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
